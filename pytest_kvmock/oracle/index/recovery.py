"""Recovery of events that a router missed: which of them the worker still has, and when the router must ask.

Theory of operation. A worker keeps its last events in a ring, and a tree of the blocks of all its events (`LocalIndex`;
Dynamo's `LocalKvIndexer`). A router keeps, for each worker and rank, the id of the last event that it applied
(`RouterCursor`). A non-consecutive id shows that events are missing. Then the router asks for the events after its
last, and gets them, or a dump of the tree if the ring no longer reaches back that far. The two do not call each other:
the index answers queries, the cursor returns the next actions.

The events of a dump have their own ids, from 0 on. A router that takes these for ids of the worker asks again at every
event (dynamo #7072).
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from pytest_kvmock.oracle.index.index import RadixIndex, RadixIndexError
from pytest_kvmock.oracle.index.tree import WorkerRank
from pytest_kvmock.values.checks import integer_text, is_integer
from pytest_kvmock.values.events import (
    Cleared,
    Located,
    Removed,
    RouterEvent,
    SparseStored,
    StorageTier,
    Stored,
    Updated,
)

RING: Final = 4096
"""Number of events that a worker keeps by default (dynamo-mocker's router harness)."""

_log = logging.getLogger("pytest_kvmock.oracle")


class WorkerQuery(NamedTuple):
    """A query of a router to a worker: `ask(*query)`.

    Attributes:
        worker_id: the worker.
        start: the first event id; None: all that the worker holds.
        end: the last event id; None: the newest.
        dp_rank: the worker's rank.
    """

    worker_id: int
    start: int | None = None
    end: int | None = None
    dp_rank: int = 0


# The answers have the names of Dynamo's `WorkerKvQueryResponse`.


@dataclass(frozen=True, slots=True)
class Events:
    """The requested events, up to the newest.

    Attributes:
        events: the published events, without those before the last Cleared among them.
        last_event_id: id of the newest event.
    """

    events: tuple[RouterEvent, ...]
    last_event_id: int


@dataclass(frozen=True, slots=True)
class TreeDump:
    """All that the worker holds, as events that build it from nothing.

    Attributes:
        events: their ids count from 0 and belong to no worker.
        last_event_id: id of the newest event in the dump; also 0 if no event was ever published.
    """

    events: tuple[RouterEvent, ...]
    last_event_id: int


@dataclass(frozen=True, slots=True)
class TooNew:
    """The answer to a query for events that have not been published yet.

    Attributes:
        requested_start: the first requested id.
        requested_end: the last requested id; the newest available one if the query had none.
        newest_available: id of the newest event.
    """

    requested_start: int
    requested_end: int
    newest_available: int


@dataclass(frozen=True, slots=True)
class InvalidRange:
    """The answer to a query whose end is before its start.

    Attributes:
        start_id: the first requested id.
        end_id: the last requested id.
    """

    start_id: int
    end_id: int


Answer: TypeAlias = Events | TreeDump | TooNew | InvalidRange


class LocalIndex:
    """The events that one rank of a worker keeps, for routers that missed some.

    Args:
        ring: number of last events that are kept.
        to_newest: an answer runs to the newest event, whatever end was requested, and begins at its last Cleared
            (kv-router 1.2.1). False: exactly from the start to the end (before dynamo #8021).
        clears_below: whether a Cleared also empties the tiers below the device, as in `RadixIndex`.

    Raises:
        ValueError: an invalid `ring`.
    """

    def __init__(self, ring: int = RING, *, to_newest: bool = True, clears_below: bool = True) -> None:
        self._clamps = not to_newest
        self._ring: deque[RouterEvent] = deque(maxlen=ring_size(ring))
        self._tree = RadixIndex(clears_below=clears_below)
        self._emptied = tuple(StorageTier) if clears_below else (StorageTier.DEVICE,)
        # Token ids of the blocks, by tier; a dump has them too.
        self._tokens: dict[StorageTier, dict[int, Sequence[int]]] = {tier: {} for tier in StorageTier}

    def __repr__(self) -> str:
        kept = f"events {self.oldest} to {self.newest}" if self._ring else "no event"
        return f"<LocalIndex with {kept}>"

    @property
    def ring(self) -> int:
        """Number of events that are kept. A smaller number drops the oldest."""
        size = self._ring.maxlen
        assert size is not None
        return size

    @ring.setter
    def ring(self, size: int) -> None:
        self._ring = deque(self._ring, maxlen=ring_size(size))

    @property
    def oldest(self) -> int | None:
        """Id of the oldest event in the ring; None if there is none."""
        return self._ring[0].event.event_id if self._ring else None

    @property
    def newest(self) -> int | None:
        """Id of the newest event; None before the first."""
        return self._ring[-1].event.event_id if self._ring else None

    def apply(self, event: RouterEvent, shown: RouterEvent | None = None) -> None:
        """Keep a published event. A non-consecutive id is logged, and the event is kept.

        Args:
            event: the event.
            shown: the event that the tree, and so a dump, gets instead, for an engine that publishes copies: a Removed
                of the blocks that have no copy left.

        Raises:
            TypeError: it is not a `RouterEvent` with a Stored, Removed, Located, Updated or Cleared.
        """
        with suppress(RadixIndexError):  # kv-router only logs it; the ring keeps the event
            self._tree.apply(shown or event)
        data, event_id = (shown or event).event.data, event.event.event_id
        if self.newest is not None and event_id != self.newest + 1:
            _log.error("worker %s: event %s was kept after %s", event.worker_id, event_id, self.newest)
        self._ring.append(event)
        tokens = self._tokens[event.storage_tier]
        if isinstance(data, SparseStored | Located | Updated):
            return
        if isinstance(data, Stored):
            tokens.update(zip(data.block_hashes, event.token_ids or (), strict=False))
        elif isinstance(data, Removed):
            for block in data.block_hashes:
                tokens.pop(block, None)
        else:
            for tier in self._emptied:
                self._tokens[tier].clear()

    def get_events_in_id_range(self, start: int | None = None, end: int | None = None) -> Answer:
        """Answer a router that missed events.

        Args:
            start: the first requested id; None: a dump.
            end: the last requested id; None: the newest.

        Raises:
            ValueError: an invalid id.
        """
        for name, value in (("start", start), ("end", end)):
            if value is not None and not is_integer(value, 0):
                raise ValueError(f"{name} is an event id, {integer_text(0)}, or None, got {value!r:.80}")
        if start is not None and end is not None and end < start:
            return InvalidRange(start, end)
        oldest, newest = self.oldest, self.newest
        if start is None or oldest is None or newest is None:
            return self._dump()
        if start > newest:
            return TooNew(start, newest if end is None else end, newest)
        if start < oldest:
            return self._dump()
        events = list(islice(self._ring, bisect_left(self._ring, start, key=_id_of), None))
        if self._clamps:
            last = newest if end is None else min(end, newest)
            return Events(tuple(event for event in events if event.event.event_id <= last), last)
        cleared = [i for i, event in enumerate(events) if isinstance(event.event.data, Cleared)]
        return Events(tuple(events[cleared[-1] if cleared else 0 :]), newest)

    def _dump(self) -> TreeDump:
        events = []
        for event in self._tree.dump_events():
            data = event.event.data
            assert isinstance(data, Stored)
            tokens = self._tokens[event.storage_tier]
            known = (
                tuple(tokens[block] for block in data.block_hashes) if tokens.keys() >= {*data.block_hashes} else None
            )
            events.append(RouterEvent(event.worker_id, event.event, event.storage_tier, known))
        return TreeDump(tuple(events), self.newest or 0)


def ring_size(size: object) -> int:
    """Return `size` if it is a valid size of a ring.

    Raises:
        ValueError: it is not.
    """
    if not is_integer(size, 1):
        raise ValueError(f"ring is a number of events, {integer_text(1)}, got {size!r:.80}")
    if size > sys.maxsize:  # the limit of a deque
        raise ValueError(f"ring is a number of events, at most {sys.maxsize}, got {size!r:.80}")
    return size


def _id_of(event: RouterEvent) -> int:
    return event.event.event_id


class RecoveryStep(NamedTuple):
    """The next actions of a router, in this order.

    Attributes:
        replace: first drop all that is known about the worker's rank.
        apply: then apply these events.
        ask: then send the worker this query, and pass its answer to `RouterCursor.answered`; None: no query.
    """

    replace: bool = False
    apply: tuple[RouterEvent, ...] = ()
    ask: WorkerQuery | None = None


_NOTHING: Final = RecoveryStep()


class _Rank:
    """The state of the ids of one worker and rank.

    Attributes:
        last: id of the last event that was applied; None before the first.
        asked: the open query.
        held: events that arrived while the query is open, by id.
    """

    __slots__ = ("asked", "held", "last")

    def __init__(self) -> None:
        self.last: int | None = None
        self.asked: WorkerQuery | None = None
        self.held: dict[int, RouterEvent] = {}


class RouterCursor:
    """Tracks event ids for a router: which events to apply, which to drop, and when to ask the worker.

    Each worker and rank is tracked separately. The first event is applied, and the worker is asked for all that it
    holds. An event with an id up to the last one is a duplicate and dropped. The next id is applied. A larger id shows
    that events are missing, and the worker is asked for them. While a query is open, events wait: the answer contains
    them, or they are applied after it. A Cleared is handled like any other event. (A Dynamo router applies it and
    continues, even if events before it are missing.)

    After an answer the cursor is at the last id of the answer, or at the id of the event that caused the query,
    whichever is later. After a dump it is at its `last_event_id`, as the ids of a dump mean nothing. A worker that gave
    no answer is asked again at its next event. Another query follows at once only if waiting events show that more is
    missing and the answer brought events; so the queries end.
    """

    def __init__(self) -> None:
        self._ranks: dict[WorkerRank, _Rank] = {}

    def last(self, worker_id: int, dp_rank: int = 0) -> int | None:
        """Return the id of the last applied event of a worker and rank; None before the first."""
        rank = self._ranks.get((worker_id, dp_rank))
        return None if rank is None else rank.last

    def observe(self, event: RouterEvent) -> RecoveryStep:
        """Receive an event.

        Raises:
            TypeError: it is not a `RouterEvent`.
        """
        if not isinstance(event, RouterEvent):
            raise TypeError(f"RouterCursor.observe takes a RouterEvent, got {event!r:.200}")
        worker_id, dp_rank, got = event.worker_id, event.event.dp_rank, event.event.event_id
        rank = self._ranks.setdefault((worker_id, dp_rank), _Rank())
        last = rank.last
        if last is not None and got <= last:
            return _NOTHING
        if rank.asked is not None:
            rank.held[got] = event
            return _NOTHING
        if last is not None and got == last + 1:
            rank.last = got
            return RecoveryStep(apply=(event,))
        rank.held[got] = event
        if last is None:
            rank.last = got
            rank.asked = WorkerQuery(worker_id, dp_rank=dp_rank)
            return RecoveryStep(apply=(event,), ask=rank.asked)
        rank.asked = WorkerQuery(worker_id, last + 1, dp_rank=dp_rank)
        return RecoveryStep(ask=rank.asked)

    def answered(self, query: WorkerQuery, answer: Answer | None) -> RecoveryStep:
        """Receive the answer of a worker.

        Args:
            query: the query that it was sent.
            answer: its answer; None: it did not answer.

        Raises:
            TypeError: `query` is not a query, or `answer` not an answer.
        """
        if not isinstance(query, WorkerQuery):
            raise TypeError(f"RouterCursor.answered takes the WorkerQuery that was asked, got {query!r:.200}")
        if answer is not None and not isinstance(answer, Answer):
            raise TypeError(f"an answer is Events, TreeDump, TooNew, InvalidRange or None, got {answer!r:.200}")
        rank = self._ranks.get((query.worker_id, query.dp_rank))
        if rank is None or rank.asked != query:
            return _NOTHING  # the worker was forgotten in the meantime
        held, rank.asked, rank.held = rank.held, None, {}
        if isinstance(answer, TreeDump):
            apply = list(answer.events)
            # An empty dump that ends with event 0 means that the worker published nothing yet.
            rank.last = answer.last_event_id if answer.events or answer.last_event_id else -1
        elif isinstance(answer, Events) and rank.last is not None:
            before = rank.last
            apply = [event for event in answer.events if event.event.event_id > before]
            rank.last = max(before, answer.last_event_id)
        else:
            if query.start is None:
                rank.last = None
            return _NOTHING
        ask = self._catch_up(rank, held, query, apply)
        return RecoveryStep(isinstance(answer, TreeDump), tuple(apply), ask)

    @staticmethod
    def _catch_up(
        rank: _Rank, held: dict[int, RouterEvent], query: WorkerQuery, apply: list[RouterEvent]
    ) -> WorkerQuery | None:
        """Apply the events that waited for an answer; return the next query if more are missing."""
        assert rank.last is not None
        helped = query.start is None or rank.last >= query.start  # otherwise the queries would not end
        for event_id in sorted(held):
            if event_id <= rank.last:
                continue
            if event_id > rank.last + 1 and helped:
                rank.held = {waiting: event for waiting, event in held.items() if waiting >= event_id}
                rank.asked = query._replace(start=rank.last + 1, end=None)
                return rank.asked
            apply.append(held[event_id])
            rank.last = event_id
        return None

    def forget(self, worker_id: int, dp_rank: int | None = None) -> None:
        """Forget a worker, or one of its ranks, that was removed or restarted: its next event is treated as the first.

        An unannounced restart looks like duplicates: the ids begin at 0 again, and the events are dropped.
        """
        for key in list(self._ranks):
            if key[0] == worker_id and dp_rank in (None, key[1]):
                del self._ranks[key]
