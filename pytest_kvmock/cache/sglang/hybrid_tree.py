"""The radix tree of a hybrid model: full attention, which is the tree itself, with a window and a state in its nodes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf
from typing import NamedTuple

from pytest_kvmock.cache.sglang.parts import Part, States, Window
from pytest_kvmock.cache.sglang.radix_tree import NodePart, Pages, RadixTree, TreeNode

# Theory of operation (SGLang 0.5.23, `UnifiedRadixCache`)
#
# A lookup goes as deep as full attention does, and answers with the deepest node that all parts accept: what is cached
# below that cannot be used. An insert goes the same way; where it passes a tombstone, the window of whoever inserts stays
# there. A leaf that is evicted takes its parts with it. Where a part is short, a leaf goes whole, and any other node only
# loses the part.
#
# Two nodes of one path have the same time of access where SGLang has them apart by a hair: they are never leaves together.


class TreeMatch(NamedTuple):
    """What a lookup found.

    Attributes:
        node: the deepest node on the device that all parts accept; the root for none.
        usable: pages that lead to its end.
        end: the last node of the path, on the device or, in a tree with a host, there; the root for none.
        depth: pages that full attention has, wherever: those that lead to its end; at least as many.
        has_window: whether the window is there where full attention ends.
        has_state: whether a state is.
    """

    node: TreeNode
    usable: int
    end: TreeNode
    depth: int
    has_window: bool = True
    has_state: bool = True


class Lock:
    """A lock of a path, to be given back.

    Attributes:
        node: the end of the path.
        edge: where the lock of its window ends (`Window.lock_path`).
        has_parts: whether window and state are locked still.
    """

    __slots__ = ("edge", "has_parts", "node")

    def __init__(self, node: TreeNode, edge: int) -> None:
        self.node = node
        self.edge = edge
        self.has_parts = True


class Inserted(NamedTuple):
    """What an insert did.

    Attributes:
        matched: pages that were on the device.
        node: the last node of the path; the root for none.
        windows: pages of the window that are the tree's now.
        has_state: whether the state is the tree's now.
    """

    matched: int
    node: TreeNode
    windows: int
    has_state: bool


class Evicted(NamedTuple):
    """What an eviction did.

    Attributes:
        names: of the pages that are no part of the tree any more, node by node in order.
        windows: pages of the window that are free now.
        states: slots that are free now.
    """

    names: list[int]
    windows: int
    states: int


class HybridTree(RadixTree):
    """A `RadixTree` with parts. Its owner has the pages, and publishes, as of any tree.

    Args:
        policy: one of `POLICIES`; parts are dropped by the time of their last use under each.
        protected_threshold: as in `RadixTree`.
        window: the one part; None for none.
        states: the other; None for none.

    Attributes:
        window: as above.
        states: as above.
    """

    __slots__ = ("_parts", "states", "window")

    def __init__(
        self,
        policy: str,
        protected_threshold: int,
        window: Window | None = None,
        states: States | None = None,
    ) -> None:
        self.window = window
        self.states = states
        self._parts: list[Part] = [part for part in (window, states) if part is not None]
        super().__init__(policy, protected_threshold)

    def reset(self) -> None:
        """Drop everything, locked nodes too."""
        super().reset()
        for part in self._parts:
            part.reset()

    # ------------------------------------------------------------------------------------------------ lookups

    def lookup(self, names: Sequence[int], count: int, namespace: Hashable = None) -> int:
        """Leading pages, of the first `count`, that can be used. Changes nothing."""
        return self.look(names, count, namespace).usable

    def look(self, names: Sequence[int], count: int, namespace: Hashable = None) -> TreeMatch:
        """Look pages up, and change nothing."""
        return self._walk(names, count, namespace, splits=False)

    def depth(self, names: Sequence[int], count: int, namespace: Hashable = None) -> int:
        """Leading pages, of the first `count`, that full attention has. Changes nothing."""
        return super().lookup(names, count, namespace)

    def match(self, names: Sequence[int], count: int, namespace: Hashable = None) -> tuple[TreeNode, int]:
        """Look pages up, as `find` does.

        Returns:
            The last node that can be used, the root for none; and how many pages lead to its end.
        """
        return self.find(names, count, namespace)[:2]

    def find(self, names: Sequence[int], count: int, namespace: Hashable = None) -> TreeMatch:
        """Look pages up, and count what can be used as used now. A node that is shared in part is split, used or not."""
        found = self._walk(names, count, namespace, splits=True)
        tick = self._clock = self._clock + 1
        node = at = found.node
        while at is not self.root:
            at.last = tick
            assert at.parent is not None
            at = at.parent
        self.note(node)
        if self._parts and node is not self.root:
            self._touch(node)
            if self.states is not None:
                self.states.touch(node.state)
        return found

    def _touch(self, node: TreeNode) -> None:
        if self.window is not None:
            self.window.touch_path(node, self.root)

    def _walk(self, names: Sequence[int], count: int, namespace: Hashable, *, splits: bool) -> TreeMatch:
        window, states = self.window, self.states
        tick = self._clock = self._clock + splits
        usable = node = self.root
        used = at = 0
        run: float = inf  # pages since the last tombstone
        has_window = has_state = True
        for node, end in self.path(names, count, namespace):
            pages, at = end - at, end
            is_whole = pages == len(node.names)
            has_state = states is None or (is_whole and node.state.there)
            if window is not None:
                run = run + pages if node.window.there else 0
                has_window = run >= window.pages or not (node.window.there or window.gates)
            if not is_whole and splits:
                node.last = tick
                node = self._split(node, pages)  # noqa: PLW2901 - the last one
            if has_state and has_window and node.on_device:
                usable, used = node, at
        return TreeMatch(usable, used, node, at, has_window, has_state)

    # ------------------------------------------------------------------------------------------------ inserts

    def checkpoint(
        self,
        pages: Pages,
        count: int,
        namespace: Hashable = None,
        *,
        inserted: int = 0,
        protected: int = 0,
        dead: int = 0,
        has_state: bool = False,
    ) -> Inserted:
        """Insert the first `count` pages of a request, with its window and its state.

        Args:
            pages: those, and maybe more.
            count: how many of them.
            namespace: as in `insert`.
            inserted: as in `insert`.
            protected: pages that are the tree's, and not the request's.
            dead: pages before which the request has no window any more.
            has_state: whether it has one of the last page's end.
        """
        matched, node = self.insert(pages, count, namespace, 0, inserted)
        if not self._parts:
            return Inserted(matched, node, 0, False)
        windows = 0
        if matched < count:
            node.window, node.state = NodePart(node), NodePart(node)
        if self.window is not None:
            windows = self._recover(node.parent if matched < count else node, matched, inserted, protected, dead)
            if matched < count:
                windows += self._give(self.window, node, matched, dead)
                node.hit_count = int(matched + len(node.names) > inserted)
        takes = has_state and self.states is not None and node is not self.root
        if takes:
            assert self.states is not None
            takes = not node.state.there
            if takes:
                self.states.put(node, node.state)
                self.states.trim(node, self.root)
            else:
                self.states.touch(node.state)
        self._touch(node)
        return Inserted(matched, node, windows, takes)

    def _recover(self, node: TreeNode | None, end: int, inserted: int, protected: int, dead: int) -> int:
        """Give the tombstones of a path, which ends with a node, the window of a request behind `protected` and `dead`."""
        window = self.window
        assert window is not None
        tombstones: list[tuple[TreeNode, int]] = []
        while end > protected and node is not None:
            if not node.window.there:
                tombstones.append((node, end))
            end -= len(node.names)
            node = node.parent
        given = 0
        for lower, until in reversed(tombstones):
            pages = len(lower.names)
            if until <= dead:
                continue
            if until - pages < dead:
                upper = self._split(lower, dead - until + pages)
                upper.hit_count -= until > inserted  # this insert hits the lower part alone
            window.put(lower, lower.window)
            given += len(lower.names)
        return given

    def _give(self, window: Window, leaf: TreeNode, start: int, dead: int) -> int:
        """Give a new leaf the window of a request behind `dead`, in nodes of which the last has one window at most.

        The nodes above it that this makes have no hit.
        """
        leaf.hit_count = 0
        pages = len(leaf.names)
        live = pages - max(0, dead - start)
        if live <= 0:
            return 0
        if live < pages:
            self._split(leaf, pages - live)
        if live > window.pages:
            upper = self._split(leaf, live - window.pages)
            window.put(upper, upper.window)
        window.put(leaf, leaf.window)
        return live

    def _split(self, node: TreeNode, pages: int) -> TreeNode:
        upper = super()._split(node, pages)
        if not self._parts:
            upper.created = node.created  # both are as old as the run was: this counts for `fifo` and `filo`
            return upper
        upper.window, upper.state = NodePart(upper), NodePart(upper)
        if self.window is not None:
            self.window.split(upper, node)
        return upper

    # -------------------------------------------------------------------------------------------------- locks

    def hold(self, node: TreeNode) -> Lock:
        """Protect a path, its last window, and the state of its end."""
        self.lock(node)
        if self.states is not None and node is not self.root:
            self.states.lock(node, node.state)
        return Lock(node, 0 if self.window is None else self.window.lock_path(node, self.root))

    def release(self, lock: Lock) -> None:
        """Take back a lock."""
        self.release_parts(lock)
        self.unlock(lock.node)

    def release_parts(self, lock: Lock) -> None:
        """Take back what a lock holds of window and state; nothing if that was done."""
        node = lock.node
        if not lock.has_parts:
            return
        lock.has_parts = False
        if self.window is not None:
            self.window.unlock_path(node, self.root, lock.edge)
        if self.states is not None and node is not self.root:
            self.states.unlock(node, node.state)

    # ----------------------------------------------------------------------------------------------- eviction

    def reclaim(self, pages: int, windows: int = 0, states: int = 0) -> Evicted:
        """Evict until so much of each is free besides, or no more may be evicted: whole leaves, then windows, then states.

        What one of them frees counts for the next.
        """
        before = [0 if part is None else part.free for part in (self.window, self.states)]
        names = [name for node in self.evict(pages) for name in node.names]
        if not self._parts:
            return Evicted(names, 0, 0)
        for part, free, wanted in zip((self.window, self.states), before, (windows, states), strict=True):
            if part is None or part.free >= free + wanted:
                continue
            for node in part.unlocked():
                if self._is_leaf(node):
                    self._evict(node)
                    names += node.names
                elif part is self.window:
                    self._drop_parts(node)
                else:
                    part.drop(node, node.state)
                if part.free >= free + wanted:
                    break
        after = [0 if part is None else part.free for part in (self.window, self.states)]
        return Evicted(names, after[0] - before[0], after[1] - before[1])

    def _evict(self, node: TreeNode) -> bool:
        self._drop_parts(node)
        return super()._evict(node)

    def _drop_parts(self, node: TreeNode) -> None:
        """Drop window and state: a state without a window is of no use."""
        if self.window is not None:
            self.window.drop(node, node.window)
        if self.states is not None:
            self.states.drop(node, node.state)
