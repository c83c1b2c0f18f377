"""Scenario files in pytest: files that are collected as tests, and files that are written from reproductions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_kvmock.plugin.options import OPTIONS as OF_CORE
from pytest_kvmock.plugin.options import Option, add_options, names
from pytest_kvmock.plugin.settings import SETTINGS, check_directory, ini_place, read_options

if TYPE_CHECKING:
    from pytest_kvmock.harness.reduce.program import Reproduction

OPTIONS: Final = (
    Option(
        "save_scenario",
        str,
        "write the smallest reproduction of each failure into this directory, as a scenario file",
        flag="--kv-save-scenario",
        metavar="DIR",
    ),
    Option(
        "scenarios",
        names,
        "globs of scenario files (*.kv.yaml) to collect as tests, relative to the root directory (default: none)",
        ini="kvmock_scenarios",
        ini_type="args",
    ),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the options."""
    add_options(parser, OPTIONS)


@pytest.hookimpl(trylast=True)  # after the core has read its settings
def pytest_configure(config: pytest.Config) -> None:
    """Register the collector and the writer of scenario files, if they are configured."""
    command_line, ini = read_options(config, OPTIONS)
    if "save_scenario" in command_line:
        directory = command_line["save_scenario"]
        check_directory(config, directory, "--kv-save-scenario")
        settings = config.stash[SETTINGS]
        if settings.get("reduce") == 0:
            option = next(option for option in OF_CORE if option.key == "reduce")
            place = option.flag if "reduce" in settings.command_line else ini_place(config, option)
            raise pytest.UsageError(
                f"--kv-save-scenario: there is nothing to save with {place}=off; allowed: one of the two"
            )
        config.pluginmanager.register(ScenarioWriter(directory), "kvmock-save-scenario")
    if "scenarios" in ini:
        from pytest_kvmock.contrib.scenarios.scenario_items import ScenarioCollector

        config.pluginmanager.register(ScenarioCollector(ini["scenarios"]), "kvmock-scenarios")


class ScenarioWriter:
    """The plugin that writes each reproduction as a scenario file; registered if a directory is given."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def pytest_kvmock_reproduction(self, item: pytest.Item, reproduction: Reproduction) -> str:
        """Write the reproduction; return its path, or why it cannot be written."""
        return _save(item, reproduction, self._directory)


def _save(item: pytest.Item, found: Reproduction, directory: str) -> str:
    """Write a reproduction as a scenario file; return the line about it."""
    from pytest_kvmock.contrib.scenarios.writing import scenario_text
    from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER
    from pytest_kvmock.oracle.hygiene.rules import RULES

    if RULES[found.rule].at_end and not found.breach.is_error:
        return f"not saved: {found.rule} is known only when a test is over"
    if any(getattr(step, "worker", 0) >= FIRST_SINK_WORKER for step in found.operations):
        return f"not saved: in a scenario file, the ids of engines end at {FIRST_SINK_WORKER - 1}"
    if found.aflush is not None:
        return "not saved: a scenario cannot await an async index"
    if found.sync != "auto":
        return f"not saved: a scenario flushes the index after each step, and this needs sync={found.sync!r}"
    if found.clears != "rank":
        return f"not saved: a scenario file cannot set clears, and this needs {found.clears!r}"
    # Each test has one file, so that workers of pytest-xdist do not collide.
    path = Path(directory, re.sub(r"[^\w.-]+", "-", item.nodeid).strip("-") + ".kv.yaml")
    target = item.config.invocation_params.dir / path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(scenario_text(found, item.name), encoding="utf-8")
    except OSError as error:
        return f"not saved as {path}: {error.strerror or error}"
    return f"saved as {path}"
