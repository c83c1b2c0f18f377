"""Repair of events from which blocks were cut, so that they break no rule that the full stream did not break. Also
renaming to small numbers.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_kvmock.oracle.hygiene.entries import NoEvent
from pytest_kvmock.values.events import Cleared, Located, Removed, RouterEvent, SparseStored, Stored, Updated, renamed

if TYPE_CHECKING:
    from pytest_kvmock.values.events import EventData, StreamKey


class Mender:
    """Stores the children of blocks that are left out under the nearest held ancestor, and drops those blocks from
    Removed events.

    Args:
        parents: by stream and block, the parent in the full stream.
        target: the block of the problem, which stays in its place.
        stored: by stream, the blocks that the remaining events store; below the device a block may arrive before its
            parent.
    """

    def __init__(
        self,
        parents: Mapping[StreamKey, Mapping[int, int | None]],
        target: int | None,
        stored: Mapping[StreamKey, Container[int]],
    ) -> None:
        self._held: dict[StreamKey, set[int]] = {}
        self._parents = parents
        self._target = target
        self._stored = stored

    def forget(self, key: StreamKey) -> None:
        """Record that a stream holds nothing."""
        self._held.pop(key, None)

    def mend(
        self, key: StreamKey, data: EventData, places: tuple[int, ...] | None, *, on_device: bool
    ) -> EventData | None:
        """Return the repaired data of an event of a stream; None if nothing is left."""
        held = self._held.setdefault(key, set())
        if isinstance(data, Removed):
            blocks = data.block_hashes if places is None else tuple([data.block_hashes[i] for i in places])
            left = tuple([block for block in blocks if block in held or block == self._target])
            held.difference_update(left)
            return Removed(left)
        if isinstance(data, Cleared):
            self.forget(key)
            return data
        if isinstance(data, (SparseStored, Located, Updated)):
            return _named(data, places)
        keep = range(len(data.block_hashes)) if places is None else places
        # The block before the first kept block is its parent, unless it was cut too.
        parent = data.block_hashes[keep[0] - 1] if keep and keep[0] else data.parent_hash
        part = _part(data, self._nearest(key, parent, held if on_device else self._stored.get(key, held)), keep)
        held.update(part.block_hashes)
        return part

    def _nearest(self, key: StreamKey, parent: int | None, held: Container[int]) -> int | None:
        parents = self._parents.get(key, {})
        seen = set()
        while parent is not None and parent not in held and parent != self._target:
            seen.add(parent)
            parent = parents.get(parent)
            if parent in seen:
                return None
        return parent


class Roots(Mender):
    """Keeps hashes as they are: a block that lost its parent becomes a root whose local hash equals its block hash."""

    def mend(
        self, key: StreamKey, data: EventData, places: tuple[int, ...] | None, *, on_device: bool
    ) -> EventData | None:
        """Return the repaired data of an event of a stream; None if the event cannot be repaired."""
        if not isinstance(data, Stored) or isinstance(data, SparseStored):
            return super().mend(key, data, places, on_device=on_device)
        held = self._held.setdefault(key, set())
        keep = range(len(data.block_hashes)) if places is None else places
        if not keep:
            return Stored(None, (), ())
        if [*keep] != [*range(keep[0], keep[-1] + 1)]:
            return None
        parent = data.block_hashes[keep[0] - 1] if keep[0] else data.parent_hash
        part = _part(data, parent, keep)
        held.update(part.block_hashes)
        if parent is None or parent in held:
            return part
        first = part.block_hashes[0]
        if first == self._target:  # its hash is judged by its parent
            return None
        return replace(part, parent_hash=None, tokens_hashes=(first, *part.tokens_hashes[1:]))


def _named(
    data: SparseStored | Located | Updated, places: tuple[int, ...] | None
) -> SparseStored | Located | Updated | None:
    """Return the data with the names that are left, which do not depend on each other; None if an Updated has none."""
    if isinstance(data, Updated):
        return data if places is None or places else None
    if places is None:
        return data
    return replace(data, block_hashes=tuple(data.block_hashes[i] for i in places))


def _part(data: Stored, parent: int | None, places: Sequence[int]) -> Stored:
    infos = data.mm_extra_info
    return Stored(
        parent,
        tuple(data.block_hashes[i] for i in places),
        tuple(data.tokens_hashes[i] for i in places),
        data.start_position,
        None if infos is None else tuple(infos[i] for i in places),
    )


class Renamer:
    """Renames blocks and local hashes to 1, 2, 3 ... in the order of their appearance."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self._local: dict[int, int] = {}

    def renamed(self, step: RouterEvent | NoEvent) -> RouterEvent | NoEvent:
        """Return the step with new numbers."""
        if isinstance(step, NoEvent):
            return step
        data: EventData = step.event.data
        if isinstance(data, Stored):
            parent = None if data.parent_hash is None else self._block(data.parent_hash)
            blocks = tuple(map(self._block, data.block_hashes))
            data = replace(data, parent_hash=parent, block_hashes=blocks)
            if not isinstance(data, SparseStored):
                local = tuple(self._local.setdefault(h, len(self._local) + 1) for h in data.tokens_hashes)
                data = replace(data, tokens_hashes=local)
        elif not isinstance(data, Cleared):
            data = renamed(data, [*map(self._block, data.block_hashes)])
        return RouterEvent(
            step.worker_id, replace(step.event, data=data), step.storage_tier, step.token_ids, step.extra
        )

    def _block(self, block: int) -> int:
        return self.blocks.setdefault(block, len(self.blocks) + 1)
