"""The virtual time of a worker whose evicted blocks travel to the host, and requests that wait in it for blocks of the device."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from pytest_kvmock.cache.dynamo.logical import LogicalManager
from pytest_kvmock.cache.offload import NoHits
from pytest_kvmock.engine.clock import Clock
from pytest_kvmock.engine.driver import SlotsLost, WouldWait, checked_manager
from pytest_kvmock.engine.parking import Parked, Parking
from pytest_kvmock.events import StorageTier

if TYPE_CHECKING:
    from pytest_kvmock.engine.move_driver import MoveDriver
    from pytest_kvmock.tokens import Prompt


class TierClock(Clock):
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
        self.manager: LogicalManager = checked_manager(driver.manager, LogicalManager, "TierClock")
        self.parking: Parking = Parking(driver, self.manager)
        # Blocks on the device that came back, and were not counted as onboarded yet, by the blocks that were asked for.
        self._came: dict[tuple[int, ...], set[int]] = {}

    @property
    def now(self) -> float:
        """The time, in ms: that of its last tick, or the manager's where somebody moved that alone further."""
        return max(self._now, self.manager.offload_now)

    @property
    def num_blocks(self) -> int | None:
        """Blocks that the host has room for; None: there is none."""
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
        """Nothing: what a pass evicts travels by itself."""
        return 0.0

    def pass_to(self, now: float) -> None:
        """Move the time forward from the end of one transfer to the next, so that each that was queued starts in its turn."""
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
            cure = f"; a host of {2 * manager.max_capacity} blocks, twice the device, has room for both"
        return (
            f"{lost} blocks of the device are quarantined for ever: the host could not hold a batch "
            f"whole{pins}, and lost it{cure}. Nothing is under way in {engine!r}"
        )

    def room(self) -> int:
        """Count the blocks of the device that no request holds, those included whose slots are on their way.

        What is reserved or pinned for blocks that come back is free when they are there; but if they come for requests of a
        scheduler, only when that takes these back.
        """
        manager = self.manager
        parked = self.parking.of_worker
        elsewhere = manager.num_reserved - sum(each.num_blocks for each in parked)
        pinned = manager.num_held_by(each.pin for each in parked)
        return manager.max_capacity - manager.num_active_blocks + manager.num_outside - elsewhere + pinned

    def cached(self, prompt: Prompt, tier: StorageTier) -> int:
        """Count the tokens of a prompt that a further tier has, beyond those that the device has. Changes nothing."""
        engine = self.manager.offload
        if engine is None or engine.tier != tier:
            return 0
        size = self.manager.block_size
        request = self._driver.open(prompt, to_look=True)
        plhs = request.sequence.positional_lineage_hashes
        return engine.lookup(plhs[self._driver.lookup(request) // size :]) * size

    def onboard(self, state: Any, *, wait: bool, resumed: bool) -> int:
        """Bring back what the host has of a request that is new; as Dynamo's scheduler, nothing for one that was preempted."""
        if resumed:
            return 0
        plhs = tuple(state.sequence.positional_lineage_hashes)
        while True:
            parked = next((each for each in self.parking.of_worker if each.plhs == plhs[: len(each.plhs)]), None)
            outcome = parked or self.parking.start(state.sequence, self._driver.lookup(state), self.now)
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
                self.tick(self.now)  # what the start of the transfer ended elsewhere is published now
            while outcome.is_open:
                self._wait(wait, f"{outcome.num_blocks} blocks are on their way back from the host")

    def admitted(self, state: Any) -> None:
        """Forget what came back for a request: it was admitted, and has counted it."""
        for asked in self._asked(tuple(state.sequence.positional_lineage_hashes)):
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
            # Where the host had all that was evicted, its slots are free again at once.
            if manager.num_active_blocks < manager.max_capacity:
                return
            assert self.lost_text is not None  # no request holds what it waits for: that was counted before
            raise SlotsLost(self.lost_text)
        if not wait:
            raise WouldWait(self.now, deadline, why)
        self.tick(max(deadline, self.now))
