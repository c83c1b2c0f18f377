"""The events of a pool with a sink, and their verdicts."""

import logging

import pytest
from block_helpers import cache, chain, fill, hashes, make_manager, make_pool, register

from pytest_kvmock import (
    CapturingSink,
    EngineProfile,
    RadixIndex,
    Removed,
    RouterHarness,
    StorageTier,
    Stored,
    block_hashes,
)
from pytest_kvmock.contrib.block_manager import TokenBlock


def stored(contents):
    return Stored(
        contents[0].parent_sequence_hash, tuple(hashes(contents)), tuple(each.block_hash for each in contents)
    )


def data(sink):
    return [event.data for event in sink.take()]


def test_a_registered_chain_is_published_as_one_stored_with_its_tokens():
    sink = CapturingSink(1337)
    pool = make_pool(4, sink)
    contents = chain(3)
    register(pool, contents)
    (event,) = sink.router_events
    assert (0, stored(contents), StorageTier.DEVICE) == (event.event.event_id, event.event.data, event.storage_tier)
    assert event.token_ids == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert block_hashes(range(12), 4) == list(event.event.data.tokens_hashes)


def test_blocks_that_are_already_registered_are_not_published_again():
    sink = CapturingSink()
    pool = make_pool(4, sink)
    contents = chain(2)
    cache(pool, contents)
    sink.take()
    cache(pool, contents)
    pool.match_sequence_hashes_blocking(hashes(contents)).close()
    pool.flush()
    assert sink.events == []


A = chain(3)
FORK = [A[0].next_block(range(50, 54)), A[0].next_block(range(60, 64))]
B = chain(2, 100)
LATER = chain(1, 200, parent=7)


@pytest.mark.parametrize(
    ("registered", "chains"),
    [
        ([*A], [[*A]]),
        ([*A, *B], [[*A], [*B]]),
        ([A[0], B[0], A[1], B[1], A[2]], [[*A], [*B]]),
        ([A[2], A[1], A[0]], [[*A]]),  # parents first, whatever the order of registration
        ([A[0], FORK[0], A[1], FORK[1]], [[A[0], FORK[0]], [A[1]], [FORK[1]]]),
        ([*LATER, *B], [[*LATER], [*B]]),
        ([A[0], A[2]], [[A[0]], [A[2]]]),
        ([A[0], A[0], A[1]], [[A[0], A[1]]]),
    ],
)
def test_each_registered_chain_is_published_as_one_stored(registered, chains):
    sink = CapturingSink()
    register(make_pool(8, sink), registered)
    assert [stored(each) for each in chains] == data(sink)


def test_an_allocation_publishes_a_removed_for_each_block_that_it_resets():
    sink = CapturingSink()
    pool = make_pool(3, sink)
    contents = chain(3)
    cache(pool, contents)
    sink.take()
    pool.allocate_blocks_blocking(2)
    assert [Removed((each.sequence_hash,)) for each in contents[:2]] == data(sink)


def test_blocks_that_were_never_registered_are_never_removed():
    sink = CapturingSink()
    pool = make_pool(2, sink)
    fill(pool, chain(2)).close()
    pool.flush()
    pool.allocate_blocks_blocking(2)
    assert sink.events == []


def test_the_tiers_of_a_manager_share_one_event_counter():
    sink = CapturingSink()
    manager = make_manager(sink=sink)
    register(manager.device(), chain(1))
    register(manager.host(), chain(1))
    register(manager.device(), chain(1, 100))
    assert [(event.event.event_id, event.storage_tier) for event in sink.router_events] == [
        (0, "device"),
        (1, "host_pinned"),
        (2, "device"),
    ]


def test_without_a_sink_no_event_is_published():
    manager = make_manager()
    register(manager.device(), chain(1))
    assert manager._publisher.next_event_id == 0


def test_a_sink_error_uses_up_the_event_id_and_is_raised_after_the_call(caplog):
    class Sink:
        def __init__(self):
            self.ids = []

        def publish(self, event, tier, token_ids):
            self.ids.append(event.event_id)
            if len(self.ids) == 1:
                raise RuntimeError("full")

    sink = Sink()
    pool = make_pool(4, sink)
    with (
        caplog.at_level(logging.WARNING, logger="pytest_kvmock.engines"),
        pytest.raises(RuntimeError, match=r"^full$"),
    ):
        register(pool, chain(1))
    held = register(pool, chain(1, 100))
    assert (sink.ids, len(pool.registered_hashes())) == ([0, 1], 2)
    assert caplog.messages == ["KV event 0 was not taken by its sink: RuntimeError('full')"]
    assert held[0].is_open


class Refusing(CapturingSink):
    def publish(self, event, storage_tier, token_ids):
        super().publish(event, storage_tier, token_ids)
        raise OSError(f"event {event.event_id}")


def test_an_eviction_is_complete_when_an_allocation_raises_the_sink_error():
    sink = Refusing()
    pool = make_pool(2)
    contents = chain(2)
    cache(pool, contents)
    pool._publisher.sink = sink
    with pytest.raises(OSError, match=r"^event 0$"):
        pool.allocate_blocks_blocking(2)
    assert [Removed((each.sequence_hash,)) for each in contents] == data(sink)
    assert pool.flush() == 2  # the caller did not get the blocks


def test_all_copies_of_a_flush_are_made_before_it_raises_the_sink_error():
    sink = Refusing()
    manager = make_manager(device=4, host=2, sink=None)
    contents = chain(4)
    shared = register(manager.device(), contents)
    for block in shared[:2]:
        manager.offload(block)
    manager.flush()
    for block in shared[2:]:
        manager.offload(block)
    manager._publisher.sink = sink
    with pytest.raises(OSError, match=r"^event 0$"):
        manager.flush()
    kinds = ["Removed", "Stored", "Removed", "Stored"]  # each copy evicts a block
    assert kinds == [type(each).__name__ for each in data(sink)]
    assert hashes(contents[2:]) == manager.host().registered_hashes()


def test_a_sink_that_raises_a_base_exception_does_not_lose_blocks():
    class Stopped(BaseException):
        pass

    class Sink:
        def publish(self, event, tier, token_ids):
            raise Stopped

    pool = make_pool(2)
    cache(pool, chain(2))
    pool._publisher.sink = Sink()
    with pytest.raises(Stopped):
        pool.allocate_blocks_blocking(1)
    pool.flush()
    with pytest.raises(Stopped):
        register(pool, chain(1, 100))
    pool.flush()
    assert (pool.total_blocks, pool.available_blocks) == (2, 2)


def test_a_router_that_hashes_tokens_itself_finds_the_blocks():
    sink = CapturingSink(1337)
    pool = make_pool(4, sink)
    cache(pool, chain(3))
    index = RadixIndex()
    for event in sink.router_events:
        index.apply(event)
    assert index.find_matches(block_hashes(range(16), 4)).scores == {(1337, 0): 3}


# ------------------------------------------------------------------------------------ judged as any other stream


def traffic(manager):
    """Fill, share, evict parents before their children, and store them again."""
    device = manager.device()
    long, other = chain(6), chain(4, 1000)
    cache(device, long)
    cache(device, other)  # of 8 blocks; evicts the first two of the long chain
    cache(device, long[:2])
    cache(manager.host(), long)
    with device.match_sequence_hashes_blocking(hashes(other)):
        cache(device, chain(4, 2000))


@pytest.fixture
def kv():
    with RouterHarness(EngineProfile(block_size=4), backend=None) as harness:
        yield harness


def make_sink(kv, device=8, host=16):
    """Make a sink for these managers; parents may be evicted first."""
    return kv.make_sink(chained=True, prefix_closed=False, num_blocks=device, tier_blocks={"host": host})


def test_the_event_stream_has_no_problem_if_parents_may_be_evicted_first(kv):
    sink = make_sink(kv)
    manager = make_manager(sink=sink)
    traffic(manager)
    assert len(sink.events) > 12
    sink.compare(manager.device().registered_hashes)
    sink.compare(manager.host().registered_hashes, storage_tier=StorageTier.HOST_PINNED)
    kv.assert_in_sync()
    assert (list(kv.judge().errors), list(kv.judge().warnings)) == ([], [])


def test_evicting_parents_first_is_a_warning_if_prefixes_must_be_closed(kv):
    manager = make_manager(sink=kv.make_sink(chained=True))
    traffic(manager)
    assert {problem.rule for problem in kv.judge().warnings} == {"orphaned_child"}


def test_a_router_index_finds_the_blocks_of_both_tiers(kv):
    sink = make_sink(kv)
    manager = make_manager(sink=sink)
    cache(manager.device(), chain(3))
    cache(manager.host(), chain(5))
    assert {sink.worker_id: 3} == kv.overlap(range(24))
    assert {sink.worker_id: 2} == kv.overlap(range(24), tier="host")


def test_a_removed_that_is_published_twice_is_reported(kv):
    sink = make_sink(kv)
    pool = make_pool(1, sink)
    cache(pool, [TokenBlock([1, 2, 3, 4])])
    pool.allocate_blocks_blocking(1)
    with kv.events.expect_error("block_not_found"):
        sink(sink.events[-1].data)
