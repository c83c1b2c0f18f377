"""What was published, beside what arrived: which problems are the workers' own, and which came of injected faults.

Theory of operation. From the first fault on, a second ledger hears what workers publish, before anything happens to it.
What both ledgers find is real: it would have been found without the fault, and it is never listed under one. What only
the ledger of what arrived finds was injected. Which injection it came of is known by the ids that are missing, by the
event that was changed, and else by the rule of `Injections`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pytest_kvmock.hygiene.injected import Injections
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
        doors: what faults did at the door of the index under test, by stream.
    """

    def __init__(self, ledger: Ledger, noted: Iterable[Problem]) -> None:
        memo: dict[int, object] = {}
        self.ledger = ledger.copy(memo)
        self.strikes: list[Injected] = []
        self.misfits: dict[StreamKey, Injected] = {}
        self.doors: dict[StreamKey, Injections] = {}
        self._arrived = ledger
        self._injections: dict[StreamKey, Injections] = {}
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

    def struck(self, strike: Injected, *, whole: bool = False) -> None:
        """A fault has struck.

        Args:
            strike: what it did.
            whole: the event arrives as it was published, more than once perhaps.
        """
        self.strikes.append(strike)
        key = (strike.worker_id, strike.dp_rank)
        if strike.event_id is None:  # a restart: the ids before it are of no account any more
            self._missing.pop(key, None)
            self._of(key).recover()
        elif strike.missing:
            self._missing.setdefault(key, []).append(strike)
        for each in strike.keys:
            self._of(each).add(strike, recovered=whole)

    def _of(self, key: StreamKey) -> Injections:
        return self._injections.setdefault(key, Injections())

    def gone(self, key: StreamKey, *, first_id: int | None) -> None:
        """A worker and rank begins anew, and the router knows: what was done to it before is over."""
        self.ledger.restarted(key, first_id=first_id)
        for of_streams in (self._missing, self._injections, self.doors):
            of_streams.pop(key, None)

    def recovered(self, key: StreamKey, ids: range) -> None:
        """The router has asked a worker and rank for these event ids, and knows all from there on."""
        self._of(key).recover_ids(key, ids)
        missing = self._missing.get(key, [])
        self._missing[key] = [strike for strike in missing if strike.event_id not in ids]

    def released(self, strike: Injected) -> None:
        """The event that this fault held back arrives."""
        strike.missing = False
        waiting = self._missing.get((strike.worker_id, strike.dp_rank), [])
        if strike in waiting:
            waiting.remove(strike)
        for key in strike.keys:
            self._of(key).recover_from(strike)

    def given(self, key: StreamKey, strike: Injected) -> None:
        """The index under test was given another event than the one that arrived."""
        self.strikes.append(strike)
        self.doors.setdefault(key, Injections()).add(strike)

    def emptied(self, key: StreamKey, strike: Injected | None) -> None:
        """A Cleared has arrived.

        Args:
            key: whose cache it emptied.
            strike: what made it arrive, or arrive as it did; None: nothing.
        """
        self._of(key).recover(before=strike)
        if key in self.doors:
            self.doors[key].recover()

    def arriving(self, origin: RouterEvent | None, strike: Injected | None) -> None:
        """Say what the next event that arrives was when it was published, and which strike made it what it is."""
        self._origin, self._now = origin, strike

    def arrived(self) -> None:
        """It has."""
        self._origin = self._now = None

    def astray(self, key: StreamKey) -> list[Problem]:
        """What the worker itself led astray or left without its parent, whoever heard of it."""
        stream = self.ledger.streams.get(key)
        return [] if stream is None else [*stream.astray.values(), *stream.orphaned.values()]

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
            problem.fault = (
                cause.fault if cause is not None else self.misfits.get(key) or self._at_the_door(problem, key)
            )
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
        """The injection that a problem came of; see `Injections` where neither ids nor the event itself say so."""
        if problem.rule == "event_id_gap" and (missing := self._next_missing(problem, key)) is not None:
            return missing
        now = self._now
        if now is not None and key in now.keys:
            return now
        here = self._of(key)
        naming = here.naming(problem.blocks, partial(self._chain, key))
        if naming is not None:
            return naming
        if problem.cause is not None and problem.cause.fault is not None:
            return problem.cause.fault
        return here.first()

    def _at_the_door(self, problem: Problem, key: StreamKey) -> Injected | None:
        here = self.doors.get(key)
        if here is None:
            return None
        data = None if problem.event is None else problem.event.event.data
        blocks = problem.blocks or getattr(data, "block_hashes", ())
        return here.naming(blocks, partial(self._chain, key)) or here.first()

    def _chain(self, key: StreamKey, block: int) -> list[int]:
        """A block's ancestors, as published, and where it was not, as it arrived; or as another has published them."""
        streams = (self.ledger.streams.get(key), self._arrived.streams.get(key), *self.ledger.streams.values())
        return next((stream.chain(block) for stream in streams if stream is not None and block in stream.origin), [])

    def _next_missing(self, gap: Problem, key: StreamKey) -> Injected | None:
        """The first strike that made a gap of ids, if ids are missing; a gap is said of them all."""
        waiting = self._missing.get(key, [])
        upto = gap.event_id
        passed = [s for s in waiting if upto is None or (s.event_id is not None and s.event_id < upto)]
        for strike in passed:
            waiting.remove(strike)
        holes = [ids for ids in self._arrived.streams[key].holes[-1:] if upto in (None, ids.stop)]  # none, if backwards
        return next((s for s in passed if any(s.event_id in ids for ids in holes)), None)


def _same(problem: Problem, other: Problem) -> bool:
    """Whether the same is wrong with what was published: the rule, the stream, and one block at least."""
    if (problem.rule, problem.worker_id, problem.dp_rank) != (other.rule, other.worker_id, other.dp_rank):
        return False
    return not problem.blocks or not other.blocks or not set(problem.blocks).isdisjoint(other.blocks)
