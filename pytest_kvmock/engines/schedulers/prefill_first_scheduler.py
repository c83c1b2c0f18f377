"""The scheduler of Dynamo's mock of SGLang since 1.6: a pass either computes prompts or decodes, never both.

One subject: its forward pass; `sglang_scheduler` has the parts that it shares with the scheduler on SGLang's own cache.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.engines.base.driver import PagedSchedulerDriver
from pytest_kvmock.engines.base.manager import protocol_mismatch
from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
from pytest_kvmock.engines.schedulers.scheduler import ForwardPass, ScheduledTokens
from pytest_kvmock.engines.schedulers.sglang_scheduler import DECAY_PASSES, MIN_RATIO, SglangScheduler

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

    from pytest_kvmock.engines.base.host_time import HostTime
    from pytest_kvmock.engines.schedulers.args import MockEngineArgs

# Theory of operation
#
# A pass that admits a request decodes no running request. A request whose prompt the pass completes gets its first
# token from the prefill, at the end of the pass. Only computed tokens are charged against the budgets: a cached prefix
# is free. If pages run short in decode, requests are retracted to the end of the queue. The share of output that is
# reserved then follows from the progress of the remaining requests.
#
# After a pass that computed new tokens, `prefill_decode_interval` passes admit nothing.

RANK_CONSERVATIVENESS: Final = 0.3
"""Factor of the conservativeness of each rank if there are several (SGLang with data-parallel attention)."""

RETRACT_TOKENS: Final = 20
"""Expected number of tokens of each remaining request between two retractions (SGLang: `retract_decode_steps`)."""


class PrefillFirstScheduler(SglangScheduler):
    """Schedules requests like Dynamo's mock of SGLang in 1.6.1.

    Args:
        driver: connects its requests to the cache.
        args: budgets, modes, times and speedups of the engine.

    Raises:
        ValueError: a chunk is smaller than the number of ranks; each rank computes a part of it.
    """

    has_priorities = False
    has_last_pass = False
    _charges_hits = False

    _driver: PagedSchedulerDriver

    def __init__(self, driver: PagedSchedulerDriver, args: MockEngineArgs) -> None:
        super().__init__(driver, args)
        self._most_tokens = args.most_tokens or math.inf
        self._lpm &= args.enable_prefix_caching
        self._interval = args.prefill_decode_interval
        if args.dp_size > 1:  # data-parallel attention: SGLang divides both
            self._chunk //= args.dp_size
            if not self._chunk:
                raise ValueError(
                    f"sglang.chunked_prefill_size must be at least dp_size, {args.dp_size}, as each rank computes its "
                    "part"
                )
            self._init_ratio *= RANK_CONSERVATIVENESS
            self._min_ratio = MIN_RATIO * self._init_ratio
            self._decay = (self._init_ratio - self._min_ratio) / DECAY_PASSES
            self._ratio = self._init_ratio
        self._ready: deque[ScheduledRequest] = deque()
        self._wait = 0  # passes that admit nothing yet
        self._idle_since = math.inf

    def submit(self, request: ScheduledRequest) -> None:
        """Add a request that has arrived."""
        if not request.max_output_tokens:
            self._driver.needs_no_output(request.state)
        super().submit(request)

    @property
    def parked(self) -> Sequence[ScheduledRequest]:
        """The requests whose prompts were computed by another engine, and that do not run yet."""
        return self._ready

    def activate(self, request: ScheduledRequest) -> None:
        """Add a request whose prompt was computed by another engine and whose blocks are held here."""
        self._ready.append(request)

    def _queue_of(self, request: ScheduledRequest) -> MutableSequence[ScheduledRequest]:
        return self._ready if request in self._ready else super()._queue_of(request)

    def call_off(self, request: ScheduledRequest) -> bool:
        """Handle an open request whose client is gone: take it out, wherever it is.

        No more of its blocks are cached (`cancel_active_request` of aisimulate-core 0.13.0, Dynamo's mock of 1.6.1).
        """
        self._take_out(request)
        return True

    # ---------------------------------------------------------------------------------------------- one pass

    def execute_pass(self, now_ms: float) -> ForwardPass:
        """Run one forward pass that starts at `now_ms`."""
        done = ForwardPass(now_ms)
        if self._wait and now_ms > self._idle_since:  # without requests these passes took no time
            self._wait, self._ratio = 0, self._init_ratio
        ratio = self._ratio
        self._reject(done)
        self._run_ready(done)
        self._order()
        if not self._wait:
            self._admit(done)
        done.active_blocks = self._driver.manager.num_active_blocks
        if done.scheduled:
            try:
                self._charge_prefill(done)
            except BaseException:  # from a user's own model: the scheduled requests wait again
                self._waiting.extendleft(reversed([each.request for each in done.scheduled]))
                raise
            self._start(done)
        else:
            self._retract(done)
            self._decode(done)
            if not done.preempted:
                self._ratio = max(self._min_ratio, self._ratio - self._decay)
        self._running = [request for request in self._running if request.status == "running"]
        self._waiting.extend(done.preempted)
        done.may_do_more = self._ratio != ratio
        done.end_ms = (now_ms + done.prefill_ms) + done.decode_ms
        if not self.is_rank:
            self.settle((done,), is_idle=not (self._running or self._waiting or self._ready))
        done.note_times()
        done.running = len(self._running)
        done.waiting = tuple(self._waiting)
        return done

    def settle(self, passes: Sequence[ForwardPass], *, is_idle: bool) -> None:
        """Count down the passes without admission; reset the share if no request could run in one of them."""
        before = self._ratio, self._wait
        is_idle_pass = self._wait > 0 and not any(done.generated or done.decode_lengths for done in passes)
        if any(part.tokens for done in passes for part in done.scheduled):
            self._wait = self._interval
        else:
            self._wait = max(0, self._wait - 1)
        if is_idle_pass:
            self._ratio = self._init_ratio
        # If a pass took no time, further passes without duration come before a request that arrives at the same time.
        end = max(done.end_ms for done in passes)
        self._idle_since = math.inf if not is_idle else end if end > passes[0].start_ms else -math.inf
        if (self._ratio, self._wait) != before:
            for done in passes:
                done.may_do_more = True

    def _reject(self, done: ForwardPass) -> None:
        """Reject the waiting requests whose prompts are too long."""
        for request in [each for each in self._waiting if each.prompt_tokens >= self._most_tokens]:
            self._waiting.remove(request)
            request.status = "rejected"
            done.rejected.append(request)

    def _run_ready(self, done: ForwardPass) -> None:
        """Run the requests whose prompts were computed by another engine, as many as may run."""
        seats = self._max_running - len(self._running)
        while self._ready and seats > 0:  # a request without output also takes a seat in this pass
            seats -= 1
            request = self._ready.popleft()
            request.status = "running"
            self._admitted(request, done.start_ms, 0)
            done.admitted.append(request)
            if request.max_output_tokens:
                self._running.append(request)
            else:
                self._finish(done, request)

    def _known(self, request: ScheduledRequest) -> int:
        return self._driver.known(request.state)

    def _admit(self, done: ForwardPass) -> None:
        """Admit waiting requests, in order, as long as budgets and room suffice."""
        waiting, running, driver, page = self._waiting, self._running, self._driver, self._page
        room = driver.unheld() - sum(self._outstanding(request) * self._ratio for request in running)
        budget, chunk = self._most_prefill, self._chunk
        seats = self._max_running - len(running)
        while waiting and len(done.scheduled) < seats and not self.holds_back_prompts:
            request = waiting[0]
            start = request.computed_tokens or driver.lookup(request.state)
            left = len(request) - start
            tokens = left if self._pages(left) <= chunk else min(chunk // page * page, left)
            if left and not tokens:
                break
            charge = self._pages(tokens)
            reserved = self._outstanding(request) if tokens == left else 0
            if charge + reserved >= room or charge > budget or charge > chunk:
                break
            if driver.prefill(request.state, start + tokens) is None:  # no room after all
                break
            waiting.popleft()
            if not request.computed_tokens:
                done.admitted.append(request)
                self._admitted(request, done.start_ms, start)
            request.computed_tokens = start + tokens
            of_prompt = max(0, min(start + tokens, request.prompt_tokens) - start)
            done.scheduled.append(ScheduledTokens(request, tokens, of_prompt, start))
            room -= charge + reserved
            budget -= charge
            chunk -= charge
            if chunk <= 0:
                break

    def _pages(self, tokens: int) -> int:
        """Return a number of tokens, rounded up to whole pages."""
        return -(-tokens // self._page) * self._page

    def _start(self, done: ForwardPass) -> None:
        """Run requests that are completely computed, with their first token; a partly computed one waits first."""
        first: list[ScheduledRequest] = []
        for each in done.scheduled:
            request = each.request
            if request.computed_tokens < len(request):
                self._driver.checkpoint(request.state)
                self._waiting.appendleft(request)
                continue
            request.status = "running"
            self._running.append(request)
            first.append(request)
        goes_on = [each for each in first if each.max_output_tokens - each.generated_tokens > 1]
        fits = self._driver.make_room([request.state for request in goes_on])
        for request in first:
            if request.max_output_tokens - request.generated_tokens == 1:  # these also come first in the output
                token = request.next_token()
                self._driver.generate_last(request.state, token)
                done.note_tokens(request, (token,))
        accepted, self._accepted = self._accepted, None  # a prefill gives one token, without drafts
        for request in goes_on if fits else ():
            self._generate_one(done, request)
        self._accepted = accepted
        for request in sorted(first, key=lambda each: each.max_output_tokens > 0):  # requests without output first
            if request.generated_tokens >= request.max_output_tokens:
                self._finish(done, request)

    # ------------------------------------------------------------------------------------------------ decode

    def _retract(self, done: ForwardPass) -> None:
        """Retract as on SGLang's own cache; then set the reserved share of output from the remaining requests."""
        super()._retract(done)
        if done.preempted:
            running = self._running
            generated = sum(request.generated_tokens for request in running)
            most = sum(request.max_output_tokens for request in running)
            self._ratio = min(1.0, (generated + RETRACT_TOKENS * len(running)) / (most + 1))

    # ------------------------------------------------------------------------------------------ in one go

    def plan(self, now_ms: float, until_ms: float) -> list[float]:
        """Return the ends of passes that only decode; see `Scheduler.plan`."""
        return [] if self._ready else super().plan(now_ms, until_ms)

    def run_plan(self, ends: list[float]) -> None:
        """Run planned passes."""
        super().run_plan(ends)
        self._wait = max(0, self._wait - len(ends))


def make_scheduler(driver: Any, args: MockEngineArgs, tiers: HostTime | None) -> SglangScheduler:
    """Return a scheduler for a release: this one, or the one on SGLang's own cache.

    Raises:
        ValueError: the driver is for 1.6.1, but the release is not 1.6.1.
    """
    if args.release.prefills_first:
        return PrefillFirstScheduler(driver, args)
    if protocol_mismatch(driver, PagedSchedulerDriver) is None:
        raise ValueError(f"the backend {driver.manager.backend!r} is of 1.6.1, and its engine semantics='mixed'")
    return SglangScheduler(driver, args, tiers)
