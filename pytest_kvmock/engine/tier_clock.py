"""The virtual time of a worker with tiers below the device, and requests that wait in it for blocks of the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_kvmock.cache.dynamo.logical import LogicalManager
from pytest_kvmock.cache.offload import NoHits
from pytest_kvmock.checks import check_time
from pytest_kvmock.engine.driver import SlotsLost, WouldWait
from pytest_kvmock.engine.move_driver import MoveDriver
from pytest_kvmock.engine.parking import Parked, park
from pytest_kvmock.events import StorageTier

if TYPE_CHECKING:
    from pytest_kvmock.engine.driver import Driver
    from pytest_kvmock.tokens import Prompt


class TierClock:
    """The time of one worker, and what is under way in it.

    Args:
        driver: the worker's; its manager has an offload engine.
        now: the time, in ms.

    Attributes:
        now: the time, in ms.
    """

    def __init__(self, driver: MoveDriver, now: float = 0.0) -> None:
        assert isinstance(driver.manager, LogicalManager)
        self._driver = driver
        self._manager = driver.manager
        self._parked: list[Parked] = []
        self.now = now

    @classmethod
    def of(cls, driver: Driver, now: float) -> TierClock | None:
        """Make the clock of a worker with this driver; None where nothing is below the device."""
        if isinstance(driver, MoveDriver) and getattr(driver.manager, "offload", None) is not None:
            return cls(driver, now)
        return None

    def tick(self, now: float) -> None:
        """Move the time forward: transfers end, and what came back for a request that does not wait for it is cached.

        Raises:
            ValueError: the time is no finite number of at least 0, or before `now`.
        """
        if check_time(now) < self.now:
            raise ValueError(f"tick: time does not go backwards; it is {self.now} ms, got {now}")
        self.now = float(now)
        self._manager.tick(self.now)
        for parked in [each for each in self._parked if each.is_complete]:
            self._parked.remove(parked)
            parked.resume()

    def forget(self) -> None:
        """Forget what is parked: its manager cancelled it."""
        self._parked.clear()

    def room(self) -> int:
        """Count the blocks of the device that no request holds, those included whose slots are on their way."""
        manager = self._manager
        return manager.max_capacity - manager.num_active_blocks + manager.num_outside

    def cached(self, prompt: Prompt, tier: StorageTier) -> int:
        """Count the tokens of a prompt that a further tier has, beyond those that the device has. Changes nothing."""
        engine = self._manager.offload
        if engine is None or engine.tier != tier:
            return 0
        size = self._manager.block_size
        plhs = self._driver.lineage(prompt)
        return engine.lookup(plhs[self._driver.lookup(prompt) // size :]) * size

    def onboard(self, state: Any, *, wait: bool) -> int:
        """Bring back what the host has of a request without blocks; returns how many tokens came.

        Raises:
            WouldWait: that takes time, and `wait` is False.
            SlotsLost: the slots for it never come.
        """
        blocks = 0
        while True:
            plhs = tuple(state.sequence.positional_lineage_hashes)
            parked = next((each for each in self._parked if each.plhs == plhs[: len(each.plhs)]), None)
            outcome = parked or park(self._manager, state.sequence, self._driver.cached(state), self.now)
            if isinstance(outcome, NoHits):
                return blocks * self._manager.block_size
            if not isinstance(outcome, Parked):
                self._wait(
                    wait, "blocks of the device are on their way to the host, to make room for those that come back"
                )
                continue
            if parked is None:
                self._parked.append(outcome)
            came = outcome.num_blocks
            while outcome.is_open:
                self._wait(wait, f"{came} blocks are on their way back from the host")
            blocks += came

    def allocate(self, state: Any, upto: int, *, wait: bool) -> None:
        """Use the blocks of a request's first tokens, and wait where the device has none.

        Raises:
            WouldWait: none is free yet, and `wait` is False.
            SlotsLost: none will be.
        """
        while self._driver.allocate(state, upto) < upto:
            self._wait(wait, "blocks of the device are on their way to the host")

    def generate(self, state: Any, tokens: Sequence[int]) -> None:
        """Decode, one step a token, and wait where the device has no block for one.

        Raises:
            SlotsLost: there will be none.
        """
        for token in tokens:
            while not self._driver.generate(state, token):
                self._wait(True, "")

    def _wait(self, wait: bool, why: str) -> None:
        """Let the time pass until the next transfer is done."""
        manager = self._manager
        deadline = manager.offload_deadline()
        if deadline is None:
            # Where the host had all that was evicted, its slots are free again at once.
            if manager.num_active_blocks < manager.max_capacity:
                return
            engine = manager.offload
            pins = (
                " while blocks that come back to the device are pinned there" if engine and engine.lost_to_pins else ""
            )
            raise SlotsLost(
                f"{manager.num_outside} blocks of the device are quarantined for ever: the host could not hold a batch "
                f"whole{pins}, and lost it. Nothing is under way in {engine!r}"
            )
        if not wait:
            raise WouldWait(self.now, deadline, why)
        self.tick(max(deadline, self.now))
