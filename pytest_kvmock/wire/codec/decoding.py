"""Decoding of payloads into events and problems. No payload makes it raise."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.dialect import DIGEST_SIZES, Dialect
from pytest_kvmock.values.events import (
    Cleared,
    EventData,
    KvCacheEvent,
    Located,
    Removed,
    RouterEvent,
    SparseStored,
    StorageTier,
    Stored,
    stored_event,
)
from pytest_kvmock.values.prompt_keys import LOOKAHEAD, hash_options
from pytest_kvmock.values.tokens import block_hashes, windows_of
from pytest_kvmock.wire.codec.batch import DIGESTS, SIZE, Decoded
from pytest_kvmock.wire.codec.defects import WireDefect, WireProblem, shown
from pytest_kvmock.wire.codec.dynamo_json import read_lines
from pytest_kvmock.wire.codec.event_fields import (
    REMOVED,
    STORED,
    EventFields,
    Tag,
    entries_flaw,
    fields_of,
    is_location,
    is_plain,
    is_sparse,
    located_value,
    lookahead_flaw,
    ordinary_value,
    read_event,
)
from pytest_kvmock.wire.codec.reader import Reader, ReadError
from pytest_kvmock.wire.codec.structs import BlockCutter, Structs, entries, structs_of
from pytest_kvmock.wire.codec.table import find_dialect
from pytest_kvmock.wire.codec.trtllm_json import read_events

# Theory of operation
#
# msgspec reads the batch into the dialect's structs and checks types and ranges. It keeps the last of two equal keys,
# so a batch of maps is written again and compared: equal bytes prove that no key is duplicate. If msgspec refuses a
# batch, each of its events is read separately. If it refuses an event, or the event is unusual, `reader.py` and
# `event_fields.py` read it at a tenth of the speed and find the problem. So a good batch costs little, and a bad one is
# explained.

MOST_BYTES: Final = 2**26
"""The largest payload that is read: 64 MiB. A batch of an engine has some hundred kB at most."""

_U32: Final = 2**32 - 1
_BATCH: Final = "an array of timestamp, events and rank"


def decode(
    payload: bytes,
    dialect: str | Dialect,
    *,
    worker_id: int = 0,
    dp_rank: int = 0,
    first_event_id: int = 0,
    most_bytes: int = MOST_BYTES,
) -> Decoded:
    """Read a payload as a router of this dialect does, and report all its problems.

    No bytes make it raise. A bad event is left out and reported; the good events of its batch are returned.

    Args:
        payload: the last frame of a message.
        dialect: name of the dialect, or a `Dialect`.
        worker_id: the worker of the stream; Dynamo's `RouterEvent` has its own.
        dp_rank: the rank of the events if the batch has none.
        first_event_id: id of the first event of the batch, because a wire numbers batches, not events. Dynamo's JSON
            has ids.
        most_bytes: larger payloads are not read.

    Raises:
        TypeError: the payload is not bytes.
        ValueError: the dialect is unknown, or a number is not at least 0.
        ImportError: msgspec is not installed.
    """
    row = find_dialect(dialect)
    structs = structs_of(row) if row.is_msgpack else None
    if type(payload) is not bytes:
        payload = as_bytes(payload)
    if not type(worker_id) is type(dp_rank) is type(first_event_id) is type(most_bytes) is int or (
        worker_id < 0 or dp_rank < 0 or first_event_id < 0
    ):
        _check_numbers(worker_id=worker_id, dp_rank=dp_rank, first_event_id=first_event_id, most_bytes=most_bytes)
    out = Decoded([], [])
    if len(payload) > most_bytes:
        out.problems.append(_oversize(payload, most_bytes))
    elif row.form == "trtllm_json":
        out.events, out.num_events = read_events(payload, worker_id, out.problems)
    elif structs is None:
        out.events, out.num_events = read_lines(payload, row, worker_id, out.problems)
    else:
        _Decoder(row, structs, payload, worker_id=worker_id, dp_rank=dp_rank, first_event_id=first_event_id).into(out)
    if (timestamp := out.timestamp) is not None and not -math.inf < timestamp < math.inf:
        _note_timestamp(out)
    return out


def _check_numbers(**numbers: object) -> None:
    """Raise a ValueError for an argument of `decode` that is not an integer of at least 0."""
    for name, value in numbers.items():
        check_integer(name, value, 0)


def as_bytes(payload: object) -> bytes:
    """Return a payload as bytes.

    Raises:
        TypeError: it is not a buffer of bytes.
    """
    if isinstance(payload, bytes):
        return payload
    try:
        return memoryview(payload).tobytes()  # type: ignore[arg-type]  # it raises for what is not a buffer
    except TypeError:
        raise TypeError(f"a payload is bytes, or a buffer of them; got {payload!r:.80}") from None


def _note_timestamp(out: Decoded) -> None:
    """Report an invalid timestamp, and leave it out."""
    observed, out.timestamp = shown(out.timestamp), None
    problem = WireProblem(WireDefect.WRONG_TYPE, None, "timestamp", observed, "a finite number", is_kept=True)
    out.problems.insert(0, problem)


def _oversize(payload: bytes, most: int) -> WireProblem:
    check_integer("most_bytes", most, 0)
    return WireProblem(WireDefect.OVERSIZE, None, None, f"{len(payload)} bytes", f"at most {most}")


# ------------------------------------------------------------------------------------------------- one batch


def _split(structs: Structs, payload: bytes, out: Decoded) -> list[bytes]:
    """Split a batch into its events, as far as possible, and note the problems of the batch."""
    try:
        out.timestamp, raws, out.dp_rank = structs.raw_batch(payload)
    except structs.errors:
        return _split_carefully(payload, out)
    out.num_events = len(raws)
    return [bytes(raw) for raw in raws]


def _split_carefully(payload: bytes, out: Decoded) -> list[bytes]:
    def note(defect: WireDefect, field: str | None, observed: str, expected: str, *, kept: bool = True) -> None:
        out.problems.append(WireProblem(defect, None, field, observed, expected, is_kept=kept))

    reader = Reader(payload)
    events: list[bytes] = []
    index: int | None = None
    try:
        length = reader.array_length()
        if length is None or length < 2:
            observed = shown(reader.value()) if length is None else f"an array of {length}"
            note(WireDefect.NOT_A_BATCH, None, observed, _BATCH, kept=False)
            return []
        timestamp = reader.value()
        if isinstance(timestamp, int | float) and not isinstance(timestamp, bool):
            out.timestamp = float(timestamp)
        else:
            note(WireDefect.WRONG_TYPE, "timestamp", shown(timestamp), "a number")
        count = reader.array_length()
        if count is None:
            note(WireDefect.WRONG_TYPE, "events", shown(reader.value()), "an array of events", kept=False)
            return []
        for index in range(count):  # noqa: B007 - it says, below, in which event the bytes ended
            start = reader.position
            out.num_events = len(events) + 1
            reader.skip()
            events.append(payload[start : reader.position])
        index = None
        if length == 2:
            note(WireDefect.MISSING_FIELD, "data_parallel_rank", "an array of 2", _BATCH)
            _note_rest(reader, note)
            return events
        rank = reader.value()
        if rank is None or (isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank <= _U32):
            out.dp_rank = rank
        else:
            note(WireDefect.BAD_RANK, "data_parallel_rank", shown(rank), "an integer from 0 to 4294967295, or nil")
        for place in range(3, length):
            note(WireDefect.UNKNOWN_FIELD, f"field_{place}", shown(reader.value()), _BATCH)
        _note_rest(reader, note)
    except ReadError as error:
        kept = bool(events) and index is None
        out.problems.append(WireProblem(error.defect, index, None, error.observed, error.expected, is_kept=kept))
    return events


def _note_rest(reader: Reader, note: Any) -> None:
    if reader.rest:
        note(WireDefect.TRAILING_BYTES, None, f"{reader.rest} bytes after it", "the end of the batch")


def _struct(dialect: Dialect, structs: Structs, event: bytes, read: Callable[[bytes], Any]) -> Any:
    """Return the struct of one event; None if msgspec refuses it, or a key may be duplicate."""
    try:
        record = read(event)
    except structs.errors:
        return None
    if dialect.form == "map":
        fields = fields_of(dialect, structs.tags[type(record)])
        there = sum(one.is_required or getattr(record, one.name) != one.default for one in fields)
        if entries(event) != 1 + there:
            return None
    return record


class _Decoder:
    """Reads one payload of msgpack."""

    __slots__ = ("_dialect", "_events", "_first", "_payload", "_rank", "_structs", "_worker")

    def __init__(
        self, dialect: Dialect, structs: Structs, payload: bytes, *, worker_id: int, dp_rank: int, first_event_id: int
    ) -> None:
        self._dialect, self._structs, self._payload = dialect, structs, payload
        self._worker, self._rank, self._first = worker_id, dp_rank, first_event_id
        self._events: list[bytes] | None = None  # the events of the batch; split on demand

    def into(self, out: Decoded) -> None:
        """Read the payload."""
        structs, dialect = self._structs, self._dialect
        try:
            out.timestamp, of_batch, out.dp_rank = batch = structs.batch(self._payload)
        except structs.errors:
            pass
        else:
            out.num_events = len(of_batch)
            ordinary = self._add_all(of_batch, out)
            if (
                dialect.form == "array"
                or structs.has_keys_once(self._payload, ordinary, len(of_batch))
                or structs.encode(batch) == self._payload
            ):
                return
        out.events, out.problems = [], []
        self._events = _split(structs, self._payload, out)
        self._add_all([_struct(dialect, structs, event, structs.event) for event in self._events], out)

    def _add_all(self, of_batch: list[Any], out: Decoded) -> dict[Tag, int]:
        """Make events from structs; None stands for an event that msgspec refused.

        Returns:
            The number of ordinary events, by tag.
        """
        # This loop determines the speed: one flat body for the usual Stored.
        structs, worker, rank = self._structs, self._worker, self._rank if out.dp_rank is None else out.dp_rank
        plans, device = structs.plans, StorageTier.DEVICE
        kind, get, known = structs.types[STORED], plans.get, plans.reading
        if self._dialect.hashes == "bytes":
            kind = None
        append, make, event_id, stored = out.events.append, stored_event, self._first, 0
        counts: dict[Tag, int] = {STORED: 0}
        for index, record in enumerate(of_batch):
            if type(record) is kind:
                hashes, parent, tokens, size, *others = get(record)
                blocks = len(hashes)
                if tokens and len(tokens) == blocks * size:
                    plan = known.get((blocks, size)) or plans.plan(blocks, size)
                    tier = device if others == plan[1] else plan.tier_of(others)
                    if tier is not None:
                        try:
                            local_hashes, token_ids = plan[0](tokens)
                        except struct.error:
                            pass  # a token id is out of range; the careful reader reports it
                        else:
                            append(make(worker, event_id + index, rank, parent, hashes, local_hashes, tier, token_ids))
                            stored += 1
                            continue
            named = None if record is None else self._of_struct(record, index, rank)
            if named is None:
                fields = read_event(self._dialect, Reader(self._bytes(index)).value(), index, out.problems)
                named = None if fields is None else self._event(fields, index, rank)
            elif named.extra is None:
                tag = structs.tags[type(record)]
                counts[tag] = counts.get(tag, 0) + 1
            if named is not None:
                append(named)
        counts[STORED] += stored
        return counts

    def _bytes(self, index: int) -> bytes:
        """Return one event as received."""
        if self._events is None:
            self._events = _split(self._structs, self._payload, Decoded())
        return self._events[index]

    def _of_struct(self, record: Any, index: int, rank: int) -> RouterEvent | None:
        """Return the event of an unusual struct; None if the careful reader must read it."""
        tag = self._structs.tags[type(record)]
        fields = EventFields(tag)
        ordinary = self._structs.ordinary[tag]
        for kind, name in ordinary.own.items():
            fields.own[kind] = getattr(record, name)
        own = fields.own
        if "medium" in own:
            if own["medium"] is None:
                fields.extra[ordinary.own["medium"]] = None
            elif own["medium"] not in self._structs.tiers:
                return None
        blocks = len(own.get("hashes", ()))
        if tag == STORED and is_location(self._dialect, own):
            fields.form = "located"
        for one in ordinary.others:
            value = getattr(record, one.name)
            if value != (located_value(one) if fields.form == "located" else ordinary_value(one, blocks)):
                if not is_plain(value) or entries_flaw(one, value, blocks) is not None:
                    return None
                fields.extra[one.name] = value
        if tag == STORED and fields.form != "located":
            tokens, size = own["tokens"], own["block_size"]
            if not size or (tokens and not 0 <= min(tokens) <= max(tokens) <= _U32):
                return None
            if len(tokens) != blocks * size:
                if not is_sparse(self._dialect, fields):
                    return None
                fields.form = "sparse"
            if lookahead_flaw(fields) is not None:
                return None
        if self._dialect.hashes == "bytes" and not {*DIGEST_SIZES}.issuperset(map(len, self._digests(own))):
            return None
        return self._event(fields, index, rank)

    @staticmethod
    def _digests(own: Mapping[Any, Any]) -> list[bytes]:
        parent = own.get("parent")
        return [*own.get("hashes", ()), *(() if parent is None else (parent,))]

    def _event(self, fields: EventFields, index: int, rank: int) -> RouterEvent:
        """Return the event of valid fields."""
        own, extra = fields.own, fields.extra
        if isinstance(keys := extra.get("extra_keys"), list):  # msgpack has no tuples, but events have
            extra["extra_keys"] = [_tuples(each) for each in keys]
        medium = own.get("medium")
        tier = StorageTier.DEVICE if medium is None else self._structs.tiers[medium]
        hashes, parent = tuple(own.get("hashes", ())), own.get("parent")
        if self._dialect.hashes == "bytes" and fields.tag in (STORED, REMOVED):
            extra[DIGESTS] = (parent, hashes)
            hashes = tuple(int.from_bytes(digest[-8:], "big") for digest in hashes)
            parent = None if parent is None else int.from_bytes(parent[-8:], "big")
        token_ids = None
        if fields.tag == REMOVED:
            data: EventData = Removed(hashes)
        elif fields.tag != STORED:
            data = Cleared()
        elif fields.form == "located":
            data = Located(hashes)
            if own["block_size"]:
                extra[SIZE] = own["block_size"]
        elif fields.form == "sparse":
            tokens, size = tuple(own["tokens"]), own["block_size"]
            data = SparseStored(parent, hashes, len(tokens), size)
            token_ids = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        else:
            local_hashes, token_ids = self._blocks(fields)
            data = Stored(parent, hashes, local_hashes)
        return RouterEvent(self._worker, KvCacheEvent(self._first + index, data, rank), tier, token_ids, extra or None)

    def _blocks(self, fields: EventFields) -> tuple[tuple[int, ...], list[tuple[int, ...]] | None]:
        """Return the router's hash of each block of a Stored, and its token ids or pairs.

        Hashes include the keys in the event's `extra`; if names look ahead, they cover windows with the next tokens.
        """
        own, extra = fields.own, fields.extra
        tokens, size, blocks = own["tokens"], own["block_size"], len(own["hashes"])
        options = hash_options(extra)
        if not blocks:
            extra[SIZE] = size
            return (), None
        if fields.pairs or LOOKAHEAD in extra:
            units = list(map(tuple, tokens)) if fields.pairs else tokens
            pages: list[tuple[Any, ...]] = [tuple(units[at : at + size]) for at in range(0, len(units), size)]
            windows, ahead = windows_of(pages, extra.get(LOOKAHEAD))
            flat = [token for window in windows for token in window]
            return tuple(block_hashes(flat, size + ahead, **options)), pages
        local_hashes, token_ids = BlockCutter(blocks, size)(tuple(tokens))
        return tuple(block_hashes(tokens, size, **options)) if options else local_hashes, token_ids


def _tuples(value: Any) -> Any:
    """Return a value with tuples instead of lists, also inside."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
