"""The radix tree of SGLang's HiCache: nodes whose pages are on the device, on the host, or on both.

One subject: where pages are, what holds them there, and in which order they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final

from pytest_kvmock.cache.sglang.hybrid_tree import HybridTree, TreeMatch
from pytest_kvmock.cache.sglang.radix_tree import Hold, HostPart, LeafQueue, Pages, TreeNode
from pytest_kvmock.events import StorageTier

# Theory of operation (SGLang 0.5.23, `UnifiedRadixCache` with `HybridCacheController`, full attention alone)
#
# A node is in the tree as long as its pages are anywhere. What is on the device is closed upward; what is on the host is
# so too, unless the copies are made at the eviction (`write_back`). From the moment that a copy is ordered a node has its
# place on the host, and counts as being there for every rule; routers hear of it when the copy is done.
#
# Both places have leaves, which go in the order of one policy: a device leaf has no child on the device, a host leaf is on
# the host alone and has no children. Locks of requests and copies hold a path, on whichever side its nodes are, but only
# nodes on the device count as evictable or protected. A lock of the host holds one node there.
#
# All else is the tree's: it asks here what a leaf is, what becomes of one that leaves the device, and what an insert
# does to a node that it passes or makes.

DEVICE: Final = StorageTier.DEVICE
HOST: Final = StorageTier.HOST_PINNED

WRITE_POLICIES: Final[dict[str, int]] = {"write_through": 1, "write_through_selective": 2, "write_back": 0}
"""From so many hits on a node is copied to the host; 0: when it is evicted from the device (`--hicache-write-policy`)."""


class HiCacheTree(HybridTree):
    """A `HybridTree` without parts, over two places. It counts free pages of the host, and tells its owner what comes and goes.

    Args:
        policy: one of "lru", "lfu", "slru"; of both places.
        protected_threshold: as in `RadixTree`.
        host_pages: pages that the host has.
        write_policy: one of `WRITE_POLICIES`.
        stored: called with a node whose pages are in a place now, and the place.
        removed: likewise with one whose pages left it.
        copied: called with a node whose copy to the host an eviction has made.

    Attributes:
        host_pages: as above.
        host_free: pages of the host that nobody has.
        is_write_back: whether copies are made at the eviction.
        ordered: copies to the host that were ordered; its owner takes them.
    """

    __slots__ = (
        "_copied",
        "_duplicates",
        "_hits_to_write",
        "_host_leaves",
        "_removed",
        "_stored",
        "host_free",
        "host_pages",
        "is_write_back",
        "ordered",
    )

    def __init__(
        self,
        policy: str,
        protected_threshold: int,
        *,
        host_pages: int,
        write_policy: str,
        stored: Callable[[TreeNode, StorageTier], None],
        removed: Callable[[TreeNode, StorageTier], None],
        copied: Callable[[TreeNode], None],
    ) -> None:
        self.host_pages = host_pages
        self._hits_to_write = WRITE_POLICIES[write_policy]
        self.is_write_back = not self._hits_to_write
        self._stored, self._removed, self._copied = stored, removed, copied
        super().__init__(policy, protected_threshold)

    def reset(self) -> None:
        """Drop everything, locked nodes too."""
        super().reset()
        self.root.host = HostPart((), None, None)
        self.root.host.on_host = True
        self.host_free = self.host_pages
        self._host_leaves = LeafQueue(self._key, self._is_host_leaf)
        self._queues.append(self._host_leaves)
        self._duplicates: dict[TreeNode, None] = {}
        self.ordered: list[Hold] = []

    def _is_leaf(self, node: TreeNode) -> bool:
        if node.lock_ref or not node.on_device or node.parent is None:
            return False
        return not any(child.on_device for child in node.children.values())

    def _is_host_leaf(self, node: TreeNode) -> bool:
        part = node.host
        return not (
            node.children or node.lock_ref or part.locks or node.on_device or node.parent is None or not part.on_host
        )

    def find(self, names: Sequence[int], count: int, namespace: Hashable = None) -> TreeMatch:
        """Look pages up, and count the path as used now, wherever it is. A node that is shared in part is split."""
        found = super().find(names, count, namespace)
        node = found.end
        self.note(node)
        while node is not found.node:
            node.last = self._clock
            assert node.parent is not None
            node = node.parent
        return found

    # ------------------------------------------------------------------------------------------------ inserts

    def _grow(self, parent: TreeNode, pages: Pages, start: int, count: int, namespace: Hashable) -> TreeNode:
        leaf = super()._grow(parent, pages, start, count, namespace)
        token_ids = pages.block_tokens(start, count)
        token_ids = token_ids if token_ids is None else tuple(token_ids)  # a queue of events extends lists
        leaf.host = HostPart(tuple(pages.local_hashes[start:count]), token_ids, pages.carried(start, count))
        return leaf

    def put_on_device(self, node: TreeNode) -> None:
        """Give a node pages of the device, which its owner had."""
        super().put_on_device(node)
        self.note_duplicate(node)
        self._stored(node, DEVICE)

    def _hit(self, node: TreeNode) -> None:
        """Count a hit, and order the copy of a node that has enough of them, and before it of what is above."""
        if self.is_write_back:
            return
        super()._hit(node)
        if node.host.on_host or node.hit_count < self._hits_to_write:
            return
        lacking = []
        at: TreeNode | None = node
        while at is not None and not at.host.on_host:
            lacking.append(at)
            at = at.parent
        for each in reversed(lacking):
            if not self.make_host_room(len(each.names)):
                return
            self._order_copy(each)

    def _order_copy(self, node: TreeNode) -> None:
        """Give a node its place on the host, for a copy that is ordered: there must be room."""
        self.host_free -= len(node.names)
        node.host.on_host = True
        node.host.copy = hold = Hold(node)
        self.lock(node)
        self.ordered.append(hold)

    def put_on_host(self, node: TreeNode) -> None:
        """Give a node pages of the host, which were counted as taken."""
        node.host.on_host = True
        self.note_duplicate(node)
        self.note(node)
        self._stored(node, HOST)

    def insert_host(self, anchor: TreeNode, pages: Pages, start: int, count: int, namespace: Hashable) -> int:
        """Put the pages from `start` to `count`, which came to the host, under the node that ends where they begin.

        What is on the device alone gets them, but for `write_back`; what is nowhere becomes a node of the host.

        Returns:
            How many of them were not needed.
        """
        node, at, spare = anchor, start, 0
        anchor.last = self._clock = self._clock + 1
        self.note(anchor)
        for node, end in self.walk(pages.names, count, namespace, anchor, start):
            if node.host.on_host or self.is_write_back:
                spare += end - at
            else:
                self.put_on_host(node)
            self.note(node)
            at = end
        if at < count:
            self.put_on_host(self._grow(node, pages, at, count, namespace))
        return spare

    def copied(self, hold: Hold) -> None:
        """End a copy to the host: what was ordered, in however many nodes it is by now, is there."""
        for node in hold.nodes:
            node.host.copy = None
            self._stored(node, HOST)
        self.unlock(hold.nodes[-1])

    def note_duplicate(self, node: TreeNode) -> None:
        """Count a node as being in both places, if it is: a load does so when it is done."""
        if self.is_write_back and node.on_device and node.host.on_host and not node.host.loads:
            self._duplicates.setdefault(node)

    def _split(self, node: TreeNode, pages: int) -> TreeNode:
        upper = super()._split(node, pages)
        upper.host = node.host.split(pages, upper, node)
        self.note_duplicate(upper)
        return upper

    # -------------------------------------------------------------------------------------------------- locks

    def hold_host(self, node: TreeNode) -> Hold:
        """Keep the pages of a node on the host; nothing for the root."""
        hold = Hold(node)
        if node is not self.root:
            node.host.locks.append(hold)
        return hold

    def release_host(self, hold: Hold) -> None:
        """Take back `hold_host`, of all nodes that it holds by now."""
        for node in hold.nodes:
            if node is not self.root:
                node.host.locks.remove(hold)
                self.note(node)

    # ----------------------------------------------------------------------------------------------- eviction

    def _evict(self, node: TreeNode) -> bool:
        """Evict a leaf of the device, which stays in the tree if it is on the host, or is copied there now."""
        part, pages = node.host, len(node.names)
        if not part.on_host and self.is_write_back and self.make_host_room(pages):
            self.host_free -= pages
            self.put_on_host(node)  # on both sides for a moment
            self._copied(node)
        if not (part.on_host or self._drop_below(node)):
            return False
        self._removed(node, DEVICE)
        if not part.on_host:
            return super()._evict(node)
        self.evictable -= pages
        node.on_device = False
        self.note(node)
        assert node.parent is not None
        self.note(node.parent)
        return True

    def _drop_below(self, node: TreeNode) -> bool:
        """Delete what a node without a copy has below it on the host; False, and nothing happens, if any of it is held."""
        below = [*_nodes_below(node)]
        if any(each.lock_ref or each.host.is_held for each in [node, *below]):
            return False
        for each in reversed(below):
            self._delete_host(each)
        return True

    def _delete_host(self, node: TreeNode) -> None:
        """Delete a node that is on the host alone."""
        self.host_free += len(node.names)
        node.host.on_host = False
        self._removed(node, HOST)
        self._detach(node)

    def make_host_room(self, pages: int) -> bool:
        """Evict from the host until so many pages are free there; False if there are fewer. What was evicted is."""
        if pages > self.host_free:
            self.evict_host(pages - self.host_free)
        return pages <= self.host_free

    def evict_host(self, pages: int) -> int:
        """Evict from the host until so many pages are freed, or none may be evicted: duplicates first, then leaves.

        Returns:
            Pages that are free there now.
        """
        before = self.host_free
        until = before + pages
        for spares_leaves in (True, False) if self._duplicates else ():
            if self.host_free < until:
                self._reclaim(until, spares_leaves=spares_leaves)
        while self.host_free < until and (node := self._first(self._host_leaves)) is not None:
            self._delete_host(node)
        return self.host_free - before

    def _reclaim(self, until: int, *, spares_leaves: bool) -> None:
        """Give up copies of what is on the device, in the order in which they became that (`write_back`)."""
        for node in [*self._duplicates]:
            if self.host_free >= until:
                return
            part = node.host
            if node.parent is None or not (node.on_device and part.on_host):
                del self._duplicates[node]
                continue
            if part.is_held or (spares_leaves and self._is_leaf(node)):
                continue
            del self._duplicates[node]
            part.on_host = False
            self.host_free += len(node.names)
            self._removed(node, HOST)


def _nodes_below(node: TreeNode) -> Iterator[TreeNode]:
    """Yield what is below a node, a parent before its children."""
    for child in node.children.values():
        yield child
        yield from _nodes_below(child)
