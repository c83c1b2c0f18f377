"""A journal that is written into a capture, so that another ledger finds the same problems from it.

Two entries have no separate line, because older readers would reject it. They are the keys `unpublished` and `anew` in
the line of the next event of their worker and rank, or of its recovery. Entries that a check does not need are not
written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytest_kvmock.oracle.hygiene import entries
from pytest_kvmock.oracle.hygiene.entries import Journal
from pytest_kvmock.oracle.hygiene.injection import Injection
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.servers.capture.capture_file import CaptureFile
from pytest_kvmock.servers.capture.lines import event_line, lines_of, who
from pytest_kvmock.servers.capture.publishers import Consumer, FaultyPublisher, Publishers
from pytest_kvmock.values.events import RouterEvent, StreamKey


class CapturingJournal(Journal):
    """A journal that writes each entry that a check needs.

    Args:
        file: the capture.
        backend_of: returns the name of a worker's backend, which a check uses to judge its hashes again; None if it has
            none.
    """

    def __init__(self, file: CaptureFile, backend_of: Callable[[StreamKey], str | None] = lambda _: None) -> None:
        super().__init__()
        self.file = file
        self._backend_of = backend_of
        self._beside: dict[StreamKey, dict[str, Any]] = {}  # keys of the line of the next event
        self._injections: dict[Injection, int] = {}
        self._faults = 0
        self._publishers = Publishers()
        self._consumers: dict[entries.Subscribed, Consumer] = {}

    def append(self, event: entries.Entry) -> None:
        """Add an arrived event, and write it."""
        super().append(event)
        if isinstance(event, RouterEvent):
            self._write_event(event)

    def add(self, entry: entries.Entry, found: Sequence[Problem]) -> None:
        """Add an entry that is not an event, and write it."""
        super().add(entry, found)
        if isinstance(entry, entries.Replayed):
            self._write_event(entry.event, replayed=True)
        elif isinstance(entry, entries.Unpublished):
            self._beside.setdefault(entry.key, {})["unpublished"] = sorted(entry.blocks)
        elif isinstance(entry, entries.IdsBegun):
            self._beside.setdefault(entry.key, {})["anew"] = True
        elif isinstance(entry, entries.Subscribed):
            self._consumers[entry] = self._publishers.subscribed(entry.endpoints)
        elif isinstance(entry, entries.Attributed):
            self._write_result(entry.problem)
        else:
            self._write(entry)

    def _write(self, entry: entries.Entry) -> None:
        more: dict[str, Any] = {}
        if isinstance(entry, entries.Opened):
            more["backend"] = self._backend_of(entry.key)
        elif isinstance(entry, entries.BatchesLost):
            consumer = None if entry.consumer is None else self._consumers[entry.consumer]
            more["sent_by"] = self._publishers.sender((entry.worker_id, entry.dp_rank), entry.batches, consumer)
        elif isinstance(entry, entries.Recovered):
            more.update(self._beside.pop((entry.published.worker_id, entry.published.dp_rank), {}))
        elif isinstance(entry, entries.Injected):
            self._injections[entry.injection] = self._faults
            self._faults += 1
        for line in lines_of(entry, **more):
            self.file.write(line)

    def _write_event(self, event: RouterEvent, *, replayed: bool = False) -> None:
        further = self._beside.pop(event.key, {}) if self._beside else {}
        self.file.write({**event_line(event, replayed=replayed), **further})

    def _write_result(self, problem: Problem) -> None:
        number = None if problem.fault is None else self._injections.get(problem.fault)
        if number is not None:  # otherwise the fault changed the input of an index, not the stream
            what = {"rule": problem.rule, "position": problem.position, "blocks": problem.blocks}
            self.file.write({"result": {**who((problem.worker_id, problem.dp_rank)), "of": number, **what}})

    def publishes(self, worker_id: int, publisher: FaultyPublisher) -> None:
        """Register a publisher of a worker, so that batches that its faults lose are not a problem of the stream."""
        self._publishers.add(worker_id, publisher)

    def injected_on_wire(self) -> None:
        """Write the injected wire faults of all publishers."""
        for number, worker_id, each in self._publishers.injections():
            self._faults += 1
            what = {"fault": each.fault, "batch": each.batch, "publisher": number, "restarts": each.restarts}
            self.file.write({"injected": {**who((worker_id, each.dp_rank)), **what}})
