"""The scheduler of Dynamo's mock of TensorRT-LLM in 1.6.1: that of its mock of vLLM, which admits by completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from pytest_kvmock.schedulers.vllm_scheduler import VllmScheduler

if TYPE_CHECKING:
    from pytest_kvmock.drivers.driver import PoolSchedulerDriver, SchedulerDriver
    from pytest_kvmock.schedulers.host_time import HostTime
    from pytest_kvmock.schedulers.scheduler import ScheduledRequest, SchedulerArgs

# Theory of operation
#
# `guaranteed_no_evict`: a waiting request is admitted only where blocks for all that it and the running ones may still
# generate are there, so that nobody is preempted. A request ends where the longest does that fits at all
# (`Release.length_fits_blocks`). A prompt that is cached whole is taken whole: nothing of it is computed, and its first
# token takes time of decode.


class TrtllmScheduler(VllmScheduler):
    """Schedules requests as Dynamo's mock of TensorRT-LLM does.

    Args:
        driver: brings its requests to the block manager.
        args: budgets, modes, times and speedups of the engine, and the release that it follows.
        tiers: the time of the tiers below the device; None: there are none.
    """

    drops_last: ClassVar[bool] = False

    def __init__(self, driver: SchedulerDriver, args: SchedulerArgs, tiers: HostTime | None = None) -> None:
        super().__init__(driver, args, tiers)
        longest = args.most_tokens
        assert longest is not None, "its release fits lengths to blocks"
        self._longest: int = longest

    def submit(self, request: ScheduledRequest) -> None:
        """Take a request that has arrived; all of its prompt may be cached."""
        cast("PoolSchedulerDriver", self._driver).needs_no_output(request.state)
        super().submit(request)

    def _lacks_room(self, request: ScheduledRequest) -> bool:
        """Whether it and the running requests need more blocks until they end than nobody has.

        Hits that somebody holds count as had; a block that several running requests share is counted for each of them.
        """
        driver, size = self._driver, self._driver.manager.block_size
        held = -(-len(request) // size) - self._need_whole(request)
        missing = self._blocks_to_completion(request) - held
        for each in self._running:
            missing += self._blocks_to_completion(each) - -(-each.computed_tokens // size)
        return missing > driver.room()

    def _blocks_to_completion(self, request: ScheduledRequest) -> int:
        """Blocks of a request when it ends, whoever else has some of them.

        It ends at its last token of output, or at the longest length that there is.
        """
        tokens = min(request.prompt_tokens + request.max_output_tokens, self._longest)
        return -(-tokens // self._driver.manager.block_size)
