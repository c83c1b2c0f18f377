"""The three rules of precedence, each a pure function of the given values. No other code decides which value wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_kvmock.plugin.options import PROFILE_KEYS, all_named, names

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import EngineProfile
    from pytest_kvmock.engines.profiles import NamedProfile


def marker_values(item: pytest.Item) -> tuple[Mapping[str, Any], ...]:
    """Return the keywords of each `kvmock` marker of a test, from the outermost to the innermost.

    pytest lists the marks of a parameter (`pytest.param(marks=...)`) after those of the function. As they apply to
    fewer tests, they are the innermost here.
    """
    marks = list(item.iter_markers("kvmock"))
    if len(marks) > 1 and (callspec := getattr(item, "callspec", None)) is not None:
        marks.sort(key=lambda mark: all(mark is not one for one in callspec.marks))
    return tuple(mark.kwargs for mark in marks)[::-1]


class Policy(NamedTuple):
    """The policy of a test: what broken rules do to it.

    Attributes:
        event_errors: "fail", "warn" or "ignore".
        event_warnings: the same.
        allow: rules whose breach has no consequence.
        log: "failed", "all" or "none": which tests show their event log.
    """

    event_errors: str = "fail"
    event_warnings: str = "ignore"
    allow: frozenset[str] = frozenset()
    log: str = "failed"


def resolve_policy(
    command_line: Mapping[str, Any], markers: Sequence[Mapping[str, Any]], ini: Mapping[str, Any]
) -> Policy:
    """Return the policy: command line over marker (inner over outer) over ini over default.

    `allow` is the exception: the command line has no such option, and the result is the union of ini and all markers,
    because allowing one rule forbids no other.

    Args:
        command_line: the values on the command line, by key.
        markers: the keywords of each `kvmock` marker, from the outermost to the innermost.
        ini: the values in the ini file, by key.
    """
    given = _laid_over(command_line, markers, ini)
    allow = frozenset(name for values in (ini, *markers) for name in names(values.get("allow", ())))
    given["allow"] = allow
    return Policy(**{key: given[key] for key in Policy._fields if key in given})


def resolve_trace_tokens(
    command_line: Mapping[str, Any], markers: Sequence[Mapping[str, Any]], ini: Mapping[str, Any]
) -> bool:
    """Return whether prompts of `kv_trace` have tokens: command line over marker over ini over default.

    Args:
        command_line: the values on the command line, by key.
        markers: the keywords of each `kvmock` marker, from the outermost to the innermost.
        ini: the values in the ini file, by key.
    """
    return bool(_laid_over(command_line, markers, ini).get("trace_tokens", False))


def _laid_over(
    command_line: Mapping[str, Any], markers: Sequence[Mapping[str, Any]], ini: Mapping[str, Any]
) -> dict[str, Any]:
    given: dict[str, Any] = dict(ini)
    for values in (*markers, command_line):
        given.update(values)
    return given


def resolve_matrix(
    known: Sequence[str],
    default: Sequence[str],
    command_line: Mapping[str, Any],
    markers: Sequence[pytest.Mark],
    ini: Mapping[str, Any],
    *,
    key: str = "backends",
) -> tuple[str, ...]:
    """Return the matrix: the closest marker's names over ini over the default, without the marker's `exclude`, and
    limited to the names on the command line, if there are any.

    Args:
        known: names of all backends or dialects, in order; the result has the same order.
        default: names of those that tests run over by default.
        command_line: the values on the command line, by key.
        markers: the test's `kv_backends` or `kv_dialects` markers, closest first; only the closest counts.
        ini: the values in the ini file, by key.
        key: the key of the setting: "backends" or "dialects".

    Returns:
        The names that the test runs over. If there are none, the test is deselected.
    """
    wanted: Iterable[str] = ini.get(key, default)
    exclude: tuple[str, ...] = ()
    if markers:
        what = key.removesuffix("s")
        wanted = all_named(markers[0].args, what) or wanted
        exclude = all_named(markers[0].kwargs.get("exclude", ()), what)
    only = command_line.get(key, known)
    chosen = set(wanted).difference(exclude).intersection(only)
    return tuple(name for name in known if name in chosen)


def resolve_profile(
    base: EngineProfile,
    markers: Sequence[Mapping[str, Any]],
    command_line: Mapping[str, Any],
    named: Mapping[str, NamedProfile] = MappingProxyType({}),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> EngineProfile:
    """Return the profile: the base (the value of `kv_base_profile`), overridden by the markers, and these by the
    command line, which can set the seed.

    The innermost `profile` of the markers replaces the base (None: the base stays); the other keys of all markers,
    including outer ones, override it. The sizes among the fields of `engine` override the result, and may not
    contradict values that were set: keys of markers and command line, and fields of the `profile` or, without one,
    fields of the base that differ from their default.

    Args:
        base: the base profile.
        markers: the keywords of each `kvmock` marker, from the outermost to the innermost.
        command_line: the values on the command line, by key.
        named: the named profiles.
        defaults: the fields that `pytest_kvmock_defaults` sets: they override the base, and count as not set.

    Raises:
        ValueError: the fields together are out of range, or a field of `engine` contradicts a value that was set.
    """
    given: dict[str, Any] = {}
    name: str | None = None
    for values in markers:
        name = values.get("profile", name)
    if name is not None:
        base = named[name].in_place_of(base)
    for values in (*markers, command_line):
        given.update({key: values[key] for key in PROFILE_KEYS if key in values})
    changes = {**defaults, **given}
    profile = base.replace(**changes) if changes else base
    engine = resolve_engine(markers)
    if not engine:
        return profile
    from pytest_kvmock.engines.schedulers.args import set_fields  # imported on first use
    from pytest_kvmock.harness.engines import engine_profile

    of_base = set_fields(base) if name is None else {*named[name].fields}
    return engine_profile(profile, engine, (of_base - {*defaults}) | {*given})


def resolve_engine(markers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of the engines: the `engine` keys of all markers merged by field, inner over outer.

    Args:
        markers: the keywords of each `kvmock` marker, from the outermost to the innermost.
    """
    return {name: value for values in markers for name, value in values.get("engine", {}).items()}
