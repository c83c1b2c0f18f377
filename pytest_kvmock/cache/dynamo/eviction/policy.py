"""What an eviction policy is: it sees the slots of one manager, and says which goes next."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
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


def check_policy(backend: str, policy: EvictionPolicy) -> EvictionPolicy:
    """Return a policy that somebody else has made, or raise a ValueError that says what it lacks."""
    for name in dir(EvictionPolicy):
        if not name.startswith("_") and not hasattr(policy, name):
            raise ValueError(
                f"the policy of backend {backend!r} has no {name}: derive {type(policy).__name__} from EvictionPolicy"
            )
    return policy
