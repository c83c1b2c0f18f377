"""The chunks of vLLM's host tier: their slots, their readers and writers, and the room for more."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pytest_kvmock.engines.vllm.host.chunk_eviction import EVICTION_ORDERS, ChunkKey, ChunkUser

# Theory of operation
#
# A chunk has a slot from the moment its copy is planned; it is ready once the copy is reported. A chunk that is being
# written or read is not evicted. New chunks first take slots that were never used, in ascending order, and then the
# slot that was freed last.


class Chunk:
    """One chunk of the host.

    Attributes:
        slot: its slot in the host.
        is_ready: whether it was written.
        readers: number of loads that read it now.
        waits: number of these loads that happen between steps.
    """

    __slots__ = ("is_ready", "readers", "slot", "waits")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.is_ready = False
        self.readers = 0
        self.waits = 0


class Room(NamedTuple):
    """The result of an offer.

    Attributes:
        new: the chunks to write, in order.
        evicted: the chunks evicted to make room, in the order of their eviction.
    """

    new: Sequence[ChunkKey]
    evicted: Sequence[ChunkKey]


class ChunkStore:
    """The host tier of one engine.

    Args:
        capacity: the most chunks, at least 1.
        policy: name of the eviction policy (`EVICTION_ORDERS`).

    Attributes:
        capacity: as given.
        chunks: the chunks by key, ready or not.
    """

    def __init__(self, capacity: int, policy: str) -> None:
        self.capacity = capacity
        self.chunks: dict[ChunkKey, Chunk] = {}
        self._policy = policy
        self._order = EVICTION_ORDERS[policy](capacity)
        self._used_slots = 0
        self._freed: list[int] = []

    def emptied(self) -> ChunkStore:
        """Make an empty store with the same settings."""
        return ChunkStore(self.capacity, self._policy)

    def ready(self) -> list[ChunkKey]:
        """Return the chunks that can be loaded."""
        return [key for key, chunk in self.chunks.items() if chunk.is_ready]

    def offer(self, user: ChunkUser, offered: Sequence[tuple[ChunkKey, int]]) -> Room | None:
        """Take the new chunks among those that a request has computed: all of them or none.

        Args:
            user: the request's use of chunks.
            offered: the chunks in order, each with its end.

        Returns:
            The new and the evicted chunks; None if there is no room for all new chunks. Offered chunks are not evicted
            for each other.
        """
        chunks, order = self.chunks, self._order
        new: list[tuple[ChunkKey, int]] = []
        for key, end in offered:
            chunk = chunks.get(key)
            if chunk is None:
                new.append((key, end))
            elif not chunk.is_ready:
                continue
            self._touch(user, key, end, found=chunk is not None)
        wanted = [key for key, _ in reversed(new) if key not in user.missed]
        user.missed.update(wanted)
        order.miss(wanted)
        evicted = self._make_room(len(new), {key for key, _ in offered})
        if evicted is None:
            return None
        for key, end in new:
            chunks[key] = Chunk(self._take_slot())
            order.write(user, key, end)
            user.wrote.add(key)
        return Room([key for key, _ in new], evicted)

    def drop(self, key: ChunkKey) -> None:
        """Give back the slot of a chunk that could not be read."""
        self._freed.append(self.chunks.pop(key).slot)
        self._order.drop(key)

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Pin chunks while a tier below reads them; see `was_read`."""
        for key in keys:
            self.chunks[key].readers += 1

    def written(self, keys: Iterable[ChunkKey]) -> None:
        """Mark planned chunks as ready."""
        for key in keys:
            self.chunks[key].is_ready = True

    def read(self, user: ChunkUser, keys: Sequence[tuple[ChunkKey, int]], *, waits: bool) -> list[int]:
        """Pin the chunks, each with its end, that a request loads between steps (`waits`) or within one; return their
        slots.
        """
        for key, end in keys:
            self._touch(user, key, end, found=True)
            chunk = self.chunks[key]
            chunk.readers += 1
            chunk.waits += waits
        return [self.chunks[key].slot for key, _ in keys]

    def was_read(self, keys: Iterable[ChunkKey], *, waited: bool) -> None:
        """Unpin chunks."""
        for key in keys:
            chunk = self.chunks[key]
            chunk.readers -= 1
            chunk.waits -= waited

    def end(self, user: ChunkUser) -> None:
        """End a request: pass its chunks to the policy, the last one first; at the same end, the last group first."""
        # vLLM: order_request_keys sorts by end, then by group, and the policies walk the result backwards.
        touched = [(end, group, name) for (name, group), end in user.touched.items()]
        keys = [(name, group) for _, group, name in sorted(touched, reverse=True)]
        self._order.end(user, [key for key in keys if key in self.chunks])

    def _make_room(self, count: int, protected: Collection[ChunkKey]) -> list[ChunkKey] | None:
        """Evict chunks until `count` more fit; return None and change nothing if that is not possible."""
        chunks = self.chunks
        short = count - (self.capacity - len(chunks))
        if short <= 0:
            return []

        def is_evictable(key: ChunkKey) -> bool:
            chunk = chunks[key]
            return chunk.is_ready and not chunk.readers and key not in protected

        victims = self._order.victims(short, is_evictable)
        if victims is not None:
            self._freed += [chunks.pop(key).slot for key in victims]
        return victims

    def _touch(self, user: ChunkUser, key: ChunkKey, end: int, *, found: bool) -> None:
        if found and key not in user.wrote:
            user.found.add(key)
        if key not in user.touched:
            user.touched[key] = end
            self._order.touch(user, key, end)

    def _take_slot(self) -> int:
        if self._used_slots < self.capacity:
            self._used_slots += 1
            return self._used_slots - 1
        return self._freed.pop()
