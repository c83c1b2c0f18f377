"""A router index for tests with a scheduler's traffic: the prefixes of each worker, and its total number of blocks.

It counts the blocks of events, and so knows how full the workers' caches are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pytest_kvmock import Cleared, Removed, RouterEvent, Stored


class CountingRouter:
    """The prefixes of each worker, by the chain of local hashes up to each block."""

    def __init__(self) -> None:
        self._chains: dict[int, dict[int, tuple[int, ...]]] = {}  # by worker: the chain of each block
        self._places: dict[int, Counter[tuple[int, ...]]] = {}
        self.stored: Counter[int] = Counter()
        self.removed: Counter[int] = Counter()

    def apply(self, event: RouterEvent) -> None:
        """Apply one event of a worker."""
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
        """Return the number of leading blocks of a prompt that each worker has; workers without any are absent."""
        found = {}
        for worker, places in self._places.items():
            depth = 0
            while depth < len(local_hashes) and places[tuple(local_hashes[: depth + 1])] > 0:
                depth += 1
            if depth:
                found[worker] = depth
        return found

    def num_blocks(self, worker: int) -> int:
        """Return the number of blocks that a worker holds."""
        return len(self._chains.get(worker, ()))
