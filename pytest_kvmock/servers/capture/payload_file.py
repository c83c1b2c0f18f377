"""Files of payloads: the batches of one engine as bytes, one after the other, in a dialect.

A payload of msgpack shows where it ends, and JSON has one line per event. So such a file needs no framing, and a
decoder in any language can read one batch after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from pytest_kvmock.servers.capture.lines import CaptureError
from pytest_kvmock.servers.capture.printed_events import TAKES
from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.wire.codec.reader import Reader, ReadError

_FIRST_OF_BATCH: Final = 0x80
"""A smaller byte is a number in msgpack, and a character in a text."""


def split_payloads(data: bytes, dialect: Dialect, path: Path) -> Iterator[bytes]:
    """Yield the payloads of a file, one after the other.

    Args:
        data: the content of the file.
        dialect: the dialect of the payloads.
        path: the file, for the message.

    Raises:
        CaptureError: the file is empty, ends inside a payload, or is not msgpack from some byte on.
    """
    if not data:
        raise CaptureError(f"{path}: the file is empty; payloads of {dialect.name} are expected")
    if not dialect.is_msgpack:
        yield data
        return
    if data[0] < _FIRST_OF_BATCH:
        raise CaptureError(f"{path}: this is text, not a payload of {dialect.name}; as text {TAKES} are read")
    reader = Reader(data)
    while reader.rest:
        start = reader.position
        try:
            reader.skip()
        except ReadError as error:
            raise CaptureError(
                f"{path}: the payload from byte {start} on cannot be read: {error.observed}, expected {error.expected}"
            ) from None
        yield data[start : reader.position]


def write_payloads(path: Path, payloads: Iterable[bytes]) -> list[tuple[int, int]]:
    """Write payloads into a file, one after the other.

    Args:
        path: the file.
        payloads: the payloads, in order.

    Returns:
        The position of the first byte and the length of each payload.

    Raises:
        CaptureError: the file cannot be written.
    """
    places, start = [], 0
    for payload in (payloads := list(payloads)):
        places.append((start, len(payload)))
        start += len(payload)
    try:
        path.write_bytes(b"".join(payloads))
    except OSError as error:
        raise CaptureError(f"{path}: cannot be written: {error.strerror or error}") from None
    return places
