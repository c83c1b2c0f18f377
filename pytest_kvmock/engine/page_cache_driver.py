"""What the drivers of SGLang's caches share: how requests are opened and looked up, and when they are checkpointed."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pytest_kvmock.cache.sglang.page_cache import PageCache
from pytest_kvmock.cache.sglang.radix_request import RadixRequest
from pytest_kvmock.engine.driver import Traits

if TYPE_CHECKING:
    from pytest_kvmock.tokens import Prompt

CacheT = TypeVar("CacheT", bound=PageCache[Any, Any])
RequestT = TypeVar("RequestT", bound=RadixRequest)


class PageCacheDriver(Generic[CacheT, RequestT]):
    """Base of the drivers of a `PageCache`; a subclass admits, allocates and frees.

    Args:
        manager: the cache.
        prefix_caching: whether requests reuse and leave anything; without it, each has pages of its own.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

    Raises:
        ValueError: the cache is one of bigrams.
    """

    traits = Traits(recomputes_last_token=True, stores_when="finish", removed_first=True, cleared_first=True)
    prompt_keys = ("lora_name", "cache_salt", "session_id")
    """A multimodal item stands in the tokens themselves: SGLang replaces its placeholders by tokens made from its hash."""

    has_priorities = True

    manager: CacheT

    def __init__(self, manager: CacheT, prefix_caching: bool, rng: Random) -> None:
        if manager.hasher.is_eagle:
            raise ValueError("a worker has no bigrams: is_eagle is for a manager that is called by hand")
        self.manager = manager
        self._prefix_caching = prefix_caching
        self._rng = rng
        self._prefilled: set[RequestT] = set()

    def open(self, prompt: Prompt, *, to_look: bool = False) -> RequestT:
        """A request that has no page yet."""
        # With names from elsewhere: whoever only looks must not change what is generated next.
        request: RequestT = self.manager.request(prompt, Random(0) if to_look else self._rng)  # noqa: S311 - mock data
        return request

    def lookup(self, request: RequestT) -> int:
        """Tokens of the request that are cached and can be used, without its last one."""
        return self.manager.lookup(request) * self.manager.block_size if self._prefix_caching else 0

    def room(self) -> int:
        """Pages that no request has."""
        return self.manager.max_capacity - self.manager.num_active_blocks

    def clear(self) -> bool:
        """Drop all that is cached."""
        return self.manager.clear()

    def unheld(self) -> int:
        """Tokens in pages that are free, or cached and evictable."""
        return self.manager.available_size() + self.manager.evictable_size()

    def free(self, request: RequestT, *, done: bool) -> None:
        """Free the pages; of a request that is done, after a last checkpoint."""
        raise NotImplementedError

    def finish(self, request: RequestT) -> None:
        """Checkpoint for the last time, and free the pages."""
        self.free(request, done=True)

    def retract(self, request: RequestT) -> None:
        """Free the pages without a checkpoint."""
        self.free(request, done=False)

    def checkpoint(self, request: RequestT) -> None:
        """Checkpoint what a prefill computed; output is not cached before the request finishes."""
        if request in self._prefilled:
            self._prefilled.discard(request)
            self._computed(request)

    def _computed(self, request: RequestT) -> None:
        """Cache what was computed of a request that goes on, where requests leave anything."""
        raise NotImplementedError
