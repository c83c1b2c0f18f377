"""Drives vLLM's block manager, as its scheduler does: look up once, then allocate step by step."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.cache.vllm.block_pool import BlockPoolManager
from pytest_kvmock.engine.driver import PROMPT_KEYS, Traits

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
    prompt_keys = PROMPT_KEYS
    admits_whole = True
    """As vLLM since 0.19, where `scheduler_reserve_full_isl` is on by default."""

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

    def reusable(self, request: PoolRequest) -> int:
        """Tokens of the request that are cached, generated ones included; its last one never counts."""
        return len(self.manager.get_computed_blocks(request)) * self.manager.block_size

    def _hits(self, request: PoolRequest) -> list[int]:
        return [] if request.block_ids else self.manager.get_computed_blocks(request)

    def fits(self, request: PoolRequest, upto: int) -> bool:
        """Whether new blocks, and hits that nobody uses, are at most as many as the queue has."""
        manager = self.manager
        return manager.missing_blocks(request, upto, self._hits(request)) <= manager.num_free_blocks

    def allocate(self, request: PoolRequest, upto: int) -> int:
        """Allocate for the first `upto` tokens, and count them as computed; all of them, or nothing changes."""
        manager, hits = self.manager, self._hits(request)
        new = upto - request.num_computed_tokens - len(hits) * manager.block_size
        if new > 0 and manager.allocate_slots(request, new, hits) is None:
            return request.num_computed_tokens
        return upto

    def generate(self, request: PoolRequest, token: int) -> bool:
        """Append a token; it gets its slot in the pass that computes it, the next one."""
        request.tokens.append(token)
        return True

    def quiet_tokens(self, request: PoolRequest) -> int:
        """Tokens that are computed, from the last one on, before one needs a block or fills one."""
        size, length = self.manager.block_size, len(request)
        return -length % size if length <= len(request.block_ids) * size else 0

    def generate_quietly(self, request: PoolRequest, tokens: Sequence[int]) -> None:
        """Compute the last token and append one, as often as there are tokens."""
        request.tokens.extend(tokens)
        request.num_computed_tokens += len(tokens)

    def release(self, request: PoolRequest) -> None:
        """Free all blocks, tail first."""
        self.manager.free(request)

    def preempt(self, request: PoolRequest) -> None:
        """Free all blocks, tail first; what was generated is kept, and looked up when the request is resumed."""
        self.manager.free(request)

    def clear(self) -> bool:
        """Drop all that is cached."""
        return self.manager.reset_prefix_cache()
