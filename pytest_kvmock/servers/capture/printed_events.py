"""Events as programs print them: the output of vLLM's example subscriber, or reprs or dicts, one per line.

Dicts may be JSON, and their numbers may be texts. Texts are parsed as Python literals and never evaluated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_kvmock.servers.capture.lines import CaptureError
from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.wire.codec.table import find_dialect, known_dialects

_KINDS: Final = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_BATCHES: Final = ("KVEventBatch", "EventBatch")
_HEADER: Final = re.compile(r"Received event batch at ([0-9.eE+-]+):?\s*$")
_FIRST: Final = re.compile(rf"\s*(?:-\s+)?(?:{_HEADER.pattern}|(?:{'|'.join((*_KINDS, *_BATCHES))})\(|{{)")
_NUMBER: Final = re.compile(r"-?[0-9]+")
_OF_NUMBERS: Final = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "group_idx")
_CONSTANTS: Final = {"true": True, "false": False, "null": None}

TAKES: Final = (
    'what vLLM\'s example subscriber prints ("Received event batch at ...:" and "  - '
    'BlockStored(...)"), reprs of events or batches, or '
    "dicts with a type, one a line"
)
"""The texts that are read, in words."""


def is_printed(data: bytes) -> bool:
    """Whether a file is such a text, judged by its first line."""
    first = data[:4096].lstrip().splitlines()[:1]
    text = first[0].decode(errors="replace") if first else ""
    is_dict = text.startswith("{")
    return bool(_FIRST.match(text)) and (not is_dict or bool(re.search(rf"['\"](?:{'|'.join(_KINDS)})['\"]", text)))


def printed_payloads(data: bytes, dialect: Dialect | None, path: Path) -> tuple[Dialect, list[bytes]]:
    """Return the batches of a text, as the payloads of a dialect.

    Args:
        data: the content of the file.
        dialect: a dialect of msgpack; None: the newest dialect of vLLM that has the fields of the events.
        path: the file, for the message.

    Raises:
        CaptureError: a line has none of these forms; the message is one line.
        ImportError: msgspec is not installed.
    """
    import msgspec

    batches = list(_batches(data, path))
    events = [event for _, of_batch, _ in batches for event in of_batch]
    row = _dialect_of(events, path) if dialect is None else dialect
    return row, [msgspec.msgpack.encode([ts, [_shaped(each, row) for each in of], rank]) for ts, of, rank in batches]


def _batches(data: bytes, path: Path) -> Iterator[tuple[float, list[dict[str, Any]], int | None]]:
    """Yield time, events and rank of each batch; an event outside of a batch is a batch by itself."""
    open_batch: tuple[float, list[dict[str, Any]], int | None] | None = None
    count = 0
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        text = line.strip().removeprefix("- ").strip()
        if not text:
            continue
        if header := _HEADER.match(text):
            if open_batch is not None:
                yield open_batch
            open_batch = (float(header[1]), [], None)
            continue
        value = _value(text, f"{path}: line {number}")
        if value["type"] in _BATCHES:
            yield float(value.get("ts") or count), value.get("events") or [], value.get("data_parallel_rank")
        elif open_batch is not None:
            open_batch[1].append(value)
        else:
            yield float(count), [value], None
        count += 1
    if open_batch is not None:
        yield open_batch


def _value(text: str, where: str) -> dict[str, Any]:
    problem = "no event or batch"
    try:
        value = _literal(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        value, problem = None, getattr(error, "msg", None) or str(error) or type(error).__name__
    if not isinstance(value, dict) or value.get("type") not in (*_KINDS, *_BATCHES):
        raise CaptureError(f"{where}: {text[:60]!r} cannot be read ({problem}); expected {TAKES}")
    return value


def _literal(node: ast.expr) -> Any:
    """Return the value of a node; a call with the name of an event becomes a dict with its type.

    Raises:
        ValueError: the node is not a literal.
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_literal(each) for each in parts]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Dict(keys=keys, values=values):
            names = [None if each is None else _literal(each) for each in keys]
            if not all(isinstance(each, str) for each in names):
                raise ValueError("a dict whose keys are not strings")
            return _read({str(name): _literal(each) for name, each in zip(names, values, strict=True)})
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if name in (*_KINDS, *_BATCHES):
            fields = {each.arg: _literal(each.value) for each in keywords if each.arg is not None}
            return _read({"type": name, **fields})
    raise ValueError(f"{type(node).__name__} is not a literal")


def _read(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields, with numbers in place of texts of numbers."""
    return {name: _number(value) if name in _OF_NUMBERS else value for name, value in fields.items()}


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(each) for each in value]
    return int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _dialect_of(events: Sequence[Mapping[str, Any]], path: Path) -> Dialect:
    """Return the newest dialect of vLLM that has all fields of the events."""
    seen = {name for each in events if each["type"] == "BlockStored" for name in each} - {"type"}
    has_digests = any(isinstance(each, bytes) for event in events for each in event.get("block_hashes") or ())
    for name in reversed([each for each in known_dialects() if each.startswith("vllm")]):
        row = find_dialect(name)
        if row.is_msgpack and (row.hashes == "bytes") is has_digests and seen <= {field.name for field in row.stored}:
            return row
    raise CaptureError(f"{path}: no vLLM dialect has all fields {', '.join(sorted(seen))[:200]}: name the dialect")


def _shaped(event: Mapping[str, Any], dialect: Dialect) -> Any:
    """Return an event in the form of a dialect."""
    fields = {"BlockStored": dialect.stored, "BlockRemoved": dialect.removed}.get(event["type"], ())
    if dialect.form == "map":  # defaults are left out
        defaults = {field.name: field.default for field in fields}
        return {name: value for name, value in event.items() if name not in defaults or value != defaults[name]}
    return [event["type"], *(event.get(field.name) for field in fields)]
