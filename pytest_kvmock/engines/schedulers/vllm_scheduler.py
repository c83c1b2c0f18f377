"""The scheduler of Dynamo's mock of vLLM: running requests first, then the waiting ones, first come, first served.

One subject: the forward pass, in the semantics of 1.2.1 and of 1.6.1.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
from pytest_kvmock.engines.schedulers.calendar import Calendar, DecodeTimes, place_of
from pytest_kvmock.engines.schedulers.performance import PolynomialModel, moments, rounded_ms
from pytest_kvmock.engines.schedulers.scheduler import ForwardPass, ScheduledTokens, Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_kvmock.engines.base.driver import BurstDriver, PoolSchedulerDriver, SchedulerDriver
    from pytest_kvmock.engines.base.host_time import HostTime, Waits
    from pytest_kvmock.engines.schedulers.args import MockEngineArgs
    from pytest_kvmock.values.acceptance import AcceptedDrafts

# Theory of operation
#
# A pass has a budget of tokens. Running requests take from it in their order; then waiting ones are admitted, unless
# the pass preempted a request. A request is scheduled for its remaining tokens, as far as the budget allows, and blocks
# are allocated for them. If blocks run short, the newest running request (or the oldest: "fifo") is preempted: it frees
# its blocks, keeps its generated tokens, and waits again, first in the queue. The next request of the same pass can
# already reuse the computed blocks. Then each completely computed request generates a token; it needs a block for the
# token, and preempts in the same way if there is none.
#
# 1.2.1: a manager may serve a part of a Use, so a request may get some of its blocks. A waiting request, too, preempts
# for the rest.
#
# 1.6.1: blocks are allocated all or nothing, and a waiting request never preempts: it is admitted if there are blocks
# for all its tokens, even if the budget computes fewer. On vLLM's pool a block is allocated in the pass that computes
# its first token, so no request is preempted while tokens come out. The first token of a request comes from its
# prefill; time of decode is charged for the other tokens, by the lengths. `Release` has a flag for each difference.
#
# Its driver either requests a plan before each pass, or inspects each pass. With plans, requests that only generate
# sleep until they are due (`calendar`): passes without a due request are planned, and other passes touch only the
# requests that are awake. Without plans no request sleeps.

_BLOCKED: Final = -1
_PREEMPTED: Final = -2


def _decodes(request: ScheduledRequest) -> bool:
    """Return whether the prompt of a running request is computed and held."""
    return request.computed_tokens >= request.prompt_tokens


class VllmScheduler(Scheduler):
    """Schedules requests like Dynamo's mock of vLLM.

    Args:
        driver: connects its requests to the block manager.
        args: budgets, modes, times and speedups of the engine, and the release to model.
        tiers: the time of the tiers below the device; None if there are none.

    Attributes:
        drops_last: whether, with drafts, the last block of a hit is computed again.
    """

    drops_last: ClassVar[bool] = True
    _driver: SchedulerDriver

    def __init__(
        self,
        driver: SchedulerDriver,
        args: MockEngineArgs,
        tiers: HostTime | None = None,
    ) -> None:
        super().__init__(driver, args)
        powers = self._powers
        if powers.pair is not None:
            from pytest_kvmock.engines.vllm.pairs.pair_time import PairTime

            tiers = cast("HostTime", PairTime(powers.pair, lambda: self._running))
        self._tiers = tiers
        self._parking = None if tiers is None else tiers.parking
        self._first_held: Callable[[], ScheduledRequest | None] | None = getattr(self._parking, "first", None)
        release = self._release = args.release
        self._whole = driver.admits_whole
        self._most_tokens = args.most_tokens or math.inf
        # The short cut for most requests of most passes, without checks of the room.
        self._step_inside = cast("PoolSchedulerDriver", driver).step_inside if release.last_token_free else None
        self._aggregated = args.worker_type == "aggregated"
        self._budget = args.max_num_batched_tokens or math.inf
        self._max_running = args.max_num_seqs or math.inf
        self._chunked = args.enable_chunked_prefill
        self._oldest_first = args.preemption_mode == "fifo"
        self._decodes = args.worker_type != "prefill"
        manager = driver.manager
        self._decode_times = DecodeTimes(
            args.performance, manager.num_blocks * manager.block_size, self._decode_speedup
        )
        self._calendar = Calendar()
        self._awake: list[ScheduledRequest] = []  # the running requests that do not sleep, in their order
        self._places = 0
        # All requests are awake in an unplanned pass if a host sees each step (a pair's engine does not), or if a
        # victim is taken from the front, which changes the turns of the others.
        self._naps = (tiers is not None and tiers.sees_each_step) or self._oldest_first
        # For an engine with several cache groups; other engines have no steps, and chunks of any length.
        groups = self._groups = powers.groups
        if groups is not None and args.max_num_batched_tokens:
            groups.limit_passes(args.max_num_batched_tokens)
        self._need: Callable[[Any, int], int] = driver.need if groups is None else groups.need_of_step
        # State of the current pass.
        self._pass = ForwardPass(0.0)
        self._used: dict[ScheduledRequest, int] = {}
        self._left = self._budget
        self._defers = False  # it computes no prompts
        self._left_nobody = False  # the last pass that computed prompts and preempted none left no request waiting

    @property
    def parked(self) -> Sequence[ScheduledRequest]:
        """The requests that wait for blocks from the host, or from another engine, in the order of their parking."""
        return () if self._parking is None else self._parking.requests

    @property
    def parking(self) -> Waits | None:
        """The object that keeps the parked requests; None if requests are never parked."""
        return self._parking

    def submit(self, request: ScheduledRequest) -> None:
        """Add a request that has arrived."""
        if not request.max_output_tokens:
            cast("PoolSchedulerDriver", self._driver).needs_no_output(request.state)  # as the release asks for
        super().submit(request)

    def activate(self, request: ScheduledRequest) -> None:
        """Add a request whose prompt was computed by another engine and whose blocks are held here."""
        super().activate(request)
        waiting = self._waiting
        at = len(waiting) - 1
        while at and waiting[at - 1].opened > request.opened:
            waiting[at - 1], waiting[at] = request, waiting[at - 1]
            at -= 1

    def preempt_all(self) -> None:
        """Preempt all running requests between two passes; none is scheduled as a decoding one."""
        super().preempt_all()
        self._awake.clear()

    def abort(self, request: ScheduledRequest) -> None:
        """Drop an open request, and free its blocks; transfers for a parked one end without effect."""
        if self._parking is None or request not in self._parking.requests:
            self.wake(request)
            if request.status == "running":
                self._awake.remove(request)
            super().abort(request)
            return
        self._parking.give_up(request)
        request.status = "aborted"

    # ---------------------------------------------------------------------------------------------- one pass

    def execute_pass(self, now_ms: float) -> ForwardPass:
        """Run one forward pass that starts at `now_ms`."""
        done = self._pass = ForwardPass(now_ms)
        self._used = {}
        self._left = self._budget
        self._defers = self.defers_prefills and self._left_nobody and any(map(_decodes, self._running))
        if self._calendar:
            self._wake_due()
            done.sleepers = len(self._calendar)
            self._left -= done.sleepers  # a token each
        tiers = self._tiers
        if tiers is not None:
            tiers.start_pass(max(now_ms, tiers.now))
            self._waiting.extendleft(reversed(tiers.parking.take_back()))
        if self._powers.begin_pass is not None:
            self._powers.begin_pass()
        self._schedule_running()
        if not done.preempted:
            self._admit()
        if self._powers.end_pass is not None:
            self._powers.end_pass()
        waits_ms = 0.0 if tiers is None else tiers.end_pass()
        done.prefill_ms = self._prefill_ms()
        self._decode()
        if self._powers.end_iteration is not None:
            self._powers.end_iteration()
        done.end_ms = (now_ms + waits_ms + done.prefill_ms) + done.decode_ms
        if tiers is not None and done.end_ms <= now_ms:
            deadline = tiers.parking.deadline
            if deadline is not None:
                done.end_ms = deadline
            done.may_do_more = done.may_do_more or tiers.may_do_more
        done.note_times()
        self._calendar.ran([done.end_ms])
        if not self._defers and not done.preempted:
            self._left_nobody = not self._waiting
        done.running = len(self._running)
        done.waiting = tuple(self._waiting)
        return done

    def _wake_due(self) -> None:
        """Wake the requests that are due in this pass, or all if others might leave a sleeping one without a token."""
        calendar = self._calendar
        self._wake_each(calendar.due(1))
        if self._naps or len(self._running) > self._budget or calendar.is_full:
            self.wake_all()
        elif calendar:
            last = self._running[-1]
            # A request that computes several tokens leaves less of the budget for the requests behind it.
            if any(each is not last and each.computed_tokens != len(each) - 1 for each in self._awake):
                self.wake_all()

    def wake(self, request: ScheduledRequest) -> bool:
        """Wake a request (`Scheduler.wake`), and all requests that are due."""
        calendar = self._calendar
        if request not in calendar:
            return False
        self._wake_each(calendar.due(0))
        if request in calendar:
            self._wake_each((request,))
        return True

    def _wake_each(self, requests: Sequence[ScheduledRequest]) -> None:
        # The last token of a sleep completes a block, and may draw a name from a source that all requests share, in the
        # order of passes and requests. So all due requests are woken together, before a pass in which others may draw.
        awake = self._awake
        for request in requests:
            self._catch_up(request)
            awake.append(request)
        if requests and len(awake) > len(requests):
            awake.sort(key=place_of)

    def wake_all(self) -> list[ScheduledRequest]:
        """Bring all requests up to date; return the sleeping ones."""
        found = self._calendar.sleepers
        for request in found:
            self._catch_up(request)
        if found:
            self._awake[:] = self._running
        return found

    def _catch_up(self, request: ScheduledRequest) -> None:
        missed = self._calendar.wake(request)
        if missed:
            self._generate_quietly(request, missed)

    def _generate_quietly(self, request: ScheduledRequest, ends: list[float]) -> None:
        """Add the tokens of passes that touch no block to a request, by the ends of the passes."""
        count = len(ends)
        self._driver.generate_quietly(request.state, request.next_tokens(count))
        request.generated_tokens += count
        request.computed_tokens += count
        request.token_ms += ends

    def _fall_asleep(self) -> None:
        """Let all requests sleep that are not due in the next pass."""
        awake: list[ScheduledRequest] = []
        for request in self._awake:
            generated = request.generated_tokens
            # One token is left to compute, and it is no prompt token (this would be prefill).
            if generated and request.computed_tokens == request.prompt_tokens + generated - 1:
                passes = request.max_output_tokens - generated - 1
                if passes > 0:
                    passes = min(passes, self._driver.quiet_tokens(request.state))
                    if passes > 0:
                        self._calendar.sleep(request, passes)
                        continue
            awake.append(request)
        self._awake = awake

    def _schedule_running(self) -> None:
        running, index = self._awake, 0
        while index < len(running) and self._left > 0:
            if self._schedule_decode(running[index]) or (self._defers and not _decodes(running[index])):
                index += 1
                continue
            outcome = self._schedule(running[index])
            if outcome == _BLOCKED:
                break
            if outcome != _PREEMPTED:
                index += 1

    def _schedule_decode(self, request: ScheduledRequest) -> bool:
        """Compute the last token of a running request; return False if more tokens, or the block for it, are missing.

        This is a short cut of `_schedule` without its checks, enough for most requests of most passes.
        """
        length = request.prompt_tokens + request.generated_tokens
        if request.computed_tokens != length - 1 or not request.generated_tokens:
            return False
        driver, state = self._driver, request.state
        step_inside = self._step_inside
        if (step_inside is None or not step_inside(state, length)) and (
            (self._whole and self._need(state, length) > driver.room()) or driver.allocate(state, length) < length
        ):
            return False
        request.computed_tokens = length
        self._used[request] = 1
        self._left -= 1
        self._pass.scheduled.append(ScheduledTokens(request, 1, 0, length - 1))
        return True

    def _admit(self) -> None:
        done, waiting, running, driver = self._pass, self._waiting, self._running, self._driver
        reports, deferred = self._powers.reports, list[ScheduledRequest]()
        while not done.preempted and waiting and len(running) < self._max_running:
            head = self._next_waiting()
            if self._parking is not None and head is not None:
                self._parking.land(head)
            if head is not None and self._rejects(head):
                waiting.remove(head)
                head.status = "rejected"
                done.rejected.append(head)
                continue
            if head is not None and reports is not None and not head.computed_tokens and self._left > 0:
                reports.report(head.state)  # at the look-up, even if the request finds no room
            if head is None or (self._whole and self._lacks_room(head)):
                break
            if self._parking is not None and (head.status == "waiting" or self._parking.parks_preempted):
                outcome = self._parking.park(head, driver.lookup(head.state), done.start_ms)
                if outcome in ("parked", "deferred"):
                    waiting.popleft()
                    if outcome == "deferred":
                        deferred.append(head)
                    continue
                if outcome == "blocked":
                    break
            used = self._schedule(head)
            if used == _BLOCKED:
                break
            waiting.remove(head)  # no longer the first if it preempted a request
            running.append(head)
            self._awake.append(head)
            self._places += 1
            head.place = self._places
            head.status = "running"
            done.admitted.append(head)
            if not used and not self._left:
                break
        waiting.extendleft(reversed(deferred))  # they keep their places

    def _next_waiting(self) -> ScheduledRequest | None:
        """Return the request to admit next: the first one, or the first whose prompt is computed or has arrived."""
        if not self.holds_back_prompts:
            return (self._first_held and self._first_held()) or self._waiting[0]
        return next((each for each in self._waiting if each.computed_tokens >= each.prompt_tokens), None)

    def _rejects(self, request: ScheduledRequest) -> bool:
        """Return whether this engine can never run a waiting request."""
        if request.prompt_tokens >= self._most_tokens:
            return True
        if not self._release.rejects_prompts or request.status != "waiting":
            return False
        manager = self._driver.manager
        if self._groups is None:
            needed = -(-request.prompt_tokens // manager.block_size)
        else:
            needed = self._groups.blocks_alone(request.state)
        return needed > manager.num_blocks

    def _lacks_room(self, request: ScheduledRequest) -> bool:
        """Return whether there are too few blocks to admit a waiting request."""
        return self._need_whole(request) > self._driver.room()

    def _need_whole(self, request: ScheduledRequest) -> int:
        """Count the blocks that a waiting request still needs for all its tokens."""
        if self._release.last_token_free and not request.computed_tokens:
            return cast("PoolSchedulerDriver", self._driver).need_whole(request.state)  # as above
        return self._need(request.state, len(request))

    def _schedule(self, request: ScheduledRequest) -> int:
        """Compute tokens of a request; return their number, or the reason for none."""
        driver, state, left = self._driver, request.state, self._left
        waits = request.status != "running"
        cached = driver.lookup(state) if not request.computed_tokens else 0
        start = request.computed_tokens + cached
        remaining = len(request) - start
        of_prompt = max(0, request.prompt_tokens - start)
        if of_prompt > left and not self._chunked:
            return _BLOCKED
        desired = min(remaining, left)
        if self._defers and waits and remaining > 1:
            return _BLOCKED
        if remaining and not desired:
            return _BLOCKED
        if self._groups is not None and desired:
            desired = self._groups.chunk_tokens(state, int(desired))
            if not desired:  # its chunk would end at a point from which no request can resume
                return _BLOCKED if waits else 0
        target = start + int(desired)
        while True:
            fits = not self._whole or self._need(state, target) <= driver.room()
            held = driver.allocate(state, target) if fits else 0
            if held >= target:
                request.computed_tokens = target
                break
            if held:
                request.computed_tokens = held
            victim = None if waits and self._whole else self._victim()
            if victim is None:
                break
            self._preempt(victim)
            if victim is request:
                return _PREEMPTED
        used = max(0, request.computed_tokens - start)
        if not used and remaining:
            return _BLOCKED
        if waits:
            found = cached if self._parking is None else max(cached, self._parking.landed_tokens(request))
            counted = found if self._release.counts_all_hits else min(found, request.prompt_tokens)
            self._admitted(request, self._pass.start_ms, counted)
        self._used[request] = used
        self._left -= used
        if used:
            self._pass.scheduled.append(ScheduledTokens(request, used, min(used, of_prompt), start))
        return used

    def _victim(self) -> ScheduledRequest | None:
        running = self._running
        if not running:
            return None
        return running[0] if self._oldest_first else running[-1]

    def _preempt(self, victim: ScheduledRequest) -> None:
        """Free the blocks of a running request; it waits again, first in the queue."""
        done = self._pass
        if self.wake(victim):
            done.sleepers -= 1
            self._used[victim] = 1
        self._driver.free(victim.state, done=False)
        self._running.remove(victim)
        self._awake.remove(victim)
        self._waiting.appendleft(victim)
        victim.status = "preempted"
        victim.computed_tokens = 0
        victim.preemptions += 1
        self._left += self._used.pop(victim, 0)
        done.scheduled = [each for each in done.scheduled if each.request is not victim]
        done.preempted.append(victim)

    def _prefill_ms(self) -> float:
        prefills = [each for each in self._pass.scheduled if each.prompt_tokens]
        count = len(prefills)
        if not count:
            return 0.0
        self._pass.prefill_tokens = sum(each.tokens for each in prefills)
        if not self._prefills:
            return 0.0
        prefix = sum(each.prefix_tokens for each in prefills)
        isl = prefix + sum(each.prompt_tokens for each in prefills)
        return rounded_ms(self._performance.prefill_ms(count, isl // count, prefix // count), self._speedup)

    # ---------------------------------------------------------------------------------------- passes in one go

    def plan(self, now_ms: float, until_ms: float) -> list[float]:
        """Return the ends of passes that only decode and start before `until_ms`; see `Scheduler.plan`."""
        # The length of a burst is unknown until it is drawn, and a prefill engine hands over after a token.
        if self._accepted is not None or not self._decodes:
            return []
        if self._parking is not None and not self._parking.is_quiet:
            return []
        self._fall_asleep()
        if now_ms >= until_ms or self._awake:
            return []
        count = self._quiet_passes()
        return self._decode_ends(now_ms, until_ms, count) if count > 0 else []

    def run_plan(self, ends: list[float]) -> None:
        """Run planned passes."""
        for request in self._awake:  # a caller has woken it since the plan
            self._generate_quietly(request, ends)
        self._calendar.ran(ends)

    def _quiet_passes(self) -> int:
        """Return the number of next passes that only decode the running requests, which all sleep."""
        running, waiting = self._running, self._waiting
        if not running or len(running) > self._budget:
            return 0
        if waiting and len(running) < self._max_running:
            head = (self._first_held and self._first_held()) or waiting[0]
            if self._powers.reports is not None and self._powers.reports.reports(head.state):
                return 0
            if not self._whole or self._rejects(head) or not self._lacks_room(head):
                return 0
        return self._calendar.quiet_passes

    def _decode_ends(self, now_ms: float, until_ms: float, count: int) -> list[float]:
        """Return the ends of the next `count` passes, which only decode; only those that start before `until_ms`."""
        manager, running, model = self._driver.manager, self._running, self._performance
        size = manager.block_size
        active, total = manager.num_active_blocks * size, manager.num_blocks * size
        length = self._calendar.tokens  # all sleep
        mean = length // len(running)
        if self._release.prefill_generates:
            lengths = range(length, length + count * len(running), len(running))
            return self._decode_times.ends(now_ms, until_ms, lengths)
        # This model ignores the mean length, which grows by a token a pass.
        if isinstance(model, PolynomialModel):
            step = rounded_ms(model.decode_ms(active, total, mean), self._decode_speedup)
            ends = moments(now_ms, step, count)
            del ends[1 + bisect_left(ends, until_ms) :]  # the first starts now, each other when the one before it ends
            return ends
        ends, end = [], now_ms
        while len(ends) < count and end < until_ms:
            end += rounded_ms(model.decode_ms(active, total, mean + len(ends)), self._decode_speedup)
            ends.append(end)
        return ends

    # ------------------------------------------------------------------------------------------------ decode

    def _decode(self) -> None:
        done, running, driver = self._pass, self._awake, self._driver
        bursts = None if self._accepted is None else self._powers.bursts
        if bursts is not None and self._accepted is not None:
            self._reserve_bursts(bursts, self._accepted.drafts)
        ready: list[ScheduledRequest] = []
        lengths: list[int] = []
        for request in running:
            generated = request.generated_tokens
            length = request.prompt_tokens + generated
            if request.computed_tokens >= length and generated < request.max_output_tokens:
                ready.append(request)
                lengths.append(length)
        done.active_blocks = driver.manager.num_active_blocks
        if not self._release.least_output:
            for request in [each for each in running if not each.max_output_tokens]:
                if request.computed_tokens >= request.prompt_tokens:
                    self._finish(request)
        if not ready and not done.sleepers:
            return
        prefilled = {each.request for each in done.scheduled if each.prompt_tokens}
        charged = lengths
        if prefilled and self._release.prefill_generates and self._aggregated and self._accepted is None:
            charged = [
                length
                for request, length in zip(ready, lengths, strict=True)
                if request.generated_tokens or request not in prefilled
            ]
        # Before any token is generated, because a user's own model may raise.
        decode_ms = 0.0
        if self._decodes and (charged or done.sleepers):
            decode_ms = self._decode_ms(sum(charged) + self._calendar.tokens, len(charged) + done.sleepers)
        for request in ready:
            if request.status != "running":  # preempted for a request before it
                continue
            tokens = self._next_tokens(request)
            if self._powers.generate_run is not None:
                self._powers.generate_run(request.state, tokens)
            else:
                tokens = self._generate(request, tokens)
            if tokens:
                request.computed_tokens += len(tokens) - 1  # drafts were computed when they were tried
                done.note_tokens(request, tokens)
                if request.generated_tokens == request.max_output_tokens:
                    self._finish(request)
        if bursts is not None:
            for request in ready:
                if request.status == "running":
                    bursts.release_burst(request.state)
        if done.has_generated:
            done.decode_ms = decode_ms
        if prefilled:
            lengths = [length for request, length in zip(ready, lengths, strict=True) if request not in prefilled]
        done.decode_lengths = lengths

    def accept_drafts(self, accepted: AcceptedDrafts | None) -> None:
        """Accept drafts (`Scheduler.accept_drafts`); Dynamo's mock of vLLM then drops the last block of a hit."""
        super().accept_drafts(accepted)
        if accepted is not None and self._powers.drop_last is not None:
            self._powers.drop_last(self.drops_last)

    def _reserve_bursts(self, bursts: BurstDriver, drafts: int) -> None:
        """Take blocks for the maximum burst of each request, before drafts are drawn; preempt if blocks are missing.

        Unused blocks are returned at the end of the pass (1.6.1, by its recorded replays).
        """
        for request in list(self._running):
            left = request.max_output_tokens - request.generated_tokens
            if not left or request.computed_tokens < request.prompt_tokens + request.generated_tokens:
                continue
            while request.status == "running" and not bursts.reserve_burst(request.state, min(1 + drafts, left)):
                self._preempt_one()

    def _generate(self, request: ScheduledRequest, tokens: list[int]) -> list[int]:
        """Append tokens to a request, each with the block that it needs; return the tokens that found room."""
        for at, token in enumerate(tokens):
            while not self._driver.generate(request.state, token):
                self._preempt_one()
                if request.status != "running":
                    return tokens[:at]
        return tokens

    def _preempt_one(self) -> None:
        """Preempt the next victim, to make room for a running request."""
        victim = self._victim()
        assert victim is not None  # at least the request that needs room is running
        self._preempt(victim)

    def _finish(self, request: ScheduledRequest) -> None:
        if not request.keeps_blocks:
            self._driver.free(request.state, done=True)
        self._running.remove(request)
        self._awake.remove(request)
        request.status = "finished"
        self._pass.finished.append(request)

    def _decode_ms(self, tokens: int, count: int) -> float:
        """Return the duration of a decode step of `count` requests with `tokens` tokens in total."""
        manager = self._driver.manager
        if self._release.prefill_generates:
            return self._decode_times.ms(tokens, count)
        size = manager.block_size
        active, total = self._pass.active_blocks * size, manager.num_blocks * size
        return rounded_ms(self._performance.decode_ms(active, total, tokens // count), self._decode_speedup)


make_scheduler = VllmScheduler
"""The scheduler of every release on vLLM's blocks; see `SchedulerSpec`."""
