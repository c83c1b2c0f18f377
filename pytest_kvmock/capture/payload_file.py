"""Files of payloads: the batches of one engine as bytes, one after the other, in a dialect.

A payload of msgpack says itself where it ends, and JSON has a line an event. So such a file needs no framing, and a
decoder in any language reads one batch after the other from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_kvmock.capture.lines import CaptureError
from pytest_kvmock.wire.reader import Reader, ReadError
from pytest_kvmock.wire.table import Dialect


def split_payloads(data: bytes, dialect: Dialect, path: Path) -> Iterator[bytes]:
    """Yield the payloads of a file, one after the other.

    Args:
        data: the file.
        dialect: of the payloads.
        path: of the file, for the message.

    Raises:
        CaptureError: the file is empty, ends in a payload, or is no msgpack from some byte on.
    """
    if not data:
        raise CaptureError(f"{path}: the file is empty; payloads of {dialect.name} are expected")
    if not dialect.is_msgpack:
        yield data
        return
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
        payloads: in order.

    Returns:
        Of each payload, its first byte and how many it has.

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
