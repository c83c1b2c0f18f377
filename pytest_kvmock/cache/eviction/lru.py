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

    Args:
        lane: several of these can share the slots of one manager, each slot in one of them at a time: which this is,
            from 0.
        lanes: how many there are.
    """

    # A slot stands in the queue once for each time it was inserted; the entry at the front was number `_first`. An entry
    # counts while `slot.place` is its number; so `remove` need not look for it. Numbers are 1, 2, 3 and so on, or each
    # lane's share of them.

    finds_by_place = False
    collisions = 0

    def __init__(self, lane: int = 0, lanes: int = 1) -> None:
        self._queue: deque[Slot] = deque()
        self._lane = lane
        self._step = lanes
        self._first = self._next = 1 + lane
        self._limit = _SLACK

    def register(self, slots: Sequence[Slot], places: Sequence[Any] | None = None) -> None:
        """Nothing to note."""

    def touch(self, slot: Slot) -> None:
        """Nothing to note."""

    def insert(self, slots: Sequence[Slot]) -> None:
        """These slots are the last to go now."""
        number, step, append = self._next, self._step, self._queue.append
        for slot in slots:
            slot.place = number
            number += step
            append(slot)
        self._next = number

    def insert_one(self, slot: Slot) -> None:
        """The slot is the last to go now."""
        slot.place = self._next
        self._next += self._step
        self._queue.append(slot)

    def remove(self, slots: Sequence[Slot]) -> None:
        """The slots are in use."""
        for slot in slots:
            slot.place = 0
        self.tidy()

    def tidy(self) -> None:
        """If there are many entries that do not count, drop them and number the others anew."""
        if len(self._queue) > self._limit:
            slots = self.order()
            self._queue.clear()
            self._first = self._next = 1 + self._lane
            self.insert(slots)
            self._limit = 2 * len(slots) + _SLACK

    def evict(self, count: int) -> list[Slot]:
        """Choose the slots that were inserted longest ago."""
        queue, number, step = self._queue, self._first, self._step
        chosen: list[Slot] = []
        while queue and len(chosen) < count:
            slot = queue.popleft()
            if slot.place == number:
                slot.place = 0
                chosen.append(slot)
            number += step
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
        first, step = self._first, self._step
        return [slot for i, slot in enumerate(self._queue) if slot.place == first + i * step]
