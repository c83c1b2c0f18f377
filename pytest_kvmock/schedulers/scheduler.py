"""What schedulers share: their requests, what a forward pass did, their queues, and how an engine drives them.

One subject: what every scheduler is, before any has its passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from pytest_kvmock.acceptance import AcceptedDrafts
    from pytest_kvmock.drivers.driver import Driver
    from pytest_kvmock.schedulers.args import MockEngineArgs

ScheduledStatus: TypeAlias = Literal[
    "waiting", "running", "preempted", "finished", "rejected", "failed", "aborted", "lost", "unfinished"
]


class ScheduledRequest:
    """One request of a scheduler.

    Attributes:
        state: the driver's own request: blocks, and a length in tokens.
        prompt_tokens: length of the prompt.
        max_output_tokens: how many tokens it generates before it finishes.
        priority: larger is served first, where the scheduler has priorities.
        arrival_ms: when it arrived.
        status: "waiting" before its first admission, "running", "preempted" (it waits again), "finished", "rejected" (it
            could never fit), "failed" (nor at the engine that it was to be handed over to), "aborted", "lost" (its worker restarted) or "unfinished" (the clock of its fleet stopped).
        computed_tokens: its first tokens whose KV is computed, cached ones included; 0 while it waits.
        generated_tokens: how many it has generated.
        reused_tokens: the most tokens of it that one admission found cached (Dynamo: the maximum over admissions).
        first_reused_tokens: those that its first admission found cached.
        lacking: before a hybrid model, how many tokens of it full attention had then, and the caches that could not resume there.
        onboarded_tokens: tokens that came back from the host for it, before its first admission.
        fetched_tokens: of these, tokens that a storage behind the host had, and the host had not.
        admitted_ms: start of the pass that first gave it blocks; None before.
        admissions: each admission: the start of its pass, and how many tokens it found cached.
        token_ms: when each generated token came out, in milliseconds.
        ended_ms: end of the pass that finished or rejected it, or when it was called off; None before.
        keeps_blocks: its blocks stay allocated when it finishes, until its engine releases them.
        preemptions: how often it was preempted.
        opened: its place among all requests of its engine, by the order in which they were opened.
        place: its place among those that run, where the scheduler lets requests sleep.
    """

    __slots__ = (
        "admissions",
        "admitted_ms",
        "arrival_ms",
        "computed_tokens",
        "ended_ms",
        "fetched_tokens",
        "first_reused_tokens",
        "generated_tokens",
        "keeps_blocks",
        "lacking",
        "max_output_tokens",
        "onboarded_tokens",
        "opened",
        "place",
        "preemptions",
        "priority",
        "prompt_tokens",
        "reused_tokens",
        "state",
        "status",
        "token_ms",
    )

    def __init__(
        self, state: Any, prompt_tokens: int, max_output_tokens: int, *, arrival_ms: float = 0.0, priority: int = 0
    ) -> None:
        self.state = state
        self.prompt_tokens = prompt_tokens
        self.max_output_tokens = max_output_tokens
        self.priority = priority
        self.arrival_ms = arrival_ms
        self.status: ScheduledStatus = "waiting"
        self.computed_tokens = 0
        self.generated_tokens = 0
        self.reused_tokens = 0
        self.first_reused_tokens = 0
        self.lacking: tuple[int, tuple[str, ...]] = (0, ())
        self.onboarded_tokens = self.fetched_tokens = 0
        self.admitted_ms: float | None = None
        self.admissions: list[tuple[float, int]] = []
        self.token_ms: list[float] = []
        self.ended_ms: float | None = None
        self.keeps_blocks = False
        self.preemptions = 0
        self.opened = 0
        self.place = 0

    def __len__(self) -> int:
        return self.prompt_tokens + self.generated_tokens

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.prompt_tokens} + {self.generated_tokens} tokens, {self.status}>"

    @property
    def is_open(self) -> bool:
        """Whether it still waits or runs."""
        return self.status in ("waiting", "running", "preempted")

    @property
    def ttft_ms(self) -> float | None:
        """From its arrival to its first token; None where there was none, and so the others."""
        return self.token_ms[0] - self.arrival_ms if self.token_ms else None

    @property
    def ttst_ms(self) -> float | None:
        """From its first token to its second."""
        return self.token_ms[1] - self.token_ms[0] if len(self.token_ms) > 1 else None

    @property
    def itl_ms(self) -> float | None:
        """Between its tokens, on the mean."""
        tokens = self.token_ms
        return (tokens[-1] - tokens[0]) / (len(tokens) - 1) if len(tokens) > 1 else None

    @property
    def e2e_ms(self) -> float | None:
        """From its arrival to its last token."""
        return self.token_ms[-1] - self.arrival_ms if self.token_ms else None

    @property
    def device_tokens(self) -> int:
        """Tokens that its first admission found on the device."""
        return max(0, self.first_reused_tokens - self.onboarded_tokens)

    @property
    def host_tokens(self) -> int:
        """Tokens that came back for it and that the host had."""
        return self.onboarded_tokens - self.fetched_tokens

    def admit(self, now_ms: float, reused_tokens: int) -> None:
        """Note an admission that found so many tokens cached."""
        if self.admitted_ms is None:
            self.admitted_ms = now_ms
            self.first_reused_tokens = reused_tokens
            self.lacking = getattr(self.state, "short", self.lacking)
        self.reused_tokens = max(self.reused_tokens, reused_tokens)
        self.admissions.append((now_ms, reused_tokens))

    def next_token(self) -> int:
        """The token that it generates next; subclasses know which."""
        return 0

    def next_tokens(self, count: int) -> Sequence[int]:
        """The tokens that it generates next, as so many calls of `next_token` would return them."""
        return [0] * count


class ScheduledTokens(NamedTuple):
    """What a pass computed of one request's prompt, or of what it recomputes.

    Attributes:
        request: which request.
        tokens: how many tokens were computed, those of the output that are computed again included.
        prompt_tokens: how many of these are the prompt's.
        prefix_tokens: tokens before them, cached or computed in earlier passes.
    """

    request: ScheduledRequest
    tokens: int
    prompt_tokens: int
    prefix_tokens: int


@dataclass(slots=True)
class ForwardPass:
    """What one forward pass did, and when.

    Attributes:
        start_ms: when it started, in virtual milliseconds.
        prefill_ms: how long its prefill took.
        decode_ms: how long its decode took.
        end_ms: when it ended; all its tokens came out then.
        scheduled: of which requests it computed how many tokens, in order; a decode step is one token, none of the prompt.
        generated: the requests that generated a token in it, in order; those that sleep are not among them.
        sleepers: how many requests generated a token in it besides, as they do in each pass while nobody looks.
        tokens: the tokens that they generated.
        bursts: how many each of them generated, of those that generated more than one, as drafts were accepted.
        admitted: the requests that it admitted, those that resume included.
        preempted: the requests that it preempted, in order.
        finished: the requests that finished with it.
        rejected: the requests that it rejected, as their prompts can never fit.
        aborted: the requests that were called off, and that it was the last one of.
        active_blocks: blocks in use when its time was calculated.
        running: how many requests run after it.
        waiting: the requests that wait after it, in order; not those that are parked.
        decode_lengths: the length in tokens of each request that it only decoded, before its token.
        prefill_tokens: tokens that it computed of requests of whose prompt it computed a part.
        may_do_more: though it may have done nothing, what the next pass goes by has changed.
    """

    start_ms: float
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    end_ms: float = 0.0
    scheduled: list[ScheduledTokens] = field(default_factory=list)
    generated: list[ScheduledRequest] = field(default_factory=list)
    sleepers: int = 0
    tokens: list[int] = field(default_factory=list)
    bursts: dict[ScheduledRequest, int] = field(default_factory=dict)
    admitted: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[ScheduledRequest] = field(default_factory=list)
    finished: list[ScheduledRequest] = field(default_factory=list)
    rejected: list[ScheduledRequest] = field(default_factory=list)
    aborted: list[ScheduledRequest] = field(default_factory=list)
    active_blocks: int = 0
    running: int = 0
    waiting: Sequence[ScheduledRequest] = ()
    decode_lengths: list[int] = field(default_factory=list)
    prefill_tokens: int = 0
    may_do_more: bool = False

    def note_tokens(self, request: ScheduledRequest, tokens: Sequence[int]) -> None:
        """Note what a request has generated."""
        request.generated_tokens += len(tokens)
        self.generated.append(request)
        self.tokens += tokens
        if len(tokens) > 1:
            self.bursts[request] = len(tokens)

    def note_times(self) -> None:
        """Note when tokens came, once its end is known."""
        end_ms, bursts = self.end_ms, self.bursts
        for request in self.generated:
            request.token_ms.append(end_ms)
            if bursts:
                request.token_ms += [end_ms] * (bursts.get(request, 1) - 1)

    @property
    def has_generated(self) -> bool:
        """Whether any request generated a token."""
        return bool(self.generated or self.sleepers)

    @property
    def did_something(self) -> bool:
        """Whether it took time, or any request is other than before."""
        return (
            self.end_ms > self.start_ms
            or bool(
                self.sleepers
                or self.scheduled
                or self.generated
                or self.admitted
                or self.preempted
                or self.rejected
                or self.aborted
            )
            or self.may_do_more
        )

    def to_json(self, worker_id: int = 0, dp_rank: int = 0, counter_id: int = 0) -> dict[str, Any]:
        """Return it by the keys of Dynamo's forward pass metrics (`ForwardPassSnapshot`).

        A variance is that of the population. What waits for its first admission counts as queued prefill, what was
        preempted as queued decode.

        Args:
            worker_id: the worker that ran it.
            dp_rank: and its rank.
            counter_id: the number of the pass.
        """
        prefills = [each for each in self.scheduled if each.prompt_tokens]
        queued = [request.prompt_tokens for request in self.waiting if request.status == "waiting"]
        preempted = [len(request) for request in self.waiting if request.status == "preempted"]
        return {
            "version": 1,
            "worker_id": worker_id,
            "dp_rank": dp_rank,
            "counter_id": counter_id,
            "num_prefill_requests": len(prefills),
            "sum_prefill_tokens": sum(each.prompt_tokens for each in prefills),
            "var_prefill_length": _variance([each.request.prompt_tokens for each in prefills]),
            "sum_prefill_kv_tokens": sum(each.prefix_tokens for each in prefills),
            "num_decode_requests": len(self.decode_lengths),
            "sum_decode_kv_tokens": sum(self.decode_lengths),
            "var_decode_kv_tokens": _variance(self.decode_lengths),
            "num_queued_prefill": len(queued),
            "sum_queued_prefill_tokens": sum(queued),
            "var_queued_prefill_length": _variance(queued),
            "num_queued_decode": len(preempted),
            "sum_queued_decode_kv_tokens": sum(preempted),
            "var_queued_decode_kv_tokens": _variance(preempted),
            "wall_time_secs": (self.end_ms - self.start_ms) / 1000,
        }


def _variance(values: Sequence[int]) -> float:
    """Return the variance of the population; 0 where there is none."""
    if not values:
        return 0.0
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


class Scheduler(ABC):
    """Decides what each forward pass computes; it has no clock and no arrivals, the engine has.

    Args:
        driver: brings its requests to the block manager.
        args: budgets, modes, times and speedups of the engine, and the release that it follows.

    Attributes:
        has_priorities: waiting requests are served by priority, the largest first.
        holds_back_prompts: it admits only requests whose prompt is computed; for schedulers of decode engines.
        is_rank: it runs its passes in lock step with other ranks, and who drives these calls `settle`.
        defers_prefills: its next pass computes prompts only where nobody decodes.
        has_last_pass: a running request that is called off has one more pass, and what was computed by then is handed out.
    """

    has_priorities: bool = False
    holds_back_prompts: bool = False
    is_rank: bool = False
    defers_prefills: bool = False
    has_last_pass: bool = False

    def __init__(self, driver: Driver, args: MockEngineArgs) -> None:
        self._driver = driver
        self._performance = args.performance
        self._prefills = args.worker_type != "decode"
        self._speedup = args.speedup_ratio
        self._decode_speedup = args.speedup_ratio * args.decode_speedup_ratio
        self._waiting: deque[ScheduledRequest] = deque()
        self._running: list[ScheduledRequest] = []
        self._accepted: AcceptedDrafts | None = None
        self._generate_run: Callable[[Any, Sequence[int]], None] | None = getattr(driver, "generate_run", None)

    def accept_drafts(self, accepted: AcceptedDrafts | None) -> None:
        """Have running requests generate accepted drafts and one token more in a pass; None: one token."""
        self._accepted = accepted

    def _next_tokens(self, request: ScheduledRequest) -> list[int]:
        """The tokens that a request generates in this pass."""
        if self._accepted is None:
            return [request.next_token()]
        count = min(1 + self._accepted.draw(), request.max_output_tokens - request.generated_tokens)
        return [request.next_token() for _ in range(count)]

    @property
    def running(self) -> Sequence[ScheduledRequest]:
        """The requests that run, in the order in which they are served."""
        return self._running

    @property
    def waiting(self) -> Sequence[ScheduledRequest]:
        """The requests that wait, in order: those that were preempted, and those of which a part is computed, too."""
        return self._waiting

    @property
    def parked(self) -> Sequence[ScheduledRequest]:
        """The requests that wait for blocks from the host, and are tried when these have come."""
        return ()

    def submit(self, request: ScheduledRequest) -> None:
        """Take a request that has arrived."""
        self._waiting.append(request)

    def activate(self, request: ScheduledRequest) -> None:
        """Take a request whose prompt was computed elsewhere, and is held here."""
        self.submit(request)

    def abort(self, request: ScheduledRequest) -> None:
        """Forget an open request, and free what it holds (one that waits may hold a part); full blocks stay cached."""
        (self._running if request.status == "running" else self._waiting).remove(request)
        self._driver.free(request.state, done=True)
        request.status = "aborted"

    def call_off(self, request: ScheduledRequest) -> bool:
        """Act on an open request, between two passes, whose client is gone.

        Returns:
            Whether it is over with that; else its next pass is its last one.
        """
        # vLLM: `Scheduler.finish_requests` frees it; dynamo-mocker: `drop_request`, all its blocks are freed.
        self.abort(request)
        return True

    def wake(self, request: ScheduledRequest) -> bool:  # noqa: ARG002 - most let nobody sleep
        """Bring a request up to date whose tokens were only counted, as nobody looked; whether it is such a one."""
        return False

    def wake_all(self) -> list[ScheduledRequest]:
        """Bring all requests up to date; returns those that were not."""
        return []

    def settle(self, passes: Sequence[ForwardPass], *, is_idle: bool) -> None:  # noqa: B027 - most have nothing to settle
        """Settle what follows from the passes of all ranks of its worker together.

        Args:
            passes: those that were run.
            is_idle: whether none of the ranks has a request now.
        """

    @abstractmethod
    def execute_pass(self, now_ms: float) -> ForwardPass:
        """Run one forward pass from this moment; its requests' `token_ms` are set, its events published."""

    @abstractmethod
    def plan(self, now_ms: float, until_ms: float) -> list[float]:
        """Return when passes end that only decode and touch no block, as long as each starts before a moment.

        Nothing is done yet. Nobody can tell one of these passes from the next: no event, no first token, no end. So who drives
        several engines may look away until the last of them, and cut the list where a request arrives before.

        Args:
            now_ms: when the first one starts.
            until_ms: the moment.
        """

    @abstractmethod
    def run_plan(self, ends: list[float]) -> None:
        """Run passes that were planned, the first of them or all; nothing but arrivals happened here since."""
