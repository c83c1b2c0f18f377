"""Data of a run for its report: a row for each request and each worker, the picks of a router, and incidents.

One subject: the values of a run. Times are virtual milliseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from pytest_kvmock.fleets.report.routing_figures import Choice
from pytest_kvmock.values.checks import check_number

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.fleets.routing.routing import Candidate, Phase, RouterRequest, Worker
    from pytest_kvmock.values.tokens import Prompt


class Asked(Protocol):
    """One request of a trace, as a report needs it.

    Attributes:
        trace: the request in the trace.
        prompt: its prompt.
        session_name: its session.
        index: its position in the session, from 0.
    """

    trace: Any
    prompt: Prompt
    session_name: str
    index: int


class Pick(NamedTuple):
    """One choice of the router.

    Attributes:
        ms: time, in virtual milliseconds.
        number: the request, by the order of arrival, from 0.
        worker: the chosen worker.
        overlap: blocks of the prompt that the worker held when the request arrived at the router, by the events
            delivered by then. Dynamo's router counts and reports these, even if the request has waited since then.
        best_overlap: the most that any candidate held at that time.
        held: blocks of the prompt that the worker held at the pick, by the delivered events; the router saw these.
        best_held: the most that any candidate held at the pick.
        waited_ms: time that the request had waited in the router.
        attempt: 1 for the first dispatch, plus 1 for each time that it was sent again.
        believed: blocks of the prompt that the router believed to be there, by its `believed(request)`; None if it has
            no such method.
        phase: for P/D pairs, the leg of the pick, which is also the role of its worker; None if there is only one leg.
    """

    ms: float
    number: int
    worker: Worker
    overlap: int
    best_overlap: int
    held: int
    best_held: int
    waited_ms: float = 0.0
    attempt: int = 1
    believed: int | None = None
    phase: Phase | None = None

    @property
    def choice(self) -> Choice:
        """The choice, by the blocks held at the pick."""
        return Choice(self.worker, self.held, self.best_held)


class RequestRow(NamedTuple):
    """One request of a run.

    Attributes:
        request: the request at its last engine.
        number: its position in the order of arrival.
        served_by: the position of the engine that generates its tokens; None if a prefill engine rejected it.
        worker: the worker that served it last.
        asked: its entry in the trace; None if there was no trace.
        handoff: data of its handoff from a prefill engine, for Dynamo's report.
        first: the first pick for it; None if there was no router.
        last: the last pick for it.
        block_size: tokens per block.
        recomputes_last_token: whether its engine computes the last token of a prompt even if it is cached.
    """

    request: ScheduledRequest
    number: int
    served_by: int | None
    worker: Worker | None
    asked: Asked | None
    handoff: Mapping[str, Any]
    first: Pick | None
    last: Pick | None
    block_size: int
    recomputes_last_token: bool

    @property
    def held(self) -> int:
        """Blocks that the index promised at the pick."""
        return 0 if self.last is None else self.last.held

    @property
    def promised(self) -> int:
        """The promised blocks that an engine may reuse."""
        return self._reusable(self.held)

    @property
    def believed(self) -> int | None:
        """Blocks that the router believed to be there at the pick, and that an engine may reuse; None if it does not
        report beliefs.
        """
        said = None if self.last is None else self.last.believed
        return None if said is None else self._reusable(said)

    def _reusable(self, blocks: int) -> int:
        generates = self.asked is None or self.asked.trace.output_length
        kept = 1 if self.recomputes_last_token and generates else 0
        return min(blocks, max(0, self.request.prompt_tokens - kept) // self.block_size)

    @property
    def found(self) -> int:
        """Blocks that its first admission reused."""
        return self.request.first_reused_tokens // self.block_size

    @property
    def lacking(self) -> tuple[int, tuple[str, ...]]:
        """The promised blocks that its engine's full attention had but the first admission did not find, and the caches
        that lacked them.
        """
        tokens, caches = self.request.lacking
        return max(0, min(self.promised, tokens // self.block_size) - self.found), caches

    @property
    def engine_wait_ms(self) -> float | None:
        """Its wait in the engine, from its pick or arrival to its first admission; None if it was never admitted."""
        admitted = self.request.admitted_ms
        since = self.request.arrival_ms if self.last is None else self.last.ms
        return None if admitted is None else admitted - since

    def lateness(self) -> float:
        """Return the time to the first token; infinite if there was none."""
        found = self.request.ttft_ms
        return float("inf") if found is None else found

    def __str__(self) -> str:
        request, times = self.request, "no token came out"
        if request.token_ms:
            waits = f"router {self.last.waited_ms if self.last else 0.0:.4g}, engine {self.engine_wait_ms or 0.0:.4g}"
            times = f"first token after {request.ttft_ms:.4g} ms ({waits}), the last after {request.e2e_ms:.4g} ms"
        return (
            f"request {self.number} of {request.prompt_tokens} + {request.generated_tokens} tokens on worker "
            f"{self.worker!r}, {request.status}: {times}; {request.first_reused_tokens} tokens were cached"
        )


class WorkerRow(NamedTuple):
    """One worker of a run.

    Attributes:
        worker: its name.
        position: its position among the engines, to which `served_by` refers.
        since_ms: time at which it joined.
        until_ms: time at which it crashed or left, or the run ended.
        passes: forward passes that it ran.
        prompt_tokens_computed: tokens of prompts that it computed, including those computed again.
        blocks_evicted: device blocks that it published as removed.
        preemptions: number of preemptions.
        open_requests: sum of its open requests over the picks at which it was a candidate.
        picks: number of these picks.
        recomputes_last_token: whether its engine computes the last token of a prompt even if it is cached.
        has_host: whether its device has a host tier.
        role: "prefill" or "decode"; None if it belongs to no P/D pair.
    """

    worker: Worker
    position: int = 0
    since_ms: float = 0.0
    until_ms: float = 0.0
    passes: int = 0
    prompt_tokens_computed: int = 0
    blocks_evicted: int = 0
    preemptions: int = 0
    open_requests: int = 0
    picks: int = 0
    recomputes_last_token: bool = False
    has_host: bool = False
    role: Phase | None = None


class Happened(NamedTuple):
    """An incident that happened.

    Attributes:
        ms: time, in virtual milliseconds.
        kind: "crash", "restart", "leave", "join", "cordon" or "uncordon".
        worker: id of the worker.
        lost: number of requests that were lost.
    """

    ms: float
    kind: str
    worker: int
    lost: int = 0


class EventMark(NamedTuple):
    """A fault or error of events at a time of a run.

    Attributes:
        ms: time of the mark, in virtual milliseconds: the end of the publishing pass, or the delivery of a late event.
        kind: the injected fault, or the rule of the error.
        worker: the id of the worker.
        text: description.
        is_error: whether it is an error.
    """

    ms: float
    kind: str
    worker: int
    text: str
    is_error: bool = False


BELIEFS: Final[Mapping[str, tuple[str, ...]]] = {
    "loads": (),
    "overlap": ("request",),
    "believed": ("request",),
    "workers": (),
    "overlap_by_owner": ("request",),
}
"""The methods that report a router's beliefs, with their arguments."""

BELIEFS_TEXT: Final = ", ".join(f"{name}({', '.join(arguments)})" for name, arguments in BELIEFS.items())
""""loads(), overlap(request) ...", for messages."""


class Belief(NamedTuple):
    """A wrong belief of a router, at the first pick where it was wrong.

    Attributes:
        rule: "load_drift", "overlap_drift" or "worker_drift".
        ms: time, in virtual milliseconds.
        number: the request of the pick, by the order of arrival.
        worker: the first worker for which it was wrong.
        observed: the router's belief, and the hook after which it became wrong.
        expected: the right value, by the hooks and events that the router received.
        follows: whether it may follow from an earlier wrong belief: prefill tokens from a wrong overlap, loads from a
            worker missing in its list.
    """

    rule: str
    ms: float
    number: int
    worker: Worker
    observed: str
    expected: str
    follows: bool = False

    def __str__(self) -> str:
        return f"{self.rule}: {self.observed}; expected {self.expected}"


class OwnerPromise(NamedTuple):
    """A router's promise of blocks in shared stores, at a pick.

    Attributes:
        ms: when, in virtual milliseconds.
        number: the request of the pick, by the order of arrival.
        blocks: by store, the blocks of the prompt that each worker can load from it, beyond the worker's faster tiers.
    """

    ms: float
    number: int
    blocks: Mapping[str, Mapping[Worker, int]]


class PassSample(NamedTuple):
    """One worker at the end of a real pass; for passes that were simulated in one go, at the end of the last.

    Attributes:
        ms: time, in virtual milliseconds.
        position: position of the worker among the engines.
        running: requests that run.
        waiting: requests that wait.
        active_blocks: blocks in use.
        prompt_tokens_computed: tokens of prompts that its engine has computed by then.
    """

    ms: float
    position: int
    running: int
    waiting: int
    active_blocks: int
    prompt_tokens_computed: int


class PickRecord(NamedTuple):
    """A pick with true values.

    Attributes:
        request: the request at the time of the pick; `overlaps` are the true ones on its arrival.
        chosen: the chosen worker.
        candidates: the workers with true overlaps and true loads, which may differ from those that the router saw.
        shown: the overlaps that the router saw, in the same order.
    """

    request: RouterRequest
    chosen: Worker
    candidates: tuple[Candidate, ...]
    shown: tuple[int, ...]


class Record(Protocol):
    """The record of a fleet with `record=True`.

    Attributes:
        samples: the columns of `PassSample`, by name.
    """

    samples: dict[str, array[Any]]

    def __len__(self) -> int:
        """Return the number of picks."""

    def pick(self, at: int) -> PickRecord:
        """Return a pick by its position in `Report.picks`, with the true values of the candidates."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits that a request must keep to count as good, in milliseconds, inclusive; None: no limit.

    Attributes:
        ttft_ms: time to the first token.
        itl_ms: mean time between its tokens; a request of one token has none.
        e2e_ms: time to its last token.

    Raises:
        ValueError: a limit is not a finite number of at least 0.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "itl_ms", "e2e_ms"):
            if (limit := getattr(self, name)) is not None:
                check_number(f"Objectives: {name}", limit, unit=" (milliseconds), or None")

    def __bool__(self) -> bool:
        return not (self.ttft_ms is None and self.itl_ms is None and self.e2e_ms is None)

    def are_met(self, request: ScheduledRequest) -> bool:
        """Whether a finished request keeps all limits; without tokens only `e2e_ms` counts."""
        first, last, end = request.ttft_ms, request.e2e_ms, request.ended_ms
        if first is None or last is None:
            alone = self.ttft_ms is None and self.itl_ms is None
            return alone and end is not None and self.e2e_ms is not None and end - request.arrival_ms <= self.e2e_ms
        gaps = len(request.token_ms) - 1
        return (
            (self.ttft_ms is None or first <= self.ttft_ms)
            and (self.e2e_ms is None or last <= self.e2e_ms)
            and (self.itl_ms is None or not gaps or (last - first) / gaps <= self.itl_ms)
        )


@dataclass(frozen=True, slots=True)
class WorkerCount:
    """The workers of one kind.

    Attributes:
        count: number of workers.
        gpus: GPUs of each worker.
    """

    count: int = 0
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Pools:
    """Data of a replay for the long form of Dynamo's report (`Release.reports_workers`).

    Attributes:
        clock_ms: duration on the clock.
        decode: the decode workers.
        prefill: the prefill workers.
        names_sessions: whether rows name sessions (`Arrivals.depends_on_ends`).
        ranks: number of ranks of a decode worker.
        decode_first: whether a request goes to its decode engine before its prefill engine.
    """

    clock_ms: float
    decode: WorkerCount
    prefill: WorkerCount = WorkerCount()
    names_sessions: bool = False
    ranks: int = 1
    decode_first: bool = False


@dataclass(frozen=True, slots=True)
class RunFacts:
    """How a run was made.

    Attributes:
        block_size: tokens per block of the engines.
        sketches: whether percentiles of gaps between tokens are sketched, and requests are ordered by their ends
            (1.6.1).
        pools: further fields of the long form of Dynamo's report; None: the report is the short one.
        router: name of the router's class; "" if there was none.
        trace: name of the trace, if it has one.
        turns: the trace.
        objectives: the limits of good requests.
        arrived: number of requests that arrived; None: the number dispatched.
        withdrawn: number of arrived requests that were called off before dispatch.
        held_before: blocks that the engines held at the start of the run.
        loads_every_ms: greatest age of the engine loads that the router saw; None: it saw those of the load book.
        nobody_from_ms: virtual milliseconds from which the requests that waited at the end had no worker; None if all
            were served or there was a worker.
    """

    block_size: int
    sketches: bool = False
    pools: Pools | None = None
    router: str = ""
    trace: str | None = None
    turns: Sequence[Asked] = ()
    objectives: Objectives = Objectives()
    arrived: int | None = None
    withdrawn: int = 0
    held_before: int = 0
    loads_every_ms: float | None = None
    nobody_from_ms: float | None = None

    @property
    def nobody_text(self) -> str:
        """Text for reports and messages if there was no worker; else ""."""
        return "" if self.nobody_from_ms is None else f"no worker was there from {self.nobody_from_ms:g} ms on"
