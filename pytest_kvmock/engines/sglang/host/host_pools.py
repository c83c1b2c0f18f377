"""The host copies of the parts of a hybrid model: windows and states, each in its own pool.

One subject: which copies there are, what holds them, and the order in which they are evicted.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_kvmock.engines.sglang.parts import Part
from pytest_kvmock.engines.sglang.radix_tree import Hold, HostCopy, TreeNode

# Theory of operation (SGLang 0.5.23, `mem_cache/unified_cache/components`, `mem_cache/pool_host/group.py`)
#
# A copy can be evicted if nothing holds it and the device does not have the part: a duplicate is never dropped for
# room. Copies whose part is not on the device are in one list, the oldest entry first. A copy enters the list when the
# device loses the part, held or not. The first hold takes a copy off the list, and the end of the last hold puts it
# back as the newest. A lookup does not move copies.


class PartPool:
    """The host copies of one part, in units of the part: window pages or state slots.

    Args:
        capacity: number of units.
        part: the part that is copied.

    Attributes:
        capacity: as given.
        part: as given.
        free: units without a copy.
    """

    __slots__ = ("_ring", "capacity", "free", "part")

    def __init__(self, capacity: int, part: Part) -> None:
        self.capacity = self.free = capacity
        self.part = part
        self._ring = HostCopy(None)

    def put(self, node: TreeNode) -> None:
        """Give a node a copy; its units were taken before."""
        self.part.copy_of(node).there = True
        self.settle(node)

    def drop(self, node: TreeNode) -> None:
        """Drop the copy of a node, if it has one."""
        copy = self.part.copy_of(node)
        if copy.there:
            copy.there = False
            self.free += self.part.size(node)
            self.settle(node)

    def settle(self, node: TreeNode) -> None:
        """Check again whether the copy of a node belongs in the list; put a new entry at the end, as the newest."""
        copy = self.part.copy_of(node)
        stands = copy.there and not self.part.of(node).there
        if stands == (copy.older is not copy):
            return
        if stands:
            self._link(copy, self._ring)
        else:
            self._unlink(copy)

    def split(self, upper: TreeNode, node: TreeNode) -> None:
        """Give the new upper node of a split the lower node's holds, and a copy if the lower node has one."""
        above, below = self.part.copy_of(upper), self.part.copy_of(node)
        above.there = below.there
        for hold in below.holds:
            hold.nodes.insert(hold.nodes.index(node), upper)
            above.holds.append(hold)
        if below.older is not below and not below.holds:
            self._link(above, below)

    def hold(self, nodes: list[TreeNode]) -> Hold:
        """Hold the copies of nodes, given from the root down, also of nodes without a copy, which may get one later."""
        hold = Hold(*nodes)
        for node in nodes:
            copy = self.part.copy_of(node)
            copy.holds.append(hold)
            if len(copy.holds) == 1 and copy.older is not copy:
                self._unlink(copy)
        return hold

    def release(self, hold: Hold) -> None:
        """Undo `hold`, for all nodes into which its nodes were split."""
        for node in reversed(hold.nodes):
            copy = self.part.copy_of(node)
            copy.holds.remove(hold)
            if not copy.holds:
                self.settle(node)

    def in_order(self) -> Iterator[TreeNode]:
        """Yield the nodes whose copy can be evicted, the oldest first; the caller may drop each."""
        copy = self._ring.newer
        while copy is not self._ring:
            newer = copy.newer
            assert copy.node is not None
            if not copy.holds:
                yield copy.node
            copy = newer

    @staticmethod
    def _unlink(copy: HostCopy) -> None:
        copy.older.newer, copy.newer.older = copy.newer, copy.older
        copy.older = copy.newer = copy

    @staticmethod
    def _link(copy: HostCopy, before: HostCopy) -> None:
        copy.older, copy.newer = before.older, before
        copy.older.newer = before.older = copy
