"""The part of vLLM's scheduler for KV that comes from another engine, or is kept for one.

It decides which leg holds blocks, which waits, and when blocks are named.

One subject: the part of `v1/core/sched/scheduler.py` of 0.33.0 for connectors. Running requests and the tokens of a
step belong to the driver.

Theory of operation. A leg that loads gets blocks for its whole prompt at its admission, and then waits with them
outside of the running requests; the blocks have no names. A later step reports the end of the transfer. The leg keeps
waiting until the scheduler next reaches it, before all legs that wait without blocks. Then its blocks are named and
published, and all its tokens except the last count as computed. Received blocks are therefore not published while all
places are taken, a step preempts, or a step has no tokens left.

A load holds its blocks for the whole transfer. It is therefore admitted only if it fits in addition to the blocks that
other unfinished prompts still need. The first leg that does not fit blocks all legs after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from pytest_kvmock.engines.vllm.deferred_frees import DeferredFrees

if TYPE_CHECKING:
    from pytest_kvmock.engines.vllm.pairs.legs import Ended, Finish, Leg, Tables, WorkerReport


class PairDriver(Protocol):
    """The interface that `VllmSide` needs of a block manager's driver."""

    manager: Any

    def lookup(self, request: Any) -> int:
        """Return the number of cached tokens of a request."""

    def room(self) -> int:
        """Return the number of blocks in the free queue."""

    def tables(self, request: Any, tokens: int | None = None) -> tuple[list[int], ...]:
        """Return the blocks that a request holds, by group."""

    def blocks_to_hold(self, request: Any, upto: int, *, external: int = 0, hits: bool = True) -> int:
        """Count the blocks that a request needs from the free queue."""

    def hold(self, request: Any, upto: int, reserved: int = 0) -> bool:
        """Take blocks for tokens that another engine sends; return False if there are too few."""

    def name(self, request: Any, upto: int) -> None:
        """Name the blocks of received tokens."""


class Connector(Protocol):
    """The interface that `VllmSide` needs of a connector's scheduler half."""

    @property
    def needs_delivery(self) -> bool:
        """Whether a preempted request drops its tokens in flight."""

    def arrived(self, leg: Leg) -> None:
        """Note the arrival of a leg."""

    def external(self, leg: Leg, local: int) -> int:
        """Return the number of tokens of a leg that come from another engine."""

    def allocated(self, leg: Leg, external: int, nameless: Tables) -> None:
        """Note that a leg has blocks."""

    def ended(self, leg: Leg, finish: Finish, tables: Tables, computed: int, now_s: float) -> Ended:
        """Note the end of a leg."""

    def reported(self, report: WorkerReport) -> None:
        """Take a report of the worker."""


class WaitingLegs(Protocol):
    """The legs that wait without blocks, in order."""

    def __len__(self) -> int:
        """Return the number of waiting legs."""

    def __getitem__(self, place: int, /) -> Leg:
        """Return the leg at a position; only the first is used."""

    def popleft(self) -> Leg:
        """Take out the first leg, which was admitted."""


class VllmSide:
    """One engine's legs, between its scheduler and its connector.

    Args:
        driver: the driver of its block manager.
        connector: its connector.
        recomputes: whether a leg whose load fails is computed here; if not, it ends with an error.
        defers: whether frees wait for a step, as the connector loads and two batches are in flight.

    Attributes:
        legs: legs that are open or whose blocks are kept, by name.
        holding: legs that hold blocks and do not run, in the order in which they will be taken up.
        over: names of legs that ended since the last step.
        frees: blocks that wait for a step.
        looked_up: called with each leg that was looked up.
    """

    def __init__(
        self,
        driver: PairDriver,
        connector: Connector,
        *,
        recomputes: bool = False,
        defers: bool = False,
    ) -> None:
        self._driver, self._connector = driver, connector
        self._recomputes = recomputes
        self.legs: dict[str, Leg] = {}
        self.holding: list[Leg] = []
        self.over: list[str] = []
        self.frees = DeferredFrees(driver.manager, defers=defers)
        self.looked_up: Callable[[Leg], None] | None = None
        self._prefills: dict[Leg, None] = {}  # legs with blocks and unfinished prompts

    @property
    def kept(self) -> list[Leg]:
        """The legs that are over and still hold blocks."""
        return [leg for leg in self.legs.values() if leg.status == "kept"]

    # ------------------------------------------------------------------------------------------------------ admission

    def arrive(self, leg: Leg) -> None:
        """Add an arriving leg."""
        self.legs[leg.name] = leg
        self._connector.arrived(leg)

    def admit(self, waiting: WaitingLegs, has_place: Callable[[], bool], start: Callable[[Leg], bool]) -> None:
        """Admit legs to a step until one does not fit; legs that hold blocks come first.

        Args:
            waiting: legs without blocks, in order; admitted legs are taken out.
            has_place: returns whether the step has tokens and a running place for one more leg.
            start: starts a leg in free blocks; returns False if there are too few for this step after all.
        """
        for leg in tuple(self.holding):
            if not has_place():
                return
            if leg.status == "loading":
                continue
            if leg.status == "received":
                self.take_up(leg)
            if not self._admit(leg, start):
                return
            self.holding.remove(leg)
        while waiting and has_place():
            if not self._admit(waiting[0], start):
                return
            waiting.popleft()

    def _admit(self, leg: Leg, start: Callable[[Leg], bool]) -> bool:
        driver, state = self._driver, leg.state
        external = 0
        if not state.num_computed_tokens:  # also true for a prompt of one token, which is computed again
            external = self.look_up(leg, driver.lookup(state))
        if driver.blocks_to_hold(state, len(state), external=external) > driver.room():
            return False
        if external:
            return self.load(leg)
        if not start(leg):
            return False
        self.started(leg)
        return True

    def look_up(self, leg: Leg, local: int) -> int:
        """Note the local hit of a leg without blocks; return the number of tokens that come from another engine."""
        leg.local_tokens = local
        leg.external_tokens = self._connector.external(leg, local)
        if not leg.preemptions:
            leg.found = local, leg.external_tokens
        if self.looked_up is not None:
            self.looked_up(leg)
        return leg.external_tokens

    def started(self, leg: Leg) -> None:
        """Note that a leg runs, and has its blocks."""
        leg.status = "running"
        self._connector.allocated(leg, 0, ())

    def load(self, leg: Leg, prefills: Iterable[Any] = ()) -> bool:
        """Give a leg that was looked up blocks for the tokens from another engine.

        Args:
            leg: the leg.
            prefills: running requests with unfinished prompts, in addition to the legs.

        Returns:
            False, and nothing changed, if there is no room in addition to the blocks that others still need.
        """
        driver, state, upto = self._driver, leg.state, leg.local_tokens + leg.external_tokens
        others = (*(each.state for each in self._prefills), *prefills)
        reserved = sum(max(0, driver.blocks_to_hold(each, len(each), hits=False)) for each in others)
        if not driver.hold(state, upto, reserved):
            return False
        leg.status = "loading"
        self._prefills[leg] = None
        self.holding.append(leg)
        self._connector.allocated(leg, leg.external_tokens, driver.manager.nameless_blocks(state))
        return True

    def take_up(self, leg: Leg) -> None:
        """Name the received blocks of a leg, which runs next.

        Tokens that a failed load did not bring are computed here.
        """
        state, driver = leg.state, self._driver
        computed = state.num_computed_tokens
        leg.status = "taken up"
        if not leg.failed:
            driver.name(state, computed)
            state.num_computed_tokens = min(computed, len(state) - 1)  # the last token is computed again
        elif computed:
            driver.name(state, computed)
        else:
            driver.manager.free(state)
            leg.status = "waiting"
        leg.failed = False

    # ----------------------------------------------------------------------------------------------------------- steps

    def step_scheduled(self, scheduled: Iterable[tuple[Leg, int]]) -> None:
        """Note the legs that a step computes, each with its number of tokens."""
        scheduled = list(scheduled)
        number = self.frees.step_scheduled() if scheduled else 0
        for leg, tokens in scheduled:
            leg.in_flight += tokens
            leg.last_step = number
            if leg.state.num_computed_tokens < len(leg.state):
                self._prefills[leg] = None
            else:
                self._prefills.pop(leg, None)

    def preempt(self, leg: Leg) -> None:
        """Take the blocks of a running leg."""
        self.frees.free(leg.state, leg.last_step)
        self._prefills.pop(leg, None)
        leg.status = "preempted"
        leg.preemptions += 1
        if self._connector.needs_delivery:
            leg.stale = leg.in_flight

    def end(self, leg: Leg, finish: Finish, now_s: float, *, at_first_token: bool = False) -> dict[str, Any] | None:
        """End a leg; return the parameters of its answer.

        `at_first_token` tells whether the answer comes with its first token.
        """
        state, driver, was = leg.state, self._driver, leg.status
        leg.finish, leg.status = finish, "over"
        self._prefills.pop(leg, None)
        if leg in self.holding:
            self.holding.remove(leg)
        computed = state.num_computed_tokens
        driver.manager.free_behind_windows(state, max(0, computed - leg.in_flight))
        keeps, params = self._connector.ended(leg, finish, driver.tables(state, computed), computed, now_s)
        self.over.append(leg.name)
        if keeps or was == "loading":  # blocks under a read are freed when its end is reported
            leg.status = "kept"
        else:
            self._free(leg)
        if params is not None and params["do_remote_prefill"] and at_first_token:
            params["remote_prefill_cached_tokens"] = leg.cached_tokens
        return params

    def _free(self, leg: Leg) -> None:
        leg.status = "over"
        self.frees.free(leg.state, leg.last_step)
        del self.legs[leg.name]

    # --------------------------------------------------------------------------------------------------------- reports

    def failures(self, report: WorkerReport) -> list[Leg]:
        """Return the legs that a report ends with an error.

        If `recomputes`, failed legs are computed here instead, after the tokens before the failure.
        """
        failed: dict[Leg, None] = {}
        for name in report.failed:
            leg = self.legs[name]
            if leg.status == "loading":
                leg.state.num_computed_tokens = 0
                failed[leg] = None
        if report.invalid:
            size = self._driver.manager.block_size
            for leg in self.holding:
                if leg.status != "loading" or leg in failed:
                    continue
                (blocks,) = self._driver.tables(leg.state, leg.state.num_computed_tokens)
                first = next((place for place, block in enumerate(blocks) if block in report.invalid), None)
                if first is not None:
                    leg.state.num_computed_tokens = first * size
                    failed[leg] = None
        if not self._recomputes:
            return list(failed)
        for leg in failed:
            leg.failed = True
        return []

    def take_report(self, report: WorkerReport) -> None:
        """Take a report: note received legs, and free blocks that are no longer needed."""
        self._connector.reported(report)
        for name in report.received:
            leg = self.legs[name]
            if leg.status == "loading":
                leg.status = "received"
            else:
                self._free(leg)
        for name in report.sent:
            self._free(self.legs[name])
