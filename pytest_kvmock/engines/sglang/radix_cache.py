"""SGLang's radix cache, and the pages of its requests (`RadixCache` of SGLang 0.5.23).

One subject: which pages are free, in the tree, or owned by a request.
"""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar

from pytest_kvmock.engines.base.hashed import HashedTokens
from pytest_kvmock.engines.sglang.hybrid_tree import HybridTree
from pytest_kvmock.engines.sglang.page_cache import Namespace, PageCache
from pytest_kvmock.engines.sglang.radix_request import RadixRequest
from pytest_kvmock.engines.sglang.radix_tree import Pages, TreeNode
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.tokens import Prompt, TokenIds

# Theory of operation
#
# A page is free, owned by a request, or in the tree, where a lock protects it or it is evictable. A request takes free
# pages. A checkpoint moves them into the tree, and frees those that another request has put there in the meantime.
# Public methods count tokens, as in SGLang; private ones count pages.
#
# SGLang's servers use another class now (UnifiedRadixCache, with its core in Rust). The tree here is that one, without
# windows and states. In every recorded workload both classes gave the same results.


class RadixCacheManager(PageCache[RadixRequest, HybridTree]):
    """Caches whole pages in a radix tree, evicts leaves by a policy, and publishes the changes.

    Its first event is a Cleared. Events are published at the end of the call that caused them, unless `hold_events`.

    Args:
        backend: name of the backend.
        num_blocks: capacity in pages, at least 1; SGLang has `num_blocks * block_size` tokens.
        block_size: tokens per page, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: receives the events; None: no event is published, and no event id is used.
        policy: eviction policy of leaves, one of `POLICIES`.
        protected_threshold: for "slru": number of hits from which a node is evicted after all others; None: 2.
        dynamo_kv_event_format: whether to publish names that differ between namespaces.
        speculative: the speculative decoding, for calls by hand (a `KvWorker` with one has a `HybridCacheManager`);
            None if there is none.
        hold_events: whether events wait until `take_events`.
        dcp: number of ranks that share the tokens of a block (`--dcp-size`). Each rank has a page (`--page-size`) of
            the `block_size` tokens. The tree, names, events and hits count blocks.

    Raises:
        ValueError: an argument is invalid.

    Attributes:
        page_size: tokens per page: `block_size` divided by `dcp`.
        dcp: as given.
        policy: as given.
        hasher: names the pages of requests without salt and namespace.
        hold_events: as given; may be set at any time.
        speculative: as given.
        requests: the requests with pages, in order of admission.
    """

    takes: ClassVar[str] = "match_prefix, insert, inc_lock_ref, dec_lock_ref, evict, reset"

    def __init__(self, *, block_size: int = 16, dcp: int = 1, **options: Any) -> None:
        check_integer("block_size", block_size, 1, " (tokens a block)")
        check_integer("dcp", dcp, 1)
        if block_size % dcp:
            raise ValueError(f"dcp must divide block_size, {block_size} tokens, into pages; got {dcp}")
        self.page_size, self.dcp = block_size // dcp, dcp
        super().__init__(block_size=block_size, **options)

    def _new_tree(self, policy: str, protected_threshold: int) -> HybridTree:
        return HybridTree(policy, protected_threshold)

    # ------------------------------------------------------------------------------------ the cache, as SGLang's

    def touch(self, tokens: TokenIds | Prompt, *, extra_key: str | None = None, cache_salt: str | None = None) -> None:
        """Count a cached prefix as used now, as `match_prefix` does."""
        self.match_prefix(tokens, extra_key=extra_key, cache_salt=cache_salt)

    def insert(
        self,
        tokens: TokenIds | Prompt,
        *,
        priority: int = 0,
        inserted_len: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Insert whole pages. New pages take free ones and are published.

        Args:
            tokens: token ids, or a prompt.
            priority: least priority of the nodes that the insert passes.
            inserted_len: nodes that end within this many tokens get no hit.
            extra_key: namespace.
            cache_salt: the salt, a namespace that also changes the names of pages.

        Returns:
            Tokens that were cached before.

        Raises:
            TypeError: a token is not an integer.
            ValueError: a token is out of range, or there are more new pages than free ones; nothing has changed.
        """
        key, namespace = self._key(tokens, extra_key, cache_salt)
        count = len(key.names)
        new = count - self._tree.lookup(key.names, count, namespace)
        if new > self._free:
            raise ValueError(f"insert: {new} pages are new and {self._free} are free; evict first")
        self._free -= new
        inserted = inserted_len // self.block_size
        matched, _ = self._insert(key, count, priority, inserted, namespace)
        self._flush()
        return matched * self.block_size

    def inc_lock_ref(self, node: TreeNode) -> int:
        """Lock a node and all above it; the root is never locked.

        Returns:
            The change of `evictable_size`: 0 or less.

        Raises:
            ValueError: the node is not part of the tree any more.
        """
        return -self._tree.lock(node) * self.block_size

    def dec_lock_ref(self, node: TreeNode) -> int:
        """Release one lock.

        Returns:
            The change of `evictable_size`: 0 or more.

        Raises:
            ValueError: the node is not locked, or not part of the tree any more.
        """
        return self._tree.unlock(node) * self.block_size

    def evict(self, num_tokens: int) -> list[int]:
        """Evict whole leaves until `num_tokens` tokens are freed, or none can be evicted.

        Returns:
            The size of each evicted node, in tokens.
        """
        size = self.block_size
        evicted = self._tree.evict(-(-num_tokens // size))
        if not evicted:
            return []
        names: list[int] = []
        for node in evicted:
            names += node.names
        self._free += len(names)
        self._queue.removed(names)
        self._flush()
        return [len(node.names) * size for node in evicted]

    # --------------------------------------------------------------------------------------------- requests

    def lookup(self, request: RadixRequest) -> int:
        """Count the pages that `find` would match. Changes nothing."""
        return self._tree.lookup(request.tokens.names, self._reusable(request), request.namespace)

    def find(self, request: RadixRequest, upto: int | None = None) -> int:
        """Match a request's tokens, except the last one, which is computed anyway; `admit` uses the match.

        Args:
            request: a request without pages.
            upto: match at most this many of its tokens; None: all.

        Returns:
            The number of pages that it needs and no request has.
        """
        count = self._reusable(request)
        if upto is not None:
            count = min(count, upto // self.block_size)
        request.node, request.found = self._tree.match(request.tokens.names, count, request.namespace)
        return self.pages_of(len(request.tokens)) - request.found + self._tree.unlocked(request.node)

    def _reusable(self, request: RadixRequest) -> int:
        return (len(request.tokens) - 1) // self.block_size

    def admit(self, request: RadixRequest) -> None:
        """Lock the match of a request."""
        if request.node is not None:
            self._tree.lock(request.node)
        self.requests[request] = None
        request.protected = request.allocated = request.found
        request.computed = request.found * self.block_size

    def allocate(self, request: RadixRequest, upto: int, demand: int = 0) -> None:
        """Allocate pages for the first `upto` tokens of a request.

        Args:
            request: an admitted request.
            upto: number of tokens, from the first.
            demand: number of tokens for which room is made, if that is more than the pages take.

        Raises:
            ValueError: too few pages are free or evictable; nothing has changed.
        """
        pages = self.pages_of(upto) - request.allocated
        if pages > self._free + self._tree.evictable:
            raise ValueError(f"{pages} pages are needed, {self._free + self._tree.evictable} are free or evictable")
        missing = max(demand, pages * self.block_size) - self.available_size()
        try:
            if missing > 0:
                self.evict(missing)
        finally:  # an exception that a sink raised at the eviction propagates after the pages are counted
            self._free -= pages
            request.allocated += pages

    def checkpoint(self, request: RadixRequest) -> int:
        """Insert the whole pages that a request has computed into the tree, and lock them there.

        Returns:
            Tokens of its pages that were in the tree already; its copies of them are freed.
        """
        tokens, size, tree = request.tokens, self.block_size, self._tree
        count = request.computed // size
        namespace = request.namespace
        matched, node = self._insert(tokens, count, request.priority, request.inserted, namespace)
        request.inserted = max(request.inserted, count)
        prompt = tokens.num_prompt_tokens // size
        if 0 < prompt < count:  # prompts have a higher priority than outputs: a node ends at the end of the prompt
            self._insert(tokens, prompt, request.priority + 1, prompt, namespace)
        duplicates = matched - request.protected
        self._free += duplicates
        request.protected = count
        if node is not request.node:  # SGLang matches again; here the path is already the newest
            if request.node is not None:
                tree.unlock(request.node)
            tree.lock(node)
            request.node = node
        self._flush()
        return duplicates * size

    def release(self, request: RadixRequest) -> None:
        """Free a request's pages outside the tree, and release its lock, if it has any."""
        if request not in self.requests:
            return
        del self.requests[request]
        self._free += request.allocated - request.protected
        if request.node is not None:
            self._tree.unlock(request.node)
        request.retract()

    # ------------------------------------------------------------------------------------------------- inside

    def request(self, prompt: Prompt, rng: Random) -> RadixRequest:
        """Make a request without pages."""
        hasher, namespace = self._hasher_of(prompt)
        return RadixRequest(HashedTokens(prompt, self.block_size, hasher, rng), rng, namespace)

    def _insert(
        self,
        pages: Pages,
        count: int,
        priority: int,
        inserted: int,
        namespace: Namespace = None,
    ) -> tuple[int, TreeNode]:
        matched, node = self._tree.insert(pages, count, namespace, priority, inserted)
        if matched < count:
            self._stored(pages, node.names, matched, count)
        return matched, node
