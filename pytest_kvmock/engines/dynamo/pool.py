"""The physical blocks of a manager, empty or cached, and the effects of one Use on them.

kvbm-logical, `BlockManager`. A slot is in one of four states: *reset* (empty), *mutable* (held by a partial block),
*active* (registered under a lineage hash, and held) or *inactive* (registered, not held, evictable). The
eviction policy orders inactive slots only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from pytest_kvmock.engines.base.eviction_policy import EvictionPolicy, Slot
from pytest_kvmock.engines.base.manager_base import EventPublisher
from pytest_kvmock.values.events import BlockTokens, Removed, Stored


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """A snapshot of a pool's counters and gauges, by kvbm-logical's names.

    The first eleven are counters since the start, the last four are gauges. Counters of operations that a mock never
    does (scans, duplicates) are 0.
    """

    allocations: int
    allocations_from_reset: int
    evictions: int
    registrations: int
    registration_dedup: int
    duplicate_blocks: int
    stagings: int
    match_hashes_requested: int
    match_blocks_returned: int
    scan_hashes_requested: int
    scan_blocks_returned: int
    inflight_mutable: int
    inflight_immutable: int
    reset_pool_size: int
    inactive_pool_size: int


class BlockPool:
    """All slots of one manager, with the block in each. The manager keeps the holders of blocks.

    Attributes:
        total: number of slots.
        registered: the slot of each registered lineage hash, active or inactive.
        inactive: the eviction policy, which holds the inactive slots.
        unknown: registered slots without an entry in the manager; their eviction publishes no Removed.
    """

    __slots__ = (
        "_fresh",
        "_reset",
        "allocations_from_reset",
        "evictions",
        "inactive",
        "match_blocks_returned",
        "match_hashes_requested",
        "registered",
        "registrations",
        "total",
        "unknown",
    )

    def __init__(self, total: int, inactive: EvictionPolicy) -> None:
        self.total = total
        self.inactive = inactive
        self.registered: dict[int, Slot] = {}
        self.unknown: set[Slot] = set()
        # The reset pool is one queue, at first of slots 0 to total - 1. Slots that were never used are at its front and
        # are created when they are taken, so an idle manager costs nothing.
        self._fresh = 0
        self._reset: deque[Slot] = deque()
        self.allocations_from_reset = 0
        self.evictions = 0
        self.registrations = 0
        self.match_hashes_requested = 0
        self.match_blocks_returned = 0

    @property
    def reset_len(self) -> int:
        """Empty slots."""
        return self.total - self._fresh + len(self._reset)

    def take_reset(self, count: int) -> list[Slot]:
        """Take up to `count` empty slots from the front of the reset pool."""
        first = self._fresh
        self._fresh = min(first + count, self.total)
        slots = [Slot() for _ in range(first, self._fresh)]
        while self._reset and len(slots) < count:
            slots.append(self._reset.popleft())
        self.allocations_from_reset += len(slots)
        return slots

    def count_taken(self, count: int) -> int:
        """Take up to `count` empty slots without their numbers; return how many there were."""
        taken = min(count, self.total - self._fresh)
        self._fresh += taken
        self.allocations_from_reset += taken
        return taken

    def count_given_back(self, count: int) -> None:
        """Put back slots that were taken without their numbers."""
        self._fresh -= count

    def give_back(self, slot: Slot) -> None:
        """Put an emptied slot at the tail of the reset pool."""
        self._reset.append(slot)

    def match(self, plh: int) -> Slot | None:
        """Return the slot in which a lineage hash is cached, active or inactive; nothing changes."""
        slot = self.registered.get(plh)
        return self.inactive._find(plh) if slot is None else slot

    def name_to_publish(self, victim: Slot) -> int | None:
        """Return the name of an evicted slot for its Removed; None, once, if the manager has no entry of it."""
        if victim not in self.unknown:
            return victim.name
        self.unknown.remove(victim)
        return None

    def drain(self) -> None:
        """Empty all slots in the order of eviction; none is active."""
        self._reset.extend(self.inactive.order())
        self.inactive.clear()
        self.registered.clear()
        self.unknown.clear()

    def metrics(self, *, mutable: int, immutable: int, inactive: int) -> PoolMetrics:
        """Return a snapshot; the manager passes in the held blocks."""
        return PoolMetrics(
            allocations=self.allocations_from_reset + self.evictions,
            allocations_from_reset=self.allocations_from_reset,
            evictions=self.evictions,
            registrations=self.registrations,
            registration_dedup=0,
            duplicate_blocks=0,
            stagings=self.registrations,
            match_hashes_requested=self.match_hashes_requested,
            match_blocks_returned=self.match_blocks_returned,
            scan_hashes_requested=0,
            scan_blocks_returned=0,
            inflight_mutable=mutable,
            inflight_immutable=immutable,
            reset_pool_size=self.reset_len,
            inactive_pool_size=inactive,
        )


# Theory of operation
#
# A Use evicts blocks immediately and publishes at its end: one Stored, then one Removed. Only then does the manager
# drop its entries of the evicted blocks, by PLH. So a block that one Use evicts and stores again loses its new entry: a
# Removed follows its Stored, and its later eviction publishes nothing (`BlockPool.unknown`). The mock keeps this fault
# of the real manager. (Blocks that are stored in bulk were not registered before, so no victim is among them.)


class Used:
    """The effects of a Use that are not published yet.

    Attributes:
        served: number of its leading blocks that are held now.
        anchor: the parent of its Stored: the last hit.
        stored: the blocks that were stored.
        local_hashes: local hashes of the stored blocks.
        token_ids: token ids of the stored blocks; empty if none were given.
        evicted: lineage hashes of the evicted blocks, where the policy chose them.
        removed: names for its Removed; None for a block without an entry in the manager.
        refused: whether a full block got no slot.
        in_bulk: whether everything was stored in bulk.
    """

    __slots__ = ("anchor", "evicted", "in_bulk", "local_hashes", "refused", "removed", "served", "stored", "token_ids")

    def __init__(self, parent: Any) -> None:
        self.served = 0
        self.anchor = parent
        self.stored: list[int] = []
        self.local_hashes: list[int] = []
        self.token_ids: BlockTokens = []
        self.evicted: list[int] = []
        self.removed: list[int | None] = []
        self.refused = False
        self.in_bulk = True

    def publish(self, publisher: EventPublisher, pool: BlockPool) -> None:
        """Publish the stored blocks, then the evicted ones, whose entries are dropped only now."""
        if self.stored:
            pool.registrations += len(self.stored)
            stored = Stored(self.anchor, tuple(self.stored), tuple(self.local_hashes))
            publisher.publish(stored, self.token_ids or None)
        if not self.removed:
            return
        pool.evictions += len(self.removed)
        if not self.in_bulk and not pool.registered.keys().isdisjoint(self.evicted):
            # Evicted and stored again by the same move: the entry that is dropped now is the new one.
            for i, plh in enumerate(self.evicted):
                again = pool.registered.get(plh)
                if again is not None:
                    self.removed[i] = again.name
                    pool.unknown.add(again)
        names = tuple([name for name in self.removed if name is not None])
        if names:
            publisher.publish(Removed(names))
