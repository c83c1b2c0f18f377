"""What schedulers share: their requests, what a forward pass did, their queues, and how an engine drives them.

One subject: what every scheduler is, before any has its passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.driver import Driver
    from pytest_kvmock.engines.schedulers.args import MockEngineArgs
    from pytest_kvmock.values.acceptance import AcceptedDrafts


class ScheduledTokens(NamedTuple):
    """The tokens that a pass computed of one request's prompt, or of tokens that it recomputes.

    Attributes:
        request: the request.
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
        scheduled: of which requests it computed how many tokens, in order; a decode step is one token, none of the
            prompt.
        generated: the requests that generated a token in it, in order; those that sleep are not among them.
        sleepers: how many requests generated a token in it besides, as they do in each pass while no caller looks.
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
        """Note the tokens that a request has generated."""
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

        A variance is the population's. What waits for its first admission counts as queued prefill, what was preempted
        as queued decode.

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
    """Return the variance of the population; 0 if there is none."""
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
        is_rank: it runs its passes in lock step with other ranks, and their driver calls `settle`.
        defers_prefills: its next pass computes prompts only where no request decodes.
        has_last_pass: a running request that is called off has one more pass, and what was computed by then is handed
            out.
    """

    has_priorities: bool = False
    holds_back_prompts: bool = False
    is_rank: bool = False
    defers_prefills: bool = False
    has_last_pass: bool = False

    def __init__(self, driver: Driver, args: MockEngineArgs) -> None:
        self._driver = driver
        self._performance = args.performance
        self._prefills = (
            args.worker_type != "decode" or args.pair_role is not None
        )  # a decode engine of vLLM's may compute prompts
        self._speedup = args.speedup_ratio
        self._decode_speedup = args.speedup_ratio * args.decode_speedup_ratio
        self._waiting: deque[ScheduledRequest] = deque()
        self._running: list[ScheduledRequest] = []
        self._accepted: AcceptedDrafts | None = None
        self._powers = driver.powers

    def accept_drafts(self, accepted: AcceptedDrafts | None) -> None:
        """Have running requests generate accepted drafts and one token more in a pass; None: one token."""
        self._accepted = accepted

    def _admitted(self, request: ScheduledRequest, now_ms: float, reused_tokens: int) -> None:
        """Note an admission that found `reused_tokens` tokens cached, and the first time what a hybrid model could
        not use.
        """
        if request.admitted_ms is None and self._powers.short is not None:
            request.lacking = self._powers.short(request.state)
        request.admit(now_ms, reused_tokens)

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
        """Take a request whose prompt was computed elsewhere and whose blocks are held here."""
        self.submit(request)

    def abort(self, request: ScheduledRequest) -> None:
        """Forget an open request, and free its blocks (one that waits may hold a part); full blocks stay cached."""
        self._queue_of(request).remove(request)
        self._driver.free(request.state, done=True)
        request.status = "aborted"

    def _queue_of(self, request: ScheduledRequest) -> MutableSequence[ScheduledRequest]:
        """Where an open request runs, or waits."""
        return self._running if request.status == "running" else self._waiting

    def call_off(self, request: ScheduledRequest) -> bool:
        """Between two passes, act on an open request whose client has left.

        Returns:
            Whether it is over with that; else its next pass is its last one.
        """
        # vLLM: `Scheduler.finish_requests` frees it; dynamo-mocker: `drop_request`, all its blocks are freed.
        self.abort(request)
        return True

    def preempt_all(self) -> None:
        """Have all running requests wait again, between two passes, first come first: their blocks are free."""
        self.wake_all()
        for request in reversed(self._running):
            self._driver.free(request.state, done=False)
            request.status, request.computed_tokens = "preempted", 0
            request.preemptions += 1
            self._waiting.appendleft(request)
        self._running.clear()

    def wake(self, request: ScheduledRequest) -> bool:  # noqa: ARG002 - most let no request sleep
        """Bring a request up to date whose tokens were only counted while no caller looked; return whether it is such
        a one.
        """
        return False

    def wake_all(self) -> list[ScheduledRequest]:
        """Bring all requests up to date; return those that were not."""
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

        Nothing is done yet. These passes do not differ: no event, no first token, no end. So a driver of several
        engines may look away until the last of them, and cut the list where a request arrives before.

        Args:
            now_ms: when the first one starts.
            until_ms: the moment.
        """

    @abstractmethod
    def run_plan(self, ends: list[float]) -> None:
        """Run passes that were planned, the first of them or all; nothing but arrivals happened here since."""
