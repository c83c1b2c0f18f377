"""Tiers below the device in the reference index: matches in each tier, worked out by hand and by a plain model."""

from contextlib import suppress
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_tiers import PlainTiers

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.oracle import RadixIndex, RadixIndexError
from pytest_kvmock.oracle.index.index import BlockNotFound, ParentBlockNotFound

DEVICE, HOST, DISK, EXTERNAL = StorageTier
TIERS = [DEVICE, HOST, DISK, EXTERNAL]
"""Blocks 101, 102 ... have local hashes 1, 2 ..., each the child of the one before, unless a test says otherwise."""


def stored(first, last=None, tier=DEVICE, *, worker=0, rank=0):
    numbers = range(first, (last or first) + 1)
    parent = None if first == 1 else 100 + first - 1
    return router_event(Stored(parent, tuple(100 + n for n in numbers), tuple(numbers)), tier, worker=worker, rank=rank)


def removed(*numbers, tier=DEVICE, worker=0, rank=0):
    return router_event(Removed(tuple(100 + n for n in numbers)), tier, worker=worker, rank=rank)


def router_event(data, tier=DEVICE, *, worker=0, rank=0):
    return RouterEvent(worker, KvCacheEvent(0, data, rank), tier)


def index_of(*events):
    index = RadixIndex()
    for event in events:
        index.apply(event)
    return index


def found(index, *numbers, worker=0, rank=0):
    """Return the blocks of one worker by tier."""
    tiers = index.find_tiered(numbers)
    return {tier.value: scores[worker, rank] for tier, scores in tiers.items() if (worker, rank) in scores}


CASES = {
    "the host goes on where the device ends": ([stored(1, 2), stored(3, 4, HOST)], {"device": 2, "host_pinned": 2}),
    "disk goes on where the host ends": (
        [stored(1), stored(2, 3, HOST), stored(4, 4, DISK)],
        {"device": 1, "host_pinned": 2, "disk": 1},
    ),
    "disk goes on where the device ends, where the host has nothing": (
        [stored(1, 2), stored(3, 4, DISK)],
        {"device": 2, "disk": 2},
    ),
    "the host alone": ([stored(1, 4, HOST)], {"host_pinned": 4}),
    "disk alone": ([stored(1, 4, DISK)], {"disk": 4}),
    "external alone": ([stored(1, 2, EXTERNAL)], {"external": 2}),
    "a root on disk, and the rest on the host: no tier comes twice": (
        [stored(1, 1, DISK), stored(2, 4, HOST)],
        {"disk": 1},
    ),
    "what the device has counts there": ([stored(1, 3), stored(1, 3, HOST)], {"device": 3}),
    "an extension from the middle of what the host has": (
        [stored(1, 2), stored(1, 4, HOST)],
        {"device": 2, "host_pinned": 2},
    ),
    "a chain offloaded tail first": (
        [stored(1, 2), stored(4, 4, HOST), stored(3, 3, HOST)],
        {"device": 2, "host_pinned": 2},
    ),
    "a hole between device and host": ([stored(1), stored(3, 4, HOST)], {"device": 1}),
    "a hole in the host": ([stored(1), stored(2, 2, HOST), stored(4, 4, HOST)], {"device": 1, "host_pinned": 1}),
    "a block removed from the middle of the host leaves its child": (
        [stored(1, 1), stored(2, 4, HOST), removed(2, tier=HOST), stored(2)],
        {"device": 2, "host_pinned": 2},
    ),
    "the device's end moves back": (
        [stored(1, 3), stored(3, 4, HOST), removed(3)],
        {"device": 2, "host_pinned": 2},
    ),
    "a block that is no longer on the device leads nowhere": ([stored(1), stored(2, 4, HOST), removed(1)], {}),
    "a block removed from the middle of the device is bridged by the host": (
        [stored(1, 3), stored(2, 2, HOST), removed(2)],
        {"device": 1, "host_pinned": 1},
    ),
    "another rank's blocks are no start": ([stored(1, 2, rank=1), stored(3, 4, HOST)], {}),
}


@pytest.mark.parametrize(("events", "expected"), CASES.values(), ids=CASES)
def test_a_tier_extends_the_match_of_the_faster_ones(events, expected):
    assert found(index_of(*events), 1, 2, 3, 4) == expected


def test_workers_and_ranks_have_their_own_matches_in_lower_tiers():
    index = index_of(
        *(stored(1, 2, worker=worker) for worker in (0, 1)),
        stored(3, 3, HOST, worker=0),
        stored(1, 4, HOST, worker=2, rank=1),
        stored(3, 4, DISK, worker=1),
        stored(4, 4, DISK, worker=0),
    )
    assert index.find_tiered(iter([1, 2, 3, 4])) == {
        DEVICE: {(0, 0): 2, (1, 0): 2},
        HOST: {(0, 0): 1, (2, 1): 4},
        DISK: {(0, 0): 1, (1, 0): 2},
    }
    assert index.find_matches([1, 2, 3, 4]).scores == {(0, 0): 2, (1, 0): 2}


def test_an_empty_index_and_an_empty_query_find_nothing():
    assert RadixIndex().find_tiered([1, 2]) == {}
    assert index_of(stored(1), stored(2, 2, HOST)).find_tiered([]) == {}


def test_a_query_that_ends_on_the_device_looks_in_no_lower_tier():
    assert found(index_of(stored(1, 2), stored(3, 4, HOST)), 1, 2) == {"device": 2}


def test_workers_with_different_names_for_the_same_blocks_both_continue():
    """One table of edges for all workers would give the host's block to the first one only, like Dynamo 1.2.1."""
    events = [
        router_event(Stored(parent, (base + local,), (local,)), tier, worker=worker)
        for worker, base in enumerate((100, 200))
        for parent, local, tier in ((None, 1, DEVICE), (base + 1, 2, HOST))
    ]
    assert index_of(*events).find_tiered([1, 2]) == {DEVICE: {(0, 0): 1, (1, 0): 1}, HOST: {(0, 0): 1, (1, 0): 1}}


def test_a_stored_below_the_device_needs_no_parent_and_one_on_the_device_needs_it_there():
    index = index_of(stored(3, 4, HOST))
    assert index.num_blocks(0, tier=HOST) == 2
    with pytest.raises(ParentBlockNotFound):
        index.apply(stored(5))  # under a block of the host


def test_a_second_edge_to_a_place_or_a_block_is_ignored_below_the_device():
    index = index_of(stored(1, 3, HOST))
    index.apply(router_event(Stored(101, (902, 903), (2, 3)), HOST))  # another name for the place of 102
    index.apply(router_event(Stored(103, (102, 104), (9, 4)), HOST))  # another place for the block 102
    assert found(index, 1, 2, 3, 4) == {"host_pinned": 3}
    assert index.num_blocks(0, tier=HOST) == 3


def test_a_block_under_itself_below_the_device_is_no_error_and_its_query_ends():
    index = index_of(router_event(Stored(7, (7,), (1,)), HOST), stored(1))
    assert found(index, 1, 1, 1) == {"device": 1}


def test_in_1_2_1_a_removed_below_the_device_drops_held_blocks_and_raises_for_the_first_unknown():
    """1.2.1 treats an unknown block there as an error."""
    index = RadixIndex(clears="worker")
    index.apply(stored(1, 3, HOST))
    index.apply(stored(1, 3))
    with pytest.raises(BlockNotFound, match="event 0 of worker 0 rank 0 in tier host_pinned removes block 108"):
        index.apply(removed(3, 8, 2, 9, tier=HOST))
    assert (index.num_blocks(0, tier=HOST), index.num_blocks(0)) == (1, 3)
    for worker, rank in ((1, 0), (0, 1)):
        with pytest.raises(BlockNotFound):
            index.apply(removed(1, tier=HOST, worker=worker, rank=rank))
    index.apply(router_event(Removed(()), HOST, worker=9))


def test_since_1_6_1_a_removed_of_unknown_blocks_below_the_device_is_no_error():
    """Stored 101, 102; then twice Removed 999, 101, 101, 102; then a Removed of a worker that never stored."""
    index = index_of(router_event(Stored(None, (101, 102), (1, 2)), HOST))
    for _ in range(2):
        index.apply(router_event(Removed((999, 101, 101, 102)), HOST))
        assert index.num_blocks(0, tier=HOST) == 0
    index.apply(router_event(Removed((101,)), HOST, worker=1))


@pytest.mark.parametrize(
    ("removed", "left", "unknown", "unknown_in_1_2"),
    [
        ([400, 400], 3, None, 400),
        ([400, 200, 200], 1, None, 200),
        ([999, 300, 300], 2, 999, 999),
        ([200, 400], 1, None, None),
    ],
)
@pytest.mark.parametrize("clears", ["rank", "worker"])
def test_since_1_6_a_removed_may_name_blocks_that_the_same_removed_dropped(
    removed, left, unknown, unknown_in_1_2, clears
):
    index = RadixIndex(clears=clears)
    index.apply(router_event(Stored(None, (100, 200, 300, 400), (1, 2, 3, 4))))
    wrong = unknown_in_1_2 if clears == "worker" else unknown
    if wrong is None:
        index.apply(router_event(Removed(tuple(removed))))
    else:
        with pytest.raises(BlockNotFound) as caught:
            index.apply(router_event(Removed(tuple(removed))))
        assert caught.value.block_hash == wrong
    assert found(index, 1, 2, 3, 4) == {"device": left}
    with pytest.raises(BlockNotFound):  # in a later Removed it is an error
        index.apply(router_event(Removed((removed[-1],))))


def test_copies_are_counted_per_tier():
    index = RadixIndex(count_copies=True)
    for event in (stored(1, 2, HOST), stored(1, 2, HOST), stored(1), removed(2, tier=HOST)):
        index.apply(event)
    assert found(index, 1, 2) == {"device": 1, "host_pinned": 1}
    index.apply(removed(2, tier=HOST))
    assert found(index, 1, 2) == {"device": 1}


@pytest.mark.parametrize(("clears", "left"), [("rank", {(0, 1): 2, (1, 0): 2}), ("worker", {(1, 0): 2})])
def test_a_cleared_empties_all_tiers(clears, left):
    index = RadixIndex(clears=clears)
    for worker, rank in ((0, 0), (0, 1), (1, 0)):
        index.apply(stored(1, 2, HOST, worker=worker, rank=rank))
    index.apply(router_event(Cleared()))
    assert {HOST: left} == index.find_tiered([1, 2])
    assert index.workers == [(0, 0), (0, 1), (1, 0)]


def test_a_removed_worker_or_rank_loses_the_blocks_of_all_tiers():
    index = index_of(*(stored(1, 2, tier, rank=rank) for tier in TIERS for rank in (0, 1)))
    index.remove_worker_dp_rank(0, 1)
    assert index.find_tiered([1, 2]) == {DEVICE: {(0, 0): 2}}
    assert index.workers == [(0, 0)]
    index.remove_worker(0)
    index.remove_worker(9)
    assert (index.find_tiered([1, 2]), index.workers) == ({}, [])


def test_clear_all_blocks_keeps_the_worker_known():
    index = index_of(stored(1, 2, DISK))
    index.clear_all_blocks(0)
    assert (index.find_tiered([1, 2]), index.workers, index.dump_events()) == ({}, [(0, 0)], [])


def test_a_dump_contains_the_blocks_of_all_tiers_including_host_orphans():
    index = index_of(stored(1, 2), stored(4, 4, HOST), stored(3, 3, HOST), stored(9, 9, DISK))
    copy = index_of(*index.dump_events())
    assert found(copy, 1, 2, 3, 4) == {"device": 2, "host_pinned": 2}
    assert (copy.num_blocks(0, tier=HOST), copy.num_blocks(0, tier=DISK)) == (2, 1)
    assert list(range(5)) == [event.event.event_id for event in index.dump_events()]


def test_a_tier_may_be_given_by_its_name():
    index = index_of(
        router_event(Stored(None, (1,), (1,)), "host_pinned"), router_event(Stored(None, (1,), (1,)), "device")
    )
    assert tuple(index.num_blocks(0, tier=tier) for tier in ("device", "host_pinned", "disk")) == (1, 1, 0)


# ------------------------------------------------------------------------------------------------ a plain model


def block_of(path):
    """Return the sequence hash of a chain of local hashes, by an injective rule."""
    return int("".join(map(str, path))) if path else None


PATHS = st.lists(st.integers(1, 2), min_size=1, max_size=5)
EVENTS = st.one_of(
    st.builds(
        lambda path, start: Stored(
            block_of(path[: min(start, len(path) - 1)]),
            tuple(block_of(path[: depth + 1]) for depth in range(min(start, len(path) - 1), len(path))),
            tuple(path[min(start, len(path) - 1) :]),
        ),
        PATHS,
        st.integers(0, 4),
    ),
    st.builds(lambda path: Removed((block_of(path),)), PATHS),
    st.just(Cleared()),
)
STREAMS = st.lists(
    st.builds(
        lambda data, tier, rank: router_event(data, tier, rank=rank), EVENTS, st.sampled_from(TIERS), st.integers(0, 1)
    ),
    max_size=30,
)
QUERIES = [[int(digit) for digit in f"{number:05b}".replace("1", "2").replace("0", "1")] for number in range(32)]


def leaves_only(events):
    """Yield the events without those that remove a device block before its child: the model's device cannot do that."""
    held = {}
    for event in events:
        key, data = event.event.dp_rank, event.event.data
        blocks = held.setdefault(key, set())
        if event.storage_tier is DEVICE and isinstance(data, Removed):
            if any(str(block).startswith(str(data.block_hashes[0])) for block in blocks - set(data.block_hashes)):
                continue
            blocks.difference_update(data.block_hashes)
        elif event.storage_tier is DEVICE and isinstance(data, Stored):
            if data.parent_hash is None or data.parent_hash in blocks:
                blocks.update(data.block_hashes)
        elif isinstance(data, Cleared):
            blocks.clear()
        yield event


@given(STREAMS)
def test_any_stream_gives_the_same_matches_as_a_plain_model(events):
    index, plain = RadixIndex(), PlainTiers()
    for event in leaves_only(events):
        with suppress(RadixIndexError):
            index.apply(event)
        plain.apply(event)
    for query in QUERIES:
        assert plain.find_tiered(query) == index.find_tiered(query)


@given(STREAMS)
def test_a_dump_builds_an_index_with_the_same_answers(events):
    index = RadixIndex()
    for event in events:
        with suppress(RadixIndexError):
            index.apply(event)
    for copy in (index_of(*index.dump_events()), deepcopy(index)):
        for query in QUERIES:
            assert index.find_tiered(query) == copy.find_tiered(query)
            assert index.find_matches(query).scores == index.find_tiered(query).get(DEVICE, {})
