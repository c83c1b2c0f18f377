"""The radix tree of Dynamo's mock of SGLang: as SGLang's, and each node knows which pages it has."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Final

from pytest_kvmock.cache.sglang.radix_tree import RadixTree, TreeNode, shared_pages

# Theory of operation
#
# It parts from SGLang's tree in three things. A page has an identity beside its name, as a request keeps its own pages
# where the tree has others of the same tokens. A node that is matched in part is split, and both halves keep the old
# time of access. And the cost of a walk is one tick, whichever way it ends.

_BY_ACCESS: Final = attrgetter("last", "created")
"""Halves of a node have one time of access; they are never leaves together, and a heap compares them all the same."""


class PageNode(TreeNode):
    """A run of pages that are evicted together.

    Attributes:
        pages: identities of its pages, one for each name.
    """

    __slots__ = ("pages",)

    def __init__(
        self, parent: TreeNode | None, edge: Hashable, names: Sequence[int], pages: Sequence[int], tick: int
    ) -> None:
        super().__init__(parent, edge, names, tick)
        self.pages = pages


class PageTree(RadixTree):
    """Runs of pages by name, evicted by the time of the last access (dynamo-mocker 1.3.1, `RadixCache`).

    It counts pages; tokens, events and who pays for a page are its owner's.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("lru")
        self._key = _BY_ACCESS

    def find(self, names: Sequence[int], count: int) -> tuple[TreeNode, list[int]]:
        """Match the first `count` pages, and count the nodes that match in full as used now.

        A node that matches in part is split, and its upper half is where the match ends; it is not counted as used.

        Returns:
            The last node of the path, the root for none; and the pages up to its end.
        """
        tick = self._clock = self._clock + 1
        node, at = self.root, 0
        pages: list[int] = []
        while at < count:
            child = node.children.get(names[at])
            if child is None:
                break
            assert isinstance(child, PageNode)
            run = child.names
            end = at + len(run)
            if end > count or names[end - 1] != run[-1]:
                upper = self._halve(child, shared_pages(run, names, at, count))
                pages += upper.pages
                return upper, pages
            child.last = tick
            pages += child.pages
            node, at = child, end
        if not node.children:
            self._changed.add(node)
        return node, pages

    def put(self, names: Sequence[int], pages: Sequence[int], count: int) -> tuple[TreeNode, list[int]]:
        """Insert the first `count` pages; what is not there becomes one leaf.

        Args:
            names: of the pages.
            pages: their identities, where they become part of the tree.
            count: how many of both.

        Returns:
            The last node of the path, and the pages up to its end: of those that were there, the tree's.
        """
        node, found = self.find(names, count)
        at = len(found)
        if at == count:
            return node, found
        self._clock += 1
        leaf = PageNode(node, names[at], tuple(names[at:count]), tuple(pages[at:count]), self._clock)
        node.children[names[at]] = leaf
        self.evictable += count - at
        self._nodes += 1
        self._changed.add(leaf)
        found += leaf.pages
        return leaf, found

    def touch(self, node: TreeNode) -> None:
        """Count a node and all above it as used now, as a match of its whole path does."""
        tick = self._clock = self._clock + 1
        if not node.children:
            self._changed.add(node)
        at: TreeNode | None = node
        while at is not None and at is not self.root:
            at.last = tick
            at = at.parent

    def path(self, node: TreeNode) -> list[int]:
        """Return the pages from the root up to the end of a node."""
        runs: list[Sequence[int]] = []
        while isinstance(node, PageNode):
            runs.append(node.pages)
            assert node.parent is not None
            node = node.parent
        return [page for run in reversed(runs) for page in run]

    def locked(self, names: Sequence[int], count: int) -> int:
        """Leading pages, of the first `count`, that are here and locked. Changes nothing."""
        node, at = self.root, 0
        while at < count:
            child = node.children.get(names[at])
            if child is None or not child.lock_ref:
                break
            shared = shared_pages(child.names, names, at, count)
            at += shared
            if shared < len(child.names):
                break
            node = child
        return at

    def evictable_leaves(self) -> int:
        """Count the pages of leaves that are not locked; unlike `evictable`, without the nodes above them. Walks the tree."""
        return sum(len(node.names) for node in self.nodes() if not node.children and not node.lock_ref)

    def _halve(self, node: PageNode, count: int) -> PageNode:
        """Put the first pages of a node into a new one above it; both keep the time of access and the locks."""
        parent, names, pages = node.parent, node.names, node.pages
        assert parent is not None
        self._clock += 1
        upper = PageNode(parent, node.edge, names[:count], pages[:count], self._clock)
        upper.last, upper.lock_ref = node.last, node.lock_ref
        parent.children[node.edge] = upper
        node.parent, node.edge, node.names, node.pages = upper, names[count], names[count:], pages[count:]
        upper.children[node.edge] = node
        self._nodes += 1
        return upper
