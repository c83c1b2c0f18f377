"""Drives vLLM's block manager with a host below it, and notes what each step does for the connector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.engine.block_pool_driver import BlockPoolDriver
from pytest_kvmock.tiers.native_offload import NativeOffload
from pytest_kvmock.tiers.offload_steps import Computing, OffloadRequest, OffloadStep

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.cache.vllm.block_pool import PoolRequest


class OffloadDriver(BlockPoolDriver):
    """Turns requests into lookups, allocations and frees, of which the clock makes steps (`NativeClock`).

    Args:
        manager: vLLM's, with a host below it.
        prefix_caching: as of a `BlockPoolDriver`; without it nothing is stored.
        rng: as of a `BlockPoolDriver`.

    Attributes:
        offload: what keeps the host.
    """

    decodes_ahead = False
    """Each step may store, and find transfers done."""

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        super().__init__(manager, prefix_caching, rng)
        offload = self.manager.offload
        assert isinstance(offload, NativeOffload)  # it is made for those
        self.offload = offload
        self.traits = replace(BlockPoolDriver.traits, chunk=offload.blocks_per_chunk, clears_below=False)
        offload.shuffle_with(Random(rng.getrandbits(64)))  # noqa: S311 - mock data
        self._known: dict[PoolRequest, OffloadRequest] = {}
        self._prefills: set[PoolRequest] = set()
        self._computing: dict[PoolRequest, Computing] = {}
        self._preempted: list[OffloadRequest] = []
        self._finished: list[OffloadRequest] = []
        self._got: set[int] = set()

    # ------------------------------------------------------------------------------------------ for the clock

    def known(self, request: PoolRequest) -> OffloadRequest:
        """What the connector knows a request as."""
        found = self._known.get(request)
        if found is None:
            found = self._known[request] = self.offload.request(request.tokens)
        return found

    def reserved(self) -> int:
        """Blocks that unfinished prefills, and those that load, still need for all their tokens."""
        missing = self.manager.missing_blocks
        return sum(max(0, missing(request, len(request))) for request in self._prefills)

    def loads(self, request: PoolRequest) -> None:
        """A request got blocks for what it loads."""
        self._got.update(request.block_ids)
        self._prefills.add(request)

    def hand_over(self, request: PoolRequest, other: PoolRequest) -> None:
        """Know one request as what another was."""
        self._known[other] = self._known.pop(request)
        self._prefills.remove(request)
        self._prefills.add(other)

    def take_step(self) -> OffloadStep:
        """Take what has happened since the last step."""
        step = OffloadStep(list(self._computing.values()), self._preempted, self._finished, self._got)
        self._computing, self._preempted, self._finished, self._got = {}, [], [], set()
        return step

    @property
    def has_news(self) -> bool:
        """Whether something has happened that a step has to be planned for."""
        return bool(self._computing or self._preempted or self._finished)

    def end(self, request: PoolRequest, *, aborted: bool) -> None:
        """A request is over."""
        known = self._known.pop(request, None)
        self._prefills.discard(request)
        if known is not None:
            self.offload.ended(known, computed=request.num_computed_tokens if aborted else None)
            self._finished.append(known)

    # ------------------------------------------------------------------------------------------ as its base has it

    def allocate(self, request: PoolRequest, upto: int) -> int:
        """Allocate for the first `upto` tokens, and count them as computed; all of them, or nothing changes."""
        held, before = len(request.block_ids), request.num_computed_tokens
        reached = super().allocate(request, upto)
        if request.num_computed_tokens > before:
            is_admitted = not held or request in self._prefills
            self._got.update(request.block_ids if is_admitted else request.block_ids[held:])
            self._computed(request)
        return reached

    def admit(self, request: PoolRequest, upto: int) -> None:
        """Allocate for the first `upto` tokens that are not computed."""
        self.allocate(request, upto)

    def step_inside(self, request: PoolRequest, upto: int) -> bool:
        """Count the tokens up to one as computed, if it lies in a block that is held and is not its last."""
        inside = super().step_inside(request, upto)
        if inside:
            self._computed(request)
        return inside

    def generate_quietly(self, request: PoolRequest, tokens: Sequence[int]) -> None:
        """Compute the last token and append one, as often as there are tokens."""
        super().generate_quietly(request, tokens)
        self._computed(request)

    def free(self, request: PoolRequest, *, done: bool) -> None:
        """Free all blocks, also those that are being copied."""
        if done:
            aborted = request.num_computed_tokens < len(request) - 1
            self.end(request, aborted=aborted)
        elif request.block_ids and request in self._known:
            self._prefills.discard(request)
            self._computing.pop(request, None)
            self._preempted.append(self._known[request])
        super().free(request, done=done)

    def _computed(self, request: PoolRequest) -> None:
        computed = request.num_computed_tokens
        self._computing[request] = Computing(self.known(request), (request.block_ids,), computed)
        if computed < len(request):
            self._prefills.add(request)
        else:
            self._prefills.discard(request)
