"""Drives the cache of Dynamo's mock of SGLang: for a worker without time, and for the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.cache.dynamo.mocker_sglang import MockerRadixManager, Semantics, check_semantics
from pytest_kvmock.cache.dynamo.mocker_sglang_request import PageRequest
from pytest_kvmock.engine.driver import Traits
from pytest_kvmock.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager


class MockerRadixDriver:
    """Serves requests from a `MockerRadixManager`.

    A worker has no passes, in which the original's requests enter the tree with their first token: here a request is
    checkpointed after its prefill, or each chunk, and whenever it fills a page. It matches its whole prompt, chunks or
    not, before room is made for the rest. Nothing is freed twice or lost, which the original's scheduler does (`finish`
    and `retract`, a scheduler's).

    Args:
        manager: the cache.
        prefix_caching: whether a worker's requests reuse and leave anything. A scheduler ignores it, as the original does.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

    Raises:
        ValueError: the manager is no such cache.
    """

    traits = Traits(stores_when="full", removed_first=True)

    manager: MockerRadixManager

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        if not isinstance(manager, MockerRadixManager):
            raise ValueError(f"a MockerRadixDriver drives a MockerRadixManager, got {manager!r:.80}")  # noqa: TRY004 - one error
        self.manager = manager
        self._prefix_caching = prefix_caching
        self._rng = rng

    # ---------------------------------------------------------------------------------------------- a worker's

    def lookup(self, prompt: Prompt) -> int:
        """Tokens of the prompt that are cached."""
        if not self._prefix_caching:
            return 0
        # With names from elsewhere: whoever only looks must not change what is generated next.
        return self.matched(PageRequest(prompt, self.manager.block_size, Random(0)))  # noqa: S311 - mock data

    def open(self, prompt: Prompt) -> PageRequest:
        """A request that has no slot yet."""
        return PageRequest(prompt, self.manager.block_size, self._rng)

    def blocks_needed(self, request: PageRequest) -> tuple[int, int]:
        """(needed, free), in pages, by which requests are accounted for. Changes nothing."""
        if self._prefix_caching:
            return self.manager.pages_needed(request), self.manager.unused_pages()
        return -(-len(request) // self.manager.block_size), self.manager.unused_pages()

    def cached(self, request: PageRequest) -> int:
        """Tokens of its prompt that are cached now."""
        return min(self.matched(request), request.tokens.num_prompt_tokens) if self._prefix_caching else 0

    def admit(self, request: PageRequest, upto: int) -> None:
        """Compute up to this token, and checkpoint."""
        manager = self.manager
        before = request.computed
        if request not in manager.requests:
            before = manager.match(request, len(request.tokens.names) if self._prefix_caching else 0)
        if upto <= before:
            return
        manager.make_room(upto - before)
        manager.extend(request, upto)
        if self._prefix_caching:
            manager.publish_pages(request, before)
            manager.checkpoint(request)

    def plan(self, request: PageRequest, tokens: Sequence[int]) -> tuple[int, int]:
        """(needed, free): pages that the steps open, and how many no request has."""
        pages = -(-(len(request) + len(tokens)) // self.manager.block_size)
        return pages - request.allocated, self.manager.unused_pages()

    def extend(self, request: PageRequest, tokens: Sequence[int]) -> None:
        """Decode steps, one a token."""
        for token in tokens:
            self.generate(request, token)
            if self._prefix_caching:
                self.manager.checkpoint(request)

    def release(self, request: PageRequest) -> None:
        """Leave the whole pages in the cache, and free the rest."""
        if self._prefix_caching:
            self.manager.finish(request)
        else:
            self.manager.release(request)

    def preempt(self, request: PageRequest) -> None:
        """Free what the cache has not."""
        self.manager.release(request)

    def clear(self) -> bool:
        """Drop all that is cached."""
        return self.manager.clear()

    # ------------------------------------------------------------------------------------------- a scheduler's

    @property
    def semantics(self) -> Semantics:
        """The version of dynamo-mocker whose cache this is."""
        return self.manager.semantics

    def begin(self, semantics: str) -> None:
        """Make it the cache of this version, before it has anything."""
        self.manager.semantics = check_semantics(semantics)

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.manager.block_size

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.manager.num_tokens

    def unheld(self) -> int:
        """Tokens that are free, or cached and evictable."""
        return self.manager.free_tokens + self.manager.evictable_tokens

    def matched(self, request: PageRequest) -> int:
        """Tokens of the whole request that are cached. Changes nothing."""
        return self.manager.lookup(request) * self.manager.block_size

    def slack(self, request: PageRequest) -> int:
        """Tokens by which its last page is accounted for, and that count as unheld."""
        return request.slack

    def opens_page(self, request: PageRequest) -> bool:
        """Whether its next token needs another page."""
        return len(request) >= request.allocated * self.manager.block_size

    def prefill(self, request: PageRequest, upto: int) -> int | None:
        """Compute a chunk (`MockerRadixManager.allocate`)."""
        return self.manager.allocate(request, upto)

    def checkpoint(self, request: PageRequest) -> None:
        """Insert what is computed into the tree."""
        self.manager.checkpoint(request)

    def make_room(self, requests: Sequence[PageRequest]) -> bool:
        """Evict until each of these has room for a token; False if not all have, with all evicted that may be."""
        return self.manager.make_room(len(requests))

    def generate(self, request: PageRequest, token: int) -> bool:
        """Compute one token; False, and nothing is computed, where there is no room and none can be made."""
        if not self.manager.make_room(1):
            return False
        request.append(token)
        self.manager.extend(request, len(request))
        return True

    def finish(self, request: PageRequest) -> None:
        """Leave its whole pages in the cache, and free the rest as the original does; in 1.2.1 its copies are lost."""
        self.manager.finish(request, loses_copies=self.manager.semantics == "1.2.1")

    def retract(self, request: PageRequest) -> None:
        """Free its slots as the original does, faults included (`MockerRadixManager.retract`)."""
        self.manager.retract(request)
