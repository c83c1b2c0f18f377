"""The queues of free blocks: one for each level and priority; the lowest priority is evicted first."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from pytest_kvmock.engines.trtllm.cache_block import DEFAULT_PRIORITY, CacheBlock


class FreeQueues:
    """Free blocks of both levels, new, used or cached ones (`LRUEvictionPolicy`).

    Args:
        levels: the blocks of each level, in the order in which they are first taken.

    Attributes:
        now: the present time for the expiry of priorities, in ms.
        free: number of free blocks of each level.
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
        """Return the oldest free block of the lowest priority of a level; the level must have a free block."""
        queues = self._queues[level]
        return next(iter(queues[min(queues)].values()))

    def claim(self, block: CacheBlock, priority: int | None = None, duration: float | None = None) -> None:
        """Take a block out of its queue if it is free; set its duration, and its priority if one is given."""
        if block.is_free:
            self._leave(block)
        if priority is not None:
            block.priority = priority
        block.duration, block.expires = duration, None

    def release(self, block: CacheBlock) -> None:
        """Put a block at the end of the queue of its level and priority; after its duration, the priority expires."""
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
        """Move blocks whose priority has expired to the end of the queue of the default priority."""
        while self._expiring and self._expiring[0][0] <= self.now:
            expires, _, block = heapq.heappop(self._expiring)
            if block.expires == expires:  # if not, the block was claimed in the meantime
                self._leave(block)
                block.priority, block.expires = DEFAULT_PRIORITY, None
                self.release(block)

    def order(self, level: int) -> Iterator[CacheBlock]:
        """Return the free blocks of a level, in the order of eviction."""
        queues = self._queues[level]
        return (block for priority in sorted(queues) for block in queues[priority].values())
