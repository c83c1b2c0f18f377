"""A fleet in virtual time behind Dynamo's router: with its verdict, compared with the original, and memory. `as_typed`
measures the command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from itertools import product

from benchmarks.measure import Figure, alternating, cpu_seconds, dynamo, written
from benchmarks.verdict import traces
from pytest_kvmock import EngineProfile, Fleet, MockEngine, MockEngineArgs, RouterHarness
from pytest_kvmock.fleets import MOONCAKE_BLOCK_SIZE, read_mooncake, synthetic_trace

ROUNDS = 3
BLOCKS = 4_000  # of a worker
MEMORY_BAR_MB = 400
NOT_JUDGED = "each event goes to a ledger and an index, too, and the peer judges nothing"
LARGEST_MB = """
from benchmarks.fleet import judged
judged(8)
# Not `ru_maxrss`, which is at least what the process had that started this one.
print(*(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def bare(workers):
    """Serve the conversation trace without a verdict, statistics included."""
    engines = [
        MockEngine(MockEngineArgs(block_size=MOONCAKE_BLOCK_SIZE, num_gpu_blocks=BLOCKS)) for _ in range(workers)
    ]
    Fleet(engines).run(read_mooncake(traces())).to_json()


JUDGED = f"""\
profile = EngineProfile(block_size={MOONCAKE_BLOCK_SIZE}, num_blocks={BLOCKS}, workers=workers)
with RouterHarness(profile, "lineage") as kv_harness:
    kv_harness.fleet().run(read_mooncake(path)).to_json()"""


def judged(workers):
    """Serve the trace with every event checked."""
    written(JUDGED, path=traces(), workers=workers)()


def speed():
    """Measure the conversation trace over 8 and 64 workers, in turn with the original."""
    core, version = dynamo("1.2")
    path = str(traces())
    os.environ["DYN_LOG"] = "error"  # otherwise it writes a line per pick
    args = core.MockEngineArgs(block_size=MOONCAKE_BLOCK_SIZE, num_gpu_blocks=BLOCKS)

    def peer(workers):
        core.run_mocker_trace_replay(
            path, args, router_mode="kv_router", num_workers=workers, trace_block_size=MOONCAKE_BLOCK_SIZE
        )

    runs = [*(partial(run, workers) for run, workers in product((bare, judged), (8, 64))), partial(peer, 8)]
    bare_8, bare_64, judged_8, judged_64, peer_8 = alternating(ROUNDS, *runs, clock=cpu_seconds)
    name = "the conversation trace behind the router"
    beside = f"run_mocker_trace_replay(router_mode='kv_router'), {version}"
    yield Figure(name, peer_8 / judged_8, 0.83, beside, "8 workers, full verdict", why=NOT_JUDGED, lines=JUDGED)
    name = "the conversation trace behind the router of 64 workers"
    for variant, few, many in (("no verdict", bare_8, bare_64), ("full verdict", judged_8, judged_64)):
        yield Figure(name, few / many, 0.71, "the same with 8 workers", variant)


def memory():
    """Measure the peak memory of a process that serves the trace over 8 workers, including `to_json`."""
    largest = int(subprocess.run([sys.executable, "-c", LARGEST_MB], capture_output=True, text=True, check=True).stdout)
    what = "memory of a process for the conversation trace, 8 workers, to_json included"
    yield Figure(what, largest, MEMORY_BAR_MB, variant="full verdict", unit="MB", most=True)


def one_test():
    """Measure a typical test: 400 requests of conversations over 4 workers, with checked events."""
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

    seconds, other = alternating(7, serve, serve_bare, clock=cpu_seconds)
    yield Figure("a test of 400 requests over 4 workers, full verdict", other / seconds, None, "the same, no verdict")
