"""What every block manager that takes moves can do, and what they share."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, NoReturn, Protocol
from uuid import UUID

from pytest_kvmock.cache.rules import check_dp_rank, check_num_blocks, check_request_block_size
from pytest_kvmock.events import BlockTokens, EventData, KvCacheEvent, Removed, StorageTier
from pytest_kvmock.moves import Block, Move, MoveError
from pytest_kvmock.sinks import Sink

_log = logging.getLogger("pytest_kvmock.cache")


class PrefillCost(NamedTuple):
    """What it would cost to prefill a sequence now.

    Attributes:
        new_blocks: blocks of the sequence, the partial one included, that are not cached.
        new_tokens: prompt tokens to compute.
        cached_tokens: prompt tokens that are cached; with `new_tokens` the whole prompt.
    """

    new_blocks: int
    new_tokens: int
    cached_tokens: int


class SequenceBlocks(Protocol):
    """What `prefill_cost` reads of a sequence; `ActiveSequence` is one."""

    @property
    def unique_blocks(self) -> Sequence[Block]:
        """All blocks, in order."""

    @property
    def positional_lineage_hashes(self) -> Sequence[int]:
        """Lineage hash of each full block."""

    @property
    def num_input_tokens(self) -> int:
        """Length of the prompt in tokens."""

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether it may share blocks."""


class KvManager(Protocol):
    """A block manager that takes moves and publishes what became of them.

    Attributes:
        backend: name of the behaviour, as tests and options call it.
        max_capacity: blocks that it has.
        block_size: tokens a block.
        dp_rank: data-parallel rank that its events name.
        sink: who hears the events; None for nobody, then no event id is consumed.
    """

    backend: str
    max_capacity: int
    block_size: int
    dp_rank: int
    sink: Sink | None

    def process(self, move: Move) -> int:
        """Do what the move says.

        Returns:
            For a Use, the number of leading blocks served; for other moves 1.

        Raises:
            MoveError: the move breaks a rule; nothing has changed.
        """

    def use(
        self,
        blocks: Iterable[Block],
        *,
        local_hashes: Sequence[int] | None = None,
        plhs: Sequence[int] | None = None,
        token_ids: Sequence[Sequence[int]] | None = None,
        parent: Block | None = None,
    ) -> int:
        """Short form of Use: what is not given is filled in so that the stream stays sound.

        A missing local hash is the block itself. A block that is cached keeps its lineage; another one's parent is
        the nearest full block before it in the call, else `parent`, else it is a root.

        Returns:
            The number of leading blocks served.

        Raises:
            MoveError: as `process` does, and for a `parent` that is not cached.
        """

    def deref(self, *blocks: Block | Iterable[Block]) -> None:
        """Short form of Deref: drop one reference to each block, given one by one or as a list.

        Raises:
            MoveError: as `process` does.
        """

    def promote(
        self,
        partial: UUID,
        block: int,
        *,
        parent: int | None = None,
        local_hash: int | None = None,
        plh: int | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> None:
        """Short form of Promote; fills in what is missing as `use` does.

        Raises:
            MoveError: as `process` does, and for a `parent` that is not cached.
        """

    def clear(self) -> bool:
        """Drop every cached block and publish a Cleared; False, and nothing happens, while any block is in use."""

    def take_event_id(self) -> int:
        """Use up the next event id, for an event that somebody else publishes in the manager's name."""

    @property
    def num_active_blocks(self) -> int:
        """Physical blocks in use."""

    @property
    def num_active_block_refs(self) -> int:
        """References to blocks in use; a partial block has one."""

    @property
    def num_inactive_blocks(self) -> int:
        """Cached blocks that nobody uses."""

    @property
    def active_perc(self) -> float:
        """Share of the capacity that is in use, from 0 to 1."""

    @property
    def active_blocks(self) -> Mapping[Block, int]:
        """References to each block in use, partial ones included."""

    def references(self, block: Block) -> int:
        """References to one block now; 0 for what is not in use."""

    def inactive_blocks(self) -> Sequence[Block]:
        """Cached blocks that nobody uses, in the order in which they would be evicted. May cost a sort."""

    def prefill_cost(self, sequence: SequenceBlocks) -> PrefillCost:
        """What it would cost to prefill this sequence now. Looks, and does not touch."""

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Sequence hashes of what is physically cached in a tier, in use or not; copies repeated."""


class Publisher:
    """Gives events their ids and tells the sink.

    One counter a manager, for all tiers, from 0 (Dynamo, `KvManager::next_event_id`). Without a sink there is no event
    and no id is consumed; a sink that raises costs its id, is logged as a warning, and nothing else happens.
    """

    __slots__ = ("dp_rank", "next_event_id", "sink")

    def __init__(self, sink: Sink | None, dp_rank: int) -> None:
        self.sink = sink
        self.dp_rank = dp_rank
        self.next_event_id = 0

    def take_id(self) -> int:
        """Use up the next event id."""
        event_id = self.next_event_id
        self.next_event_id += 1
        return event_id

    def publish(
        self, data: EventData, token_ids: BlockTokens | None = None, tier: StorageTier = StorageTier.DEVICE
    ) -> None:
        """Publish one event."""
        if self.sink is None:
            return
        event = KvCacheEvent(self.take_id(), data, self.dp_rank)
        try:
            self.sink.publish(event, tier, token_ids)
        except Exception as error:  # noqa: BLE001 - whatever a listener does, the engine goes on
            _not_taken(event, error)

    def publish_removed(self, blocks: Iterable[int]) -> None:
        """Publish one Removed a block, for engines that say each by itself: most of what they say."""
        if self.sink is None:
            return
        publish, device, dp_rank, new = self.sink.publish, StorageTier.DEVICE, self.dp_rank, object.__new__
        for block in blocks:
            # The same as their constructors do, of which the calls would take a third of the time here.
            data = new(Removed)
            data.block_hashes = (block,)
            event = new(KvCacheEvent)
            event.event_id, event.data, event.dp_rank = self.next_event_id, data, dp_rank
            self.next_event_id += 1
            try:
                publish(event, device, None)
            except Exception as error:  # noqa: BLE001 - as above
                _not_taken(event, error)


def _not_taken(event: KvCacheEvent, error: Exception) -> None:
    _log.warning("KV event %d was not taken by its sink: %r", event.event_id, error, exc_info=True)


class ManagerBase:
    """What managers share: sizes, and who hears them.

    Args:
        backend: name of the behaviour.
        num_blocks: capacity in usable blocks, at least 1.
        block_size: tokens a block; checked by the manager, as each takes others.
        dp_rank: data-parallel rank that events name.
        sink: who hears the events.

    Raises:
        ValueError: a number is not what it must be.
    """

    def __init__(self, *, backend: str, num_blocks: int, block_size: int, dp_rank: int, sink: Sink | None) -> None:
        self.backend = backend
        self.max_capacity = check_num_blocks(num_blocks)
        self.block_size = block_size
        self.dp_rank = check_dp_rank(dp_rank)
        self._publisher = Publisher(sink, dp_rank)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.backend}: {self.num_active_blocks} active, "
            f"{self.num_inactive_blocks} inactive of {self.max_capacity}>"
        )

    @property
    def sink(self) -> Sink | None:
        """Who hears the events."""
        return self._publisher.sink

    @sink.setter
    def sink(self, sink: Sink | None) -> None:
        self._publisher.sink = sink

    def take_event_id(self) -> int:
        """Use up the next event id, for an event that somebody else publishes in the manager's name."""
        return self._publisher.take_id()

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
    """Base of managers that think in requests, not in moves, as vLLM's and SGLang's do.

    It refuses what the others take, and has what all share; a subclass has the queries of `KvManager`, and methods of
    its own for requests, named after the original's.

    Args:
        backend: name of the behaviour.
        num_blocks: capacity in usable blocks, at least 1.
        block_size: tokens a block, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: who hears the events.

    Raises:
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


def unlike(subject: object, protocol: type) -> str | None:
    """Say what an object is if it has not all that a protocol such as `KvManager` names; None if it has."""
    if isinstance(subject, type):
        return f"the class {subject.__name__}; it must be an object, {subject.__name__}()"
    members = [*protocol.__annotations__, *vars(protocol)]
    missing = [name for name in dict.fromkeys(members) if not name.startswith("_") and not hasattr(subject, name)]
    if not missing:
        return None
    names = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
    return f"{subject!r:.80} ({type(subject).__name__}), which is no {protocol.__name__}: it has no {names}"
