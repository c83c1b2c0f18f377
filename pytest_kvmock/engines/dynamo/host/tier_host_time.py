"""The virtual time of a worker whose evicted blocks travel to the host, and the requests that wait in it.

They wait for blocks of the device, or for their prefix to come back from the host (Dynamo's `VllmCore`,
`AwaitingSwapIn`). The blocks of the prefix that the device has are pinned meanwhile, and slots are reserved for those
that come. When the transfer is done, these are cached as inactive blocks, and the request's own Use finds them.

One subject: what travels between Dynamo's device and host, and which requests wait for it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from pytest_kvmock.engines.base.driver import SlotsLost, WouldWait, checked_manager
from pytest_kvmock.engines.base.host_time import HostTime
from pytest_kvmock.engines.base.offload import BlockDetails, BlockedOnG1Offload, NoHits, Scheduled
from pytest_kvmock.engines.dynamo.logical import LogicalManager
from pytest_kvmock.values.events import StorageTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.engines.dynamo.cached_slots import Pin
    from pytest_kvmock.engines.dynamo.move_driver import MoveDriver
    from pytest_kvmock.engines.dynamo.sequence import ActiveSequence
    from pytest_kvmock.values.tokens import Prompt


class Parked:
    """A swap-in under way for one request.

    Attributes:
        plhs: lineage hashes of the request's blocks up to the last that comes.
        skip: how many of them the device had.
        pin: what keeps those on the device.
    """

    __slots__ = ("_blocks", "_manager", "_parent", "_scheduled", "pin", "plhs", "skip")

    def __init__(
        self, manager: LogicalManager, sequence: ActiveSequence, skip: int, pin: Pin, coming: Scheduled
    ) -> None:
        end = skip + coming.num_blocks
        plhs, locals_ = sequence.positional_lineage_hashes, sequence.block_hashes
        size = sequence.block_size
        tokens = sequence.tokens if sequence.emit_token_ids else None
        self._manager = manager
        self.pin = pin
        self._scheduled = coming
        self.plhs = tuple(plhs[:end])
        self.skip = skip
        names = [block for block in sequence.unique_blocks[:end] if not isinstance(block, UUID)]
        self._parent = names[skip - 1] if skip else None
        self._blocks = [
            BlockDetails(
                names[i], plhs[i], None, locals_[i], None if tokens is None else tokens[i * size : (i + 1) * size]
            )
            for i in range(skip, end)
        ]

    @property
    def num_blocks(self) -> int:
        """How many blocks come."""
        return len(self._blocks)

    @property
    def is_open(self) -> bool:
        """Whether slots are reserved for them: until `resume` or `give_up`, or until its manager cancels its
        transfers.
        """
        return self._scheduled.is_open

    @property
    def is_complete(self) -> bool:
        """Whether they have come, by the last tick."""
        return self._scheduled.is_complete

    def resume(self) -> int:
        """Cache the blocks that came, and pin no more; return how many."""
        taken = self._manager.register_swapped_in(self._blocks, self._parent, self._scheduled)
        self._manager.unpin(self.pin)
        return taken

    def give_up(self) -> None:
        """Free slots and pins; the transfer continues without effect."""
        self._manager.put_down(self._scheduled)
        self._manager.unpin(self.pin)


class Parking:
    """What is under way from the host to one manager, in the order in which it began, and for which request.

    The requests of a scheduler are parked, and come back to it (`take_back`). A worker's own wait for theirs while its
    time passes (`TierHostTime`), and are not listed here: what comes may be another's by then.

    Args:
        driver: of the manager; what is published meanwhile is for requests, as its recorder marks it.
        manager: the manager.
    """

    parks_preempted = False
    """Only what is new is swapped in, as by Dynamo's scheduler."""

    def __init__(self, driver: MoveDriver, manager: LogicalManager) -> None:
        self._driver = driver
        self._manager = manager
        self._parked: dict[Parked, ScheduledRequest | None] = {}

    @property
    def requests(self) -> Sequence[ScheduledRequest]:
        """The requests of a scheduler that are parked, in the order of their parking."""
        return tuple(request for request in self._parked.values() if request is not None)

    @property
    def of_worker(self) -> list[Parked]:
        """What is under way for requests of the worker itself, without what the manager cancelled."""
        return [parked for parked, request in self._parked.items() if request is None and parked.is_open]

    @property
    def deadline(self) -> float | None:
        """When the next transfer is done, those to the host included; None if none is under way."""
        return self._manager.offload_deadline()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing that a scheduler waits for, or pays for, happens however much time passes."""
        return not self.requests and self.deadline is None

    def start(
        self, sequence: ActiveSequence, cached_tokens: int, now: float, request: ScheduledRequest | None = None
    ) -> Parked | NoHits | BlockedOnG1Offload:
        """Start to bring back what the host has of a request, from the first block on that the device has not.

        Args:
            sequence: the request's; it holds no block.
            cached_tokens: tokens of its prompt that the device has.
            now: the time in ms.
            request: the scheduler's request; None: the worker's own.
        """
        manager = self._manager
        plhs = sequence.positional_lineage_hashes
        skip = cached_tokens // sequence.block_size
        if skip >= len(plhs):
            return NoHits()
        with self._driver.recorder:
            pin = manager.pin(plhs[:skip])
            if pin is None:
                return NoHits()
            outcome = manager.swap_in(plhs[skip:], now)
            if not isinstance(outcome, Scheduled):
                manager.unpin(pin)
                return outcome
        parked = Parked(manager, sequence, skip, pin, outcome)
        self._parked[parked] = request
        return parked

    def park(
        self, request: ScheduledRequest, cached_tokens: int, now_ms: float
    ) -> Literal["parked", "blocked", "none"]:
        """Start to bring back what the host has of a request that waits for its first admission.

        Args:
            request: which.
            cached_tokens: tokens of it that the device has.
            now_ms: the time.

        Returns:
            "parked"; "blocked" where blocks of the device must travel to the host first; "none" where nothing comes.
        """
        outcome = self.start(request.state, cached_tokens, now_ms, request)
        if isinstance(outcome, Parked):
            return "parked"
        return "none" if isinstance(outcome, NoHits) else "blocked"

    def resume(self, parked: Parked) -> int:
        """Cache the blocks that came, and pin no more; return how many."""
        with self._driver.recorder:
            return parked.resume()

    def land(self, request: ScheduledRequest) -> None:
        """Nothing: its own Use finds what has come."""

    def landed_tokens(self, request: ScheduledRequest) -> int:  # noqa: ARG002 - as above
        """None: it holds nothing while it waits."""
        return 0

    def take_done(self) -> list[Parked]:
        """Take out what has come for requests of the worker, by the last tick, and forget what the manager cancelled.

        The caller resumes each.
        """
        own = [parked for parked, request in self._parked.items() if request is None]
        done = [parked for parked in own if parked.is_open and parked.is_complete]
        for parked in own:
            if not parked.is_open or parked in done:
                del self._parked[parked]
        return done

    def take_back(self) -> list[ScheduledRequest]:
        """Take out the requests whose blocks have come, which are cached now, in parking order.

        And those whose blocks never will, as the manager was cleared.
        """
        done = [
            (parked, request)
            for parked, request in self._parked.items()
            if request is not None and (parked.is_complete or not parked.is_open)
        ]
        for parked, request in done:
            del self._parked[parked]
            blocks = self.resume(parked) if parked.is_open else 0
            request.onboarded_tokens += blocks * self._manager.block_size
        return [request for _, request in done]

    def give_up(self, request: ScheduledRequest) -> None:
        """Forget a parked request; what is on its way for it comes for nothing."""
        parked = next(parked for parked, waits in self._parked.items() if waits is request)
        del self._parked[parked]
        if parked.is_open:
            with self._driver.recorder:
                parked.give_up()

    def forget(self) -> None:
        """Forget the worker's transfers under way: its manager cancelled them. A scheduler takes its requests back."""
        self._parked = {parked: request for parked, request in self._parked.items() if request is not None}


class TierHostTime(HostTime):
    """The time of a worker whose evicted blocks travel to the host, and what is under way in it.

    Args:
        driver: the worker's; its manager has an offload engine.
        now: the time, in ms.

    Attributes:
        manager: the worker's.
        parking: what is under way from the host to it, for requests of the worker and of a scheduler that uses it.
    """

    def __init__(self, driver: MoveDriver, now: float = 0.0) -> None:
        super().__init__(driver, now)
        self.manager: LogicalManager = checked_manager(driver.manager, LogicalManager, "TierHostTime")
        self.parking: Parking = Parking(driver, self.manager)
        # Blocks that came back to the device and are not counted as onboarded yet, by the requested blocks.
        self._came: dict[tuple[int, ...], set[int]] = {}

    @property
    def now(self) -> float:
        """The time, in ms: that of its last tick, or the manager's where somebody moved that alone further."""
        return max(self._now, self.manager.offload_now)

    @property
    def num_blocks(self) -> int | None:
        """Capacity of the host in blocks; None without a host."""
        return None if self.manager.offload is None else self.manager.offload.num_blocks

    def _pass(self, now: float) -> None:
        self._now = now
        with self._driver.recorder:
            self.manager.tick(self._now)
        for parked in self.parking.take_done():
            cached = {
                plh for blocks in self._came.values() for plh, here in self.manager.check_presence(blocks) if here
            }
            self._came = {plhs: here for plhs, blocks in self._came.items() if (here := blocks & cached)}
            self._came.setdefault(parked.plhs, set()).update(parked.plhs[parked.skip :])
            self.parking.resume(parked)

    def start_pass(self, now: float) -> None:
        """Move the time forward: a pass finds what is done."""
        self.tick(now)

    def end_pass(self) -> float:
        """Nothing: evicted blocks of a pass travel without it."""
        return 0.0

    def pass_to(self, now: float) -> None:
        """Move the time forward from the end of one transfer to the next, so that each that was queued starts in its
        turn.
        """
        deadline = self.manager.offload_deadline()
        while deadline is not None and deadline <= now:
            self.tick(max(deadline, self.now))
            deadline = self.manager.offload_deadline()
        self.tick(now)

    def forget(self) -> None:
        """Forget what is parked, and what came back: its manager cancelled it."""
        self.parking.forget()
        self._came.clear()

    def cancel(self) -> None:
        """Cancel all transfers, and empty the further tier."""
        self.manager.cancel_offload()
        self.forget()

    def unpublished(self, tier: StorageTier) -> Container[int]:
        """Return the blocks of a further tier that events do not show; see `OffloadEngine`."""
        return self.manager.unpublished(tier)

    @property
    def lost_text(self) -> str | None:
        """Which slots of the device are lost, and why; None while something is under way, or none are."""
        manager = self.manager
        engine, lost = manager.offload, manager.num_outside - manager.num_reserved
        if engine is None or not lost or engine.deadline() is not None:
            return None
        pins = cure = ""
        if engine.lost_to_pins:
            pins = " while blocks that come back to the device are pinned there"
            cure = f"; a host of {2 * manager.num_blocks} blocks, twice the device, has room for both"
        return (
            f"{lost} blocks of the device are quarantined for ever: the host could not hold a batch "
            f"whole{pins}, and lost it{cure}. Nothing is under way in {engine!r}"
        )

    def room(self) -> int:
        """Count the blocks of the device that no request holds, those included whose slots are on their way.

        What is reserved or pinned for blocks that come back is free when they are there; but if they come for requests
        of a scheduler, only when that takes these back.
        """
        manager = self.manager
        parked = self.parking.of_worker
        elsewhere = manager.num_reserved - sum(each.num_blocks for each in parked)
        pinned = manager.num_held_by(each.pin for each in parked)
        return manager.num_blocks - manager.num_active_blocks + manager.num_outside - elsewhere + pinned

    def cached(self, prompt: Prompt, tier: StorageTier) -> int:
        """Count the tokens of a prompt that a further tier has, beyond those that the device has. Changes nothing."""
        engine = self.manager.offload
        if engine is None or engine.tier != tier:
            return 0
        size = self.manager.block_size
        request = self._driver.open(prompt, to_look=True)
        plhs = request.positional_lineage_hashes
        return engine.lookup(plhs[self._driver.lookup(request) // size :]) * size

    def onboard(self, state: Any, *, wait: bool, resumed: bool) -> int:
        """Bring back what the host has of a request that is new; as Dynamo's scheduler, nothing for one that was
        preempted.
        """
        if resumed:
            return 0
        plhs = tuple(state.positional_lineage_hashes)
        while True:
            parked = next((each for each in self.parking.of_worker if each.plhs == plhs[: len(each.plhs)]), None)
            outcome = parked or self.parking.start(state, self._driver.lookup(state), self.now)
            if isinstance(outcome, NoHits):
                size = self.manager.block_size
                came = set().union(*(self._came[asked] for asked in self._asked(plhs)))
                return sum(plh in came for plh in plhs[: self._driver.lookup(state) // size]) * size
            if not isinstance(outcome, Parked):
                self._wait(
                    wait, "blocks of the device are on their way to the host, to make room for those that come back"
                )
                continue
            if parked is None:
                self.tick(self.now)  # publishes other transfers that ended at the start of this one
            while outcome.is_open:
                self._wait(wait, f"{outcome.num_blocks} blocks are on their way back from the host")

    def admitted(self, state: Any) -> None:
        """Forget what came back for a request: it was admitted, and has counted it."""
        for asked in self._asked(tuple(state.positional_lineage_hashes)):
            del self._came[asked]

    def _asked(self, plhs: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The keys of what came back for a request with these blocks: it begins with them."""
        return [asked for asked in self._came if asked == plhs[: len(asked)]]

    def allocate(self, state: Any, upto: int, *, wait: bool) -> None:
        """Use the blocks of a request's first tokens, and wait where the device has none."""
        while self._driver.allocate(state, upto) < upto:
            self._wait(wait, "blocks of the device are on their way to the host")

    def generate(self, state: Any, tokens: Sequence[int]) -> None:
        """Decode, one step a token, and wait where the device has no block for one."""
        for token in tokens:
            while not self._driver.generate(state, token):
                self._wait(True, "")

    def _wait(self, wait: bool, why: str) -> None:
        """Let the time pass until the next transfer is done."""
        manager = self.manager
        deadline = manager.offload_deadline()
        if deadline is None and any(each.is_complete for each in self.parking.of_worker):  # by a tick of the manager
            self.tick(self.now)
            return
        if deadline is None:
            # If the host already had all evicted blocks, their slots are free again at once.
            if manager.num_active_blocks < manager.num_blocks:
                return
            assert self.lost_text is not None  # this was checked before: no request holds the blocks that it waits for
            raise SlotsLost(self.lost_text)
        if not wait:
            raise WouldWait(self.now, deadline, why)
        self.tick(max(deadline, self.now))
