"""The tree of blocks that a `RadixIndex` keeps for the device tier; see there for its rules."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from pytest_kvmock.values.events import Stored

WorkerRank: TypeAlias = tuple[int, int]
"""`(worker_id, dp_rank)`: one data-parallel rank of an engine; each has its own cache."""


_U64: Final = 2**64 - 1
_DEAD: Final = 256
"""Number of nodes without holders that are kept before they are dropped; in a large tree an eighth of the others."""


class Node:
    """One block: its holders, and its children by local hash.

    Nearly every block has one child, which is kept in two slots; only further children need a dict. That halves the
    memory and saves a query one dict look-up per block.

    Attributes:
        holders: one bit for each worker and rank that holds the block.
        local: local hash of the first child; None if there is no child.
        child: the first child; not set if there is none.
        others: the other children.
        run: the run that contains the node, if any.
    """

    __slots__ = ("child", "holders", "local", "others", "run")

    local: int | None
    child: Node

    def __init__(self, holders: int = 0) -> None:
        self.holders = holders
        self.local = None
        self.others: dict[int, Node] | None = None
        self.run: HeldRun | None = None

    def link(self, local: int, child: Node) -> None:
        """Add a child under a local hash that has none yet."""
        if self.local is None:
            self.local = local
            self.child = child
        elif self.others is None:
            self.others = {local: child}
        else:
            self.others[local] = child

    def child_at(self, local: int) -> Node | None:
        """Return the child under a local hash, if there is one."""
        if self.local == local:
            return self.child
        return None if self.others is None else self.others.get(local)

    def children(self) -> Iterator[tuple[int, Node]]:
        """Yield each child with its local hash."""
        if self.local is not None:
            yield self.local, self.child
        if self.others is not None:
            yield from self.others.items()


class HeldRun:
    """A part of a chain whose nodes have the same holders; a query records it so that the next can compare it at once.

    The first change of one of its nodes ends it. But if its last block is removed, which is usual in a cache that drops
    leaves first, it only gets shorter.

    Attributes:
        nodes: its nodes, in order.
        locals: local hash of each node except the first, which several local hashes may lead to.
    """

    __slots__ = ("locals", "nodes")

    def __init__(self, first: Node, locals_: list[int]) -> None:
        self.locals = locals_
        self.nodes = [first]
        node = first
        for local in locals_:
            node = node.child if node.local == local or node.others is None else node.others[local]
            self.nodes.append(node)
        if len(set(self.nodes)) < len(self.nodes):  # a cycle
            return
        for node in self.nodes:
            if node.run is not None:
                node.run.end()
            node.run = self

    def change(self, node: Node) -> None:
        """Shorten or end the run, because the holders of one of its nodes changed."""
        if node is self.nodes[-1] and self.locals:
            self.nodes.pop()
            self.locals.pop()
            node.run = None
        else:
            self.end()

    def end(self) -> None:
        """End the run: its nodes belong to no run."""
        for node in self.nodes:
            node.run = None


class Rank:
    """The blocks that one worker and rank holds on the device.

    Attributes:
        key: its worker and rank.
        bit: its bit in `Node.holders`.
        blocks: its blocks by sequence hash.
    """

    __slots__ = ("bit", "blocks", "key")

    def __init__(self, key: WorkerRank, bit: int) -> None:
        self.key = key
        self.bit = bit
        self.blocks: dict[int, Node] = {}


class Tree:
    """The blocks of the device tier."""

    def __init__(self) -> None:
        self.root = Node()
        self.ranks: dict[WorkerRank, Rank] = {}
        # A bit is never reused for another rank: a node that a rank's table no longer names (two sequence hashes for
        # one place can cause this) keeps the bit forever, as it keeps the worker in 1.2.1.
        self.bits: dict[WorkerRank, int] = {}
        self.keys: dict[int, WorkerRank] = {}
        self._in_places: set[Node] = set()  # the nodes that were linked more than once
        self._gone: dict[Node, array[int]] = {}  # by parent, local hashes of the dropped nodes, in order
        self._dead = 0  # approximate number of nodes without holders that are still linked under their parents
        self._most_dead = _DEAD

    def __deepcopy__(self, memo: dict[int, object]) -> Tree:
        """Return a tree with its own nodes. It has no runs; queries find them again."""
        nodes: dict[Node, Node] = {}
        queue = [self.root]
        for rank in self.ranks.values():
            queue += rank.blocks.values()
        while queue:  # no recursion: chains are long, and there can be cycles
            node = queue.pop()
            if node not in nodes:
                nodes[node] = Node(node.holders)
                queue += (child for _, child in node.children())
        for node, twin in nodes.items():
            for local, child in node.children():
                twin.link(local, nodes[child])
        copy = Tree()
        copy.root = nodes[self.root]
        copy.bits, copy.keys = self.bits.copy(), self.keys.copy()
        copy._in_places = {nodes[node] for node in self._in_places if node in nodes}
        copy._gone = {nodes[node]: gone for node, gone in self._gone.items() if node in nodes}
        copy._dead, copy._most_dead = self._dead, self._most_dead
        for key, rank in self.ranks.items():
            twin_rank = copy.ranks[key] = Rank(key, rank.bit)
            twin_rank.blocks = {block: nodes[node] for block, node in rank.blocks.items()}
        return copy

    def rank(self, key: WorkerRank) -> Rank:
        """Return the table of `key`; make it if there is none."""
        found = self.ranks.get(key)
        if found is None:
            bit = self.bits.setdefault(key, 1 << len(self.bits))
            self.keys[bit] = key
            found = self.ranks[key] = Rank(key, bit)
        return found

    def who(self, bits: int) -> Sequence[WorkerRank]:
        """Return the ranks of these bits, in order of arrival."""
        if bits in self.keys:  # a single one, the usual case
            return (self.keys[bits],)
        found = []
        while bits:
            lowest = bits & -bits
            found.append(self.keys[lowest])
            bits ^= lowest
        return found

    def store(self, rank: Rank, parent: Node, data: Stored) -> int | None:
        """Store the blocks under `parent`; return the sequence hash of a block that is its own parent, if there is
        one.
        """
        blocks, bit = rank.blocks, rank.bit
        node = parent
        if self._store_new(rank, parent, data):
            return None
        for block_hash, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            if node.local == local:
                child = node.child
            elif node.others is not None and local in node.others:
                child = node.others[local]
            else:
                known = None if self._gone and self._is_gone(node, local) else blocks.get(block_hash)
                if known is not None:
                    self._in_places.add(known)
                child = known or Node()
                node.link(local, child)
            if child is node:
                return block_hash
            if child.run is not None and not child.holders & bit:
                child.run.change(child)
            child.holders |= bit
            blocks[block_hash] = child
            node = child
        return None

    @staticmethod
    def _store_new(rank: Rank, parent: Node, data: Stored) -> bool:
        """Store a chain of new blocks, the usual case; return whether it was one."""
        hashes, locals_, blocks = data.block_hashes, data.tokens_hashes, rank.blocks
        if (
            not hashes
            or parent.local == locals_[0]
            or (parent.others is not None and locals_[0] in parent.others)
            or len(set(hashes)) < len(hashes)
            or not blocks.keys().isdisjoint(hashes)
        ):
            return False
        bit = rank.bit
        node = Node(bit)
        parent.link(locals_[0], node)
        nodes = [node]
        for local in locals_[1:]:
            child = Node(bit)
            node.local = local
            node.child = child
            nodes.append(child)
            node = child
        blocks.update(zip(hashes, nodes, strict=True))
        return True

    def remove(self, rank: Rank, block_hashes: Iterable[int]) -> int | None:
        """Remove the blocks; return the first sequence hash that the rank does not hold, if there is one."""
        blocks, without = rank.blocks, ~rank.bit
        unknown, dead = None, self._dead
        for block_hash in block_hashes:
            node = blocks.pop(block_hash, None)
            if node is None:
                if unknown is None:
                    unknown = block_hash
                continue
            if node.run is not None:
                node.run.change(node)
            node.holders &= without
            if not node.holders:
                dead += 1
                if node.local is not None:
                    dead -= 1 if node.others is None else 1 + len(node.others)
                    node.local = None
                    del node.child
                    node.others = None
                if self._gone:
                    self._gone.pop(node, None)
        self._dead = max(dead, 0)  # some children of a removed node may have holders
        if dead > self._most_dead:
            self._forget_dead()
        return unknown

    def _forget_dead(self) -> None:
        """Drop nodes without holders, children and names, and keep only their places: a new node would be equal."""
        kept = self._in_places.union(*(rank.blocks.values() for rank in self.ranks.values()))
        for parent in (self.root, *kept):
            children = list(parent.children())
            gone = {
                local for local, child in children if not child.holders and child not in kept and 0 <= local <= _U64
            }
            if gone:
                self._gone[parent] = array("Q", sorted(gone.union(self._gone.get(parent, ()))))
                parent.local, parent.others = None, None
                del parent.child
                for local, child in children:
                    if local not in gone:
                        parent.link(local, child)
        self._dead, self._most_dead = 0, max(_DEAD, len(kept) // 8)

    def _is_gone(self, parent: Node, local: int) -> bool:
        """Whether the node of a place was dropped: the next Stored makes a new one there, whatever block it names."""
        gone = self._gone.get(parent, ())
        place = bisect_left(gone, local)
        return place < len(gone) and gone[place] == local

    def clear(self, rank: Rank) -> None:
        """Remove all blocks of a rank."""
        self.remove(rank, list(rank.blocks))

    def ranks_of(self, worker_id: int) -> list[Rank]:
        """Return the tables of a worker's ranks."""
        return [rank for key, rank in self.ranks.items() if key[0] == worker_id]

    def find(self, local_hashes: Iterable[int], early_exit: bool) -> dict[WorkerRank, int]:
        """Return the depths of a query (`RadixIndex.find_matches`).

        The query walks from run to run as far as possible, then block by block: each step compares one hash, and the
        block's holders with those of the block before. The part walked block by block is recorded as runs.
        """
        hashes = local_hashes if type(local_hashes) is list else list(local_hashes)
        scores: dict[WorkerRank, int] = {}
        node = self.root
        active = -1  # before the first block every worker matches
        depth, end = 0, len(hashes)
        while depth < end:
            child = node.child_at(hashes[depth])
            run = None if child is None else child.run
            if child is None or run is None or run.nodes[0] is not child:
                break
            after = depth + 1 + len(run.locals)
            if hashes[depth + 1 : after] != run.locals:
                break
            if child.holders != active:
                active = self._stay(child, active, depth, scores)
                if not active:
                    return scores
                if early_exit and active & (active - 1) == 0:
                    self._score(active, depth + 1, scores)
                    return scores
            node, depth = run.nodes[-1], after

        first: Node | None = None  # the first node of the run in progress, at depth `since`
        holders, since = None, depth
        for local in hashes[depth:]:
            if node.local == local:
                node = node.child
            elif node.others is None or local not in node.others:
                break
            else:
                node = node.others[local]
            if node.holders != holders:
                if first is not None:
                    HeldRun(first, hashes[since + 1 : depth])
                first, holders, since = node, node.holders, depth
                if holders != active:
                    active = self._stay(node, active, depth, scores)
                    if not active:
                        return scores
                    if early_exit and active & (active - 1) == 0:
                        depth += 1
                        break
            depth += 1
        if first is not None:
            HeldRun(first, hashes[since + 1 : depth])
        if depth:
            self._score(active, depth, scores)
        return scores

    def _stay(self, node: Node, active: int, depth: int, scores: dict[WorkerRank, int]) -> int:
        """Score the ranks of `active` that do not hold a block, and return the others."""
        still = node.holders & active
        if depth:
            self._score(active & ~still, depth, scores)
        return still

    def _score(self, bits: int, depth: int, scores: dict[WorkerRank, int]) -> None:
        for key in self.who(bits):
            scores[key] = depth

    def path(self, local_hashes: Sequence[int]) -> list[Node]:
        """Return the nodes of a chain of local hashes, from the first block to the last that exists."""
        node, nodes = self.root, []
        for local in local_hashes:
            child = node.child_at(local)
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def edges(self, rank: Rank) -> Iterator[tuple[int | None, int, int]]:
        """Yield each edge that a query can walk for `rank`, breadth first: the parent's sequence hash, then the block's
        sequence hash and local hash.

        Each edge comes once, even if several paths or cycles lead to it. An edge from a block to itself is left out: no
        event can make one without an error.
        """
        names = {node: block_hash for block_hash, node in rank.blocks.items()}
        seen = {self.root}
        queue: deque[tuple[Node, int | None]] = deque([(self.root, None)])
        while queue:
            node, parent_hash = queue.popleft()
            for local, child in node.children():
                block_hash = names.get(child)
                if block_hash is None or not child.holders & rank.bit or child is node:
                    continue
                yield parent_hash, block_hash, local
                if child not in seen:
                    seen.add(child)
                    queue.append((child, block_hash))
