"""Frames: block sets and descriptor lists as bytes, for tests that send them over a wire of their own.

A frame is `KVBM`, a version (one byte), a kind (one byte), the length of the body (u32, little-endian), the body, and the
CRC-32 of all before it (u32). The body is JSON. The original has JSON without a frame, which says of a cut text only that
it ends; a frame is refused with what is wrong with it.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final
from zlib import crc32

from pytest_kvmock.block_manager.remote_errors import NixlSerializationError
from pytest_kvmock.checks import MOST_U64, MemberT, check_member, integer_text, is_integer

MAGIC: Final = b"KVBM"
VERSION: Final = 1

_HEAD: Final = struct.Struct("<4sBcI")
_TAIL: Final = struct.Struct("<I")

KINDS: Final = {b"S": "block set", b"D": "descriptor list"}
"""What a frame holds, by its kind."""


def to_frame(kind: bytes, fields: dict[str, Any]) -> bytes:
    """Return fields that JSON can write as a frame; the same fields make the same bytes."""
    body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    data = _HEAD.pack(MAGIC, VERSION, kind, len(body)) + body
    return data + _TAIL.pack(crc32(data))


def from_frame(kind: bytes, data: object, names: tuple[str, ...]) -> FrameFields:
    """Return the fields of a frame.

    Args:
        kind: what it must hold.
        data: the bytes.
        names: the fields that it must have, and no others.

    Raises:
        NixlSerializationError: it is foreign, truncated, changed, of another version or kind, or has other fields.
        TypeError: these are no bytes.
    """
    what = KINDS[kind]
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"a {what} is read from bytes, got {data!r:.80}")
    data = bytes(data)
    if data[: len(MAGIC)] != MAGIC[: len(data)] or not data:
        raise NixlSerializationError(f"not the bytes of a {what}: they begin with {data[:4]!r}, expected {MAGIC!r}")
    if len(data) < _HEAD.size:
        raise NixlSerializationError(f"the bytes of a {what} are truncated: {len(data)} of at least {_HEAD.size}")
    _, version, found, length = _HEAD.unpack_from(data)
    if version != VERSION:
        raise NixlSerializationError(f"the bytes of a {what} are of version {version}, only {VERSION} is known")
    expected = _HEAD.size + length + _TAIL.size
    if len(data) < expected:
        raise NixlSerializationError(f"the bytes of a {what} are truncated: {len(data)} of {expected}")
    if len(data) > expected:
        raise NixlSerializationError(f"after the bytes of a {what} there are {len(data) - expected} more")
    body, (checksum,) = data[_HEAD.size : -_TAIL.size], _TAIL.unpack_from(data, expected - _TAIL.size)
    if checksum != crc32(data[: -_TAIL.size]):
        raise NixlSerializationError(
            f"the bytes of a {what} were changed: their checksum is {crc32(data[: -_TAIL.size]):08x}, not {checksum:08x}"
        )
    if found != kind:
        raise NixlSerializationError(f"these are the bytes of a {KINDS.get(found, repr(found))}, not of a {what}")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NixlSerializationError(f"the body of a {what} is no JSON: {error}") from None
    return FrameFields(fields, names, what)


class FrameFields:
    """The fields of one object of a frame, read with their types checked.

    Args:
        fields: what JSON read.
        names: the fields that there must be, and no others.
        where: what messages call the object.

    Raises:
        NixlSerializationError: it is no object, or has other fields.
    """

    __slots__ = ("_fields", "_where")

    def __init__(self, fields: object, names: tuple[str, ...], where: str) -> None:
        if not isinstance(fields, dict) or set(fields) != set(names):
            got = sorted(fields) if isinstance(fields, dict) else fields
            raise NixlSerializationError(f"a {where} has the fields {', '.join(names)}, got {got!r:.200}")
        self._fields = fields
        self._where = where

    def integer(self, name: str, least: int = 0) -> int:
        """Return a field that is a u64 of at least `least`."""
        return self._checked_integer(name, self._fields[name], least)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a field that is a list of u64."""
        values = self._typed(name, list, "a list")
        return tuple([self._checked_integer(f"{name}[{at}]", value, 0) for at, value in enumerate(values)])

    def text(self, name: str) -> str:
        """Return a field that is text."""
        return str(self._typed(name, str, "text"))

    def member(self, name: str, kind: type[MemberT]) -> MemberT:
        """Return the member of an enumeration that a field names."""
        try:
            return check_member(name, self._fields[name], kind)
        except ValueError as error:
            raise self._wrong(str(error)) from None

    def objects(self, name: str, names: tuple[str, ...]) -> list[FrameFields]:
        """Return a field that is a list of objects, each with the fields `names`."""
        values = self._typed(name, list, "a list")
        return [FrameFields(value, names, f"{self._where}'s {name}[{at}]") for at, value in enumerate(values)]

    def _typed(self, name: str, kind: type, words: str) -> Any:
        value = self._fields[name]
        if not isinstance(value, kind):
            raise self._wrong(f"{name} must be {words}, got {value!r:.80}")
        return value

    def _checked_integer(self, name: str, value: object, least: int) -> int:
        if not is_integer(value, least) or value > MOST_U64:
            raise self._wrong(f"{name} must be {integer_text(least)} (u64), got {value!r:.80}")
        return value

    def _wrong(self, why: str) -> NixlSerializationError:
        return NixlSerializationError(f"in a {self._where}, {why}")
