"""Scenario files: what is done to mock engines and what has to come of it, written down in YAML.

`reading.py` makes `Scenario` values of a file, `player.py` plays one on a `RouterHarness`, `writing.py` writes one.
The plugin collects the files as tests; `load_scenarios` gives them to a test of your own, with an index of your own.
"""

from pytest_kvmock.scenarios.player import ScenarioFailure, play
from pytest_kvmock.scenarios.reading import load_scenarios
from pytest_kvmock.scenarios.values import Scenario, Step

__all__ = ["Scenario", "ScenarioFailure", "Step", "load_scenarios", "play"]
