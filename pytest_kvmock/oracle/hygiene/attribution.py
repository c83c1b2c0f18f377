"""Attribution: separates problems that workers cause from results of faults that a test injected.

Theory of operation. From the first fault on, a second ledger takes the events as published. A problem that
both ledgers find is real: it would be found without the fault, and is never listed under one. A problem that only the
ledger of arrived events finds is a result of a fault. The injection is found by the missing ids, by the changed event,
or else by the rule of `Injections`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from pytest_kvmock.oracle.hygiene.delivery import Delivery
from pytest_kvmock.oracle.hygiene.injection import Injection, Injections
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.hygiene.problem import INDEX_RULES, Problem
from pytest_kvmock.oracle.hygiene.rules import EVENT_ID_GAP, OVER_CAPACITY
from pytest_kvmock.values.events import StreamKey


class Attribution:
    """Separates real problems from the results of injected faults, and finds the fault that caused each result.

    Args:
        arrived: the ledger of the events that arrived.
        published: the ledger of the events as published.
        twins: the problems found so far; the key of each is the same problem in the ledger of published events.

    Attributes:
        injections: the injections of faults, in order.
        mismatched: workers that are a fault themselves, with its injection; each problem of their events results from
            it.
    """

    def __init__(self, arrived: Ledger, published: Ledger, twins: dict[Problem, Problem]) -> None:
        self.injections: list[Injection] = []
        self.mismatched: dict[StreamKey, Injection] = {}
        self._arrived = arrived
        self._published = published
        self._twins = twins
        self._of_streams: dict[StreamKey, Injections] = {}
        self._of_index_input: dict[StreamKey, Injections] = {}
        self._missing: dict[StreamKey, list[Injection]] = {}

    # --------------------------------------------------------------------------------------- what faults do

    def injected(self, injection: Injection, emptied: Collection[int] = ()) -> None:
        """Record an injection into a stream.

        Args:
            injection: the injection.
            emptied: the blocks that were held before it emptied the cache.
        """
        self.injections.append(injection)
        key = (injection.worker_id, injection.dp_rank)
        if injection.event_id is None and injection.empties:  # after a restart, earlier ids no longer count
            self._missing.pop(key, None)
            self._of(key).recover()
        elif injection.missing and not injection.fails_sink:  # a failing sink is reported as a separate problem
            self._missing.setdefault(key, []).append(injection)
        for each in injection.keys:
            self._of(each).add(injection, emptied, recovered=injection.whole)

    def index_input_changed(self, key: StreamKey, injection: Injection) -> None:
        """Record that the index under test received a different event from the one that arrived."""
        self.injections.append(injection)
        self._of_index_input.setdefault(key, Injections()).add(injection)

    def released(self, injection: Injection, emptied: Collection[int] = ()) -> None:
        """Record the arrival of an event that a fault delayed; see `injected`."""
        waiting = self._missing.get((injection.worker_id, injection.dp_rank), [])
        if injection in waiting:
            waiting.remove(injection)
        for key in injection.keys:
            self._of(key).recover_from(injection, emptied)

    def cleared(self, key: StreamKey, injection: Injection | None) -> None:
        """Record that a Cleared has arrived.

        Args:
            key: the worker and rank whose cache it emptied.
            injection: the injection that caused or changed it; None if there is none.
        """
        self._of(key).recover(before=injection)
        if key in self._of_index_input:
            self._of_index_input[key].recover()

    def lost_to_failure(self, problem: Problem, twin: Problem) -> None:
        """Record an event lost to a real failure; `twin` is the same failure in the ledger of published events."""
        self._twins[twin] = problem
        if problem.cause is not None and problem.cause.fault is not None:
            problem.stand()

    def recovered(self, key: StreamKey, ids: range) -> None:
        """Record that the router asked a worker and rank for these event ids, and now has all events from the first
        of them on.
        """
        self._of(key).recover_ids(key, ids)
        missing = self._missing.get(key, [])
        self._missing[key] = [injection for injection in missing if injection.event_id not in ids]

    def begin_anew(self, key: StreamKey) -> None:
        """Drop the injections into a worker and rank after an announced restart or its removal from the router."""
        for of_streams in (self._missing, self._of_streams, self._of_index_input):
            of_streams.pop(key, None)

    def _of(self, key: StreamKey) -> Injections:
        return self._of_streams.setdefault(key, Injections())

    # ----------------------------------------------------------------------------------------- classifying

    def classify(self, problems: Iterable[Problem], real: Sequence[Problem], delivery: Delivery | None = None) -> None:
        """Set the fault of each problem that results from one, and stop listing real problems under such problems.

        Args:
            problems: the problems of the arrived events, causes before their consequences.
            real: the problems of the published events at the same point.
            delivery: the event that shows them; None if a comparison does.
        """
        for problem in problems:
            self._classify(problem, real, None if delivery is None else delivery.injection)

    def _classify(self, problem: Problem, real: Sequence[Problem], arriving: Injection | None) -> None:
        key = (problem.worker_id, problem.dp_rank)
        if problem.fault is not None:
            return
        if problem.rule in INDEX_RULES:
            cause = problem.cause
            problem.fault = (
                cause.fault if cause is not None else self.mismatched.get(key) or self._attribute_input(problem, key)
            )
            return
        twin = next((other for other in real if _same(problem, other)), None)
        if twin is not None and key not in self.mismatched and not self._stands_by_fault(problem, twin):
            self._twins[twin] = problem
            if problem.cause is not None and problem.cause.fault is not None:
                problem.stand()
            if problem.cause is None and twin.cause in self._twins:
                problem.follows_from(self._twins[twin.cause])
            return
        stream = self._published.streams.get(key)
        # The ledger of published events may have reported it before.
        if problem.rule == OVER_CAPACITY and stream is not None and problem.storage_tier in stream.overfull:
            problem.stand()
            return
        problem.fault = self.mismatched.get(key) or self._attribute(problem, key, arriving)
        cause = problem.cause
        if cause is not None and cause.excused and not problem.excused:  # the router need not survive its own fault
            problem.stand()

    def _stands_by_fault(self, problem: Problem, twin: Problem) -> bool:
        """Whether a problem stands by itself only because a fault hid the engine's warning that is its cause."""
        warning = twin.cause
        is_hidden = warning is not None and not warning.is_error and warning not in self._twins
        return is_hidden and problem.cause is None

    def _attribute(self, problem: Problem, key: StreamKey, arriving: Injection | None) -> Injection | None:
        """Return the injection that caused a problem, by missing ids, by the event itself, or by the rule of
        `Injections`.
        """
        if problem.rule == EVENT_ID_GAP and (missing := self._next_missing(problem, key)) is not None:
            return missing
        if arriving is not None and key in arriving.keys:
            return arriving
        of_stream = self._of(key)
        naming = of_stream.naming(problem.blocks, partial(self._ancestors, key))
        if naming is not None:
            return naming
        if problem.cause is not None and problem.cause.fault is not None:
            return problem.cause.fault
        return of_stream.first()

    def _attribute_input(self, problem: Problem, key: StreamKey) -> Injection | None:
        """Return the change to the input of the index under test that caused a problem."""
        of_input = self._of_index_input.get(key)
        if of_input is None:
            return None
        data = None if problem.event is None else problem.event.event.data
        blocks = problem.blocks or getattr(data, "block_hashes", ())
        return of_input.naming(blocks, partial(self._ancestors, key)) or of_input.first()

    def _ancestors(self, key: StreamKey, block: int) -> list[int]:
        """Return the chain of a block: as published, else as it arrived, else as another stream published it."""
        published = self._published.streams
        streams = (published.get(key), self._arrived.streams.get(key), *published.values())
        return next((stream.chain(block) for stream in streams if stream is not None and stream.was_stored(block)), [])

    def _next_missing(self, gap: Problem, key: StreamKey) -> Injection | None:
        """Return the first injection that caused a gap of ids, if ids are missing; one gap covers several
        injections.
        """
        waiting = self._missing.get(key, [])
        upto = gap.event_id
        passed = [one for one in waiting if upto is None or (one.event_id is not None and one.event_id < upto)]
        for injection in passed:
            waiting.remove(injection)
        # Empty if ids went backwards.
        holes = [ids for ids in self._arrived.streams[key].holes[-1:] if upto in (None, ids.stop)]
        return next((one for one in passed if any(one.event_id in ids for ids in holes)), None)


def _same(problem: Problem, other: Problem) -> bool:
    """Whether two problems are the same: they share rule, stream, tier, and at least one block."""
    if (problem.rule, problem.worker_id, problem.dp_rank) != (other.rule, other.worker_id, other.dp_rank):
        return False
    if problem.storage_tier is not other.storage_tier:
        return False
    return not problem.blocks or not other.blocks or not set(problem.blocks).isdisjoint(other.blocks)
