"""KV events as bytes: the dialects of engines, a codec for all of them, and the defects of payloads.

The dialects of vLLM and SGLang need msgspec, the extra `wire`; it is loaded when one of them is used.
"""

from typing import TYPE_CHECKING

from pytest_kvmock.values.checks import late_names

if TYPE_CHECKING:
    from pytest_kvmock.values.dialect import Dialect as Dialect
    from pytest_kvmock.values.dialect import WireField as WireField
    from pytest_kvmock.wire.codec.batch import Batch as Batch
    from pytest_kvmock.wire.codec.batcher import KvWire as KvWire
    from pytest_kvmock.wire.codec.decoding import decode as decode
    from pytest_kvmock.wire.codec.defects import EncodeError as EncodeError
    from pytest_kvmock.wire.codec.digests import StreamDigests as StreamDigests
    from pytest_kvmock.wire.codec.encoding import encode as encode
    from pytest_kvmock.wire.codec.table import DIALECTS as DIALECTS
    from pytest_kvmock.wire.codec.table import find_dialect as find_dialect
    from pytest_kvmock.wire.codec.trtllm_json import read_events as read_events

_HOME = {
    "Batch": "wire.codec.batch",
    "DIALECTS": "wire.codec.table",
    "Dialect": "values.dialect",
    "EncodeError": "wire.codec.defects",
    "KvWire": "wire.codec.batcher",
    "StreamDigests": "wire.codec.digests",
    "WireField": "values.dialect",
    "decode": "wire.codec.decoding",
    "encode": "wire.codec.encoding",
    "find_dialect": "wire.codec.table",
    "read_events": "wire.codec.trtllm_json",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table is the one list

# Loaded on first use, because a test of a router needs none of these.
__getattr__ = late_names(__name__, _HOME)
