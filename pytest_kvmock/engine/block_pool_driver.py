"""Drives vLLM's block manager, as its scheduler does: look up once, then allocate step by step."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.engine.traits import Traits

if TYPE_CHECKING:
    from pytest_kvmock.cache.block_pool import BlockPoolManager, PoolRequest
    from pytest_kvmock.moves import Block
    from pytest_kvmock.tokens import Prompt


class _PooledRequest:
    """A request as the worker knows it, and what was found for it last.

    Attributes:
        request: the pool's.
        hits: the cached blocks that it could start with.
        seen: `BlockPoolManager.changes` when they were looked up.
    """

    __slots__ = ("hits", "request", "seen")

    def __init__(self, request: PoolRequest) -> None:
        self.request = request
        self.hits: list[int] = []
        self.seen = -1

    @property
    def blocks(self) -> Sequence[Block]:
        return self.request.blocks

    def __len__(self) -> int:
        return len(self.request)


class BlockPoolDriver:
    """Turns requests into lookups, allocations and frees.

    Args:
        manager: vLLM's.
        prefix_caching: whether its requests may reuse blocks; the manager is told.
        rng: source of the names of generated blocks where a prompt has hashes only.
    """

    traits = Traits(recomputes_last_token=True, stores_when="full", copies=True, removed_first=True)

    def __init__(self, manager: BlockPoolManager, prefix_caching: bool, rng: Random) -> None:
        self.manager = manager
        self._rng = rng
        if not prefix_caching:
            manager.enable_caching = False

    def look(self, prompt: Prompt) -> int:
        """Tokens of the prompt that are cached."""
        manager = self.manager
        return len(manager.get_computed_blocks(manager.new_request(prompt))) * manager.block_size

    def open(self, prompt: Prompt) -> _PooledRequest:
        """A request that has no block yet."""
        return _PooledRequest(self.manager.new_request(prompt, rng=self._rng))

    def _hits(self, state: _PooledRequest) -> list[int]:
        """What the request could start with; looked up again if anything has changed since."""
        if state.seen != self.manager.changes:
            state.hits = self.manager.get_computed_blocks(state.request)
            state.seen = self.manager.changes
        return state.hits

    def cached(self, state: _PooledRequest) -> int:
        """Tokens of its prompt that are cached."""
        return min(len(self._hits(state)) * self.manager.block_size, state.request.tokens.num_prompt_tokens)

    def shortage(self, state: _PooledRequest) -> tuple[int, int]:
        """(needed, free): new blocks, and hits that nobody uses, as vLLM counts them."""
        manager = self.manager
        return manager.missing_blocks(state.request, len(state.request), self._hits(state)), manager.num_free_blocks

    def admit(self, state: _PooledRequest, upto: int) -> None:
        """Allocate for the first `upto` tokens that are not computed; with the first of them, all hits are taken."""
        request, manager = state.request, self.manager
        hits = [] if request.block_ids else self._hits(state)
        new = upto - request.num_computed_tokens - len(hits) * manager.block_size
        if new > 0:
            manager.allocate_slots(request, new, hits)

    def plan(self, state: _PooledRequest, tokens: Sequence[int]) -> tuple[int, int]:
        """(needed, free): nothing is given back by decode steps, so the blocks are counted."""
        manager = self.manager
        return manager.missing_blocks(state.request, len(state.request) + len(tokens)), manager.num_free_blocks

    def extend(self, state: _PooledRequest, tokens: Sequence[int]) -> None:
        """Decode steps, one a token; only the first and the last of a block's do anything."""
        request, manager = state.request, self.manager
        size, start = manager.block_size, 0
        while start < len(tokens):
            step = tokens[start : start + size - len(request) % size]
            request.tokens.extend(step)
            manager.allocate_slots(request, len(step))
            start += len(step)

    def release(self, state: _PooledRequest) -> None:
        """Free all blocks, tail first."""
        self.manager.free(state.request)

    def preempt(self, state: _PooledRequest) -> None:
        """Free all blocks, tail first; what was generated is kept, and looked up when the request is resumed."""
        self.manager.free(state.request)
        state.seen = -1

    def clear(self) -> bool:
        """Drop all that is cached."""
        return self.manager.reset_prefix_cache()
