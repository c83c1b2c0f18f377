"""`lineage`: leaves go first, the oldest of them before the others. Dynamo's default."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush

from pytest_kvmock.cache.pool import Slot
from pytest_kvmock.tokens import lineage_fragment, lineage_parent_fragment, lineage_position

# Theory of operation (kvbm-logical, `LineageBackend`)
#
# Blocks form a forest: a block's place is (position, own fragment), its parent's (position - 1, parent fragment), both
# read from the lineage hash. A place holds one inactive block, or none: then it is a *ghost*, which keeps the children
# of a block that is in use or not cached. A ghost without children is pruned, and its parent may be a ghost without
# children then, and so on. Only leaves are evicted, the one with the lowest tick first; the tick is given by `insert`,
# and a block that becomes a leaf again still has its old one.
#
# Here a place is a `_Node`, and outlives its pruning as long as a registered block has it as its own or as its
# parent's place: what is pruned is the link to the parent. So a block that is used and freed again costs no look-up.
#
# `_queue` has each inserted node once, in order of ticks; the entry at its front has tick `_tick - len(_queue)`, and is
# void when the node has another one by now. A node that turns out to be no leaf when its turn comes is *parked*: it
# waits, without an entry, until its last child goes, and then stands in `_exposed`. All ticks in there are lower than
# those in the queue.

_MASK59 = 2**59 - 1


class _Node:
    """A place in the forest."""

    __slots__ = ("children", "key", "owners", "parent", "parked", "pins", "slot", "tick")

    def __init__(self, key: int) -> None:
        self.key = key  # position << 64 | fragment
        self.slot: Slot | None = None  # the inactive block; None for a ghost
        self.tick = -1
        self.parked = False
        self.parent: _Node | None = None  # the node that counts this one as its child
        self.children = 0
        self.owners = 0  # registered blocks with this place
        self.pins = 0  # the same, and those whose parent's place it is


def _places(plh: int) -> tuple[int, int]:
    """Keys of a block's own place and of its parent's (negative for a root)."""
    if not plh >> 126:  # positions below 256: as the functions do, inline
        position = plh >> 118
        return position << 64 | plh & _MASK59, (position - 1) << 64 | plh >> 59 & _MASK59
    position = lineage_position(plh)
    return position << 64 | lineage_fragment(plh), (position - 1) << 64 | lineage_parent_fragment(plh)


class LineagePolicy:
    """Leaves only, oldest tick first.

    Freed tail first, as schedulers do, a chain goes tail first; freed in any other order it does so too. `touch`
    changes nothing. Two lineage hashes with one place (same position and own fragment, other parents) stand for the
    same cached block, as in Dynamo 1.2.1; two such blocks, both active, cannot become inactive both.
    """

    finds_by_place = True

    def __init__(self) -> None:
        self.collisions = 0
        self._nodes: dict[int, _Node] = {}
        self._queue: deque[_Node] = deque()
        self._exposed: list[tuple[int, _Node]] = []
        self._tick = 0
        self._count = 0
        # (parent, child) keys of links that outlive the child: a place whose block changed its parent is still counted
        # by the old one. Only blocks that share a place make them.
        self._left_behind: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return self._count

    def register(self, slot: Slot) -> None:
        """Give the slot its place, and its parent's."""
        key, parent_key = _places(slot.plh)
        slot.place = node = self._node(key)
        if node.owners:
            self.collisions += 1
        node.owners += 1
        node.pins += 1
        if parent_key < 0:
            slot.above = None
        else:
            slot.above = above = self._node(parent_key)
            above.pins += 1

    def _node(self, key: int) -> _Node:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _Node(key)
        return node

    def touch(self, slot: Slot) -> None:
        """Nothing to note."""

    def insert(self, slot: Slot) -> None:
        """Put the slot into the forest, with the next tick."""
        node: _Node = slot.place
        node.slot = slot
        node.tick = self._tick
        node.parked = False
        self._tick += 1
        self._count += 1
        self._queue.append(node)
        if node.parent is not slot.above:
            self._link(node, slot.above)

    def _link(self, node: _Node, parent: _Node | None) -> None:
        if node.parent is not None:
            self._left_behind.add((node.parent.key, node.key))
        node.parent = parent
        if parent is None:
            return
        if self._left_behind and (parent.key, node.key) in self._left_behind:
            self._left_behind.remove((parent.key, node.key))
        else:
            parent.children += 1

    def remove(self, slot: Slot) -> None:
        """Take the slot out; its place stays as a ghost while it has children."""
        self._leave(slot.place)
        if len(self._queue) > 2 * self._count + 1024:
            self._compact()

    def _leave(self, node: _Node) -> None:
        node.slot = None
        node.tick = -1
        self._count -= 1
        while not node.children and node.parent is not None:
            parent = node.parent
            node.parent = None
            parent.children -= 1
            if parent.slot is not None:
                if parent.parked and not parent.children:
                    parent.parked = False
                    heappush(self._exposed, (parent.tick, parent))
                return
            if not parent.pins and not parent.children:
                del self._nodes[parent.key]
            node = parent

    def _compact(self) -> None:
        """Drop void entries; new ticks in the same order, still above those that are parked or exposed."""
        first = self._tick - len(self._queue)
        self._queue = deque(node for tick, node in enumerate(self._queue, first) if node.tick == tick)
        for tick, node in enumerate(self._queue, self._tick - len(self._queue)):
            node.tick = tick

    def evict(self) -> Slot | None:
        """Choose the leaf with the lowest tick; None where no block is a leaf (only shared places can do that)."""
        node = self._next_leaf()
        if node is None:
            return None
        slot = node.slot
        assert slot is not None
        self._leave(node)
        node.owners -= 1
        if node.owners:
            self.collisions -= 1
        self._unpin(node)
        if slot.above is not None:
            self._unpin(slot.above)
        return slot

    def _next_leaf(self) -> _Node | None:
        exposed, queue = self._exposed, self._queue
        while exposed:
            tick, node = heappop(exposed)
            if node.tick == tick:
                if not node.children:
                    return node
                node.parked = True
        while queue:
            tick = self._tick - len(queue)
            node = queue.popleft()
            if node.tick == tick:
                if not node.children:
                    return node
                node.parked = True
        return None

    def _unpin(self, node: _Node) -> None:
        node.pins -= 1
        if not node.pins and not node.children:
            del self._nodes[node.key]

    def find(self, plh: int) -> Slot | None:
        """Return the inactive block at the place of `plh`; its own lineage hash may have another parent."""
        node = self._nodes.get(_places(plh)[0])
        return None if node is None else node.slot

    def refused(self, slots: Iterable[Slot]) -> Slot | None:
        """Return the first slot whose place is taken by another block (kvbm-logical: "Hash collision detected")."""
        taken: set[_Node] = set()
        for slot in slots:
            node = slot.place
            if node.slot is not None or node in taken:
                return slot
            taken.add(node)
        return None

    def order(self) -> list[Slot]:
        """Play the evictions through; blocks that could never go stand at the end."""
        children = {node: node.children for node in self._nodes.values()}
        inactive = [node for node in children if node.slot is not None]
        leaves: list[tuple[int, _Node]] = []
        for node in inactive:
            if not node.children:
                heappush(leaves, (node.tick, node))
        gone: dict[_Node, None] = {}
        while leaves:
            node = heappop(leaves)[1]
            gone[node] = None
            while not children[node] and node.parent is not None:
                node = node.parent
                children[node] -= 1
                if node.slot is not None and node not in gone:
                    if not children[node]:
                        heappush(leaves, (node.tick, node))
                    break
        rest = sorted((node for node in inactive if node not in gone), key=lambda node: node.tick)
        return [node.slot for node in (*gone, *rest) if node.slot is not None]
