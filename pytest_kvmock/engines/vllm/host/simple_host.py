"""vLLM's `SimpleCPUOffloadConnector` as the host of a worker: its pool in place of a `NativeOffload`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_kvmock.engines.vllm.host.offload_driver import HybridOffloadDriver
from pytest_kvmock.engines.vllm.host.offload_steps import Hit, OffloadPlan, OffloadStep, OffloadTransfer
from pytest_kvmock.engines.vllm.host.simple_offload import BlockCopies, ComputingRequest, SimpleOffload, SimpleRequest
from pytest_kvmock.values.checks import KvMockError
from pytest_kvmock.values.events import Cleared

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.base.offload import TierEvent
    from pytest_kvmock.engines.vllm.group_request import GroupRequest
    from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager
    from pytest_kvmock.values.prompt_keys import LoraIds


class EndlessOffloadError(KvMockError, RuntimeError):
    """An idle engine of vLLM copies forever: its lazy pool has fewer blocks than the device caches."""


class SimpleComputing(NamedTuple):
    """A request that computes tokens in a step, in place of a `Computing`.

    Attributes:
        request: the request.
        before: number of its tokens computed by earlier steps.
    """

    request: SimpleRequest
    before: int


class SimpleHost:
    """The pool below one engine, with the interface of a `NativeOffload`: transfers of both directions share numbers.

    Args:
        num_blocks: usable blocks of the pool.
        device: the block manager above it.
        lazy: as in `SimpleOffload`.
        disk: as in `SimpleOffload`.

    Attributes:
        pool: the pool.
        num_blocks: as given.
        tier: the tier of the pool.
        blocks_per_chunk: 1; each block has separate events.
        files: None; there is no folder below it.
    """

    blocks_per_chunk = 1
    files = None

    def __init__(self, num_blocks: int, device: VllmHybridManager, *, lazy: bool = False, disk: bool = False) -> None:
        self.pool = SimpleOffload(num_blocks, device, lazy=lazy, disk=disk)
        self.num_blocks = num_blocks
        self.tier = self.pool.tier
        # Transfers in flight by number: the pool's number of a store, or the requests of a load.
        self._stores: dict[int, int] = {}
        self._loads: dict[int, Sequence[SimpleRequest]] = {}
        self._next = 0
        # A copy of each block of the device, with the steps in which the copy is planned, begins and is done.
        self._most_idle = 4 * device.num_blocks + num_blocks
        self._idle_steps = 0

    # ---------------------------------------------------------------------------------- what a manager needs of it

    def number_adapters(self, lora_ids: LoraIds) -> None:
        """Set the engine's numbers of adapters, which events carry."""
        self.pool.lora_ids = lora_ids

    def take_events(self) -> list[TierEvent]:
        """Take the events since the last call, without the Cleared of the pool.

        It names no medium, so a stream cannot distinguish it from the Cleared of the device.
        """
        return [event for event in self.pool.take_events() if not isinstance(event.data, Cleared)]

    def resident_names(self, group: int = 0) -> list[int]:
        """Return the hashes of a group's blocks in the pool, repeated for copies."""
        return [block_hash for number, block_hash in self.pool.resident() if number == group]

    # --------------------------------------------------------------------------------- what the host's time needs

    def shuffle_with(self, rng: Random) -> None:
        """Do nothing: its events have a defined order."""

    @property
    def unmet_offer(self) -> tuple[int, int] | None:
        """None: blocks that do not fit are offered again."""
        return None

    def lookup(self, state: GroupRequest, start: int) -> int:
        """Count the tokens of a request that the pool has after `start` tokens on the device. Changes nothing."""
        return self.pool.count(state, start)

    def match(self, request: SimpleRequest, start: int) -> Hit:
        """Look up the tokens that follow those of the device, and pin their blocks."""
        return Hit(start, self.pool.match(request, start))

    def allocated(self, request: SimpleRequest, blocks: object, hit: Hit, named: object = None) -> None:  # noqa: ARG002 - the request has its blocks
        """Load a hit for an admitted request; the request is offered from now on, also with an empty hit."""
        self.pool.allocated(request, hit.start + hit.tokens, hit.tokens)

    def ended(self, request: SimpleRequest, *, computed: int | None = None) -> None:
        """End a request, before its blocks are freed."""
        self.pool.ended(request, request.state.num_computed_tokens if computed is None else computed)

    def plan(self, step: OffloadStep) -> OffloadPlan:
        """Plan the transfers of a step.

        Raises:
            EndlessOffloadError: nothing was computed for more steps than the copies of all blocks need.
        """
        preempted: list[Any] = list(step.preempted)  # they are this host's
        computing: list[Any] = list(step.computing)
        for request in preempted:
            self.pool.preempted(request)
        asked = [ComputingRequest(each.request, each.before) for each in computing]
        plan, out = self.pool.plan(asked, flush=bool(preempted)), OffloadPlan()
        self._idle_steps = 0 if computing or step.finished or not self.pool.lazy else self._idle_steps + 1
        if self._idle_steps > self._most_idle:
            raise EndlessOffloadError(
                f"tiers: an idle engine copies for ever: its lazy pool of {self.num_blocks} blocks is smaller than "
                "what the device caches, so each copy evicts another (vLLM 0.33.0; give the pool more blocks)"
            )
        if plan.store is not None:
            self._stores[self._next] = plan.store.number
            out.stores.append(self._transfer(plan.store))
        if plan.load is not None:
            self._loads[self._next] = plan.load.requests
            out.loads.append(self._transfer(plan.load, is_load=True))
        if plan.flush:
            out.flush = {*self._stores, *self._loads}
        return out

    def _transfer(self, copies: BlockCopies, *, is_load: bool = False) -> OffloadTransfer:
        number, self._next = self._next, self._next + 1
        request: Any = copies.requests
        return OffloadTransfer(number, request, (), copies.device, copies.slots, (), (), is_load=is_load)

    def complete(self, jobs: Iterable[int]) -> list[SimpleRequest]:
        """Complete the transfers that are reported as done; return the requests whose loads are done."""
        numbers = list(jobs)
        received = [request for number in numbers for request in self._loads.pop(number, ())]
        self.pool.complete(received, [self._stores.pop(number) for number in numbers if number in self._stores])
        return received

    def reset(self) -> None:
        """Empty the pool; while a copy is in flight, nothing is dropped."""
        self.pool.reset()


class SimpleOffloadDriver(HybridOffloadDriver):
    """Turns requests into lookups, allocations and frees, over a pool of blocks.

    A block is offered with the step after the one that computed it, so the driver records the tokens that were computed
    before each step.

    Args:
        manager: a `VllmHybridManager` with a `SimpleHost` below it.
        prefix_caching: as in the base; without it nothing is stored.
        rng: as in the base.
    """

    offload: Any

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        super().__init__(manager, prefix_caching, rng)
        self._before: dict[Any, int] = {}

    def known(self, request: GroupRequest) -> Any:
        """Return the connector's record of a request."""
        found: Any = self._known.get(request)
        if found is None:
            found = self._known[request] = self.offload.pool.request(request)
        return found

    def found_below(self, request: GroupRequest) -> int:
        """Count the tokens of a request that the pool has beyond those of the device. Changes nothing."""
        found: int = self.offload.lookup(request, self.lookup(request))
        return found

    def held_by_copies(self) -> int:
        """Count the blocks of the device that only stores hold; they are free once the stores are done."""
        held: int = self.offload.pool.num_held_alone
        return held

    def leave(self, request: GroupRequest) -> Any:
        """Move the load of a request and its blocks to a new request; return that."""
        left = super().leave(request)
        self.known(left).state = left
        return left

    def take_step(self) -> OffloadStep:
        """Take the record since the last step."""
        self._before.clear()
        return super().take_step()

    def allocate(self, request: GroupRequest, upto: int) -> int:
        """Allocate for the first `upto` tokens and count them as computed; all of them, or none."""
        is_new = not request.holds_blocks
        before = self.lookup(request) if is_new else request.num_computed_tokens
        self._before.setdefault(request, before)
        reached = super().allocate(request, upto)
        if is_new and request.holds_blocks:
            self.offload.allocated(self.known(request), (), Hit(before, 0))
        return reached

    def step_inside(self, request: GroupRequest, upto: int) -> bool:
        """Count the first `upto` tokens as computed if that takes, fills and frees no block."""
        self._before.setdefault(request, request.num_computed_tokens)
        return super().step_inside(request, upto)

    def _computed(self, request: GroupRequest) -> None:
        super()._computed(request)
        noted: Any = SimpleComputing(self.known(request), self._before.get(request, request.num_computed_tokens))
        self._computing[request] = noted
