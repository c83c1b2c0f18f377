"""Drives vLLM's block manager, as its scheduler does: look up once, then allocate step by step."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.cache.vllm.block_pool import BlockPoolManager
from pytest_kvmock.engine.driver import Traits

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.cache.vllm.block_pool import PoolRequest
    from pytest_kvmock.tokens import Prompt


class BlockPoolDriver:
    """Turns requests into lookups, allocations and frees.

    Args:
        manager: vLLM's.
        prefix_caching: whether its requests may reuse blocks; the manager is set to it.
        rng: source of the names of generated blocks where a prompt has hashes only.

    Raises:
        ValueError: the manager is another.
    """

    traits = Traits(recomputes_last_token=True, stores_when="full", copies=True, removed_first=True)

    manager: BlockPoolManager

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        if not isinstance(manager, BlockPoolManager):
            raise ValueError(f"a BlockPoolDriver drives a BlockPoolManager, got {manager!r:.80}")  # noqa: TRY004 - one error
        self.manager = manager
        self._rng = rng
        if not prefix_caching:
            manager.enable_caching = False

    def lookup(self, prompt: Prompt) -> int:
        """Tokens of the prompt that are cached."""
        manager = self.manager
        return len(manager.get_computed_blocks(manager.new_request(prompt))) * manager.block_size

    def open(self, prompt: Prompt) -> PoolRequest:
        """A request that has no block yet."""
        return self.manager.new_request(prompt, rng=self._rng)

    def cached(self, request: PoolRequest) -> int:
        """Tokens of its prompt that are cached."""
        hits = self.manager.get_computed_blocks(request)
        return min(len(hits) * self.manager.block_size, request.tokens.num_prompt_tokens)

    def blocks_needed(self, request: PoolRequest) -> tuple[int, int]:
        """(needed, free): new blocks, and hits that nobody uses, as vLLM counts them."""
        manager = self.manager
        hits = manager.get_computed_blocks(request)
        return manager.missing_blocks(request, request.tokens.num_tokens, hits), manager.num_free_blocks

    def admit(self, request: PoolRequest, upto: int) -> None:
        """Allocate for the first `upto` tokens that are not computed; with the first of them, all hits are taken."""
        manager = self.manager
        hits = [] if request.block_ids else manager.get_computed_blocks(request)
        new = upto - request.num_computed_tokens - len(hits) * manager.block_size
        if new > 0:
            manager.allocate_slots(request, new, hits)

    def plan(self, request: PoolRequest, tokens: Sequence[int]) -> tuple[int, int]:
        """(needed, free): nothing is given back by decode steps, so the blocks are counted."""
        manager = self.manager
        return manager.missing_blocks(request, len(request) + len(tokens)), manager.num_free_blocks

    def extend(self, request: PoolRequest, tokens: Sequence[int]) -> None:
        """Decode steps, one a token; only the first and the last of a block's do anything."""
        size, start = self.manager.block_size, 0
        while start < len(tokens):
            step = tokens[start : start + size - len(request) % size]
            request.tokens.extend(step)
            self.manager.allocate_slots(request, len(step))
            start += len(step)

    def release(self, request: PoolRequest) -> None:
        """Free all blocks, tail first."""
        self.manager.free(request)

    def preempt(self, request: PoolRequest) -> None:
        """Free all blocks, tail first; what was generated is kept, and looked up when the request is resumed."""
        self.manager.free(request)

    def clear(self) -> bool:
        """Drop all that is cached."""
        return self.manager.reset_prefix_cache()
