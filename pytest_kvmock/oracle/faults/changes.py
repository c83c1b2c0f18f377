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
    """Make the change that gives a Stored this parent; None: one that was never stored."""

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
    """Whether the parent of a Stored must be held; a sparse Stored, or one of a sparse group, does not need it."""
    return not isinstance(event.event.data, SparseStored) and is_attention_group(event.extra)


def unknown_removed(rng: Random) -> Change:
    """Make the change that adds two blocks that were never stored to a Removed: one first, one last."""

    def change(event: RouterEvent) -> list[RouterEvent] | None:
        data = event.event.data
        if not isinstance(data, Removed):
            return None
        last = rng.getrandbits(64)  # the first is its complement: one draw keeps the results of older seeds
        return [_with(event, Removed((last ^ _U64, *data.block_hashes, last)))]

    return change


def foreign(receiver: Callable[[StreamKey], StreamKey | None]) -> Change:
    """Make the change that moves an event to the worker and rank that `receiver` returns for the event's own."""

    def change(event: RouterEvent) -> list[RouterEvent] | None:
        to = receiver((event.worker_id, event.event.dp_rank))
        if to is None:
            return None
        return [replace(event, worker_id=to[0], event=replace(event.event, dp_rank=to[1]))]

    return change


def salted(block_size: int, lora_name: str | None, cache_namespace: str | None) -> Change:
    """Make the change that hashes with a salt. Events without one list of token ids for each block do not change."""
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
            return None  # a user's own event has invalid tokens
        blocks = tuple(sequence_hashes(local, parent=None if parent is None else parent & _U64))
        if min(data.block_hashes, default=0) < 0:
            blocks = tuple(map(_i64, blocks))
        names.update({(key, block): salt for block, salt in zip(data.block_hashes, blocks, strict=True)})
        return [_with(event, replace(data, parent_hash=parent, block_hashes=blocks, tokens_hashes=tuple(local)))]

    return change


def signed(event: RouterEvent) -> list[RouterEvent] | None:
    """Read block hashes as i64: those from 2**63 on become negative. The result is not a valid `RouterEvent`.

    Local hashes are computed by the router, so they do not change.
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
    """Return the blocks that an event names, including a parent."""
    data = event.event.data
    if isinstance(data, Cleared):
        return set()
    parent = data.parent_hash if isinstance(data, Stored) else None
    return {*data.block_hashes, *(() if parent is None else (parent,))}


def _with(event: RouterEvent, data: EventData) -> RouterEvent:
    return replace(event, event=replace(event.event, data=data))


def _i64(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
