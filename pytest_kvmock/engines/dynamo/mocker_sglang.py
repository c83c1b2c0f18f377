"""The cache of Dynamo's mock of SGLang since 1.6: whole pages in a radix tree, and events by presence.

One subject: the pages of each request and node, and the published ones among them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from random import Random
from typing import ClassVar

from pytest_kvmock.engines.base.cache_trace import TRACE_LEVEL, trace
from pytest_kvmock.engines.base.hashed import HashedTokens
from pytest_kvmock.engines.base.manager_base import LOG
from pytest_kvmock.engines.dynamo.mocker_sglang_request import MockerRadixRequest
from pytest_kvmock.engines.dynamo.mocker_sglang_tree import PageTree
from pytest_kvmock.engines.sglang.radix_manager import RadixManager
from pytest_kvmock.values.events import BlockTokens, Removed, StorageTier, Stored
from pytest_kvmock.values.prompt_keys import LoraIds, part_of
from pytest_kvmock.values.sinks import Sink
from pytest_kvmock.values.tokens import Prompt, chained_hash

# Theory of operation
#
# A page is free, owned by a request, or in the tree, where it is locked or evictable. A request takes whole pages, and
# owns its last page before this is full. Its cached prefix, up to the page before its last token, is locked at
# admission. Computed pages enter the tree below the request's node. If the tree already has a page with these tokens,
# the request takes this page, and its own is freed at once. The original counts slots of tokens; the mock counts free
# pages and gives each complete page an identity.
#
# Events follow presence. A page has a hash as soon as its last token is computed, before it enters the tree. Several
# pages may have one hash: requests that compute the same tokens at the same time have their own pages until they are
# checkpointed. A Stored is published when the first page with a hash appears, a Removed when the last one is gone.


class MockerRadixManager(RadixManager[MockerRadixRequest, PageTree]):
    """Caches whole pages in a radix tree, trims leaves by the time of their last access, and publishes the changes.

    Args:
        backend: name of the behaviour.
        num_blocks: capacity in pages, at least 1.
        block_size: tokens a page, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None to publish nothing and consume no event id.

    Raises:
        ValueError: an argument is invalid.

    Attributes:
        free_pages: number of free pages.
        requests: requests that have pages, in order of arrival.
    """

    takes: ClassVar[str] = "allocate, reserve, checkpoint, finish, release, evict, clear"

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
        self.requests = {}
        self._tree = PageTree()
        self.free_pages = num_blocks
        self._next_page = 0
        self._hashes: dict[int, int] = {}  # the hash of each page that has one
        self._copies: dict[int, int] = {}  # number of pages with each hash
        self._lora_ids = LoraIds()

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def num_active_blocks(self) -> int:
        """Pages in use (`active_kv_blocks`)."""
        return self.num_blocks - self.unused_pages()

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Return each hash that some page has, in the tree or with a request, once."""
        return list(self._copies) if tier == StorageTier.DEVICE else []

    def unused_pages(self) -> int:
        """Count the pages that no request has, free or cached."""
        return self.free_pages + self._tree.evictable

    def lookup(self, request: MockerRadixRequest) -> int:
        """Count the leading pages of a request, its output included, that are in the tree. Changes nothing."""
        return self._tree.lookup(request.tokens.names, len(request.tokens.names))

    def pages_missing(self, request: MockerRadixRequest, upto: int) -> int:
        """Count the pages that a request still needs for its tokens up to `upto`; negative if it has more."""
        return -(-upto // self.block_size) - request.allocated

    def pages_needed(self, request: MockerRadixRequest) -> int:
        """Count the pages that a whole request needs, without those that others have locked. Changes nothing."""
        return -(-len(request) // self.block_size) - self._tree.locked(request.tokens.names, request.most_hits)

    # --------------------------------------------------------------------------------------------- requests

    def request(self, prompt: Prompt, rng: Random) -> MockerRadixRequest:
        """Return a new request, without pages; see `MockerRadixRequest`."""
        return MockerRadixRequest(prompt, self.block_size, rng)

    def match(self, request: MockerRadixRequest, count: int) -> int:
        """Match and lock the first `count` pages of a request without pages, except the page of its last token.

        Returns:
            Number of matched tokens, in whole pages.
        """
        node, pages = self._tree.find(request.tokens.names, min(count, request.most_hits))
        self._tree.lock(node)
        self._lora_ids.use(request.tokens.keys)
        self.requests[request] = None
        request.node, request.pages = node, pages
        request.found = request.protected = request.allocated = len(pages)
        request.computed = len(pages) * self.block_size
        return request.computed

    def allocate(self, request: MockerRadixRequest, upto: int, *, caches: bool = True) -> int | None:
        """Take pages for the tokens of a request up to `upto`, and publish the pages that are complete.

        The first chunk of a request matches and locks its cached pages before room is made; later chunks match
        nothing.

        Args:
            request: a request whose tokens have pages up to some token, or no pages.
            upto: number of tokens, from the first.
            caches: whether it reuses and publishes pages.

        Returns:
            Number of leading tokens that were not computed now. None, with no page taken, if there are too few pages.
        """
        is_first = request not in self.requests
        before = self.match(request, len(request.tokens.names) if caches else 0) if is_first else request.computed
        missing = self.pages_missing(request, upto)
        if missing > self.unused_pages():
            if is_first:
                self._drop(request)
            return None
        self._make_room(missing)
        self.extend(request, upto)
        if caches:
            self._publish_pages(request, before)
        self._publisher.surface()
        return before

    def reserve(self, request: MockerRadixRequest, upto: int, *, caches: bool = True) -> int | None:
        """Lock the cached pages of the first `upto` tokens of a request without pages, and take pages for the rest.

        Returns:
            Number of pages that were taken. None, with none taken, if there are too few.
        """
        request.computes_last_token = False
        self.match(request, upto // self.block_size if caches else 0)
        request.computes_last_token = True
        missing = self.pages_missing(request, upto)
        if missing > self.unused_pages():
            self._drop(request)
            return None
        self._make_room(missing)
        self.free_pages -= missing
        request.allocated += missing
        self._publisher.surface()
        return missing

    def make_room(self, pages: int) -> bool:
        """Evict until `pages` pages are free; return False if all evictable pages were not enough."""
        self._make_room(pages)
        self._publisher.surface()
        return pages <= self.free_pages

    def _make_room(self, pages: int) -> None:
        if pages > self.free_pages:
            self._evict(pages - self.free_pages)

    def extend(self, request: MockerRadixRequest, upto: int) -> None:
        """Take free pages for the tokens of a request up to `upto`; the caller has checked that there are enough."""
        missing = self.pages_missing(request, upto)
        if missing > 0:
            self.free_pages -= missing
            request.allocated += missing
        request.computed = upto
        complete = upto // self.block_size - len(request.pages)
        if complete > 0:
            request.pages += range(self._next_page, self._next_page + complete)
            self._next_page += complete

    def evict(self, tokens: int) -> int:
        """Evict pages of `tokens` tokens, or all that may be evicted.

        Returns:
            Number of freed tokens.
        """
        freed = self._evict(-(-tokens // self.block_size)) * self.block_size
        self._publisher.surface()
        return freed

    def _evict(self, count: int) -> int:
        pages = self._tree.trim(count)
        self.free_pages += len(pages)
        self._remove(pages)
        return len(pages)

    def checkpoint(self, request: MockerRadixRequest) -> None:
        """Insert the whole computed pages of a request into the tree, and lock them there.

        If the tree already has pages with these tokens, the request uses them from now on, and frees its own.
        """
        count = request.computed // self.block_size
        if count <= request.protected:
            return
        self._publish_pages(request, request.protected * self.block_size)
        self._insert(request, count)
        self._publisher.surface()

    def _insert(self, request: MockerRadixRequest, count: int) -> None:
        tree, first, old = self._tree, request.protected, request.node
        assert old is not None
        node, kept = tree.put_behind(old, request.tokens.names, request.pages, first, count)
        if node is not old:
            tree.lock(node)
        copies = [own for own, page in zip(request.pages[first:count], kept, strict=True) if own != page]
        request.pages[first:count] = kept
        self.free_pages += len(copies)
        self._remove(copies)
        if node is not old:
            tree.unlock(old)
        request.node, request.protected = node, count

    def finish(self, request: MockerRadixRequest) -> None:
        """Insert the whole pages of a request into the tree, and free the rest; do nothing if it has no pages."""
        if request not in self.requests:
            return
        self._publish_pages(request, request.protected * self.block_size)
        count = min(len(request), request.computed) // self.block_size
        self._free_from(request, count)
        if count > request.protected:
            self._insert(request, count)
        self._drop(request)
        self._publisher.surface()

    def release(self, request: MockerRadixRequest) -> None:
        """Free the pages of a request that are not in the tree, and insert none; do nothing if it has no pages."""
        if request not in self.requests:
            return
        self._free_from(request, request.protected)
        self._drop(request)
        self._publisher.surface()

    def _free_from(self, request: MockerRadixRequest, first: int) -> None:
        """Free the pages of a request from number `first` on; they are not in the tree."""
        self.free_pages += request.allocated - first
        request.allocated = first
        self._remove(request.pages[first:])
        del request.pages[first:]

    def _drop(self, request: MockerRadixRequest) -> None:
        del self.requests[request]
        assert request.node is not None
        self._tree.unlock(request.node)
        request.retract()

    def clear(self) -> bool:
        """Drop all cached pages, and publish a Cleared; do nothing and return False while any request has pages."""
        if self.is_in_use:
            return False
        self._tree.reset()
        self.free_pages = self.num_blocks
        self._hashes.clear()
        self._copies.clear()
        return self._cleared()

    # --------------------------------------------------------------------------------------------------- events

    def _publish_pages(self, request: MockerRadixRequest, first: int) -> None:
        """Give the complete pages from token `first` on their hashes, and publish one Stored.

        The Stored begins at the first page whose hash was not present, and has all later pages, new or not.
        """
        tokens, pages, hashes, copies = request.tokens, request.pages, self._hashes, self._copies
        names: list[int] = []
        places: list[int] = []
        parent = None
        for at in range(first // self.block_size, request.computed // self.block_size):
            page = pages[at]
            if page in hashes:
                continue
            before = hashes.get(pages[at - 1]) if at else None
            if before is not None and before == tokens.names[at - 1]:
                name = tokens.names[at]
            else:  # as in the original, a page after one that lost its hash is published as a root
                name = chained_hash(before, tokens.local_hashes[at])
            hashes[page] = name
            count = copies[name] = copies.get(name, 0) + 1
            if not names:
                if count > 1:
                    continue
                parent = before
            names.append(name)
            places.append(at)
        if names:
            local = tuple(tokens.local_hashes[at] for at in places)
            extra = None if tokens.keys is None else part_of(tokens.carried(0, places[-1] + 1, self._lora_ids), places)
            data, token_ids = Stored(parent, tuple(names), local), self._token_ids(tokens, places)
            self._publisher.publish(data, token_ids, StorageTier.DEVICE, extra)
            if LOG.isEnabledFor(TRACE_LEVEL):
                trace(self, "allocation", names)

    def _token_ids(self, tokens: HashedTokens, places: Sequence[int]) -> BlockTokens | None:
        """Return the tokens of some pages; None without a sink. The original's events have no tokens."""
        rows = None if self.sink is None or not places else tokens.rows(0, max(places) + 1, self.block_size)
        return None if rows is None else [rows[at] for at in places]

    def _remove(self, pages: Iterable[int]) -> None:
        """Drop the hashes of pages, and publish at most one Removed, for the hashes without a page."""
        hashes, copies = self._hashes, self._copies
        gone: list[int] = []
        for page in pages:
            name = hashes.pop(page, None)
            if name is None:
                continue
            if copies[name] > 1:
                copies[name] -= 1
            else:
                del copies[name]
                gone.append(name)
        if not gone:
            return
        self._publisher.publish(Removed(tuple(gone)))
        if LOG.isEnabledFor(TRACE_LEVEL):
            trace(self, "eviction", gone)
