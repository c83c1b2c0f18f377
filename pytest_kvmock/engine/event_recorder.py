"""What stands between a block manager and the sink of its worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pytest_kvmock.events import BlockTokens, KvCacheEvent, StorageTier, Stored
from pytest_kvmock.sinks import Sink, publish_with_extra

if TYPE_CHECKING:
    from pytest_kvmock.prompt_keys import EventExtra


class EventRecorder:
    """A sink that passes every event on, at once or when it is released, and records what is stored.

    A worker has one for all its managers, also after a restart. What its sink raises does not leave the manager's call, as that
    is one of several of a request, which would end between two of them.

    Args:
        sink: where events go; None: nowhere.

    Attributes:
        sink: as above.
        published: whether a manager ever published anything.
        stored: hashes of the blocks that were stored on the device, in order, while somebody asks for them; else None.
        holds: whether events are held.
        held: the events that are held, in order, with tier, token ids and what else travels with them.
        extra_of: finds what travels beside a Stored of a manager that does not say it; None: nothing does.
    """

    only_logged: ClassVar[bool] = True
    __slots__ = ("extra_of", "held", "holds", "published", "sink", "stored")

    def __init__(self, sink: Sink | None) -> None:
        self.sink = sink
        self.published = False
        self.stored: list[int] | None = None
        self.holds = False
        self.held: list[tuple[KvCacheEvent, StorageTier, BlockTokens | None, EventExtra | None]] = []
        self.extra_of: Callable[[Stored], EventExtra | None] | None = None

    def publish(
        self,
        event: KvCacheEvent,
        storage_tier: StorageTier = StorageTier.DEVICE,
        token_ids: BlockTokens | None = None,
        extra: EventExtra | None = None,
    ) -> None:
        """Take an event of a manager."""
        self.published = True
        if self.stored is not None and isinstance(event.data, Stored) and storage_tier is StorageTier.DEVICE:
            self.stored += event.data.block_hashes
        if self.extra_of is not None and extra is None and isinstance(event.data, Stored):
            extra = self.extra_of(event.data)
        if self.holds:
            self.held.append((event, storage_tier, token_ids, extra))
        elif self.sink is not None:
            if extra is None:
                self.sink.publish(event, storage_tier, token_ids)
            else:
                publish_with_extra(self.sink, event, storage_tier, token_ids, extra)

    def release(self) -> None:
        """Pass on what is held, in order, and hold nothing from now on."""
        self.holds = False
        held, self.held = self.held, []
        if self.sink is not None:
            for event, storage_tier, token_ids, extra in held:
                if extra is None:
                    self.sink.publish(event, storage_tier, token_ids)
                else:
                    publish_with_extra(self.sink, event, storage_tier, token_ids, extra)

    def drop(self) -> None:
        """Forget what is held, as its worker restarts."""
        self.holds = False
        self.held.clear()
