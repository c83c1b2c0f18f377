"""The interface of the virtual time of a worker with tiers below the device, for the worker and its scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pytest_kvmock.values.checks import check_time

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.values.events import StorageTier
    from pytest_kvmock.values.tokens import Prompt


class Waits(Protocol):
    """The requests of a scheduler that wait for blocks from the host."""

    @property
    def parks_preempted(self) -> bool:
        """Whether preempted requests wait too."""

    @property
    def requests(self) -> Sequence[ScheduledRequest]:
        """The waiting requests, in order."""

    @property
    def deadline(self) -> float | None:
        """Time of the next event; None if nothing is under way."""

    @property
    def is_quiet(self) -> bool:
        """Whether time alone brings no change that a scheduler waits for or has to count."""

    def park(
        self, request: ScheduledRequest, cached_tokens: int, now_ms: float
    ) -> Literal["parked", "blocked", "deferred", "none"]:
        """Start to load back the blocks of a request that the host has.

        "blocked": no request is admitted now; "deferred": this one is passed over.
        """

    def take_back(self) -> list[ScheduledRequest]:
        """Take out the requests whose blocks have arrived."""

    def land(self, request: ScheduledRequest) -> None:
        """Record that the scheduler has reached a request, whose blocks may have arrived."""

    def landed_tokens(self, request: ScheduledRequest) -> int:
        """Count the tokens that a request holds already at its admission."""

    def give_up(self, request: ScheduledRequest) -> None:
        """Drop a waiting request."""


class HostTime(ABC):
    """The time of one worker, and its waiting requests.

    Args:
        driver: the worker's driver.
        now: the time in ms.

    Attributes:
        parking: the requests of a scheduler that wait for blocks from the host.
    """

    parking: Waits
    sees_each_step: ClassVar[bool] = True
    """Whether each step of a scheduler may change something, so that no request sleeps."""
    is_dead = False
    """Whether the engine has ended because of a request."""

    def __init__(self, driver: Any, now: float) -> None:
        self._driver = driver
        self._now = now

    @property
    def now(self) -> float:
        """The time in ms."""
        return self._now

    @property
    @abstractmethod
    def num_blocks(self) -> int | None:
        """Capacity of the host in blocks; None without a host."""

    @property
    def lost_text(self) -> str | None:
        """Text on the lost device slots and the reason; None if none are lost, or while a transfer is under way."""
        return None

    @property
    def may_do_more(self) -> bool:
        """Whether the input of the next pass has changed: something arrived, was detected, or was released."""
        return False

    def arrive(self, state: Any) -> None:  # noqa: B027 - no other has a storage
        """Record a request that arrives at a scheduler. Only a storage uses it, to look the request up."""

    def tick(self, now: float) -> None:
        """Move the time forward: end transfers, and cache blocks that came back for a request that no longer waits.

        Raises:
            ValueError: the time is not a finite number of at least 0, or is before `now`.
        """
        if check_time(now) < self.now:
            raise ValueError(f"tick: time does not go backwards; it is {self.now} ms, got {now}")
        self._pass(float(now))

    @abstractmethod
    def _pass(self, now: float) -> None:
        """Move the time forward to `now`; it is not before the present time."""

    @abstractmethod
    def start_pass(self, now: float) -> None:
        """Begin a pass of a scheduler."""

    @abstractmethod
    def end_pass(self) -> float:
        """End the scheduling of a pass; return the ms that it waits for transfers."""

    @abstractmethod
    def pass_to(self, now: float) -> None:
        """Move the time forward from the end of one transfer to the next, so queued transfers start in turn."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the records of blocks that came back, because the device was cleared."""

    @abstractmethod
    def cancel(self) -> None:
        """Empty the further tier, without an event, and cancel the transfers under way."""

    def empty_below(self) -> None:
        """Empty the tiers below the device, without an event, if a reset asks for it."""
        self.cancel()

    def was_reset(self) -> None:  # noqa: B027 - of a store that learns it too late
        """Record that a reset caused the last preemptions."""

    @abstractmethod
    def unpublished(self, tier: StorageTier) -> Container[int]:
        """Return the blocks of a further tier that events do not show; see `OffloadEngine`."""

    @abstractmethod
    def room(self) -> int:
        """Count the device blocks that no request holds, including those on their way to the host or back."""

    @abstractmethod
    def cached(self, prompt: Prompt, tier: StorageTier) -> int:
        """Count the tokens of a prompt that a further tier has after the device's prefix. Changes nothing."""

    @abstractmethod
    def onboard(self, state: Any, *, wait: bool, resumed: bool) -> int:
        """Load back the blocks of a request that the host has; the request has none yet.

        Returns:
            The number of its cached tokens that came back for it, including earlier attempts that did not wait.

        Raises:
            WouldWait: this takes time, and `wait` is False.
            SlotsLost: the slots for it will never be free.
        """

    @abstractmethod
    def admitted(self, state: Any) -> None:
        """Record that a request has its blocks."""

    @abstractmethod
    def allocate(self, state: Any, upto: int, *, wait: bool) -> None:
        """Take blocks for a request's first tokens; wait if the device has none.

        Raises:
            WouldWait: none is free yet, and `wait` is False.
            SlotsLost: none will ever be free.
        """

    @abstractmethod
    def generate(self, state: Any, tokens: Sequence[int]) -> None:
        """Decode one token per step; wait if the device has no block.

        Raises:
            SlotsLost: none will ever be free.
        """

    def generate_runs(self, state: Any, runs: Sequence[Sequence[int]]) -> None:
        """Decode with a draft model; each step commits one of `runs`."""
        self._driver.extend_runs(state, runs)

    @abstractmethod
    def _wait(self, wait: bool, why: str) -> None:
        """Advance the time until the next transfer is done."""
