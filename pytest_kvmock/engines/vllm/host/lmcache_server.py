"""LMCache's server below vLLM: its chunks, their names, the log that engines read, and the events that they publish.

It mocks `KVEventModule` of LMCache 0.5.7rc2 and its adapter for vLLM. You choose which chunks the server drops, and
when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, NoReturn

from pytest_kvmock.engines.base.offload import TierEvent
from pytest_kvmock.values.checks import install_text
from pytest_kvmock.values.events import Removed, StorageTier, Stored
from pytest_kvmock.values.tokens import block_hashes

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra

# Theory of operation
#
# The server keeps a log of stored and dropped chunks; the first rank of each engine reads it from its last position on.
# Each engine therefore announces the chunks that any engine of its model stored, once per name, and publishes removals
# only of its own announcements. Records lost from the log are invisible to engines. If the log marks a loss, or the
# stream was closed, the engine removes all its announcements and starts again with the records that the log still has.
#
# Names contain neither salt nor adapter, but the server keeps salts apart: two salted copies of a chunk have one name.

CHUNK_TOKENS: Final = 256
"""Default tokens per chunk."""

LOG_RECORDS: Final = 32_768
"""Default number of records that the server keeps."""


class LmcacheHasher:
    """Names chunks as LMCache does; a `BlockHasher` whose blocks are chunks, not blocks of the engine.

    The chain begins with the blake3 digest of 12 zero bytes. Each digest covers the previous digest and the tokens as
    big-endian 32-bit numbers. A name is the low 64 bits.

    Raises:
        ImportError: blake3 is not installed.
    """

    signed: ClassVar[bool] = False

    def __init__(self) -> None:
        try:
            from blake3 import blake3  # type: ignore[import-not-found, unused-ignore]  # an extra
        except ImportError:
            raise ImportError(f"names of LMCache's chunks need blake3: {install_text('lmcache')}") from None
        self._blake3 = blake3
        self._root: bytes = blake3(bytes(12)).digest()

    def __eq__(self, other: object) -> bool:
        return type(other) is LmcacheHasher

    def __hash__(self) -> int:
        return hash(LmcacheHasher)

    def digests(self, tokens: Sequence[int], block_size: int, position: int, parent: bytes | None) -> list[bytes]:  # noqa: ARG002 - the signature of BlockHasher
        """Return the chained digest of each complete chunk; see `BlockHasher.digests`.

        Raises:
            OverflowError: a token is not from 0 to 2**32 - 1.
        """
        before = self._root if parent is None else parent
        out: list[bytes] = []
        for end in range(block_size, len(tokens) + 1, block_size):
            words = b"".join(token.to_bytes(4, "big") for token in tokens[end - block_size : end])
            before = self._blake3(before + words).digest()
            out.append(before)
        return out

    def name(self, digest: bytes) -> int:
        """Return the low 64 bits of a digest."""
        return int.from_bytes(digest[-8:], "big")

    def looking_ahead(self, lookahead: int) -> LmcacheHasher:  # noqa: ARG002 - the signature of BlockHasher
        """Return this hasher: names of chunks do not look ahead."""
        return self

    def of_event(self, extra: EventExtra, position: int) -> LmcacheHasher:  # noqa: ARG002 - the signature of BlockHasher
        """Return this hasher: names cover only tokens."""
        return self


class HeldChunk(NamedTuple):
    """A chunk that the server has.

    Attributes:
        model: model of the engine that stored it; engines of other models do not see it.
        digest: its full digest.
        salt: salt of the request; "" for none.
    """

    model: str
    digest: bytes
    salt: str = ""


class _Kind(Enum):
    """Kinds of log records."""

    STORED = auto()
    REMOVED = auto()
    LOST = auto()


class _Record(NamedTuple):
    """One record of the log: its number from 1 on, model and chunks; for a stored chunk also its parent and tokens."""

    number: int
    kind: _Kind
    model: str = ""
    digests: Sequence[bytes] = ()
    parent: bytes | None = None
    tokens: Sequence[int] = ()


class LmcacheServer:
    """One server, to which engines of one node are attached.

    Args:
        chunk_tokens: tokens per chunk, at least 1.
        log_records: the most records that the log keeps; 0: no engine announces anything.
        capacity: the most chunks; the oldest are dropped. None: no limit.

    Attributes:
        chunk_tokens: as given.
        held: its chunks, in the order in which they were first stored.

    Raises:
        ImportError: blake3 is not installed.
        ValueError: a size is too small.
    """

    def __init__(
        self, *, chunk_tokens: int = CHUNK_TOKENS, log_records: int = LOG_RECORDS, capacity: int | None = None
    ) -> None:
        for name, value, least in (
            ("chunk_tokens", chunk_tokens, 1),
            ("log_records", log_records, 0),
            ("capacity", 1 if capacity is None else capacity, 1),
        ):
            if value < least:
                _raise_too_small(name, value, least)
        self.chunk_tokens = chunk_tokens
        self._capacity = capacity
        self.hasher = LmcacheHasher()
        self.held: dict[HeldChunk, None] = {}
        self._log: deque[_Record] = deque(maxlen=log_records)
        self._readers: list[LmcacheReader] = []
        self._restart()

    def attach(self, model: str, *, page: int = 1024) -> LmcacheReader:
        """Attach an engine.

        Args:
            model: its model.
            page: the most records that it reads at once, at least 1.
        """
        if page < 1:
            _raise_too_small("page", page, 1)
        reader = LmcacheReader(self, model, page)
        self._readers.append(reader)
        return reader

    def store(
        self, model: str, tokens: Sequence[int], *, first: int = 0, salt: str = "", are_known: bool = True
    ) -> list[HeldChunk]:
        """Store the complete chunks of a prompt.

        Args:
            model: model of the engine that stores.
            tokens: the tokens of the prompt from the first on.
            first: the first chunk that is stored.
            salt: salt of the request; "" for none.
            are_known: whether the server receives the tokens; a chunk whose tokens it never received is not announced.

        Returns:
            The stored chunks; existing ones are stored again.
        """
        size = self.chunk_tokens
        digests = self.hasher.digests(tokens, size, 0, None)
        if are_known:
            for place, digest in enumerate(digests):
                parent = digests[place - 1] if place else None
                self._tokens[digest] = tuple(tokens[place * size : (place + 1) * size]), parent
        chunks = [HeldChunk(model, digest, salt) for digest in digests[first:]]
        for chunk in chunks:
            self.held[chunk] = None
            known = self._tokens.get(chunk.digest)
            if known is not None:
                self._note(_Kind.STORED, model, [chunk.digest], parent=known[1], tokens=known[0])
        if self._capacity is not None and len(self.held) > self._capacity:
            self.drop(len(self.held) - self._capacity)
        return chunks

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.held)

    def drop(self, count: int) -> list[int]:
        """Evict the oldest chunks, with a record in the log; return their names."""
        gone = [*self.held][:count]
        self.evict(gone)
        return [self.hasher.name(chunk.digest) for chunk in gone]

    def evict(self, chunks: Iterable[HeldChunk]) -> None:
        """Drop chunks, with one record in the log for each model, which has each name once."""
        names: dict[str, dict[bytes, None]] = {}
        for chunk in chunks:
            self.held.pop(chunk, None)
            names.setdefault(chunk.model, {})[chunk.digest] = None
        for model, digests in names.items():
            self._note(_Kind.REMOVED, model, [*digests])

    def lose_events(self) -> None:
        """Lose events inside the server: the log gets a record that marks the loss."""
        self._note(_Kind.LOST)

    def trim_log(self, keep: int = 0) -> None:
        """Drop all but the last `keep` records of the log, as if it were full."""
        while len(self._log) > keep:
            self._log.popleft()

    def restart(self) -> None:
        """Restart with no chunks and a new log; streams are closed."""
        self.held.clear()
        self._log.clear()
        self._restart()
        for reader in self._readers:
            reader.close()

    def _restart(self) -> None:
        self._next_record = 1
        self._tokens: dict[bytes, tuple[Sequence[int], bytes | None]] = {}

    def _note(
        self,
        kind: _Kind,
        model: str = "",
        digests: Sequence[bytes] = (),
        *,
        parent: bytes | None = None,
        tokens: Sequence[int] = (),
    ) -> None:
        self._log.append(_Record(self._next_record, kind, model, digests, parent, tokens))
        self._next_record += 1

    def _page(self, model: str, cursor: int, count: int) -> tuple[list[_Record], int, bool]:
        """Return a model's records after `cursor`, the new cursor, and whether records before these were lost."""
        last = self._next_record - 1
        first = self._log[0].number if self._log else last + 1
        is_lost = cursor + 1 < first
        records: list[_Record] = []
        for record in self._log:
            if record.number <= cursor:
                continue
            cursor = record.number
            if record.kind is _Kind.LOST:
                is_lost = True
                records.clear()
            elif record.model == model:
                records.append(record)
                if len(records) == count:
                    break
        return records, cursor, is_lost


class LmcacheReader:
    """Makes the events that one engine publishes about a server; made by `LmcacheServer.attach`.

    Attributes:
        model: the engine's model.
        announced: digests of the chunks whose Stored, but no Removed, was published.
    """

    def __init__(self, server: LmcacheServer, model: str, page: int) -> None:
        self.model = model
        self.announced: set[bytes] = set()
        self._server = server
        self._page = page
        self.close()

    def close(self) -> None:
        """Close the stream: the next read begins with the oldest record of the log."""
        self._cursor, self._is_new = 0, True

    def read(self) -> list[TierEvent]:
        """Read all new records; return the events that the engine publishes."""
        events: list[TierEvent] = []
        if not self._server._log.maxlen:  # noqa: SLF001 - one family
            return events
        while True:
            before = self._cursor
            records, self._cursor, is_lost = self._server._page(self.model, before, self._page)  # noqa: SLF001 - one family
            if (is_lost or self._is_new) and self.announced:
                events.append(self._removed(sorted(self.announced)))
                self.announced.clear()
            self._is_new = False
            for record in records:
                events += self._of_record(record)
            if self._cursor == before:
                return events

    def _of_record(self, record: _Record) -> list[TierEvent]:
        known = [digest for digest in record.digests if digest in self.announced]
        if record.kind is _Kind.REMOVED:
            self.announced.difference_update(known)
            return [self._removed(known)] if known else []
        if known:
            return []
        self.announced.update(record.digests)
        name = self._server.hasher.name
        local = tuple(block_hashes(record.tokens, len(record.tokens)))
        parent = None if record.parent is None else name(record.parent)
        data = Stored(parent, tuple(map(name, record.digests)), local)
        # The event has no other fields: no group, no kind, no adapter, no extra keys.
        extra = {"extra_keys": None, "group_idx": None, "kv_cache_spec_kind": None}
        return [TierEvent(data, StorageTier.HOST_PINNED, (tuple(record.tokens),), extra)]

    def _removed(self, digests: Iterable[bytes]) -> TierEvent:
        names = map(self._server.hasher.name, digests)
        return TierEvent(Removed(names), StorageTier.HOST_PINNED, None, {"group_idx": None})


def _raise_too_small(name: str, value: int, least: int) -> NoReturn:
    raise ValueError(f"LmcacheServer: {name} must be at least {least}, got {value!r}")
