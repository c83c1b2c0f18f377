"""Block managers: speed with a capturing sink, and memory."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
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


RUST = "KVMOCK_RUST_MANAGER"
RUST_BARS = {"lineage": (1.5, 4.0), "lru": (1.5, 4.0), "multi_lru": (1.0, 1.5)}


def rust_rates(program: str) -> dict[str, float]:
    """M blocks/s of Dynamo's manager, by backend."""
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [line.split() for line in lines if " events=true " in line]
    return {row[0]: float(row[2]) for row in rows}


def beside_rust():
    """Dynamo's manager in Rust on the same workload, in alternating runs.

    The program of `KVMOCK_RUST_MANAGER` prints a line a backend, "lineage events=true 0.58 M blocks/s": each request is a
    Use with hashes that were made before, and 32 Derefs, events captured (dynamo-mocker 1.2.1, optimised).
    """
    program = os.environ.get(RUST)
    if not program:
        raise NotHere(f"{RUST} names no program that measures Dynamo's manager")
    forms = {"32 Derefs a request": workload.moves, "one Deref a request": workload.moves_of_a_worker}
    for (number, (form, of)), (backend, bars) in product(enumerate(forms.items()), RUST_BARS.items()):
        of()
        mine, theirs = [], []
        for _ in range(5):
            mine.append(TOTAL / cpu_seconds(partial(run, backend, of)) / 1e6)
            theirs.append(rust_rates(program)[backend])
        ours, other, bar = statistics.median(mine), statistics.median(theirs), bars[number]
        yield Figure(
            f"manager with a capturing sink beside Dynamo's in Rust, {backend}, {form}",
            f"{bar} ×",
            f"{ours / other:.2f} × ({ours:.2f} M/s blocks)",
            ours >= bar * other,
            f"dynamo-mocker 1.2.1, optimised: {other:.2f} M/s",
        )


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
