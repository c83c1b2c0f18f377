"""`multi_lru`: evict blocks of low frequency first; among these, the one that became inactive longest ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from pytest_kvmock.engines.base.eviction_policy import EvictionPolicy, Slot
from pytest_kvmock.engines.base.manager_base import check_num_blocks
from pytest_kvmock.engines.dynamo.eviction.tinylfu import Place, TinyLfu

THRESHOLDS: Final = (3, 8, 15)
"""Counts from which a block is warm, hot and very hot; below the first it is cold (kvbm-logical's default)."""

_LEVELS: Final = tuple(sum(count >= threshold for threshold in THRESHOLDS) for count in range(16))
_SLACK = 1024  # stale entries allowed before a lane is cleaned


class _Lane:
    """One of several queues that share the slots of a manager, each slot in one of them at a time.

    Args:
        lane: number of this queue, from 0.
        lanes: number of queues.
    """

    # Each insertion adds an entry to the queue; the entry at the front has the number `_first`. An entry counts while
    # `slot.place` is its number, so removals need no search. Each lane has its share of the numbers 1, 2, 3 and so on.
    # (`lru` has only one queue, and so can count a slot's entries instead, which is quicker.)

    def __init__(self, lane: int, lanes: int) -> None:
        self._queue: deque[Slot] = deque()
        self._lane = lane
        self._step = lanes
        self._first = self._next = 1 + lane
        self._limit = _SLACK

    def insert(self, slots: Sequence[Slot]) -> None:
        """Append these slots: they are evicted last."""
        number, step, append = self._next, self._step, self._queue.append
        for slot in slots:
            slot.place = number
            number += step
            append(slot)
        self._next = number

    def tidy(self) -> None:
        """If there are many stale entries, drop them and number the others again."""
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
        """Drop all slots; numbers are not reused, so no old entry counts."""
        self._queue.clear()
        self._first = self._next

    def order(self) -> list[Slot]:
        """Return the slots, from the one inserted longest ago."""
        first, step = self._first, self._step
        return [slot for i, slot in enumerate(self._queue) if slot.place == first + i * step]


class MultiLruPolicy(EvictionPolicy):
    """Four queues by frequency, the coldest first; in each, least recently inserted first (`MultiLruBackend`).

    A `TinyLfu` counts lineage hashes: one for a registration, two for the reuse of an inactive block, one for a match
    of an active block by another name. A use of an active block by its own name counts nothing. A block gets its level
    when it becomes inactive, and keeps it while inactive, even if its counters change. Counters outlive the eviction of
    a block and the clearing of the cache.

    So a block can outlive its parent: a parent that stays active is not counted again while the blocks below it are
    reused.

    Args:
        num_blocks: capacity of the manager; it sets the size of the tracker.

    Raises:
        ValueError: `num_blocks` is not a positive integer.
    """

    # The counters of a slot's lineage hash are found when it is registered, and kept in `slot.above`; `slot.place`
    # belongs to the queues. Counters are read only when a block becomes inactive, which never happens inside a Use. So
    # one `evict` and one `_on_register` can handle all new blocks of a Use.

    def __init__(self, num_blocks: int) -> None:
        self._tracker = TinyLfu(check_num_blocks(num_blocks))
        self._queues = [_Lane(level, 4) for level in range(4)]

    def _on_register(self, slots: Sequence[Slot], places: Sequence[Any] | None = None) -> None:  # noqa: ARG002 - never given
        """Count the slots' lineage hashes once."""
        found = self._tracker.places([slot.plh for slot in slots])
        for slot, place in zip(slots, found, strict=True):
            slot.above = place
        self._tracker.count(found)

    def _on_touch(self, slot: Slot) -> None:
        """Count the slot's lineage hash once more."""
        self._tracker.count((slot.above,))

    def insert(self, slots: Sequence[Slot]) -> None:
        """Append these slots to the queues of their levels."""
        counters = self._tracker.counters
        levels: list[list[Slot]] = [[], [], [], []]
        for slot in slots:
            first, second, third, fourth = slot.above
            least = counters[first]  # the tracker's `estimate`; min() takes twice the time
            if (count := counters[second]) < least:
                least = count
            if (count := counters[third]) < least:
                least = count
            if (count := counters[fourth]) < least:
                least = count
            levels[_LEVELS[least]].append(slot)
        for queue, of_level in zip(self._queues, levels, strict=True):
            if of_level:
                queue.insert(of_level)

    def remove(self, slots: Sequence[Slot]) -> None:
        """Remove the slots: they are in use. Each lineage hash counts twice."""
        # The real manager first looks for a block among the active ones, and counts because it finds the registration.
        # Then it finds the block inactive, and counts again.
        places: list[Place] = []
        for slot in slots:
            slot.place = 0
            places += (slot.above, slot.above)
        self._tracker.count(places)
        for queue in self._queues:
            queue.tidy()

    def _wake_run(self, slots: Sequence[Slot]) -> None:
        """Remove the slots; only the first one's lineage hash counts twice, because only it was looked up among the
        active blocks.
        """
        self.remove(slots[:1])
        for slot in slots[1:]:
            slot.place = 0
        self._tracker.count([slot.above for slot in slots[1:]])

    def evict(self, count: int) -> list[Slot]:
        """Choose slots from the coldest level on; within a level, those inserted longest ago."""
        chosen: list[Slot] = []
        for queue in self._queues:
            chosen += queue.evict(count - len(chosen))
            if len(chosen) == count:
                break
        return chosen

    def clear(self) -> None:
        """Drop all slots; the counters stay."""
        for queue in self._queues:
            queue.clear()

    def order(self) -> list[Slot]:
        """Return the inactive slots level by level, each from the one inserted longest ago."""
        return [slot for queue in self._queues for slot in queue.order()]
