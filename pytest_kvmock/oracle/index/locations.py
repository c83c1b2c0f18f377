"""Locations of blocks below the device, for engines that publish them without tokens: vLLM's native offload.

Theory of operation. A location says that a block is in a tier; it has no tokens. So the parent and tokens of each name
are kept from the Stored of any tier, even after the device evicts the block: a location may come later. A query
follows the names of its local hashes from the root, and looks up the names of chunks: a tier holds chunks of several
blocks, each under the name of its last block, and an incomplete chunk counts nothing. The query continues from the end
of the device's match and never goes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Final

from pytest_kvmock.values.events import StorageTier, Stored

MOST_NAMES: Final = 2**18
"""Number of names of a rank that are kept in addition to those of blocks that some tier holds."""


class Locations:
    """The names of one worker and rank, and their number of copies in each tier below the device.

    Attributes:
        copies: by tier, how often each block was stored or located there and not removed since.
    """

    __slots__ = ("_edges", "_names", "copies")

    def __init__(self) -> None:
        self.copies: dict[StorageTier, Counter[int]] = {}
        self._names: dict[tuple[int | None, int], int] = {}
        self._edges: dict[int, tuple[int | None, int]] = {}  # parent and local hash of each name, the newest last

    def know(self, parent: int | None, block: int, local: int) -> None:
        """Record the parent and local hash of a block, in place of earlier ones."""
        before = self._edges.pop(block, None)
        if before is not None and before != (parent, local) and self._names.get(before) == block:
            del self._names[before]
        self._edges[block] = parent, local
        self._names[parent, local] = block

    def knows(self, block: int) -> bool:
        """Whether the parent and local hash of a block are known."""
        return block in self._edges

    def stored(self, data: Stored, on_device: Container[int]) -> None:
        """Record the blocks of a Stored; `on_device` are the blocks that the device holds."""
        parent = data.parent_hash
        for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            self.know(parent, block, local)
            parent = block
        if len(self._edges) > 2 * MOST_NAMES:
            self._forget(on_device)

    def _forget(self, on_device: Container[int]) -> None:
        """Drop the oldest names of blocks that no tier holds."""
        for block in list(self._edges)[:-MOST_NAMES]:
            if block not in on_device and not any(block in copies for copies in self.copies.values()):
                edge = self._edges.pop(block)
                if self._names.get(edge) == block:
                    del self._names[edge]

    def located(self, tier: StorageTier, blocks: Sequence[int]) -> None:
        """Count one more copy of each block in a tier."""
        self.copies.setdefault(tier, Counter()).update(blocks)

    def removed(self, tier: StorageTier, blocks: Sequence[int]) -> int | None:
        """Count one copy fewer of each block in a tier; return the first block that is not there, if any."""
        copies, unknown = self.copies.setdefault(tier, Counter()), None
        for block in blocks:
            if copies[block] > 1:
                copies[block] -= 1
            elif copies.pop(block, 0) == 0 and unknown is None:
                unknown = block
        return unknown

    def clear(self) -> None:
        """Remove all blocks from all tiers."""
        self.copies.clear()

    def extends(self, tier: StorageTier, local_hashes: Sequence[int], depth: int, chunk: int) -> int:
        """Return by how many blocks a tier's chunks extend a match of `depth` leading blocks; at least a chunk, or 0.

        Args:
            tier: the tier.
            local_hashes: the query.
            depth: number of leading blocks that the faster tiers hold.
            chunk: blocks per chunk; chunks are counted from the first block of the query.
        """
        copies = self.copies.get(tier)
        if not copies:
            return 0
        names: list[int] = []
        parent: int | None = None
        for local in local_hashes:
            parent = self._names.get((parent, local))
            if parent is None:
                break
            names.append(parent)
        end = depth // chunk * chunk
        while end + chunk <= len(names) and names[end + chunk - 1] in copies:
            end += chunk
        return end - depth if end - depth >= chunk else 0

    def __iter__(self) -> Iterator[tuple[StorageTier, tuple[int | None, int, int]]]:
        """Yield each copy in each tier as `(parent's name, name, local hash)`, without blocks of unknown tokens."""
        for tier, copies in self.copies.items():
            for block, count in copies.items():
                if block in self._edges:
                    parent, local = self._edges[block]
                    yield from [(tier, (parent, block, local))] * count
