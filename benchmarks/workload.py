"""The common workload of managers, indexes and peers.

10,000 requests of 32 blocks of 16 tokens, one at a time; the first half of each request's blocks is shared by one of 64
groups, and the cache has 8,192 blocks. A block counts once, for its Use and its Deref together.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pytest_kvmock import CapturingSink, RouterEvent, create_manager, sequence_hashes
from pytest_kvmock.values import Deref, Use, lineage_hashes

REQUESTS, BLOCKS, SHARED, GROUPS, CAPACITY, BLOCK_SIZE = 10_000, 32, 16, 64, 8_192, 16


class Request(NamedTuple):
    local: list[int]
    blocks: list[int]
    plhs: list[int]

    def moves(self):
        """Return its Use, and its Derefs as the real scheduler sends them: one per block, tail first."""
        return [Use(self.blocks, self.local, self.plhs), *(Deref([block]) for block in reversed(self.blocks))]


@cache
def requests() -> list[Request]:
    rng = random.Random(0)
    groups = [[rng.getrandbits(64) for _ in range(SHARED)] for _ in range(GROUPS)]
    out = []
    for _ in range(REQUESTS):
        local = [*rng.choice(groups), *(rng.getrandbits(64) for _ in range(BLOCKS - SHARED))]
        blocks = sequence_hashes(local)
        out.append(Request(local, blocks, lineage_hashes(blocks)))
    return out


@cache
def moves() -> list[list[Use | Deref]]:
    return [request.moves() for request in requests()]


@cache
def moves_of_a_worker() -> list[list[Use | Deref]]:
    """Return the same moves with one Deref per request, as `KvWorker` sends it."""
    return [[Use(r.blocks, r.local, r.plhs), Deref(r.blocks[::-1])] for r in requests()]


@cache
def tokens() -> list[list[int]]:
    """Return the tokens of the same requests, for code that hashes them: blocks with equal hashes have equal tokens."""
    known: dict[int, list[int]] = {}
    rng = random.Random(1)
    for request in requests():
        for block in request.local:
            if block not in known:
                known[block] = [rng.randrange(1 << 17) for _ in range(BLOCK_SIZE)]
    return [[token for block in request.local for token in known[block]] for request in requests()]


@cache
def events() -> list[RouterEvent]:
    """Return the events of a worker with an lru cache: about 20,000 events of 16 blocks."""
    sink = CapturingSink()
    serve(create_manager("lru", num_blocks=CAPACITY, block_size=BLOCK_SIZE, sink=sink))
    return sink.router_events


def serve(manager, of=moves) -> None:
    process = manager.process
    for request in of():
        for move in request:
            process(move)


def write_trace(path: Path) -> None:
    """Write the same requests in the Mooncake format, for peers that replay traces; ids there are 32-bit tokens."""
    ids: dict[int, int] = {}
    with path.open("w") as out:
        for request in requests():
            hash_ids = [ids.setdefault(block, len(ids)) for block in request.blocks]
            row = {"timestamp": 0, "input_length": BLOCKS * BLOCK_SIZE, "output_length": 1, "hash_ids": hash_ids}
            out.write(json.dumps(row) + "\n")
