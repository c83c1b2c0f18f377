"""Requests that wait for their prefix to come back from the host (Dynamo's `VllmCore`, `AwaitingSwapIn`).

The blocks of the prefix that the device has are pinned meanwhile, and slots are reserved for those that come. When the
transfer is done, these are cached as inactive blocks, and the request's own Use finds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from uuid import UUID

from pytest_kvmock.cache.offload import BlockDetails, BlockedOnG1Offload, NoHits, Scheduled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_kvmock.cache.dynamo.cached_slots import Pin
    from pytest_kvmock.cache.dynamo.logical import LogicalManager
    from pytest_kvmock.engine.move_driver import MoveDriver
    from pytest_kvmock.engine.scheduler import ScheduledRequest
    from pytest_kvmock.engine.sequence import ActiveSequence


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
        """Whether slots are reserved for them: until `resume` or `give_up`, or until its manager cancels its transfers."""
        return self._scheduled.is_open

    @property
    def is_complete(self) -> bool:
        """Whether they have come, by the last tick."""
        return self._scheduled.is_complete

    def resume(self) -> int:
        """Cache the blocks that came, and pin no more; returns how many."""
        taken = self._manager.register_swapped_in(self._blocks, self._parent, self._scheduled)
        self._manager.unpin(self.pin)
        return taken

    def give_up(self) -> None:
        """Free slots and pins; the transfer goes on, for nothing."""
        self._manager.put_down(self._scheduled)
        self._manager.unpin(self.pin)


class Parking:
    """What is under way from the host to one manager, in the order in which it began, and for whom.

    The requests of a scheduler are parked, and come back to it (`take_back`). A worker's own wait for theirs while its
    time passes (`TierClock`), and are not listed here: what comes may be another's by then.

    Args:
        driver: of the manager; what is published meanwhile is for requests, as its recorder marks it.
        manager: the manager.
    """

    parks_preempted = False
    """As Dynamo's scheduler: only what is new is swapped in."""

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
        """When the next transfer is done, those to the host included; None: none is under way."""
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
        outcome = self.start(request.state.sequence, cached_tokens, now_ms, request)
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
        """Forget what is under way for the worker: its manager cancelled it. A scheduler takes its requests back."""
        self._parked = {parked: request for parked, request in self._parked.items() if request is not None}
