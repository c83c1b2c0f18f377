"""Checks of markers: when a test is collected, and again at its set-up, for markers added later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvmock.plugin.options import (
    AXES,
    CLEARS,
    PROFILE_KEYS,
    REACTIONS,
    SYNCS,
    boolean,
    fault_names,
    fault_rates,
    known_names,
    one_of,
    rule_names,
)
from pytest_kvmock.plugin.settings import SETTINGS, profile_name, profile_of
from pytest_kvmock.values.checks import unknown_text

if TYPE_CHECKING:
    from pytest_kvmock.engines.profiles import NamedProfile

POLICY_KEYS: Final = ("event_errors", "event_warnings", "allow")
KVMOCK_KEYS: Final = (
    *PROFILE_KEYS,
    "profile",
    "sync",
    "clears",
    *POLICY_KEYS,
    "faults",
    "survive",
    "engine",
    "trace_tokens",
    "roles",
    "stores",
)


def wrong_names(mark: pytest.Mark) -> Iterator[str]:
    """Yield the errors in one `kv_backends` or `kv_dialects` marker, a sentence for each argument."""
    axis = next(axis for axis in AXES if axis.marker == mark.name)
    for key in mark.kwargs:
        if key != "exclude":
            yield unknown_text("key", key, ["exclude"])
    for value in (mark.args, mark.kwargs.get("exclude", ())):
        try:
            known_names(value, axis.what, axis.known())
        except ValueError as error:
            yield str(error)


def wrong_in_kvmock(mark: pytest.Mark, profiles: Mapping[str, NamedProfile]) -> Iterator[str]:
    """Yield the errors in one `kvmock` marker, a sentence for each argument; `profiles` are the named profiles."""
    if mark.args:
        yield f"takes keywords only; known: {', '.join(KVMOCK_KEYS)}"
    checks: Mapping[str, Callable[[Any], Any]] = {
        "event_errors": one_of(*REACTIONS),
        "event_warnings": one_of(*REACTIONS),
        "sync": one_of(*SYNCS),
        "clears": one_of(*CLEARS),
        "allow": rule_names,
        "profile": lambda value: None if value is None else profile_name(value, profiles),
        "faults": fault_rates,
        "survive": fault_names,
        "trace_tokens": boolean,
        "roles": _roles,
        "stores": _stores,
    }
    for key, value in mark.kwargs.items():
        if key not in KVMOCK_KEYS:
            yield unknown_text("key", key, KVMOCK_KEYS)
            continue
        if key == "engine":
            yield from (f"{key}: {wrong}" for wrong in wrong_in_engine(value))
            continue
        try:
            if key in PROFILE_KEYS:
                profile_of({key: value})
            else:
                checks[key](value)
        except ValueError as error:
            yield str(error) if str(error).startswith(f"{key}: ") else f"{key}: {error}"


def _roles(value: Any) -> Any:
    from pytest_kvmock.harness.roles import read_roles  # imported on first use

    return read_roles(value)


def _stores(value: Any) -> Any:
    from pytest_kvmock.values.shared_stores import read_stores  # imported on first use

    return read_stores(value)


def wrong_in_engine(fields: object) -> Iterable[str]:
    """List the errors in the fields of `MockEngineArgs` that a `kvmock` marker sets."""
    if not isinstance(fields, Mapping):
        return [f"got {fields!r:.80}; allowed: a mapping of fields of MockEngineArgs"]
    from pytest_kvmock.harness.engines import wrong_fields

    return wrong_fields(fields)


def _meant_by(name: str, config: pytest.Config) -> str | None:
    """Return the marker of this plugin that differs from a name only in underscores or a plural; pytest only warns of
    such a name.

    An example is `kv_backend`, the name of the fixture. None for a marker that the project registers.
    """

    def spelt(name: str) -> str:
        return name.replace("_", "").removesuffix("s")

    ours = ("kvmock", *(axis.marker for axis in AXES))
    meant = next((each for each in ours if spelt(each) == spelt(name)), None)
    registered = {line.split(":")[0].split("(")[0].strip() for line in config.getini("markers")}
    return None if name in registered else meant


def wrong_in(mark: pytest.Mark, config: pytest.Config) -> list[str]:
    """List the errors in a marker of this plugin, each with the marker as written."""
    if mark.name in ("kv_backends", "kv_dialects"):
        wrong = wrong_names(mark)
    elif mark.name == "kvmock":
        wrong = wrong_in_kvmock(mark, config.stash[SETTINGS].profiles)
    elif (meant := _meant_by(mark.name, config)) is not None:
        wrong = iter([f"unknown marker; did you mean {meant}?"])
    else:
        return []
    return [f"{show_mark(mark)}: {what}" for what in wrong]


def check_markers(node: pytest.Item) -> None:
    """Check all markers of this plugin on a test.

    Raises:
        ValueError: a marker is wrong; the message has a line for each error.
    """
    wrong = [line for mark in node.iter_markers() for line in wrong_in(mark, node.config)]
    if wrong:
        raise ValueError("\n".join(wrong))


def wrong_markers(definition: pytest.Item) -> str:
    """List all wrong markers of the file or class in which pytest found one: its collector cannot continue.

    A marker that several tests share, such as that of a class, is listed with the first of them.

    Returns:
        A line for each error, with the test's id.
    """
    tests: list[tuple[str, Iterable[pytest.Mark]]] = []
    collector = definition.parent
    if isinstance(collector, pytest.Module | pytest.Class):
        tests += _tests_of(collector, collector.obj, collector.nodeid, [*collector.iter_markers()])
    tests.append((definition.nodeid, definition.iter_markers()))  # a hook may have made the test, or its marker
    seen: set[int] = set()
    lines = []
    for nodeid, marks in tests:
        for mark in marks:
            if id(mark) not in seen:
                seen.add(id(mark))
                lines += [f"{nodeid}: {wrong}" for wrong in wrong_in(mark, definition.config)]
    return "\n".join(lines)


def _tests_of(
    collector: pytest.Module | pytest.Class, holder: Any, nodeid: str, outer: Sequence[pytest.Mark]
) -> Iterator[tuple[str, Sequence[pytest.Mark]]]:
    """Yield the tests of a module or class by id, each with its markers; `outer` has the markers of the holder and
    around it.
    """
    holders = holder.__mro__ if isinstance(holder, type) else (holder,)
    for name in dict.fromkeys(name for each in holders for name in vars(each)):
        thing = getattr_static(holder, name)
        marks = [*_marks_of(thing), *outer]
        if isinstance(thing, type):
            if collector.istestclass(thing, name) and f"::{name}" not in nodeid:  # a class may be its own attribute
                yield from _tests_of(collector, thing, f"{nodeid}::{name}", marks)
        elif collector.istestfunction(thing, name):
            yield f"{nodeid}::{name}", marks


def _marks_of(thing: object) -> Iterator[pytest.Mark]:
    """Yield the markers on a function or class itself."""
    own = getattr(thing, "pytestmark", ())
    for mark in own if isinstance(own, list | tuple) else (own,):
        found = getattr(mark, "mark", mark)  # a decorator in a hand-written list
        if isinstance(found, pytest.Mark):
            yield found


def show_mark(mark: pytest.Mark) -> str:
    """Return a marker as written."""
    arguments = [*map(repr, mark.args), *(f"{key}={value!r}" for key, value in mark.kwargs.items())]
    return f"{mark.name}({', '.join(arguments)})"
