"""A ledger that writes what it is given into a capture, so that another ledger finds the same problems from it.

What it is asked, and does not change what it finds later, is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from pytest_kvmock.capture.capture_file import CaptureFile
from pytest_kvmock.capture.lines import bare_line, event_line
from pytest_kvmock.capture.publishers import FaultyPublisher, Publishers
from pytest_kvmock.events import RouterEvent, StreamKey
from pytest_kvmock.hygiene.injection import Injection
from pytest_kvmock.hygiene.ledger import Ledger
from pytest_kvmock.hygiene.problem import Problem
from pytest_kvmock.hygiene.stream import Stream


def _who(key: StreamKey) -> dict[str, int]:
    return {"worker_id": key[0], "dp_rank": key[1]}


class CapturingLedger(Ledger):
    """A ledger that writes down all that it judges. Its copies write nothing.

    Args:
        file: where.
        backend_of: returns the name of a worker's backend, by which its hashes are judged again; None: it has none.
    """

    def __init__(self, file: CaptureFile, backend_of: Callable[[StreamKey], str | None] = lambda _: None) -> None:
        super().__init__()
        self.file = file
        self._backend_of = backend_of
        self._injections: dict[Injection, int] = {}
        self._faults = 0
        self._publishers = Publishers()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        plain = memo[id(self)] = Ledger()
        plain.streams = deepcopy(self.streams, memo)
        return plain

    def open(self, key: StreamKey, **about: Any) -> Stream:
        """As `Ledger.open`."""
        stream = super().open(key, **about)
        line: dict[str, Any] = {**_who(key), **{name: value for name, value in about.items() if name != "chain"}}
        line["backend"] = self._backend_of(key)
        self.file.write({"stream": line})
        return stream

    def restarted(self, key: StreamKey, *, first_id: int | None) -> None:
        """As `Ledger.restarted`."""
        super().restarted(key, first_id=first_id)
        self.file.write({"restarted": {**_who(key), "first_id": first_id}})

    def observe(self, event: RouterEvent, position: int) -> list[Problem]:
        """As `Ledger.observe`."""
        problems = super().observe(event, position)
        self.file.write(event_line(event))
        return problems

    def wrong_hash(self, event: RouterEvent, position: int, before: Sequence[Problem]) -> list[Problem]:
        """As `Ledger.wrong_hash`."""
        self.file.write({"hashes_of": position})
        return super().wrong_hash(event, position, before)

    def missed(self, key: StreamKey, event_id: int, cause: Problem) -> None:
        """As `Ledger.missed`."""
        super().missed(key, event_id, cause)
        why = {"rule": cause.rule, "observed": cause.observed, "expected": cause.expected}
        event = None if cause.event is None else bare_line(cause.event)
        self.file.write({"missed": {**_who(key), "event_id": event_id, **why, "event": event}})
        if cause.fault is not None:
            self.attributed(cause)

    def subscribed(self, endpoints: Sequence[str]) -> object:
        """As `Ledger.subscribed`."""
        return self._publishers.subscribed(endpoints)

    def lost_batches(
        self, key: StreamKey, batches: range, position: int, observed: str = "", consumer: object = None
    ) -> list[Problem]:
        """As `Ledger.lost_batches`."""
        found = super().lost_batches(key, batches, position, observed, consumer)
        line = {**_who(key), "start": batches.start, "stop": batches.stop, "observed": found[0].observed}
        self.file.write({"lost": {**line, "sent_by": self._publishers.sender(key, batches, consumer)}})
        return found

    def skipped(self, key: StreamKey, due: int | None, got: int) -> None:
        """As `Ledger.skipped`."""
        super().skipped(key, due, got)
        if key in self.streams:
            self.file.write({"skipped": {**_who(key), "due": due, "got": got}})

    def published(self, key: StreamKey, next_id: int, position: int) -> list[Problem]:
        """As `Ledger.published`."""
        found = super().published(key, next_id, position)
        if found:
            self.file.write({"published": {**_who(key), "next_id": next_id}})
        return found

    def over_capacity(self, position: int) -> list[Problem]:
        """As `Ledger.over_capacity`."""
        found = super().over_capacity(position)
        if found:
            self.file.write({"full": True})
        return found

    def injected(self, injection: Injection) -> None:
        """As `Ledger.injected`."""
        self._injections[injection] = self._faults
        self._faults += 1
        what = {"fault": injection.kind, "event_id": injection.event_id, "survived": injection.survived}
        self.file.write({"injected": {**_who((injection.worker_id, injection.dp_rank)), **what}})

    def attributed(self, problem: Problem) -> None:
        """As `Ledger.attributed`."""
        number = None if problem.fault is None else self._injections.get(problem.fault)
        if number is not None:  # else it changed what an index was given, and not the stream
            what = {"rule": problem.rule, "position": problem.position, "blocks": problem.blocks}
            self.file.write({"result": {**_who((problem.worker_id, problem.dp_rank)), "of": number, **what}})

    def publishes(self, worker_id: int, publisher: FaultyPublisher) -> None:
        """Take note of a publisher of a worker: batches that consumers lose by its faults are then no problem of the stream."""
        self._publishers.add(worker_id, publisher)

    def injected_on_wire(self) -> None:
        """Write down the faults of the wire that were injected, of all publishers."""
        for number, worker_id, each in self._publishers.injections():
            self._faults += 1
            what = {"fault": each.fault, "batch": each.batch, "publisher": number, "restarts": each.restarts}
            self.file.write({"injected": {**_who((worker_id, each.dp_rank)), **what}})

    def was_replayed(self, event: RouterEvent) -> bool:
        """As `Ledger.was_replayed`."""
        replayed = super().was_replayed(event)
        if replayed:
            self.file.write(event_line(event, replayed=True))
        return replayed

    def recovered(self, published: Stream, ids: range) -> list[Problem]:
        """As `Ledger.recovered`."""
        parts = (published, *published.groups.values())
        events: Iterable[RouterEvent] = {id(event): event for part in parts for event in part.events}.values()
        line: Mapping[str, Any] = {
            **_who((published.worker_id, published.dp_rank)),
            "start": ids.start,
            "stop": ids.stop,
            "events": [bare_line(event) for event in sorted(events, key=lambda each: each.event.event_id)],
        }
        self.file.write({"recovered": line})
        return super().recovered(published, ids)
