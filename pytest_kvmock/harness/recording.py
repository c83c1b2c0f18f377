"""The recording of a harness, from which a failure is replayed and reduced (`pytest_kvmock.harness.reduce`).

Two levels are kept: the arrived events, in the journal, and the operations on the workers. A passing test only pays for
one tuple per operation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_kvmock.oracle.hygiene import entries
from pytest_kvmock.values.events import RouterEvent
from pytest_kvmock.values.programs.operations import Operation, RunPasses
from pytest_kvmock.values.tokens import TokenRuns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_kvmock.engines.backends import BackendSpec
    from pytest_kvmock.engines.schedulers.args import MockEngineArgs
    from pytest_kvmock.harness.index_comparison import Sync
    from pytest_kvmock.oracle.hygiene.log import EventLog
    from pytest_kvmock.oracle.index.index import Clears
    from pytest_kvmock.values.events import StreamKey

MOST: Final = 200_000
"""Maximum number of events, and of operations, that a failure is reduced from; later ones are left out."""


class RecordedOperation(NamedTuple):
    """An operation, and when it was called.

    Attributes:
        operation: the operation on a worker or the router; requests are numbered from 1.
        at: the number of events that had arrived before.
    """

    operation: Operation
    at: int


class Recording:
    """Events and operations of a harness, in order, each up to `MOST`.

    Args:
        log: counts the events.
        journal: has the events.
        sync: when the index under test is compared; see `RouterHarness`.
        clears: what a Cleared empties; see `RouterHarness`.

    Attributes:
        operations: the operations on the workers: the class of each, its fields, and `RecordedOperation.at`. `recorded`
            makes values of them on demand.
        requests: the number of requests.
        bursts: whether the test gave an index events in bursts (`RouterHarness.burst`).
        engines: for each worker and rank that had an engine, its arguments and the worker's backend.
        backends: the backends of the workers, by name.
        sinks: the worker ids of the sinks.
    """

    __slots__ = (
        "_journal",
        "_log",
        "backends",
        "bursts",
        "clears",
        "engines",
        "operations",
        "requests",
        "sinks",
        "sync",
    )

    def __init__(self, log: EventLog, journal: entries.Journal, sync: Sync = "auto", clears: Clears = "rank") -> None:
        self.operations: list[tuple[type[Operation], tuple[Any, ...], int]] = []
        self.requests = 0
        self.bursts = False
        self.engines: dict[StreamKey, tuple[MockEngineArgs, BackendSpec]] = {}
        self.backends: dict[str, BackendSpec] = {}
        self.sinks: set[int] = set()
        self.sync = sync
        self.clears = clears
        self._log = log
        self._journal = journal

    @property
    def arrivals(self) -> list[entries.Arrival]:
        """The events and other arrivals that the router received, in order. Events whose hashes were later found to be
        a chain are marked.
        """
        chained = {entry.position for entry in self._journal if isinstance(entry, entries.HashesChained)}
        arrivals: list[entries.Arrival] = []
        position = 0
        for entry in self._journal:
            event = entry.event if isinstance(entry, entries.Replayed) else entry
            if isinstance(event, RouterEvent):
                arrivals.append(replace(event, chained=True) if position in chained else event)
                position += 1
            elif isinstance(event, entries.NoEvent):
                arrivals.append(event)
        return arrivals[:MOST]

    @property
    def is_cut(self) -> bool:
        """Whether events and operations were dropped, so that nothing can be replayed."""
        return self._journal.is_cut

    def cut(self) -> None:
        """Drop all events and operations so far."""
        self._journal.cut()
        self.operations.clear()

    @property
    def journal(self) -> Sequence[entries.Entry]:
        """All entries of the ledger."""
        return self._journal

    def next_request(self) -> int:
        """Return the number of the next request, from 1."""
        self.requests += 1
        return self.requests

    def operate(self, operation: type[Operation], *fields: Any) -> None:
        """Record an operation before it runs, because an operation that raises may already have changed something.

        Consecutive passes of an engine are one operation.
        """
        if operation is RunPasses and self.operations:
            last, (count, *key), at = self.operations[-1]
            if last is RunPasses and key == [*fields[1:]]:
                self.operations[-1] = last, (count + fields[0], *key), at
                return
        if len(self.operations) < MOST:
            self.operations.append((operation, fields, self._log.total))

    def retract_pass(self, worker_id: int, dp_rank: int) -> None:
        """Remove the last recorded pass of an engine."""
        for place in range(len(self.operations) - 1, -1, -1):
            operation, (count, *key), at = self.operations[place]
            if operation is RunPasses and key == [worker_id, dp_rank]:
                self.operations[place] = operation, (count - 1, *key), at
                if count == 1:
                    del self.operations[place]
                return

    def recorded(self) -> Iterator[RecordedOperation]:
        """Yield the operations as values, in order."""
        for operation, fields, at in self.operations:
            made = (each.tokens() if isinstance(each, TokenRuns) else each for each in fields)
            yield RecordedOperation(operation(*made), at)
