"""A router index that a scheduler's traffic tests: which worker holds which prefix, and how many blocks in all.

It counts what it is told, and so knows how full the caches of the workers are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pytest_kvmock import Cleared, Removed, RouterEvent, Stored


class CountingRouter:
    """Which worker has which prefix, by the chain of local hashes up to each block."""

    def __init__(self) -> None:
        self._chains: dict[int, dict[int, tuple[int, ...]]] = {}  # of each worker: the chain of each block
        self._places: dict[int, Counter[tuple[int, ...]]] = {}
        self.stored: Counter[int] = Counter()
        self.removed: Counter[int] = Counter()

    def apply(self, event: RouterEvent) -> None:
        """Take one event of a worker."""
        worker, data = event.worker_id, event.event.data
        chains = self._chains.setdefault(worker, {})
        places = self._places.setdefault(worker, Counter())
        if isinstance(data, Stored):
            chain = () if data.parent_hash is None else chains[data.parent_hash]
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                chain = (*chain, local)
                if block not in chains:
                    chains[block] = chain
                    places[chain] += 1
            self.stored[worker] += len(data.block_hashes)
        elif isinstance(data, Removed):
            for block in data.block_hashes:
                places[chains.pop(block)] -= 1
            self.removed[worker] += len(data.block_hashes)
        else:
            assert isinstance(data, Cleared)
            chains.clear()
            places.clear()

    def find_matches(self, local_hashes: Sequence[int]) -> dict[int, int]:
        """How many leading blocks of a prompt each worker has; who has none is absent."""
        found = {}
        for worker, places in self._places.items():
            depth = 0
            while depth < len(local_hashes) and places[tuple(local_hashes[: depth + 1])] > 0:
                depth += 1
            if depth:
                found[worker] = depth
        return found

    def num_blocks(self, worker: int) -> int:
        """How many blocks a worker holds."""
        return len(self._chains.get(worker, ()))
