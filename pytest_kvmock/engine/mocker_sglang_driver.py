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
        prefix_caching: whether requests reuse and leave anything. With a scheduler they do all the same, as the original's.
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

    def open(self, prompt: Prompt, *, to_look: bool = False) -> PageRequest:
        """A request that has no slot yet."""
        # With names from elsewhere: whoever only looks must not change what is generated next.
        return PageRequest(prompt, self.manager.block_size, Random(0) if to_look else self._rng)  # noqa: S311 - mock data

    def lookup(self, request: PageRequest) -> int:
        """Tokens of the whole request that are cached."""
        return self.manager.lookup(request) * self.manager.block_size if self._prefix_caching else 0

    def need(self, request: PageRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """Pages, by which requests are accounted for."""
        if self._prefix_caching and request not in self.manager.requests:
            return self.manager.pages_needed(request)
        return -(-(upto + len(tokens)) // self.manager.block_size) - request.allocated

    def room(self) -> int:
        """Pages that no request has."""
        return self.manager.unused_pages()

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
            manager.checkpoint(request)

    def extend(self, request: PageRequest, tokens: Sequence[int]) -> None:
        """Decode steps, one a token."""
        for token in tokens:
            self.generate(request, token)
            if self._prefix_caching:
                self.manager.checkpoint(request)

    def free(self, request: PageRequest, *, done: bool) -> None:
        """Free what the cache has not; of a request that is done, the cache has its whole pages by then."""
        if done and self._prefix_caching:
            self.manager.finish(request)
        else:
            self.manager.release(request)

    def clear(self) -> bool:
        """Drop all that is cached."""
        return self.manager.clear()

    # ------------------------------------------------------------------------------------------- a scheduler's

    has_priorities = False

    def begin(self, semantics: Semantics) -> None:
        """Make it the cache of this release (`MockerRadixManager.follow`), whose requests always reuse."""
        self.manager.follow(semantics)
        self._prefix_caching = True

    def unheld(self) -> int:
        """Tokens that are free, or cached and evictable."""
        return self.manager.free_tokens + self.manager.evictable_tokens

    def prefill(self, request: PageRequest, upto: int) -> int | None:
        """Compute a chunk (`MockerRadixManager.allocate`)."""
        return self.manager.allocate(request, upto)

    def checkpoint(self, request: PageRequest) -> None:
        """Insert pages that are complete into the tree; with the first token that is the whole prompt."""
        if request.computed // self.manager.block_size > request.protected:
            self.manager.checkpoint(request)

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
