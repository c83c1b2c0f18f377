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
# of a block that is in use or not cached. A ghost without children is pruned, and its parent may be a ghost without
# children then, and so on. Only leaves are evicted, the one inserted longest ago first; a block that becomes a leaf
# again still has its old turn.
#
# Here a place is a `_Node`. It outlives its pruning as long as a registered block has it as its own or as its parent's
# place: what is pruned is the link to the parent. So a block that is used and freed again costs no look-up. A slot
# keeps its node when its block is evicted, for the next one, unless the place must stay for the sake of a child.
#
# `_queue` has a node once for each insertion, in order; only its last entry counts, and only while its block is
# inactive. A node that turns out to be no leaf when its turn comes is *parked* under the next number: it waits, without
# an entry, until its last child is evicted, and then its number stands in `_exposed`. The parked go before the queued:
# their turn has come already. (What is written for every block are small numbers and flags: they cost no memory of
# their own.)

_SLACK = 1024  # entries that do not count, before the queue is cleaned

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
    """The key of the parent's place; below `_LEVEL` for a root."""
    if plh < _MODE_1:
        return plh >> 59
    return lineage_position(plh) << 59 | lineage_parent_fragment(plh)


class _Node:
    """A place in the forest."""

    __slots__ = ("children", "entries", "key", "occupied", "parent", "parked", "pins", "slot")

    def __init__(self) -> None:
        self.key = 0
        self.slot: Slot | None = None  # a registered block with this place: the inactive one, if one is
        self.occupied = False  # whether it is; a ghost is not
        self.entries = 0  # in the queue
        self.parked = -1
        self.parent: _Node | None = None  # the node that counts this one as its child
        self.children = 0
        self.pins = 0  # registered blocks whose parent's place it is


class LineagePolicy(EvictionPolicy):
    """Leaves only, oldest first.

    A chain is evicted tail first, in whatever order it was freed. A match of an active block changes nothing. Two
    lineage hashes with one place (same position and own fragment, other parents) stand for the same cached block, as in
    Dynamo 1.2.1; two such blocks, both active, cannot become inactive both.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._collisions = 0
        self._nodes: dict[int, _Node] = {}
        self._queue: deque[_Node] = deque()
        self._limit = _SLACK
        self._number = 0  # of the next node that is parked
        self._parked: dict[int, _Node] = {}
        self._exposed: list[int] = []
        self._rivals: defaultdict[_Node, list[Slot]] = defaultdict(list)  # blocks other than `_Node.slot`
        # Links that outlive the child: a place whose block changed its parent is still counted by the old one. Only
        # blocks that share a place make them.
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
        """Register slots at free places if each is the parent of the next, as nearly always; whether it was so."""
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
        """The node of a place; if there is none, `spare` becomes it, or a new one."""
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = spare or _Node()
            node.key = key
        return node

    def _drop(self, node: _Node) -> None:
        """Forget a place if it is not needed: it has no block of its own and none below it."""
        if node.slot is None and not node.pins and not node.children:
            del self._nodes[node.key]

    def _disown(self, node: _Node, slot: Slot) -> None:
        """Take a block that is no longer cached off its place, which others may share."""
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
        """Forget an active slot that cannot become inactive."""
        node: _Node = slot.place
        self._disown(node, slot)
        self._drop(node)
        above: _Node | None = slot.above
        if above is not None:
            above.pins -= 1
            self._drop(above)

    def insert(self, slots: Sequence[Slot]) -> None:
        """Put the slots into the forest; their turn comes after all others'."""
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
        """Make `slot` the one of the blocks that share a place that is inactive."""
        assert node.slot is not None
        rivals = self._rivals[node]
        rivals[rivals.index(slot)], node.slot = node.slot, slot

    def _link(self, node: _Node, parent: _Node) -> None:
        """Make a place the child of another; its old parent, if blocks that share a place gave it one, still counts
        it.
        """
        if node.parent is not None:
            self._left_behind.add((node.parent, node.key))
        node.parent = parent
        if (parent, node.key) in self._left_behind:
            self._left_behind.remove((parent, node.key))
        else:
            parent.children += 1

    def remove(self, slots: Sequence[Slot]) -> None:
        """Take the slots out; their places stay as ghosts while they have children."""
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
        """Cut a ghost without children off its parent, and so on upward."""
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
        """Drop the entries that do not count."""
        nodes = self._queued()
        for node in self._queue:
            node.entries = 0
        for node in nodes:
            node.entries = 1
        self._queue = deque(nodes)
        self._limit = 2 * len(nodes) + _SLACK

    def _queued(self) -> list[_Node]:
        """Nodes whose entry in the queue counts, in order."""
        newest = dict.fromkeys(node for node in reversed(self._queue) if node.occupied)
        return list(newest)[::-1]

    def evict(self, count: int) -> list[Slot]:
        """Choose the leaves whose turn is first; fewer if no block is a leaf (only shared places can do that)."""
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
        """Forget all slots and places."""
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
        """Return the keys of the places, if none is taken (or kept for a child) and no two are the same."""
        if max(plhs) < _MODE_1:
            keys = [(plh >> 118) + 1 << 59 | plh & _FRAGMENT for plh in plhs]
        else:
            keys = [_key(plh) for plh in plhs]
        if len(set(keys)) == len(keys) and self._nodes.keys().isdisjoint(keys):
            return keys
        return None

    def _first_refused(self, slots: Iterable[Slot]) -> Slot | None:
        """Return the first slot whose place is taken by another block (kvbm-logical: "Hash collision detected")."""
        taken: set[_Node] = set()
        for slot in slots:
            node = slot.place
            if node.occupied or node in taken:
                return slot
            taken.add(node)
        return None

    def order(self) -> list[Slot]:
        """Return the inactive slots as evictions would take them; blocks that could never be evicted stand at the
        end.
        """
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
