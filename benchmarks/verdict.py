"""The verdict: what it costs to have every event judged."""

from __future__ import annotations

import os
import statistics
from functools import partial
from pathlib import Path

from benchmarks import workload
from benchmarks.measure import Figure, NotHere, cpu_seconds, profile_of, rate
from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.router.index import RadixIndex
from pytest_kvmock.traces import MOONCAKE_BLOCK_SIZE, read_mooncake

TOTAL = workload.REQUESTS * workload.BLOCKS
TRACE = "mooncake_conversation_trace.jsonl"
TRACE_CAPACITY = 4_000


class Plugged:
    """A reference index of its own, as a user's would be."""

    def __init__(self):
        tree = RadixIndex()
        self.apply, self.find_matches = tree.apply, tree.find_matches


def judged(index=None, sync="auto"):
    profile = EngineProfile(block_size=workload.BLOCK_SIZE, num_blocks=workload.CAPACITY)
    with RouterHarness(profile, "lineage", index, sync=sync) as kv:
        workload.serve(kv.worker(0).manager)
    assert kv.events.total


def with_ledger_and_index():
    workload.moves()
    seconds = statistics.median(cpu_seconds(judged) for _ in range(5))
    met = TOTAL / seconds >= 0.3e6
    yield Figure(
        "the same with ledger and index, lineage",
        "0.3 M/s",
        rate(TOTAL, seconds),
        met,
        profile="" if met else profile_of(judged),
    )


def with_an_index_asked_after_every_event():
    workload.moves()
    for sync in ("every", "auto"):
        seconds = cpu_seconds(partial(judged, Plugged(), sync))
        name = "after every event" if sync == "every" else "as by default"
        yield Figure(f"the same with an index plugged in and asked {name}", "", rate(TOTAL, seconds))


def traces():
    """As tests/conftest.py finds them."""
    named = os.environ.get("KVMOCK_TRACES")
    path = (Path(named) if named else Path(__file__).parents[2] / "shared" / "traces") / TRACE
    if not path.is_file():
        raise NotHere("the Mooncake traces are not here: set KVMOCK_TRACES to their directory")
    return path


def mooncake():
    requests = list(read_mooncake(traces()))
    blocks = sum(len(request.hash_ids) for request in requests)

    def serve():
        with RouterHarness(EngineProfile(block_size=MOONCAKE_BLOCK_SIZE, num_blocks=TRACE_CAPACITY)) as kv:
            worker = kv.worker(0)
            for request in requests:
                worker.serve(request.prompt(whole_blocks=True))
            kv.assert_in_sync()

    seconds = statistics.median(cpu_seconds(serve) for _ in range(3))
    met = seconds <= 3
    yield Figure(
        f"Mooncake conversation trace ({len(requests):,} requests, {blocks:,} blocks) through a worker with full verdict",
        "3 s",
        f"{seconds:.2f} s ({rate(blocks, seconds)})",
        met,
        profile="" if met else profile_of(serve),
    )
