"""The offload part of Dynamo's logical manager (`KvManager` of dynamo-mocker 1.2.1, feature `kvbm-offload`).

With an engine, an eviction makes no room at once: the slot is quarantined until its block is copied. So a Use that
finds no empty slot is served in part, and evicts together as many blocks as it still needs slots.

One subject: slots and blocks of the device that belong to a transfer, not to a request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Literal
from uuid import UUID

from pytest_kvmock.engines.base.cache_trace import OF_1_2_1, TRACE_LEVEL, trace
from pytest_kvmock.engines.base.eviction_policy import Slot
from pytest_kvmock.engines.base.manager import KvManager
from pytest_kvmock.engines.base.manager_base import LOG, EventPublisher
from pytest_kvmock.engines.base.offload import (
    BlockDetails,
    BlockedOnG1Offload,
    NoHits,
    OffloadEngine,
    OffloadResult,
    Scheduled,
    SwapIn,
)
from pytest_kvmock.engines.dynamo import move_checks
from pytest_kvmock.engines.dynamo.cached_slots import CachedSlots
from pytest_kvmock.engines.dynamo.pool import BlockPool, Used
from pytest_kvmock.values.checks import check_time
from pytest_kvmock.values.events import Cleared, StorageTier, Stored
from pytest_kvmock.values.moves import Use


class Offloading:
    """The part of a logical manager that deals with a further tier. Without an engine it does nothing.

    Args:
        manager: the manager that it is a part of.
        slots: switches the manager to blocks in slots, and returns them.
        pool: the manager's pool.
        publisher: the manager's publisher.

    Attributes:
        engine: the offload engine; None if there is no further tier.
        now: the latest time, in ms, that the further tier was moved to; 0 before the first.
        num_outside: slots that are quarantined, or reserved for a swap-in.
    """

    def __init__(
        self, manager: KvManager, slots: Callable[[], CachedSlots], pool: BlockPool, publisher: EventPublisher
    ) -> None:
        self._manager = manager
        self._slots = slots
        self._pool = pool
        self._publisher = publisher
        self.engine: OffloadEngine | None = None
        self.now = 0.0
        self.num_outside = 0
        self._details: dict[int, BlockDetails] = {}  # details of each block on the device, by lineage hash
        self._scheduled: list[Scheduled] = []

    # ----------------------------------------------------------------------------------------------- the engine

    def attach(self, engine: OffloadEngine) -> None:
        """See `LogicalManager.attach_offload`."""
        if self.engine is not None:
            raise ValueError(f"{self._manager!r} has an offload engine already: {self.engine!r}")
        if self._pool.reset_len < self._pool.total:
            raise ValueError(f"an offload engine is attached to a manager that is empty, not to {self._manager!r}")
        self._slots().makes_room = False
        self.engine = engine

    def tick(self, now: float) -> None:
        """See `LogicalManager.tick`."""
        now = check_time(now)
        if self.engine is not None:
            if now < self.now:
                raise ValueError(f"tick: time does not go backwards; it is {self.now} ms, got {now}")
            self.now = float(now)
            self._carry_out(self.engine.tick(now))
            self._publisher.surface()

    @property
    def num_reserved(self) -> int:
        """Slots, among `num_outside`, that are reserved for blocks that come back."""
        return sum(len(scheduled.slots) for scheduled in self._scheduled)

    def _carry_out(self, result: OffloadResult, removed: Sequence[int | None] = ()) -> None:
        """Take back the slots that are free again, and publish the events.

        The device's Removed was published before, but its eviction is traced here, because the trace shows the sizes
        of this moment.
        """
        for slot in result.slots:
            self._pool.give_back(slot)
        self.num_outside -= len(result.slots)
        is_traced = bool(removed or result.events) and LOG.isEnabledFor(TRACE_LEVEL)
        if is_traced:
            trace(self._manager, "eviction", removed, form=OF_1_2_1)
        for data, tier, token_ids, _ in result.events:
            self._publisher.publish(data, token_ids, tier)
            if is_traced and not isinstance(data, Cleared):
                event: Literal["allocation", "eviction"] = "allocation" if isinstance(data, Stored) else "eviction"
                trace(self._manager, event, data.block_hashes, tier=tier, form=OF_1_2_1)

    def resident(self, tier: StorageTier) -> Collection[int]:
        """Return the sequence hashes of the blocks on another tier."""
        return self.engine.resident() if self.engine is not None and self.engine.tier == tier else []

    def unpublished(self, tier: StorageTier) -> Container[int]:
        """Return the blocks of a further tier that events do not show; see `OffloadEngine`."""
        return self.engine.unpublished if self.engine is not None and self.engine.tier == tier else ()

    # -------------------------------------------------------------------------------------------------- moves

    def note(self, block: BlockDetails) -> None:
        """Keep the details of a stored block for the events of the further tier."""
        if self.engine is not None:
            self._details[block.plh] = block

    def note_stored(self, move: Use, used: Used) -> None:
        """Keep the details of each block that a Use stored.

        A block's parent is the full block before it in the Use (a hit or not), not the Stored's parent.
        """
        tokens: Iterable[Sequence[int] | None] = used.token_ids or [None] * len(used.stored)
        stored = zip(used.stored, used.local_hashes, tokens, strict=True)
        name, local, ids = next(stored)
        parent = move.parent
        plhs = iter(move.plhs)
        for block in move.blocks[: used.served]:
            if isinstance(block, UUID):
                continue
            plh = next(plhs)
            if block == name:
                self._details[plh] = BlockDetails(block, plh, parent, local, ids)  # type: ignore[arg-type]  # checked
                following = next(stored, None)
                if following is None:
                    return
                name, local, ids = following
            parent = block

    def hand_over(self, victims: Sequence[Slot], used: Used) -> None:
        """Pass evicted blocks and their slots to the engine; their Removed is already published."""
        assert self.engine is not None
        self.num_outside += len(victims)
        details = [self._details.pop(slot.plh, None) for slot in victims]
        result = self.engine.take([block for block in details if block is not None], victims)
        self._carry_out(result, used.removed)

    # ------------------------------------------------------------------------------------------------- swap-in

    def swap_in(self, plhs: Sequence[int], now: float | None) -> SwapIn:
        """See `LogicalManager.swap_in`."""
        if now is not None:
            check_time(now)
        move_checks.check_plhs(plhs)
        prefix = None if self.engine is None else self.engine.find(plhs)
        if self.engine is None or prefix is None:
            return NoHits()
        # The prefix stays pinned until the blocks evicted for it are handed over.
        reserved = self._reserve(prefix.num_blocks)
        if isinstance(reserved, Scheduled):
            reserved.prefix = prefix
            self.engine.start(prefix, now)
            if now is not None:
                self.now = max(self.now, float(now))
        else:
            self.engine.release(prefix)
        self._publisher.surface()
        return reserved

    def _reserve(self, count: int) -> SwapIn:
        """Reserve slots for all `count` blocks to come, or none."""
        slots = self._pool.take_reset(count)
        if len(slots) == count:
            self.num_outside += count
            scheduled = Scheduled(None, slots)
            self._scheduled.append(scheduled)
            return scheduled
        used = Used(None)
        victims = self._slots().evict_some(count - len(slots), used)
        for slot in slots:
            self._pool.give_back(slot)
        if not victims:
            return NoHits()
        used.publish(self._publisher, self._pool)
        self.hand_over(victims, used)
        return BlockedOnG1Offload()

    def put_down(self, scheduled: Scheduled) -> None:
        """See `LogicalManager.put_down`."""
        self._close(scheduled)
        self._free(scheduled.slots)

    def _close(self, scheduled: Scheduled) -> None:
        if not scheduled.is_open or scheduled not in self._scheduled:
            raise ValueError(
                f"{scheduled!r} is not open on {self._manager!r}: a swap-in is put down, or registered, once"
            )
        self._scheduled.remove(scheduled)
        scheduled.is_open = False
        if scheduled.prefix is not None and self.engine is not None:
            self.engine.release(scheduled.prefix)

    def _free(self, slots: list[Slot]) -> None:
        self.num_outside -= len(slots)
        for slot in slots:
            self._pool.give_back(slot)
        slots.clear()

    def register(self, blocks: Sequence[BlockDetails], parent: int | None, scheduled: Scheduled) -> int:
        """See `LogicalManager.register_swapped_in`."""
        self._close(scheduled)
        slots = scheduled.slots[::-1]
        taken = min(len(slots), len(blocks))
        scheduled.slots.clear()
        self.num_outside -= len(slots)
        anchor = parent  # parent of the next Stored
        stored: list[BlockDetails] = []
        for block in blocks[:taken]:
            slot = slots.pop()
            if self._slots().cache(slot, block.name, block.plh):
                self._details[block.plh] = block._replace(parent=parent)
                stored.append(block)
            else:
                self._pool.give_back(slot)
                self._publish_swapped_in(anchor, stored)
                stored = []
                anchor = block.name
            parent = block.name
        self._publish_swapped_in(anchor, stored)
        for slot in slots[::-1]:
            self._pool.give_back(slot)
        self._publisher.surface()
        return taken

    def _publish_swapped_in(self, anchor: int | None, stored: Sequence[BlockDetails]) -> None:
        """Publish one Stored, with token ids only if every block has them."""
        if not stored:
            return
        self._pool.registrations += len(stored)
        names = tuple(block.name for block in stored)
        token_ids = [block.token_ids for block in stored if block.token_ids is not None]
        data = Stored(anchor, names, tuple(block.local_hash for block in stored))
        self._publisher.publish(data, token_ids if len(token_ids) == len(stored) else None)
        if LOG.isEnabledFor(TRACE_LEVEL):
            trace(self._manager, "allocation", names, form=OF_1_2_1)

    def cancel(self) -> None:
        """See `LogicalManager.cancel_offload`."""
        if self.engine is None:
            return
        for scheduled in list(self._scheduled):
            self.put_down(scheduled)
        self._slots().unpin_all()
        self._free(list(self.engine.clear()))

    def clear(self) -> None:
        """Cancel all transfers, and drop the details of the device's blocks."""
        self.cancel()
        self._details.clear()
