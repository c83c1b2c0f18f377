"""What a hybrid model keeps beside full attention: windows and states, each with pages or slots of its own.

One subject: who has how much of a part, and in which order it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pytest_kvmock.cache.sglang.radix_tree import NodePart, TreeNode

# Theory of operation
#
# SGLang calls them components of its tree: SWA and MAMBA beside FULL. Full attention is the tree itself: it is there as
# long as the node. A part is there or not in each node; without it, the node is a tombstone. What is there stands in one
# list by the time of its last use, whatever policy evicts leaves. Nothing of this is ever published.
#
# A window is of all pages of a node. The lock of a request holds the last window of its path: it goes up from its node
# until it has a window's length, and marks the last node that it locks. Splits move the mark up, so that the lock is
# released where it ends, not where as many pages would end now.
#
# A state is of the end of a node, and has one slot, however long the node is.


class Part:
    """A part of a hybrid tree, in units of its own: pages of a window, slots of states.

    Args:
        capacity: units that there are.

    Attributes:
        capacity: as above.
        free: units that nobody has.
        evictable: units in nodes whose part is not locked.
        protected: units in nodes whose part is.
    """

    __slots__ = ("_ring", "capacity", "evictable", "free", "protected")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reset()

    def reset(self) -> None:
        """Drop everything; all units are free."""
        self.free = self.capacity
        self.evictable = self.protected = 0
        self._ring = NodePart(None)

    def size(self, node: TreeNode) -> int:
        """Units that a node has, where it has the part."""
        raise NotImplementedError

    def unheld(self) -> int:
        """Units that are free or evictable."""
        return self.free + self.evictable

    # -------------------------------------------------------------------------------------------- in a node

    def put(self, node: TreeNode, part: NodePart) -> None:
        """Give a node the part, as the last used; its owner had the units before."""
        part.there = True
        if part.lock_ref:
            self.protected += self.size(node)
        else:
            self.evictable += self.size(node)
        _link(part, self._ring)

    def drop(self, node: TreeNode, part: NodePart) -> None:
        """Make a node whose part is not locked a tombstone; nothing where it is one."""
        if not part.there:
            return
        part.there = False
        self.evictable -= self.size(node)
        self.free += self.size(node)
        _unlink(part)

    def touch(self, part: NodePart) -> None:
        """Count the part of a node as used last, where it is there."""
        if part.there:
            _unlink(part)
            _link(part, self._ring)

    def lock(self, node: TreeNode, part: NodePart) -> None:
        """Protect the part of a node; of a tombstone, too: it may be given the part later."""
        if part.there and not part.lock_ref:
            self.evictable -= self.size(node)
            self.protected += self.size(node)
        part.lock_ref += 1

    def unlock(self, node: TreeNode, part: NodePart) -> None:
        """Take back a lock."""
        part.lock_ref -= 1
        if part.there and not part.lock_ref:
            self.evictable += self.size(node)
            self.protected -= self.size(node)

    def unlocked(self) -> Iterator[TreeNode]:
        """Yield the nodes whose part is there and not locked, the least recently used first; each may be dropped."""
        ring = self._ring
        part = ring.newer
        while part is not ring:
            newer = part.newer
            if not part.lock_ref:
                assert part.node is not None
                yield part.node
            part = newer


class Window(Part):
    """The pages of layers that attend to the last tokens only.

    Args:
        capacity: pages that there are.
        pages: of a window, whole ones that hold it.
        gates: whether a prefix is used only where its window is there; without, a tombstone is as good.

    Attributes:
        pages: as above.
        gates: as above.
    """

    __slots__ = ("_marks", "gates", "pages")

    def __init__(self, capacity: int, pages: int, *, gates: bool = True) -> None:
        self.pages = pages
        self.gates = gates
        self._marks = 0
        super().__init__(capacity)

    def size(self, node: TreeNode) -> int:
        """Pages of a node."""
        return len(node.names)

    def split(self, upper: TreeNode, node: TreeNode) -> None:
        """Give the new upper part of a node that was split what the lower one has, and its mark."""
        above, below = upper.window, node.window
        above.there, above.lock_ref = below.there, below.lock_ref
        above.edge, below.edge = below.edge, 0
        if above.there:
            _link(above, below)

    def touch_path(self, node: TreeNode, root: TreeNode) -> None:
        """Count what is there of the last window of a path, and of one page more, as used last: the deepest last of all."""
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
        """Protect the last window of a path.

        Returns:
            The mark where the lock ends; 0: it goes up to the root.
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
        """Take back a lock that ends at this mark."""
        while node is not root:
            self.unlock(node, node.window)
            if edge and node.window.edge == edge:
                return
            node = _above(node)


class States(Part):
    """The recurrent states of a model, each of a prefix.

    Args:
        capacity: slots that there are.
        most: states that one path keeps when another comes; None: all.

    Attributes:
        most: as above.
    """

    __slots__ = ("most",)

    SIZE: Final = 1

    def __init__(self, capacity: int, most: int | None = None) -> None:
        self.most = most
        super().__init__(capacity)

    def size(self, node: TreeNode) -> int:  # noqa: ARG002 - a node has one, whatever its length
        """One slot."""
        return self.SIZE

    def trim(self, node: TreeNode, root: TreeNode) -> None:
        """Drop states above a node where its path has too many, from the root on; not where it forks, and no locked one."""
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
    """Put a node into the list, as used just before another; before the ring, as the last used."""
    older = before.older
    part.older, part.newer = older, before
    older.newer = before.older = part


def _unlink(part: NodePart) -> None:
    part.older.newer, part.newer.older = part.newer, part.older
