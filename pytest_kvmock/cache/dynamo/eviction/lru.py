"""`lru`: the block that became inactive longest ago goes first, whatever stands before or after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from pytest_kvmock.cache.dynamo.eviction.policy import Slot

_SLACK = 1024  # entries that do not count, before the queue is cleaned


class LruPolicy:
    """Least recently inserted first (kvbm-logical, `LruBackend`).

    A chain that is freed root first is evicted root first, and so loses its head before its tail. A block that is
    reused and freed again counts as new; that it is looked at or matched while active changes nothing.
    """

    # A slot stands in the queue once for each time it was inserted, `slot.place` times by now; its last entry counts while
    # it is inactive, which `slot.above` says. So `remove` need not look for it.

    finds_by_place = False
    collisions = 0

    def __init__(self) -> None:
        self._queue: deque[Slot] = deque()
        self._limit = _SLACK

    def register(self, slots: Sequence[Slot], places: Sequence[Any] | None = None) -> None:
        """Nothing to note."""

    def touch(self, slot: Slot) -> None:
        """Nothing to note."""

    def insert(self, slots: Sequence[Slot]) -> None:
        """These slots are the last to go now."""
        for slot in slots:
            slot.place += 1
            slot.above = True
        self._queue += slots

    def insert_one(self, slot: Slot) -> None:
        """The same for one slot."""
        self.insert((slot,))

    def remove(self, slots: Sequence[Slot]) -> None:
        """The slots are in use."""
        for slot in slots:
            slot.above = False
        if len(self._queue) > self._limit:
            self._clean()

    def _clean(self) -> None:
        """Drop the entries that do not count."""
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
        """No slot is left."""
        for slot in self._queue:
            slot.place, slot.above = 0, False
        self._queue.clear()

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
        newest = dict.fromkeys(slot for slot in reversed(self._queue) if slot.above)
        return list(newest)[::-1]
