"""Scenario files: steps on mock engines and their expected results, in YAML.

`reading.py` reads `Scenario` values from a file, `player.py` plays one on a `RouterHarness`, `writing.py` writes one.
The plugin collects the files as tests; `load_scenarios` loads them for your own test, with your own index.
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
    """Load a name on first use: the plugin is loaded in every run of pytest, and needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
