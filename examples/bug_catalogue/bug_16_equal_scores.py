"""No worker holds the prompt, so all scores are equal, and the first worker gets all requests: a hot spot."""

import pytest

from pytest_kvmock import Prompt
from pytest_kvmock.fleets import FleetRequest


class BestScore:
    def pick(self, request, candidates):
        return max(candidates, key=lambda each: each.overlap).worker  # the first of equals


@pytest.fixture
def kv_router():
    return BestScore()


@pytest.mark.kvmock(workers=4)
def test_new_prompts_are_shared_out(kv_fleet):
    report = kv_fleet.run([FleetRequest(Prompt(range(100 * at, 100 * at + 64)), 4, 10.0 * at) for at in range(8)])
    report.assert_balanced(within=2.0)
