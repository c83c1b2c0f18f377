"""What markers may say: checked when a test is collected, and once more when it is set up, for those that came later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvmock.plugin.options import (
    PROFILE_KEYS,
    REACTIONS,
    SETTINGS,
    SYNCS,
    backend_names,
    fault_names,
    fault_rates,
    index_semantics,
    one_of,
    profile_name,
    profile_of,
    rule_names,
)

if TYPE_CHECKING:
    from pytest_kvmock.profiles import NamedProfile

POLICY_KEYS: Final = ("event_errors", "event_warnings", "allow")
KVMOCK_KEYS: Final = (*PROFILE_KEYS, "profile", "sync", "index_semantics", *POLICY_KEYS, "faults", "survive")


def check_kv_backends(mark: pytest.Mark) -> None:
    """Check the arguments of one `kv_backends` marker.

    Raises:
        ValueError: one is wrong. The message shows the marker.
    """
    for key in mark.kwargs:
        if key != "exclude":
            raise ValueError(f"{show_mark(mark)}: unknown key {key!r}; known: exclude")
    try:
        backend_names(mark.args)
        backend_names(mark.kwargs.get("exclude", ()))
    except ValueError as error:
        raise ValueError(f"{show_mark(mark)}: {error}") from None


def check_kvmock(mark: pytest.Mark, profiles: Mapping[str, NamedProfile]) -> None:
    """Check the arguments of one `kvmock` marker; `profiles` are the named ones that there are.

    Raises:
        ValueError: one is wrong. The message shows the marker.
    """
    if mark.args:
        raise ValueError(f"{show_mark(mark)}: takes keywords only; known: {', '.join(KVMOCK_KEYS)}")
    checks: Mapping[str, Callable[[Any], Any]] = {
        "event_errors": one_of(*REACTIONS),
        "event_warnings": one_of(*REACTIONS),
        "sync": one_of(*SYNCS),
        "index_semantics": index_semantics,
        "allow": rule_names,
        "profile": lambda value: None if value is None else profile_name(value, profiles),
        "faults": fault_rates,
        "survive": fault_names,
    }
    for key, value in mark.kwargs.items():
        if key not in KVMOCK_KEYS:
            raise ValueError(f"{show_mark(mark)}: unknown key {key!r}; known: {', '.join(KVMOCK_KEYS)}")
        try:
            if key in PROFILE_KEYS:
                profile_of({key: value})
            else:
                checks[key](value)
        except ValueError as error:
            raise ValueError(f"{show_mark(mark)}: {key}: {error}") from None


def check_markers(node: pytest.Item) -> None:
    """Check all markers of ours that a test has.

    Raises:
        ValueError: one is wrong.
    """
    for mark in node.iter_markers("kv_backends"):
        check_kv_backends(mark)
    for mark in node.iter_markers("kvmock"):
        check_kvmock(mark, node.config.stash[SETTINGS].profiles)


def show_mark(mark: pytest.Mark) -> str:
    """Show a marker as it was written."""
    arguments = [*map(repr, mark.args), *(f"{key}={value!r}" for key, value in mark.kwargs.items())]
    return f"{mark.name}({', '.join(arguments)})"
