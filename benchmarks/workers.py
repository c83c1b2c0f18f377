"""Workers beside the real engines that they model, and memory of every backend over a long replay."""

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
"""How often that a worker should do."""

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
    """Events are captured, and taken after each request, as from the real managers."""
    sink = CapturingSink()
    worker = new_worker(backend, sink)
    for prompt in prompts():
        worker.serve(prompt)
        sink.take()


def heard(backend):
    """All that a worker says over the workload, each event as `row_of` has it."""
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
    """Each real manager that is installed, and the worker that models it: they must publish the same.

    Prompts have been hashed before, as the real managers' are.
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
    """Hears everything and keeps nothing."""

    def publish(self, event, storage_tier, token_ids):
        pass


def memory():
    """Fresh prompts over and over: what stays is what is cached, however many requests there were."""
    for backend, spec in BACKENDS.items():
        if spec.group == "hybrid":  # some take no prompts of hashes alone
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
    """Blocks that no other request has, three a request and a token more, beside one that many have."""
    for number in range(REPLAYED):
        hashes = [number % 64, *(2**32 + 4 * number + i for i in range(3))]
        yield Prompt(hashes=hashes, num_tokens=len(hashes) * workload.BLOCK_SIZE + 1)
