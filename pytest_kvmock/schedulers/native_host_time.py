"""The virtual time of a vLLM worker with native offload, and the steps that it runs in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pytest_kvmock.drivers.driver import WouldWait
from pytest_kvmock.events import StorageTier
from pytest_kvmock.schedulers.host_time import HostTime
from pytest_kvmock.schedulers.tier_host_time import TierHostTime
from pytest_kvmock.tiers.offload_steps import OffloadRequest
from pytest_kvmock.tiers.timed_copies import HostLinks, TimedCopies

if TYPE_CHECKING:
    from pytest_kvmock.cache.vllm.block_pool import BlockPoolManager
    from pytest_kvmock.cache.vllm.hybrid import VllmHybridManager
    from pytest_kvmock.drivers.offload_driver import OffloadNotes
    from pytest_kvmock.schedulers.scheduler import ScheduledRequest
    from pytest_kvmock.tokens import Prompt

# Theory of operation
#
# Each chunk of a prefill, each decoded token and each load is a step: what it computed is stored, and begins to travel with the
# next step. Between operations the engine steps on with nothing to compute, as long as anything is under way; those steps take
# place where time passes. So what a request stored is on the host once the time has passed, and not before.


class NativeParking:
    """The requests of a scheduler that wait for what is loaded for them.

    Args:
        host_time: that of the worker.
        driver: the worker's.
    """

    parks_preempted = True
    is_quiet = False
    """Each pass may store, and find transfers done."""

    def __init__(self, host_time: NativeHostTime, driver: OffloadNotes) -> None:
        self._host_time = host_time
        self._driver = driver
        self._parked: dict[OffloadRequest, ScheduledRequest] = {}
        self._come: list[ScheduledRequest] = []
        self._landed: dict[ScheduledRequest, int] = {}  # how many tokens they found, until they are admitted

    @property
    def requests(self) -> Sequence[ScheduledRequest]:
        """The requests that wait, in the order of their admission."""
        return (*self._parked.values(), *self._come)

    @property
    def deadline(self) -> float | None:
        """When the next step has something to do."""
        return self._host_time.deadline()

    def park(
        self,
        request: ScheduledRequest,
        cached_tokens: int,  # noqa: ARG002 - it is looked up with the blocks
        now_ms: float,  # noqa: ARG002 - the host's time has it
    ) -> Literal["parked", "blocked", "deferred", "none"]:
        """Load what the host has of a request that waits for its admission.

        Returns:
            "parked"; "blocked" where it lacks room; "deferred" where it is passed over in this pass; "none" where nothing comes.
        """
        if request.computed_tokens:  # it has come
            return "none"
        outcome = self._host_time.load(request.state)
        if isinstance(outcome, str):
            return outcome
        self._parked[outcome] = request
        return "parked"

    def received(self, offload_request: OffloadRequest) -> bool:
        """Take a load that was reported; False: it is none of a scheduler's."""
        request = self._parked.pop(offload_request, None)
        if request is not None:
            self._come.append(request)
        return request is not None

    def take_back(self) -> list[ScheduledRequest]:
        """Take out the requests whose loads have come, in the order in which they did; they hold their blocks."""
        come, self._come = self._come, []
        for request in come:
            request.computed_tokens = min(request.state.num_computed_tokens, len(request.state) - 1)
            self._landed[request] = request.computed_tokens
        return come

    def land(self, request: ScheduledRequest) -> None:
        """Cache what has come for a request, as its admission is reached."""
        state = request.state
        if request in self._landed:
            held = self._host_time.local.pop(state, request.computed_tokens)
            self._driver.cache(state)
            request.onboarded_tokens += max(0, request.computed_tokens - held)
            state.num_computed_tokens = request.computed_tokens

    def landed_tokens(self, request: ScheduledRequest) -> int:
        """How many tokens of a request that is admitted now had come, or were on the device then."""
        return self._landed.pop(request, 0)

    def give_up(self, request: ScheduledRequest) -> None:
        """Forget a parked request; its blocks are free once what is loaded for it has come."""
        if request in self._come:
            self._come.remove(request)
            self._driver.free(request.state, done=True)
            return
        known = next(known for known, each in self._parked.items() if each is request)
        del self._parked[known]
        self._host_time.leave(known)


class NativeHostTime(HostTime):
    """The time of a worker over vLLM's block manager and its host, and what is under way in it.

    Args:
        driver: the worker's.
        now: the time, in ms.

    Attributes:
        manager: the worker's.
        local: of requests that load, tokens that the device had of them.
        parking: the requests of a scheduler that wait for what is loaded for them.
    """

    def __init__(self, driver: OffloadNotes, now: float = 0.0) -> None:
        super().__init__(driver, now)
        self.manager: BlockPoolManager | VllmHybridManager = driver.manager
        self._offload = driver.offload
        assert isinstance(driver.manager.copies, TimedCopies)
        self._copies = driver.manager.copies
        self.parking: NativeParking = NativeParking(self, driver)
        self._loading: dict[OffloadRequest, Any] = {}
        self.local: dict[Any, int] = {}
        self._left: set[Any] = set()  # of those: for requests that did not wait
        # Tokens that came for requests that did not wait, by the names of their blocks.
        self._came: dict[tuple[int, ...], int] = {}
        self._warned = False

    @property
    def num_blocks(self) -> int:
        """Blocks that the host has room for."""
        return self._offload.num_blocks

    def deadline(self) -> float | None:
        """When the next step has something to do; None: nothing is under way."""
        if self._driver.has_news or self._copies.waits_for_step:
            return self._now
        return self._copies.deadline()

    def step(self) -> None:
        """Run one step: plan what has happened since the last one, carry it out, and publish what is reported."""
        plan = self._offload.plan(self._driver.take_step())
        self._now, done = self._copies.step(plan, self._now)
        for request in self._offload.complete(done):
            state = self._loading.pop(request)
            if not self.parking.received(request) and state in self._left:
                self._left.remove(state)
                self._came[tuple(state.tokens.names)] = state.num_computed_tokens - self.local.pop(state)
                self._driver.cache(state)
                self._driver.end(state, aborted=True)
                self.manager.free(state)
        self.manager.publish_below()
        capacity = self._offload.store.capacity
        if self._offload.largest_offer > capacity and not self._warned:
            self._warned = True
            warnings.warn(
                f"tiers: a step offered {self._offload.largest_offer} chunks, and the host has room for {capacity}: of a step "
                "with more chunks than that nothing will ever be stored",
                stacklevel=2,
            )

    def _pass(self, now: float) -> None:
        while (deadline := self.deadline()) is not None and deadline <= now:
            self._now = max(deadline, self._now)
            self.step()
        self._now = max(now, self._now)  # a step may have waited for what it flushed

    def pass_to(self, now: float) -> None:
        """Move the time forward; each transfer that was queued starts in its turn."""
        self.tick(now)

    def forget(self) -> None:
        """Forget what came back: the device was cleared."""
        self._came.clear()

    def cancel(self) -> None:
        """Empty the host, without an event; what is under way comes for nothing."""
        self._offload.reset()

    def unpublished(self, tier: StorageTier) -> Container[int]:  # noqa: ARG002 - all that is there was published
        """Nothing: an emptied host is what events do not show."""
        return ()

    def room(self) -> int:
        """Count the blocks of the device that no request holds, those included that something is loaded into."""
        count: Callable[[Any], int] = self._driver.count
        return self.manager.num_free_blocks + sum(map(count, self._left))

    def cached(self, prompt: Prompt, tier: StorageTier) -> int:
        """Count the tokens of a prompt that the host has, beyond those that the device has. Changes nothing."""
        if tier != self._offload.tier:
            return 0
        state = self._driver.open(prompt, to_look=True)
        return self._offload.lookup(state.tokens, self._driver.lookup(state))

    def start_pass(self, now: float) -> None:
        """A pass of a scheduler starts, which is a step."""
        self._now = max(now, self._now)

    def end_pass(self) -> float:
        """A pass has scheduled all that it does: plan what it stores. Returns for how many ms it waits for what is flushed."""
        start = self._now
        self.step()
        return self._now - start

    def load(self, state: Any) -> OffloadRequest | Literal["blocked", "deferred", "none"]:
        """Load what the host has of a request without blocks.

        Returns:
            The request, to which it will come with a step; or "blocked" where it lacks room, "deferred" where another transfer
            has to be waited for, "none" where nothing comes.
        """
        driver = self._driver
        hits, local = driver.found(state)
        request: OffloadRequest = driver.known(state)
        hit = self._offload.match(request, local)
        if hit is None:
            return "deferred"
        if not hit.tokens:
            return "none"
        free, missing = self.manager.num_free_blocks, driver.missing
        if missing(state, len(state), hits) > free or (
            missing(state, local + hit.tokens, hits) > free - driver.reserved()
        ):
            return "blocked"
        driver.place(state, hits, hit.tokens)
        driver.loads(state)
        self._offload.allocated(request, driver.tables(state), hit)
        self._loading[request], self.local[state] = state, local
        return request

    def onboard(self, state: Any, *, wait: bool, resumed: bool) -> int:  # noqa: ARG002 - preempted ones load, too
        """Load what the host has of a request without blocks; see `HostTime.onboard`."""
        while True:
            came = self._came.pop(tuple(state.tokens.names), None)
            if came is not None:
                found: int = self._driver.lookup(state)
                return min(came, found)
            outcome = self.load(state)
            if outcome == "none" or (outcome == "blocked" and self.deadline() is None):
                return 0
            if not isinstance(outcome, str):
                break
            self._wait_for(state, wait, "what it begins with is being copied, or the blocks that it needs are")
        local = self.local[state]
        self.step()
        while outcome in self._loading:
            blocks = (state.num_computed_tokens - local) // self.manager.block_size
            self._wait_for(state, wait, f"{blocks} blocks are on their way back from the host")
        self._driver.cache(state)
        del self.local[state]
        computed: int = min(state.num_computed_tokens, len(state) - 1)
        state.num_computed_tokens = computed
        return computed - local

    def admitted(self, state: Any) -> None:
        """Nothing: what came back was counted as it came."""

    def allocate(self, state: Any, upto: int, *, wait: bool) -> None:
        """Take blocks for a request's first tokens, which are a step; see `HostTime.allocate`."""
        reached = -1
        while reached < upto:
            before = state.num_computed_tokens
            reached = self._driver.allocate(state, upto)
            if reached < upto and state.num_computed_tokens == before:
                self._wait_for(state, wait, "blocks of the device are being loaded into for others")
            else:
                self.step()

    def generate(self, state: Any, tokens: Sequence[int]) -> None:
        """Decode, one step a token; see `HostTime.generate`."""
        for token in tokens:
            state.tokens.append(token)
            self.allocate(state, len(state), wait=True)

    def _wait_for(self, state: Any, wait: bool, why: str) -> None:
        """Wait; where it must not, what is loaded for the request is left to itself, and the request gives up its place."""
        try:
            self._wait(wait, why)
        except WouldWait:
            request = self._driver.known(state)
            if request in self._loading:
                self.leave(request)
            else:
                self._driver.end(state, aborted=True)
            raise

    def leave(self, request: OffloadRequest) -> None:
        """Leave a load to itself: what it brings is cached, and free, once it has come; its request has no blocks any more."""
        state = self._loading[request]
        left = self._driver.leave(state)
        self._loading[request], self.local[left] = left, self.local.pop(state)
        self._left.add(left)

    def _wait(self, wait: bool, why: str) -> None:
        """Let the time pass until the next step that has something to do."""
        if self.deadline() == self._now:  # a step that takes no time
            self.tick(self._now)
            return
        deadline = self.deadline()
        assert deadline is not None  # it waits for something
        if not wait:
            raise WouldWait(self._now, deadline, why)
        self.tick(max(deadline, self._now))


def host_time_of(driver: Any, now: float) -> HostTime:
    """The host's time of a worker whose driver's manager has a host below it, of whichever kind."""
    if isinstance(driver.manager.offload, HostLinks):
        from pytest_kvmock.schedulers.hicache_host_time import HiCacheHostTime

        return HiCacheHostTime(driver, now)
    return TierHostTime(driver, now) if driver.traits.chunk is None else NativeHostTime(driver, now)
