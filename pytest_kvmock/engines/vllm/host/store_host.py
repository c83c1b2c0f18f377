"""A store that engines share, below one engine of vLLM: what takes the place of its host, and what it does in time."""

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
# It is asked as a `NativeOffload` is: a look-up at admission, a plan at the end of each step, and the transfers that
# are done. But it holds the blocks of the device that a transfer reads, nothing in it is the engine's own, and what has
# gone from it is noticed only as it is loaded: then the request computes from there on.


class WaitsForEverError(KvMockError, RuntimeError):
    """A request of vLLM waits for a load that no step begins, with its blocks; no reset succeeds from now on."""


class StoreComputing(NamedTuple):
    """A request that computes tokens in a step.

    Attributes:
        request: which, as the connector knows it.
        blocks: the blocks that it has; not copied.
        before: how many of its tokens the steps before have computed, or found.
        upto: how many are computed with this step.
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
    """What one engine has in a store that it shares; it stands where a `NativeOffload` does.

    Args:
        manager: the block manager above it.

    Raises:
        ValueError: that is of another kind than was recorded over such a store.

    Attributes:
        tier: that of its blocks in events.
        blocks_per_chunk: blocks that have one name there.
        files: None, as the next two: it has no folder, no size of its own, and offers again what had no room.
        num_blocks: as above.
        unmet_offer: as above.
    """

    tier: StorageTier
    blocks_per_chunk = 1
    files = None
    num_blocks = None
    unmet_offer = None
    has_questions = False
    """Whether look-ups were asked that are answered with the next step."""

    def __init__(self, manager: KvManager) -> None:
        if not isinstance(manager, BlockPoolManager):
            raise ValueError(  # noqa: TRY004 - one error
                f"stores: {manager.backend!r} has several cache groups or a draft model, and no such engine was "
                "recorded over a store; give vllm"
            )
        self._manager = manager
        self._pins: Counter[int] = Counter()
        self._next = 0
        self._states: dict[Any, PoolRequest] = {}  # of the requests that load

    # ------------------------------------------------------------------------------------------- what a store does

    @abstractmethod
    def request(self, tokens: HashedTokens) -> Any:
        """What the connector knows a request with these tokens as."""

    @abstractmethod
    def lookup(self, tokens: HashedTokens, start: int) -> int:
        """Count the tokens that can be loaded after `start` tokens on the device. Changes nothing."""

    @abstractmethod
    def match(self, request: Any, start: int) -> Hit | None:
        """Look up a request that would be admitted, of which the device has `start` tokens; None: ask again in the
        next step.
        """

    @abstractmethod
    def admitted(self, request: Any) -> None:
        """A request has the blocks that it computes into."""

    @abstractmethod
    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], hit: Hit, named: object = None) -> None:
        """A request has blocks, and a hit is loaded into them."""

    @abstractmethod
    def plan(self, step: OffloadStep) -> OffloadPlan:
        """Plan the transfers of a step.

        Raises:
            EngineDied: the original's engine ends by it.
        """

    @abstractmethod
    def complete(self, jobs: Iterable[int]) -> list[Any]:
        """Transfers are done; returns the requests all of whose loads are."""

    @abstractmethod
    def take_events(self) -> Sequence[TierEvent]:
        """Take the events since the last time, to be published after those of the device."""

    @abstractmethod
    def empty(self) -> None:
        """Empty the store, for all of its engines, without an event."""

    def reset(self) -> None:  # noqa: B027 - what is under way ends with the engine
        """The engine goes away; the store keeps what it has."""

    # ------------------------------------------------------------------------------------------ what is nothing here

    def number_adapters(self, lora_ids: LoraIds) -> None:  # noqa: B027 - as the next two
        """Nothing: its events name no adapter."""

    def shuffle_with(self, rng: Random) -> None:  # noqa: B027 - as the next one
        """Nothing: what it publishes has an order."""

    def ended(self, request: Any, *, computed: int | None = None) -> None:  # noqa: B027 - nothing to do
        """Nothing: it is told with the step."""

    def resident_names(self, group: int = 0) -> list[int]:  # noqa: ARG002 - one group
        """Nothing: what the store has is no engine's own."""
        return []

    # ----------------------------------------------------------------------------------------------- for subclasses

    def loads(self, request: Any, state: PoolRequest) -> None:
        """The request of its driver that loads."""
        self._states[request] = state

    def _hold(self, blocks: list[int]) -> None:
        self._manager.pin_blocks(blocks)
        self._pins.update(blocks)

    def _free(self, blocks: list[int]) -> None:
        self._pins.subtract(blocks)
        self._manager.give_back(blocks)

    @property
    def num_held_alone(self) -> int:
        """Blocks of the device that transfers hold and nothing else."""
        return self._manager.count_held_by(+self._pins)

    def _transfer(self, request: Any, blocks: int, *, is_load: bool = False) -> OffloadTransfer:
        """One of `blocks` blocks, with a number of its own."""
        number, self._next = self._next, self._next + 1
        return OffloadTransfer(number, request, (), range(blocks), (), (), (), is_load=is_load)

    def _loaded(self, request: Any, upto: int) -> None:
        """All that comes for a request has come, up to this token."""
        state = self._states.pop(request)
        state.num_computed_tokens = min(state.num_computed_tokens, upto)


class StoreDriver(OffloadDriver):
    """Turns requests into lookups, allocations and frees over a store, and notes what was computed before each step.

    Args:
        manager: vLLM's, with a `StoreHost` below it.
        prefix_caching: as of its base; without it nothing is stored.
        rng: as of its base.
    """

    offload: Any

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        super().__init__(manager, prefix_caching, rng)
        self._before: dict[Any, int] = {}
        self._began: set[Any] = set()  # those that have computed since they were admitted
        self._admitted: set[Any] = set()  # in this step
        self._resumed: set[Any] = set()
        self._by_reset: list[Any] = []

    def held_by_copies(self) -> int:
        """Blocks of the device that are held for puts alone, and free once these are done."""
        held: int = self.offload.num_held_alone
        return held

    def found_below(self, request: PoolRequest) -> int:
        """Tokens of a request that the store has, beyond those that the device has. Changes nothing."""
        found: int = self.offload.lookup(request.tokens, self.lookup(request))
        return found

    def loads(self, request: PoolRequest) -> None:
        """A request got blocks for what it loads."""
        super().loads(request)
        self.offload.loads(self.known(request), request)

    def leave(self, request: PoolRequest) -> Any:
        """Have another one know what a request has loaded for it, and its blocks."""
        left = super().leave(request)
        self.offload.loads(self.known(left), left)
        return left

    def was_reset(self) -> None:
        """What is preempted by now was so by a reset: no step stands between that and what comes next."""
        self._by_reset = list(self._preempted)

    def needs_step(self, request: PoolRequest) -> bool:
        """Whether a request was preempted in a step that the connector has not been told of."""
        known = self._known.get(request)
        return known in self._preempted and known not in self._by_reset

    def take_step(self) -> OffloadStep:
        """Take what has happened since the last step."""
        step = super().take_step()
        self._began |= self._admitted
        self._resumed -= self._admitted
        self._before, self._admitted, self._by_reset = {}, set(), []
        return step

    def allocate(self, request: PoolRequest, upto: int) -> int:
        """Allocate for the first `upto` tokens, and count them as computed; all of them, or none."""
        before = request.num_computed_tokens if request.block_ids else self.lookup(request)
        self._before.setdefault(request, before)
        return super().allocate(request, upto)

    def step_inside(self, request: PoolRequest, upto: int) -> bool:
        """Count the tokens up to one as computed, if that takes, fills and frees no block."""
        self._before.setdefault(request, request.num_computed_tokens)
        return super().step_inside(request, upto)

    def generate_quietly(self, request: PoolRequest, tokens: Sequence[int]) -> None:
        """Compute the last token and append one, as often as there are tokens."""
        self._before.setdefault(request, request.num_computed_tokens)
        super().generate_quietly(request, tokens)

    def free(self, request: PoolRequest, *, done: bool) -> None:
        """Free all blocks; those that are put are held until that is done."""
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
        is_dead: whether the engine has ended by what it was asked for.
    """

    _offload: Any

    def step(self) -> None:
        """Run one step; see `NativeHostTime.step`.

        Raises:
            EngineDied: the original's engine ends by it.
        """
        try:
            super().step()
        except EngineDied:
            self.is_dead = True
            raise

    def deadline(self) -> float | None:
        """When the next step has something to do; None: nothing is under way."""
        return self._now if self._offload.has_questions else super().deadline()

    def was_reset(self) -> None:
        """Requests were preempted by a reset: the step that admits one again is the one that the connector learns it
        with, and the original ends by that.
        """
        self._driver.was_reset()

    def empty_below(self) -> None:
        """Empty the store, for all of its engines, without an event (vLLM: `reset_external`)."""
        self._offload.empty()

    def onboard(self, state: Any, *, wait: bool, resumed: bool) -> int:
        """Load what the store has of a request without blocks; see `HostTime.onboard`.

        Raises:
            WaitsForEverError: the load is never begun.
        """
        if self._driver.needs_step(state):
            self.step()
        return super().onboard(state, wait=wait, resumed=resumed)

    def _pass(self, now: float) -> None:
        super()._pass(now)
        self.manager.publish_below()  # what the store has to tell, where no step is due

    def _wait(self, wait: bool, why: str) -> None:
        if self.deadline() is None:
            raise WaitsForEverError(
                "a reset preempted a request, the same step admits it again, and the connector forgot what it was to "
                "load (vLLM 0.33.0, MooncakeStoreConnector): it waits for ever, with its blocks"
            )
        super()._wait(wait, why)


class StoreBelow(NamedTuple):
    """What is given to makers of managers in the place of `Tiers`: puts a store below each.

    Attributes:
        kind: of the store.
        put_below: called with a manager.
    """

    kind: str
    put_below: Callable[[Any], None]
