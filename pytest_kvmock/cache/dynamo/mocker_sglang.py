"""The cache of Dynamo's mock of SGLang: token slots, a radix tree of whole pages, and events by presence.

One subject: who has which slots, and which pages are published.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar, Final, Literal, TypeAlias

from pytest_kvmock.cache.base import LOG
from pytest_kvmock.cache.cache_trace import TRACE_LEVEL, trace
from pytest_kvmock.cache.dynamo.mocker_sglang_request import PageRequest
from pytest_kvmock.cache.dynamo.mocker_sglang_tree import PageNode, PageTree
from pytest_kvmock.cache.hashed import HashedTokens
from pytest_kvmock.cache.sglang.radix_manager import RadixManager
from pytest_kvmock.cache.sglang.radix_tree import TreeNode
from pytest_kvmock.checks import unknown_text
from pytest_kvmock.events import BlockTokens, Cleared, Removed, StorageTier, Stored
from pytest_kvmock.prompt_keys import LoraIds, part_of
from pytest_kvmock.sinks import Sink
from pytest_kvmock.tokens import chained_hash

# Theory of operation
#
# A token slot is free, a request's own, or in the tree, there locked or evictable. Slots are taken and given back one by
# one; only the tree thinks in whole pages. What the original does with slots is done here with a count of the free ones
# and an identity for each complete page: no slot of a page is ever in use without the others, so both say the same,
# but after a fault of the original that gives slots back twice (`retract`).
#
# Events follow presence. A page has a hash from the moment at which its last token is computed, before the tree has it,
# and several pages may have one hash: requests that compute the same at the same time have pages of their own until they
# finish. A hash is published when its first page comes, and removed when its last one goes.

Semantics: TypeAlias = Literal["1.3.1", "1.2.1"]

SEMANTICS: Final[tuple[Semantics, ...]] = ("1.3.1", "1.2.1")
"""Versions of dynamo-mocker whose cache this is."""


def check_semantics(semantics: str) -> Semantics:
    """Return `semantics`, or raise a ValueError that names the versions there are."""
    for version in SEMANTICS:
        if semantics == version:
            return version
    raise ValueError(unknown_text("semantics", semantics, SEMANTICS))


class MockerRadixManager(RadixManager[PageRequest, PageTree]):
    """Caches whole pages in a radix tree, evicts leaves by the time of their last access, and publishes what changed.

    Args:
        backend: name of the behaviour.
        num_blocks: capacity in pages, at least 1; it has `num_blocks * block_size` token slots.
        block_size: tokens a page, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None: nowhere, and no event id is consumed.
        semantics: "1.3.1", or "1.2.1": there only leaves count as evictable, and under the scheduler a request that
            finishes loses its copies (`finish`). Events have the form of 1.3.1 in both. None: as a scheduler says
            (`follow`), else "1.3.1".

    Raises:
        ValueError: an argument is not what it must be.

    Attributes:
        semantics: as above.
        free_tokens: slots that are free.
        requests: those that have slots, in the order in which they came.
    """

    takes: ClassVar[str] = "allocate, checkpoint, finish, retract, evict, clear"

    def __init__(
        self,
        *,
        backend: str = "mocker_sglang",
        num_blocks: int,
        block_size: int = 16,
        dp_rank: int = 0,
        sink: Sink | None = None,
        semantics: str | None = None,
    ) -> None:
        super().__init__(backend=backend, num_blocks=num_blocks, block_size=block_size, dp_rank=dp_rank, sink=sink)
        self._is_of_one_release = semantics is not None
        self.semantics: Semantics = SEMANTICS[0] if semantics is None else check_semantics(semantics)
        self.requests = {}
        self._tree = PageTree()
        self.free_tokens = self.num_tokens
        self._next_page = 0
        self._hashes: dict[int, int] = {}  # of each page that has one
        self._copies: dict[int, int] = {}  # pages of each hash
        self._lora_ids = LoraIds()

    def follow(self, semantics: Semantics) -> None:
        """Follow this release from now on.

        Raises:
            ValueError: it was made for another one.
        """
        if self._is_of_one_release and semantics != self.semantics:
            raise ValueError(
                f"the backend {self.backend!r} has semantics={self.semantics!r}, and its engine semantics={semantics!r}"
            )
        self.semantics = semantics

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def num_tokens(self) -> int:
        """Slots that it has."""
        return self.max_capacity * self.block_size

    @property
    def evictable_tokens(self) -> int:
        """Tokens in cached pages that are not locked; in 1.2.1 those of leaves only, which walks the tree."""
        tree = self._tree
        return (tree.evictable if self.semantics == "1.3.1" else tree.evictable_leaves()) * self.block_size

    @property
    def loses_copies(self) -> bool:
        """Whether a request that finishes under the scheduler loses its copies (`finish`), as in 1.2.1."""
        return self.semantics == "1.2.1"

    @property
    def num_active_blocks(self) -> int:
        """Slots in use, in pages, rounded up (`active_kv_blocks`)."""
        return self.active_blocks_after(0)

    def active_blocks_after(self, tokens: int) -> int:
        """Return how many pages are in use once so many tokens more have their slots."""
        used = self.num_tokens - self.free_tokens - self._tree.evictable * self.block_size + tokens
        return max(0, -(-used // self.block_size))

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Hashes of which there is a page, in the tree or with a request; each once."""
        return list(self._copies) if tier == StorageTier.DEVICE else []

    def unused_pages(self) -> int:
        """Pages that no request has, free or cached, where each request is accounted for by whole pages."""
        slots = self.free_tokens + self._tree.evictable * self.block_size - sum(r.slack for r in self.requests)
        return slots // self.block_size

    def lookup(self, request: PageRequest) -> int:
        """Count the leading pages of a request, its output included, that are in the tree. Changes nothing."""
        return self._tree.lookup(request.tokens.names, len(request.tokens.names))

    def pages_needed(self, request: PageRequest) -> int:
        """Count the pages that a whole request needs and that no other request has. Changes nothing."""
        names = request.tokens.names
        needed = -(-len(request) // self.block_size)
        return needed - self._tree.locked(names, len(names))

    # --------------------------------------------------------------------------------------------- requests

    def match(self, request: PageRequest, count: int) -> int:
        """Match the first `count` pages of a request that has no slots, and lock what was found.

        Returns:
            Tokens that were found; whole pages.
        """
        node, pages = self._tree.find(request.tokens.names, count)
        self._hold(request, node, pages)
        return len(pages) * self.block_size

    def _hold(self, request: PageRequest, node: TreeNode, pages: list[int]) -> None:
        self._tree.lock(node)
        self._lora_ids.use(request.tokens.keys)
        self.requests[request] = None
        request.node, request.pages, request.found = node, pages, len(pages)
        request.computed, request.allocated = len(pages) * self.block_size, len(pages)

    def allocate(self, request: PageRequest, upto: int) -> int | None:
        """Take slots for the tokens of a request up to `upto`, and publish the pages that they complete.

        Room is made first, for all of these tokens: a cached prefix counts for nothing there, and may be evicted itself.
        Then the first chunk of a request matches what is cached of it; later ones match nothing.

        Args:
            request: one whose tokens have slots up to some token, or none at all.
            upto: so many tokens, from the first.

        Returns:
            Tokens before which nothing was computed: those that were found, or for a later chunk those that had slots.
            None: there are too few slots, none was taken; what was matched was counted as used all the same.
        """
        before: int | None = request.computed
        self._make_room(upto - request.computed)
        if request.computed:
            if self.free_tokens < upto - request.computed:
                before = None
        else:
            node, pages = self._tree.find(request.tokens.names, upto // self.block_size)
            before = len(pages) * self.block_size
            if self.free_tokens < upto - before:
                before = None
            else:
                self._hold(request, node, pages)
        if before is not None:
            self.extend(request, upto)
            self._publish_pages(request, before)
        if self._publisher.failure is not None:
            self._publisher.surface()
        return before

    def make_room(self, tokens: int) -> bool:
        """Evict until so many slots are free; False if they are not, with all evicted that may be."""
        self._make_room(tokens)
        if self._publisher.failure is not None:
            self._publisher.surface()
        return tokens <= self.free_tokens

    def _make_room(self, tokens: int) -> None:
        if tokens > self.free_tokens:
            self._evict(tokens - self.free_tokens)

    def extend(self, request: PageRequest, upto: int) -> None:
        """Take free slots for the tokens of a request up to `upto`; they are there, as was checked before."""
        size = self.block_size
        self.free_tokens -= upto - request.computed
        request.computed = upto
        request.allocated = max(request.allocated, -(-upto // size))
        missing = upto // size - len(request.pages)
        if missing > 0:
            request.pages += range(self._next_page, self._next_page + missing)
            self._next_page += missing

    def evict(self, tokens: int) -> int:
        """Evict whole leaves until so many tokens are freed, or none may be evicted.

        Returns:
            Tokens that were freed.
        """
        freed = self._evict(tokens)
        if self._publisher.failure is not None:
            self._publisher.surface()
        return freed

    def _evict(self, tokens: int) -> int:
        pages: list[int] = []
        for node in self._tree.evict(-(-tokens // self.block_size)):
            assert isinstance(node, PageNode)
            pages += node.pages
        self.free_tokens += len(pages) * self.block_size
        self._remove(pages)
        return len(pages) * self.block_size

    def checkpoint(self, request: PageRequest) -> None:
        """Insert the whole pages that a request has computed into the tree, and lock them there.

        Where the tree has pages of these tokens already, the request keeps its own beside them until it finishes.
        """
        count = request.computed // self.block_size
        if count <= request.protected:
            return
        self._publish_pages(request, request.protected * self.block_size)
        node, _ = self._tree.put(request.tokens.names, request.pages, count)
        self._tree.touch(node)
        self._tree.lock(node)
        assert request.node is not None
        self._tree.unlock(request.node)
        request.node, request.protected = node, count
        if self._publisher.failure is not None:
            self._publisher.surface()

    def finish(self, request: PageRequest, *, loses_copies: bool = False) -> None:
        """Insert the whole pages of a request into the tree, and free the rest of its slots; nothing if it has none.

        Args:
            request: one that is done.
            loses_copies: pages of its own in whose place the tree has others are not freed, and nobody has them any more,
                as in 1.2.1.
        """
        if request not in self.requests:
            return
        size = self.block_size
        self._publish_pages(request, request.protected * size)
        count = request.computed // size
        self.free_tokens += request.computed - count * size
        node, pages = self._tree.put(request.tokens.names, request.pages, count)
        if not loses_copies:
            self._tree.touch(node)
            self._give_back(request, pages)
        self._drop(request)
        if self._publisher.failure is not None:
            self._publisher.surface()

    def _give_back(self, request: PageRequest, kept: list[int]) -> None:
        """Free the pages of a request in whose place the tree has others."""
        copies = [own for own, other in zip(request.pages, kept, strict=False) if own != other]
        self.free_tokens += len(copies) * self.block_size
        self._remove(copies)

    def _drop(self, request: PageRequest) -> None:
        del self.requests[request]
        assert request.node is not None
        self._tree.unlock(request.node)
        request.retract()

    def retract(self, request: PageRequest) -> None:
        """Free all slots of a request after its last checkpoint, as the original's scheduler retracts it.

        Two faults of the original are kept. Before its first checkpoint that is all of its slots, those of a prefix that
        it shares with the tree included: they are free twice then. And copies before the checkpoint are lost.
        """
        if request not in self.requests:
            return
        self.free_tokens += request.computed - request.protected * self.block_size
        self._remove(request.pages[request.protected :])
        self._drop(request)
        if self._publisher.failure is not None:
            self._publisher.surface()

    def release(self, request: PageRequest) -> None:
        """Free all slots of a request that the tree has not, without inserting any; nothing if it has none."""
        if request not in self.requests:
            return
        assert request.node is not None
        self._give_back(request, self._tree.path(request.node))
        shared = request.shared
        self.free_tokens += request.computed - shared * self.block_size
        self._remove(request.pages[shared:])
        self._drop(request)
        if self._publisher.failure is not None:
            self._publisher.surface()

    def clear(self) -> bool:
        """Drop all that is cached, and publish a Cleared; False, and nothing happens, while any request has slots."""
        if self.is_in_use:
            return False
        self._tree.reset()
        self.free_tokens = self.num_tokens
        self._hashes.clear()
        self._copies.clear()
        self._publisher.publish(Cleared())
        if self._publisher.failure is not None:
            self._publisher.surface()
        return True

    # --------------------------------------------------------------------------------------------------- events

    def _publish_pages(self, request: PageRequest, first: int) -> None:
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
        if self.sink is None or tokens.tokens is None:
            return None
        size, ids = self.block_size, tokens.tokens
        return [tuple(ids[at * size : (at + 1) * size]) for at in places]

    def _remove(self, pages: Iterable[int]) -> None:
        """Take the hashes of pages away, and publish which have no page left: one Removed, or none."""
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
