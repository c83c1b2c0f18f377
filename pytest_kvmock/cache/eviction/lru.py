"""`lru`: the block that became inactive longest ago goes first, whatever stands before or after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pytest_kvmock.cache.pool import Slot


class LruPolicy:
    """Least recently inserted first (kvbm-logical, `LruBackend`).

    A chain that is freed root first is evicted root first, and so loses its head before its tail. A block that is
    reused and freed again counts as new; that it is looked at or matched while active changes nothing.
    """

    # A slot stands in the queue once for each time it was inserted, and `slot.place` counts these entries. Only the
    # last one counts, and only while the slot is inactive; so `remove` need not look for it.

    finds_by_place = False
    collisions = 0

    def __init__(self) -> None:
        self._queue: deque[Slot] = deque()
        self._removed = 0  # since the queue was last cleaned

    def register(self, slot: Slot) -> None:
        """Nothing to note."""

    def touch(self, slot: Slot) -> None:
        """Nothing to note."""

    def insert(self, slot: Slot) -> None:
        """The slot is the last to go now."""
        slot.place += 1
        self._queue.append(slot)

    def remove(self, slot: Slot) -> None:  # noqa: ARG002 - its entry is void because it is active
        """The slot is in use."""
        self._removed += 1
        if self._removed > 1024 and self._removed > len(self._queue) // 2:
            self._clean()

    def _clean(self) -> None:
        slots = self.order()
        for slot in self._queue:
            slot.place = 0
        for slot in slots:
            slot.place = 1
        self._queue = deque(slots)
        self._removed = 0

    def evict(self) -> Slot | None:
        """Choose the slot that was inserted longest ago."""
        queue = self._queue
        while queue:
            slot = queue.popleft()
            slot.place -= 1
            if not slot.place and not slot.refs:
                return slot
        return None

    def find(self, plh: int) -> Slot | None:  # noqa: ARG002 - never asked
        """A slot answers to its own lineage hash only."""
        return None

    def refused(self, slots: Iterable[Slot]) -> Slot | None:  # noqa: ARG002 - never asked
        """Every slot can be inserted."""
        return None

    def order(self) -> list[Slot]:
        """From the one inserted longest ago."""
        newest_first = dict.fromkeys(slot for slot in reversed(self._queue) if not slot.refs)
        return list(newest_first)[::-1]
