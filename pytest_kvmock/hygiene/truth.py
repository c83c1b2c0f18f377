"""What was published, beside what arrived: which problems are the workers' own, and which came of injected faults.

Theory of operation. From the first fault on, a second ledger hears what workers publish, before anything happens to it.
What both ledgers find is real: it would have been found without the fault, and it is never listed under one. What only
the ledger of what arrived finds was injected. Which strike it came of is told by the ids that are missing, by the event
that was changed, by the blocks, and else it is the last one on that stream.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_kvmock.hygiene.problem import INDEX_RULES, Problem

if TYPE_CHECKING:
    from pytest_kvmock.events import RouterEvent
    from pytest_kvmock.hygiene.injected import Injected
    from pytest_kvmock.hygiene.ledger import Ledger
    from pytest_kvmock.hygiene.stream import StreamKey


class Truth:
    """Sorts problems into real ones and those that came of injected faults.

    Args:
        ledger: of what arrived; until now that is what was published.
        noted: the problems so far.

    Attributes:
        ledger: of what is published.
        strikes: what faults did, in order.
        misfits: workers that are themselves a fault: all that is wrong with what they say came of it.
        doors: the last strike of a fault at the door of the index under test, by stream.
    """

    def __init__(self, ledger: Ledger, noted: Iterable[Problem]) -> None:
        # Events are values that all listeners share; only what the ledger makes of them is its own.
        memo: dict[int, object] = {
            id(event): event for stream in ledger.streams.values() for event in (*stream.said, stream.last)
        }
        self.ledger = copy.deepcopy(ledger, memo)
        self.strikes: list[Injected] = []
        self.misfits: dict[StreamKey, Injected] = {}
        self.doors: dict[StreamKey, Injected] = {}
        self._twins: dict[object, Problem] = {memo[id(p)]: p for p in noted if id(p) in memo}
        self._real: dict[int, tuple[RouterEvent, list[Problem]]] = {}
        self._missing: dict[StreamKey, list[Injected]] = {}
        self._origin: RouterEvent | None = None
        self._now: Injected | None = None

    def published(self, event: RouterEvent, position: int, *, chained: bool) -> None:
        """A worker says something."""
        found = self.ledger.observe(event, position, chained=chained)
        if found:
            self._real[id(event)] = event, found

    def missed(self, problem: Problem, event: RouterEvent) -> None:
        """An event was lost to a failure that is real."""
        twin = replace(problem, cause=None, folded=[])
        self._twins[twin] = problem
        self.ledger.missed((event.worker_id, event.event.dp_rank), event.event.event_id, twin)
        if problem.cause is not None and problem.cause.fault is not None:
            problem.stand()

    def struck(self, strike: Injected) -> None:
        """A fault has struck."""
        self.strikes.append(strike)
        key = (strike.worker_id, strike.dp_rank)
        if strike.event_id is None:  # a restart: the ids before it are of no account any more
            self._missing.pop(key, None)
        elif strike.missing:
            self._missing.setdefault(key, []).append(strike)

    def arriving(self, origin: RouterEvent | None, strike: Injected | None) -> None:
        """Say what the next event that arrives was when it was published, and which strike made it what it is."""
        self._origin, self._now = origin, strike
        if strike is not None and not strike.missing:
            waiting = self._missing.get((strike.worker_id, strike.dp_rank))
            if waiting and strike in waiting:
                waiting.remove(strike)

    def arrived(self) -> None:
        """It has."""
        self._origin = self._now = None

    def astray(self, key: StreamKey) -> list[Problem]:
        """What the worker itself led astray, whoever heard of it."""
        stream = self.ledger.streams.get(key)
        return [] if stream is None else list(stream.astray.values())

    # ----------------------------------------------------------------------------------------------- sorting

    def sort(self, problems: Iterable[Problem], real: Sequence[Problem] | None = None) -> None:
        """Mark the problems that came of a fault, and take the real ones from under those.

        Args:
            problems: what was found with what arrived, causes before what follows from them.
            real: what was found with what was published, at the same point; None: with the event that arrives.
        """
        if real is None:
            real = self._real.get(id(self._origin), (None, []))[1]
        for problem in problems:
            self._sort(problem, real)

    def _sort(self, problem: Problem, real: Sequence[Problem]) -> None:
        key = (problem.worker_id, problem.dp_rank)
        if problem.fault is not None:
            return
        if problem.rule in INDEX_RULES:
            cause = problem.cause
            problem.fault = cause.fault if cause is not None else self.misfits.get(key) or self.doors.get(key)
            return
        twin = next((other for other in real if _same(problem, other)), None)
        if twin is not None and key not in self.misfits:
            self._twins[twin] = problem
            if problem.cause is not None and problem.cause.fault is not None:
                problem.stand()
            if problem.cause is None and twin.cause in self._twins:
                problem.follows_from(self._twins[twin.cause])
            return
        stream = self.ledger.streams.get(key)
        if problem.rule == "over_capacity" and stream is not None and stream.overfull:  # it may have been said before
            problem.stand()
            return
        problem.fault = self.misfits.get(key) or self._blame(problem, key)
        cause = problem.cause
        if cause is not None and cause.excused and not problem.excused:  # one that a router need not survive
            problem.stand()

    def _blame(self, problem: Problem, key: StreamKey) -> Injected | None:
        """The strike that a problem came of."""
        if problem.rule == "event_id_gap" and (missing := self._next_missing(problem, key)) is not None:
            return missing
        now = self._now
        if now is not None and key in now.keys:
            return now
        here = [strike for strike in reversed(self.strikes) if key in strike.keys]
        blocks = set(problem.blocks)
        touching = next((strike for strike in here if not blocks.isdisjoint(strike.blocks)), None)
        if touching is not None:
            return touching
        if problem.cause is not None and problem.cause.fault is not None:
            return problem.cause.fault
        return here[0] if here else None

    def _next_missing(self, gap: Problem, key: StreamKey) -> Injected | None:
        """The first strike that made a gap of ids, if ids are missing; a gap is said of them all."""
        waiting = self._missing.get(key, [])
        upto = gap.event_id
        passed = [s for s in waiting if upto is None or (s.event_id is not None and s.event_id < upto)]
        for strike in passed:
            waiting.remove(strike)
        return passed[0] if passed else None


def _same(problem: Problem, other: Problem) -> bool:
    """Whether the same is wrong with what was published: the rule, the stream, and one block at least."""
    if (problem.rule, problem.worker_id, problem.dp_rank) != (other.rule, other.worker_id, other.dp_rank):
        return False
    return not problem.blocks or not other.blocks or not set(problem.blocks).isdisjoint(other.blocks)
