"""The radix tree of Dynamo's mock of SGLang: SGLang's tree, whose nodes also list their pages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pytest_kvmock.engines.sglang.radix_tree import RadixTree, TreeNode

# Theory of operation
#
# It differs from SGLang's tree in five ways. A page has an identity next to its name, because a request keeps its own
# pages where the tree has other pages with the same tokens. A partial match splits a node, and both halves keep the old
# time of access. Every walk costs one tick, whichever way it ends. A leaf is evicted from its tail, and only as many
# pages as needed. A leaf grows in place.


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

    It counts pages; its owner keeps tokens, events and the request that pays for a page.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("lru")

    def find(self, names: Sequence[int], count: int) -> tuple[TreeNode, list[int]]:
        """Match the first `count` pages, and count each fully matched node as used now.

        A partial match splits its node and ends at the upper half, which does not count as used.

        Returns:
            The last node of the path (the root if nothing matches), and the pages up to its end.
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
        """Count the leading pages, of the first `count`, that are in the tree and locked. Changes nothing."""
        at = 0
        for node, end in self.path(names, count):
            if not node.lock_ref:
                break
            at = end
        return at

    def trim(self, pages: int) -> list[int]:
        """Evict `pages` pages, or all that may be evicted, each from the tail of the least recently used leaf.

        Returns:
            The identities of the pages, leaf by leaf, each from front to back.
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
        """Insert pages behind a node that ends with page `first`.

        The path to the node, and the nodes that match behind it, count as used now. The leaf at the end of the match
        grows if it is not locked, or if it is `start` and locked once.

        Args:
            start: the node; the root if `first` is 0.
            names: names of all pages of a request, from the root.
            pages: identities of these pages.
            first: number of pages up to the end of the node.
            count: number of pages that the tree has after the call.

        Returns:
            The last node of the path, and the pages behind `first`: the tree's own where it had them already.
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
