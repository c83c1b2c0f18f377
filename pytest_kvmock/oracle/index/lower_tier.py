"""The blocks of one tier below the device: edges from block to block, not a tree.

Theory of operation. An engine offloads blocks in the order in which the device evicts them: the last block of a chain
first, and often a block without its parent. So a tier holds, for each worker and rank, edges
`(parent's sequence hash, local hash) -> sequence hash`, and a Stored adds edges even if the parent is not held
(Dynamo, `LowerTierIndexer` of kv-router 1.2.1). A query continues from the end of the faster tiers' match: it follows
the edge of the next local hash as long as there is one.

As in 1.2.1, the first edge of a place wins. If a Stored names another block there, or another place for a block that
is held, it ends at that block without an error. Removing a block keeps the edges of its children.

This module differs where 1.2.1 is wrong by accident. 1.2.1 keeps one table of edges for all workers, in which workers
share an edge only if they give the block the same name; here each rank has its own table. A Removed with an unknown
block still removes the others, as on the device; 1.2.1 stops there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pytest_kvmock.oracle.index.tree import Node, Rank, WorkerRank
from pytest_kvmock.values.events import Stored


class Match(NamedTuple):
    """How far a query matches for one worker and rank.

    Attributes:
        depth: number of leading blocks that match.
        last: sequence hash of the last of them; None if it is unknown or there are none.
    """

    depth: int
    last: int | None


class Edges:
    """What one worker and rank holds in one tier below the device.

    Attributes:
        blocks: by sequence hash, each block's parent and local hash, in the order of their Stored.
    """

    __slots__ = ("_by_local", "blocks")

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, int]] = {}
        # The first key is the local hash: at the end of the device's match only the next local hash is known, not the
        # name of the parent.
        self._by_local: dict[int, dict[int | None, int]] = {}

    def store(self, data: Stored) -> None:
        """Add the blocks of a Stored, up to the first that contradicts a held block."""
        parent, blocks = data.parent_hash, self.blocks
        for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            if blocks.get(block, (parent, local)) != (parent, local):
                return
            if self._by_local.setdefault(local, {}).setdefault(parent, block) != block:
                return
            blocks[block] = parent, local
            parent = block

    def remove(self, blocks: Iterable[int]) -> int | None:
        """Remove blocks; return the first that is not held, if there is one."""
        unknown = None
        for block in blocks:
            edge = self.blocks.pop(block, None)
            if edge is not None:
                parent, local = edge
                children = self._by_local[local]
                del children[parent]
                if not children:
                    del self._by_local[local]
            elif unknown is None:
                unknown = block
        return unknown

    def clear(self) -> None:
        """Remove all blocks."""
        self.blocks.clear()
        self._by_local.clear()

    def after_device(self, local_hashes: Sequence[int], depth: int, node: Node, rank: Rank) -> Match | None:
        """Return the device's match with the sequence hash from which this tier continues; None if it does not.

        Args:
            local_hashes: the query.
            depth: number of leading blocks that the device holds, at least one.
            node: the last of them in the device's tree.
            rank: the same worker and rank there.
        """
        if depth == len(local_hashes):
            return None
        for parent in self._by_local.get(local_hashes[depth], ()):
            if parent is not None and rank.blocks.get(parent) is node:
                return Match(depth, parent)
        return None

    def extend(self, local_hashes: Sequence[int], match: Match) -> Match:
        """Return the match with the blocks that this tier adds to it; the same object if it adds none."""
        depth, last = match
        while depth < len(local_hashes):
            child = self._by_local.get(local_hashes[depth], {}).get(last)
            if child is None:
                break
            depth, last = depth + 1, child
        return match if depth == match.depth else Match(depth, last)

    def __iter__(self) -> Iterator[tuple[int | None, int, int]]:
        """Yield each block as `(parent's sequence hash, sequence hash, local hash)`, in the order of their Stored."""
        for block, (parent, local) in self.blocks.items():
            yield parent, block, local


class LowerTier:
    """The blocks of one tier below the device.

    Attributes:
        ranks: the blocks that each worker and rank holds in the tier.
    """

    __slots__ = ("ranks",)

    def __init__(self) -> None:
        self.ranks: dict[WorkerRank, Edges] = {}

    def store(self, key: WorkerRank, data: Stored) -> None:
        """Add the blocks of a Stored; see `Edges.store`."""
        edges = self.ranks.get(key)
        if edges is None:
            edges = self.ranks[key] = Edges()
        edges.store(data)

    def remove(self, key: WorkerRank, blocks: Sequence[int]) -> int | None:
        """Remove blocks; return the first that the worker and rank does not hold, if there is one."""
        edges = self.ranks.get(key)
        if edges is None:
            return blocks[0] if blocks else None
        return edges.remove(blocks)

    def clear(self, worker_id: int, dp_rank: int | None = None) -> None:
        """Empty one rank of a worker, or all of them."""
        for (worker, rank), edges in self.ranks.items():
            if worker == worker_id and dp_rank in (None, rank):
                edges.clear()

    def num_blocks(self, key: WorkerRank) -> int:
        """Count the blocks that a worker and rank holds."""
        edges = self.ranks.get(key)
        return 0 if edges is None else len(edges.blocks)
