"""`lru`: the block that became inactive longest ago goes first, whatever stands before or after it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from pytest_kvmock.cache.pool import Slot


class LruPolicy:
    """Least recently inserted first (kvbm-logical, `LruBackend`).

    A chain that is freed root first is evicted root first, and so loses its head before its tail. A block that is
    reused and freed again counts as new; that it is looked at or matched while active changes nothing.
    """

    finds_by_place = False
    collisions = 0

    def __init__(self) -> None:
        self._slots: OrderedDict[Slot, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def register(self, slot: Slot) -> None:
        """Nothing to note."""

    def touch(self, slot: Slot) -> None:
        """Nothing to note."""

    def insert(self, slot: Slot) -> None:
        """The slot is the last to go now."""
        self._slots[slot] = None

    def remove(self, slot: Slot) -> None:
        """The slot is in use."""
        del self._slots[slot]

    def evict(self) -> Slot | None:
        """Choose the slot that was inserted longest ago."""
        return self._slots.popitem(last=False)[0] if self._slots else None

    def find(self, plh: int) -> Slot | None:  # noqa: ARG002 - never asked
        """A slot answers to its own lineage hash only."""
        return None

    def refused(self, slots: Iterable[Slot]) -> Slot | None:  # noqa: ARG002 - never asked
        """Every slot can be inserted."""
        return None

    def order(self) -> list[Slot]:
        """From the one inserted longest ago."""
        return list(self._slots)
