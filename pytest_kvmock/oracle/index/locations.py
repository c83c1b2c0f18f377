"""Where blocks are below the device, of an engine that publishes places of names: vLLM, as it offloads.

Theory of operation. A location says that a block is in a tier, and nothing of its tokens. So what a name stands for is
kept from the Stored of any tier, also when the device lets go of the block: a location may come after that. A query
follows the names of its local hashes from the root on, and asks for the names of chunks: the tier has chunks of some
blocks, each under the name of its last one, and part of a chunk is worth nothing. It goes on from where the device's
match ends; there is no way back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Final

from pytest_kvmock.values.events import StorageTier, Stored

MOST_NAMES: Final = 2**18
"""How many names of a rank are kept, in addition to those of blocks that are somewhere."""


class Locations:
    """The names of one worker and rank, and how often each is in each tier below the device.

    Attributes:
        copies: by tier, how often each block was stored or located there and not removed since.
    """

    __slots__ = ("_edges", "_names", "copies")

    def __init__(self) -> None:
        self.copies: dict[StorageTier, Counter[int]] = {}
        self._names: dict[tuple[int | None, int], int] = {}
        self._edges: dict[int, tuple[int | None, int]] = {}  # the path to each name, the newest last

    def know(self, parent: int | None, block: int, local: int) -> None:
        """Know what a block stands for; what it was taken to stand for before is forgotten."""
        before = self._edges.pop(block, None)
        if before is not None and before != (parent, local) and self._names.get(before) == block:
            del self._names[before]
        self._edges[block] = parent, local
        self._names[parent, local] = block

    def knows(self, block: int) -> bool:
        """Whether it is known what a block stands for."""
        return block in self._edges

    def stored(self, data: Stored, on_device: Container[int]) -> None:
        """Know what the blocks of a Stored stand for; `on_device` are those that are there."""
        parent = data.parent_hash
        for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            self.know(parent, block, local)
            parent = block
        if len(self._edges) > 2 * MOST_NAMES:
            self._forget(on_device)

    def _forget(self, on_device: Container[int]) -> None:
        """Forget the oldest names of blocks that are nowhere."""
        for block in list(self._edges)[:-MOST_NAMES]:
            if block not in on_device and not any(block in copies for copies in self.copies.values()):
                edge = self._edges.pop(block)
                if self._names.get(edge) == block:
                    del self._names[edge]

    def located(self, tier: StorageTier, blocks: Sequence[int]) -> None:
        """Take blocks as being in a tier once more."""
        self.copies.setdefault(tier, Counter()).update(blocks)

    def removed(self, tier: StorageTier, blocks: Sequence[int]) -> int | None:
        """Take one copy of each block out of a tier; return the first that is not there, if there is one."""
        copies, unknown = self.copies.setdefault(tier, Counter()), None
        for block in blocks:
            if copies[block] > 1:
                copies[block] -= 1
            elif copies.pop(block, 0) == 0 and unknown is None:
                unknown = block
        return unknown

    def clear(self) -> None:
        """Take all blocks out of all tiers."""
        self.copies.clear()

    def extends(self, tier: StorageTier, local_hashes: Sequence[int], depth: int, chunk: int) -> int:
        """By how many blocks whole chunks of a tier extend a match of `depth` leading blocks; at least a chunk, or 0.

        Args:
            tier: which.
            local_hashes: the query.
            depth: how many leading blocks the faster tiers have.
            chunk: blocks a chunk; chunks are counted from the first block of the query.
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
        """Each copy in each tier, as `(parent's name, name, local hash)`; those of which nothing else is known are
        left out.
        """
        for tier, copies in self.copies.items():
            for block, count in copies.items():
                if block in self._edges:
                    parent, local = self._edges[block]
                    yield from [(tier, (parent, block, local))] * count
