"""What a run shows of the plugin: header, event logs, properties, the list of backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

from pytest_kvmock.plugin.options import SETTINGS, Settings, default_backends, known_backends
from pytest_kvmock.plugin.precedence import resolve_matrix, resolve_policy

if TYPE_CHECKING:
    from pytest_kvmock.plugin.fixtures import Case


def header(config: pytest.Config) -> str:
    """Say in one line what differs from the default, or, with -v, everything."""
    settings = config.stash[SETTINGS]
    known = known_backends()
    matrix = resolve_matrix(known, default_backends(), settings.command_line, (), settings.ini)
    policy = resolve_policy(settings.command_line, (), settings.ini)
    said = [f"backends={','.join(matrix) or 'none'} (of {len(known)})"]
    said.append(f"event errors={policy.event_errors}")
    said.append(f"event warnings={policy.event_warnings}")
    if policy.allow:
        said.append(f"allow={','.join(sorted(policy.allow))}")
    said.append(f"seed={settings.get('seed', 0)}")
    if settings.get("trace") is not None:
        said.append(f"trace={settings.get('trace')}")
    return f"kvmock: {', '.join(said)}"


def backend_lines(settings: Settings, plugins: Mapping[str, str]) -> str:
    """All backends, one a line, with what each follows.

    Args:
        settings: of the run.
        plugins: who registered those that are not built in, by name.
    """
    from pytest_kvmock import backends

    known = backends.known_backends()
    matrix = resolve_matrix(tuple(known), default_backends(), settings.command_line, (), settings.ini)
    width = max(map(len, known))
    lines = []
    for name, spec in known.items():
        plugin = f" (from {plugins[name]})" if name in plugins else ""
        lines.append(f"{name:<{width}}  {spec.follows}{plugin}")
        if name not in matrix:
            lines[-1] += " (not in the matrix of this run)"
    return "\n".join(lines) + "\n"


def profile_lines(settings: Settings) -> str:
    """All named profiles, one a line: what each says, where it stands, and what it is for."""
    profiles = settings.profiles
    if not profiles:
        return "no profiles: ini kvmock_profiles names their files\n"
    width = max(map(len, profiles))
    lines = []
    for name, profile in profiles.items():
        fields = ", ".join(f"{key}={value}" for key, value in profile.fields.items())
        place = f"{profile.place.file}:{profile.place.line}"
        default = ["(the default)"] if name == settings.ini.get("profile") else []
        said = [fields, place, profile.description, *default]
        lines.append("  ".join([f"{name:<{width}}", *filter(None, said)]))
    return "\n".join(lines) + "\n"


def add_log(case: Case, phase: str) -> None:
    """Attach the event log to the report of this phase."""
    from pytest_kvmock.hygiene.report import log_text

    events = case.harness.events
    if len(events):
        case.item.add_report_section(phase, "kvmock events", log_text(events))


def record_properties(case: Case) -> None:
    """Put backend, events and errors where junit and pytest-xdist find them.

    Replaced, not appended: a rerun judges the same item again.
    """
    mine: list[tuple[str, object]] = []
    if case.backend is not None:
        mine.append(("kvmock.backend", case.backend))
    mine.append(("kvmock.events", case.harness.events.total))
    mine.append(("kvmock.errors", case.errors))
    properties = case.item.user_properties
    properties[:] = [pair for pair in properties if not pair[0].startswith("kvmock.")] + mine
