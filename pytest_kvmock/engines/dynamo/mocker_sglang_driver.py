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

    A worker has no passes, in which the original's requests enter the tree with their first token: here a request is
    checkpointed after its prefill, or each chunk, and whenever it fills a page. It matches its whole prompt, chunks or
    not, before room is made for the rest.

    Args:
        manager: the cache.
        prefix_caching: whether requests reuse and leave anything.
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
        """What it can do that not every driver can."""
        return Powers(page_bursts=self)

    # ---------------------------------------------------------------------------------------------- a worker's

    def lookup(self, request: MockerRadixRequest) -> int:
        """Tokens of the whole request that are cached, without the page of its last one."""
        return min(self.known(request), request.most_hits * self.manager.block_size)

    def need(self, request: MockerRadixRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """Pages that it lacks; for a request without any, the pages of the whole that no request has."""
        if self._prefix_caching and request not in self.manager.requests:
            return self.manager.pages_needed(request)
        return -(-(upto + len(tokens)) // self.manager.block_size) - request.allocated

    def plan(self, request: MockerRadixRequest, upto: int) -> PromptPlan:
        """The blocks that it needs, free blocks and cached ones, by look-ups that do not count as uses."""
        return PromptPlan(self.need(request, upto), self.room(), self.lookup(request))

    def admit(self, request: MockerRadixRequest, upto: int, plan: PromptPlan | None = None) -> None:  # noqa: ARG002 - it matches
        """Compute up to this token, and checkpoint."""
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
        """Decode steps, one a token."""
        for token in tokens:
            self.generate(request, token)
            self.checkpoint(request)

    def free(self, request: MockerRadixRequest, *, done: bool) -> None:
        """Free what the cache has not; of a request that is done, the cache has its whole pages by then."""
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
        """Tokens of the whole request that are cached, the page of its last one included."""
        return self.manager.lookup(request) * self.manager.block_size if self._prefix_caching else 0

    def prefill(self, request: MockerRadixRequest, upto: int) -> int | None:
        """Compute a chunk (`MockerRadixManager.allocate`)."""
        return self.manager.allocate(request, upto, caches=self._prefix_caching)

    def reserve(self, request: MockerRadixRequest, upto: int) -> int | None:
        """Lock the cached pages of the first `upto` tokens, and take pages for the rest, which no other request can
        hit.
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
        """Evict until there is a page for each that needs one."""
        return self.manager.make_room(sum(request.opens_page for request in requests))

    def burst_pages(self, requests: Sequence[MockerRadixRequest], bursts: Sequence[int]) -> int:
        """Pages that these need for `bursts` tokens, which drafts may give them in one pass."""
        size = self.manager.block_size
        each = zip(requests, bursts, strict=True)
        return sum(max(-(-(request.computed + burst) // size) - request.allocated, 0) for request, burst in each)

    def make_burst_room(self, requests: Sequence[MockerRadixRequest], bursts: Sequence[int]) -> bool:
        """Make room for `bursts` tokens of each."""
        return self.manager.make_room(self.burst_pages(requests, bursts))

    def generate(self, request: MockerRadixRequest, token: int) -> bool:
        """Compute one token; compute nothing and return False if there is no page and none can be made."""
        if not self.make_room((request,)):
            return False
        request.append(token)
        self.manager.extend(request, request.computed + 1)
        return True

    def generate_last(self, request: MockerRadixRequest, token: int) -> None:
        """Append a token that is not computed."""
        request.append(token)

    def quiet_passes(self, requests: Sequence[MockerRadixRequest]) -> int:
        """Passes in which each generates a token and no page is opened or filled."""
        size = self.manager.block_size
        inside = [request.computed % size for request in requests]
        if not all(inside) or any(each.computed // size > each.protected for each in requests if self._prefix_caching):
            return 0
        return size - 1 - max(inside)

    def generate_quietly(self, request: MockerRadixRequest, tokens: Sequence[int]) -> None:
        """Append tokens that complete no page."""
        request.extend(tokens)
        request.computed += len(tokens)
