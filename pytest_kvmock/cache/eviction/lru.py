"""`lru`: the block that became inactive longest ago goes first, whatever stands before or after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

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

    def register(self, slots: Sequence[Slot], places: Sequence[Any] | None = None) -> None:
        """Nothing to note."""

    def touch(self, slot: Slot) -> None:
        """Nothing to note."""

    def insert(self, slots: Sequence[Slot]) -> None:
        """These slots are the last to go now."""
        number, append = self._next, self._queue.append
        for slot in slots:
            slot.place = number
            number += 1
            append(slot)
        self._next = number

    def insert_one(self, slot: Slot) -> None:
        """The slot is the last to go now."""
        slot.place = self._next
        self._next += 1
        self._queue.append(slot)

    def remove(self, slots: Sequence[Slot]) -> None:
        """The slots are in use."""
        for slot in slots:
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

    def evict(self, count: int) -> list[Slot]:
        """Choose the slots that were inserted longest ago."""
        queue, number = self._queue, self._first
        chosen: list[Slot] = []
        while queue and len(chosen) < count:
            slot = queue.popleft()
            if slot.place == number:
                slot.place = 0
                chosen.append(slot)
            number += 1
        self._first = number
        return chosen

    def clear(self) -> None:
        """No slot is left; numbers go on, so that no old one counts."""
        self._queue.clear()
        self._first = self._next

    def find(self, plh: int) -> Slot | None:  # noqa: ARG002 - never asked
        """A slot answers to its own lineage hash only."""
        return None

    def free_places(self, plhs: Sequence[int]) -> Sequence[Any] | None:  # noqa: ARG002 - never asked
        """Slots have no places."""
        return None

    def refused(self, slots: Iterable[Slot]) -> Slot | None:  # noqa: ARG002 - never asked
        """Every slot can be inserted."""
        return None

    def order(self) -> list[Slot]:
        """From the one inserted longest ago."""
        return [slot for number, slot in enumerate(self._queue, self._first) if slot.place == number]
