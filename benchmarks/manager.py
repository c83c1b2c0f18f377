"""Block managers: speed with a capturing sink, and memory."""

from __future__ import annotations

import gc
import statistics
import tempfile
import tracemalloc
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks import workload
from benchmarks.measure import Figure, NotHere, cpu_seconds, dynamo, profile_of, rate
from pytest_kvmock import create_manager
from pytest_kvmock.moves import Deref, Use
from pytest_kvmock.plh import lineage_hashes
from pytest_kvmock.sinks import CapturingSink
from pytest_kvmock.tokens import sequence_hashes

BARS = {"lru": 1.0, "lineage": 0.8, "multi_lru": 0.3}
TOTAL = workload.REQUESTS * workload.BLOCKS


def run(backend, of=workload.moves):
    sink = CapturingSink()
    manager = create_manager(backend, num_blocks=workload.CAPACITY, block_size=workload.BLOCK_SIZE, sink=sink)
    workload.serve(manager, of)


def replay():
    """A directory with the same requests as a trace, a call of Dynamo's replay of it, and its version."""
    core, version = dynamo("1.2")
    directory = tempfile.TemporaryDirectory()
    path = Path(directory.name, "trace.jsonl")
    workload.write_trace(path)
    args = core.MockEngineArgs(block_size=workload.BLOCK_SIZE, num_gpu_blocks=workload.CAPACITY)
    options = {"replay_concurrency": 1, "trace_block_size": workload.BLOCK_SIZE}
    return directory, partial(core.run_mocker_trace_replay, str(path), args, **options), version


def speed():
    peer, version = None, ""
    try:
        directory, peer, version = replay()
    except NotHere as reason:
        version = f"not beside run_mocker_trace_replay: {reason}"
    forms = {"a Deref a block": workload.moves, "one Deref a request": workload.moves_of_a_worker}
    for (backend, bar), (form, of) in product(BARS.items(), forms.items()):
        of()
        ours = partial(run, backend, of)
        mine, theirs = [], []
        for _ in range(5):
            mine.append(cpu_seconds(ours))
            if peer is not None:
                theirs.append(cpu_seconds(peer))
        seconds, beside = statistics.median(mine), version
        if theirs:
            other = statistics.median(theirs)
            beside = f"run_mocker_trace_replay with its scheduler, {version}: {rate(TOTAL, other)}, so {other / seconds:.2f} ×"
        met = TOTAL / seconds >= bar * 1e6
        yield Figure(
            f"blocks through the manager with a capturing sink, {backend}, {form}",
            f"{bar} M/s",
            rate(TOTAL, seconds),
            met,
            beside,
            "" if met else profile_of(ours),
        )
    if peer is not None:
        directory.cleanup()


def memory():
    requests = workload.requests()[:2000]
    for backend in BARS:
        tracemalloc.start()
        manager = create_manager(backend, num_blocks=workload.CAPACITY, block_size=workload.BLOCK_SIZE)
        before = tracemalloc.get_traced_memory()[0]
        for request in requests:
            # Hashes of its own for each request, as they would come from outside: kept alive by the manager alone.
            local = [value + 0 for value in request.local]
            blocks = sequence_hashes(local)
            manager.process(Use(blocks, local, lineage_hashes(blocks)))
            manager.process(Deref(blocks[::-1]))
        del local, blocks
        gc.collect()
        used = (tracemalloc.get_traced_memory()[0] - before) / manager.num_inactive_blocks
        tracemalloc.stop()
        yield Figure(f"memory of the manager, {backend}", "600 B a cached block", f"{used:.0f} B", used <= 600)
