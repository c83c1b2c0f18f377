"""Blocks a second through the logical manager, and bytes for each block it caches.

The workload is the one the peers were measured with: 10,000 requests of 32 blocks, half of the blocks shared with one
of 64 groups' prefixes, capacity 8,192, one request at a time: a Use of its 32 blocks, then its frees, tail first.
Hashes are given; a capturing sink takes the events. A block counts once, for its Use and its Deref together.

    python benchmarks/bench_manager.py
"""

import gc
import random
import statistics
import sys
import time
import tracemalloc

from pytest_kvmock.cache.eviction.lineage import LineagePolicy
from pytest_kvmock.cache.eviction.lru import LruPolicy
from pytest_kvmock.cache.logical import LogicalManager
from pytest_kvmock.moves import Deref, Use
from pytest_kvmock.sinks import CapturingSink
from pytest_kvmock.tokens import lineage_hashes, sequence_hashes

POLICIES = {"lru": LruPolicy, "lineage": LineagePolicy}
REQUESTS, BLOCKS, GROUPS, CAPACITY = 10_000, 32, 64, 8_192


def workload(seed=0, requests=REQUESTS):
    """Local, sequence and lineage hashes of each request."""
    rng = random.Random(seed)
    prefixes = [[rng.getrandbits(64) for _ in range(BLOCKS // 2)] for _ in range(GROUPS)]
    prompts = []
    for _ in range(requests):
        local = [*rng.choice(prefixes), *(rng.getrandbits(64) for _ in range(BLOCKS // 2))]
        blocks = sequence_hashes(local)
        prompts.append((local, blocks, lineage_hashes(blocks)))
    return prompts


def new_manager(backend):
    return LogicalManager(backend=backend, eviction=POLICIES[backend](), num_blocks=CAPACITY, sink=CapturingSink())


def moves_of(prompts, frees):
    """One list of moves a request; `frees`: "single" is a Deref a block, as the real scheduler sends, "whole" is one."""
    requests = []
    for local, blocks, plhs in prompts:
        tail_first = blocks[::-1]
        derefs = [Deref([block]) for block in tail_first] if frees == "single" else [Deref(tail_first)]
        requests.append([Use(blocks, local, plhs), *derefs])
    return requests


def drive(manager, requests):
    process = manager.process
    start = time.process_time()  # one thread: the same as the wall clock of an idle machine, on a busy one too
    for moves in requests:
        for move in moves:
            process(move)
    return time.process_time() - start


def blocks_a_second(backend, requests, repeats=5):
    figures = []
    for _ in range(repeats):
        manager = new_manager(backend)
        gc.collect()
        figures.append(len(requests) * BLOCKS / drive(manager, requests))
    return statistics.median(figures)


def bytes_a_block(backend, prompts):
    """What the manager itself holds for a cached block, hashes included, events not."""
    tracemalloc.start()
    manager = LogicalManager(backend=backend, eviction=POLICIES[backend](), num_blocks=CAPACITY)
    before = tracemalloc.get_traced_memory()[0]
    for prompt, _, _ in prompts:
        # Hashes of its own for each request, as they would come from outside: kept alive by the manager alone.
        local = [value + 0 for value in prompt]
        blocks = sequence_hashes(local)
        manager.process(Use(blocks, local, lineage_hashes(blocks)))
        manager.process(Deref(blocks[::-1]))
    del local, blocks
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / manager.num_inactive_blocks


def main():
    prompts = workload()
    print(f"Python {sys.version.split()[0]}; {REQUESTS:,} requests x {BLOCKS} blocks, capacity {CAPACITY:,}")
    for frees in ("single", "whole"):
        requests = moves_of(prompts, frees)
        for backend in POLICIES:
            rate = blocks_a_second(backend, requests)
            print(f"{backend:8} frees {frees:7} {rate / 1e6:6.3f} M blocks/s")
    for backend in POLICIES:
        print(f"{backend:8} {bytes_a_block(backend, prompts[:2000]):6.0f} bytes a cached block")


if __name__ == "__main__":
    main()
