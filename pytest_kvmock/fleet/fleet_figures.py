"""The figures of a fleet's report, each by its name: of one worker, or of all together.

Theory of operation. A request counts for the worker that served it last. What its pick promised is the overlap by the index then,
what was found is what its first admission there reused. An engine that computes the last token of a prompt again
(`Traits.recomputes_last_token`) does not reuse the last of a prompt of full blocks, so that this is not promised; a request without
output may reuse it whatever the engine does, as in 1.6.1. The ideal is one endless cache that sees the requests in order of arrival.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import chain, islice
from operator import sub
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from pytest_kvmock.checks import unknown_text
from pytest_kvmock.fleet.report import statistics
from pytest_kvmock.fleet.routing_figures import jain, max_to_mean, of_best, share

if TYPE_CHECKING:
    from pytest_kvmock.fleet.arrivals import Turn
    from pytest_kvmock.fleet.engine_request import EngineRequest
    from pytest_kvmock.fleet.later_report import Objectives
    from pytest_kvmock.fleet.run_notes import Pick, Service
    from pytest_kvmock.router.routing import Worker

Figures: TypeAlias = dict[str, "float | None"]

LATENCIES: Final = {"ttft": "ttft_ms", "itl": "itl_ms", "tpot": "tpot_ms", "e2e": "e2e_latency_ms"}
"""The latencies, by what Dynamo calls them."""

_POINTS: Final = {"mean": "mean", "p50": "median", "p75": "p75", "p90": "p90", "p95": "p95", "p99": "p99", "max": "max"}

BALANCED: Final = ("requests", "prompt_tokens", "open_requests")
"""What balance is told of: requests, prompt tokens that were computed, open requests at picks."""

_MORE_IS_BETTER: Final = (
    *("completed", "hit_ratio", "of_ideal", "of_best", "goodput"),
    *(f"jain_{each}" for each in BALANCED),
)
_NEITHER: Final = ("requests", "ideal_hit_ratio", "overlap_selected", "overlap_best", "found_not_promised")
_LESS_IS_BETTER: Final = (
    *(
        "overlap_regret",
        "promised_not_found",
        "believed_not_found",
        "prompt_tokens_computed",
        "blocks_evicted",
        "preemptions",
    ),
    *("router_wait_ms", "engine_wait_ms"),
    *(f"{each}_{point}" for each in LATENCIES for point in _POINTS),
    *(f"balance_{each}" for each in BALANCED),
)
FIGURES: Final[Mapping[str, int]] = {
    **dict.fromkeys(_NEITHER, 0),
    **dict.fromkeys(_MORE_IS_BETTER, 1),
    **dict.fromkeys(_LESS_IS_BETTER, -1),
}
"""Every figure: 1 where more of it is better, -1 where less is, 0 where neither."""


def check_figure(name: str) -> str:
    """Return the name of a figure, if it is one.

    Raises:
        ValueError: no figure has it.
    """
    if not isinstance(name, str) or name not in FIGURES:
        raise ValueError(unknown_text("figure", name, FIGURES))
    return name


def dynamo_key(name: str) -> str | None:
    """Return what Dynamo's report calls a latency, "ttft_p95" for one; None where the figure is none of its."""
    what, _, point = name.rpartition("_")
    return f"{_POINTS[point]}_{LATENCIES[what]}" if what in LATENCIES and point in _POINTS else None


class RequestRow(NamedTuple):
    """One request, with its picks.

    Attributes:
        request: as its last engine had it.
        number: its place in the order of arrival at the router.
        first: the first pick for it.
        last: the last one.
        block_size: tokens a block.
        recomputes_last_token: whether its engine computes the last token of a prompt though it is cached.
    """

    request: EngineRequest
    number: int
    first: Pick
    last: Pick
    block_size: int
    recomputes_last_token: bool

    @property
    def promised(self) -> int:
        """Blocks that the index promised at the pick, and that an engine may reuse."""
        return self._reusable(self.last.held)

    @property
    def believed(self) -> int:
        """Blocks that the router believed to be there at the pick, and that an engine may reuse."""
        return self._reusable(self.last.believed or 0)

    def _reusable(self, blocks: int) -> int:
        kept = 1 if self.recomputes_last_token and self.request.requested_output_tokens else 0
        return min(blocks, max(0, self.request.prompt_tokens - kept) // self.block_size)

    @property
    def found(self) -> int:
        """Blocks that its first admission reused."""
        return self.request.first_reused_tokens // self.block_size

    @property
    def engine_wait_ms(self) -> float | None:
        """How long it waited in the engine, from its pick to its first admission; None where it had none."""
        admitted = self.request.admitted_ms
        return None if admitted is None else admitted - self.last.ms


class Rows:
    """Calculates figures, of one worker or of all.

    Args:
        served: the requests that were dispatched.
        picks: the choices of the router.
        services: what each worker did.
        arrived: how many requests arrived at the router.
        turns: the requests that were dispatched, by the place in the trace.
        objectives: what counts as good.
        gaps: statistics of the gaps between tokens.
        block_size: tokens a block.
    """

    def __init__(
        self,
        served: Sequence[RequestRow],
        picks: Sequence[Pick],
        *,
        services: Sequence[Service],
        arrived: int,
        turns: Sequence[Turn],
        objectives: Objectives,
        gaps: Callable[[str, Any], dict[str, float]],
        block_size: int,
    ) -> None:
        self._served = served
        self._picks = picks
        self._services = services
        self._arrived = arrived
        self._turns = turns
        self._objectives = objectives
        self._gaps = gaps
        self._block_size = block_size

    def row(self, worker: Worker | None = None, *, latencies: Iterable[str] = tuple(LATENCIES)) -> Figures:
        """Return the figures of a worker; None: of all together, with balance and ideal.

        Args:
            worker: whose.
            latencies: which of `LATENCIES` are calculated too.
        """
        served = [each for each in self._served if worker is None or each.last.worker == worker]
        picks = [pick for pick in self._picks if worker is None or pick.worker == worker]
        services = [each for each in self._services if worker is None or each.worker == worker]
        done = [each.request for each in served if each.request.status == "finished"]
        prompts = sum(request.prompt_tokens for request in done)
        hit = share(sum(request.first_reused_tokens for request in done), prompts)
        admitted = [each for each in served if each.request.admitted_ms is not None]
        waits = [each.engine_wait_ms for each in admitted]
        out: Figures = {
            "requests": self._arrived if worker is None else len(served),
            "completed": len(done),
            "hit_ratio": hit,
            "overlap_selected": sum(pick.held for pick in picks),
            "overlap_best": sum(pick.best_held for pick in picks),
            "overlap_regret": share(sum(pick.choice.regret for pick in picks), len(picks)),
            "of_best": of_best(pick.choice for pick in picks),
            "promised_not_found": sum(max(0, each.promised - each.found) for each in admitted),
            "believed_not_found": self._believed_not_found(admitted),
            "found_not_promised": sum(max(0, each.found - each.last.held) for each in admitted),
            "prompt_tokens_computed": sum(each.prompt_tokens_computed for each in services),
            "blocks_evicted": sum(each.blocks_evicted for each in services),
            "preemptions": sum(each.preemptions for each in services),
            "router_wait_ms": share(sum(each.first.waited_ms for each in served), len(served)),
            "engine_wait_ms": share(sum(each for each in waits if each is not None), len(waits)),
            "goodput": self._goodput(done, worker, len(served)),
        }
        if worker is None:
            ideal = self.ideal()
            out |= {"ideal_hit_ratio": ideal, "of_ideal": share(hit or 0.0, ideal or 0.0)}
            for each in BALANCED:
                counts, there = self.counts(each)
                out |= {f"balance_{each}": max_to_mean(counts, there), f"jain_{each}": jain(counts, there)}
        for each in latencies:
            out |= self.latency(each, done)
        return out

    def _believed_not_found(self, admitted: Iterable[RequestRow]) -> int | None:
        says = [each for each in admitted if each.last.believed is not None]
        return sum(max(0, each.believed - each.found) for each in says) if says else None

    def _goodput(self, done: Iterable[EngineRequest], worker: Worker | None, served: int) -> float | None:
        if not self._objectives:
            return None
        good = sum(self._objectives.are_met(request) for request in done)
        return share(good, self._arrived if worker is None else served)

    def latency(self, name: str, done: Iterable[EngineRequest] | None = None) -> Figures:
        """Return mean, percentiles and greatest value of one of `LATENCIES` over requests that finished; None: over all of them."""
        done = (each.request for each in self._served if each.request.status == "finished") if done is None else done
        times = [(request.arrival_ms, request.token_ms) for request in done if request.token_ms]
        if name == "itl":
            later = (tokens for _, tokens in times if len(tokens) > 1)
            gaps = array("d", chain.from_iterable(map(sub, islice(tokens, 1, None), tokens) for tokens in later))
            found = self._gaps("x", gaps)
        elif name == "ttft":
            found = statistics("x", [tokens[0] - arrival for arrival, tokens in times])
        elif name == "e2e":
            found = statistics("x", [tokens[-1] - arrival for arrival, tokens in times])
        else:
            per_token = [(tokens[-1] - tokens[0]) / (len(tokens) - 1) for _, tokens in times if len(tokens) > 1]
            found = statistics("x", per_token)
        return {f"{name}_{point}": found[f"{key}_x"] for point, key in _POINTS.items()}

    def ideal(self) -> float | None:
        """Return the hit ratio of one endless cache that sees the requests in order of arrival; None where none finished."""
        seen: set[int] = set()
        cached = prompts = 0
        for each, turn in sorted(zip(self._served, self._turns, strict=True), key=lambda pair: pair[0].number):
            if each.request.status == "rejected":
                continue
            blocks = turn.prompt.sequence_hashes(self._block_size)
            known = next((at for at, block in enumerate(blocks) if block not in seen), len(blocks))
            seen.update(blocks)
            if each.request.status == "finished":
                cached += known * self._block_size
                prompts += each.request.prompt_tokens
        return share(cached, prompts)

    def counts(self, of: str) -> tuple[dict[Worker, float], dict[Worker, float]]:
        """Return one of `BALANCED` by worker, and at which share of the picks each worker was a candidate."""
        picks = len(self._picks)
        there = {each.worker: each.picks / picks if picks else 0.0 for each in self._services}
        if of == "prompt_tokens":
            return {each.worker: each.prompt_tokens_computed for each in self._services}, there
        if of == "open_requests":
            return {each.worker: each.open_requests / picks if picks else 0.0 for each in self._services}, there
        counts: dict[Worker, float] = dict.fromkeys(there, 0.0)
        for pick in self._picks:
            counts[pick.worker] += 1
        return counts, there


def trace_digest(turns: Iterable[Turn], block_size: int) -> str:
    """Return eight digits that two traces share if they ask for the same: prompts, lengths, times, sessions and priorities.

    Args:
        turns: the requests of a trace, in its order.
        block_size: tokens a block of the engines, by which prompts are hashed.
    """
    found = sha256()
    for turn in turns:
        asked, prompt = turn.trace, turn.prompt
        times = asked.timestamp, asked.delay, asked.session_id, asked.priority
        sizes = prompt.length(block_size), asked.output_length
        found.update(repr((prompt.sequence_hashes(block_size)[-1:], *sizes, *times)).encode())
    return found.hexdigest()[:8]
