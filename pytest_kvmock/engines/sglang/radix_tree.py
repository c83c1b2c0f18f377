"""SGLang's radix tree: runs of pages in nodes, locks along a path, and the order of eviction.

One subject: nodes, the records that subclasses keep in them, and the tree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Protocol

from pytest_kvmock.values.events import BlockTokens

# Theory of operation
#
# The tree contains only names of pages. Names are chained: a name stands for its page and all pages before it. Two runs
# from the same start are therefore equal up to a page if their names of that page are equal. A whole node is compared
# by its last name.
#
# SGLang makes a heap of all leaves at each eviction. Here one heap is kept. An entry is a node with its key at the time
# it was queued. Nodes whose key changed are noted, and queued again at the next eviction; entries other than the last
# of a node are skipped.
#
# In a tree with a host (`hicache_tree.py`) the pages of a node may be only on the host. Then the node is not a device
# leaf, it counts as neither evictable nor protected, and the nodes above it may be leaves. If a node is on the device,
# all nodes above it are too. Without a host, all nodes are on the device.


class Pages(Protocol):
    """Pages to insert and store: a `RadixKey`, or the tokens of a request."""

    names: list[int]

    @property
    def local_hashes(self) -> list[int]:
        """The router's hash of each page."""

    def block_tokens(self, start: int, end: int) -> BlockTokens | None:
        """Return the token ids of the pages from `start` to `end`; None if unknown."""

    def carried(self, start: int, end: int) -> dict[str, Any] | None:
        """Return the extra properties of an event that stores these pages; None if there are none."""


class TreeNode:
    """A run of pages that are evicted together.

    Attributes:
        parent: the node above it; None for the root and for nodes that left the tree.
        edge: its key among the parent's children.
        children: the nodes below it, in order of insertion; a split keeps the place.
        names: names of its pages.
        lock_ref: number of requests that hold it or a node below it.
        hit_count: number of inserts that passed it.
        priority: the highest priority of these inserts.
        last: tick of the last access.
        created: tick of its creation.
        on_device: whether its pages are on the device.
        window: its record in the window part of a hybrid tree; unset in other trees.
        state: its record in the state part of a hybrid tree; unset in other trees.
        host: its record in a tree with a host; unset in other trees.
    """

    __slots__ = (
        "children",
        "created",
        "edge",
        "hit_count",
        "host",
        "last",
        "lock_ref",
        "names",
        "on_device",
        "parent",
        "priority",
        "state",
        "window",
    )
    window: NodePart
    state: NodePart
    host: HostPart

    def __init__(self, parent: TreeNode | None, edge: Hashable, names: Sequence[int], tick: int) -> None:
        self.parent = parent
        self.edge = edge
        self.names = names
        self.children: dict[Hashable, TreeNode] = {}
        self.lock_ref = self.hit_count = self.priority = 0
        self.last = self.created = tick
        self.on_device = True


class NodePart:
    """The record that a part of a hybrid tree (`parts.py`) keeps of one node.

    Attributes:
        node: the node; None in the sentinel that ends the part's list.
        there: whether the node has the part. A node without it is a tombstone.
        lock_ref: number of requests that hold the part.
        edge: the mark of the locks that end here; 0 if none do.
        older: the record before it in order of use, if the node has the part.
        newer: the record after it, if the node has the part.
    """

    __slots__ = ("edge", "lock_ref", "newer", "node", "older", "there")

    def __init__(self, node: TreeNode | None) -> None:
        self.node = node
        self.there = False
        self.lock_ref = self.edge = 0
        self.older = self.newer = self


class Hold:
    """Nodes that one copy, load or host lock holds together, from the root down. Splits add nodes.

    Attributes:
        nodes: the nodes.
    """

    __slots__ = ("nodes",)

    def __init__(self, *nodes: TreeNode) -> None:
        self.nodes = [*nodes]


class HostCopy:
    """The record of a node's host copy (`host_pools.py`) of its window or its state.

    Attributes:
        node: the node; None in the sentinel that ends the pool's list.
        there: whether the host has the copy, or has reserved its place while it is under way.
        holds: the holds that keep it on the host.
        older: the copy that is evicted before it, if it is in the list; else itself.
        newer: the copy that is evicted after it, if it is in the list; else itself.
    """

    __slots__ = ("holds", "newer", "node", "older", "there")

    def __init__(self, node: TreeNode | None) -> None:
        self.node = node
        self.there = False
        self.holds: list[Hold] = []
        self.older = self.newer = self


class HostPart:
    """The record that a tree with a host (`hicache_tree.py`) keeps of one node.

    Attributes:
        on_host: whether its pages are on the host, or have a reserved place there while the copy is under way.
        on_the_way: whether the copy of its pages is not acknowledged yet. A later copy of a window or state does not
            count.
        copy: the copy to the host under way; None if there is none.
        locks: locks of its pages on the host.
        loads: copies to the device under way.
        local_hashes: the router's hash of each page.
        token_ids: token ids of each page; None if unknown.
        extra: extra properties of events that store its pages; None if there are none.
        window: record of the window's host copy; unset in trees without windows.
        state: record of the state's host copy; unset in trees without states.
    """

    __slots__ = (
        "copy",
        "extra",
        "loads",
        "local_hashes",
        "locks",
        "on_host",
        "on_the_way",
        "state",
        "token_ids",
        "window",
    )
    window: HostCopy
    state: HostCopy

    def __init__(self, local_hashes: Sequence[int], token_ids: Sequence[Any] | None, extra: Any) -> None:
        self.on_host = self.on_the_way = False
        self.copy: Hold | None = None
        self.locks: list[Hold] = []
        self.loads: list[Hold] = []
        self.local_hashes = local_hashes
        self.token_ids = token_ids
        self.extra = extra

    @property
    def is_held(self) -> bool:
        """Whether its pages have to stay on the host: they are locked there, or a copy is under way."""
        return bool(self.copy or self.locks or self.loads)

    def split(self, pages: int, upper: TreeNode, lower: TreeNode) -> HostPart:
        """Make the record of the upper node of a split, with the first pages and all holds of the lower node."""
        part = HostPart(self.local_hashes[:pages], self.token_ids and self.token_ids[:pages], self.extra)
        self.local_hashes = self.local_hashes[pages:]
        self.token_ids = self.token_ids and self.token_ids[pages:]
        part.on_host, part.on_the_way, part.copy = self.on_host, self.on_the_way, self.copy
        part.locks, part.loads = [*self.locks], [*self.loads]
        for hold in [*self.locks, *self.loads, *([self.copy] if self.copy else [])]:
            hold.nodes.insert(hold.nodes.index(lower), upper)
        return part


PROTECTED_THRESHOLD: Final = 2
"""Number of hits from which `slru` protects a node (SGLang 0.5.23, the default of `SLRUStrategy`)."""

POLICIES: Final[Mapping[str, Callable[[TreeNode], Any]]] = MappingProxyType(
    {
        "lru": attrgetter("last"),
        "lfu": attrgetter("hit_count", "last"),
        "fifo": attrgetter("created"),
        "mru": lambda node: -node.last,
        "filo": lambda node: -node.created,
        "priority": attrgetter("priority", "last"),
        "slru": lambda node: (node.hit_count >= PROTECTED_THRESHOLD, node.last),
    }
)
"""Eviction keys of nodes, by policy; the lowest is evicted first (SGLang 0.5.23, `evict_policy`). No two evictable
nodes have the same key.
"""


def _slru(threshold: int) -> Callable[[TreeNode], Any]:
    """Return the key of `slru` with this number of hits in place of `PROTECTED_THRESHOLD`."""
    return lambda node: (node.hit_count >= threshold, node.last)


class LeafQueue:
    """Leaves in the order of a policy.

    Args:
        key_of: returns the key of a node; the lowest comes first.
        is_leaf: whether a node is a leaf; called when it is offered and when it is taken.
    """

    __slots__ = ("_count", "_heap", "_is_leaf", "_key_of", "_queued")

    def __init__(self, key_of: Callable[[TreeNode], Any], is_leaf: Callable[[TreeNode], bool]) -> None:
        self._key_of, self._is_leaf = key_of, is_leaf
        self._heap: list[tuple[Any, int, TreeNode]] = []
        self._queued: dict[TreeNode, Any] = {}  # the key of each node's last entry
        self._count = 0

    def offer(self, nodes: Iterable[TreeNode]) -> None:
        """Queue the leaves among some nodes, unless they are queued with their present key."""
        queued, is_leaf, key_of = self._queued, self._is_leaf, self._key_of
        for node in nodes:
            if is_leaf(node):
                key = key_of(node)
                if queued.get(node) != key:
                    queued[node] = key
                    self._count += 1  # breaks ties of equal keys, of which only one is still a leaf
                    heappush(self._heap, (key, self._count, node))

    def forget(self, node: TreeNode) -> None:
        """Drop a deleted node from the queue."""
        self._queued.pop(node, None)

    def pop(self) -> TreeNode | None:
        """Take the first leaf; None if there is none."""
        heap, queued = self._heap, self._queued
        if len(heap) > 2 * len(queued) + 64:  # most entries are stale, and with mru would never be popped
            heap[:] = [entry for entry in heap if queued.get(entry[2]) == entry[0]]
            heapify(heap)
        while heap:
            key, _, node = heappop(heap)
            if queued.get(node) == key:
                del queued[node]
                if self._is_leaf(node):
                    return node
        return None


class RadixTree:
    """A radix tree of page names. It counts pages; its owner keeps tokens, events and the owners of pages.

    Args:
        policy: one of `POLICIES`.
        protected_threshold: with "slru", number of hits from which a node is protected.

    Attributes:
        root: the node above all others; it has no pages and is never locked.
        evictable: device pages in nodes that are not locked.
        protected: device pages in locked nodes.
    """

    __slots__ = ("_changed", "_clock", "_key", "_leaves", "_queues", "evictable", "protected", "root")

    def __init__(self, policy: str, protected_threshold: int = PROTECTED_THRESHOLD) -> None:
        self._key = POLICIES[policy] if policy != "slru" else _slru(protected_threshold)
        self._clock = 0
        self.reset()

    def reset(self) -> None:
        """Drop everything, including locked nodes."""
        self.root = TreeNode(None, None, (), self._clock)
        self.evictable = self.protected = 0
        self._changed: dict[TreeNode, None] = {}
        self._leaves = LeafQueue(self._key, self._is_leaf)
        self._queues = [self._leaves]

    def _is_leaf(self, node: TreeNode) -> bool:
        """Return whether a node may be evicted."""
        return not node.children and not node.lock_ref and node.parent is not None

    def note(self, node: TreeNode) -> None:
        """Check a node again before the next eviction: it may have become a leaf, or its key may have changed."""
        self._changed[node] = None

    def _first(self, queue: LeafQueue) -> TreeNode | None:
        """Take the first leaf of a queue; None if there is none."""
        if self._changed:
            for each in self._queues:
                each.offer(self._changed)
            self._changed.clear()
        return queue.pop()

    # ------------------------------------------------------------------------------------------------ lookups

    def path(
        self,
        names: Sequence[int],
        count: int,
        namespace: Hashable = None,
        node: TreeNode | None = None,
        at: int = 0,
    ) -> Iterator[tuple[TreeNode, int]]:
        """Yield the nodes that have the first `count` pages, each with the number of pages from the root to its end, or
        to the end of the path.

        It changes nothing; the caller may change a node before it asks for the next one.

        Args:
            names: names of the pages.
            count: number of pages.
            namespace: separates this chain from others with the same names; None: the common namespace.
            node: the node below which the path begins; None: the root.
            at: pages from the root to its end.
        """
        node = node or self.root
        while at < count:
            child = node.children.get(names[at] if at or namespace is None else (namespace, names[0]))
            if child is None:
                return
            node, run = child, child.names
            end = at + len(run)
            if end > count or names[end - 1] != run[-1]:
                yield node, at + shared_pages(run, names, at, count)
                return
            at = end
            yield node, at

    def lookup(self, names: Sequence[int], count: int, namespace: Hashable = None) -> int:
        """Count the leading pages, of the first `count`, that are in the tree. Changes nothing."""
        at = 0
        for _, at in self.path(names, count, namespace):  # noqa: B007 - the last one is the answer
            pass
        return at

    def walk(
        self,
        names: Sequence[int],
        count: int,
        namespace: Hashable = None,
        node: TreeNode | None = None,
        at: int = 0,
    ) -> Iterator[tuple[TreeNode, int]]:
        """Walk a path as `path` does, and count each node as used now. A node that is matched in part is split, and its
        upper part is the last one.
        """
        tick = self._clock = self._clock + 1
        for child, end in self.path(names, count, namespace, node, at):
            child.last = tick
            yield child if end - at == len(child.names) else self._split(child, end - at), end
            at = end

    # ------------------------------------------------------------------------------------------------ inserts

    def insert(
        self, pages: Pages, count: int, namespace: Hashable = None, priority: int = 0, inserted: int = 0
    ) -> tuple[int, TreeNode]:
        """Insert the first `count` pages on the device.

        Args:
            pages: these pages, maybe followed by more.
            count: number of pages to insert.
            namespace: see `path`.
            priority: priority of the insert; a node keeps the highest.
            inserted: nodes that end within this many pages get no hit, as the same request inserted them before.

        Returns:
            The number of pages that were on the device before, and the node that ends with the last page.
        """
        node: TreeNode = self.root
        matched = at = 0
        for node, at in self.walk(pages.names, count, namespace):
            if node.on_device:
                matched = at
            else:
                self.put_on_device(node)
            node.priority = max(node.priority, priority)
            if at > inserted:
                self._hit(node)
        if at < count:
            node = self._grow(node, pages, at, count, namespace)
            node.priority = priority
            self.put_on_device(node)
            if count > inserted:
                self._hit(node)
        self.note(node)
        return matched, node

    def _grow(self, parent: TreeNode, pages: Pages, start: int, count: int, namespace: Hashable) -> TreeNode:
        """Add a leaf with the pages from `start` to `count`, which are not in the tree yet."""
        names = pages.names
        edge = names[start] if start or namespace is None else (namespace, names[0])
        self._clock += 1
        leaf = TreeNode(parent, edge, tuple(names[start:count]), self._clock)
        leaf.on_device = False
        parent.children[edge] = leaf
        return leaf

    def put_on_device(self, node: TreeNode) -> None:
        """Give a node device pages that the owner has taken."""
        node.on_device = True
        if node.lock_ref:
            self.protected += len(node.names)
        else:
            self.evictable += len(node.names)

    def _hit(self, node: TreeNode) -> None:
        """Count an insert that passed or made a node."""
        node.hit_count += 1

    def _split(self, node: TreeNode, pages: int) -> TreeNode:
        """Move the first pages of a node into a new node above it; the node itself becomes the lower part."""
        parent, names = node.parent, node.names
        assert parent is not None
        self._clock += 1
        upper = TreeNode(parent, node.edge, names[:pages], self._clock)
        upper.lock_ref, upper.hit_count, upper.priority = node.lock_ref, node.hit_count, node.priority
        upper.on_device = node.on_device
        parent.children[node.edge] = upper
        node.parent, node.edge, node.names = upper, names[pages], names[pages:]
        upper.children[node.edge] = node
        self.note(node)
        return upper

    # -------------------------------------------------------------------------------------------------- locks

    def lock(self, node: TreeNode) -> int:
        """Protect a node and all above it from eviction.

        Returns:
            Pages that became protected.

        Raises:
            ValueError: the node is not part of the tree any more.
        """
        gained = 0
        at: TreeNode | None = node
        while at is not self.root:
            if at is None:  # the counted nodes are not part of the tree either
                raise ValueError("inc_lock_ref: the node is no longer in the tree; match its tokens again")
            if not at.lock_ref and at.on_device:
                gained += len(at.names)
            at.lock_ref += 1
            at = at.parent
        self.evictable -= gained
        self.protected += gained
        return gained

    def unlock(self, node: TreeNode) -> int:
        """Release one lock.

        Returns:
            Pages that became evictable.

        Raises:
            ValueError: the node is not locked, or not part of the tree any more.
        """
        if node is not self.root and not node.lock_ref:
            raise ValueError("dec_lock_ref: the node is not locked")
        freed = 0
        at: TreeNode | None = node
        while at is not self.root:
            if at is None:
                raise ValueError("dec_lock_ref: the node is no longer in the tree; a reset dropped it")
            at.lock_ref -= 1
            if not at.lock_ref:
                self.note(at)
                if at.on_device:
                    freed += len(at.names)
            at = at.parent
        self.evictable += freed
        self.protected -= freed
        return freed

    def unlocked(self, node: TreeNode) -> int:
        """Count the pages that `lock` would protect."""
        pages = 0
        at: TreeNode | None = node
        while at is not None and not at.lock_ref:
            pages += len(at.names)
            at = at.parent
        return pages

    # ----------------------------------------------------------------------------------------------- eviction

    def evict(self, pages: int) -> list[TreeNode]:
        """Evict whole leaves until `pages` pages are freed, or none can be evicted. Parents that become leaves are
        included.

        Returns:
            The evicted nodes, in order.
        """
        evicted: list[TreeNode] = []
        stay: list[TreeNode] = []
        freed = 0
        while freed < pages and (node := self._first(self._leaves)) is not None:
            if self._evict(node):
                freed += len(node.names)
                evicted.append(node)
            else:
                stay.append(node)
        for node in stay:
            self.note(node)
        return evicted

    def _evict(self, node: TreeNode) -> bool:
        """Evict one leaf; do nothing and return False if it has to stay."""
        self.evictable -= len(node.names)
        self._detach(node)
        return True

    def _detach(self, node: TreeNode) -> None:
        """Delete a node without children."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge]
        node.parent = None
        self._changed.pop(node, None)
        for queue in self._queues:
            queue.forget(node)
        self.note(parent)

    def order(self) -> Iterator[TreeNode]:
        """Yield the unlocked device nodes in the order of eviction."""
        key_of = self._key
        heap = [(key_of(node), number, node) for number, node in enumerate(self.nodes()) if self._is_leaf(node)]
        heapify(heap)
        left: dict[TreeNode, int] = {}
        while heap:
            _, number, node = heappop(heap)
            yield node
            parent = node.parent
            assert parent is not None
            if parent is self.root or parent.lock_ref:
                continue
            if parent not in left:
                left[parent] = sum(child.on_device for child in parent.children.values())
            left[parent] -= 1
            if not left[parent]:
                heappush(heap, (key_of(parent), number, parent))

    def nodes(self) -> Iterator[TreeNode]:
        """Yield all nodes except the root, a parent before its children."""
        waiting = [*self.root.children.values()][::-1]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += [*node.children.values()][::-1]


def shared_pages(run: Sequence[int], names: Sequence[int], at: int, count: int) -> int:
    """Count the pages that a run shares with the names from `at` to `count`."""
    most = min(len(run), count - at)
    if run[most - 1] == names[at + most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda i: run[i] != names[at + i])
