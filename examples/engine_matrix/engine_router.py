"""A router for engines of any make, which is what `test_engine_matrix.py` tests.

It differs in one thing from one for Dynamo's engines alone: vLLM stores several copies of one block and removes each by
itself, so it counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from pytest_kvmock import Removed, RouterEvent, Stored

Place: TypeAlias = int
"""Where a block stands: the hash of all local hashes up to its own."""

ROOT: Place = 0


class EngineIndex:
    """Which worker has which prefix, by the local hashes in the events of the workers."""

    def __init__(self) -> None:
        self._places: dict[int, dict[int, Place]] = {}  # of each worker: where its blocks stand
        self._copies: dict[int, Counter[Place]] = {}  # of each worker: how many copies it has of what stands there

    def apply(self, event: RouterEvent) -> None:
        """Take one event of a worker."""
        places = self._places.setdefault(event.worker_id, {})
        copies = self._copies.setdefault(event.worker_id, Counter())
        data = event.event.data
        if isinstance(data, Stored):
            place = ROOT if data.parent_hash is None else places[data.parent_hash]
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                place = hash((place, local))
                places[block] = place
                copies[place] += 1
        elif isinstance(data, Removed):
            for block in data.block_hashes:
                copies[places[block]] -= 1
                if not copies[places[block]]:
                    del copies[places[block]], places[block]
        else:
            places.clear()
            copies.clear()

    def find_matches(self, local_hashes: Sequence[int]) -> dict[int, int]:
        """How many leading blocks of a prompt each worker has; who has none is absent."""
        found = {worker: self._depth(copies, local_hashes) for worker, copies in self._copies.items()}
        return {worker: depth for worker, depth in found.items() if depth}

    @staticmethod
    def _depth(copies: Counter[Place], local_hashes: Sequence[int]) -> int:
        place = ROOT
        for depth, local in enumerate(local_hashes):
            place = hash((place, local))
            if place not in copies:
                return depth
        return len(local_hashes)


class EngineRouter:
    """Sends a prompt to the worker that has most of it, and among equals to the one that was asked least.

    Args:
        index: what the workers have.
        workers: their ids.
    """

    def __init__(self, index: EngineIndex, workers: Sequence[int]) -> None:
        self.index = index
        self._asked = dict.fromkeys(workers, 0)

    def route(self, local_hashes: Sequence[int]) -> int:
        """Choose a worker for a prompt."""
        overlap = self.index.find_matches(local_hashes)
        worker = min(self._asked, key=lambda worker: (-overlap.get(worker, 0), self._asked[worker]))
        self._asked[worker] += 1
        return worker
