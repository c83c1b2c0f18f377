"""A worker with host memory below its device: its time, its waits and its onboarding."""

import math
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import CapturingSink, OutOfBlocks, Prompt, Removed, StorageTier, Stored, create_manager
from pytest_kvmock.engines import KvWorker, WouldWait
from pytest_kvmock.engines.base.driver import SlotsLost
from pytest_kvmock.engines.dynamo.eviction.lineage import LineagePolicy
from pytest_kvmock.engines.dynamo.host.host_offload import HostOffload
from pytest_kvmock.engines.dynamo.logical import LogicalManager
from pytest_kvmock.fleets import MOONCAKE_BLOCK_SIZE, read_mooncake

SIZE = 4
A, B, C = (list(range(start, start + 24)) for start in (0, 100, 200))
HOST = StorageTier.HOST_PINNED


def worker_of(num_blocks=8, backend="lineage", *, host=64, gbps=1.0, bytes_per_token=250_000, **options):
    """Return a worker whose blocks take a millisecond each, alone on the link."""
    tiers = {"host": host, "gbps": gbps, "bytes_per_token": bytes_per_token}
    make = partial(create_manager, backend, num_blocks=num_blocks, block_size=SIZE, tiers=tiers)
    return KvWorker(lambda sink: make(sink=sink), sink=CapturingSink(), rng=Random(1), **options)


def plain_worker():
    return KvWorker(lambda sink: create_manager(num_blocks=8, block_size=SIZE, sink=sink), sink=CapturingSink())


def serve(worker, prompt):
    with worker.prefill(prompt) as request:
        return request.cached_tokens, request.onboarded_tokens


def sink_of(worker):
    return worker._recorder.sink.given


@pytest.mark.parametrize("backend", ["lineage", "lru", "multi_lru"])
def test_evicted_blocks_are_loaded_back_from_the_host(backend):
    worker = worker_of(backend=backend)
    assert serve(worker, A) == (0, 0)
    assert worker.now == 0.0
    assert serve(worker, B) == (0, 0)
    assert worker.now == 4.0  # B finds two empty slots and needs six
    worker.tick(50.0)
    assert worker.cached_tokens(A) + worker.cached_tokens(A, HOST) == 24
    assert serve(worker, A) == (24, 16)
    assert worker.cached_tokens(A) == 24


def test_only_the_part_of_a_prefix_that_the_device_lacks_is_swapped_in():
    worker = worker_of()
    serve(worker, A)
    serve(worker, B[:12])  # one block of A is evicted
    worker.tick(10.0)
    held = worker.cached_tokens(A)
    assert 0 < held < 24
    assert 24 - held == worker.cached_tokens(A, "host_pinned")
    assert (24, 24 - held) == serve(worker, A)


def test_without_evictions_a_worker_with_tiers_equals_one_without():
    tiered, plain = worker_of(), plain_worker()
    for prompt in (A, A[:12], [*A[:16], 1, 2]):
        assert plain.serve(prompt) == tiered.serve(prompt)
    assert sink_of(plain).events == sink_of(tiered).events
    assert tiered.now == 0.0


def test_prefill_without_waiting_raises_with_the_deadline():
    worker = worker_of()
    serve(worker, A)
    with pytest.raises(WouldWait) as error:
        worker.prefill(B, wait=False)
    assert error.value.deadline == 4.0
    assert str(error.value) == (
        "blocks of the device are on their way to the host, until 4.0 ms at the earliest; it is 0.0 ms "
        "(wait=True waits, or tick the worker)"
    )
    assert (worker.requests, worker.manager.num_active_block_refs, worker.now) == ([], 0, 0.0)
    worker.tick(error.value.deadline)
    with worker.prefill(B, wait=False) as request:
        assert len(request) == 24


def test_a_swap_in_without_a_waiting_request_continues_and_completes_at_a_tick():
    worker = worker_of()
    serve(worker, A)
    serve(worker, B)
    worker.tick(50.0)
    with pytest.raises(WouldWait, match="on their way to the host") as error:
        worker.prefill(A, wait=False)
    worker.tick(error.value.deadline)
    with pytest.raises(WouldWait, match="4 blocks are on their way back from the host") as error:
        worker.prefill(A, wait=False)
    with pytest.raises(WouldWait) as again:
        worker.prefill(A, wait=False)
    assert error.value.deadline == again.value.deadline  # it is not started twice
    worker.tick(error.value.deadline)
    assert worker.cached_tokens(A) == 24
    longer = [*A, *C[:8]]
    with pytest.raises(WouldWait, match="blocks of the device are on their way to the host, until") as error:
        worker.prefill(longer, wait=False)  # for the two more blocks that it needs
    worker.tick(error.value.deadline)
    with worker.prefill(longer, wait=False) as request:
        assert (request.cached_tokens, request.onboarded_tokens) == (24, 16)
    assert serve(worker, A) == (24, 0)


def parked_worker():
    """A worker of 4 blocks, all of A[:16]: two stay pinned while the two others are onboarded; and the
    deadline.
    """
    worker = worker_of(4)
    serve(worker, A[:16])
    serve(worker, B[:8])
    worker.tick(50.0)
    for _ in range(2):
        with pytest.raises(WouldWait) as error:
            worker.prefill(A[:16], wait=False)
        now, deadline = worker.now, error.value.deadline
        worker.tick(deadline if "way to the host" in str(error.value) else now)
    assert (worker.manager.num_active_blocks, worker.manager.num_outside) == (4, 2)
    return worker, deadline


def test_blocks_pinned_for_a_swap_in_do_not_belong_to_a_request():
    worker, deadline = parked_worker()
    with pytest.raises(WouldWait) as error:
        worker.prefill(A[:16], wait=False)
    assert deadline == error.value.deadline
    assert serve(worker, A[:16]) == (16, 8)
    worker, deadline = parked_worker()
    assert serve(worker, C[:16]) == (0, 0)  # it waits for them, and for their copy to the host
    assert deadline < worker.now


def test_a_request_does_not_wait_for_time_that_the_manager_has_already_passed():
    worker, deadline = parked_worker()
    worker.manager.tick(deadline)
    assert serve(worker, A[:16]) == (16, 8)
    assert worker.manager.num_outside == 0


def test_the_time_of_a_worker_is_never_before_that_of_its_manager():
    worker = worker_of()
    worker.manager.tick(50.0)
    assert worker.now == 50.0
    with pytest.raises(ValueError, match=r"tick: time does not go backwards; it is 50\.0 ms, got 49"):
        worker.tick(49)
    serve(worker, A)
    serve(worker, B)
    assert worker.now == 54.0
    worker.manager.tick(100.0)
    with pytest.raises(ValueError, match=r"tick: time does not go backwards; it is 100\.0 ms, got 70\.0"):
        worker.manager.tick(70.0)
    assert serve(worker, A) == (24, 16)
    assert 108.0 == worker.now == worker.manager.offload.now
    worker.manager.swap_in([], 200.0)
    worker.restart()
    assert worker.now == 108.0


def test_a_request_does_not_wait_for_swap_ins_of_a_cleared_manager():
    worker, _ = parked_worker()
    assert worker.manager.clear()
    assert serve(worker, A[:16]) == (0, 0)
    assert worker.cached_tokens(A) == 16


def test_slots_held_by_a_completed_swap_in_are_not_reported_as_lost():
    worker = worker_of(4)
    serve(worker, A[:16])
    serve(worker, B[:16])
    worker.manager.swap_in(Prompt.of(A[:16]).lineage_hashes(worker.manager.block_size))
    worker.tick(100.0)
    scheduled = worker.manager.swap_in(Prompt.of(A[:8]).lineage_hashes(worker.manager.block_size))
    worker.tick(200.0)
    assert scheduled.is_complete
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 2 are available"):
        worker.prefill(C[:12])
    worker.manager.put_down(scheduled)
    assert serve(worker, C[:12]) == (0, 0)


def test_blocks_swapped_in_for_another_request_are_hit_on_the_device():
    worker = worker_of()
    serve(worker, A)
    serve(worker, B)
    worker.tick(50.0)
    for _ in range(2):
        with pytest.raises(WouldWait) as error:
            worker.prefill(A, wait=False)
        worker.tick(error.value.deadline)
    assert serve(worker, [*A[:16], 7]) == (16, 0)
    assert serve(worker, A) == (24, 16)


def test_decode_waits_for_a_free_block():
    worker = worker_of(4)
    serve(worker, A[:16])
    request = worker.prefill(B[:8])
    at = worker.now
    request.decode(8)
    assert worker.now > at
    assert (len(request), len(request.blocks), worker.manager.num_active_block_refs) == (16, 4, 4)


def test_a_decode_that_does_not_fit_generates_no_token():
    worker = worker_of(4)
    request = worker.prefill(B[:16])
    with pytest.raises(OutOfBlocks) as error:
        request.decode(1)
    assert (error.value.requested, error.value.available, len(request)) == (1, 0, 16)


def test_a_request_larger_than_the_free_capacity_is_refused_without_evictions():
    worker = worker_of(8)
    serve(worker, A)
    request = worker.prefill(A[:8])
    before = len(sink_of(worker).events)
    with pytest.raises(OutOfBlocks) as error:
        worker.prefill([*B, *C])
    assert (error.value.requested, error.value.available) == (12, 6)
    assert before == len(sink_of(worker).events)
    request.finish()


def test_a_preempted_request_waits_for_room_and_is_not_swapped_in():
    worker = worker_of()
    request = worker.prefill(A)
    request.preempt()
    serve(worker, B)
    request.resume()
    assert (request.status, request.onboarded_tokens) == ("running", 0)
    request.finish()


def test_each_chunk_of_a_prefill_waits_for_its_own_room():
    worker = worker_of(chunk=8)
    serve(worker, A)
    assert serve(worker, B) == (0, 0)
    assert worker.cached_tokens(B) == 24


def lost_worker():
    """Return a worker whose host is smaller than one batch; the fixture's settings would refuse this."""

    def make(sink):
        host = HostOffload(1, block_bytes=1_000_000)
        return LogicalManager(
            backend="lineage", eviction=LineagePolicy(), num_blocks=8, block_size=SIZE, sink=sink, offload=host
        )

    return KvWorker(make, sink=CapturingSink())


@pytest.mark.parametrize("wait", [True, False])
def test_lost_slots_raise_at_once_instead_of_waiting_forever(wait):
    worker = lost_worker()
    serve(worker, A)
    with pytest.raises(SlotsLost, match=r"^6 blocks of the device are quarantined for ever: the host could not hold"):
        worker.prefill(B, wait=wait)
    assert (worker.requests, worker.manager.num_active_block_refs) == ([], 0)


def test_tokens_generated_before_slots_run_out_are_kept():
    worker = lost_worker()
    serve(worker, A)
    with pytest.raises(SlotsLost):
        worker.prefill(B)
    request = worker.prefill(B[:6])  # in the two remaining slots
    with pytest.raises(SlotsLost):
        request.decode([7] * 6)
    assert (len(request), len(request.blocks), request.status) == (8, 2, "running")


def test_a_request_that_cannot_resume_for_lost_slots_stays_preempted():
    worker = lost_worker()
    request = worker.prefill(A)
    request.preempt()
    with pytest.raises(SlotsLost):
        worker.prefill(B)
    with pytest.raises(SlotsLost):
        request.resume()
    assert (request.status, len(request), worker.manager.num_active_block_refs) == ("preempted", 24, 0)
    request.finish()


def test_the_error_for_slots_lost_to_the_pins_of_a_swap_in_names_that_cause():
    worker = worker_of(6, host=1)
    serve(worker, A[:4])
    serve(worker, B)
    with pytest.raises(SlotsLost) as error:
        worker.prefill(A[:4])
    assert str(error.value).startswith(
        "6 blocks of the device are quarantined for ever: the host could not hold a batch whole while blocks that come "
        "back to the device are pinned there, and lost it; a host of 12 blocks, twice the device, has room for both. "
        "Nothing is under way in <HostOffload"
    )
    assert (worker.manager.num_active_blocks, worker.manager.num_outside) == (6, 6)


def test_clear_during_transfers_empties_both_tiers():
    worker = worker_of()
    serve(worker, A)
    with pytest.raises(WouldWait):
        worker.prefill(B, wait=False)
    assert worker.clear()
    assert (worker.cached_tokens(A), worker.cached_tokens(A, HOST)) == (0, 0)
    assert (worker.manager.num_active_blocks, worker.manager.offload_deadline()) == (0, None)
    assert serve(worker, A) == (0, 0)


def test_a_restart_drops_active_transfers_and_does_not_reset_time():
    worker = worker_of()
    serve(worker, A)
    serve(worker, B)
    now = worker.now
    worker.restart()
    assert (now, 0, 0) == (worker.now, worker.cached_tokens(A), worker.cached_tokens(A, HOST))
    serve(worker, A)
    assert worker.cached_tokens(A) == 24


def test_serve_counts_blocks_stored_on_the_device():
    worker = worker_of()
    worker.serve(A)
    assert len(worker.serve(B).stored_blocks) == 6


def test_time_cannot_go_backwards():
    worker = worker_of()
    worker.tick(2)
    with pytest.raises(ValueError) as error:
        worker.tick(1.5)
    assert (str(error.value), worker.now) == ("tick: time does not go backwards; it is 2.0 ms, got 1.5", 2.0)
    worker.tick(2.0)


@pytest.mark.parametrize("now", [math.nan, math.inf, -1, None])
def test_an_invalid_time_is_refused(now):
    worker = worker_of()
    with pytest.raises(ValueError) as error:
        worker.tick(now)
    assert str(error.value) == f"a time must be a finite number of at least 0 (ms), got {now!r}"


def test_a_worker_can_tick_to_any_finite_time():
    worker = worker_of()
    serve(worker, A)
    serve(worker, B)
    worker.tick(1.7e308)
    assert (worker.now, worker.manager.offload.now) == (1.7e308, 1.7e308)


def test_a_worker_without_tiers_refuses_ticks_and_has_no_host_blocks():
    worker = plain_worker()
    with pytest.raises(ValueError) as error:
        worker.tick(1.0)
    assert (
        str(error.value) == "tick: <KvWorker 0 rank 0 lineage> has no tiers below the device, so no time passes in it"
    )
    assert (worker.now, worker.cached_tokens(A, HOST)) == (0.0, 0)
    worker.manager.tick(1.0)


def test_an_unknown_tier_is_refused():
    with pytest.raises(ValueError) as error:
        worker_of().cached_tokens(A, "hots")
    assert (
        str(error.value)
        == "unknown tier 'hots'; did you mean 'host'? known: device, host_pinned, disk, external, host, g1, g2, g3, g4"
    )


STEPS = st.lists(
    st.tuples(st.sampled_from(["prefill", "finish", "decode", "tick"]), st.integers(0, 5), st.integers(1, 24)),
    max_size=30,
)


@pytest.mark.parametrize("backend", ["lineage", "lru", "multi_lru"])
@given(STEPS, st.integers(6, 12), st.integers(1, 40))
def test_random_requests_conserve_slots_and_blocks(backend, steps, num_blocks, host):
    worker = worker_of(num_blocks, backend, host=host)
    manager, sink = worker.manager, sink_of(worker)
    held = {StorageTier.DEVICE: set(), HOST: set()}
    for what, which, length in steps:
        try:
            if what == "prefill":
                worker.prefill([which] * length)
            elif what == "tick":
                worker.tick(worker.now + which)
            elif worker.requests:
                request = worker.requests[which % len(worker.requests)]
                request.finish() if what == "finish" else request.decode(which)
        except OutOfBlocks:
            pass
        except SlotsLost:  # because of pins: the batch fits the host
            assert manager.offload.lost_to_pins
            return
        for event in sink.router_events:
            blocks, data = held[event.storage_tier], event.event.data
            if isinstance(data, Stored):
                blocks.update(data.block_hashes)
            elif isinstance(data, Removed):
                blocks.difference_update(data.block_hashes)
        sink.take()
        assert held[StorageTier.DEVICE] == set(manager.resident())
        assert held[HOST] == {block for block in manager.resident(HOST) if block not in worker.unpublished(HOST)}
        assert manager.num_active_blocks == len(manager.active_blocks) + manager.num_outside
        for request in worker.requests:
            assert len(request.blocks) == -(-len(request) // SIZE)
            assert all(manager.references(block) for block in request.blocks)
    for request in list(worker.requests):
        request.finish()
    while (deadline := manager.offload_deadline()) is not None:
        worker.tick(max(deadline, worker.now))
    assert (manager.num_active_blocks, manager.offload.lost_blocks) == (0, 0)


def test_a_trace_reuses_more_with_a_host_and_ends_in_sync(traces_dir):
    """The first requests of the published conversation trace; a block is 512 tokens, 5.9 ms on the link."""
    requests = list(read_mooncake(traces_dir / "mooncake_conversation_trace.jsonl"))[:700]
    reused = {}
    for name, host in (("none", 1), ("host", 4000)):
        tiers = {"tiers": {"host": host}} if name == "host" else {}
        make = partial(create_manager, num_blocks=1000, block_size=MOONCAKE_BLOCK_SIZE, **tiers)
        sink = CapturingSink()
        worker = KvWorker(lambda sink, make=make: make(sink=sink), sink=sink)
        reused[name] = sum(serve(worker, request.prompt())[0] for request in requests) // MOONCAKE_BLOCK_SIZE
        held = {StorageTier.DEVICE: set(), HOST: set()}
        for event in sink.router_events:
            blocks, data = held[event.storage_tier], event.event.data
            if isinstance(data, Stored):
                assert blocks.isdisjoint(data.block_hashes)
                blocks.update(data.block_hashes)
            else:
                assert blocks.issuperset(data.block_hashes)
                blocks.difference_update(data.block_hashes)
        for tier, blocks in held.items():
            assert blocks == set(worker.manager.resident(tier))
    assert reused == {"none": 738, "host": 1896}
