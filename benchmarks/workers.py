"""Workers over every backend: speed with events captured, and memory over a long replay."""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack, suppress
from functools import cache, partial
from itertools import islice

from benchmarks import workload
from benchmarks.engine_peers import Sglang, Vllm, row_of
from benchmarks.manager import replay
from benchmarks.measure import Figure, NotHere, alternating, cpu_seconds, profile_of, rate
from pytest_kvmock import Prompt
from pytest_kvmock.backends import BACKENDS
from pytest_kvmock.engine.worker import KvWorker
from pytest_kvmock.events import Removed, Stored
from pytest_kvmock.sinks import CapturingSink

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


def run(backend):
    """Events are captured, and taken after each request, as from the real managers."""
    sink = CapturingSink()
    worker = new_worker(backend, sink)
    for prompt in prompts():
        worker.serve(prompt)
        sink.take()


def peers(kept):
    """Calls that serve the workload by other programs, and their names.

    What they read is there until the stack `kept` is left.
    """
    with suppress(NotHere):
        directory, call, version = replay()
        kept.enter_context(directory)
        yield call, f"run_mocker_trace_replay with its scheduler, {version}"


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


def speed():
    """Hashes given, as the real managers were measured: the prompts have been served before, and so are named."""
    with ExitStack() as kept:
        yield from beside(list(peers(kept)))


def beside(real):
    for backend in BACKENDS:
        calls = [partial(run, backend), *(call for call, _ in real)]
        calls[0]()
        # What is there before is not what is measured: else each full collection walks all prompts.
        gc.collect()
        gc.freeze()
        seconds, *others = alternating(5, *calls, clock=cpu_seconds)
        gc.unfreeze()
        said = []
        for other, (_, name) in zip(others, real, strict=True):
            said.append(f"{name}: {rate(TOTAL, other)}, so {other / seconds:.2f} ×")
        yield Figure(
            f"blocks through a worker with events captured, {backend}",
            "",
            rate(TOTAL, seconds),
            peer="; ".join(said),
        )


def beside_real_engines():
    """Each real manager that is installed, and the worker that models it: they must publish the same."""
    missing = []
    for real in (Vllm, Sglang):
        try:
            peer = real()
        except NotHere as reason:
            missing.append(str(reason))
            continue
        ours = partial(run, peer.backend)
        same = peer.run(row_of) == heard(peer.backend)
        gc.collect()
        gc.freeze()
        seconds, other = alternating(5, ours, peer.run, clock=cpu_seconds)
        gc.unfreeze()
        met = same and other / seconds >= TIMES
        yield Figure(
            f"a worker over {peer.backend} beside {peer.name}",
            f"{TIMES} ×, and the same events",
            f"{other / seconds:.2f} ×, and {'the same' if same else 'OTHER'} events",
            met,
            f"{rate(TOTAL, seconds)} blocks, the real one {rate(TOTAL, other)}",
            "" if met else profile_of(ours),
        )
    if len(missing) == 2:
        raise NotHere("; ".join(missing))


class Nobody:
    """Hears everything and keeps nothing."""

    def publish(self, event, storage_tier, token_ids):
        pass


def memory():
    """Fresh prompts over and over: what stays is what is cached, however many requests there were."""
    for backend in BACKENDS:
        worker = new_worker(backend, Nobody())
        prompts = fresh_prompts()
        serve(worker, islice(prompts, REPLAYED // 10))
        gc.collect()
        before = sys.getallocatedblocks()
        serve(worker, prompts)
        gc.collect()
        grown = sys.getallocatedblocks() - before
        yield Figure(
            f"memory of a worker over a replay of {REPLAYED:,} requests, from the 10,000th on, {backend}",
            "flat: within 1,000 allocations",
            f"{grown:+,} allocations",
            grown <= 1_000,
        )


def fresh_prompts():
    """Blocks that no other request has, three a request and a token more, beside one that many have."""
    for number in range(REPLAYED):
        hashes = [number % 64, *(2**32 + 4 * number + i for i in range(3))]
        yield Prompt(hashes=hashes, num_tokens=len(hashes) * workload.BLOCK_SIZE + 1)
