"""The changes that faults make to an event: pure functions of the event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TypeAlias

from pytest_kvmock.values.events import (
    Cleared,
    EventData,
    Located,
    Removed,
    RouterEvent,
    SparseStored,
    Stored,
    StreamKey,
    Updated,
    renamed,
)
from pytest_kvmock.values.prompt_keys import is_attention_group
from pytest_kvmock.values.tokens import block_hashes, sequence_hashes

_U64 = 2**64 - 1

Change: TypeAlias = Callable[[RouterEvent], list[RouterEvent] | None]
"""Returns what arrives in place of an event; None if the fault does not apply to it."""


def lost(event: RouterEvent) -> list[RouterEvent]:  # noqa: ARG001 - a Change
    """Drop the event."""
    return []


def first_lost(event: RouterEvent) -> list[RouterEvent] | None:
    """Drop the event if it is the first of its worker and rank."""
    return None if event.event.event_id else []


def doubled(event: RouterEvent) -> list[RouterEvent]:
    """Deliver the event twice."""
    return [event, event]


def wrong_parent(rng: Random, parent: int | None = None) -> Change:
    """Make the change that gives a Stored this parent, or a block that was never stored."""

    def change(event: RouterEvent) -> list[RouterEvent] | None:
        data = event.event.data
        if not isinstance(data, Stored) or not _needs_parent(event) or parent == data.parent_hash is not None:
            return None
        return [_with(event, replace(data, parent_hash=rng.getrandbits(64) if parent is None else parent))]

    return change


def self_parent(event: RouterEvent) -> list[RouterEvent] | None:
    """Give a Stored its own first block as parent."""
    data = event.event.data
    if not isinstance(data, Stored) or not data.block_hashes or not _needs_parent(event):
        return None
    return [_with(event, replace(data, parent_hash=data.block_hashes[0]))]


def _needs_parent(event: RouterEvent) -> bool:
    """Whether the parent of a Stored must be held: nothing hangs on that of a sparse one, nor in a sparse group."""
    return not isinstance(event.event.data, SparseStored) and is_attention_group(event.extra)


def unknown_removed(rng: Random) -> Change:
    """Make the change that adds to a Removed a block that was never stored before its own blocks, and one behind
    them.
    """

    def change(event: RouterEvent) -> list[RouterEvent] | None:
        data = event.event.data
        if not isinstance(data, Removed):
            return None
        last = rng.getrandbits(64)  # the other is its complement: a seed draws what it drew before
        return [_with(event, Removed((last ^ _U64, *data.block_hashes, last)))]

    return change


def foreign(receiver: Callable[[StreamKey], StreamKey | None]) -> Change:
    """Make the change that moves an event to another worker and rank, which `receiver` chooses by those of the
    event.
    """

    def change(event: RouterEvent) -> list[RouterEvent] | None:
        to = receiver((event.worker_id, event.event.dp_rank))
        if to is None:
            return None
        return [replace(event, worker_id=to[0], event=replace(event.event, dp_rank=to[1]))]

    return change


def salted(block_size: int, lora_name: str | None, cache_namespace: str | None) -> Change:
    """Make the change that hashes with a salt. Blocks that came without tokens, one list a block, stay as they are."""
    names: dict[tuple[StreamKey, int], int] = {}

    def change(event: RouterEvent) -> list[RouterEvent] | None:
        data, tokens = event.event.data, event.token_ids
        key = (event.worker_id, event.event.dp_rank)
        if isinstance(data, (Removed, Located, Updated)):
            blocks = tuple(names.get((key, block), block) for block in data.block_hashes)
            return None if blocks == data.block_hashes else [_with(event, renamed(data, blocks))]
        if isinstance(data, Cleared) or tokens is None or len(tokens) != len(data.block_hashes):
            return None
        if any(len(ids) != block_size for ids in tokens):
            return None
        parent = data.parent_hash
        if parent is not None:
            parent = names.get((key, parent), parent)
        flat = [token for ids in tokens for token in ids]
        try:
            local = block_hashes(flat, block_size, lora_name=lora_name, cache_namespace=cache_namespace)
        except (TypeError, ValueError):
            return None  # the tokens of a user's own event are not tokens
        blocks = tuple(sequence_hashes(local, parent=None if parent is None else parent & _U64))
        if min(data.block_hashes, default=0) < 0:
            blocks = tuple(map(_i64, blocks))
        names.update({(key, block): salt for block, salt in zip(data.block_hashes, blocks, strict=True)})
        return [_with(event, replace(data, parent_hash=parent, block_hashes=blocks, tokens_hashes=tuple(local)))]

    return change


def signed(event: RouterEvent) -> list[RouterEvent] | None:
    """Read the hashes of blocks as i64: those from 2**63 on are negative. Such an event is not a valid `RouterEvent`.

    Local hashes are the router's own, and stay.
    """
    data = event.event.data
    if isinstance(data, Stored):
        parent = None if data.parent_hash is None else _i64(data.parent_hash)
        arriving: EventData = replace(data, parent_hash=parent, block_hashes=tuple(map(_i64, data.block_hashes)))
    elif isinstance(data, (Removed, Located, Updated)):
        arriving = renamed(data, [*map(_i64, data.block_hashes)])
    else:
        return None
    return None if arriving == data else [_with(event, arriving)]


def named(event: RouterEvent) -> set[int]:
    """The blocks that an event names, a parent too."""
    data = event.event.data
    if isinstance(data, Cleared):
        return set()
    parent = data.parent_hash if isinstance(data, Stored) else None
    return {*data.block_hashes, *(() if parent is None else (parent,))}


def _with(event: RouterEvent, data: EventData) -> RouterEvent:
    return replace(event, event=replace(event.event, data=data))


def _i64(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
