"""Offload between a manager's own pools, an addition: dynamo-llm 0.2.1 has no offload.

It follows the rules of later versions' offload manager. Requests are carried out by priority, the highest first, then
in the order of queuing. A queued block is not held, and may be evicted before. A block that the host already has is not
copied. If the host has no room, the request is dropped. Later versions copy in threads; here `flush()` copies. Their
disk tier, and offload of every registered block, are not implemented.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from pytest_kvmock.contrib.block_manager.block_errors import BlockPoolError, NotEnoughBlocksAvailable
from pytest_kvmock.contrib.block_manager.block_handles import ImmutableBlock
from pytest_kvmock.contrib.block_manager.block_lists import ImmutableBlocks
from pytest_kvmock.contrib.block_manager.tier_pool import TierPool
from pytest_kvmock.values.checks import check_iterable, is_integer


class Flushed(NamedTuple):
    """The result of a manager's `flush()`."""

    returned: int
    """Returned blocks that the pools took back."""
    offloaded: int
    """Blocks that were copied to the host."""
    evicted_before: int
    """Queued blocks that the device no longer had."""
    present: int
    """Queued blocks that the host already had."""
    no_room: int
    """Queued blocks for which the host had no room; their requests are dropped."""


class TierOffload:
    """Copies registered blocks: queued ones from device to host, and requested ones back.

    Args:
        device: the pool whose blocks are offloaded; None if there is none.
        host: the pool that receives the copies; None if there is none.
    """

    __slots__ = ("_device", "_host", "_queue", "_queued")

    def __init__(self, device: TierPool | None, host: TierPool | None) -> None:
        self._device = device
        self._host = host
        self._queue: list[tuple[int, int, int]] = []  # a heap of (-priority, position, sequence hash)
        self._queued = 0

    def queue(self, block: ImmutableBlock, priority: int) -> None:
        """Queue a registered block of the device; see `KvBlockManager.offload`."""
        device, _ = self._both("offload")
        device.check_running("offload")
        _check_of_pool("offload", block, device)
        if not is_integer(priority, 0):
            raise ValueError(f"offload: priority must be an integer of at least 0, got {priority!r:.80}")
        heappush(self._queue, (-priority, self._queued, block.sequence_hash))
        self._queued += 1

    def run(self) -> tuple[int, int, int, int]:
        """Copy the queued blocks; return how many were copied, evicted before, present, and without room.

        The copies are held until all are done, so that none is evicted for another copy of the same run.
        """
        copied = gone = present = full = 0
        if not self._queue:
            return copied, gone, present, full
        device, host = self._both("flush")
        held = ImmutableBlocks()
        while self._queue:
            sequence_hash = heappop(self._queue)[2]
            with device.match_sequence_hashes_blocking((sequence_hash,)) as source:
                if not source:
                    gone += 1
                    continue
                found = host.match_sequence_hashes_blocking((sequence_hash,))
                if found:
                    present += 1
                    held += found
                    continue
                try:
                    held += host.copy_in([handle.held for handle in source])
                except NotEnoughBlocksAvailable:
                    full += 1
                    continue
                copied += 1
        held.close()
        return copied, gone, present, full

    def onboard(self, blocks: Iterable[ImmutableBlock]) -> ImmutableBlocks:
        """Copy registered blocks of the host to the device; see `KvBlockManager.onboard`."""
        device, host = self._both("onboard")
        device.check_running("onboard")
        listed = list(check_iterable("onboard", blocks, "immutable blocks of the host pool"))
        for block in listed:
            _check_of_pool("onboard", block, host)
        return device.copy_in([block.held for block in listed])

    def _both(self, step: str) -> tuple[TierPool, TierPool]:
        if self._device is None or self._host is None:
            missing = "device" if self._device is None else "host"
            raise BlockPoolError(f"{step} needs a device and a host pool; this manager has no {missing} pool")
        return self._device, self._host


def _check_of_pool(step: str, block: object, pool: TierPool) -> None:
    name = pool.block_set.name
    if not isinstance(block, ImmutableBlock):
        raise TypeError(f"{step} takes immutable blocks of the {name} pool, got {block!r:.80}")
    if block.held.set is not pool.block_set:
        raise BlockPoolError(
            f"{step} takes blocks of the {name} pool of worker {pool.block_set.worker_id}, got {block.held.place}"
        )
