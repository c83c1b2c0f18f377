"""Slots, and the base class of eviction policies, which choose the next slot to evict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_kvmock.values.events import block_text


class Slot:
    """One physical block, and the cached block that is registered in it.

    Attributes:
        plh: lineage hash under which it is registered.
        name: sequence hash under which it was stored; later other names may hold it too.
        refs: references to it by `name`, if the manager finds it by this name.
        aliases: other names that hold it. A slot with neither references nor aliases is inactive.
        place: for the policy's own use, initially 0. The pool never changes it.
        above: like `place`.
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


class EvictionPolicy(ABC):
    """The order in which inactive blocks are evicted.

    A policy derives from this class, and defines `insert`, `remove`, `evict`, `clear` and `order`. It may store any
    data in the `place` and `above` of slots. A slot is inserted when its block is no longer held, and removed when the
    block is used again. These alternate until the slot is evicted; later it may come back with another block. A call
    has many slots, in order; freed slots are inserted in one batch before another operation.
    """

    # The private methods are for policies of this package. They are called for each slot of a manager: `_on_register`
    # when a block was stored in it, `_on_touch` when an active slot was matched by another name. The new blocks of one
    # Use may come as one `evict` and one `_on_register`, so evictions may follow each other without an `_on_register`
    # in between. The other methods serve speed, and the rule of `lineage` that a place has one inactive block.

    _collisions: int = (
        0  # number of registered slots that conflict with another; while it is 0, `_first_refused` is not called
    )

    @abstractmethod
    def insert(self, slots: Sequence[Slot]) -> None:
        """Make slots evictable because they are no longer held."""

    @abstractmethod
    def remove(self, slots: Sequence[Slot]) -> None:
        """Make inactive slots active because look-ups have matched them."""

    @abstractmethod
    def evict(self, count: int) -> list[Slot]:
        """Choose the next inactive slots and drop them; fewer than `count` if no more can be evicted."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all slots, because none is registered any more."""

    @abstractmethod
    def order(self) -> list[Slot]:
        """Return the inactive slots in eviction order. May cost a sort."""

    def _on_register(self, slots: Sequence[Slot], places: Sequence[Any] | None = None) -> None:  # noqa: B027 - most need no note
        """Record slots that were just registered and are active; `places` may be the result of `_free_places`."""

    def _on_touch(self, slot: Slot) -> None:  # noqa: B027 - as above
        """Record that a new name matched an active slot by its lineage hash."""

    def _wake_run(self, slots: Sequence[Slot]) -> None:
        """Remove the slots that one look-up of several lineage hashes matched."""
        self.remove(slots)

    def _find(self, plh: int) -> Slot | None:  # noqa: ARG002 - for those that find by place
        """Return the inactive slot that this policy finds for a lineage hash other than its own, if there is one."""
        return None

    def _free_places(self, plhs: Sequence[int], registered: Mapping[int, Slot]) -> Sequence[Any] | None:
        """Return the policy's places for lineage hashes, if each has a separate place without a block."""
        return plhs if len(set(plhs)) == len(plhs) and registered.keys().isdisjoint(plhs) else None

    def _first_refused(self, slots: Iterable[Slot]) -> Slot | None:  # noqa: ARG002 - as above
        """Return the first of `slots` that could not be inserted if they were inserted in this order."""
        return None


def check_policy(backend: str, policy: EvictionPolicy) -> EvictionPolicy:
    """Return a user's policy, or raise a ValueError that names the missing methods."""
    kind = type(policy).__name__
    for name in dir(EvictionPolicy):
        if not name.startswith("_") and not hasattr(policy, name):
            raise ValueError(f"the policy of backend {backend!r} has no {name}: derive {kind} from EvictionPolicy")
    if not isinstance(policy, EvictionPolicy):
        raise ValueError(  # noqa: TRY004 - one error
            f"the policy of backend {backend!r} is not an EvictionPolicy: derive {kind} from EvictionPolicy"
        )
    return policy
