"""The requests of a scheduler that wait for blocks from the host, in the order in which they began to (Dynamo's `VllmCore`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pytest_kvmock.cache.offload import NoHits
from pytest_kvmock.engine.parking import Parked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_kvmock.cache.dynamo.logical import LogicalManager
    from pytest_kvmock.engine.scheduler import ScheduledRequest
    from pytest_kvmock.engine.tier_clock import TierClock


class ParkedRequests:
    """Parks requests whose prefix the host has, and says which of them may go on.

    Args:
        clock: the time of their worker, whose transfers end as it passes.
    """

    def __init__(self, clock: TierClock) -> None:
        self._clock = clock
        self._manager: LogicalManager = clock.manager
        self._parked: dict[ScheduledRequest, Parked] = {}

    @property
    def requests(self) -> Sequence[ScheduledRequest]:
        """The requests that are parked, in the order of their parking."""
        return tuple(self._parked)

    @property
    def deadline(self) -> float | None:
        """When the next transfer is done, those to the host included; None: none is under way."""
        return self._manager.offload_deadline()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing happens between tiers however much time passes."""
        return not self._parked and self.deadline is None

    def tick(self, now_ms: float) -> list[ScheduledRequest]:
        """Let the time pass until now; returns the requests whose blocks came, which are cached, in parking order.

        And those whose blocks never will, as the manager was cleared.
        """
        self._clock.tick(max(now_ms, self._clock.now))
        done = [request for request, parked in self._parked.items() if parked.is_complete or not parked.is_open]
        for request in done:
            parked = self._parked.pop(request)
            blocks = self._clock.resume(parked) if parked.is_open else 0
            request.onboarded_tokens += blocks * self._manager.block_size
        return done

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
        outcome = self._clock.park(request.state.sequence, cached_tokens, now_ms)
        if isinstance(outcome, Parked):
            self._parked[request] = outcome
            return "parked"
        return "none" if isinstance(outcome, NoHits) else "blocked"

    def give_up(self, request: ScheduledRequest) -> None:
        """Forget a parked request; what is on its way for it comes for nothing."""
        parked = self._parked.pop(request)
        if parked.is_open:
            self._clock.give_up(parked)
