"""SGLang's cache of a hybrid model: promised and usable pages, models and their sizes, refused inputs."""

import pytest

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    Cleared,
    EngineProfile,
    Removed,
    RouterHarness,
    Stored,
    create_manager,
)
from pytest_kvmock.engines import KvWorker
from pytest_kvmock.engines.backends import HYBRID
from pytest_kvmock.engines.sglang.hybrid_cache import HybridCacheManager
from pytest_kvmock.engines.sglang.models import MODELS
from pytest_kvmock.engines.sglang.radix_cache import RadixCacheManager

SIZE = 4
S = [*range(16)]
A, B, C = (S + [base + at for at in range(8)] for base in (100, 200, 300))
"""Prompts that share 16 tokens."""


def new_worker(num_blocks=32, **options):
    sink = CapturingSink()

    def make(outlet):
        return create_manager("sglang", num_blocks=num_blocks, block_size=SIZE, sink=outlet, **options)

    worker = KvWorker(make, sink=sink, driver=BACKENDS["sglang"].driver)
    worker.captured = sink
    return worker


def events(worker):
    return [(type(e.data), len(getattr(e.data, "block_hashes", ()))) for e in worker.captured.take()]


def promised_and_usable(worker, prompt):
    """Return the tokens of a prompt, except its last, that full attention has, and those that a request can use."""
    request = worker._driver.open(worker.accept([*prompt, 0]), to_look=True)
    return worker.manager.promised(request) * SIZE, worker.manager.lookup(request) * SIZE


def test_the_second_request_with_a_prefix_reuses_nothing_and_the_third_hits_its_window():
    worker = new_worker(window=8, window_ratio=1)
    one = worker.prefill(A)
    assert [(Cleared, 0), (Stored, 6)] == events(worker)
    assert [(len(node.names) * SIZE, node.window.there) for node in worker.manager._tree.nodes()] == [
        (12, False),
        (4, True),
        (8, True),
    ]
    assert promised_and_usable(worker, B) == (16, 0)
    two = worker.prefill(B)
    assert (two.cached_tokens, events(worker)) == (0, [])  # its own part is not published yet
    assert promised_and_usable(worker, B) == (16, 16)
    two.finish()
    assert [(Stored, 2)] == events(worker)
    one.finish()
    assert [promised_and_usable(worker, prompt) for prompt in (C, A)] == [(16, 16), (24, 24)]


def test_evicting_windows_removes_whole_leaves_and_keeps_unusable_prefixes_published():
    worker = new_worker(window=8, window_ratio=1)
    for prompt in (A, B):
        worker.serve(prompt)
    events(worker)
    assert worker.manager.evict(0, 100) == (16, 28, 0)
    assert [(Removed, 4)] == events(worker)
    assert promised_and_usable(worker, A) == (16, 0)


def test_states_lie_on_a_grid_and_output_is_cached_up_to_the_last_interval():
    worker = new_worker(states=24, state_grid=4, state_interval=8)
    request = worker.prefill([*A, 7, 8])
    assert [(Cleared, 0), (Stored, 6)] == events(worker)
    request.decode(9)  # 35 tokens; the last state is at token 32
    request.finish()
    assert [(Stored, 2)] == events(worker)
    assert promised_and_usable(worker, B) == (16, 0)
    worker.serve(B)  # its state is saved at the branch, and its own part is never published
    assert events(worker) == []
    assert promised_and_usable(worker, C) == (16, 16)


def test_a_worker_reports_only_usable_tokens_while_events_promise_more():
    with RouterHarness(EngineProfile(block_size=SIZE, num_blocks=64), "sglang_gpt_oss") as kv:
        worker, prompt = kv.worker(0), kv.prompt(24)
        worker.serve(prompt)
        other = kv.prompt(4, after=prompt.tokens[: 8 * SIZE])
        assert (kv.overlap(other), worker.cached_tokens(other)) == ({0: 8}, 0)
        worker.serve(other)
        assert (
            kv.overlap(other),
            worker.cached_tokens(kv.prompt(1, after=other.tokens[: 8 * SIZE])),
        ) == ({0: 12}, 8 * SIZE)


# -------------------------------------------------------------------------------------------------- models


def test_the_window_and_grid_of_a_model_scale_with_the_block_size():
    def sizes(name, block_size):
        geometry = create_manager(name, num_blocks=1000, block_size=block_size).geometry
        return (geometry.window, geometry.state_grid if geometry.states else None)

    assert {name: [sizes(name, block_size) for block_size in (4, 16)] for name in MODELS} == {
        "sglang_gpt_oss": [(31, None), (127, None)],
        "sglang_gemma4": [(255, None), (1023, None)],
        "sglang_llama4": [(2048, None), (8192, None)],
        "sglang_qwen3_next": [(None, 4), (None, 16)],
        "sglang_kimi_linear": [(None, 4), (None, 16)],
        "sglang_deepseek_v4": [(2, None), (8, None)],
    }
    assert [name for name, spec in BACKENDS.items() if spec.group == HYBRID and spec.scheduler == "sglang"] == [*MODELS]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_its_original_sizes_at_its_own_page_size(name):
    model = MODELS[name]
    manager = create_manager(name, num_blocks=1000, block_size=model.page)
    geometry = manager.geometry
    if model.grid is None:
        window = model.window - model.is_exclusive
        assert (window, 128) == (geometry.window, geometry.window_interval)
        assert max(1000 * model.ratio, -(-window // model.page) + 1) == manager.window.capacity
    else:
        assert (geometry.state_grid, geometry.state_interval, geometry.states) == (64, 256, 64)


def test_a_small_cache_has_at_least_one_window():
    assert [create_manager("sglang_gpt_oss", num_blocks=blocks).window.capacity for blocks in (4, 16, 35)] == [
        4,
        16,
        28,
    ]
    assert [create_manager("sglang_deepseek_v4", num_blocks=blocks).window.capacity for blocks in (100, 1000)] == [
        16,
        100,
    ]


def test_an_unsupported_block_size_of_a_model_is_refused_with_the_supported_ones():
    with pytest.raises(
        ValueError,
        match=r"^backend 'sglang_deepseek_v4' cannot be scaled to block_size 3; it can be scaled to multiples of 2, "
        r"and its own pages have 256 tokens$",
    ):
        create_manager("sglang_deepseek_v4", num_blocks=8, block_size=3)


# ------------------------------------------------------------------------------------------------- refusals

REFUSED = {
    "window must be an integer of at least 1, or None, got 0": {"window": 0},
    "window_ratio=0.5 has no effect without window=": {"window_ratio": 0.5},
    "window_ratio must be a number above 0 and at most 1, got 0": {"window": 4, "window_ratio": 0},
    "window_ratio must be a number above 0 and at most 1, got 1.5": {"window": 4, "window_ratio": 1.5},
    "a window of 127 tokens needs 33 blocks of 4, and window_ratio 0.1 of 64 blocks is 6": {
        "window": 127,
        "window_ratio": 0.1,
    },
    "window_gates must be True or False, got 1": {"window": 4, "window_gates": 1},
    "states must be an integer of at least 1, or None, got 0": {"states": 0},
    "states must be at least 5, the slots of one request; got 4": {"states": 4},
    "state_grid=64 has no effect without states=": {"state_grid": 64},
    "state_interval=256 has no effect without states=": {"window": 8, "state_interval": 256},
    "state_grid must be a multiple of block_size 4, or divide it; got 6": {"states": 8, "state_grid": 6},
    "state_interval must be a multiple of the grid, 64 tokens, got 100": {"states": 8, "state_interval": 100},
    "state_strategy 'no_buffer' is for a block_size of 1, got 4": {"states": 8, "state_strategy": "no_buffer"},
    "state_strategy must be 'extra_buffer' or 'no_buffer', got 'lazy'": {"states": 8, "state_strategy": "lazy"},
    "states_per_path must be an integer of at least 0, or None, got -1": {"states": 8, "states_per_path": -1},
    "policy must be lru, lfu or slru for a hybrid model or with speculative, got 'priority'": {
        "states": 8,
        "policy": "priority",
    },
    "policy must be one of lru, lfu, fifo, mru, filo, priority, slru, got 'tlru'": {"window": 8, "policy": "tlru"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_impossible_geometry_is_refused(message):
    with pytest.raises(ValueError) as raised:
        create_manager("sglang", num_blocks=64, block_size=4, **REFUSED[message])
    assert str(raised.value) == message


def test_a_window_or_states_select_the_hybrid_manager():
    assert isinstance(create_manager("sglang", num_blocks=8, window=None, states=None), RadixCacheManager)
    assert isinstance(create_manager("sglang", num_blocks=64, window=8), HybridCacheManager)
    variant = BACKENDS["sglang"].variant("mine", window=8, window_ratio=1)
    assert (variant.traits.promises_more, create_manager(variant, num_blocks=8).backend) == (True, "mine")
    assert not BACKENDS["sglang"].traits.promises_more
