"""The hooks. They run for every test of every suite that has the plugin installed, so each returns at once where the
plugin is not used, and what only users need is imported when one turns up.
"""  # noqa: D205 - one sentence

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

from pytest_kvmock.plugin.fixtures import CASE
from pytest_kvmock.plugin.matrix import AXIS, CASE_FIXTURE, deselect, generate
from pytest_kvmock.plugin.options import MARKERS, SETTINGS, add_options, read_settings


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register options and ini options."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register markers, and check what command line and ini file say."""
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    settings = config.stash[SETTINGS] = read_settings(config)
    if "scenarios" in settings.ini:
        from pytest_kvmock.plugin.scenario_items import ScenarioCollector

        config.pluginmanager.register(ScenarioCollector(settings.ini["scenarios"]), "kvmock-scenarios")


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Answer --kv-list-backends."""
    if not config.option.kv_list_backends:
        return None
    from pytest_kvmock.plugin.report import backend_lines

    # Plugins are not configured yet, and what does it for --markers is private: so the settings are read here.
    sys.stdout.write(backend_lines(read_settings(config)))
    return 0


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the matrix and the policy, where they are not the default, or with -v."""
    settings = config.stash[SETTINGS]
    if not settings.command_line and not settings.ini and config.option.verbose <= 0:
        return None
    from pytest_kvmock.plugin.report import header

    return header(config)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Run tests over the matrix, after every other parametrisation."""
    yield
    names, keywords = metafunc.fixturenames, metafunc.definition.keywords
    if (
        AXIS in names
        or CASE_FIXTURE in names
        or "kvmock" in keywords  # a marker on a test that does not use us may be wrong all the same
        or "kv_backends" in keywords
    ):
        generate(metafunc)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the matrix does not contain, when every marker has arrived."""
    deselect(config, items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Judge the events of the test when its body is over."""
    __tracebackhide__ = True
    try:
        yield
    except BaseException as failure:
        case = item.stash.get(CASE, None)
        if case is not None:
            from pytest_kvmock.plugin.verdict import judge_failed_body

            judge_failed_body(case, failure)
        raise
    case = item.stash.get(CASE, None)
    if case is not None:
        from pytest_kvmock.plugin.verdict import judge_body

        judge_body(case)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Judge what came after the body, when all finalizers are done."""
    __tracebackhide__ = True
    try:
        yield
    except BaseException as failure:
        case = item.stash.get(CASE, None)
        if case is not None:
            from pytest_kvmock.plugin.verdict import judge_failed_teardown

            del item.stash[CASE]
            judge_failed_teardown(case, failure)
        raise
    case = item.stash.get(CASE, None)
    if case is not None:
        from pytest_kvmock.plugin.verdict import judge_late

        del item.stash[CASE]  # pytest-rerunfailures runs the same item again
        judge_late(case)
