"""Cache groups of a hybrid model: each holds its own blocks, under the same hashes."""

import pytest

from pytest_kvmock import Cleared, KvCacheEvent, Prompt, Removed, RouterEvent, RouterHarness, Stored

ROOT = Stored(None, (1, 2), (11, 12))


def publish(sink, *events):
    for data, group in events:
        sink.publish(data, extra=None if group is None else {"group_idx": group})


@pytest.fixture(params=["unique", "counted"])
def kv(request):
    harness = RouterHarness(backend=None)
    harness.sink = harness.make_sink(residency=request.param)
    return harness


CASES = {
    "each group stores and removes": ([(ROOT, 0), (ROOT, 1), (Removed((2, 1)), 1), (Removed((2, 1)), 0)], []),
    "no group is group 0": ([(ROOT, None), (ROOT, 1), (Removed((2, 1)), None), (Removed((2, 1)), 1)], []),
    "a window slides": ([(ROOT, 0), (ROOT, 1), (Removed((2,)), 1), (Stored(2, (3,), (13,)), 0)], []),
    "a group removes what another has": (
        [(ROOT, 0), (Removed((2,)), 1)],
        [("block_not_found", "block 2 was never stored (cache group 1)")],
    ),
    "a parent of another group": (
        [(ROOT, 0), (Stored(2, (3,), (13,)), 2)],
        [("parent_block_not_found", "block 2 was never stored (cache group 2)")],
    ),
    "a Cleared empties all": (
        [(ROOT, 0), (ROOT, 1), (Cleared(), None), (Removed((2,)), 1)],
        [("block_not_found", "block 2 was stored by event 1 and cleared by event 2 (cache group 1)")],
    ),
}


@pytest.mark.parametrize(("events", "expected"), CASES.values(), ids=CASES)
def test_a_stream_is_judged_by_group(kv, events, expected):
    publish(kv.sink, *events)
    kv.flush()

    assert [(problem.rule, problem.observed) for problem in kv.events.problems] == expected


def test_the_reference_finds_blocks_of_group_0(kv):
    publish(kv.sink, (ROOT, 0), (ROOT, 1), (Removed((2, 1)), 1))
    assert {kv.sink.worker_id: 2} == kv.overlap(Prompt(hashes=[11, 12]))

    publish(kv.sink, (Removed((2, 1)), 0), (ROOT, 1))
    assert kv.overlap(Prompt(hashes=[11, 12])) == {}


def test_event_ids_are_counted_over_all_groups(kv):
    sink = kv.sink
    sink.publish(RouterEvent(0, KvCacheEvent(0, ROOT)))
    sink.publish(RouterEvent(0, KvCacheEvent(2, ROOT), extra={"group_idx": 1}))
    kv.flush()

    assert [problem.rule for problem in kv.events.problems] == ["event_id_gap"]


def test_after_a_gap_the_blocks_of_every_group_are_unknown(kv):
    sink = kv.sink
    publish(sink, (ROOT, 0), (ROOT, 1))
    sink.publish(RouterEvent(0, KvCacheEvent(5, Removed((7,))), extra={"group_idx": 1}))
    sink.publish(RouterEvent(0, KvCacheEvent(6, Removed((8,))), extra={"group_idx": 2}))
    kv.flush()

    gap, *rest = kv.events.problems
    assert gap.rule == "event_id_gap"
    assert [("block_not_found", gap), ("block_not_found", gap)] == [(each.rule, each.cause) for each in rest]


@pytest.mark.parametrize("group", [None, 0, "1", [1], True, -1])
def test_an_event_without_a_group_belongs_to_group_0(kv, group):
    publish(kv.sink, (ROOT, group), (Removed((2, 1)), 0))
    kv.flush()

    assert kv.events.problems == []


def kinds(group, kind):
    return {"group_idx": group, "kv_cache_spec_kind": kind}


def test_the_reference_finds_blocks_of_full_attention_if_group_0_is_a_window(kv):
    sink = kv.sink
    sink.publish(ROOT, extra=kinds(0, "sliding_window"))
    assert {sink.worker_id: 2} == kv.overlap(Prompt(hashes=[11, 12]))  # no other group is known yet

    sink.publish(ROOT, extra={"group_idx": 1})
    sink.publish(Removed((2, 1)))  # the window of group 0
    assert {sink.worker_id: 2} == kv.overlap(Prompt(hashes=[11, 12]))

    sink.publish(Stored(2, (3,), (13,)), extra={"group_idx": 1})
    assert {sink.worker_id: 3} == kv.overlap(Prompt(hashes=[11, 12, 13]))

    sink.publish(Removed((3, 2, 1)), extra={"group_idx": 1})
    assert kv.overlap(Prompt(hashes=[11, 12, 13])) == {}
    kv.flush()
    assert kv.events.problems == []


def test_an_engine_with_only_windows_and_states_is_found_by_group_0(kv):
    kv.sink.publish(ROOT, extra=kinds(0, "sliding_window"))
    kv.sink.publish(ROOT, extra=kinds(1, "mamba"))
    kv.sink.publish(Removed((2,)), extra={"group_idx": 1})
    assert {kv.sink.worker_id: 2} == kv.overlap(Prompt(hashes=[11, 12]))
