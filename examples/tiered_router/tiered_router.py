"""A router for workers with host memory below the device, tested by `test_tiered_router.py`.

A prefix on the device costs nothing. A prefix in host memory comes back over a link, which is cheaper than recomputing
it. A block on the device therefore saves a whole block of prefill, and a block on the host that extends it saves three
quarters: the weights of Dynamo's router, `overlap_score_credit` and `host_cache_hit_weight`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from pytest_kvmock import Removed, RouterEvent, StorageTier, Stored

Edge: TypeAlias = tuple[int | None, int]
"""The previous block (None for a root) and the local hash of the block."""

CREDIT = {StorageTier.DEVICE: 1.0, StorageTier.HOST_PINNED: 0.75, StorageTier.DISK: 0.25}
"""The saving of a block in each tier, in blocks of prefill; other tiers save nothing."""


class Tier:
    """The blocks of one worker in one tier, each with the edge that leads to it.

    A look-up reaches a block only through its parent, so the order of arrival does not matter: the host stores a prefix
    from its end.
    """

    def __init__(self) -> None:
        self._after: dict[Edge, int] = {}
        self._edges: dict[int, Edge] = {}

    def __len__(self) -> int:
        return len(self._edges)

    def store(self, data: Stored) -> None:
        """Add the blocks of a Stored."""
        parent = data.parent_hash
        for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            self.remove([block])
            self._after[parent, local] = block
            self._edges[block] = parent, local
            parent = block

    def remove(self, blocks: Iterable[int]) -> None:
        """Remove blocks."""
        for block in blocks:
            edge = self._edges.pop(block, None)
            if edge is not None and self._after.get(edge) == block:
                del self._after[edge]

    def follow(self, block: int | None, local_hashes: Sequence[int]) -> list[int]:
        """Return the blocks that follow a block, as far as they match."""
        found: list[int] = []
        for local in local_hashes:
            block = self._after.get((block, local))
            if block is None:
                break
            found.append(block)
        return found


class TieredIndex:
    """The prefixes of each worker in each tier, for one rank per worker."""

    def __init__(self) -> None:
        self._tiers: defaultdict[tuple[int, StorageTier], Tier] = defaultdict(Tier)

    def apply(self, event: RouterEvent) -> None:
        """Apply one event of a worker."""
        data, tier = event.event.data, self._tiers[event.worker_id, event.storage_tier]
        if isinstance(data, Stored):
            tier.store(data)
        elif isinstance(data, Removed):
            tier.remove(data.block_hashes)
        else:  # Cleared empties every tier of the worker
            self.remove_worker(event.worker_id)

    def remove_worker(self, worker: int) -> None:
        """Drop a worker that was removed or restarted."""
        for tier in StorageTier:
            self._tiers.pop((worker, tier), None)

    def find_tiered(self, local_hashes: Sequence[int]) -> dict[StorageTier, dict[tuple[int, int], int]]:
        """Return the leading blocks of a prompt: for each tier, the blocks by which it extends the match of the faster
        tiers.
        """
        found: dict[StorageTier, dict[tuple[int, int], int]] = {tier: {} for tier in StorageTier}
        for worker in {worker for worker, _ in self._tiers}:
            block: int | None = None
            depth = 0
            for tier, matches in found.items():  # from the fastest to the slowest
                if (worker, tier) not in self._tiers:
                    continue
                blocks = self._tiers[worker, tier].follow(block, local_hashes[depth:])
                if blocks:
                    matches[worker, 0] = len(blocks)
                    block, depth = blocks[-1], depth + len(blocks)
        return found

    def size(self, worker: int, tier: StorageTier) -> int:
        """Return the number of blocks of a worker in a tier."""
        return len(self._tiers[worker, tier])


class TieredRouter:
    """Chooses a worker for each prompt: the one with the least left to prefill, including its load.

    Args:
        index: the index of the workers' blocks by tier.
        workers: the ids of the workers.
        credit: the saving of a block in each tier, in blocks of prefill.
    """

    def __init__(
        self, index: TieredIndex, workers: Iterable[int], credit: dict[StorageTier, float] | None = None
    ) -> None:
        self.index = index
        self._credit = CREDIT if credit is None else credit
        self._active: Counter[int] = Counter()  # blocks of the running requests of each worker
        self._routed = dict.fromkeys(workers, 0)

    def cost(self, local_hashes: Sequence[int]) -> dict[int, float]:
        """Return the cost of a prompt on each worker, in blocks."""
        costs = {worker: float(len(local_hashes) + self._active[worker]) for worker in self._routed}
        for tier, matches in self.index.find_tiered(local_hashes).items():
            for (worker, _), blocks in matches.items():
                if worker in costs:
                    costs[worker] -= self._credit.get(tier, 0.0) * blocks
        return costs

    def route(self, local_hashes: Sequence[int]) -> int:
        """Choose the cheapest worker, among equals the one that was chosen least, and count the request as running
        there.
        """
        costs = self.cost(local_hashes)
        worker = min(costs, key=lambda worker: (costs[worker], self._routed[worker]))
        self._routed[worker] += 1
        self._active[worker] += len(local_hashes)
        return worker

    def finish(self, worker: int, local_hashes: Sequence[int]) -> None:
        """Stop counting a finished request."""
        self._active[worker] -= len(local_hashes)
