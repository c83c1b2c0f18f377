"""Where a block manager of the user's own publishes."""

import pytest

from pytest_kvmock import KvEventsError, RouterHarness, create_manager
from pytest_kvmock.events import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.tokens import sequence_hashes

FIRST = 2**16


def one_block(number):
    return Stored(None, (number,), (number,))


@pytest.fixture
def kv(make_kv):
    return make_kv(None)


@pytest.fixture
def sink(kv):
    return kv.make_sink()


def test_each_is_a_worker_of_its_own(kv):
    sinks = [kv.make_sink() for _ in range(3)]
    assert [FIRST, FIRST + 1, FIRST + 2] == [sink.worker_id for sink in sinks]
    for count, sink in enumerate(sinks, 1):
        sink(Stored(None, tuple(range(1, count + 1)), tuple(range(1, count + 1))))
    assert {FIRST: 1, FIRST + 1: 2, FIRST + 2: 3} == kv.overlap_for_hashes([1, 2, 3])
    kv.assert_no_event_errors()


def test_one_that_speaks_for_several_ranks_takes_no_others_id(kv):
    first = kv.make_sink()
    for rank in (0, 1, 2):
        first(KvCacheEvent(0, one_block(1), rank))
    assert FIRST + 1 == kv.make_sink().worker_id


def test_it_is_called_or_published_to_and_captures(kv, sink):
    sink(one_block(1))
    sink.publish(Stored(1, (2,), (2,)))
    sink(Removed((2,)))
    sink(Cleared())
    assert [0, 1, 2, 3] == [event.event_id for event in sink.events]
    assert [entry.event.event for entry in kv.events] == sink.events
    assert f"<KvSink worker {FIRST}, 4 events>" == repr(sink)
    kv.assert_no_event_errors()


def test_events_keep_their_ids_which_may_begin_anywhere(kv, sink):
    sink(KvCacheEvent(41, one_block(1)))
    sink(one_block(2))
    assert [41, 42] == [event.event_id for event in sink.events]
    kv.assert_no_event_errors()
    sink(KvCacheEvent(44, one_block(3)))
    (problem,) = kv.judge().errors
    assert ("event_id_gap", 44) == (problem.rule, problem.event_id)


def test_a_router_event_is_relabelled_and_keeps_the_rest(kv, sink):
    sink(RouterEvent(3, KvCacheEvent(7, one_block(1), 2), StorageTier.HOST_PINNED, [(1, 2, 3, 4)]))
    (entry,) = kv.events
    assert (FIRST, 2, 7) == (entry.event.worker_id, entry.event.event.dp_rank, entry.event.event.event_id)
    assert (StorageTier.HOST_PINNED, [(1, 2, 3, 4)]) == (entry.storage_tier, entry.token_ids)


def test_tier_and_token_ids_travel_beside_an_event(kv, sink):
    sink(one_block(1), StorageTier.DISK, [(1, 2, 3, 4)])
    sink.publish(one_block(1), token_ids=[(5, 6, 7, 8)])
    assert [StorageTier.DISK, StorageTier.DEVICE] == [entry.storage_tier for entry in kv.events]
    assert [[(1, 2, 3, 4)], [(5, 6, 7, 8)]] == [entry.token_ids for entry in kv.events]
    assert {} == kv.warning_counts()  # another tier, so no duplicate


def test_a_manager_publishes_to_it(kv, sink):
    manager = create_manager("lru", num_blocks=2, block_size=4, sink=sink)
    sink.compare(manager.resident)
    for number in range(5):
        manager.use([number])
        manager.deref(number)
    kv.assert_in_sync()
    assert 8 == len(sink.events)  # five stored, three removed


@pytest.mark.parametrize("wrong", [None, 1, "stored", [one_block(1)], KvCacheEvent(0, 7), RouterEvent(0, None)])
def test_what_is_no_event_is_refused_and_not_captured(kv, sink, wrong):
    with pytest.raises(
        TypeError,
        match=r"a kv_sink takes Stored, Removed, Cleared, KvCacheEvent or RouterEvent, with tuples of .*, got",
    ):
        sink(wrong)
    assert ([], 0) == (sink.events, kv.events.total)
    sink(one_block(1))
    assert [0] == [event.event_id for event in sink.events]


def test_hashes_are_free_unless_it_is_chained(kv):
    free, chained = kv.make_sink(), kv.make_sink(chained=True)
    for sink in (free, chained):
        sink(Stored(None, (1, 2), (1, 2)))
    (problem,) = kv.judge().errors
    assert ("wrong_hash", chained.worker_id) == (problem.rule, problem.worker_id)
    chained(Stored(None, tuple(sequence_hashes([5, 6])), (5, 6)))
    assert [] == kv.judge().errors


# ------------------------------------------------------------------------------------------------------- compare


def test_without_compare_what_is_resident_is_not_asked_for(kv, sink):
    sink(one_block(1))
    kv.assert_in_sync()


def test_a_missing_removed_is_drift(kv, sink):
    resident = {1, 2}
    sink.compare(lambda: resident)
    sink(one_block(1))
    sink(one_block(2))
    kv.assert_in_sync()
    resident.discard(1)
    with pytest.raises(KvEventsError, match="engine_drift"):
        kv.assert_in_sync()
    (problem,) = kv.judge().errors
    assert ("engine_drift", FIRST, (1,)) == (problem.rule, problem.worker_id, problem.blocks)
    assert "the engine does not hold block 1; to the events, block 1 is held since event 0" == problem.known
    assert "what the engine drops is published as Removed" == problem.right


def test_a_missing_stored_is_drift(kv, sink):
    sink.compare(lambda: [1])
    (problem,) = kv.judge().errors
    assert "the engine holds block 1; to the events, block 1 was never stored" == problem.known


@pytest.mark.parametrize("resident", [list, set, tuple, iter, dict.fromkeys])
def test_any_iterable_of_hashes_tells_what_is_resident(kv, sink, resident):
    sink.compare(lambda: resident([1]))
    sink(one_block(1))
    kv.assert_in_sync()


def test_ranks_and_tiers_are_compared_by_themselves(kv, sink):
    sink.compare(lambda: [1])
    sink.compare(lambda: [2], dp_rank=1)
    sink.compare(lambda: [3], storage_tier=StorageTier.DISK)
    sink(one_block(1))
    sink(KvCacheEvent(0, one_block(2), 1))
    assert [(3,)] == [problem.blocks for problem in kv.judge().errors]
    sink(one_block(3), StorageTier.DISK)
    kv.assert_in_sync()


def test_what_cannot_be_called_cannot_be_compared(sink):
    with pytest.raises(TypeError, match=r"compare takes a callable that tells the resident block hashes, got \[1\]"):
        sink.compare([1])


def test_a_removed_one_is_not_compared_any_more(kv, sink):
    sink.compare(lambda: [1])
    sink(one_block(1))
    kv.remove_worker(sink.worker_id)
    kv.assert_in_sync()
    assert {} == kv.overlap_for_hashes([1])


@pytest.mark.parametrize(
    "data",
    [
        Removed(("a",)),
        Removed((2**64,)),
        Removed((-(2**63) - 1,)),
        Stored("x", (1,), (1,)),
        Stored(None, (1.5,), (1,)),
        Stored(None, (1,), (-1,)),
    ],
)
def test_what_is_no_hash_is_refused_before_it_is_logged(data):
    kv = RouterHarness(backend=None)
    sink = kv.make_sink()
    with pytest.raises(
        TypeError, match=r"with tuples of hashes, of blocks from -2\*\*63 to 2\*\*64 - 1 and local ones from 0, got"
    ):
        sink(data)
    with pytest.raises(
        TypeError, match=r"with tuples of hashes, of blocks from -2\*\*63 to 2\*\*64 - 1 and local ones from 0, got"
    ):
        kv.apply(data)
    assert (0, []) == (kv.events.total, sink.events)


@pytest.mark.parametrize(
    "resident", [lambda: 1 / 0, lambda: 3, lambda: ["a"]], ids=["it raises", "no iterable", "no hash"]
)
def test_a_callable_that_cannot_tell_what_is_resident_is_a_problem_and_loses_no_other(resident):
    kv = RouterHarness(backend=None)
    sink = kv.make_sink()
    sink.compare(resident)
    sink(Removed((9,)))
    assert ["block_not_found", "engine_drift"] == [p.rule for p in kv.judge().errors]
    assert "what is resident could not be told: " in kv.events.errors[1].known
    assert [] == kv.judge().errors


# ----------------------------------------------------------------------------------------------- what a manager is


def test_capacity_is_judged_where_it_is_told(kv):
    for num_blocks in (2, None):
        sink = kv.make_sink(num_blocks=num_blocks)
        for number in range(3):
            sink(one_block(number))
    (problem,) = kv.judge().errors
    assert ("over_capacity", FIRST) == (problem.rule, problem.worker_id)


def test_copies_are_counted_where_it_is_told(kv):
    resident = [1, 1]
    sink = kv.make_sink(residency="counted", num_blocks=2)
    sink.compare(lambda: resident)
    sink(one_block(1))
    sink(one_block(1))
    sink(KvCacheEvent(0, one_block(1), 3))
    sink(KvCacheEvent(1, one_block(1), 3))  # another rank is like the first
    kv.assert_in_sync()
    assert {} == kv.warning_counts()
    resident.pop()
    with pytest.raises(
        KvEventsError, match="the engine holds fewer copies of block 1; to the events, block 1 is held, 2"
    ):
        kv.assert_in_sync()
    sink(Removed((1,)))
    kv.assert_in_sync()


def test_an_orphan_is_a_warning_unless_it_is_told_that_there_are_some(kv):
    for closed in (True, False):
        sink = kv.make_sink(prefix_closed=closed)
        sink(Stored(None, (1, 2), (1, 2)))
        sink(Removed((1,)))
    (warning,) = kv.judge().warnings
    assert ("orphaned_child", FIRST) == (warning.rule, warning.worker_id)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "make_kv_sink: num_blocks must be an integer of at least 1, or None, got 0"),
        ({"num_blocks": True}, "got True"),
        ({"num_blocks": 2.0}, "got 2.0"),
        ({"residency": "multi"}, "make_kv_sink: unknown residency 'multi'; known: unique, counted"),
    ],
    ids=["zero", "a bool", "a float", "a word"],
)
def test_what_a_manager_cannot_be_is_refused(kv, options, message):
    with pytest.raises(ValueError, match=message):
        kv.make_sink(**options)
    assert FIRST == kv.make_sink().worker_id  # no id is used up


def test_an_index_of_tokens_is_not_blamed_for_tokens_that_did_not_come(make_kv):
    class ByTokens:
        def __init__(self):
            self.held = {}

        def apply(self, event):
            for block, tokens in zip(event.event.data.block_hashes, event.token_ids, strict=True):
                self.held[block] = tuple(tokens)

        def match_tokens(self, tokens):
            return {FIRST: len(tokens) // 4} if tuple(tokens[:4]) in self.held.values() else {}

    kv = make_kv(None, ByTokens())
    sink = kv.make_sink()
    sink(one_block(1), token_ids=[(1, 2, 3, 4)])
    sink(Stored(1, (2, 3), (2, 3)), token_ids=[(5, 6, 7, 8)])
    sink(Stored(3, (4,), (4,)), token_ids=[(5, 6, 7, 8)])
    (problem,) = kv.judge().errors
    assert ("sparse_tokens", (3,)) == (problem.rule, problem.blocks)


def test_signed_block_hashes_are_taken_as_they_are():
    """SGLang's are; local hashes never."""
    with RouterHarness(backend=None) as kv:
        sink = kv.make_sink(num_blocks=4)
        sink.compare(lambda: [-5, -(2**63)])
        sink(Stored(None, (-1, -2), (11, 12)))
        sink(Stored(-2, (-(2**63), -5), (13, 14)))
        assert {sink.worker_id: 4} == kv.overlap_for_hashes([11, 12, 13, 14])
        sink(Removed((-2,)))
        sink(Removed((-1,)))
        assert ["orphaned_child"] == [problem.rule for problem in kv.events.warnings]
        assert {} == kv.overlap_for_hashes([11])
        with kv.events.expect_error("block_not_found"):
            sink(Removed((-1,)))
        with kv.events.expect_error("parent_block_not_found"):
            sink(Stored(-2, (-7,), (15,)))
            sink(Removed((-7,)))


@pytest.mark.parametrize("child", [-1, -2, 7])
def test_a_child_of_any_name_is_seen_to_be_left_behind(child):
    kv = RouterHarness(backend=None)
    sink = kv.make_sink()
    for data in (Stored(None, (5, child), (5, 6)), Removed((5,))):
        sink(data)
    assert ["orphaned_child"] == [problem.rule for problem in kv.judge().warnings]


def test_signed_block_hashes_are_unsigned_in_dynamos_json():
    event = KvCacheEvent(0, Stored(-2, (-1,), (11,)))
    assert Stored(2**64 - 2, (2**64 - 1,), (11,)) == KvCacheEvent.from_json(event.to_json()).data
    assert Removed((2**63,)) == KvCacheEvent.from_json(KvCacheEvent(0, Removed((-(2**63),))).to_json()).data


def test_a_wrong_hash_stands_where_its_parent_is_only_unknown_and_follows_from_a_parent_that_is_wrong(make_kv):
    standing = []
    for event_id in (1, 5):  # from 5 on nobody knows whether the parent was stored
        sink = make_kv().make_sink(chained=True)
        kv = sink._harness
        (right,) = sequence_hashes((4,))
        sink(KvCacheEvent(0, Stored(None, (right,), (4,))))
        sink(KvCacheEvent(event_id, Stored(77, (2,), (2,))))
        standing.append([(p.rule, [each.rule for each in p.folded]) for p in kv.events.errors])
    wrong_parent, unknown_parent = standing
    assert [("parent_block_not_found", ["wrong_hash"])] == wrong_parent
    assert [("event_id_gap", ["parent_block_not_found"]), ("wrong_hash", [])] == unknown_parent
