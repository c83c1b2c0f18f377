"""SGLang's radix cache, and the pages that its requests have (`RadixCache` of SGLang 0.5.23).

One subject: who has which pages, as free ones, in the tree or outside of it.
"""

from __future__ import annotations

from random import Random
from typing import ClassVar

from pytest_kvmock.cache.hashed import HashedTokens
from pytest_kvmock.cache.sglang.hybrid_tree import HybridTree
from pytest_kvmock.cache.sglang.page_cache import Namespace, PageCache
from pytest_kvmock.cache.sglang.radix_request import RadixRequest
from pytest_kvmock.cache.sglang.radix_tree import Pages, TreeNode
from pytest_kvmock.tokens import Prompt, TokenIds

# Theory of operation
#
# A page is free, a request's own, or in the tree, there protected by a lock or evictable. A request gets its pages out
# of the free ones; at a checkpoint they go into the tree, and those that somebody else has put there meanwhile are free
# again. Sizes are in tokens in the public methods, as in SGLang; inside, all is pages.
#
# SGLang's servers build another class by now (UnifiedRadixCache, its core in Rust), and its tree is the one here,
# without windows and states. In every recorded workload both answered the same.


class RadixCacheManager(PageCache[RadixRequest, HybridTree]):
    """Caches whole pages in a radix tree, evicts leaves by a policy, and publishes what changed.

    Its first event is a Cleared. Others are published when the call is over that made them, unless `hold_events`.

    Args:
        backend: name of the behaviour.
        num_blocks: capacity in pages, at least 1; SGLang has `num_blocks * block_size` tokens.
        block_size: tokens a page, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None: nowhere, and no event id is consumed.
        policy: order in which leaves are evicted: one of `POLICIES`.
        protected_threshold: with "slru" only, from how many hits on a node is evicted after all others; None: 2.
        dynamo_kv_event_format: publish names that tell namespaces apart.
        speculative: speculative decoding, for calls by hand: a `KvWorker` has a `HybridCacheManager` then; None: there is none.
        hold_events: let events wait until `take_events`.

    Raises:
        ValueError: an argument is not what it must be.

    Attributes:
        policy: as above.
        hasher: names the pages of requests without salt and namespace.
        hold_events: as above; may be set at any time.
        speculative: as above.
        requests: those that have pages, in the order in which they came.
    """

    takes: ClassVar[str] = "match_prefix, insert, inc_lock_ref, dec_lock_ref, evict, reset"

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
        """Insert whole pages; those that are new take free pages, and are published.

        Args:
            tokens: token ids, or a prompt.
            priority: of the nodes that it passes, at least.
            inserted_len: nodes that end within so many tokens are not hit again.
            extra_key: namespace.
            cache_salt: likewise, and names of pages depend on it.

        Returns:
            Tokens that were cached before.

        Raises:
            TypeError: a token is not an integer.
            ValueError: a token is out of range, or fewer pages are free than are new; nothing has changed.
        """
        key, namespace = self._key(tokens, extra_key, cache_salt)
        count = len(key.names)
        new = count - self._tree.lookup(key.names, count, namespace)
        if new > self._free:
            raise ValueError(f"insert: {new} pages are new and {self._free} are free; evict first")
        self._free -= new
        inserted = inserted_len // self.block_size
        matched, _ = self._insert(key, count, priority, inserted, namespace)
        self._publish()
        if self._publisher.failure is not None:
            self._publisher.surface()
        return matched * self.block_size

    def inc_lock_ref(self, node: TreeNode) -> int:
        """Lock a node and all above it; nothing for the root.

        Returns:
            By how much `evictable_size` changed: 0 or less.

        Raises:
            ValueError: the node is no part of the tree any more.
        """
        return -self._tree.lock(node) * self.block_size

    def dec_lock_ref(self, node: TreeNode) -> int:
        """Release one lock.

        Returns:
            By how much `evictable_size` changed: 0 or more.

        Raises:
            ValueError: the node is not locked, or no part of the tree any more.
        """
        return self._tree.unlock(node) * self.block_size

    def evict(self, num_tokens: int) -> list[int]:
        """Evict whole leaves until so many tokens are freed, or none may be evicted.

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
        self._publish()
        if self._publisher.failure is not None:
            self._publisher.surface()
        return [len(node.names) * size for node in evicted]

    # --------------------------------------------------------------------------------------------- requests

    def lookup(self, request: RadixRequest) -> int:
        """Count the pages that `find` would find. Changes nothing."""
        return self._tree.lookup(request.tokens.names, self._reusable(request), request.namespace)

    def find(self, request: RadixRequest, upto: int | None = None) -> int:
        """Match all of a request but its last token, which is computed anyway, for `admit`.

        Args:
            request: one that has no pages.
            upto: match no more than so many of its tokens; None: all.

        Returns:
            Pages that it needs and that no request has.
        """
        count = self._reusable(request)
        if upto is not None:
            count = min(count, upto // self.block_size)
        request.node, request.found = self._tree.match(request.tokens.names, count, request.namespace)
        return self.pages_of(len(request.tokens)) - request.found + self._tree.unlocked(request.node)

    def _reusable(self, request: RadixRequest) -> int:
        return (len(request.tokens) - 1) // self.block_size

    def admit(self, request: RadixRequest) -> None:
        """Lock what was found for a request."""
        if request.node is not None:
            self._tree.lock(request.node)
        self.requests[request] = None
        request.protected = request.allocated = request.found
        request.computed = request.found * self.block_size

    def allocate(self, request: RadixRequest, upto: int, demand: int = 0) -> None:
        """Allocate pages for the first `upto` tokens of a request.

        Args:
            request: one that was admitted.
            upto: so many tokens, from the first.
            demand: for so many free tokens room is made, and at least for as many as are taken.

        Raises:
            ValueError: not so many pages are free or evictable; nothing has changed.
        """
        pages = self.pages_of(upto) - request.allocated
        if pages > self._free + self._tree.evictable:
            raise ValueError(f"{pages} pages are needed, {self._free + self._tree.evictable} are free or evictable")
        missing = max(demand, pages * self.block_size) - self.available_size()
        try:
            if missing > 0:
                self.evict(missing)
        finally:  # what a sink raised at the eviction leaves this call when it is complete
            self._free -= pages
            request.allocated += pages

    def checkpoint(self, request: RadixRequest) -> int:
        """Insert the whole pages that a request has computed into the tree, and lock them there.

        Returns:
            Tokens that it had in pages of its own though they were there already; those are free again.
        """
        tokens, size, tree = request.tokens, self.block_size, self._tree
        count = request.computed // size
        namespace = request.namespace
        matched, node = self._insert(tokens, count, request.priority, request.inserted, namespace)
        request.inserted = max(request.inserted, count)
        prompt = tokens.num_prompt_tokens // size
        if 0 < prompt < count:  # prompts are worth more than outputs: a node ends where the prompt does
            self._insert(tokens, prompt, request.priority + 1, prompt, namespace)
        duplicates = matched - request.protected
        self._free += duplicates
        request.protected = count
        if node is not request.node:  # SGLang matches anew; the path is the newest already
            if request.node is not None:
                tree.unlock(request.node)
            tree.lock(node)
            request.node = node
        self._publish()
        if self._publisher.failure is not None:
            self._publisher.surface()
        return duplicates * size

    def release(self, request: RadixRequest) -> None:
        """Free the pages that a request has outside the tree, and release its lock; nothing if it has none."""
        if request not in self.requests:
            return
        del self.requests[request]
        self._free += request.allocated - request.protected
        if request.node is not None:
            self._tree.unlock(request.node)
        request.retract()

    # ------------------------------------------------------------------------------------------------- inside

    def request(self, prompt: Prompt, rng: Random) -> RadixRequest:
        """A request that has no page yet."""
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
