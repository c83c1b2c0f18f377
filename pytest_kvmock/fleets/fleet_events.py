"""Delivery of engine events to index and router, at once or late.

One subject: the delivery of events.

`Knowledge` is the interface that a fleet uses. This module also has the implementation for bare engines, whose events
are not judged. A harness has its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from pytest_kvmock.fleets.clock.mock_engine import MockEngine
from pytest_kvmock.fleets.routing.routing import NameForms, id_of, stream_of
from pytest_kvmock.oracle.index.index import RadixIndex, RadixIndexError
from pytest_kvmock.values.checks import check_number
from pytest_kvmock.values.events import RemovedRow, RouterEvent

if TYPE_CHECKING:
    from pytest_kvmock.fleets.clock.passes import Calls
    from pytest_kvmock.fleets.fleet_stores import FleetStores
    from pytest_kvmock.fleets.report.rows import Belief, EventMark
    from pytest_kvmock.fleets.router_calls import RouterCalls
    from pytest_kvmock.fleets.routing.routing import RouterRequest, Worker
    from pytest_kvmock.values.events import StreamKey
    from pytest_kvmock.values.shared_stores import StoreSpec

_T = TypeVar("_T")

EventDelay: TypeAlias = "float | Callable[[RouterEvent], float]"
"""The delay of events in virtual milliseconds, or a function that returns it for each event."""


class Late(Generic[_T]):
    """Queue of delayed things, each with the moment at which it is due; things of one stream stay in order.

    Args:
        delay: the delay; `take` raises a ValueError if a function returns something other than a number of at least 0.
    """

    def __init__(self, delay: EventDelay) -> None:
        self._delay = delay
        self._new: list[tuple[RouterEvent | RemovedRow, _T]] = []
        self._late: list[tuple[float, int, StreamKey, _T]] = []
        self._count = 0
        self._last_due: dict[StreamKey, float] = {}

    @property
    def next_ms(self) -> float:
        """The time at which the next thing is due; infinite if there is none."""
        return self._late[0][0] if self._late else math.inf

    @property
    def is_at_once(self) -> bool:
        """Whether there is no delay."""
        return not self._delay

    def put(self, event: RouterEvent | RemovedRow, thing: _T) -> None:
        """Queue something for an event; a row of events is allowed only without a delay."""
        self._new.append((event, thing))

    def take(self, now_ms: float) -> list[_T]:
        """Take the things that are due."""
        due: list[_T] = []
        if self._new:
            new, self._new = self._new, []
            if not self._delay:
                return [thing for _, thing in new]
            for event, thing in new:
                assert isinstance(event, RouterEvent)
                delay = self._delay_of(event) if now_ms < math.inf else 0.0
                moment = max(now_ms + delay, self._last_due.get(event.key, 0.0))
                self._last_due[event.key] = moment
                self._count += 1
                heappush(self._late, (moment, self._count, event.key, thing))
        while self._late and self._late[0][0] <= now_ms:
            due.append(heappop(self._late)[3])
        return due

    def _delay_of(self, event: RouterEvent) -> float:
        if not callable(self._delay):
            return self._delay
        delay = self._delay(event)
        check_number(f"Fleet: the result of event_delay_ms for {event!r:.80}", delay, unit=" (milliseconds)")
        return delay

    def drop(self, worker_id: int, dp_rank: int | None = None) -> None:
        """Drop the queued things of a worker that is gone, or of one rank that restarts."""

        def stays(key: StreamKey) -> bool:
            return key[0] != worker_id or (dp_rank is not None and key[1] != dp_rank)

        self._new = [each for each in self._new if stays(each[0].key)]
        self._late = [each for each in self._late if stays(each[2])]
        heapify(self._late)


def by_worker(scores: Mapping[Any, int], *, has_ranks: bool) -> Mapping[Worker, int]:
    """Return scores by the fleet's names of workers: id, or pair of id and rank."""
    if has_ranks:
        return scores
    return {id_of(key): score for key, score in scores.items()}


class Tap:
    """Sink of one engine that gives its events the worker's name in the fleet.

    Args:
        take: called with each event, or row of events.
        worker: the worker.
        takes_row: returns whether rows of events are allowed now; None: never.
    """

    def __init__(
        self,
        take: Callable[[Any], None],
        worker: Worker,
        takes_row: Callable[[], bool] | None = None,
    ) -> None:
        self._take = take
        self._key = stream_of(worker)
        self._takes_row = takes_row

    def takes_row(self) -> bool:
        """Whether events may be published in a row; see `RemovedRow`."""
        return self._takes_row is not None and self._takes_row()

    def publish_row(self, row: RemovedRow) -> None:
        """Pass on a row of events."""
        if row.key != self._key:
            worker_id, dp_rank = self._key
            row = row._replace(worker_id=worker_id, dp_rank=dp_rank)
        self._take(row)

    def publish(self, event: RouterEvent) -> None:
        """Pass on an event."""
        worker_id, dp_rank = self._key
        inner = event.event
        if inner.dp_rank != dp_rank:
            inner = replace(inner, dp_rank=dp_rank)
        if inner is not event.event or event.worker_id != worker_id:
            event = RouterEvent(worker_id, inner, event.storage_tier, event.token_ids, event.extra, event.chained)
        self._take(event)


class KnownCaches:
    """The caches as an index knows them.

    Args:
        reference: the index.
        has_ranks: whether workers have more ranks than one.
    """

    def __init__(self, reference: RadixIndex, *, has_ranks: bool) -> None:
        self.reference = reference
        self.forms = NameForms()
        self.has_ranks = has_ranks

    def overlaps(self, request: RouterRequest) -> Mapping[Worker, int]:
        """Return the number of leading full blocks of a prompt that each worker holds; a worker with none may be
        absent.
        """
        found = self.forms.find(self.reference.find_matches, request.hashes)
        return by_worker(found, has_ranks=self.has_ranks)

    def held_blocks(self, worker: Worker) -> int:
        """Return the number of blocks that a worker holds."""
        return self.reference.num_blocks(*stream_of(worker))


class TrueCaches(KnownCaches):
    """The caches by all published events, applied at once and without faults: the view of a router with complete
    information.

    Args:
        engines: the engines.
        held: the blocks that are held already, as events.
        counts_copies: whether an engine publishes every copy of a block.
        has_ranks: whether workers have more ranks than one.
        stores: the stores that workers share.
    """

    def __init__(
        self,
        engines: Mapping[Worker, MockEngine],
        held: Iterable[RouterEvent],
        *,
        counts_copies: bool,
        has_ranks: bool,
        stores: Mapping[str, StoreSpec] = MappingProxyType({}),
    ) -> None:
        super().__init__(RadixIndex(count_copies=counts_copies, stores=stores), has_ranks=has_ranks)
        for worker, engine in engines.items():
            self.join(worker, engine)
        for event in held:
            self.reference.apply(event)

    def _take(self, event: RouterEvent) -> None:
        self.forms.take(event)
        with suppress(RadixIndexError):
            self.reference.apply(event)

    def remove(self, worker: Worker) -> None:
        """Drop the blocks of a worker that is gone or empty."""
        self.reference.remove_worker(id_of(worker))
        self.forms.forget(id_of(worker))

    def join(self, worker: Worker, engine: MockEngine) -> None:
        """Add a worker."""
        self.reference.offloads_in_chunks(*stream_of(worker), engine.worker.traits.chunk)
        engine.worker.publish_to(Tap(self._take, worker))


class Knowledge(KnownCaches, ABC, Generic[_T]):
    """The caches by the events delivered so far; a stage of a run.

    Args:
        reference: the reference index of the delivered events, whichever index is under test.
        delay: how late events are delivered, in virtual milliseconds.
        has_ranks: whether workers have more ranks than one.

    Attributes:
        marks: injected faults and event errors of this run, in order.
        takes_engines: whether a join may be given an engine.
    """

    marks: Sequence[EventMark] = ()
    takes_engines = True

    def __init__(self, reference: RadixIndex, delay: EventDelay, *, has_ranks: bool) -> None:
        super().__init__(reference, has_ranks=has_ranks)
        self._calls: RouterCalls | None = None
        self._on_the_way: Late[_T] = Late(delay)

    def begin(self, calls: RouterCalls) -> None:
        """Begin a run, which delivers events to the router too."""
        self._calls = calls

    def end(self) -> None:
        """End the run."""
        self._calls = None

    @property
    def next_ms(self) -> float:
        """The time at which the next late event is due; infinite if no event is late."""
        return self._on_the_way.next_ms

    def deliver(self, now_ms: float) -> Iterable[Any]:
        """Deliver the events that were published since the last call, and the late ones that are due by now."""
        due = self._on_the_way.take(now_ms)
        if due:
            return self._deliver(due, now_ms)
        self._delivered(now_ms)  # the usual case: nothing is due
        return ()

    def _deliver(self, due: Iterable[_T], now_ms: float) -> Calls:
        for thing in due:
            received = self._receive(thing)
            if received is not None and self._calls is not None and self._calls.wants("apply"):
                event, may_be_refused = received
                yield from self._calls.apply(event, now_ms, self._story, may_be_refused=may_be_refused)
        self._delivered(now_ms)

    def _delivered(self, now_ms: float) -> None:
        """Note that everything due by now was delivered."""

    @abstractmethod
    def _receive(self, thing: _T) -> tuple[RouterEvent, bool] | None:
        """Deliver an event to the indexes. Return it, and whether the router may raise on it as they do; None: the
        router does not get it.
        """

    def _story(self, event: RouterEvent) -> str:  # noqa: ARG002 - none is kept
        """Return the history of an event's parent block, for messages."""
        return ""

    def held_events(self) -> list[RouterEvent]:
        """Return events that rebuild the present content in an empty index, one for each copy."""
        return self.reference.dump_events()

    def new_index(self) -> RadixIndex:
        """Return an empty index for the events that the router gets."""
        return self.reference.new()

    def reference_overlaps(self, request: RouterRequest) -> Mapping[Worker, int]:
        """Return how many leading full blocks each worker holds, by the reference index."""
        return KnownCaches.overlaps(self, request)

    @property
    def untold(self) -> Collection[Worker]:
        """The workers that held blocks before the router started to get their events."""
        return ()

    @property
    def event_errors(self) -> Sequence[object] | None:
        """The errors in the events so far that no injected fault explains; None: the events are not judged."""
        return None

    def drifted(self, belief: Belief) -> None:
        """Note a wrong belief of the router."""

    @abstractmethod
    def restart(self, worker: Worker, engine: MockEngine, *, announced: bool) -> None:
        """Restart a worker: it loses its blocks and requests. An announced restart also drops the knowledge of the
        worker.
        """

    def crash(self, worker: Worker, engine: MockEngine) -> None:  # noqa: ARG002 - the engine alone dies
        """Let a worker crash: its requests and its unpublished events are lost."""
        engine.worker.crash()

    def remove(self, worker: Worker) -> None:
        """Drop the knowledge of a worker that has left."""
        self._on_the_way.drop(id_of(worker))
        self._remove_from_indexes(id_of(worker))

    @abstractmethod
    def _remove_from_indexes(self, worker_id: int) -> None:
        """Remove a worker from the indexes."""

    @abstractmethod
    def join(self, worker: Worker, engine: MockEngine | None, like: MockEngine) -> MockEngine:
        """Add a worker; without an engine it gets one modelled on `like`."""


class Heard(Knowledge["RouterEvent | RemovedRow"]):
    """The caches as index and router know them from events of bare engines.

    Args:
        index: the index that overlaps come from; None for a `RadixIndex`.
        engines: the engines.
        delay_ms: the delay of events.
        counts_copies: whether an engine publishes every copy of a block.
        has_ranks: whether workers have more ranks than one.
        shared: the stores that workers share; None: there are none.

    Raises:
        TypeError: the index lacks a method.
        ValueError: an engine cannot use a store of its worker.
    """

    def __init__(
        self,
        index: Any,
        engines: Mapping[Worker, MockEngine],
        delay_ms: EventDelay,
        *,
        counts_copies: bool,
        has_ranks: bool,
        shared: FleetStores | None = None,
    ) -> None:
        for method in ("apply", "find_matches") if index is not None else ():
            if not callable(getattr(index, method, None)):
                raise TypeError(f"Fleet: index must have a method {method}(), got {index!r:.80}")
        stores = None if shared is None else shared.specs
        reference = index if isinstance(index, RadixIndex) else RadixIndex(count_copies=counts_copies, stores=stores)
        super().__init__(reference, delay_ms, has_ranks=has_ranks)
        self._shared = shared
        self._given = index
        self._index: Any = self.reference if index is None else index
        for worker, engine in engines.items():
            self._hear(worker, engine)

    def _hear(self, worker: Worker, engine: MockEngine) -> None:
        if self._shared is not None:
            self._shared.put(id_of(worker), engine.worker)
        if self.reference is not self._given:
            self.reference.offloads_in_chunks(*stream_of(worker), engine.worker.traits.chunk)
        engine.worker.publish_to(Tap(self._put, worker, self._takes_row))

    def _put(self, event: RouterEvent | RemovedRow) -> None:
        self._on_the_way.put(event, event)

    def _takes_row(self) -> bool:
        """Whether rows are allowed: neither a router nor a given index takes single events, and there is no delay."""
        if self._calls is None or self._calls.wants("apply"):
            return False
        return self._given is None and self._on_the_way.is_at_once

    def _receive(self, thing: RouterEvent | RemovedRow) -> tuple[RouterEvent, bool] | None:
        if isinstance(thing, RemovedRow):
            self.reference.remove(*thing.key, thing.blocks)
            return None
        refused = False
        self.forms.take(thing)
        try:
            self.reference.apply(thing)
        except RadixIndexError:  # a faithful engine's oddity, on which this index raises
            refused = True
        if self.reference is not self._index:
            self._index.apply(thing)
        return thing, refused

    def overlaps(self, request: RouterRequest) -> Mapping[Worker, int]:
        """Return the number of leading full blocks of a prompt that each worker holds, by the given index."""

        def find(hashes: Sequence[int]) -> Any:
            found = self._index.find_matches(hashes)
            return getattr(found, "scores", found)

        return by_worker(self.forms.find(find, request.hashes), has_ranks=self.has_ranks)

    def restart(self, worker: Worker, engine: MockEngine, *, announced: bool) -> None:
        """Restart a worker."""
        if announced:  # the old events do not belong to the new start
            self._on_the_way.drop(*stream_of(worker))
            self._remove_from_indexes(id_of(worker))
        engine.worker.restart()

    def _remove_from_indexes(self, worker_id: int) -> None:
        self.reference.remove_worker(worker_id)
        self.forms.forget(worker_id)
        if self._index is not self.reference and callable(getattr(self._index, "remove_worker", None)):
            self._index.remove_worker(worker_id)

    def join(self, worker: Worker, engine: MockEngine | None, like: MockEngine) -> MockEngine:
        """Add a worker."""
        if engine is None:
            engine = MockEngine(like.args, backend=like.worker.backend, seed=hash(worker))
        self._hear(worker, engine)
        return engine
