"""A judged fleet over engines with a draft model compares a router's overlaps by the windows that names cover."""

import pytest

from pytest_kvmock import BACKENDS, EngineProfile, RouterHarness
from pytest_kvmock.fleets import FleetRequest
from pytest_kvmock.oracle.hygiene.rules import OVERLAP_DRIFT
from pytest_kvmock.testing import RightRouter

WITH_DRAFTS = ("vllm_mtp", "sglang_eagle")
SIZE = 8


class PlainNames(RightRouter):
    """Looks up its index by block hashes only, whatever window the names cover."""

    def overlap(self, request):
        return self._matched(request.local_hashes)


def believed(backend, kind):
    """Return the rules that a router's beliefs break in two runs with shared prefixes; the second has a restart."""
    harness = RouterHarness(EngineProfile(block_size=SIZE, num_blocks=128, workers=2, seed=3), backend)
    fleet = harness.fleet(kind(range(2), copies=BACKENDS[backend].residency == "counted"))
    prompts = [harness.prompt(blocks=4) for _ in range(3)]
    rows = [harness.prompt(blocks=2, after=prompts[turn % 3]) for turn in range(9)]
    rules = set()
    for _ in range(2):
        report = fleet.run([FleetRequest(prompt, 4, 100.0 * turn) for turn, prompt in enumerate(rows)])
        rules |= {belief.rule for belief in report.beliefs}
        fleet.at(300.0).restart(1, announced=False)
    harness.judge()
    return rules


@pytest.mark.parametrize("backend", WITH_DRAFTS)
def test_a_router_that_looks_up_windows_has_the_right_overlaps(backend):
    assert believed(backend, RightRouter) == set()


@pytest.mark.parametrize("backend", WITH_DRAFTS)
def test_a_router_that_looks_up_plain_names_has_overlap_drift(backend):
    assert believed(backend, PlainNames) == {OVERLAP_DRIFT}
