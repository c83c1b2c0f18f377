"""Scenario files for tests that are about something else; where their folder of contrib was deleted, such a test is
left out.
"""

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
