"""A store that engines share, below one engine of vLLM: it takes the place of the host and of its time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_kvmock.engines.vllm.block_pool import BlockPoolManager
from pytest_kvmock.engines.vllm.host.native_host_time import NativeHostTime
from pytest_kvmock.engines.vllm.host.offload_driver import OffloadDriver
from pytest_kvmock.engines.vllm.host.offload_steps import Hit, OffloadPlan, OffloadStep, OffloadTransfer
from pytest_kvmock.engines.vllm.pairs.legs import EngineDied
from pytest_kvmock.values.checks import KvMockError

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import HashedTokens
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.base.offload import TierEvent
    from pytest_kvmock.engines.vllm.block_pool import PoolRequest
    from pytest_kvmock.values.events import StorageTier
    from pytest_kvmock.values.prompt_keys import LoraIds

# Theory of operation
#
# A store has the interface of a `NativeOffload`: a look-up at admission, a plan at the end of each step, and the
# completed transfers. There are three differences. It holds the blocks of the device that a transfer reads. Its
# contents do not belong to one engine. A missing block is noticed only when it is loaded; the request then computes
# from there on.


class WaitsForEverError(KvMockError, RuntimeError):
    """A request of vLLM holds its blocks and waits for a load that no step begins; no reset succeeds from now on."""


class StoreComputing(NamedTuple):
    """A request that computes tokens in a step.

    Attributes:
        request: the connector's record of the request.
        blocks: its blocks; not copied.
        before: number of its tokens that earlier steps have computed or found.
        upto: number of its tokens computed after this step.
        is_admitted: whether it was admitted in this step.
        is_resumed: whether it was preempted since it last computed.
    """

    request: Any
    blocks: Sequence[int]
    before: int
    upto: int
    is_admitted: bool
    is_resumed: bool


class StoreHost(ABC):
    """A shared store as the host of one engine, in place of a `NativeOffload`.

    Args:
        manager: the block manager above it.

    Raises:
        ValueError: this kind of manager was not recorded over a store.

    Attributes:
        tier: the tier of its blocks in events.
        blocks_per_chunk: number of blocks that share a name there.
        files: None: it has no folder.
        num_blocks: None: it has no size of its own.
        unmet_offer: None: chunks without room are offered again.
    """

    tier: StorageTier
    blocks_per_chunk = 1
    files = None
    num_blocks = None
    unmet_offer = None
    has_questions = False
    """Whether look-ups wait for their answers in the next step."""

    def __init__(self, manager: KvManager) -> None:
        if not isinstance(manager, BlockPoolManager):
            raise ValueError(  # noqa: TRY004 - one error
                f"stores: {manager.backend!r} has several cache groups or a draft model, and no such engine was "
                "recorded over a store; give vllm"
            )
        self._manager = manager
        self._pins: Counter[int] = Counter()
        self._next = 0
        self._states: dict[Any, PoolRequest] = {}  # of loading requests

    # ------------------------------------------------------------------------------------------- what a store does

    @abstractmethod
    def request(self, tokens: HashedTokens) -> Any:
        """Make the connector's record of a request with these tokens."""

    @abstractmethod
    def lookup(self, tokens: HashedTokens, start: int) -> int:
        """Count the tokens that can be loaded after `start` tokens on the device. Changes nothing."""

    @abstractmethod
    def match(self, request: Any, start: int) -> Hit | None:
        """Look up a request that would be admitted, behind `start` tokens on the device.

        Return None if it must be asked again in the next step.
        """

    @abstractmethod
    def admitted(self, request: Any) -> None:
        """Record that a request has blocks to compute into."""

    @abstractmethod
    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], hit: Hit, named: object = None) -> None:
        """Record that a request has blocks, and that a hit is loaded into them."""

    @abstractmethod
    def plan(self, step: OffloadStep) -> OffloadPlan:
        """Plan the transfers of a step.

        Raises:
            EngineDied: the original engine would end.
        """

    @abstractmethod
    def complete(self, jobs: Iterable[int]) -> list[Any]:
        """Complete transfers; return the requests whose loads are all done."""

    @abstractmethod
    def take_events(self) -> Sequence[TierEvent]:
        """Take the events since the last call, to be published after those of the device."""

    @abstractmethod
    def empty(self) -> None:
        """Empty the store for all its engines, without an event."""

    def reset(self) -> None:  # noqa: B027 - what is under way ends with the engine
        """Do nothing when the engine goes away: the store keeps its contents."""

    # ------------------------------------------------------------------------------------------ what is nothing here

    def number_adapters(self, lora_ids: LoraIds) -> None:  # noqa: B027 - as the next two
        """Do nothing: its events name no adapter."""

    def shuffle_with(self, rng: Random) -> None:  # noqa: B027 - as the next one
        """Do nothing: its events have a defined order."""

    def ended(self, request: Any, *, computed: int | None = None) -> None:  # noqa: B027 - nothing to do
        """Do nothing: the step reports ended requests."""

    def resident_names(self, group: int = 0) -> list[int]:  # noqa: ARG002 - one group
        """Return nothing: the contents of the store do not belong to one engine."""
        return []

    # ----------------------------------------------------------------------------------------------- for subclasses

    def loads(self, request: Any, state: PoolRequest) -> None:
        """Record the driver's request for a request that loads."""
        self._states[request] = state

    def _hold(self, blocks: list[int]) -> None:
        self._manager.pin_blocks(blocks)
        self._pins.update(blocks)

    def _free(self, blocks: list[int]) -> None:
        self._pins.subtract(blocks)
        self._manager.give_back(blocks)

    @property
    def num_held_alone(self) -> int:
        """Number of blocks of the device that only transfers hold."""
        return self._manager.count_held_by(+self._pins)

    def _transfer(self, request: Any, blocks: int, *, is_load: bool = False) -> OffloadTransfer:
        """Make a transfer of `blocks` blocks with a new number."""
        number, self._next = self._next, self._next + 1
        return OffloadTransfer(number, request, (), range(blocks), (), (), (), is_load=is_load)

    def _loaded(self, request: Any, upto: int) -> None:
        """Record that the load of a request has arrived, up to `upto` tokens."""
        state = self._states.pop(request)
        state.num_computed_tokens = min(state.num_computed_tokens, upto)


class StoreDriver(OffloadDriver):
    """Turns requests into lookups, allocations and frees over a store, and records the tokens computed before each
    step.

    Args:
        manager: a `BlockPoolManager` with a `StoreHost` below it.
        prefix_caching: as in the base; without it nothing is stored.
        rng: as in the base.
    """

    offload: Any

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        super().__init__(manager, prefix_caching, rng)
        self._before: dict[Any, int] = {}
        self._began: set[Any] = set()  # requests that have computed since their admission
        self._admitted: set[Any] = set()  # in this step
        self._resumed: set[Any] = set()
        self._by_reset: list[Any] = []

    def held_by_copies(self) -> int:
        """Count the blocks of the device that only puts hold; they are free once the puts are done."""
        held: int = self.offload.num_held_alone
        return held

    def found_below(self, request: PoolRequest) -> int:
        """Count the tokens of a request that the store has beyond those of the device. Changes nothing."""
        found: int = self.offload.lookup(request.tokens, self.lookup(request))
        return found

    def loads(self, request: PoolRequest) -> None:
        """Record that a request got blocks for its load."""
        super().loads(request)
        self.offload.loads(self.known(request), request)

    def leave(self, request: PoolRequest) -> Any:
        """Move the load of a request and its blocks to a new request; return that."""
        left = super().leave(request)
        self.offload.loads(self.known(left), left)
        return left

    def was_reset(self) -> None:
        """Record that a reset caused the preemptions so far: no step separates them from the next operation."""
        self._by_reset = list(self._preempted)

    def needs_step(self, request: PoolRequest) -> bool:
        """Return whether a step, not a reset, preempted a request and was not reported to the connector yet."""
        known = self._known.get(request)
        return known in self._preempted and known not in self._by_reset

    def take_step(self) -> OffloadStep:
        """Take the record since the last step."""
        step = super().take_step()
        self._began |= self._admitted
        self._resumed -= self._admitted
        self._before, self._admitted, self._by_reset = {}, set(), []
        return step

    def allocate(self, request: PoolRequest, upto: int) -> int:
        """Allocate for the first `upto` tokens and count them as computed; all of them, or none."""
        before = request.num_computed_tokens if request.block_ids else self.lookup(request)
        self._before.setdefault(request, before)
        return super().allocate(request, upto)

    def step_inside(self, request: PoolRequest, upto: int) -> bool:
        """Count the first `upto` tokens as computed if that takes, fills and frees no block."""
        self._before.setdefault(request, request.num_computed_tokens)
        return super().step_inside(request, upto)

    def generate_quietly(self, request: PoolRequest, tokens: Sequence[int]) -> None:
        """Compute the last token and append the next, for each of these tokens."""
        self._before.setdefault(request, request.num_computed_tokens)
        super().generate_quietly(request, tokens)

    def free(self, request: PoolRequest, *, done: bool) -> None:
        """Free all blocks; blocks in a put stay held until it is done."""
        self._began.discard(request)
        self._admitted.discard(request)
        if done:
            self._resumed.discard(request)
        elif request.block_ids:
            self._resumed.add(request)
        super().free(request, done=done)

    def _computed(self, request: PoolRequest) -> None:
        super()._computed(request)
        known = self.known(request)
        if request not in self._began and request not in self._admitted:
            self._admitted.add(request)
            self.offload.admitted(known)
        noted: Any = StoreComputing(
            known,
            request.block_ids,
            self._before.get(request, request.num_computed_tokens),
            request.num_computed_tokens,
            request in self._admitted,
            request in self._resumed,
        )
        self._computing[request] = noted


class StoreHostTime(NativeHostTime):
    """The time of a worker over vLLM's block manager and a store.

    Attributes:
        is_dead: whether an operation has ended the engine.
    """

    _offload: Any

    def step(self) -> None:
        """Run one step; see `NativeHostTime.step`.

        Raises:
            EngineDied: the original engine would end.
        """
        try:
            super().step()
        except EngineDied:
            self.is_dead = True
            raise

    def deadline(self) -> float | None:
        """Return when the next step has work; None if nothing is in flight."""
        return self._now if self._offload.has_questions else super().deadline()

    def was_reset(self) -> None:
        """Record that a reset preempted requests.

        The step that admits one of them again is the step that notifies the connector, which ends the original engine.
        """
        self._driver.was_reset()

    def empty_below(self) -> None:
        """Empty the store for all its engines, without an event (vLLM: `reset_external`)."""
        self._offload.empty()

    def onboard(self, state: Any, *, wait: bool, resumed: bool) -> int:
        """Load the blocks that the store has of a request without blocks; see `HostTime.onboard`.

        Raises:
            WaitsForEverError: the load never begins.
        """
        if self._driver.needs_step(state):
            self.step()
        return super().onboard(state, wait=wait, resumed=resumed)

    def _pass(self, now: float) -> None:
        super()._pass(now)
        self.manager.publish_below()  # events of the store when no step is due

    def _wait(self, wait: bool, why: str) -> None:
        if self.deadline() is None:
            raise WaitsForEverError(
                "a reset preempted a request, the same step admits it again, and the connector forgot what it was to "
                "load (vLLM 0.33.0, MooncakeStoreConnector): it waits for ever, with its blocks"
            )
        super()._wait(wait, why)


class StoreBelow(NamedTuple):
    """Puts a store below managers; makers of managers take it in place of `Tiers`.

    Attributes:
        kind: the kind of store.
        put_below: called with each manager.
    """

    kind: str
    put_below: Callable[[Any], None]
