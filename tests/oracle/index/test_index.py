"""The router index, scenario by scenario: those of Dynamo's own indexer tests, and more."""

import gc
import pickle

import pytest
from index_steps import (
    INVALID,
    PARENT,
    UNKNOWN,
    chain,
    chain_removed,
    cleared,
    dump,
    event,
    find,
    play,
    remove,
    remove_worker,
    store,
)

from pytest_kvmock import (
    Cleared,
    KvCacheEvent,
    Prompt,
    Removed,
    RouterEvent,
    StorageTier,
    Stored,
    block_hashes,
    sequence_hashes,
)
from pytest_kvmock.oracle import OverlapScores, RadixIndex, RadixIndexError
from pytest_kvmock.oracle.index.index import BlockNotFound, InvalidBlockSequence, ParentBlockNotFound

OK = None


@pytest.fixture
def index():
    return RadixIndex()


def apply_all(index, *events):
    for reported in events:
        index.apply(reported)


# ------------------------------------------------------------------------------------------------ short scenarios

SCENARIOS = {
    "what was stored is found": [(OK, store(0, [1, 2, 3])), ({(0, 0): 3}, find(1, 2, 3))],
    "the same Stored twice changes nothing": [
        (OK, store(0, [1, 2, 3])),
        (OK, store(0, [1, 2, 3])),
        ({(0, 0): 3}, find(1, 2, 3)),
        ([(0, 0, None, (101,)), (0, 0, 101, (102,)), (0, 0, 102, (103,))], dump),
    ],
    "one Removed undoes two Stored": [
        (OK, store(0, [1])),
        (OK, store(0, [1])),
        (OK, remove(0, [101])),
        ({}, find(1)),
        (UNKNOWN, remove(0, [101])),
    ],
    "a continuation under its parent": [(OK, store(0, [1, 2])), (OK, store(0, [3], 102)), ({(0, 0): 3}, find(1, 2, 3))],
    "a query leaves the chain": [(OK, store(0, [1, 2, 3])), ({(0, 0): 2}, find(1, 2, 999))],
    "a query is longer than the chain": [(OK, store(0, [1, 2])), ({(0, 0): 2}, find(1, 2, 3, 4))],
    "a miss": [(OK, store(0, [1])), ({}, find(999))],
    "an empty index": [({}, find(1, 2)), ([], dump)],
    "an empty query": [(OK, store(0, [1])), ({}, find())],
    "all removed": [(OK, store(0, [1, 2])), (OK, remove(0, [102, 101])), ({}, find(1, 2)), ([], dump)],
    "the last removed": [(OK, store(0, [1, 2, 3])), (OK, remove(0, [103])), ({(0, 0): 2}, find(1, 2, 3))],
    "two workers part": [
        (OK, store(0, [1, 2])),
        (OK, store(1, [1, 3])),
        ({(0, 0): 2, (1, 0): 1}, find(1, 2)),
        ({(0, 0): 1, (1, 0): 2}, find(1, 3)),
    ],
    "a branch off a shared prefix": [
        (OK, store(1, [1, 2, 3, 4, 5, 6])),
        (OK, store(2, [1, 2, 3])),
        ({(1, 0): 6, (2, 0): 3}, find(1, 2, 3, 4, 5, 6)),
        (OK, store(2, [7, 8], 103)),
        ({(1, 0): 3, (2, 0): 5}, find(1, 2, 3, 7, 8)),
        (PARENT, store(2, [5, 6], 104)),
        ({(1, 0): 6, (2, 0): 3}, find(1, 2, 3, 4, 5, 6)),
    ],
    "a prefix that another worker appends to": [
        (OK, store(1, [1, 2, 3, 4, 5, 6])),
        (OK, store(2, [1, 2, 3, 4, 5, 6])),
        (OK, store(2, [7, 8, 9], 106)),
        ({(1, 0): 6, (2, 0): 9}, find(1, 2, 3, 4, 5, 6, 7, 8, 9)),
    ],
    "a hole, and its repair": [
        (OK, store(0, [1, 2, 3, 4, 5])),
        (OK, remove(0, [103])),
        ({(0, 0): 2}, find(1, 2, 3, 4, 5)),
        (OK, store(0, [3], 102)),
        ({(0, 0): 3}, find(1, 2, 3, 4, 5)),
        (OK, store(0, [4, 5], 103)),
        ({(0, 0): 5}, find(1, 2, 3, 4, 5)),
    ],
    "an unknown worker removes": [(OK, store(0, [1])), (UNKNOWN, remove(9, [101])), ({(0, 0): 1}, find(1))],
    "an unknown worker removes nothing": [(OK, remove(9, []))],
    "an unknown worker is cleared": [(OK, store(0, [1])), (OK, cleared(9)), ({(0, 0): 1}, find(1))],
    "an unknown worker is removed": [(OK, store(0, [1])), (OK, remove_worker(9)), ({(0, 0): 1}, find(1))],
    "a worker is removed": [
        (OK, store(0, [1, 2])),
        (OK, store(0, [1, 2], rank=1)),
        (OK, store(1, [1, 2])),
        (OK, remove_worker(0)),
        ({(1, 0): 2}, find(1, 2)),
        (PARENT, store(0, [3], 102)),
    ],
    "one rank is removed": [
        (OK, store(0, [1, 2])),
        (OK, store(0, [1, 2], rank=1)),
        (OK, lambda index: index.remove_worker_dp_rank(0, 1)),
        (OK, lambda index: index.remove_worker_dp_rank(7, 7)),
        ({(0, 0): 2}, find(1, 2)),
        (UNKNOWN, remove(0, [101], rank=1)),
    ],
    "ranks are apart": [
        (OK, store(0, [1, 2, 3], rank=0)),
        (OK, store(0, [1, 2, 3], rank=1)),
        (OK, store(0, [1, 2, 3], rank=2)),
        ({(0, 0): 3, (0, 1): 3, (0, 2): 3}, find(1, 2, 3)),
        (PARENT, store(0, [4], 103, rank=3)),
    ],
    "a rank is cleared and stores again": [
        (OK, store(0, [1, 2], rank=0)),
        (OK, store(0, [1, 2], rank=1)),
        (OK, cleared(0, rank=1)),
        (OK, store(0, [1], rank=1)),
        ({(0, 0): 2, (0, 1): 1}, find(1, 2)),
    ],
    "cleared, and used again": [
        (OK, store(0, [1, 2])),
        (OK, cleared(0)),
        ({}, find(1, 2)),
        (OK, store(0, [3])),
        ({(0, 0): 1}, find(3)),
    ],
    "two sequences do not mix": [
        (OK, store(0, [1, 2, 3])),
        (OK, store(0, [10, 11])),
        ({(0, 0): 1}, find(1, 10)),
        ({(0, 0): 2}, find(10, 11)),
    ],
    "many continuations": [
        (OK, store(0, [1])),
        (OK, store(0, [2, 3], 101)),
        (OK, store(0, [4], 103)),
        (OK, store(0, [5], 104)),
        ({(0, 0): 5}, find(1, 2, 3, 4, 5)),
        ({(0, 0): 3}, find(1, 2, 3, 9)),
    ],
    "all branches go with their last holder": [
        (OK, store(0, [1, 2, 3])),
        (OK, store(0, [7, 8], 102)),
        (OK, remove(0, [102])),
        (OK, store(0, [2], 101)),
        ({(0, 0): 2}, find(1, 2, 3)),
        ({(0, 0): 2}, find(1, 2, 7, 8)),
    ],
    "a block with two names goes with the first that is removed, and both can be": [
        (OK, store(0, [1, 2])),
        (OK, store(0, [(201, 1)])),
        (OK, store(1, [1, 2])),
        (OK, remove(0, [101])),
        ({(1, 0): 2}, find(1, 2)),
        ([(1, 0, None, (101,)), (1, 0, 101, (102,))], dump),
        (OK, remove(0, [201])),
        ({(1, 0): 2}, find(1, 2)),
        (UNKNOWN, remove(0, [201])),
    ],
    "a worker that comes after another was removed": [
        (OK, store(0, [1])),
        (OK, store(1, [1, 2])),
        (OK, remove_worker(0)),
        (OK, store(2, [3])),
        ({(1, 0): 2}, find(1, 2)),
        ({(2, 0): 1}, find(3)),
    ],
    "a worker that comes back has nothing": [
        (OK, store(0, [1, 2])),
        (OK, store(1, [1, 2])),
        (OK, remove_worker(0)),
        (OK, store(0, [1])),
        ({(0, 0): 1, (1, 0): 2}, find(1, 2)),
    ],
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_each_scenario_gives_the_expected_answers(index, scenario):
    for number, (expected, step) in enumerate(scenario):
        assert step(index) == expected, f"step {number}"


# ------------------------------------------------------------------------------------------------- early exit


@pytest.mark.parametrize(
    ("stored", "full", "early"),
    [
        ({0: 3, 1: 1}, {(0, 0): 3, (1, 0): 1}, {(0, 0): 2, (1, 0): 1}),
        ({0: 5}, {(0, 0): 5}, {(0, 0): 1}),
        ({0: 4, 1: 4}, {(0, 0): 4, (1, 0): 4}, {(0, 0): 4, (1, 0): 4}),
        ({0: 4, 1: 2, 2: 1}, {(0, 0): 4, (1, 0): 2, (2, 0): 1}, {(0, 0): 3, (1, 0): 2, (2, 0): 1}),
    ],
)
def test_early_exit_stops_at_the_first_block_that_only_one_rank_holds(index, stored, full, early):
    for worker, depth in stored.items():
        apply_all(index, chain(worker, [1, 2, 3, 4, 5][:depth]))
    assert OverlapScores(full) == index.find_matches([1, 2, 3, 4, 5])
    assert OverlapScores(early) == index.find_matches([1, 2, 3, 4, 5], early_exit=True)


def test_forty_workers_each_get_their_own_depth(index):
    for worker in range(40):
        apply_all(index, chain(worker, range(1, worker + 2)))
    assert {(w, 0): w + 1 for w in range(40)} == index.find_matches(range(1, 41)).scores
    for worker in range(0, 40, 2):
        index.remove_worker(worker)
    assert {(w, 0): w + 1 for w in range(1, 40, 2)} == index.find_matches(range(1, 41)).scores


# --------------------------------------------------------------------------------------------- long sequences


@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, 96])
def test_long_sequences_are_found_in_full(index, length):
    apply_all(index, chain(0, range(1, length + 1)))
    assert {(0, 0): length} == index.find_matches(range(1, length + 1)).scores
    assert {(0, 0): length} == index.find_matches(range(1, length + 20)).scores


@pytest.mark.parametrize("at", [31, 32, 33, 63, 64, 65, 97])
def test_a_query_that_diverges_from_a_long_sequence_matches_up_to_there(index, at):
    apply_all(index, chain(0, range(1, 129)))
    assert {(0, 0): at} == index.find_matches([*range(1, at + 1), *range(1001, 1020)]).scores


def test_a_branch_of_a_long_sequence_is_found(index):
    apply_all(index, chain(0, range(1, 61)), chain(0, range(1001, 1031), range(1, 31)))
    assert index.find_matches(range(1, 61)).scores == {(0, 0): 60}
    assert index.find_matches([*range(1, 31), *range(1001, 1031)]).scores == {(0, 0): 60}
    assert index.find_matches([*range(1, 31), 5]).scores == {(0, 0): 30}


def test_a_block_removed_late_in_a_long_sequence_ends_the_match(index):
    apply_all(index, chain(0, range(1, 101)), chain_removed(0, range(1, 101), 79))
    assert index.find_matches(range(1, 101)).scores == {(0, 0): 79}


def test_twenty_continuations_of_ten_blocks_are_one_sequence(index):
    for start in range(0, 200, 10):
        apply_all(index, chain(0, range(start + 1, start + 11), range(1, start + 1)))
    assert index.find_matches(range(1, 201)).scores == {(0, 0): 200}
    assert index.num_blocks(0) == 200


def test_workers_with_different_depths_each_get_their_own(index):
    depths = {0: 10, 1: 20, 2: 35, 3: 64, 4: 100}
    for worker, depth in depths.items():
        apply_all(index, chain(worker, range(1, depth + 1)))
    assert {(w, 0): d for w, d in depths.items()} == index.find_matches(range(1, 101)).scores


def test_two_sequences_of_a_thousand_blocks_may_diverge_in_the_middle(index):
    apply_all(index, chain(0, range(1, 1001)), chain(1, [*range(1, 500), *range(5001, 5502)]))
    assert index.find_matches(range(1, 1001)).scores == {(0, 0): 1000, (1, 0): 499}
    assert index.find_matches(range(1, 501)).scores == {(0, 0): 500, (1, 0): 499}


def test_a_chain_of_a_hundred_thousand_blocks_is_dropped_without_recursion(index):
    local = range(1, 100_001)
    apply_all(index, chain(0, local))
    assert index.find_matches(local).scores == {(0, 0): 100_000}
    apply_all(index, event(0, Removed(tuple(sequence_hashes(local)))))
    gc.collect()
    assert index.num_blocks(0) == 0


# --------------------------------------------------------------------------------------------- prompts and salts


def test_a_prompt_of_96_tokens_is_three_blocks_of_32(index):
    prompt = Prompt(range(96))
    apply_all(index, chain(0, prompt.block_hashes(32)))
    assert index.find_matches(prompt.block_hashes(32)).scores == {(0, 0): 3}


@pytest.mark.parametrize("salt", [{"lora_name": "adapter"}, {"cache_namespace": "tenant"}], ids=repr)
def test_a_prompt_under_another_adapter_or_namespace_does_not_match(index, salt):
    apply_all(index, chain(0, block_hashes(range(8), 4)))
    assert index.find_matches(block_hashes(range(8), 4, **salt)).scores == {}


# ------------------------------------------------------------------------------------------------- accounting


def test_block_counts_follow_stored_and_removed_blocks_without_counting_twice(index):
    assert (index.num_blocks(0), index.workers) == (0, [])
    apply_all(index, chain(0, [1, 2, 3]), chain(0, [1, 2, 3]), chain(0, [9], [1, 2]), chain(0, [1], rank=1))
    assert (index.num_blocks(0), index.num_blocks(0, 1)) == (4, 1)
    apply_all(index, chain_removed(0, [1, 2, 3], 2))
    assert (index.num_blocks(0), index.num_blocks(0, 1)) == (3, 1)
    index.clear_all_blocks(0)
    assert (index.num_blocks(0), index.num_blocks(0, 1)) == (0, 0)


def test_a_cleared_worker_stays_known_and_a_removed_one_does_not(index):
    apply_all(index, chain(2, [1]), chain(1, [1], rank=3), event(2, Cleared()))
    assert index.workers == [(1, 3), (2, 0)]
    index.remove_worker(2)
    assert index.workers == [(1, 3)]


def test_a_cleared_empties_all_ranks_of_its_worker_only_with_clears_worker():
    left = {}
    for clears in ("rank", "worker"):
        index = RadixIndex(clears=clears)
        apply_all(index, chain(0, [1], rank=0), chain(0, [1], rank=1), chain(1, [1]), event(0, Cleared(), rank=1))
        left[clears] = index.find_matches([1]).scores
    assert left == {"rank": {(0, 0): 1, (1, 0): 1}, "worker": {(1, 0): 1}}


# ----------------------------------------------------------------------------------------------------- errors


def test_an_unknown_parent_leaves_the_index_unchanged(index):
    apply_all(index, chain(0, [1, 2]), chain(1, [1, 2, 3]))
    before = index.dump_events()
    with pytest.raises(ParentBlockNotFound) as caught:
        apply_all(index, event(0, Stored(777, (778, 779), (3, 4)), rank=0, event_id=5))
    assert before == index.dump_events()
    assert (
        caught.value.worker_id,
        caught.value.dp_rank,
        caught.value.event_id,
        caught.value.block_hash,
    ) == (0, 0, 5, 777)
    assert caught.value.rule == "parent_block_not_found"
    assert (
        str(caught.value)
        == "Failed to find parent block: event 5 of worker 0 rank 0 stores under block 777, which that rank does not "
        "hold"
    )


def test_a_rejected_first_event_leaves_the_worker_unknown(index):
    with pytest.raises(ParentBlockNotFound):
        apply_all(index, event(3, Stored(1, (2,), (2,))))
    assert index.workers == []


def test_an_unknown_block_in_a_removed_does_not_keep_the_other_blocks(index):
    apply_all(index, chain(0, [1, 2, 3]))
    hashes = sequence_hashes([1, 2, 3])
    with pytest.raises(BlockNotFound) as caught:
        apply_all(index, event(0, Removed((hashes[2], 888, hashes[1], 999)), event_id=9))
    assert index.find_matches([1, 2, 3]).scores == {(0, 0): 1}
    assert (caught.value.rule, caught.value.block_hash, caught.value.event_id) == ("block_not_found", 888, 9)
    assert (
        str(caught.value)
        == "Failed to find block: event 9 of worker 0 rank 0 removes block 888, which that rank does not hold"
    )


def test_a_block_under_itself_is_refused_and_the_blocks_before_it_are_stored(index):
    assert play(index, [store(4, [1, 2, (102, 3), 4])]) == [INVALID]
    assert index.find_matches([1, 2]).scores == {(4, 0): 2}
    with pytest.raises(
        InvalidBlockSequence, match="event 7 of worker 4 rank 0 stores block 102 under itself"
    ) as caught:
        apply_all(index, event(4, Stored(102, (102,), (8,)), event_id=7))
    assert (caught.value.rule, caught.value.block_hash) == ("invalid_block", 102)


def test_index_errors_are_value_errors_and_can_be_pickled():
    for error in (ParentBlockNotFound, BlockNotFound, InvalidBlockSequence):
        made = error(1, 2, 3, 4, StorageTier.DISK)
        copy = pickle.loads(pickle.dumps(made))
        assert issubclass(error, RadixIndexError)
        assert issubclass(error, ValueError)
        assert str(made) == str(copy)
        assert "worker 1 rank 2 in tier disk" in str(copy)
        assert "4" in str(copy)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (KvCacheEvent(0, Cleared()), "takes a RouterEvent, got KvCacheEvent"),
        (None, "takes a RouterEvent, got None"),
        (RouterEvent(0, KvCacheEvent(0, "cleared")), "a Stored, Removed, Located, Updated or Cleared, got 'cleared'"),
    ],
)
def test_a_value_that_is_not_an_event_is_refused_by_name(index, wrong, message):
    with pytest.raises(TypeError, match=message):
        index.apply(wrong)


@pytest.mark.parametrize("clears", ["ranks", "e1", None, 1])
def test_invalid_values_of_clears_are_refused(clears):
    with pytest.raises(ValueError, match=r"unknown clears .*known: rank, worker"):
        RadixIndex(clears=clears)


# ----------------------------------------------------------------------------------------------------- cycles


def test_a_cycle_of_two_blocks_can_be_queried_dumped_and_replayed(index):
    steps = [store(0, [1, 2, 3]), store(0, [4], 103), store(0, [3], 104)]
    assert play(index, steps) == [OK] * 3
    assert index.find_matches([1, 2, 3, 4, 3, 4, 3, 4, 3, 9]).scores == {(0, 0): 9}
    rows = [(0, 0, None, (101,)), (0, 0, 101, (102,)), (0, 0, 102, (103,)), (0, 0, 103, (104,)), (0, 0, 104, (103,))]
    assert rows == dump(index)
    copy = RadixIndex()
    apply_all(copy, *index.dump_events())
    assert rows == dump(copy)
    assert copy.find_matches([1, 2, 3, 4, 3, 4, 3, 4, 3, 9]).scores == {(0, 0): 9}


def test_a_refused_self_parent_leaves_dynamos_edge_and_the_dump_terminates(index):
    assert play(index, [store(0, [1, 2, 3]), store(0, [3], 103)]) == [OK, INVALID]
    assert index.find_matches([1, 2, 3, 3, 3]).scores == {(0, 0): 5}
    assert dump(index) == [(0, 0, None, (101,)), (0, 0, 101, (102,)), (0, 0, 102, (103,))]
    assert play(index, [store(0, [3], 103)]) == [INVALID]
    assert play(index, [remove(0, [103])]) == [OK]
    assert index.find_matches([1, 2, 3, 3, 3]).scores == {(0, 0): 2}


def test_a_cycle_can_be_cleared_and_its_worker_removed(index):
    play(index, [store(0, [1, 2]), store(0, [1], 102)])
    index.clear_all_blocks(0)
    assert index.find_matches([1, 2]).scores == {}
    play(index, [store(0, [1, 2]), store(0, [1], 102)])
    index.remove_worker(0)
    assert (index.find_matches([1, 2]).scores, index.dump_events()) == ({}, [])


# ------------------------------------------------------------------------------------------------------- dump


def test_a_dump_has_one_event_per_block_and_ids_from_zero(index):
    apply_all(index, chain(0, [1, 2, 3]), chain(1, [1, 9], rank=2))
    dumped = index.dump_events()
    assert [e.event.event_id for e in dumped] == [0, 1, 2, 3, 4]
    assert [len(e.event.data.block_hashes) for e in dumped] == [1] * 5
    first, second, third = sequence_hashes([1, 2, 3])
    other = sequence_hashes([1, 9])[1]
    assert [
        (0, 0, None, (first,)),
        (0, 0, first, (second,)),
        (0, 0, second, (third,)),
        (1, 2, None, (first,)),
        (1, 2, first, (other,)),
    ] == dump(index)


def test_a_dump_omits_blocks_that_no_query_reaches(index):
    play(index, [store(0, [1, 2, 3]), store(1, [1, 2, 3]), remove(0, [102])])
    assert dump(index) == [(0, 0, None, (101,)), (1, 0, None, (101,)), (1, 0, 101, (102,)), (1, 0, 102, (103,))]


def test_each_rank_is_dumped_with_its_own_hashes(index):
    play(index, [store(0, [1, 2]), store(1, [1, 2], base=200)])
    copy = RadixIndex()
    apply_all(copy, *index.dump_events())
    assert play(copy, [store(0, [3], 102), store(1, [3], 202, base=200)]) == [OK, OK]
    assert copy.find_matches([1, 2, 3]).scores == {(0, 0): 3, (1, 0): 3}
