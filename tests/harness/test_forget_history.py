"""A harness that runs for hours drops its history and keeps held blocks and errors; its memory does not grow."""

import pytest
from depth import seeds
from hybrid_sizes import EACH, sized

from pytest_kvmock import EngineProfile, KvCacheEvent, Removed, RouterEvent, RouterHarness, Stored
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.harness.reduce.program import NotReduced

PROFILE = EngineProfile(num_blocks=8, block_size=4, workers=2)


def serve(kv, count):
    shared = kv.prompt(blocks=1)
    for number in range(count):
        kv.worker(number % 2).serve(kv.prompt(blocks=2, after=shared))


def sizes(kv):
    return (
        len(kv.events),
        len(kv.recording.operations),
        sum(len(stream.events) for stream in kv.inside.streams.values()),
    )


@pytest.mark.parametrize("backend", EACH)
def test_a_harness_that_forgets_its_history_does_not_grow(backend):
    profile, found = sized(PROFILE, backend), []
    with RouterHarness(profile, backend) as kv:
        for _ in range(4):
            serve(kv, 20)
            kv.inside.forget_history(events=10)
            found.append(sizes(kv))
        assert all(events <= 10 and not operations for events, operations, _ in found)
        assert max(each[2] for each in found) <= 2 * profile.num_blocks
        assert kv.events.total > 40
        assert [each.position for each in kv.events] == [*range(kv.events.total - len(kv.events), kv.events.total)]


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("backend", ["lineage", "multi_lru", "vllm", "sglang"])
def test_forgetting_history_does_not_change_the_verdict(backend, seed):
    def errors(forgets):
        kv = RouterHarness(EngineProfile(num_blocks=8, block_size=4, workers=2, seed=seed), backend)
        serve(kv, 6)
        if forgets:
            kv.inside.forget_history(events=0)
        kv.faults.at_random({"lose": 0.2, "double": 0.1})
        serve(kv, 12)
        kv.worker(0).restart(announced=False)
        serve(kv, 6)
        return [
            (each.rule, each.worker_id, each.position, each.observed, each.fault is not None)
            for each in kv.judge().errors
        ]

    assert errors(forgets=True) == errors(forgets=False)


def test_errors_before_and_after_forgetting_history_are_reported():
    kv = RouterHarness(PROFILE)
    kv.apply(
        [RouterEvent(7, KvCacheEvent(0, Stored(None, (1, 2), (1, 2)))), RouterEvent(7, KvCacheEvent(1, Removed((9,))))]
    )
    kv.inside.forget_history(events=0)
    kv.apply([RouterEvent(7, KvCacheEvent(2, Removed((2, 1)))), RouterEvent(7, KvCacheEvent(3, Removed((1,))))])
    assert [problem.rule for problem in kv.judge().errors] == ["block_not_found", "block_not_found"]
    with pytest.raises(NotReduced, match="what happened before was dropped"):
        reproduce(kv)


def test_forget_history_refuses_a_negative_number_of_events():
    kv = RouterHarness(PROFILE)
    with pytest.raises(ValueError, match="forget_history: events must be an integer of at least 0, got -1"):
        kv.inside.forget_history(events=-1)
    assert not kv.recording.is_cut
