"""`lineage`: leaves go first, the oldest of them before the others. Dynamo's default."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import count

from pytest_kvmock.cache.pool import Slot
from pytest_kvmock.tokens import lineage_fragment, lineage_parent_fragment, lineage_position

# Theory of operation (kvbm-logical, `LineageBackend`)
#
# Blocks form a forest: a block's place is (position, own fragment), its parent's (position - 1, parent fragment), both
# read from the lineage hash. A place holds one inactive block, or none: then it is a *ghost*, which keeps the children
# of a block that is in use or not cached. A ghost without children is pruned, and its parent may be a ghost without
# children then, and so on. Only leaves are evicted, the one inserted longest ago first; a block that becomes a leaf
# again still has its old turn.
#
# Here a place is a `_Node`, and outlives its pruning as long as a registered block has it as its own or as its
# parent's place: what is pruned is the link to the parent. So a block that is used and freed again costs no look-up.
#
# `_queue` has a node once for each insertion, in order; only its last entry counts, and only while it holds a block. A
# node that turns out to be no leaf when its turn comes is *parked* under the next number: it waits, without an entry,
# until its last child goes, and then its number stands in `_exposed`. The parked go before the queued: their turn has
# come already.

_MASK59 = 2**59 - 1


class _Node:
    """A place in the forest."""

    __slots__ = ("children", "entries", "fragment", "level", "owner", "parent", "parked", "pins", "slot")

    def __init__(self) -> None:
        self.level: dict[int, _Node]  # the nodes at its position
        self.fragment = 0
        self.slot: Slot | None = None  # the inactive block; None for a ghost
        self.entries = 0  # in the queue
        self.parked = -1
        self.parent: _Node | None = None  # the node that counts this one as its child
        self.children = 0
        self.owner: Slot | None = None  # the registered block with this place; the first, should there be more
        self.pins = 0  # registered blocks whose parent's place it is


class LineagePolicy:
    """Leaves only, oldest first.

    Freed tail first, as schedulers do, a chain goes tail first; freed in any other order it does so too. `touch`
    changes nothing. Two lineage hashes with one place (same position and own fragment, other parents) stand for the
    same cached block, as in Dynamo 1.2.1; two such blocks, both active, cannot become inactive both.
    """

    finds_by_place = True

    def __init__(self) -> None:
        self.collisions = 0
        self._levels: defaultdict[int, dict[int, _Node]] = defaultdict(dict)
        self._queue: deque[_Node] = deque()
        self._limit = 1024
        self._numbers = count()
        self._parked: dict[int, _Node] = {}
        self._exposed: list[int] = []
        self._spare: list[_Node] = []
        self._rivals: defaultdict[_Node, list[Slot]] = defaultdict(list)  # blocks beside the owner of their place
        # Links that outlive the child: a place whose block changed its parent is still counted by the old one. Only
        # blocks that share a place make them.
        self._left_behind: set[tuple[_Node, int]] = set()

    def register(self, slot: Slot) -> None:
        """Give the slot its place, and its parent's."""
        plh = slot.plh
        position = plh >> 118
        if position < 256:  # the mode bits are 0: as the functions do, inline
            fragment = plh & _MASK59
            above = plh >> 59 & _MASK59
        else:
            position, fragment, above = lineage_position(plh), lineage_fragment(plh), lineage_parent_fragment(plh)
        level = self._levels[position]
        node = level.get(fragment)
        if node is None:
            node = self._new_node(level, fragment)
        slot.place = node
        if node.owner is None:
            node.owner = slot
        else:
            self.collisions += 1
            self._rivals[node].append(slot)
        if position:
            level = self._levels[position - 1]
            node = level.get(above)
            if node is None:
                node = self._new_node(level, above)
            node.pins += 1
            slot.above = node
        else:
            slot.above = None

    def _new_node(self, level: dict[int, _Node], fragment: int) -> _Node:
        level[fragment] = node = self._spare.pop() if self._spare else _Node()
        node.level = level
        node.fragment = fragment
        return node

    def _drop(self, node: _Node) -> None:
        """Forget a place that nobody needs: no block of its own, no block below it."""
        if node.owner is None and not node.pins and not node.children:
            del node.level[node.fragment]
            self._spare.append(node)

    def _unregister(self, slot: Slot) -> None:
        node: _Node = slot.place
        if self.collisions and node in self._rivals:
            self.collisions -= 1
            rivals = self._rivals[node]
            if node.owner is slot:
                node.owner = rivals.pop()
            else:
                rivals.remove(slot)
            if not rivals:
                del self._rivals[node]
        else:
            node.owner = None
            if not node.pins and not node.children:
                del node.level[node.fragment]
                self._spare.append(node)
        node = slot.above
        if node is not None:
            node.pins -= 1
            if node.owner is None:
                self._drop(node)

    def touch(self, slot: Slot) -> None:
        """Nothing to note."""

    def insert(self, slot: Slot) -> None:
        """Put the slot into the forest; its turn comes after all others'."""
        node: _Node = slot.place
        node.slot = slot
        node.entries += 1
        self._queue.append(node)
        if node.parent is not slot.above:
            self._link(node, slot.above)

    def _link(self, node: _Node, parent: _Node) -> None:
        if node.parent is not None:
            self._left_behind.add((node.parent, node.fragment))
        node.parent = parent
        if self._left_behind and (parent, node.fragment) in self._left_behind:
            self._left_behind.remove((parent, node.fragment))
        else:
            parent.children += 1

    def remove(self, slot: Slot) -> None:
        """Take the slot out; its place stays as a ghost while it has children."""
        self._leave(slot.place)
        if len(self._queue) > self._limit:
            self._clean()

    def _leave(self, node: _Node) -> None:
        node.slot = None
        if node.parked >= 0:
            del self._parked[node.parked]
            node.parked = -1
        while not node.children:
            parent = node.parent
            if parent is None:
                return
            node.parent = None
            parent.children -= 1
            if parent.slot is not None:
                if parent.parked >= 0 and not parent.children:
                    heappush(self._exposed, parent.parked)
                return
            if parent.owner is None:
                self._drop(parent)
            node = parent

    def _clean(self) -> None:
        """Drop the entries that do not count."""
        nodes = self._queued()
        for node in self._queue:
            node.entries = 0
        for node in nodes:
            node.entries = 1
        self._queue = deque(nodes)
        self._limit = 2 * len(nodes) + 1024

    def _queued(self) -> list[_Node]:
        """Nodes whose entry in the queue counts, in order."""
        newest = dict.fromkeys(node for node in reversed(self._queue) if node.slot is not None)
        return list(newest)[::-1]

    def evict(self) -> Slot | None:
        """Choose the leaf whose turn is first; None where no block is a leaf (only shared places can do that)."""
        node = self._next_leaf()
        if node is None:
            return None
        slot = node.slot
        assert slot is not None
        self._leave(node)
        self._unregister(slot)
        return slot

    def _next_leaf(self) -> _Node | None:
        while self._exposed:
            node = self._parked.get(heappop(self._exposed))
            if node is not None and not node.children:
                return node
        queue = self._queue
        while queue:
            node = queue.popleft()
            node.entries -= 1
            if not node.entries and node.slot is not None:
                if not node.children:
                    return node
                node.parked = next(self._numbers)
                self._parked[node.parked] = node
        return None

    def find(self, plh: int) -> Slot | None:
        """Return the inactive block at the place of `plh`; its own lineage hash may have another parent."""
        position = plh >> 118
        if position < 256:
            node = self._levels[position].get(plh & _MASK59)
        else:
            node = self._levels[lineage_position(plh)].get(lineage_fragment(plh))
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
        waiting = [*(self._parked[number] for number in sorted(self._parked)), *self._queued()]
        turns = {node: turn for turn, node in enumerate(waiting)}
        children = {node: node.children for level in self._levels.values() for node in level.values()}
        leaves = [turn for turn, node in enumerate(waiting) if not node.children]
        heapify(leaves)
        order: dict[_Node, None] = {}
        while leaves:
            node = waiting[heappop(leaves)]
            order[node] = None
            while not children[node] and node.parent is not None:
                node = node.parent
                children[node] -= 1
                if node in turns and node not in order:
                    if not children[node]:
                        heappush(leaves, turns[node])
                    break
        order.update(dict.fromkeys(waiting))
        return [node.slot for node in order if node.slot is not None]
