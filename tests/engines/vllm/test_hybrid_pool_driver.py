"""Workers and engines over vLLM's cache groups: requests that fit are admitted, and quiet steps omit nothing."""

from functools import partial
from random import Random
from types import SimpleNamespace

import pytest

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    EngineProfile,
    KvWorker,
    MockEngine,
    MockEngineArgs,
    OutOfBlocks,
    Prompt,
    RouterHarness,
    Stored,
    create_manager,
)
from pytest_kvmock.engines import CacheGroup
from pytest_kvmock.engines.vllm.hybrid_pool_driver import HybridPoolDriver

FULL = CacheGroup("full_attention", block_size=4)
GEOMETRIES = {
    "gpt_oss": ((CacheGroup("sliding_window", block_size=4, window=10), FULL), {}),
    "gemma4": (
        (
            CacheGroup("sliding_window", block_size=4, window=13),
            CacheGroup("sliding_window", block_size=4, window=13),
            CacheGroup("full_attention", block_size=8),
        ),
        {"retention": None},
    ),
    "qwen3_next": ((CacheGroup("mamba", block_size=4), CacheGroup("mamba", block_size=4), FULL), {}),
    "kimi_k3": (
        (CacheGroup("mamba", block_size=8, checkpoint=4), CacheGroup("mla_attention", block_size=8)),
        {"match_unit": 4, "retention": 16},
    ),
    "deepseek_v4": (
        (
            CacheGroup("sliding_window_mla", block_size=4, window=8),
            CacheGroup("mla_attention", block_size=16),
            CacheGroup("sliding_window_mla", block_size=1, window=2),
        ),
        {},
    ),
    "llama4": ((CacheGroup("chunked_local_attention", block_size=4, chunk=16), FULL), {}),
    "speculative": (
        (CacheGroup("mamba", block_size=4, speculative_blocks=2), FULL, CacheGroup("ring", block_size=4)),
        {"retention": None},
    ),
}


def made(name, sink=None, *, num_blocks=60, **more):
    groups, options = GEOMETRIES[name]
    return create_manager("vllm", num_blocks=num_blocks, groups=groups, sink=sink, **options, **more)


def worker_of(name, num_blocks=60, **options):
    sink = CapturingSink()
    worker = KvWorker(
        lambda sink: made(name, sink, num_blocks=num_blocks),
        sink=sink,
        rng=Random(0),
        driver=BACKENDS["vllm"].driver,
        **options,
    )
    worker.captured = sink
    return worker


class Plain:
    """The actions of a worker, with one step per token and without look-ahead."""

    def __init__(self, name, num_blocks):
        self.sink = CapturingSink()
        self.manager = made(name, self.sink, num_blocks=num_blocks)

    def rehearsed(self, request):
        """Return the same actions on a copy."""
        copy = Plain.__new__(Plain)
        copy.manager, copied = self.manager.rehearsal(request, 0)
        return SimpleNamespace(decode=partial(copy.decode, copied), prefill=partial(copy.prefill, copied))

    def step(self, request, tokens, hits=None):
        taken = self.manager.allocate_slots(request, tokens, hits)
        self.manager.end_step()
        self.manager.new_step_starts()
        return taken is not None

    def prefill(self, request):
        hits = self.manager.get_computed_blocks(request)
        while request.num_computed_tokens < len(request):
            start = request.num_computed_tokens + (hits.num_tokens if hits else 0)
            if not self.step(request, self.manager.chunk_tokens(request, len(request) - start, hits), hits):
                self.manager.free(request)
                return False
            hits = None
        return True

    def decode(self, request, tokens):
        for token in tokens:
            request.tokens.append(token)
            if not self.step(request, 1):
                return False
        return True


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("num_blocks", [22, 60])
def test_a_worker_equals_single_steps_and_refuses_requests_that_fail_there(name, num_blocks):
    rng = Random(name)
    worker, plain = worker_of(name, num_blocks), Plain(name, num_blocks)
    open_requests, refused = [], 0
    for _ in range(100):
        if open_requests and rng.random() < 0.6:
            request, twin = rng.choice(open_requests)
            if rng.random() < 0.3:
                request.finish()
                plain.manager.free(twin)
                open_requests.remove((request, twin))
            else:
                tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
                before = len(request)
                try:
                    request.decode(tokens)
                except OutOfBlocks:
                    refused += 1
                    assert len(request) == before
                    assert not plain.rehearsed(twin).decode(tokens)
                else:
                    assert plain.decode(twin, tokens)
        else:
            prompt = [rng.randrange(2) for _ in range(rng.choice([6, 20, 40]))]
            twin = plain.manager.new_request(prompt)
            try:
                request = worker.prefill(prompt)
            except OutOfBlocks:
                refused += 1
                assert not plain.rehearsed(twin).prefill()
            else:
                assert plain.prefill(twin)
                open_requests.append((request, twin))
        assert worker.captured.events == plain.sink.events
        assert worker.manager.free_queue == plain.manager.free_queue
        for request, twin in open_requests:
            tables = [table.blocks for table in request._state.tables]
            assert tables == [table.blocks for table in twin.tables]
    assert refused if num_blocks == 22 else any(isinstance(event.data, Stored) for event in plain.sink.events)
    for request, _ in open_requests:
        request.finish()
    assert worker.manager.num_active_blocks == 0


@pytest.mark.parametrize("name", GEOMETRIES)
def test_without_prefix_caching_no_event_is_published_and_all_blocks_are_freed(name):
    worker = worker_of(name, prefix_caching=False)
    for _ in range(2):
        assert worker.serve(range(30), 20).cached_tokens == 0
    assert worker.captured.events == []
    assert worker.manager.num_free_blocks == 60
    with worker.prefill(Prompt(hashes=[1])) as request:
        assert len(request) == worker.manager.block_size


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4", "qwen3_next"])
def test_stored_blocks_of_a_request_are_those_of_the_attention_group(name):
    worker = worker_of(name)
    names = worker.manager.new_request(range(33)).blocks
    assert worker.serve(range(33)).stored_blocks == tuple(names[: 32 // worker.manager.block_size])


def test_a_hybrid_pool_driver_refuses_another_manager():
    with pytest.raises(ValueError, match=r"^a HybridPoolDriver drives a VllmHybridManager, got <BlockPoolManager vllm"):
        HybridPoolDriver(create_manager("vllm", num_blocks=4), True, Random(0))


MODELS = [name for name, spec in BACKENDS.items() if spec.group == "hybrid" and spec.scheduler == "vllm"]
ROOM = {"vllm_gemma3": 70, "vllm_gemma4": 104, "vllm_deepseek_v4": 900, "vllm_llama4": 40}  # blocks; others have 22


def served(backend, seed, *, pass_by_pass, **fields):
    """Return an engine with few blocks after requests that partly share prefixes."""
    rng, size, sink = Random(seed), BACKENDS[backend].default_block_size, CapturingSink()
    args = MockEngineArgs(block_size=size, num_gpu_blocks=ROOM.get(backend, 22), semantics="1.6.1", **fields)
    engine = MockEngine(args, backend=backend, seed=seed, sink=sink)
    if pass_by_pass:
        engine.on_pass(lambda done: None)  # an observer of passes causes each of them to be made
    prefixes = [[rng.getrandbits(17) for _ in range(4 * size)] for _ in range(3)]
    now = 0.0
    for _ in range(14):
        now += rng.choice([0.0, 1.0, 30.0, 400.0])
        prompt = rng.choice(prefixes)[: rng.randint(1, 4 * size)] + [
            rng.getrandbits(17) for _ in range(rng.randint(0, 9))
        ]
        engine.submit(prompt, rng.choice([1, 2, size, rng.randint(1, 4 * size)]), now)
    engine.run()
    return engine, sink.events


@pytest.mark.parametrize("backend", MODELS)
def test_a_prompt_that_never_fits_in_all_groups_is_rejected(backend):
    size = BACKENDS[backend].default_block_size
    args = MockEngineArgs(block_size=size, num_gpu_blocks=ROOM.get(backend, 22), semantics="1.6.1")
    engine = MockEngine(args, backend=backend)
    large, small = engine.submit(range((ROOM.get(backend, 22) - 2) * size), 4), engine.submit(range(size), 4)
    engine.run()
    assert (large.status, small.status) == ("rejected", "finished")


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("backend", ["vllm_gpt_oss", "vllm_kimi_k3"])
def test_a_chunked_prompt_fits_or_is_refused_without_a_leak(backend, chunk):
    """At the ends of chunks, a model that exports states temporarily holds more of them than without chunks."""
    refused = 0
    for num_blocks in range(8, 20):
        with RouterHarness(EngineProfile(block_size=4, num_blocks=num_blocks, chunk=chunk), backend) as kv:
            for length in (21, 5, 13, 30, 21, 9):
                worker = kv.worker(0)
                before = sorted(worker.manager.resident())
                try:
                    worker.prefill(kv.prompt(length // 4, tail=length % 4)).finish()
                except OutOfBlocks:
                    refused += 1
                    assert before == sorted(worker.manager.resident())
                assert worker.manager.num_active_blocks == 0
    assert refused


@pytest.mark.parametrize("backend", MODELS)
@pytest.mark.parametrize("fields", [{}, {"max_num_batched_tokens": 40}], ids=["whole", "chunked"])
def test_passes_in_one_go_equal_passes_one_by_one(backend, fields):
    preemptions = reused = 0
    for seed in range(4):
        (quick, events), (slow, expected) = (
            served(backend, seed, pass_by_pass=each, **fields) for each in (False, True)
        )
        assert {request.status for request in quick.requests} == {"finished"}
        assert events == expected
        assert quick.metrics == slow.metrics
        for name in ("token_ms", "admissions", "preemptions", "computed_tokens", "first_reused_tokens"):
            assert [getattr(one, name) for one in quick.requests] == [getattr(one, name) for one in slow.requests], name
        assert quick.worker.manager.free_queue == slow.worker.manager.free_queue
        assert quick.worker.manager.num_active_blocks == 0
        preemptions += sum(request.preemptions for request in quick.requests)
        reused += sum(request.first_reused_tokens or 0 for request in quick.requests)
    assert reused
    assert preemptions or backend == "vllm_deepseek_v4"  # its windows free more than its decode steps take


def test_a_sibling_of_a_state_cached_in_this_pass_waits_for_the_next_pass():
    engine = MockEngine(MockEngineArgs(block_size=16, num_gpu_blocks=200, semantics="1.6.1"), backend="vllm_qwen3_next")
    passes = []
    engine.on_pass(lambda done: passes.append([(each.request, each.tokens) for each in done.scheduled]))
    first, second = (engine.submit(range(40), 2, 0.0) for _ in range(2))
    engine.run()
    assert passes[0] == [(first, 32)]  # up to where its state is cached
    assert passes[1] == [(first, 8), (second, 8)]
    assert (first.first_reused_tokens, second.first_reused_tokens) == (0, 32)
