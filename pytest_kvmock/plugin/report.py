"""The output of the plugin: header, event logs, properties, the lists of backends and profiles."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvmock.plugin.options import REDUCE_SECONDS, default_backends, known_backends
from pytest_kvmock.plugin.precedence import resolve_matrix, resolve_policy
from pytest_kvmock.plugin.settings import SETTINGS, UNJUDGED, Settings

if TYPE_CHECKING:
    from pytest_kvmock.oracle.hygiene.problem import Problem
    from pytest_kvmock.plugin.case import Case


AS_READ: Final = "as read in its sources; the program did not run"


def header(config: pytest.Config) -> str:
    """Return the header: one line with the matrix and the policy, and lines about backends outside of the matrix or
    read from sources.
    """
    settings = config.stash[SETTINGS]
    from pytest_kvmock.engines.backends import backend_spec

    known = known_backends()
    chosen = settings.command_line.get("backends", ())
    matrix = resolve_matrix(known, default_backends(chosen), settings.command_line, (), settings.ini)
    policy = resolve_policy(settings.command_line, (), settings.ini)
    parts = [f"backends={','.join(matrix) or 'none'} (of {len(known)})"]
    parts.append(f"event errors={policy.event_errors}")
    parts.append(f"event warnings={policy.event_warnings}")
    if policy.allow:
        parts.append(f"allow={','.join(sorted(policy.allow))}")
    parts.append(f"seed={settings.get('seed', 0)}")
    if settings.get("trace") is not None:
        parts.append(f"trace={settings.get('trace')}")
    line = f"kvmock: {', '.join(parts)}"
    others = [name for name in chosen if name not in matrix] if len(chosen) < len(known) else []
    if others:
        line += (
            f"\nkvmock: {', '.join(others)}: only where a test names it; "
            f"for all tests: -o kvmock_backends={' '.join(others) if len(others) == 1 else repr(' '.join(others))}"
        )
    if read := [name for name in (*matrix, *others) if backend_spec(name).as_read]:
        line += f"\nkvmock: {', '.join(read)}: {AS_READ}"
    return line


def backend_lines(settings: Settings, plugins: Mapping[str, str]) -> str:
    """Return all backends, one per line, with the model of each.

    Args:
        settings: settings of the run.
        plugins: the plugin that registered each backend that is not built in, by the backend's name.
    """
    from pytest_kvmock.engines import backends

    known = backends.known_backends()
    default = default_backends(settings.command_line.get("backends", ()))
    matrix = resolve_matrix(tuple(known), default, settings.command_line, (), settings.ini)
    width = max(map(len, known))
    lines = []
    for name, spec in known.items():
        plugin = f" (from {plugins[name]})" if name in plugins else ""
        read = f" ({AS_READ})" if spec.as_read else ""
        lines.append(f"{name:<{width}}  {spec.models}{read}{plugin}")
        if name not in matrix:
            lines[-1] += " (not in the matrix of this run)"
    return "\n".join(lines) + "\n"


def profile_lines(settings: Settings) -> str:
    """Return all named profiles, one per line: fields, place, and description."""
    profiles = settings.profiles
    if not profiles:
        return "no profiles: ini kvmock_profiles names their files\n"
    width = max(map(len, profiles))
    lines = []
    for name, profile in profiles.items():
        fields = ", ".join(f"{key}={value}" for key, value in profile.fields.items())
        place = f"{profile.place.file}:{profile.place.line}"
        default = ["(the default)"] if name == settings.ini.get("profile") else []
        parts = [fields, place, profile.description, *default]
        lines.append("  ".join([f"{name:<{width}}", *filter(None, parts)]))
    return "\n".join(lines) + "\n"


_UNUSED: Final = "faults at random that were never injected"


def add_log(case: Case, phase: str, around: Problem | None = None) -> None:
    """Attach the event log to the report of this phase: the part around a problem, or the end."""
    from pytest_kvmock.oracle.hygiene.log_text import log_text

    events = case.harness.events
    if len(events):
        text = _engine_text(case) + log_text(events, around=around)
        if unused := case.harness.publisher.unused_faults:
            text += f"\n{_UNUSED}: {', '.join(unused)}"
        case.item.add_report_section(phase, "kvmock events", text)


def _engine_text(case: Case) -> str:
    """Return a line with the effective sizes of a hybrid model's caches; empty for an engine with one cache."""
    groups = next((worker.traits.groups for worker in case.harness.workers.values()), ())
    if not groups:
        return ""
    from pytest_kvmock.engines.base.cache_group import groups_text  # imported on first use

    return f"{case.backend}, tokens a block: {groups_text(groups)}\n"


_SPENT: Final = pytest.StashKey[float]()
_SESSION: Final = 10
"""Limit of a run's time for reproductions, in multiples of the limit for one test: a bug that breaks every test needs
one reproduction, not hundreds."""

_SCREEN_EVENTS: Final = 20
_SCREEN_REQUESTS: Final = 3


def add_reproduction(case: Case, phase: str, problem: Problem) -> str | None:
    """Attach the smallest reproduction of a failure, or a line that says why there is none, and return it; None if none
    was wanted.

    A failure whose traffic fits on a screen needs none, unless a plugin or a page uses it.
    """
    config, kv = case.item.config, case.harness
    settings = config.stash[SETTINGS]
    seconds = settings.get("reduce", REDUCE_SECONDS)
    is_short = kv.events.total <= _SCREEN_EVENTS and kv.recording.requests <= _SCREEN_REQUESTS
    is_wanted = settings.get("html") is not None or config.hook.pytest_kvmock_reproduction.get_hookimpls()
    if not seconds or (is_short and not is_wanted):
        return None
    spent = config.stash.get(_SPENT, 0.0)
    if spent >= _SESSION * seconds:
        text = f"none: {spent:.0f} seconds of this run went into those of other tests; run this one alone"
    else:
        start = time.monotonic()
        text = _reproduction(case, problem, seconds, until=start + seconds)
        config.stash[_SPENT] = spent + time.monotonic() - start
    case.item.add_report_section(phase, "kvmock smallest reproduction", text)
    return text


def _reproduction(case: Case, problem: Problem, seconds: float, until: float) -> str:
    from pytest_kvmock.harness.reduce import reproduce
    from pytest_kvmock.harness.reduce.program import NotReduced

    try:
        found = reproduce(case.harness, problem, allow=case.policy.allow, expired=lambda: time.monotonic() > until)
    except NotReduced as reason:
        return f"none: {reason} (--kv-reduce={seconds:g})"
    except Exception as error:  # noqa: BLE001 - a user's index or backend, replayed; the verdict must still be reported
        return f"none: the search ended in {type(error).__name__}: {error}"
    lines = case.item.ihook.pytest_kvmock_reproduction(item=case.item, reproduction=found)
    saved = "".join(f"\n# {line}" for line in lines)
    text = found.as_test(awaited_by=_awaited_by(case.item))
    more = "" if found.complete else f"; perhaps not the smallest, because --kv-reduce={seconds:g} ended the search"
    return f"# cut from {found.cut_from:,} {found.level} to {found.size:,}{more}{saved}\n{text.rstrip()}"


def add_page(
    case: Case, phase: str, failure: str, problem: Problem | None = None, reproduction: str | None = None
) -> None:
    """With --kv-html, write the page of a failing test; a line of the report has its path, or why there is none.

    Args:
        case: the test.
        phase: the phase of pytest.
        failure: the message of the failure.
        problem: the problem shown first; None: the end of the log.
        reproduction: the smallest reproduction, as text.
    """
    directory = case.item.config.stash[SETTINGS].get("html")
    if directory is None:
        return
    from pytest_kvmock.plugin.failure_page import write_failure  # imported on first use

    try:
        text = write_failure(case, directory, failure, problem, reproduction)
    except Exception as error:  # noqa: BLE001 - the failure of the test must still be reported
        text = f"none: --kv-html={directory}: {' '.join(f'{type(error).__name__}: {error}'.split())}"
    case.item.add_report_section(phase, "kvmock page", text)


def _awaited_by(item: pytest.Item) -> str | None:
    """Return the marker by which a plugin awaits a test like this one, "" for an async test without one; None for a
    test that is not async.
    """
    for marker in ("asyncio", "anyio"):
        if item.get_closest_marker(marker) is not None:
            return marker
    return "" if iscoroutinefunction(getattr(item, "function", None)) else None


def passed_logs(reporter: pytest.TerminalReporter) -> None:
    """Write the event logs of passed tests if pytest does not (-rP, and -rX for an xfail that passed)."""
    for outcome, char in (("passed", "P"), ("xpassed", "X")):
        if reporter.hasopt(char):
            continue
        for report in reporter.getreports(outcome):
            logs = [text for name, text in report.sections if name.startswith("Captured kvmock")]
            if logs:
                reporter.write_sep("_", f"kvmock events of {report.nodeid}")
                for text in logs:
                    reporter.write_line(text)


def record_properties(case: Case) -> None:
    """Record backend, events, errors and warnings as properties that junit, pytest-xdist and the summary read.

    They are replaced, not appended: a rerun uses the same item again.
    """
    mine: list[tuple[str, object]] = []
    if case.backend is not None:
        mine.append(("kvmock.backend", case.backend))
    mine.append(("kvmock.events", case.harness.events.total))
    mine.append(("kvmock.errors", case.errors))
    if case.warnings:
        mine.append(("kvmock.warnings", _counts_text(case.warnings)))
    if case.engine_warnings:
        mine.append(("kvmock.engine_warnings", _counts_text(case.engine_warnings)))
    if unused := case.harness.publisher.unused_faults:
        mine.append(("kvmock.unused_faults", _counts_text(dict.fromkeys(unused, 1))))
    # A scenario file has its own events, and there is no engine to compare them with.
    if isinstance(case.item, pytest.Function):
        sinks = {
            "uncompared_sinks": case.harness.publisher.num_uncompared_sinks,
            "unused_sinks": len(case.harness.publisher.unused_sinks),
        }
        mine += [(f"kvmock.{name}", count) for name, count in sinks.items() if count]
    if case.taken_for_device:
        mine.append(("kvmock.taken_for_device", case.taken_for_device))
    properties = case.item.user_properties
    others = [pair for pair in properties if not pair[0].startswith("kvmock.") or pair[0] == UNJUDGED]
    properties[:] = others + mine


def _tests(count: int) -> str:
    return f"{count:,} test{'s' * (count != 1)}"


def _counts_text(counts: Mapping[str, int]) -> str:
    """Return "2 duplicate_store, 1 orphaned_child"."""
    return ", ".join(f"{count} {rule}" for rule, count in counts.items())


def summary_line(reports: Iterable[pytest.TestReport], settings: Settings, *, only_undone: bool = False) -> str | None:
    """Return the line on the events that a run checked: tests, backends, events, warnings by rule; None if there were
    none.

    The line then lists requested checks that were not done: random faults, each with the number of tests in which it
    was injected into no event, and sinks that no event came to, or whose engine was not compared. Last comes the number
    of blocks on the host that an index took for the device's.

    Args:
        reports: teardown reports with the properties of `record_properties`; of a rerun test, the last report counts.
        settings: settings of the run.
        only_undone: whether to leave out the checked events.
    """
    from pytest_kvmock.oracle.hygiene.rules import RULES

    tests = events = uncompared = idle = taken = 0
    backends: set[str] = set()
    warnings: Counter[str] = Counter()
    engine_warnings: Counter[str] = Counter()
    unused: Counter[str] = Counter()
    counted = {"kvmock.warnings": warnings, "kvmock.engine_warnings": engine_warnings, "kvmock.unused_faults": unused}
    for report in {each.nodeid: each for each in sorted(reports, key=lambda one: one.start)}.values():
        properties: dict[str, Any] = dict(report.user_properties)
        # A leaked request may be the only finding.
        tests += bool(properties["kvmock.events"] or "kvmock.warnings" in properties)
        events += properties["kvmock.events"]
        if "kvmock.backend" in properties:
            backends.add(properties["kvmock.backend"])
        uncompared += properties.get("kvmock.uncompared_sinks", 0)
        idle += properties.get("kvmock.unused_sinks", 0)
        taken += properties.get("kvmock.taken_for_device", 0)
        for key, counts in counted.items():
            for part in properties.get(key, "").split(", ") if key in properties else ():
                count, _, rule = part.partition(" ")
                counts[rule] += int(count)
    undone: list[str] = []
    if unused:
        undone.append(f"{_UNUSED}: {', '.join(f'{kind} ({_tests(unused[kind])})' for kind in sorted(unused))}")
    if idle:
        undone.append(f"{idle:,} sink{'s' * (idle != 1)} without events (kv_sink)")
    if uncompared:
        engines = "its engine" if uncompared == 1 else "their engines"
        undone.append(f"{uncompared:,} sink{'s' * (uncompared != 1)} never compared with {engines} (kv_sink.compare)")
    if taken:
        undone.append(f"{taken:,} block{'s' * (taken != 1)} on the host taken for the device's (no takes_updates)")
    if only_undone or not tests:
        return f"kvmock: {'; '.join(undone)}" if undone else None
    order = [*RULES]
    known = known_backends()
    names = sorted(backends, key=lambda name: (known.index(name) if name in known else len(known), name))
    line = f"kvmock: {_tests(tests)}{' on ' * bool(names)}{', '.join(names)}; "
    line += f"{events:,} event{'s' * (events != 1)}; "
    if warnings:
        line += f"warnings: {_counts_text({rule: warnings[rule] for rule in order if rule in warnings})}"
        if settings.get("event_warnings") != "fail":
            line += " (--kv-event-warnings=fail makes them fail)"
    else:
        line += "warnings: none" if engine_warnings else "no warnings"
    if engine_warnings:
        own = _counts_text({rule: engine_warnings[rule] for rule in order if rule in engine_warnings})
        line += f"{'; ' if warnings else ' but '}the engines' own: {own}"
    return "; ".join([line, *undone])
