"""How hashes, ids and events read in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pytest_kvmock.events import KvCacheEvent, RouterEvent, StorageTier, Stored

if TYPE_CHECKING:
    from pytest_kvmock.events import EventData


NOBODY: Final = (-1, 0)
"""In place of (worker_id, dp_rank), where a problem is about no worker."""


def block_text(block: int) -> str:
    """A block or local hash: in full, so that it can be searched for; small ones, as written by hand, in decimal."""
    if not isinstance(block, int) or abs(block) < 2**16:
        return repr(block)
    return f"{'-' * (block < 0)}0x{abs(block):016x}"


def blocks_text(blocks: Sequence[int], most: int = 4) -> str:
    """Several blocks; the first few, and how many more."""
    shown = ", ".join(map(block_text, blocks[:most]))
    more = f" and {len(blocks) - most} more" if len(blocks) > most else ""
    return f"block{'s' * (len(blocks) != 1)} {shown}{more}"


def ids_text(ids: range) -> str:
    """A run of event ids."""
    return f"event {ids.start}" if ids.stop - ids.start == 1 else f"events {ids.start} to {ids.stop - 1}"


def worker_text(worker_id: int, dp_rank: int) -> str:
    """A worker; its rank is named where it is not 0."""
    if (worker_id, dp_rank) == NOBODY:
        return "no worker"
    return f"worker {worker_id}" + (f" rank {dp_rank}" if dp_rank else "")


def data_text(data: EventData) -> str:
    """What an event says, in one line."""
    kind = type(data).__name__
    if isinstance(data, Stored):
        root = "as a root" if data.parent_hash is None else f"after {block_text(data.parent_hash)}"
        return f"{kind} {blocks_text(data.block_hashes)} {root}"
    hashes = getattr(data, "block_hashes", None)
    return kind if hashes is None else f"{kind} {blocks_text(hashes)}"


def event_text(event: RouterEvent) -> str:
    """An event, in one line."""
    inner: KvCacheEvent = event.event
    tier = "" if event.storage_tier is StorageTier.DEVICE else f" ({event.storage_tier})"
    who = worker_text(event.worker_id, inner.dp_rank)
    return f"event {inner.event_id}  {who}{tier}  {data_text(inner.data)}"
