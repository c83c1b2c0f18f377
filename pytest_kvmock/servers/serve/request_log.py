"""The record of each request to a server: where a router sent it, and how much of its prompt each worker held then."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_kvmock.fleets.report.figures import Rows
from pytest_kvmock.fleets.report.routing_figures import (
    Choice,
    assert_at_least,
    assert_balanced,
    called_off_text,
    check_share,
    worst_choice,
)
from pytest_kvmock.fleets.report.rows import RunFacts, WorkerRow
from pytest_kvmock.fleets.routing.routing import id_of

if TYPE_CHECKING:
    from pytest_kvmock.fleets.routing.routing import Worker


@dataclass(slots=True, eq=False)
class ServedRequest:
    """One prompt that arrived over HTTP.

    Attributes:
        number: its number among all prompts, from 0.
        worker: the worker that it was sent to.
        rank: the rank that served it.
        path: the path of the request.
        headers: the headers of the request, with names in lower case.
        prompt_tokens: number of tokens of its prompt.
        blocks: number of full blocks of its prompt.
        overlap: how many of its leading blocks each worker held on arrival, for the best rank of each; workers without
            any are absent.
        cached_tokens: number of cached prompt tokens; None if it was not admitted yet.
        output_tokens: number of generated tokens.
        status: the status of the answer; None if it has not ended or was cut off.
        aborted: whether it was cut off: its client disconnected before the end, or its engine restarted, stopped or cut
            it on request.
        called_off: whether its client disconnected before the end.
        body: the body of the request, if the server keeps bodies; else empty.
        role: the role of its worker in P/D pairs: "prefill", "decode" or "both"; None: it is in no pair.
        hand_over: the leg's parameters: `kv_transfer_params`, or the bootstrap fields; None: nothing.
        handed: the parameters in its answer (`kv_transfer_params`); None: nothing.
        legs: the numbers of all legs of the same client request, as far as their parameters show it.
    """

    number: int
    worker: int
    rank: int
    path: str
    headers: Mapping[str, str]
    prompt_tokens: int
    blocks: int
    overlap: dict[int, int] = field(default_factory=dict)
    cached_tokens: int | None = None
    output_tokens: int = 0
    status: int | None = None
    aborted: bool = False
    called_off: bool = False
    body: bytes = field(default=b"", repr=False)
    role: str | None = None
    hand_over: Mapping[str, Any] | None = None
    handed: Mapping[str, Any] | None = None
    legs: list[int] = field(default_factory=list)

    @property
    def choice(self) -> Choice:
        """The router's choice: the worker, the blocks that it held, and the most that any worker held."""
        return Choice(self.worker, self.overlap.get(self.worker, 0), max(self.overlap.values(), default=0))

    def to_json(self) -> dict[str, Any]:
        """Return the request as a JSON object."""
        names = ("number", "worker", "rank", "path", "prompt_tokens", "blocks", "cached_tokens", "output_tokens")
        return {
            **{name: getattr(self, name) for name in names},
            "overlap": {str(worker): blocks for worker, blocks in self.overlap.items()},
            "status": self.status,
            "aborted": self.aborted,
            "called_off": self.called_off,
            "headers": dict(self.headers),
            **({} if self.role is None else {"role": self.role, "hand_over": self.hand_over, "legs": self.legs}),
        }


class Routing:
    """The quality of the routing of requests, with the terms of `Report`.

    Args:
        requests: the requests.
        workers: all workers.
        block_size: tokens per block.
    """

    def __init__(self, requests: Iterable[ServedRequest], workers: Iterable[int], block_size: int) -> None:
        self._requests = list(requests)
        count = len(self._requests)
        names = dict.fromkeys((*workers, *(each.worker for each in self._requests)))
        self._rows = Rows(
            RunFacts(block_size, router="the router"),
            picks=self._requests,
            workers=[WorkerRow(worker, picks=count) for worker in names],
            arrived=count,
            done=[each for each in self._requests if each.cached_tokens is not None],
        )
        self._called_off = Counter(each.worker for each in self._requests if each.called_off)
        counts = Counter(each.worker for each in self._requests)
        self.requests_by_worker: dict[Worker, float] = {worker: counts[worker] for worker in names}

    def __repr__(self) -> str:
        return f"<Routing {self.to_json()}>"

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self._requests)

    @property
    def called_off(self) -> int:
        """Number of requests whose clients disconnected, without those whose engine restarted or stopped."""
        return self._called_off.total()

    @property
    def hit_ratio(self) -> float | None:
        """The share of prompt tokens that were cached, over all admitted requests; None if there are none."""
        return self._rows.figure("hit_ratio")

    @property
    def of_best(self) -> float | None:
        """Blocks that the chosen workers held, as a share of those that the best workers held; None if no worker held
        any.
        """
        return self._rows.figure("of_best")

    @property
    def elsewhere(self) -> int:
        """Number of requests that were sent to a worker while another worker held more of the prompt."""
        return int(self._rows.figure("elsewhere") or 0)

    @property
    def balance(self) -> float | None:
        """Requests of the worker with the most requests, divided by the mean; None if there are no requests."""
        return self._rows.figure("balance_requests")

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        names = ("requests", "called_off", "hit_ratio", "of_best", "elsewhere", "balance")
        by_worker = {str(worker): count for worker, count in self.requests_by_worker.items()}
        return {name: getattr(self, name) for name in names} | {"requests_by_worker": by_worker}

    def assert_hit_ratio(self, at_least: float | None = None, *, of_best: float | None = None) -> None:
        """Fail if too little was cached.

        Args:
            at_least: required share of cached prompt tokens.
            of_best: required share of the blocks that the best workers held.

        Raises:
            AssertionError: a share is smaller; the message has the request that lost most.
            ValueError: neither is given, an argument is no share, or there is nothing to count.
        """
        __tracebackhide__ = True
        if at_least is None and of_best is None:
            raise ValueError("assert_hit_ratio takes at_least=, of_best= or both, got neither")
        for name, argument, least in (("hit_ratio", "at_least", at_least), ("of_best", "of_best", of_best)):
            if least is not None:
                assert_at_least(name, self._rows.figure(name), check_share(argument, least), self._worst())

    def assert_balanced(self, within: float | None = None) -> None:
        """Fail if a worker has more than `within` times the mean number of requests; a single worker is balanced.

        Args:
            within: the factor; None: 2.0 for four or more workers, 1.8 for three, 1.5 for two.

        Raises:
            AssertionError: a worker has more.
            ValueError: `within` is below 1, or so large that no assignment could exceed it; or there were no requests.
        """
        __tracebackhide__ = True
        row = self._called_off_row if self._called_off else None
        assert_balanced("requests", self.requests_by_worker, within, row=row)

    def _called_off_row(self, worker: Worker) -> str:
        return called_off_text(self._called_off[id_of(worker)]).rstrip()

    def _worst(self) -> str:
        at = worst_choice([each.choice for each in self._requests])
        if at is None:
            return "every request went to a worker that held most of it"
        each = self._requests[at]
        held = ", ".join(f"worker {worker} held {blocks}" for worker, blocks in sorted(each.overlap.items()))
        return f"request {each.number} ({each.blocks} blocks) was sent to worker {each.worker}: {held}"


class RequestLog:
    """The last requests.

    Args:
        most: number of requests that are kept; None: all.
    """

    def __init__(self, most: int | None = None) -> None:
        self.rows: deque[ServedRequest] = deque(maxlen=most)
        self.total = 0

    def add(self, row: ServedRequest) -> None:
        """Add a request."""
        self.rows.append(row)
        self.total += 1

    @property
    def forgotten(self) -> int:
        """Number of requests that are no longer kept."""
        return self.total - len(self.rows)

    def clear(self) -> None:
        """Drop all requests, and count from 0 again."""
        self.rows.clear()
        self.total = 0
