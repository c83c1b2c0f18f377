"""Right policies crossed: those of the examples, and some that report their beliefs, over every backend.

The quick run takes one cell per policy; the deep run all. A new backend is included automatically.
"""

import sys
from pathlib import Path
from random import Random

import pytest
from contract_runs import failure_of, names_of_tests
from depth import each_parameter, few, takes_long, worth_its_time
from test_router_load import contract

from pytest_kvmock import BACKENDS
from pytest_kvmock.fleets import DynamoRouter, LeastLoaded, MostCached, RoundRobin
from pytest_kvmock.testing import RightRouter, RouterContract

sys.path.append(str(Path(__file__).parents[2] / "examples" / "routing"))

from aibrix_rule import AibrixRule
from dynamo_cost import DynamoCost
from hash_ring import HashRing
from llm_d_scorers import Scorers
from ray_rule import RayRule
from sglang_rule import CacheAware
from trtllm_rule import KvCacheAware
from two_choices import TwoChoices


class OfRight(RouterContract):
    """Reports its loads, overlaps and workers."""

    def make_router(self, workers):
        copies = self.backend is not None and BACKENDS[self.backend].traits.copies
        return RightRouter(workers, copies=copies)


POLICIES = {
    "right": OfRight,
    "dynamo": contract(lambda: DynamoRouter("1.6.1", rng=Random(0)), uses_overlap=True),
    "turns": contract(RoundRobin),
    "least": contract(LeastLoaded, first_of_equals=True),
    "cached": contract(MostCached, first_of_equals=True, follows_prefix=True),
    "two choices": contract(TwoChoices),
    "ring": contract(HashRing, follows_prefix=True),
    "aibrix": contract(AibrixRule, follows_prefix=True),
    "llm-d": contract(Scorers),
    "sglang": contract(CacheAware, follows_prefix=True),
    "ray": contract(RayRule, follows_prefix=True),
    "dynamo's cost": contract(DynamoCost),
    "trtllm": contract(KvCacheAware),
}
FEW = (
    "test_it_follows_evictions",
    "test_it_follows_a_restart",
    "test_it_keeps_adapters_apart",
    "test_it_keeps_ranks_apart",
    "test_a_held_prompt_goes_where_it_is_however_loaded_others_are",
    "test_what_a_cordoned_worker_held_is_its_still",
)
"""Tests whose answers depend on published events."""

BY_BACKENDS = [(policy, backend) for backend in BACKENDS for policy in POLICIES]


def failures(policy, backend, names):
    """Return by name the failures of a policy in these tests over a backend."""
    spec = BACKENDS[backend]
    mine = type("OfX", (POLICIES[policy],), {"backend": backend, "block_size": spec.default_block_size})
    found = {}
    for name in names:
        try:
            found[name] = failure_of(mine, name)
        except pytest.skip.Exception:
            continue
    return {name: text for name, text in found.items() if text is not None}


@pytest.mark.parametrize(("policy", "backend"), few(BY_BACKENDS, 7))
@each_parameter
@worth_its_time
def test_a_right_policy_passes_the_tests_that_depend_on_events(policy, backend):
    assert failures(policy, backend, FEW) == {}


@takes_long
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_right_router_passes_every_test_over_every_backend(backend):
    assert failures("right", backend, names_of_tests(RouterContract)) == {}
