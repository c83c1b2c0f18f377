"""Driver of SGLang's radix cache, in the steps of its scheduler: match, lock, make room, compute, checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.engines.base.driver import checked_manager
from pytest_kvmock.engines.base.tree_driver import TreeDriver
from pytest_kvmock.engines.sglang.radix_cache import RadixCacheManager
from pytest_kvmock.engines.sglang.radix_request import RadixRequest

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.manager import KvManager


class RadixDriver(TreeDriver):
    """Serves requests from a `RadixCacheManager`.

    A request is checkpointed after its prefill and when it finishes, which publishes its output. A chunked prefill is
    checkpointed after each chunk (`chunked_req` of SGLang's scheduler): each chunk becomes a node, which is evicted
    separately. SGLang cuts chunks to whole pages; here they have the length of the profile, and only whole pages are
    published. Checkpointed pages of a preempted request stay in the cache; the rest is freed unpublished.

    Args:
        manager: the cache.
        prefix_caching: whether requests reuse and leave anything; without it, requests share no pages.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

    Raises:
        ValueError: the manager is not a `RadixCacheManager`, or has speculative decoding.
    """

    manager: RadixCacheManager

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        super().__init__(checked_manager(manager, RadixCacheManager, "RadixDriver"), prefix_caching, rng)
        if self.manager.speculative is not None:
            raise ValueError(
                "a RadixDriver does not drive a RadixCacheManager with speculative, which is for calls by hand"
            )

    def need(self, request: RadixRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """Return the pages that a request needs. For a request without pages this is its lookup: recency and splits
        stay, as in SGLang, even if the request is refused.
        """
        if self._prefix_caching and request not in self.manager.requests:
            return self.manager.find(request)
        return -(-(upto + len(tokens)) // self.manager.block_size) - request.allocated

    def _start(self, request: RadixRequest, upto: int) -> bool:
        if self._prefix_caching:
            self.manager.find(request, upto)
        self.manager.admit(request)
        return True

    def _fits(self, request: RadixRequest, upto: int) -> bool:
        return -(-upto // self.manager.block_size) - request.allocated <= self.room()

    def _withdraw(self, request: RadixRequest) -> None:
        self.manager.release(request)

    def _compute(self, request: RadixRequest, upto: int) -> None:
        self.manager.allocate(request, upto, self._demand(request, upto))
        request.computed = upto

    def _computed(self, request: RadixRequest) -> None:
        if self._prefix_caching:
            self.manager.checkpoint(request)

    def _demand(self, request: RadixRequest, upto: int) -> int:
        """Free tokens that a prefill asks for: one page too many if a page has several tokens (`alloc_for_extend`)."""
        size = self.manager.block_size
        return upto - request.computed + (size if size > 1 else 0)

    def _step_demand(self) -> int:
        """Free tokens that a decode step asks for per request, even for requests that need no page.

        SGLang does so if a page has several tokens (`alloc_paged_token_slots_decode`); with one token per page, each
        request needs one. In the recordings a driver asks only for the pages that are needed, so they do not show this.
        """
        return self.manager.block_size

    def extend(self, request: RadixRequest, tokens: Sequence[int]) -> None:
        """Decode one token per step."""
        manager, demand = self.manager, self._step_demand()
        size = manager.block_size
        for token in tokens:
            request.append(token)
            request.computed += 1
            if request.computed > request.allocated * size or manager.available_size() < demand:
                manager.allocate(request, request.computed, demand)

    def free(self, request: RadixRequest, *, done: bool) -> None:
        """Free the pages of a request; if it is done, checkpoint it first."""
        self._prefilled.discard(request)
        if done and self._prefix_caching and request in self.manager.requests:
            self.manager.checkpoint(request)
        self.manager.release(request)
        if done:
            request.tokens.release()

    # ------------------------------------------------------------------------------------------- a scheduler's

    def make_room(self, requests: Sequence[RadixRequest]) -> bool:
        """Evict until there is a page for each request that needs one."""
        manager, needed = self.manager, self.step_tokens(requests)
        for tokens in (
            needed,
            len(requests) * self._step_demand(),
        ):  # first the pages that the step needs, then the room that SGLang asks for
            missing = tokens - manager.available_size()
            if missing > 0:
                manager.evict(missing)
            if needed > manager.available_size():
                return False
        return True

    def generate(self, request: RadixRequest, token: int) -> bool:
        """Compute one token; compute nothing and return False if it needs a page and none is free or evictable."""
        if request.opens_page:
            if self.unheld() < self.manager.block_size:
                return False
            self.manager.allocate(request, request.computed + 1)
        self.generate_quietly(request, (token,))
        return True

    def quiet_passes(self, requests: Sequence[RadixRequest]) -> int:
        """Count the next passes in which each request generates a token, none needs a page, and no unneeded room is
        evicted.
        """
        manager = self.manager
        evicts = manager.available_size() < len(requests) * self._step_demand() and manager.evictable_size() > 0
        if evicts or not self._prefilled.isdisjoint(requests):
            return 0
        return min(request.allocated * manager.block_size - request.computed for request in requests)
