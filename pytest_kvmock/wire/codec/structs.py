"""msgspec's structs, encoders and decoders of a dialect, made from its table row.

Only structs give the exact bytes of an engine: for vLLM's struct with more than 15 fields, msgspec writes the head of a
long map even with few entries. msgspec is an extra, and loaded when the first dialect is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from pytest_kvmock.values.checks import install_text
from pytest_kvmock.values.dialect import DIGEST_SIZES, FIELD_TYPES, REQUIRED, Dialect, WireField
from pytest_kvmock.values.events import StorageTier
from pytest_kvmock.values.tokens import SEED
from pytest_kvmock.wire.codec.event_fields import (
    CLEARED,
    METADATA,
    REMOVED,
    STORED,
    TAG_KEY,
    TAGS,
    Tag,
    fields_of,
    least_read,
    ordinary_value,
)

if TYPE_CHECKING:
    from msgspec import Raw

MOST_KEPT: Final = 256
"""Maximum number of blocks of an event whose ordinary values are cached."""

NOTHING: Final = object()
"""Equal to no value of a field."""

_BEGINS: Final = ("hashes", "parent", "tokens", "block_size")


def load_msgspec() -> Any:
    """Import msgspec.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        import msgspec
    except ImportError:
        raise ImportError(f"dialects of vLLM and SGLang need msgspec: {install_text('wire')}") from None
    return msgspec


class Ordinary:
    """The fields of one kind of event, and the values that an ordinary engine writes in the fields other than the
    event's own.

    Args:
        fields: the fields, in order.

    Attributes:
        own: names of the event's own fields, by type.
        others: the other fields.
        places: the positions of all fields, by name.
    """

    __slots__ = ("_fields", "_kept", "others", "own", "places")

    def __init__(self, fields: tuple[WireField, ...]) -> None:
        self._fields = fields
        self.own = {one.type: one.name for one in fields if one.is_own}
        self.others = [one for one in fields if not one.is_own]
        self.places = {one.name: place for place, one in enumerate(fields)}
        self._kept: dict[int, list[Any]] = {}

    def written(self, blocks: int) -> list[Any]:
        """Return the field values of an ordinary event with `blocks` blocks, in order: a list in which the caller fills
        in the event's own.
        """
        found = self._kept.get(blocks)
        if found is None:
            found = [ordinary_value(one, blocks) for one in self._fields]
            if blocks <= MOST_KEPT:
                self._kept[blocks] = found
        return found.copy()


class BlockCutter:
    """Cuts flat token ids of n full blocks, as a decoder does for each event.

    Args:
        blocks: number of blocks.
        block_size: tokens per block, at least 1.
    """

    __slots__ = ("_cut", "_pack", "_split")

    def __init__(self, blocks: int, block_size: int) -> None:
        self._pack = struct.Struct(f"<{blocks * block_size}I").pack
        self._split = struct.Struct(f"{4 * block_size}s" * blocks).unpack
        cuts = [slice(at, at + block_size) for at in range(0, blocks * block_size, block_size)]
        self._cut: Callable[[tuple[int, ...]], Iterable[tuple[int, ...]]]
        self._cut = itemgetter(*cuts) if blocks > 1 else lambda tokens: (tokens,) * blocks

    def __call__(self, tokens: tuple[int, ...], seed: int = SEED) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Return the local hash and the token ids of each block.

        Args:
            tokens: the token ids of all blocks.
            seed: see `hash_seed`.

        Raises:
            struct.error: a value is not a token id, or their number does not fit the blocks.
        """
        chunks = self._split(self._pack(*tokens))
        return tuple(map(xxh3_64_intdigest, chunks, repeat(seed))), [*self._cut(tokens)]


class Plan(NamedTuple):
    """The plan for reading an ordinary `BlockStored` of n blocks of one size; nearly all events are ordinary.

    Attributes:
        cut: cuts its token ids into blocks and hashes them.
        on_device: the fields after the first four of an ordinary event of blocks on the device.
        elsewhere: the same for blocks on the other tiers.
    """

    cut: BlockCutter
    on_device: list[Any]
    elsewhere: list[tuple[list[Any], StorageTier]]

    def tier_of(self, others: list[Any]) -> StorageTier | None:
        """Return the tier of an ordinary event below the device; None if the event is not ordinary."""
        return next((tier for ordinary, tier in self.elsewhere if others == ordinary), None)


class StoredPlans:
    """The plans for reading and writing an ordinary `BlockStored`, by its number of blocks and further keys.

    Args:
        msgspec: the module.
        dialect: the dialect of the events.

    Attributes:
        get: returns hashes, parent, tokens and block size of a struct, then all other fields in order.
        begins: whether the dialect's fields begin with hashes, parent, tokens and block size, as in all engines.
        reading: the cached plans, by number of blocks and block size; `plan` makes others.
        on_device: the fields after the first four of an ordinary event of blocks on the device, by number of blocks, as
            far as they are cached.
    """

    __slots__ = ("_rest", "_tiers", "begins", "get", "on_device", "reading")

    def __init__(self, msgspec: Any, dialect: Dialect) -> None:
        own = {one.type: one.name for one in dialect.stored if one.is_own}
        self._rest = [one for one in dialect.stored if one.type not in _BEGINS]
        self._tiers: dict[StorageTier, str | None] = dict(dialect.media)
        if all(one.type != "medium" for one in self._rest):
            self._tiers = {StorageTier.DEVICE: None}
        self.begins = tuple(one.type for one in dialect.stored[: len(_BEGINS)]) == _BEGINS
        self.get: Callable[[Any], tuple[Any, ...]] = (
            msgspec.structs.astuple
            if self.begins
            else attrgetter(*(own[kind] for kind in _BEGINS), *(one.name for one in self._rest))
        )
        self.reading: dict[tuple[int, int], Plan] = {}
        self.on_device: dict[int, list[Any]] = {}

    def plan(self, blocks: int, size: int) -> Plan:
        """Make the plan for an event with `blocks` blocks, and cache it unless the number is large."""
        others = {tier: self.rest(blocks, tier) for tier in self._tiers}
        on_device = others.pop(StorageTier.DEVICE, None) or [NOTHING]
        plan = Plan(BlockCutter(blocks, size), on_device, [(rest, tier) for tier, rest in others.items() if rest])
        if blocks <= MOST_KEPT and len(self.reading) < MOST_KEPT:
            self.reading[blocks, size] = plan
        return plan

    def rest(self, blocks: int, tier: StorageTier) -> list[Any] | None:
        """Return the fields after the first four of an ordinary event; None if the dialect cannot express the tier."""
        if tier not in self._tiers:
            return None
        rest = [self._tiers[tier] if one.type == "medium" else ordinary_value(one, blocks) for one in self._rest]
        if tier is StorageTier.DEVICE and blocks <= MOST_KEPT:
            self.on_device[blocks] = rest
        return rest


class Structs:
    """Structs, encoder and decoders of one dialect.

    Args:
        dialect: a dialect in msgpack.

    Raises:
        ImportError: msgspec is not installed.

    Attributes:
        types: the struct of each tag.
        stored_with_metadata: the struct of `BlockStored` with the map after its fields.
        tags: the tag of each struct.
        ordinary: the ordinary fields of each tag.
        tiers: the tier of each medium; under None if the dialect has no media.
        encode: encodes any value.
        batch: decodes a batch to (timestamp, structs, rank).
        event: decodes one event to a struct.
        raw_batch: decodes a batch to (timestamp, events as `msgspec.Raw`, rank).
        plans: the plans for an ordinary `BlockStored`.
        cleared: the only struct of that tag.
        errors: the errors that decoders raise.
    """

    def __init__(self, dialect: Dialect) -> None:
        msgspec = load_msgspec()
        self._dialect = dialect
        self.types: dict[Tag, Any] = {tag: _struct(msgspec, dialect, tag) for tag in TAGS}
        self.tags: dict[type, Tag] = {kind: tag for tag, kind in self.types.items()}
        self.stored_with_metadata = _struct(msgspec, dialect, STORED, [(METADATA, Any)]) if dialect.metadata else None
        self.ordinary = {tag: Ordinary(fields_of(dialect, tag)) for tag in self.types}
        self.tiers: dict[str | None, StorageTier] = {name: tier for tier, name in dialect.media.items()}
        if not dialect.media:
            self.tiers[None] = StorageTier.DEVICE
        decoder = msgspec.msgpack.Decoder
        rank = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] | None
        event = self.types[STORED] | self.types[REMOVED] | self.types[CLEARED]
        self.encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
        self.batch: Callable[[bytes], tuple[float, list[Any], int | None]]
        self.batch = decoder(tuple[float, list[event], rank]).decode  # type: ignore[valid-type]  # made from the row
        self.event: Callable[[bytes], Any] = decoder(event).decode
        self.raw_batch: Callable[[bytes], tuple[float, list[Raw], int | None]]
        self.raw_batch = decoder(tuple[float, list[msgspec.Raw], rank]).decode  # type: ignore[name-defined]  # the module, loaded late
        self.plans = StoredPlans(msgspec, dialect)
        self.cleared = self.types[CLEARED]()
        self._heads = self._ordinary_heads() if dialect.form == "map" else {}
        # In addition to msgspec's own errors: text that is not UTF-8, and nesting beyond Python's stack.
        self.errors: tuple[type[Exception], ...] = (msgspec.MsgspecError, UnicodeError, RecursionError)

    def _ordinary_heads(self) -> dict[Tag, bytes]:
        """Return the first bytes of an ordinary event of each kind: its number of entries, its tag, its first key."""
        heads: dict[Tag, bytes] = {}
        for tag, kind in self.types.items():
            fields = fields_of(self._dialect, tag)
            values = self.ordinary[tag].written(1)
            event = kind(*(0 if one.is_own else value for one, value in zip(fields, values, strict=True)))
            first = fields[0].name.encode() if fields else tag.encode()
            data = self.encode(event)
            after = data.index(tag.encode()) + (len(tag) if fields else 0)
            heads[tag] = data[: data.index(first, after) + len(first)]
        return heads

    def has_keys_once(self, payload: bytes, counts: Mapping[Tag, int], events: int) -> bool:
        """Whether a batch that msgspec has read has only ordinary events and no duplicate key.

        The first bytes of each event contain its number of entries. An ordinary event has no free text that could
        contain such bytes, so counting them is enough.

        Args:
            payload: the batch.
            counts: the number of ordinary events of each kind.
            events: the number of events.
        """
        if counts[STORED] == events:
            return payload.count(self._heads[STORED]) == events
        if sum(counts.values()) != events:
            return False
        return all(payload.count(self._heads[tag]) == count for tag, count in counts.items() if count)


@lru_cache(maxsize=256)
def structs_of(dialect: Dialect) -> Structs:
    """Return the cached structs of a dialect."""
    return Structs(dialect)


def _struct(msgspec: Any, dialect: Dialect, tag: Tag, more: list[tuple[str, Any]] | None = None) -> Any:
    fields: list[Any] = []
    for one in fields_of(dialect, tag):
        kind = _type(msgspec, dialect, one)
        if one.default is REQUIRED:
            fields.append((one.name, kind))
        elif isinstance(one.default, list | dict | set):
            fields.append((one.name, kind, msgspec.field(default_factory=one.default.copy)))
        else:
            fields.append((one.name, kind, one.default))
    fields += [(name, kind, None) for name, kind in more or ()]
    return msgspec.defstruct(
        tag,
        fields,
        tag=tag,
        tag_field=None if dialect.form == "array" else TAG_KEY,
        array_like=dialect.form == "array",
        omit_defaults=True,
        forbid_unknown_fields=True,
        gc=False,
    )


def _type(msgspec: Any, dialect: Dialect, one: WireField) -> Any:
    """Return the type of a field for msgspec's checks, made from `FIELD_TYPES`."""
    meta, shape = msgspec.Meta, FIELD_TYPES[one.type]
    kind: Any = {"integer": int, "string": str, "anything": Any}.get(shape.item)
    if shape.item == "hash":
        if dialect.hashes == "bytes":
            kind = Annotated[bytes, meta(min_length=min(DIGEST_SIZES), max_length=max(DIGEST_SIZES))]
        elif dialect.hashes == "either":
            kind = int
        else:
            kind = Annotated[int, meta(ge=0) if dialect.hashes == "unsigned" else meta(le=2**63 - 1)]
    elif shape.least is not None and not shape.depth:  # token ids are checked when they are packed
        kind = Annotated[int, meta(ge=least_read(one))]
    for _ in range(shape.depth):
        kind = tuple[kind, ...] if one.is_own else list[kind]
    return kind | None if shape.is_optional and kind is not Any else kind


def entries(event: bytes) -> int:
    """Return the number of entries of the map that an event is written as."""
    first = event[0]
    if first < 0x90:
        return first & 15
    return int.from_bytes(event[1 : 3 if first == 0xDE else 5], "big")
