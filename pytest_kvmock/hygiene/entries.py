"""The journal of a ledger: what it has learned, in order, each entry a value.

Theory of operation. All that a ledger learns is an entry, and goes through `Ledger.take`; an event that arrives is the entry
itself. The same entries in the same order make the same ledger, whenever they are taken: nothing of an entry asks a live
worker. So one journal serves all who look back: the second book replays it, a capture writes it down, a check reads it, and
a failure is reduced from the events in it.

Some entries state what a ledger can learn anew at any time: what is resident at a flush, and all that a worker has
published, at a recovery. They are long, and are kept only until the journal was replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from pytest_kvmock.events import RouterEvent, StorageTier, StreamKey
from pytest_kvmock.hygiene.injection import Injection
from pytest_kvmock.hygiene.problem import Problem
from pytest_kvmock.hygiene.stream import Stream
from pytest_kvmock.hygiene.stream_spec import StreamSpec


class Opened(NamedTuple):
    """The stream of a worker and rank begins, which holds nothing.

    Attributes:
        key: (worker_id, dp_rank).
        first_id: the id that its first event has; None for any.
        spec: what is known of its engine; None: nothing.
    """

    key: StreamKey
    first_id: int | None = None
    spec: StreamSpec | None = None


class Replayed(NamedTuple):
    """An event arrived that was part of a recovery, so that it changes nothing; see `Ledger.is_replay`."""

    event: RouterEvent


class WorkerRemoved(NamedTuple):
    """A worker, or one rank of it, was removed from the router, or restarted, announced.

    Attributes:
        worker_id: which worker.
        dp_rank: which rank; None for all.
        first_id: the id that its next event has; None for any, after a removal.
        keys: the streams that begin anew: nothing is held.
    """

    worker_id: int
    dp_rank: int | None
    first_id: int | None
    keys: tuple[StreamKey, ...] = ()


class Missed(NamedTuple):
    """An event was kept from the router by a sink: its id is no gap, and its blocks are unknown.

    Attributes:
        key: worker and rank.
        event_id: its id.
        rule: the rule of the problem that this is.
        observed: see `Problem`.
        expected: likewise.
        event: the event, where it is known.
    """

    key: StreamKey
    event_id: int
    rule: str
    observed: str
    expected: str
    event: RouterEvent | None = None


class Skipped(NamedTuple):
    """A worker published an event and left out ids before it: they will not arrive.

    Attributes:
        key: worker and rank.
        due: the id after the last one that it published; None: it has published nothing before.
        got: the id that it published.
    """

    key: StreamKey
    due: int | None
    got: int


@dataclass(frozen=True, slots=True, eq=False)
class Subscribed:
    """A consumer of a wire subscribed at these endpoints, one a rank. It changes nothing: it names who loses batches."""

    endpoints: tuple[str, ...]


class BatchesLost(NamedTuple):
    """Batches of a wire did not arrive, and could not be had: what was in them is unknown.

    A wire numbers batches and no events, so the ids of events show no gap.

    Attributes:
        worker_id: which worker.
        dp_rank: which rank.
        batches: their numbers; none where numbers went backwards, and `start` is the number that was due.
        observed: what happened; empty: they did not arrive.
        consumer: who lost them, where that is known.
    """

    worker_id: int
    dp_rank: int
    batches: range
    observed: str = ""
    consumer: Subscribed | None = None

    @property
    def text(self) -> str:
        """What happened."""
        numbers = self.batches
        names = f"batch {numbers.start}" if len(numbers) == 1 else f"batches {numbers.start} to {numbers.stop - 1}"
        return self.observed or f"{names} did not arrive"


class IdsBegun(NamedTuple):
    """The ids of a worker and rank begin anew: those that a recovery had do not arrive any more."""

    key: StreamKey


class Unpublished(NamedTuple):
    """Of the blocks that the next event of a worker and rank removes below the device, these were there without a Stored.

    Dynamo's offload engine has such blocks, for one that the device evicted again while its first copy was on its way: it
    names each of them (`OffloadEngine.unpublished`). No such block is drift, nor is its Removed wrong.
    """

    key: StreamKey
    blocks: frozenset[int]


class HashesChained(NamedTuple):
    """The hashes of a Stored that has arrived are a chain, as was found out later: they are to be judged.

    Attributes:
        event: the event.
        position: its number among those that arrived, from 0.
    """

    event: RouterEvent
    position: int


class Recovered(NamedTuple):
    """A worker and rank was asked for event ids, up to the newest, and these have arrived.

    Attributes:
        published: all that it has published, in order.
        ids: the ids that it was asked for.
    """

    published: Stream
    ids: range


class IdsPublished(NamedTuple):
    """A worker and rank has published ids below this, all of which must have arrived by now."""

    key: StreamKey
    next_id: int


class Counted(NamedTuple):
    """What each worker and rank holds is compared with its capacity, as at a flush, when events are complete."""


class Resident(NamedTuple):
    """What an engine holds in a tier is compared with what it holds according to the events.

    Attributes:
        key: worker and rank.
        tier: which tier.
        blocks: the block hashes; where residency is counted, one for each copy.
        unpublished: those of them that may be there without a Stored; see `Unpublished`.
    """

    key: StreamKey
    tier: StorageTier
    blocks: Collection[int]
    unpublished: Collection[int] = ()


class Injected(NamedTuple):
    """A fault was injected into a stream. It changes nothing here: what arrives does."""

    injection: Injection


class Attributed(NamedTuple):
    """A problem was found to be a result of an injected fault. Likewise."""

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
"""What a ledger is given; a RouterEvent is one that arrives."""

NoEvent: TypeAlias = WorkerRemoved | BatchesLost
"""What stands among the arrivals, and is no event."""

Arrival: TypeAlias = RouterEvent | NoEvent
"""An event as it arrived, or what stands among them."""

OF_STATE: Final = (Recovered, Resident)
"""The entries that are kept only until the journal was replayed."""


class Journal(list[Entry]):
    """Entries in order, which a ledger adds as it has taken them: events by `append`, all others by `add`.

    Attributes:
        found: the problems that entries showed, by the place of the entry, for a replay.
        is_open: whether nobody has replayed it yet.
        is_cut: whether entries were dropped, so that it is no whole story any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Sequence[Problem]] = {}
        self.is_open = True
        self.is_cut = False

    def add(self, entry: Entry, found: Sequence[Problem]) -> None:
        """Add an entry that is no event, and what it has shown."""
        if self.is_open or not isinstance(entry, OF_STATE):
            list.append(self, entry)
            if found:
                self.note(found)

    def note(self, found: Sequence[Problem]) -> None:
        """Note what the last entry has shown."""
        if self.is_open:
            self.found[len(self) - 1] = found

    def cut(self) -> None:
        """Drop all entries so far."""
        self.is_cut = True
        self.found.clear()
        list.clear(self)

    def close(self) -> None:
        """Drop what is only for a replay: there was one."""
        self.is_open = False
        self.found.clear()
        self[:] = [entry for entry in self if not isinstance(entry, OF_STATE)]
