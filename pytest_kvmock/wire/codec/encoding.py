"""Encoding of a batch into the bytes that an engine of a dialect writes.

One subject: the writing of events. `decoding.py` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from pytest_kvmock.values.checks import is_integer
from pytest_kvmock.values.dialect import DIGEST_SIZES, Dialect
from pytest_kvmock.values.events import Cleared, Located, Removed, RouterEvent, SparseStored, StorageTier, Stored
from pytest_kvmock.values.prompt_keys import LOOKAHEAD
from pytest_kvmock.wire.codec.batch import DIGESTS, SIZE, SMALL, Batch, widened
from pytest_kvmock.wire.codec.defects import EncodeError, shown, shown_hash
from pytest_kvmock.wire.codec.digests import StreamDigests
from pytest_kvmock.wire.codec.dynamo_json import write_lines
from pytest_kvmock.wire.codec.event_fields import (
    REMOVED,
    STORED,
    Tag,
    entries_flaw,
    fields_of,
    located_value,
    metadata_flaw,
    value_flaw,
)
from pytest_kvmock.wire.codec.event_flaws import check_events, check_rank, check_timestamp, event_flaw, odd_hash
from pytest_kvmock.wire.codec.structs import Structs, structs_of
from pytest_kvmock.wire.codec.table import find_dialect
from pytest_kvmock.wire.codec.trtllm_json import write_events

# Theory of operation
#
# A struct is filled from a list: the fields of an ordinary event with that number of blocks, then the event's own.
# Values in `RouterEvent.extra` go into the field of their name if the dialect has it; otherwise they are ignored.

_U32: Final = 2**32 - 1
_U64: Final = 2**64 - 1


def encode(batch: Batch, dialect: str | Dialect, *, digests: StreamDigests | None = None) -> bytes:
    """Write a batch as an engine of this dialect does.

    Args:
        batch: events of one worker and rank. Token ids are written without a check of their range (0 to 2**32 - 1), for
            speed; `decode` reports ids out of range.
        dialect: name of the dialect, or a `Dialect`.
        digests: the digests of the stream, if the dialect has bytes as hashes; not needed for events decoded from such
            a dialect. If an event is refused, they stay unchanged.

    Raises:
        ValueError: the dialect is unknown.
        EncodeError: an event cannot be written in the dialect: token ids or digests are missing, a span or a hash does
            not fit, the dialect has no name for the tier, the events have different ranks, or the rank of the batch is
            invalid.
        TypeError: `batch` is not a Batch, or has items other than RouterEvents.
        ImportError: msgspec is not installed.
    """
    row = find_dialect(dialect)
    if not isinstance(batch, Batch):
        raise TypeError(f"encode takes a Batch of RouterEvents, got {batch!r:.80}")
    if digests is not None and not isinstance(digests, StreamDigests):
        raise TypeError(f"digests must be StreamDigests, or None, got {digests!r:.80}")
    return _writer_of(row).payload(batch.events, batch.timestamp, batch.dp_rank, digests)


class BatchWriter:
    """Writes batches in one dialect like `encode`, but looks up the dialect's data only once.

    Args:
        dialect: the dialect to write.
        widens: whether block ids below 2^32 are written as full-width values (`wire_hash`).

    Raises:
        ImportError: msgspec is not installed.
    """

    __slots__ = ("_checking", "_dialect", "_plan", "_structs", "_widens")

    def __init__(self, dialect: Dialect, *, widens: bool = False) -> None:
        self._dialect = dialect
        self._widens = widens and dialect.hashes != "bytes"
        self._structs = structs_of(dialect) if dialect.is_msgpack else None
        if self._structs is not None:
            plans = self._structs.plans
            self._checking = _Writer(dialect, self._structs, None)
            self._plan = (  # data of the loop, in one load
                Stored if plans.begins and dialect.hashes != "bytes" else None,  # None: no event takes the fast path
                StorageTier.DEVICE,
                self._structs.types[STORED],
                plans.on_device.get,
                plans.rest,
                SMALL if self._widens else {"unsigned": 0, "either": -(2**63)}.get(dialect.hashes),
                dialect.hashes != "signed",
            )

    def payload(
        self, events: Sequence[RouterEvent], timestamp: float, dp_rank: int | None, digests: StreamDigests | None = None
    ) -> bytes:
        """Write a batch.

        Args:
            events: as in `Batch`.
            timestamp: as in `Batch`.
            dp_rank: as in `Batch`.
            digests: as in `encode`, which also lists the errors.
        """
        if type(timestamp) is not float or not -math.inf < timestamp < math.inf:
            check_timestamp(timestamp, self._dialect.name)
        if type(events) is not list and not isinstance(events, Sequence):
            check_events(events)
        try:
            if self._structs is None:
                has_tokens = self._dialect.form == "trtllm_json"
                check_events(events, with_tokens=has_tokens)
                return write_events(events) if has_tokens else write_lines(events, self._dialect)
            if digests is None:
                return self._payload(self._structs, events, timestamp, dp_rank, None)
            with digests.one_batch():
                return self._payload(self._structs, events, timestamp, dp_rank, digests)
        except (AttributeError, TypeError):  # searched now, as checking each event costs a tenth of the speed
            check_events(events)
            raise

    def _payload(
        self,
        structs: Structs,
        events: Sequence[RouterEvent],
        timestamp: float,
        rank: int | None,
        digests: StreamDigests | None,
    ) -> bytes:
        # This loop determines the speed: one flat body for the usual Stored.
        fills = rank is not None or self._dialect.rank == "filled"
        if rank is None and len(events):
            check_rank(rank := events[0].event.dp_rank)
        elif rank is not None and (type(rank) is not int or not 0 <= rank <= _U32):
            check_rank(rank)
        short, device, kind, on_device, rest_of, least, all_64_bits = self._plan
        out: list[Any] = []
        append = out.append
        writer = self._checking if digests is None else _Writer(self._dialect, structs, digests)
        for event in events:
            named = event.event
            data = named.data
            if named.dp_rank != rank:
                raise EncodeError(
                    f"event {len(out)} of the batch is of rank {named.dp_rank}, and the batch of rank {rank}"
                )
            if type(data) is short and event.extra is None and (tokens := event.token_ids):
                size, even = len(tokens[0]), True
                flat: list[int] = []
                for each in tokens:
                    flat += each
                    if len(each) != size:
                        even = False
                hashes, parent, tier = data.block_hashes, data.parent_hash, event.storage_tier
                blocks = len(hashes)
                rest = (on_device(blocks) if tier is device else None) or rest_of(blocks, tier)
                if (
                    even
                    and rest is not None
                    and size
                    and len(flat) == blocks * size
                    and (least is None or (min(hashes) >= least and (parent is None or parent >= least)))
                    and (all_64_bits or (max(hashes) < 2**63 and (parent is None or parent < 2**63)))
                ):
                    append(kind(hashes, parent, flat, size, *rest))
                    continue
            append(writer.checked(len(out), widened(event) if self._widens else event))
        try:
            return structs.encode((float(timestamp), out, (rank or 0) if fills else None))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            if digests is None:  # the loop checks only what it must; the writer checks everything
                for index, event in enumerate(events):
                    writer.checked(index, widened(event) if self._widens else event)
            raise EncodeError(f"the batch cannot be written in {self._dialect.name!r}: {error}") from None


@lru_cache(maxsize=256)
def _writer_of(dialect: Dialect) -> BatchWriter:
    return BatchWriter(dialect)


class _Writer:
    """Makes structs from events, with all checks."""

    __slots__ = (
        "_cleared",
        "_dialect",
        "_digests",
        "_media",
        "_removed",
        "_removed_at",
        "_stored",
        "_stored_at",
        "_structs",
    )

    def __init__(self, dialect: Dialect, structs: Structs, digests: StreamDigests | None) -> None:
        self._dialect, self._structs, self._digests = dialect, structs, digests
        self._media = dialect.media
        self._stored, self._removed = structs.ordinary[STORED], structs.ordinary[REMOVED]
        self._cleared = structs.cleared
        places, own = self._stored.places, self._stored.own
        self._stored_at = tuple(places[own[kind]] for kind in ("hashes", "parent", "tokens", "block_size"))
        self._removed_at = self._removed.places[self._removed.own["hashes"]]

    def checked(self, index: int, event: RouterEvent) -> Any:
        """Return the struct of one event.

        Args:
            index: its number in the batch, for the message.
            event: the event.

        Raises:
            EncodeError: the event cannot be written in this dialect.
        """
        try:
            return self._struct(event)
        except EncodeError as error:
            raise EncodeError(f"event {index} of the batch: {error}") from None

    def _struct(self, event: RouterEvent) -> Any:
        data = event.event.data
        if type(data) is Stored:
            return self._of_stored(event, data)
        if type(data) is Removed:
            hashes: Any = data.block_hashes
            values = self._removed.written(len(hashes))
            values[self._removed_at] = (
                self._hashes(hashes) if self._dialect.hashes != "bytes" else self._digests_of(event)[1]
            )
            self._place(event, REMOVED, values)
            return self._structs.types[REMOVED](*values)
        if isinstance(data, Stored):
            return self._of_stored(event, data)
        if isinstance(data, Located):
            return self._of_located(event, data)
        if type(data) is not Cleared:
            flaw = event_flaw(event)
            raise EncodeError(flaw or f"dialect {self._dialect.name!r} has no {type(data).__name__}, got {data!r:.80}")
        if self._digests is not None:
            self._digests.cleared()
        return self._cleared

    def _of_stored(self, event: RouterEvent, data: Stored) -> Any:
        hashes: Any = data.block_hashes
        parent: Any = data.parent_hash
        blocks = len(hashes)
        flat, size = self._tokens_of(event, data)
        if isinstance(data, SparseStored):
            self._check_sparse(data, flat, size)
        elif len(flat) != blocks * size or not size:
            raise EncodeError(f"{len(flat)} token ids came for {blocks} blocks of {size}")
        if self._dialect.hashes == "bytes":
            parent, hashes = self._digests_of(event)
        else:
            hashes = self._hashes(hashes)
            if parent is not None:
                (parent,) = self._hashes((parent,))
        values = self._stored.written(blocks)
        place = self._stored_at
        values[place[0]], values[place[1]], values[place[2]], values[place[3]] = hashes, parent, flat, size
        self._place(event, STORED, values)
        metadata = (
            self._dialect.metadata
            and event.extra
            and {key: event.extra[key] for key in self._dialect.metadata if event.extra.get(key) is not None}
        )
        for key, value in (metadata or {}).items():
            if (flaw := metadata_flaw(value)) is not None:
                raise EncodeError(f"extra[{key!r}]: expected {flaw.expected}, got {flaw.observed}")
        if metadata and self._structs.stored_with_metadata is not None:
            return self._structs.stored_with_metadata(*values, metadata)
        return self._structs.types[STORED](*values)

    def _check_sparse(self, data: SparseStored, tokens: Sequence[int], size: int) -> None:
        if not self._dialect.has_groups:
            raise EncodeError(f"dialect {self._dialect.name!r} has no cache groups, and a SparseStored is of one")
        if len(tokens) != data.span or size != data.block_size:
            raise EncodeError(
                f"{len(tokens)} token ids in blocks of {size} came for a span of {data.span} in blocks of "
                f"{data.block_size}"
            )

    def _of_located(self, event: RouterEvent, data: Located) -> Any:
        if event.storage_tier is StorageTier.DEVICE or not data.block_hashes:
            raise EncodeError("a location names blocks in a tier below the device")
        hashes: Any = data.block_hashes
        hashes = self._hashes(hashes) if self._dialect.hashes != "bytes" else self._digests_of(event)[1]
        values = [located_value(one) for one in self._dialect.stored]
        size = (event.extra or {}).get(SIZE, 0)
        if not is_integer(size, 0):
            raise EncodeError(f"extra[{SIZE!r}]: expected an integer of at least 0, got {shown(size)}")
        place = self._stored_at
        values[place[0]], values[place[1]], values[place[2]], values[place[3]] = hashes, None, [], size
        self._place(event, STORED, values)
        return self._structs.types[STORED](*values)

    def _tokens_of(self, event: RouterEvent, data: Stored) -> tuple[list[Any], int]:
        """Return the token ids and block size of an unusual Stored."""
        extra, blocks = event.extra or {}, len(data.block_hashes)
        if not blocks and not isinstance(data, SparseStored):
            size = extra.get(SIZE)
            if not is_integer(size, 1):
                raise EncodeError("a Stored without blocks has no block size; no engine publishes one")
            return [], size
        if event.token_ids:
            sizes = [*map(len, event.token_ids)]
            if len({*sizes}) > 1:
                raise EncodeError(f"blocks came with {min(sizes)} to {max(sizes)} token ids; expected one block size")
            return [token for each in event.token_ids for token in each], sizes[0]
        raise EncodeError(
            f"a Stored without token ids, which dialect {self._dialect.name!r} carries: serve prompts of tokens, not "
            "of hashes, and give a manager token_ids"
        )

    def _hashes(self, hashes: tuple[int, ...]) -> tuple[int, ...]:
        """Return block hashes in the form of the dialect: the same 64 bits, signed or unsigned."""
        signed, either = self._dialect.hashes == "signed", self._dialect.hashes == "either"
        if not hashes:
            return hashes
        low, high = min(hashes), max(hashes)
        if (
            type(low) is not int
            or type(high) is not int
            or (len(hashes) > 2 and not {int}.issuperset(map(type, hashes)))
        ) and not all(map(is_integer, hashes)):
            raise EncodeError(odd_hash("block_hashes", hashes))
        if not either and ((low < 0) if not signed else (high >= 2**63)):
            wrong = next((each for each in hashes if not -(2**63) <= each <= _U64), None)
            if wrong is None:
                if signed:
                    return tuple(each - 2**64 if each >= 2**63 else each for each in hashes)
                return tuple(each & _U64 for each in hashes)
        if low < -(2**63) or high > _U64:
            wrong = low if low < -(2**63) else high
            raise EncodeError(f"block hash {shown_hash(wrong)} has more than 64 bits")
        return hashes

    def _digests_of(self, event: RouterEvent) -> tuple[bytes | None, tuple[bytes, ...]]:
        """Return the digest of the parent (None in a Removed) and of each block."""
        extra, data = event.extra or {}, event.event.data
        if self._digests is not None:
            if isinstance(data, Removed):
                return None, tuple(self._digests.removed(event))
            if isinstance(data, Located):
                return None, tuple(self._digests.located(data))
            found, parent = self._digests.stored(event)
            return parent, tuple(found)
        if DIGESTS in extra:
            return self._checked_digests(extra[DIGESTS], len(data.block_hashes))  # type: ignore[union-attr]  # no Cleared
        raise EncodeError(
            f"dialect {self._dialect.name!r} has whole digests as block hashes, and an event has 64 bits of one: give "
            "digests=StreamDigests.of_manager(...) of the manager whose stream it is"
        )

    @staticmethod
    def _checked_digests(value: Any, blocks: int) -> tuple[bytes | None, tuple[bytes, ...]]:
        """Return the digests in an event's `extra`: the parent's, and that of each block."""
        if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], tuple | list):
            parent, found = value[0], tuple(value[1])
            digests = found if parent is None else (parent, *found)
            if len(found) == blocks and all(isinstance(each, bytes) and len(each) in DIGEST_SIZES for each in digests):
                return parent, found
        expected = f"the digest of the parent or None, and of each of {blocks} blocks, of 16 or 32 bytes"
        raise EncodeError(f"extra[{DIGESTS!r}]: expected {expected}, got {shown(value)}")

    def _place(self, event: RouterEvent, tag: Tag, values: list[Any]) -> None:
        """Put the medium and the values in the event's `extra` into the dialect's fields."""
        ordinary = self._structs.ordinary[tag]
        medium = ordinary.own.get("medium")
        tier, extra = event.storage_tier, event.extra
        if medium is not None:
            name = self._media.get(tier)
            if name is None:
                raise EncodeError(
                    f"dialect {self._dialect.name!r} has no name for tier {tier}; it has {', '.join(self._media)}"
                )
            values[ordinary.places[medium]] = name
        elif tier is not StorageTier.DEVICE:
            raise EncodeError(f"dialect {self._dialect.name!r} does not say where a block is, and tier is {tier}")
        if extra is None:
            return
        if type(extra) is not dict and not isinstance(extra, Mapping):
            raise EncodeError(event_flaw(event) or "extra must be a mapping")
        blocks = len(event.event.data.block_hashes)  # type: ignore[union-attr]  # a Cleared has no fields to be put
        if extra.get(LOOKAHEAD) is not None and tag == STORED and LOOKAHEAD not in ordinary.places:
            raise EncodeError(
                f"dialect {self._dialect.name!r} has no {LOOKAHEAD}, and the names of these blocks look ahead: "
                "vllm-0.33 has it, and an engine with Speculative(..., plain_hashes=True) needs none"
            )
        for field in fields_of(self._dialect, tag):
            if field.name not in extra:
                continue
            value = extra[field.name]
            if field.is_own and not (field.type == "medium" and value is None):
                if field.type == "block_size" and (not blocks or isinstance(event.event.data, Located)):
                    continue  # `_tokens_of` or `_of_located` has read it
                raise EncodeError(f"extra[{field.name!r}]: the event has this field itself; extra is for other fields")
            flaw = value_flaw(self._dialect, field, value) or entries_flaw(field, value, blocks)
            if flaw is not None:
                raise EncodeError(f"extra[{field.name!r}]: expected {flaw.expected}, got {flaw.observed}")
            values[ordinary.places[field.name]] = value
