"""The radix tree of Dynamo's mock of SGLang: as SGLang's, and each node lists its pages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pytest_kvmock.engines.sglang.radix_tree import RadixTree, TreeNode

# Theory of operation
#
# It differs from SGLang's tree in five ways. A page has an identity next to its name, as a request keeps its own pages
# where the tree has others of the same tokens. A node that is matched in part is split, and both halves keep the old
# time of access. The cost of a walk is one tick, whichever way it ends. A leaf is evicted from its tail, no further
# than is wanted. And a leaf grows in place.


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
    """Runs of pages by name, trimmed by the time of the last access (dynamo-mocker 1.6.1, `RadixCache`).

    It counts pages; its owner keeps tokens, events and which request pays for a page.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("lru")

    def find(self, names: Sequence[int], count: int) -> tuple[TreeNode, list[int]]:
        """Match the first `count` pages, and count the nodes that match in full as used now.

        A node that matches in part is split, and its upper half is where the match ends; it is not counted as used.

        Returns:
            The last node of the path, the root for none; and the pages up to its end.
        """
        tick = self._clock = self._clock + 1
        node: TreeNode = self.root
        pages: list[int] = []
        for node, end in self.path(names, count):
            assert isinstance(node, PageNode)
            if end - len(pages) < len(node.names):
                node = self._halve(node, end - len(pages))  # noqa: PLW2901 - the last one
            else:
                node.last = tick
            pages += node.pages
        self.note(node)
        return node, pages

    def touch(self, node: TreeNode) -> None:
        """Count a node and all above it as used now, as a match of its whole path does."""
        tick = self._clock = self._clock + 1
        self.note(node)
        at: TreeNode | None = node
        while at is not None and at is not self.root:
            at.last = tick
            at = at.parent

    def locked(self, names: Sequence[int], count: int) -> int:
        """Leading pages, of the first `count`, that are here and locked. Changes nothing."""
        at = 0
        for node, end in self.path(names, count):
            if not node.lock_ref:
                break
            at = end
        return at

    def trim(self, pages: int) -> list[int]:
        """Evict `pages` pages, or all that may be: from the tail of the leaf that was used the longest ago, leaf by
        leaf.

        Returns:
            Their identities, leaf by leaf, each from front to back.
        """
        out: list[int] = []
        while len(out) < pages and (node := self._first(self._leaves)) is not None:
            assert isinstance(node, PageNode)
            wanted = pages - len(out)
            out += node.pages[-wanted:]
            if wanted < len(node.names):
                node.names, node.pages = node.names[:-wanted], node.pages[:-wanted]
                self.note(node)
            else:
                self._detach(node)
        self.evictable -= len(out)
        return out

    def put_behind(
        self, start: TreeNode, names: Sequence[int], pages: Sequence[int], first: int, count: int
    ) -> tuple[TreeNode, list[int]]:
        """Insert pages behind a node that ends with page `first`, and count its path, and what is there, as used now.

        A leaf at the end of that grows, if it is not locked, or if it is the node itself and locked once.

        Args:
            start: the node; the root for a `first` of 0.
            names: of all pages of a request, from the root.
            pages: their identities.
            first: how many of them lead to the end of the node.
            count: how many of them shall be there.

        Returns:
            The last node of the path, and the pages behind `first`: of those that were there, the tree's.
        """
        self.touch(start)
        tick = self._clock
        node, at = start, first
        kept: list[int] = []
        for node, end in self.path(names, count, None, start, first):
            assert isinstance(node, PageNode)
            if end - at < len(node.names):
                node = self._halve(node, end - at)  # noqa: PLW2901 - the last one
            else:
                node.last = tick
            kept += node.pages
            at = end
        if at < count:
            node = self._extend(node, start, names[at:count], pages[at:count])
            kept += pages[at:count]
        self.note(node)
        return node, kept

    def _extend(self, node: TreeNode, start: TreeNode, names: Sequence[int], pages: Sequence[int]) -> TreeNode:
        grows = isinstance(node, PageNode) and not node.children
        if grows and (not node.lock_ref or (node is start and node.lock_ref == 1)):
            assert isinstance(node, PageNode)
            node.names, node.pages = (*node.names, *names), (*node.pages, *pages)
            if node.lock_ref:
                self.protected += len(names)
            else:
                self.evictable += len(names)
            return node
        self._clock += 1
        leaf = PageNode(node, names[0], tuple(names), tuple(pages), self._clock)
        node.children[names[0]] = leaf
        self.evictable += len(names)
        return leaf

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
        return upper
