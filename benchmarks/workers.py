"""Workers compared with the real engines that they model, and memory of every backend over a long replay."""

from __future__ import annotations

import gc
import sys
from functools import cache, partial
from itertools import islice

from benchmarks import workload
from benchmarks.engine_peers import Sglang, Vllm, row_of
from benchmarks.measure import Figure, NotHere, alternating, cpu_seconds
from pytest_kvmock import BACKENDS, CapturingSink, Prompt, Removed, Stored
from pytest_kvmock.engines import KvWorker

TIMES = 3
"""The multiple of a real engine's speed that a worker should reach."""

REPLAYED = 100_000


def new_worker(backend, sink):
    spec = BACKENDS[backend]

    def make(outlet):
        return spec.make(num_blocks=workload.CAPACITY, block_size=workload.BLOCK_SIZE, dp_rank=0, sink=outlet)

    return KvWorker(make, sink=sink, driver=spec.driver)


def serve(worker, prompts):
    for prompt in prompts:
        worker.serve(prompt)


def run(backend):
    """Serve the workload; take the captured events after each request, as from the real managers."""
    sink = CapturingSink()
    worker = new_worker(backend, sink)
    for prompt in prompts():
        worker.serve(prompt)
        sink.take()


def heard(backend):
    """Return all events of a worker over the workload, in the form of `row_of`."""
    sink = CapturingSink()
    serve(new_worker(backend, sink), prompts())
    rows = []
    for event in sink.events:
        match event.data:
            case Stored(parent_hash, block_hashes):
                rows.append(("S", parent_hash, *block_hashes))
            case Removed(block_hashes):
                rows.append(("R", *block_hashes))
            case _:
                rows.append(("C",))
    return rows


@cache
def prompts():
    return [Prompt(tokens) for tokens in workload.tokens()]


def beside_real_engines():
    """Measure each installed real manager and the worker that models it; both must publish the same events.

    Prompts are hashed before, as for the real managers.
    """
    missing = []
    for real in (Vllm, Sglang):
        try:
            peer = real()
        except NotHere as reason:
            missing.append(str(reason))
            continue
        ours = partial(run, peer.backend)
        assert peer.run(row_of) == heard(peer.backend)
        gc.collect()
        gc.freeze()
        seconds, other = alternating(5, ours, peer.run, clock=cpu_seconds)
        gc.unfreeze()
        name = "a worker that says the same events as a real engine's block manager"
        yield Figure(name, other / seconds, TIMES, peer.name, peer.backend)
    if len(missing) == 2:
        raise NotHere("; ".join(missing))


class Nobody:
    """A sink that keeps nothing."""

    def publish(self, event, storage_tier, token_ids):
        pass


def memory():
    """Measure fresh prompts repeatedly: only cached blocks may stay, whatever the number of requests."""
    for backend, spec in BACKENDS.items():
        if spec.group == "hybrid":  # some take no prompts by hashes only
            continue
        worker = new_worker(backend, Nobody())
        prompts = fresh_prompts()
        serve(worker, islice(prompts, REPLAYED // 10))
        gc.collect()
        before = sys.getallocatedblocks()
        serve(worker, prompts)
        gc.collect()
        grown = sys.getallocatedblocks() - before
        name = f"memory that a worker gains over {REPLAYED:,} requests, from the 10,000th on"
        yield Figure(name, grown, 1_000, variant=backend, unit="allocations", most=True)


def fresh_prompts():
    """Yield prompts of one block that many requests share, three new blocks, and one more token."""
    for number in range(REPLAYED):
        hashes = [number % 64, *(2**32 + 4 * number + i for i in range(3))]
        yield Prompt(hashes=hashes, num_tokens=len(hashes) * workload.BLOCK_SIZE + 1)
