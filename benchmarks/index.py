"""RadixIndex beside Dynamo's Rust RadixTree.

Both start from ready events: ours from `RouterEvent` objects, the peer from their JSON as Python objects. That it then
costs a `json.dumps` each is counted, since whoever feeds it from Python pays it.
"""

from __future__ import annotations

import gc
import json
import tracemalloc

from benchmarks import workload
from benchmarks.measure import Figure, NotHere, alternating, dynamo, profile_of, rate, wall_seconds
from pytest_kvmock.events import RouterEvent
from pytest_kvmock.router.index import RadixIndex

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
    try:
        core, version = dynamo("1.6")
    except NotHere as reason:
        seconds = [
            wall_seconds(fill),
            wall_seconds(lambda: ask(index, queries)),
            wall_seconds(lambda: ask(index, cached)),
        ]
        print(f"  RadixIndex without its peer ({reason}): " + ", ".join(map("{:.3f} s".format, seconds)))
        raise
    documents = [(event.worker_id, event.event.to_dict()) for event in events]

    def fill_theirs():
        tree = core.RadixTree()
        for worker_id, document in documents:
            tree.apply_event(worker_id, json.dumps(document).encode())
        return tree

    tree = fill_theirs()
    assert all(tree.find_matches(query).scores == index.find_matches(query).scores for query in queries[:1000])
    rows = (
        ("RadixIndex.apply", 1.5, len(events), fill, fill_theirs, "events"),
        (
            "RadixIndex.find_matches, 32 of 32 cached",
            2.5,
            len(cached),
            lambda: ask(index, cached),
            lambda: ask(tree, cached),
            "queries",
        ),
        (
            "RadixIndex.find_matches, all requests",
            None,
            len(queries),
            lambda: ask(index, queries),
            lambda: ask(tree, queries),
            "queries",
        ),
    )
    for name, bar, count, ours, theirs, what in rows:
        mine, other = alternating(ROUNDS, ours, theirs)
        ratio = other / mine
        met = None if bar is None else ratio >= bar
        yield Figure(
            name,
            "" if bar is None else f"{bar} × the peer",
            f"{ratio:.2f} × ({rate(count, mine)} {what})",
            met,
            f"RadixTree from Python, JSON encoding counted, {version}: {rate(count, other)}",
            profile_of(ours) if met is False else "",
        )


def memory():
    """Of an index that is the last to hold its hashes: events come as text, and are dropped."""
    lines = [event.to_json() for event in workload.events()]
    gc.collect()
    tracemalloc.start()
    index = RadixIndex()
    for line in lines:
        index.apply(RouterEvent.from_json(line))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] / index.num_blocks(0)
    tracemalloc.stop()
    yield Figure("memory of the index", "250 B a cached block", f"{used:.0f} B", used <= 250)
