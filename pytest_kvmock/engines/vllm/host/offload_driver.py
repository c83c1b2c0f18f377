"""Drives vLLM's block managers with a host below them, and notes what each step of the engine does for its
connector.
"""

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
    """The part of a driver that notes what `NativeHostTime` makes steps of; it stands before that of its manager.

    Args:
        manager: vLLM's, with a host below it.
        prefix_caching: as of its base; without it nothing is stored.
        rng: as of its base, and of what has the order of a set in the original.

    Attributes:
        offload: what keeps the host.
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
        """What the device has of a request without blocks, and tokens of that."""

    @abstractmethod
    def fits(self, request: Any, hits: Any, local: int, tokens: int) -> bool:
        """Whether there are blocks for all of a request and what is loaded for it, without those that others need.

        Args:
            request: which; it has no blocks.
            hits: what was found on the device.
            local: tokens of that.
            tokens: those that are loaded behind them.
        """

    @abstractmethod
    def place(self, request: Any, hits: Any, tokens: int) -> None:
        """Take what was found, and blocks for the next `tokens` tokens, which are loaded into them."""

    @abstractmethod
    def detach(self, request: Any) -> Any:
        """Move the blocks of a request to another one like it, which is returned."""

    def whole(self, local: int) -> int:
        """Of tokens that the device has, those in whole blocks, which a load may follow."""
        return local

    def cut(self, hits: Any, local: int) -> Any:  # noqa: ARG002 - for those whose hits may end inside a block
        """What was found, up to `local` tokens in whole blocks."""
        return hits

    def named(self, block: int) -> object:  # noqa: ARG002 - for those that have some of what is behind a hit
        """Whether a block has a name, so that it need not be loaded."""
        return False

    def before_end(self, request: Any) -> None:
        """Do what the manager does before the connector is told that a request is over."""

    # ------------------------------------------------------------------------------------------ for the host's time

    def known(self, request: Any) -> OffloadRequest:
        """What the connector knows a request as."""
        found = self._known.get(request)
        if found is None:
            found = self._known[request] = self.offload.request(request.tokens)
        return found

    def found_below(self, request: Any) -> int:
        """Tokens of a request that the host has, beyond those that the device has. Changes nothing."""
        return self.offload.lookup(request.tokens, self.whole(self.found(request)[1]))

    def loads(self, request: Any) -> None:
        """A request got blocks for what it loads."""
        self._got.update(*self.tables(request))
        self._prefills.add(request)

    def leave(self, request: Any) -> Any:
        """Have another one know what a request has loaded for it, and its blocks; it is returned."""
        left = self.detach(request)
        self._known[left] = self._known.pop(request)
        self._prefills.remove(request)
        self._prefills.add(left)
        return left

    def count(self, request: Any) -> int:
        """Blocks that a request holds."""
        return sum(1 for blocks in self.tables(request) for block in blocks if block)

    def held_by_copies(self) -> int:
        """Blocks of the device that are held for copies alone: those of a native offload are free meanwhile."""
        return 0

    def take_step(self) -> OffloadStep:
        """Take what has happened since the last step."""
        step = OffloadStep(list(self._computing.values()), self._preempted, self._finished, self._got)
        self._computing, self._preempted, self._finished, self._got = {}, [], [], set()
        return step

    @property
    def has_news(self) -> bool:
        """Whether something has happened that a step has to be planned for."""
        return bool(self._computing or self._preempted or self._finished)

    def end(self, request: Any, *, aborted: bool) -> None:
        """A request is over."""
        known = self._known.pop(request, None)
        self._prefills.discard(request)
        if known is not None:
            self.before_end(request)
            self.offload.ended(known, computed=request.num_computed_tokens if aborted else None)
            self._finished.append(known)

    # ------------------------------------------------------------------------------------------ as its base has it

    def allocate(self, request: Any, upto: int) -> int:
        """Allocate for the first `upto` tokens, and count them as computed; all of them, or none."""
        held, before = [len(blocks) for blocks in self.tables(request)], request.num_computed_tokens
        reached = super().allocate(request, upto)
        if request.num_computed_tokens > before:
            is_admitted = not any(held) or request in self._prefills
            for blocks, count in zip(self.tables(request), held, strict=True):
                self._got.update(blocks if is_admitted else blocks[count:])
            self._computed(request)
        return reached

    def step_inside(self, request: Any, upto: int) -> bool:
        """Count the tokens up to one as computed, if that takes, fills and frees no block."""
        inside = super().step_inside(request, upto)
        if inside:
            self._computed(request)
        return inside

    def generate_quietly(self, request: Any, tokens: Sequence[int]) -> None:
        """Compute the last token and append one, as often as there are tokens."""
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
    """Turns requests into lookups, allocations and frees, of which the host's time makes steps.

    Args:
        manager: vLLM's, with a host below it.
        prefix_caching: as of a `BlockPoolDriver`; without it nothing is stored.
        rng: as of a `BlockPoolDriver`.
    """

    manager: BlockPoolManager

    def found(self, request: PoolRequest) -> tuple[list[int], int]:
        """Return the cached blocks of a request without any, and their tokens."""
        hits = self.manager.get_computed_blocks(request)
        return hits, len(hits) * self.manager.block_size

    def fits(self, request: PoolRequest, hits: Sequence[int], local: int, tokens: int) -> bool:
        """Return whether there are blocks for a request and what is loaded, without those that others need."""
        missing, free = self.manager.missing_blocks, self.manager.num_free_blocks
        reserved = sum(max(0, missing(each, len(each), ())) for each in self._prefills)
        return missing(request, len(request), hits) <= free and (
            missing(request, local + tokens, hits) <= free - reserved
        )

    def place(self, request: PoolRequest, hits: Sequence[int], tokens: int) -> None:
        """Take what was found, and blocks behind it that are cached once they are loaded."""
        self.manager.allocate_slots(request, tokens, hits, delay_cache_blocks=True)

    def detach(self, request: PoolRequest) -> PoolRequest:
        """Move the blocks of a request to another one with its tokens, and return that."""
        left = type(request)(request.tokens)
        left.block_ids, left.num_computed_tokens = request.block_ids, request.num_computed_tokens
        left.num_cached_blocks = request.num_cached_blocks
        request.block_ids, request.num_computed_tokens, request.num_cached_blocks = [], 0, 0
        return left

    # ------------------------------------------------------------------------------------------ as its base has it

    def admit(self, request: PoolRequest, upto: int, plan: PromptPlan | None = None) -> None:  # noqa: ARG002 - a worker has no plan
        """Allocate for the first `upto` tokens that are not computed."""
        self.allocate(request, upto)


class HybridOffloadDriver(OffloadNotes, HybridPoolDriver):
    """Turns requests into lookups, allocations and frees of several cache groups, of which the host's time makes steps.

    Args:
        manager: vLLM's, with a host below it.
        prefix_caching: as of a `HybridPoolDriver`; without it nothing is stored.
        rng: as of a `HybridPoolDriver`.

    Raises:
        ValueError: groups of states without prefix caching.
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
        # What a step with drafts takes beyond a request's tokens: `_request_remaining_blocks` of vLLM's scheduler.
        self._ahead = 0 if draft is None else 1 + draft.tokens + draft.slots
        self._step_blocks = sum(-(-self._ahead // each.block_size) for each in groups if each.kind != STATE)

    def lookup(self, request: GroupRequest) -> int:
        """Tokens that a request begins with: all that was loaded for it, also where the device names none of it."""
        found = super().lookup(request)
        return max(found, request.num_computed_tokens) if request.holds_blocks else found

    def found(self, request: GroupRequest) -> tuple[ComputedBlocks, int]:
        """Return what all groups have cached of a request without blocks, and its tokens."""
        hits = self.manager.get_computed_blocks(request)
        return hits, hits.num_tokens

    def whole(self, local: int) -> int:
        """Return of tokens that the device has those in whole blocks of all groups."""
        return local - local % self.manager.geometry.scheduler_block_size

    def cut(self, hits: ComputedBlocks, local: int) -> ComputedBlocks:
        """Return what was found, up to `local` tokens in whole blocks."""
        return self.manager.cut_hits(hits, local)

    def named(self, block: int) -> object:
        """Return the names of a block."""
        return self.manager.pool.names(block)

    def fits(self, request: GroupRequest, hits: ComputedBlocks, local: int, tokens: int) -> bool:
        """Return whether there are blocks for a request and what is loaded, without those that others need."""
        missing, free = self.manager.missing_blocks, self.manager.num_free_blocks
        if missing(request, len(request), hits, for_admission=True, num_external_tokens=tokens) > free:
            return False
        reserved = self._step_blocks + sum(
            missing(each, len(each), for_admission=True, num_lookahead_tokens=self._ahead) for each in self._prefills
        )
        fits: bool = missing(request, local + tokens, hits, num_external_tokens=tokens) <= free - reserved
        return fits

    def place(self, request: GroupRequest, hits: ComputedBlocks, tokens: int) -> None:
        """Take what was found, and blocks of each group behind it that are cached once they are loaded."""
        self.manager.allocate_slots(
            request, 0, hits, num_lookahead_tokens=0, num_external_tokens=tokens, delay_cache_blocks=True
        )

    def detach(self, request: GroupRequest) -> GroupRequest:
        """Move the blocks of all groups to another request with its tokens, and return that."""
        left = self.manager.another(request)
        left.tables, request.tables = request.tables, left.tables
        left.num_computed_tokens, request.num_computed_tokens = request.num_computed_tokens, 0
        request.junction = 0
        return left

    def before_end(self, request: GroupRequest) -> None:
        """Free what lies behind the windows, as the manager does before the connector learns of the end."""
        if request.holds_blocks:
            self.manager.free_behind_windows(request)

    def end_pass(self) -> None:
        """A step ends: what was copied in it is let go of, and what it cached may be hit."""
        self._in_pass = False
        self._got.update(copy for _, copy in self.manager.end_step())
        self.manager.new_step_starts()

    def take_step(self) -> OffloadStep:
        """Take the step that was noted; an operation of a worker is one, which ends here."""
        named = self.manager.take_states()
        if not self._in_pass:
            self.end_pass()
        step = super().take_step()
        step.states = [(self._known[each], states) for each, states in named.items() if each in self._known]
        return step

    # ------------------------------------------------------------------------------------------ as its base has it

    def allocate(self, request: GroupRequest, upto: int) -> int:
        """Allocate for the first `upto` tokens, and count them as computed: all of them, or as many as a step has,
        or none.
        """
        if not self._in_pass:
            manager = self.manager
            hits = None if request.holds_blocks else manager.get_computed_blocks(request)
            start = request.num_computed_tokens + (0 if hits is None else hits.num_tokens)
            if upto <= start and request.computes_last_token:
                return upto
            if upto > start and (hits is not None or start < len(request) - 1):
                tokens = manager.chunk_tokens(request, min(upto - start, manager.max_num_batched_tokens), hits)
                if not tokens:  # it comes with the next chunk
                    return upto
                upto = start + tokens
        return super().allocate(request, upto)


class DraftOffloadDriver(HybridOffloadDriver, DraftPoolDriver):
    """Turns requests into lookups and steps with drafts, of which the host's time makes steps.

    Args:
        manager: vLLM's, with a draft model and a host below it.
        prefix_caching: as of a `DraftPoolDriver`; without it nothing is stored.
        rng: as of a `DraftPoolDriver`.
    """

    def owed(self, request: GroupRequest, run: Sequence[int]) -> Sequence[int]:
        """Answer what a prefill owes with the first token of a run; returns the others."""
        if not request.num_in_flight_tokens:
            return run
        self.generate_run(request, run[:1])
        return run[1:]

    def free(self, request: GroupRequest, *, done: bool) -> None:
        """Free all blocks; what is owed is stale."""
        if request.num_in_flight_tokens:
            request.drafts.answered()
            request.num_in_flight_tokens = 0
        super().free(request, done=done)
