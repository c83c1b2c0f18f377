"""The blocks of the host tier: a pool that evicts leaves first and refuses duplicates (`BlockManager<G2>`)."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvmock.engines.base.eviction_policy import Slot
from pytest_kvmock.engines.dynamo.eviction.lineage import LineagePolicy
from pytest_kvmock.engines.dynamo.pool import BlockPool


class HostPool:
    """Slots of the host, and the blocks in them. A block is active while it is pinned, else inactive and evictable.

    Args:
        total: number of slots, at least 1.
    """

    __slots__ = ("_num_inactive", "_policy", "_pool")

    def __init__(self, total: int) -> None:
        self._policy = LineagePolicy()
        self._pool = BlockPool(total, self._policy)
        self._num_inactive = 0

    def __contains__(self, plh: int) -> bool:
        return plh in self._pool.registered

    @property
    def total(self) -> int:
        """Number of slots."""
        return self._pool.total

    @property
    def available(self) -> int:
        """Number of slots that are empty, or hold a block that may be evicted."""
        return self._pool.reset_len + self._num_inactive

    @property
    def pinned(self) -> int:
        """Number of pinned blocks."""
        return len(self._pool.registered) - self._num_inactive

    def name_of(self, plh: int) -> int | None:
        """Return the sequence hash of a block; None if it is not held."""
        slot = self._pool.registered.get(plh)
        return None if slot is None else slot.name

    def blocks(self) -> list[Slot]:
        """Return the slots that hold a block."""
        return list(self._pool.registered.values())

    def allocate(self, count: int) -> tuple[list[Slot], list[int]] | None:
        """Take slots, all or none: empty ones first, then by eviction.

        Returns:
            The slots, and the lineage hashes of the evicted blocks, in order; None if there are too few slots.
        """
        if count > self.available:
            return None
        slots = self._pool.take_reset(count)
        victims = self._policy.evict(count - len(slots)) if len(slots) < count else []
        for slot in victims:
            del self._pool.registered[slot.plh]
        self._num_inactive -= len(victims)
        return slots + victims, [slot.plh for slot in victims]

    def register(self, slots: Sequence[Slot], names: Sequence[int], plhs: Sequence[int]) -> tuple[list[int], list[int]]:
        """Fill slots with all blocks of one transfer at once, so none of them is evicted for another.

        A block that is held already keeps its slot, and becomes the youngest; the second slot is given back.

        Returns:
            The lineage hashes of the new blocks, and of the new blocks that are lost again with their slots. A block
            is lost if another block has its place in the forest (position and fragment, with another parent); the
            original panics in this case. Chained hashes never cause it.
        """
        new: list[int] = []
        held: list[Slot] = []
        for slot, name, plh in zip(slots, names, plhs, strict=True):
            present = self._pool.registered.get(plh)
            if present is None:
                slot.name, slot.plh = name, plh
                self._pool.registered[plh] = slot
                self._policy._on_register((slot,))
                new.append(plh)
                present = slot
                slot.refs = 1
            else:
                self._pool.give_back(slot)
                self._pin(present)
            held.append(present)
        lost: list[int] = []
        for slot in held:
            if slot.refs == 1 and self._policy._first_refused((slot,)) is not None:
                lost.append(slot.plh)
                del self._pool.registered[slot.plh]
                self._policy._unregister(slot)
            else:
                self.release((slot,))
        return new, lost

    def match(self, plhs: Sequence[int]) -> list[Slot]:
        """Pin the longest prefix that `match_blocks` finds, and return its slots.

        This is a run of blocks that are pinned already, then a run of inactive blocks; a pinned block after these is
        not found.
        """
        registered = self._pool.registered
        found: list[Slot] = []
        for plh in plhs:
            slot = registered.get(plh)
            if slot is None or not slot.refs:
                break
            found.append(slot)
        for slot in found:
            self._pin(slot)
        for plh in plhs[len(found) :]:
            slot = self._policy._find(plh)
            if slot is None:
                break
            self._pin(slot)
            found.append(slot)
        return found

    def release(self, slots: Sequence[Slot]) -> None:
        """Drop one pin of each slot, in order."""
        for slot in slots:
            slot.refs -= 1
            if not slot.refs:
                self._policy.insert((slot,))
                self._num_inactive += 1

    def _pin(self, slot: Slot) -> None:
        if not slot.refs:
            self._policy.remove((slot,))
            self._num_inactive -= 1
        slot.refs += 1
