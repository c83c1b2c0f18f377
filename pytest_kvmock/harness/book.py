"""The book of the events that would have arrived without faults: a ledger of published events, from the first fault on.

It answers two questions. Which problems result from an injected fault (`Attribution`)? And what should an index answer
that survives faults (`SurvivalOracle`)? The second also needs a history and a reference index; they are kept only if a
test requires that its router survives faults.

`Recovery` keeps a separate record of what workers *published*. The two differ if a real failure keeps an event from the
router, at an unannounced restart, and when a worker is removed from the router. Which record starts over when:

| what happens | ledger of what arrived | this book | recovery |
|---|---|---|---|
| a worker restarts, announced | again | again | again |
| a worker restarts, unannounced | continues: ids go backwards | continues: ids go backwards | again |
| the fault `restart` | continues: ids go backwards | again | again |
| `remove_worker` | again, any id | again, any id | continues: the worker still exists |
| `worker(id)` after that, a new one | again, id 0 | again, id 0 | again |
| the fault `clear` | emptied | continues | continues |
| a sink before the router raises | continues, the event is missing | continues, the event is missing | has the event |
| a fault loses or changes an event | continues with what arrives | has the event as published | has the event |

Each ledger has separate hash chains: a chain has the state of its stream, and two ledgers that shared one would find
wrong hashes in a correct stream.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pytest_kvmock.harness.survival import SurvivalOracle
from pytest_kvmock.oracle.hygiene.attribution import Attribution
from pytest_kvmock.oracle.hygiene.delivery import Delivery, Published
from pytest_kvmock.oracle.hygiene.entries import Missed, WorkerRemoved
from pytest_kvmock.oracle.hygiene.injection import Injection
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.index.index import RadixIndex
from pytest_kvmock.values.events import Cleared, RouterEvent, StreamKey


class Book:
    """A record of the published events, for comparison with the events that arrived.

    Its ledger first replays the journal of arrived events; until then the same events were published.

    Args:
        arrived: the ledger of arrived events; its journal was not replayed yet.

    Attributes:
        ledger: the ledger of published events.
        attribution: finds the fault that caused a problem.
        survival: what an index that survives faults should answer; None if no test requires it.
    """

    def __init__(self, arrived: Ledger) -> None:
        self.ledger = Ledger()
        journal, take = arrived.journal, self.ledger.take
        assert journal is not None
        twins: dict[Problem, Problem] = {}
        if journal.is_cut:  # all published events have arrived
            self.ledger.streams.update((key, stream.twin()) for key, stream in arrived.streams.items())
            self.ledger.position = arrived.position
        else:
            for place, entry in enumerate(journal):
                found = take(entry)
                if found:
                    twins.update(zip(found, journal.found[place], strict=True))
        journal.close()
        self.attribution = Attribution(arrived, self.ledger, twins)
        self.survival: SurvivalOracle | None = None
        self._emptied: dict[Injection, Collection[int]] = {}

    def survive(self, reference: RadixIndex) -> SurvivalOracle:
        """Start to keep the answers of an index that survives faults; `reference` has the events that arrived so
        far.
        """
        if self.survival is None:
            self.survival = SurvivalOracle(self.ledger, reference)
        return self.survival

    # -------------------------------------------------------------------------------------- what is published

    def published(self, event: RouterEvent, problems: Sequence[Problem]) -> Published:
        """Record a published event that the book's ledger has taken, and its problems."""
        return Published(event, problems, 0 if self.survival is None else self.survival.published(event))

    def lost_to_failure(self, problem: Problem, missed: Missed) -> None:
        """Record an event that a real failure kept from the router; no router can detect that."""
        (twin,) = self.ledger.take(missed)
        self.attribution.lost_to_failure(problem, twin)

    def begin_anew(self, key: StreamKey, *, first_id: int | None) -> None:
        """Start over with a worker and rank, after an announced restart or its removal from the router."""
        self.ledger.take(WorkerRemoved(*key, first_id, (key,)))
        self.attribution.begin_anew(key)
        if self.survival is not None:
            self.survival.begin_anew(key, announced=True)

    # ---------------------------------------------------------------------------------------- what faults do

    def injected(self, injection: Injection, event: RouterEvent | None, emptied: Collection[int]) -> None:
        """Record an injection.

        Args:
            injection: the injection.
            event: the published event that it changed; None if it changed none.
            emptied: the blocks that were held before it emptied the cache.
        """
        if emptied and injection.late:
            self._emptied[injection] = emptied
        if injection.event_id is None:  # an unannounced restart
            key = (injection.worker_id, injection.dp_rank)
            self.ledger.take(WorkerRemoved(*key, 0, (key,)))
            if self.survival is not None:
                self.survival.begin_anew(key, announced=False)
        self.attribution.injected(injection, emptied)
        if self.survival is not None:
            self.survival.injected(injection, event, emptied)

    # ------------------------------------------------------------------------------------------ what arrives

    def receiving(self, delivery: Delivery) -> None:
        """Record an event that is about to be judged: a delayed event is no longer missing, and lost events before it
        become visible.
        """
        injection = delivery.injection
        if injection is not None and injection.late:
            emptied = self._emptied.pop(injection, ())
            self.attribution.released(injection, emptied)
            if self.survival is not None:
                self.survival.released(injection, emptied)
        if self.survival is not None:
            self.survival.received(delivery.key, delivery.published)

    def received(self, delivery: Delivery) -> None:
        """Record an event that was judged: a Cleared ends the effects of earlier faults."""
        if isinstance(delivery.event.event.data, Cleared):
            self.attribution.cleared(delivery.key, delivery.injection)

    def recovered(self, key: StreamKey, ids: range) -> None:
        """Record that the router asked a worker and rank for these event ids, and has all events from the first on."""
        self.attribution.recovered(key, ids)
        if self.survival is not None:
            self.survival.recovered(key, ids)

    def left_behind(self, key: StreamKey) -> Sequence[Problem]:
        """Return the problems of blocks that the worker itself left resident after a Removed, or without a parent."""
        stream = self.ledger.streams.get(key)
        return [] if stream is None else [*stream.removed_but_resident.values(), *stream.orphaned.values()]
