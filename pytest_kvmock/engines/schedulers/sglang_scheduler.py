"""The scheduler on SGLang's own cache: it reserves room for a request's output at admission, and may retract it later.

One subject: the forward pass on a radix cache, where prompts and output share a pass (`semantics="mixed"`).
"""

from __future__ import annotations

import math
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
from pytest_kvmock.engines.schedulers.performance import rounded_ms
from pytest_kvmock.engines.schedulers.scheduler import ForwardPass, ScheduledTokens, Scheduler

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.driver import PageBurstDriver, RadixSchedulerDriver
    from pytest_kvmock.engines.base.host_time import HostTime
    from pytest_kvmock.engines.schedulers.args import MockEngineArgs

# Theory of operation
#
# The scheduler counts tokens. A waiting request is admitted if free and evictable pages have room for its prompt, its
# whole output, and a share of the outstanding output of each running request. The share, `ratio`, shrinks with each
# pass. Prompts are computed in chunks of whole pages; a request with a remaining chunk waits again, as the first one.
# All running requests generate a token in each pass. If pages run short, the request with the fewest generated tokens
# is retracted: its pages are freed, it waits again, and the ratio is reset.
#
# Budgets, ratio and order are those of the SGLang mock in Dynamo before 1.6. That mock had its own cache; here the
# cache is SGLang's, with its priorities.
#
# A running request that is called off is marked. The pass that computes its next token ends it like any finished
# request (SGLang: `abort_request` sets `to_finish`); a retraction before that keeps the mark.

LPM_FALLBACK: Final = 128
"""With more waiting requests than this, they are not sorted by their longest cached prefix."""

IN_BATCH_TOKENS: Final = 32
"""A request with at most this number of cached tokens yields to an earlier one that begins with the same tokens.

The number of compared tokens is rounded up to whole pages. A shorter request yields to no other."""

INIT_RATIO: Final = 0.7
"""Initial share of outstanding output that is reserved for running requests; multiplied by the conservativeness."""

MIN_RATIO: Final = 0.14
"""The minimum share, as a factor of the initial one."""

DECAY_PASSES: Final = 600
"""Number of passes in which the share falls from the initial to the minimum value."""


class SglangScheduler(Scheduler):
    """Schedules requests on SGLang's cache; its passes compute prompts, and decode all other requests.

    `max_num_batched_tokens`, `enable_chunked_prefill` and `preemption_mode` have no effect. A decode worker charges no
    prefill. Unlike the mock of vLLM, a prefill worker charges the decode of its one token.

    Args:
        driver: connects its requests to the cache.
        args: budgets, modes, times and speedups of the engine.
        tiers: the time of the tiers below the device; None if there are none.
    """

    has_priorities = True
    has_last_pass = True
    _charges_hits = True  # the model also predicts the time of a prefill without new tokens

    _driver: RadixSchedulerDriver

    def __init__(self, driver: RadixSchedulerDriver, args: MockEngineArgs, tiers: HostTime | None = None) -> None:
        super().__init__(driver, args)
        self._tiers = tiers
        options = args.sglang_options
        self._lpm = options.schedule_policy == "lpm"
        self._most_prefill = _given(options.max_prefill_tokens)
        self._chunk = _given(options.chunked_prefill_size)
        self._clip = _given(options.clip_max_new_tokens)
        self._init_ratio = INIT_RATIO * _given(options.schedule_conservativeness)
        self._min_ratio = MIN_RATIO * self._init_ratio
        self._decay = (self._init_ratio - self._min_ratio) / DECAY_PASSES
        self._ratio = self._init_ratio
        self._max_running = args.max_num_seqs or math.inf
        self._page = driver.manager.block_size
        self._capacity = driver.manager.num_blocks * self._page
        self._prioritised = False
        self._called_off: set[ScheduledRequest] = set()

    def submit(self, request: ScheduledRequest) -> None:
        """Add a request that has arrived."""
        super().submit(request)
        if self._tiers is not None:
            self._tiers.arrive(request.state)
        self._prioritised |= self.has_priorities and bool(request.priority)

    def abort(self, request: ScheduledRequest) -> None:
        """Drop an open request, and free its blocks."""
        self._called_off.discard(request)
        super().abort(request)

    def call_off(self, request: ScheduledRequest) -> bool:
        """Handle an open request whose client is gone: a running one has one more pass, a waiting one is taken out.

        The computed part of a prompt between two chunks is freed without a checkpoint
        (`process_pending_chunked_abort`).
        """
        if request.status == "running":
            self._called_off.add(request)
            return False
        self._called_off.discard(request)
        self._take_out(request)
        return True

    def _take_out(self, request: ScheduledRequest) -> None:
        """Drop an open request, and free its blocks without caching any."""
        self._queue_of(request).remove(request)
        self._driver.free(request.state, done=False)
        request.status = "aborted"

    # ---------------------------------------------------------------------------------------------- one pass

    def execute_pass(self, now_ms: float) -> ForwardPass:
        """Run one forward pass that starts at `now_ms`."""
        done, tiers = ForwardPass(now_ms), self._tiers
        if tiers is not None:
            tiers.start_pass(now_ms)
        self._order()
        self._admit(done)
        self._start(done)
        self._charge_prefill(done)
        self._retract(done)
        if self._running:
            done.active_blocks = self._driver.manager.num_active_blocks
        self._decode(done)
        self._running = [request for request in self._running if request.status == "running"]
        done.end_ms = (now_ms + done.prefill_ms) + done.decode_ms
        if tiers is not None:
            tiers.end_pass()
            deadline = tiers.parking.deadline
            if deadline is not None and done.end_ms <= now_ms:  # it can do nothing before a copy is done
                done.end_ms = max(now_ms, deadline)
        done.note_times()
        self._waiting.extendleft(reversed(done.preempted))
        if done.preempted:
            self._ratio = self._init_ratio
        self._ratio = max(self._min_ratio, self._ratio - self._decay)
        done.running = len(self._running)
        done.waiting = tuple(self._waiting)
        return done

    def _order(self) -> None:
        """Put the waiting requests in the order in which they are tried."""
        waiting = self._waiting
        if self._lpm and 1 < len(waiting) <= LPM_FALLBACK:
            first = -(-IN_BATCH_TOKENS // self._page) * self._page
            seen: set[Any] = set()
            keys: dict[ScheduledRequest, tuple[bool, int]] = {}
            for request in waiting:
                matched = self._known(request)
                late = False
                if matched <= IN_BATCH_TOKENS and len(request) >= first:
                    beginning = _beginning(request.state.tokens, first)
                    late = beginning in seen
                    seen.add(beginning)
                keys[request] = late, -matched
            self._waiting = waiting = deque(sorted(waiting, key=keys.__getitem__))
        if self._prioritised:
            self._waiting = deque(sorted(waiting, key=lambda request: -request.priority))

    def _known(self, request: ScheduledRequest) -> int:
        """Return the number of cached tokens of a waiting request; this decides the order."""
        return self._driver.lookup(request.state)

    def _outstanding(self, request: ScheduledRequest) -> int:
        """Return the number of tokens that a request may still generate, up to the limit of reservations."""
        left: int = min(max(0, request.max_output_tokens - request.generated_tokens), self._clip)
        return left

    def _admit(self, done: ForwardPass) -> None:
        """Admit waiting requests, in order, as long as budgets and room suffice."""
        waiting, running, driver, page = self._waiting, self._running, self._driver, self._page
        if not waiting:
            return
        room = driver.unheld() - sum(self._outstanding(request) * self._ratio for request in running)
        budget, chunk = self._most_prefill, self._chunk
        seats = self._max_running - len(running)
        parking = None if self._tiers is None else self._tiers.parking
        deferred: list[ScheduledRequest] = []
        while waiting and len(done.scheduled) < seats:
            request = waiting[0]
            if parking is not None and parking.park(request, 0, done.start_ms) == "deferred":
                deferred.append(waiting.popleft())
                continue
            computed = request.computed_tokens
            full = len(request) - computed
            if not full:
                break
            tokens = full if full <= self._chunk else min(chunk // page * page, full)
            if not tokens:
                break
            charge = -(-tokens // page) * page
            reserved = self._outstanding(request) if tokens == full else 0
            if charge + reserved >= room or charge > budget or charge > chunk:
                break
            before = driver.prefill(request.state, computed + tokens)
            if before is None:  # no room after all
                self._ratio = self._init_ratio
                break
            waiting.popleft()
            self._note_chunk(done, request, computed + tokens, before)
            allocated = -(-(computed + tokens) // page) * page - -(-computed // page) * page
            room -= allocated + reserved
            budget -= charge
            chunk -= charge
            if chunk <= 0:
                break
        waiting.extendleft(reversed(deferred))

    def _note_chunk(self, done: ForwardPass, request: ScheduledRequest, upto: int, before: int) -> None:
        if not request.computed_tokens:
            done.admitted.append(request)
            if not request.admissions and self._powers.brought is not None:
                request.onboarded_tokens, request.fetched_tokens = self._powers.brought(request.state)
        request.computed_tokens = upto
        self._admitted(request, done.start_ms, before)
        of_prompt = max(0, min(upto, request.prompt_tokens) - before)
        done.scheduled.append(ScheduledTokens(request, upto - before, of_prompt, before))

    def _charge_prefill(self, done: ForwardPass) -> None:
        count = len(done.scheduled)
        done.prefill_tokens = sum(each.tokens for each in done.scheduled)
        if not count or not self._prefills:
            return
        prefix = sum(each.prefix_tokens for each in done.scheduled)
        isl = prefix + sum(each.tokens for each in done.scheduled)
        if not self._charges_hits and isl // count == prefix // count:
            return
        ms = self._performance.prefill_ms(count, isl // count, prefix // count)
        done.prefill_ms = rounded_ms(ms, self._speedup)

    def _start(self, done: ForwardPass) -> None:
        """Run requests that are completely computed; a partly computed one waits first."""
        for each in done.scheduled:
            request = each.request
            if request.computed_tokens < len(request):
                self._driver.checkpoint(request.state)
                self._waiting.appendleft(request)
            else:
                request.status = "running"
                self._running.append(request)

    # ------------------------------------------------------------------------------------------------ decode

    def _decode_ms(self, tokens: int, count: int) -> float:
        capacity = self._capacity
        ms = self._performance.decode_ms(min(tokens, capacity), capacity, tokens // count)
        return rounded_ms(ms, self._decode_speedup)

    def _retract(self, done: ForwardPass) -> None:
        """Retract running requests until the others can generate, or one is left."""
        running, driver = self._running, self._driver
        while len(running) > 1:
            if driver.unheld() >= self._step_tokens():
                return
            victim = min(running, key=lambda request: request.generated_tokens)
            running.remove(victim)
            driver.free(victim.state, done=False)
            victim.status = "preempted"
            victim.computed_tokens = 0
            victim.preemptions += 1
            done.preempted.append(victim)

    def _burst(self) -> tuple[PageBurstDriver, list[int]] | None:
        """Return the driver for several tokens a request, and the maximum for each running request.

        None without drafts, or if the driver cannot do this.
        """
        if self._accepted is None or self._powers.page_bursts is None:
            return None
        most = 1 + self._accepted.drafts
        bursts = [min(most, request.max_output_tokens - request.generated_tokens) for request in self._running]
        return self._powers.page_bursts, bursts

    def _step_tokens(self) -> int:
        """Count the unheld tokens that the next pass of the running requests needs."""
        states, burst = [request.state for request in self._running], self._burst()
        if burst is None:
            return self._driver.step_tokens(states)
        return burst[0].burst_pages(states, burst[1]) * self._page

    def _make_room(self) -> bool:
        """Evict until all running requests have room for the next pass; return False if this is not possible."""
        states, burst = [request.state for request in self._running], self._burst()
        return self._driver.make_room(states) if burst is None else burst[0].make_burst_room(states, burst[1])

    def _decode(self, done: ForwardPass) -> None:
        """Let each running request generate a token, or none of them if pages run short."""
        running, driver = self._running, self._driver
        prefilled = {each.request for each in done.scheduled if each.prompt_tokens}
        done.decode_lengths = [len(request) for request in running if request not in prefilled]
        if not running or not self._make_room():
            return
        done.active_blocks = driver.manager.num_active_blocks
        done.decode_ms = self._decode_ms(sum(map(len, running)), len(running))
        for request in running:
            self._generate_one(done, request)
        for request in running:
            if request in self._called_off:  # SGLang checks this first (`update_finish_state`)
                self._called_off.discard(request)
                self._driver.free(request.state, done=True)
                request.status = "aborted"
                done.aborted.append(request)
            elif request.generated_tokens == request.max_output_tokens:
                self._finish(done, request)

    def _generate_one(self, done: ForwardPass, request: ScheduledRequest) -> None:
        tokens = self._next_tokens(request)
        if self._powers.generate_run is not None and self._accepted is not None:
            self._powers.generate_run(request.state, tokens)
        else:
            for token in tokens:
                self._driver.generate(request.state, token)
        request.computed_tokens += len(tokens)
        done.note_tokens(request, tokens)
        if request.generated_tokens < request.max_output_tokens:
            self._driver.checkpoint(request.state)

    def _finish(self, done: ForwardPass, request: ScheduledRequest) -> None:
        if not request.keeps_blocks:
            self._driver.free(request.state, done=True)
        request.status = "finished"
        done.finished.append(request)

    # ------------------------------------------------------------------------------------------ in one go

    def plan(self, now_ms: float, until_ms: float) -> list[float]:
        """Return the ends of passes that only decode, touch no page, and start before `until_ms`."""
        running = self._running
        if self._waiting or not running or self._called_off or self._accepted is not None:
            return []
        if self._tiers is not None and not self._tiers.parking.is_quiet:
            return []
        states = [request.state for request in running]
        most = min(request.max_output_tokens - request.generated_tokens for request in running) - 1
        most = min(most, self._driver.quiet_passes(states))
        ends: list[float] = []
        tokens, count, end = sum(map(len, running)), len(running), now_ms
        while len(ends) < most and end < until_ms:
            end += self._decode_ms(tokens, count)
            ends.append(end)
            tokens += count
        return ends

    def run_plan(self, ends: list[float]) -> None:
        """Run planned passes."""
        for request in self._running:
            self._driver.generate_quietly(request.state, request.next_tokens(len(ends)))
            request.generated_tokens += len(ends)
            request.computed_tokens += len(ends)
            request.token_ms += ends
        for _ in repeat(None, len(ends)):
            if self._ratio == self._min_ratio:
                break
            self._ratio = max(self._min_ratio, self._ratio - self._decay)


def _given(value: float | None) -> Any:
    """Return an option whose default is filled in."""
    assert value is not None
    return value


def _beginning(tokens: Any, count: int) -> Any:
    """Return the beginning of a request: its first tokens, or, if unknown, its first pages' names and a length."""
    if tokens.tokens is not None:
        return tuple(tokens.tokens[:count])
    return tuple(tokens.names[: count // tokens.block_size]), min(count, len(tokens))
