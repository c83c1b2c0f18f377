"""What SGLang's caches share: pages in a tree, names of pages, and the events that are published of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pytest_kvmock.cache.base import LOG
from pytest_kvmock.cache.cache_trace import TRACE_LEVEL, trace
from pytest_kvmock.cache.sglang.event_queue import EventQueue, TakenEvent
from pytest_kvmock.cache.sglang.hashes import SglangHasher
from pytest_kvmock.cache.sglang.hybrid_tree import HybridTree
from pytest_kvmock.cache.sglang.radix_manager import RadixManager, RequestT
from pytest_kvmock.cache.sglang.radix_request import RadixKey
from pytest_kvmock.cache.sglang.radix_tree import POLICIES, PROTECTED_THRESHOLD, Pages, TreeNode
from pytest_kvmock.cache.sglang.speculative import SglangSpeculative
from pytest_kvmock.events import Removed, StorageTier, Stored
from pytest_kvmock.sinks import Sink
from pytest_kvmock.tokens import Prompt, TokenIds

TreeT = TypeVar("TreeT", bound=HybridTree)

Namespace: TypeAlias = tuple[str | None, str | None] | None
"""Extra key and salt, by which chains are kept apart in the tree; None where there are neither."""


class MatchResult(NamedTuple):
    """The cached prefix that `match_prefix` found.

    Attributes:
        tokens: how many leading tokens are cached; whole pages.
        node: where they end; to be locked, as long as they are used. The root for none.
    """

    tokens: int
    node: TreeNode


class PageCache(RadixManager[RequestT, TreeT]):
    """Base of the managers that publish, as SGLang does, what whole pages of a tree are cached; a subclass has requests.

    Args:
        backend: name of the behaviour.
        num_blocks: capacity in pages, at least 1.
        block_size: tokens a page, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None: nowhere, and no event id is consumed.
        policy: order in which leaves are evicted: one of `POLICIES`.
        protected_threshold: with "slru" only, from how many hits on a node is evicted after all others; None: 2.
        dynamo_kv_event_format: publish names that tell namespaces apart.
        speculative: speculative decoding; None: there is none.
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
        speculative: SglangSpeculative | None = None,
        hold_events: bool = False,
    ) -> None:
        super().__init__(backend=backend, num_blocks=num_blocks, block_size=block_size, dp_rank=dp_rank, sink=sink)
        self.policy = _checked_policy(policy)
        threshold = _checked_threshold(policy, protected_threshold)
        flags = {"dynamo_kv_event_format": dynamo_kv_event_format, "hold_events": hold_events}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r:.80}")  # noqa: TRY004 - one error
        if speculative is not None and not isinstance(speculative, SglangSpeculative):
            raise ValueError(f"speculative must be an SglangSpeculative, or None; got {speculative!r:.80}")
        self.speculative = speculative
        pairs = speculative is not None and speculative.has_pairs and self._may_have_pairs
        self.hasher = SglangHasher(dynamo_kv_event_format=dynamo_kv_event_format, is_eagle=pairs)
        self.hold_events = hold_events
        self.requests = {}
        self._tree = self._new_tree(policy, threshold)
        self._free = num_blocks
        self._queue = EventQueue()
        self._queue.cleared()
        self._publish()
        if self._publisher.failure is not None:
            self._publisher.surface()

    _may_have_pairs = True
    """Whether keys are pairs with a draft model."""

    def _new_tree(self, policy: str, protected_threshold: int) -> TreeT:
        """Make the tree; called once, when the sizes are known."""
        raise NotImplementedError

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

    def request(self, prompt: Prompt, rng: Random) -> RequestT:
        """A request that has no page yet.

        Args:
            prompt: what is asked; its adapter is the namespace, as in SGLang.
            rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

        Raises:
            ValueError: the prompt is empty, or its hashes do not fit the page size.
        """
        raise NotImplementedError

    def lookup(self, request: RequestT) -> int:
        """Count the pages that a lookup of a request would find, without its last token. Changes nothing."""
        raise NotImplementedError

    def pages_ahead(self, request: RequestT) -> int:
        """Pages that a request lacks for what is committed and for the drafts of two steps."""
        assert self.speculative is not None
        ahead = self.pages_of(request.computed + self.speculative.ahead(self.block_size))
        return max(ahead - request.allocated, 0)

    def slots(self, request: RequestT) -> int:
        """Tokens that a request has slots for: its own before its first step, and whole pages from then on."""
        return request.allocated * self.block_size if request.steps else request.computed

    def make_room(self, tokens: int) -> None:
        """Evict until so many tokens are free, or no more may be evicted."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------- inside

    def _allocate(self, request: RequestT, upto: int) -> None:
        """Give a request the pages of its first tokens, for which room was made."""
        raise NotImplementedError

    def _take_ahead(self, requests: Sequence[RequestT], lacking: Sequence[int]) -> None:
        """Give each request the pages that it lacks before a step with drafts, and make room as the original does."""
        size = self.block_size
        # Asked for are tokens: of a request that has made no step, those behind its last one in its last page, too.
        asked = sum(lacking) * size + sum(request.allocated * size - self.slots(request) for request in requests)
        if asked:
            self.make_room(asked + (len(requests) * size if size > 1 else 0))
        for request, own in zip(requests, lacking, strict=True):
            self._allocate(request, (request.allocated + own) * size)

    def pages_of(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.block_size)

    def _hasher_of(self, prompt: Prompt) -> tuple[SglangHasher, Namespace]:
        """What names the pages of a prompt, whose adapter is the namespace, as in SGLang; and what keeps them apart."""
        keys = prompt.keys
        if keys is None or not keys.naming:
            return self.hasher, None
        hasher = self.hasher.keyed(keys.lora_name, keys.cache_salt, is_lora=keys.lora_name is not None)
        return hasher, _namespace(keys.lora_name, keys.cache_salt)

    def _key(
        self, tokens: TokenIds | Prompt, extra_key: str | None, cache_salt: str | None
    ) -> tuple[RadixKey, Namespace]:
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

    def _stored(self, pages: Pages, new: Sequence[int], start: int, end: int) -> None:
        """Queue the Stored of the pages from `start` to `end`, whose names are `new`."""
        self._queue.stored(
            pages.names[start - 1] if start else None,
            new,
            tuple(pages.local_hashes[start:end]),
            pages.block_tokens(start, end),
            on_the_wire(pages.carried(start, end)),
        )

    def _publish(self) -> None:
        if self._queue and not self.hold_events:
            self._publish_events(self._queue.take())

    def _publish_events(self, events: list[TakenEvent]) -> None:
        for event in events:
            (data, token_ids, extra), tier = event, event.tier
            if extra is None:
                self._publisher.publish(data, token_ids, tier)
            else:
                self._publisher.publish(data, token_ids, tier, extra)
            if LOG.isEnabledFor(TRACE_LEVEL):
                trace(self, "allocation", data.block_hashes if isinstance(data, Stored) else ())
                trace(self, "eviction", data.block_hashes if isinstance(data, Removed) else ())


def on_the_wire(extra: dict[str, Any] | None) -> dict[str, Any] | None:
    """What SGLang's own events have of what a request carries: an adapter by its name alone, and no keys of single pages."""
    return extra and {name: extra[name] for name in ("lora_name", "cache_salt", "session_id") if name in extra}


def _namespace(extra_key: str | None, cache_salt: str | None) -> Namespace:
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
