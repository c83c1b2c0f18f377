"""TensorRT-LLM's JSON form of KV events: a list of new events, as returned by `POST /kv_cache_events`.

Events have ids, ranks and windows; hashes are unsigned 64-bit numbers. V2's events also name their layer group and the
hash algorithm of their blocks; with `v2_sha256`, hashes are full digests in hexadecimal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pytest_kvmock.values.checks import MOST_U64, is_integer
from pytest_kvmock.values.events import (
    Cleared,
    EventData,
    KvCacheEvent,
    Removed,
    RouterEvent,
    SparseStored,
    StorageTier,
    Stored,
    Updated,
)
from pytest_kvmock.values.prompt_keys import FULL_ATTENTION, group_extra
from pytest_kvmock.values.tokens import block_hashes
from pytest_kvmock.wire.codec.batch import DIGESTS
from pytest_kvmock.wire.codec.defects import EncodeError, WireDefect, WireProblem, shown

FULL_WINDOW: Final = 2**31 - 1
"""The window, in tokens, of an event without one: as long as any request."""

HASH_ALGOS: Final = ("v1_block_key", "v2_sha256", "v2_sha256_64")
"""The hash algorithms of V2's events."""

_DIGEST_SIZE: Final = 32
_PRIORITY: Final = 35
_V2_FIELD: Final = "layer_group_id"
_U32: Final = 2**32 - 1
_UNREADABLE: Final = {
    RecursionError: WireDefect.NESTED_TOO_DEEPLY,
    UnicodeDecodeError: WireDefect.BAD_TEXT,
}
_OUT_OF_RANGE: Final = {
    "token_id": WireDefect.TOKEN_OUT_OF_RANGE,
    **dict.fromkeys(("block_hash", "block_hashes", "parent_hash"), WireDefect.HASH_OUT_OF_RANGE),
}


def write_events(events: Sequence[RouterEvent]) -> bytes:
    """Write events as one list, followed by a newline.

    Raises:
        EncodeError: TensorRT-LLM has no form for an event.
    """
    rows = []
    for index, event in enumerate(events):
        try:
            rows.append(event_row(event))
        except EncodeError as error:
            raise EncodeError(f"event {index} of the batch: {error}") from None
    return json.dumps(rows, separators=(",", ":")).encode() + b"\n"


def event_row(event: RouterEvent) -> dict[str, Any]:
    """Return one event in the JSON form, as Python objects.

    Raises:
        EncodeError: TensorRT-LLM has no form for it.
    """
    extra = event.extra or {}
    if event.storage_tier is not StorageTier.DEVICE:
        raise EncodeError(f"TensorRT-LLM names a tier by the level of a block alone, got {event.storage_tier.value!r}")
    row: dict[str, Any] = {"event_id": event.event_id, "data": _data_row(event.data, event.token_ids, extra)}
    row["window_size"] = extra.get("window_size", FULL_WINDOW)
    if event.dp_rank:
        row["attention_dp_rank"] = event.dp_rank
    row |= {name: extra[name] for name in ("hash_algo", _V2_FIELD) if name in extra}
    return row


def _hashes(data: Removed | Stored | Updated, extra: Mapping[str, Any]) -> tuple[int | str | None, list[int | str]]:
    """Return the parent and blocks of an event in their written form: numbers, or digests in hexadecimal."""
    if DIGESTS in extra:
        parent, digests = extra[DIGESTS]
        return None if parent is None else parent.hex(), [digest.hex() for digest in digests]
    names = (data.block_hash,) if isinstance(data, Updated) else data.block_hashes
    before = data.parent_hash if isinstance(data, Stored) else None
    return None if before is None else before & MOST_U64, [name & MOST_U64 for name in names]


def _data_row(data: EventData, token_ids: Sequence[Sequence[int]] | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(data, Cleared):
        if "blocks_per_level" not in extra:
            raise EncodeError("TensorRT-LLM has no event that says that all is gone; its created has blocks_per_level")
        return {"type": "created", "num_blocks_per_cache_level": list(extra["blocks_per_level"])}
    if isinstance(data, Removed):
        return {"type": "removed", "block_hashes": _hashes(data, extra)[1]}
    if isinstance(data, Updated):
        changes = {"cache_level": _diff(data.levels), "priority": _diff(data.priorities)}
        return {"type": "updated", "block_hash": _hashes(data, extra)[1][0], **changes}
    if not isinstance(data, Stored) or isinstance(data, SparseStored):
        raise EncodeError(f"TensorRT-LLM has no {type(data).__name__}")
    if token_ids is None or len(token_ids) != len(data.block_hashes):
        raise EncodeError("a block of TensorRT-LLM's Stored has its tokens, and here are not those of each")
    count = len(data.block_hashes)
    more: dict[str, Any] = {}
    if _V2_FIELD in extra:  # V2 always has both
        more = {"mm_keys": [], "cache_salt": extra.get("cache_salt")}
    levels = extra.get("cache_levels", [0] * count)
    priorities = extra.get("priorities", [_PRIORITY] * count)
    parent, hashes = _hashes(data, extra)
    blocks = [
        {
            "type": "stored_block",
            "block_hash": block,
            "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
            "cache_level": level,
            "priority": priority,
            **more,
        }
        for block, tokens, level, priority in zip(hashes, token_ids, levels, priorities, strict=True)
    ]
    return {"type": "stored", "parent_hash": parent, "blocks": blocks}


def _diff(pair: tuple[int, int] | None) -> dict[str, Any] | None:
    return None if pair is None else {"type": "event_diff", "new_value": pair[1], "old_value": pair[0]}


# ---------------------------------------------------------------------------------------------------------- reading


class _FlawError(ValueError):
    """A flaw of an event: its defect and field, the observed value, and what is expected."""

    def __init__(self, defect: WireDefect, field: str, observed: object, expected: str) -> None:
        super().__init__(defect, field, observed, expected)
        self.defect, self.field, self.observed, self.expected = defect, field, observed, expected


def read_events(
    payload: bytes, worker_id: int, problems: list[WireProblem], windows: set[int] | None = None
) -> tuple[list[RouterEvent], int]:
    """Read lists of events, one per line, and note in `problems` the defects of events that are left out.

    Args:
        payload: the bytes, as received.
        worker_id: the worker that sent it.
        problems: where problems are noted.
        windows: the windows seen before in this stream, to which those of the payload are added: a window's group is
            its place among them; None: only the windows of the payload.

    Returns:
        The good events, and the number of all events.
    """
    rows: list[Any] = []
    for line in filter(bytes.strip, payload.split(b"\n")):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            defect = _UNREADABLE.get(type(error), WireDefect.MALFORMED)
            if defect is WireDefect.MALFORMED and not line.rstrip().endswith(b"]"):
                defect = WireDefect.TRUNCATED
            problems.append(WireProblem(defect, None, None, str(error)[:80], "a list of events in JSON"))
            continue
        if isinstance(found, list):
            rows += found
        else:
            problems.append(WireProblem(WireDefect.NOT_A_BATCH, None, None, shown(found), "a list of events"))
    seen = set() if windows is None else windows
    seen.update(row["window_size"] for row in rows if isinstance(row, dict) and is_integer(row.get("window_size"), 1))
    events = []
    for index, row in enumerate(rows):
        try:
            events.append(_event_of(row, worker_id, sorted(seen)))
        except _FlawError as flaw:
            problems.append(WireProblem(flaw.defect, index, flaw.field, shown(flaw.observed)[:80], flaw.expected))
    return events, len(rows)


def _event_of(row: object, worker_id: int, windows: Sequence[int]) -> RouterEvent:
    fields = _read(row, "event", dict)
    event_id, window = _field(fields, "event_id", MOST_U64), _field(fields, "window_size", FULL_WINDOW)
    rank = _field(fields, "attention_dp_rank", _U32) if fields.get("attention_dp_rank") is not None else 0
    group, of_v2 = windows.index(window) if window in windows else 0, dict[str, Any]()
    if fields.get(_V2_FIELD) is not None:
        group = of_v2[_V2_FIELD] = _field(fields, _V2_FIELD, _U32)
    algo = fields.get("hash_algo")
    if algo is not None:
        if algo not in HASH_ALGOS:
            raise _FlawError(WireDefect.WRONG_TYPE, "hash_algo", algo, " or ".join(HASH_ALGOS))
        of_v2["hash_algo"] = algo
    is_longest = window == max(windows, default=window)
    kind = FULL_ATTENTION if is_longest else "sliding_window"
    own = _field(fields, "data", dict)
    if algo == "v2_sha256" and own.get("type") != "created":
        own, of_v2[DIGESTS] = _numbered(own)
    data, token_ids, more = _data_of(own)
    extra = {"window_size": window, **(group_extra(group, kind, None if is_longest else window) or {}), **of_v2, **more}
    return RouterEvent(worker_id, KvCacheEvent(event_id, data, rank), StorageTier.DEVICE, token_ids, extra)


def _numbered(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[bytes | None, tuple[bytes, ...]]]:
    """Return an event with the first 8 bytes of digests as numbers, and the digests of its parent and blocks."""
    found, parent, digests = dict(fields), None, list[bytes]()
    if fields.get("type") == "removed":
        digests = [_digest(each, "block_hashes") for each in _field(fields, "block_hashes", list)]
        found["block_hashes"] = [_number_of(digest) for digest in digests]
    elif fields.get("type") == "updated":
        digests = [_digest(fields.get("block_hash"), "block_hash")]
        found["block_hash"] = _number_of(digests[0])
    elif fields.get("type") == "stored":
        blocks = [_read(block, "blocks", dict) for block in _field(fields, "blocks", list)]
        digests = [_digest(block.get("block_hash"), "block_hash") for block in blocks]
        found["blocks"] = [
            {**block, "block_hash": _number_of(each)} for block, each in zip(blocks, digests, strict=True)
        ]
        if fields.get("parent_hash") is not None:
            parent = _digest(fields["parent_hash"], "parent_hash")
            found["parent_hash"] = _number_of(parent)
    return found, (parent, tuple(digests))


def _number_of(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _digest(value: object, field: str) -> bytes:
    try:
        digest = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        digest = b""
    if len(digest) != _DIGEST_SIZE:
        expected = "64 hexadecimal digits, as its hash_algo is v2_sha256"
        raise _FlawError(WireDefect.HASH_OUT_OF_RANGE, field, value, expected)
    return digest


def _data_of(fields: Mapping[str, Any]) -> tuple[EventData, list[tuple[int, ...]] | None, dict[str, Any]]:
    kind = fields.get("type")
    if kind == "created":
        return Cleared(), None, {"blocks_per_level": _numbers(fields, "num_blocks_per_cache_level")}
    if kind == "removed":
        return Removed(_numbers(fields, "block_hashes")), None, {}
    if kind == "updated":
        changes = (_pair(fields, name) for name in ("cache_level", "priority"))
        return Updated(_field(fields, "block_hash", MOST_U64), *changes), None, {}
    if kind != "stored":
        raise _FlawError(WireDefect.UNKNOWN_TAG, "type", kind, "created, stored, removed or updated")
    blocks = [_read(block, "blocks", dict) for block in _field(fields, "blocks", list)]
    tokens = [
        tuple(_field(_read(token, "tokens", dict), "token_id", _U32) for token in _field(block, "tokens", list))
        for block in blocks
    ]
    if not all(tokens):
        raise _FlawError(WireDefect.WRONG_TYPE, "tokens", [], "at least one token a block")
    salts = {block["cache_salt"] for block in blocks if isinstance(block.get("cache_salt"), str)}
    more = {"cache_salt": min(salts)} if len(salts) == 1 else {}
    local = [block_hashes(each, len(each), cache_namespace=more.get("cache_salt"))[0] for each in tokens]
    parent = None if fields.get("parent_hash") is None else _field(fields, "parent_hash", MOST_U64)
    names = tuple(_field(block, "block_hash", MOST_U64) for block in blocks)
    of_blocks = {"cache_levels": "cache_level", "priorities": "priority"}
    extra = {ours: [_field(block, theirs, _U32) for block in blocks] for ours, theirs in of_blocks.items()}
    return Stored(parent, names, tuple(local)), tokens, {**extra, **more}


def _pair(fields: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    if fields.get(name) is None:
        return None
    diff = _field(fields, name, dict)
    return _field(diff, "old_value", _U32), _field(diff, "new_value", _U32)


def _numbers(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    return tuple(_read(each, name, MOST_U64) for each in _field(fields, name, list))


def _field(fields: Mapping[str, Any], name: str, kind: type | int) -> Any:
    """Return a required field; see `_read`."""
    if name not in fields:
        raise _FlawError(WireDefect.MISSING_FIELD, name, "nothing", "a value")
    return _read(fields[name], name, kind)


def _read(value: Any, name: str, kind: type | int) -> Any:
    """Return a value if it is an object, an array, or an integer from 0 to `kind`."""
    if isinstance(kind, int):
        if is_integer(value, 0) and value <= kind:
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        defect = _OUT_OF_RANGE.get(name, WireDefect.WRONG_TYPE) if is_number else WireDefect.WRONG_TYPE
        raise _FlawError(defect, name, value, f"an integer from 0 to {kind}")
    if isinstance(value, kind):
        return value
    wanted, defect = ("an object", WireDefect.WRONG_FORM) if kind is dict else ("an array", WireDefect.WRONG_TYPE)
    raise _FlawError(defect, name, value, wanted)
