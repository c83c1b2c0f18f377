"""A strict reader of handwritten YAML: each value has its file, line and column, and unusual constructs are refused.

A document becomes a tree of `YamlNode`s, and the caller walks it with readers, one for each key that may be there:

    node.fields({"block_size": integer, "backends": list_of(string)}, required=("block_size",))

Only the parser of PyYAML is used, so that a tag never makes an object. Refused are empty files, several documents,
duplicate keys, keys that are neither strings nor integers, tags, merge keys, and anchors with their aliases (with which
a small file can expand without end). An integer key is read as text. Plain words have their meaning in YAML 1.2: `yes`,
`on`, `010`, `1:30` and dates are strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from pytest_kvmock.values.checks import KvMockError, is_integer, unknown_text

T = TypeVar("T")

DEEPEST: Final = 32
"""Maximum nesting depth of a document."""

_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_LONGEST_NUMBER: Final = 100  # characters; int() refuses some thousands
_WORDS: Final[Mapping[str, bool | None]] = {
    "": None,
    "~": None,
    **dict.fromkeys(("null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class Place(NamedTuple):
    """A place in a file, which has the caller's name for it; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class YamlError(KvMockError, ValueError):
    """A document is invalid. The message is one line that begins with file, line and column.

    Attributes:
        place: the place of the error; None for a file that could not be read.
    """

    def __init__(self, message: str, place: Place | None = None) -> None:
        super().__init__(message if place is None else f"{place}: {message}")
        self.place = place


@dataclass(frozen=True, slots=True)
class YamlNode:
    """One value of a document, and its place.

    Attributes:
        value: a string, integer, float, bool or None; a list of nodes; a dict of nodes by key.
        place: where it begins.
        name: its key; for an element, the key of its list; "" for the document itself.
        keys: for a mapping, the place of each key.
    """

    value: Any
    place: Place
    name: str = ""
    keys: Mapping[str, Place] = field(default_factory=dict)

    def error(self, message: str) -> YamlError:
        """Return an error that points at this value."""
        return YamlError(f"{self.name}: {message}" if self.name else message, self.place)

    def key_error(self, key: str, message: str) -> YamlError:
        """Return an error that points at one key of this mapping."""
        return YamlError(f"{self.name}: {message}" if self.name else message, self.keys[key])

    def wrong_type(self, allowed: str) -> YamlError:
        """Return the error for a value of a wrong type."""
        if self.value is None:
            got = "nothing"
        elif isinstance(self.value, dict | list):
            got = "a mapping" if isinstance(self.value, dict) else "a list"
        else:
            got = f"{self.value!r:.80}"
        return self.error(f"got {got}; allowed: {allowed}")

    def read(self, reader: Callable[[YamlNode], T]) -> T:
        """Read this value with a reader; a plain ValueError of the reader gets the place of this value.

        Raises:
            YamlError: the reader refuses it.
        """
        try:
            return reader(self)
        except YamlError:
            raise
        except ValueError as error:
            raise self.error(str(error)) from None

    def fields(self, readers: Mapping[str, Callable[[YamlNode], Any]], required: Iterable[str] = ()) -> dict[str, Any]:
        """Read a mapping of known keys.

        Args:
            readers: the reader of each allowed key.
            required: the required keys.

        Returns:
            The values of the keys that are there, in the order of the document.

        Raises:
            YamlError: it is not a mapping, a key is unknown or missing, or a reader refuses a value.
        """
        given = self._mapping("keys " + ", ".join(readers))
        for key in given:
            if key not in readers:
                raise self.key_error(key, unknown_text("key", key, readers))
        for key in required:
            if key not in given:
                raise self.error(f"the key {key!r} is missing")
        return {key: node.read(readers[key]) for key, node in given.items()}

    def entries(self, reader: Callable[[YamlNode], T]) -> dict[str, T]:
        """Read a mapping with free keys.

        Raises:
            YamlError: it is not a mapping, or the reader refuses a value.
        """
        return {key: node.read(reader) for key, node in self._mapping("names of your own").items()}

    def elements(self, reader: Callable[[YamlNode], T]) -> list[T]:
        """Read a list.

        Raises:
            YamlError: it is not a list, or the reader refuses a value.
        """
        if not isinstance(self.value, list):
            raise self.wrong_type("a list")
        return [node.read(reader) for node in self.value]

    def _mapping(self, of: str) -> dict[str, YamlNode]:
        if not isinstance(self.value, dict):
            raise self.wrong_type(f"a mapping of {of}")
        return self.value


# ---------------------------------------------------------------------------------------------------- readers


def string(node: YamlNode) -> str:
    """Read a string."""
    if not isinstance(node.value, str):
        raise node.wrong_type("a string")
    return node.value


def integer(node: YamlNode) -> int:
    """Read an integer."""
    if not is_integer(node.value):
        raise node.wrong_type("an integer")
    return node.value


def number(node: YamlNode) -> float:
    """Read an integer or a float."""
    if not isinstance(node.value, int | float) or isinstance(node.value, bool):
        raise node.wrong_type("a number")
    return node.value


def boolean(node: YamlNode) -> bool:
    """Read true or false."""
    if not isinstance(node.value, bool):
        raise node.wrong_type("true or false")
    return node.value


def plain(node: YamlNode) -> Any:
    """Read anything, as plain Python values without places."""
    if isinstance(node.value, dict):
        return {key: plain(value) for key, value in node.value.items()}
    if isinstance(node.value, list):
        return [plain(value) for value in node.value]
    return node.value


def nullable(reader: Callable[[YamlNode], T]) -> Callable[[YamlNode], T | None]:
    """Make a reader that also takes null."""

    def read(node: YamlNode) -> T | None:
        return None if node.value is None else reader(node)

    return read


def list_of(reader: Callable[[YamlNode], T]) -> Callable[[YamlNode], list[T]]:
    """Make a reader of lists."""

    def read(node: YamlNode) -> list[T]:
        return node.elements(reader)

    return read


# ---------------------------------------------------------------------------------------------------- documents


def read_yaml(path: Path, name: str | None = None) -> YamlNode:
    """Read a file.

    Args:
        path: where it is.
        name: its name in messages; None: `path`.

    Raises:
        YamlError: the file cannot be read, is not UTF-8, or `parse_yaml` refuses it.
    """
    name = str(path) if name is None else name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise YamlError(f"{name}: {error.strerror or error}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = _place_at(data[: error.start].decode("utf-8-sig", "replace"), name)
        raise YamlError(f"not UTF-8: byte 0x{data[error.start]:02x}", place) from None
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str) -> YamlNode:
    """Read a document.

    Args:
        text: the document.
        name: of the file, for messages.

    Raises:
        YamlError: the document is empty, not YAML, or has a refused construct (see the module docstring).
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:  # it checks the whole text at once
        message = f"not YAML: the character U+{ord(text[error.position]):04X} is not allowed"
        raise YamlError(message, _place_at(text[: error.position], name)) from None
    try:
        return _Tree(loader, name).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise YamlError(f"not YAML: {problem}", _place_of(mark, name)) from None
    except YamlError:
        raise
    except (ValueError, OverflowError):  # what PyYAML returns at the end
        message = "not YAML: an escape that stands for no character"
        raise YamlError(message, _place_of(loader.get_mark(), name)) from None
    finally:
        loader.dispose()


class _Tree:
    """Builds the nodes from the parser's events, which still have the source text of values."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = loader  # a yaml.SafeLoader, whose methods are not typed
        self._file = name

    def document(self) -> YamlNode:
        import yaml

        loader = self._loader
        loader.get_event()  # the stream begins
        if loader.check_event(yaml.StreamEndEvent):
            raise YamlError("the file is empty", Place(self._file, 1, 1))
        loader.get_event()  # the document begins
        node = self._node("", 0)
        if node.value is None:
            raise YamlError("the file is empty", node.place)
        loader.get_event()  # the document ends
        if not loader.check_event(yaml.StreamEndEvent):
            raise YamlError("a second document begins; only one is allowed", self._place(loader.peek_event()))
        return node

    def _node(self, name: str, depth: int) -> YamlNode:
        import yaml

        event = self._loader.get_event()
        place = self._place(event)
        if isinstance(event, yaml.AliasEvent):
            raise YamlError(f"the alias *{event.anchor}: aliases are not allowed; write it out", place)
        if event.anchor is not None:
            raise YamlError(f"the anchor &{event.anchor}: anchors are not allowed", place)
        if event.tag is not None:
            raise YamlError(f"the tag {event.tag!r:.80}: tags are not allowed", place)
        if depth > DEEPEST:
            raise YamlError(f"nested deeper than {DEEPEST} levels", place)
        if isinstance(event, yaml.ScalarEvent):
            return YamlNode(event.value if event.style is not None else _plain_scalar(event.value), place, name)
        if isinstance(event, yaml.SequenceStartEvent):
            elements = []
            while not self._loader.check_event(yaml.SequenceEndEvent):
                elements.append(self._node(name, depth + 1))
            self._loader.get_event()
            return YamlNode(elements, place, name)
        return self._mapping(place, name, depth)

    def _mapping(self, place: Place, name: str, depth: int) -> YamlNode:
        import yaml

        values: dict[str, YamlNode] = {}
        keys: dict[str, Place] = {}
        while not self._loader.check_event(yaml.MappingEndEvent):
            is_plain = getattr(self._loader.peek_event(), "style", "") is None
            key = self._node("", depth + 1)
            if key.value == "<<" and is_plain:
                raise YamlError("the merge key <<: merge keys are not allowed", key.place)
            if not isinstance(key.value, str | int) or isinstance(key.value, bool):
                raise key.wrong_type("keys that are strings or integers; put it in quotes")
            text = str(key.value)
            if text in keys:
                raise YamlError(f"the key {text!r:.80} comes twice; first in line {keys[text].line}", key.place)
            keys[text] = key.place
            values[text] = self._node(text, depth + 1)
        self._loader.get_event()
        return YamlNode(values, place, name, keys)

    def _place(self, event: Any) -> Place:
        return _place_of(event.start_mark, self._file)


def _place_of(mark: Any, name: str) -> Place:
    return Place(name, mark.line + 1, mark.column + 1)


def _place_at(before: str, name: str) -> Place:
    """Return the place in a document after the text `before`."""
    return Place(name, before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)


def _plain_scalar(text: str) -> str | int | float | bool | None:
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= _LONGEST_NUMBER:
        if _INT.fullmatch(text):
            return int(text, 0)
        if _FLOAT.fullmatch(text) and not re.match(r"[-+]?0[0-9]", text):
            return float(text)
    return text
