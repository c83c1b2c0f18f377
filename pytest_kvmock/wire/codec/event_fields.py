"""Checks of the fields of one event: its own values, its extra values, and its problems.

One subject: the values that a field of each type may hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from pytest_kvmock.values.checks import is_integer
from pytest_kvmock.values.dialect import (
    DIGEST_SIZES,
    FIELD_TYPES,
    NONE_PER_BLOCK,
    REQUIRED,
    Dialect,
    FieldShape,
    FieldType,
    WireField,
)
from pytest_kvmock.values.events import StorageTier
from pytest_kvmock.values.prompt_keys import LOOKAHEAD, may_be_sparse
from pytest_kvmock.wire.codec.defects import WireDefect, WireProblem, shown, shown_hash
from pytest_kvmock.wire.codec.reader import MOST_DEPTH, Pairs, Unreadable

TAG_KEY: Final = "type"
METADATA: Final = "metadata"
"""The name, in problems, of the map after the last field (`Dialect.metadata`)."""

Tag: TypeAlias = Literal["BlockStored", "BlockRemoved", "AllBlocksCleared"]

STORED: Final = "BlockStored"
REMOVED: Final = "BlockRemoved"
CLEARED: Final = "AllBlocksCleared"
TAGS: Final[tuple[Tag, ...]] = (STORED, REMOVED, CLEARED)

_U32: Final = 2**32 - 1
_RANGES: Final = {
    "unsigned": ("0", "2**64 - 1"),
    "signed": ("-2**63", "2**63 - 1"),
    "either": ("-2**63", "2**64 - 1"),
}
"""The ranges of integer hashes, as text."""


class Flaw(NamedTuple):
    """The problem of one value."""

    defect: WireDefect
    observed: str
    expected: str


Form: TypeAlias = Literal["dense", "sparse", "located"]
"""The form of a `BlockStored`: with every block of its span, with some of them, or a location."""


@dataclass(slots=True)
class EventFields:
    """An event whose fields are valid.

    Attributes:
        tag: one of `TAGS`.
        own: the values of the event's own fields, by `WireField.type`.
        extra: the values that an ordinary event does not have, by name.
        pairs: whether the token ids are pairs, each beginning with the end of the previous pair, as in SGLang with a
            draft model.
        form: the form of a `BlockStored`.
    """

    tag: Tag
    own: dict[FieldType, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    pairs: bool = False
    form: Form = "dense"


def fields_of(dialect: Dialect, tag: Tag) -> tuple[WireField, ...]:
    """Return the fields of an event with this tag, in order."""
    return dialect.stored if tag == STORED else dialect.removed if tag == REMOVED else ()


def ordinary_value(field: WireField, blocks: int) -> object:
    """Return the value that an ordinary engine writes in a field of an event with `blocks` blocks."""
    return [None] * blocks or None if field.ordinary is NONE_PER_BLOCK else field.ordinary


def located_value(field: WireField) -> object:
    """Return the value that an ordinary engine writes in a field of a location, which has only the group of its
    blocks.
    """
    return field.ordinary if field.type == "integer" else None


def is_location(dialect: Dialect, own: Mapping[FieldType, Any]) -> bool:
    """Whether a `BlockStored` names blocks below the device without parent and tokens, as vLLM's connectors write
    it.
    """
    medium = own.get("medium")
    below = medium is not None and medium != dialect.media.get(StorageTier.DEVICE)
    return below and own["parent"] is None and not own["tokens"] and len(own["hashes"]) > 0


def is_sparse(dialect: Dialect, event: EventFields) -> bool:
    """Whether a `BlockStored` has token ids of more full blocks than it has hashes, in a cache group that may be
    sparse.
    """
    own = event.own
    left_out, rest = divmod(len(own["tokens"]) - len(own["hashes"]) * own["block_size"], own["block_size"])
    return left_out > 0 and not rest and not event.pairs and dialect.has_groups and may_be_sparse(event.extra)


def hash_text(dialect: Dialect) -> str:
    """Return the form of a dialect's block hashes, for messages."""
    if dialect.hashes == "bytes":
        return f"a digest of {' or '.join(map(str, DIGEST_SIZES))} bytes"
    low, high = _RANGES[dialect.hashes]
    return f"an integer from {low} to {high}"


def read_event(dialect: Dialect, value: object, index: int, problems: list[WireProblem]) -> EventFields | None:
    """Check one event, and note its problems in `problems`.

    Args:
        dialect: the expected dialect.
        value: the event, as `Reader.value` returns it.
        index: its number in the batch.
        problems: the list of problems to extend.

    Returns:
        The fields; None if the event cannot be used.
    """

    def note(flaw: Flaw, field: str | None = None, *, kept: bool = False) -> None:
        problems.append(WireProblem(flaw.defect, index, field, flaw.observed, flaw.expected, is_kept=kept))

    if isinstance(value, Unreadable):
        note(Flaw(value.defect, value.observed, value.expected))
        return None
    form = "a map" if isinstance(value, Pairs) else "an array" if isinstance(value, list) else shown(value)
    expected = "a map" if dialect.form == "map" else "an array"
    if form != expected:
        is_event = isinstance(value, list)
        note(Flaw(WireDefect.WRONG_FORM if is_event else WireDefect.WRONG_TYPE, form, expected))
        return None
    assert isinstance(value, list)
    before = len(problems)
    read = _of_map(dialect, Pairs(value), note) if dialect.form == "map" else _of_array(dialect, value, note)
    if read is None:
        return None
    tag, values, surplus = read
    event = EventFields(tag, extra=surplus)
    _own_fields(dialect, event, values, note)
    if any(not problem.is_kept for problem in problems[before:]):
        return None
    blocks = len(event.own.get("hashes", ()))
    if tag == STORED and is_location(dialect, event.own):
        event.form = "located"
    for one in fields_of(dialect, tag):
        if not one.is_own:
            present = _plain(values.get(one.name, one.default))
            if present != (located_value(one) if event.form == "located" else ordinary_value(one, blocks)):
                event.extra[one.name] = present
        elif one.type == "medium" and event.own["medium"] is None and dialect.media:
            event.extra[one.name] = None
    if tag == STORED and event.form != "located":
        if not event.own["block_size"]:
            note(Flaw(WireDefect.BAD_BLOCK_SIZE, "0", FIELD_TYPES["block_size"].text), _name_of(dialect, "block_size"))
            return None
        if is_sparse(dialect, event):
            event.form = "sparse"
        elif (flaw := _span_flaw(event)) is not None:
            note(flaw, _name_of(dialect, "tokens"))
            return None
    for one in fields_of(dialect, tag):
        if one.name in event.extra and (flaw := entries_flaw(one, event.extra[one.name], blocks)) is not None:
            note(flaw, one.name, kept=True)
    if tag == STORED and event.form != "located" and (flaw := lookahead_flaw(event)) is not None:
        note(flaw, LOOKAHEAD, kept=True)
        del event.extra[LOOKAHEAD]
    if event.pairs:
        follow = all(one[1] == after[0] for one, after in pairwise(event.own["tokens"]))
        if not (follow and dialect.pairs):
            expected = "pairs that follow on each other" if dialect.pairs else "one token id each"
            flaw = Flaw(WireDefect.EAGLE_PAIRS, f"{len(event.own['tokens'])} pairs", expected)
            note(flaw, _name_of(dialect, "tokens"), kept=follow)
        return event if follow else None
    return event


def _of_array(dialect: Dialect, value: Sequence[Any], note: Any) -> tuple[Tag, dict[str, Any], dict[str, Any]] | None:
    """Return the tag, values by field name, and surplus values of an array; None if they cannot be determined."""
    if not value:
        note(Flaw(WireDefect.MISSING_FIELD, "an empty array", f"a tag: {', '.join(TAGS)}"), TAG_KEY)
        return None
    tag = _tag(value[0], note)
    if tag is None:
        return None
    fields, rest = fields_of(dialect, tag), value[1:]
    values = {one.name: present for one, present in zip(fields, rest, strict=False)}
    missing = [one.name for one in fields[len(rest) :] if one.is_required]
    for name in missing:
        note(Flaw(WireDefect.MISSING_FIELD, f"{len(rest)} fields", f"the field {name}"), name)
    surplus: dict[str, Any] = {}
    beyond = list(rest[len(fields) :])
    if tag == STORED and dialect.metadata and beyond:
        _metadata(dialect, beyond.pop(0), surplus, note)
    for place, present in enumerate(beyond, len(value) - len(beyond)):
        name = f"field_{place}"
        if (flaw := unreadable(present)) is not None:
            note(flaw, name)
        else:
            note(Flaw(WireDefect.UNKNOWN_FIELD, shown(present), f"at most {len(fields)} fields"), name, kept=True)
            surplus[name] = _plain(present)
    return tag, values, surplus


def _metadata(dialect: Dialect, value: object, surplus: dict[str, Any], note: Any) -> None:
    """Read the map after the fields of an array."""
    if not isinstance(value, Pairs):
        note(unreadable(value) or Flaw(WireDefect.WRONG_TYPE, shown(value), "a map"), METADATA)
        return
    if (flaw := unreadable(value)) is not None:
        note(flaw, METADATA)
        return
    for key, present in value:
        if key not in dialect.metadata:
            allowed = f"keys {', '.join(dialect.metadata)}"
            note(Flaw(WireDefect.UNKNOWN_FIELD, f"the key {shown(key)}", allowed), METADATA, kept=True)
        elif (wrong := metadata_flaw(present)) is not None:
            note(wrong, METADATA)
            continue
        surplus[str(key)] = _plain(present)


def metadata_flaw(value: object) -> Flaw | None:
    """Return the flaw in the value of a key of `Dialect.metadata`, which must be a text or nil; None if it is valid."""
    return (
        None
        if value is None or isinstance(value, str)
        else Flaw(WireDefect.WRONG_TYPE, shown(value), FIELD_TYPES["text"].text)
    )


def _of_map(dialect: Dialect, value: Pairs, note: Any) -> tuple[Tag, dict[str, Any], dict[str, Any]] | None:
    """Return the tag, values by field name, and surplus values of a map; None if they cannot be determined."""
    values: dict[str, Any] = {}
    others: list[tuple[object, Any]] = []
    repeated = False
    for key, present in value:
        if not isinstance(key, str):
            others.append((key, present))
        elif key in values:
            note(Flaw(WireDefect.DUPLICATE_KEY, f"the key {shown(key)} again", "each key once"), key[:80])
            repeated = True
        else:
            values[key] = present
    if TAG_KEY not in values:
        note(Flaw(WireDefect.MISSING_FIELD, f"a map of {len(value)}", f"a tag: {', '.join(TAGS)}"), TAG_KEY)
        return None
    tag = _tag(values.pop(TAG_KEY), note)
    if tag is None or repeated:
        return None
    fields = fields_of(dialect, tag)
    names = [one.name for one in fields]
    for one in fields:
        if one.is_required and one.name not in values:
            note(Flaw(WireDefect.MISSING_FIELD, f"a map of {len(value)}", f"the field {one.name}"), one.name)
    surplus: dict[str, Any] = {}
    allowed = ", ".join(names) or "no field"
    for name in [name for name in values if name not in names]:
        present = values.pop(name)
        if (flaw := unreadable(present)) is not None:
            note(flaw, name[:80])
        else:
            note(Flaw(WireDefect.UNKNOWN_FIELD, shown(present), allowed), name[:80], kept=True)
            surplus[name] = _plain(present)
    for key, _ in others:
        note(unreadable(key) or Flaw(WireDefect.UNKNOWN_FIELD, f"the key {shown(key)}", "a text as a key"))
    return tag, values, surplus


def _tag(value: object, note: Any) -> Tag | None:
    for tag in TAGS:
        if value == tag:
            return tag
    flaw = unreadable(value) or Flaw(WireDefect.UNKNOWN_TAG, shown(value), ", ".join(TAGS))
    note(flaw, TAG_KEY)
    return None


def _own_fields(dialect: Dialect, event: EventFields, values: Mapping[str, Any], note: Any) -> None:
    """Check each present field; put the event's own fields into `event.own`."""
    for one in fields_of(dialect, event.tag):
        present = values.get(one.name, one.default)
        if present is REQUIRED:
            continue
        if one.type == "tokens" and is_pairs(present):
            event.pairs = True
        elif one.name in values and (flaw := value_flaw(dialect, one, present)) is not None:
            note(flaw, one.name)
            continue
        if one.is_own:
            event.own[one.type] = present
    event.own.setdefault("medium", None)


def least_read(one: WireField) -> int | None:
    """Return the smallest integer that a field may have; it is 0 for a block size, because of locations."""
    return 0 if one.type == "block_size" else FIELD_TYPES[one.type].least


def value_flaw(dialect: Dialect, one: WireField, value: Any) -> Flaw | None:
    """Return the flaw in the value of a field; None if it is valid."""
    if (flaw := unreadable(value)) is not None:
        return flaw
    shape = FIELD_TYPES[one.type]
    if (value is None and shape.is_optional) or (shape.item == "anything" and not shape.depth):
        return None
    if shape.depth:
        if not isinstance(value, list | tuple) or isinstance(value, Pairs):
            return Flaw(WireDefect.WRONG_TYPE, shown(value), shape.text)
        if shape.item == "hash":
            return _first(_hash_flaw(dialect, each) for each in value)
        if shape.item == "anything":
            return None
        return _lists_flaw(shape, value) if shape.depth == 2 else _integers_flaw(shape, value)
    if shape.item == "hash":
        return _hash_flaw(dialect, value)
    if not (isinstance(value, str) if shape.item == "string" else is_integer(value)):
        return Flaw(WireDefect.WRONG_TYPE, shown(value), shape.text)
    if one.type == "medium" and value not in dialect.media.values():
        return Flaw(WireDefect.UNKNOWN_MEDIUM, shown(value), " or ".join(dialect.media.values()) or "no medium")
    if (least := least_read(one)) is not None and value < least:
        return Flaw(WireDefect.BAD_BLOCK_SIZE, shown(value), shape.text)
    return None


def _integers_flaw(shape: FieldShape, value: Sequence[Any]) -> Flaw | None:
    if {int}.issuperset(map(type, value)):
        if shape.least is None or not value or (min(value) >= shape.least and max(value) <= _U32):
            return None
        wrong = next(each for each in value if not shape.least <= each <= _U32)
        return Flaw(WireDefect.TOKEN_OUT_OF_RANGE, shown(wrong), shape.text)
    place, wrong = next((place, each) for place, each in enumerate(value) if type(each) is not int)
    return Flaw(WireDefect.WRONG_TYPE, f"{shown(wrong)} at {place}", shape.text)


def _lists_flaw(shape: FieldShape, value: Sequence[Any]) -> Flaw | None:
    for place, each in enumerate(value):
        if not isinstance(each, list | tuple) or isinstance(each, Pairs):
            return Flaw(WireDefect.WRONG_TYPE, f"{shown(each)} at {place}", shape.text)
        if (flaw := _integers_flaw(shape, each)) is not None:
            return flaw._replace(observed=f"{flaw.observed} of {place}")
    return None


def _hash_flaw(dialect: Dialect, value: object) -> Flaw | None:
    form, expected = dialect.hashes, hash_text(dialect)
    if isinstance(value, bytes):
        if form != "bytes":
            return Flaw(WireDefect.WRONG_HASH_FORM, f"{len(value)} bytes", expected)
        if len(value) not in DIGEST_SIZES:
            return Flaw(WireDefect.HASH_OUT_OF_RANGE, f"{len(value)} bytes", expected)
        return None
    if not is_integer(value):
        return Flaw(WireDefect.WRONG_TYPE, shown(value), expected)
    if form == "bytes":
        return Flaw(WireDefect.WRONG_HASH_FORM, shown_hash(value), expected)
    low, high = (-(2**63) if form != "unsigned" else 0), (2**63 if form == "signed" else 2**64)
    return None if low <= value < high else Flaw(WireDefect.HASH_OUT_OF_RANGE, shown_hash(value), expected)


def _span_flaw(event: EventFields) -> Flaw | None:
    hashes, tokens, size = event.own["hashes"], event.own["tokens"], event.own["block_size"]
    return span_flaw(len(hashes), len(tokens), size)


def span_flaw(blocks: int, tokens: int, size: int) -> Flaw | None:
    """Return the flaw if `blocks` blocks of this size do not fit `tokens` token ids; None if they fit."""
    if tokens == blocks * size:
        return None
    expected = f"{blocks * size} ({_count(blocks, 'block')} of {size})"
    return Flaw(WireDefect.SPAN_MISMATCH, f"{tokens} token ids", expected)


def entries_flaw(one: WireField, value: object, blocks: int) -> Flaw | None:
    """Return the flaw if a field with one entry per block, such as `extra_keys`, has another number of entries; None if
    it is valid.
    """
    if one.ordinary is not NONE_PER_BLOCK or not isinstance(value, list | tuple) or len(value) == blocks:
        return None
    return Flaw(
        WireDefect.SPAN_MISMATCH, f"an array of {len(value)}", f"an entry for each of {_count(blocks, 'block')}"
    )


def lookahead_flaw(event: EventFields) -> Flaw | None:
    """Return the flaw in the look-ahead tokens of block names; None if they are valid, or names do not look ahead."""
    lists = event.extra.get(LOOKAHEAD)
    if lists is None:
        return None
    hashes, tokens, size = event.own["hashes"], event.own["tokens"], event.own["block_size"]
    if not isinstance(lists, list | tuple) or not all(isinstance(each, list | tuple) for each in lists):
        return Flaw(WireDefect.BAD_LOOKAHEAD, shown(lists), "an array of arrays of token ids")
    if len(lists) != len(hashes):
        return Flaw(
            WireDefect.BAD_LOOKAHEAD, _count(len(lists), "list"), f"one for each of {_count(len(hashes), 'block')}"
        )
    sizes = {*map(len, lists)}
    if len(sizes) > 1 or sizes == {0}:
        observed = f"lists of {' and '.join(map(str, sorted(sizes)))} token ids"
        return Flaw(WireDefect.BAD_LOOKAHEAD, observed, "lists of one length, of at least 1")
    for place, each in enumerate(lists):
        if not all(map(_is_token, each)):
            return Flaw(WireDefect.BAD_LOOKAHEAD, f"{shown(each)} of {place}", "token ids from 0 to 4294967295")
    for place, each in enumerate(lists[:-1] if event.form == "dense" and not event.pairs else ()):
        begins = tokens[(place + 1) * size : (place + 2) * size][: len(each)]
        if [*each[: len(begins)]] != [*begins]:
            return Flaw(
                WireDefect.BAD_LOOKAHEAD, f"{shown(each)} of {place}", f"how the next block begins, {shown(begins)}"
            )
    return None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _is_token(value: object) -> bool:
    return is_integer(value, 0) and value <= _U32


def is_pairs(value: object) -> bool:
    """Whether a value is an array of pairs of token ids, as in EAGLE's bigram pages."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_token, pair)) for pair in value)
    )


def _name_of(dialect: Dialect, kind: FieldType) -> str:
    return next(one.name for one in dialect.stored if one.type == kind)


def unreadable(value: object) -> Flaw | None:
    """Return the first unreadable part of a value: an invalid text, too deep nesting, a map with a duplicate key."""
    if isinstance(value, Unreadable):
        return Flaw(value.defect, value.observed, value.expected)
    if isinstance(value, Pairs):
        keys: set[object] = set()
        for key, _ in value:
            if isinstance(key, Unreadable | list):
                return unreadable(key) or Flaw(WireDefect.WRONG_TYPE, shown(key), "a scalar as a key")
            if key in keys:
                return Flaw(WireDefect.DUPLICATE_KEY, f"the key {shown(key)} again", "each key once")
            keys.add(key)
        return _first(unreadable(each) for _, each in value)
    if isinstance(value, list):
        return _first(map(unreadable, value))
    return None


def _first(flaws: Iterable[Flaw | None]) -> Flaw | None:
    return next((flaw for flaw in flaws if flaw is not None), None)


def _plain(value: Any) -> Any:
    """Return a value without `Pairs`."""
    if isinstance(value, Pairs):
        return {key: _plain(each) for key, each in value}
    return [_plain(each) for each in value] if isinstance(value, list) else value


_SCALARS: Final = frozenset((type(None), bool, int, float, str, bytes))


def is_plain(value: object, depth: int = 2) -> bool:
    """Whether the careful reader would read the same value as msgspec: scalars and arrays of them.

    Args:
        value: the value that msgspec has read.
        depth: number of arrays and maps around it.
    """
    if type(value) in _SCALARS:
        return True
    if type(value) not in (list, tuple) or depth >= MOST_DEPTH:
        return False
    return all(is_plain(each, depth + 1) for each in value)  # type: ignore[attr-defined]  # a list or tuple by now
