"""The defects of payloads: each has a name, and a record says where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from pytest_kvmock.values.checks import KvMockError
from pytest_kvmock.values.events import block_text


class WireDefect(StrEnum):
    """The name of a defect of a payload; `DEFECTS` says when it is reported."""

    OVERSIZE = "oversize"
    MALFORMED = "malformed"
    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing_bytes"
    NESTED_TOO_DEEPLY = "nested_too_deeply"
    BAD_TEXT = "bad_text"
    NOT_A_BATCH = "not_a_batch"
    BAD_RANK = "bad_rank"
    WRONG_FORM = "wrong_form"
    WRONG_TYPE = "wrong_type"
    UNKNOWN_TAG = "unknown_tag"
    UNKNOWN_FIELD = "unknown_field"
    MISSING_FIELD = "missing_field"
    DUPLICATE_KEY = "duplicate_key"
    UNKNOWN_MEDIUM = "unknown_medium"
    BAD_BLOCK_SIZE = "bad_block_size"
    HASH_OUT_OF_RANGE = "hash_out_of_range"
    WRONG_HASH_FORM = "wrong_hash_form"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"  # noqa: S105 - a token id
    EAGLE_PAIRS = "eagle_pairs"
    SPAN_MISMATCH = "span_mismatch"
    BAD_LOOKAHEAD = "bad_lookahead"


DEFECTS: Final[Mapping[WireDefect, str]] = MappingProxyType(
    {
        WireDefect.OVERSIZE: "the payload has more bytes than are read",
        WireDefect.MALFORMED: "the bytes are not msgpack, or not JSON",
        WireDefect.TRUNCATED: "the payload ends in the middle of a value",
        WireDefect.TRAILING_BYTES: "bytes follow the batch",
        WireDefect.NESTED_TOO_DEEPLY: "arrays or maps are nested deeper than any engine does",
        WireDefect.BAD_TEXT: "a text is not UTF-8",
        WireDefect.NOT_A_BATCH: "the payload is not an array of timestamp, events and rank",
        WireDefect.BAD_RANK: "the rank of the batch is not an integer from 0 to 4294967295",
        WireDefect.WRONG_FORM: "an event is a map where the dialect has arrays, or the other way round",
        WireDefect.WRONG_TYPE: "a value is not of the type of its field",
        WireDefect.UNKNOWN_TAG: "an event is not a BlockStored, BlockRemoved or AllBlocksCleared",
        WireDefect.UNKNOWN_FIELD: "the dialect has no such field",
        WireDefect.MISSING_FIELD: "a field without a default is absent",
        WireDefect.DUPLICATE_KEY: "a key of a map is there twice",
        WireDefect.UNKNOWN_MEDIUM: "the dialect has no such medium",
        WireDefect.BAD_BLOCK_SIZE: "the block size is below 1, and the event is not a location",
        WireDefect.HASH_OUT_OF_RANGE: "a block hash does not fit the dialect's 64 bits, or is not a whole digest",
        WireDefect.WRONG_HASH_FORM: "a block hash is bytes where the dialect has integers, or the other way round",
        WireDefect.TOKEN_OUT_OF_RANGE: "a token id is below 0 or above 4294967295",
        WireDefect.EAGLE_PAIRS: "token ids are pairs that do not follow on each other, or pairs in a dialect that has "
        "none",
        WireDefect.SPAN_MISMATCH: "there are not block_size token ids, or not one entry of extra_keys, for each block "
        "hash, and it is not a span of a sparse group",
        WireDefect.BAD_LOOKAHEAD: "lookahead_token_ids is not one list for each block hash, all of one length, each "
        "of how the next block of the event begins",
    }
)
"""When each defect is reported."""


@dataclass(frozen=True, slots=True)
class WireProblem:
    """One defect of a payload.

    Attributes:
        name: the name of the defect.
        event: number of the event in the batch, from 0; None: the defect is the batch's.
        field: the field; None if it is the whole event or batch.
        observed: the observed value.
        expected: what the dialect allows.
        is_kept: whether the event is decoded nevertheless.
    """

    name: WireDefect
    event: int | None
    field: str | None
    observed: str
    expected: str
    is_kept: bool = False

    def __str__(self) -> str:
        where = "batch" if self.event is None else f"event {self.event}"
        field = "" if self.field is None else f", {self.field}"
        return f"{self.name}: {where}{field}: expected {self.expected}, got {self.observed}"


class EncodeError(KvMockError, ValueError):
    """Raised when an event cannot be written in a dialect. The message names the event, the field and the allowed
    values.
    """


def shown(value: object) -> str:
    """Return a value of any size for a message, cut to 80 characters."""
    if isinstance(value, list | tuple | dict) and len(value) > 8:
        kind = "a map" if isinstance(value, dict) else "an array"
        return f"{kind} of {len(value)}"
    if isinstance(value, bytes | str) and len(value) > 80:
        return f"{'bytes' if isinstance(value, bytes) else 'a text'} of length {len(value)}"
    return f"{value!r:.80}"


def shown_hash(value: object) -> str:
    """Return a block hash for a message, in the form of event hashes; other values as by `shown`."""
    return block_text(value) if isinstance(value, int) and not isinstance(value, bool) else shown(value)
