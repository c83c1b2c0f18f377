"""Engines in virtual time: the shared workload and a trace through a scheduler, beside Dynamo's; and the scheduler matrix."""

from __future__ import annotations

import statistics
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmarks import manager, workload
from benchmarks.measure import Figure, NotHere, cpu_seconds, dynamo, profile_of
from benchmarks.verdict import traces
from pytest_kvmock import MockEngine, MockEngineArgs, RouterHarness, replay
from pytest_kvmock.fleet.scheduler_cases import (
    BLOCK_SIZE,
    NUM_GPU_BLOCKS,
    NUM_REQUESTS,
    SCHEDULER_CASES,
    make_scheduler_requests,
)
from pytest_kvmock.traces import MOONCAKE_BLOCK_SIZE, read_mooncake

ROUNDS = 3
BACKENDS = ("lineage", "lru", "multi_lru")
MATRIX_SECONDS = 10
TRACE_SECONDS, TRACE_RATIO = 10, 0.3
RATIO = 0.33


def _engine(block_size, num_blocks):
    return MockEngine(MockEngineArgs(block_size=block_size, num_gpu_blocks=num_blocks))


def _statistics(requests, block_size, num_blocks, trace_block_size):
    engine = _engine(block_size, num_blocks)
    return replay(requests, [engine], concurrency=1, trace_block_size=trace_block_size).to_json()


def shared_workload():
    """Requests a second, one at a time, one output token each, hashing and statistics included."""
    try:
        directory, peer, version = manager.replay()
    except NotHere as reason:
        directory, peer, version = None, None, f"not beside run_mocker_trace_replay: {reason}"
    with TemporaryDirectory() as home:
        path = Path(home, "trace.jsonl")
        workload.write_trace(path)
        requests = list(read_mooncake(path, trace_block_size=workload.BLOCK_SIZE))
    size = workload.BLOCK_SIZE

    def ours():
        _statistics(requests, size, workload.CAPACITY, size)

    yield _beside(
        "requests a second through a scheduler, one at a time, one output token",
        f"{RATIO} × the peer (4,500 where it does 13,800)",
        ours,
        peer,
        version,
        ratio=RATIO,
        count=len(requests),
    )
    if directory is not None:
        directory.cleanup()


def mooncake():
    """The conversation trace, one request at a time, all its output tokens."""
    path = traces()
    size, blocks = MOONCAKE_BLOCK_SIZE, 2_000
    requests = list(read_mooncake(path))
    try:
        core, version = dynamo("1.2")
        args = core.MockEngineArgs(block_size=size, num_gpu_blocks=blocks)

        def peer():
            core.run_mocker_trace_replay(str(path), args, replay_concurrency=1, trace_block_size=size)
    except NotHere as reason:
        peer, version = None, f"not beside run_mocker_trace_replay: {reason}"

    def ours():
        _statistics(requests, size, blocks, None)

    yield _beside(
        "Mooncake conversation trace through a scheduler, one at a time, 4.1 M output tokens",
        f"{TRACE_RATIO} × the peer (10 s where it takes 3)",
        ours,
        peer,
        version,
        ratio=TRACE_RATIO,
    )


def _beside(name, bar, ours, peer, version, *, ratio, count=None):
    """A figure of ours beside the peer, from alternating runs."""
    mine, theirs = [], []
    for _ in range(ROUNDS):
        mine.append(cpu_seconds(ours))
        if peer is not None:
            theirs.append(cpu_seconds(peer))
    seconds = statistics.median(mine)
    measured = f"{seconds:.2f} s" if count is None else f"{count / seconds:,.0f}/s"
    if not theirs:
        return Figure(name, bar, measured, None, version)
    other = statistics.median(theirs)
    met = other / seconds >= ratio
    shown = f"{other:.2f} s" if count is None else f"{count / other:,.0f}/s"
    beside = f"run_mocker_trace_replay, {version}: {shown}"
    return Figure(name, bar, f"{other / seconds:.2f} × ({measured})", met, beside, "" if met else profile_of(ours))


def _serve(backend, case):
    sizes = {"num_gpu_blocks": NUM_GPU_BLOCKS, "block_size": BLOCK_SIZE, "enable_prefix_caching": case.caching}
    with RouterHarness(backend=backend, engine={**sizes, **case.engine}, judge_unpublished=True) as kv:
        engine = kv.engine()
        for request in make_scheduler_requests(case, Random(0)):
            engine.submit(*request)
        report = engine.run()
    assert len(report.completed) == NUM_REQUESTS


def scheduler_matrix():
    """All cases of the scheduler matrix over the eviction backends, with verdict."""

    def all_cases():
        for backend, case in product(BACKENDS, SCHEDULER_CASES):
            _serve(backend, case)

    seconds = cpu_seconds(all_cases)
    met = seconds <= MATRIX_SECONDS
    yield Figure(
        "the scheduler matrix, 24 runs of 200 requests, with verdict",
        f"{MATRIX_SECONDS} s in all",
        f"{seconds:.1f} s",
        met,
        profile="" if met else profile_of(all_cases),
    )
