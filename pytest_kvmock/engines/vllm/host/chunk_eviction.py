"""Eviction order of the chunks in vLLM's host tier: its two policies, LRU by request and ARC."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Final, Protocol, TypeAlias

ChunkKey: TypeAlias = tuple[int, int]
"""Name of a chunk: the hash of its last block, and its cache group."""


class ChunkUser:
    """The chunks that one request used, until it is over.

    Attributes:
        number: its rank by the time of its first touch; None before.
        touched: the end of each chunk that it touched, by key.
        wrote: chunks that it stored.
        found: chunks that it found ready or loaded, and had not stored itself before.
        missed: chunks that it wanted to store, with or without success.
    """

    __slots__ = ("found", "missed", "number", "touched", "wrote")

    def __init__(self) -> None:
        self.number: int | None = None
        self.touched: dict[ChunkKey, int] = {}
        self.wrote: set[ChunkKey] = set()
        self.found: set[ChunkKey] = set()
        self.missed: set[ChunkKey] = set()


class EvictionOrder(Protocol):
    """The policy of one host tier. A chunk is resident from `write` until it is a victim."""

    def touch(self, user: ChunkUser, key: ChunkKey, end: int) -> None:
        """Record that a request uses a chunk for the first time; the chunk may be absent."""

    def miss(self, keys: Iterable[ChunkKey]) -> None:
        """Record absent chunks that a request wants to store for the first time, the last one first."""

    def victims(self, count: int, evictable: Callable[[ChunkKey], bool]) -> list[ChunkKey] | None:
        """Choose and drop `count` chunks; return None and change nothing if there are fewer."""

    def write(self, user: ChunkUser, key: ChunkKey, end: int) -> None:
        """Record that a request writes an absent chunk."""

    def drop(self, key: ChunkKey) -> None:
        """Drop a chunk that was to be filled from a file that could not be read."""

    def end(self, user: ChunkUser, held: Collection[ChunkKey]) -> None:
        """Record the end of a request; `held` are the resident chunks that it touched, the last one first."""


class LruOrder:
    """Each chunk has a rank; the chunk with the lowest rank is evicted.

    The rank is the number of the last request that used the chunk; among the chunks of one request, the last has the
    lowest rank. When the request is over, each of its chunks gets a new, higher number, also the tail of a prefix that
    it shares with other requests.
    """

    def __init__(self, capacity: int) -> None:  # noqa: ARG002 - as of the others
        self._ranks: dict[ChunkKey, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], ChunkKey]] = []  # including outdated ranks
        self._last = 0

    def touch(self, user: ChunkUser, key: ChunkKey, end: int) -> None:
        """Raise the rank of a resident chunk to that of the request."""
        if user.number is None:
            user.number = self._last = self._last + 1
        if key in self._ranks:
            self._rank(key, max(self._ranks[key], (user.number, -end)))

    def miss(self, keys: Iterable[ChunkKey]) -> None:
        """Do nothing: evicted chunks are forgotten."""

    def victims(self, count: int, evictable: Callable[[ChunkKey], bool]) -> list[ChunkKey] | None:
        """Choose and drop the evictable chunks with the lowest ranks."""
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
        """Give a chunk the rank of the request, whatever rank it had."""
        assert user.number is not None  # it was touched before
        self._rank(key, (user.number, -end))

    def drop(self, key: ChunkKey) -> None:
        """Forget the rank of a chunk."""
        del self._ranks[key]

    def end(self, user: ChunkUser, held: Collection[ChunkKey]) -> None:  # noqa: ARG002 - as of the others
        """Give each chunk a new number."""
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
    """ARC: a list of chunks used once, a list of chunks used again, and the ghosts of chunks evicted from each.

    A target for the size of the first list decides which list gives up a chunk. Ghosts that are requested again move
    the target.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        # Chunks and ghosts, the oldest first.
        self._once: OrderedDict[ChunkKey, None] = OrderedDict()
        self._again: OrderedDict[ChunkKey, None] = OrderedDict()
        self._once_ghosts: OrderedDict[ChunkKey, None] = OrderedDict()
        self._again_ghosts: OrderedDict[ChunkKey, None] = OrderedDict()

    def touch(self, user: ChunkUser, key: ChunkKey, end: int) -> None:
        """Do nothing: the chunks of a request move when it is over."""

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
        """Take the oldest of the first list while it has at least the target size or the second is empty, else of the
        second.
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
        """Append a chunk to the young end of the first list."""
        self._once[key] = None
        self._once_ghosts.pop(key, None)
        self._again_ghosts.pop(key, None)

    def drop(self, key: ChunkKey) -> None:
        """Remove a chunk from its list without a ghost."""
        self._once.pop(key, None)
        self._again.pop(key, None)

    def end(self, user: ChunkUser, held: Collection[ChunkKey]) -> None:
        """Move the chunks that the request found to the young end of the second list.

        Chunks that it only stored move to the young end of their list.
        """
        for key in held:
            if key in user.found:
                self._once.pop(key, None)
                self._again[key] = None
                self._again.move_to_end(key)
            elif key in user.wrote:
                (self._once if key in self._once else self._again).move_to_end(key)


EVICTION_ORDERS: Final[Mapping[str, Callable[[int], EvictionOrder]]] = {"lru": LruOrder, "arc": ArcOrder}
"""The policies by name; each takes the capacity of the tier."""
