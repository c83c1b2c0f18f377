"""`lru`: evict the block that became inactive longest ago, wherever it is in its chain."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pytest_kvmock.engines.base.eviction_policy import EvictionPolicy, Slot

_SLACK = 1024  # stale entries allowed before the queue is cleaned


class LruPolicy(EvictionPolicy):
    """Least recently inserted first (kvbm-logical, `LruBackend`).

    A chain that is freed root first is evicted root first, so it loses its head before its tail. A block that is reused
    and freed again counts as new. A look-up, or a match while the block is active, changes nothing.
    """

    # Each insertion adds an entry to the queue; `slot.place` is the number of a slot's entries. Its last entry counts
    # while the slot is inactive (`slot.above`). So `remove` needs no search.

    def __init__(self) -> None:
        self._queue: deque[Slot] = deque()
        self._limit = _SLACK

    def insert(self, slots: Sequence[Slot]) -> None:
        """Append these slots: they are evicted last."""
        for slot in slots:
            slot.place += 1
            slot.above = True
        self._queue += slots

    def remove(self, slots: Sequence[Slot]) -> None:
        """Remove the slots: they are in use."""
        for slot in slots:
            slot.above = False
        if len(self._queue) > self._limit:
            self._clean()

    def _clean(self) -> None:
        """Drop the stale entries."""
        slots = self.order()
        for slot in self._queue:
            slot.place = 0
        for slot in slots:
            slot.place = 1
        self._queue = deque(slots)
        self._limit = 2 * len(slots) + _SLACK

    def evict(self, count: int) -> list[Slot]:
        """Choose the slots that were inserted longest ago."""
        queue = self._queue
        chosen: list[Slot] = []
        while queue and len(chosen) < count:
            slot = queue.popleft()
            slot.place -= 1
            if not slot.place and slot.above:
                slot.above = False
                chosen.append(slot)
        return chosen

    def clear(self) -> None:
        """Drop all slots."""
        for slot in self._queue:
            slot.place, slot.above = 0, False
        self._queue.clear()

    def order(self) -> list[Slot]:
        """Return the inactive slots, from the one inserted longest ago."""
        newest = dict.fromkeys(slot for slot in reversed(self._queue) if slot.above)
        return list(newest)[::-1]
