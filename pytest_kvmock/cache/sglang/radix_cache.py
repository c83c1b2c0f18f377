"""SGLang's radix cache, and the pages that its requests have (`RadixCache` of SGLang 0.5.23).

One subject: who has which pages, as free ones, in the tree or outside of it.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from pytest_kvmock.cache.base import LOG
from pytest_kvmock.cache.cache_trace import TRACE_LEVEL, trace
from pytest_kvmock.cache.hashed import HashedTokens
from pytest_kvmock.cache.sglang.event_queue import EventQueue, TakenEvent
from pytest_kvmock.cache.sglang.hashes import SglangHasher
from pytest_kvmock.cache.sglang.radix_manager import RadixManager
from pytest_kvmock.cache.sglang.radix_request import RadixKey, RadixRequest
from pytest_kvmock.cache.sglang.radix_tree import POLICIES, PROTECTED_THRESHOLD, RadixTree, TreeNode
from pytest_kvmock.events import BlockTokens, Removed, StorageTier, Stored
from pytest_kvmock.sinks import Sink
from pytest_kvmock.tokens import Prompt, TokenIds

# Theory of operation
#
# A page is free, a request's own, or in the tree, there protected by a lock or evictable. A request gets its pages out
# of the free ones; at a checkpoint they go into the tree, and those that somebody else has put there meanwhile are free
# again. Sizes are in tokens in the public methods, as in SGLang; inside, all is pages.
#
# SGLang's servers build another class by now (UnifiedRadixCache, its core in Rust). In every recorded workload it
# answered the same.


_Namespace: TypeAlias = tuple[str | None, str | None] | None
"""Extra key and salt, by which chains are kept apart in the tree; None where there are neither."""


class MatchResult(NamedTuple):
    """The cached prefix that `match_prefix` found.

    Attributes:
        tokens: how many leading tokens are cached; whole pages.
        node: where they end; to be locked, as long as they are used. The root for none.
    """

    tokens: int
    node: TreeNode


class _Pages(Protocol):
    """Pages as they are stored: `RadixKey`, or the tokens of a request."""

    names: list[int]

    @property
    def local_hashes(self) -> list[int]: ...
    def block_tokens(self, start: int, end: int) -> BlockTokens | None: ...
    def carried(self, start: int, end: int) -> dict[str, Any] | None: ...


class RadixCacheManager(RadixManager[RadixRequest, RadixTree]):
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
        is_eagle: keys are bigrams. For calls by hand; a `KvWorker` has none.
        hold_events: let events wait until `take_events`.

    Raises:
        ValueError: an argument is not what it must be.

    Attributes:
        policy: as above.
        hasher: names the pages of requests without salt and namespace.
        hold_events: as above; may be set at any time.
        requests: those that have pages, in the order in which they came.
    """

    takes: ClassVar[str] = "match_prefix, insert, inc_lock_ref, dec_lock_ref, evict, reset"

    def __init__(
        self,
        *,
        backend: str = "sglang",
        num_blocks: int,
        block_size: int = 16,
        dp_rank: int = 0,
        sink: Sink | None = None,
        policy: str = "lru",
        protected_threshold: int | None = None,
        dynamo_kv_event_format: bool = False,
        is_eagle: bool = False,
        hold_events: bool = False,
    ) -> None:
        super().__init__(backend=backend, num_blocks=num_blocks, block_size=block_size, dp_rank=dp_rank, sink=sink)
        self.policy = _checked_policy(policy)
        threshold = _checked_threshold(policy, protected_threshold)
        flags = {"dynamo_kv_event_format": dynamo_kv_event_format, "is_eagle": is_eagle, "hold_events": hold_events}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r:.80}")  # noqa: TRY004 - one error
        self.hasher = SglangHasher(dynamo_kv_event_format=dynamo_kv_event_format, is_eagle=is_eagle)
        self.hold_events = hold_events
        self.requests = {}
        self._tree = RadixTree(policy, threshold)
        self._free = num_blocks
        self._queue = EventQueue()
        self._queue.cleared()
        self._publish()
        if self._publisher.failure is not None:
            self._publisher.surface()

    # ------------------------------------------------------------------------------------------------- queries

    def available_size(self) -> int:
        """Tokens in pages that are free."""
        return self._free * self.block_size

    def evictable_size(self) -> int:
        """Tokens in cached pages that are not locked."""
        return self._tree.evictable * self.block_size

    def protected_size(self) -> int:
        """Tokens in cached pages that are locked."""
        return self._tree.protected * self.block_size

    @property
    def num_active_blocks(self) -> int:
        """Pages in use: locked ones in the tree, and those that requests have outside of it."""
        return self.max_capacity - self._free - self._tree.evictable

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Names of what is cached in a tier; one that two namespaces have is there twice."""
        if tier != StorageTier.DEVICE:
            return []
        return [name for node in self._tree.nodes() for name in node.names]

    # ------------------------------------------------------------------------------------ the cache, as SGLang's

    def match_prefix(
        self, tokens: TokenIds | Prompt, *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> MatchResult:
        """Find the longest cached prefix, and count it as used now. A node that is matched in part is split.

        Args:
            tokens: token ids, or a prompt; whole pages are looked for.
            extra_key: namespace in which it is looked for.
            cache_salt: likewise, and names of pages depend on it.

        Raises:
            TypeError: a token is not an integer.
            ValueError: a token is out of range.
        """
        key, namespace = self._key(tokens, extra_key, cache_salt)
        node, pages = self._tree.match(key.names, len(key.names), namespace)
        return MatchResult(pages * self.block_size, node)

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

    def reset(self) -> None:
        """Drop everything that is cached, locked or not, and publish a Cleared.

        Raises:
            ValueError: requests have pages; they would come back to a tree that does not know them.
        """
        if self.requests:
            raise ValueError(f"reset: {len(self.requests)} requests have pages; release them first")
        self._tree.reset()
        self._free = self.max_capacity
        self._queue.cleared()
        self._publish()
        if self._publisher.failure is not None:
            self._publisher.surface()

    def clear(self) -> bool:
        """Reset the cache; False, and nothing happens, while any page is in use (`flush_cache`)."""
        if self.is_in_use:
            return False
        self.reset()
        return True

    def take_events(self) -> list[TakenEvent]:
        """Publish the events that wait, and return them."""
        taken = self._queue.take()
        self._publish_events(taken)
        if self._publisher.failure is not None:
            self._publisher.surface()
        return taken

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
        return self._pages(len(request.tokens)) - request.found + self._tree.unlocked(request.node)

    def _reusable(self, request: RadixRequest) -> int:
        return (len(request.tokens) - 1) // self.block_size

    def admit(self, request: RadixRequest) -> None:
        """Lock what was found for a request."""
        if request.node is not None:
            self._tree.lock(request.node)
        self.requests[request] = None
        request.protected = request.allocated = request.found
        request.computed = request.found * self.block_size

    def allocate(self, request: RadixRequest, upto: int, demand: int | None = None) -> None:
        """Allocate pages for the first `upto` tokens of a request.

        Args:
            request: one that was admitted.
            upto: so many tokens, from the first.
            demand: for so many free tokens room is made; by default for as many as are taken.

        Raises:
            ValueError: not so many pages are free or evictable; nothing has changed.
        """
        pages = self._pages(upto) - request.allocated
        if pages > self._free + self._tree.evictable:
            raise ValueError(f"{pages} pages are needed, {self._free + self._tree.evictable} are free or evictable")
        missing = (pages * self.block_size if demand is None else demand) - self.available_size()
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

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def request(self, prompt: Prompt, rng: Random) -> RadixRequest:
        """A request that has no page yet.

        Args:
            prompt: what is asked; its adapter is the namespace, as in SGLang.
            rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

        Raises:
            ValueError: the prompt is empty, or its hashes do not fit the page size.
        """
        keys = prompt.keys
        if keys is None or not keys.naming:
            return RadixRequest(HashedTokens(prompt, self.block_size, self.hasher, rng), rng)
        hasher = self.hasher.keyed(keys.lora_name, keys.cache_salt, is_lora=keys.lora_name is not None)
        namespace = _namespace(keys.lora_name, keys.cache_salt)
        return RadixRequest(HashedTokens(prompt, self.block_size, hasher, rng), rng, namespace)

    def _key(
        self, tokens: TokenIds | Prompt, extra_key: str | None, cache_salt: str | None
    ) -> tuple[RadixKey, _Namespace]:
        """Pages by hand, and their namespace; what a prompt carries stands in for what is not given."""
        for name, value in (("extra_key", extra_key), ("cache_salt", cache_salt)):
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must be a string, or None, got {value!r:.80}")
        keys = tokens.keys if isinstance(tokens, Prompt) else None
        lora_name = session_id = None
        if keys is not None:
            session_id, lora_name = keys.session_id, keys.lora_name
            extra_key = lora_name if extra_key is None else extra_key
            cache_salt = keys.cache_salt if cache_salt is None else cache_salt
        namespace = _namespace(extra_key, cache_salt)
        hasher = self.hasher
        if namespace is not None:
            hasher = hasher.keyed(extra_key, cache_salt, is_lora=lora_name is not None)
        return RadixKey(tokens, self.block_size, hasher, lora_name=lora_name, session_id=session_id), namespace

    def _insert(
        self,
        pages: _Pages,
        count: int,
        priority: int,
        inserted: int,
        namespace: _Namespace = None,
    ) -> tuple[int, TreeNode]:
        names = pages.names
        matched, node = self._tree.insert(names, count, namespace, priority, inserted)
        if matched < count:
            self._queue.stored(
                names[matched - 1] if matched else None,
                node.names,
                tuple(pages.local_hashes[matched:count]),
                pages.block_tokens(matched, count),
                _on_the_wire(pages.carried(matched, count)),
            )
        return matched, node

    def _publish(self) -> None:
        if self._queue and not self.hold_events:
            self._publish_events(self._queue.take())

    def _publish_events(self, events: list[TakenEvent]) -> None:
        for data, token_ids, extra in events:
            if extra is None:
                self._publisher.publish(data, token_ids)
            else:
                self._publisher.publish(data, token_ids, StorageTier.DEVICE, extra)
            if LOG.isEnabledFor(TRACE_LEVEL):
                trace(self, "allocation", data.block_hashes if isinstance(data, Stored) else ())
                trace(self, "eviction", data.block_hashes if isinstance(data, Removed) else ())


def _on_the_wire(extra: dict[str, Any] | None) -> dict[str, Any] | None:
    """What SGLang's own events have of what a request carries: an adapter by its name alone, and no keys of single pages."""
    return extra and {name: extra[name] for name in ("lora_name", "cache_salt", "session_id") if name in extra}


def _namespace(extra_key: str | None, cache_salt: str | None) -> _Namespace:
    return None if extra_key is None and cache_salt is None else (extra_key, cache_salt)


def _checked_policy(policy: str) -> str:
    if not isinstance(policy, str) or policy not in POLICIES:
        # tlru needs what only the unified tree keeps: on RadixCache, SGLang fails with it at the first eviction.
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r:.80}")
    return policy


def _checked_threshold(policy: str, threshold: int | None) -> int:
    if threshold is None:
        return PROTECTED_THRESHOLD
    if policy != "slru":
        raise ValueError(f'protected_threshold is an option of policy "slru", got policy {policy!r}')
    if not isinstance(threshold, int) or isinstance(threshold, bool) or threshold < 1:
        raise ValueError(f"protected_threshold must be an integer of at least 1 (hits), got {threshold!r:.80}")
    return threshold
