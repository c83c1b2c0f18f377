"""TensorRT-LLM's own scheduler over V2 (`KVCacheV2Scheduler`): pages are taken as it goes, and who gives way is suspended.

As read in its sources; it did not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_kvmock.engine.capacity_scheduler import CapacityScheduler, generates

if TYPE_CHECKING:
    from pytest_kvmock.engine.clock import Clock
    from pytest_kvmock.engine.driver import SuspendingDriver
    from pytest_kvmock.engine.scheduler import ScheduledRequest, SchedulerArgs

# Theory of operation
#
# There is one policy, MAX_UTILIZATION. Those that generate come first, in order; one without room has the last started behind it
# give way, and in the end itself. Then prompts, behind their hits; one without room has one started request give way that this pass
# has not computed, and no other prompt is looked at.
#
# Who gives way is suspended: its pages fall, and it runs on once they are back. Where they could fall nowhere, as there is no level
# below, or where nobody is left who runs, it is closed as by V1, and comes back as a prompt of all its tokens: the sources that were
# read do not say what is done then.


class SuspendingScheduler(CapacityScheduler):
    """Schedules requests as TensorRT-LLM does over V2.

    Args:
        driver: brings its requests to the block manager.
        args: budgets, modes, times and speedups of the engine.
        tiers: the time of the tiers below the device; None: there are none.
    """

    _driver: SuspendingDriver

    def __init__(self, driver: SuspendingDriver, args: SchedulerArgs, tiers: Clock | None = None) -> None:
        super().__init__(driver, args, tiers)
        self._done: set[ScheduledRequest] = set()

    def _schedule_running(self) -> None:
        """Those that generate, then prompts."""
        self._done = set()
        if self._generate_all():
            self._take_prompts()

    @property
    def _is_full(self) -> bool:
        return self._left < 1 or len(self._done) >= self._max_running

    def _generate_all(self) -> bool:
        """Compute a token of each that generates; False: one has no room, and nobody is left to give way."""
        for request in [each for each in self._running if generates(each)]:
            if self._is_full or request.status != "running":
                return False
            while not self._schedule_decode(request):
                if not self._make_way([each for each in self._running if each.opened >= request.opened], request):
                    return False
            self._done.add(request)
        return True

    def _make_way(self, started: list[ScheduledRequest], asking: ScheduledRequest) -> bool:
        """Have the last of these that this pass has not computed give way; False: that is nobody, or who asks."""
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

    def _decode_passes(self) -> int:
        """How many passes from now on decode every running request; none while one is suspended."""
        if any(self._driver.is_suspended(each.state) for each in self._running):
            return 0
        return super()._decode_passes()
