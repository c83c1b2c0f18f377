"""Requests of a fleet that are called off because their clients go away.

Theory of operation. An abort is planned for a moment of the run (`Fleet.at`), or by the request: at a time after its
arrival at the router, or after a number of output tokens, which its engine counts. It happens after the arrivals of its
moment and before passes start. The run decides what becomes of the request. If the request is over by then or has not
arrived, the abort does not happen and is kept as missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.fleets.report.report_text import MissedAbort
from pytest_kvmock.values.checks import check_integer, check_number

if TYPE_CHECKING:
    from pytest_kvmock.fleets.clock.arrivals import Turn
    from pytest_kvmock.fleets.clock.passes import Calls
    from pytest_kvmock.fleets.routing.routing import RouterRequest


@dataclass(frozen=True, slots=True)
class PlannedAbort:
    """An abort that is planned for a moment of a run.

    Attributes:
        ms: when, in virtual milliseconds from the start of the run.
        number: the request, by its place in the order of arrival.
    """

    ms: float
    number: int


class Aborts:
    """The aborts of a run, a stage of it.

    Args:
        call_off: calls an open request off, the first time only.
        start_ms: when the run starts.
        planned: the aborts planned so far.

    Attributes:
        called_off: the requests that were called off and are still open, because their engines are in a pass.
    """

    def __init__(
        self, call_off: Callable[[RouterRequest], Calls], start_ms: float, planned: Iterable[PlannedAbort]
    ) -> None:
        self._call_off = call_off
        self._start_ms = start_ms
        self._due: list[tuple[float, int, int]] = []  # (when, order, number)
        self._count = 0
        self._open: dict[int, RouterRequest] = {}
        self._arrived = 0
        self._limited: set[int] = set()  # requests that are called off after a number of tokens
        self._missed: list[MissedAbort] = []
        self._aborted: set[int] = set()
        self.called_off: set[RouterRequest] = set()
        for abort in planned:
            self.plan(abort)

    def plan(self, abort: PlannedAbort) -> None:
        """Plan an abort, at its time after the start."""
        self._plan(self._start_ms + abort.ms, abort.number)

    def now(self, request: RouterRequest, now_ms: float) -> None:
        """Plan an abort at the present moment."""
        self._plan(now_ms, request.number)

    def _plan(self, ms: float, number: int) -> None:
        self._count += 1
        heappush(self._due, (ms, self._count, number))

    def arrived(self, request: RouterRequest, turn: Turn) -> None:
        """Add a request that has arrived, with the abort that is planned for it."""
        self._arrived = request.number + 1
        self._open[request.number] = request
        if turn.abort_after_tokens == 0:
            self._plan(request.arrival_ms, request.number)
        elif turn.abort_after_tokens is not None:
            self._limited.add(request.number)
        if turn.abort_after_ms is not None:
            self._plan(request.arrival_ms + turn.abort_after_ms, request.number)

    def over(self, request: RouterRequest, now_ms: float) -> None:
        """Note that a request is over, for whatever reason."""
        number = request.number
        del self._open[number]
        if request.status == "aborted":
            self._aborted.add(number)
        elif number in self._limited or request in self.called_off:  # it ended before its engine acted
            self._miss(now_ms, number)
        self.called_off.discard(request)
        self._limited.discard(number)

    def _miss(self, ms: float, number: int) -> None:
        if number not in self._aborted:
            self._missed.append(MissedAbort(ms - self._start_ms, number))

    def has_seen(self, request: RouterRequest) -> bool:
        """Return whether a request is one of this run, open or over."""
        return self._open.get(request.number, request if request.number < self._arrived else None) is request

    def missed(self, now_ms: float) -> list[MissedAbort]:
        """Return the aborts that did not happen by the end of the run, by time, with those still to come."""
        for ms, _, number in self._due:
            self._miss(ms, number)
        for number in sorted(self._limited):
            self._miss(now_ms, number)
        return sorted(self._missed, key=lambda each: each.ms)

    @property
    def next_ms(self) -> float:
        """The time of the next abort; infinite if there is none."""
        due = self._due
        while due and due[0][2] < self._arrived and due[0][2] not in self._open:  # its request is over
            ms, _, number = heappop(due)
            self._miss(ms, number)
        return due[0][0] if due else math.inf

    def at(self, now_ms: float) -> Calls:
        """Carry out the aborts that are due by now."""
        while self.next_ms <= now_ms:
            ms, _, number = heappop(self._due)
            request = self._open.get(number)
            if request is None:  # it has not arrived
                self._miss(ms, number)
            elif request not in self.called_off:
                self.called_off.add(request)
                yield from self._call_off(request)


@dataclass(frozen=True, slots=True)
class AbortShare:
    """Draws which requests of a trace are called off, by a seed.

    Args:
        share: the share of all requests, from 0 to 1.
        seed: the seed of the draw.
        within_ms: the longest time from arrival to an abort that is planned by time.

    Raises:
        ValueError: an argument is out of range.
    """

    share: float
    seed: int
    within_ms: float

    def __post_init__(self) -> None:
        check_number("abort_share: share", self.share, 0.0, 1.0)
        check_integer("abort_share: seed", self.seed, 0)
        check_number("abort_share: within_ms", self.within_ms, unit=" (milliseconds)")

    def plan(self, turns: Sequence[Turn]) -> None:
        """Plan an abort for each drawn request that does not set one itself.

        Half of them are called off after a time, the others in the middle of their output. A request for one token
        always goes after a time.
        """
        rng = Random(self.seed)  # noqa: S311 - mock data
        for turn in turns:
            drawn, by_time, when = rng.random() < self.share, rng.random() < 0.5, rng.random()
            if not drawn or turn.abort_after_ms is not None or turn.abort_after_tokens is not None:
                continue
            output = turn.trace.output_length
            if by_time or output < 2:
                turn.abort_after_ms = when * self.within_ms
            else:
                turn.abort_after_tokens = 1 + int(when * (output - 1))
