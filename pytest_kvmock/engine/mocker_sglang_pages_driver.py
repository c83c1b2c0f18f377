"""Drives the cache of Dynamo's mock of SGLang since 1.6: for a worker without time, and for the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.cache.dynamo.mocker_sglang_pages import PagedRadixManager, PagedRequest
from pytest_kvmock.engine.driver import Traits
from pytest_kvmock.engine.mocker_sglang_driver import MockerRadixDriver

if TYPE_CHECKING:
    from pytest_kvmock.cache.dynamo.mocker_sglang_request import PageRequest
    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.tokens import Prompt


class PagedRadixDriver(MockerRadixDriver):
    """Serves requests from a `PagedRadixManager`; a worker's are checkpointed as `MockerRadixDriver` does it.

    Args:
        manager: the cache.
        prefix_caching: whether requests reuse and leave anything.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

    Raises:
        ValueError: the manager is no such cache.
    """

    traits = Traits(recomputes_last_token=True, stores_when="full", removed_first=True)

    manager: PagedRadixManager

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        if not isinstance(manager, PagedRadixManager):
            raise ValueError(f"a PagedRadixDriver drives a PagedRadixManager, got {manager!r:.80}")  # noqa: TRY004 - one error
        super().__init__(manager, prefix_caching, rng)

    def open(self, prompt: Prompt, *, to_look: bool = False) -> PagedRequest:
        """A request that has no page yet."""
        # With names from elsewhere: whoever only looks must not change what is generated next.
        return PagedRequest(prompt, self.manager.block_size, Random(0) if to_look else self._rng)  # noqa: S311 - mock data

    def lookup(self, request: PageRequest) -> int:
        """Tokens of the whole request that are cached, without the page of its last one."""
        assert isinstance(request, PagedRequest)
        return min(super().lookup(request), request.most_hits * self.manager.block_size)

    # ------------------------------------------------------------------------------------------- a scheduler's

    def begin(self, semantics: str) -> None:
        """Check that the scheduler follows the release whose cache this is."""
        self.manager.follow(semantics)

    def needs_no_output(self, request: PagedRequest) -> None:
        """Let all of its prompt be cached."""
        request.computes_last_token = False

    def known(self, request: PagedRequest) -> int:
        """Tokens of the whole request that are cached, the page of its last one included."""
        return super().lookup(request)

    def prefill(self, request: PageRequest, upto: int) -> int | None:
        """Compute a chunk (`PagedRadixManager.allocate`)."""
        return self.manager.allocate(request, upto, caches=self._prefix_caching)

    def reserve(self, request: PageRequest, upto: int) -> int | None:
        """Lock what is cached of the first `upto` tokens, and take pages for the rest, which nobody else can hit."""
        return self.manager.reserve(request, upto, caches=self._prefix_caching)

    def claim(self, request: PageRequest, upto: int) -> None:
        """Complete the pages that were reserved, and insert them."""
        self.manager.extend(request, upto)
        self.checkpoint(request)

    def checkpoint(self, request: PageRequest) -> None:
        """Insert pages that are complete into the tree."""
        if self._prefix_caching:
            super().checkpoint(request)

    def step_tokens(self, requests: Sequence[PageRequest]) -> int:
        """A page for each that needs one."""
        return sum(request.opens_page for request in requests) * self.manager.block_size

    def make_room(self, requests: Sequence[PageRequest]) -> bool:
        """Evict until there is a page for each that needs one."""
        return self.manager.make_room(self.step_tokens(requests))

    def generate(self, request: PageRequest, token: int) -> bool:
        """Compute one token; False, and nothing is computed, where there is no page and none can be made."""
        if not self.make_room((request,)):
            return False
        request.append(token)
        self.manager.extend(request, request.computed + 1)
        return True

    def generate_last(self, request: PagedRequest, token: int) -> None:
        """Append a token that is not computed."""
        request.append(token)

    def finish(self, request: PageRequest) -> None:
        """Leave its whole pages in the cache, and free the rest."""
        self.free(request, done=True)

    def quiet_passes(self, requests: Sequence[PageRequest]) -> int:
        """Passes in which each generates a token and no page is opened or filled."""
        size = self.manager.block_size
        inside = [request.computed % size for request in requests]
        if not all(inside) or any(each.computed // size > each.protected for each in requests if self._prefix_caching):
            return 0
        return size - 1 - max(inside)

    def generate_quietly(self, request: PageRequest, tokens: Sequence[int]) -> None:
        """Append tokens that complete no page."""
        request.extend(tokens)
        request.computed += len(tokens)
