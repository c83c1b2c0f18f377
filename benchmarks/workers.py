"""Workers over every backend: speed with events captured, and memory over a long replay."""

from __future__ import annotations

import gc
import inspect
import tracemalloc
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice

from benchmarks import workload
from benchmarks.manager import replay
from benchmarks.measure import Figure, NotHere, alternating, cpu_seconds, profile_of, rate
from pytest_kvmock import Prompt
from pytest_kvmock.backends import BACKENDS
from pytest_kvmock.engine.worker import KvWorker
from pytest_kvmock.sinks import CapturingSink

RECORDED = {"vllm": 216_000, "vllm_0_19": 216_000, "sglang": 213_000}
"""Blocks a second of vLLM 0.33.0 and SGLang 0.5.23 with events, on the machine that they were measured on."""

TIMES = 3
"""How often that a worker should do."""

TOTAL = workload.REQUESTS * workload.BLOCKS
REPLAYED = 100_000


def new_worker(backend, sink):
    spec = BACKENDS[backend]

    def make(outlet):
        return spec.make(num_blocks=workload.CAPACITY, block_size=workload.BLOCK_SIZE, dp_rank=0, sink=outlet)

    return KvWorker(make, sink=sink, driver=spec.driver)


def serve(worker, prompts):
    for prompt in prompts:
        worker.serve(prompt)


def run(backend, prompts):
    serve(new_worker(backend, CapturingSink()), prompts)


def real_vllm():
    """A call that serves the same workload by vLLM's own manager, lookup to free, and its version."""
    try:
        from vllm import SamplingParams, __version__
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request
    except ImportError:
        raise NotHere("vLLM is not installed") from None
    import torch

    size = workload.BLOCK_SIZE
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float16)
    config = KVCacheConfig(workload.CAPACITY + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    sizes = {"max_model_len": 2**20, "hash_block_size": size}
    if "scheduler_block_size" in inspect.signature(KVCacheManager.__init__).parameters:
        sizes["scheduler_block_size"] = size
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(size, sha256_cbor)
    # A block of the workload is a hash: its lower bits are the first of the tokens that it stands for.
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=[token for local in request.local for token in (local % 2**31, *range(1, size))],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=hasher,
        )
        for number, request in enumerate(workload.requests())
    ]

    def run():
        manager = KVCacheManager(config, enable_kv_cache_events=True, **sizes)
        heard = []
        for request in requests:
            blocks, hit, *_ = manager.get_computed_blocks(request)
            manager.allocate_slots(request, request.num_tokens - hit, hit, blocks)
            heard += manager.take_events()
            manager.free(request)
        return heard

    return run, f"KVCacheManager of vLLM {__version__}"


def peers(kept):
    """Calls that serve the workload by real programs, with their names and who of ours is measured against them.

    What they read is there until the stack `kept` is left.
    """
    with suppress(NotHere):
        directory, call, version = replay()
        kept.enter_context(directory)
        yield call, f"run_mocker_trace_replay with its scheduler, {version}", ()
    with suppress(NotHere):
        yield *real_vllm(), ("vllm", "vllm_0_19")


def speed():
    """Hashes given, as the real managers were measured: the prompts have been served before, and so are named."""
    with ExitStack() as kept:
        yield from beside(list(peers(kept)))


def beside(real):
    prompts = [Prompt(hashes=request.local) for request in workload.requests()]
    for backend in BACKENDS:
        calls = [partial(run, backend, prompts), *(call for call, _, _ in real)]
        calls[0]()
        # What is there before is not what is measured: else each full collection walks all prompts.
        gc.collect()
        gc.freeze()
        seconds, *others = alternating(5, *calls, clock=cpu_seconds)
        gc.unfreeze()
        recorded = RECORDED.get(backend)
        met = None if recorded is None else TOTAL / seconds >= TIMES * recorded
        said = []
        for other, (_, name, measures) in zip(others, real, strict=True):
            said.append(f"{name}: {rate(TOTAL, other)}, so {other / seconds:.2f} ×")
            if backend in measures:
                met = other / seconds >= TIMES
        yield Figure(
            f"blocks through a worker with events captured, {backend}",
            "" if recorded is None else f"{TIMES} × the real manager (recorded elsewhere: {rate(recorded, 1)})",
            rate(TOTAL, seconds),
            met,
            "; ".join(said) or "no real program is installed here",
            profile_of(calls[0]) if met is False else "",
        )


class Nobody:
    """Hears everything and keeps nothing."""

    def publish(self, event, storage_tier, token_ids):
        pass


def memory():
    """Fresh prompts over and over: what stays is what is cached, however many requests there were."""
    for backend in BACKENDS:
        worker = new_worker(backend, Nobody())
        tracemalloc.start()
        prompts = fresh_prompts()
        serve(worker, islice(prompts, REPLAYED // 10))
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        serve(worker, prompts)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        yield Figure(
            f"memory of a worker over a replay of {REPLAYED:,} requests, from the 10,000th on, {backend}",
            "flat: within 64 KiB",
            f"{grown / 1024:+.0f} KiB",
            grown <= 64 * 1024,
        )


def fresh_prompts():
    """Blocks that no other request has, three a request and a token more, beside one that many have."""
    for number in range(REPLAYED):
        hashes = [number % 64, *(2**32 + 4 * number + i for i in range(3))]
        yield Prompt(hashes=hashes, num_tokens=len(hashes) * workload.BLOCK_SIZE + 1)
