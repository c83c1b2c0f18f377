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
from benchmarks.measure import Figure, NotHere, alternating, cpu_seconds, dynamo
from pytest_kvmock import CapturingSink, create_manager, sequence_hashes
from pytest_kvmock.values import Deref, Use, lineage_hashes

BACKENDS = {"lineage": 150, "lru": 150, "multi_lru": 600}
"""The largest number of bytes per cached block."""
TOTAL = workload.REQUESTS * workload.BLOCKS


def run(backend, of=workload.moves):
    sink = CapturingSink()
    manager = create_manager(backend, num_blocks=workload.CAPACITY, block_size=workload.BLOCK_SIZE, sink=sink)
    workload.serve(manager, of)


def replay():
    """Return a directory with the same requests as a trace, a call of Dynamo's replay of it, and Dynamo's version."""
    core, version = dynamo("1.2")
    directory = tempfile.TemporaryDirectory()
    path = Path(directory.name, "trace.jsonl")
    workload.write_trace(path)
    args = core.MockEngineArgs(block_size=workload.BLOCK_SIZE, num_gpu_blocks=workload.CAPACITY)
    options = {"replay_concurrency": 1, "trace_block_size": workload.BLOCK_SIZE}
    return directory, partial(core.run_mocker_trace_replay, str(path), args, **options), version


RUST = "KVMOCK_RUST_MANAGER"
FORMS = {
    "32 Derefs a request": (
        workload.moves,
        "each of 33 moves a request is a call of Python that looks at what it is given",
    ),
    "one Deref a request": (
        workload.moves_of_a_worker,
        "a fifth of the time makes lineage hashes; in multi_lru, a sixth counts how often blocks were seen",
    ),
}
RUST_BARS = {"lineage": (1.5, 1.2), "lru": (1.5, 1.0), "multi_lru": (1.0, 0.6)}


def rust_rates(program: str) -> dict[str, float]:
    """Return the rates of Dynamo's manager in M blocks/s, by backend."""
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [line.split() for line in lines if " events=true " in line]
    return {row[0]: float(row[2]) for row in rows}


def beside_rust():
    """Measure against Dynamo's manager in Rust on the same workload, in alternating runs.

    The program of `KVMOCK_RUST_MANAGER` prints one line per backend, "lineage events=true 0.58 M blocks/s": each
    request is a Use with precomputed hashes and 32 Derefs, with captured events (dynamo-mocker 1.2.1, optimised).
    """
    program = os.environ.get(RUST)
    if not program:
        raise NotHere(f"{RUST} names no program that measures Dynamo's manager")
    for (number, (form, (of, why))), backend in product(enumerate(FORMS.items()), RUST_BARS):
        of()
        mine, theirs = [], []
        for _ in range(5):
            mine.append(TOTAL / cpu_seconds(partial(run, backend, of)) / 1e6)
            theirs.append(rust_rates(program)[backend])
        yield Figure(
            f"block manager with a capturing sink, {form}",
            statistics.median(mine) / statistics.median(theirs),
            RUST_BARS[backend][number],
            "Dynamo's in Rust, dynamo-mocker 1.2.1, optimised",
            backend,
            why=why,
        )


def beside_replay():
    directory, peer, version = replay()
    with directory:
        for (form, (of, _)), backend in product(FORMS.items(), BACKENDS):
            of()
            seconds, other = alternating(5, partial(run, backend, of), peer, clock=cpu_seconds)
            name = f"block manager with a capturing sink, {form}, beside a whole replay"
            yield Figure(name, other / seconds, None, f"run_mocker_trace_replay, {version}", backend)


def memory():
    requests = workload.requests()[:2000]
    for backend, most in BACKENDS.items():
        tracemalloc.start()
        manager = create_manager(backend, num_blocks=workload.CAPACITY, block_size=workload.BLOCK_SIZE)
        before = tracemalloc.get_traced_memory()[0]
        for request in requests:
            # New hash objects for each request, as from outside: only the manager keeps them alive.
            local = [value + 0 for value in request.local]
            blocks = sequence_hashes(local)
            manager.process(Use(blocks, local, lineage_hashes(blocks)))
            manager.process(Deref(blocks[::-1]))
        del local, blocks
        gc.collect()
        used = (tracemalloc.get_traced_memory()[0] - before) / manager.num_inactive_blocks
        tracemalloc.stop()
        why = "a name, the key that finds it and its entry in a dictionary are 140 B in Python"
        yield Figure(
            "memory of a cached block in the manager", used, most, variant=backend, unit="B", most=True, why=why
        )
