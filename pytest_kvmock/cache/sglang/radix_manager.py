"""What SGLang's cache and that of Dynamo's mock of it share: a radix tree, requests that have pages, and the queries of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Generic, TypeVar

from pytest_kvmock.cache.base import RequestLevel
from pytest_kvmock.cache.sglang.radix_request import RadixRequest
from pytest_kvmock.cache.sglang.radix_tree import RadixTree
from pytest_kvmock.moves import Block

RequestT = TypeVar("RequestT", bound=RadixRequest)
TreeT = TypeVar("TreeT", bound=RadixTree)


class RadixManager(RequestLevel, Generic[RequestT, TreeT]):
    """Base of the managers that keep whole pages in a radix tree; a subclass makes the tree, and publishes.

    Attributes:
        requests: those that have pages, in the order in which they came.
    """

    requests: dict[RequestT, None]
    _tree: TreeT

    @property
    def num_inactive_blocks(self) -> int:
        """Cached pages that nobody has locked; every copy counts."""
        return self._tree.evictable

    @property
    def num_active_block_refs(self) -> int:
        """Locks on each page in the tree, and one for each page outside of it."""
        locks = sum(node.lock_ref * len(node.names) for node in self._tree.nodes())
        return locks + sum(request.allocated - request.shared for request in self.requests)

    @property
    def active_blocks(self) -> Mapping[Block, int]:
        """References to each block in use, partial ones included."""
        blocks: Counter[Block] = Counter()
        for node in self._tree.nodes():
            if node.lock_ref:
                for name in node.names:
                    blocks[name] += node.lock_ref
        for request in self.requests:
            blocks.update(request.blocks[request.shared : request.allocated])
        return blocks

    def references(self, block: Block) -> int:
        """References to one block now; 0 for what is not in use."""
        return self.active_blocks.get(block, 0)

    def inactive_blocks(self) -> list[int]:
        """Cached pages that nobody has locked, node by node in the order in which they would be evicted."""
        return [name for node in self._tree.order() for name in node.names]

    @property
    def is_in_use(self) -> bool:
        """Whether a request has pages, or somebody has locked some; it is not cleared then."""
        return bool(self.requests or self._tree.protected)
