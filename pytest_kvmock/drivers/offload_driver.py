"""Drives vLLM's block managers with a host below them, and notes what each step of the engine does for its connector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from pytest_kvmock.drivers.block_pool_driver import BlockPoolDriver
from pytest_kvmock.drivers.hybrid_pool_driver import HybridPoolDriver
from pytest_kvmock.drivers.pool_driver import PoolDriver
from pytest_kvmock.tiers.native_offload import NativeOffload
from pytest_kvmock.tiers.offload_steps import Computing, Keeps, OffloadRequest, OffloadStep

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.cache.vllm.block_pool import BlockPoolManager, PoolRequest
    from pytest_kvmock.cache.vllm.group_request import ComputedBlocks, GroupRequest
    from pytest_kvmock.cache.vllm.hybrid import VllmHybridManager


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
        offload = self.manager.offload
        assert isinstance(offload, NativeOffload)  # it is made for those
        self.offload = offload
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
    def tables(self, request: Any) -> Sequence[Sequence[int]]:
        """All blocks of a request, by group; not copied."""

    @abstractmethod
    def found(self, request: Any) -> tuple[Any, int]:
        """What the device has of a request without blocks, and tokens of that."""

    @abstractmethod
    def missing(self, request: Any, upto: int, hits: Any = None) -> int:
        """Free blocks that it needs for its first `upto` tokens, beside those that were found."""

    @abstractmethod
    def place(self, request: Any, hits: Any, tokens: int) -> None:
        """Take what was found, and blocks for so many tokens behind that, which are loaded into them."""

    @abstractmethod
    def cache(self, request: Any) -> None:
        """Cache what was loaded, as far as it is computed."""

    @abstractmethod
    def detach(self, request: Any) -> Any:
        """Move the blocks of a request to another one like it, which is returned."""

    def keeps(self, request: Any) -> Keeps | None:  # noqa: ARG002 - for those with windows
        """What is stored of groups with a window; None: there are none."""
        return None

    def before_end(self, request: Any) -> None:
        """Do what the manager does before the connector is told that a request is over."""

    # ------------------------------------------------------------------------------------------ for the host's time

    def known(self, request: Any) -> OffloadRequest:
        """What the connector knows a request as."""
        found = self._known.get(request)
        if found is None:
            found = self._known[request] = self.offload.request(request.tokens, keeps=self.keeps(request))
        return found

    def reserved(self) -> int:
        """Blocks that unfinished prefills, and those that load, still need for all their tokens."""
        return sum(max(0, self.missing(request, len(request))) for request in self._prefills)

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
        self._computing[request] = Computing(self.known(request), self.tables(request), computed)
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

    def tables(self, request: PoolRequest) -> Sequence[Sequence[int]]:
        """Return the blocks of a request, which are one group."""
        return (request.block_ids,)

    def found(self, request: PoolRequest) -> tuple[list[int], int]:
        """Return the cached blocks of a request without any, and their tokens."""
        hits = self.manager.get_computed_blocks(request)
        return hits, len(hits) * self.manager.block_size

    def missing(self, request: PoolRequest, upto: int, hits: Sequence[int] | None = None) -> int:
        """Return how many free blocks its first `upto` tokens need, beside those that were found."""
        return self.manager.missing_blocks(request, upto, hits or ())

    def place(self, request: PoolRequest, hits: Sequence[int], tokens: int) -> None:
        """Take what was found, and blocks behind it that are cached once they are loaded."""
        self.manager.allocate_slots(request, tokens, hits, delay_cache_blocks=True)

    def cache(self, request: PoolRequest) -> None:
        """Cache the blocks that were loaded."""
        self.manager.cache_blocks(request)

    def detach(self, request: PoolRequest) -> PoolRequest:
        """Move the blocks of a request to another one with its tokens, and return that."""
        left = type(request)(request.tokens)
        left.block_ids, left.num_computed_tokens = request.block_ids, request.num_computed_tokens
        left.num_cached_blocks = request.num_cached_blocks
        request.block_ids, request.num_computed_tokens, request.num_cached_blocks = [], 0, 0
        return left

    # ------------------------------------------------------------------------------------------ as its base has it

    def admit(self, request: PoolRequest, upto: int) -> None:
        """Allocate for the first `upto` tokens that are not computed."""
        self.allocate(request, upto)


class HybridOffloadDriver(OffloadNotes, HybridPoolDriver):
    """Turns requests into lookups, allocations and frees of several cache groups, of which the host's time makes steps.

    Args:
        manager: vLLM's, with a host below it.
        prefix_caching: as of a `HybridPoolDriver`; without it nothing is stored.
        rng: as of a `HybridPoolDriver`.
    """

    manager: VllmHybridManager

    def tables(self, request: GroupRequest) -> Sequence[Sequence[int]]:
        """Return the blocks of a request, group by group."""
        return tuple(table.blocks for table in request.tables)

    def found(self, request: GroupRequest) -> tuple[ComputedBlocks | None, int]:
        """Return what all groups have cached of a request without blocks, None for nothing, and its tokens."""
        hits = self.manager.get_computed_blocks(request)
        return hits if hits.num_tokens else None, hits.num_tokens

    def missing(self, request: GroupRequest, upto: int, hits: ComputedBlocks | None = None) -> int:
        """Return how many free blocks its first `upto` tokens need in all groups, beside those that were found."""
        return self.manager.missing_blocks(request, upto, hits, for_admission=True)

    def place(self, request: GroupRequest, hits: ComputedBlocks | None, tokens: int) -> None:
        """Take what was found, and blocks of each group behind it that are cached once they are loaded."""
        self.manager.allocate_slots(request, 0, hits, num_external_tokens=tokens, delay_cache_blocks=True)

    def cache(self, request: GroupRequest) -> None:
        """Cache the blocks that were loaded, as far as they are computed."""
        self.manager.cache_blocks(request, request.num_computed_tokens)

    def detach(self, request: GroupRequest) -> GroupRequest:
        """Move the blocks of all groups to another request with its tokens, and return that."""
        left = self.manager.another(request)
        left.tables, request.tables = request.tables, left.tables
        left.num_computed_tokens, request.num_computed_tokens = request.num_computed_tokens, 0
        request.junction = 0
        return left

    def keeps(self, request: GroupRequest) -> Keeps:
        """Return what the manager keeps of the request's groups with a window."""
        return partial(self.manager.kept, request)

    def before_end(self, request: GroupRequest) -> None:
        """Free what lies behind the windows, as the manager does before the connector learns of the end."""
        if request.holds_blocks:
            self.manager.free_behind_windows(request)

    def take_step(self) -> OffloadStep:
        """Take the step that was noted; an operation of a worker is one, which ends here."""
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
