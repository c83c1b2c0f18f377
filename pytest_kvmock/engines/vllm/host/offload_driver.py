"""Drivers of vLLM's block managers with a host below them; they record each step of the engine for its connector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from pytest_kvmock.engines.base.cache_group import STATE, groups_text
from pytest_kvmock.engines.vllm.block_pool_driver import BlockPoolDriver
from pytest_kvmock.engines.vllm.draft_pool_driver import DraftPoolDriver
from pytest_kvmock.engines.vllm.host.offload_steps import Computing, OffloadRequest, OffloadStep
from pytest_kvmock.engines.vllm.hybrid_pool_driver import HybridPoolDriver
from pytest_kvmock.engines.vllm.pool_driver import PoolDriver

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.driver import PromptPlan
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.vllm.block_pool import BlockPoolManager, PoolRequest
    from pytest_kvmock.engines.vllm.group_request import ComputedBlocks, GroupRequest
    from pytest_kvmock.engines.vllm.host.native_offload import NativeOffload
    from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager


class OffloadNotes(PoolDriver, ABC):
    """Driver mixin that records the operations from which `NativeHostTime` makes steps; it precedes the driver base.

    Args:
        manager: a manager of vLLM with a host below it.
        prefix_caching: as in the driver base; without it nothing is stored.
        rng: as in the driver base; also replaces the orders that are those of a set in the original.

    Attributes:
        offload: the host.
    """

    offload: NativeOffload

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        super().__init__(manager, prefix_caching, rng)
        offload = self.offload = self.manager.offload
        self.traits = replace(self.traits, chunk=offload.blocks_per_chunk, clears_below=False)
        offload.shuffle_with(Random(rng.getrandbits(64)))  # noqa: S311 - mock data
        self._known: dict[Any, OffloadRequest] = {}
        self._prefills: set[Any] = set()
        self._computing: dict[Any, Computing] = {}
        self._preempted: list[OffloadRequest] = []
        self._finished: list[OffloadRequest] = []
        self._got: set[int] = set()

    # ----------------------------------------------------------------------------------- what its manager does

    @abstractmethod
    def found(self, request: Any) -> tuple[Any, int]:
        """Return the hits of a request without blocks on the device, and their tokens."""

    @abstractmethod
    def fits(self, request: Any, hits: Any, local: int, tokens: int) -> bool:
        """Return whether there are blocks for a whole request and its load beyond those that other requests need.

        Args:
            request: the request, without blocks.
            hits: its hits on the device.
            local: tokens of the hits.
            tokens: tokens that are loaded behind the hits.
        """

    @abstractmethod
    def place(self, request: Any, hits: Any, tokens: int) -> None:
        """Take the hits, and blocks into which the next `tokens` tokens are loaded."""

    @abstractmethod
    def detach(self, request: Any) -> Any:
        """Move the blocks of a request to a new request with the same tokens; return that."""

    def whole(self, local: int) -> int:
        """Return the tokens of a device hit that a load may follow: those in whole blocks."""
        return local

    def cut(self, hits: Any, local: int) -> Any:  # noqa: ARG002 - for those whose hits may end inside a block
        """Cut hits down to `local` tokens, a whole number of blocks."""
        return hits

    def named(self, block: int) -> object:  # noqa: ARG002 - for those that have some of what is behind a hit
        """Return whether a block has a name, so that it need not be loaded."""
        return False

    def before_end(self, request: Any) -> None:
        """Do the manager's part before the connector is notified that a request is over."""

    # ------------------------------------------------------------------------------------------ for the host's time

    def known(self, request: Any) -> OffloadRequest:
        """Return the connector's record of a request."""
        found = self._known.get(request)
        if found is None:
            found = self._known[request] = self.offload.request(request.tokens)
        return found

    def found_below(self, request: Any) -> int:
        """Count the tokens of a request that the host has beyond those of the device. Changes nothing."""
        return self.offload.lookup(request.tokens, self.whole(self.found(request)[1]))

    def loads(self, request: Any) -> None:
        """Record that a request got blocks for its load."""
        self._got.update(*self.tables(request))
        self._prefills.add(request)

    def leave(self, request: Any) -> Any:
        """Move the load of a request and its blocks to a new request; return that."""
        left = self.detach(request)
        self._known[left] = self._known.pop(request)
        self._prefills.remove(request)
        self._prefills.add(left)
        return left

    def count(self, request: Any) -> int:
        """Count the blocks that a request holds."""
        return sum(1 for blocks in self.tables(request) for block in blocks if block)

    def held_by_copies(self) -> int:
        """Count the blocks of the device that only copies hold: none, as a native offload holds no blocks."""
        return 0

    def take_step(self) -> OffloadStep:
        """Take the record since the last step."""
        step = OffloadStep(list(self._computing.values()), self._preempted, self._finished, self._got)
        self._computing, self._preempted, self._finished, self._got = {}, [], [], set()
        return step

    @property
    def has_news(self) -> bool:
        """Whether something was recorded that a step must be planned for."""
        return bool(self._computing or self._preempted or self._finished)

    def end(self, request: Any, *, aborted: bool) -> None:
        """End a request at the connector."""
        known = self._known.pop(request, None)
        self._prefills.discard(request)
        if known is not None:
            self.before_end(request)
            self.offload.ended(known, computed=request.num_computed_tokens if aborted else None)
            self._finished.append(known)

    # ------------------------------------------------------------------------------------------ as its base has it

    def allocate(self, request: Any, upto: int) -> int:
        """Allocate for the first `upto` tokens and count them as computed; all of them, or none."""
        held, before = [len(blocks) for blocks in self.tables(request)], request.num_computed_tokens
        reached = super().allocate(request, upto)
        if request.num_computed_tokens > before:
            is_admitted = not any(held) or request in self._prefills
            for blocks, count in zip(self.tables(request), held, strict=True):
                self._got.update(blocks if is_admitted else blocks[count:])
            self._computed(request)
        return reached

    def step_inside(self, request: Any, upto: int) -> bool:
        """Count the first `upto` tokens as computed if that takes, fills and frees no block."""
        inside = super().step_inside(request, upto)
        if inside:
            self._computed(request)
        return inside

    def generate_quietly(self, request: Any, tokens: Sequence[int]) -> None:
        """Compute the last token and append the next, for each of these tokens."""
        super().generate_quietly(request, tokens)
        self._computed(request)

    def free(self, request: Any, *, done: bool) -> None:
        """Free all blocks, also those that are being copied."""
        if done:
            self.end(request, aborted=request.num_computed_tokens < len(request) - 1)
        elif any(self.tables(request)) and request in self._known:
            self._prefills.discard(request)
            self._computing.pop(request, None)
            self._preempted.append(self._known[request])
        super().free(request, done=done)

    def _computed(self, request: Any) -> None:
        computed = request.num_computed_tokens
        junction = getattr(request, "junction", 0)
        self._computing[request] = Computing(self.known(request), self.tables(request), computed, junction)
        if computed < len(request):
            self._prefills.add(request)
        else:
            self._prefills.discard(request)


class OffloadDriver(OffloadNotes, BlockPoolDriver):
    """Turns requests into lookups, allocations and frees, from which the host's time makes steps.

    Args:
        manager: a `BlockPoolManager` with a host below it.
        prefix_caching: as in `BlockPoolDriver`; without it nothing is stored.
        rng: as in `BlockPoolDriver`.
    """

    manager: BlockPoolManager

    def found(self, request: PoolRequest) -> tuple[list[int], int]:
        """Return the cached blocks of a request without blocks, and their tokens."""
        hits = self.manager.get_computed_blocks(request)
        return hits, len(hits) * self.manager.block_size

    def fits(self, request: PoolRequest, hits: Sequence[int], local: int, tokens: int) -> bool:
        """Return whether there are blocks for a request and its load beyond those that other requests need."""
        missing, free = self.manager.missing_blocks, self.manager.num_free_blocks
        reserved = sum(max(0, missing(each, len(each), ())) for each in self._prefills)
        return missing(request, len(request), hits) <= free and (
            missing(request, local + tokens, hits) <= free - reserved
        )

    def place(self, request: PoolRequest, hits: Sequence[int], tokens: int) -> None:
        """Take the hits, and blocks behind them that are cached once they are loaded."""
        self.manager.allocate_slots(request, tokens, hits, delay_cache_blocks=True)

    def detach(self, request: PoolRequest) -> PoolRequest:
        """Move the blocks of a request to a new request with its tokens; return that."""
        left = type(request)(request.tokens)
        left.block_ids, left.num_computed_tokens = request.block_ids, request.num_computed_tokens
        left.num_cached_blocks = request.num_cached_blocks
        request.block_ids, request.num_computed_tokens, request.num_cached_blocks = [], 0, 0
        return left

    # ------------------------------------------------------------------------------------------ as its base has it

    def admit(self, request: PoolRequest, upto: int, plan: PromptPlan | None = None) -> None:  # noqa: ARG002 - a worker has no plan
        """Allocate for the first `upto` tokens."""
        self.allocate(request, upto)


class HybridOffloadDriver(OffloadNotes, HybridPoolDriver):
    """Turns requests into lookups, allocations and frees of cache groups, from which the host's time makes steps.

    Args:
        manager: a `VllmHybridManager` with a host below it.
        prefix_caching: as in `HybridPoolDriver`; without it nothing is stored.
        rng: as in `HybridPoolDriver`.

    Raises:
        ValueError: there are state groups, but no prefix caching.
    """

    manager: VllmHybridManager

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        groups = manager.geometry.groups  # type: ignore[attr-defined]  # it is vLLM's
        if not prefix_caching and any(group.kind == STATE for group in groups):
            raise ValueError(
                "tiers below groups of states need prefix caching, as vLLM 0.33.0 refuses a connector without: their "
                f"blocks are no whole hash units; got {groups_text(groups)}"
            )
        super().__init__(manager, prefix_caching, rng)
        draft = self.manager.speculative
        # Tokens that a step with drafts takes beyond a request's: `_request_remaining_blocks` of vLLM's scheduler.
        self._ahead = 0 if draft is None else 1 + draft.tokens + draft.slots
        self._step_blocks = sum(-(-self._ahead // each.block_size) for each in groups if each.kind != STATE)

    def lookup(self, request: GroupRequest) -> int:
        """Return the tokens that a request begins with, including loaded tokens that the device has not named."""
        found = super().lookup(request)
        return max(found, request.num_computed_tokens) if request.holds_blocks else found

    def found(self, request: GroupRequest) -> tuple[ComputedBlocks, int]:
        """Return the common hit of all groups for a request without blocks, and its tokens."""
        hits = self.manager.get_computed_blocks(request)
        return hits, hits.num_tokens

    def whole(self, local: int) -> int:
        """Return the tokens of a device hit that fill whole blocks of all groups."""
        return local - local % self.manager.geometry.scheduler_block_size

    def cut(self, hits: ComputedBlocks, local: int) -> ComputedBlocks:
        """Cut hits down to `local` tokens, a whole number of blocks."""
        return self.manager.cut_hits(hits, local)

    def named(self, block: int) -> object:
        """Return the names of a block."""
        return self.manager.pool.names(block)

    def fits(self, request: GroupRequest, hits: ComputedBlocks, local: int, tokens: int) -> bool:
        """Return whether there are blocks for a request and its load beyond those that other requests need."""
        missing, free = self.manager.missing_blocks, self.manager.num_free_blocks
        if missing(request, len(request), hits, for_admission=True, num_external_tokens=tokens) > free:
            return False
        reserved = self._step_blocks + sum(
            missing(each, len(each), for_admission=True, num_lookahead_tokens=self._ahead) for each in self._prefills
        )
        fits: bool = missing(request, local + tokens, hits, num_external_tokens=tokens) <= free - reserved
        return fits

    def place(self, request: GroupRequest, hits: ComputedBlocks, tokens: int) -> None:
        """Take the hits, and blocks of each group behind them that are cached once they are loaded."""
        self.manager.allocate_slots(
            request, 0, hits, num_lookahead_tokens=0, num_external_tokens=tokens, delay_cache_blocks=True
        )

    def detach(self, request: GroupRequest) -> GroupRequest:
        """Move the blocks of all groups to a new request with the same tokens; return that."""
        left = self.manager.another(request)
        left.tables, request.tables = request.tables, left.tables
        left.num_computed_tokens, request.num_computed_tokens = request.num_computed_tokens, 0
        request.junction = 0
        return left

    def before_end(self, request: GroupRequest) -> None:
        """Free the blocks behind the windows, as the manager does before it notifies the connector of the end."""
        if request.holds_blocks:
            self.manager.free_behind_windows(request)

    def end_pass(self) -> None:
        """End a step: release the blocks copied in it; blocks that it cached may be hit from now on."""
        self._in_pass = False
        self._got.update(copy for _, copy in self.manager.end_step())
        self.manager.new_step_starts()

    def take_step(self) -> OffloadStep:
        """Take the recorded step; an operation of a worker is a step, which ends here."""
        named = self.manager.take_states()
        if not self._in_pass:
            self.end_pass()
        step = super().take_step()
        step.states = [(self._known[each], states) for each, states in named.items() if each in self._known]
        return step

    # ------------------------------------------------------------------------------------------ as its base has it

    def allocate(self, request: GroupRequest, upto: int) -> int:
        """Allocate for the first `upto` tokens, or as many as a step takes, and count them as computed; or for none."""
        if not self._in_pass:
            manager = self.manager
            hits = None if request.holds_blocks else manager.get_computed_blocks(request)
            start = request.num_computed_tokens + (0 if hits is None else hits.num_tokens)
            if upto <= start and request.computes_last_token:
                return upto
            if upto > start and (hits is not None or start < len(request) - 1):
                tokens = manager.chunk_tokens(request, min(upto - start, manager.max_num_batched_tokens), hits)
                if not tokens:  # computed with the next chunk
                    return upto
                upto = start + tokens
        return super().allocate(request, upto)


class DraftOffloadDriver(HybridOffloadDriver, DraftPoolDriver):
    """Turns requests into lookups and operations with drafts, from which the host's time makes steps.

    Args:
        manager: a `VllmHybridManager` with a draft model and a host below it.
        prefix_caching: as in `DraftPoolDriver`; without it nothing is stored.
        rng: as in `DraftPoolDriver`.
    """

    def owed(self, request: GroupRequest, run: Sequence[int]) -> Sequence[int]:
        """Answer an open prefill step with the first token of a run; return the remaining tokens."""
        if not request.num_in_flight_tokens:
            return run
        self.generate_run(request, run[:1])
        return run[1:]

    def free(self, request: GroupRequest, *, done: bool) -> None:
        """Free all blocks; tokens in flight become stale."""
        if request.num_in_flight_tokens:
            request.drafts.answered()
            request.num_in_flight_tokens = 0
        super().free(request, done=done)
