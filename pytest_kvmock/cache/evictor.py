"""The order in which dynamo-mocker 1.0.2 evicts (`LRUEvictor`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class LruEvictor(Generic[T]):
    """Objects in the order in which they go.

    The original gives each a signed number, and evicts the smallest: `insert` counts up from 0, `push_front` down. So
    what is inserted goes last, what is pushed to the front goes first, and what comes again has its new place only.
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, item: object) -> bool:
        return item in self._order

    def __iter__(self) -> Iterator[T]:
        """In the order of eviction."""
        return iter(self._order)

    def insert(self, item: T) -> None:
        """Let it go last."""
        self._order[item] = None
        self._order.move_to_end(item)

    def push_front(self, item: T) -> None:
        """Let it go first."""
        self._order[item] = None
        self._order.move_to_end(item, last=False)

    def remove(self, item: T) -> bool:
        """Take it out; False if it is not in."""
        if item not in self._order:
            return False
        del self._order[item]
        return True

    def evict(self) -> T | None:
        """Take out what goes first; None if there is nothing."""
        return self._order.popitem(last=False)[0] if self._order else None

    def clear(self) -> None:
        """Take everything out."""
        self._order.clear()
