"""Engines that publish several copies of one block (vLLM): it is held until the last one is removed."""

from collections import Counter

import pytest

from pytest_kvmock import Cleared, KvCacheEvent, Prompt, Removed, RouterEvent, RouterHarness, Stored
from pytest_kvmock.harness.recovery import Recovery
from pytest_kvmock.oracle import RadixIndex

ONE = Stored(None, (1,), (11,))
TWO = Stored(1, (2,), (12,))


def counting():
    return RadixIndex(count_copies=True)


def harness(index=None, **options):
    return RouterHarness(backend=None, index=index, sync="every", **options)


def test_a_block_is_held_until_its_last_copy_is_removed():
    with harness() as kv:
        sink = kv.make_sink(residency="counted")
        for data in (ONE, ONE, TWO, Removed((2,)), Removed((1,))):
            sink(data)
        assert {sink.worker_id: 1} == kv.overlap(Prompt(hashes=[11, 12]))
        sink(Removed((1,)))
        assert kv.overlap(Prompt(hashes=[11])) == {}


def test_one_removed_may_name_both_copies():
    with harness() as kv:
        sink = kv.make_sink(residency="counted")
        for data in (ONE, ONE, Removed((1, 1))):
            sink(data)
        assert kv.overlap(Prompt(hashes=[11])) == {}


def test_a_removed_after_the_last_copy_is_an_error():
    with harness() as kv:
        sink = kv.make_sink(residency="counted")
        for data in (ONE, ONE, Removed((1,)), Removed((1,))):
            sink(data)
        with kv.events.expect_error("block_not_found"):
            sink(Removed((1,)))


def test_an_index_that_counts_copies_is_right():
    with harness(counting()) as kv:
        sink = kv.make_sink(residency="counted")
        for data in (ONE, TWO, TWO, Removed((2,)), ONE, Removed((1,)), Removed((2,)), Removed((1,)), ONE, Cleared()):
            sink(data)


def test_a_copy_with_an_unknown_parent_counts_too():
    """The tree refuses it, and the engine holds it."""
    with harness(counting()) as kv:
        sink = kv.make_sink(residency="counted")
        with kv.events.expect_error("parent_block_not_found"):
            sink(TWO)
        for data in (ONE, TWO, Removed((2,))):
            sink(data)
        assert {sink.worker_id: 2} == kv.overlap(Prompt(hashes=[11, 12]))


def test_an_index_that_drops_a_block_with_its_first_copy_drifts():
    kv = harness(RadixIndex())
    sink = kv.make_sink(residency="counted")
    for data in (ONE, ONE, Removed((1,))):
        sink(data)
    (problem,) = kv.judge().errors
    assert problem.rule == "index_drift"
    assert problem.event.event.event_id == 2
    assert problem.observed.endswith("; this Removed took one copy of it, and the engine has another")


@pytest.mark.parametrize("ring", [1, 2, 100])
def test_a_recovering_router_can_count_the_copies_that_it_receives(ring):
    """It receives the missed events, or a dump, which names every copy."""
    recovery = Recovery(ring=ring)
    index = counting()
    with harness(index, recovery=recovery, allow=["event_id_gap"]) as kv:
        sink = kv.make_sink(residency="counted")
        sink(ONE)
        with kv.faults.lose(3):
            for data in (ONE, TWO, TWO):
                sink(data)
        index.apply = lambda event: None
        for event in recovery(sink.worker_id, None).events:
            RadixIndex.apply(index, event)
        del index.apply
        sink(Removed((2,)))
        assert {sink.worker_id: 2} == kv.overlap(Prompt(hashes=[11, 12]))
        sink(Removed((2,)))
        assert {sink.worker_id: 1} == kv.overlap(Prompt(hashes=[11, 12]))


@pytest.mark.parametrize("version", ["0.19.1", "0.33.0"])
def test_vllms_recorded_events_break_no_rule_for_an_index_that_counts_copies(recording, version):
    """An index that does not count drops blocks too early, or receives a Removed of a dropped block."""
    found = Counter()
    for program in recording(f"vllm_{version}_random.json.gz"):
        with harness(counting()) as kv:
            sink = kv.make_sink(residency="counted", num_blocks=program["usable_blocks"])
            for data in _events(program):
                sink(data)
        forgetful = harness(RadixIndex())
        sink = forgetful.make_sink(residency="counted")
        for data in _events(program):
            sink(data)
        found.update(problem.rule for problem in forgetful.judge().errors)
    assert set(found) == {"index_drift", "index_failure"}


def _events(program):
    for step in program["steps"]:
        for kind, *rest in step["events"]:
            if kind == "S":
                yield Stored(rest[0], tuple(rest[1]), tuple(rest[1]))
            else:
                yield Removed(tuple(rest[0])) if kind == "R" else Cleared()


def test_an_index_that_counts_copies_keeps_a_block_after_the_removed_of_one_copy():
    index = counting()
    _apply(index, ONE, ONE, TWO, Removed((1,)), Removed((2,)))
    assert index.num_blocks(0) == 1
    _apply(index, Removed((1,)))
    assert index.num_blocks(0) == 0


@pytest.mark.parametrize(
    "forget",
    [
        lambda index: _apply(index, Cleared()),
        lambda index: index.clear_all_blocks(0),
        lambda index: index.remove_worker(0),
        lambda index: index.remove_worker_dp_rank(0, 0),
    ],
    ids=["Cleared", "clear_all_blocks", "remove_worker", "remove_worker_dp_rank"],
)
def test_all_copies_are_dropped_with_the_blocks_of_a_worker(forget):
    index = counting()
    _apply(index, ONE, ONE)
    forget(index)
    _apply(index, ONE, Removed((1,)))
    assert index.num_blocks(0) == 0


def test_new_makes_an_index_that_counts_copies_too():
    index = counting().new()
    _apply(index, ONE, ONE, Removed((1,)))
    assert index.num_blocks(0) == 1


def _apply(index, *events):
    for data in events:
        index.apply(RouterEvent(0, KvCacheEvent(0, data)))


def test_a_dump_contains_a_block_with_one_copy_left():
    recovery = Recovery()
    with harness(recovery=recovery) as kv:
        sink = kv.make_sink(residency="counted")
        for event_id, data in enumerate((ONE, ONE, Removed((1,)))):
            sink.publish(KvCacheEvent(event_id, data), token_ids=None if event_id else [range(16)])
        (again,) = recovery(sink.worker_id).events
        assert ((1,), [range(16)]) == (again.event.data.block_hashes, list(again.token_ids))


def test_a_recovered_removed_takes_one_copy():
    recovery = Recovery()
    index = counting()
    with harness(index, recovery=recovery, allow=["event_id_gap"]) as kv:
        sink = kv.make_sink(residency="counted")
        for data in (ONE, ONE):
            sink(data)
        with kv.faults.lose(1):
            sink(Removed((1,)))
        for event in recovery(sink.worker_id, 2).events:
            index.apply(event)
        sink(TWO)
        assert {sink.worker_id: 2} == kv.overlap(Prompt(hashes=[11, 12]))


def test_an_event_lost_at_the_end_is_not_expected_of_an_index_that_counts_copies():
    """The index has the block that lost its first copy, and not the block whose Stored was lost without a trace."""
    with harness(counting(), survive=["lose"]) as kv:
        sink = kv.make_sink(residency="counted")
        for data in (ONE, ONE, Removed((1,))):
            sink(data)
        kv.faults.lose(1)
        sink(TWO)
        kv.flush()
        assert {sink.worker_id: 1} == kv.overlap(Prompt(hashes=[11, 12]))
