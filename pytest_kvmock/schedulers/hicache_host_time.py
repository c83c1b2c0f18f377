"""The virtual time of a worker over SGLang's HiCache: when copies between device and host are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from pytest_kvmock.drivers.driver import SlotsLost, WouldWait
from pytest_kvmock.events import StorageTier
from pytest_kvmock.schedulers.host_time import HostTime
from pytest_kvmock.tiers.timed_copies import HostLinks

if TYPE_CHECKING:
    from pytest_kvmock.cache.sglang.hicache_cache import HiCacheManager
    from pytest_kvmock.cache.sglang.radix_tree import TreeNode
    from pytest_kvmock.drivers.hicache_driver import HiCacheDriver
    from pytest_kvmock.schedulers.scheduler import ScheduledRequest
    from pytest_kvmock.tokens import Prompt

# Theory of operation
#
# A group of copies begins when it is submitted, or when the one before it in its direction is done. A load is waited for by
# nobody: its request computes layer by layer behind it. A copy to the host is acknowledged when time passes to its end; until
# then its nodes cannot be evicted, which is what a request may have to wait for.


_SLACK_MS: Final = 0.001
"""So long after the end of its patience a request waits no longer."""


class Prefetches:
    """The requests of a scheduler that wait for what a storage has: they stay in its queue, and others may pass.

    For blocks from the host nobody waits: a load goes with the batch that needs it.
    """

    parks_preempted = False
    requests: Sequence[ScheduledRequest] = ()

    def __init__(self, host_time: HiCacheHostTime) -> None:
        self._host_time = host_time

    @property
    def deadline(self) -> float | None:
        """When the next copy is done, or somebody waits no longer."""
        return self._host_time.wakes()

    @property
    def is_quiet(self) -> bool:
        """Whether no copy or prefetch is under way."""
        return self.deadline is None

    def park(
        self,
        request: ScheduledRequest,
        cached_tokens: int,  # noqa: ARG002 - as `Waits` has it
        now_ms: float,  # noqa: ARG002 - as `Waits` has it
    ) -> Literal["deferred", "none"]:
        """Whether it is passed over, as what is fetched for it has not come."""
        return "deferred" if self._host_time.blocked(request.state) else "none"

    def take_back(self) -> list[ScheduledRequest]:
        """Nobody."""
        return []

    def land(self, request: ScheduledRequest) -> None:
        """Nothing."""

    def landed_tokens(self, request: ScheduledRequest) -> int:  # noqa: ARG002 - as `Waits` has it
        """None."""
        return 0

    def give_up(self, request: ScheduledRequest) -> None:
        """Nothing: nobody waits."""


class HiCacheHostTime(HostTime):
    """The time of a worker over SGLang's HiCache.

    Args:
        driver: the worker's.
        now: the time, in ms.

    Attributes:
        manager: the worker's.
    """

    def __init__(self, driver: HiCacheDriver, now: float = 0.0) -> None:
        super().__init__(driver, now)
        self.manager: HiCacheManager = driver.manager
        assert isinstance(self.manager.offload, HostLinks)
        self._links = self.manager.offload
        self._writes: deque[float] = deque()  # when each group is done
        self._loads: deque[float] = deque()
        self._reads: deque[float] = deque()  # when the storage reports each batch, and each end
        self._write_end = self._load_end = self._read_end = now
        self._left: dict[Any, None] = {}  # requests that did not wait, and whose prefetch goes on
        self.parking: Prefetches = Prefetches(self)

    @property
    def num_blocks(self) -> int:
        """Blocks that the host has room for."""
        return self.manager.host_blocks

    def _begin(self) -> None:
        """Let what was ordered begin, each group behind the one before it."""
        manager = self.manager
        manager.submit_writes()
        manager.submit_loads()
        for group in [*manager.writes][len(self._writes) :]:
            pages = sum(_pages(hold.nodes) for hold in group)
            self._write_end = max(self._now, self._write_end) + self._links.ms(pages)
            self._writes.append(self._write_end)
        for loads in [*manager.loads][len(self._loads) :]:
            pages = sum(_pages(hold.nodes) for hold, _ in loads)
            self._load_end = max(self._now, self._load_end) + self._links.ms(pages)
            self._loads.append(self._load_end)

    def deadline(self) -> float | None:
        """When the next group is done; None: nothing is under way."""
        self._begin()
        return min((ends[0] for ends in (self._writes, self._loads, self._reads) if ends), default=None)

    def wakes(self) -> float | None:
        """Return the `deadline`, or when the next request has waited for its prefetch as long as it may."""
        ends = [] if (deadline := self.deadline()) is None else [deadline]
        storage = self._driver.storage
        if storage is not None:
            timeouts = (timeout * 1000 + _SLACK_MS for timeout in storage.timeouts)
            ends += (end for end in timeouts if end > self._now)  # one that is over waits for something else
        return min(ends, default=None)

    # ------------------------------------------------------------------------------------------ what a storage has

    def arrive(self, state: Any) -> None:
        """Look a request up in the storage, if there is one; what that has begins to come."""
        storage = self._driver.storage
        if storage is not None:
            storage.now = self._now / 1000
            storage.arrive(state)
            self._see()

    def _see(self, *, retries: bool = False) -> None:
        """See what the storage has answered and read; with retries, look up again what was not found, in no time."""
        storage = self._driver.storage
        if storage is None:
            return
        if retries:
            storage.step()
        while True:
            storage.run(len(storage.queries), 0, 0, 0)
            storage.see()
            if not storage.queries:
                break
        while storage.transfers:
            known, came = len(storage.reports), 0
            storage.run(0, 1, 0, 0)
            for _, done in [*storage.reports][known:]:
                pages = 0 if done is None else done - came
                came += pages
                self._read_end = max(self._now, self._read_end) + self._links.ms(pages)
                self._reads.append(self._read_end)
        for state in [*self._left]:
            if storage.waiting[state].prefetch is None:
                del self._left[state]
                storage.leave(state)
        self.manager.step(0, 0)  # publishes what came to the host

    def blocked(self, state: Any) -> bool:
        """Whether a request has to wait for what is fetched for it, or is looked up again, before it is admitted."""
        storage = self._driver.storage
        if storage is None or state not in storage.waiting:
            return False
        storage.now = self._now / 1000
        if storage.blocks(state):
            return True
        self._see()
        if storage.shrank(state, self.manager.promised(state)) is None:
            return False
        self._see()
        return True

    def _fetch(self, state: Any, *, wait: bool) -> None:
        """Wait for what the storage has of a request."""
        self.arrive(state)
        while self.blocked(state):
            if (
                self._driver.storage.waiting[state].prefetch is None
            ):  # its match has become shorter, and it was looked up again
                continue
            try:
                self._wait(wait, "its prefix is fetched from the storage")
            except WouldWait:
                state.leaves_prefetch = True
                self._left[state] = None
                raise

    def _pass(self, now: float) -> None:
        while (deadline := self.deadline()) is not None and deadline <= now:
            self._now = max(deadline, self._now)
            counts = []
            for ends in (self._writes, self._loads):
                counts.append(0)
                while ends and ends[0] <= self._now:
                    ends.popleft()
                    counts[-1] += 1
            self.manager.step(*counts)
            read = 0
            while self._reads and self._reads[0] <= self._now:
                self._reads.popleft()
                read += 1
            if read:
                self.manager.storage.run(0, 0, read, 0)  # type: ignore[union-attr]  # it has read
            self._see()
            self._driver.write_storage()
        self._now = max(now, self._now)

    def pass_to(self, now: float) -> None:
        """Move the time forward."""
        self.tick(now)

    def start_pass(self, now: float) -> None:
        """A pass of a scheduler starts: it looks what is done."""
        self.tick(max(now, self._now))
        self._see(retries=True)

    def end_pass(self) -> float:
        """A pass has computed: its copies begin."""
        self._begin()
        return 0.0

    def forget(self) -> None:
        """Nothing: what is cleared has no copy under way."""

    def cancel(self) -> None:
        """Nothing: a server has no way to empty its host alone."""

    def unpublished(self, tier: StorageTier) -> Container[int]:  # noqa: ARG002 - all that is there was published
        """Nothing."""
        return ()

    def room(self) -> int:
        """Count the blocks of the device that no request holds, those included that are being copied."""
        return self.manager.unheld_blocks

    def cached(self, prompt: Prompt, tier: StorageTier) -> int:
        """Count the tokens of a prompt that would be loaded from the host: those beyond the device, unless they are too few."""
        if tier != StorageTier.HOST_PINNED:
            return 0
        state = self._driver.open(prompt, to_look=True)
        manager = self.manager
        return (manager.lookup(state) - manager.on_device(state)) * manager.block_size

    def onboard(self, state: Any, *, wait: bool, resumed: bool) -> int:
        """Admit a request when what is fetched for it has come; it does not wait for what it loads from the host."""
        self.tick(self._now)
        if not resumed:
            self._fetch(state, wait=wait)
        while not self._driver.start(state, len(state)):
            self._wait(wait, "blocks of the device are being copied to the host")
        tokens: int = state.from_host
        return tokens

    def admitted(self, state: Any) -> None:  # noqa: ARG002 - whatever it is
        """A request is computed: its copies begin."""
        self._begin()

    def allocate(self, state: Any, upto: int, *, wait: bool) -> None:
        """Compute a request's first tokens, and wait where blocks for them are being copied."""
        while self.manager.lacking(state, upto):
            self._wait(wait, "blocks of the device are being copied to the host")
        self._driver.admit(state, upto)

    def generate(self, state: Any, tokens: Sequence[int]) -> None:
        """Decode, one step a token, and wait where blocks are being copied."""
        self.generate_runs(state, [(token,) for token in tokens])

    def generate_runs(self, state: Any, runs: Sequence[Sequence[int]]) -> None:
        """Decode in steps that commit so many tokens each, and wait where blocks are being copied."""
        for run in runs:
            while not self._driver.make_room((state,)):
                self._wait(True, "")
            self._driver.commit(state, run)
        self._begin()

    def _wait(self, wait: bool, why: str) -> None:
        deadline = self.wakes()
        if deadline is None:
            raise SlotsLost(
                "blocks of the device are cached, and cannot be evicted: what is below them is held on the host"
            )
        if not wait:
            raise WouldWait(self._now, deadline, why)
        self.tick(max(deadline, self._now))


def _pages(nodes: Sequence[TreeNode]) -> int:
    return sum(len(node.names) for node in nodes)
