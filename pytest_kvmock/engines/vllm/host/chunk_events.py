"""What vLLM publishes of the chunks in its host tier: places alone, or all that there is to say of them."""

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
# By default an event names the last block of a chunk and nothing more. A self-describing one has its tokens, and the
# hashes of all its blocks; these are noted when the chunk is stored, or looked up, and forgotten once its Removed is
# published. So a chunk that is evicted and stored again before that loses what was noted of it, and is published as a
# place (a fault of the original).


class _Happened(Enum):
    """What happened to chunks of the host, or to their files."""

    STORED = auto()
    READ = auto()  # from files
    REMOVED = auto()


class OffloadGroup(NamedTuple):
    """A cache group whose chunks are stored.

    Attributes:
        block_size: tokens a block.
        kind: as vLLM's `kv_cache_spec_kind`.
        window: tokens of its window, if it has one.
        chunk: tokens of a chunk of local attention, if it has that.
        drafts: it holds draft layers, whose last chunk may be rewritten.
        again: tokens that its window keeps beyond its own (`GroupGeometry.computed_again`).
        number: the engine's; None: its place among those that are given.
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
    """Groups with the engine's numbers; those that have none get their places."""
    return tuple(
        group if group.number is not None else group._replace(number=place) for place, group in enumerate(groups)
    )


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
        self._groups = {group.number: group for group in numbered(groups)}
        self._removed_extras = {number: group_extra(number or 0) for number in self._groups}
        self._stored_extras = {number: self._stored_extra(number or 0, each) for number, each in self._groups.items()}
        self._noted: dict[ChunkKey, TierEvent] = {}
        self._happened: list[tuple[_Happened, list[ChunkKey]]] = []  # in order
        self._written: list[tuple[Sequence[ChunkKey], str | None]] = []  # files, and their locality

    def _stored_extra(self, number: int, group: OffloadGroup) -> dict[str, Any] | None:
        if not self._describes:
            return group_extra(number)
        # Its kind stands in a location too, where it is none of what an ordinary event has.
        return group_extra(number, group.kind, group.window, {"kv_cache_spec_kind": group.kind})

    def note(self, tokens: HashedTokens, end: int, key: ChunkKey, *, again: bool = True) -> None:
        """Note what is to be said of a chunk; nothing of windows and states, whose chunks are places always.

        Args:
            tokens: of a request that has it.
            end: where it ends there, in tokens.
            key: its name.
            again: whether to note it once more, where it is noted already.
        """
        group = self._groups[key[1]]
        if not self._describes or not group.is_dense or (not again and key in self._noted):
            return
        self._note(tokens, end - self._blocks * group.block_size, end, key, group.block_size)

    def note_found(self, tokens: HashedTokens, end: int, key: ChunkKey) -> None:
        """As `note`, of what a look-up came by."""
        self.note(tokens, end, key, again=False)

    def note_tail(self, tokens: HashedTokens, end: int, key: ChunkKey, *, again: bool = True) -> None:
        """Note what is to be said of a block whose first tokens alone are there; otherwise as `note`.

        The units from the block's begin on are named, also those that another chunk has: so they are named twice.
        """
        group = self._groups[key[1]]
        if not self._describes or not group.is_dense or (not again and key in self._noted):
            return
        size = self._blocks * group.block_size
        self._note(tokens, (end - 1) // size * size, end, key, tokens.block_size)

    def note_tail_found(self, tokens: HashedTokens, end: int, key: ChunkKey) -> None:
        """As `note_tail`, of what a look-up came by."""
        self.note_tail(tokens, end, key, again=False)

    def _note(self, tokens: HashedTokens, start: int, end: int, key: ChunkKey, size: int) -> None:
        """Note the tokens from one place to another, in blocks of a size."""
        unit, group = tokens.block_size, self._groups[key[1]]
        names = tuple(tokens.names[at // unit - 1] for at in range(start + size, end + 1, size))
        parent = tokens.names[start // unit - 1] if start else None
        # Who hashes the tokens himself finds other names for blocks of a salted prompt: what else is hashed is not said
        # here.
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
        """Chunks were reported as written, by one transfer; they are put in the order in which they are published."""
        self._happened.append((_Happened.STORED, keys))

    def read(self, keys: Sequence[ChunkKey]) -> None:
        """Chunks were read from files, in this order."""
        self._happened.append((_Happened.READ, [*keys]))

    def removed(self, keys: Sequence[ChunkKey]) -> None:
        """Chunks were evicted, in this order, to make room for one request."""
        self._happened.append((_Happened.REMOVED, [*keys]))

    def written(self, keys: Sequence[ChunkKey], locality: str | None) -> None:
        """Files of chunks were written, by one job; they are published behind all of the host."""
        self._written.append((keys, locality))

    def forget_notes(self) -> None:
        """Forget what is noted of all chunks."""
        self._noted.clear()

    def take(self) -> list[TierEvent]:
        """The events since the last time: of each transfer one a chunk, and one of what was evicted at once in a
        group.
        """
        events: list[TierEvent] = []
        gone: list[ChunkKey] = []
        for happened, keys in self._happened:
            if happened is _Happened.STORED:
                self.rng.shuffle(keys)
            if happened is not _Happened.REMOVED:
                events += map(self._of_stored, keys)
                continue
            gone += keys
            for number in dict.fromkeys(group for _, group in keys):  # in the order of their first ones
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
        """The blocks that events name of a chunk."""
        noted = self._noted.get(key)
        return key[:1] if noted is None else noted.data.block_hashes  # type: ignore[union-attr]  # it is a Stored
