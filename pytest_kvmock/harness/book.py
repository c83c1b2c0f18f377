"""The book of what would have arrived without faults: a ledger of what workers publish, from the first fault on.

It serves two questions. Which problems are results of an injected fault (`Attribution`)? And what should an index
answer that survives faults (`SurvivalOracle`)? The second needs a history and a reference index too, which are kept
where a test says that its router survives.

`Recovery` keeps a book of its own, of what workers *published*: the two part where a real failure keeps an event from
the router, at an unannounced restart, and when a worker is removed from the router. Which of them starts over when:

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

Each ledger has hash chains of its own: a chain of hashes remembers its stream, and one that two ledgers share would
find wrong hashes in a sound stream.
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
    """A record of what workers published, to compare with what arrived.

    Its ledger replays the journal of what arrived; until now that is what was published.

    Args:
        arrived: the ledger of what arrived, which has a journal that was not replayed.

    Attributes:
        ledger: of what is published.
        attribution: finds the fault of each problem that is a result of one.
        survival: what an index that survives faults should answer; None where no test asks for it.
    """

    def __init__(self, arrived: Ledger) -> None:
        self.ledger = Ledger()
        journal, take = arrived.journal, self.ledger.take
        assert journal is not None
        twins: dict[Problem, Problem] = {}
        if journal.is_cut:  # what has arrived is all that was published
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
        """Keep from here on what an index should answer that survives faults; `reference` has what arrived until
        now.
        """
        if self.survival is None:
            self.survival = SurvivalOracle(self.ledger, reference)
        return self.survival

    # -------------------------------------------------------------------------------------- what is published

    def published(self, event: RouterEvent, problems: Sequence[Problem]) -> Published:
        """Record an event that a worker publishes, which its ledger has taken, and what is wrong with it."""
        return Published(event, problems, 0 if self.survival is None else self.survival.published(event))

    def lost_to_failure(self, problem: Problem, missed: Missed) -> None:
        """Record an event that a real failure kept from the router; no router can detect that."""
        (twin,) = self.ledger.take(missed)
        self.attribution.lost_to_failure(problem, twin)

    def begin_anew(self, key: StreamKey, *, first_id: int | None) -> None:
        """Start over with a worker and rank: it restarts, announced, or the router removes it."""
        self.ledger.take(WorkerRemoved(*key, first_id, (key,)))
        self.attribution.begin_anew(key)
        if self.survival is not None:
            self.survival.begin_anew(key, announced=True)

    # ---------------------------------------------------------------------------------------- what faults do

    def injected(self, injection: Injection, event: RouterEvent | None, emptied: Collection[int]) -> None:
        """Record what a fault did.

        Args:
            injection: what it did.
            event: the event that it changed, as published; None where it changed none that was published.
            emptied: the blocks that were held until it emptied the cache.
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
        """Record an event that arrives: what was lost before it shows, and what was held back is no longer missing."""
        injection = delivery.injection
        if injection is not None and injection.late:
            emptied = self._emptied.pop(injection, ())
            self.attribution.released(injection, emptied)
            if self.survival is not None:
                self.survival.released(injection, emptied)
        if self.survival is not None:
            self.survival.received(delivery.key, delivery.published)

    def received(self, delivery: Delivery) -> None:
        """Record an event that arrived and was judged: a Cleared ends what faults did before it."""
        if isinstance(delivery.event.event.data, Cleared):
            self.attribution.cleared(delivery.key, delivery.injection)

    def recovered(self, key: StreamKey, ids: range) -> None:
        """Record that the router has asked a worker and rank for these event ids, and has every event from there on."""
        self.attribution.recovered(key, ids)
        if self.survival is not None:
            self.survival.recovered(key, ids)

    def left_behind(self, key: StreamKey) -> Sequence[Problem]:
        """Problems of blocks that the worker itself left resident after a Removed, or without their parent."""
        stream = self.ledger.streams.get(key)
        return [] if stream is None else [*stream.removed_but_resident.values(), *stream.orphaned.values()]
