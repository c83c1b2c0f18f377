"""The time of transfers in vLLM's native offload and of copies in SGLang's HiCache, sequential in each direction."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from pytest_kvmock.engines.base.bandwidth import Link
from pytest_kvmock.engines.vllm.host.offload_steps import OffloadPlan, OffloadTransfer

# Theory of operation
#
# A load begins with its step. A store begins with the next step, so that it does not delay sampling, or with this step
# if it is flushed. A step finds the transfers that are done by its time; it waits for flushed transfers, which lets
# time pass. With two batches in flight, the next step is scheduled before the results are known, and reports them.


class HasNumber(Protocol):
    """A job with a number."""

    @property
    def number(self) -> int:
        """The number of the job."""


Job = TypeVar("Job", bound=HasNumber)


class Direction(Generic[Job]):
    """The queue of transfers in one direction; the first is in flight.

    Args:
        gbps: bandwidth in GB/s; 0 is infinite.
    """

    def __init__(self, gbps: float) -> None:
        self._link = Link(gbps)
        self._queue: deque[tuple[Job, int]] = deque()

    def enter(self, job: Job, num_bytes: int, now: float) -> None:
        """Queue a transfer behind the others."""
        self._queue.append((job, num_bytes))
        if len(self._queue) == 1:
            self._link.start(now, num_bytes)

    def deadline(self) -> float | None:
        """Return when the next transfer is done; None if there is none."""
        return self._link.earliest()

    def finish(self, now: float) -> list[Job]:
        """Take out the transfers that are done by `now`; each begins when the previous one is done."""
        done: list[Job] = []
        while (earliest := self._link.earliest()) is not None and earliest <= now:
            self._link.advance(earliest)
            done.append(self._queue.popleft()[0])
            if self._queue:
                self._link.start(earliest, self._queue[0][1])
        return done

    def last_of(self, numbers: set[int], now: float) -> float:
        """Return when all of these transfers, and those queued before them, are done; `now` if none is queued here."""
        end = now
        copy, at = Link(self._link.gbps), self._link.earliest()
        for place, (job, num_bytes) in enumerate(self._queue):
            assert at is not None
            if place:
                copy.start(at, num_bytes)
                at = copy.earliest() or at
                copy.advance(at)
            if job.number in numbers:
                end = max(end, at)
        return end


class TimedCopies:
    """The transfers of one worker that are in flight or about to begin.

    Args:
        gbps: bandwidth of the link to the host and of the link back, in GB/s; 0 is infinite.
        block_bytes: bytes per block.
        reports_late: whether a step reports the transfers that the previous step found done.
    """

    def __init__(self, gbps: float, block_bytes: int, *, reports_late: bool = False) -> None:
        self._block_bytes = block_bytes
        self._reports_late = reports_late
        self._found: list[int] = []  # done, and not reported yet
        self._to_host: Direction[OffloadTransfer] = Direction(gbps)
        self._to_device: Direction[OffloadTransfer] = Direction(gbps)
        self._not_begun: list[OffloadTransfer] = []

    @property
    def waits_for_step(self) -> bool:
        """Whether transfers begin or are reported with the next step."""
        return bool(self._not_begun or self._found)

    def deadline(self) -> float | None:
        """Return when the next transfer that has begun is done; None if none has."""
        both = (self._to_host.deadline(), self._to_device.deadline())
        return min((each for each in both if each is not None), default=None)

    def step(self, plan: OffloadPlan, now: float) -> tuple[float, list[int]]:
        """Carry out the plan of a step.

        Args:
            plan: the plan.
            now: when the step begins, in ms.

        Returns:
            When all transfers that the step waits for are done, and the numbers of the reported transfers, in order.
        """
        flushed = [job for job in plan.stores if job.number in plan.flush]
        for job in (*self._not_begun, *flushed):
            self._to_host.enter(job, len(job.blocks) * self._block_bytes, now)
        self._not_begun = [job for job in plan.stores if job.number not in plan.flush]
        for job in plan.loads:
            self._to_device.enter(job, len(job.blocks) * self._block_bytes, now)
        awaited = plan.flush | {job.number for job in plan.loads if job.within_step}
        if awaited:
            now = max(self._to_host.last_of(awaited, now), self._to_device.last_of(awaited, now))
        done = [job.number for each in (self._to_host, self._to_device) for job in each.finish(now)]
        if self._reports_late:
            done, self._found = self._found, done
        return now, done
