"""What stands between a block manager and the sink of its worker."""

from __future__ import annotations

from pytest_kvmock.events import BlockTokens, KvCacheEvent, StorageTier, Stored
from pytest_kvmock.sinks import Sink


class EventRecorder:
    """A sink that passes every event on, at once or when it is released, and records what is stored.

    A worker has one for all its managers, also after a restart.

    Args:
        sink: where events go; None: nowhere.

    Attributes:
        sink: as above.
        published: whether a manager ever published anything.
        stored: hashes of the blocks that were stored on the device, in order, while somebody asks for them; else None.
        holds: whether events are held.
        held: the events that are held, in order, with tier and token ids.
    """

    __slots__ = ("held", "holds", "published", "sink", "stored")

    def __init__(self, sink: Sink | None) -> None:
        self.sink = sink
        self.published = False
        self.stored: list[int] | None = None
        self.holds = False
        self.held: list[tuple[KvCacheEvent, StorageTier, BlockTokens | None]] = []

    def publish(
        self,
        event: KvCacheEvent,
        storage_tier: StorageTier = StorageTier.DEVICE,
        token_ids: BlockTokens | None = None,
    ) -> None:
        """Take an event of a manager."""
        self.published = True
        if self.stored is not None and isinstance(event.data, Stored) and storage_tier is StorageTier.DEVICE:
            self.stored += event.data.block_hashes
        if self.holds:
            self.held.append((event, storage_tier, token_ids))
        elif self.sink is not None:
            self.sink.publish(event, storage_tier, token_ids)

    def release(self) -> None:
        """Pass on what is held, in order, and hold nothing from now on."""
        self.holds = False
        held, self.held = self.held, []
        if self.sink is not None:
            for each in held:
                self.sink.publish(*each)

    def drop(self) -> None:
        """Forget what is held, as its worker restarts."""
        self.holds = False
        self.held.clear()
