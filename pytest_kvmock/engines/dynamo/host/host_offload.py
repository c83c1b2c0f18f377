"""The host tier (G2) of Dynamo's mocker: evicted blocks travel to the host in batches, and back, in virtual time.

It does the same as `MockOffloadEngine` of dynamo-mocker 1.2.1 on `kvbm-engine`, with one difference: the original works
in threads. If the moment of a step depends on a thread, here the step happens in the call that causes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from itertools import count
from math import inf
from typing import Final

from pytest_kvmock.engines.base.bandwidth import DEFAULT_GBPS, Link
from pytest_kvmock.engines.base.eviction_policy import Slot
from pytest_kvmock.engines.base.offload import BlockDetails, OffloadResult, PinnedPrefix, TierEvent
from pytest_kvmock.engines.dynamo.host.host_pool import HostPool
from pytest_kvmock.values.checks import check_integer, check_number, check_time
from pytest_kvmock.values.events import Removed, StorageTier, Stored

# Theory of operation
#
# A *call* is the input of one `take`: evicted blocks, and their device slots, which stay quarantined until every block
# of the call has settled. Blocks that are on the host already, or queued for it, are left out; the others are cut into
# batches, and a batch is one transfer. At most `batch_size` transfers may be under way at once; other batches wait,
# first come first served. Host slots are taken when a transfer starts, with evictions from the host if needed. The
# blocks are registered when the transfer ends.
#
# Two hazards of the original are kept. First, a batch is lost if the host has too few slots that are empty or
# evictable; its call never settles, so the device slots stay quarantined. Second, the details of a block for its events
# are kept once for each lineage hash, and dropped when the host evicts the block. A block may be sent twice, because
# the device evicted it again while its first copy was under way. If the first copy arrives and is evicted from the
# host, the second copy arrives without a Stored. If the device then evicts the block once more, its Removed is
# published all the same. `unpublished` names such blocks: a comparison of the host with its events skips only these.

DEFAULT_BATCH: Final = 32
"""Default number of blocks of one transfer to the host, and of transfers under way at once."""


class _Call:
    """The slots of one `take`, and the number of its blocks that have not settled."""

    __slots__ = ("slots", "unsettled")

    def __init__(self, slots: list[Slot], unsettled: int) -> None:
        self.slots = slots
        self.unsettled = unsettled


class _Batch:
    """Blocks that travel to the host together, and their slots there once the transfer has begun."""

    __slots__ = ("blocks", "call", "slots")

    def __init__(self, call: _Call, blocks: list[BlockDetails]) -> None:
        self.call = call
        self.blocks = blocks
        self.slots: list[Slot] = []


class HostPrefix:
    """A pinned prefix of the host (`SwapInHandle`).

    Attributes:
        num_blocks: number of blocks.
        slots: the slots of these blocks, while they are pinned.
        is_complete: whether its transfer is done.
    """

    __slots__ = ("is_complete", "num_blocks", "slots")

    def __init__(self, slots: list[Slot]) -> None:
        self.num_blocks = len(slots)
        self.slots = slots
        self.is_complete = False

    def __repr__(self) -> str:
        state = "released" if not self.slots else "complete" if self.is_complete else "pinned"
        return f"<HostPrefix of {self.num_blocks} blocks, {state}>"


class HostOffload:
    """Keeps the evicted blocks of one manager in host memory.

    Args:
        num_blocks: capacity of the host in blocks, at least 1.
        block_bytes: bytes of a block; 0: unknown, a transfer takes no time.
        batch_size: blocks of one transfer to the host, and transfers to the host that may be under way at once. If more
            blocks are under way than the host can hold, batches are lost; a `batch_size` whose square is at most
            `num_blocks` is safe.
        to_host_gbps: bandwidth from the device to the host, in GB/s; 0 is infinite.
        to_device_gbps: bandwidth back.

    Raises:
        ValueError: a number is invalid.

    Attributes:
        tier: the host's tier.
        batch_size: as given.
        now: the time of the last tick, in ms, cut to microseconds; a transfer that a move starts begins then.
        lost_blocks: number of blocks lost because the host could not hold a whole batch.
        lost_to_pins: number of those blocks that were lost because a swap-in had pinned other blocks.
    """

    tier = StorageTier.HOST_PINNED

    def __init__(
        self,
        num_blocks: int = 100_000,
        *,
        block_bytes: int = 0,
        batch_size: int = DEFAULT_BATCH,
        to_host_gbps: float = DEFAULT_GBPS,
        to_device_gbps: float = DEFAULT_GBPS,
    ) -> None:
        self._host = HostPool(check_integer("num_blocks", num_blocks, 1, " (blocks of the host)"))
        self._block_bytes = check_integer("block_bytes", block_bytes, 0, "; 0: a transfer takes no time")
        check_number("block_bytes * num_blocks", block_bytes * num_blocks, unit=" (bytes)")
        self.batch_size = check_integer("batch_size", batch_size, 1)
        ids = count()
        self._to_host = Link(to_host_gbps, ids)
        self._to_device = Link(to_device_gbps, ids)
        self.now = 0.0
        self.lost_blocks = 0
        self.lost_to_pins = 0
        self._calls: list[_Call] = []
        self._queue: deque[_Batch] = deque()
        self._offloads: dict[int, _Batch] = {}
        self._onboards: dict[int, HostPrefix] = {}
        self._details: dict[int, BlockDetails] = {}  # for the next event of each block, by lineage hash
        self._happened: list[tuple[bool, int]] = []  # (whether stored, lineage hash) of changes not yet published
        self._unpublished: set[int] = set()

    def __repr__(self) -> str:
        return (
            f"<HostOffload at {self.now} ms: {len(self.resident())} blocks of {self._host.total}, "
            f"{len(self._offloads)} transfers to the host, {len(self._onboards)} to the device>"
        )

    @property
    def num_blocks(self) -> int:
        """Capacity of the host in blocks."""
        return self._host.total

    @property
    def block_bytes(self) -> int:
        """Bytes of a block; 0: unknown, a transfer takes no time."""
        return self._block_bytes

    @property
    def gbps(self) -> tuple[float, float]:
        """Bandwidth to the host, and back, in GB/s; 0 is infinite."""
        return self._to_host.gbps, self._to_device.gbps

    @property
    def quarantined(self) -> int:
        """Slots of the device that are held, including those that will be held forever."""
        return sum(len(call.slots) for call in self._calls)

    def resident(self) -> list[int]:
        """Return the sequence hashes of the host's blocks."""
        return [slot.name for slot in self._host.blocks()]

    @property
    def unpublished(self) -> Container[int]:
        """Sequence hashes of blocks that arrived without a Stored, until they get one; see the theory of operation."""
        return self._unpublished

    def deadline(self) -> float | None:
        """Return when the next transfer finishes, in either direction; None if none is under way."""
        both = [link.earliest() for link in (self._to_host, self._to_device)]
        return min((finish for finish in both if finish is not None), default=None)

    def take(self, evicted: Sequence[BlockDetails], slots: Sequence[Slot]) -> OffloadResult:
        """Take blocks that the device evicted; see `OffloadEngine.take`."""
        if not evicted:
            return self._result(slots)
        self._details.update((block.plh, block) for block in evicted)
        # The next batch in the queue counts as under way already, so its blocks are sent again (kvbm-engine,
        # `upgrade_batch`).
        waiting = {block.plh for i, batch in enumerate(self._queue) if i for block in batch.blocks}
        passed: list[BlockDetails] = []
        for block in evicted:
            if block.plh not in self._host and block.plh not in waiting:
                waiting.add(block.plh)
                passed.append(block)
        if not passed:
            return self._result([*slots, *self._settled_slots()])
        call = _Call(list(slots), len(passed))
        self._calls.append(call)
        size = self.batch_size
        self._queue += [_Batch(call, passed[i : i + size]) for i in range(0, len(passed), size)]
        self._start_queued()
        return self._result(())

    def tick(self, now: float) -> OffloadResult:
        """Move the time forward to `now`; see `OffloadEngine.tick`.

        A time before the last one changes nothing on the links.
        """
        self._set_now(check_time(now))
        self._drain(now)
        self._start_queued()
        return self._result(self._settled_slots())

    def find(self, plhs: Sequence[int]) -> HostPrefix | None:
        """Pin the longest prefix that the host holds; see `OffloadEngine.find`."""
        slots = self._host.match(plhs)
        return HostPrefix(slots) if slots else None

    def lookup(self, plhs: Sequence[int]) -> int:
        """Count the leading blocks that the host holds. Changes nothing."""
        return next((i for i, plh in enumerate(plhs) if plh not in self._host), len(plhs))

    def start(self, prefix: PinnedPrefix, now: float | None = None) -> None:
        """Start the transfer of a pinned prefix to the device; see `OffloadEngine.start`."""
        assert isinstance(prefix, HostPrefix)
        now = self.now if now is None else check_time(now)
        self._set_now(now)
        self._drain(now)
        number = self._to_device.start(now, prefix.num_blocks * self._block_bytes)
        self._onboards[number] = prefix
        self._start_queued()

    def release(self, prefix: PinnedPrefix) -> None:
        """Unpin a prefix if it is pinned; its transfer continues without effect."""
        assert isinstance(prefix, HostPrefix)
        slots, prefix.slots = prefix.slots, []
        self._host.release(slots)

    def clear(self) -> list[Slot]:
        """Cancel all transfers and drop all blocks; see `OffloadEngine.clear`."""
        slots = [slot for call in self._calls for slot in call.slots]
        self._host = HostPool(self._host.total)
        self._to_host.cancel()
        self._to_device.cancel()
        for each in (self._calls, self._queue, self._offloads, self._onboards, self._details, self._happened):
            each.clear()
        self._unpublished.clear()
        return slots

    def _set_now(self, now: float) -> None:
        micros = now * 1000
        self.now = int(micros) / 1000 if micros < inf else now  # the original keeps integer microseconds

    def _drain(self, now: float) -> None:
        """Advance both links, and complete the finished transfers, in the order in which they finished."""
        for number in (*self._to_host.advance(now), *self._to_device.advance(now)):
            batch = self._offloads.pop(number, None)
            if batch is None:
                self._onboards.pop(number).is_complete = True
                continue
            names = [block.name for block in batch.blocks]
            new, lost = self._host.register(batch.slots, names, [block.plh for block in batch.blocks])
            self._happened += [(True, plh) for plh in new]
            self._happened += [(False, plh) for plh in lost]
            if lost:
                self.lost_blocks += len(lost)
            else:
                batch.call.unsettled -= len(batch.blocks)

    def _start_queued(self) -> None:
        """Start the waiting batches in order, until the maximum number of transfers is under way."""
        while self._queue and len(self._offloads) < self.batch_size:
            batch = self._queue.popleft()
            allocated = self._host.allocate(len(batch.blocks))
            if allocated is None:
                self.lost_blocks += len(batch.blocks)
                if len(batch.blocks) <= self._host.available + self._host.pinned:
                    self.lost_to_pins += len(batch.blocks)
                continue
            batch.slots, evicted = allocated
            self._happened += [(False, plh) for plh in evicted]
            self._drain(self.now)  # a transfer of 0 bytes ends when the next one starts
            number = self._to_host.start(self.now, len(batch.blocks) * self._block_bytes)
            self._offloads[number] = batch

    def _settled_slots(self) -> list[Slot]:
        """Take out the calls whose blocks have all settled; return their slots."""
        slots = [slot for call in self._calls if not call.unsettled for slot in call.slots]
        if slots:
            self._calls = [call for call in self._calls if call.unsettled]
        return slots

    def _result(self, slots: Iterable[Slot]) -> OffloadResult:
        """Return the changes since the last result as events, with these slots."""
        events: list[TierEvent] = []
        for stored, plh in self._happened:
            block = self._details.get(plh) if stored else self._details.pop(plh, None)
            if block is None:
                name = self._host.name_of(plh) if stored else None
                if name is not None:
                    self._unpublished.add(name)
                continue
            if stored:
                self._unpublished.discard(block.name)
                tokens = None if block.token_ids is None else [block.token_ids]
                data = Stored(block.parent, (block.name,), (block.local_hash,))
                events.append(TierEvent(data, self.tier, tokens))
            else:
                events.append(TierEvent(Removed((block.name,)), self.tier))
        self._happened.clear()
        return OffloadResult(events, list(slots))
