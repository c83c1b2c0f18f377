"""The common base of schedulers: requests, the record of a forward pass, queues, and the interface to an engine.

One subject: everything that schedulers share, except their passes.
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
    """The tokens of one request that a pass computed or recomputed.

    Attributes:
        request: the request.
        tokens: number of computed tokens, including recomputed output.
        prompt_tokens: number of prompt tokens among them.
        prefix_tokens: tokens before them, cached or computed in earlier passes.
    """

    request: ScheduledRequest
    tokens: int
    prompt_tokens: int
    prefix_tokens: int


@dataclass(slots=True)
class ForwardPass:
    """The record of one forward pass.

    Attributes:
        start_ms: its start, in virtual milliseconds.
        prefill_ms: duration of its prefill.
        decode_ms: duration of its decode.
        end_ms: its end, when all its tokens come out.
        scheduled: the computed tokens of each request, in order; a decode step is one token, with no prompt token.
        generated: the requests that generated a token in it, in order, without the sleeping ones.
        sleepers: number of sleeping requests, which also generate a token in each pass.
        tokens: the tokens of `generated`.
        bursts: number of tokens of each request that generated more than one, because drafts were accepted.
        admitted: the requests that it admitted, including resumed ones.
        preempted: the requests that it preempted, in order.
        finished: the requests that finished with it.
        rejected: the requests that it rejected, because their prompts can never fit.
        aborted: the called-off requests that had their last pass in it.
        active_blocks: blocks in use when its duration was calculated.
        running: number of requests that run after it.
        waiting: the requests that wait after it, in order, without the parked ones.
        decode_lengths: length in tokens of each request that it only decoded, before the new token.
        prefill_tokens: computed tokens of the requests whose prompts it computed in part.
        may_do_more: whether the input of the next pass has changed, even if this pass did nothing.
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
        """Record the tokens that a request has generated."""
        request.generated_tokens += len(tokens)
        self.generated.append(request)
        self.tokens += tokens
        if len(tokens) > 1:
            self.bursts[request] = len(tokens)

    def note_times(self) -> None:
        """Record the times of the tokens, once its end is known."""
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
        """Whether it took time or changed a request."""
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
        """Return it with the keys of Dynamo's forward pass metrics (`ForwardPassSnapshot`).

        A variance is the population's. A request that waits for its first admission counts as queued prefill, a
        preempted one as queued decode.

        Args:
            worker_id: the worker that ran it.
            dp_rank: the worker's rank.
            counter_id: number of the pass.
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
    """Return the variance of the population; 0 for an empty one."""
    if not values:
        return 0.0
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


class Scheduler(ABC):
    """Decides what each forward pass computes. The engine has the clock and the arrivals.

    Args:
        driver: connects its requests to the block manager.
        args: budgets, modes, times and speedups of the engine, and the release to model.

    Attributes:
        has_priorities: waiting requests are served by priority, the largest first.
        holds_back_prompts: only requests whose prompts are computed are admitted; for schedulers of decode engines.
        is_rank: its passes run in lock step with other ranks, and their driver calls `settle`.
        defers_prefills: its next pass computes prompts only if no request decodes.
        has_last_pass: a running request that is called off has one more pass, and returns the tokens computed by then.
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
        """Let running requests generate accepted drafts and one more token in each pass; None: one token."""
        self._accepted = accepted

    def _admitted(self, request: ScheduledRequest, now_ms: float, reused_tokens: int) -> None:
        """Record an admission with `reused_tokens` cached tokens.

        The first one also records the hits that a hybrid model cannot use.
        """
        if request.admitted_ms is None and self._powers.short is not None:
            request.lacking = self._powers.short(request.state)
        request.admit(now_ms, reused_tokens)

    def _next_tokens(self, request: ScheduledRequest) -> list[int]:
        """Return the tokens that a request generates in this pass."""
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
        """The waiting requests, in order, including preempted and partly computed ones."""
        return self._waiting

    @property
    def parked(self) -> Sequence[ScheduledRequest]:
        """The requests that wait for blocks from the host; they are tried again when the blocks have arrived."""
        return ()

    def submit(self, request: ScheduledRequest) -> None:
        """Add a request that has arrived."""
        self._waiting.append(request)

    def activate(self, request: ScheduledRequest) -> None:
        """Add a request whose prompt was computed by another engine and whose blocks are held here."""
        self.submit(request)

    def abort(self, request: ScheduledRequest) -> None:
        """Drop an open request, and free its blocks (a waiting one may hold some); full blocks stay cached."""
        self._queue_of(request).remove(request)
        self._driver.free(request.state, done=True)
        request.status = "aborted"

    def _queue_of(self, request: ScheduledRequest) -> MutableSequence[ScheduledRequest]:
        """Return the queue in which an open request runs or waits."""
        return self._running if request.status == "running" else self._waiting

    def call_off(self, request: ScheduledRequest) -> bool:
        """Handle an open request whose client has left, between two passes.

        Returns:
            Whether the request has ended; if not, its next pass is its last one.
        """
        # vLLM: `Scheduler.finish_requests` frees the request; dynamo-mocker: `drop_request` frees all its blocks.
        self.abort(request)
        return True

    def preempt_all(self) -> None:
        """Preempt all running requests between two passes, and free their blocks; they wait in the same order."""
        self.wake_all()
        for request in reversed(self._running):
            self._driver.free(request.state, done=False)
            request.status, request.computed_tokens = "preempted", 0
            request.preemptions += 1
            self._waiting.appendleft(request)
        self._running.clear()

    def wake(self, request: ScheduledRequest) -> bool:  # noqa: ARG002 - most let no request sleep
        """Bring a sleeping request up to date: add the tokens that were only counted. Return whether it slept."""
        return False

    def wake_all(self) -> list[ScheduledRequest]:
        """Bring all requests up to date; return the sleeping ones."""
        return []

    def settle(self, passes: Sequence[ForwardPass], *, is_idle: bool) -> None:  # noqa: B027 - most have nothing to settle
        """Update the state that depends on the passes of all ranks of its worker.

        Args:
            passes: the passes that were run.
            is_idle: whether no rank has a request now.
        """

    @abstractmethod
    def execute_pass(self, now_ms: float) -> ForwardPass:
        """Run one forward pass that starts at `now_ms`; set its requests' `token_ms`, and publish its events."""

    @abstractmethod
    def plan(self, now_ms: float, until_ms: float) -> list[float]:
        """Return the ends of passes that only decode, touch no block, and start before `until_ms`.

        This changes nothing. The passes are alike: none has an event, a first token, or the end of a request. So a
        driver of several engines may skip to the last of them, or cut the list where a request arrives.

        Args:
            now_ms: start of the first pass.
            until_ms: no pass starts at this time or later.
        """

    @abstractmethod
    def run_plan(self, ends: list[float]) -> None:
        """Run planned passes, the first ones or all; only arrivals may have happened since the plan."""
