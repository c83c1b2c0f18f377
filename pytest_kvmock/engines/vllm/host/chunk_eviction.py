"""Which chunk of vLLM's host tier is evicted next: its two policies, LRU by request and ARC."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Final, Protocol, TypeAlias

ChunkKey: TypeAlias = tuple[int, int]
"""Name of a chunk: the hash of its last block, and its cache group."""


class ChunkUser:
    """What one request did with chunks, until it is over.

    Attributes:
        number: when it first touched one; None before.
        touched: the end of each chunk that it touched, by its key.
        wrote: those that it stored.
        found: those that it found ready, or loaded, and had not stored itself before.
        missed: those that it wanted to store, whatever came of it.
    """

    __slots__ = ("found", "missed", "number", "touched", "wrote")

    def __init__(self) -> None:
        self.number: int | None = None
        self.touched: dict[ChunkKey, int] = {}
        self.wrote: set[ChunkKey] = set()
        self.found: set[ChunkKey] = set()
        self.missed: set[ChunkKey] = set()


class EvictionOrder(Protocol):
    """The policy of one host tier. A chunk is there from `write` until it is among the victims."""

    def touch(self, user: ChunkUser, key: ChunkKey, end: int) -> None:
        """A request uses a chunk for the first time; it may not be there."""

    def miss(self, keys: Iterable[ChunkKey]) -> None:
        """Chunks, the last one first, that a request wants to store for the first time are not there."""

    def victims(self, count: int, evictable: Callable[[ChunkKey], bool]) -> list[ChunkKey] | None:
        """Choose and drop `count` chunks; None, and nothing has changed, where there are fewer."""

    def write(self, user: ChunkUser, key: ChunkKey, end: int) -> None:
        """A request writes a chunk that was not there."""

    def drop(self, key: ChunkKey) -> None:
        """A chunk that was to be written is not there: what it would have had could not be read."""

    def end(self, user: ChunkUser, held: Collection[ChunkKey]) -> None:
        """A request is over; of what it touched these are there, the last one first."""


class LruOrder:
    """Each chunk has a rank, and the lowest is evicted.

    That is the number of the last request that used it, and of its chunks the last is the lowest; once the request is
    over, each has a number of its own. So of a prefix that others use the tail is kept, too, once they are over.
    """

    def __init__(self, capacity: int) -> None:  # noqa: ARG002 - as of the others
        self._ranks: dict[ChunkKey, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], ChunkKey]] = []  # with ranks that are no more
        self._last = 0

    def touch(self, user: ChunkUser, key: ChunkKey, end: int) -> None:
        """Raise the rank of a chunk that is there to that of the request."""
        if user.number is None:
            user.number = self._last = self._last + 1
        if key in self._ranks:
            self._rank(key, max(self._ranks[key], (user.number, -end)))

    def miss(self, keys: Iterable[ChunkKey]) -> None:
        """Nothing: what was evicted is forgotten."""

    def victims(self, count: int, evictable: Callable[[ChunkKey], bool]) -> list[ChunkKey] | None:
        """The lowest ranks that may be evicted."""
        chosen: list[ChunkKey] = []
        passed: list[tuple[tuple[int, int], ChunkKey]] = []
        heap, ranks = self._heap, self._ranks
        while heap and len(chosen) < count:
            rank, key = heappop(heap)
            if ranks.get(key) == rank:
                passed.append((rank, key))
                if evictable(key):
                    chosen.append(key)
        enough = len(chosen) == count
        if enough:
            for key in chosen:
                del ranks[key]
        for rank, key in passed:
            if key in ranks:
                heappush(heap, (rank, key))
        return chosen if enough else None

    def write(self, user: ChunkUser, key: ChunkKey, end: int) -> None:
        """Give a chunk the rank of the request, whatever rank it had before."""
        assert user.number is not None  # it was touched before
        self._rank(key, (user.number, -end))

    def drop(self, key: ChunkKey) -> None:
        """Forget its rank."""
        del self._ranks[key]

    def end(self, user: ChunkUser, held: Collection[ChunkKey]) -> None:  # noqa: ARG002 - as of the others
        """Give each chunk a number of its own."""
        for key in held:
            self._last += 1
            self._rank(key, (self._last, 0))

    def _rank(self, key: ChunkKey, rank: tuple[int, int]) -> None:
        if self._ranks.get(key) == rank:
            return
        self._ranks[key] = rank
        heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + 4 * len(self._ranks):
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapify(self._heap)


class ArcOrder:
    """Chunks that were used once, and again, in a list each, and ghosts of what was evicted from each (ARC).

    Which list gives up a chunk depends on a target for the size of the first, which ghosts that are wanted again move.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        # The oldest first: of chunks, and of ghosts.
        self._once: OrderedDict[ChunkKey, None] = OrderedDict()
        self._again: OrderedDict[ChunkKey, None] = OrderedDict()
        self._once_ghosts: OrderedDict[ChunkKey, None] = OrderedDict()
        self._again_ghosts: OrderedDict[ChunkKey, None] = OrderedDict()

    def touch(self, user: ChunkUser, key: ChunkKey, end: int) -> None:
        """Nothing: what a request used moves when it is over."""

    def miss(self, keys: Iterable[ChunkKey]) -> None:
        """Move the target towards the list that a ghost was evicted from."""
        once, again = self._once_ghosts, self._again_ghosts
        for key in keys:
            if key in once:
                self._target = min(self._target + max(1.0, len(again) / len(once)), self._capacity)
                once.move_to_end(key)
            elif key in again:
                self._target = max(self._target - max(1.0, len(once) / len(again)), 0.0)
                again.move_to_end(key)

    def victims(self, count: int, evictable: Callable[[ChunkKey], bool]) -> list[ChunkKey] | None:
        """Of the first list while it is as large as the target, else of the second, else of the first; the oldest
        first.
        """
        once = [key for key in self._once if evictable(key)][:count]
        again = [key for key in self._again if evictable(key)][:count]
        if len(once) + len(again) < count:
            return None
        chosen: list[ChunkKey] = []
        size, target = len(self._once), int(self._target)
        once.reverse()
        again.reverse()
        while len(chosen) < count:
            first = once and (size >= target or not again)
            size -= bool(first)
            chosen.append((once if first else again).pop())
        for key in chosen:
            if key in self._once:
                del self._once[key]
                self._once_ghosts[key] = None
            else:
                del self._again[key]
                self._again_ghosts[key] = None
        for ghosts in (self._once_ghosts, self._again_ghosts):
            while len(ghosts) > self._capacity:
                ghosts.popitem(last=False)
        return chosen

    def write(self, user: ChunkUser, key: ChunkKey, end: int) -> None:  # noqa: ARG002 - as of the others
        """Put a chunk to the young end of the first list."""
        self._once[key] = None
        self._once_ghosts.pop(key, None)
        self._again_ghosts.pop(key, None)

    def drop(self, key: ChunkKey) -> None:
        """Take it out of its list, without a ghost."""
        self._once.pop(key, None)
        self._again.pop(key, None)

    def end(self, user: ChunkUser, held: Collection[ChunkKey]) -> None:
        """Move what the request found to the young end of the second list, and what it only stored to that of its
        own.
        """
        for key in held:
            if key in user.found:
                self._once.pop(key, None)
                self._again[key] = None
                self._again.move_to_end(key)
            elif key in user.wrote:
                (self._once if key in self._once else self._again).move_to_end(key)


EVICTION_ORDERS: Final[Mapping[str, Callable[[int], EvictionOrder]]] = {"lru": LruOrder, "arc": ArcOrder}
"""The policies by name; each is made with the capacity of the tier."""
