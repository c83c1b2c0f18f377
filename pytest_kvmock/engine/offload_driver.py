"""Drives vLLM's block manager with a host below it, and notes what each step does for the connector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_kvmock.engine.block_pool_driver import BlockPoolDriver
from pytest_kvmock.engine.offload_notes import OffloadNotes

if TYPE_CHECKING:
    from pytest_kvmock.cache.vllm.block_pool import BlockPoolManager, PoolRequest


class OffloadDriver(OffloadNotes, BlockPoolDriver):
    """Turns requests into lookups, allocations and frees, of which the clock makes steps.

    Args:
        manager: vLLM's, with a host below it.
        prefix_caching: as of a `BlockPoolDriver`; without it nothing is stored.
        rng: as of a `BlockPoolDriver`.
    """

    manager: BlockPoolManager
    decodes_ahead = False
    """Each step may store, and find transfers done."""

    def tables(self, request: PoolRequest) -> Sequence[Sequence[int]]:
        """As `OffloadNotes`."""
        return (request.block_ids,)

    def found(self, request: PoolRequest) -> tuple[list[int], int]:
        """As `OffloadNotes`."""
        hits = self.manager.get_computed_blocks(request)
        return hits, len(hits) * self.manager.block_size

    def missing(self, request: PoolRequest, upto: int, hits: Sequence[int] | None = None) -> int:
        """As `OffloadNotes`."""
        return self.manager.missing_blocks(request, upto, hits or ())

    def place(self, request: PoolRequest, hits: Sequence[int], tokens: int) -> None:
        """As `OffloadNotes`."""
        self.manager.allocate_slots(request, tokens, hits, delay_cache_blocks=True)

    def cache(self, request: PoolRequest) -> None:
        """As `OffloadNotes`."""
        self.manager.cache_blocks(request)

    def detach(self, request: PoolRequest) -> PoolRequest:
        """As `OffloadNotes`."""
        left = type(request)(request.tokens)
        left.block_ids, left.num_computed_tokens = request.block_ids, request.num_computed_tokens
        left.num_cached_blocks = request.num_cached_blocks
        request.block_ids, request.num_computed_tokens, request.num_cached_blocks = [], 0, 0
        return left

    # ------------------------------------------------------------------------------------------ as its base has it

    def admit(self, request: PoolRequest, upto: int) -> None:
        """Allocate for the first `upto` tokens that are not computed."""
        self.allocate(request, upto)
