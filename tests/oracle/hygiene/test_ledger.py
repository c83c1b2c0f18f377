"""Each rule of the ledger, broken and kept by hand-made events."""

import pytest
from depth import each_parameter

from pytest_kvmock import (
    Cleared,
    KvCacheEvent,
    Removed,
    RouterEvent,
    StorageTier,
    Stored,
    block_hashes,
    sequence_hashes,
)
from pytest_kvmock.oracle.hygiene.entries import BatchesLost, IdsPublished, Resident, WorkerRemoved
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.hygiene.story import story_of

LOCALS = block_hashes(range(12), 4)
CHAIN = sequence_hashes(LOCALS)
TOKENS = [tuple(range(i, i + 4)) for i in (0, 4, 8)]
HOST = StorageTier.HOST_PINNED


def stored(*blocks, parent=None, local=None):
    return Stored(parent, blocks, tuple(blocks) if local is None else tuple(local))


class Stream:
    """Events of one worker, with consecutive ids unless an id is given."""

    def __init__(self, **options):
        self.ledger = Ledger()
        self.ledger.open((0, 0), first_id=0, block_size=4, **options)
        self.next_id = 0

    def observe(self, data, event_id=None, *, tier=StorageTier.DEVICE, chained=False, tokens=None, rank=0):
        if event_id is None:
            event_id = self.next_id
        self.next_id = event_id + 1
        event = RouterEvent(0, KvCacheEvent(event_id, data, rank), tier, tokens, chained=chained)
        problems = self.ledger.take(event)
        return [p.rule if p.cause is None else f"({p.rule})" for p in problems]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([stored(1, 2), stored(3, parent=2), Removed((3, 2))], [], id="clean"),
        pytest.param([stored(1), stored(2, parent=9)], ["parent_block_not_found"], id="unknown parent"),
        pytest.param([stored(1), Removed((1,)), stored(2, parent=1)], ["parent_block_not_found"], id="removed parent"),
        pytest.param([stored(1), Cleared(), stored(2, parent=1)], ["parent_block_not_found"], id="cleared parent"),
        pytest.param([stored(1), Removed((9,))], ["block_not_found"], id="unknown block"),
        pytest.param([stored(1), Removed((1,)), Removed((1,))], ["block_not_found"], id="removed twice"),
        pytest.param([Removed((8, 9))], ["block_not_found"], id="two unknown blocks are one problem"),
        pytest.param([stored(1, parent=1)], ["invalid_block"], id="own parent"),
        pytest.param([stored(1, 2, 2)], ["invalid_block"], id="own parent inside the event"),
        pytest.param([stored(1), stored(1, local=[7])], ["invalid_block"], id="a second local hash"),
        pytest.param([stored(1), Removed((1,)), stored(1, local=[7])], [], id="another local hash once it is gone"),
        pytest.param([stored(1, 2, 1, local=[1, 2, 9])], ["invalid_block"], id="two local hashes in one event"),
        pytest.param([stored(1), stored(2, parent=1), stored(1, parent=2)], ["duplicate_store"], id="a cycle is legal"),
        pytest.param([stored(1, 2), stored(1, 2)], ["duplicate_store"], id="stored twice"),
        pytest.param([stored(1, 2), stored(2, 3, parent=1)], [], id="half of it is new"),
        pytest.param([stored(), Removed(()), Cleared()], [], id="empty events"),
    ],
)
def test_each_broken_rule_is_reported_once(events, expected):
    stream = Stream()
    assert [rule for data in events for rule in stream.observe(data)] == expected


def test_an_unknown_parent_is_reported_once_because_it_counts_as_held_afterwards():
    stream = Stream()
    assert stream.observe(stored(2, parent=9)) == ["parent_block_not_found"]
    assert stream.observe(stored(3, parent=9)) == []
    assert stream.observe(Removed((9,))) == ["orphaned_child"]  # and no block_not_found
    assert stream.observe(Removed((9,))) == ["block_not_found"]


def test_each_tier_has_its_own_blocks_and_a_parent_may_be_in_any_tier():
    stream = Stream()
    assert stream.observe(stored(1)) == []
    assert stream.observe(stored(2, parent=1), tier=HOST) == []
    assert stream.observe(Removed((1,)), tier=HOST) == ["block_not_found"]
    assert stream.observe(Removed((1,))) == []
    assert stream.observe(Removed((2,)), tier=HOST) == []


def test_each_rank_has_its_own_blocks_and_ids():
    stream = Stream()
    stream.ledger.open((0, 1), first_id=0)
    assert stream.observe(stored(1), 0) == []
    assert stream.observe(stored(2, parent=1), 0, rank=1) == ["parent_block_not_found"]
    assert stream.observe(Cleared(), 1, rank=1) == []
    assert stream.observe(Removed((1,)), 1) == []


@pytest.mark.parametrize(
    ("locals_", "blocks", "parent", "tokens", "expected"),
    [
        pytest.param(LOCALS, CHAIN, None, None, [], id="a chain"),
        pytest.param(LOCALS, CHAIN, None, TOKENS, [], id="with tokens"),
        pytest.param(LOCALS[1:], CHAIN[1:], CHAIN[0], TOKENS[1:], [], id="a continuation"),
        pytest.param(LOCALS[1:], CHAIN[1:], None, None, ["wrong_hash"], id="as a root"),
        pytest.param(LOCALS, [*CHAIN[:2], 5], None, None, ["wrong_hash"], id="the last block"),
        pytest.param(LOCALS, CHAIN, None, [*TOKENS[:2], (0, 0, 0, 0)], ["wrong_hash"], id="other tokens"),
    ],
)
def test_hashes_are_checked_only_if_they_must_be_a_chain(locals_, blocks, parent, tokens, expected):
    stream = Stream()
    stream.observe(stored(CHAIN[0], local=LOCALS[:1]) if parent else Cleared())
    data = stored(*blocks, parent=parent, local=locals_)
    assert stream.observe(data, chained=True, tokens=tokens) == expected
    assert Stream().observe(stored(5, 6, local=[7, 8]), chained=False) == []


def test_a_wrong_hash_is_a_warning_if_the_backend_is_not_prefix_closed():
    ledger = Ledger()
    ledger.open((0, 0), first_id=0, prefix_closed=False)
    event = RouterEvent(0, KvCacheEvent(0, stored(5, local=[7])), chained=True)
    (problem,) = ledger.take(event)
    assert (problem.rule, problem.is_error) == ("wrong_hash", False)


@pytest.mark.parametrize(
    ("ids", "gaps"),
    [
        pytest.param([0, 1, 2], [], id="in order"),
        pytest.param([0, 2, 3], [2], id="skipped"),
        pytest.param([1, 2], [1], id="the first is missing"),
        pytest.param([0, 2, 1, 3], [2], id="a late one fills the hole"),
        pytest.param([0, 3, 1, 2, 4], [3], id="two late ones fill it"),
        pytest.param([0, 3, 2, 2, 3], [3, 2], id="a hole is filled once"),
        pytest.param([0, 1, 0, 1, 2], [0], id="gone backwards"),
        pytest.param([0, 2**64 - 1, 5, 2**40], [2**64 - 1], id="far away, and then late ones"),
    ],
)
def test_ids_that_are_not_the_next_are_gaps(ids, gaps):
    stream = Stream()
    found = [(i, rule) for n, i in enumerate(ids) for rule in stream.observe(stored(100 + n), i) if "gap" in rule]
    assert gaps == [i for i, _ in found]


@pytest.mark.parametrize(
    ("first", "second", "known"),
    [
        (stored(1), stored(1), "event 0 had arrived already"),
        (
            stored(1),
            stored(2),
            "another event 0 had arrived: ids went backwards, as after an unannounced restart",
        ),
    ],
    ids=["the same event", "another event"],
)
def test_a_repeated_id_is_reported_as_a_repeat_or_a_restart(first, second, known):
    ledger = Ledger()
    ledger.take(RouterEvent(0, KvCacheEvent(0, first)))
    gap, *_ = ledger.take(RouterEvent(0, KvCacheEvent(0, second)))
    assert ("event_id_gap", known) == (gap.rule, gap.observed)


def test_a_stream_may_begin_at_any_id():
    ledger = Ledger()
    ledger.open((3, 0), first_id=None)
    assert ledger.take(RouterEvent(3, KvCacheEvent(41, stored(1)))) == []
    assert [p.rule for p in ledger.take(RouterEvent(3, KvCacheEvent(43, stored(2))))] == ["event_id_gap"]


def test_after_a_gap_unknown_blocks_are_not_reported_until_an_event_names_them():
    stream = Stream()
    stream.observe(stored(1, 2))
    assert stream.observe(Removed((8,)), 5) == ["event_id_gap", "(block_not_found)"]
    assert stream.observe(stored(3, parent=9)) == ["(parent_block_not_found)"]
    assert stream.observe(stored(1, 2)) == ["(duplicate_store)"]
    assert stream.observe(stored(1, 2)) == ["duplicate_store"]
    assert stream.observe(Removed((8,))) == ["block_not_found"]
    assert sorted(stream.observe(Removed((8, 77)))) == ["(block_not_found)", "block_not_found"]


def test_a_second_gap_is_listed_under_the_first_and_makes_blocks_unknown_again():
    stream = Stream()
    stream.observe(stored(1), 3)
    assert stream.observe(stored(2), 9) == ["(event_id_gap)"]
    assert stream.observe(Removed((77,))) == ["(block_not_found)"]
    assert stream.observe(Removed((77,))) == ["block_not_found"]


def test_a_repeat_of_the_event_before_covers_its_own_consequences_only():
    stream = Stream()
    stream.observe(stored(1))
    stream.observe(Removed((1,)))
    assert stream.observe(Removed((1,)), 1) == ["event_id_gap", "(block_not_found)"]
    assert stream.observe(Removed((77,))) == ["block_not_found"]


def test_a_repeated_id_with_other_content_is_not_a_repeat():
    stream = Stream()
    stream.observe(stored(1))
    assert stream.observe(Removed((77,)), 0) == ["event_id_gap", "(block_not_found)"]
    assert stream.observe(Removed((78,))) == ["(block_not_found)"]


def test_a_cleared_closes_the_gap():
    stream = Stream()
    stream.observe(stored(1), 4)
    stream.observe(Cleared())
    assert stream.observe(Removed((77,))) == ["block_not_found"]


def test_an_announced_restart_closes_the_gap_and_begins_ids_again():
    stream = Stream()
    stream.observe(stored(1), 4)
    stream.ledger.take(WorkerRemoved(0, 0, 0, ((0, 0),)))
    assert stream.observe(stored(1), 0) == []
    assert stream.observe(Removed((77,))) == ["block_not_found"]


def test_a_wrong_hash_is_a_separate_problem_even_in_a_gap():
    stream = Stream()
    stream.observe(stored(1), 4)
    assert stream.observe(stored(5, local=[7]), chained=True) == ["wrong_hash"]


def test_published_events_that_never_arrived_are_one_gap():
    stream = Stream()
    stream.observe(stored(1))
    (gap,) = stream.ledger.take(IdsPublished((0, 0), 3))
    assert gap.observed == "the worker published ids up to 2; events 1 to 2 did not arrive"
    assert stream.ledger.take(IdsPublished((0, 0), 3)) == []
    assert stream.observe(stored(2), 3) == []
    assert stream.observe(stored(3), 1) == []  # late, but it arrives


def test_drift_names_each_missing_and_each_unpublished_block_once():
    stream = Stream()
    stream.observe(stored(1, 2))
    extra, silent = stream.ledger.take(Resident((0, 0), StorageTier.DEVICE, {2, 3, 4}))
    assert (extra.blocks, set(silent.blocks)) == ((1,), {3, 4})
    assert extra.observed == "the engine does not hold block 1; block 1 was stored by event 0 and never removed"
    assert stream.ledger.take(Resident((0, 0), StorageTier.DEVICE, {2, 3, 4})) == []
    (more,) = stream.ledger.take(Resident((0, 0), StorageTier.DEVICE, {3, 4}))
    assert more.blocks == (2,)
    assert stream.ledger.take(Resident((0, 0), StorageTier.DEVICE, {1, 2})) == []


def test_drift_in_a_gap_is_separate_for_blocks_named_since():
    stream = Stream()
    stream.observe(stored(1, 2))
    stream.observe(stored(3), 5)
    problems = stream.ledger.take(Resident((0, 0), StorageTier.DEVICE, set()))
    assert [(p.blocks, p.cause and p.cause.rule) for p in problems] == [((3,), None), ((1, 2), "event_id_gap")]


def test_an_expected_problem_covers_its_consequences():
    stream = Stream()
    event = RouterEvent(0, KvCacheEvent(7, Removed((9,))))
    gap, follows = stream.ledger.take(event)
    assert not follows.covered()
    gap.expected_by = stream
    assert follows.covered()
    assert [follows] == list(gap.consequences())


def test_a_chain_is_rebuilt_from_history_and_ends_on_a_cycle():
    stream = Stream()
    stream.observe(stored(1, 2))
    stream.observe(stored(3, 4, parent=2))
    known = stream.ledger.streams[0, 0]
    assert known.chain(4) == [1, 2, 3, 4]
    stream.observe(Removed((2, 1)))
    assert known.chain(3) == [1, 2, 3]
    stream.observe(stored(1, parent=4))
    assert len(known.chain(4)) == 4


def test_a_late_event_that_is_repeated_does_not_change_the_next_id():
    stream = Stream()
    found = [stream.observe(stored(100), 0), stream.observe(stored(102), 2), stream.observe(stored(101), 1)]
    found += [stream.observe(stored(101), 1), stream.observe(stored(103), 3)]
    assert found == [[], ["event_id_gap"], [], ["(event_id_gap)", "(duplicate_store)"], []]


def test_with_several_tiers_the_history_of_a_block_names_its_tier():
    stream = Stream()
    stream.observe(stored(1))
    stream.observe(stored(2), tier=HOST)
    assert story_of(stream.ledger.streams[0, 0], 1) == "block 1 was stored in device by event 0 and never removed"


def test_an_unknown_parent_and_a_wrong_hash_under_it_are_one_error():
    stream = Stream()
    assert stream.observe(stored(5, parent=9, local=[7]), chained=True) == ["parent_block_not_found", "(wrong_hash)"]


def test_lost_batches_are_a_gap_although_event_ids_show_none():
    stream = Stream()
    assert stream.observe(stored(1)) == []
    (gap,) = stream.ledger.take(BatchesLost(0, 0, range(4, 7)))
    assert (
        gap.rule,
        gap.observed,
        gap.expected,
        gap.position,
    ) == ("event_id_gap", "batches 4 to 6 did not arrive", "batch 4", 0)
    # Perhaps block 9 was stored, or block 1 removed, in a lost batch.
    assert stream.observe(stored(2, parent=9)) == ["(parent_block_not_found)"]
    assert stream.observe(stored(1)) == ["(duplicate_store)"]
    assert stream.observe(Removed((8,))) == ["(block_not_found)"]
    assert [*stream.observe(Removed((1,))), *stream.observe(Removed((1,)))] == ["block_not_found"]  # named since
    (one,) = stream.ledger.take(BatchesLost(0, 0, range(7, 8)))
    assert one.observed == "batch 7 did not arrive"
    (again,) = stream.ledger.take(BatchesLost(0, 0, range(9, 9), "batch 0 came after batch 8"))
    assert (again.observed, again.expected) == ("batch 0 came after batch 8", "batch 9")
    assert one.cause is gap
    assert again.cause is gap


def test_lost_batches_are_a_gap_in_a_stream_without_earlier_events():
    ledger = Ledger()
    (gap,) = ledger.take(BatchesLost(3, 1, range(2)))
    assert (gap.observed, gap.worker_id, gap.dp_rank) == ("batches 0 to 1 did not arrive", 3, 1)
    event = RouterEvent(3, KvCacheEvent(0, stored(2, parent=1), 1))
    assert [gap] == [problem.cause for problem in ledger.take(event)]


# -------------------------------------------------------------------------------- one block, in two tiers


@pytest.mark.parametrize(
    ("below", "expected"),
    [
        pytest.param(stored(3, parent=2), [], id="under the same parent"),
        pytest.param(stored(3, parent=1), ["wrong_hash"], id="under another"),
        pytest.param(stored(1, parent=3), ["wrong_hash"], id="the root under one"),
        pytest.param(stored(3), [], id="without a parent, which states none"),
        pytest.param(stored(3, 2, parent=2), [], id="the others of a chunk may come in any order"),
        pytest.param(stored(3, 2, parent=1), ["wrong_hash"], id="the first of a chunk"),
        pytest.param(stored(3, parent=1, local=[9]), [], id="of other tokens, perhaps of more"),
        pytest.param(stored(9, parent=1), [], id="one that the device never had"),
    ],
)
def test_a_block_must_have_the_same_parent_on_the_device_and_below(below, expected):
    stream = Stream()
    stream.observe(stored(1, 2, 3))
    stream.observe(Removed((3,)))
    assert stream.observe(below, tier=HOST) == expected


@pytest.mark.parametrize(
    ("on_device", "below", "expected"),
    [
        ([[1] * 4, [2] * 4], [[2] * 4], ["wrong_hash"]),
        ([[1] * 4, [2] * 4], [[2] * 8], []),  # a chunk under one name
        ([[1] * 4, [2] * 4], None, ["wrong_hash"]),  # of the same local hash
    ],
)
def test_parents_are_compared_only_between_blocks_of_the_same_number_of_tokens(on_device, below, expected):
    ledger = Ledger()
    ledger.open((0, 0), first_id=0)
    ledger.take(RouterEvent(0, KvCacheEvent(0, stored(1, 2)), token_ids=on_device))
    problems = ledger.take(RouterEvent(0, KvCacheEvent(1, stored(2, parent=7)), HOST, below))
    assert [problem.rule for problem in problems] == expected


def test_parents_are_not_compared_across_a_cleared_or_a_restart():
    for end in ("cleared", "restarted"):
        stream = Stream()
        stream.observe(stored(1, 2))
        if end == "cleared":
            stream.observe(Cleared())
        else:
            stream.ledger.take(WorkerRemoved(0, None, 0, ((0, 0),)))
            stream.next_id = 0
        stream.observe(stored(1))
        assert stream.observe(stored(2, parent=7), tier=HOST) == []
        stream.observe(stored(2, parent=1))
        assert stream.observe(stored(2, parent=8), tier=HOST) == ["wrong_hash"]


def test_a_wrong_parent_below_the_device_names_both_parents_and_the_event():
    ledger = Ledger()
    ledger.open((0, 0), first_id=0)
    ledger.take(RouterEvent(0, KvCacheEvent(0, stored(1, 2))))
    (problem,) = ledger.take(RouterEvent(0, KvCacheEvent(1, stored(2, parent=7)), HOST))
    assert "block 2 is stored under block 7" in problem.observed
    assert problem.expected == "on the device it was stored under block 1, by event 0"
    assert problem.is_error


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([Removed((1,)), Removed((1,))], [], id="it was a copy"),
        pytest.param([Removed((1,)), stored(2, parent=1)], [], id="it was a copy, which has a child"),
        pytest.param([Removed((1,)), stored(1, 2)], [], id="it was a report"),
        pytest.param([Removed((1,))] * 3, ["block_not_found"], id="one Removed more than both can have"),
        pytest.param([Cleared(), Removed((1,))], ["block_not_found"], id="nothing is left of it after a Cleared"),
        pytest.param([stored(3, parent=2)], ["parent_block_not_found"], id="another block is missing"),
    ],
)
@each_parameter
def test_a_stored_that_may_be_a_full_report_is_checked_in_both_readings(events, expected):
    stream = Stream(residency="counted", full_reports=True)
    found = [stream.observe(data) for data in (stored(1), stored(1), *events)]
    assert [rule for rules in found for rule in rules] == expected


def test_full_reports_do_not_count_towards_the_capacity():
    """Counted as copies they would exceed it."""
    rules = {}
    for full_reports in (False, True):
        stream = Stream(residency="counted", num_blocks=2, full_reports=full_reports)
        rules[full_reports] = [stream.observe(data) for data in (stored(1, 2), stored(1, 2), Removed((2,)), stored(3))]
    assert rules == {False: [[], [], [], ["over_capacity"]], True: [[], [], [], []]}
