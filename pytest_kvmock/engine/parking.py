"""A request that waits for its prefix to come back from the host (Dynamo's `VllmCore`, `AwaitingSwapIn`).

The blocks of the prefix that the device has are pinned meanwhile, and slots are reserved for those that come. When the
transfer is done, these are cached as inactive blocks, and the request's own Use finds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from pytest_kvmock.cache.offload import BlockDetails, BlockedOnG1Offload, NoHits, Scheduled

if TYPE_CHECKING:
    from pytest_kvmock.cache.dynamo.logical import LogicalManager
    from pytest_kvmock.cache.dynamo.offloading import Pin
    from pytest_kvmock.engine.sequence import ActiveSequence


class Parked:
    """A swap-in under way for one request.

    Attributes:
        plhs: lineage hashes of the request's blocks up to the last that comes.
        skip: how many of them the device had.
        pin: what keeps those on the device.
    """

    __slots__ = ("_blocks", "_manager", "_parent", "_scheduled", "pin", "plhs", "skip")

    def __init__(
        self, manager: LogicalManager, sequence: ActiveSequence, skip: int, pin: Pin, coming: Scheduled
    ) -> None:
        end = skip + coming.num_blocks
        plhs, locals_ = sequence.positional_lineage_hashes, sequence.block_hashes
        size = sequence.block_size
        tokens = sequence.tokens if sequence.emit_token_ids else None
        self._manager = manager
        self.pin = pin
        self._scheduled = coming
        self.plhs = tuple(plhs[:end])
        self.skip = skip
        names = [block for block in sequence.unique_blocks[:end] if not isinstance(block, UUID)]
        self._parent = names[skip - 1] if skip else None
        self._blocks = [
            BlockDetails(
                names[i], plhs[i], None, locals_[i], None if tokens is None else tokens[i * size : (i + 1) * size]
            )
            for i in range(skip, end)
        ]

    @property
    def num_blocks(self) -> int:
        """How many blocks come."""
        return len(self._blocks)

    @property
    def is_open(self) -> bool:
        """Whether slots are reserved for them: until `resume` or `give_up`, or until its manager cancels its transfers."""
        return self._scheduled.is_open

    @property
    def is_complete(self) -> bool:
        """Whether they have come, by the last tick."""
        return self._scheduled.is_complete

    def resume(self) -> int:
        """Cache the blocks that came, and pin no more; returns how many."""
        taken = self._manager.register_swapped_in(self._blocks, self._parent, self._scheduled)
        self._manager.unpin(self.pin)
        return taken

    def give_up(self) -> None:
        """Free slots and pins; the transfer goes on, for nothing."""
        self._manager.put_down(self._scheduled)
        self._manager.unpin(self.pin)


def park(
    manager: LogicalManager, sequence: ActiveSequence, cached_tokens: int, now: float
) -> Parked | NoHits | BlockedOnG1Offload:
    """Start to bring back what the host has of a request, from the first block on that the device has not.

    Args:
        manager: its manager.
        sequence: the request's; it holds no block.
        cached_tokens: tokens of its prompt that the device has.
        now: the time in ms.
    """
    plhs = sequence.positional_lineage_hashes
    skip = cached_tokens // sequence.block_size
    if skip >= len(plhs):
        return NoHits()
    pin = manager.pin(plhs[:skip])
    if pin is None:
        return NoHits()
    outcome = manager.swap_in(plhs[skip:], now)
    if not isinstance(outcome, Scheduled):
        manager.unpin(pin)
        return outcome
    return Parked(manager, sequence, skip, pin, outcome)
