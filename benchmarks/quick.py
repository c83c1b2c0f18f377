"""Ratios that a minute can measure, relative to a loop of plain Python: a change must not halve one unnoticed.

The loop has the most frequent operations of the package, with dictionaries, tuples and one hash per block, so that a
ratio depends little on the machine and much on the code: it is the speed of our blocks in units of the loop's.
`python -m benchmarks quick` records them, `python -m benchmarks --quick` compares with the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

from benchmarks import workload
from benchmarks.block_manager import full_cycles
from benchmarks.measure import Figure, NotHere, cpu_seconds, needs
from benchmarks.wire import stored_events
from pytest_kvmock import (
    CapturingSink,
    EngineProfile,
    MockEngine,
    MockEngineArgs,
    RouterHarness,
    block_hashes,
    create_manager,
    replay,
)
from pytest_kvmock.fleets import TraceRequest, synthetic_trace
from pytest_kvmock.oracle import RadixIndex

FALL = 2.0
"""The factor below the recorded ratio that is a failure."""

PEER = "a loop of plain Python"
ROUNDS = 3
LOOP_BLOCKS = 200_000
REQUESTS = 1_000  # of the workload
SIZE = workload.BLOCK_SIZE
DIALECT = "vllm-0.33"


def loop() -> None:
    """Run the loop of plain Python, the unit of all ratios."""
    held: dict[int, tuple[int, int]] = {}
    order: list[int] = []
    parent = 0
    for block in range(LOOP_BLOCKS):
        parent = hash((parent, block))
        held[parent] = (block, parent)
        order.append(parent)
        if block >= workload.CAPACITY:
            held.pop(order[block - workload.CAPACITY], None)


@cache
def trace(requests: int = 250, interval_ms: int = 40) -> tuple[TraceRequest, ...]:
    sizes: dict[str, Any] = {
        "input_tokens": (64, 600),
        "output_tokens": (4, 24),
        "groups": 16,
        "prefix_blocks": (4, 16),
    }
    return tuple(synthetic_trace(requests, block_size=SIZE, interval_ms=interval_ms, seed=1, **sizes))


def blocks_of(requests: Iterable[TraceRequest]) -> int:
    return sum(request.input_length for request in requests) // SIZE


def _manager(backend: str) -> int:
    manager = create_manager(backend, num_blocks=workload.CAPACITY, block_size=SIZE, sink=CapturingSink())
    for moves in workload.moves_of_a_worker()[:REQUESTS]:
        for move in moves:
            manager.process(move)
    return REQUESTS * workload.BLOCKS


def _verdict(backend: str, capacity: int = workload.CAPACITY) -> int:
    with RouterHarness(EngineProfile(block_size=SIZE, num_blocks=capacity), backend) as kv:
        worker = kv.worker(0)
        for tokens in workload.tokens()[: REQUESTS // 2]:
            worker.serve(tokens)
        assert not kv.events.errors
    return REQUESTS // 2 * workload.BLOCKS


def _fleet(workers: int) -> int:
    with RouterHarness(EngineProfile(block_size=SIZE, num_blocks=1_024, workers=workers), "lineage") as kv:
        kv.fleet().run(trace()).to_json()
    return blocks_of(trace())


def _replay() -> int:
    replay(trace(), [MockEngine(MockEngineArgs(block_size=SIZE, num_gpu_blocks=4_096))]).to_json()
    return blocks_of(trace())


def _hashes() -> int:
    for tokens in workload.tokens()[:REQUESTS]:
        block_hashes(tokens, SIZE)
    return REQUESTS * workload.BLOCKS


@cache
def _filled() -> RadixIndex:
    index = RadixIndex()
    for event in workload.events():
        index.apply(event)
    return index


def _apply() -> int:
    index, events = RadixIndex(), workload.events()[:4_000]
    for event in events:
        index.apply(event)
    return len(events) * workload.SHARED


def _find() -> int:
    index = _filled()
    for request in workload.requests():
        index.find_matches(request.local)
    return workload.REQUESTS * workload.BLOCKS


def _encode_and_decode() -> int:
    needs("msgspec")
    from pytest_kvmock.wire import Batch, decode, encode

    batch = Batch(stored_events(), 1700000000.5)
    for _ in range(30):
        decode(encode(batch, DIALECT), DIALECT)
    return 30 * sum(len(event.event.data.block_hashes) for event in batch.events)


FIGURES: Mapping[str, Callable[[], int]] = {
    **{f"manager, {name}": partial(_manager, name) for name in ("lineage", "lru", "multi_lru")},
    **{f"worker and verdict, {name}": partial(_verdict, name) for name in ("lineage", "vllm", "sglang")},
    "worker and verdict, lineage, 64 k blocks": partial(_verdict, "lineage", 65_536),
    **{f"fleet and verdict, {workers} workers": partial(_fleet, workers) for workers in (8, 64)},
    "replay, one engine": _replay,
    "local hashes from tokens": _hashes,
    "KvBlockManager, full cycles": full_cycles,
    "index, events applied": _apply,
    "index, questions": _find,
    f"events encoded and decoded, {DIALECT}": _encode_and_decode,
}
"""The functions that are measured; each runs once, and returns its number of blocks."""


def ratio(run: Callable[[], int]) -> float:
    """Return the speed of a run's blocks relative to the loop's, from the best of alternating rounds.

    Raises:
        NotHere: a package is not installed.
    """
    blocks, ours, plain = 0, [], []

    def counted() -> None:
        nonlocal blocks
        blocks = run()

    for _ in range(ROUNDS):  # the first round also fills caches, and is never the best
        plain.append(cpu_seconds(loop))
        ours.append(cpu_seconds(counted))
    return (blocks / min(ours)) / (LOOP_BLOCKS / min(plain))


def ratios():
    """Yield one row per figure, to be recorded."""
    for name, run in FIGURES.items():
        found = ratio(run)
        yield _figure(name, round(found, 4))


def falls(rows: Mapping[str, Mapping[str, Any]], measure: Callable[[Callable[[], int]], float] = ratio) -> list[str]:
    """Return a line for each figure that fell by more than `FALL`; print all figures.

    Args:
        rows: the recorded rows, as in `results.json`.
        measure: measures one figure.
    """
    fallen = []
    for name, run in FIGURES.items():
        row = rows.get(_figure(name, 0).key)
        if row is None:
            fallen.append(f"{name}: nothing is recorded; run `python -m benchmarks quick`")
            continue
        recorded = row["ratio"]
        try:
            found = measure(run)
            if found * FALL < recorded:  # other work of the machine may have slowed it, but not the loop
                found = max(found, measure(run))
        except NotHere as reason:
            print(f"{name}: not measured here: {reason}", flush=True)
            continue
        print(f"{name}: {found:.4f}, recorded {recorded:.4f}", flush=True)
        if found * FALL < recorded:
            fallen.append(f"{name}: {found:.4f} is {recorded / found:.1f} times less than the recorded {recorded:.4f}")
    return fallen


def _figure(name: str, ratio: float) -> Figure:
    what, _, variant = name.partition(", ")
    return Figure(f"guarded by `--quick`: blocks a CPU second, {what}", ratio, None, PEER, variant)
