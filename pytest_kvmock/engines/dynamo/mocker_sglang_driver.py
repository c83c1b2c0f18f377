"""Drives the cache of Dynamo's mock of SGLang: for a worker without time, and for the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.engines.base.driver import PROMPT_KEYS, Powers, PromptPlan, Traits, checked_manager
from pytest_kvmock.engines.base.tree_driver import TreeDriver
from pytest_kvmock.engines.dynamo.mocker_sglang import MockerRadixManager

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.dynamo.mocker_sglang_request import MockerRadixRequest


class MockerRadixDriver(TreeDriver):
    """Serves requests from a `MockerRadixManager`.

    In the original, requests enter the tree with their first token, in a pass. A worker has no passes: here a request
    is checkpointed after its prefill, after each chunk, and whenever it fills a page. With or without chunks, it
    matches its whole prompt before room is made for the rest.

    Args:
        manager: the cache.
        prefix_caching: whether requests reuse cached pages and leave pages in the cache.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

    Raises:
        ValueError: the manager is not a cache of Dynamo's mock of SGLang.
    """

    traits = Traits(recomputes_last_token=True, stores_when="full", removed_first=True)
    prompt_keys = PROMPT_KEYS

    manager: MockerRadixManager

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        super().__init__(checked_manager(manager, MockerRadixManager, "MockerRadixDriver"), prefix_caching, rng)

    @property
    def powers(self) -> Powers:
        """Capabilities that not every driver has."""
        return Powers(page_bursts=self)

    # ---------------------------------------------------------------------------------------------- a worker's

    def lookup(self, request: MockerRadixRequest) -> int:
        """Count the cached tokens of the whole request, without the page of its last token."""
        return min(self.known(request), request.most_hits * self.manager.block_size)

    def need(self, request: MockerRadixRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """Count the pages that it lacks; for a request without pages, all its pages that no request has locked."""
        if self._prefix_caching and request not in self.manager.requests:
            return self.manager.pages_needed(request)
        return -(-(upto + len(tokens)) // self.manager.block_size) - request.allocated

    def plan(self, request: MockerRadixRequest, upto: int) -> PromptPlan:
        """Return the blocks that it needs, the free blocks and the cached tokens; the look-ups do not count as uses."""
        return PromptPlan(self.need(request, upto), self.room(), self.lookup(request))

    def admit(self, request: MockerRadixRequest, upto: int, plan: PromptPlan | None = None) -> None:  # noqa: ARG002 - it matches
        """Compute the first `upto` tokens, and checkpoint."""
        manager = self.manager
        before = request.computed
        if request not in manager.requests:
            before = manager.match(request, len(request.tokens.names) if self._prefix_caching else 0)
        if upto <= before:
            return
        manager.make_room(manager.pages_missing(request, upto))
        manager.extend(request, upto)
        self.checkpoint(request)

    def extend(self, request: MockerRadixRequest, tokens: Sequence[int]) -> None:
        """Decode, one step a token."""
        for token in tokens:
            self.generate(request, token)
            self.checkpoint(request)

    def free(self, request: MockerRadixRequest, *, done: bool) -> None:
        """Free the pages that are not in the cache; a request that is done first inserts its whole pages."""
        if done and self._prefix_caching:
            self.manager.finish(request)
        else:
            self.manager.release(request)
        if done:
            request.tokens.release()

    # ------------------------------------------------------------------------------------------- a scheduler's

    def needs_no_output(self, request: MockerRadixRequest) -> None:
        """Let all of its prompt be cached."""
        request.computes_last_token = False

    def known(self, request: MockerRadixRequest) -> int:
        """Count the cached tokens of the whole request, with the page of its last token."""
        return self.manager.lookup(request) * self.manager.block_size if self._prefix_caching else 0

    def prefill(self, request: MockerRadixRequest, upto: int) -> int | None:
        """Compute a chunk (`MockerRadixManager.allocate`)."""
        return self.manager.allocate(request, upto, caches=self._prefix_caching)

    def reserve(self, request: MockerRadixRequest, upto: int) -> int | None:
        """Lock the cached pages of the first `upto` tokens, and take pages for the rest; no other request can hit these
        yet.
        """
        return self.manager.reserve(request, upto, caches=self._prefix_caching)

    def claim(self, request: MockerRadixRequest, upto: int) -> None:
        """Complete the pages that were reserved, and insert them."""
        self.manager.extend(request, upto)
        self.checkpoint(request)

    def checkpoint(self, request: MockerRadixRequest) -> None:
        """Insert pages that are complete into the tree."""
        if self._prefix_caching and request.computed // self.manager.block_size > request.protected:
            self.manager.checkpoint(request)

    def make_room(self, requests: Sequence[MockerRadixRequest]) -> bool:
        """Evict until there is a page for each request that needs one."""
        return self.manager.make_room(sum(request.opens_page for request in requests))

    def burst_pages(self, requests: Sequence[MockerRadixRequest], bursts: Sequence[int]) -> int:
        """Count the pages that requests need for `bursts` tokens each, the most that drafts may add in one pass."""
        size = self.manager.block_size
        each = zip(requests, bursts, strict=True)
        return sum(max(-(-(request.computed + burst) // size) - request.allocated, 0) for request, burst in each)

    def make_burst_room(self, requests: Sequence[MockerRadixRequest], bursts: Sequence[int]) -> bool:
        """Make room for `bursts` tokens of each request."""
        return self.manager.make_room(self.burst_pages(requests, bursts))

    def generate(self, request: MockerRadixRequest, token: int) -> bool:
        """Compute one token; return False, with nothing computed, if a page is needed and none can be freed."""
        if not self.make_room((request,)):
            return False
        request.append(token)
        self.manager.extend(request, request.computed + 1)
        return True

    def generate_last(self, request: MockerRadixRequest, token: int) -> None:
        """Append a token that is not computed."""
        request.append(token)

    def quiet_passes(self, requests: Sequence[MockerRadixRequest]) -> int:
        """Count the next passes in which each request generates a token and no page is opened or filled."""
        size = self.manager.block_size
        inside = [request.computed % size for request in requests]
        if not all(inside) or any(each.computed // size > each.protected for each in requests if self._prefix_caching):
            return 0
        return size - 1 - max(inside)

    def generate_quietly(self, request: MockerRadixRequest, tokens: Sequence[int]) -> None:
        """Append tokens that complete no page."""
        request.extend(tokens)
        request.computed += len(tokens)
