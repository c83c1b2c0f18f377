"""Ray Serve's own PrefixTree in the rule of `examples/routing/`: it answers like `SentTexts`, and picks the same
workers.

It needs the dependency group `ray`, in an environment of its own; no cluster is started. The rule around the tree
(`PrefixCacheAffinityRouter`) lives in a Ray actor and was read in source, 2.60.
"""

import sys
from pathlib import Path
from random import Random

import pytest
from depth import seeds
from peer import engine

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs
from pytest_kvmock.fleets import LeastLoaded, RoundRobin, synthetic_trace
from pytest_kvmock.testing import RouterContract

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "routing"))

from ray_rule import RayRule, SentTexts

(tree,) = engine("ray", "llm._internal.serve.routing_policies.prefix_aware.prefix_tree", group="ray")


class TestRule(RouterContract):
    """The rule over Ray's tree passes the contract of routers."""

    follows_prefix = True

    def make_router(self):
        return RayRule(tree.PrefixTree())


@pytest.mark.parametrize("seed", seeds(200))
def test_the_tree_answers_like_a_plain_table(seed):
    rng, trees, now = Random(seed), (tree.PrefixTree(), SentTexts()), 0.0
    here = ["a", "b"]
    for each in trees:
        each.add_tenants(here, now)
    for _ in range(60):
        now += 1
        text = "".join(rng.choices("xyz", k=rng.randint(1, 7)))
        step = rng.random()
        if step < 0.5:
            tenant = rng.choice(here)
            for each in trees:
                each.insert(text, tenant, now)
        elif step < 0.56 and len(here) < 4:
            here.append(next(name for name in "abcd" if name not in here))
            for each in trees:
                each.add_tenants(here, now)
        elif step < 0.62 and len(here) > 1:
            gone = here.pop(rng.randrange(len(here)))
            for each in trees:
                each.remove_tenants([gone])
        offered = rng.sample(here, rng.randint(1, len(here)))
        real, plain = (each.prefix_match(text, offered) for each in trees)
        assert real == plain
        assert sorted(trees[0].get_smallest_tenants()) == sorted(trees[1].get_smallest_tenants())


def played(router, seed):
    args = MockEngineArgs(num_gpu_blocks=200, block_size=16)
    fleet = Fleet([MockEngine(args) for _ in range(4)], router)
    fleet.at(300).crash(1)
    fleet.at(500).restart(2)
    fleet.at(700).join(engine=MockEngine(args))
    sizes = {"block_size": 16, "prefix_blocks": (2, 8), "input_tokens": (16, 128), "output_tokens": (4, 24)}
    return fleet.run(synthetic_trace(80, seed=seed, groups=8, turns=(1, 3), interval_ms=15, delay_ms=(5, 50), **sizes))


@pytest.mark.parametrize("seed", seeds(40))
@pytest.mark.parametrize("imbalanced", [float("inf"), 2])
def test_in_a_fleet_the_tree_picks_like_the_table(imbalanced, seed):
    real = played(RayRule(tree.PrefixTree(), imbalanced=imbalanced), seed)
    plain = played(RayRule(imbalanced=imbalanced), seed)
    assert [pick.worker for pick in plain.picks] == [pick.worker for pick in real.picks]
    assert plain.compare(real).differences == {}
    assert len(real.completed) == 80


def served_by(router):
    args = MockEngineArgs(num_gpu_blocks=600, block_size=16)
    sizes = {"block_size": 16, "prefix_blocks": (4, 16), "input_tokens": (16, 200), "output_tokens": (8, 64)}
    trace = synthetic_trace(300, seed=2, groups=12, turns=(1, 4), interval_ms=40, delay_ms=(200, 2_000), **sizes)
    return Fleet([MockEngine(args) for _ in range(4)], router).run(trace, name="chats")


def test_the_tree_reuses_more_than_round_robin_and_lets_no_request_wait():
    turns, loads = served_by(RoundRobin()), served_by(LeastLoaded())
    report = served_by(RayRule(tree.PrefixTree(), imbalanced=10))
    report.assert_hit_ratio(times=(1.2, turns))
    report.assert_balanced(within=2.0)
    report.assert_no_worse(than=[turns, loads], ttft_p95=1.5)


class SaysWhatItSent(RayRule):
    """Claims that its sent prompts are held."""

    def overlap(self, request):
        text = self.text(request)
        return {int(name): len(self.tree.prefix_match(text, [name])[0]) for name in self.known}


def test_the_tree_used_as_an_index_drifts_because_it_receives_no_events():
    report = played(SaysWhatItSent(tree.PrefixTree()), 0)
    (belief,) = report.beliefs
    assert belief.rule == "overlap_drift"
