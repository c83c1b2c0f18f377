"""A vLLM worker with native offload, and an engine over one: stores and their times, loads, and waits."""

import warnings
from collections import Counter
from functools import partial
from random import Random

import pytest

from pytest_kvmock import Cleared, Removed, StorageTier, Stored, create_manager
from pytest_kvmock.engines import KvWorker, MockEngineArgs, WouldWait, backend_spec
from pytest_kvmock.fleets import MockEngine
from pytest_kvmock.values import Located

SIZE = 4
HOST = StorageTier.HOST_PINNED
A, B = list(range(100, 118)), list(range(200, 240))


def worker_of(num_blocks=12, *, seed=1, chunk_tokens=None, **tiers):
    """Return a worker whose blocks take a millisecond each on either link, and the list of its events."""
    tiers = {"host": 16, "gbps": 1.0, "bytes_per_token": 250_000, **tiers}
    make = partial(create_manager, "vllm", num_blocks=num_blocks, block_size=SIZE, tiers=tiers)
    events = []
    driver = backend_spec("vllm").driver
    worker = KvWorker(
        lambda sink: make(sink=sink), sink=events.append, rng=Random(seed), driver=driver, chunk=chunk_tokens
    )
    return worker, events


def taken(events):
    """Return the events so far in a short form, and clear them."""
    short = [
        ("host" if each.storage_tier is HOST else "device", type(each.event.data), len(_hashes(each)))
        for each in events
    ]
    events.clear()
    return short


def _hashes(event):
    return getattr(event.event.data, "block_hashes", ())


def serve(worker, prompt):
    with worker.prefill(prompt) as request:
        return request.cached_tokens, request.onboarded_tokens


def test_computed_blocks_are_copied_to_the_host_when_their_transfer_ends():
    worker, events = worker_of()
    serve(worker, A)
    assert [("device", Stored, 4)] == taken(events)
    worker.tick(3.9)
    assert taken(events) == []
    assert worker.cached_tokens(A, HOST) == 0
    worker.tick(4.0)
    assert [("host", Located, 1)] * 4 == taken(events)
    assert worker.cached_tokens(A) == 16  # a copy, not a move
    assert len(worker.manager.resident(HOST)) * SIZE == 16


def test_a_load_from_the_host_publishes_one_stored_of_the_device():
    worker, events = worker_of()
    serve(worker, A)
    worker.tick(10.0)
    serve(worker, B)
    worker.tick(30.0)
    assert (worker.cached_tokens(A), worker.cached_tokens(A, HOST)) == (8, 8)
    events.clear()
    assert serve(worker, A) == (16, 8)
    assert worker.now == 32.0
    assert [("device", Stored, 2)] == [each for each in taken(events) if each[1] is not Removed]
    assert len(worker.manager.resident(HOST)) == 14  # loaded blocks stay on the host


def test_a_fully_cached_prompt_of_whole_blocks_loads_its_last_block_from_the_host():
    worker, events = worker_of()
    serve(worker, A[:16])
    worker.tick(10.0)
    events.clear()
    assert serve(worker, A[:16]) == (12, 3)
    assert worker.now == 11.0
    assert [("device", Stored, 1)] == taken(events)
    assert [count for count in Counter(worker.manager.resident()).values() if count > 1] == [2]


def test_a_request_that_does_not_wait_gets_a_deadline_and_hits_at_the_next_attempt():
    worker, events = worker_of()
    serve(worker, A)
    worker.tick(10.0)
    serve(worker, B)
    worker.tick(30.0)
    with pytest.raises(WouldWait, match="2 blocks are on their way back from the host") as error:
        worker.prefill(A, wait=False)
    assert error.value.deadline == 32.0
    assert worker.requests == []
    events.clear()
    with pytest.raises(WouldWait):
        worker.prefill(A, wait=False)
    worker.tick(error.value.deadline)
    assert [("device", Stored, 2)] == taken(events)
    with worker.prefill(A, wait=False) as request:
        assert (request.cached_tokens, request.onboarded_tokens) == (16, 8)
    assert worker.manager.num_free_blocks == 12


def test_a_request_waits_for_the_copy_of_its_prefix_to_the_host():
    worker, _ = worker_of()
    serve(worker, A)
    with pytest.raises(WouldWait, match="its leading blocks are being copied") as error:
        worker.prefill(A[:16], wait=False)
    assert error.value.deadline == 4.0
    assert serve(worker, A[:16]) == (12, 3)


def test_a_request_that_reuses_blocks_under_copy_waits_for_the_copy():
    worker, events = worker_of(num_blocks=5)
    serve(worker, A)
    worker.tick(0.0)  # the copy starts
    events.clear()
    serve(worker, list(range(300, 316)))
    assert worker.now == 4.0
    kinds = [(tier, kind) for tier, kind, _ in taken(events)]
    assert ("host", Located) in kinds
    assert kinds.index(("device", Stored)) < kinds.index(("host", Located))


def test_output_is_stored_on_the_host_unless_prompt_only():
    for prompt_only, blocks in ((True, 4), (False, 5)):
        worker, _ = worker_of(prompt_only=prompt_only)
        worker.serve(A, 5)
        worker.tick(50.0)
        assert blocks == len(worker.manager.resident(HOST)), prompt_only


def test_a_chunk_is_stored_when_it_was_offered_store_threshold_times():
    worker, _ = worker_of(store_threshold=2)
    serve(worker, A)
    worker.tick(10.0)
    assert worker.manager.resident(HOST) == []
    serve(worker, A)
    worker.tick(20.0)
    assert len(worker.manager.resident(HOST)) == 4


def test_a_chunked_prefill_starts_behind_the_hit_on_the_device():
    worker, _ = worker_of(chunk_tokens=8)
    serve(worker, A)
    worker.tick(10.0)
    other = A[:8] + B[:10]
    assert serve(worker, other) == (8, 0)
    worker.tick(20.0)
    assert len(worker.manager.resident(HOST)) == 6


def test_max_offload_tokens_and_max_load_tokens_limit_stores_and_loads():
    worker, _ = worker_of(max_offload_tokens=11)
    serve(worker, A)
    worker.tick(10.0)
    assert len(worker.manager.resident(HOST)) == 2
    for limit, loaded in ((7, 4), (0, 0), (100, 8)):
        worker, _ = worker_of(max_load_tokens=limit)
        serve(worker, A)
        worker.tick(10.0)
        serve(worker, B)
        worker.tick(30.0)
        assert (8 + loaded, loaded) == serve(worker, A)


def test_async_scheduling_reports_finished_transfers_one_step_later():
    located = [("host", Located, 1)] * 4
    for is_async in (False, True):
        worker, events = worker_of(async_scheduling=is_async)
        serve(worker, A)
        worker.tick(1.0)
        events.clear()
        with worker.prefill(B):  # it takes blocks that are being copied, and waits for the copies
            assert worker.now == 4.0
            assert ([] if is_async else located) == [each for each in taken(events) if each[0] == "host"]
            assert (0 if is_async else 4) == len(worker.manager.resident(HOST))
            worker.tick(4.0)
            assert (located if is_async else []) == taken(events)
        worker.tick(50.0)
        assert len(worker.manager.resident(HOST)) == 14


def test_self_describing_events_have_all_blocks_of_a_chunk_with_tokens_and_parent():
    worker, events = worker_of(chunk=2, self_describing=True)
    serve(worker, A)
    names = _hashes(events[0])
    worker.tick(10.0)
    stored = {_hashes(each): each for each in events if each.storage_tier is HOST}
    assert {names[:2], names[2:]} == set(stored)
    second = stored[names[2:]]
    assert names[1] == second.event.data.parent_hash
    assert [tuple(A[8:12]), tuple(A[12:16])] == [tuple(each) for each in second.token_ids]
    assert second.extra == {"extra_keys": None}
    assert Counter(names) == Counter(worker.manager.resident(HOST))


def test_a_location_names_the_last_block_of_its_chunk():
    worker, events = worker_of(chunk=2)
    serve(worker, A)
    names = _hashes(events[0])
    worker.tick(10.0)
    assert {names[1], names[3]} == {name for each in events if each.storage_tier is HOST for name in _hashes(each)}


def test_a_cleared_covers_only_the_device_and_clearing_the_host_publishes_nothing():
    worker, events = worker_of()
    serve(worker, A)
    worker.tick(10.0)
    events.clear()
    assert worker.clear()
    assert not worker.traits.clears_below
    assert [("device", Cleared, 0)] == taken(events)
    assert worker.cached_tokens(A, HOST) == 16
    worker.cancel_transfers()
    assert taken(events) == []
    assert worker.cached_tokens(A, HOST) == 0


def test_the_seed_sets_the_order_of_the_chunks_of_a_transfer():
    def order(seed):
        worker, events = worker_of(num_blocks=12, seed=seed)
        serve(worker, B)
        names = _hashes(events[0])
        worker.tick(20.0)
        return [names.index(*_hashes(each)) for each in events if each.storage_tier is HOST]

    orders = [order(seed) for seed in range(4)]
    assert orders == [order(seed) for seed in range(4)]
    assert {tuple(range(10))} == {tuple(sorted(each)) for each in orders}
    assert len({*map(tuple, orders)}) == 4
    assert all(each != sorted(each) for each in orders)  # children before parents


def test_a_host_smaller_than_the_chunks_of_a_step_warns_once():
    worker, _ = worker_of(host=4)
    with pytest.warns(UserWarning, match="a step offered 10 chunks, and the host has room for 4") as found:
        serve(worker, B)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        serve(worker, B)
    assert len(found) == 1
    worker.tick(50.0)
    assert worker.manager.resident(HOST) == []
    worker, _ = worker_of(host=4, seed=2, chunk_tokens=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        serve(worker, A)


def test_a_restart_empties_the_host():
    worker, _ = worker_of()
    serve(worker, A)
    worker.tick(10.0)
    worker.restart()
    assert worker.now == 10.0
    assert worker.cached_tokens(A, HOST) == 0
    assert serve(worker, A) == (0, 0)


def test_a_preempted_request_loads_its_stored_blocks():
    worker, _ = worker_of()
    request = worker.prefill(A)
    worker.tick(10.0)
    request.preempt()
    worker.serve(B)
    request.resume()
    assert (request.cached_tokens, request.onboarded_tokens) == (16, 8)
    request.finish()


# ------------------------------------------------------------------------------------------------------- engines


def engine_of(num_blocks=12, **tiers):
    worker, events = worker_of(num_blocks, **tiers)
    args = MockEngineArgs(num_gpu_blocks=num_blocks, block_size=SIZE, max_num_seqs=8, max_num_batched_tokens=64)
    return MockEngine(args, worker=worker), worker, events


def test_an_engine_parks_a_request_while_its_prefix_is_loaded_from_the_host():
    engine, worker, events = engine_of()
    engine.submit(A, 2)
    engine.run()
    engine.submit(B, 2)
    engine.run()
    events.clear()
    again, other = engine.submit(A, 2), engine.submit([1, 2, 3], 2)
    engine.run()
    assert again.onboarded_tokens == 12
    assert again.reused_tokens == 16
    assert other.token_ms[0] < again.token_ms[0]  # it does not wait
    assert [again, other] == [each for each in engine.requests if each.status == "finished"][-2:]
    assert worker.manager.num_free_blocks == 12


def test_an_idle_engine_continues_to_step_until_all_transfers_are_reported():
    engine, worker, _ = engine_of()
    engine.submit(A, 1)
    engine.run()
    engine.run(until_ms=engine.now_ms + 50.0)
    assert len(worker.manager.resident(HOST)) == 4


def test_an_aborted_request_frees_its_blocks_when_its_load_ends():
    engine, worker, _ = engine_of()
    engine.submit(A, 1)
    engine.run()
    engine.submit(B, 1)
    engine.run()
    engine.run(until_ms=engine.now_ms + 50.0)
    request = engine.submit(A, 1)
    engine.run(until_ms=engine.now_ms + 0.5)
    assert request in engine.inside.scheduler.parked
    engine.abort(request)
    assert worker.manager.num_free_blocks < 12
    engine.run(until_ms=engine.now_ms + 50.0)
    assert worker.manager.num_free_blocks == 12


def test_the_dynamo_host_argument_is_refused_over_vllm():
    with pytest.raises(ValueError, match="num_g2_blocks=8 is the host of Dynamo's block managers, and backend 'vllm'"):
        MockEngine(
            MockEngineArgs(num_gpu_blocks=8, block_size=4, num_g2_blocks=8, kv_bytes_per_token=1), backend="vllm"
        )
