"""Correct routers pass the assertions of a report: Dynamo's cost, llm-d's scorers, SGLang's rule, five without index.

`--all-routers` plays 10 seeds in 18 settings (half an hour); otherwise a few settings run.
"""

from collections import Counter

import pytest
from depth import few, worth_its_time
from right_routers import CALM, POLICIES, ROUTERS, SETTINGS, baselines, failures

COUNT = 200  # requests


def wrong(setting, seed):
    """Return the assertions that correct routers fail, except latencies of cache-unaware ones near saturation."""
    found = [(router.__name__, name) for router in ROUTERS for name in failures(router, setting, seed, COUNT)]
    for router in POLICIES:
        may = set() if setting in CALM else {"no_worse"}
        found += [(router.__name__, name) for name in failures(router, setting, seed, COUNT) if name not in may]
    baselines.cache_clear()
    return found


@worth_its_time
@pytest.mark.parametrize("setting", few(SETTINGS, 2))
def test_correct_routers_pass_every_check_in_a_few_settings(setting):
    assert wrong(setting, seed=0) == []


def test_correct_routers_pass_every_check_in_all_settings(pytestconfig):
    if not pytestconfig.getoption("--all-routers"):
        pytest.skip("half an hour: run it with --all-routers")
    found = Counter()
    for setting in SETTINGS:
        for seed in range(10):
            found.update((setting, *each) for each in wrong(setting, seed))
    assert not found
