"""The cache group of a hybrid model whose blocks a router asks for: its number, and the events about its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pytest_kvmock.oracle.index.tree import Rank, WorkerRank
from pytest_kvmock.values.events import Cleared, EventData, Removed, RouterEvent, SparseStored, StorageTier, Stored
from pytest_kvmock.values.prompt_keys import group_of, is_attention_group, is_tail


class AttentionGroup:
    """The attention group of one worker and rank.

    It is group 0. If nothing is stored in group 0, or its blocks belong to a window, it is the first group of full
    attention: a window drops blocks that are still part of a prefix. For an engine with windows only it stays group 0,
    and missing parents or blocks are no error.

    Attributes:
        group_idx: its number.
        is_whole: whether it keeps every block of a prefix.
        has_changed: whether the last event changed the group, so that the held blocks belong to the group before.
    """

    __slots__ = ("_block_size", "_tails", "group_idx", "has_changed", "is_whole")

    def __init__(self) -> None:
        self.group_idx = 0
        self.is_whole = True
        self.has_changed = False
        self._block_size: int | None = None
        self._tails: Counter[int] = Counter()  # number of stores of each block without a Removed since

    def data_of(self, event: RouterEvent, ranks: Mapping[WorkerRank, Rank]) -> EventData | None:
        """Return the part of an event that is about blocks of the group; None if no part is.

        Args:
            event: an event of the worker and rank.
            ranks: the blocks that each worker and rank holds on the device.
        """
        data: EventData = event.event.data
        self.has_changed = False
        if isinstance(data, Cleared):
            self._tails.clear()
            return data
        group_idx, rank = group_of(event.extra), ranks.get((event.worker_id, event.event.dp_rank))
        if isinstance(data, Stored):
            is_whole = is_attention_group(event.extra)
            if group_idx == self.group_idx:
                self.is_whole = is_whole
            elif is_whole and not (self.is_whole and rank is not None):
                self.group_idx, self.is_whole, self.has_changed = group_idx, True, True
                rank = None
        if group_idx != self.group_idx:
            return None
        if isinstance(data, Removed):
            return Removed(self._without_tails(data.block_hashes)) if self._tails else data
        if isinstance(data, SparseStored) or (isinstance(data, Stored) and self._names_alone(event, data, rank)):
            return None
        return data

    def _names_alone(self, event: RouterEvent, data: Stored, rank: Rank | None) -> bool:
        """Whether the blocks of a Stored are outside every chain: a prompt's tail, or window blocks whose parent is
        not held.
        """
        if event.storage_tier is not StorageTier.DEVICE:
            return False
        parent, tokens = data.parent_hash, event.token_ids
        missing = parent is not None and (rank is None or parent not in rank.blocks)
        if not self.is_whole:
            return missing
        if is_tail(len(data.block_hashes), tokens, self._block_size, parent_is_missing=missing):
            self._tails.update(data.block_hashes)
            return True
        if tokens:
            self._block_size = max(len(tokens[0]), self._block_size or 0)
        return False

    def _without_tails(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        left = []
        for block in blocks:
            if block not in self._tails:
                left.append(block)
            elif self._tails[block] > 1:
                self._tails[block] -= 1
            else:
                del self._tails[block]
        return tuple(left)
