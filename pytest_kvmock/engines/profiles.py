"""Named engine profiles, read from YAML files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from pytest_kvmock.engines.backends import EngineProfile
from pytest_kvmock.values.checks import unknown_text
from pytest_kvmock.values.strict_yaml import (
    Place,
    YamlError,
    YamlNode,
    boolean,
    integer,
    nullable,
    plain,
    read_yaml,
    string,
)


@dataclass(frozen=True, slots=True)
class NamedProfile:
    """A profile with a name.

    Attributes:
        name: its name.
        fields: the fields of `EngineProfile` that it or its bases set.
        description: its purpose; may be empty.
        place: its file and line.
    """

    name: str
    fields: Mapping[str, Any]
    description: str
    place: Place

    def in_place_of(self, base: EngineProfile) -> EngineProfile:
        """Return the whole profile. Unset fields have the defaults of `EngineProfile`.

        Only the seed stays that of `base`, because it is not a property of an engine.
        """
        return EngineProfile(**{"seed": base.seed, **self.fields})


@dataclass(slots=True)
class _Draft:
    """A profile as written in its file, without its base's fields."""

    place: Place
    base: YamlNode | None
    description: str
    fields: dict[str, Any]


def read_profiles(files: Iterable[tuple[Path, str]]) -> dict[str, NamedProfile]:
    """Read the profiles of some files.

    A file has only the key `profiles`, with a mapping of names to profiles. A profile has fields of `EngineProfile`. It
    may have a `description` and a `base`: the name of another profile in any of the files, from which it takes the
    fields that it does not set itself.

    Args:
        files: the path of each file, with the name that messages use.

    Returns:
        The profiles by name, in the order of the files.

    Raises:
        YamlError: a file cannot be read or has another form, a name occurs twice, a value is out of range, or a base
            does not exist or is based on its own profile.
    """
    drafts: dict[str, _Draft] = {}
    for path, shown in files:
        root = read_yaml(path, shown)
        found = root.fields({"profiles": _drafts}, required=("profiles",))["profiles"]
        for name, draft in found.items():
            if name in drafts:
                raise YamlError(f"there is another profile {name!r} at {drafts[name].place}", draft.place)
            drafts[name] = draft
    return {name: _complete(name, drafts) for name in drafts}


def _drafts(node: YamlNode) -> dict[str, _Draft]:
    drafts = node.entries(_draft)
    for name, draft in drafts.items():
        draft.place = node.keys[name]
    return drafts


def _draft(node: YamlNode) -> _Draft:
    given = node.fields({"base": _base, "description": string, **FIELDS})
    return _Draft(node.place, given.pop("base", None), given.pop("description", ""), given)


def _base(node: YamlNode) -> YamlNode:
    string(node)
    return node


def _field(name: str) -> Callable[[YamlNode], Any]:
    readers: Mapping[str, Callable[[YamlNode], Any]] = {
        "prefix_caching": boolean,
        "real_sizes": boolean,
        "chunk": nullable(integer),
        "tiers": plain,
    }
    reader = readers.get(name, integer)

    def read(node: YamlNode) -> Any:
        value = reader(node)
        try:
            return getattr(EngineProfile(**{name: value}), name)
        except ValueError as error:
            raise YamlError(str(error), node.place) from None  # it begins with the field's name

    return read


FIELDS: Final[Mapping[str, Callable[[YamlNode], Any]]] = {
    field.name: _field(field.name) for field in fields(EngineProfile)
}
"""The reader of each field of an `EngineProfile`."""


def _complete(name: str, drafts: Mapping[str, _Draft]) -> NamedProfile:
    """Return a profile with the fields of its base, of the base's base, and so on."""
    chain = [name]
    given: dict[str, Any] = {}
    while True:
        draft = drafts[chain[-1]]
        given = {**draft.fields, **given}
        if draft.base is None:
            break
        base = draft.base.value
        if base not in drafts:
            raise draft.base.error(unknown_text("profile", base, drafts))
        if base in chain:
            raise draft.base.error(f"a profile cannot be based on itself: {' -> '.join([*chain, base])}")
        chain.append(base)
    own = drafts[name]
    try:
        EngineProfile(**given)
    except ValueError as error:  # fields that are valid alone, but too large together
        raise YamlError(f"{name}: {error}", own.place) from None
    return NamedProfile(name, given, own.description, own.place)
