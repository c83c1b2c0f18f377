"""A fleet in virtual time behind Dynamo's router, beside the original: speed with and without a verdict, and memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from benchmarks.measure import Figure, NotHere, cpu_seconds, dynamo, profile_of
from benchmarks.verdict import traces
from pytest_kvmock import EngineProfile, MockEngine, MockEngineArgs, RouterHarness
from pytest_kvmock.fleet import Fleet
from pytest_kvmock.traces import MOONCAKE_BLOCK_SIZE, read_mooncake, synthetic_trace

ROUNDS = 3
BLOCKS = 4_000  # of a worker
BARS = {8: 1.75, 64: 1.0}
VERDICT_BAR, GROWTH_BAR, MEMORY_BAR_MB, TEST_BAR_S = 2.25, 1.4, 400, 0.2
LARGEST_MB = """
from benchmarks.fleet import {0}
{0}(8)
# Not `ru_maxrss`, which is at least what the process had that started this one.
print(*(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def bare(workers):
    """Serve the conversation trace without a verdict, statistics included."""
    engines = [
        MockEngine(MockEngineArgs(block_size=MOONCAKE_BLOCK_SIZE, num_gpu_blocks=BLOCKS)) for _ in range(workers)
    ]
    Fleet(engines).run(read_mooncake(traces())).to_json()


def judged(workers):
    """Serve it with every event judged."""
    profile = EngineProfile(block_size=MOONCAKE_BLOCK_SIZE, num_blocks=BLOCKS, workers=workers)
    with RouterHarness(profile, "lineage") as kv:
        kv.fleet().run(read_mooncake(traces())).to_json()


def speed():
    """Processor seconds for the conversation trace over 8 and 64 workers, in turn with the original's."""
    path, peer, version = str(traces()), None, ""
    os.environ["DYN_LOG"] = "error"  # it writes a line a pick else
    try:
        core, version = dynamo("1.2")
        args = core.MockEngineArgs(block_size=MOONCAKE_BLOCK_SIZE, num_gpu_blocks=BLOCKS)

        def peer(workers):
            core.run_mocker_trace_replay(
                path, args, router_mode="kv_router", num_workers=workers, trace_block_size=MOONCAKE_BLOCK_SIZE
            )
    except NotHere as reason:
        version = f"not beside run_mocker_trace_replay: {reason}"
    runs = {("fleet", 8): bare, ("verdict", 8): judged, ("fleet", 64): bare, ("verdict", 64): judged}
    if peer is not None:
        runs |= {("peer", 8): peer, ("peer", 64): peer}
    times = {key: [] for key in runs}
    for _ in range(ROUNDS):
        for key, run in runs.items():
            times[key].append(cpu_seconds(lambda run=run, workers=key[1]: run(workers)))
    seconds = {key: statistics.median(each) for key, each in times.items()}
    for what, workers, bar in (("fleet", 8, BARS[8]), ("verdict", 8, VERDICT_BAR), ("fleet", 64, BARS[64])):
        own = seconds[what, workers]
        name = f"Mooncake conversation trace behind the router, {workers} workers, {'no' if what == 'fleet' else 'full'} verdict"
        if peer is None:
            yield Figure(name, f"{bar} × the peer's time", f"{own:.1f} s", None, version)
            continue
        ratio = own / seconds["peer", workers]
        other = f"run_mocker_trace_replay(router_mode='kv_router'), {version}: {seconds['peer', workers]:.1f} s"
        met = ratio <= bar
        profile = "" if met else profile_of(lambda run=runs[what, workers], workers=workers: run(workers))
        yield Figure(name, f"{bar} × the peer's time", f"{ratio:.2f} × ({own:.1f} s)", met, other, profile)
    growth = seconds["fleet", 64] / seconds["fleet", 8]
    yield Figure(
        "the same, 64 workers beside 8 (no verdict)",
        f"{GROWTH_BAR} × the time",
        f"{growth:.2f} ×",
        growth <= GROWTH_BAR,
        f"with full verdict: {seconds['verdict', 64] / seconds['verdict', 8]:.2f} × ({seconds['verdict', 64]:.1f} s)",
    )


def memory():
    """The most memory that a process had which serves the trace over 8 workers, `to_json` included."""
    for name in ("bare", "judged"):
        program = [sys.executable, "-c", LARGEST_MB.format(name)]
        largest = int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
        yield Figure(
            f"memory for the conversation trace, 8 workers, {'no' if name == 'bare' else 'full'} verdict, to_json included",
            f"{MEMORY_BAR_MB} MB",
            f"{largest} MB",
            largest <= MEMORY_BAR_MB,
        )


def one_test():
    """A test as people write them: 400 requests of conversations over 4 workers, judged."""
    trace = list(
        synthetic_trace(
            400,
            groups=8,
            prefix_blocks=(2, 12),
            turns=(2, 5),
            block_size=16,
            input_tokens=(16, 200),
            output_tokens=(8, 64),
            interval_ms=60,
            delay_ms=(200, 2000),
        )
    )

    def serve():
        with RouterHarness(EngineProfile(block_size=16, num_blocks=512, workers=4), "lineage") as kv:
            kv.fleet().run(trace).to_json()

    def serve_bare():
        Fleet([MockEngine(MockEngineArgs(block_size=16, num_gpu_blocks=512)) for _ in range(4)]).run(trace).to_json()

    for name, run in (("full", serve), ("no", serve_bare)):
        seconds = statistics.median(cpu_seconds(run) for _ in range(7))
        met = seconds <= TEST_BAR_S
        title = f"a test of 400 requests over 4 workers, {name} verdict"
        yield Figure(title, f"{TEST_BAR_S} s", f"{seconds:.2f} s", met, profile="" if met else profile_of(run))
