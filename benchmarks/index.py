"""RadixIndex compared with Dynamo's Rust RadixTree.

Both start from ready events: ours from `RouterEvent` objects, the peer from their JSON as Python objects. A
`json.dumps` per event counts for the peer, since every caller from Python pays for it.
"""

from __future__ import annotations

import gc
import json
import tracemalloc

from benchmarks import workload
from benchmarks.measure import Figure, alternating, dynamo
from pytest_kvmock import RouterEvent
from pytest_kvmock.oracle import RadixIndex

ROUNDS = 7


def fill():
    index = RadixIndex()
    apply = index.apply
    for event in workload.events():
        apply(event)
    return index


def ask(index, queries):
    find = index.find_matches
    for query in queries:
        find(query)


def speed():
    events = workload.events()
    index = fill()
    queries = [request.local for request in workload.requests()]
    cached = [query for query in queries if index.find_matches(query).scores == {(0, 0): workload.BLOCKS}]
    cached *= len(queries) // len(cached)
    core, version = dynamo("1.6")
    documents = [(event.worker_id, event.event.to_dict()) for event in events]

    def fill_theirs():
        tree = core.RadixTree()
        for worker_id, document in documents:
            tree.apply_event(worker_id, json.dumps(document).encode())
        return tree

    tree = fill_theirs()
    assert all(tree.find_matches(query).scores == index.find_matches(query).scores for query in queries[:1000])
    for variant, bar, ours, theirs in (
        ("apply", 1.5, fill, fill_theirs),
        ("find_matches, 32 of 32 cached", 2.5, lambda: ask(index, cached), lambda: ask(tree, cached)),
        ("find_matches, all requests", None, lambda: ask(index, queries), lambda: ask(tree, queries)),
    ):
        mine, other = alternating(ROUNDS, ours, theirs)
        peer = f"RadixTree from Python, JSON encoding counted, {version}"
        yield Figure("RadixIndex", other / mine, bar, peer, variant)


def memory():
    """Measure an index that is the only owner of its hashes: events are read from text, and dropped."""
    lines = [event.to_json() for event in workload.events()]
    gc.collect()
    tracemalloc.start()
    index = RadixIndex()
    for line in lines:
        index.apply(RouterEvent.from_json(line))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] / index.num_blocks(0)
    tracemalloc.stop()
    yield Figure("memory of a cached block in the index", used, 250, unit="B", most=True)
