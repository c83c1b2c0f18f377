"""Events of one engine as batches of bytes, one for each step and rank, as vLLM publishes them. `KvWire` keeps them
without a socket.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from pytest_kvmock.values.checks import check_integer, did_you_mean, is_integer
from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.values.events import BlockTokens, Cleared, EventData, KvCacheEvent, RouterEvent, StorageTier, Stored
from pytest_kvmock.values.prompt_keys import LOOKAHEAD_KEYS
from pytest_kvmock.wire.codec.batch import DIGESTS, SIZE, Decoded
from pytest_kvmock.wire.codec.decoding import decode
from pytest_kvmock.wire.codec.defects import EncodeError
from pytest_kvmock.wire.codec.digests import StreamDigests
from pytest_kvmock.wire.codec.encoding import BatchWriter
from pytest_kvmock.wire.codec.event_flaws import check_events
from pytest_kvmock.wire.codec.structs import load_msgspec
from pytest_kvmock.wire.codec.table import field_names, find_dialect
from pytest_kvmock.wire.codec.trtllm_zmq import WholeBlocks

_DEVICE: Final = StorageTier.DEVICE  # looked up once, because enum attributes are slow


class _Step(AbstractContextManager[None]):
    """The context of `Batcher.step`; one object serves all steps, because the batcher has the counter."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *raised: object) -> None:
        self._end()


class Batcher(ABC):
    """A `Sink` that writes the events of one engine with all its ranks in a dialect.

    Each event is a separate batch; events published within `step()` become one batch for each rank.

    Args:
        dialect: name of the dialect, or a `Dialect`.
        ranks: number of data-parallel ranks.
        timestamp: returns the timestamp of a batch, in seconds; None: the number of earlier batches, over restarts.
        digests: the digests of each rank, if the dialect has bytes as hashes.
        widens: whether block ids below 2^32 are written as full-width values.

    Raises:
        TypeError: `timestamp` cannot be called, or `digests` is not a mapping to StreamDigests.
        ValueError: the dialect is unknown, a number is out of range, or `digests` has an unknown rank.
        ImportError: the dialect needs msgspec, which is not installed.

    Attributes:
        dialect: the `Dialect`.
        ranks: number of ranks.
    """

    def __init__(
        self,
        dialect: str | Dialect,
        *,
        ranks: int,
        timestamp: Callable[[], float] | None,
        digests: Mapping[int, StreamDigests] | None,
        widens: bool,
    ) -> None:
        self.dialect = find_dialect(dialect)
        self.ranks = check_integer("ranks", ranks, 1)
        if timestamp is not None and not callable(timestamp):
            raise TypeError(f"timestamp must be callable and return seconds, or None, got {timestamp!r:.80}")
        if digests is not None and not isinstance(digests, Mapping):
            raise TypeError(f"digests must map ranks to StreamDigests, got {digests!r:.80}")
        for dp_rank, of_rank in (digests or {}).items():
            if not isinstance(of_rank, StreamDigests):
                raise TypeError(f"digests must map ranks to StreamDigests, got {of_rank!r:.80} for {dp_rank!r:.80}")
            if not is_integer(dp_rank, 0) or dp_rank >= ranks:
                raise ValueError(f"digests are of ranks 0 to {ranks - 1}, got rank {dp_rank!r:.80}")
        if self.dialect.is_msgpack:
            load_msgspec()  # invalid events are refused here, not in the middle of a step
        self._timestamp = timestamp
        self._digests = dict(digests or {})
        self._writer = BatchWriter(self.dialect, widens=widens)
        self._lock = threading.RLock()
        self._depth = self._sent = self._next_event_id = 0
        self._closed = False
        self._extra_names: set[object] = {DIGESTS, SIZE, "lora_path", LOOKAHEAD_KEYS}  # and names that were checked
        self._step = _Step(self._begin_step, self._end_step)
        self._pending: list[list[RouterEvent]] = [[] for _ in range(ranks)]
        self._whole = [WholeBlocks() for _ in range(ranks)] if self.dialect.whole_blocks else None

    @abstractmethod
    def _write(self, dp_rank: int, payload: bytes) -> None:
        """Take the payload of the next batch of a rank."""

    def publish(
        self,
        event: EventData | KvCacheEvent | RouterEvent,
        storage_tier: StorageTier | str = StorageTier.DEVICE,
        token_ids: BlockTokens | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish an event as a separate batch, or, within `step()`, as a part of one.

        Args:
            event: the event, or its data.
            storage_tier: the tier of the blocks, or its name, unless a RouterEvent has it.
            token_ids: for a Stored, the token ids of each block; every dialect over ZMQ carries them. As in `encode`,
                their range is not checked.
            extra: fields of the dialect in addition to the event's own, by name; fields of other dialects are ignored.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: the rank or tier is unknown; tier, token ids or `extra` are given with a RouterEvent, which has
                its own, or with an event that cannot carry them; a name in `extra` is unknown but similar to a field;
                or the publisher is closed.
            EncodeError: the dialect cannot express the event. Nothing was sent, and no number is used up.
        """
        with self._lock:  # this is fast for steps of events that engines have made
            if self._closed:
                self._check_open()
            if type(event) is not RouterEvent:
                event = self._addressed(event, storage_tier, token_ids, extra)
            elif token_ids is not None or extra is not None or storage_tier is not _DEVICE:
                self._check_alone(event, storage_tier=storage_tier, token_ids=token_ids, extra=extra)
            try:
                dp_rank = event.event.dp_rank
            except AttributeError:
                check_events([event])
                raise
            if type(dp_rank) is not int or not 0 <= dp_rank < self.ranks:
                self.check_rank(dp_rank)
            if self._depth:
                self._pending[dp_rank].append(event)
            else:
                self._publish_batch(dp_rank, [event])

    def step(self) -> AbstractContextManager[None]:
        """Make one batch for each rank from all events published within the context, as an engine's step does; no
        events make no batch.

        Raises:
            ValueError: the publisher is closed; raised when the context is entered.
            EncodeError: as in `flush`; raised when the context is left.
        """
        return self._step

    def _begin_step(self) -> None:
        with self._lock:
            self._check_open()
            self._depth += 1

    def _end_step(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth and not self._closed:
                self.flush()

    def flush(self) -> None:
        """Send the events published so far within a `step()`.

        Raises:
            EncodeError: the dialect cannot express an event; that batch is not sent, but those of other ranks are.
        """
        with self._lock:
            self._check_open()
            refused: EncodeError | None = None
            for dp_rank, events in enumerate(self._pending):
                if events:
                    self._pending[dp_rank] = []
                    try:
                        self._publish_batch(dp_rank, events)
                    except EncodeError as error:
                        refused = refused or error
            if refused is not None:
                raise refused

    def _addressed(
        self,
        event: object,
        storage_tier: StorageTier | str,
        token_ids: BlockTokens | None,
        extra: Mapping[str, Any] | None,
    ) -> RouterEvent:
        if type(storage_tier) is not StorageTier:
            storage_tier = StorageTier.of(storage_tier)
        if extra is not None:
            self._check_extra(extra)
        if isinstance(event, EventData):
            self._check_carries(event, token_ids, extra)
            event = KvCacheEvent(self._next_event_id, event)
            self._next_event_id += 1
        if not isinstance(event, KvCacheEvent):
            raise TypeError(
                f"a {type(self).__name__} takes Stored, Removed, Located, Updated, Cleared, KvCacheEvent or "
                f"RouterEvent, got {event!r:.80} ({type(event).__name__})"
            )
        return RouterEvent(0, event, storage_tier, token_ids, extra)

    @staticmethod
    def _check_alone(event: RouterEvent, **others: object) -> None:
        """Refuse arguments that the event already has."""
        if others["storage_tier"] in (StorageTier.DEVICE, event.storage_tier):
            del others["storage_tier"]
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ValueError(
                f"{' and '.join(given)} given with a RouterEvent, which has its own: publish the event alone, or its "
                "KvCacheEvent with these"
            )

    @staticmethod
    def _check_carries(data: EventData, token_ids: object, extra: object) -> None:
        """Refuse arguments that no event of this kind can carry."""
        if token_ids is not None and not isinstance(data, Stored):
            raise ValueError(f"token_ids go with a Stored, and were given with {data!r:.80}")
        if extra and isinstance(data, Cleared):
            raise ValueError(f"extra goes with a Stored or a Removed, and was given with {data!r:.80}")

    def _check_extra(self, extra: object) -> None:
        """Refuse a non-mapping, and a name similar to a field's, which would be ignored silently."""
        if not isinstance(extra, Mapping):
            raise TypeError(f"extra must map names of fields to values, or be None, got {extra!r:.80}")
        if self._extra_names.issuperset(extra):
            return
        for name in extra:
            if not isinstance(name, str):
                raise TypeError(f"extra must map names of fields to values, got the name {name!r:.80}")
            if name not in self._extra_names:
                known = field_names(self.dialect)
                if name not in known and (near := did_you_mean(name, known)):
                    raise ValueError(f"extra has {name!r:.80}, which is a field of no dialect{near}")
                self._extra_names.add(name)

    def worker_restarted(self, dp_rank: int) -> None:
        """Reset a rank whose worker restarts; unsent events are lost. A harness calls it."""
        with self._lock:
            if not self._closed and dp_rank < self.ranks:
                self._begin_anew(dp_rank)

    def use_digests(self, digests: Mapping[int, StreamDigests]) -> None:
        """Use the digests of other managers from now on, for ranks whose blocks were all removed."""
        with self._lock:
            self._digests.update(digests)

    def _publish_batch(self, dp_rank: int, events: list[RouterEvent]) -> None:
        if self._whole is not None:
            events = self._whole[dp_rank].passed(events)
            if not events:
                return
        timestamp = float(self._sent) if self._timestamp is None else self._timestamp()
        self._write(dp_rank, self._writer.payload(events, timestamp, dp_rank, self._digests.get(dp_rank)))
        self._sent += 1

    def check_rank(self, dp_rank: int) -> int:
        """Return a rank, after a check.

        Raises:
            ValueError: there is no such rank.
        """
        if type(dp_rank) is not int or not 0 <= dp_rank < self.ranks:
            raise ValueError(f"the publisher has ranks 0 to {self.ranks - 1}, got rank {dp_rank!r:.80}")
        return dp_rank

    def _begin_anew(self, dp_rank: int | None) -> list[int]:
        """Drop the pending events and known blocks of a rank, or of all; return these ranks."""
        ranks = [*range(self.ranks)] if dp_rank is None else [self.check_rank(dp_rank)]
        for rank in ranks:
            self._pending[rank] = []
            if rank in self._digests:
                self._digests[rank].cleared()
            if self._whole is not None:
                self._whole[rank] = WholeBlocks()
        if 0 in ranks:
            self._next_event_id = 0
        return ranks

    @property
    def closed(self) -> bool:
        """Whether it is closed, so that it takes no more events."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"this {type(self).__name__} is closed")


@dataclass(frozen=True, slots=True)
class WireBatch:
    """A batch that was written.

    Attributes:
        dp_rank: the rank.
        payload: the bytes.
    """

    dp_rank: int
    payload: bytes


class KvWire(Batcher):
    """Writes the events of an engine in a dialect and keeps the bytes, for tests of a decoder without a socket.

    Args:
        dialect: name of the dialect, or a `Dialect`.
        ranks: number of data-parallel ranks.
        timestamp: as in `KvPublisher`.
        digests: the digests of each rank, if the dialect has bytes as hashes.

    Attributes:
        batches: the batches so far, in order.
    """

    def __init__(
        self,
        dialect: str | Dialect = "vllm-0.33",
        *,
        ranks: int = 1,
        timestamp: Callable[[], float] | None = None,
        digests: Mapping[int, StreamDigests] | None = None,
    ) -> None:
        super().__init__(dialect, ranks=ranks, timestamp=timestamp, digests=digests, widens=False)
        self.batches: list[WireBatch] = []

    def __repr__(self) -> str:
        return f"<KvWire {self.dialect.name}: {len(self.batches)} batches>"

    @property
    def payloads(self) -> list[bytes]:
        """The bytes of the batches so far, in order."""
        return [batch.payload for batch in self.batches]

    def take(self) -> list[bytes]:
        """Return the bytes of the batches so far, and drop them."""
        payloads, self.batches = self.payloads, []
        return payloads

    def decode(self, payload: bytes) -> Decoded:
        """Read a payload by the rules of the dialect, to compare with your decoder."""
        return decode(payload, self.dialect)

    def _write(self, dp_rank: int, payload: bytes) -> None:
        self.batches.append(WireBatch(dp_rank, payload))
