"""The virtual time of a worker over SGLang's HiCache: when copies between device and host are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from pytest_kvmock.engines.base.bandwidth import HostLinks
from pytest_kvmock.engines.base.driver import SlotsLost, WouldWait
from pytest_kvmock.engines.base.host_time import HostTime
from pytest_kvmock.values.events import StorageTier

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.engines.sglang.host.hicache_cache import HiCacheManager
    from pytest_kvmock.engines.sglang.host.hicache_driver import HiCacheDriver
    from pytest_kvmock.engines.sglang.radix_tree import TreeNode
    from pytest_kvmock.values.tokens import Prompt

# Theory of operation
#
# A group of copies begins when it is submitted, or when the previous group in the same direction is done. No request
# waits for a load: it computes layer by layer while the load runs. A copy to the host is acknowledged when its end is
# reached. Until then its nodes cannot be evicted, and a request may have to wait for room.


_SLACK_MS: Final = 0.001
"""Added to the end of a request's wait, so that the wait is over by then."""


class Prefetches:
    """The requests of a scheduler that wait for a prefetch from a storage: they stay in its queue, and others may pass.

    No request waits for blocks from the host: a load runs with the batch that needs it.
    """

    parks_preempted = False
    requests: Sequence[ScheduledRequest] = ()

    def __init__(self, host_time: HiCacheHostTime) -> None:
        self._host_time = host_time

    @property
    def deadline(self) -> float | None:
        """Time at which the next copy is done or the next wait ends."""
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
        """Return "deferred" if a request is skipped because its prefetch has not arrived."""
        return "deferred" if self._host_time.blocked(request.state) else "none"

    def take_back(self) -> list[ScheduledRequest]:
        """Return no request: none is taken out of the queue."""
        return []

    def land(self, request: ScheduledRequest) -> None:
        """Do nothing."""

    def landed_tokens(self, request: ScheduledRequest) -> int:  # noqa: ARG002 - as `Waits` has it
        """Return 0: no request waits for blocks from the host."""
        return 0

    def give_up(self, request: ScheduledRequest) -> None:
        """Do nothing: no request waits."""


class HiCacheHostTime(HostTime):
    """The time of a worker over SGLang's HiCache.

    Args:
        driver: the worker's driver.
        now: the time, in ms.

    Attributes:
        manager: the worker's manager.
    """

    def __init__(self, driver: HiCacheDriver, now: float = 0.0) -> None:
        super().__init__(driver, now)
        self.manager: HiCacheManager = driver.manager
        assert isinstance(self.manager.offload, HostLinks)
        self._links = self.manager.offload
        self._writes: deque[float] = deque()  # time at which each group is done
        self._loads: deque[float] = deque()
        self._reads: deque[float] = deque()  # times at which the storage reports each batch and each end
        self._write_end = self._load_end = self._read_end = now
        self._left: dict[Any, None] = {}  # requests that did not wait, and whose prefetch continues
        self.parking: Prefetches = Prefetches(self)

    @property
    def num_blocks(self) -> int:
        """Capacity of the host in blocks."""
        return self.manager.host_blocks

    def _begin(self) -> None:
        """Start the ordered copies, each group after the previous one."""
        manager = self.manager
        manager.submit_writes()
        manager.submit_loads()
        for group in [*manager.writes][len(self._writes) :]:
            pages = sum(_pages(hold.nodes) for hold in group)
            self._write_end = max(self._now, self._write_end) + self._links.ms(pages)
            self._writes.append(self._write_end)
        for loads in [*manager.loads][len(self._loads) :]:
            pages = sum(_pages(load.nodes.nodes) for load in loads)
            self._load_end = max(self._now, self._load_end) + self._links.ms(pages)
            self._loads.append(self._load_end)

    def deadline(self) -> float | None:
        """Return the time at which the next group is done; None if none is under way."""
        self._begin()
        return min((ends[0] for ends in (self._writes, self._loads, self._reads) if ends), default=None)

    def wakes(self) -> float | None:
        """Return the `deadline`, or the time at which the next wait for a prefetch times out, whichever comes first."""
        ends = [] if (deadline := self.deadline()) is None else [deadline]
        storage = self._driver.storage
        if storage is not None:
            timeouts = (timeout * 1000 + _SLACK_MS for timeout in storage.timeouts)
            ends += (end for end in timeouts if end > self._now)  # requests that timed out wait for something else
        return min(ends, default=None)

    # ------------------------------------------------------------------------------------------ what a storage has

    def arrive(self, state: Any) -> None:
        """Look a request up in the storage, if there is one, and start its prefetch."""
        storage = self._driver.storage
        if storage is not None:
            storage.now = self._now / 1000
            storage.arrive(state)
            self._see()

    def _see(self, *, retries: bool = False) -> None:
        """Take the storage's answers and reads; with `retries`, repeat failed look-ups, which takes no time."""
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
                pages = done - came if isinstance(done, int) else 0
                came += pages
                self._read_end = max(self._now, self._read_end) + self._links.ms(pages)
                self._reads.append(self._read_end)
        for state in [*self._left]:
            if storage.waiting[state].prefetch is None:
                del self._left[state]
                storage.leave(state)
        self.manager.step(0, 0)  # publishes pages that arrived on the host

    def blocked(self, state: Any) -> bool:
        """Return whether a request has to wait for its prefetch, or for a second look-up, before it is admitted."""
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
        """Wait for the prefetch of a request."""
        self.arrive(state)
        while self.blocked(state):
            if (
                self._driver.storage.waiting[state].prefetch is None
            ):  # its match became shorter, and it was looked up again
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
        """Begin a pass of a scheduler, which acknowledges finished copies."""
        self.tick(max(now, self._now))
        self._see(retries=True)

    def end_pass(self) -> float:
        """End a pass: its copies begin."""
        self._begin()
        return 0.0

    def forget(self) -> None:
        """Do nothing: no copy is under way when a cache is cleared."""

    def cancel(self) -> None:
        """Do nothing: a server cannot empty only its host."""

    def unpublished(self, tier: StorageTier) -> Container[int]:  # noqa: ARG002 - every host page was published
        """Return an empty container."""
        return ()

    def room(self) -> int:
        """Count the device blocks that no request holds, including those that are being copied."""
        return self.manager.unheld_blocks

    def cached(self, prompt: Prompt, tier: StorageTier) -> int:
        """Count the tokens of a prompt that would be loaded from the host, after the device's prefix; 0 if too few."""
        if tier != StorageTier.HOST_PINNED:
            return 0
        state = self._driver.open(prompt, to_look=True)
        manager = self.manager
        return (manager.lookup(state) - manager.on_device(state)) * manager.block_size

    def onboard(self, state: Any, *, wait: bool, resumed: bool) -> int:
        """Admit a request once its prefetch has arrived; it does not wait for loads from the host."""
        self.tick(self._now)
        if not resumed:
            self._fetch(state, wait=wait)
        while not self._driver.start(state, len(state)):
            self._wait(wait, "blocks of the device are being copied to the host")
        tokens: int = state.from_host
        return tokens

    def admitted(self, state: Any) -> None:  # noqa: ARG002 - whatever it is
        """Start the copies of a computed request."""
        self._begin()

    def allocate(self, state: Any, upto: int, *, wait: bool) -> None:
        """Compute a request's first tokens; wait if blocks for them are being copied."""
        while True:
            end = self.manager.chunk_end(state, upto)  # with windows, in several chunks, as room allows
            while self.manager.lacking(state, end):
                self._wait(wait, "blocks of the device are being copied to the host")
                end = self.manager.chunk_end(state, upto)
            self._driver.admit(state, end)
            if end >= upto:
                return
            self._begin()

    def generate(self, state: Any, tokens: Sequence[int]) -> None:
        """Decode one token per step; wait if blocks are being copied."""
        self.generate_runs(state, [(token,) for token in tokens])

    def generate_runs(self, state: Any, runs: Sequence[Sequence[int]]) -> None:
        """Decode in steps that each commit one of `runs`; wait if blocks are being copied."""
        for run in runs:
            while not self._driver.make_room((state,)):
                self._wait(True, "")
            self._driver.commit(state, run)
        self._begin()

    def _wait(self, wait: bool, why: str) -> None:
        deadline = self.wakes()
        if deadline is None:
            raise SlotsLost("device blocks are cached and cannot be evicted, as nodes below them are held on the host")
        if not wait:
            raise WouldWait(self._now, deadline, why)
        self.tick(max(deadline, self._now))


def _pages(nodes: Sequence[TreeNode]) -> int:
    return sum(len(node.names) for node in nodes)
