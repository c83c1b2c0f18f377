"""Events made by hand: missing fields are added, and the events are published for a worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NoReturn

from pytest_kvmock.harness.publisher import Publisher
from pytest_kvmock.harness.user_sink import HASHES, Publishable, is_event
from pytest_kvmock.harness.workers import Workers
from pytest_kvmock.values.events import EventData, KvCacheEvent, RouterEvent, StorageTier, StreamKey


class ByHand:
    """Publishes events made by hand.

    Args:
        publisher: publishes the events.
        workers: the workers that the events can belong to, and the sinks, which accept no events made by hand.

    Attributes:
        keys: the workers and ranks with events made by hand.
    """

    __slots__ = ("_publisher", "_workers", "keys")

    def __init__(self, publisher: Publisher, workers: Workers) -> None:
        self.keys: set[StreamKey] = set()
        self._publisher = publisher
        self._workers = workers

    def publish(self, events: Publishable | Iterable[Publishable], worker_id: int, dp_rank: int) -> None:
        """Publish one or more events; see `RouterHarness.apply`."""
        if isinstance(events, (EventData, KvCacheEvent, RouterEvent)):
            events = (events,)
        elif not isinstance(events, Iterable) or isinstance(events, (str, bytes, Mapping)):
            _refuse(events)
        for event in events:
            with self._publisher.lock:  # covers the choice of the id, or two threads would get the same id
                addressed = self._addressed(event, worker_id, dp_rank)
                self.keys.add((addressed.worker_id, addressed.event.dp_rank))
                self._publisher.publish(addressed)

    def _addressed(self, event: Publishable, worker_id: int, dp_rank: int) -> RouterEvent:
        """Return an event with id, rank and worker added if missing, and a `StorageTier` in place of a tier's name."""
        if isinstance(event, EventData):
            event = KvCacheEvent(self.next_id(worker_id, dp_rank), event, dp_rank)
        if isinstance(event, KvCacheEvent):
            event = RouterEvent(worker_id, event)
        if not is_event(event):
            _refuse(event)
        if type(event.storage_tier) is not StorageTier or event.chained:  # an event made by hand belongs to no request
            event = replace(event, storage_tier=StorageTier.of(event.storage_tier), chained=False)
        if event.worker_id in self._workers.sink_ids:
            raise ValueError(f"worker {event.worker_id} is a sink of this test; publish its events through the sink")
        return event

    def next_id(self, worker_id: int, dp_rank: int) -> int:
        """Take the next id for an event made by hand that has none; the id is not used again."""
        worker = self._workers.by_key.get(self._workers.key(worker_id, dp_rank))
        published = self._publisher.next_id(worker_id, dp_rank)  # events made by hand may have had larger ids
        return published if worker is None else max(published, worker.manager.take_event_id())


def _refuse(event: object) -> NoReturn:
    raise TypeError(
        "apply takes Stored, Removed, Located, Updated, Cleared, KvCacheEvent or RouterEvent, one or more, with "
        f"{HASHES}, got {event!r:.80} ({type(event).__name__})"
    )
