"""Workers and engines over SGLang's cache of a hybrid model: what they request, hold and free."""

from random import Random

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from players import player

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    MockEngine,
    MockEngineArgs,
    OutOfBlocks,
    Removed,
    Stored,
    create_manager,
)
from pytest_kvmock.engines import KvWorker
from pytest_kvmock.engines.sglang.geometry import Geometry
from pytest_kvmock.engines.sglang.hybrid_cache import HybridCacheManager
from pytest_kvmock.engines.sglang.hybrid_radix_driver import HybridRadixDriver

is_complete = player("engines/sglang/play_hybrid.py").is_complete


def new_worker(num_blocks=64, block_size=4, *, prefix_caching=True, chunk=None, **geometry):
    sink = CapturingSink()

    def make(outlet):
        return HybridCacheManager(
            geometry=Geometry(**geometry), num_blocks=num_blocks, block_size=block_size, sink=outlet
        )

    options = {"prefix_caching": prefix_caching, "chunk": chunk, "rng": Random(0), "driver": HybridRadixDriver}
    worker = KvWorker(make, sink=sink, **options)
    worker.captured = sink
    return worker


def test_a_hybrid_radix_driver_refuses_a_plain_radix_cache():
    with pytest.raises(
        ValueError, match=r"^a HybridRadixDriver drives a HybridCacheManager, got <RadixCacheManager sglang: "
    ):
        HybridRadixDriver(create_manager("sglang", num_blocks=1), True, Random(0))


def test_a_prompt_larger_than_the_window_pool_is_computed_in_chunks():
    worker = new_worker(window=4, window_ratio=0.25)
    request = worker.prefill(range(60 * 4))  # 60 pages, and 16 of windows
    assert worker.manager.num_active_blocks == 60
    request.finish()
    assert worker.cached_tokens(range(60 * 4)) == 59 * 4


def test_a_request_without_room_for_its_window_is_refused_and_holds_no_page():
    worker = new_worker(window=16, window_ratio=0.25)
    first = worker.prefill(range(12 * 4))
    before = worker.manager.window.free
    # 8 pages of windows are missing.
    with pytest.raises(OutOfBlocks, match=r"^60 blocks are needed and 52 are available"):
        worker.prefill(range(1000, 1000 + 25 * 4))
    assert (before, 1) == (worker.manager.window.free, len(worker.manager.requests))
    assert is_complete(worker.manager)
    first.finish()


def test_a_request_without_free_state_slots_is_refused():
    worker = new_worker(states=9, state_grid=4, state_interval=8)
    requests = [worker.prefill([number] * 9) for number in (1, 2)]
    with pytest.raises(OutOfBlocks):
        worker.prefill([3] * 9)
    requests.pop().finish()
    requests.append(worker.prefill([3] * 9))
    assert is_complete(worker.manager)


def test_windows_slide_while_tokens_are_generated():
    worker = new_worker(window=4, window_ratio=0.5, window_interval=8)
    request = worker.prefill(range(8))
    request.decode(50 * 4)  # 50 pages, of 32 of windows
    state = next(iter(worker.manager.requests))
    assert state.allocated - state.dead <= 4
    assert is_complete(worker.manager)
    request.finish()
    assert worker.manager.num_active_blocks == 0


def test_without_prefix_caching_no_event_is_published_and_windows_still_slide():
    worker = new_worker(window=4, window_ratio=0.25, prefix_caching=False)
    request = worker.prefill(range(60 * 4))
    assert worker.manager.window.capacity - worker.manager.window.free <= 2
    request.finish()
    assert (worker.captured.take(), worker.manager.resident()) == ([], [])


def test_evictions_for_state_slots_are_published_before_the_stored_of_the_prefill():
    worker = new_worker(states=11, state_grid=4, state_interval=8)
    for number in range(5):
        worker.serve([number] * 9)
    running = [worker.prefill([number] * 3) for number in (6, 7)]  # each has three slots
    assert (worker.manager.states.free, worker.manager.states.evictable) == (0, 5)
    worker.captured.take()
    request = worker.prefill([*[4] * 9, *[5] * 9])
    assert request.cached_tokens == 8
    # One for the copy of the hit state, two spares, and one for the state at the end of the prompt.
    assert [(Removed, 2), (Removed, 4), (Removed, 2), (Stored, 2)] == [
        (type(event.data), len(event.data.block_hashes)) for event in worker.captured.take()
    ]
    for each in (*running, request):
        each.finish()
    assert is_complete(worker.manager)


# ---------------------------------------------------------------------------------------------- any traffic

GEOMETRIES = st.sampled_from(
    [
        {"window": 3, "window_ratio": 0.5, "window_interval": 4},
        {"window": 9, "window_ratio": 0.4, "window_gates": False},
        {"window": 8, "window_ratio": 0.8, "release_window": True, "window_interval": 1},
        {"states": 8, "state_grid": 4, "state_interval": 8},
        {"states": 30, "state_grid": 2, "state_interval": 4, "states_per_path": 1},
        {"states": 12, "state_grid": 4, "state_interval": 4, "window": 4, "window_ratio": 0.6, "window_interval": 4},
    ]
)


@settings(max_examples=examples(80))
@given(
    geometry=GEOMETRIES,
    num_blocks=st.sampled_from([12, 40]),
    chunk=st.sampled_from([None, None, 3, 12]),
    prefix_caching=st.sampled_from([True, True, False]),
    seed=st.integers(0, 2**32),
)
def test_any_requests_conserve_pages_window_pages_and_state_slots(geometry, num_blocks, chunk, prefix_caching, seed):
    rng = Random(seed)
    worker = new_worker(num_blocks, chunk=chunk, prefix_caching=prefix_caching, **geometry)
    shared = [[rng.randrange(9) for _ in range(60)] for _ in range(2)]
    for _ in range(30):
        try:
            kind = rng.choice(["prefill", "prefill", "decode", "decode", "finish", "preempt", "resume"])
            if kind == "prefill":
                tokens = rng.choice(shared)[: rng.randrange(1, 60)] + [9] * rng.randrange(5)
                usable = worker.cached_tokens(tokens)
                assert usable == worker.prefill(tokens).cached_tokens
            elif worker.requests:
                request = rng.choice(worker.requests)
                if (kind == "resume") == (request.status == "preempted"):
                    getattr(request, kind)(*([rng.randrange(1, 20)] if kind == "decode" else []))
        except OutOfBlocks:
            pass  # the state is unchanged
        assert is_complete(worker.manager)
    for request in list(worker.requests):
        request.finish()
    manager = worker.manager
    assert (manager.num_active_blocks, manager.num_active_block_refs) == (0, 0)
    assert worker.clear()
    assert all(part is None or part.free == part.capacity for part in (manager.window, manager.states))


@pytest.mark.parametrize(
    "backend", [name for name, spec in BACKENDS.items() if spec.group and spec.scheduler == "sglang"]
)
def test_passes_in_one_go_give_the_times_and_events_of_passes_one_by_one(backend):
    ends = []
    for quiet in (True, False):
        sink = CapturingSink()
        engine = MockEngine(
            MockEngineArgs(engine_type="sglang", block_size=4, num_gpu_blocks=48), backend=backend, sink=sink, seed=3
        )
        if not quiet:
            engine.worker._driver.quiet_passes = lambda requests: 0
        rng = Random(5)
        requests = [engine.submit([*range(20), *[rng.randrange(9)] * rng.randrange(1, 30)], 25) for _ in range(12)]
        engine.run()
        assert is_complete(engine.worker.manager)
        ends.append(([request.token_ms for request in requests], [event.data for event in sink.events]))
    assert ends[0] == ends[1]
    assert any(isinstance(data, Removed) for data in ends[0][1])
