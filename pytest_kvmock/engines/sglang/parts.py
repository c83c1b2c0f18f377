"""The parts of a hybrid model in addition to full attention: windows, which have their own pages, and states, which
have slots.

One subject: the units of a part that each node has, and the order in which they are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from pytest_kvmock.engines.sglang.radix_tree import HostCopy, NodePart, TreeNode

# Theory of operation
#
# SGLang calls them components of its tree: SWA and MAMBA next to FULL. Full attention is the tree itself: every node
# has it. A node may have a part or lack it; without it, the node is a tombstone. Nodes with a part are in one list in
# order of last use, whatever policy evicts leaves. Parts are never published.
#
# A node's window covers all its pages. A request locks the last window of its path: the lock goes up from the request's
# node for a window's length, and marks the last node that it locks. Splits move the mark up, so that a release ends at
# the mark and not after the number of pages that a window has now.
#
# A state belongs to the end of a node, and takes one slot, however long the node is.


class HostBelow(Protocol):
    """The interface of a part's host pool that the part uses."""

    def settle(self, node: TreeNode) -> None:
        """Check again whether the host copy of a node can be evicted."""


class Part:
    """A part of a hybrid tree, in its own units: window pages or state slots.

    Args:
        capacity: number of units.

    Attributes:
        capacity: as given.
        free: units that no node has.
        evictable: units in nodes whose part is not locked.
        protected: units in nodes whose part is locked.
        host: its pool on the host (`host_pools.py`); None if there is none.
    """

    __slots__ = ("_ring", "capacity", "evictable", "free", "host", "protected")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.host: HostBelow | None = None
        self.reset()

    def reset(self) -> None:
        """Drop everything; all units are free."""
        self.free = self.capacity
        self.evictable = self.protected = 0
        self._ring = NodePart(None)

    def size(self, node: TreeNode) -> int:
        """Return the units of a node that has the part."""
        raise NotImplementedError

    def of(self, node: TreeNode) -> NodePart:
        """Return the record of a node's part."""
        raise NotImplementedError

    def copy_of(self, node: TreeNode) -> HostCopy:
        """Return the record of the part's host copy."""
        raise NotImplementedError

    def unheld(self) -> int:
        """Count the units that are free or evictable."""
        return self.free + self.evictable

    # -------------------------------------------------------------------------------------------- in a node

    def put(self, node: TreeNode, part: NodePart) -> None:
        """Give a node the part, as the most recently used; the owner has taken the units."""
        part.there = True
        if part.lock_ref:
            self.protected += self.size(node)
        else:
            self.evictable += self.size(node)
        _link(part, self._ring)
        if self.host is not None:
            self.host.settle(node)

    def drop(self, node: TreeNode, part: NodePart) -> None:
        """Turn a node whose part is not locked into a tombstone; do nothing if it is one."""
        if not part.there:
            return
        part.there = False
        self.evictable -= self.size(node)
        self.free += self.size(node)
        _unlink(part)
        if self.host is not None:
            self.host.settle(node)

    def touch(self, part: NodePart) -> None:
        """Make a node's part the most recently used, if the node has it."""
        if part.there:
            _unlink(part)
            _link(part, self._ring)

    def lock(self, node: TreeNode, part: NodePart) -> None:
        """Protect the part of a node. This also counts for a tombstone, which may get the part later."""
        if part.there and not part.lock_ref:
            self.evictable -= self.size(node)
            self.protected += self.size(node)
        part.lock_ref += 1

    def unlock(self, node: TreeNode, part: NodePart) -> None:
        """Release a lock."""
        part.lock_ref -= 1
        if part.there and not part.lock_ref:
            self.evictable += self.size(node)
            self.protected -= self.size(node)

    def unlocked(self) -> Iterator[TreeNode]:
        """Yield the nodes whose part is there and not locked, the least recently used first; the caller may drop
        each.
        """
        ring = self._ring
        part = ring.newer
        while part is not ring:
            newer = part.newer
            if not part.lock_ref:
                assert part.node is not None
                yield part.node
            part = newer


class Window(Part):
    """The pages of layers that attend only to the last tokens.

    Args:
        capacity: number of pages.
        pages: number of whole pages that hold a window.
        gates: whether a prefix can be reused only if its window is cached; if not, tombstones are accepted too.

    Attributes:
        pages: as given.
        gates: as given.
    """

    __slots__ = ("_marks", "gates", "pages")

    def __init__(self, capacity: int, pages: int, *, gates: bool = True) -> None:
        self.pages = pages
        self.gates = gates
        self._marks = 0
        super().__init__(capacity)

    def size(self, node: TreeNode) -> int:
        """Return the number of pages of a node."""
        return len(node.names)

    def of(self, node: TreeNode) -> NodePart:
        """Return the record of a node's window."""
        return node.window

    def copy_of(self, node: TreeNode) -> HostCopy:
        """Return the record of the window's host copy."""
        return node.host.window

    def last(self, node: TreeNode, root: TreeNode) -> Iterator[TreeNode]:
        """Yield the nodes of the last window of a path, from its end towards the root."""
        pages = 0
        while node is not root and pages < self.pages:
            yield node
            pages += len(node.names)
            node = _above(node)

    def split(self, upper: TreeNode, node: TreeNode) -> None:
        """Give the new upper node of a split the window if the lower node has it, and the lower node's mark."""
        above, below = upper.window, node.window
        above.there, above.lock_ref = below.there, below.lock_ref
        above.edge, below.edge = below.edge, 0
        if above.there:
            _link(above, below)

    def touch_path(self, node: TreeNode, root: TreeNode) -> None:
        """Make a path's last window, and one page more, the most recently used window parts, the deepest node last."""
        pages, before = 0, self._ring
        while node is not root and pages <= self.pages:
            part = node.window
            if part.there:
                _unlink(part)
                _link(part, before)
                before = part
            pages += len(node.names)
            node = _above(node)

    def lock_path(self, node: TreeNode, root: TreeNode) -> int:
        """Lock the last window of a path.

        Returns:
            The mark at which the lock ends; 0 if it reaches the root.
        """
        pages = 0
        while node is not root:
            self.lock(node, node.window)
            pages += len(node.names)
            if pages >= self.pages:
                if not node.window.edge:
                    self._marks += 1
                    node.window.edge = self._marks
                return node.window.edge
            node = _above(node)
        return 0

    def unlock_path(self, node: TreeNode, root: TreeNode, edge: int) -> None:
        """Release a lock that ends at this mark."""
        for each in self.locked(node, root, edge):
            self.unlock(each, each.window)

    def locked(self, node: TreeNode, root: TreeNode, edge: int) -> Iterator[TreeNode]:
        """Yield the nodes of a lock that ends at this mark, from the path's end up. After splits these may be more than
        the last window.
        """
        while node is not root:
            above, is_last = _above(node), bool(edge) and node.window.edge == edge
            yield node
            if is_last:
                return
            node = above


class States(Part):
    """The recurrent states of a model, each for one prefix.

    Args:
        capacity: number of slots.
        most: the most states that one path keeps when it gets another one; None: all.

    Attributes:
        most: as given.
    """

    __slots__ = ("most",)

    SIZE: Final = 1

    def __init__(self, capacity: int, most: int | None = None) -> None:
        self.most = most
        super().__init__(capacity)

    def size(self, node: TreeNode) -> int:  # noqa: ARG002 - a node has one, whatever its length
        """Return 1: a state takes one slot."""
        return self.SIZE

    def of(self, node: TreeNode) -> NodePart:
        """Return the record of a node's state."""
        return node.state

    def copy_of(self, node: TreeNode) -> HostCopy:
        """Return the record of the state's host copy."""
        return node.host.state

    def trim(self, node: TreeNode, root: TreeNode) -> None:
        """Drop states above a node, from the root on, if its path has too many; keep locked states and forks."""
        if self.most is None:
            return
        holders = []
        at = node
        while at is not root:
            if at.state.there:
                holders.append(at)
            at = _above(at)
        excess = len(holders) - self.most
        for holder in reversed(holders):
            if excess <= 0:
                return
            if holder is not node and len(holder.children) == 1 and not holder.state.lock_ref:
                self.drop(holder, holder.state)
                excess -= 1


def _above(node: TreeNode) -> TreeNode:
    assert node.parent is not None
    return node.parent


def _link(part: NodePart, before: NodePart) -> None:
    """Put a node into the list just before another; before the ring it is the most recently used."""
    older = before.older
    part.older, part.newer = older, before
    older.newer = before.older = part


def _unlink(part: NodePart) -> None:
    part.older.newer, part.newer.older = part.newer, part.older
