"""Drives vLLM's block manager of several cache groups with a host below it, and notes what each step does for the connector."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from pytest_kvmock.engine.hybrid_pool_driver import HybridPoolDriver
from pytest_kvmock.engine.offload_notes import OffloadNotes
from pytest_kvmock.tiers.offload_steps import Keeps, OffloadStep

if TYPE_CHECKING:
    from pytest_kvmock.cache.vllm.group_request import ComputedBlocks, GroupRequest
    from pytest_kvmock.cache.vllm.hybrid import HybridManager


class HybridOffloadDriver(OffloadNotes, HybridPoolDriver):
    """Turns requests into lookups, allocations and frees of several cache groups, of which the clock makes steps.

    Args:
        manager: vLLM's, with a host below it.
        prefix_caching: as of a `HybridPoolDriver`; without it nothing is stored.
        rng: as of a `HybridPoolDriver`.
    """

    manager: HybridManager

    def tables(self, request: GroupRequest) -> Sequence[Sequence[int]]:
        """As `OffloadNotes`."""
        return tuple(table.blocks for table in request.tables)

    def found(self, request: GroupRequest) -> tuple[ComputedBlocks | None, int]:
        """As `OffloadNotes`."""
        hits = self.manager.get_computed_blocks(request)
        return hits if hits.num_tokens else None, hits.num_tokens

    def missing(self, request: GroupRequest, upto: int, hits: ComputedBlocks | None = None) -> int:
        """As `OffloadNotes`."""
        return self.manager.missing_blocks(request, upto, hits, for_admission=True)

    def place(self, request: GroupRequest, hits: ComputedBlocks | None, tokens: int) -> None:
        """As `OffloadNotes`."""
        self.manager.allocate_slots(request, 0, hits, num_external_tokens=tokens, delay_cache_blocks=True)

    def cache(self, request: GroupRequest) -> None:
        """As `OffloadNotes`."""
        self.manager.cache_blocks(request, request.num_computed_tokens)

    def detach(self, request: GroupRequest) -> GroupRequest:
        """As `OffloadNotes`."""
        left = self.manager.another(request)
        left.tables, request.tables = request.tables, left.tables
        left.num_computed_tokens, request.num_computed_tokens = request.num_computed_tokens, 0
        request.junction = 0
        return left

    def keeps(self, request: GroupRequest) -> Keeps:
        """As `OffloadNotes`."""
        return partial(self.manager.kept, request)

    def before_end(self, request: GroupRequest) -> None:
        """As `OffloadNotes`."""
        if request.holds_blocks:
            self.manager.free_behind_windows(request)

    def take_step(self) -> OffloadStep:
        """As `OffloadNotes`; an operation of a worker is a step, which ends here."""
        step = super().take_step()
        if not self._in_pass:
            self.end_pass()
            self.manager.new_step_starts()
        return step

    # ------------------------------------------------------------------------------------------ as its base has it

    def allocate(self, request: GroupRequest, upto: int) -> int:
        """Allocate for the first `upto` tokens, and count them as computed: all of them, or as many as a step has, or none."""
        if not self._in_pass:
            hits = self._hits(request)
            start = request.num_computed_tokens + (0 if hits is None else hits.num_tokens)
            upto = min(upto, start + self.manager.max_num_batched_tokens)
            if upto <= start and request.computes_last_token:
                return upto
        return super().allocate(request, upto)
