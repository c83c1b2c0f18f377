"""Schedulers of TensorRT-LLM: Dynamo's mock in 1.6.1, and TensorRT-LLM's own, on V1 with two policies, and on V2.

One subject: admission by the room in the cache. TensorRT-LLM's own schedulers follow its sources; these were not run.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable, Iterator
from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from pytest_kvmock.engines.base.driver import SuspendingDriver
from pytest_kvmock.engines.base.manager import protocol_mismatch
from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
from pytest_kvmock.engines.schedulers.scheduler import ScheduledTokens
from pytest_kvmock.engines.schedulers.vllm_scheduler import VllmScheduler

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.driver import CapacityDriver, CountingDriver, PoolSchedulerDriver, SchedulerDriver
    from pytest_kvmock.engines.base.host_time import HostTime
    from pytest_kvmock.engines.schedulers.args import MockEngineArgs

# Theory of operation
#
# Dynamo's mock of 1.6.1 is its mock of vLLM with `guaranteed_no_evict`: a waiting request is admitted only if there are
# blocks for all tokens that it and the running requests may still generate, so no request is preempted. A request ends
# at the maximum length that fits (`Release.length_fits_blocks`). A prompt that is completely cached is reused
# completely: none of it is computed, and its first token takes time of decode.
#
# TensorRT-LLM's own schedulers keep requests in the order of arrival, which a pause does not change.
#
# Capacity. GUARANTEED_NO_EVICT takes the generating requests, each with the blocks that it needs to its end, then the
# other requests in order, as long as their blocks fit. MAX_UTILIZATION takes requests in order, each with the blocks of
# its next step. If a request does not fit, the last started one, down to this request, is paused, and no request behind
# the paused one is considered; if no such request is started, the pass takes no more. In both policies hits count as
# needed blocks, and a prompt waits if another request of the pass computes its first new block.
#
# Micro batch (`MicroBatchScheduler`): the requests with room, as far as the budget of a pass allows. Paused requests
# are freed before any request gets blocks; prompts get blocks before generating requests.
#
# On V2 (`KVCacheV2Scheduler`) there is one policy, MAX_UTILIZATION, and pages are taken immediately. Generating
# requests come first, in order. If one has no room, the last started request behind it gives way, and finally the
# request itself. Then come prompts, behind their hits. If one has no room, one started request that this pass has not
# computed gives way, and no other prompt is considered.
#
# A request that gives way is suspended: its pages move to a lower level, and it continues once they are back. If there
# is no lower level, or no running request is left, it is closed as on V1, and comes back as a prompt of all its tokens:
# the sources do not say what happens in this case.

_place = attrgetter("opened")


class TrtllmScheduler(VllmScheduler):
    """Schedules requests like Dynamo's mock of TensorRT-LLM.

    Args:
        driver: connects its requests to the block manager.
        args: budgets, modes, times and speedups of the engine, and the release to model.
        tiers: the time of the tiers below the device; None if there are none.
    """

    drops_last: ClassVar[bool] = False

    def __init__(self, driver: SchedulerDriver, args: MockEngineArgs, tiers: HostTime | None = None) -> None:
        super().__init__(driver, args, tiers)
        longest = args.most_tokens
        assert longest is not None, "its release fits lengths to blocks"
        self._longest: int = longest

    def submit(self, request: ScheduledRequest) -> None:
        """Add a request that has arrived; all of its prompt may be cached."""
        cast("PoolSchedulerDriver", self._driver).needs_no_output(request.state)
        super().submit(request)

    def _lacks_room(self, request: ScheduledRequest) -> bool:
        """Return whether it and the running requests need more blocks until their ends than are free.

        Hits that a request holds already need no block; a block that several running requests share counts for each.
        """
        driver, size = self._driver, self._driver.manager.block_size
        held = -(-len(request) // size) - self._need_whole(request)
        missing = self._blocks_to_completion(request) - held
        for each in self._running:
            missing += self._blocks_to_completion(each) - -(-each.computed_tokens // size)
        return missing > driver.room()

    def _blocks_to_completion(self, request: ScheduledRequest) -> int:
        """Return the number of blocks of a request at its end, shared blocks included.

        It ends at its last output token, or at the maximum length.
        """
        tokens = min(request.prompt_tokens + request.max_output_tokens, self._longest)
        return -(-tokens // self._driver.manager.block_size)


class _Part(NamedTuple):
    """The part of a prompt that a pass will compute: its tokens of the budget, before hits are known."""

    request: ScheduledRequest
    remaining: int
    tokens: int

    @property
    def is_last(self) -> bool:
        return self.tokens == self.remaining


def generates(request: ScheduledRequest) -> bool:
    """Return whether only the last generated token of a request is left to compute."""
    computed = request.computed_tokens
    return request.status == "running" and request.generated_tokens > 0 and computed == len(request) - 1


class CapacityScheduler(VllmScheduler):
    """Schedules requests like TensorRT-LLM on V1, by GUARANTEED_NO_EVICT or MAX_UTILIZATION.

    Args:
        driver: connects its requests to the block manager.
        args: budgets, modes, times and speedups of the engine, and its policy.
        tiers: the time of the tiers below the device; None if there are none.
    """

    _driver: CapacityDriver

    def __init__(self, driver: CapacityDriver, args: MockEngineArgs, tiers: HostTime | None = None) -> None:
        super().__init__(driver, args, tiers)
        self._pauses = bool(args.release.pauses)
        self._in_turns = args.context_chunking_policy == "equal_progress"
        self._naps = True  # the choice of requests for a token considers all of them

    # -------------------------------------------------------------------------------------------------- the order

    def _in_order(self, running: Iterable[ScheduledRequest]) -> Iterator[ScheduledRequest]:
        """Yield running and waiting requests in the order of arrival; reject one that can never run at its turn."""
        for request in merge(running, [*self._waiting], key=_place):
            if request.status == "waiting" and self._rejects(request):
                self._waiting.remove(request)
                request.status = "rejected"
                self._pass.rejected.append(request)
            else:
                yield request

    def _start(self, request: ScheduledRequest, found: int) -> None:
        """Move a waiting request to the running ones, and record its admission."""
        self._waiting.remove(request)
        insort(self._running, request, key=_place)
        insort(self._awake, request, key=_place)
        request.place = request.opened
        request.status = "running"
        self._admitted(request, self._pass.start_ms, min(found, request.prompt_tokens))
        self._pass.admitted.append(request)

    def _preempt(self, victim: ScheduledRequest) -> None:
        """Pause a request: it waits at its place, and comes back as a prompt of all its tokens."""
        super()._preempt(victim)
        waiting = self._waiting
        waiting.popleft()
        waiting.insert(sum(each.opened < victim.opened for each in waiting), victim)

    # ---------------------------------------------------------------------------------------------------- capacity

    def _named(self) -> set[Hashable]:
        """Return the blocks that prompts in progress compute next."""
        parts = (each for each in self._running if not generates(each))
        return {self._driver.first_new_block(each.state) for each in parts} - {None}

    def _new_block(self, request: ScheduledRequest) -> Hashable | None:
        """Return the first block that a request without blocks would compute; None if none, or if it has blocks."""
        return None if request.status == "running" else self._driver.first_new_block(request.state)

    def _guaranteed(self) -> list[ScheduledRequest]:
        """Return the requests that have room to their ends (`GuaranteedNoEvictScheduler`)."""
        driver, most = cast("CountingDriver", self._driver), self._max_running
        running, named = self._running, self._named()
        fitting = [each for each in running if generates(each)]
        free = driver.free_blocks()
        for each in fitting:
            free = _less(free, driver.blocks_to_completion(each.state, self._final(each)))
        for request in self._in_order([each for each in running if not generates(each)]):
            if len(fitting) >= most:
                break
            block = self._new_block(request)
            if block is not None and block in named:
                continue
            left = _less(free, driver.blocks_to_completion(request.state, self._final(request)))
            if min(left) < 0:
                break
            free = left
            fitting.append(request)
            named.add(block)
        return fitting

    @staticmethod
    def _final(request: ScheduledRequest) -> int:
        return request.prompt_tokens + request.max_output_tokens

    def _max_utilization(self) -> list[ScheduledRequest]:
        """Return the requests that have room for their next step; pause the last started ones for them if needed.

        TensorRT-LLM: `MaxUtilizationScheduler`.
        """
        driver, most = cast("CountingDriver", self._driver), self._max_running
        started, named = [*self._running], self._named()
        fitting: list[ScheduledRequest] = []
        paused: list[ScheduledRequest] = []
        free, taken = driver.free_blocks(), [0 for _ in driver.free_blocks()]
        for request in self._in_order([*started]):
            if paused and request.opened >= paused[-1].opened:
                break
            block = self._new_block(request)
            if block is not None and block in named:
                continue
            needed = driver.blocks_of_step(request.state)
            while len(fitting) >= most or min(_less(_less(free, taken), needed)) < 0:
                if not started or started[-1].opened < request.opened:
                    break
                paused.append(started.pop())
                free = driver.free_blocks([each.state for each in paused])
                if paused[-1] is request:
                    break
            else:
                fitting.append(request)
                taken = [one + other for one, other in zip(taken, needed, strict=True)]
                named.add(block)
                continue
            break
        for victim in paused:
            self._preempt(victim)
        return fitting

    # ------------------------------------------------------------------------------------------------- micro batch

    def _micro_batch(self, fitting: Iterable[ScheduledRequest]) -> tuple[list[_Part], list[ScheduledRequest]]:
        """Return the parts of prompts that fit into the budget, in order, and the generating requests."""
        left: float = self._budget
        parts: list[_Part] = []
        steps: list[ScheduledRequest] = []
        for request in fitting:
            if len(parts) + len(steps) >= self._max_running:
                break
            is_step = generates(request)
            remaining = len(request) - request.computed_tokens
            if (is_step or not self._chunked) and remaining > left:
                break
            if is_step:
                steps.append(request)
            else:
                parts.append(_Part(request, remaining, remaining))
            if is_step or not self._chunked:
                left -= remaining
        is_cut = self._chunked and sum(each.remaining for each in parts) > left
        if is_cut:
            share = self._equal_progress if self._in_turns else self._first_come
            parts = [each for each in share(parts, int(left)) if each.tokens]
        adapter = self._driver.adapter
        parts.sort(key=lambda each: (is_cut and each.is_last, adapter(each.request.state)))
        steps.sort(key=lambda each: adapter(each.state))
        return parts, steps

    def _first_come(self, parts: Iterable[_Part], left: int) -> Iterator[_Part]:
        """Give each part the rest of the budget; a cut part has whole blocks."""
        size = self._driver.manager.block_size
        for part in parts:
            tokens = part.remaining if part.remaining <= left else left // size * size
            left -= tokens
            yield part._replace(tokens=tokens)

    def _equal_progress(self, parts: Iterable[_Part], left: int) -> list[_Part]:
        """Give each part a block in turn, as long as the budget has a block for one of them."""
        size, found = self._driver.manager.block_size, [part._replace(tokens=0) for part in parts]
        goes_on = True
        while goes_on and left > 0:
            goes_on = False
            for place, part in enumerate(found):
                more = min(size, part.remaining - part.tokens)
                if 0 < more <= left:
                    found[place] = part._replace(tokens=part.tokens + more)
                    left -= more
                    goes_on = True
        return found

    # ---------------------------------------------------------------------------------------------------- one pass

    def _schedule_running(self) -> None:
        """Run both stages, then compute the chosen requests: first prompts, then generating ones."""
        fitting = self._max_utilization() if self._pauses else self._guaranteed()
        parts, steps = self._micro_batch(fitting)
        for part in parts:
            self._compute(part)
        for request in steps:
            self._schedule_decode(request)

    def _admit(self) -> None:
        """Admit no further request."""

    def _compute(self, part: _Part) -> None:
        """Compute a part of a prompt behind its hits, which are known now; it ends with a block, or with the prompt."""
        request, tokens = part.request, part.tokens
        is_first = request.status != "running"
        found = self._driver.lookup(request.state) if is_first else 0
        start = request.computed_tokens + found
        upto = min(start + tokens, len(request))
        if upto < len(request):
            upto -= upto % self._driver.manager.block_size
        if self._driver.allocate(request.state, upto) >= upto:
            self._computed(request, start, upto, found)

    def _computed(self, request: ScheduledRequest, start: int, upto: int, found: int) -> None:
        """Record the computed part of a prompt that has its blocks."""
        if request.status != "running":
            self._start(request, found)
        request.computed_tokens = upto
        used = upto - start
        self._pass.scheduled.append(
            ScheduledTokens(request, used, min(used, max(0, request.prompt_tokens - start)), start)
        )

    def _quiet_passes(self) -> int:
        """Return the number of next passes that decode every running request; 0 while a request waits."""
        return 0 if self._waiting or len(self._running) > self._max_running else super()._quiet_passes()


class SuspendingScheduler(CapacityScheduler):
    """Schedules requests like TensorRT-LLM on V2.

    Args:
        driver: connects its requests to the block manager.
        args: budgets, modes, times and speedups of the engine.
        tiers: the time of the tiers below the device; None if there are none.
    """

    _driver: SuspendingDriver

    def __init__(self, driver: SuspendingDriver, args: MockEngineArgs, tiers: HostTime | None = None) -> None:
        super().__init__(driver, args, tiers)
        self._done: set[ScheduledRequest] = set()

    def _schedule_running(self) -> None:
        """Compute the generating requests, then prompts."""
        self._done = set()
        if self._generate_all():
            self._take_prompts()

    @property
    def _is_full(self) -> bool:
        return self._left < 1 or len(self._done) >= self._max_running

    def _generate_all(self) -> bool:
        """Compute a token of each generating request; return False if one has no room and none is left to give way."""
        for request in [each for each in self._running if generates(each)]:
            if self._is_full or request.status != "running":
                return False
            while not self._schedule_decode(request):
                if not self._make_way([each for each in self._running if each.opened >= request.opened], request):
                    return False
            self._done.add(request)
        return True

    def _make_way(self, started: list[ScheduledRequest], asking: ScheduledRequest) -> bool:
        """Let the last of these requests that this pass has not computed give way.

        Return False if there is none, or if it is the asking request.
        """
        driver = self._driver
        idle = [each for each in started if each not in self._done]
        active = [each for each in idle if not driver.is_suspended(each.state)]
        if not active and [asking] == idle:
            return False
        victim = (active or idle)[-1]
        if driver.suspend(victim.state):
            victim.preemptions += 1
            self._pass.preempted.append(victim)
        else:
            self._preempt(victim)
        return victim is not asking

    def _take_prompts(self) -> None:
        named, size = self._named(), self._driver.manager.block_size
        for request in self._in_order([each for each in self._running if not generates(each)]):
            if self._is_full:
                break
            block = self._new_block(request)
            if block is not None and block in named:
                continue
            found = 0 if request.status == "running" else self._driver.lookup(request.state)
            start = request.computed_tokens + found
            tokens = len(request) - start
            if tokens > self._left:
                if not self._chunked:
                    break
                tokens = int(self._left) // size * size
            if not tokens:
                continue
            if not self._driver.place(request.state, start + tokens):
                others = [each for each in self._running if each is not request]
                if any(each not in self._done for each in others):
                    self._make_way(others, request)
                break
            self._computed(request, start, start + tokens, found)
            self._left -= tokens
            self._done.add(request)
            named.add(block)

    def plan(self, now_ms: float, until_ms: float) -> list[float]:
        """Plan passes (`VllmScheduler.plan`); none while a request is suspended."""
        if any(self._driver.is_suspended(each.state) for each in self._running):
            return []
        return super().plan(now_ms, until_ms)


def _less(blocks: list[int], other: list[int]) -> list[int]:
    return [one - each for one, each in zip(blocks, other, strict=True)]


def make_scheduler(driver: Any, args: MockEngineArgs, tiers: HostTime | None) -> VllmScheduler:
    """Return a scheduler for a release: Dynamo's mock, or TensorRT-LLM's own on V1 or V2."""
    if args.release.pauses is None:
        return TrtllmScheduler(driver, args, tiers)
    if protocol_mismatch(driver, SuspendingDriver) is None:  # V2 has one policy, used for any other
        return SuspendingScheduler(driver, args, tiers)
    return CapacityScheduler(driver, args, tiers)
