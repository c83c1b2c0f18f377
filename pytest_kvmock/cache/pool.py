"""The physical blocks of a manager: slots, the registry of what is cached, and the protocol of eviction policies.

kvbm-logical, `BlockManager`. A slot is in one of four states: *reset* (empty), *mutable* (held by a partial block),
*active* (registered under a lineage hash, and held) or *inactive* (registered, held by nobody, evictable). Only
inactive slots are known to the eviction policy's order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_kvmock.events import block_text


class Slot:
    """One physical block, and what is known of the block registered in it.

    Attributes:
        plh: lineage hash under which it is registered.
        name: sequence hash under which it was stored; other names may hold it later.
        refs: references to it by its own name, where the manager finds it by that.
        aliases: other names that hold it. It is inactive when it has neither.
        place: for the policy's own use, 0 at first. The pool does not touch it, whatever becomes of the slot.
        above: the same.
    """

    __slots__ = ("above", "aliases", "name", "place", "plh", "refs")

    def __init__(self) -> None:
        self.plh = 0
        self.name = 0
        self.refs = 0
        self.aliases = 0
        self.place: Any = 0
        self.above: Any = None

    def __repr__(self) -> str:
        return f"<Slot of block {block_text(self.name)}: {self.refs} references>"


class EvictionPolicy(Protocol):
    """In which order inactive blocks are evicted.

    A policy may derive from this class; then what it leaves out does nothing. It must say `insert`, `remove`, `evict`,
    `clear` and `order`.

    The manager tells a policy of a slot's life, in this order: `register` once, then `insert` and `remove` (or
    `evict`, which ends it) in turns. A policy sees slots, and may keep what it likes in their `place` and `above`.
    It is told of many slots at once, in the order in which it happened to them; of what was freed, when something else
    happens. The new blocks of one Use may come as one `evict` and one `register`; a policy must not mind that no other
    `register` stands between its evictions.

    Attributes:
        finds_by_place: whether `find` and `free_places` are to be asked about lineage hashes that are not registered.
        collisions: how many registered slots are at odds with another one; while it is 0, `refused` is not asked.
    """

    finds_by_place: bool = False
    collisions: int = 0

    def register(self, slots: Sequence[Slot], places: Sequence[Any] | None = None) -> None:
        """Take note of slots that were just registered, and are active; `places` may be what `free_places` said."""

    def touch(self, slot: Slot) -> None:
        """Take note that an active slot was matched by its lineage hash, by a name that did not hold it yet."""

    @abstractmethod
    def insert(self, slots: Sequence[Slot]) -> None:
        """Make these slots evictable: nobody holds them any more."""

    def insert_one(self, slot: Slot) -> None:
        """The same for one slot."""
        self.insert((slot,))

    @abstractmethod
    def remove(self, slots: Sequence[Slot]) -> None:
        """Make inactive slots active: look-ups matched them."""

    @abstractmethod
    def evict(self, count: int) -> list[Slot]:
        """Choose the next inactive slots and forget them; fewer than `count` when no more can go."""

    def find(self, plh: int) -> Slot | None:  # noqa: ARG002 - for those that find by place
        """Return the inactive slot that answers to a lineage hash that is not its own, if there is one."""
        return None

    def free_places(self, plhs: Sequence[int]) -> Sequence[Any] | None:  # noqa: ARG002 - as above
        """Return the policy's places of lineage hashes, if every one has a place of its own that no block has."""
        return None

    def refused(self, slots: Iterable[Slot]) -> Slot | None:  # noqa: ARG002 - as above
        """Return the first of `slots` that could not be inserted, were they inserted in this order."""
        return None

    @abstractmethod
    def clear(self) -> None:
        """Forget all slots; none is registered any more."""

    @abstractmethod
    def order(self) -> list[Slot]:
        """Return the inactive slots in the order in which they would be evicted. May cost a sort."""


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """A snapshot of a pool's counters and gauges, by kvbm-logical's names.

    The first eleven count since the start; the last four are what is there now. What a mock never does (scans,
    duplicates) is 0.
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
    """All slots of one manager; it says what is where, and the manager says who holds it.

    Attributes:
        total: how many slots there are.
        registered: the slot of each registered lineage hash, active or inactive.
        inactive: the policy, which holds the inactive ones.
        unknown: registered slots that the manager has no entry of, from which it would publish their Removed.
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
        # The reset pool is one queue, 0 to total - 1 at first. Slots that were never used stand at its front and are
        # made when they are taken, so that an idle manager costs nothing.
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
        """Take up to `count` empty slots, first those that have waited longest."""
        first = self._fresh
        self._fresh = min(first + count, self.total)
        slots = [Slot() for _ in range(first, self._fresh)]
        while self._reset and len(slots) < count:
            slots.append(self._reset.popleft())
        self.allocations_from_reset += len(slots)
        return slots

    def give_back(self, slot: Slot) -> None:
        """Put an emptied slot at the tail of the reset pool."""
        self._reset.append(slot)

    def match(self, plh: int) -> Slot | None:
        """Return the slot in which a lineage hash is cached, active or inactive; nothing changes."""
        slot = self.registered.get(plh)
        if slot is None and self.inactive.finds_by_place:
            return self.inactive.find(plh)
        return slot

    def name_to_tell(self, victim: Slot) -> int | None:
        """What a Removed calls an evicted slot; None, once, if the manager has no entry of it."""
        if victim not in self.unknown:
            return victim.name
        self.unknown.remove(victim)
        return None

    def drain(self) -> None:
        """Empty all slots, of which none is active, in the order of eviction."""
        self._reset.extend(self.inactive.order())
        self.inactive.clear()
        self.registered.clear()
        self.unknown.clear()

    def metrics(self, *, mutable: int, immutable: int, inactive: int) -> PoolMetrics:
        """Take a snapshot; what is held is the manager's to say."""
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
