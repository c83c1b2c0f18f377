"""Dialects: the form in which one engine version writes KV events on a wire, with its fields in order."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from keyword import iskeyword
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from pytest_kvmock.values.checks import did_you_mean, is_integer, unknown_text
from pytest_kvmock.values.events import StorageTier


class Mark(Enum):
    """A placeholder for a value in a `WireField`."""

    REQUIRED = "required"
    NONE_PER_BLOCK = "None a block"

    def __repr__(self) -> str:
        return self.name


REQUIRED: Final = Mark.REQUIRED
"""As a default: the field has no default and is always written."""


NONE_PER_BLOCK: Final = Mark.NONE_PER_BLOCK
"""As an ordinary value: a list with one None per block."""


FieldType: TypeAlias = Literal[
    "hashes", "parent", "tokens", "block_size", "medium", "integer", "text", "integers", "integer_lists", "keys", "any"
]


class FieldShape(NamedTuple):
    """The values that a field type takes, as far as they do not depend on the dialect.

    Attributes:
        text: description for messages.
        item: a block hash, an integer, a string or anything.
        depth: 0: an item, 1: an array of items, 2: an array of such arrays.
        is_optional: whether it may be nil.
        least: the smallest integer.
    """

    text: str
    item: Literal["hash", "integer", "string", "anything"]
    depth: int = 0
    is_optional: bool = True
    least: int | None = None


FIELD_TYPES: Final[Mapping[FieldType, FieldShape]] = MappingProxyType(
    {
        "hashes": FieldShape("an array of block hashes", "hash", 1, is_optional=False),
        "parent": FieldShape("a block hash, or nil", "hash"),
        "tokens": FieldShape("an array of integers from 0 to 4294967295", "integer", 1, is_optional=False, least=0),
        "block_size": FieldShape("an integer of at least 1", "integer", is_optional=False, least=1),
        "medium": FieldShape("a string, or nil", "string"),
        "integer": FieldShape("an integer, or nil", "integer"),
        "text": FieldShape("a string, or nil", "string"),
        "integers": FieldShape("an array of integers, or nil", "integer", 1),
        "integer_lists": FieldShape("an array of arrays of integers, or nil", "integer", 2),
        "keys": FieldShape("an array, or nil", "anything", 1),
        "any": FieldShape("anything", "anything"),
    }
)
"""The field types and their values; msgspec's types and the careful reader's checks are made from this table.

The first five belong to the event itself; the others travel in `RouterEvent.extra`.
"""


_OWN: Final = ("hashes", "parent", "tokens", "block_size", "medium")


HashForm: TypeAlias = Literal["unsigned", "signed", "either", "bytes"]


def _is_of_type(kind: FieldType, value: object) -> bool:
    """Whether a field of this type can have the value, as far as this does not depend on the dialect."""
    shape = FIELD_TYPES[kind]
    if value is None:
        return shape.is_optional
    return not isinstance(value, Mark) and _fits(shape, shape.depth, value)


def _fits(shape: FieldShape, depth: int, value: object) -> bool:
    """Whether a value fits a field type within `depth` nested arrays."""
    if depth:
        return isinstance(value, list | tuple) and all(_fits(shape, depth - 1, each) for each in value)
    if shape.item == "integer":
        return is_integer(value, shape.least)
    if shape.item == "hash":
        return is_integer(value) or isinstance(value, bytes)
    return shape.item == "anything" or isinstance(value, str)


DIGEST_SIZES: Final = (16, 32)
"""Bytes of a full digest: xxh3-128, or SHA-256."""


@dataclass(frozen=True, slots=True)
class WireField:
    """One field of an event.

    Attributes:
        name: the engine's name; the key in a map, and in `RouterEvent.extra`.
        type: one of `FIELD_TYPES`.
        default: the value of an absent field; a map leaves the default out. `REQUIRED`: the field is always there.
        ordinary: the value that an engine writes if the event has nothing special; `NONE_PER_BLOCK`: one None per
            block.

    Raises:
        ValueError: the name is empty, the type is unknown, or a value is not of the type.
    """

    name: str
    type: FieldType
    default: object = REQUIRED
    ordinary: object = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or iskeyword(self.name):
            raise ValueError(f"a field's name is an identifier and not a keyword, got {self.name!r:.80}")
        if not isinstance(self.type, str) or self.type not in FIELD_TYPES:
            raise ValueError(f"field {self.name!r}: {unknown_text('type', self.type, FIELD_TYPES)}")
        wanted = FIELD_TYPES[self.type].text
        if self.default is not REQUIRED and not _is_of_type(self.type, self.default):
            raise ValueError(f"field {self.name!r}: default must be {wanted}, or REQUIRED, got {self.default!r:.80}")
        if self.is_own and self.ordinary is not None:
            raise ValueError(
                f"field {self.name!r}: ordinary is for a field that travels with an event, and {self.type!r} is the "
                f"event's own; got {self.ordinary!r:.80}"
            )
        of_blocks = self.type in ("keys", "any")
        if self.ordinary is NONE_PER_BLOCK and of_blocks:
            return
        if not self.is_own and not _is_of_type(self.type, self.ordinary):
            mark = ", or NONE_PER_BLOCK" if of_blocks else ""
            raise ValueError(f"field {self.name!r}: ordinary must be {wanted}{mark}, got {self.ordinary!r:.80}")

    @property
    def is_own(self) -> bool:
        """Whether the event itself has this field, so that it is not part of `RouterEvent.extra`."""
        return self.type in _OWN

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is REQUIRED


_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


_WORDS: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "form": ("array", "map", "json", "router_json", "trtllm_json"),
        "hashes": ("unsigned", "signed", "either", "bytes"),
        "rank": ("filled", "nil"),
        "replay": ("plain", "topic", None),
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """The form of KV events on a wire that one engine version writes. Dialects are equal only if they are the same
    object.

    Attributes:
        name: the name in tests and test ids: letters, digits, `_`, `.` and `-`.
        models: the program and version that write it.
        form: events as "array" (tag first, every field) or "map" (tag under "type", defaults left out), both in
            msgpack; or Dynamo's JSON, one per line: "json" for `KvCacheEvent`, "router_json" for `RouterEvent`; or
            "trtllm_json": TensorRT-LLM's JSON, one list of events per line.
        stored: fields of `BlockStored` in order; none in JSON.
        removed: fields of `BlockRemoved` in order.
        hashes: how a block hash is written: "unsigned" or "signed" 64 bits of the digest, "either" as the engine has it
            (below 0 as signed, from 2**63 on as unsigned), or the full digest as "bytes".
        media: the name of each tier in the field `medium`; tiers without a name are refused.
        rank: the value in a batch's rank slot if its `Batch.dp_rank` is None: the rank of its events ("filled"), or
            "nil", as in newly made structs of SGLang. Publishers fill it in, in every release of both engines.
        replay: frames of a replayed batch after the identity: "plain" (empty, sequence, payload), or with the "topic"
            before the sequence; None if the dialect is not spoken over ZMQ.
        metadata: keys of a map after the last field of a `BlockStored` in array form, written if one of them is set;
            the values are strings.
        backend: the backend whose engine writes it.
        version: the release of that backend (its option `version`) whose block names it has; None: the backend's
            default.
        in_matrix: whether tests run over it by default, or only if they name it.
        pairs: whether token ids may be pairs of neighbours, as in SGLang with a draft model.
        whole_blocks: whether publishers write only full blocks of the longest window, named by sha256, and no Updated,
            as TensorRT-LLM does over ZMQ.

    Raises:
        ValueError: a field is invalid. The message names the field, the given value and the allowed values.
    """

    name: str
    models: str
    form: Literal["array", "map", "json", "router_json", "trtllm_json"]
    stored: tuple[WireField, ...] = ()
    removed: tuple[WireField, ...] = ()
    hashes: HashForm = "unsigned"
    media: Mapping[StorageTier, str] = dataclasses.field(default_factory=dict)
    rank: Literal["filled", "nil"] = "filled"
    replay: Literal["plain", "topic"] | None = "plain"
    metadata: tuple[str, ...] = ()
    backend: str = "vllm"
    version: str | None = None
    in_matrix: bool = True
    pairs: bool = False
    whole_blocks: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name == "all":
            raise ValueError(
                f"a dialect's name has only letters, digits, '_', '.' and '-', and is not 'all'; got {self.name!r:.80}"
            )
        for field in ("models", "backend"):
            if not isinstance(getattr(self, field), str):
                raise ValueError(f"dialect {self.name!r}: {field} must be a string, got {getattr(self, field)!r:.80}")  # noqa: TRY004 - one error
        if self.version is not None and not isinstance(self.version, str):
            raise ValueError(f"dialect {self.name!r}: version must be a string, or None, got {self.version!r:.80}")
        for field, words in _WORDS.items():
            value = getattr(self, field)
            if value not in words:
                allowed = " or ".join(map(repr, words))
                hint = did_you_mean(value, [word for word in words if isinstance(word, str)])
                raise ValueError(f"dialect {self.name!r}: {field} must be {allowed}, got {value!r:.80}{hint}")
        for field in ("in_matrix", "pairs", "whole_blocks"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise ValueError(f"dialect {self.name!r}: {field} must be True or False, got {value!r:.80}")  # noqa: TRY004 - one error
        if not self.is_msgpack:
            return
        self._check_fields("stored", {"hashes": 1, "parent": 1, "tokens": 1, "block_size": 1})
        self._check_fields("removed", {"hashes": 1, "parent": 0, "tokens": 0, "block_size": 0})
        object.__setattr__(self, "media", MappingProxyType(self._checked_media()))
        if not isinstance(self.metadata, tuple) or not all(isinstance(key, str) for key in self.metadata):
            raise ValueError(f"dialect {self.name!r}: metadata must be a tuple of strings, got {self.metadata!r:.80}")
        if self.metadata and self.form != "array":
            raise ValueError(f"dialect {self.name!r}: metadata follows an array; a map has fields")

    def _check_fields(self, attribute: str, needed: Mapping[str, int]) -> None:
        """Raise a ValueError for invalid or duplicate fields, or a wrong number of fields of a type."""
        where = f"dialect {self.name!r}: {attribute}"
        fields = getattr(self, attribute)
        if not isinstance(fields, tuple) or not all(isinstance(field, WireField) for field in fields):
            raise ValueError(f"{where} must be a tuple of WireFields, got {fields!r:.80}")
        names = [field.name for field in fields]
        for name in names:
            if names.count(name) > 1 or name == "type":
                raise ValueError(f"{where} has the field {name!r} {'twice' if name != 'type' else 'next to the tag'}")
        types = [field.type for field in fields]
        for kind, count in needed.items():
            if types.count(kind) != count:
                raise ValueError(f"{where} must have {count or 'no'} field of type {kind!r}, got {types.count(kind)}")
        if types.count("medium") > 1:
            raise ValueError(f"{where} must have at most one field of type 'medium', got {types.count('medium')}")
        after_default = False
        for field in fields:
            if after_default and field.is_required:
                raise ValueError(f"{where}: field {field.name!r} is required, and stands after one with a default")
            after_default |= not field.is_required

    def _checked_media(self) -> dict[StorageTier, str]:
        if not isinstance(self.media, Mapping):
            raise ValueError(f"dialect {self.name!r}: media must map tiers to names, got {self.media!r:.80}")  # noqa: TRY004 - one error
        media = {StorageTier.of(tier): name for tier, name in self.media.items()}
        if not all(isinstance(name, str) for name in media.values()) or len({*media.values()}) != len(media):
            raise ValueError(
                f"dialect {self.name!r}: media must be strings, each for one tier; got {dict(media)!r:.80}"
            )
        return media

    @property
    def has_groups(self) -> bool:
        """Whether its events name their cache group, so that it has sparse Stored."""
        return any(field.name == "group_idx" for field in self.stored)

    @property
    def mocks_groups(self) -> bool:
        """Whether hybrid models of vLLM can publish in it: their block names have 64 bits here, never bytes."""
        return self.has_groups and self.hashes != "bytes"

    def tells(self, key: str) -> bool:
        """Whether its events have a field for the adapter ("lora_name") or the salt ("cache_salt"), not only block
        names.
        """
        if self.whole_blocks or not self.is_msgpack:
            return False  # TensorRT-LLM leaves its fields empty
        names = {*(field.name for field in self.stored), *self.metadata}
        return key in names or (key == "cache_salt" and "extra_keys" in names)

    @property
    def clears(self) -> bool:
        """Whether it has an event for an emptied cache; TensorRT-LLM has none, or defines it but never sends it."""
        return self.form != "trtllm_json" and not self.whole_blocks

    @property
    def is_msgpack(self) -> bool:
        """Whether it is written in msgpack, which needs the extra `wire`."""
        return self.form in ("array", "map")

    def check_host(self, *, self_describing: bool) -> None:
        """Check that it can express the events of engines with a host tier.

        Args:
            self_describing: whether the events of the host have tokens, as vLLM's may.

        Raises:
            ValueError: it has no field for the tier of a block, or its vLLM release had no such events.
        """
        if self.is_msgpack and not self.media:
            raise ValueError(
                f"dialect {self.name!r} does not say where a block is, and engines have a host below the device"
            )
        if self_describing and self.models.startswith("vLLM ") and self.form == "array":
            raise ValueError(f"self-describing events of a host are vLLM's from 0.24 on; got dialect {self.name!r}")

    def variant(
        self,
        name: str,
        *,
        models: str | None = None,
        add_stored: tuple[WireField, ...] = (),
        add_removed: tuple[WireField, ...] = (),
        without: Collection[str] = (),
        **changes: Any,
    ) -> Dialect:
        """Make a dialect that differs from this one.

        Args:
            name: the new dialect's name.
            models: as in `Dialect`; by default this dialect's, with the changes.
            add_stored: fields to append to those of `BlockStored`.
            add_removed: fields to append to those of `BlockRemoved`.
            without: names of fields to leave out.
            **changes: other attributes. With another backend, `version` is None by default, because backends have
                different releases.

        Raises:
            ValueError: an attribute or field is unknown, or the new dialect would be invalid.
        """
        attributes = [field.name for field in dataclasses.fields(self)]
        for change in changes:
            if change not in attributes:
                raise ValueError(f"{unknown_text('attribute of a dialect', change, attributes)}")
        for what, added in (("stored", add_stored), ("removed", add_removed)):
            if not isinstance(added, tuple) or not all(isinstance(field, WireField) for field in added):
                raise ValueError(f"dialect {name!r:.80}: add_{what} must be a tuple of WireFields, got {added!r:.80}")
            if what in changes and (added or without):
                raise ValueError(f"dialect {name!r:.80}: {what} are all its fields; leave out add_{what} and without")
        if isinstance(without, str) or not isinstance(without, Collection):
            raise ValueError(f"dialect {name!r:.80}: without must be names of fields, got {without!r:.80}")  # noqa: TRY004 - one error
        names = [*dict.fromkeys(field.name for field in (*self.stored, *self.removed))]
        for gone in without:
            if gone not in names:
                raise ValueError(f"dialect {self.name!r} has no field {gone!r}{did_you_mean(gone, names)}")
        if models is None:
            models = ", ".join([self.models, *(f"{key}={value!r}" for key, value in changes.items())])
        if changes.get("backend", self.backend) != self.backend:
            changes.setdefault("version", None)
        changes.setdefault("stored", tuple(field for field in self.stored if field.name not in without) + add_stored)
        changes.setdefault("removed", tuple(field for field in self.removed if field.name not in without) + add_removed)
        return dataclasses.replace(self, name=name, models=models, **changes)
