"""The verdict: the cost that an index under test adds, and the path of the traces."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from benchmarks import workload
from benchmarks.measure import Figure, NotHere, alternating, cpu_seconds
from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.oracle import RadixIndex

TRACE = "mooncake_conversation_trace.jsonl"
TRACE_CAPACITY = 4_000


class Plugged:
    """A separate reference index, in place of a user's."""

    def __init__(self):
        tree = RadixIndex()
        self.apply, self.find_matches = tree.apply, tree.find_matches


def judged(index=None, sync="auto"):
    profile = EngineProfile(block_size=workload.BLOCK_SIZE, num_blocks=workload.CAPACITY)
    with RouterHarness(profile, "lineage", index, sync=sync) as kv:
        workload.serve(kv.worker(0).manager)
    assert kv.events.total


def with_an_index():
    """Measure the verdict with an index under test, queried after each event or as by default, against the verdict
    without it.
    """
    workload.moves()
    for variant, sync in (("asked after every event", "every"), ("asked as by default", "auto")):
        seconds, alone = alternating(1, partial(judged, Plugged(), sync), judged, clock=cpu_seconds)
        name = "blocks through manager, ledger and index with an index under test"
        yield Figure(name, alone / seconds, None, "the same without an index under test", variant)


def traces():
    """Return the path of the conversation trace, found as in tests/conftest.py."""
    named = os.environ.get("KVMOCK_TRACES")
    path = (Path(named) if named else Path(__file__).parents[2] / "shared" / "traces") / TRACE
    if not path.is_file():
        raise NotHere("the Mooncake traces are not here: set KVMOCK_TRACES to their directory")
    return path
