"""The time that transfers of vLLM's native offload, and copies of SGLang's HiCache, take: each direction one after
the other.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from pytest_kvmock.engines.base.bandwidth import Link
from pytest_kvmock.engines.vllm.host.offload_steps import OffloadPlan, OffloadTransfer

# Theory of operation
#
# A load begins with its step. A store begins with the next one, so as not to delay this one's sampling, or with this
# one if it is flushed. A step finds what is done by its time, and waits for what is flushed: that lets time pass. Where
# two batches are in flight, the next step is scheduled before that is known, and reports it.


class HasNumber(Protocol):
    """What has a number."""

    @property
    def number(self) -> int:
        """It."""


Job = TypeVar("Job", bound=HasNumber)


class Direction(Generic[Job]):
    """Transfers in one direction, the first of which is under way.

    Args:
        gbps: bandwidth in GB/s; 0 is infinite.
    """

    def __init__(self, gbps: float) -> None:
        self._link = Link(gbps)
        self._queue: deque[tuple[Job, int]] = deque()

    def enter(self, job: Job, num_bytes: int, now: float) -> None:
        """Put one behind the others."""
        self._queue.append((job, num_bytes))
        if len(self._queue) == 1:
            self._link.start(now, num_bytes)

    def deadline(self) -> float | None:
        """When the next one is done; None: there is none."""
        return self._link.earliest()

    def finish(self, now: float) -> list[Job]:
        """Take out what is done by a time; each begins when the one before it is done."""
        done: list[Job] = []
        while (earliest := self._link.earliest()) is not None and earliest <= now:
            self._link.advance(earliest)
            done.append(self._queue.popleft()[0])
            if self._queue:
                self._link.start(earliest, self._queue[0][1])
        return done

    def last_of(self, numbers: set[int], now: float) -> float:
        """When all of some transfers are done, with what is before them; the time, where none of them is here."""
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
    """The transfers of one worker that are under way, or about to begin.

    Args:
        gbps: bandwidth of the link to the host and of the link back, in GB/s; 0 is infinite.
        block_bytes: bytes of a block.
        reports_late: whether a step reports what the one before it has found done.
    """

    def __init__(self, gbps: float, block_bytes: int, *, reports_late: bool = False) -> None:
        self._block_bytes = block_bytes
        self._reports_late = reports_late
        self._found: list[int] = []  # and not reported yet
        self._to_host: Direction[OffloadTransfer] = Direction(gbps)
        self._to_device: Direction[OffloadTransfer] = Direction(gbps)
        self._not_begun: list[OffloadTransfer] = []

    @property
    def waits_for_step(self) -> bool:
        """Whether something begins, or is reported, with the next step."""
        return bool(self._not_begun or self._found)

    def deadline(self) -> float | None:
        """When the next transfer is done, of those that have begun; None: none has."""
        both = (self._to_host.deadline(), self._to_device.deadline())
        return min((each for each in both if each is not None), default=None)

    def step(self, plan: OffloadPlan, now: float) -> tuple[float, list[int]]:
        """Carry out what was planned for a step.

        Args:
            plan: what.
            now: when the step begins, in ms.

        Returns:
            When all that the step waits for is done, and the numbers of the transfers that it reports, in order.
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
