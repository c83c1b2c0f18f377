"""Drives SGLang's radix cache as its scheduler does: match, lock, make room, compute, checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.cache.sglang.radix_cache import RadixCacheManager
from pytest_kvmock.engine.driver import Traits
from pytest_kvmock.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.cache.sglang.radix_request import RadixRequest


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
    prompt_keys = ("lora_name", "cache_salt", "session_id")
    """A multimodal item stands in the tokens themselves: SGLang replaces its placeholders by tokens made from its hash."""

    manager: RadixCacheManager

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        if not isinstance(manager, RadixCacheManager):
            raise ValueError(f"a RadixDriver drives a RadixCacheManager, got {manager!r:.80}")  # noqa: TRY004 - one error
        if manager.hasher.is_eagle:
            raise ValueError("a worker has no bigrams: is_eagle is for a manager that is called by hand")
        self.manager = manager
        self._prefix_caching = prefix_caching
        self._rng = rng
        self._prefilled: set[RadixRequest] = set()

    def open(self, prompt: Prompt, *, to_look: bool = False) -> RadixRequest:
        """A request that has no page yet."""
        # With names from elsewhere: whoever only looks must not change what is generated next.
        return self.manager.request(prompt, Random(0) if to_look else self._rng)  # noqa: S311 - mock data

    def lookup(self, request: RadixRequest) -> int:
        """Tokens of the request that are cached, without its last one."""
        return self.manager.lookup(request) * self.manager.block_size if self._prefix_caching else 0

    def need(self, request: RadixRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """Pages. Without any, this is the lookup of the request: recency and splits stay, as in SGLang, if it is refused."""
        if self._prefix_caching and request not in self.manager.requests:
            return self.manager.find(request)
        return -(-(upto + len(tokens)) // self.manager.block_size) - request.allocated

    def room(self) -> int:
        """Pages that no request has."""
        return self.manager.max_capacity - self.manager.num_active_blocks

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

    def _computed(self, request: RadixRequest) -> None:
        self.manager.checkpoint(request)

    def _demand(self, request: RadixRequest, upto: int) -> int:
        """Free tokens that a prefill asks for: one page too many where a page has several (`alloc_for_extend`)."""
        size = self.manager.block_size
        return upto - request.computed + (size if size > 1 else 0)

    def extend(self, request: RadixRequest, tokens: Sequence[int]) -> None:
        """Decode steps, one a token."""
        size = self.manager.block_size
        for token in tokens:
            request.append(token)
            request.computed += 1
            if request.computed > request.allocated * size:
                self.manager.allocate(request, request.computed)

    def free(self, request: RadixRequest, *, done: bool) -> None:
        """Free the pages; of a request that is done, after a last checkpoint."""
        self._prefilled.discard(request)
        if done and self._prefix_caching and request in self.manager.requests:
            self.manager.checkpoint(request)
        self.manager.release(request)

    def clear(self) -> bool:
        """Drop all that is cached."""
        return self.manager.clear()

    # ------------------------------------------------------------------------------------------- a scheduler's

    def unheld(self) -> int:
        """Tokens in pages that are free, or cached and evictable."""
        return self.manager.available_size() + self.manager.evictable_size()

    def prefill(self, request: RadixRequest, upto: int) -> int | None:
        """Compute a chunk: match, lock, make room. It enters the tree when it is done, at the end of the pass.

        SGLang matches the whole prompt before it cuts a chunk; here a chunk matches what is cached of itself.
        """
        manager, size = self.manager, self.manager.block_size
        is_first = request not in manager.requests
        if is_first:
            if self._prefix_caching:
                manager.find(request, upto)
            manager.admit(request)
        if -(-upto // size) - request.allocated > self.unheld() // size:
            if is_first:
                manager.release(request)
            return None
        before = request.computed
        if upto > before:
            manager.allocate(request, upto, self._demand(request, upto))
            request.computed = upto
        self._prefilled.add(request)
        return before

    def checkpoint(self, request: RadixRequest) -> None:
        """Checkpoint what a prefill computed; output is not cached before the request finishes."""
        if request in self._prefilled:
            self._prefilled.discard(request)
            if self._prefix_caching:
                self._computed(request)

    def step_tokens(self, requests: Sequence[RadixRequest]) -> int:
        """A page for each that needs one."""
        return sum(request.opens_page for request in requests) * self.manager.block_size

    def make_room(self, requests: Sequence[RadixRequest]) -> bool:
        """Evict until there is a page for each that needs one."""
        missing = self.step_tokens(requests) - self.manager.available_size()
        if missing > 0:
            self.manager.evict(missing)
        return missing <= 0 or self.step_tokens(requests) <= self.manager.available_size()

    def generate(self, request: RadixRequest, token: int) -> bool:
        """Compute one token; False, and nothing is computed, where it needs a page and none is free or evictable."""
        if request.opens_page and self.unheld() < self.manager.block_size:
            return False
        self.extend(request, (token,))
        return True

    def quiet_passes(self, requests: Sequence[RadixRequest]) -> int:
        """Passes in which each generates a token and none needs a page."""
        if not self._prefilled.isdisjoint(requests):
            return 0
        size = self.manager.block_size
        return min(request.allocated * size - request.computed for request in requests)

    def generate_quietly(self, request: RadixRequest, tokens: Sequence[int]) -> None:
        """Append tokens for which there are pages."""
        self.extend(request, tokens)
