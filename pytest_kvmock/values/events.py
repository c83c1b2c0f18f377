"""The events that engines publish and routers receive: Stored, Removed, Located, Updated, Cleared, and two envelopes.

One subject: event values and their JSON. The shapes, names and JSON come from Dynamo's `kv-router` protocols. Blocks
are parallel tuples, not one object each; `Stored.blocks` makes objects on demand.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, NoReturn, TypeAlias

from pytest_kvmock.values.checks import is_integer, unknown_text

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra

_U32: Final = 2**32 - 1
_U64: Final = 2**64 - 1


def check_block_hashes(hashes: Sequence[int]) -> None:
    """Check that hashes have 64 bits, all unsigned or all signed.

    Raises:
        TypeError: a hash is not an integer.
        OverflowError: a hash has more bits.
    """
    try:
        array("Q", hashes)
    except OverflowError:
        array("q", hashes)


def block_text(block: object) -> str:
    """Return a block or local hash as text: 16 searchable digits; small, handwritten ones in decimal.

    A value that is not a 64-bit hash is shown unchanged.
    """
    if not isinstance(block, int) or not 2**16 <= abs(block) <= _U64:
        return repr(block)
    return f"{'-' * (block < 0)}0x{abs(block):016x}"


def value_text(value: object) -> str:
    """Return the `repr` with hashes in the form of `block_text`."""
    if type(value) is list:
        return f"[{', '.join(map(value_text, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(value_text, value))}{',' * (len(value) == 1)})"
    if value and type(value) in (set, frozenset):
        shown = f"{{{', '.join(map(value_text, value))}}}"  # type: ignore[call-overload]  # mypy does not see the type
        return shown if type(value) is set else f"frozenset({shown})"
    if isinstance(value, dict):
        shown = f"{{{', '.join(f'{value_text(key)}: {value_text(one)}' for key, one in value.items())}}}"
        return shown if type(value) is dict else f"{type(value).__name__}({shown})"
    return block_text(value)


StreamKey: TypeAlias = tuple[int, int]
"""(worker_id, dp_rank): one rank, with separate event ids and blocks."""

BlockTokens: TypeAlias = Sequence[Sequence[int]]
"""Token ids that travel with a Stored: one sequence of `block_size` ids for each block."""


class StorageTier(StrEnum):
    """The location of a block: G1 device, G2 host pinned, G3 disk, G4 external. The value is the name in JSON."""

    DEVICE = "device"
    HOST_PINNED = "host_pinned"
    DISK = "disk"
    EXTERNAL = "external"

    @classmethod
    def of(cls, tier: StorageTier | str) -> StorageTier:
        """Return the tier of a name: its value, or a short name, "host" or "g1" to "g4".

        Raises:
            ValueError: the tier is unknown; the message lists the known ones.
        """
        if type(tier) is cls:
            return tier
        found = TIER_NAMES.get(tier) if isinstance(tier, str) else None
        if found is None:
            raise ValueError(unknown_text("tier", tier, TIER_NAMES))
        return found


TIER_NAMES: Final = {
    **{tier.value: tier for tier in StorageTier},
    "host": StorageTier.HOST_PINNED,
    **{f"g{number}": tier for number, tier in enumerate(StorageTier, start=1)},
}
"""The tiers by all names that users may use."""


class StoredBlock(NamedTuple):
    """One block of a Stored, as `Stored.blocks` shows it."""

    block_hash: int
    tokens_hash: int
    mm_extra_info: Any = None

    def __repr__(self) -> str:
        hashes = f"block_hash={block_text(self.block_hash)}, tokens_hash={block_text(self.tokens_hash)}"
        return f"StoredBlock({hashes}, mm_extra_info={self.mm_extra_info!r})"


# Not frozen: a frozen dataclass takes three times as long to make, and one is made for every move. They are still
# values: every listener of a stream gets the same object.


@dataclass(slots=True, unsafe_hash=True, repr=False)
class Stored:
    """Blocks became cached, in order, each the child of the previous one.

    Attributes:
        parent_hash: sequence hash of the first block's parent; None if the first is a root.
        block_hashes: sequence hash of each block, as the engine publishes it: u64, or i64 (SGLang).
        tokens_hashes: local hash of each block, u64.
        start_position: position of the first block in its sequence, if the engine publishes it.
        mm_extra_info: per block, the engine's data on its multimodal objects; None if there is none.

    Raises:
        ValueError: the tuples differ in length.
    """

    kind: ClassVar[str] = "stored"

    parent_hash: int | None
    block_hashes: tuple[int, ...]
    tokens_hashes: tuple[int, ...]
    start_position: int | None = None
    mm_extra_info: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        if type(self.block_hashes) is not tuple or type(self.tokens_hashes) is not tuple:
            self.block_hashes, self.tokens_hashes = tuple(self.block_hashes), tuple(self.tokens_hashes)
        if len(self.block_hashes) != len(self.tokens_hashes):
            raise ValueError(
                f"Stored: {len(self.block_hashes)} block_hashes and {len(self.tokens_hashes)} tokens_hashes; "
                "one of each a block is expected"
            )
        if self.mm_extra_info is not None and len(self.mm_extra_info) != len(self.block_hashes):
            raise ValueError(
                f"Stored: {len(self.block_hashes)} block_hashes and {len(self.mm_extra_info)} entries of "
                "mm_extra_info; one a block, or None for all, is expected"
            )

    def __repr__(self) -> str:
        hashes = f"block_hashes={value_text(self.block_hashes)}, tokens_hashes={value_text(self.tokens_hashes)}"
        more = f"start_position={self.start_position!r}, mm_extra_info={self.mm_extra_info!r}"
        return f"Stored(parent_hash={block_text(self.parent_hash)}, {hashes}, {more})"

    @property
    def blocks(self) -> tuple[StoredBlock, ...]:
        """The blocks, one object each."""
        infos = self.mm_extra_info or (None,) * len(self.block_hashes)
        return tuple(map(StoredBlock, self.block_hashes, self.tokens_hashes, infos))


# A separate class, so that the usual Stored needs no slots for these fields.


@dataclass(slots=True, unsafe_hash=True, repr=False)
class SparseStored(Stored):
    """A Stored of a sparse cache group: the kept blocks of a span, possibly none.

    Groups with a window or a state keep only the blocks that a later prompt can resume from, and vLLM publishes the
    full span. Only names identify the kept blocks: there are no local hashes, and no block is the child of the previous
    one. The token ids that travel with it cover all blocks of the span.

    Attributes:
        parent_hash: sequence hash of the block before the span, held or not; None if the span begins a prompt.
        block_hashes: the hashes of the kept blocks, in order; fewer than the span has.
        tokens_hashes: empty.
        start_position: None.
        mm_extra_info: None.
        span: tokens of the span.
        block_size: tokens per block of the group.

    Raises:
        ValueError: the span does not consist of full blocks, or all its blocks were kept.
    """

    tokens_hashes: tuple[int, ...] = field(default=(), init=False)
    start_position: int | None = field(default=None, init=False)
    mm_extra_info: tuple[Any, ...] | None = field(default=None, init=False)
    span: int
    block_size: int

    def __post_init__(self) -> None:
        if type(self.block_hashes) is not tuple:
            self.block_hashes = tuple(self.block_hashes)
        if not is_integer(self.block_size, 1):
            raise ValueError(f"SparseStored: block_size must be an integer of at least 1, got {self.block_size!r:.80}")
        if not is_integer(self.span, 1) or self.span % self.block_size:
            raise ValueError(
                f"SparseStored: a span has whole blocks of {self.block_size} tokens, got {self.span!r:.80}"
            )
        blocks = self.span // self.block_size
        if len(self.block_hashes) >= blocks:
            raise ValueError(
                f"SparseStored: {len(self.block_hashes)} block_hashes, and the span of {self.span} tokens has {blocks} "
                f"blocks of {self.block_size}; where all were kept it is a Stored"
            )

    def __repr__(self) -> str:
        hashes = f"parent_hash={block_text(self.parent_hash)}, block_hashes={value_text(self.block_hashes)}"
        return f"SparseStored({hashes}, span={self.span!r}, block_size={self.block_size!r})"

    @property
    def blocks(self) -> tuple[StoredBlock, ...]:
        """Empty, because only the names of the blocks are known."""
        return ()


@dataclass(slots=True, unsafe_hash=True, repr=False)
class Removed:
    """Blocks left the cache, in the order in which they were evicted."""

    kind: ClassVar[str] = "removed"

    block_hashes: tuple[int, ...]

    def __init__(self, block_hashes: Iterable[int]) -> None:
        self.block_hashes = block_hashes if type(block_hashes) is tuple else tuple(block_hashes)

    def __repr__(self) -> str:
        return f"Removed(block_hashes={value_text(self.block_hashes)})"


@dataclass(slots=True, unsafe_hash=True, repr=False)
class Located:
    """A placeholder: these blocks, known now or later, are also in a tier. It has only their names.

    vLLM's offloading publishes one for blocks that it has copied to the host. It neither introduces blocks nor links
    them: a tier-aware index notes the location, and others ignore it.
    """

    kind: ClassVar[str] = "located"

    block_hashes: tuple[int, ...]

    def __init__(self, block_hashes: Iterable[int]) -> None:
        self.block_hashes = block_hashes if type(block_hashes) is tuple else tuple(block_hashes)

    def __repr__(self) -> str:
        return f"Located(block_hashes={value_text(self.block_hashes)})"


@dataclass(slots=True, unsafe_hash=True, repr=False)
class Updated:
    """A cached block changed its level or priority: TensorRT-LLM's event for blocks that move between its tiers.

    It does not change links. A level is the number of a tier: 0 is the device, 1 the host.

    Attributes:
        block_hash: the block.
        levels: old and new level; None if the level stays.
        priorities: old and new eviction priority; None if the priority stays.
    """

    kind: ClassVar[str] = "updated"

    block_hash: int
    levels: tuple[int, int] | None = None
    priorities: tuple[int, int] | None = None

    @property
    def block_hashes(self) -> tuple[int, ...]:
        """The single block, under the name that other events use."""
        return (self.block_hash,)

    def __repr__(self) -> str:
        return f"Updated(block_hash={block_text(self.block_hash)}, levels={self.levels}, priorities={self.priorities})"


@dataclass(slots=True, unsafe_hash=True)
class Cleared:
    """The cache was emptied."""

    kind: ClassVar[str] = "cleared"


EventData: TypeAlias = Stored | Removed | Located | Updated | Cleared


def renamed(data: Removed | Located | Updated, block_hashes: Sequence[int]) -> Removed | Located | Updated:
    """Return the same data with the names of other blocks, equal in number."""
    if isinstance(data, Updated):
        return Updated(block_hashes[0], data.levels, data.priorities)
    return type(data)(tuple(block_hashes))


@dataclass(slots=True, unsafe_hash=True)
class KvCacheEvent:
    """An event that one rank of an engine publishes.

    Attributes:
        event_id: 0, 1, 2 ... for each rank separately, over all tiers.
        data: the Stored, Removed, Located, Updated or Cleared.
        dp_rank: data-parallel rank of the publishing engine.
    """

    event_id: int
    data: EventData
    dp_rank: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return Dynamo's JSON form as Python objects; signed block hashes become the u64 of the same bits, as Dynamo
        reads them.
        """
        return {"event_id": self.event_id, "data": _data_to_json(self.data), "dp_rank": self.dp_rank}

    def to_json(self) -> str:
        """Dynamo's JSON form."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_dict(cls, value: object) -> KvCacheEvent:
        """Read Dynamo's JSON form: absent keys have their default, unknown keys are ignored.

        Raises:
            ValueError: a key is missing or of the wrong type, or a hash is not a u64 (a signed engine hash must be
                converted before this layer). The message names the place.
        """
        return _event_from_json(value, "KvCacheEvent")

    @classmethod
    def from_json(cls, text: str | bytes) -> KvCacheEvent:
        """Read Dynamo's JSON form from text; raises like `from_dict`, and for invalid JSON."""
        return _event_from_json(_loads(text, "KvCacheEvent"), "KvCacheEvent")


@dataclass(slots=True, unsafe_hash=True, repr=False)
class RouterEvent:
    """An event as a router receives it, with its worker.

    Attributes:
        worker_id: the worker.
        event: the published event.
        storage_tier: the tier of the blocks.
        token_ids: for a Stored, the token ids of each block, if known; for a sparse one, of each block of its span.
            They travel with the event but are not part of equality or of Dynamo's JSON.
        extra: its other fields, by the names of the wire (`prompt_keys.EventExtra`): the adapter, salt and session of
            the storing request, per block the values hashed with its tokens, and the cache group of a hybrid model.
            None: no such fields. Do not change it.
        chained: whether it was published for a request, so its hashes must follow the engine's chain; handmade moves
            have free hashes. Like the previous two, it travels with the event and is not part of equality, text or
            JSON.
    """

    worker_id: int
    event: KvCacheEvent
    storage_tier: StorageTier = StorageTier.DEVICE
    token_ids: BlockTokens | None = field(default=None, compare=False)
    extra: EventExtra | None = field(default=None, compare=False)
    chained: bool = field(default=False, compare=False)

    @property
    def event_id(self) -> int:
        """The id of the event: 0, 1, 2 ... for each worker and rank separately."""
        return self.event.event_id

    @property
    def data(self) -> EventData:
        """The Stored, Removed, Located, Updated or Cleared."""
        return self.event.data

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank that published it."""
        return self.event.dp_rank

    @property
    def key(self) -> StreamKey:
        """Worker and rank, which have separate event ids and blocks."""
        return self.worker_id, self.event.dp_rank

    def __repr__(self) -> str:
        extra = "" if self.extra is None else f", extra={self.extra!r}"
        return (
            f"RouterEvent(worker_id={self.worker_id!r}, event={self.event!r}, storage_tier={self.storage_tier!r}, "
            f"token_ids={self.token_ids!r}{extra})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Dynamo's JSON form, as Python objects."""
        return {
            "worker_id": self.worker_id,
            "storage_tier": self.storage_tier.value,
            "event": self.event.to_dict(),
        }

    def to_json(self) -> str:
        """Dynamo's JSON form."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_dict(cls, value: object) -> RouterEvent:
        """Read Dynamo's JSON form; raises as `KvCacheEvent.from_dict` does."""
        where = "RouterEvent"
        fields = _object(value, where)
        tier = fields.get("storage_tier", "device")
        try:
            storage_tier = StorageTier(tier)
        except ValueError:
            known = ", ".join(StorageTier)
            raise ValueError(f"{where}.storage_tier: expected one of {known}, got {tier!r}") from None
        return cls(
            _unsigned(fields, "worker_id", where),
            _event_from_json(_required(fields, "event", where), f"{where}.event"),
            storage_tier,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> RouterEvent:
        """Read Dynamo's JSON form from text; raises like `from_dict`, and for invalid JSON."""
        return cls.from_dict(_loads(text, "RouterEvent"))


_new: Final = object.__new__


class RemovedRow(NamedTuple):
    """Consecutive events of one worker, each a Removed of one block on the device; most events are of this kind.

    A sink gets them by `publish_row(row)` if it has `takes_row()` and that returns True.

    Attributes:
        worker_id: the worker.
        dp_rank: its rank.
        first_id: the id of the first event.
        blocks: the block of each.
        chained: see `RouterEvent`.
    """

    worker_id: int
    dp_rank: int
    first_id: int
    blocks: tuple[int, ...]
    chained: bool

    @property
    def key(self) -> StreamKey:
        """Worker and rank."""
        return self.worker_id, self.dp_rank

    def events(self) -> list[RouterEvent]:
        """Make the events."""
        worker_id, dp_rank, first_id, blocks, chained = self
        new, device = _new, StorageTier.DEVICE
        events = []
        for event_id, block in enumerate(blocks, first_id):
            # Inlines the constructors; calling them would take half of the time here.
            data = new(Removed)
            data.block_hashes = (block,)
            event = new(KvCacheEvent)
            event.event_id, event.data, event.dp_rank = event_id, data, dp_rank
            named = new(RouterEvent)
            named.worker_id, named.event, named.storage_tier = worker_id, event, device
            named.token_ids, named.extra, named.chained = None, None, chained
            events.append(named)
        return events


def stored_event(  # noqa: PLR0917 - it is called for each event that is decoded, and keywords take time
    worker_id: int,
    event_id: int,
    dp_rank: int,
    parent_hash: int | None,
    block_hashes: tuple[int, ...],
    tokens_hashes: tuple[int, ...],
    storage_tier: StorageTier,
    token_ids: BlockTokens | None,
) -> RouterEvent:
    """Make the event of a Stored with tuples of equal length, in half the time of three constructors."""
    data = _new(Stored)
    data.parent_hash, data.block_hashes, data.tokens_hashes = parent_hash, block_hashes, tokens_hashes
    data.start_position = data.mm_extra_info = None
    event = _new(KvCacheEvent)
    event.event_id, event.data, event.dp_rank = event_id, data, dp_rank
    named = _new(RouterEvent)
    named.worker_id, named.event, named.storage_tier = worker_id, event, storage_tier
    named.token_ids, named.extra, named.chained = token_ids, None, False
    return named


# ------------------------------------------------------------------------------------------------ Dynamo's JSON


# Dynamo's JSON has no sparse Stored, Located or Updated. They have our own form, which Dynamo refuses.


def _data_to_json(data: EventData) -> Any:
    if isinstance(data, SparseStored):
        parent = None if data.parent_hash is None else data.parent_hash & _U64
        kept = [block_hash & _U64 for block_hash in data.block_hashes]
        span = {"span": data.span, "block_size": data.block_size}
        return {"stored": {"parent_hash": parent, "block_hashes": kept, **span}}
    if isinstance(data, Stored):
        blocks = [
            {"block_hash": block_hash & _U64, "tokens_hash": tokens_hash, "mm_extra_info": info}
            for block_hash, tokens_hash, info in data.blocks
        ]
        parent = None if data.parent_hash is None else data.parent_hash & _U64
        return {"stored": {"parent_hash": parent, "start_position": data.start_position, "blocks": blocks}}
    if isinstance(data, Updated):
        changes = {"levels": data.levels, "priorities": data.priorities}
        return {data.kind: {"block_hash": data.block_hash & _U64, **changes}}
    if isinstance(data, (Removed, Located)):
        return {data.kind: {"block_hashes": [block_hash & _U64 for block_hash in data.block_hashes]}}
    return "cleared"


def _event_from_json(value: object, where: str) -> KvCacheEvent:
    fields = _object(value, where)
    return KvCacheEvent(
        _unsigned(fields, "event_id", where),
        _data_from_json(_required(fields, "data", where), f"{where}.data"),
        _unsigned(fields, "dp_rank", where, _U32) if "dp_rank" in fields else 0,
    )


def _data_from_json(value: object, where: str) -> EventData:
    if value == "cleared":
        return Cleared()
    if isinstance(value, Mapping) and len(value) == 1:
        kind, body = next(iter(value.items()))
        if kind == "stored":
            return _stored_from_json(body, f"{where}.stored")
        if kind in ("removed", "located"):
            hashes = _hashes_from_json(_object(body, f"{where}.{kind}"), f"{where}.{kind}")
            return Removed(hashes) if kind == "removed" else Located(hashes)
        if kind == "updated":
            return _updated_from_json(_object(body, f"{where}.{kind}"), f"{where}.{kind}")
        if kind == "cleared" and body is None:
            return Cleared()
    raise ValueError(
        f'{where}: expected {{"stored": ...}}, {{"removed": ...}} or "cleared", got '
        f"{json.dumps(value, default=repr)[:80]}"
    )


def _hashes_from_json(fields: Mapping[str, Any], where: str) -> tuple[int, ...]:
    place = f"{where}.block_hashes"
    return tuple(_number(h, f"{place}[{i}]") for i, h in enumerate(_array(fields, "block_hashes", where)))


def _updated_from_json(fields: Mapping[str, Any], where: str) -> Updated:
    pairs: list[tuple[int, int] | None] = []
    for name in ("levels", "priorities"):
        pair = fields.get(name)
        if pair is not None and (not isinstance(pair, list | tuple) or len(pair) != 2):
            raise ValueError(f"{where}.{name}: expected [before, after], or null, got {pair!r:.80}")
        pairs.append(
            None if pair is None else (_number(pair[0], f"{where}.{name}"), _number(pair[1], f"{where}.{name}"))
        )
    return Updated(_unsigned(fields, "block_hash", where), *pairs)


def _stored_from_json(body: object, where: str) -> Stored:
    fields = _object(body, where)
    if "span" in fields:
        parent, kept = fields.get("parent_hash"), _hashes_from_json(fields, where)
        sizes = [_unsigned(fields, name, where) for name in ("span", "block_size")]
        try:
            return SparseStored(None if parent is None else _number(parent, f"{where}.parent_hash"), kept, *sizes)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    hashes, locals_, infos = [], [], []
    for i, block in enumerate(_array(fields, "blocks", where)):
        place = f"{where}.blocks[{i}]"
        entry = _object(block, place)
        hashes.append(_unsigned(entry, "block_hash", place))
        locals_.append(_unsigned(entry, "tokens_hash", place))
        infos.append(_mm_info(entry.get("mm_extra_info"), f"{place}.mm_extra_info"))
    parent, start = fields.get("parent_hash"), fields.get("start_position")
    return Stored(
        None if parent is None else _number(parent, f"{where}.parent_hash"),
        tuple(hashes),
        tuple(locals_),
        None if start is None else _number(start, f"{where}.start_position", _U32),
        tuple(infos) if any(info is not None for info in infos) else None,
    )


def _mm_info(value: object, where: str) -> object:
    """Check a block's `{"mm_objects": [{"mm_hash": u64, "offsets": [[start, end], ...]}]}`, and return it unchanged."""
    if value is None:
        return None
    for i, entry in enumerate(_array(_object(value, where), "mm_objects", where)):
        place = f"{where}.mm_objects[{i}]"
        fields = _object(entry, place)
        _unsigned(fields, "mm_hash", place)
        for j, pair in enumerate(_array(fields, "offsets", place)):
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError(f"{place}.offsets[{j}]: expected [start, end], got {pair!r:.80}")
            for number in pair:
                _number(number, f"{place}.offsets[{j}]")
    return value


# Dynamo reads JSON with serde: a repeated field and NaN are errors there, but not in Python's json.


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if key in _FIELDS and keys.count(key) > 1), None)
        if twice is not None:
            raise ValueError(f"duplicate field {twice!r}")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


_FIELDS: Final = frozenset(
    (
        *("worker_id", "storage_tier", "event", "event_id", "data", "dp_rank"),
        *("parent_hash", "start_position", "blocks", "block_hash", "tokens_hash", "block_hashes"),
        *("mm_extra_info", "mm_objects", "mm_hash", "offsets"),
        *("span", "block_size", "levels", "priorities"),
    )
)
_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique_fields, parse_constant=_no_constant)


def _loads(text: str | bytes, where: str) -> object:
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError(f"{where}: not JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object, got {value!r:.80}")  # noqa: TRY004 - one error for bad JSON
    return value


def _required(fields: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in fields:
        raise ValueError(f"{where}: missing field {key!r}")
    return fields[key]


def _array(fields: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = _required(fields, key, where)
    if not isinstance(value, list):
        raise ValueError(f"{where}.{key}: expected an array, got {value!r:.80}")  # noqa: TRY004 - as above
    return value


def _unsigned(fields: Mapping[str, Any], key: str, where: str, top: int = _U64) -> int:
    return _number(_required(fields, key, where), f"{where}.{key}", top)


def _number(value: object, where: str, top: int = _U64) -> int:
    if not is_integer(value, 0) or value > top:
        raise ValueError(f"{where}: expected an integer from 0 to {top} (u{top.bit_length()}), got {value!r:.80}")
    return value


KINDS: Final = tuple(data.kind for data in (Stored, Removed, Cleared, Located, Updated))
"""The kinds of events."""


def kind_of(event: RouterEvent) -> str:
    """Return an event's kind: "stored", "removed", "cleared", "located" or "updated"."""
    return event.event.data.kind
