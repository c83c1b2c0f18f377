"""The base of SGLang's caches: pages in a tree, names of pages, and published events."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pytest_kvmock.engines.base.cache_trace import TRACE_LEVEL, trace
from pytest_kvmock.engines.base.manager_base import LOG
from pytest_kvmock.engines.sglang.event_queue import EventQueue, TakenEvent
from pytest_kvmock.engines.sglang.hashes import SglangHasher
from pytest_kvmock.engines.sglang.hybrid_tree import HybridTree
from pytest_kvmock.engines.sglang.radix_manager import RadixManager, RequestT
from pytest_kvmock.engines.sglang.radix_request import RadixKey
from pytest_kvmock.engines.sglang.radix_tree import POLICIES, PROTECTED_THRESHOLD, Pages, TreeNode
from pytest_kvmock.engines.sglang.speculative import SglangSpeculative
from pytest_kvmock.values.events import Removed, StorageTier, Stored
from pytest_kvmock.values.sinks import Sink
from pytest_kvmock.values.tokens import Prompt, TokenIds

TreeT = TypeVar("TreeT", bound=HybridTree)

Namespace: TypeAlias = tuple[str | None, str | None] | None
"""Extra key and salt, which separate chains in the tree; None if there are neither."""


class MatchResult(NamedTuple):
    """The cached prefix that `match_prefix` found.

    Attributes:
        tokens: number of leading tokens that are cached, in whole pages.
        node: the node where they end, to be locked while they are used; the root if none are cached.
    """

    tokens: int
    node: TreeNode


class PageCache(RadixManager[RequestT, TreeT]):
    """Base of the managers that publish which whole pages of a tree are cached, as SGLang does. Subclasses add
    requests.

    Args:
        backend: name of the backend.
        num_blocks: capacity in pages, at least 1.
        block_size: tokens per page, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: receives the events; None: no event is published, and no event id is used.
        policy: eviction policy of leaves, one of `POLICIES`.
        protected_threshold: for "slru": number of hits from which a node is evicted after all others; None: 2.
        dynamo_kv_event_format: whether to publish names that differ between namespaces.
        speculative: the speculative decoding; None if there is none.
        hold_events: whether events wait until `take_events`.

    Raises:
        ValueError: an argument is invalid.

    Attributes:
        policy: as given.
        hasher: names the pages of requests without salt and namespace.
        hold_events: as given; may be set at any time.
        speculative: as given.
        requests: the requests with pages, in order of admission.
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
        self._flush()

    _may_have_pairs = True
    """Whether keys are pairs if there is a draft model."""

    def _new_tree(self, policy: str, protected_threshold: int) -> TreeT:
        """Make the tree; the constructor calls this once."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------- queries

    def available_size(self) -> int:
        """Count the tokens in free pages."""
        return self._free * self.block_size

    def evictable_size(self) -> int:
        """Count the tokens in cached pages that are not locked."""
        return self._tree.evictable * self.block_size

    def protected_size(self) -> int:
        """Count the tokens in cached pages that are locked."""
        return self._tree.protected * self.block_size

    @property
    def num_active_blocks(self) -> int:
        """Pages in use: locked pages in the tree, and pages of requests outside of it."""
        return self.num_blocks - self._free - self._tree.evictable

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Return the names of the pages that are cached in a tier; a name that two namespaces share appears twice."""
        if tier != StorageTier.DEVICE:
            return []
        return [name for node in self._tree.nodes() for name in node.names]

    def match_prefix(
        self, tokens: TokenIds | Prompt, *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> MatchResult:
        """Find the longest cached prefix, and count it as used now. A node that is matched in part is split.

        Args:
            tokens: token ids, or a prompt; only whole pages are looked up.
            extra_key: the namespace.
            cache_salt: the salt, a namespace that also changes the names of pages.

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
            ValueError: requests have pages, which would be missing in the emptied tree.
        """
        if self.requests:
            raise ValueError(f"reset: {len(self.requests)} requests have pages; release them first")
        self._tree.reset()
        self._free = self.num_blocks
        self._queue.cleared()
        self._flush()

    def clear(self) -> bool:
        """Reset the cache; do nothing and return False while any page is in use (`flush_cache`)."""
        if self.is_in_use:
            return False
        self.reset()
        return True

    def take_events(self) -> list[TakenEvent]:
        """Publish the waiting events, and return them."""
        taken = self._queue.take()
        self._publish_events(taken)
        self._publisher.surface()
        return taken

    # --------------------------------------------------------------------------------------------- requests

    def request(self, prompt: Prompt, rng: Random) -> RequestT:
        """Make a request without pages.

        Args:
            prompt: the prompt; its adapter is the namespace, as in SGLang.
            rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

        Raises:
            ValueError: the prompt is empty, or its hashes do not fit the page size.
        """
        raise NotImplementedError

    def lookup(self, request: RequestT) -> int:
        """Count the cached pages of a request, without its last token. Changes nothing."""
        raise NotImplementedError

    def pages_ahead(self, request: RequestT) -> int:
        """Count the pages that a request lacks for its committed tokens and the drafts of two steps."""
        assert self.speculative is not None
        ahead = self.pages_of(request.computed + self.speculative.ahead(self.block_size))
        return max(ahead - request.allocated, 0)

    def slots(self, request: RequestT) -> int:
        """Count the token slots of a request: one per computed token before its first step, then whole pages."""
        return request.allocated * self.block_size if request.steps else request.computed

    def make_room(self, tokens: int) -> None:
        """Evict until `tokens` tokens are free, or nothing more can be evicted."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------- inside

    def _allocate(self, request: RequestT, upto: int) -> None:
        """Give a request pages for its first tokens; the caller has made room."""
        raise NotImplementedError

    def _take_ahead(self, requests: Sequence[RequestT], lacking: Sequence[int]) -> None:
        """Make room as SGLang does, and give each request the pages that it lacks before a step with drafts."""
        size = self.block_size
        # The room is in tokens: for a request without a step it includes the unused tokens of its last page.
        asked = sum(lacking) * size + sum(request.allocated * size - self.slots(request) for request in requests)
        if asked:
            self.make_room(asked + (len(requests) * size if size > 1 else 0))
        for request, own in zip(requests, lacking, strict=True):
            self._allocate(request, (request.allocated + own) * size)

    def pages_of(self, tokens: int) -> int:
        """Count the pages that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def _hasher_of(self, prompt: Prompt) -> tuple[SglangHasher, Namespace]:
        """Return the hasher of a prompt's pages, and the namespace of their chain.

        An adapter is a namespace, as in SGLang.
        """
        keys = prompt.keys
        if keys is None or not keys.naming:
            return self.hasher, None
        hasher = self.hasher.keyed(keys.lora_name, keys.cache_salt, is_lora=keys.lora_name is not None)
        # Each load of an adapter is a separate namespace, though names and events only have the adapter's name.
        load = f"\0{keys.lora_path}" if keys.lora_path else ""
        return hasher, _namespace(keys.lora_name and keys.lora_name + load, keys.cache_salt)

    def _key(
        self, tokens: TokenIds | Prompt, extra_key: str | None, cache_salt: str | None
    ) -> tuple[RadixKey, Namespace]:
        """Return the pages of a call by hand, and their namespace. A prompt's keys are the arguments' defaults."""
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

    def _flush(self) -> None:
        """Publish the queued events at the end of a call."""
        self._publish()
        self._publisher.surface()

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
    """Return the properties of a request that SGLang's events name: adapter, salt and session, but no keys of pages."""
    return extra and {name: extra[name] for name in ("lora_name", "cache_salt", "session_id") if name in extra}


def _namespace(extra_key: str | None, cache_salt: str | None) -> Namespace:
    return None if extra_key is None and cache_salt is None else (extra_key, cache_salt)


def _checked_policy(policy: str) -> str:
    if not isinstance(policy, str) or policy not in POLICIES:
        # tlru is missing: it needs data that only the unified tree keeps, and with RadixCache SGLang fails at its first
        # eviction.
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
