"""Base classes of block managers: sizes, and publishing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn

from pytest_kvmock.values.checks import check_integer, check_time, is_integer
from pytest_kvmock.values.events import BlockTokens, Cleared, EventData, KvCacheEvent, Removed, StorageTier
from pytest_kvmock.values.moves import MoveError
from pytest_kvmock.values.sinks import Sink, adapted, call_with_extra, given_sink

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra

LOG: Final = logging.getLogger("pytest_kvmock.engines")


def check_num_blocks(num_blocks: int) -> int:
    """Return `num_blocks`, or raise a ValueError that names the allowed values."""
    return check_integer("num_blocks", num_blocks, 1)


def check_request_block_size(block_size: int) -> int:
    """Return `block_size`, or raise a ValueError; managers of requests accept any size of at least 1."""
    return check_integer("block_size", block_size, 1, " (tokens a block)")


def check_dp_rank(dp_rank: int) -> int:
    """Return `dp_rank`, or raise a ValueError that names the allowed values."""
    if not is_integer(dp_rank, 0) or dp_rank >= 2**32:
        raise ValueError(f"dp_rank must be an integer from 0 to 4294967295, got {dp_rank!r}")
    return dp_rank


class EventPublisher:
    """Publishes events to the sink, and numbers them.

    Each manager has one counter for all tiers, from 0 (Dynamo, `KvManager::next_event_id`). Without a sink there are no
    events, and no id is used. If a sink raises, the id is used and a warning is logged; the move and its later events
    continue. The first exception is kept, and raised at the end of the manager's call: each public method that
    publishes ends with `publisher.surface()` (in frequent calls, only `if publisher.failure is not None`). Exceptions
    of a sink with `only_logged` (a worker's sink) are not kept.

    Args:
        sink: receives the events; None if there is none.
        dp_rank: data-parallel rank that events name.

    Raises:
        TypeError: `sink` is not a sink.

    Attributes:
        sink: as given, adapted to the protocol of `Sink`.
        dp_rank: as given.
        next_event_id: the id of the next event.
        failure: the first exception of the sink in this call; None if there was none.
    """

    __slots__ = ("_depth", "_passes_over", "_takes_removed", "dp_rank", "failure", "next_event_id", "sink")

    def __init__(self, sink: Sink | None, dp_rank: int) -> None:
        self.publish_to(sink)
        self.dp_rank = dp_rank
        self.next_event_id = 0
        self.failure: Exception | None = None
        self._depth = 0

    def publish_to(self, sink: Sink | None) -> None:
        """Publish to this sink from now on; None: to no sink.

        Raises:
            TypeError: `sink` is not a sink.
        """
        self.sink = None if sink is None else adapted(sink)
        # Only for a worker's recorder: a mock object used as a sink would have any method.
        passes_over = getattr(type(self.sink), "passes_over", None)
        self._passes_over: Callable[[int], bool] | None = passes_over and partial(passes_over, self.sink)
        removed = getattr(type(self.sink), "publish_removed", None)
        self._takes_removed: Callable[[int, int, Sequence[int]], bool] | None = removed and partial(removed, self.sink)

    def take_id(self) -> int:
        """Use the next event id."""
        event_id = self.next_event_id
        self.next_event_id += 1
        return event_id

    def passes_over(self, events: int, removed: int = 0) -> bool:
        """Return whether the next `events` events can be skipped because no sink receives them.

        Args:
            events: number of events; if they are skipped, their ids are used.
            removed: number of device blocks that they remove.
        """
        if self._passes_over is None or not self._passes_over(removed):
            return False
        self.next_event_id += events
        return True

    def publish(
        self,
        data: EventData,
        token_ids: BlockTokens | None = None,
        tier: StorageTier = StorageTier.DEVICE,
        extra: EventExtra | None = None,
    ) -> None:
        """Publish one event."""
        if self.sink is None:
            return
        event = KvCacheEvent(self.take_id(), data, self.dp_rank)
        try:
            if extra is None:
                self.sink.publish(event, tier, token_ids)
            else:
                call_with_extra(self.sink.publish, event, tier, token_ids, extra=extra)
        except Exception as error:  # noqa: BLE001 - whatever a sink does, the move is completed
            self._not_taken(event, error)

    def publish_removed(self, blocks: Sequence[int], tier: StorageTier = StorageTier.DEVICE) -> None:
        """Publish one Removed for each block, like engines that publish each block separately."""
        if self.sink is None or self.passes_over(len(blocks), len(blocks) if tier is StorageTier.DEVICE else 0):
            return
        publish, dp_rank, new = self.sink.publish, self.dp_rank, object.__new__
        takes_all = None if tier is not StorageTier.DEVICE else self._takes_removed
        if takes_all is not None and takes_all(self.next_event_id, dp_rank, blocks):
            self.next_event_id += len(blocks)
            return
        for block in blocks:
            # Inlined constructors: the calls would take a third of the time here.
            data = new(Removed)
            data.block_hashes = (block,)
            event = new(KvCacheEvent)
            event.event_id, event.data, event.dp_rank = self.next_event_id, data, dp_rank
            self.next_event_id += 1
            try:
                publish(event, tier, None)
            except Exception as error:  # noqa: BLE001 - as above
                self._not_taken(event, error)

    def _not_taken(self, event: KvCacheEvent, error: Exception) -> None:
        LOG.warning("KV event %d was not taken by its sink: %r", event.event_id, error, exc_info=error)
        if self.failure is None and not getattr(self.sink, "only_logged", False):
            self.failure = error

    def surface(self) -> None:
        """Raise the sink's first exception at the end of a manager's call, unless the call is part of another one."""
        if self._depth:
            return
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Raise the sink's first exception of nested calls at the end of this one, unless this one raises itself."""
        self._depth += 1
        try:
            yield
        except BaseException:
            if self._depth == 1:
                self.failure = None  # it was logged, and does not belong to the next call
            raise
        finally:
            self._depth -= 1
        self.surface()


class ManagerBase:
    """Sizes and sink of a block manager.

    Args:
        backend: name of the backend.
        num_blocks: capacity in usable blocks, at least 1.
        block_size: tokens a block; the manager checks it, because the allowed sizes differ.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None to publish nothing and consume no event id.

    Raises:
        TypeError: `sink` is not a sink.
        ValueError: a number is invalid.
    """

    def __init__(self, *, backend: str, num_blocks: int, block_size: int, dp_rank: int, sink: Sink | None) -> None:
        self.backend = backend
        self.num_blocks = check_num_blocks(num_blocks)
        self.block_size = block_size
        self.dp_rank = check_dp_rank(dp_rank)
        self._publisher = EventPublisher(sink, dp_rank)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.backend}: {self.num_active_blocks} active, "
            f"{self.num_inactive_blocks} inactive of {self.num_blocks}>"
        )

    @property
    def sink(self) -> Sink | None:
        """The sink that receives events; None if there is none."""
        sink: Sink | None = given_sink(self._publisher.sink)
        return sink

    @sink.setter
    def sink(self, sink: Sink | None) -> None:
        self._publisher.publish_to(sink)

    def take_event_id(self) -> int:
        """Use the next event id for an event that another object publishes for this manager."""
        return self._publisher.take_id()

    def _cleared(self) -> bool:
        """Publish a Cleared, because nothing is cached any more, and return True."""
        self._publisher.publish(Cleared())
        self._publisher.surface()
        return True

    def tick(self, now: float) -> None:
        """Move the time of the tiers below the device forward to `now` (ms), if there are any.

        Raises:
            ValueError: the time is not a finite number of at least 0.
        """
        check_time(now)

    @property
    def num_active_blocks(self) -> int:
        """Physical blocks in use."""
        raise NotImplementedError

    @property
    def num_inactive_blocks(self) -> int:
        """Cached blocks that no request uses; every copy counts."""
        raise NotImplementedError

    @property
    def active_perc(self) -> float:
        """Share of the capacity that is in use, from 0 to 1."""
        return self.num_active_blocks / self.num_blocks


class RequestLevel(ManagerBase):
    """Base of managers that take requests instead of moves, such as vLLM's and SGLang's.

    It refuses moves. A subclass has the queries of `KvManager`, and methods for requests with the names of the
    original.

    Args:
        backend: name of the backend.
        num_blocks: capacity in usable blocks, at least 1.
        block_size: tokens a block, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None to publish nothing and consume no event id.

    Raises:
        TypeError: `sink` is not a sink.
        ValueError: a number is invalid.

    Attributes:
        takes: names of its methods, for the error message of a move.
    """

    takes: ClassVar[str] = ""

    def __init__(self, *, backend: str, num_blocks: int, block_size: int, dp_rank: int, sink: Sink | None) -> None:
        super().__init__(
            backend=backend,
            num_blocks=num_blocks,
            block_size=check_request_block_size(block_size),
            dp_rank=dp_rank,
            sink=sink,
        )

    def process(self, move: object) -> NoReturn:
        """Refuse: it takes no moves."""
        self._refuse(type(move).__name__)

    def use(self, *blocks: object, **fields: object) -> NoReturn:  # noqa: ARG002 - the signature of KvManager
        """Refuse: it takes no moves."""
        self._refuse("Use")

    def deref(self, *blocks: object) -> NoReturn:  # noqa: ARG002 - the signature of KvManager
        """Refuse: it takes no moves."""
        self._refuse("Deref")

    def promote(self, *blocks: object, **fields: object) -> NoReturn:  # noqa: ARG002 - the signature of KvManager
        """Refuse: it takes no moves."""
        self._refuse("Promote")

    def prefill_cost(self, sequence: object) -> NoReturn:  # noqa: ARG002 - the signature of KvManager
        """Refuse: a sequence is for managers that take moves."""
        self._refuse("prefill_cost of a sequence")

    def _refuse(self, what: str) -> NoReturn:
        raise MoveError(
            f"{what}: a {self.backend!r} manager takes requests, not moves ({self.takes}); "
            "a KvWorker drives every backend"
        )
