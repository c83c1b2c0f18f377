"""KV events as bytes: the dialects of engines, a codec for all of them, and what is wrong with a payload.

msgspec, which the dialects of vLLM and SGLang need, is the extra `wire`; it is loaded when one of them is used.
"""

from pytest_kvmock.wire.batch import Batch, Decoded
from pytest_kvmock.wire.batcher import KvWire
from pytest_kvmock.wire.decoding import MOST_BYTES, decode
from pytest_kvmock.wire.defects import DEFECTS, EncodeError, WireDefect, WireProblem
from pytest_kvmock.wire.digests import StreamDigests
from pytest_kvmock.wire.encoding import encode
from pytest_kvmock.wire.table import (
    DIALECTS,
    NONE_PER_BLOCK,
    REQUIRED,
    Dialect,
    WireField,
    find_dialect,
    known_dialects,
    registered_dialects,
)

__all__ = [
    "DEFECTS",
    "DIALECTS",
    "MOST_BYTES",
    "NONE_PER_BLOCK",
    "REQUIRED",
    "Batch",
    "Decoded",
    "Dialect",
    "EncodeError",
    "KvWire",
    "StreamDigests",
    "WireDefect",
    "WireField",
    "WireProblem",
    "decode",
    "encode",
    "find_dialect",
    "known_dialects",
    "registered_dialects",
]
