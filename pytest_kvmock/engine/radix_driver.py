"""Drives SGLang's radix cache as its scheduler does: match, lock, make room, compute, checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.cache.hashed import HashedTokens
from pytest_kvmock.cache.sglang.radix_cache import RadixCacheManager
from pytest_kvmock.cache.sglang.radix_request import RadixRequest
from pytest_kvmock.engine.driver import Traits
from pytest_kvmock.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager


class RadixDriver:
    """Serves requests from a `RadixCacheManager`.

    A request is checkpointed after its prefill and when it finishes; what it decodes is published then. In chunks, it
    is checkpointed after each (`chunked_req` of SGLang's scheduler): a chunk becomes a node of its own, evicted by
    itself. SGLang cuts chunks to whole pages; here they are as long as in the profile, and whole pages are published.
    A preempted request leaves in the cache what was checkpointed; the rest is freed unpublished.

    Args:
        manager: the cache.
        prefix_caching: whether requests reuse and leave anything; without it, each has pages of its own.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

    Raises:
        ValueError: the manager is no such cache, or one of bigrams.
    """

    traits = Traits(recomputes_last_token=True, stores_when="finish", removed_first=True, cleared_first=True)

    manager: RadixCacheManager

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        if not isinstance(manager, RadixCacheManager):
            raise ValueError(f"a RadixDriver drives a RadixCacheManager, got {manager!r:.80}")  # noqa: TRY004 - one error
        if manager.hasher.is_eagle:
            raise ValueError("a worker has no bigrams: is_eagle is for a manager that is called by hand")
        self.manager = manager
        self._prefix_caching = prefix_caching
        self._rng = rng

    def _request(self, prompt: Prompt, rng: Random) -> RadixRequest:
        return RadixRequest(HashedTokens(prompt, self.manager.block_size, self.manager.hasher, rng), rng)

    def lookup(self, prompt: Prompt) -> int:
        """Tokens of the prompt that are cached; its last one never counts."""
        # With names from elsewhere: whoever only looks must not change what is generated next.
        request = self._request(prompt, Random(0))  # noqa: S311 - mock data
        return self.manager.lookup(request) * self.manager.block_size if self._prefix_caching else 0

    def open(self, prompt: Prompt) -> RadixRequest:
        """A request that has no page yet."""
        return self._request(prompt, self._rng)

    def blocks_needed(self, request: RadixRequest) -> tuple[int, int]:
        """(needed, free). This is the lookup of the request: recency and splits stay, as in SGLang, if it is refused."""
        if self._prefix_caching:
            return self.manager.find(request)
        return -(-len(request) // self.manager.block_size), self._free()

    def _free(self) -> int:
        return self.manager.max_capacity - self.manager.num_active_blocks

    def cached(self, request: RadixRequest) -> int:
        """Tokens of its prompt that the lookup found."""
        return min(request.found * self.manager.block_size, request.tokens.num_prompt_tokens)

    def admit(self, request: RadixRequest, upto: int) -> None:
        """Compute up to this token, and checkpoint."""
        manager = self.manager
        if request not in manager.requests:
            manager.admit(request)
        if upto <= request.computed:
            return
        manager.allocate(request, upto, self._demand(request, upto))
        request.computed = upto
        if self._prefix_caching:
            self._computed(request)

    def _demand(self, request: RadixRequest, upto: int) -> int:
        """Free tokens that a prefill asks for: one page too many where a page has several (`alloc_for_extend`)."""
        size = self.manager.block_size
        return upto - request.computed + (size if size > 1 else 0)

    def _computed(self, request: RadixRequest) -> None:
        self.manager.checkpoint(request)

    def plan(self, request: RadixRequest, tokens: Sequence[int]) -> tuple[int, int]:
        """(needed, free): pages that the steps open, and how many no request has."""
        return -(-(len(request) + len(tokens)) // self.manager.block_size) - request.allocated, self._free()

    def extend(self, request: RadixRequest, tokens: Sequence[int]) -> None:
        """Decode steps, one a token."""
        size = self.manager.block_size
        for token in tokens:
            request.append(token)
            request.computed += 1
            if request.computed > request.allocated * size:
                self.manager.allocate(request, request.computed)

    def release(self, request: RadixRequest) -> None:
        """Checkpoint for the last time, and free the pages."""
        if self._prefix_caching and request in self.manager.requests:
            self.manager.checkpoint(request)
        self.manager.release(request)

    def preempt(self, request: RadixRequest) -> None:
        """Free the pages without a checkpoint."""
        self.manager.release(request)

    def clear(self) -> bool:
        """Drop all that is cached."""
        return self.manager.clear()
