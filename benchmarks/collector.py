"""The gain of a long run that makes Python's garbage collector run less often, compared with the same run with the
collector unchanged.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import islice

from benchmarks.measure import Figure, alternating, cpu_seconds
from benchmarks.verdict import TRACE_CAPACITY, traces
from pytest_kvmock import EngineProfile, Fleet, MockEngine, MockEngineArgs, RouterHarness, replay
from pytest_kvmock.fleets import MOONCAKE_BLOCK_SIZE, read_mooncake
from pytest_kvmock.values.long_runs import long_run

ROUNDS, REQUESTS = 3, 2_500
TRACE = f"{REQUESTS:,} requests of the conversation trace"
LEFT_ALONE = (699, 10, 10)
"""Almost Python's default thresholds, but different, so that a run takes them for the user's and keeps them."""


def left_alone(run: Callable[[], object]) -> None:
    found = gc.get_threshold()
    gc.set_threshold(*LEFT_ALONE)
    try:
        run()
    finally:
        gc.set_threshold(*found)


def gained():
    """Compare the CPU time of normal runs with runs that keep the collector unchanged, in turn; above 1 is a gain."""
    requests = list(islice(read_mooncake(traces()), REQUESTS))

    def judged_fleet():
        profile = EngineProfile(block_size=MOONCAKE_BLOCK_SIZE, num_blocks=TRACE_CAPACITY, workers=8)
        with RouterHarness(profile, "lineage") as kv:
            kv.fleet().run(requests)

    def bare_fleet():
        Fleet([_engine() for _ in range(8)]).run(requests)

    def of_one_engine():
        replay(requests, [_engine()])

    def verdict_over(backend):
        def run():
            with RouterHarness(EngineProfile(block_size=MOONCAKE_BLOCK_SIZE, num_blocks=TRACE_CAPACITY), backend) as kv:
                worker = kv.worker(0)
                for request in requests:
                    worker.serve(request.prompt(whole_blocks=True))

        return run

    for variant, run in (
        ("fleet of 8, full verdict", judged_fleet),
        ("fleet of 8, no verdict", bare_fleet),
        ("replay on one engine", of_one_engine),
    ):
        before, after = alternating(ROUNDS, lambda run=run: left_alone(run), run, clock=cpu_seconds)
        yield Figure(
            f"a long run over {TRACE}", before / after, None, "the same with the collector left alone", variant
        )
    for backend in ("lineage", "vllm", "sglang"):
        run = verdict_over(backend)

        def raised(run=run):
            with long_run():
                run()

        before, after = alternating(ROUNDS, run, raised, clock=cpu_seconds)
        name = f"a test's own loop with verdict over {TRACE}, were it a long run"
        yield Figure(name, before / after, None, "the same as it is, no long run", backend)


def _engine() -> MockEngine:
    return MockEngine(MockEngineArgs(block_size=MOONCAKE_BLOCK_SIZE, num_gpu_blocks=TRACE_CAPACITY))
