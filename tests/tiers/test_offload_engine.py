"""The host tier by itself: queues, duplicates, pins, and hazards, as a manager would use it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock.cache.dynamo.eviction.policy import Slot
from pytest_kvmock.cache.offload import BlockDetails
from pytest_kvmock.events import Removed, Stored
from pytest_kvmock.plh import lineage_hash
from pytest_kvmock.tiers.offload import HostOffload

MB = 1_000_000


def block(name):
    return BlockDetails(name, lineage_hash(name, None, 0), None, name)


def take(engine, *names):
    """Hand blocks over with a slot each; returns what came of it: events in short, and how many slots came back."""
    return short(engine.take([block(name) for name in names], [Slot() for _ in names]))


def tick(engine, now):
    return short(engine.tick(now))


def short(result):
    rows = [
        ("S" if isinstance(event.data, Stored) else "R", *event.data.block_hashes)
        for event in result.events
        if isinstance(event.data, Stored | Removed)
    ]
    return rows, len(result.slots)


def engine_of(num_blocks, batch_size, *, block_bytes=MB, gbps=1.0):
    return HostOffload(
        num_blocks, block_bytes=block_bytes, batch_size=batch_size, to_host_gbps=gbps, to_device_gbps=gbps
    )


def test_a_call_is_cut_into_batches_that_share_the_link_and_its_slots_come_back_together():
    engine = engine_of(8, 2)
    assert ([], 0) == take(engine, 1, 2, 3)
    assert 2.0 == engine.deadline()  # one block of three, at half the bandwidth
    assert ([("S", 3)], 0) == tick(engine, 2.0)
    assert ([("S", 1), ("S", 2)], 3) == tick(engine, 3.0)
    assert None is engine.deadline()


def test_no_more_transfers_are_under_way_than_a_batch_has_blocks_and_the_others_wait():
    engine = engine_of(8, 1)
    take(engine, 1, 2, 3)
    assert 1.0 == engine.deadline()
    assert ([("S", 1)], 0) == tick(engine, 1.5)
    assert 2.5 == engine.deadline()  # the next begins when the tick sees that there is room
    assert ([("S", 2)], 0) == tick(engine, 2.5)
    assert ([("S", 3)], 3) == tick(engine, 3.5)


def test_a_block_that_waits_is_not_sent_again_but_the_next_in_turn_is():
    engine = engine_of(8, 1)
    take(engine, 1, 2, 3)  # 1 is under way, 2 is next, 3 waits
    assert ([], 1) == take(engine, 3)
    assert ([], 0) == take(engine, 2)
    assert ([], 0) == take(engine, 1)
    found = []
    while (deadline := engine.deadline()) is not None:
        found.append(tick(engine, deadline))
    assert [([("S", 1)], 0), ([("S", 2)], 0), ([("S", 3)], 3), ([], 1), ([], 1)] == found


def test_what_arrives_a_second_time_becomes_the_youngest():
    engine = engine_of(4, 2)
    take(engine, 1)
    take(engine, 1)  # sent again
    take(engine, 2)
    for now in (1.0, 2.0, 3.0):
        tick(engine, now)
    assert [1, 2] == sorted(engine.resident())
    narrow = engine_of(3, 2)
    take(narrow, 1)
    tick(narrow, 1.0)
    take(narrow, 2)
    tick(narrow, 2.0)
    take(narrow, 3)
    tick(narrow, 3.0)
    assert ([("R", 1)], 0) == take(narrow, 4)


def test_a_block_that_was_evicted_between_two_copies_of_it_has_no_stored_the_second_time():
    """The original forgets what events say of it when it is evicted; the block is on the host all the same."""
    engine = engine_of(2, 2)
    take(engine, 1)
    tick(engine, 0.5)
    take(engine, 1)
    assert ([("S", 1)], 1) == tick(engine, 1.5)
    assert ([("R", 1)], 0) == take(engine, 2)  # the other slot is the second copy's
    assert ([], 1) == tick(engine, 2.5)
    assert [1] == engine.resident()
    assert ([("S", 2)], 1) == tick(engine, 3.0)
    assert ([], 0) == take(engine, 3)  # nor has it a Removed
    assert [2] == engine.resident()


def test_if_such_a_block_is_handed_over_once_more_it_has_a_removed_without_a_stored():
    engine = engine_of(2, 2)
    take(engine, 1)
    tick(engine, 0.5)
    take(engine, 1)
    tick(engine, 1.5)
    take(engine, 2)
    tick(engine, 3.0)
    assert ([], 1) == take(engine, 1)  # the host has it
    assert ([("R", 1)], 0) == take(engine, 3)


def test_pins_hold_until_the_last_is_released():
    engine = engine_of(2, 1, gbps=0.0)
    take(engine, 1)
    tick(engine, 0.0)
    first, second = engine.find([block(1).plh]), engine.find([block(1).plh, block(2).plh])
    assert (1, 1) == (first.num_blocks, second.num_blocks)
    assert None is engine.find([block(2).plh, block(1).plh])
    engine.release(first)
    engine.release(first)  # released already
    take(engine, 2)
    tick(engine, 0.0)
    assert ([("R", 2)], 0) == take(engine, 3)  # 1 is pinned
    tick(engine, 0.0)
    engine.release(second)
    assert ([("R", 3)], 0) == take(engine, 4)
    assert "<HostPrefix of 1 blocks, released>" == repr(second)


def test_a_pinned_block_after_one_that_is_not_is_not_found():
    engine = engine_of(4, 2, gbps=0.0)
    take(engine, 1, 2)
    tick(engine, 0.0)
    pinned = engine.find([block(2).plh])
    assert 1 == engine.find([block(1).plh, block(2).plh]).num_blocks
    assert 2 == engine.find([block(2).plh, block(1).plh]).num_blocks
    assert not pinned.is_complete


def test_a_transfer_to_the_device_completes_at_a_tick_and_when_another_one_starts():
    engine = engine_of(4, 2, gbps=1.0)
    take(engine, 1, 2)
    tick(engine, 2.0)
    first, second = engine.find([block(1).plh]), engine.find([block(2).plh])
    engine.start(first, 2.0)
    assert (3.0, False) == (engine.deadline(), first.is_complete)
    engine.start(second, 3.0)
    assert (4.0, True, False) == (engine.deadline(), first.is_complete, second.is_complete)
    tick(engine, 4.0)
    assert second.is_complete


def test_no_time_means_that_of_the_last_tick_in_microseconds():
    engine = engine_of(4, 2, gbps=1.0)
    take(engine, 1)
    tick(engine, 5.0000019)
    assert 5.0 == engine.now
    engine.start(engine.find([block(1).plh]))
    assert 6.0000019 == pytest.approx(engine.deadline(), abs=1e-12)  # a link's own time does not go back


def test_slots_without_blocks_come_back_at_once():
    assert ([], 2) == short(engine_of(1, 1).take([], [Slot(), Slot()]))


def test_clear_returns_every_slot_those_of_lost_batches_too():
    engine = engine_of(1, 2)
    take(engine, 1, 2)
    assert (2, 2) == (engine.lost_blocks, engine.quarantined)
    take(engine, 3)
    assert 3 == len(engine.clear())
    assert (None, 0, []) == (engine.deadline(), engine.quarantined, engine.resident())
    assert ([], 0) == tick(engine, 9.0)


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.lists(
        st.one_of(st.lists(st.integers(1, 20), min_size=1, max_size=6, unique=True), st.floats(0, 3)), max_size=30
    ),
)
def test_blocks_and_slots_are_conserved(num_blocks, batch_size, steps):
    engine = engine_of(num_blocks, batch_size)
    now, given_slots, back = 0.0, 0, 0
    held, sent_twice = set(), False
    seen = set()

    def note(result):
        for kind, name in result[0]:
            assert sent_twice or (kind == "R") == (name in held)
            (held.add if kind == "S" else held.discard)(name)
        return result[1]

    for step in steps:
        if isinstance(step, list):
            sent_twice |= not seen.isdisjoint(step)
            seen.update(step)
            given_slots += len(step)
            back += note(take(engine, *step))
        else:
            now += step
            back += note(tick(engine, now))
        assert given_slots == back + engine.quarantined
        if not sent_twice:
            assert sorted(held) == sorted(engine.resident())
        assert len(engine.resident()) <= num_blocks
    while (deadline := engine.deadline()) is not None:
        back += note(tick(engine, deadline))
    assert bool(engine.lost_blocks) == bool(engine.quarantined)
    assert given_slots == back + engine.quarantined
    if not engine.lost_blocks and not sent_twice and len(seen) <= num_blocks:
        assert seen == held
