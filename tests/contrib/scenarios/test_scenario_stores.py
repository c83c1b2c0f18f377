"""Scenario files whose workers share a store."""

import pytest

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.contrib.scenarios import load_scenarios, play
from pytest_kvmock.values.strict_yaml import YamlError

FILE = """
profile: {{block_size: 4, num_blocks: 8, workers: 3, tiers: {{host: 8, files: true}}}}
stores: {{disk: {{kind: {kind}, workers: [0, 1]}}}}
backends: [vllm]
scenarios:
  shared:
    steps:
      - serve: {{tokens: 0..26}}
      - tick: 20
      - serve: {{tokens: 100..126}}
      - serve: {{tokens: 0..26, worker: {worker}}}
        expect: {{cached_tokens: {cached}}}
"""


def scenario_of(tmp_path, kind="files", worker=1, cached=24):
    path = tmp_path / "stores.kv.yaml"
    path.write_text(FILE.format(kind=kind, worker=worker, cached=cached))
    return load_scenarios(path)[0]


@pytest.mark.parametrize(("worker", "cached"), [(1, 24), (2, 0)])
def test_a_scenario_is_played_over_its_stores(tmp_path, worker, cached):
    scenario = scenario_of(tmp_path, worker=worker, cached=cached)
    with RouterHarness(EngineProfile(**scenario.profile), "vllm", stores=scenario.stores) as kv:
        play(kv, scenario)


def test_a_harness_without_its_stores_is_refused(tmp_path):
    scenario = scenario_of(tmp_path)
    kv = RouterHarness(EngineProfile(**scenario.profile), "vllm")
    with pytest.raises(ValueError, match=r"the scenario wants stores=.*, the harness has {}$"):
        play(kv, scenario)


def test_an_invalid_store_is_a_one_line_error_with_its_place(tmp_path):
    with pytest.raises(YamlError, match=r"kv.yaml:3:9: stores: stores\['disk'\]: unknown kind 'file'; did you mean"):
        scenario_of(tmp_path, kind="file")


def test_the_plugin_runs_a_scenario_with_stores(pytester):
    pytester.makefile(".kv.yaml", stores=FILE.format(kind="files", worker=1, cached=24))
    pytester.makeini("[pytest]\nkvmock_scenarios = *.kv.yaml")
    pytester.runpytest("-p", "no:asyncio").assert_outcomes(passed=1)
