"""What a run leaves for its report: a row a request, a row a worker, the picks of a router, and what happened.

One subject: the values of a run. Times are virtual milliseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from pytest_kvmock.checks import check_number
from pytest_kvmock.report.routing_figures import Choice

if TYPE_CHECKING:
    from pytest_kvmock.router.routing import Candidate, RouterRequest, Worker
    from pytest_kvmock.schedulers.scheduler import ScheduledRequest
    from pytest_kvmock.tokens import Prompt


class Asked(Protocol):
    """One request of a trace, as a report needs it.

    Attributes:
        trace: the request as the trace has it.
        prompt: its prompt.
        session_name: its session.
        index: its place in that, from 0.
    """

    trace: Any
    prompt: Prompt
    session_name: str
    index: int


class Pick(NamedTuple):
    """One choice of the router.

    Attributes:
        ms: when, in virtual milliseconds.
        number: the request, by the order of arrival, from 0.
        worker: who was picked.
        overlap: blocks of the prompt that the worker held when the request arrived at the router, by the events delivered by then: what
            Dynamo's router counts and reports, also where the request has waited.
        best_overlap: the most that any candidate held then.
        held: blocks of the prompt that the worker held at the pick, by the events delivered: what the router was shown.
        best_held: the most that any candidate held at the pick.
        waited_ms: how long the request had waited in the router.
        attempt: 1, or one more for each time that it was sent anew.
        believed: blocks of the prompt that the router believed to be there, by its `believed(request)`; None: it does not say.
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

    @property
    def choice(self) -> Choice:
        """What it gave away, at the pick."""
        return Choice(self.worker, self.held, self.best_held)


class RequestRow(NamedTuple):
    """One request of a run.

    Attributes:
        request: as its last engine had it.
        number: its place in the order of arrival.
        served_by: the position of the engine that generates its tokens; None: none does, as a prefill engine rejected it.
        worker: who served it last.
        asked: what the trace asked for; None: no trace did.
        handoff: what Dynamo's report says of its handoff from a prefill engine.
        first: the first pick for it; None: no router picked.
        last: the last one.
        block_size: tokens a block.
        recomputes_last_token: whether its engine computes the last token of a prompt though it is cached.
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
        """Those of them that an engine may reuse."""
        return self._reusable(self.held)

    @property
    def believed(self) -> int | None:
        """Blocks that the router believed to be there at the pick, and that an engine may reuse; None: it does not say."""
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
        """Of the blocks that were promised and not found, those that its engine's full attention had; and which other caches lacked them."""
        tokens, caches = self.request.lacking
        return max(0, min(self.promised, tokens // self.block_size) - self.found), caches

    @property
    def engine_wait_ms(self) -> float | None:
        """How long it waited in the engine, from its pick or arrival to its first admission; None where it had none."""
        admitted = self.request.admitted_ms
        since = self.request.arrival_ms if self.last is None else self.last.ms
        return None if admitted is None else admitted - since

    def lateness(self) -> float:
        """Return the time to the first token; infinite where there was none."""
        found = self.request.ttft_ms
        return float("inf") if found is None else found

    def __str__(self) -> str:
        request, times = self.request, "no token came out"
        if request.token_ms:
            waits = f"router {self.last.waited_ms if self.last else 0.0:.4g}, engine {self.engine_wait_ms or 0.0:.4g}"
            times = f"first token after {request.ttft_ms:.4g} ms ({waits}), the last after {request.e2e_ms:.4g} ms"
        return (
            f"request {self.number} of {request.prompt_tokens} + {request.generated_tokens} tokens on worker {self.worker!r}, "
            f"{request.status}: {times}; {request.first_reused_tokens} tokens were cached"
        )


class WorkerRow(NamedTuple):
    """What one worker did in a run.

    Attributes:
        worker: its name.
        position: its place among the engines, by which `served_by` names it.
        since_ms: when it came.
        until_ms: when it crashed, left, or the run ended.
        passes: forward passes that it ran.
        prompt_tokens_computed: tokens of prompts that it computed, and with them what it computed again.
        blocks_evicted: blocks on the device that it published as removed.
        preemptions: how often it preempted a request.
        open_requests: its open requests at the picks that it was a candidate of, summed over these.
        picks: how many picks these were.
        recomputes_last_token: whether its engine computes the last token of a prompt though it is cached.
        has_host: whether there is a host below its device.
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


class Happened(NamedTuple):
    """An incident that happened.

    Attributes:
        ms: when, in virtual milliseconds.
        kind: "crash", "restart", "leave", "join", "cordon" or "uncordon".
        worker: to whom, by the id.
        lost: how many requests it lost.
    """

    ms: float
    kind: str
    worker: int
    lost: int = 0


class EventMark(NamedTuple):
    """What happened to events at a time of a run.

    Attributes:
        ms: when it was noted, in virtual milliseconds: at the end of the pass that published, or when a late event was delivered.
        kind: a fault that was injected, or the rule of an error.
        worker: the id of the worker.
        text: what happened.
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
}
"""The methods of a router that say what it believes, and what each is asked with."""

BELIEFS_TEXT: Final = ", ".join(f"{name}({', '.join(arguments)})" for name, arguments in BELIEFS.items())
""""loads(), overlap(request) ...", for messages."""


class Belief(NamedTuple):
    """A wrong belief of a router, at the first pick where it was wrong.

    Attributes:
        rule: "load_drift", "overlap_drift" or "worker_drift".
        ms: when, in virtual milliseconds.
        number: the request that was picked for, by the order of arrival.
        worker: the first worker that it is about.
        observed: what the router said, and after which hook it parted from what is right.
        expected: what is right, by what the router was told.
        follows: whether it may follow from one before it: prefill tokens of a wrong overlap, loads of a worker that it does not know.
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


class PassSample(NamedTuple):
    """One worker at the end of a real pass; of passes that were run in one go, at the end of the last.

    Attributes:
        ms: when, in virtual milliseconds.
        position: the worker, by its place among the engines.
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
    """A pick with all that truly was.

    Attributes:
        request: the request, as it was when it was picked for; `overlaps` are the true ones on its arrival.
        chosen: who was picked.
        candidates: the workers, with true overlaps and true loads, whatever the router was shown.
        shown: the overlaps that the router was shown, in the same order.
    """

    request: RouterRequest
    chosen: Worker
    candidates: tuple[Candidate, ...]
    shown: tuple[int, ...]


class Record(Protocol):
    """What a fleet with `record=True` keeps.

    Attributes:
        samples: the columns of `PassSample`, by name.
    """

    samples: dict[str, array[Any]]

    def __len__(self) -> int:
        """Return how many picks there are."""

    def pick(self, at: int) -> PickRecord:
        """Return a pick by its place in `Report.picks`, with the candidates as they truly were."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must not exceed to count as good, in milliseconds; None: any. Each bound is inclusive.

    Attributes:
        ttft_ms: time to the first token.
        itl_ms: mean time between its tokens; a request of one token has none.
        e2e_ms: time to its last token.

    Raises:
        ValueError: a bound is no finite number of at least 0.
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
        """Whether a finished request keeps all of them; one without tokens only one end to end."""
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
        count: how many.
        gpus: of each.
    """

    count: int = 0
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Pools:
    """What the long form of Dynamo's report has of a replay (`Release.reports_workers`).

    Attributes:
        clock_ms: how long the clock ran.
        decode: the workers that generate.
        prefill: the prefill workers.
        names_sessions: whether rows name sessions (`Arrivals.depends_on_ends`).
        ranks: of a decode worker.
        decode_first: whether a request is given to its decode engine before it is to its prefill engine.
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
        block_size: tokens a block of the engines.
        sketches: whether percentiles of gaps between tokens are sketched, and requests counted by their ends (1.6.1).
        pools: what the long form of Dynamo's report has besides; None: the report is the short one.
        router: the class of the router, by name; "": there was none.
        trace: what the trace is called, if it has a name.
        turns: the trace.
        objectives: what counts as good.
        arrived: how many requests arrived; None: those that were dispatched.
        withdrawn: how many of them were called off before they were ever dispatched.
        held_before: blocks that the engines held as the run began.
        loads_every_ms: how old the loads of engines were at most that the router was shown; None: it was shown those of the load book.
        nobody_from_ms: from when on no worker was there for the requests that waited at the end, in virtual milliseconds; None: all
            were served, or there was one.
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
        """What reports and messages say of that nobody was there; "" where somebody was."""
        return "" if self.nobody_from_ms is None else f"no worker was there from {self.nobody_from_ms:g} ms on"
