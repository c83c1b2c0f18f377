"""The radix tree of a hybrid model: nodes hold full attention pages and may also hold a window and a state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import NamedTuple

from pytest_kvmock.engines.sglang.parts import Part, States, Window
from pytest_kvmock.engines.sglang.radix_tree import NodePart, Pages, RadixTree, TreeNode

# Theory of operation (SGLang 0.5.23, `UnifiedRadixCache`)
#
# A lookup follows full attention to its end, and returns the deepest node that all parts accept; pages below that node
# cannot be used. An insert takes the same path, and gives the tombstones that it passes the window of its request. An
# evicted leaf loses its parts too. If a part is short, leaves are evicted whole, and other nodes lose only the part.
#
# All nodes of a path have the same access time here; in SGLang the times differ slightly. Nodes of one path are never
# leaves at the same time, so the order of eviction is the same.


class TreeMatch(NamedTuple):
    """The result of a lookup.

    Attributes:
        node: the deepest device node that all parts accept; the root if there is none.
        usable: pages from the root to its end.
        end: the last node of the path, in a tree with a host on either tier; the root if there is none.
        depth: pages that full attention has on either tier, from the root to the end of `end`; at least `usable`.
        best: the deepest node on either tier that all parts accept; without a host, `node`.
        reach: pages from the root to the end of `best`.
        host_pages: pages between `node` and `best` that full attention has on the host.
        window_pages: pages of the last window up to `best` that are only on the host.
        state_on_host: whether the state of `best` is only on the host.
        has_window: whether the window is cached where full attention ends.
        has_state: whether a state is cached there.
    """

    node: TreeNode
    usable: int
    end: TreeNode
    depth: int
    best: TreeNode
    reach: int
    host_pages: int = 0
    window_pages: int = 0
    state_on_host: bool = False
    has_window: bool = True
    has_state: bool = True

    @property
    def to_load(self) -> bool:
        """Whether a usable part is only on the host."""
        return bool(self.host_pages or self.window_pages or self.state_on_host)

    @property
    def promised(self) -> int:
        """Device and host pages that an admission counts on."""
        return self.usable + self.host_pages


class Lock:
    """A lock of a path, which its owner releases.

    Attributes:
        node: the end of the path.
        edge: where the lock of its window ends (`Window.lock_path`).
        has_parts: whether window and state are still locked.
    """

    __slots__ = ("edge", "has_parts", "node")

    def __init__(self, node: TreeNode, edge: int) -> None:
        self.node = node
        self.edge = edge
        self.has_parts = True


class Inserted(NamedTuple):
    """The result of an insert.

    Attributes:
        matched: pages that were on the device.
        node: the last node of the path; the root if there is none.
        windows: window pages that the tree owns now.
        has_state: whether the tree owns the state now.
    """

    matched: int
    node: TreeNode
    windows: int
    has_state: bool


class Evicted(NamedTuple):
    """The result of an eviction.

    Attributes:
        names: names of the pages that left the tree, node by node in order.
        windows: freed window pages.
        states: freed state slots.
    """

    names: list[int]
    windows: int
    states: int


class HybridTree(RadixTree):
    """A `RadixTree` with windows and states. Its owner keeps the pages and publishes, as with any tree.

    Args:
        policy: one of `POLICIES`; parts are dropped in order of their last use under every policy.
        protected_threshold: as in `RadixTree`.
        window: the window part; None if there is none.
        states: the state part; None if there is none.

    Attributes:
        window: as given.
        states: as given.
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
        """Drop everything, including locked nodes."""
        super().reset()
        for part in self._parts:
            part.reset()

    # ------------------------------------------------------------------------------------------------ lookups

    def lookup(self, names: Sequence[int], count: int, namespace: Hashable = None) -> int:
        """Count the leading pages, of the first `count`, that can be used. Changes nothing."""
        return self.look(names, count, namespace).usable

    def look(self, names: Sequence[int], count: int, namespace: Hashable = None) -> TreeMatch:
        """Look pages up without a change of recency or nodes."""
        return self._walk(names, count, namespace, splits=False)

    def depth(self, names: Sequence[int], count: int, namespace: Hashable = None) -> int:
        """Count the leading pages, of the first `count`, that full attention has. Changes nothing."""
        return super().lookup(names, count, namespace)

    def match(self, names: Sequence[int], count: int, namespace: Hashable = None) -> tuple[TreeNode, int]:
        """Look pages up, as `find` does.

        Returns:
            The last usable node, or the root if there is none; and the number of pages from the root to its end.
        """
        return self.find(names, count, namespace)[:2]

    def find(self, names: Sequence[int], count: int, namespace: Hashable = None) -> TreeMatch:
        """Look pages up, and count the usable ones as used now. A node that is matched in part is split, usable or
        not.
        """
        found = self._walk(names, count, namespace, splits=True)
        tick = self._clock = self._clock + 1
        node = at = found.best
        while at is not self.root:
            at.last = tick
            if node is not found.node:
                self.note(at)  # any node on the path may have become a device leaf
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
        tick = self._clock = self._clock + splits
        usable = node = self.root
        used = at = 0
        accepts = self._acceptor()
        has_window = has_state = True
        for node, end in self.path(names, count, namespace):
            pages, at = end - at, end
            is_whole = pages == len(node.names)
            has_window, has_state = accepts(node, pages, is_whole)
            if not is_whole and splits:
                node.last = tick
                node = self._split(node, pages)  # noqa: PLW2901 - the last one
            if has_state and has_window:
                usable, used = node, at
        return TreeMatch(usable, used, node, at, usable, used, has_window=has_window, has_state=has_state)

    def _acceptor(self, *, counts_host: bool = False) -> Callable[[TreeNode, int, bool], tuple[bool, bool]]:
        """Return a function to call for each node of a path, from the root on; it returns whether window and state
        allow a prefix to end there.

        Args:
            counts_host: count parts on the host like those on the device.
        """
        window, states = self.window, self.states
        run: float = inf  # pages since the last tombstone

        def accepts(node: TreeNode, pages: int, is_whole: bool) -> tuple[bool, bool]:
            nonlocal run
            has_window = True
            if window is not None:
                there = node.window.there or (counts_host and node.host.window.there)
                run = run + pages if there else 0
                has_window = run >= window.pages or not (there or window.gates)
            if states is None:
                return has_window, True
            return has_window, is_whole and (node.state.there or (counts_host and node.host.state.there))

        return accepts

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
            pages: these pages, maybe followed by more.
            count: number of pages to insert.
            namespace: as in `insert`.
            inserted: as in `insert`.
            protected: number of leading pages that the tree owns, not the request.
            dead: number of leading pages whose window the request has freed.
            has_state: whether the request has the state at the end of the last page.
        """
        if not self._parts:
            return Inserted(*self.insert(pages, count, namespace, 0, inserted), 0, False)
        window, states = self.window, self.states
        node, matched, at, windows = self.root, 0, 0, 0
        for node, end in self.walk(pages.names, count, namespace):
            at = end
            if node.on_device:
                matched = at
            else:
                self.put_on_device(node)
            if window is not None:
                windows += self._recover(window, node, at, protected, dead)
            if at > inserted:
                self._hit(node)
        grows = at < count
        if grows:
            node = self._grow(node, pages, at, count, namespace)
            self.put_on_device(node)
            if window is not None:
                windows += self._give(window, node, at, dead)
        takes = False
        if states is not None and has_state and node is not self.root:
            takes = not node.state.there
            if takes:
                states.put(node, node.state)
                states.trim(node, self.root)
            else:
                states.touch(node.state)
        if grows and at + len(node.names) > inserted:  # only the lowest node
            self._hit(node)
        self._ended(node)
        self.note(node)
        self._touch(node)
        return Inserted(matched, node, windows, takes)

    def _ended(self, node: TreeNode) -> None:
        """Do nothing when an insert has ended with a node; subclasses may override this."""

    def _grow(self, parent: TreeNode, pages: Pages, start: int, count: int, namespace: Hashable) -> TreeNode:
        leaf = super()._grow(parent, pages, start, count, namespace)
        if self._parts:
            leaf.window, leaf.state = NodePart(leaf), NodePart(leaf)
        return leaf

    def _recover(self, window: Window, node: TreeNode, end: int, protected: int, dead: int) -> int:
        """Give a tombstone the window pages that a request has after `protected` and `dead`; return their number."""
        pages = len(node.names)
        if node.window.there or end <= protected or end <= dead:
            return 0
        if end - pages < dead:
            self._split(node, dead - end + pages)
        window.put(node, node.window)
        return len(node.names)

    def _give(self, window: Window, leaf: TreeNode, start: int, dead: int) -> int:
        """Give a new leaf the window pages that a request has after `dead`, split so that the last node has one window
        at most.
        """
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
            upper.created = node.created  # both nodes are as old as the run: `fifo` and `filo` use this
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
        """Release a lock."""
        self.release_parts(lock)
        self.unlock(lock.node)

    def release_parts(self, lock: Lock) -> None:
        """Release the window and state of a lock, unless this was done before."""
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
        """Evict until these amounts are freed or nothing more can be evicted: first whole leaves, then windows, then
        states.

        Amounts that one step frees count in the next ones.
        """
        before = [0 if part is None else part.free for part in (self.window, self.states)]
        names = [name for node in self.evict(pages) for name in node.names]
        if not self._parts:
            return Evicted(names, 0, 0)
        for part, free, wanted in zip((self.window, self.states), before, (windows, states), strict=True):
            if part is None or part.free >= free + wanted:
                continue
            for node in part.unlocked():
                if not self._is_leaf(node):
                    self._lose(part, node)
                elif self._evict(node):
                    names += node.names
                if part.free >= free + wanted:
                    break
        after = [0 if part is None else part.free for part in (self.window, self.states)]
        return Evicted(names, after[0] - before[0], after[1] - before[1])

    def _lose(self, part: Part, node: TreeNode) -> None:
        """Drop a part of a node that is not a leaf."""
        if part is self.window:
            self._drop_parts(node)
        else:
            part.drop(node, part.of(node))

    def _evict(self, node: TreeNode) -> bool:
        self._drop_parts(node)
        return super()._evict(node)

    def _drop_parts(self, node: TreeNode) -> None:
        """Drop window and state: a state is useless without its window."""
        if self.window is not None:
            self.window.drop(node, node.window)
        if self.states is not None:
            self.states.drop(node, node.state)
