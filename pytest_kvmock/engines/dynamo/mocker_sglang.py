"""The cache of Dynamo's mock of SGLang since 1.6: whole pages in a radix tree, and events by presence.

One subject: which request or node has which pages, and which are published.
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
# A page is free, owned by a request, or in the tree, where it is locked or evictable. A request takes whole pages and
# owns its last one before it is full. Its cached prefix, up to the page before its last token, is locked at its
# admission. Computed pages enter the tree below its own node; if the tree already has a page with these tokens, the
# request takes that one, and its own is freed at once. What the original does with slots of tokens is done here with a
# count of free pages and an identity for each complete one.
#
# Events follow presence. A page has a hash from the moment at which its last token is computed, before the tree has it,
# and several pages may have one hash: requests that compute the same at the same time have pages of their own until
# they are checkpointed. A hash is published when its first page comes, and removed when its last one goes.


class MockerRadixManager(RadixManager[MockerRadixRequest, PageTree]):
    """Caches whole pages in a radix tree, trims leaves by the time of their last access, and publishes what changed.

    Args:
        backend: name of the behaviour.
        num_blocks: capacity in pages, at least 1.
        block_size: tokens a page, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None to publish nothing and consume no event id.

    Raises:
        ValueError: an argument is invalid.

    Attributes:
        free_pages: pages that are free.
        requests: those that have pages, in order of arrival.
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
        self._hashes: dict[int, int] = {}  # of each page that has one
        self._copies: dict[int, int] = {}  # pages of each hash
        self._lora_ids = LoraIds()

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def num_active_blocks(self) -> int:
        """Pages in use (`active_kv_blocks`)."""
        return self.num_blocks - self.unused_pages()

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Hashes of which there is a page, in the tree or with a request; each once."""
        return list(self._copies) if tier == StorageTier.DEVICE else []

    def unused_pages(self) -> int:
        """Pages that no request has, free or cached."""
        return self.free_pages + self._tree.evictable

    def lookup(self, request: MockerRadixRequest) -> int:
        """Count the leading pages of a request, its output included, that are in the tree. Changes nothing."""
        return self._tree.lookup(request.tokens.names, len(request.tokens.names))

    def pages_missing(self, request: MockerRadixRequest, upto: int) -> int:
        """Count the pages that a request has not yet for its tokens up to `upto`; below 0 where it has more."""
        return -(-upto // self.block_size) - request.allocated

    def pages_needed(self, request: MockerRadixRequest) -> int:
        """Count the pages that a whole request needs and that no other request has. Changes nothing."""
        return -(-len(request) // self.block_size) - self._tree.locked(request.tokens.names, request.most_hits)

    # --------------------------------------------------------------------------------------------- requests

    def request(self, prompt: Prompt, rng: Random) -> MockerRadixRequest:
        """A request that has no page yet; see `MockerRadixRequest`."""
        return MockerRadixRequest(prompt, self.block_size, rng)

    def match(self, request: MockerRadixRequest, count: int) -> int:
        """Match the first `count` pages of a request that has none, but not the page of its last token, and lock them.

        Returns:
            Tokens that were found; whole pages.
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
        """Take pages for the tokens of a request up to `upto`, and publish those that they complete.

        The first chunk of a request matches and locks what is cached of it before room is made; later ones match
        nothing.

        Args:
            request: one whose tokens have pages up to some token, or none at all.
            upto: how many tokens, from the first.
            caches: whether it reuses and publishes anything.

        Returns:
            Tokens before which nothing was computed. None if there are too few pages, and none was taken.
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
        """Lock what is cached of the first `upto` tokens of a request that has no pages, and take pages for the rest.

        Returns:
            How many were taken. None if there are too few, and none was.
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
        """Evict until `pages` pages are free; return False if they are not, with all evicted that may be."""
        self._make_room(pages)
        self._publisher.surface()
        return pages <= self.free_pages

    def _make_room(self, pages: int) -> None:
        if pages > self.free_pages:
            self._evict(pages - self.free_pages)

    def extend(self, request: MockerRadixRequest, upto: int) -> None:
        """Take free pages for the tokens of a request up to `upto`; they are there, as was checked before."""
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
            Tokens that were freed.
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
        """Insert the whole pages that a request has computed into the tree, and lock them there.

        Where the tree has pages of these tokens already, they are the request's from now on, and its own are freed.
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
        """Insert the whole pages of a request into the tree, and free the rest; nothing if it has none."""
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
        """Free the pages of a request that the tree has not, without inserting any; nothing if it has none."""
        if request not in self.requests:
            return
        self._free_from(request, request.protected)
        self._drop(request)
        self._publisher.surface()

    def _free_from(self, request: MockerRadixRequest, first: int) -> None:
        """Free the own pages of a request from one on."""
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
        """Drop all that is cached, and publish a Cleared; do nothing and return False while any request has pages."""
        if self.is_in_use:
            return False
        self._tree.reset()
        self.free_pages = self.num_blocks
        self._hashes.clear()
        self._copies.clear()
        return self._cleared()

    # --------------------------------------------------------------------------------------------------- events

    def _publish_pages(self, request: MockerRadixRequest, first: int) -> None:
        """Give the complete pages from token `first` on their hashes, and publish what was not present before.

        One Stored begins at the first page whose hash is new, and has all later ones, new or not.
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
            else:  # a page after one that lost its hash is published as a root, as in the original
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
        """The tokens of some pages, where somebody is given them; the original's events have none."""
        rows = None if self.sink is None or not places else tokens.rows(0, max(places) + 1, self.block_size)
        return None if rows is None else [rows[at] for at in places]

    def _remove(self, pages: Iterable[int]) -> None:
        """Take the hashes of pages away, and publish which have no page left: at most one Removed."""
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
