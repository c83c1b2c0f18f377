"""Dynamo's rules for picking a worker, and simple routers to compare a router with.

Theory of operation. The cost of a candidate, in blocks, is the prompt tokens to compute there (of this request and
others) minus a credit for cached blocks, plus the blocks in use and those that the request adds. The least cost wins;
ties are drawn at random. A request that finds every worker busy waits in the router. (Dynamo's `kv-router`, 1.2.1 and
1.6.1.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pytest_kvmock.values.checks import unknown_text

if TYPE_CHECKING:
    from pytest_kvmock.fleets.routing.routing import Candidate, RouterRequest, Worker

RouterSemantics: TypeAlias = Literal["1.2.1", "1.6.1"]
QueuePolicy: TypeAlias = Literal["fcfs", "lcfs", "wspt"]


ROUTER_RELEASES: Final[Mapping[RouterSemantics, float | None]] = MappingProxyType({"1.2.1": 4.0, "1.6.1": None})
"""The supported releases, and the default threshold of the queue in each."""

_UNLIMITED: Final = 10_000_000  # tokens of a pass for an engine without a limit, as in the original
_REMEMBERED: Final = 1_000  # number of picks that `explain` remembers
_POLICIES: Final = ("fcfs", "lcfs", "wspt")


def _name(router: object) -> str:
    return f"<{type(router).__name__}>"


class DynamoRouter:
    """Picks as Dynamo's KV router does; the options have Dynamo's names (`KvRouterConfig`).

    The loads come from the fleet; of a request the router keeps only the overlap on arrival.

    Args:
        semantics: the release whose rules it follows.
        overlap_score_credit: blocks that each cached block takes off the cost of prefill.
        overlap_score_credit_decay: how fast the credit falls on workers that have more to compute than the least busy
            one (1.6.1).
        prefill_load_scale: weight of prefill compared with decode.
        decode_active_request_weight: cost that each open request adds (1.6.1).
        router_temperature: 0: the least cost wins; above 0, the worker is drawn by a softmax over the costs.
        router_queue_threshold: a worker is busy while it has more than this multiple of the tokens of one pass to
            compute; requests wait while all workers are busy. None: never. The default depends on the release: 4, and
            None in 1.6.1.
        router_queue_policy: the next request: "fcfs" the first, "lcfs" the last, "wspt" the one with the fewest tokens
            to compute.
        router_track_active_blocks: False: blocks in use do not count.
        router_track_prefill_tokens: False: prefill does not count, and no worker is ever busy.
        router_assume_kv_reuse: False: shared blocks count once for each request.
        rng: random source for ties and for the temperature.
        tie: "random", or "first": among equal costs the first candidate wins, without a draw.

    Raises:
        ValueError: an option is out of range, or unknown to the release.
    """

    def __init__(
        self,
        semantics: RouterSemantics = "1.2.1",
        *,
        overlap_score_credit: float = 1.0,
        overlap_score_credit_decay: float = 0.0,
        prefill_load_scale: float = 1.0,
        decode_active_request_weight: float = 0.0,
        router_temperature: float = 0.0,
        router_queue_threshold: float | Literal["default"] | None = "default",
        router_queue_policy: QueuePolicy = "fcfs",
        router_track_active_blocks: bool = True,
        router_track_prefill_tokens: bool = True,
        router_assume_kv_reuse: bool = True,
        rng: Random | None = None,
        tie: Literal["random", "first"] = "random",
    ) -> None:
        if semantics not in ROUTER_RELEASES:
            raise ValueError(unknown_text("semantics", semantics, ROUTER_RELEASES))
        if router_queue_policy not in _POLICIES:
            raise ValueError(unknown_text("router_queue_policy", router_queue_policy, _POLICIES))
        if tie not in ("random", "first"):
            raise ValueError(unknown_text("tie", tie, ("random", "first")))
        numbers: dict[str, float] = {
            "overlap_score_credit": overlap_score_credit,
            "overlap_score_credit_decay": overlap_score_credit_decay,
            "prefill_load_scale": prefill_load_scale,
            "decode_active_request_weight": decode_active_request_weight,
            "router_temperature": router_temperature,
        }
        threshold = ROUTER_RELEASES[semantics] if router_queue_threshold == "default" else router_queue_threshold
        if threshold is not None:
            numbers["router_queue_threshold"] = threshold
        for name, value in numbers.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number of at least 0, got {value!r:.80}")
        self.semantics = semantics
        self.tie = tie
        self._credit = overlap_score_credit
        self._decay = overlap_score_credit_decay
        self._scale = prefill_load_scale
        self._request_weight = decode_active_request_weight
        self._temperature = router_temperature
        self._threshold = threshold
        self._policy = router_queue_policy
        self._tracks_blocks = router_track_active_blocks
        self._tracks_prefill = router_track_prefill_tokens
        self._reuses = router_assume_kv_reuse
        self._rng = Random(0) if rng is None else rng  # noqa: S311 - mock data
        # The greatest overlap on arrival of each waiting request.
        self._best: dict[RouterRequest, int] = {}
        # The worker of each open request, and the blocks of each worker; used only if shared blocks count for each
        # request.
        self._sent: dict[RouterRequest, Worker] = {}
        self._blocks: dict[Worker, int] = {}
        self._refused: RouterRequest | None = None  # the last request that found all workers busy
        # For the last requests: the candidates, the cost of each (None if the request waits), and the chosen worker.
        self._asked: dict[RouterRequest, tuple[Sequence[Candidate], Sequence[float] | None, Worker | None]] = {}

    def __repr__(self) -> str:
        return f"<DynamoRouter {self.semantics}>"

    # ------------------------------------------------------------------------------------------------- cost

    def known_overlap(self, request: RouterRequest, candidate: Candidate) -> int:
        """Return the overlap that counts: the one on the request's arrival, if it is known."""
        known = request.overlaps
        return candidate.overlap if known is None else known.get(candidate.worker, 0)

    def cost(self, request: RouterRequest, candidate: Candidate, least_prefill: int | None = None) -> float:
        """Return the cost of a request on a candidate, in blocks.

        Args:
            request: the request.
            candidate: the worker's present state.
            least_prefill: the fewest prompt tokens to compute on any candidate, for the decay; None: those of this
                candidate.
        """
        size, overlap = request.block_size, self.known_overlap(request, candidate)
        decode = self._decode(request, candidate)
        cached = overlap * size
        uncached = request.prompt_tokens - cached if cached < request.prompt_tokens else 0
        raw = candidate.prefill_tokens + uncached + cached if self._tracks_prefill else 0
        credit = self._credit
        if self._decay and least_prefill is not None:
            excess = (candidate.prefill_tokens - least_prefill) / size
            credit /= 1.0 + self._decay * excess / max(1, -(-request.prompt_tokens // size))
        cost = self._scale * max(0.0, raw / size - credit * overlap) + decode
        if self._request_weight:
            cost += self._request_weight * candidate.active_requests
        return cost

    def _decode(self, request: RouterRequest, candidate: Candidate) -> int:
        if not self._tracks_blocks:
            return 0
        if not self._reuses:
            return self._blocks.get(candidate.worker, 0) + len(request.local_hashes)
        return candidate.decode_blocks + candidate.new_blocks

    def costs(self, request: RouterRequest, candidates: Sequence[Candidate]) -> list[float]:
        """Return the cost of a request on each candidate."""
        least = min((each.prefill_tokens for each in candidates), default=0) if self._tracks_prefill else None
        return [self.cost(request, each, least) for each in candidates]

    def is_busy(self, candidate: Candidate) -> bool:
        """Whether a worker has more to compute than the threshold of the queue."""
        if self._threshold is None or not self._tracks_prefill:
            return False
        budget = candidate.max_batched_tokens or _UNLIMITED
        return candidate.prefill_tokens > self._threshold * budget

    # ------------------------------------------------------------------------------------------------- pick

    def pick(self, request: RouterRequest, candidates: Sequence[Candidate]) -> Worker | None:
        """Pick a worker for a request; return None to let it wait if all workers are busy or there is none."""
        self._refused = None
        if all(map(self.is_busy, candidates)):
            self._refused = request
            self._remember(request, candidates, None, None)
            if request not in self._best:
                self._best[request] = max((self.known_overlap(request, each) for each in candidates), default=0)
            return None
        costs = self.costs(request, candidates)
        chosen = self._choose(request, candidates, costs)
        self._best.pop(request, None)
        self._remember(request, candidates, costs, chosen)
        return chosen

    def _remember(
        self,
        request: RouterRequest,
        candidates: Sequence[Candidate],
        costs: Sequence[float] | None,
        chosen: Worker | None,
    ) -> None:
        self._asked.pop(request, None)
        self._asked[request] = candidates, costs, chosen
        if len(self._asked) > _REMEMBERED:
            del self._asked[next(iter(self._asked))]

    def _choose(self, request: RouterRequest, candidates: Sequence[Candidate], costs: Sequence[float]) -> Worker:
        if self._temperature and self.tie == "random":
            return candidates[self._sampled(costs)].worker
        cheapest = self._cheapest(request, candidates, costs)
        if len(cheapest) == 1 or self.tie == "first":
            return cheapest[0].worker
        return self._rng.choice(cheapest).worker

    def _cheapest(
        self,
        request: RouterRequest,  # noqa: ARG002 - for who picks by it
        candidates: Sequence[Candidate],
        costs: Sequence[float],
    ) -> list[Candidate]:
        least = min(costs)
        return [each for each, cost in zip(candidates, costs, strict=True) if cost == least]

    def _sampled(self, costs: Sequence[float]) -> int:
        least, most = min(costs), max(costs)
        if least == most:
            return self._rng.randrange(len(costs))
        scale = (most - least) * self._temperature
        weights = [math.exp(-(cost - least) / scale) for cost in costs]
        sample, total = self._rng.random() * sum(weights), 0.0
        for position, weight in enumerate(weights):
            total += weight
            if sample <= total:
                return position
        return len(costs) - 1

    def explain(self, request: RouterRequest, candidates: Sequence[Candidate] | None = None) -> str:
        """Return a table of the cost of each candidate, with the chosen one and ties. It draws no random number and
        changes nothing.

        Args:
            request: the request.
            candidates: the workers to compare; None: those of the request's last pick, if it is one of the last 1,000
                requests.

        Raises:
            ValueError: no candidates are given, and none are remembered.
        """
        costs: Sequence[float] | None = None
        chosen: Worker | None = None
        if candidates is None:
            if request not in self._asked:
                raise ValueError(
                    f"explain: {request!r} is not among the last {_REMEMBERED} requests that were picked for; give "
                    "candidates"
                )
            candidates, costs, chosen = self._asked[request]
            if not candidates:
                return f"{request!r} at {request.now_ms:g} ms\nno worker was there: the request waits"
        if not candidates:
            raise ValueError("explain: candidates must be at least one, got none")
        costs = self.costs(request, candidates) if costs is None else costs
        cheapest = {each.worker for each in self._cheapest(request, candidates, costs)}
        waits = chosen is None and all(map(self.is_busy, candidates))
        if chosen is None and len(cheapest) == 1 and not waits:
            (chosen,) = cheapest
        lines = [
            f"{request!r} at {request.now_ms:g} ms",
            "worker    overlap  prefill tokens  decode + new blocks  cost",
        ]
        for each, cost in zip(candidates, costs, strict=True):
            tied = " = tied" if each.worker in cheapest and len(cheapest) > 1 and not waits else ""
            mark = f"{tied} <- chosen" if each.worker == chosen else tied
            blocks = f"{each.decode_blocks} + {each.new_blocks}"
            lines.append(
                f"{each.worker!s:<9} {self.known_overlap(request, each):>7}  {each.prefill_tokens:>14}  {blocks:>19}  "
                f"{cost:g}{mark}"
            )
        if waits:
            lines.append("every worker is busy: the request waits")
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------------- queue

    def next_waiting(self, requests: Sequence[RouterRequest]) -> RouterRequest | None:
        """Return the waiting request to pick for next; None if all workers are busy."""
        if (
            self._refused is not None and self._refused not in requests
        ):  # it waits in this round, as no other request would do better
            return None
        if self._policy == "lcfs":
            return max(requests, key=attrgetter("arrival_ms"))  # the first one of equal times
        return requests[0] if self._policy == "fcfs" else min(requests, key=self._left_to_compute)

    def _left_to_compute(self, request: RouterRequest) -> int:
        best = max(request.overlaps.values(), default=0) if request.overlaps is not None else self._best.get(request, 0)
        return max(1, request.prompt_tokens - request.block_size * best)

    def dispatched(self, request: RouterRequest, worker: Worker) -> None:
        """Note the worker of a request."""
        if not self._reuses:
            self._sent[request] = worker
            self._blocks[worker] = self._blocks.get(worker, 0) + len(request.local_hashes)

    def finished(self, request: RouterRequest) -> None:
        """Forget a request that is over."""
        self._best.pop(request, None)
        worker = self._sent.pop(request, None)
        if worker is not None:
            self._blocks[worker] -= len(request.local_hashes)

    def withdrawn(self, request: RouterRequest) -> None:
        """Forget a waiting request that was called off."""
        self._best.pop(request, None)
        if self._refused is request:  # the next request may find a worker
            self._refused = None


class RoundRobin:
    """Picks the workers in turn, regardless of load and cache."""

    def __init__(self) -> None:
        self._next = 0

    def __repr__(self) -> str:
        return _name(self)

    def pick(self, request: RouterRequest, candidates: Sequence[Candidate]) -> Worker | None:  # noqa: ARG002 - a router's method
        """Pick the next worker; None if there is none."""
        if not candidates:
            return None
        chosen = candidates[self._next % len(candidates)].worker
        self._next += 1
        return chosen


class LeastLoaded:
    """Picks the worker with the fewest prompt tokens to compute; ties go to the fewest blocks, then requests, then the
    first.
    """

    def __repr__(self) -> str:
        return _name(self)

    def pick(self, request: RouterRequest, candidates: Sequence[Candidate]) -> Worker | None:  # noqa: ARG002 - a router's method
        """Pick the least loaded worker; None if there is none."""
        if not candidates:
            return None
        return min(candidates, key=lambda each: (each.prefill_tokens, each.decode_blocks, each.active_requests)).worker


class MostCached:
    """Picks the worker that holds most of the prompt; ties go to the fewest open requests.

    It is not a bound for other routers: it sends all requests with one prefix to one worker, at any load. In trials its
    time to first token was up to 20 times that of round robin, and routers that also consider loads had higher hit
    ratios on some traces.
    """

    def __repr__(self) -> str:
        return _name(self)

    def pick(self, request: RouterRequest, candidates: Sequence[Candidate]) -> Worker | None:  # noqa: ARG002 - a router's method
        """Pick the worker that holds most of the prompt; None if there is no worker."""
        if not candidates:
            return None
        return max(candidates, key=lambda each: (each.overlap, -each.active_requests)).worker
