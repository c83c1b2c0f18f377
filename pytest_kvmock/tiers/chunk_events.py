"""What vLLM publishes of the chunks in its host tier: places alone, or all that there is to say of them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_kvmock.cache.offload import TierEvent
from pytest_kvmock.events import Located, Removed, StorageTier, Stored
from pytest_kvmock.prompt_keys import FULL_ATTENTION, LoraIds, group_extra
from pytest_kvmock.tiers.chunk_eviction import ChunkKey
from pytest_kvmock.tokens import keyed_block_hashes

if TYPE_CHECKING:
    from pytest_kvmock.cache.hashed import HashedTokens

# Theory of operation
#
# By default an event names the last block of a chunk and nothing more. A self-describing one has its tokens, and the hashes of all
# its blocks; these are noted when the chunk is stored, or looked up, and forgotten once its Removed is published. So a chunk that
# is evicted and stored again before that loses what was noted of it, and is published as a place (a fault of the original).


class OffloadGroup(NamedTuple):
    """A cache group whose chunks are stored.

    Attributes:
        block_size: tokens a block.
        kind: as vLLM's `kv_cache_spec_kind`.
        window: tokens of its window, if it has one.
    """

    block_size: int
    kind: str = FULL_ATTENTION
    window: int | None = None


class ChunkEvents:
    """The events of one host tier that are not published yet.

    Args:
        groups: the cache groups.
        blocks_per_chunk: blocks of a chunk.
        self_describing: whether events say all that there is to say.
        rng: shuffles what is reported at once, which in the original has the order of a set.

    Attributes:
        rng: as above.
        lora_ids: the numbers of adapters in its engine.
    """

    def __init__(
        self, groups: Sequence[OffloadGroup], blocks_per_chunk: int, self_describing: bool, rng: Random
    ) -> None:
        self._blocks = blocks_per_chunk
        self._describes = self_describing
        self.rng = rng
        self.lora_ids = LoraIds()
        self._groups = groups
        self._removed_extras = [group_extra(number) for number in range(len(groups))]
        self._stored_extras = [self._stored_extra(number, group) for number, group in enumerate(groups)]
        self._noted: dict[ChunkKey, TierEvent] = {}
        self._happened: list[tuple[bool, Sequence[ChunkKey]]] = []  # (whether they were stored, which), in order

    def _stored_extra(self, number: int, group: OffloadGroup) -> dict[str, Any] | None:
        if not self._describes:
            return group_extra(number)
        # Its kind stands in a location too, where it is none of what an ordinary event has.
        return group_extra(number, group.kind, group.window, {"kv_cache_spec_kind": group.kind})

    def note(self, tokens: HashedTokens, end: int, key: ChunkKey, *, again: bool = True) -> None:
        """Note what is to be said of a chunk; nothing for a group with a window, whose chunks are places always.

        Args:
            tokens: of a request that has it.
            end: where it ends there, in tokens.
            key: its name.
            again: whether to note it anew, where it is noted already.
        """
        group = self._groups[key[1]]
        if not self._describes or group.kind != FULL_ATTENTION or (not again and key in self._noted):
            return
        size, unit = group.block_size, tokens.block_size
        start = end - self._blocks * size
        names = tuple(tokens.names[at // unit - 1] for at in range(start + size, end + 1, size))
        parent = tokens.names[start // unit - 1] if start else None
        # Who hashes the tokens himself finds other names for blocks of a salted prompt: what else is hashed is not said here.
        adapter = None if tokens.keys is None else tokens.keys.lora_name
        extra: dict[str, Any] = {"extra_keys": None}
        if adapter is not None:
            extra |= {"lora_id": self.lora_ids.of(adapter), "lora_name": adapter}
        blocks = tokens.rows(start // size, end // size, size)
        if blocks is None:
            local = tokens.local_hashes[start // size : end // size]
        else:
            local = keyed_block_hashes(tokens.cut(start, end), size, tokens.keys, start // size)
        data = Stored(parent, names, tuple(local))
        self._noted[key] = TierEvent(data, StorageTier.HOST_PINNED, blocks, group_extra(key[1], extra=extra))

    def stored(self, keys: Sequence[ChunkKey]) -> None:
        """Chunks were reported as written, by one transfer."""
        self._happened.append((True, keys))

    def removed(self, keys: Sequence[ChunkKey]) -> None:
        """Chunks were evicted, in this order, to make room for one request."""
        self._happened.append((False, keys))

    def forget_notes(self) -> None:
        """Forget what is noted of all chunks."""
        self._noted.clear()

    def take(self) -> list[TierEvent]:
        """The events since the last time: of each transfer one a chunk, and one of what was evicted at once in a group."""
        events: list[TierEvent] = []
        gone: list[ChunkKey] = []
        for is_stored, keys in self._happened:
            if is_stored:
                shuffled = list(keys)
                self.rng.shuffle(shuffled)
                events += map(self._of_stored, shuffled)
                continue
            gone += keys
            for number in sorted({group for _, group in keys}):
                names = [name for key in keys if key[1] == number for name in self.names_of(key)]
                events.append(TierEvent(Removed(names), StorageTier.HOST_PINNED, None, self._removed_extras[number]))
        for key in gone:
            self._noted.pop(key, None)
        self._happened.clear()
        return events

    def _of_stored(self, key: ChunkKey) -> TierEvent:
        noted = self._noted.get(key)
        if noted is not None:
            return noted
        return TierEvent(Located(key[:1]), StorageTier.HOST_PINNED, None, self._stored_extras[key[1]])

    def names_of(self, key: ChunkKey) -> tuple[int, ...]:
        """The blocks that events name of a chunk."""
        noted = self._noted.get(key)
        return key[:1] if noted is None else noted.data.block_hashes  # type: ignore[union-attr]  # it is a Stored
