"""What stands between a block manager and the sink of its worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from pytest_kvmock.events import (
    BlockTokens,
    Cleared,
    KvCacheEvent,
    Removed,
    RemovedRow,
    RouterEvent,
    StorageTier,
    Stored,
)
from pytest_kvmock.prompt_keys import is_attention_group

if TYPE_CHECKING:
    from pytest_kvmock.prompt_keys import EventExtra
    from pytest_kvmock.sinks import EventSink


class EventRecorder:
    """A sink that makes each event of a manager one of its worker, passes it on, and records what is stored.

    A manager does not know its worker. A worker has one recorder for all its managers, also after a restart. What its sink
    raises does not leave the manager's call, as that is one of several of a request, which would end between two of them.

    Args:
        worker_id: the worker.
        sink: where events go, at once or when they are released; None: nowhere.
        holds: whether events are held.

    Attributes:
        worker_id: as above.
        sink: as above.
        published: whether a manager ever published anything.
        removed: how many blocks on the device were published as removed, a copy each time that it was.
        stored: hashes of the blocks that were stored on the device, in order, while somebody asks for them; else None. Of a
            hybrid model those of its attention group.
        holds: as above.
        held: the events that are held, in order, and rows of them.
        for_requests: whether all that is published is for a request, so that its hashes are the engine's
            (`RouterEvent.chained`). Else it is while the recorder is entered as a context manager (`MoveDriver`).
        extra_of: finds what travels beside a Stored of a manager that does not say it; None: nothing does.
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
        """Pass events on to one more sink, after the one that there is."""
        self.sink = sink if self.sink is None else _Both(self.sink, sink)

    def __enter__(self) -> None:
        self._requests += 1

    def __exit__(self, *raised: object) -> None:
        self._requests -= 1

    @property
    def is_heard(self) -> bool:
        """Whether events go anywhere."""
        return self.sink is not None or self.stored is not None

    def passes_over(self, removed: int) -> bool:
        """Whether events of a manager are of no use to anybody, so that it need not make them.

        Args:
            removed: how many blocks of the device the next ones remove.
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
        """Take an event of a manager."""
        self.published = True
        if type(event.data) is Removed and storage_tier is StorageTier.DEVICE:
            self.removed += len(event.data.block_hashes)
        if self.stored is not None and isinstance(event.data, Stored) and storage_tier is StorageTier.DEVICE:
            self.stored += event.data.block_hashes if is_attention_group(extra) else ()
        if self.extra_of is not None and extra is None and isinstance(event.data, Stored):
            extra = self.extra_of(event.data)
        if self.sink is not None:
            chained = (self.for_requests or self._requests > 0) and type(event.data) is not Cleared  # that is for none
            if extra is not None and extra.get("extra_keys", ()) is None:
                chained = False  # it does not say what was hashed beside the tokens
            named = RouterEvent(self.worker_id, event, storage_tier, token_ids, extra, chained)
            if self.holds:
                self.held.append(named)
            else:
                self.sink.publish(named)

    def publish_removed(self, first_id: int, dp_rank: int, blocks: Sequence[int]) -> bool:
        """Take Removed of the device, one a block, all at once; False: nothing was done, each has to be published.

        So it is unless who hears them takes them in a row.

        Args:
            first_id: the id of the first.
            dp_rank: the rank that they name.
            blocks: these; none is no event.
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
        """Pass on what is held, in order, and hold nothing from now on."""
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
        """Forget what is held, as its worker restarts."""
        self.holds = False
        self.held.clear()


class _Both:
    """Two sinks as one.

    Args:
        first: is given each event first; what it raises does not keep it from the other.
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
