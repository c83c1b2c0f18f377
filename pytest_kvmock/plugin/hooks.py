"""The hooks. They run for every test of every suite that has the plugin installed. Each therefore returns at once if
the plugin is not used, and imports what it needs on first use.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterable, Mapping
from typing import Final

import pytest

from pytest_kvmock.plugin import hookspecs
from pytest_kvmock.plugin.fixtures import (
    CASE,
    FIXTURES,
)
from pytest_kvmock.plugin.matrix import AXIS, CASE_FIXTURE, DIALECT_AXIS, deselect, generate
from pytest_kvmock.plugin.options import FIXTURE_PREFIXES, LISTS, MARKERS, OPTIONS, add_options, check_flags
from pytest_kvmock.plugin.settings import SETTINGS, UNJUDGED, read_settings

EVENTS: Final = "kvmock.events"
"""The property in the report of each test whose events were checked."""

MOST_NAMES: Final = 3
MOST_COLUMNS: Final = 160
"""Limits of a line that lists what a contract did not judge: names, and columns. With -v the line is complete."""

_REGISTERED_BY: Final = pytest.StashKey[Mapping[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register options and ini options."""
    add_options(parser, OPTIONS)
    group = parser.getgroup("kvmock")
    for flag, what in LISTS.items():
        group.addoption(flag, action="store_true", default=False, help=what)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the hooks that others may implement."""
    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(args: list[str], parser: pytest.Parser) -> Generator[None]:
    """Answer a misspelt option of ours with the nearest ones, after conftests have added theirs."""
    yield
    if any(arg.startswith("--kv") for arg in args):
        check_flags(args, parser)


REGISTERING_HOOKS: Final = ("pytest_kvmock_backends", "pytest_kvmock_dialects")


def register_of_others(config: pytest.Config) -> None:
    """Register the backends and dialects of other plugins, and note which plugin brought each backend."""
    plugins: Mapping[str, str] = {}
    # If this run is inside another one, the backends of the outer run are not known here.
    if config.hook.pytest_kvmock_backends.get_hookimpls() or "pytest_kvmock.engines.backends" in sys.modules:
        from pytest_kvmock.plugin.registry import read_backends

        plugins = read_backends(config)
    config.stash[_REGISTERED_BY] = plugins
    if config.hook.pytest_kvmock_dialects.get_hookimpls() or "pytest_kvmock.wire.codec.table" in sys.modules:
        from pytest_kvmock.plugin.registry import read_dialects

        read_dialects(config)


class Latecomers:
    """A plugin that refuses plugins which bring backends or dialects after these have been read.

    Such plugins are conftests that pytest finds during collection; the directory of each becomes a collection error.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._early = config.pluginmanager.get_plugins()

    def pytest_plugin_registered(self, plugin: object) -> None:
        """Check one plugin; pytest passes the early ones, too."""
        if plugin in self._early:
            return
        for hook in REGISTERING_HOOKS:
            if hasattr(plugin, hook):
                from pytest_kvmock.plugin.registry import too_late

                raise too_late(self._config, plugin, hook)


@pytest.hookimpl(trylast=True)  # other plugins may register backends here
def pytest_configure(config: pytest.Config) -> None:
    """Register markers, backends and dialects, and read the settings."""
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    register_of_others(config)
    config.pluginmanager.register(Latecomers(config), "kvmock-latecomers")
    config.stash[SETTINGS] = read_settings(config)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Answer --kv-list-backends and --kv-list-profiles."""
    option = config.option
    if not option.kv_list_backends and not option.kv_list_profiles:
        return None
    from pytest_kvmock.plugin.report import backend_lines, profile_lines

    # Plugins are not configured yet, and the function that does this for --markers is private: read all here.
    register_of_others(config)
    settings = read_settings(config)
    if option.kv_list_backends:
        sys.stdout.write(backend_lines(settings, config.stash[_REGISTERED_BY]))
    if option.kv_list_profiles:
        sys.stdout.write(profile_lines(settings))
    return 0


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the matrix and the policy if they are not the default, or with -v."""
    settings = config.stash[SETTINGS]
    if not settings.command_line and not settings.ini and config.option.verbose <= 0:
        return None
    from pytest_kvmock.plugin.report import header

    return header(config)


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> pytest.CollectReport | None:
    """Refuse a contract whose declarations contradict each other, in one line."""
    if "pytest_kvmock.testing" not in sys.modules or not isinstance(collector, pytest.Class):
        return None
    check = getattr(collector.obj, "wrong_declaration", None)
    wrong = check() if callable(check) else ""
    if not wrong:
        return None
    return pytest.CollectReport(collector.nodeid, "failed", f"{collector.obj.__name__}: {wrong}", [])


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Run tests over the matrix, after every other parametrisation."""
    yield
    names, keywords = metafunc.fixturenames, metafunc.definition.keywords
    if (
        AXIS in names
        or DIALECT_AXIS in names
        or CASE_FIXTURE in names
        or "kvmock" in keywords  # a marker on a test that does not use the plugin may still be wrong
        or "kv_backends" in keywords
        or "kv_dialects" in keywords
    ):
        generate(metafunc)
    for name in names:
        if name.startswith(FIXTURE_PREFIXES) and name not in FIXTURES:
            from pytest_kvmock.plugin.misspelt import expect_lookup_errors  # imported on first use

            expect_lookup_errors(metafunc.config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases outside of the matrix, after all markers are known."""
    deselect(config, items)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the last lines of the summary
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Generator[None]:
    """Show the event logs of passed tests with --kv-show-log=all, and a summary line on the checked events.

    With -q the line has only requested checks that were not done; with -qq there is no line.
    """
    yield
    settings = config.stash[SETTINGS]
    if settings.get("log") == "all":
        from pytest_kvmock.plugin.report import passed_logs

        passed_logs(terminalreporter)
    if config.get_verbosity() < -1:
        return
    ended = [  # only the report of a teardown has all findings
        report
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "teardown" and report.user_properties
    ]
    for unjudged in _unjudged(ended):
        text = f"kvmock: {unjudged}"
        terminalreporter.write_line(text if config.get_verbosity() > 0 else _short(text))
    judged = [report for report in ended if any(name == EVENTS for name, _ in report.user_properties)]
    if judged:
        from pytest_kvmock.plugin.report import summary_line

        line = summary_line(judged, settings, only_undone=config.get_verbosity() < 0)
        if line is not None:
            terminalreporter.write_line(line)


def _short(line: str) -> str:
    """Shorten a line of what was not judged to `MOST_COLUMNS`: three names, and the number of further ones that -v
    shows.
    """
    if len(line) <= MOST_COLUMNS and line.count(", ") < MOST_NAMES:
        return line
    names = re.sub(r" \((?:[^()]|\([^()]*\))*\)", "", line).split(", ")  # without the setting that would allow each
    more = f", and {len(names) - MOST_NAMES} more (-v)" if len(names) > MOST_NAMES else " (-v)"
    kept = ", ".join(names[:MOST_NAMES])
    room = MOST_COLUMNS - len(more)
    return (kept if len(kept) <= room else kept[: room - 3] + "...") + more


def _unjudged(reports: Iterable[pytest.TestReport]) -> Iterable[str]:
    """Return a line for each class that its contract could not judge completely."""
    found = [str(value) for report in reports for name, value in report.user_properties if name == UNJUDGED]
    return {line.partition(": ")[0]: line for line in found}.values()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Check the events of the test after its body."""
    __tracebackhide__ = True
    case = item.stash.get(CASE, None)
    if case is not None:
        case.harness.inside.body_begins()
    try:
        yield
    except BaseException as failure:
        case = item.stash.get(CASE, None)
        if case is not None:
            from pytest_kvmock.plugin.verdict import judge_failed_body

            judge_failed_body(case, failure)
        if "pytest_kvmock.values.checks" in sys.modules:
            from pytest_kvmock.plugin.tracebacks import leave_out_ours

            leave_out_ours(item, failure)
        raise
    case = item.stash.get(CASE, None)
    if case is not None:
        from pytest_kvmock.plugin.verdict import judge_body

        judge_body(case)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Check the events that came after the body, when all finalizers are done."""
    __tracebackhide__ = True
    try:
        yield
    except BaseException as failure:
        case = item.stash.get(CASE, None)
        if case is not None:
            from pytest_kvmock.plugin.verdict import judge_failed_teardown

            del item.stash[CASE]
            with case.closing():
                judge_failed_teardown(case, failure)
        raise
    case = item.stash.get(CASE, None)
    if case is not None:
        from pytest_kvmock.plugin.verdict import judge_late

        del item.stash[CASE]  # pytest-rerunfailures runs the same item again
        with case.closing():
            judge_late(case)
