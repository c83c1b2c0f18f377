"""What Dynamo's logical manager does with an offload engine (`KvManager` of dynamo-mocker 1.2.1, feature `kvbm-offload`).

With an engine nothing that is evicted makes room at once: its slot is quarantined until the block has been copied. So a
Use that finds no empty slot is served short, and evicts as many blocks in one go as it will still need slots.

One subject: slots and blocks of the device that belong to no request, as something travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Sequence
from typing import TYPE_CHECKING, Literal
from uuid import UUID

from pytest_kvmock.cache.base import LOG, Publisher
from pytest_kvmock.cache.cache_trace import OF_1_2_1, TRACE_LEVEL, trace
from pytest_kvmock.cache.dynamo.eviction.policy import Slot
from pytest_kvmock.cache.dynamo.move_checks import are_plhs
from pytest_kvmock.cache.dynamo.names import Names
from pytest_kvmock.cache.dynamo.pool import BlockPool, PendingEvents
from pytest_kvmock.cache.offload import (
    BlockDetails,
    BlockedOnG1Offload,
    NoHits,
    OffloadEngine,
    OffloadResult,
    Scheduled,
    SwapIn,
)
from pytest_kvmock.checks import check_time
from pytest_kvmock.events import Cleared, StorageTier, Stored
from pytest_kvmock.moves import MoveError, Use

if TYPE_CHECKING:
    from collections.abc import Iterable


class Pin:
    """Blocks of the device that stay active for no request, until `unpin`."""

    __slots__ = ("is_open", "numbers")

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers  # the aliases that stand for it
        self.is_open = True

    def __repr__(self) -> str:
        return f"<Pin of {len(self.numbers)} blocks{'' if self.is_open else ', dropped'}>"


class Offloading:
    """The part of a logical manager that deals with a further tier. Without an engine there is none, and nothing to do."""

    _pool: BlockPool
    _names: Names
    _publisher: Publisher
    _partials: dict[UUID, Slot]
    _num_inactive: int

    def _flush_freed(self) -> None:
        raise NotImplementedError

    def _evict(self, count: int, pending: PendingEvents) -> list[Slot]:
        raise NotImplementedError

    def _start_offload(self) -> None:
        self._offload: OffloadEngine | None = None
        self._details: dict[int, BlockDetails] = {}  # of each block on the device, by lineage hash
        self._offload_now = 0.0
        self._num_outside = 0  # slots that are quarantined, or reserved for a swap-in
        self._scheduled: list[Scheduled] = []
        self._last_pin = 0  # numbers of pins go down from -1: no block is named so

    # ----------------------------------------------------------------------------------------------- the engine

    @property
    def offload(self) -> OffloadEngine | None:
        """The offload engine; None where there is no further tier."""
        return self._offload

    def attach_offload(self, engine: OffloadEngine) -> None:
        """Attach an offload engine: what is evicted from now on goes there.

        Args:
            engine: one of its own; two managers cannot share it.

        Raises:
            ValueError: there is one already, or blocks are cached or in use. (What events said of those is not kept
                without an engine, and the further tier's events say it again.)
        """
        if self._offload is not None:
            raise ValueError(f"{self!r} has an offload engine already: {self._offload!r}")
        if self._pool.reset_len < self._pool.total:
            raise ValueError(f"an offload engine is attached to a manager that is empty, not to {self!r}")
        self._flush_freed()
        self._offload = engine

    def tick(self, now: float) -> None:
        """Move the time of the further tier forward to `now` (ms), and publish what happened there.

        Nothing happens without an offload engine.

        Raises:
            ValueError: the time is no finite number of at least 0, or before the last one.
        """
        now = check_time(now)
        if self._offload is not None:
            if now < self._offload_now:
                raise ValueError(f"tick: time does not go backwards; it is {self._offload_now} ms, got {now}")
            self._offload_now = float(now)
            self._carry_out(self._offload.tick(now))
            if self._publisher.failure is not None:
                self._publisher.surface()

    @property
    def offload_now(self) -> float:
        """The latest time, in ms, that the further tier was moved to; 0 before the first."""
        return self._offload_now

    def offload_deadline(self) -> float | None:
        """Return when the next transfer finishes if nothing else starts; None if none is under way."""
        return None if self._offload is None else self._offload.deadline()

    @property
    def num_outside(self) -> int:
        """Slots that hold no block: quarantined until a block of theirs was copied, or reserved for one that comes back."""
        return self._num_outside

    @property
    def num_reserved(self) -> int:
        """Slots, among `num_outside`, that are reserved for blocks that come back."""
        return sum(len(scheduled.slots) for scheduled in self._scheduled)

    def _carry_out(self, result: OffloadResult, removed: Sequence[int | None] = ()) -> None:
        """Take back the slots that are free again, and publish the events.

        What the device evicted for them was published before, and is in the trace now: here are the sizes of that moment.
        """
        for slot in result.slots:
            self._pool.give_back(slot)
        self._num_outside -= len(result.slots)
        is_traced = bool(removed or result.events) and LOG.isEnabledFor(TRACE_LEVEL)
        if is_traced:
            trace(self, "eviction", removed, form=OF_1_2_1)  # type: ignore[arg-type]  # the whole manager is one
        for data, tier, token_ids, _ in result.events:
            self._publisher.publish(data, token_ids, tier)
            if is_traced and not isinstance(data, Cleared):
                event: Literal["allocation", "eviction"] = "allocation" if isinstance(data, Stored) else "eviction"
                trace(self, event, data.block_hashes, tier=tier, form=OF_1_2_1)  # type: ignore[arg-type]  # as above

    def _resident_below(self, tier: StorageTier) -> Collection[int]:
        """Sequence hashes of what a further tier holds."""
        return self._offload.resident() if self._offload is not None and self._offload.tier == tier else []

    def unpublished(self, tier: StorageTier) -> Container[int]:
        """Return the blocks of a further tier that events do not show; see `OffloadEngine`."""
        return self._offload.unpublished if self._offload is not None and self._offload.tier == tier else ()

    # --------------------------------------------------------------------------------------------------- a Use

    def _offload_use(self, move: Use, served: int, pending: PendingEvents) -> list[Slot]:
        """Note what a Use stored. Where it was served short, evict; returns the slots, which are quarantined."""
        if pending.stored:
            self._note_stored(move, served, pending)
        if served == len(move.blocks) or not self._num_inactive:
            return []
        victims = self._evict(1, pending)
        # Counted after the first eviction: its victim may be among them.
        held_by, registered = self._names.held_by, self._pool.registered
        full = served - sum(isinstance(block, UUID) for block in move.blocks[:served])
        plhs = iter(move.plhs[full + isinstance(move.blocks[served], int) :])
        needed = 0
        for block in move.blocks[served + 1 :]:
            if isinstance(block, UUID):
                needed += block not in self._partials
            else:
                needed += next(plhs) not in registered and held_by(block) is None
        if needed and self._num_inactive:
            victims += self._evict(min(needed, self._num_inactive), pending)
        return victims

    def _note_stored(self, move: Use, served: int, pending: PendingEvents) -> None:
        """Keep what the Stored of a Use says of each block, for the events of the further tier.

        A block's parent is the full block before it in the Use, a hit or not: not the Stored's parent.
        """
        tokens: Iterable[Sequence[int] | None] = pending.token_ids or [None] * len(pending.stored)
        stored = zip(pending.stored, pending.local_hashes, tokens, strict=True)
        name, local, ids = next(stored)
        parent = move.parent
        plhs = iter(move.plhs)
        for block in move.blocks[:served]:
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

    def _hand_over(self, victims: Sequence[Slot], pending: PendingEvents) -> None:
        """Give evicted blocks to the engine, with their slots; their Removed is published."""
        assert self._offload is not None
        self._num_outside += len(victims)
        details = [self._details.pop(slot.plh, None) for slot in victims]
        result = self._offload.take([block for block in details if block is not None], victims)
        self._carry_out(result, pending.removed)

    # ------------------------------------------------------------------------------------------------- swap-in

    def swap_in(self, plhs: Sequence[int], now: float | None = None) -> SwapIn:
        """Start to bring the longest prefix of these that the further tier holds back to the device.

        Args:
            plhs: lineage hashes of the blocks, in order, from the first that the device has not.
            now: the time, in ms; None: that of the last tick.

        Returns:
            `NoHits`; `BlockedOnG1Offload` where blocks must be evicted first, which has begun; or `Scheduled`, of which
            the blocks are registered (`register_swapped_in`) when it is complete, or which is put down (`put_down`).

        Raises:
            ValueError: the time is no finite number of at least 0.
            MoveError: something is no lineage hash.
        """
        if now is not None:
            check_time(now)
        _check_plhs(plhs)
        prefix = None if self._offload is None else self._offload.find(plhs)
        if self._offload is None or prefix is None:
            return NoHits()
        # The prefix stays pinned until what is evicted for it was handed over.
        reserved = self._reserve(prefix.num_blocks)
        if isinstance(reserved, Scheduled):
            reserved.prefix = prefix
            self._offload.start(prefix, now)
            if now is not None:
                self._offload_now = max(self._offload_now, float(now))
        else:
            self._offload.release(prefix)
        if self._publisher.failure is not None:
            self._publisher.surface()
        return reserved

    def _reserve(self, count: int) -> SwapIn:
        """Reserve slots for blocks that are to come, all or none."""
        self._flush_freed()
        slots = self._pool.take_reset(count)
        if len(slots) == count:
            self._num_outside += count
            scheduled = Scheduled(None, slots)
            self._scheduled.append(scheduled)
            return scheduled
        pending = PendingEvents(None)
        victims = self._evict(min(count - len(slots), self._num_inactive), pending) if self._num_inactive else []
        for slot in slots:
            self._pool.give_back(slot)
        if not victims:
            return NoHits()
        pending.publish(self._publisher, self._pool)
        self._hand_over(victims, pending)
        return BlockedOnG1Offload()

    def put_down(self, scheduled: Scheduled) -> None:
        """Give up a swap-in: its slots are free again, and its blocks in the further tier are pinned no more.

        Raises:
            ValueError: it was put down already, its blocks were registered, or it was cancelled; or it is another
                manager's.
        """
        self._close(scheduled)
        self._free(scheduled.slots)

    def _close(self, scheduled: Scheduled) -> None:
        if not scheduled.is_open or scheduled not in self._scheduled:
            raise ValueError(f"{scheduled!r} is not open on {self!r}: a swap-in is put down, or registered, once")
        self._scheduled.remove(scheduled)
        scheduled.is_open = False
        if scheduled.prefix is not None and self._offload is not None:
            self._offload.release(scheduled.prefix)

    def _free(self, slots: list[Slot]) -> None:
        self._num_outside -= len(slots)
        for slot in slots:
            self._pool.give_back(slot)
        slots.clear()

    def register_swapped_in(self, blocks: Sequence[BlockDetails], parent: int | None, scheduled: Scheduled) -> int:
        """Cache the blocks that a swap-in brought, inactive, and publish them as stored on the device.

        A block that the device has by now gives its slot back, and what comes after it is stored below it. The `parent`
        that a block of `blocks` names counts for nothing: it is the one before it.

        Args:
            blocks: in order.
            parent: sequence hash of the block before the first; None for a root.
            scheduled: has the slots; it is done with after this.

        Returns:
            How many blocks were taken: fewer than there are where there are fewer slots.

        Raises:
            ValueError: as `put_down`.
        """
        self._close(scheduled)
        self._flush_freed()
        slots = scheduled.slots[::-1]
        taken = min(len(slots), len(blocks))
        scheduled.slots.clear()
        self._num_outside -= len(slots)
        pool, policy = self._pool, self._pool.inactive
        anchor = parent  # of the Stored to come
        stored: list[BlockDetails] = []
        for block in blocks[:taken]:
            slot = slots.pop()
            if self._names.held_by(block.name) is not None or pool.match(block.plh) is not None:
                pool.give_back(slot)
                self._publish_swapped_in(anchor, stored)
                stored = []
                anchor = parent = block.name
                continue
            slot.name, slot.plh = block.name, block.plh
            pool.registered[block.plh] = slot
            self._names.hold_new(slot)
            self._names.release(block.name)
            policy._on_register((slot,))
            policy._insert_one(slot)
            self._num_inactive += 1
            self._details[block.plh] = block._replace(parent=parent)
            stored.append(block)
            parent = block.name
        self._publish_swapped_in(anchor, stored)
        for slot in slots[::-1]:
            pool.give_back(slot)
        if self._publisher.failure is not None:
            self._publisher.surface()
        return taken

    def _publish_swapped_in(self, anchor: int | None, stored: Sequence[BlockDetails]) -> None:
        """Publish one Stored; its token ids only if every block has them."""
        if not stored:
            return
        self._pool.registrations += len(stored)
        names = tuple(block.name for block in stored)
        token_ids = [block.token_ids for block in stored if block.token_ids is not None]
        data = Stored(anchor, names, tuple(block.local_hash for block in stored))
        self._publisher.publish(data, token_ids if len(token_ids) == len(stored) else None)
        if LOG.isEnabledFor(TRACE_LEVEL):
            trace(self, "allocation", names, form=OF_1_2_1)  # type: ignore[arg-type]  # as above

    # ---------------------------------------------------------------------------------------------------- pins

    def pin(self, plhs: Sequence[int]) -> Pin | None:
        """Keep these blocks active until `unpin`, for no request; None if not all are cached.

        They are looked up as a Use looks them up, also when it fails: inactive ones become the youngest.

        Raises:
            MoveError: something is no lineage hash.
        """
        _check_plhs(plhs)
        self._flush_freed()
        pool, policy = self._pool, self._pool.inactive
        found: list[Slot] = []
        for plh in plhs:
            slot = pool.registered.get(plh)
            if slot is None or not (slot.refs or slot.aliases):
                break
            policy._on_touch(slot)
            found.append(slot)
        woken: list[Slot] = []
        for plh in plhs[len(found) :]:
            slot = pool.match(plh)
            if slot is None or slot.refs or slot.aliases or slot in woken:
                break
            woken.append(slot)
        if woken:
            policy._wake_run(woken)
            self._num_inactive -= len(woken)
        found += woken
        pool.match_hashes_requested += len(plhs)
        pool.match_blocks_returned += len(found)
        numbers: list[int] = []
        for slot in found:
            self._last_pin -= 1
            self._names.hold(slot, self._last_pin)
            numbers.append(self._last_pin)
        pin = Pin(numbers)
        if len(found) < len(plhs):
            self.unpin(pin)
            return None
        return pin

    def unpin(self, pin: Pin) -> None:
        """Drop a pin: blocks that nobody else holds become inactive, in order.

        Raises:
            ValueError: it was dropped already, or cancelled.
        """
        if not pin.is_open or any(number not in self._names.alias_slots for number in pin.numbers):
            raise ValueError(f"{pin!r} is no pin of {self!r}: a pin is dropped once")
        pin.is_open = False
        for number in pin.numbers:
            slot = self._names.release(number)
            if not slot.refs and not slot.aliases:
                self._pool.inactive._insert_one(slot)
                self._num_inactive += 1

    def num_held_by(self, pins: Iterable[Pin]) -> int:
        """Count the blocks that are active for these pins alone."""
        slots = Counter(self._names.alias_slots[number] for pin in pins for number in pin.numbers)
        return sum(not slot.refs and slot.aliases == count for slot, count in slots.items())

    def cancel_offload(self) -> None:
        """Cancel all transfers, put down swap-ins and pins, and empty the further tier, without an event.

        Nothing happens without an offload engine. What the device has, it keeps.
        """
        if self._offload is None:
            return
        for scheduled in list(self._scheduled):
            self.put_down(scheduled)
        pins = [number for number in self._names.alias_slots if number < 0]
        self.unpin(Pin(pins))
        self._free(list(self._offload.clear()))


def _check_plhs(plhs: Sequence[int]) -> None:
    if not are_plhs(plhs):
        raise MoveError(f"lineage hashes are expected, integers of 128 bits, got {plhs!r:.200}")
