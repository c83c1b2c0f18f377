"""The cache of Dynamo's mock of SGLang since 1.6: whole pages, leaves that are trimmed, and leaves that grow in place.

One subject: in what the second generation of that cache differs from the first (`mocker_sglang`).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from pytest_kvmock.cache.dynamo.mocker_sglang import MockerRadixManager
from pytest_kvmock.cache.dynamo.mocker_sglang_request import PageRequest
from pytest_kvmock.cache.dynamo.mocker_sglang_tree import PageNode, PageTree
from pytest_kvmock.cache.sglang.radix_tree import TreeNode, shared_pages
from pytest_kvmock.sinks import Sink

# Theory of operation
#
# A request takes pages, not slots: its last one is its own before it is full. What is cached of it, up to the page of its
# last token, is locked as it is admitted, and never freed twice. What it computes enters the tree behind its own node; where
# the tree has a page of these tokens already, the request takes that one, and its own is free at once.


class TrimmedTree(PageTree):
    """Runs of pages, of which eviction takes no more than is wanted, from the tail, and which grow at their end."""

    __slots__ = ()

    def trim(self, pages: int) -> list[int]:
        """Evict so many pages, or all that may be: from the tail of the leaf that was used the longest ago, leaf by leaf.

        Returns:
            Their identities, leaf by leaf, each from front to back.
        """
        self._queue_changed()
        heap, root, key_of = self._heap, self.root, self._key
        out: list[int] = []
        while len(out) < pages and heap:
            key, node = heap[0]
            parent, wanted = node.parent, pages - len(out)
            is_leaf = key == node.queued and parent is not None and not (node.children or node.lock_ref)
            if is_leaf and wanted < len(node.names):
                assert isinstance(node, PageNode)
                out += node.pages[-wanted:]
                node.names, node.pages = node.names[:-wanted], node.pages[:-wanted]
                break
            heappop(heap)
            if key == node.queued:
                node.queued = None
            if not is_leaf:
                continue
            assert isinstance(node, PageNode)
            assert parent is not None
            out += node.pages
            del parent.children[node.edge]
            node.parent = None
            self._nodes -= 1
            if not parent.children and not parent.lock_ref and parent is not root:
                parent.queued = key_of(parent)
                heappush(heap, (parent.queued, parent))
        self.evictable -= len(out)
        return out

    def put_behind(
        self, start: TreeNode, names: Sequence[int], pages: Sequence[int], first: int, count: int
    ) -> tuple[TreeNode, list[int]]:
        """Insert pages behind a node that ends with page `first`, and count its path, and what is there, as used now.

        A leaf at the end of that grows, if nobody has locked it, or if it is the node itself and locked once.

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
        tick, at = self._clock, first
        node: TreeNode = start
        kept: list[int] = []
        while at < count:
            child = node.children.get(names[at])
            if child is None:
                break
            assert isinstance(child, PageNode)
            shared = shared_pages(child.names, names, at, count)
            at += shared
            if shared < len(child.names):
                node = upper = self._halve(child, shared)
                kept += upper.pages
                break
            child.last = tick
            kept += child.pages
            node = child
        if at < count:
            node = self._grow(node, start, names[at:count], pages[at:count])
            kept += pages[at:count]
        if not node.children:
            self._changed.add(node)
        return node, kept

    def _grow(self, node: TreeNode, start: TreeNode, names: Sequence[int], pages: Sequence[int]) -> TreeNode:
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
        self._nodes += 1
        return leaf


class PagedRequest(PageRequest):
    """One request, which takes whole pages.

    Attributes:
        computes_last_token: its last token is computed whatever is cached, as its output is needed.
    """

    __slots__ = ("computes_last_token",)

    @property
    def slack(self) -> int:
        """None: a page is taken whole."""
        return 0

    def retract(self) -> None:
        """Forget its pages: it begins anew, with the tokens that it has."""
        super().retract()
        if not hasattr(self, "computes_last_token"):
            self.computes_last_token = True

    @property
    def most_hits(self) -> int:
        """How many of its pages may be hits: all full ones, or all before the one of its last token."""
        return (len(self) - self.computes_last_token) // self.tokens.block_size


class PagedRadixManager(MockerRadixManager):
    """Caches whole pages in a radix tree, trims leaves by the time of their last access, and publishes what changed.

    Dynamo's mock of SGLang 1.6.1; names and events are made as by `MockerRadixManager`, from which it differs in what is
    taken, matched, inserted, evicted and freed. Its requests are `PagedRequest`.

    Args:
        backend: name of the behaviour.
        num_blocks: capacity in pages, at least 1.
        block_size: tokens a page, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None: nowhere, and no event id is consumed.

    Raises:
        ValueError: an argument is not what it must be.
    """

    _tree: TrimmedTree

    def __init__(
        self,
        *,
        backend: str = "mocker_sglang_1_6",
        num_blocks: int,
        block_size: int = 16,
        dp_rank: int = 0,
        sink: Sink | None = None,
    ) -> None:
        super().__init__(backend=backend, num_blocks=num_blocks, block_size=block_size, dp_rank=dp_rank, sink=sink)
        self._tree = TrimmedTree()

    def follow(self, semantics: str) -> None:
        """Follow 1.6.1, as it does.

        Raises:
            ValueError: it is another release.
        """
        if semantics != "1.6.1":
            raise ValueError(f"the backend {self.backend!r} is of 1.6.1, and its engine semantics={semantics!r}")

    @property
    def loses_copies(self) -> bool:
        """False: what the tree has already is freed."""
        return False

    def pages_needed(self, request: PageRequest) -> int:
        """Count the pages that a whole request needs and that no other request has. Changes nothing."""
        assert isinstance(request, PagedRequest)
        return -(-len(request) // self.block_size) - self._tree.locked(request.tokens.names, request.most_hits)

    def match(self, request: PageRequest, count: int) -> int:
        """Match the first `count` pages of a request that has none, but not the page of its last token, and lock them.

        Returns:
            Tokens that were found; whole pages.
        """
        assert isinstance(request, PagedRequest)
        found = super().match(request, min(count, request.most_hits))
        request.protected = request.found
        return found

    def allocate(self, request: PageRequest, upto: int, *, caches: bool = True) -> int | None:
        """Take pages for the tokens of a request up to `upto`, and publish those that they complete.

        The first chunk of a request matches and locks what is cached of it before room is made; later ones match nothing.

        Args:
            request: one whose tokens have pages up to some token, or none at all.
            upto: so many tokens, from the first.
            caches: whether it reuses and publishes anything.

        Returns:
            Tokens before which nothing was computed. None: there are too few pages, and none was taken.
        """
        is_first = request not in self.requests
        before = self.match(request, len(request.tokens.names) if caches else 0) if is_first else request.computed
        missing = -(-upto // self.block_size) - request.allocated
        if missing > self.unused_pages():
            if is_first:
                self._drop(request)
            return None
        self._make_room(missing * self.block_size)
        self.extend(request, upto)
        if caches:
            self._publish_pages(request, before)
        if self._publisher.failure is not None:
            self._publisher.surface()
        return before

    def reserve(self, request: PageRequest, upto: int, *, caches: bool = True) -> int | None:
        """Lock what is cached of the first `upto` tokens of a request that has no pages, and take pages for the rest.

        Returns:
            How many were taken. None: there are too few, and none was.
        """
        assert isinstance(request, PagedRequest)
        request.computes_last_token = False
        self.match(request, upto // self.block_size if caches else 0)
        request.computes_last_token = True
        missing = -(-upto // self.block_size) - request.allocated
        if missing > self.unused_pages():
            self._drop(request)
            return None
        self._make_room(missing * self.block_size)
        self.free_tokens -= missing * self.block_size
        request.allocated += missing
        if self._publisher.failure is not None:
            self._publisher.surface()
        return missing

    def extend(self, request: PageRequest, upto: int) -> None:
        """Take free pages for the tokens of a request up to `upto`; they are there, as was checked before."""
        size = self.block_size
        missing = -(-upto // size) - request.allocated
        if missing > 0:
            self.free_tokens -= missing * size
            request.allocated += missing
        request.computed = upto
        complete = upto // size - len(request.pages)
        if complete > 0:
            request.pages += range(self._next_page, self._next_page + complete)
            self._next_page += complete

    def make_room(self, tokens: int) -> bool:
        """Evict until pages for so many tokens are free; False if they are not, with all evicted that may be."""
        return super().make_room(-(-tokens // self.block_size) * self.block_size)

    def _evict(self, tokens: int) -> int:
        pages = self._tree.trim(-(-tokens // self.block_size))
        self.free_tokens += len(pages) * self.block_size
        self._remove(pages)
        return len(pages) * self.block_size

    def checkpoint(self, request: PageRequest) -> None:
        """Insert the whole pages that a request has computed into the tree, and lock them there.

        Where the tree has pages of these tokens already, they are the request's from now on, and its own are freed.
        """
        count = request.computed // self.block_size
        if count <= request.protected:
            return
        self._publish_pages(request, request.protected * self.block_size)
        self._insert(request, count)
        if self._publisher.failure is not None:
            self._publisher.surface()

    def _insert(self, request: PageRequest, count: int) -> None:
        tree, first, old = self._tree, request.protected, request.node
        assert old is not None
        node, kept = tree.put_behind(old, request.tokens.names, request.pages, first, count)
        if node is not old:
            tree.lock(node)
        copies = [own for own, page in zip(request.pages[first:count], kept, strict=True) if own != page]
        request.pages[first:count] = kept
        self.free_tokens += len(copies) * self.block_size
        self._remove(copies)
        if node is not old:
            tree.unlock(old)
        request.node, request.protected = node, count

    def finish(self, request: PageRequest, *, loses_copies: bool = False) -> None:  # noqa: ARG002 - none are lost
        """Insert the whole pages of a request into the tree, and free the rest; nothing if it has none."""
        if request not in self.requests:
            return
        self._publish_pages(request, request.protected * self.block_size)
        count = min(len(request), request.computed) // self.block_size
        self._free_from(request, count)
        if count > request.protected:
            self._insert(request, count)
        self._drop(request)
        if self._publisher.failure is not None:
            self._publisher.surface()

    def retract(self, request: PageRequest) -> None:
        """Free the pages of a request that the tree has not, without inserting any; nothing if it has none."""
        if request not in self.requests:
            return
        self._free_from(request, request.protected)
        self._drop(request)
        if self._publisher.failure is not None:
            self._publisher.surface()

    release = retract

    def _free_from(self, request: PageRequest, first: int) -> None:
        """Free the own pages of a request from one on."""
        self.free_tokens += (request.allocated - first) * self.block_size
        request.allocated = first
        self._remove(request.pages[first:])
        del request.pages[first:]
