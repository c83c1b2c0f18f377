"""An eviction policy under contract: slots filled as a block manager fills them, and random requests on them.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pytest_kvmock.engines.base.eviction_policy import EvictionPolicy, Slot
from pytest_kvmock.values.plh import lineage_fragment, lineage_hash, lineage_position


def slot_names(slots: Sequence[Slot]) -> list[int]:
    """Return the names of the blocks in these slots."""
    return [slot.name for slot in slots]


def filled_by_manager(slot: Slot) -> tuple[object, ...]:
    """Return the fields of a slot that the manager fills."""
    return slot.plh, slot.name, slot.refs, slot.aliases


class Slots:
    """Calls a policy as a manager does; blocks are named 1, 2, 3 … in the order of registration.

    Args:
        policy: the policy under contract.

    Attributes:
        policy: as given.
        parents: the parent of each block, by name; None for a root.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.parents: dict[int, int | None] = {}
        self._last = 0

    def chain(self, length: int, after: Slot | None = None) -> list[Slot]:
        """Register new blocks, each the child of the one before it, all active."""
        return self.register([Slot() for _ in range(length)], after)

    def roots(self, count: int) -> list[Slot]:
        """Register new blocks without a parent, all active."""
        return [slot for _ in range(count) for slot in self.chain(1)]

    def register(self, slots: Sequence[Slot], after: Slot | None) -> list[Slot]:
        """Register new blocks in these slots, each the child of the one before it."""
        slots = list(slots)
        parent = after
        for slot in slots:
            self._last += 1
            if parent is None:
                plh = lineage_hash(self._last, None, 0)
            else:
                plh = lineage_hash(self._last, lineage_fragment(parent.plh), lineage_position(parent.plh) + 1)
            slot.plh, slot.name, slot.refs = plh, self._last, 1
            self.parents[slot.name] = None if parent is None else parent.name
            parent = slot
        policy = self.policy
        policy._on_register(slots, policy._free_places([slot.plh for slot in slots], {}))
        return slots

    def free(self, slots: Sequence[Slot]) -> None:
        """Make these slots inactive."""
        for slot in slots:
            slot.refs = 0
        self.policy.insert(slots)

    def hold(self, slots: Sequence[Slot]) -> None:
        """Make these slots active."""
        for slot in slots:
            slot.refs = 1
        self.policy.remove(slots)

    def expect_evictable(self, names: list[int]) -> None:
        """Check that exactly these blocks can be evicted."""
        __tracebackhide__ = True
        order = slot_names(self.policy.order())
        assert names == sorted(order), f"order() is {order}; the blocks that no request holds are {names}"

    def expect_evicted(self, names: list[int], count: int) -> None:
        """Evict `count` slots, and check that they are `names`, in any order."""
        __tracebackhide__ = True
        evicted = slot_names(self.policy.evict(count))
        assert names == sorted(evicted), f"evict({count}) gave {evicted}; expected {names}, in any order"


class Life:
    """Random requests, as a scheduler would serve them, with checks of the policy after each step.

    Args:
        slots: slots of the policy under contract.
        capacity: number of blocks of its manager.
        seed: seed of the random requests.
    """

    def __init__(self, slots: Slots, capacity: int, seed: int) -> None:
        self._slots = slots
        self._capacity = capacity
        self._rng = Random(seed)  # noqa: S311 - mock data
        self._cached: dict[int, Slot] = {}
        self._requests: list[list[Slot]] = []
        self._evicted: list[int] = []

    def live(self, steps: int) -> list[int]:
        """Admit and finish random requests.

        Returns:
            The evicted blocks, in order.
        """
        for _ in range(steps):
            if self._requests and self._rng.random() < 0.5:
                self._finish(self._requests.pop(self._rng.randrange(len(self._requests))))
            else:
                self._admit()
            idle = sorted(name for name, slot in self._cached.items() if not slot.refs)
            self._slots.expect_evictable(idle)
        return self._evicted

    def _admit(self) -> None:
        rng, policy = self._rng, self._slots.policy
        before = self._path(rng.choice(list(self._cached.values()))) if self._cached and rng.random() < 0.7 else []
        new = rng.randint(0, 4)
        idle = [slot for slot in before if not slot.refs]
        room = self._capacity - sum(slot.refs > 0 for slot in self._cached.values()) - len(idle)
        if (not before and not new) or new > room:
            return
        if idle:
            policy.remove(idle)
        for slot in before:
            slot.refs += 1
        short = new - (self._capacity - len(self._cached))
        fresh: list[Slot] = []
        if short > 0:
            fresh = list(policy.evict(short))
            evicted = slot_names(fresh)
            self._evicted += evicted
            evictable = sorted(name for name, slot in self._cached.items() if not slot.refs)
            assert len(set(evicted)) == short, f"evict({short}) gave {evicted}, where {evictable} could be evicted"
            assert set(evicted) <= set(evictable), (
                f"evict({short}) gave {evicted}, where only {evictable} could be evicted"
            )
            for name in evicted:
                del self._cached[name]
        fresh += [Slot() for _ in range(new - len(fresh))]
        if fresh:
            self._slots.register(fresh, before[-1] if before else None)
            self._cached.update((slot.name, slot) for slot in fresh)
        self._requests.append(before + fresh)

    def _path(self, slot: Slot) -> list[Slot]:
        """Return the blocks from the root to this one; an empty list if one of them was evicted."""
        path = [slot]
        while (above := self._slots.parents[path[0].name]) is not None:
            parent = self._cached.get(above)
            if parent is None:
                return []
            path.insert(0, parent)
        return path

    def _finish(self, request: list[Slot]) -> None:
        policy, one_by_one = self._slots.policy, self._rng.random() < 0.5
        idle = []
        for slot in request[::-1]:
            slot.refs -= 1
            if not slot.refs:
                idle.append(slot)
        if one_by_one:
            for slot in idle:
                policy.insert((slot,))
        elif idle:
            policy.insert(idle)
