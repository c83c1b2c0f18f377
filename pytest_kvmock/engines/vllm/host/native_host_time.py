"""The virtual time of a vLLM worker with native offload, and the steps that run in it.

One subject: the steps of one worker, with any tier below its device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, cast

from pytest_kvmock.engines.base.driver import WouldWait
from pytest_kvmock.engines.base.host_time import HostTime
from pytest_kvmock.engines.vllm.host.offload_steps import OffloadRequest
from pytest_kvmock.engines.vllm.host.timed_copies import TimedCopies
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.events import StorageTier
from pytest_kvmock.values.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.engines.vllm.block_pool import BlockPoolManager
    from pytest_kvmock.engines.vllm.host.chunk_eviction import ChunkKey
    from pytest_kvmock.engines.vllm.host.file_tier import FileTier
    from pytest_kvmock.engines.vllm.host.offload_driver import DraftOffloadDriver, OffloadNotes
    from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager

# Theory of operation
#
# Each chunk of a prefill, each decoded token and each load is a step. The blocks that a step computed are stored; their
# transfer begins with the next step. Between operations the engine runs steps without computation while any transfer is
# in flight; these steps happen as time passes. Stored chunks are therefore on the host only after that time has passed.


class NativeParking:
    """The requests of a scheduler that wait for their loads.

    Args:
        host_time: the time of the worker.
        driver: the driver of the worker.
    """

    parks_preempted = True
    is_quiet = False
    """Each pass may store and find finished transfers."""

    def __init__(self, host_time: NativeHostTime, driver: OffloadNotes) -> None:
        self._host_time = host_time
        self._driver = driver
        self._parked: dict[OffloadRequest, ScheduledRequest] = {}
        self._come: list[ScheduledRequest] = []
        self._landed: dict[ScheduledRequest, int] = {}  # with the tokens that they found, until they are admitted

    @property
    def requests(self) -> Sequence[ScheduledRequest]:
        """The requests that wait, in the order of their admission."""
        return (*self._parked.values(), *self._come)

    @property
    def has_come(self) -> bool:
        """Whether loads have finished for requests that the next pass takes back."""
        return bool(self._come)

    @property
    def deadline(self) -> float | None:
        """When the next step has work, also for the waiting requests."""
        host_time = self._host_time
        return host_time.now if host_time.has_answers else host_time.deadline()

    def park(
        self,
        request: ScheduledRequest,
        cached_tokens: int,  # noqa: ARG002 - it is looked up with the blocks
        now_ms: float,  # noqa: ARG002 - the host's time has it
    ) -> Literal["parked", "blocked", "deferred", "none"]:
        """Load the chunks that the host has of a request that waits for admission.

        Returns:
            "parked"; "blocked" if too few blocks are free; "deferred" if the request is skipped in this pass; "none"
            if nothing is loaded.
        """
        if request.computed_tokens or request in self._landed:  # its load has arrived or failed
            return "none"
        outcome = self._host_time.load(request.state)
        if isinstance(outcome, str):
            return outcome
        self._parked[outcome] = request
        return "parked"

    def received(self, offload_request: OffloadRequest) -> bool:
        """Take a reported load; return False if it does not belong to a request of the scheduler."""
        request = self._parked.pop(offload_request, None)
        if request is not None:
            self._come.append(request)
        return request is not None

    def take_back(self) -> list[ScheduledRequest]:
        """Take out the requests whose loads have arrived, in order of arrival; they hold their blocks."""
        come, self._come = self._come, []
        for request in come:
            request.computed_tokens = min(request.state.num_computed_tokens, len(request.state) - 1)
            self._landed[request] = request.computed_tokens
        return come

    def first(self) -> ScheduledRequest | None:
        """Return the request that is admitted before all others: its load has arrived, and it holds blocks.

        vLLM's scheduler tries skipped requests before waiting ones (`skipped_waiting`). Otherwise a request that was
        preempted meanwhile would wait for their blocks forever.
        """
        return next((each for each in self._landed if each.status in ("waiting", "preempted")), None)

    def land(self, request: ScheduledRequest) -> None:
        """Cache the loaded blocks of a request when its admission is reached."""
        state = request.state
        if request in self._landed and state in self._host_time.local:  # once
            held = self._host_time.local.pop(state)
            self._driver.name(state, state.num_computed_tokens)
            request.onboarded_tokens += max(0, request.computed_tokens - held)
            state.num_computed_tokens = request.computed_tokens

    def landed_tokens(self, request: ScheduledRequest) -> int:
        """Return the tokens that an admitted request got from its load or had on the device then; 0 without a load."""
        return self._landed.pop(request, 0)

    def give_up(self, request: ScheduledRequest) -> None:
        """Forget a parked request; its blocks are freed once its load has arrived."""
        if request in self._come:
            self._come.remove(request)
            self._driver.free(request.state, done=True)
            return
        known = next(known for known, each in self._parked.items() if each is request)
        del self._parked[known]
        self._host_time.leave(known)


class NativeHostTime(HostTime):
    """The time of a worker over vLLM's block manager and its host, and the transfers in flight.

    Args:
        driver: the driver of the worker.
        now: the time, in ms.

    Attributes:
        manager: the manager of the worker.
        local: tokens that the device had of each loading request.
        parking: the requests of a scheduler that wait for their loads.
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
        self._left: set[Any] = set()  # loads of requests that did not wait
        # Tokens that arrived for requests that did not wait, by the names of their blocks.
        self._came: dict[tuple[int, ...], int] = {}
        self._warned = False
        self._let_go = False

    @property
    def num_blocks(self) -> int | None:
        """Capacity of the host in blocks; None if a store takes its place."""
        return self._offload.num_blocks

    def deadline(self) -> float | None:
        """Return when the next step has work; None if nothing is in flight."""
        files = self._offload.files
        if self._driver.has_news or self._copies.waits_for_step or (files is not None and files.needs_step):
            return self._now
        deadline = self._copies.deadline()
        of_files = None if files is None else files.threads.deadline()
        return of_files if deadline is None else deadline if of_files is None else min(deadline, of_files)

    @property
    def has_answers(self) -> bool:
        """Whether there is news for the next pass: a load arrived, or a file was found or is missing."""
        files = self._offload.files
        return self.parking.has_come or (files is not None and files.threads.has_answers)

    @property
    def may_do_more(self) -> bool:
        """Whether the next pass may do more than this one: `has_answers`, or copies have released blocks."""
        return self.has_answers or self._let_go

    def step(self) -> None:
        """Run one step: plan for the changes since the last one, carry the plan out, and publish the reports."""
        held: int = self._driver.held_by_copies()
        if self._offload.files is not None:
            self._offload.files.threads.now = self._now
        plan = self._offload.plan(self._driver.take_step())
        self._now, done = self._copies.step(plan, self._now)
        for request in self._offload.complete(done):
            state = self._loading.pop(request)
            if not self.parking.received(request) and state in self._left:
                self._left.remove(state)
                self._came[tuple(state.tokens.names)] = state.num_computed_tokens - self.local.pop(state)
                self._driver.name(state, state.num_computed_tokens)
                self._driver.end(state, aborted=True)
                self.manager.free(state)
        self._let_go = self._driver.held_by_copies() < held
        self.manager.publish_below()
        unmet = self._offload.unmet_offer
        if unmet is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"tiers: a step offered {unmet[0]} chunks, and the host has room for {unmet[1]}: "
                "a step with more chunks than that is never stored",
                stacklevel=2,
            )

    def _pass(self, now: float) -> None:
        while (deadline := self.deadline()) is not None and deadline <= now:
            self._now = max(deadline, self._now)
            self.step()
        self._now = max(now, self._now)  # a step may have waited for flushed transfers

    def pass_to(self, now: float) -> None:
        """Move the time forward; queued transfers start in turn."""
        self.tick(now)

    def forget(self) -> None:
        """Forget loads that have arrived, because the device was cleared."""
        self._came.clear()

    def cancel(self) -> None:
        """Empty the host without an event; transfers in flight have no effect."""
        self._offload.reset()

    def unpublished(self, tier: StorageTier) -> Container[int]:  # noqa: ARG002 - all that is there was published
        """Return nothing: all chunks were published. Events do not show that the host was emptied."""
        return ()

    def room(self) -> int:
        """Count the blocks of the device that no request holds, including targets of abandoned loads and sources of
        copies.
        """
        count: Callable[[Any], int] = self._driver.count
        held: int = self._driver.held_by_copies()
        return self.manager.num_free_blocks + sum(map(count, self._left)) + held

    def cached(self, prompt: Prompt, tier: StorageTier) -> int:
        """Count the tokens of a prompt that the host has beyond those of the device. Changes nothing."""
        if tier != self._offload.tier:
            return 0
        state = self._driver.open(prompt, to_look=True)
        found: int = self._driver.found_below(state)
        return found

    @property
    def files(self) -> FileTier | None:
        """The folder below the host; None if there is none."""
        return self._offload.files

    def chunks_of(self, prompt: Prompt | TokenIds, from_block: int = 0) -> list[ChunkKey]:
        """Return the complete chunks of a prompt that end behind block `from_block`."""
        names, size = self._driver.open(Prompt.of(prompt), to_look=True).tokens.names, self._offload.blocks_per_chunk
        return [(names[end - 1], 0) for end in range(size, len(names) + 1, size) if end > from_block]

    def in_files(self, prompt: Prompt | TokenIds) -> int:
        """Count the tokens of a prompt that the folder has beyond those of device and host. Changes nothing."""
        assert self.files is not None
        asked, folder = Prompt.of(prompt), self.files.threads.store
        if asked.keys is not None and not self.files.serves(asked.keys.load_tiers):
            return 0
        before: int = self._driver.lookup(self._driver.open(asked, to_look=True)) + self.cached(
            asked, self._offload.tier
        )
        chunk = self._offload.blocks_per_chunk * self.manager.block_size
        missing = self.chunks_of(asked)[before // chunk :]
        there = sum(1 for _ in takewhile(folder.__contains__, missing))
        return max(0, before // chunk * chunk + there * chunk - before)

    def start_pass(self, now: float) -> None:
        """Start a pass of a scheduler, which is a step."""
        self._now = max(now, self._now)
        if self._offload.files is not None:
            self._offload.files.threads.now = self._now

    def end_pass(self) -> float:
        """Run the step of a pass that has scheduled everything; return the ms that it waits for flushed transfers."""
        start = self._now
        self.step()
        return self._now - start

    def load(self, state: Any) -> OffloadRequest | Literal["blocked", "deferred", "none"]:
        """Load the chunks that the host has of a request without blocks.

        Returns:
            The request, whose load arrives with a later step; or "blocked" if too few blocks are free, "deferred" if it
            must wait for another transfer, "none" if nothing is loaded.
        """
        driver = self._driver
        hits, found = driver.found(state)
        local = driver.whole(found)
        request: OffloadRequest = driver.known(state)
        hit = self._offload.match(request, local)
        if hit is None:
            return "deferred"
        if local + hit.tokens <= found:
            return "none"
        if local < found:  # a longer hit from the host replaces a hit that ends inside a block
            hits = driver.cut(hits, local)
        if not driver.fits(state, hits, local, hit.tokens):
            return "blocked"
        driver.place(state, hits, hit.tokens)
        driver.loads(state)
        self._offload.allocated(request, driver.tables(state), hit, driver.named)
        self._loading[request], self.local[state] = state, local
        return request

    def onboard(self, state: Any, *, wait: bool, resumed: bool) -> int:  # noqa: ARG002 - preempted ones load, too
        """Load the chunks that the host has of a request without blocks; see `HostTime.onboard`."""
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
            self._wait_for(state, wait, "its leading blocks are being copied, or the blocks that it needs are")
        local = self.local[state]
        self.step()
        while outcome in self._loading:
            blocks = (state.num_computed_tokens - local) // self.manager.block_size
            self._wait_for(state, wait, f"{blocks} blocks are on their way back from the host")
        self._driver.name(state, state.num_computed_tokens)
        del self.local[state]
        computed: int = min(state.num_computed_tokens, len(state) - 1)
        state.num_computed_tokens = computed
        return computed - local

    def admitted(self, state: Any) -> None:
        """Do nothing: loaded tokens were counted on arrival."""

    def allocate(self, state: Any, upto: int, *, wait: bool) -> None:
        """Take blocks for a request's first `upto` tokens, in one or more steps; see `HostTime.allocate`."""
        reached = -1
        while reached < upto:
            before = state.num_computed_tokens
            reached = self._driver.allocate(state, upto)
            if reached < upto and state.num_computed_tokens == before:
                self._wait_for(state, wait, "blocks of the device are being filled by loads for other requests")
            else:
                self.step()

    def generate(self, state: Any, tokens: Sequence[int]) -> None:
        """Decode, one step per token; see `HostTime.generate`."""
        if self._driver.powers.drafts is not None:
            self.generate_runs(state, [(token,) for token in tokens])
            return
        for token in tokens:
            state.tokens.append(token)
            self.allocate(state, len(state), wait=True)

    def generate_runs(self, state: Any, runs: Sequence[Sequence[int]]) -> None:
        """Decode in steps that try drafts; see `HostTime.generate_runs`."""
        driver = cast("DraftOffloadDriver", self._driver)
        for run in runs:
            left = driver.owed(state, run)
            if left:
                self.allocate(state, len(state), wait=True)
                driver.generate_run(state, left)

    def _wait_for(self, state: Any, wait: bool, why: str) -> None:
        """Wait; if waiting is not allowed, abandon the load of the request, or end the request, and raise."""
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
        """Abandon a load: its request loses its blocks, which are cached and freed when the load arrives."""
        state = self._loading[request]
        left = self._driver.leave(state)
        self._loading[request], self.local[left] = left, self.local.pop(state)
        self._left.add(left)

    def _wait(self, wait: bool, why: str) -> None:
        """Let time pass until the next step that has work."""
        if self.deadline() == self._now:  # a step that takes no time
            self.tick(self._now)
            return
        deadline = self.deadline()
        assert deadline is not None  # it waits for something
        if not wait:
            raise WouldWait(self._now, deadline, why)
        self.tick(max(deadline, self._now))


class WorkerFolder:
    """The folder below the host of a worker, for tests that fill it or delete from it. Deletions publish nothing.

    Args:
        host_time: the time of the worker.
    """

    def __init__(self, host_time: NativeHostTime) -> None:
        files = host_time.files
        assert files is not None  # it is made for one
        self._host_time, self._files, self._store = host_time, files, files.threads.store

    @property
    def announces(self) -> bool:
        """Whether its worker announces written chunks (vLLM: `enable_kv_events` of the tier)."""
        return self._files.publishes

    @announces.setter
    def announces(self, announces: bool) -> None:
        self._files.publishes = announces

    @property
    def blocks(self) -> set[int]:
        """Names of the last blocks of its chunks, written by any worker."""
        return {name for name, _ in self._store.files}

    def fill(self, prompt: Prompt | TokenIds) -> None:
        """Write the complete chunks of a prompt, as another worker would."""
        self._store.write(self._host_time.chunks_of(prompt))

    def lose(self, prompt: Prompt | TokenIds, from_block: int = 0) -> None:
        """Delete the files of a prompt's chunks from a block on, as a cleaner does."""
        check_integer("lose: from_block", from_block, 0)
        self._store.lose(self._host_time.chunks_of(prompt, from_block))

    def reusable(self, prompt: Prompt | TokenIds) -> int:
        """Count the tokens that a request would read beyond those of device and host. Changes nothing."""
        return self._host_time.in_files(prompt)
