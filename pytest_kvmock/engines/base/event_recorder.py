"""The event recorder between a block manager and the sink of its worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from pytest_kvmock.values.events import (
    BlockTokens,
    Cleared,
    KvCacheEvent,
    Removed,
    RemovedRow,
    RouterEvent,
    StorageTier,
    Stored,
)
from pytest_kvmock.values.prompt_keys import is_attention_group

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra
    from pytest_kvmock.values.sinks import EventSink


class EventRecorder:
    """A sink that turns each event of a manager into one of its worker, passes it on, and records stored blocks.

    A manager has no worker id. A worker has one recorder for all its managers, also after a restart. Exceptions of its
    sink do not leave the manager's call: a request makes several calls, and an exception would stop it between two.

    Args:
        worker_id: the worker.
        sink: receives events, at once or when they are released; None for no sink.
        holds: whether events are held.

    Attributes:
        worker_id: as given.
        sink: as given.
        published: whether a manager ever published anything.
        removed: number of device blocks that were published as removed; each copy counts.
        stored: hashes of the blocks that were stored on the device, in order, while a caller records them; else None.
            For a hybrid model only those of the attention group.
        holds: as given.
        held: the held events and rows of events, in order.
        for_requests: whether all events belong to requests, so their hashes are the engine's (`RouterEvent.chained`).
            If not, this holds only for events that are published while the recorder is entered as a context manager
            (`MoveDriver`).
        extra_of: returns the extra data of a Stored whose manager does not give it; None if there is none.
    """

    only_logged: ClassVar[bool] = True
    __slots__ = (
        "_requests",
        "extra_of",
        "for_requests",
        "held",
        "holds",
        "published",
        "removed",
        "sink",
        "stored",
        "worker_id",
    )

    def __init__(self, worker_id: int, sink: EventSink | None, *, holds: bool = False) -> None:
        self.worker_id = worker_id
        self.sink = sink
        self.published = False
        self.removed = 0
        self.stored: list[int] | None = None
        self.holds = holds
        self.for_requests = False
        self._requests = 0
        self.held: list[RouterEvent | RemovedRow] = []
        self.extra_of: Callable[[Stored], EventExtra | None] | None = None

    def add(self, sink: EventSink) -> None:
        """Pass events on to a further sink, after the present ones."""
        self.sink = sink if self.sink is None else _Both(self.sink, sink)

    def __enter__(self) -> None:
        self._requests += 1

    def __exit__(self, *raised: object) -> None:
        self._requests -= 1

    @property
    def is_heard(self) -> bool:
        """Whether events have a receiver."""
        return self.sink is not None or self.stored is not None

    def passes_over(self, removed: int) -> bool:
        """Return whether no receiver uses the next events of a manager, so it need not make them.

        Args:
            removed: number of device blocks that these events remove.
        """
        if self.is_heard:
            return False
        self.published = True
        self.removed += removed
        return True

    def publish(
        self,
        event: KvCacheEvent,
        storage_tier: StorageTier = StorageTier.DEVICE,
        token_ids: BlockTokens | None = None,
        extra: EventExtra | None = None,
    ) -> None:
        """Receive an event of a manager."""
        self.published = True
        if type(event.data) is Removed and storage_tier is StorageTier.DEVICE:
            self.removed += len(event.data.block_hashes)
        if self.stored is not None and isinstance(event.data, Stored) and storage_tier is StorageTier.DEVICE:
            self.stored += event.data.block_hashes if extra is None or is_attention_group(extra) else ()
        if self.extra_of is not None and extra is None and isinstance(event.data, Stored):
            extra = self.extra_of(event.data)
        if self.sink is not None:
            chained = (self.for_requests or self._requests > 0) and type(event.data) is not Cleared  # no request
            if extra is not None and extra.get("extra_keys", ()) is None:
                chained = False  # the event lacks data that was hashed with the tokens
            named = RouterEvent(self.worker_id, event, storage_tier, token_ids, extra, chained)
            if self.holds:
                self.held.append(named)
            else:
                self.sink.publish(named)

    def publish_removed(self, first_id: int, dp_rank: int, blocks: Sequence[int]) -> bool:
        """Receive one Removed of the device for each block, all at once.

        Return False, without an effect, if each has to be published separately, because the receiver takes no rows.

        Args:
            first_id: id of the first event.
            dp_rank: the rank that the events name.
            blocks: the removed blocks; if empty there is no event.
        """
        if not blocks or self.sink is None or not (self.holds or self._takes_row):
            return False
        self.published = True
        self.removed += len(blocks)
        row = RemovedRow(self.worker_id, dp_rank, first_id, tuple(blocks), self.for_requests or self._requests > 0)
        if self.holds:
            self.held.append(row)
        else:
            self.sink.publish_row(row)  # type: ignore[attr-defined]  # one that takes rows has it
        return True

    @property
    def _takes_row(self) -> bool:
        takes_row = getattr(type(self.sink), "takes_row", None)
        return takes_row is not None and takes_row(self.sink)

    def release(self) -> None:
        """Pass on the held events in order, and hold no more."""
        self.holds = False
        all_held, self.held = self.held, []
        if self.sink is None:
            return
        for held in all_held:
            if isinstance(held, RouterEvent):
                self.sink.publish(held)
            elif self._takes_row:
                self.sink.publish_row(held)  # type: ignore[attr-defined]  # as above
            else:
                for event in held.events():
                    self.sink.publish(event)

    def drop(self) -> None:
        """Drop the held events, because the worker restarts."""
        self.holds = False
        self.held.clear()


class _Both:
    """Two sinks as one.

    Args:
        first: receives each event first; the other receives it even if this one raises.
        second: the other.
    """

    __slots__ = ("_first", "_second")

    def __init__(self, first: EventSink, second: EventSink) -> None:
        self._first = first
        self._second = second

    def publish(self, event: RouterEvent) -> None:
        """Publish one event to both."""
        try:
            self._first.publish(event)
        finally:
            self._second.publish(event)
