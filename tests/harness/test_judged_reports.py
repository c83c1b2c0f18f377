"""Reports of a fleet in a harness: event errors, true caches in spite of faults and late events, and records."""

from random import Random

import pytest

from pytest_kvmock import EngineProfile, Prompt, RouterHarness
from pytest_kvmock.fleets import DynamoRouter, synthetic_trace
from pytest_kvmock.oracle import RadixIndex


def trace(count=40, seed=0):
    sizes = {"block_size": 4, "input_tokens": (4, 24), "output_tokens": (1, 12)}
    options = {"groups": 3, "prefix_blocks": (3, 3), "turns": (1, 2), "interval_ms": 10, "delay_ms": (5, 50)}
    return list(synthetic_trace(count, seed=seed, **sizes, **options))


def harness(backend="lineage", **options):
    return RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=3), backend, **options)


class Deaf(RadixIndex):
    """An index that ignores every event."""

    def apply(self, event):
        pass


def test_a_report_of_a_right_world_has_no_event_errors():
    with harness() as world:
        report = world.fleet().run(trace())
        assert report.run.event_errors == []
        report.assert_no_event_errors()


def test_a_report_lists_errors_of_events_and_of_the_index():
    report = harness(index=Deaf()).fleet().run(trace())
    assert {problem.rule for problem in report.run.event_errors} == {"index_drift"}
    with pytest.raises(AssertionError, match=r"errors of events: \d+\n<index_drift: worker"):
        report.assert_no_event_errors()
    assert f"errors of events: {len(report.run.event_errors)}" in str(report)
    assert len(report.run.event_errors) == report.to_json()["fleet"]["event_errors"]


def test_errors_before_the_run_and_from_injected_faults_do_not_count():
    world = harness()
    world.faults.lose(1, kind="stored")
    fleet = world.fleet()
    fleet.run(trace()).assert_no_event_errors()
    assert world.judge().errors
    fleet.run(trace(seed=1)).assert_no_event_errors()


@pytest.mark.parametrize("backend", ["lineage", "hash_cache", "vllm", "sglang", "vllm_gpt_oss", "vllm_qwen3_next"])
def test_a_right_router_has_no_regret_in_a_harness(backend):
    world = harness(backend)
    for each in trace()[:5]:  # blocks held before the fleet existed are known too
        world.worker(1).serve(each.prompt(4))
    fleet = world.fleet(DynamoRouter(rng=Random(1)), record=True)
    fleet.at(100).join()
    fleet.at(150).crash(0)
    report = fleet.run(trace())
    report.assert_regret(DynamoRouter())
    assert report.picks[0].best_overlap > 0


def test_lost_events_cause_regret():
    world = harness()
    world.faults.at_random({"lose": 0.5})
    report = world.fleet(DynamoRouter(rng=Random(1)), record=True).run(trace(120))
    assert report.regret(DynamoRouter()).share > 0


def test_each_rank_has_its_own_row():
    world = RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=2, dp_size=2), "vllm")
    report = world.fleet(DynamoRouter("1.6.1", rng=Random(1)), record=True).run(trace())
    assert report.workers == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sum(report.rows()[worker]["requests"] for worker in report.workers) == 40
    report.assert_regret(DynamoRouter("1.6.1"))


def test_prompts_with_different_adapters_share_no_prefix_in_the_ideal_hit_ratio():
    from pytest_kvmock.fleets import FleetRequest

    rows = [FleetRequest(Prompt(range(24), lora_name=name), 2, 100.0 * at) for at, name in enumerate("abab")]
    report = harness().fleet().run(rows)
    assert report.figure("ideal_hit_ratio") == 0.5
