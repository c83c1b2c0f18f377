"""The host tier alone, called as by a manager: queues, duplicates, pins and hazards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import Removed, Stored
from pytest_kvmock.engines import BlockDetails
from pytest_kvmock.engines.base.eviction_policy import Slot
from pytest_kvmock.engines.dynamo.host.host_offload import HostOffload
from pytest_kvmock.values import lineage_hash

MB = 1_000_000


def block(name):
    return BlockDetails(name, lineage_hash(name, None, 0), None, name)


def take(engine, *names):
    """Offload blocks with one slot each; return the short events and the number of returned slots."""
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


def test_a_call_is_split_into_batches_that_share_the_link_and_return_their_slots_together():
    engine = engine_of(8, 2)
    assert take(engine, 1, 2, 3) == ([], 0)
    assert engine.deadline() == 2.0  # one block of three, at half the bandwidth
    assert tick(engine, 2.0) == ([("S", 3)], 0)
    assert tick(engine, 3.0) == ([("S", 1), ("S", 2)], 3)
    assert None is engine.deadline()


def test_the_number_of_concurrent_transfers_is_limited_to_the_batch_size():
    engine = engine_of(8, 1)
    take(engine, 1, 2, 3)
    assert engine.deadline() == 1.0
    assert tick(engine, 1.5) == ([("S", 1)], 0)
    assert engine.deadline() == 2.5  # the next transfer starts when the tick finds room
    assert tick(engine, 2.5) == ([("S", 2)], 0)
    assert tick(engine, 3.5) == ([("S", 3)], 3)


def test_a_queued_block_is_not_sent_twice_unless_it_is_the_next_or_under_way():
    engine = engine_of(8, 1)
    take(engine, 1, 2, 3)  # 1 is under way, 2 is next, 3 waits
    assert take(engine, 3) == ([], 1)
    assert take(engine, 2) == ([], 0)
    assert take(engine, 1) == ([], 0)
    found = []
    while (deadline := engine.deadline()) is not None:
        found.append(tick(engine, deadline))
    assert found == [([("S", 1)], 0), ([("S", 2)], 0), ([("S", 3)], 3), ([], 1), ([], 1)]


def test_a_block_whose_second_copy_arrives_becomes_the_most_recent_on_the_host():
    engine = engine_of(4, 2)
    take(engine, 1)
    take(engine, 1)  # sent again
    take(engine, 2)
    for now in (1.0, 2.0, 3.0):
        tick(engine, now)
    assert sorted(engine.resident()) == [1, 2]
    narrow = engine_of(3, 2)
    take(narrow, 1)
    tick(narrow, 1.0)
    take(narrow, 2)
    tick(narrow, 2.0)
    take(narrow, 3)
    tick(narrow, 3.0)
    assert take(narrow, 4) == ([("R", 1)], 0)


def test_a_block_evicted_between_two_of_its_copies_gets_no_stored_for_the_second_copy():
    """The original drops the block's event data at its eviction, although the block is still on the host."""
    engine = engine_of(2, 2)
    take(engine, 1)
    tick(engine, 0.5)
    take(engine, 1)
    assert tick(engine, 1.5) == ([("S", 1)], 1)
    assert take(engine, 2) == ([("R", 1)], 0)  # the second copy has the other slot
    assert tick(engine, 2.5) == ([], 1)
    assert engine.resident() == [1]
    assert tick(engine, 3.0) == ([("S", 2)], 1)
    assert take(engine, 3) == ([], 0)  # it gets no Removed either
    assert engine.resident() == [2]


def test_a_host_block_without_a_stored_that_is_offloaded_again_gets_a_removed_on_eviction():
    engine = engine_of(2, 2)
    take(engine, 1)
    tick(engine, 0.5)
    take(engine, 1)
    tick(engine, 1.5)
    take(engine, 2)
    tick(engine, 3.0)
    assert take(engine, 1) == ([], 1)  # the host already has it
    assert take(engine, 3) == ([("R", 1)], 0)


def test_a_block_stays_pinned_until_its_last_pin_is_released():
    engine = engine_of(2, 1, gbps=0.0)
    take(engine, 1)
    tick(engine, 0.0)
    first, second = engine.find([block(1).plh]), engine.find([block(1).plh, block(2).plh])
    assert (first.num_blocks, second.num_blocks) == (1, 1)
    assert None is engine.find([block(2).plh, block(1).plh])
    engine.release(first)
    engine.release(first)  # released already
    take(engine, 2)
    tick(engine, 0.0)
    assert take(engine, 3) == ([("R", 2)], 0)  # 1 is pinned
    tick(engine, 0.0)
    engine.release(second)
    assert take(engine, 4) == ([("R", 3)], 0)
    assert repr(second) == "<HostPrefix of 1 blocks, released>"


def test_a_lookup_does_not_find_a_pinned_block_behind_an_unpinned_one():
    engine = engine_of(4, 2, gbps=0.0)
    take(engine, 1, 2)
    tick(engine, 0.0)
    pinned = engine.find([block(2).plh])
    assert engine.find([block(1).plh, block(2).plh]).num_blocks == 1
    assert engine.find([block(2).plh, block(1).plh]).num_blocks == 2
    assert not pinned.is_complete


def test_a_transfer_to_the_device_completes_at_a_tick_or_when_another_one_starts():
    engine = engine_of(4, 2, gbps=1.0)
    take(engine, 1, 2)
    tick(engine, 2.0)
    first, second = engine.find([block(1).plh]), engine.find([block(2).plh])
    engine.start(first, 2.0)
    assert (engine.deadline(), first.is_complete) == (3.0, False)
    engine.start(second, 3.0)
    assert (engine.deadline(), first.is_complete, second.is_complete) == (4.0, True, False)
    tick(engine, 4.0)
    assert second.is_complete


def test_a_start_without_a_time_uses_the_last_tick_rounded_down_to_microseconds():
    engine = engine_of(4, 2, gbps=1.0)
    take(engine, 1)
    tick(engine, 5.0000019)
    assert engine.now == 5.0
    engine.start(engine.find([block(1).plh]))
    assert pytest.approx(engine.deadline(), abs=1e-12) == 6.0000019  # a link's own time never goes back


def test_slots_without_blocks_are_returned_at_once():
    assert short(engine_of(1, 1).take([], [Slot(), Slot()])) == ([], 2)


def test_clear_returns_every_slot_including_those_of_lost_batches():
    engine = engine_of(1, 2)
    take(engine, 1, 2)
    assert (engine.lost_blocks, engine.quarantined) == (2, 2)
    take(engine, 3)
    assert len(engine.clear()) == 3
    assert (engine.deadline(), engine.quarantined, engine.resident()) == (None, 0, [])
    assert tick(engine, 9.0) == ([], 0)


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.lists(
        st.one_of(st.lists(st.integers(1, 20), min_size=1, max_size=6, unique=True), st.floats(0, 3)), max_size=30
    ),
)
def test_any_offload_calls_conserve_blocks_and_slots(num_blocks, batch_size, steps):
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
