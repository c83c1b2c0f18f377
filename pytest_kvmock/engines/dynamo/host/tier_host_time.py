"""The virtual time of a worker that offloads evicted blocks to the host, and the requests that wait.

A request waits for blocks of the device, or until its prefix comes back from the host (Dynamo's `VllmCore`,
`AwaitingSwapIn`). Meanwhile the prefix blocks on the device are pinned, and slots are reserved for the coming blocks.
When the transfer is done, the blocks are cached as inactive ones, and the Use of the request finds them.

One subject: transfers between Dynamo's device and host, and the requests that wait for them.
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
        plhs: lineage hashes of the request's blocks, up to the last block that comes.
        skip: number of leading blocks that the device had.
        pin: the pin that keeps these blocks on the device.
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
        """Number of blocks that come."""
        return len(self._blocks)

    @property
    def is_open(self) -> bool:
        """Whether slots are reserved for the blocks: until `resume`, `give_up`, or a cancellation by the manager."""
        return self._scheduled.is_open

    @property
    def is_complete(self) -> bool:
        """Whether the blocks had arrived by the last tick."""
        return self._scheduled.is_complete

    def resume(self) -> int:
        """Cache the arrived blocks, and drop the pin; return the number of blocks."""
        taken = self._manager.register_swapped_in(self._blocks, self._parent, self._scheduled)
        self._manager.unpin(self.pin)
        return taken

    def give_up(self) -> None:
        """Free the slots and the pin; the transfer continues without effect."""
        self._manager.put_down(self._scheduled)
        self._manager.unpin(self.pin)


class Parking:
    """The swap-ins under way from the host to one manager, in the order of their start, with their requests.

    Requests of a scheduler are parked, and come back to it (`take_back`). A worker's own requests wait while its time
    passes (`TierHostTime`). They are not recorded here, because the blocks may serve another request when they arrive.

    Args:
        driver: the manager's driver; its recorder marks the events of a swap-in as made for a request.
        manager: the manager.
    """

    parks_preempted = False
    """As in Dynamo's scheduler, only new requests are swapped in."""

    def __init__(self, driver: MoveDriver, manager: LogicalManager) -> None:
        self._driver = driver
        self._manager = manager
        self._parked: dict[Parked, ScheduledRequest | None] = {}

    @property
    def requests(self) -> Sequence[ScheduledRequest]:
        """The parked requests of a scheduler, in the order of their parking."""
        return tuple(request for request in self._parked.values() if request is not None)

    @property
    def of_worker(self) -> list[Parked]:
        """The swap-ins under way for the worker's own requests, without those that the manager cancelled."""
        return [parked for parked, request in self._parked.items() if request is None and parked.is_open]

    @property
    def deadline(self) -> float | None:
        """Time at which the next transfer, in either direction, is done; None if none is under way."""
        return self._manager.offload_deadline()

    @property
    def is_quiet(self) -> bool:
        """Whether time alone brings no change that a scheduler waits or pays for."""
        return not self.requests and self.deadline is None

    def start(
        self, sequence: ActiveSequence, cached_tokens: int, now: float, request: ScheduledRequest | None = None
    ) -> Parked | NoHits | BlockedOnG1Offload:
        """Start to load back a request's blocks from the host, from the first block on that the device lacks.

        Args:
            sequence: the request's sequence; it holds no block.
            cached_tokens: number of its prompt tokens that the device has.
            now: the time in ms.
            request: the scheduler's request; None for a request of the worker itself.
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
        """Start to load back the blocks of a request that waits for its first admission.

        Args:
            request: the request.
            cached_tokens: number of its tokens that the device has.
            now_ms: the time.

        Returns:
            "parked"; "blocked" if blocks of the device must be copied to the host first; "none" if no block comes.
        """
        outcome = self.start(request.state, cached_tokens, now_ms, request)
        if isinstance(outcome, Parked):
            return "parked"
        return "none" if isinstance(outcome, NoHits) else "blocked"

    def resume(self, parked: Parked) -> int:
        """Cache the arrived blocks, and drop the pin; return the number of blocks."""
        with self._driver.recorder:
            return parked.resume()

    def land(self, request: ScheduledRequest) -> None:
        """Do nothing: the Use of the request finds the blocks."""

    def landed_tokens(self, request: ScheduledRequest) -> int:  # noqa: ARG002 - as above
        """Return 0: the request holds no block while it waits."""
        return 0

    def take_done(self) -> list[Parked]:
        """Take out the swap-ins for the worker's requests that are complete, and drop those that the manager cancelled.

        The caller resumes each.
        """
        own = [parked for parked, request in self._parked.items() if request is None]
        done = [parked for parked in own if parked.is_open and parked.is_complete]
        for parked in own:
            if not parked.is_open or parked in done:
                del self._parked[parked]
        return done

    def take_back(self) -> list[ScheduledRequest]:
        """Take out the requests whose blocks have arrived, in parking order, and cache these blocks.

        Also take out the requests whose blocks never arrive, because the manager was cleared.
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
        """Drop a parked request; its transfer continues without effect."""
        parked = next(parked for parked, waits in self._parked.items() if waits is request)
        del self._parked[parked]
        if parked.is_open:
            with self._driver.recorder:
                parked.give_up()

    def forget(self) -> None:
        """Drop the worker's swap-ins, which its manager cancelled. A scheduler takes its requests back."""
        self._parked = {parked: request for parked, request in self._parked.items() if request is not None}


class TierHostTime(HostTime):
    """The time of a worker that offloads evicted blocks to the host, and the transfers under way.

    Args:
        driver: the worker's driver; its manager has an offload engine.
        now: the time, in ms.

    Attributes:
        manager: the worker's manager.
        parking: swap-ins under way, for requests of the worker and of a scheduler that uses it.
    """

    def __init__(self, driver: MoveDriver, now: float = 0.0) -> None:
        super().__init__(driver, now)
        self.manager: LogicalManager = checked_manager(driver.manager, LogicalManager, "TierHostTime")
        self.parking: Parking = Parking(driver, self.manager)
        # Blocks that came back to the device and are not yet counted as onboarded, by the requested blocks.
        self._came: dict[tuple[int, ...], set[int]] = {}

    @property
    def now(self) -> float:
        """The time, in ms: that of its last tick, or the manager's time if this is later."""
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
        """Move the time forward, so a pass finds the transfers that are done."""
        self.tick(now)

    def end_pass(self) -> float:
        """Return 0: offload adds no time to a pass."""
        return 0.0

    def pass_to(self, now: float) -> None:
        """Move the time forward from the end of one transfer to the next, so each queued transfer starts in turn."""
        deadline = self.manager.offload_deadline()
        while deadline is not None and deadline <= now:
            self.tick(max(deadline, self.now))
            deadline = self.manager.offload_deadline()
        self.tick(now)

    def forget(self) -> None:
        """Drop the swap-ins and the arrived blocks, which the manager cancelled."""
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
        """Text on the lost slots of the device, and the reason; None if none are lost, or a transfer is under way."""
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
        """Count the blocks of the device that no request holds, including slots that a transfer holds.

        Slots that are reserved or pinned for a swap-in are free when it is done. For a scheduler's request they are
        free only when the scheduler takes the request back, so they do not count.
        """
        manager = self.manager
        parked = self.parking.of_worker
        elsewhere = manager.num_reserved - sum(each.num_blocks for each in parked)
        pinned = manager.num_held_by(each.pin for each in parked)
        return manager.num_blocks - manager.num_active_blocks + manager.num_outside - elsewhere + pinned

    def cached(self, prompt: Prompt, tier: StorageTier) -> int:
        """Count the tokens of a prompt that a further tier has, after the tokens on the device. Changes nothing."""
        engine = self.manager.offload
        if engine is None or engine.tier != tier:
            return 0
        size = self.manager.block_size
        request = self._driver.open(prompt, to_look=True)
        plhs = request.positional_lineage_hashes
        return engine.lookup(plhs[self._driver.lookup(request) // size :]) * size

    def onboard(self, state: Any, *, wait: bool, resumed: bool) -> int:
        """Load back the blocks of a new request from the host; as in Dynamo's scheduler, none for a preempted one."""
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
                self.tick(self.now)  # publishes other transfers that ended when this one started
            while outcome.is_open:
                self._wait(wait, f"{outcome.num_blocks} blocks are on their way back from the host")

    def admitted(self, state: Any) -> None:
        """Drop the record of the blocks that came back for a request: it was admitted, and has counted them."""
        for asked in self._asked(tuple(state.positional_lineage_hashes)):
            del self._came[asked]

    def _asked(self, plhs: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the keys of the arrived blocks that are a prefix of these blocks."""
        return [asked for asked in self._came if asked == plhs[: len(asked)]]

    def allocate(self, state: Any, upto: int, *, wait: bool) -> None:
        """Use the blocks of a request's first `upto` tokens; wait while the device has too few."""
        while self._driver.allocate(state, upto) < upto:
            self._wait(wait, "blocks of the device are on their way to the host")

    def generate(self, state: Any, tokens: Sequence[int]) -> None:
        """Decode, one step a token; wait while the device has no block for a token."""
        for token in tokens:
            while not self._driver.generate(state, token):
                self._wait(True, "")

    def _wait(self, wait: bool, why: str) -> None:
        """Move the time forward until the next transfer is done."""
        manager = self.manager
        deadline = manager.offload_deadline()
        if deadline is None and any(each.is_complete for each in self.parking.of_worker):  # by a tick of the manager
            self.tick(self.now)
            return
        if deadline is None:
            # If the host already had all evicted blocks, their slots are free again at once.
            if manager.num_active_blocks < manager.num_blocks:
                return
            assert self.lost_text is not None  # no request holds the needed blocks, as checked by the caller
            raise SlotsLost(self.lost_text)
        if not wait:
            raise WouldWait(self.now, deadline, why)
        self.tick(max(deadline, self.now))
