"""RadixIndex against Dynamo's Rust RadixTree, in one process, as ratios.

Run it where `ai-dynamo-runtime` is installed (the bars are set against 1.6.1):

    python benchmarks/bench_index.py

The workload is that of the other benchmarks: 10,000 requests of 32 blocks, the first half of each shared by one of 64
groups, through a cache of 8,192 blocks with LRU eviction and tail-first frees: about 20,000 events of 16 blocks.
Ours starts from `RouterEvent` objects, the Rust tree from ready dicts; `json.dumps` is counted, since whoever feeds the
tree from Python pays it. Rounds alternate and the median of the rounds counts.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from importlib import metadata

from pytest_kvmock.events import KvCacheEvent, Removed, RouterEvent, Stored
from pytest_kvmock.router.index import RadixIndex
from pytest_kvmock.tokens import sequence_hashes

REQUESTS, BLOCKS, SHARED, GROUPS, CAPACITY = 10_000, 32, 16, 64, 8_192
ROUNDS = 9
BARS = {"apply": 1.5, "find, all requests": 2.5}


def workload(seed: int = 7) -> tuple[list[list[int]], list[RouterEvent]]:
    """The requests' local hashes, and the events that an engine with an LRU cache publishes for them."""
    rnd = random.Random(seed)
    groups = [[rnd.getrandbits(64) for _ in range(SHARED)] for _ in range(GROUPS)]
    requests, events = [], []
    cached: OrderedDict[int, None] = OrderedDict()
    for _ in range(REQUESTS):
        local = [*rnd.choice(groups), *(rnd.getrandbits(64) for _ in range(BLOCKS - SHARED))]
        requests.append(local)
        chain = sequence_hashes(local)
        hits = next((i for i, h in enumerate(chain) if h not in cached), BLOCKS)
        for h in chain[:hits]:
            del cached[h]
        removed = []
        while len(cached) + BLOCKS > CAPACITY:
            removed.append(cached.popitem(last=False)[0])
        cached.update(dict.fromkeys(reversed(chain)))
        if hits < BLOCKS:
            data = Stored(chain[hits - 1] if hits else None, tuple(chain[hits:]), tuple(local[hits:]))
            events.append(RouterEvent(0, KvCacheEvent(len(events), data)))
        if removed:
            events.append(RouterEvent(0, KvCacheEvent(len(events), Removed(tuple(removed)))))
    return requests, events


def seconds(function: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def fill(events: list[RouterEvent]) -> RadixIndex:
    index = RadixIndex()
    apply = index.apply
    for event in events:
        apply(event)
    return index


def ask(index: RadixIndex, queries: list[list[int]]) -> None:
    find = index.find_matches
    for query in queries:
        find(query)


def bytes_per_block(events: list[RouterEvent]) -> float:
    """Memory of an index that is the last to hold its hashes: events come as text, and are dropped."""
    lines = [event.to_json() for event in events]
    gc.collect()
    tracemalloc.start()
    index = RadixIndex()
    for line in lines:
        index.apply(RouterEvent.from_json(line))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / index.num_blocks(0)


def main() -> None:
    requests, events = workload()
    blocks = sum(len(e.event.data.block_hashes) for e in events)
    print(f"{len(events)} events, {blocks} blocks in them")

    index = fill(events)
    queries = {
        "find, all requests": requests,
        # The most that a query can cost: those of the last requests, whose every block is still there.
        "find, 32 of 32 cached": [q for q in requests if index.find_matches(q).scores == {(0, 0): BLOCKS}] * 30,
    }
    try:
        from dynamo._core import RadixTree
    except ImportError:
        RadixTree = None  # noqa: N806 - the class of that name
        print("ai-dynamo-runtime is not installed: no ratios")

    documents = [(event.worker_id, event.event.to_dict()) for event in events]

    def fill_rust():
        tree = RadixTree()
        for worker_id, document in documents:
            tree.apply_event(worker_id, json.dumps(document).encode())
        return tree

    def ask_rust(queries):
        find = tree.find_matches
        for query in queries:
            find(query)

    figures = {"apply": (len(events), lambda: fill(events), fill_rust if RadixTree else None)}
    tree = fill_rust() if RadixTree else None
    for name, asked in queries.items():
        if tree is not None:
            assert all(tree.find_matches(q).scores == index.find_matches(q).scores for q in asked[:1000])
        figures[name] = (
            len(asked),
            lambda asked=asked: ask(index, asked),
            (lambda asked=asked: ask_rust(asked)) if RadixTree else None,
        )
    if RadixTree:
        print(f"peer: RadixTree of ai-dynamo-runtime {metadata.version('ai-dynamo-runtime')}, JSON encoding counted")
    for name, (count, ours, theirs) in figures.items():
        mine, peer = [], []
        for _ in range(ROUNDS):
            mine.append(seconds(ours))
            if theirs:
                peer.append(seconds(theirs))
        rate = count / statistics.median(mine)
        line = f"{name:24} {rate:10,.0f}/s"
        if theirs:
            other = count / statistics.median(peer)
            line += f"   peer {other:10,.0f}/s   ratio {rate / other:5.2f}"
            if name in BARS:
                line += f"   (bar {BARS[name]})"
        print(line)
    print(f"{'memory':24} {bytes_per_block(events):10,.0f} bytes a cached block   (bar 500)")


if __name__ == "__main__":
    main()
