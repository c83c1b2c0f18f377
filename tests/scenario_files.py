"""Scenario files for tests of other subjects; without their folder of contrib, such a test is skipped."""

import pytest


def _module(name):
    folder = "pytest_kvmock.contrib.scenarios"
    pytest.importorskip(folder, reason="scenario files come by a folder of contrib")
    return pytest.importorskip(f"{folder}.{name}")


def need_scenario_files():
    _module("player")


def load_scenarios(*args, **named):
    return _module("reading").load_scenarios(*args, **named)


def play(*args, **named):
    return _module("player").play(*args, **named)


def scenario_text(*args, **named):
    return _module("writing").scenario_text(*args, **named)


def scenario_failure():
    return _module("player").ScenarioFailure
