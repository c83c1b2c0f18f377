"""Events of the chunks in vLLM's host tier: locations only, or self-describing ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_kvmock.engines.base.cache_group import FULL
from pytest_kvmock.engines.base.offload import TierEvent
from pytest_kvmock.engines.vllm.host.chunk_eviction import ChunkKey
from pytest_kvmock.values.events import Located, Removed, StorageTier, Stored
from pytest_kvmock.values.prompt_keys import FULL_ATTENTION, LoraIds, group_extra
from pytest_kvmock.values.tokens import keyed_block_hashes

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import HashedTokens

# Theory of operation
#
# By default an event names only the last block of a chunk. A self-describing event has the tokens and the hashes of all
# blocks of the chunk. These are noted when the chunk is stored or looked up, and forgotten once its Removed is
# published. A chunk that is evicted and stored again before that loses its note, and is published as a location (a bug
# of the original).


class _Happened(Enum):
    """Kinds of changes of chunks in the host, or of their files."""

    STORED = auto()
    READ = auto()  # from files
    REMOVED = auto()


class OffloadGroup(NamedTuple):
    """A cache group whose chunks are stored.

    Attributes:
        block_size: tokens per block.
        kind: as vLLM's `kv_cache_spec_kind`.
        window: tokens of its window, if it has one.
        chunk: tokens per chunk of local attention, if it has that.
        drafts: it holds draft layers, whose last chunk may be rewritten.
        again: tokens that are kept beyond the window (`GroupGeometry.computed_again`).
        number: its number in the engine; None: its place among the given groups.
    """

    block_size: int
    kind: str = FULL_ATTENTION
    window: int | None = None
    chunk: int | None = None
    drafts: bool = False
    again: int = 0
    number: int | None = None

    @property
    def is_dense(self) -> bool:
        """Whether a hit needs all of its blocks, as with full attention."""
        return self.kind in FULL


def numbered(groups: Iterable[OffloadGroup]) -> tuple[OffloadGroup, ...]:
    """Return groups with the engine's numbers; a group without a number gets its place."""
    return tuple(
        group if group.number is not None else group._replace(number=place) for place, group in enumerate(groups)
    )


class ChunkEvents:
    """The events of one host tier that are not published yet.

    Args:
        groups: the cache groups.
        blocks_per_chunk: blocks per chunk.
        self_describing: whether events describe their chunks in full.
        rng: shuffles chunks that are reported at once; their order in the original is that of a set.

    Attributes:
        rng: as given.
        lora_ids: the numbers of adapters in its engine.
    """

    def __init__(
        self, groups: Sequence[OffloadGroup], blocks_per_chunk: int, self_describing: bool, rng: Random
    ) -> None:
        self._blocks = blocks_per_chunk
        self._describes = self_describing
        self.rng = rng
        self.lora_ids = LoraIds()
        self._groups = {group.number: group for group in numbered(groups)}
        self._removed_extras = {number: group_extra(number or 0) for number in self._groups}
        self._stored_extras = {number: self._stored_extra(number or 0, each) for number, each in self._groups.items()}
        self._noted: dict[ChunkKey, TierEvent] = {}
        self._happened: list[tuple[_Happened, list[ChunkKey]]] = []  # in order
        self._written: list[tuple[Sequence[ChunkKey], str | None]] = []  # files, and their locality

    def _stored_extra(self, number: int, group: OffloadGroup) -> dict[str, Any] | None:
        if not self._describes:
            return group_extra(number)
        # With self-describing events, a location has the kind too, also a kind that ordinary events omit.
        return group_extra(number, group.kind, group.window, {"kv_cache_spec_kind": group.kind})

    def note(self, tokens: HashedTokens, end: int, key: ChunkKey, *, again: bool = True) -> None:
        """Note the description of a chunk; chunks of windows and states have none and are always locations.

        Args:
            tokens: the tokens of a request that has the chunk.
            end: where the chunk ends in the request, in tokens.
            key: the name of the chunk.
            again: whether to replace an existing note.
        """
        group = self._groups[key[1]]
        if not self._describes or not group.is_dense or (not again and key in self._noted):
            return
        self._note(tokens, end - self._blocks * group.block_size, end, key, group.block_size)

    def note_found(self, tokens: HashedTokens, end: int, key: ChunkKey) -> None:
        """Note a chunk that a look-up passed, unless it has a note."""
        self.note(tokens, end, key, again=False)

    def note_tail(self, tokens: HashedTokens, end: int, key: ChunkKey, *, again: bool = True) -> None:
        """Note a block of which only the first tokens are stored; otherwise as `note`.

        The note names the units from the start of the block on, also units of another chunk, which are then named
        twice.
        """
        group = self._groups[key[1]]
        if not self._describes or not group.is_dense or (not again and key in self._noted):
            return
        size = self._blocks * group.block_size
        self._note(tokens, (end - 1) // size * size, end, key, tokens.block_size)

    def note_tail_found(self, tokens: HashedTokens, end: int, key: ChunkKey) -> None:
        """Note such a block that a look-up found, unless it has a note."""
        self.note_tail(tokens, end, key, again=False)

    def _note(self, tokens: HashedTokens, start: int, end: int, key: ChunkKey, size: int) -> None:
        """Note the tokens from `start` to `end`, in blocks of `size` tokens."""
        unit, group = tokens.block_size, self._groups[key[1]]
        names = tuple(tokens.names[at // unit - 1] for at in range(start + size, end + 1, size))
        parent = tokens.names[start // unit - 1] if start else None
        # The event omits other extra keys. A router that hashes the tokens itself finds other names for the blocks of a
        # salted prompt.
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
        extra_of = group_extra(key[1], group.kind, extra=extra)
        self._noted[key] = TierEvent(data, StorageTier.HOST_PINNED, blocks, extra_of)

    def stored(self, keys: list[ChunkKey]) -> None:
        """Record the chunks that one transfer wrote; the list is later put into the order of publication."""
        self._happened.append((_Happened.STORED, keys))

    def read(self, keys: Sequence[ChunkKey]) -> None:
        """Record chunks that were read from files, in this order."""
        self._happened.append((_Happened.READ, [*keys]))

    def removed(self, keys: Sequence[ChunkKey]) -> None:
        """Record chunks that were evicted, in this order, to make room for one request."""
        self._happened.append((_Happened.REMOVED, [*keys]))

    def written(self, keys: Sequence[ChunkKey], locality: str | None) -> None:
        """Record the files that one job wrote; they are published after all events of the host."""
        self._written.append((keys, locality))

    def forget_notes(self) -> None:
        """Forget the notes of all chunks."""
        self._noted.clear()

    def take(self) -> list[TierEvent]:
        """Take the events since the last call: one per chunk of a transfer, and one per group for each eviction."""
        events: list[TierEvent] = []
        gone: list[ChunkKey] = []
        for happened, keys in self._happened:
            if happened is _Happened.STORED:
                self.rng.shuffle(keys)
            if happened is not _Happened.REMOVED:
                events += map(self._of_stored, keys)
                continue
            gone += keys
            for number in dict.fromkeys(group for _, group in keys):  # in the order of their first chunks
                names = [name for key in keys if key[1] == number for name in self.names_of(key)]
                events.append(TierEvent(Removed(names), StorageTier.HOST_PINNED, None, self._removed_extras[number]))
        for files, locality in self._written:
            events += (self._of_file(key, locality) for key in files)
        for key in gone:
            self._noted.pop(key, None)
        self._happened.clear()
        self._written.clear()
        return events

    def _of_stored(self, key: ChunkKey) -> TierEvent:
        noted = self._noted.get(key)
        if noted is not None:
            return noted
        return TierEvent(Located(key[:1]), StorageTier.HOST_PINNED, None, self._stored_extras[key[1]])

    def _of_file(self, key: ChunkKey, locality: str | None) -> TierEvent:
        event = self._of_stored(key)._replace(tier=StorageTier.DISK)
        return event if locality is None else event._replace(extra={**(event.extra or {}), "locality": locality})

    def names_of(self, key: ChunkKey) -> tuple[int, ...]:
        """Return the blocks of a chunk that events name."""
        noted = self._noted.get(key)
        return key[:1] if noted is None else noted.data.block_hashes  # type: ignore[union-attr]  # it is a Stored
