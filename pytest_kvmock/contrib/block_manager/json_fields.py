"""Block sets and descriptor lists as bytes, for tests that send them over their own wire: JSON, as in the original.

The fields are ours: other programs cannot read them. Each field is checked when it is read, and refused with a reason.
"""

from __future__ import annotations

import json
from typing import Any

from pytest_kvmock.contrib.block_manager.remote_errors import NixlSerializationError
from pytest_kvmock.values.checks import MOST_U64, MemberT, check_member, integer_text, is_integer


def to_json(fields: dict[str, Any]) -> bytes:
    """Return fields as JSON; equal fields make equal bytes."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def from_json(what: str, data: object, names: tuple[str, ...]) -> JsonFields:
    """Read fields from bytes.

    Args:
        what: the name of the value in messages.
        data: the bytes.
        names: the required fields; no others are allowed.

    Raises:
        NixlSerializationError: the bytes are not JSON, or have other fields.
        TypeError: `data` is not bytes.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"a {what} is read from bytes, got {data!r:.80}")
    try:
        fields = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise NixlSerializationError(f"the bytes of a {what} are not JSON: {error}") from None
    return JsonFields(fields, names, what)


class JsonFields:
    """The fields of one object; reading a field checks its type.

    Args:
        fields: the value that JSON returned.
        names: the required fields; no others are allowed.
        where: the name of the object in messages.

    Raises:
        NixlSerializationError: it is not an object, or has other fields.
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

    def objects(self, name: str, names: tuple[str, ...]) -> list[JsonFields]:
        """Return a field that is a list of objects, each with the fields `names`."""
        values = self._typed(name, list, "a list")
        return [JsonFields(value, names, f"{self._where}'s {name}[{at}]") for at, value in enumerate(values)]

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
