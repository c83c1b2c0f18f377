"""Seven routing policies on one trace, compared with round robin."""

from functools import partial
from random import Random

import pytest
from aibrix_rule import AibrixRule
from dynamo_cost import DynamoCost
from hash_ring import HashRing
from llm_d_scorers import Scorers
from ray_rule import RayRule
from sglang_rule import CacheAware
from two_choices import TwoChoices

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs
from pytest_kvmock.fleets import DynamoRouter, RoundRobin, TraceRequest

BLOCK = 16
ROUTERS = [TwoChoices, HashRing, AibrixRule, Scorers, CacheAware, DynamoCost, RayRule]
KNOW_PREFIXES = ROUTERS[1:]


def tenants(count=200, seed=0):
    """Yield requests that begin with one of 16 system prompts, some of which are much more frequent than others."""
    rng, ids = Random(seed), iter(range(10**9))
    prompts = [[next(ids) for _ in range(rng.randint(8, 32))] for _ in range(16)]
    weights = [1 / rank for rank in range(1, 17)]
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(1 / 12)
        blocks = [*rng.choices(prompts, weights)[0], *(next(ids) for _ in range(rng.randint(1, 6)))]
        yield TraceRequest(now, BLOCK * len(blocks), rng.randint(8, 64), tuple(blocks))


def made_fleet(router, **options):
    args = MockEngineArgs(num_gpu_blocks=400, block_size=BLOCK)
    if isinstance(router, Scorers):
        options |= {"loads": "engine", "loads_every_ms": 50}
    return Fleet([MockEngine(args) for _ in range(4)], router, **options)


@pytest.mark.parametrize("router", ROUTERS)
def test_it_serves_all_and_uses_every_worker(router):
    report = made_fleet(router()).run(tenants())
    assert len(report.completed) == 200
    report.assert_balanced(within=2.0)


@pytest.mark.parametrize("router", KNOW_PREFIXES)
def test_it_reuses_more_than_turns_do(router):
    turns = made_fleet(RoundRobin()).run(tenants())
    made_fleet(router()).run(tenants()).assert_hit_ratio(times=(1.0, turns))


def lived_through(router):
    """Return the number of requests of a worker that joined after a crash and a restart."""
    fleet = made_fleet(router)
    fleet.at(600).crash(1)
    fleet.at(900).restart(2)
    joined = fleet.at(1200).join(engine=MockEngine(fleet.engines[0].args))
    report = fleet.run(tenants())
    assert len(report.completed) == 200
    return sum(pick.worker == joined for pick in report.picks)


@pytest.mark.parametrize("router", [*ROUTERS[:-1], partial(RayRule, imbalanced=4)])
def test_it_lives_through_a_crash_a_restart_and_a_join(router):
    assert lived_through(router())


def test_by_default_rays_rule_has_nothing_for_a_worker_that_joins():
    """Every prompt begins with a prefix that some worker has seen, and loads do not count."""
    assert lived_through(RayRule()) == 0


def test_no_pick_of_dynamos_cost_was_dearer_than_need_be():
    made_fleet(DynamoCost(), record=True).run(tenants()).assert_regret(DynamoRouter("1.2.1"))


def test_a_seed_makes_it_the_same_run():
    first, second = (made_fleet(TwoChoices(seed=7)).run(tenants()) for _ in range(2))
    assert [pick.worker for pick in first.picks] == [pick.worker for pick in second.picks]
