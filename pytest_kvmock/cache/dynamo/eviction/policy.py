"""Slots, and the base class of the policies that choose which of them is evicted next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_kvmock.events import block_text


class Slot:
    """One physical block, and the cached block that is registered in it.

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


class EvictionPolicy(ABC):
    """The order in which inactive blocks are evicted.

    A policy derives from this class, and defines `insert`, `remove`, `evict`, `clear` and `order`. It sees slots, and may
    keep what it likes in their `place` and `above`. A slot is inserted when nobody holds its block any more, and removed
    when the block is used again, in turns, until it is evicted; then it may come back with another block. Slots come
    many at once, in the order in which it happened to them; those that were freed, when something else happens.
    """

    # The private methods are for policies of this package. They are called for each slot of a manager: `_on_register`
    # when a block was stored in it, `_on_touch` when an active one was matched by another name. The new blocks of one
    # Use may come as one `evict` and one `_on_register`, so a policy must not mind that no other `_on_register` stands
    # between its evictions. The others serve speed, and the rule of `lineage` that a place has one inactive block.

    _collisions: int = (
        0  # registered slots that are at odds with another one; while it is 0, `_first_refused` is not asked
    )

    @abstractmethod
    def insert(self, slots: Sequence[Slot]) -> None:
        """Make these slots evictable: nobody holds them any more."""

    @abstractmethod
    def remove(self, slots: Sequence[Slot]) -> None:
        """Make inactive slots active: look-ups matched them."""

    @abstractmethod
    def evict(self, count: int) -> list[Slot]:
        """Choose the next inactive slots and forget them; fewer than `count` when no more can be evicted."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all slots; none is registered any more."""

    @abstractmethod
    def order(self) -> list[Slot]:
        """Return the inactive slots in the order in which they would be evicted. May cost a sort."""

    def _on_register(self, slots: Sequence[Slot], places: Sequence[Any] | None = None) -> None:  # noqa: B027 - most need no note
        """Take note of slots that were just registered, and are active; `places` may be what `_free_places` returned."""

    def _on_touch(self, slot: Slot) -> None:  # noqa: B027 - as above
        """Take note that an active slot was matched by its lineage hash, by a name that did not hold it yet."""

    def _wake_run(self, slots: Sequence[Slot]) -> None:
        """Remove slots that one look-up of several lineage hashes matched."""
        self.remove(slots)

    def _find(self, plh: int) -> Slot | None:  # noqa: ARG002 - for those that find by place
        """Return the inactive slot that answers to a lineage hash that is not its own, if there is one."""
        return None

    def _free_places(self, plhs: Sequence[int], registered: Mapping[int, Slot]) -> Sequence[Any] | None:
        """Return the policy's places of lineage hashes, if every one has a place of its own that no block has."""
        return plhs if len(set(plhs)) == len(plhs) and registered.keys().isdisjoint(plhs) else None

    def _first_refused(self, slots: Iterable[Slot]) -> Slot | None:  # noqa: ARG002 - as above
        """Return the first of `slots` that could not be inserted, were they inserted in this order."""
        return None


def check_policy(backend: str, policy: EvictionPolicy) -> EvictionPolicy:
    """Return a policy of the user's, or raise a ValueError that names what it lacks."""
    kind = type(policy).__name__
    for name in dir(EvictionPolicy):
        if not name.startswith("_") and not hasattr(policy, name):
            raise ValueError(f"the policy of backend {backend!r} has no {name}: derive {kind} from EvictionPolicy")
    if not isinstance(policy, EvictionPolicy):
        raise ValueError(  # noqa: TRY004 - one error
            f"the policy of backend {backend!r} is no EvictionPolicy: derive {kind} from EvictionPolicy"
        )
    return policy
