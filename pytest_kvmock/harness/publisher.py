"""The publisher between worker and router: it counts ids, publishes to sinks, injects faults, delivers to the judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pytest_kvmock.harness.judge import Judge
from pytest_kvmock.oracle.hygiene.delivery import Delivery
from pytest_kvmock.oracle.hygiene.entries import BatchesLost, Skipped, Subscribed
from pytest_kvmock.oracle.hygiene.story import removal_of
from pytest_kvmock.values.events import KvCacheEvent, RemovedRow, RouterEvent, Stored, StreamKey
from pytest_kvmock.values.sinks import EventSink, GivenSink, event_sink, given_sink, sink_text

if TYPE_CHECKING:
    from pytest_kvmock.harness.recovery import Recovery
    from pytest_kvmock.oracle.faults.injector import FaultInjector
    from pytest_kvmock.oracle.hygiene.injection import Injection
    from pytest_kvmock.wire.sockets.receiver import LostBatches

Transport: TypeAlias = Callable[[RouterEvent], Iterable[RouterEvent]]
"""Returns the events that arrive for a published event; empty if it is lost."""

_SinkOf: TypeAlias = tuple[EventSink, int | None]
"""A sink, and the worker whose events it gets; None: all workers."""


class _UserSink(Protocol):
    """The part of a `KvSink` that is used here."""

    worker_id: int
    events: list[KvCacheEvent]

    @property
    def is_watched(self) -> bool: ...

    @property
    def is_compared(self) -> bool: ...


class Publisher:
    """Delivers published events to the judge, one at a time.

    Args:
        judge: receives the arriving events.

    Attributes:
        lock: held while an event is published; code that takes an id and then publishes with it holds it for both.
        next_ids: the id after the last published one, by worker and rank.
        transport: the last stage, after sinks and faults; None: every event arrives.
        gate: gets each delivery instead of the judge, and passes it to `receive` when it is due; None: at once.
        user_sinks: the sinks that publish here instead of an engine.
        injections: the injections into events, in order.
    """

    def __init__(self, judge: Judge) -> None:
        self.lock = RLock()
        self.next_ids: dict[StreamKey, int] = {}
        self.transport: Transport | None = None
        self.gate: Callable[[Delivery], None] | None = None
        self.user_sinks: list[_UserSink] = []
        self.injections: list[Injection] = []
        self._judge = judge
        self._injector: FaultInjector | None = None
        self._recovery: Recovery | None = None
        self._before: list[_SinkOf] = []
        self._after: list[_SinkOf] = []

    @property
    def injector(self) -> FaultInjector | None:
        """The injector of faults; None while no test has requested a fault."""
        return self._injector

    @property
    def unused_faults(self) -> list[str]:
        """The names of the random faults that were not injected yet."""
        faults = () if self._injector is None else self._injector.random
        return list(dict.fromkeys(fault.kind for fault in faults if fault.is_unused))

    @property
    def num_uncompared_sinks(self) -> int:
        """Number of sinks of `make_kv_sink` that published and whose engine the test does not compare in each rank and
        tier.
        """
        return sum(bool(sink.events) and not sink.is_compared for sink in self.user_sinks)

    @property
    def unused_sinks(self) -> list[int]:
        """The workers of the sinks of `make_kv_sink` that got no event.

        A sink whose engine is compared counts as used, unless the workers of the test published and it got no event.
        """
        served = any(self.next_ids.values())
        return [sink.worker_id for sink in self.user_sinks if not sink.events and (served or not sink.is_watched)]

    @property
    def num_taken_for_device(self) -> int:
        """See `Judge.num_taken_for_device`."""
        return self._judge.num_taken_for_device

    @property
    def recovery(self) -> Recovery | None:
        """The recovery that keeps each published event, even a lost one; None if there is no recovery."""
        return self._recovery

    def add_sink(self, sink: GivenSink, *, before: bool, worker_id: int | None = None) -> None:
        """Add a sink that gets each event, or each event of one worker, before the router or after it.

        Raises:
            TypeError: not a sink.
        """
        (self._before if before else self._after).append((event_sink(sink, "add_sink: sink"), worker_id))

    def remove_sink(self, sink: GivenSink) -> None:
        """Stop publishing events to a sink."""
        with self.lock:
            self._before = [each for each in self._before if given_sink(each[0]) is not sink]
            self._after = [each for each in self._after if given_sink(each[0]) is not sink]

    def sinks_of(self, worker_id: int) -> list[_SinkOf]:
        """Return the sinks that get the events of a worker."""
        sinks = (*self._before, *self._after)
        return [(given_sink(sink), of) for sink, of in sinks if of in (None, worker_id)]

    def use_injector(self, injector: FaultInjector) -> None:
        """Start to inject faults, and to keep a book of the events that would have arrived without them."""
        self._injector = injector
        self._judge.keep_book()

    def use_recovery(self, recovery: Recovery) -> None:
        """Keep published events, so that a router can ask for those that it missed.

        Raises:
            ValueError: the recovery belongs to another harness.
        """
        recovery.join(self._judge, self.lock)
        self._recovery = recovery

    # ----------------------------------------------------------------------------------------------- events

    def next_id(self, worker_id: int, dp_rank: int) -> int:
        """Return the id after the last one that a worker and rank published."""
        return self.next_ids.get((worker_id, dp_rank), 0)

    def publish(self, event: RouterEvent) -> None:
        """Publish an event of a worker. A failure to judge it is also reported, because a worker would only log it."""
        with self.lock:
            try:
                self._publish(event)
            except Exception as error:
                self._raised(error, event)
                raise

    def _publish(self, event: RouterEvent) -> None:
        self._note_id(event)
        if self._recovery is not None:
            self._recovery.keep(event)
        if self._before and not self._publish_to(self._before, event, missed=True):
            return
        judge, injector = self._judge, self._injector
        if injector is None and self.transport is None and self.gate is None:
            judge.received(Delivery(event))
        elif injector is None:
            self.deliver(Delivery(event))
        else:
            injection, deliveries = injector.publish(Delivery(event, judge.published(event)))
            if injection is not None:
                self.injections.append(injection)
                judge.injected(injection, event)
            for delivery in deliveries:
                self.deliver(delivery)
            if injection is not None and injection.fails_sink:
                return
        if self._after:
            self._publish_to(self._after, event, missed=False)

    def takes_row(self) -> bool:
        """Whether events may be published in a row: no stage is between workers and judge, and there is no other
        receiver.
        """
        is_plain = self._injector is None and self._recovery is None and self.transport is None and self.gate is None
        return is_plain and not self._before and not self._after and self._judge.takes_row()

    def publish_row(self, row: RemovedRow) -> None:
        """Publish events of one worker and rank with consecutive ids, all at once; see `takes_row`."""
        events = row.events()
        with self.lock:
            try:
                self._note_id(events[0])
                self.next_ids[events[0].key] = events[-1].event_id + 1
                self._judge.received_row(events)
            except Exception as error:
                self._raised(error, events[0])
                raise

    def _raised(self, error: Exception, event: RouterEvent) -> None:
        self._judge.sink_failed(f"it could not be judged: {type(error).__name__}: {error}", event, missed=False)

    def _note_id(self, event: RouterEvent) -> None:
        """Record the id of a published event, and the ids that the worker skipped."""
        key = event.worker_id, event.event.dp_rank
        due, event_id = self.next_ids.get(key), event.event.event_id
        if event_id > (due or 0):
            self._judge.ledger.take(Skipped(key, due, event_id))
        self.next_ids[key] = event_id + 1

    def deliver(self, delivery: Delivery) -> None:
        """Deliver an event to the judge, at once or, with a gate, when it is due."""
        if self.gate is not None:
            self.gate(delivery)
        else:
            self.receive(delivery)

    def receive(self, delivery: Delivery) -> None:
        """Deliver an event to the judge now."""
        if self.transport is None:
            self._judge.received(delivery)
        else:
            for event in self.transport(delivery.event):
                if event.chained is not delivery.event.chained:  # no transport carries the mark
                    event = replace(event, chained=delivery.event.chained)  # noqa: PLW2901 - the same event
                self._judge.received(delivery._replace(event=event))

    @property
    def may_be_refused(self) -> bool:
        """Whether a router that indexes parents may raise on the last received event."""
        last = self._judge.last_received
        return last is not None and last.is_of_the_engine

    def story_before(self, event: RouterEvent) -> str:
        """Return what removed the block that an event continues from or removes, or else the block's story; "" if there
        is no such block.
        """
        stream, data = self._judge.ledger.streams.get(event.key), event.data
        blocks = (data.parent_hash,) if isinstance(data, Stored) else getattr(data, "block_hashes", ())[:1]
        return "" if stream is None or not blocks or blocks[0] is None else removal_of(stream, blocks[0])

    def losses_at(self, endpoints: Sequence[str], sink: int | None = None) -> LostBatches:
        """Return the function that a subscriber at these endpoints, one per rank, calls to report lost batches.

        Args:
            endpoints: the endpoints.
            sink: the worker whose batches are lost; None: the worker that each call names.
        """
        with self.lock:
            consumer = Subscribed(tuple(endpoints))
            self._judge.ledger.take(consumer)

        def lose(worker_id: int, dp_rank: int, batches: range, observed: str) -> None:
            self.lost_batches(BatchesLost(worker_id if sink is None else sink, dp_rank, batches, observed, consumer))

        return lose

    def lost_batches(self, lost: BatchesLost) -> None:
        """Record batches of a wire that did not arrive."""
        with self.lock:
            self._judge.lost_batches(lost)

    def _publish_to(self, sinks: list[_SinkOf], event: RouterEvent, *, missed: bool) -> bool:
        """Publish to sinks in order; the first that raises keeps the event from later sinks (dynamo-mocker)."""
        for sink, worker_id in sinks:
            if worker_id is not None and worker_id != event.worker_id:
                continue
            try:
                sink.publish(event)
            except Exception as error:  # noqa: BLE001 - whatever a sink raises is a finding
                observed = f"{sink_text(sink)} raised {type(error).__name__}: {error}"
                if getattr(given_sink(sink), "closed", False) is True:  # it would raise at each event: report it once
                    self.remove_sink(given_sink(sink))
                    observed += "; it gets no further events"
                self._judge.sink_failed(observed, event, missed=missed)
                return False
        return True

    # ---------------------------------------------------------------------------------------------- workers

    def begun(self, key: StreamKey) -> None:
        """Begin with a worker and rank that has not published anything."""
        if self._recovery is not None:
            self._recovery.worker_restarted(key)

    def worker_restarted(self, key: StreamKey, *, announced: bool) -> None:
        """Restart a worker and rank: its event ids begin again with 0. Sinks that get only this worker's events are
        notified.

        Raises:
            ValueError: the restart is announced and the index under test cannot remove the worker; nothing has changed.
        """
        with self.lock:
            if announced:
                self._judge.removed(*key, first_id=0)
            self.next_ids[key] = 0
            self.begun(key)
            for sink, worker_id in (*self._before, *self._after):
                notify = getattr(given_sink(sink), "worker_restarted", None) if worker_id == key[0] else None
                if notify is not None:
                    notify(key[1])

    def removed(self, worker_id: int, dp_rank: int | None = None) -> list[StreamKey]:
        """Remove a worker, or one of its ranks (None: all), from the router; return the removed ranks.

        Raises:
            ValueError: the index under test cannot remove it; nothing has changed.
        """
        with self.lock:
            keys = self._judge.removed(worker_id, dp_rank, first_id=None)
            for key in keys:
                self.next_ids.pop(key, None)
            return keys
