"""Scenario files: steps on mock engines and their expected results, in YAML.

`reading.py` makes `Scenario` values of a file, `player.py` plays one on a `RouterHarness`, `writing.py` writes one.
The plugin collects the files as tests; `load_scenarios` gives them to a test of your own, with an index of your own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_kvmock.contrib.scenarios.player import ScenarioFailure as ScenarioFailure
    from pytest_kvmock.contrib.scenarios.player import play as play
    from pytest_kvmock.contrib.scenarios.reading import load_scenarios as load_scenarios
    from pytest_kvmock.contrib.scenarios.values import Scenario as Scenario
    from pytest_kvmock.contrib.scenarios.values import Step as Step

_HOME = {
    "Scenario": "values",
    "ScenarioFailure": "player",
    "Step": "values",
    "load_scenarios": "reading",
    "play": "player",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table is the one list


def __getattr__(name: str) -> Any:
    """Load what is asked for: the plugin is loaded with every run of pytest, and needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
