"""Base classes of block managers: sizes, and publishing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn

from pytest_kvmock.checks import check_integer, check_time, is_integer
from pytest_kvmock.events import BlockTokens, Cleared, EventData, KvCacheEvent, Removed, StorageTier
from pytest_kvmock.moves import MoveError
from pytest_kvmock.sinks import Sink, adapted, call_with_extra, given_sink

if TYPE_CHECKING:
    from pytest_kvmock.prompt_keys import EventExtra

LOG: Final = logging.getLogger("pytest_kvmock.cache")


def check_num_blocks(num_blocks: int) -> int:
    """Return `num_blocks`, or raise a ValueError that names what is allowed."""
    return check_integer("num_blocks", num_blocks, 1)


def check_request_block_size(block_size: int) -> int:
    """Return `block_size`, or raise a ValueError: engines that think in requests take any."""
    return check_integer("block_size", block_size, 1, " (tokens a block)")


def check_dp_rank(dp_rank: int) -> int:
    """Return `dp_rank`, or raise a ValueError that names what is allowed."""
    if not is_integer(dp_rank, 0) or dp_rank >= 2**32:
        raise ValueError(f"dp_rank must be an integer from 0 to 4294967295, got {dp_rank!r}")
    return dp_rank


class EventPublisher:
    """Publishes events to the sink, and numbers them.

    One counter a manager, for all tiers, from 0 (Dynamo, `KvManager::next_event_id`). Without a sink there is no event
    and no id is consumed. A sink that raises costs its id and is logged as a warning; the move goes on, and so do its later
    events. What was raised first is kept until the manager's call is over, and leaves it there: each public method that
    publishes ends with `if publisher.failure is not None: publisher.surface()`, which costs no call where all is well. Of a
    sink with `only_logged`, that of a worker, nothing is kept.

    Args:
        sink: where events go; None: nowhere.
        dp_rank: data-parallel rank that events name.

    Raises:
        TypeError: that is no sink.

    Attributes:
        sink: as above, of the protocol of `Sink`.
        dp_rank: as above.
        next_event_id: the id of the next event.
        failure: what the sink raised first in this call; None: nothing.
    """

    __slots__ = ("_depth", "_passes_over", "_takes_removed", "dp_rank", "failure", "next_event_id", "sink")

    def __init__(self, sink: Sink | None, dp_rank: int) -> None:
        self.publish_to(sink)
        self.dp_rank = dp_rank
        self.next_event_id = 0
        self.failure: Exception | None = None
        self._depth = 0

    def publish_to(self, sink: Sink | None) -> None:
        """Publish to this sink from now on; None: to none.

        Raises:
            TypeError: that is no sink.
        """
        self.sink = None if sink is None else adapted(sink)
        # Of a worker's recorder only: a mock of a sink has any method that it is asked for.
        passes_over = getattr(type(self.sink), "passes_over", None)
        self._passes_over: Callable[[int], bool] | None = passes_over and partial(passes_over, self.sink)
        removed = getattr(type(self.sink), "publish_removed", None)
        self._takes_removed: Callable[[int, int, Sequence[int]], bool] | None = removed and partial(removed, self.sink)

    def take_id(self) -> int:
        """Consume the next event id."""
        event_id = self.next_event_id
        self.next_event_id += 1
        return event_id

    def passes_over(self, events: int, removed: int = 0) -> bool:
        """Whether so many events need not be made, as nobody would see them: a worker's sink with nothing behind it says so.

        Args:
            events: how many; their ids are consumed then.
            removed: how many blocks of the device they remove.
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
        """Publish one Removed a block, for engines that publish each by itself: most of their events."""
        if self.sink is None or self.passes_over(len(blocks), len(blocks) if tier is StorageTier.DEVICE else 0):
            return
        publish, dp_rank, new = self.sink.publish, self.dp_rank, object.__new__
        takes_all = None if tier is not StorageTier.DEVICE else self._takes_removed
        if takes_all is not None and takes_all(self.next_event_id, dp_rank, blocks):
            self.next_event_id += len(blocks)
            return
        for block in blocks:
            # The same as their constructors do, of which the calls would take a third of the time here.
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
        """Raise what the sink raised first, as a call of the manager ends; nothing where that is part of another call."""
        if self._depth:
            return
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Have what the sink raises in calls that are part of this one leave it at its end, unless it raises by itself."""
        self._depth += 1
        try:
            yield
        except BaseException:
            if self._depth == 1:
                self.failure = None  # it was logged, and is nothing of the next call
            raise
        finally:
            self._depth -= 1
        self.surface()


class ManagerBase:
    """Sizes and sink of a block manager.

    Args:
        backend: name of the behaviour.
        num_blocks: capacity in usable blocks, at least 1.
        block_size: tokens a block; checked by the manager, as each takes others.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None: nowhere, and no event id is consumed.

    Raises:
        TypeError: that is no sink.
        ValueError: a number is not what it must be.
    """

    def __init__(self, *, backend: str, num_blocks: int, block_size: int, dp_rank: int, sink: Sink | None) -> None:
        self.backend = backend
        self.max_capacity = check_num_blocks(num_blocks)
        self.block_size = block_size
        self.dp_rank = check_dp_rank(dp_rank)
        self._publisher = EventPublisher(sink, dp_rank)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.backend}: {self.num_active_blocks} active, "
            f"{self.num_inactive_blocks} inactive of {self.max_capacity}>"
        )

    @property
    def sink(self) -> Sink | None:
        """Where events are published; None: nowhere."""
        sink: Sink | None = given_sink(self._publisher.sink)
        return sink

    @sink.setter
    def sink(self, sink: Sink | None) -> None:
        self._publisher.publish_to(sink)

    def take_event_id(self) -> int:
        """Consume the next event id, for an event that somebody else publishes for this manager."""
        return self._publisher.take_id()

    def _cleared(self) -> bool:
        """Publish a Cleared, as nothing is cached any more, and return True."""
        self._publisher.publish(Cleared())
        self._publisher.surface()
        return True

    def tick(self, now: float) -> None:
        """Move the time of the tiers below the device forward to `now` (ms); nothing happens where there are none.

        Raises:
            ValueError: the time is no finite number of at least 0.
        """
        check_time(now)

    @property
    def num_active_blocks(self) -> int:
        """Physical blocks in use."""
        raise NotImplementedError

    @property
    def num_inactive_blocks(self) -> int:
        """Cached blocks that nobody uses; every copy counts."""
        raise NotImplementedError

    @property
    def active_perc(self) -> float:
        """Share of the capacity that is in use, from 0 to 1."""
        return self.num_active_blocks / self.max_capacity


class RequestLevel(ManagerBase):
    """Base of managers that take requests instead of moves, such as vLLM's and SGLang's.

    It refuses moves. A subclass has the queries of `KvManager`, and methods of its own for requests, named after the
    original's.

    Args:
        backend: name of the behaviour.
        num_blocks: capacity in usable blocks, at least 1.
        block_size: tokens a block, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None: nowhere, and no event id is consumed.

    Raises:
        TypeError: that is no sink.
        ValueError: a number is not what it must be.

    Attributes:
        takes: its own methods, for the error of a move.
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
            f"{what}: a {self.backend!r} manager takes no moves, it thinks in requests ({self.takes}); "
            "a KvWorker drives every backend"
        )
