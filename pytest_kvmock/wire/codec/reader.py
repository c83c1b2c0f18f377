"""A msgpack reader that reports invalid values and keeps valid ones.

It is used if msgspec refuses a payload: msgspec stops at the first error, has no nesting limit, and keeps the last of
two equal keys. This reader is much slower, and needs no import.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pytest_kvmock.wire.codec.defects import WireDefect

MOST_DEPTH: Final = 16
"""Maximum nesting depth of arrays and maps in an event; engines nest four."""


class ReadError(Exception):
    """The bytes cannot be read further."""

    def __init__(self, defect: WireDefect, observed: str, expected: str) -> None:
        super().__init__(defect, observed, expected)
        self.defect, self.observed, self.expected = defect, observed, expected


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value with a known end that cannot be read: a text that is not UTF-8, too deep nesting, an extension.

    Attributes:
        defect: the reason.
        observed: the value found.
        expected: what can be read.
    """

    defect: WireDefect
    observed: str
    expected: str


class Pairs(list[tuple[Any, Any]]):
    """A map as its keys and values, in order and with duplicates."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{key!r}: {value!r}' for key, value in self)}}}"


_NUMBERS: Final[dict[int, struct.Struct]] = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_CONSTANTS: Final = {0xC0: None, 0xC2: False, 0xC3: True}
# By first byte of a value with a length: bytes of the length, and the kind of value.
_SIZED: Final = {
    **{0xC4 + i: (1 << i, "bytes") for i in range(3)},
    **{0xC7 + i: (1 << i, "extension") for i in range(3)},
    **{0xD9 + i: (1 << i, "text") for i in range(3)},
    **{0xDC + i: (2 << i, "array") for i in range(2)},
    **{0xDE + i: (2 << i, "map") for i in range(2)},
}


class Reader:
    """Reads one value after the other.

    Args:
        data: msgpack.

    Attributes:
        position: position of the next byte.
    """

    __slots__ = ("_data", "position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    @property
    def rest(self) -> int:
        """Number of bytes left."""
        return len(self._data) - self.position

    def array_length(self) -> int | None:
        """Read the head of an array; if the next value is not an array, return None and read nothing.

        Raises:
            ReadError: the payload ends in the head.
        """
        before = self.position
        kind, size = self._head()
        if kind == "array":
            return size
        self.position = before
        return None

    def value(self, depth: int = 0) -> Any:
        """Read one value: a scalar, a list, `Pairs`, or `Unreadable`.

        Args:
            depth: number of arrays and maps around it.

        Raises:
            ReadError: the payload ends inside the value, or is not msgpack.
        """
        start = self.position
        kind, size = self._head()
        if kind == "value":
            self.position = start
            return self._scalar()
        if kind in ("array", "map"):
            count = size if kind == "array" else 2 * size
            if depth >= MOST_DEPTH:
                self._skip(count)
                observed = f"an {kind}" if kind == "array" else f"a {kind}"
                return Unreadable(
                    WireDefect.NESTED_TOO_DEEPLY, f"{observed} in {depth} others", f"at most {MOST_DEPTH} in each other"
                )
            if count > self.rest:
                raise _truncated(f"{count} values are announced and {self.rest} bytes left")
            if kind == "array":
                return [self.value(depth + 1) for _ in range(size)]
            return Pairs((self.value(depth + 1), self.value(depth + 1)) for _ in range(size))
        data = self._take(size + (kind == "extension"))
        if kind == "text":
            try:
                return data.decode()
            except UnicodeDecodeError as error:
                observed = f"byte 0x{data[error.start]:02x} at {error.start} of a text of {size} bytes"
                return Unreadable(WireDefect.BAD_TEXT, observed, "UTF-8")
        if kind == "extension":
            code = data[0] - 256 * (data[0] > 127)
            return Unreadable(WireDefect.WRONG_TYPE, f"an extension of type {code}", "a value of msgpack's own types")
        return data

    def skip(self) -> None:
        """Skip one value of any depth.

        Raises:
            ReadError: see `value`.
        """
        self._skip(1)

    def _head(self) -> tuple[str, int]:
        """Read the first byte, and the length if one follows; the kind of a scalar is "value"."""
        first = self._take(1)[0]
        if first in _SIZED:
            width, kind = _SIZED[first]
            return kind, int.from_bytes(self._take(width), "big")
        if 0xA0 <= first <= 0xBF:
            return "text", first & 31
        if 0x90 <= first <= 0x9F:
            return "array", first & 15
        if 0x80 <= first <= 0x8F:
            return "map", first & 15
        if 0xD4 <= first <= 0xD8:
            return "extension", 1 << (first - 0xD4)
        if first == 0xC1:
            raise ReadError(
                WireDefect.MALFORMED, f"byte 0xc1 at {self.position - 1}", "msgpack, which has no such byte"
            )
        return "value", 0

    def _scalar(self) -> int | float | bool | None:
        first = self._take(1)[0]
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 256
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        number = _NUMBERS[first]
        value: int | float = number.unpack(self._take(number.size))[0]
        return value

    def _take(self, count: int) -> bytes:
        if count > self.rest:
            raise _truncated(f"{count} bytes are needed and {self.rest} left")
        start = self.position
        self.position = start + count
        return self._data[start : self.position]

    def _skip(self, count: int) -> None:
        """Skip `count` values of any depth."""
        sizes: dict[str, Callable[[int], int]] = {"array": lambda size: size, "map": lambda size: 2 * size}
        while count:
            count -= 1
            start = self.position
            kind, size = self._head()
            if kind in sizes:
                count += sizes[kind](size)
                if count > self.rest:
                    raise _truncated(f"{count} values are announced and {self.rest} bytes left")
            elif kind == "value":
                self.position = start
                self._scalar()
            else:
                self._take(size + (kind == "extension"))


def _truncated(why: str) -> ReadError:
    return ReadError(WireDefect.TRUNCATED, why, "the whole of the value")
