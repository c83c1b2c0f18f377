"""Text of hashes, ids and events in messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from pytest_kvmock.values.events import (
    Cleared,
    KvCacheEvent,
    RouterEvent,
    SparseStored,
    StorageTier,
    Stored,
    block_text,
)
from pytest_kvmock.values.prompt_keys import block_keys, group_of, is_of_group

if TYPE_CHECKING:
    from pytest_kvmock.values.events import EventData
    from pytest_kvmock.values.prompt_keys import EventExtra


NO_WORKER: Final = (-1, 0)
"""The (worker_id, dp_rank) of a problem that is about no worker."""


MOST_BLOCKS: Final = 4
"""Maximum number of blocks of a list that are shown."""

EVENTS_BEGAN_ANEW: Final = {
    "restart": "the restart",
    "removal": "the worker was removed",
    "backwards": "ids went backwards",
}
"""The reasons why event ids of a worker and rank begin again, in words that can follow "before" and "after"."""


def blocks_text(blocks: Sequence[int]) -> str:
    """Return the text of several blocks: the first few, and the number of others."""
    shown = ", ".join(map(block_text, blocks[:MOST_BLOCKS]))
    more = f" and {len(blocks) - MOST_BLOCKS} more" if len(blocks) > MOST_BLOCKS else ""
    return f"block{'s' * (len(blocks) != 1)} {shown}{more}"


def ids_text(ids: range) -> str:
    """Return the text of a range of event ids."""
    return f"event {ids.start}" if ids.stop - ids.start == 1 else f"events {ids.start} to {ids.stop - 1}"


def event_name(event_id: int, resets: Sequence[str] = ()) -> str:
    """Return the text of an event by its id.

    Args:
        event_id: the id.
        resets: the reason for each time that ids began again since then; keys of `EVENTS_BEGAN_ANEW`.
    """
    if not resets:
        return f"event {event_id}"
    when = f"before {EVENTS_BEGAN_ANEW[resets[0]]}" if len(resets) == 1 else f"{len(resets)} restarts ago"
    return f"event {event_id} ({when})"


def without_restarts(text: str) -> str:
    """Return a text without the restarts that `event_name` puts into it."""
    return _ANEW.sub("", text)


_ANEW: Final = re.compile(rf" \((?:before (?:{'|'.join(EVENTS_BEGAN_ANEW.values())})|\d+ restarts ago)\)")


def after_text(restarts: Sequence[str]) -> str:
    """Return the text of a worker's restarts before an event; "" if there were none."""
    if not restarts:
        return ""
    return f" after {EVENTS_BEGAN_ANEW[restarts[0]] if len(restarts) == 1 else f'{len(restarts)} restarts'}"


def worker_text(worker_id: int, dp_rank: int) -> str:
    """Return the text of a worker, with its rank if that is not 0."""
    if (worker_id, dp_rank) == NO_WORKER:
        return "no worker"
    return f"worker {worker_id}" + (f" rank {dp_rank}" if dp_rank else "")


def data_text(data: EventData) -> str:
    """Return the text of an event's data, in one line."""
    kind = type(data).__name__
    if isinstance(data, Stored):
        root = "as a root" if data.parent_hash is None else f"after {block_text(data.parent_hash)}"
        if isinstance(data, SparseStored):
            kept = blocks_text(data.block_hashes) if data.block_hashes else "no block"
            return f"Stored {kept} of {data.span} tokens {root}"
        return f"{kind} {blocks_text(data.block_hashes)} {root}"
    hashes = getattr(data, "block_hashes", None)
    return kind if hashes is None else f"{kind} {blocks_text(hashes)}"


def beside_text(extra: EventExtra | None) -> str:
    """Return the text of the keys that are hashed in addition to tokens; "" if there are none."""
    if extra is None:
        return ""
    adapter = extra.get("lora_name") or extra.get("lora_id")
    keys = [key for of_block in block_keys(extra) if isinstance(of_block, (list, tuple)) for key in of_block]
    # On vLLM's wire the salt is one of a block's keys, after the name of the adapter.
    texts = [key for key in keys if isinstance(key, str) and (adapter is None or key != adapter)]
    salts = dict.fromkeys([extra["cache_salt"]] if extra.get("cache_salt") else texts)
    images = dict.fromkeys(key[0] for key in keys if isinstance(key, (list, tuple)) and len(key) == 2)
    parts = [] if adapter is None else [f"adapter {adapter!r:.40}"]
    parts += [f"salt {salt!r:.40}" for salt in salts]
    parts += [f"image {name!s:.16}" for name in images]
    return f" ({', '.join(parts)})" if parts else ""


def event_text(
    event: RouterEvent, named: Iterable[int] = (), restarts: Sequence[str] = (), *, has_groups: bool = False
) -> str:
    """Return the text of an event, in one line.

    Args:
        event: the event.
        named: blocks that are always shown if the event has them.
        restarts: the reason for each time that ids of its worker began again before it; keys of `EVENTS_BEGAN_ANEW`.
        has_groups: whether its worker has cache groups; then a Removed that names no group belongs to group 0.
    """
    inner: KvCacheEvent = event.event
    tier = "" if event.storage_tier is StorageTier.DEVICE else f" ({event.storage_tier})"
    if is_of_group(event.extra) or (has_groups and not isinstance(inner.data, Cleared)):
        tier += f" (cache group {group_of(event.extra)})"
    tier += beside_text(event.extra)
    who = worker_text(event.worker_id, inner.dp_rank)
    hashes = getattr(inner.data, "block_hashes", ())
    hidden = [] if len(hashes) <= MOST_BLOCKS else [block for block in dict.fromkeys(named) if block in hashes]
    hidden = [block for block in hidden if block not in hashes[:MOST_BLOCKS]]
    among = f"  ({blocks_text(hidden)} among them)" if hidden else ""
    return f"event {inner.event_id}{after_text(restarts)}  {who}{tier}  {data_text(inner.data)}{among}"
