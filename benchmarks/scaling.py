"""Cost per block relative to the smallest size, as caches, fleets and traces grow; the plots should be flat.

Each size is four times the previous one, up to the requested largest. All runs have the full verdict, over `lineage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from benchmarks import quick, workload
from benchmarks.measure import Figure, cpu_seconds
from benchmarks.page import AXES, BAND, cost_name
from pytest_kvmock import EngineProfile, Prompt, RouterHarness

ROUNDS = 3
REQUESTS = 500  # measured once a cache is full
SIZE, BLOCKS = workload.BLOCK_SIZE, workload.BLOCKS
FLEET = 4  # workers for traces of any length, and requests per worker when workers grow


def blocks(largest: int) -> Iterator[Figure]:
    """Measure a worker with a full cache: each request finds half of its blocks, and evicts for the others."""
    return _costs("blocks", largest, _full_cache)


def _full_cache(capacity: int) -> float:
    fresh = count(1)
    with RouterHarness(EngineProfile(block_size=SIZE, num_blocks=capacity), "lineage") as kv:
        worker = kv.worker(0)

        def serve(requests: int) -> None:
            for _ in range(requests):
                start = next(fresh) * BLOCKS
                hashes = [*range(BLOCKS // 2), *range(start, start + BLOCKS // 2)]
                worker.serve(Prompt(hashes=hashes, num_tokens=BLOCKS * SIZE))

        serve(capacity // (BLOCKS // 2))
        seconds = min(cpu_seconds(lambda: serve(REQUESTS)) for _ in range(ROUNDS))
        assert worker.manager.num_inactive_blocks > capacity - BLOCKS
        assert not kv.events.errors
    return seconds / (REQUESTS * BLOCKS)


def workers(largest: int) -> Iterator[Figure]:
    """Measure a fleet behind the router, with the same requests and load per worker at each size."""
    why = "the router weighs every worker for each request, as Dynamo's does"
    return _costs("workers", largest, lambda size: _fleet(size, max(512, FLEET * size), max(1, 1_024 // size)), why)


def requests(largest: int) -> Iterator[Figure]:
    """Measure a fleet behind the router, with traces of any length."""
    return _costs("requests", largest, lambda size: _fleet(FLEET, size, 80))


def _fleet(of: int, length: int, interval_ms: int) -> float:
    trace = quick.trace.__wrapped__(length, interval_ms)  # without its cache
    with RouterHarness(EngineProfile(block_size=SIZE, num_blocks=1_024, workers=of), "lineage") as kv:
        fleet = kv.fleet()
        seconds = cpu_seconds(lambda: fleet.run(trace).to_json())
    return seconds / quick.blocks_of(trace)


def _costs(axis: str, largest: int, cost: Callable[[int], float], why: str = "") -> Iterator[Figure]:
    size = AXES[axis][1]
    cost(size)  # fills caches
    first = cost(size)
    peer = f"the smallest size: {size:,}"
    yield Figure(cost_name(axis), 1.0, BAND, peer, f"{size:,}", most=True)
    while (size := 4 * size) <= largest:
        yield Figure(cost_name(axis), cost(size) / first, BAND, peer, f"{size:,}", most=True, why=why)
