"""The base of SGLang's cache and of Dynamo's mock of it: a radix tree, requests with pages, and queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Generic, TypeVar

from pytest_kvmock.engines.base.manager_base import RequestLevel
from pytest_kvmock.engines.sglang.radix_request import RadixRequest
from pytest_kvmock.engines.sglang.radix_tree import RadixTree
from pytest_kvmock.values.moves import Block

RequestT = TypeVar("RequestT", bound=RadixRequest)
TreeT = TypeVar("TreeT", bound=RadixTree)


class RadixManager(RequestLevel, Generic[RequestT, TreeT]):
    """Base of the managers that keep whole pages in a radix tree. Subclasses make the tree and publish.

    Attributes:
        requests: the requests with pages, in order of admission.
    """

    requests: dict[RequestT, None]
    _tree: TreeT

    @property
    def num_inactive_blocks(self) -> int:
        """Cached pages that are not locked; every copy counts."""
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
        """Return the current references to one block; 0 if it is not in use."""
        return self.active_blocks.get(block, 0)

    def inactive_blocks(self) -> list[int]:
        """Return the cached pages that are not locked, node by node in the order of eviction."""
        return [name for node in self._tree.order() for name in node.names]

    @property
    def is_in_use(self) -> bool:
        """Whether a request has pages or a node is locked; then the cache cannot be cleared."""
        return bool(self.requests or self._tree.protected)
