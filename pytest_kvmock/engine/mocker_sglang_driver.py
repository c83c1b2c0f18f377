"""Drives the cache of Dynamo's mock of SGLang: for a worker without time, and for the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.cache.dynamo.mocker_sglang import MockerRadixManager, Semantics
from pytest_kvmock.cache.dynamo.mocker_sglang_request import PageRequest
from pytest_kvmock.engine.driver import PROMPT_KEYS, Traits
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
    prompt_keys = PROMPT_KEYS

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

    has_priorities = False

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.manager.block_size

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.manager.num_tokens

    def begin(self, semantics: Semantics) -> None:
        """Make it the cache of this release (`MockerRadixManager.follow`)."""
        self.manager.follow(semantics)

    def unheld(self) -> int:
        """Tokens that are free, or cached and evictable."""
        return self.manager.free_tokens + self.manager.evictable_tokens

    def slack(self, request: PageRequest) -> int:
        """Tokens by which its last page is accounted for, and that count as unheld."""
        return request.slack

    def matched(self, request: PageRequest) -> int:
        """Tokens of the whole request that are cached. Changes nothing."""
        return self.manager.lookup(request) * self.manager.block_size

    def prefill(self, request: PageRequest, upto: int) -> int | None:
        """Compute a chunk (`MockerRadixManager.allocate`)."""
        return self.manager.allocate(request, upto)

    def chunk_done(self, request: PageRequest) -> None:
        """Insert what is computed into the tree."""
        self.manager.checkpoint(request)

    def opens_page(self, request: PageRequest) -> bool:
        """Whether its next token needs another page."""
        return request.computed >= request.allocated * self.manager.block_size

    def step_tokens(self, requests: Sequence[PageRequest]) -> int:
        """One slot each."""
        return len(requests)

    def make_room(self, requests: Sequence[PageRequest]) -> bool:
        """Evict until there is a slot for each."""
        return self.manager.make_room(len(requests))

    def generate(self, request: PageRequest, token: int) -> bool:
        """Compute one token; False, and nothing is computed, where there is no slot and none can be made."""
        manager = self.manager
        if not manager.free_tokens and not manager.make_room(1):
            return False
        request.append(token)
        manager.extend(request, request.computed + 1)
        return True

    def token_done(self, request: PageRequest) -> None:
        """Insert a page that is complete into the tree, and with its first token the whole prompt."""
        if request.computed // self.manager.block_size > request.protected:
            self.manager.checkpoint(request)

    def finish(self, request: PageRequest) -> None:
        """Leave its whole pages in the cache, and free the rest as the original does; in 1.2.1 its copies are lost."""
        self.manager.finish(request, loses_copies=self.manager.loses_copies)

    def retract(self, request: PageRequest) -> None:
        """Free its slots as the original does, faults included (`MockerRadixManager.retract`)."""
        self.manager.retract(request)

    def quiet_passes(self, requests: Sequence[PageRequest]) -> int:
        """Passes in which each generates a token and no page is opened or filled."""
        size = self.manager.block_size
        most = self.manager.free_tokens // len(requests)
        for request in requests:
            inside = request.computed % size
            if not inside or request.computed // size > request.protected:
                return 0
            most = min(most, size - 1 - inside)
        return most

    def generate_quietly(self, request: PageRequest, tokens: Sequence[int]) -> None:
        """Append tokens that complete no page."""
        request.extend(tokens)
        self.manager.free_tokens -= len(tokens)
        request.computed += len(tokens)
