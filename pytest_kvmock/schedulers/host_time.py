"""What the virtual time of a worker with tiers below the device is to the worker, and to a scheduler that uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pytest_kvmock.checks import check_time

if TYPE_CHECKING:
    from pytest_kvmock.events import StorageTier
    from pytest_kvmock.schedulers.scheduler import ScheduledRequest
    from pytest_kvmock.tokens import Prompt


class Waits(Protocol):
    """The requests of a scheduler that wait for blocks from the host."""

    @property
    def parks_preempted(self) -> bool:
        """Whether requests that were preempted wait, too."""

    @property
    def requests(self) -> Sequence[ScheduledRequest]:
        """Which, in order."""

    @property
    def deadline(self) -> float | None:
        """When something happens next; None: nothing is under way."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing that a scheduler waits for, or pays for, happens however much time passes."""

    def park(
        self, request: ScheduledRequest, cached_tokens: int, now_ms: float
    ) -> Literal["parked", "blocked", "deferred", "none"]:
        """Start to bring back what the host has of a request; "blocked": nobody is admitted now; "deferred": it is passed over."""

    def take_back(self) -> list[ScheduledRequest]:
        """Take out the requests whose blocks have come."""

    def land(self, request: ScheduledRequest) -> None:
        """The admission of a request is reached, whose blocks may have come."""

    def landed_tokens(self, request: ScheduledRequest) -> int:
        """How many tokens a request that is admitted now holds already."""

    def give_up(self, request: ScheduledRequest) -> None:
        """Forget a request that waits."""


class HostTime(ABC):
    """The time of one worker, and what waits in it.

    Args:
        driver: the worker's.
        now: the time, in ms.

    Attributes:
        parking: the requests of a scheduler that wait for blocks from the host.
    """

    parking: Waits

    def __init__(self, driver: Any, now: float) -> None:
        self._driver = driver
        self._now = now

    @property
    def now(self) -> float:
        """The time, in ms."""
        return self._now

    @property
    @abstractmethod
    def num_blocks(self) -> int | None:
        """Blocks that the host has room for; None: there is none."""

    @property
    def lost_text(self) -> str | None:
        """Which slots of the device are lost, and why; None while something is under way, or where none ever are."""
        return None

    def arrive(self, state: Any) -> None:  # noqa: B027 - no other has a storage
        """Take note of a request that arrives at a scheduler: nothing, but where a storage is asked for it then."""

    def tick(self, now: float) -> None:
        """Move the time forward: transfers end, and what came back for a request that does not wait for it is cached.

        Raises:
            ValueError: the time is no finite number of at least 0, or before `now`.
        """
        if check_time(now) < self.now:
            raise ValueError(f"tick: time does not go backwards; it is {self.now} ms, got {now}")
        self._pass(float(now))

    @abstractmethod
    def _pass(self, now: float) -> None:
        """Move the time forward to one that is not before now."""

    @abstractmethod
    def start_pass(self, now: float) -> None:
        """A pass of a scheduler starts."""

    @abstractmethod
    def end_pass(self) -> float:
        """A pass has scheduled all that it does; returns for how many ms it waits for transfers."""

    @abstractmethod
    def pass_to(self, now: float) -> None:
        """Move the time forward from the end of one transfer to the next, so that each that was queued starts in its turn."""

    @abstractmethod
    def forget(self) -> None:
        """Forget what came back: the device was cleared."""

    @abstractmethod
    def cancel(self) -> None:
        """Empty the further tier, without an event, and cancel what is under way."""

    @abstractmethod
    def unpublished(self, tier: StorageTier) -> Container[int]:
        """Return the blocks of a further tier that events do not show; see `OffloadEngine`."""

    @abstractmethod
    def room(self) -> int:
        """Count the blocks of the device that no request holds, those included that are on their way to the host or back."""

    @abstractmethod
    def cached(self, prompt: Prompt, tier: StorageTier) -> int:
        """Count the tokens of a prompt that a further tier has, beyond those that the device has. Changes nothing."""

    @abstractmethod
    def onboard(self, state: Any, *, wait: bool, resumed: bool) -> int:
        """Bring back what the host has of a request without blocks.

        Returns:
            How many of its cached tokens came back for it; in an earlier attempt, too, which did not wait for them.

        Raises:
            WouldWait: that takes time, and `wait` is False.
            SlotsLost: the slots for it never come.
        """

    @abstractmethod
    def admitted(self, state: Any) -> None:
        """Note that a request has its blocks."""

    @abstractmethod
    def allocate(self, state: Any, upto: int, *, wait: bool) -> None:
        """Take blocks for a request's first tokens, and wait where the device has none.

        Raises:
            WouldWait: none is free yet, and `wait` is False.
            SlotsLost: none will be.
        """

    @abstractmethod
    def generate(self, state: Any, tokens: Sequence[int]) -> None:
        """Decode, one step a token, and wait where the device has no block for one.

        Raises:
            SlotsLost: there will be none.
        """

    def generate_runs(self, state: Any, runs: Sequence[Sequence[int]]) -> None:
        """Decode in steps that commit so many tokens each, of an engine with a draft model."""
        self._driver.extend_runs(state, runs)

    @abstractmethod
    def _wait(self, wait: bool, why: str) -> None:
        """Let the time pass until the next transfer is done."""
