"""A fleet behind Dynamo's router, in virtual time, beside the original of 1.2.1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.measure import Figure, NotHere, cpu_seconds, dynamo, profile_of
from benchmarks.verdict import traces
from pytest_kvmock import EngineProfile, MockEngine, MockEngineArgs, RouterHarness
from pytest_kvmock.fleet import Fleet
from pytest_kvmock.traces import MOONCAKE_BLOCK_SIZE, read_mooncake, synthetic_trace

ROUNDS = 3
NUM_BLOCKS = 4_000
RELEASE = "1.2.1"
MEMORY_MB = 400
TEST_SECONDS = 0.2
WORKLOAD = "the conversation trace behind Dynamo's router"


def _args() -> MockEngineArgs:
    return MockEngineArgs(block_size=MOONCAKE_BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS, semantics=RELEASE)


def serve(workers: int, requests, *, verdict: bool = False):
    """Serve a trace and write the report as JSON; with the verdict, judged."""
    if not verdict:
        fleet = Fleet([MockEngine(_args(), backend="lineage", seed=seed) for seed in range(workers)])
        return fleet.run(requests).to_json()
    profile = EngineProfile(workers=workers, block_size=MOONCAKE_BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    with RouterHarness(profile, "lineage", engine={"semantics": RELEASE}) as kv:
        return kv.fleet().run(requests).to_json()


def speed():
    """CPU seconds of 8 and 64 workers, alternating with the original."""
    path = traces()
    requests = list(read_mooncake(path))
    try:
        os.environ.setdefault("DYN_LOG", "error")  # it would log each pick, which takes time
        core, version = dynamo("1.2")
        args = core.MockEngineArgs(block_size=MOONCAKE_BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS)

        def original(workers):
            core.run_mocker_trace_replay(
                str(path), args, num_workers=workers, router_mode="kv_router", trace_block_size=MOONCAKE_BLOCK_SIZE
            )
    except NotHere as reason:
        original, version = None, f"not beside run_mocker_trace_replay: {reason}"

    runs = {
        "8": lambda: serve(8, requests),
        "8, verdict": lambda: serve(8, requests, verdict=True),
        "64": lambda: serve(64, requests),
    }
    if original is not None:
        runs |= {"theirs, 8": lambda: original(8), "theirs, 64": lambda: original(64)}
    taken = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            taken[name].append(cpu_seconds(run))
    seconds = {name: median(each) for name, each in taken.items()}
    for name, title, beside, bar in (
        ("8", "8 workers, no verdict", "theirs, 8", 1.75),
        ("8, verdict", "8 workers, full verdict", "theirs, 8", 2.25),
        ("64", "64 workers, no verdict", "theirs, 64", 1.0),
    ):
        theirs = seconds.get(beside)
        met = None if theirs is None else seconds[name] <= bar * theirs
        measured = (
            f"{seconds[name]:.1f} s" if theirs is None else f"{seconds[name] / theirs:.2f} × ({seconds[name]:.1f} s)"
        )
        peer = version if theirs is None else f"run_mocker_trace_replay, {version}: {theirs:.1f} s"
        profile = profile_of(runs[name]) if met is False else ""
        yield Figure(f"{WORKLOAD}, {title}", f"{bar} × the peer's time", measured, met, peer, profile)
    ratio = seconds["64"] / seconds["8"]
    yield Figure(f"{WORKLOAD}, 64 workers beside 8", "1.4 ×", f"{ratio:.2f} ×", ratio <= 1.4)


_PEAK = """
from benchmarks.fleet import serve
from benchmarks.verdict import traces
from pytest_kvmock.traces import read_mooncake
serve(8, list(read_mooncake(traces())))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def memory():
    """The most memory that a process had which serves the trace and writes the report."""
    traces()
    if not Path("/proc/self/status").is_file():
        raise NotHere("a process's peak is read from /proc")
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    peak = json.loads(done.stdout) / 1024
    yield Figure(
        f"{WORKLOAD}, 8 workers, peak memory of the process", f"{MEMORY_MB} MB", f"{peak:.0f} MB", peak <= MEMORY_MB
    )


def a_test():
    """What a test of a policy costs: 400 requests over four workers, with verdict."""
    rows = list(
        synthetic_trace(
            400,
            block_size=16,
            groups=8,
            prefix_blocks=(2, 12),
            turns=(2, 5),
            input_tokens=(16, 200),
            output_tokens=(8, 64),
            interval_ms=60,
            delay_ms=(200, 2000),
        )
    )

    def test():
        with RouterHarness(EngineProfile(workers=4, num_blocks=2_048, block_size=16)) as kv:
            assert len(kv.fleet().run(rows).completed) == len(rows)

    seconds = median(cpu_seconds(test) for _ in range(2 * ROUNDS))
    met = seconds <= TEST_SECONDS
    yield Figure(
        "a test of 400 requests over 4 workers behind Dynamo's router, with verdict",
        f"{TEST_SECONDS} s",
        f"{seconds:.2f} s",
        met,
        profile="" if met else profile_of(test),
    )
