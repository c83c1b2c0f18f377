"""The journal of a ledger: all its inputs in order, as values.

Theory of operation. Each input of a ledger is an entry for `Ledger.take`; an arriving event is itself an entry. The
same entries in the same order always make the same ledger, as no entry reads a live worker. So one journal serves all
later uses: the second book replays it, a capture writes it, a check reads it, and a failure is reduced from its events.

Some entries only repeat data that a ledger can find again: the resident blocks at a flush, and all published events at
a recovery. They are long, and kept only until the journal is replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from pytest_kvmock.oracle.hygiene.injection import Injection
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.hygiene.stream import Stream
from pytest_kvmock.oracle.hygiene.stream_spec import StreamSpec
from pytest_kvmock.values.events import RouterEvent, StorageTier, StreamKey


class Opened(NamedTuple):
    """The stream of a worker and rank begins; it holds nothing.

    Attributes:
        key: (worker_id, dp_rank).
        first_id: the id of its first event; None: any.
        spec: the known properties of its engine; None: unknown.
    """

    key: StreamKey
    first_id: int | None = None
    spec: StreamSpec | None = None


class Replayed(NamedTuple):
    """An event arrived after a recovery had brought it, so it changes nothing; see `Ledger.is_replay`."""

    event: RouterEvent


class WorkerRemoved(NamedTuple):
    """A worker, or one rank of it, was removed from the router, or its restart was announced.

    Attributes:
        worker_id: the worker.
        dp_rank: the rank; None: all ranks.
        first_id: the id of its next event; None: any, after a removal.
        keys: the streams that begin again, and hold nothing.
    """

    worker_id: int
    dp_rank: int | None
    first_id: int | None
    keys: tuple[StreamKey, ...] = ()


class Missed(NamedTuple):
    """A sink kept an event from the router: its id is not a gap, and its blocks are unknown.

    Attributes:
        key: worker and rank.
        event_id: its id.
        rule: the rule of this problem.
        observed: see `Problem`.
        expected: see `Problem`.
        event: the event, if it is known.
    """

    key: StreamKey
    event_id: int
    rule: str
    observed: str
    expected: str
    event: RouterEvent | None = None


class Skipped(NamedTuple):
    """A worker published an event and left out ids before it, which will not arrive.

    Attributes:
        key: worker and rank.
        due: the id after the last one that it published; None if there was none.
        got: the id that it published.
    """

    key: StreamKey
    due: int | None
    got: int


@dataclass(frozen=True, slots=True, eq=False)
class Subscribed:
    """A consumer of a wire subscribed at these endpoints, one per rank. The entry changes nothing; it names the
    consumer for messages about lost batches.
    """

    endpoints: tuple[str, ...]


class BatchesLost(NamedTuple):
    """Batches of a wire did not arrive and could not be replayed: their contents are unknown.

    A wire numbers batches, not events, so the ids of events show no gap.

    Attributes:
        worker_id: the worker.
        dp_rank: the rank.
        batches: their numbers; empty if numbers went backwards: then `start` is the number that was due.
        observed: text of what happened; "": they did not arrive.
        consumer: name of the consumer that lost them, if known.
    """

    worker_id: int
    dp_rank: int
    batches: range
    observed: str = ""
    consumer: Subscribed | None = None

    @property
    def text(self) -> str:
        """Text of what happened."""
        numbers = self.batches
        names = f"batch {numbers.start}" if len(numbers) == 1 else f"batches {numbers.start} to {numbers.stop - 1}"
        return self.observed or f"{names} did not arrive"


class IdsBegun(NamedTuple):
    """The ids of a worker and rank begin again: events that a recovery has brought do not arrive any more."""

    key: StreamKey


class Unpublished(NamedTuple):
    """Blocks that the next event of a worker and rank removes from a tier below the device, where no Stored named them.

    Dynamo's offload engine creates such a block if the device evicts a block again while its first copy is under way;
    `OffloadEngine.unpublished` lists them. They are not drift, and their Removed is right.
    """

    key: StreamKey
    blocks: frozenset[int]


class HashesChained(NamedTuple):
    """The hashes of an earlier Stored were later found to be a chain, and are now judged.

    Attributes:
        event: the event.
        position: its number among the arrived events, from 0.
    """

    event: RouterEvent
    position: int


class Recovered(NamedTuple):
    """A worker and rank was asked for event ids up to the newest, and they have arrived.

    Attributes:
        published: all events that it has published, in order.
        ids: the requested ids.
    """

    published: Stream
    ids: range


class IdsPublished(NamedTuple):
    """A worker and rank has published all ids below `next_id`; they must have arrived by now."""

    key: StreamKey
    next_id: int


class Counted(NamedTuple):
    """The blocks of each worker and rank are compared with its capacity, as at a flush, when events are complete."""


class Resident(NamedTuple):
    """The blocks that an engine holds in a tier are compared with those that the events give.

    Attributes:
        key: worker and rank.
        tier: the tier.
        blocks: the block hashes; if residency is counted, one for each copy.
        unpublished: the hashes that may be there without a Stored; see `Unpublished`.
    """

    key: StreamKey
    tier: StorageTier
    blocks: Collection[int]
    unpublished: Collection[int] = ()


class Injected(NamedTuple):
    """A fault was injected into a stream. The entry changes nothing; only arriving events do."""

    injection: Injection


class Attributed(NamedTuple):
    """A problem was found to be a result of an injected fault. The entry changes nothing."""

    problem: Problem


Entry: TypeAlias = (
    RouterEvent
    | Opened
    | Replayed
    | WorkerRemoved
    | Missed
    | Skipped
    | Subscribed
    | BatchesLost
    | IdsBegun
    | Unpublished
    | HashesChained
    | Recovered
    | IdsPublished
    | Counted
    | Resident
    | Injected
    | Attributed
)
"""Inputs of a ledger; a RouterEvent is an arriving event."""

NoEvent: TypeAlias = WorkerRemoved | BatchesLost
"""Arrivals that are not events."""

Arrival: TypeAlias = RouterEvent | NoEvent
"""An event as it arrived, or another arrival."""

OF_STATE: Final = (Recovered, Resident)
"""The entries that are kept only until the journal is replayed."""


class Journal(list[Entry]):
    """Entries in order. A ledger adds events by `append`, all others by `add`, after it has taken them.

    Attributes:
        found: the problems that entries showed, by position of the entry, for a replay.
        is_open: whether it was not replayed yet.
        is_cut: whether entries were dropped, so that it is incomplete.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Sequence[Problem]] = {}
        self.is_open = True
        self.is_cut = False

    def add(self, entry: Entry, found: Sequence[Problem]) -> None:
        """Add an entry that is not an event, and its problems."""
        if self.is_open or not isinstance(entry, OF_STATE):
            list.append(self, entry)
            if found:
                self.note(found)

    def note(self, found: Sequence[Problem]) -> None:
        """Record the problems of the last entry."""
        if self.is_open:
            self.found[len(self) - 1] = found

    def cut(self) -> None:
        """Drop all entries so far."""
        self.is_cut = True
        self.found.clear()
        list.clear(self)

    def close(self) -> None:
        """Drop the data that only a replay needs. Call it after the replay."""
        self.is_open = False
        self.found.clear()
        self[:] = [entry for entry in self if not isinstance(entry, OF_STATE)]
