"""`lru`: the block that became inactive longest ago goes first, whatever stands before or after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pytest_kvmock.cache.pool import Slot

_SLACK = 1024  # entries that do not count, before the queue is cleaned


class LruPolicy:
    """Least recently inserted first (kvbm-logical, `LruBackend`).

    A chain that is freed root first is evicted root first, and so loses its head before its tail. A block that is
    reused and freed again counts as new; that it is looked at or matched while active changes nothing.
    """

    # A slot stands in the queue once for each time it was inserted; the entry at the front was number `_first`. An entry
    # counts while `slot.place` is its number; so `remove` need not look for it.

    finds_by_place = False
    collisions = 0

    def __init__(self) -> None:
        self._queue: deque[Slot] = deque()
        self._first = 1
        self._next = 1
        self._limit = _SLACK

    def register(self, slot: Slot) -> None:
        """Nothing to note."""

    def touch(self, slot: Slot) -> None:
        """Nothing to note."""

    def insert(self, slot: Slot) -> None:
        """The slot is the last to go now."""
        slot.place = self._next
        self._next += 1
        self._queue.append(slot)

    def remove(self, slot: Slot) -> None:
        """The slot is in use."""
        slot.place = 0
        if len(self._queue) > self._limit:
            self._clean()

    def _clean(self) -> None:
        """Drop the entries that do not count, and number the others anew."""
        self._queue = deque(self.order())
        self._limit = 2 * len(self._queue) + _SLACK
        self._first = 1
        self._next = len(self._queue) + 1
        for number, slot in enumerate(self._queue, 1):
            slot.place = number

    def evict(self) -> Slot | None:
        """Choose the slot that was inserted longest ago."""
        queue = self._queue
        while queue:
            slot = queue.popleft()
            self._first += 1
            if slot.place == self._first - 1:
                slot.place = 0
                return slot
        return None

    def clear(self) -> None:
        """No slot is left; numbers go on, so that no old one counts."""
        self._queue.clear()
        self._first = self._next

    def find(self, plh: int) -> Slot | None:  # noqa: ARG002 - never asked
        """A slot answers to its own lineage hash only."""
        return None

    def refused(self, slots: Iterable[Slot]) -> Slot | None:  # noqa: ARG002 - never asked
        """Every slot can be inserted."""
        return None

    def order(self) -> list[Slot]:
        """From the one inserted longest ago."""
        return [slot for number, slot in enumerate(self._queue, self._first) if slot.place == number]
