"""The queues of free blocks: one a level and priority, of which the lowest is evicted from first."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from pytest_kvmock.engines.trtllm.cache_block import DEFAULT_PRIORITY, CacheBlock


class FreeQueues:
    """Free blocks of both levels, used or cached before or not (`LRUEvictionPolicy`).

    Args:
        levels: the blocks of each, in the order in which they are taken first.

    Attributes:
        now: the time by which priorities expire, in ms.
        free: how many blocks of each level are free.
    """

    __slots__ = ("_expiring", "_queues", "free", "now")

    def __init__(self, levels: Sequence[Sequence[CacheBlock]]) -> None:
        self.now = 0.0
        self._queues: list[dict[int, OrderedDict[int, CacheBlock]]] = [{} for _ in levels]
        self._expiring: list[tuple[float, int, CacheBlock]] = []
        self.free = [0 for _ in levels]
        for blocks in levels:
            for block in blocks:
                self.release(block)

    def first(self, level: int) -> CacheBlock:
        """The oldest free block of the lowest priority of a level, which has one."""
        queues = self._queues[level]
        return next(iter(queues[min(queues)].values()))

    def claim(self, block: CacheBlock, priority: int | None = None, duration: float | None = None) -> None:
        """Take a block out of its queue, if it is free, with a duration and, if one is given, a priority."""
        if block.is_free:
            self._leave(block)
        if priority is not None:
            block.priority = priority
        block.duration, block.expires = duration, None

    def release(self, block: CacheBlock) -> None:
        """Put a block at the end of the queue of its level and priority; what has a duration expires after it."""
        block.is_free = True
        self._queues[block.level].setdefault(block.priority, OrderedDict())[block.id] = block
        self.free[block.level] += 1
        if block.duration is not None and block.priority != DEFAULT_PRIORITY:
            block.expires = self.now + block.duration
            heapq.heappush(self._expiring, (block.expires, block.id, block))

    def _leave(self, block: CacheBlock) -> None:
        block.is_free = False
        queues = self._queues[block.level]
        queue = queues[block.priority]
        del queue[block.id]
        if not queue:
            del queues[block.priority]
        self.free[block.level] -= 1

    def refresh(self) -> None:
        """Move what has expired to the end of the queue of the default priority."""
        while self._expiring and self._expiring[0][0] <= self.now:
            expires, _, block = heapq.heappop(self._expiring)
            if block.expires == expires:  # if not, it was claimed since then
                self._leave(block)
                block.priority, block.expires = DEFAULT_PRIORITY, None
                self.release(block)

    def order(self, level: int) -> Iterator[CacheBlock]:
        """The free blocks of a level, in the order in which they are evicted."""
        queues = self._queues[level]
        return (block for priority in sorted(queues) for block in queues[priority].values())
