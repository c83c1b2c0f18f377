"""Sinks for the user's own block managers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeGuard

from pytest_kvmock.engines.backends import MOST_WORKERS
from pytest_kvmock.oracle.hygiene.content import FoundChain
from pytest_kvmock.oracle.hygiene.entries import BatchesLost
from pytest_kvmock.values.events import (
    BlockTokens,
    Cleared,
    EventData,
    KvCacheEvent,
    Located,
    Removed,
    RouterEvent,
    StorageTier,
    Stored,
    Updated,
    check_block_hashes,
)

if TYPE_CHECKING:
    from pytest_kvmock.harness.publisher import Publisher
    from pytest_kvmock.values.prompt_keys import EventExtra
    from pytest_kvmock.values.sinks import EventSink
    from pytest_kvmock.wire.sockets.receiver import LostBatches

MOST_UNJUDGED: Final = 10_000
"""Maximum number of Stored that are kept until their hashes are found to be a chain, which may never happen."""

FIRST_SINK_WORKER: Final = MOST_WORKERS
"""Sinks are separate workers, with the first free ids from here."""

CompareWith: TypeAlias = Callable[[int, int, StorageTier | str, Callable[[], Iterable[int]]], None]
"""Compares the stream of a worker, rank and tier with the resident blocks that a callable returns."""

Publishable: TypeAlias = EventData | KvCacheEvent | RouterEvent
"""The arguments that a sink takes: the data of an event, an event with its id, or an event with its worker."""


HASHES: Final = "tuples of hashes, of blocks from -2**63 to 2**64 - 1 and local ones from 0, and a mapping as extra"
"""The fields of an event, in words."""


def is_event(event: object) -> TypeGuard[RouterEvent]:
    """Whether an object is a RouterEvent with valid ids and hashes; SGLang's block hashes are signed."""
    if not isinstance(event, RouterEvent) or not isinstance(event.event, KvCacheEvent):
        return False
    if event.extra is not None and not isinstance(event.extra, Mapping):
        return False
    data = event.event.data
    if isinstance(data, Stored):
        parent = () if data.parent_hash is None else (data.parent_hash,)
        blocks: tuple[Any, ...] = (parent, data.block_hashes)
        unsigned: tuple[Any, ...] = (data.tokens_hashes,)
    elif isinstance(data, (Removed, Located, Updated)):
        blocks, unsigned = (data.block_hashes,), ()
    elif isinstance(data, Cleared):
        blocks = unsigned = ()
    else:
        return False
    try:
        for values in ((event.worker_id, event.event.event_id, event.event.dp_rank), *unsigned):
            array("Q", values)
        for values in blocks:
            check_block_hashes(values)
    except (TypeError, OverflowError):
        return False
    return all(isinstance(values, tuple) for values in (*blocks, *unsigned))


class KvSink:
    """Captures the events of a user's own block manager, and publishes them for a separate worker, to be judged.

    Call the sink, or its `publish`, with a Stored, Removed, Located, Updated, Cleared, KvCacheEvent or RouterEvent.
    Data without an id get the next id. A RouterEvent gets the id of this worker; its rank, event id and tier stay.

    Attributes:
        worker_id: the worker's id; by default the first free id from 2**16.
        events: the events so far, in order.
        chained: whether hashes must be a chain, Dynamo's or that of its stream; None: detected by `FoundChain`.
        is_removed: whether the router has removed the worker and nothing was published since; then another sink may
            take its id.
    """

    def __init__(
        self,
        worker_id: int,
        publisher: Publisher,
        judge_hashes: Callable[[Sequence[RouterEvent]], None],
        compare_with: CompareWith,
        *,
        chained: bool | None = None,
        judges_host: bool = True,
    ) -> None:
        self.worker_id = worker_id
        self.chained = chained
        self._judges_host = judges_host  # vLLM's events about the host lack the keys that were hashed with tokens
        self.events: list[KvCacheEvent] = []
        self.is_removed = False
        self._publisher = publisher
        self._judge_hashes = judge_hashes
        self._compare_with = compare_with
        self._published: set[tuple[int, StorageTier]] = set()  # ranks and tiers of the blocks in its events
        self._compared: set[tuple[int, StorageTier]] = set()
        self._chain = FoundChain()
        self._unjudged: list[RouterEvent] = []  # every Stored before the chain was found
        self._looked_at = 0  # the number of these at the last lookup of resident blocks

    def __repr__(self) -> str:
        return f"<KvSink worker {self.worker_id}, {len(self.events)} events>"

    @property
    def is_watched(self) -> bool:
        """Whether `compare` was called."""
        return bool(self._compared)

    @property
    def is_compared(self) -> bool:
        """Whether `compare` was called for each rank and tier whose blocks were published."""
        return bool(self._compared) and self._published <= self._compared

    def publish(
        self,
        event: Publishable,
        storage_tier: StorageTier | str = StorageTier.DEVICE,
        token_ids: BlockTokens | None = None,
        extra: EventExtra | None = None,
    ) -> None:
        """Publish an event.

        Args:
            event: the event, or its data.
            storage_tier: the tier of the blocks, or its name; ignored for a RouterEvent, which has a tier.
            token_ids: for a Stored, the token ids of each block.
            extra: extra data of the event (`RouterEvent.extra`).

        Raises:
            TypeError: an invalid event.
            ValueError: an unknown tier.
        """
        __tracebackhide__ = True
        if isinstance(event, RouterEvent):
            storage_tier, token_ids, extra = event.storage_tier, event.token_ids, event.extra
            event = event.event
        tier = StorageTier.of(storage_tier)
        with self._publisher.lock:  # covers the choice of the id, or two threads would get the same id
            if isinstance(event, EventData):
                event = KvCacheEvent(self._publisher.next_id(self.worker_id, 0), event)
            addressed = RouterEvent(self.worker_id, event, tier, token_ids, extra)
            if not is_event(addressed):
                raise TypeError(
                    "a kv_sink takes Stored, Removed, Located, Updated, Cleared, KvCacheEvent or RouterEvent, with "
                    f"{HASHES}, got {event!r:.80} ({type(event).__name__})"
                )
            self.events.append(event)
            if not isinstance(event.data, Cleared):  # a Cleared has no tier
                self._published.add((event.dp_rank, tier))
            self.is_removed = False
            addressed.chained = self._must_chain(addressed)
            self._publisher.publish(addressed)

    __call__ = publish

    def lost_batches(self, worker_id: int, dp_rank: int, batches: range, observed: str = "") -> None:  # noqa: ARG002 - the sink is a worker of its own
        """Record batches of a wire that did not arrive; see `Inside.lost_batches`."""
        self._publisher.lost_batches(BatchesLost(self.worker_id, dp_rank, batches, observed))

    def losses_at(self, endpoints: Sequence[str]) -> LostBatches:
        """Return `lost_batches` for a subscriber at these endpoints; see `Inside.losses_at`."""
        return self._publisher.losses_at(endpoints, self.worker_id)

    def sinks_of(self, worker_id: int) -> list[tuple[EventSink, int | None]]:  # noqa: ARG002 - as of `lost_batches`
        """Return the sinks that get the events of this sink; see `Inside.sinks_of`."""
        return self._publisher.sinks_of(self.worker_id)

    def _must_chain(self, addressed: RouterEvent) -> bool:
        """Whether the hashes of an event must be judged as a chain; if `chained` is None, only of an event that breaks
        the chain found so far.
        """
        if self.chained is not None:
            return self.chained and (self._judges_host or addressed.storage_tier is StorageTier.DEVICE)
        data, chain = addressed.event.data, self._chain
        if not isinstance(data, Stored):
            return False
        was_found = chain.found
        is_broken = chain.is_broken_by(data)
        if not chain.found:
            if len(self._unjudged) < MOST_UNJUDGED:
                self._unjudged.append(addressed)
        elif not was_found:
            self._judge_earlier(chain.is_broken_by)
        return is_broken

    def _judge_earlier(self, is_broken: Callable[[Stored], bool]) -> None:
        """Judge the hashes of earlier events that break the chain, after it was found."""
        unjudged, self._unjudged = self._unjudged, []
        self._judge_hashes([e for e in unjudged if isinstance(e.event.data, Stored) and is_broken(e.event.data)])

    def _looked_up(self, resident: Callable[[], Iterable[int]]) -> Iterable[int]:
        """Return the resident blocks; they may show that the hashes are a chain and that a wrong one was published."""
        blocks = resident()
        fresh = self._unjudged[self._looked_at :]
        if self.chained is None and fresh:
            self._looked_at = len(self._unjudged)
            blocks = list(blocks)
            with suppress(TypeError):  # from an invalid hash; the comparison reports it
                held = frozenset(blocks)
                if any(isinstance(e.event.data, Stored) and self._chain.is_shown_by(e.event.data, held) for e in fresh):
                    self._judge_earlier(
                        lambda data: self._chain.is_shown_by(data, held) or self._chain.is_broken_by(data)
                    )
        return blocks

    def compare(
        self,
        resident: Callable[[], Iterable[int]],
        *,
        dp_rank: int = 0,
        storage_tier: StorageTier | str = StorageTier.DEVICE,
    ) -> None:
        """Add the drift check: at each flush and at the end, compare the published events with the resident blocks.

        Args:
            resident: returns the block hashes that the manager holds now.
            dp_rank: the rank of these blocks.
            storage_tier: the tier of these blocks, or its name.

        Raises:
            TypeError: `resident` cannot be called.
            ValueError: an unknown tier.
        """
        __tracebackhide__ = True
        if not callable(resident):
            raise TypeError(f"compare takes a callable that returns the resident block hashes, got {resident!r:.80}")
        self._compare_with(self.worker_id, dp_rank, storage_tier, partial(self._looked_up, resident))
        self._compared.add((dp_rank, StorageTier.of(storage_tier)))
