"""`lineage`: evict leaves only, the oldest first. Dynamo's default."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from pytest_kvmock.engines.base.eviction_policy import EvictionPolicy, Slot
from pytest_kvmock.values.plh import lineage_fragment, lineage_parent_fragment, lineage_position

# Theory of operation (kvbm-logical, `LineageBackend`)
#
# Blocks form a forest: a block's place is (position, own fragment), its parent's (position - 1, parent fragment), both
# read from the lineage hash. A place holds one inactive block, or none: then it is a *ghost*, which keeps the children
# of a block that is in use or not cached. A ghost without children is pruned; its parent may then be a ghost without
# children, and so on. Only leaves are evicted, the one inserted longest ago first. A block that becomes a leaf again
# keeps its old place in the order.
#
# Here a place is a `_Node`. Pruning cuts only its link to the parent. The node lives as long as it is the place of a
# registered block or of such a block's parent, so a block that is used and freed again costs no look-up. When its block
# is evicted, a slot keeps the node for its next block, unless a child still needs the place.
#
# `_queue` has a node once for each insertion, in order; only its last entry counts, and only while its block is
# inactive. A node that reaches the front and is not a leaf is *parked* under the next number. It waits without an entry
# until its last child is evicted; then its number is put into `_exposed`. Parked nodes are evicted before queued ones,
# because they reached the front already. (Each block adds only small numbers and flags, which take no extra memory.)

_SLACK = 1024  # stale entries allowed before the queue is cleaned

# The key of a place is `position + 1 << 59 | fragment`. Below position 256, where the mode bits of a lineage hash are
# 0, a hash is `position << 118 | parent's fragment << 59 | fragment`: shifted by 59 it is the parent's key.
_MODE_1 = 1 << 126
_FRAGMENT = 2**59 - 1
_LEVEL = 1 << 59


def _key(plh: int) -> int:
    if plh < _MODE_1:
        return (plh >> 118) + 1 << 59 | plh & _FRAGMENT
    return lineage_position(plh) + 1 << 59 | lineage_fragment(plh)


def _key_above(plh: int) -> int:
    """Return the key of the parent's place; below `_LEVEL` for a root."""
    if plh < _MODE_1:
        return plh >> 59
    return lineage_position(plh) << 59 | lineage_parent_fragment(plh)


class _Node:
    """A place in the forest."""

    __slots__ = ("children", "entries", "key", "occupied", "parent", "parked", "pins", "slot")

    def __init__(self) -> None:
        self.key = 0
        self.slot: Slot | None = None  # a registered block with this place: the inactive one, if there is one
        self.occupied = False  # whether `slot` is inactive; False for a ghost
        self.entries = 0  # number of its entries in the queue
        self.parked = -1
        self.parent: _Node | None = None  # the node that counts this one as its child
        self.children = 0
        self.pins = 0  # number of registered blocks whose parent has this place


class LineagePolicy(EvictionPolicy):
    """Leaves only, oldest first.

    A chain is evicted tail first, whatever the order in which it was freed. A match of an active block changes nothing.
    As in Dynamo 1.2.1, two lineage hashes with one place (same position and own fragment, different parents) stand for
    the same cached block. If two such blocks are active, only one of them can become inactive.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._collisions = 0
        self._nodes: dict[int, _Node] = {}
        self._queue: deque[_Node] = deque()
        self._limit = _SLACK
        self._number = 0  # the number of the next parked node
        self._parked: dict[int, _Node] = {}
        self._exposed: list[int] = []
        self._rivals: defaultdict[_Node, list[Slot]] = defaultdict(list)  # blocks other than `_Node.slot`
        # Stale links: if the block of a place has changed its parent, the old parent still counts the place as a child.
        # Only blocks that share a place cause this.
        self._left_behind: set[tuple[_Node, int]] = set()

    def _on_register(self, slots: Sequence[Slot], places: Sequence[int] | None = None) -> None:
        """Give each slot its place, and its parent's."""
        if places and self._register_chain(slots, places):
            return
        for slot in slots:
            above = _key_above(slot.plh)
            slot.above = None if above < _LEVEL else self._node(above)
            if slot.above is not None:
                slot.above.pins += 1
            slot.place = node = self._node(_key(slot.plh), slot.place)
            if node.slot is None:
                node.slot = slot
            else:
                self._collisions += 1
                self._rivals[node].append(slot)

    def _register_chain(self, slots: Sequence[Slot], keys: Sequence[int]) -> bool:
        """Register slots at free places if each is the parent of the next (the usual case); return whether it was."""
        plhs = [slot.plh for slot in slots]
        if max(plhs) >= _MODE_1 or [plh >> 59 for plh in plhs[1:]] != keys[:-1]:
            return False
        above = plhs[0] >> 59
        parent = None if above < _LEVEL else self._node(above)
        nodes: list[_Node] = []
        for slot, key in zip(slots, keys, strict=True):
            node: _Node = slot.place or _Node()
            slot.place = node
            node.key = key
            node.slot = slot
            slot.above = parent
            if parent is not None:
                parent.pins += 1
            nodes.append(node)
            parent = node
        self._nodes.update(zip(keys, nodes, strict=True))
        return True

    def _node(self, key: int, spare: _Node | None = None) -> _Node:
        """Return the node of a place; if it has none, `spare` or a new node becomes its node."""
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = spare or _Node()
            node.key = key
        return node

    def _drop(self, node: _Node) -> None:
        """Drop a place that is not needed: no block is in it or below it."""
        if node.slot is None and not node.pins and not node.children:
            del self._nodes[node.key]

    def _disown(self, node: _Node, slot: Slot) -> None:
        """Remove a block that is no longer cached from its place, which other blocks may share."""
        rivals = self._rivals.get(node)
        if rivals is None:
            node.slot = None
            return
        self._collisions -= 1
        if node.slot is slot:
            node.slot = rivals.pop()
        else:
            rivals.remove(slot)
        if not rivals:
            del self._rivals[node]

    def _unregister(self, slot: Slot) -> None:
        """Drop an active slot that cannot become inactive."""
        node: _Node = slot.place
        self._disown(node, slot)
        self._drop(node)
        above: _Node | None = slot.above
        if above is not None:
            above.pins -= 1
            self._drop(above)

    def insert(self, slots: Sequence[Slot]) -> None:
        """Insert the slots into the forest, at the end of the eviction order."""
        append = self._queue.append
        for slot in slots:
            node: _Node = slot.place
            if node.slot is not slot:
                self._swap(node, slot)
            node.occupied = True
            node.entries += 1
            append(node)
            parent: _Node | None = slot.above
            if parent is not None and node.parent is not parent:
                if node.parent is None and not self._left_behind:
                    node.parent = parent
                    parent.children += 1
                else:
                    self._link(node, parent)

    def _swap(self, node: _Node, slot: Slot) -> None:
        """Make `slot` the inactive one among the blocks that share a place."""
        assert node.slot is not None
        rivals = self._rivals[node]
        rivals[rivals.index(slot)], node.slot = node.slot, slot

    def _link(self, node: _Node, parent: _Node) -> None:
        """Make a place the child of another. An old parent, of another block with this place, still counts it."""
        if node.parent is not None:
            self._left_behind.add((node.parent, node.key))
        node.parent = parent
        if (parent, node.key) in self._left_behind:
            self._left_behind.remove((parent, node.key))
        else:
            parent.children += 1

    def remove(self, slots: Sequence[Slot]) -> None:
        """Remove the slots; their places stay as ghosts while they have children."""
        for slot in slots:
            node: _Node = slot.place
            node.occupied = False
            if node.parked >= 0:
                self._unpark(node)
            if not node.children and node.parent is not None:
                self._prune(node)
        if len(self._queue) > self._limit:
            self._clean()

    def _unpark(self, node: _Node) -> None:
        del self._parked[node.parked]
        node.parked = -1

    def _prune(self, node: _Node) -> None:
        """Cut a ghost without children off its parent, and repeat this upward."""
        parent = node.parent
        while parent is not None:
            node.parent = None
            parent.children -= 1
            if parent.children:
                return
            if parent.occupied:
                if parent.parked >= 0:
                    heappush(self._exposed, parent.parked)
                return
            if parent.slot is None:
                self._drop(parent)
            node = parent
            parent = node.parent

    def _clean(self) -> None:
        """Drop the stale entries."""
        nodes = self._queued()
        for node in self._queue:
            node.entries = 0
        for node in nodes:
            node.entries = 1
        self._queue = deque(nodes)
        self._limit = 2 * len(nodes) + _SLACK

    def _queued(self) -> list[_Node]:
        """Return the nodes with a valid entry in the queue, in order."""
        newest = dict.fromkeys(node for node in reversed(self._queue) if node.occupied)
        return list(newest)[::-1]

    def evict(self, count: int) -> list[Slot]:
        """Choose the next leaves to evict; fewer if no block is a leaf, which only shared places can cause."""
        queue, nodes = self._queue, self._nodes
        chosen: list[Slot] = []
        while len(chosen) < count:
            node = self._next_exposed() if self._exposed else None
            if node is None:
                while queue:
                    node = queue.popleft()
                    node.entries -= 1
                    if not node.entries and node.occupied:
                        if not node.children:
                            break
                        node.parked = self._number
                        self._number += 1
                        self._parked[node.parked] = node
                else:
                    break
            slot = node.slot
            assert slot is not None
            chosen.append(slot)
            node.occupied = False
            parent = node.parent
            if parent is not None:
                if not parent.occupied:
                    self._prune(node)
                else:  # as in _prune, without the call: the parent is nearly always inactive too
                    node.parent = None
                    parent.children -= 1
                    if not parent.children and parent.parked >= 0:
                        heappush(self._exposed, parent.parked)
            if self._collisions:
                self._disown(node, slot)
            else:
                node.slot = None
            if node.slot is None and not node.pins:
                del nodes[node.key]
            else:
                slot.place = None
            above: _Node | None = slot.above
            if above is not None:
                above.pins -= 1
                if above.slot is None:
                    self._drop(above)
        return chosen

    def _next_exposed(self) -> _Node | None:
        while self._exposed:
            node = self._parked.get(heappop(self._exposed))
            if node is not None and not node.children:
                self._unpark(node)
                return node
        return None

    def clear(self) -> None:
        """Drop all slots and places."""
        for node in self._nodes.values():
            if node.slot is not None:
                node.slot.place = None
        for rivals in self._rivals.values():
            for slot in rivals:
                slot.place = None
        self._reset()

    def _find(self, plh: int) -> Slot | None:
        """Return the inactive block at the place of `plh`; its own lineage hash may have another parent."""
        node = self._nodes.get(_key(plh))
        return None if node is None or not node.occupied else node.slot

    def _free_places(self, plhs: Sequence[int], registered: Mapping[int, Slot]) -> Sequence[int] | None:  # noqa: ARG002 - places tell more
        """Return the keys of the places; None if one is taken (or kept for a child), or two are the same."""
        if max(plhs) < _MODE_1:
            keys = [(plh >> 118) + 1 << 59 | plh & _FRAGMENT for plh in plhs]
        else:
            keys = [_key(plh) for plh in plhs]
        if len(set(keys)) == len(keys) and self._nodes.keys().isdisjoint(keys):
            return keys
        return None

    def _first_refused(self, slots: Iterable[Slot]) -> Slot | None:
        """Return the first slot whose place another block has taken (kvbm-logical: "Hash collision detected")."""
        taken: set[_Node] = set()
        for slot in slots:
            node = slot.place
            if node.occupied or node in taken:
                return slot
            taken.add(node)
        return None

    def order(self) -> list[Slot]:
        """Return the inactive slots in the order of eviction; blocks that can never be evicted come last."""
        waiting = [*(self._parked[number] for number in sorted(self._parked)), *self._queued()]
        turns = {node: turn for turn, node in enumerate(waiting)}
        children = {node: node.children for node in self._nodes.values()}
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
