"""The radix tree of SGLang's HiCache: nodes whose pages are on the device, on the host, or on both.

One subject: where pages are, what holds them there, and in which order they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Final, NamedTuple

from pytest_kvmock.cache.sglang.page_cache import Pages
from pytest_kvmock.cache.sglang.radix_tree import Hold, HostPart, RadixTree, TreeNode, shared_pages
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

DEVICE: Final = StorageTier.DEVICE
HOST: Final = StorageTier.HOST_PINNED

WRITE_POLICIES: Final[dict[str, int]] = {"write_through": 1, "write_through_selective": 2, "write_back": 0}
"""From so many hits on a node is copied to the host; 0: when it is evicted from the device (`--hicache-write-policy`)."""


class HostMatch(NamedTuple):
    """What a lookup found.

    Attributes:
        node: the end of the path; the root for none.
        device_node: the last node of it that is on the device; the root for none.
        pages: that lead to the end.
        device_pages: of these, on the device.
    """

    node: TreeNode
    device_node: TreeNode
    pages: int
    device_pages: int


class LeafQueue:
    """Leaves in the order of a policy. A node is noted when it may have become one, or when its key has changed.

    Args:
        key_of: the order; the least is first.
        is_leaf: asked when a node's turn comes.
    """

    __slots__ = ("_changed", "_count", "_heap", "_is_leaf", "_key_of", "_queued")

    def __init__(self, key_of: Callable[[TreeNode], Any], is_leaf: Callable[[TreeNode], bool]) -> None:
        self._key_of, self._is_leaf = key_of, is_leaf
        self._heap: list[tuple[Any, int, TreeNode]] = []
        self._queued: dict[TreeNode, Any] = {}
        self._changed: dict[TreeNode, None] = {}
        self._count = 0

    def note(self, node: TreeNode) -> None:
        """Look at a node before the next leaf is taken."""
        self._changed[node] = None

    def pop(self) -> TreeNode | None:
        """Take the first leaf; None if there is none."""
        heap, queued = self._heap, self._queued
        for node in self._changed:
            if self._is_leaf(node):
                key = self._key_of(node)
                if queued.get(node) != key:
                    queued[node] = key
                    self._count += 1
                    heappush(heap, (key, self._count, node))
        self._changed.clear()
        if len(heap) > 2 * len(queued) + 64:
            heap[:] = [entry for entry in heap if queued.get(entry[2]) == entry[0]]
            heapify(heap)
        while heap:
            key, _, node = heappop(heap)
            if queued.get(node) == key:
                del queued[node]
                if self._is_leaf(node):
                    return node
        return None


class HiCacheTree(RadixTree):
    """A `RadixTree` over two places. It counts free pages of the host, and tells its owner what comes and goes.

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
    """

    __slots__ = (
        "_copied",
        "_device_leaves",
        "_duplicates",
        "_host_leaves",
        "_removed",
        "_stored",
        "host_free",
        "host_pages",
        "is_write_back",
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
        self.is_write_back = not WRITE_POLICIES[write_policy]
        self._stored, self._removed, self._copied = stored, removed, copied
        super().__init__(policy, protected_threshold)

    def reset(self) -> None:
        """Drop everything, locked nodes too."""
        super().reset()
        self.root.host = HostPart((), None, None)
        self.root.host.on_device = self.root.host.on_host = True
        self.host_free = self.host_pages
        self._device_leaves = LeafQueue(self._key, self._is_device_leaf)
        self._host_leaves = LeafQueue(self._key, self._is_host_leaf)
        self._duplicates: dict[TreeNode, None] = {}

    def _is_device_leaf(self, node: TreeNode) -> bool:
        if node.lock_ref or not node.host.on_device or node.parent is None:
            return False
        return not any(child.host.on_device for child in node.children.values())

    def _is_host_leaf(self, node: TreeNode) -> bool:
        part = node.host
        return not (
            node.children or node.lock_ref or part.locks or part.on_device or node.parent is None or not part.on_host
        )

    # ------------------------------------------------------------------------------------------------ lookups

    def path(self, names: Sequence[int], count: int, namespace: Hashable = None) -> Iterator[tuple[TreeNode, int]]:
        """Yield the nodes that have the first `count` pages, with how many of them each has. Changes nothing."""
        node, at = self.root, 0
        while at < count:
            child = node.children.get(self.edge(names, at, namespace))
            if child is None:
                return
            shared = shared_pages(child.names, names, at, count)
            at += shared
            yield child, shared
            if shared < len(child.names):
                return
            node = child

    def look(self, names: Sequence[int], count: int, namespace: Hashable = None) -> tuple[int, int]:
        """Leading pages, of the first `count`, that are anywhere, and those on the device. Changes nothing."""
        at = on_device = 0
        for node, pages in self.path(names, count, namespace):
            at += pages
            if node.host.on_device:
                on_device = at
        return at, on_device

    def find(self, names: Sequence[int], count: int, namespace: Hashable = None) -> HostMatch:
        """Look pages up, and count the path as used now, wherever it is. A node that is shared in part is split."""
        path = [*self.walk(names, count, namespace)]
        node, pages = path[-1] if path else (self.root, 0)
        at, on_device = node, pages
        while not at.host.on_device:
            on_device -= len(at.names)
            assert at.parent is not None
            at = at.parent
        self.note(node)
        self.note(at)
        return HostMatch(node, at, pages, on_device)

    def match(self, names: Sequence[int], count: int, namespace: Hashable = None) -> tuple[TreeNode, int]:
        """Look pages up, as `find` does: the last node that is on the device, and how many pages lead to its end."""
        found = self.find(names, count, namespace)
        return found.device_node, found.device_pages

    def note(self, node: TreeNode) -> None:
        """Look at a node again before the next eviction: it may be a leaf now, or its key has changed."""
        if node is not self.root:
            self._device_leaves.note(node)
            self._host_leaves.note(node)

    # ------------------------------------------------------------------------------------------------ inserts

    def walk(self, names: Sequence[int], count: int, namespace: Hashable = None) -> Iterator[tuple[TreeNode, int]]:
        """Yield the nodes that have the first `count` pages, with the page where each ends; the last may be split for it.

        Each counts as used now. Whoever walks may change a node before the next is looked for.
        """
        tick = self._clock = self._clock + 1
        node, at = self.root, 0
        while at < count:
            child = node.children.get(self.edge(names, at, namespace))
            if child is None:
                break
            child.last = tick
            end = at + len(child.names)
            if end <= count and names[end - 1] == child.names[-1]:
                node, at = child, end
            else:
                node = self._split(child, shared_pages(child.names, names, at, count))
                at += len(node.names)
            self.note(node)
            yield node, at

    @staticmethod
    def edge(names: Sequence[int], at: int, namespace: Hashable) -> Hashable:
        """The key of the page at a place among the children of the node before it."""
        return names[at] if at or namespace is None else (namespace, names[0])

    def grow(self, parent: TreeNode, pages: Pages, start: int, count: int, namespace: Hashable) -> TreeNode:
        """Add a leaf of the pages from `start` to `count`, which is nowhere yet."""
        edge = self.edge(pages.names, start, namespace)
        self._clock += 1
        leaf = TreeNode(parent, edge, tuple(pages.names[start:count]), self._clock)
        token_ids = pages.block_tokens(start, count)
        token_ids = token_ids if token_ids is None else tuple(token_ids)  # a queue of events extends lists
        leaf.host = HostPart(tuple(pages.local_hashes[start:count]), token_ids, pages.carried(start, count))
        parent.children[edge] = leaf
        self._nodes += 1
        return leaf

    def put_on_device(self, node: TreeNode) -> None:
        """Give a node pages of the device, which its owner had."""
        node.host.on_device = True
        if node.lock_ref:
            self.protected += len(node.names)
        else:
            self.evictable += len(node.names)
        self.note_duplicate(node)
        self.note(node)
        self._stored(node, DEVICE)

    def put_on_host(self, node: TreeNode) -> None:
        """Give a node pages of the host, which were counted as taken."""
        node.host.on_host = True
        self.note_duplicate(node)
        self.note(node)
        self._stored(node, HOST)

    def order_copy(self, node: TreeNode) -> Hold:
        """Give a node its place on the host, for a copy that is ordered: there must be room."""
        self.host_free -= len(node.names)
        node.host.on_host = True
        node.host.copy = hold = Hold(node)
        self.lock(node)
        return hold

    def insert_host(self, anchor: TreeNode, pages: Pages, start: int, count: int, namespace: Hashable) -> int:
        """Put the pages from `start` to `count`, which came to the host, under the node that ends where they begin.

        What is on the device alone gets them, but for `write_back`; what is nowhere becomes a node of the host.

        Returns:
            How many of them were not needed.
        """
        names, node, at, spare = pages.names, anchor, start, 0
        tick = anchor.last = self._clock = self._clock + 1
        self.note(anchor)
        while at < count:
            child = node.children.get(self.edge(names, at, namespace))
            if child is None:
                break
            child.last = tick
            shared = shared_pages(child.names, names, at, count)
            node = child if shared == len(child.names) else self._split(child, shared)
            at += shared
            if node.host.on_host or self.is_write_back:
                spare += shared
            else:
                self.put_on_host(node)
            self.note(node)
        if at < count:
            leaf = self.grow(node, pages, at, count, namespace)
            self.put_on_host(leaf)
        return spare

    def copied(self, hold: Hold) -> None:
        """End a copy to the host: what was ordered, in however many nodes it is by now, is there."""
        for node in hold.nodes:
            node.host.copy = None
            self._stored(node, HOST)
        self.unlock(hold.nodes[-1])

    def note_duplicate(self, node: TreeNode) -> None:
        """Count a node as being in both places, if it is: a load does so when it is done."""
        if self.is_write_back and node.host.on_device and node.host.on_host and not node.host.loads:
            self._duplicates.setdefault(node)

    def _split(self, node: TreeNode, pages: int) -> TreeNode:
        upper = super()._split(node, pages)
        upper.host = node.host.split(pages, upper, node)
        self.note_duplicate(upper)
        self._changed.clear()  # the queue of a tree without a host
        self.note(node)
        return upper

    # -------------------------------------------------------------------------------------------------- locks

    def lock(self, node: TreeNode) -> int:
        """Protect a node and all above it, wherever they are.

        Returns:
            Pages of the device that became protected.
        """
        gained = 0
        at = node
        while at is not self.root:
            if not at.lock_ref and at.host.on_device:
                gained += len(at.names)
            at.lock_ref += 1
            assert at.parent is not None
            at = at.parent
        self.evictable -= gained
        self.protected += gained
        return gained

    def unlock(self, node: TreeNode) -> int:
        """Release one lock.

        Returns:
            Pages of the device that became evictable.
        """
        freed = 0
        at = node
        while at is not self.root:
            at.lock_ref -= 1
            if not at.lock_ref:
                self.note(at)
                if at.host.on_device:
                    freed += len(at.names)
            assert at.parent is not None
            at = at.parent
        self.evictable += freed
        self.protected -= freed
        return freed

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

    def evict_device(self, pages: int) -> int:
        """Evict device leaves until so many pages are freed, or none may be evicted.

        Returns:
            Pages that are free now.
        """
        freed = 0
        stay: list[TreeNode] = []
        while freed < pages and (node := self._device_leaves.pop()) is not None:
            parent = node.parent
            assert parent is not None
            if not node.host.on_host and self.is_write_back and self.make_host_room(len(node.names)):
                self.host_free -= len(node.names)
                self.put_on_host(node)  # on both sides for a moment
                self._copied(node)
            if node.host.on_host:
                node.host.on_device = False
            elif not self._drop_below(node):
                stay.append(node)
                continue
            self.evictable -= len(node.names)
            freed += len(node.names)
            self._removed(node, DEVICE)
            if not node.host.on_host:
                self._detach(node)
            self.note(node)
            self.note(parent)
        for node in stay:
            self.note(node)
        return freed

    def _drop_below(self, node: TreeNode) -> bool:
        """Delete what a node without a copy has below it on the host; False, and nothing happens, if any of it is held."""
        below = [*_nodes_below(node)]
        if any(each.lock_ref or each.host.is_held for each in [node, *below]):
            return False
        for each in reversed(below):
            self._delete_host(each)
        return True

    def _detach(self, node: TreeNode) -> None:
        assert node.parent is not None
        del node.parent.children[node.edge]
        node.parent = None
        self._nodes -= 1

    def _delete_host(self, node: TreeNode) -> None:
        """Delete a node that is on the host alone."""
        parent = node.parent
        assert parent is not None
        self.host_free += len(node.names)
        node.host.on_host = False
        self._removed(node, HOST)
        self._detach(node)
        self.note(parent)

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
        while self.host_free < until and (node := self._host_leaves.pop()) is not None:
            self._delete_host(node)
        return self.host_free - before

    def _reclaim(self, until: int, *, spares_leaves: bool) -> None:
        """Give up copies of what is on the device, in the order in which they became that (`write_back`)."""
        for node in [*self._duplicates]:
            if self.host_free >= until:
                return
            part = node.host
            if node.parent is None or not (part.on_device and part.on_host):
                del self._duplicates[node]
                continue
            if part.is_held or (spares_leaves and self._is_device_leaf(node)):
                continue
            del self._duplicates[node]
            part.on_host = False
            self.host_free += len(node.names)
            self._removed(node, HOST)

    def order(self) -> Iterator[TreeNode]:
        """Yield the nodes on the device that are not locked, in the order in which they would leave it."""
        waiting = [node for node in self.nodes() if node.host.on_device and not node.lock_ref]
        left = {node: sum(child.host.on_device for child in node.children.values()) for node in waiting}
        heap = [(self._key(node), number, node) for number, node in enumerate(waiting) if not left[node]]
        heapify(heap)
        while heap:
            _, number, node = heappop(heap)
            yield node
            parent = node.parent
            if parent in left:
                left[parent] -= 1
                if not left[parent]:
                    heappush(heap, (self._key(parent), number, parent))


def _nodes_below(node: TreeNode) -> Iterator[TreeNode]:
    """Yield what is below a node, a parent before its children."""
    for child in node.children.values():
        yield child
        yield from _nodes_below(child)
