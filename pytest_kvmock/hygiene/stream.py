"""What one worker and rank has said, and what is unknown of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import TypeAlias

from pytest_kvmock.events import Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.hygiene.problem import Problem
from pytest_kvmock.hygiene.text import block_text

StreamKey: TypeAlias = tuple[int, int]
"""(worker_id, dp_rank): who counts event ids and holds blocks by itself."""


class Wound:
    """Blocks of one stream are unknown since `cause`, but those that an event has named since."""

    __slots__ = ("cause", "named")

    def __init__(self, cause: Problem) -> None:
        self.cause = cause
        self.named: set[int] = set()


class Stream:
    """What one worker and rank has said.

    Attributes:
        tiers: per tier, block hash to local hash of what is held.
        implied: parents that a Stored named though nothing had stored them: believed, so reported once.
        said: every Stored and Removed, in order: its history, which `origin` and `gone` look up.
        emptied: the last Cleared's choice of the blocks that it emptied: the first, one amid, and the last.
        next_id: the id that is due; None when any may come.
        holes: ids that did not arrive.
        late: ids that did not arrive either, but were asked for and told since (see `Ledger.recovered`).
        wound: open while blocks are unknown.
    """

    __slots__ = (
        "_gone",
        "_origin",
        "_read",
        "block_size",
        "dp_rank",
        "drifted",
        "emptied",
        "holes",
        "implied",
        "last",
        "late",
        "next_id",
        "prefix_closed",
        "said",
        "tiers",
        "worker_id",
        "wound",
    )

    def __init__(
        self, key: StreamKey, *, first_id: int | None, block_size: int | None = None, prefix_closed: bool = True
    ) -> None:
        self.worker_id, self.dp_rank = key
        self.next_id = first_id
        self.block_size = block_size
        self.prefix_closed = prefix_closed
        self.tiers: dict[StorageTier, dict[int, int]] = {StorageTier.DEVICE: {}}
        self.implied: set[int] = set()
        self.said: list[RouterEvent] = []
        self._read = 0
        self._origin: dict[int, RouterEvent] = {}
        self._gone: dict[int, RouterEvent] = {}
        self.holes: list[range] = []
        self.late: list[range] = []
        self.last: RouterEvent | None = None
        self.wound: Wound | None = None
        self.drifted: set[int] = set()
        self.emptied: tuple[int, ...] = ()

    def holds(self, block: int) -> bool:
        """Whether the events say that the block is held, in any tier."""
        return any(block in held for held in self.tiers.values()) or block in self.implied

    @property
    def origin(self) -> dict[int, RouterEvent]:
        """The event that last stored a block, for every block ever stored."""
        self._read_history()
        return self._origin

    @property
    def gone(self) -> dict[int, RouterEvent]:
        """The event that last removed a block."""
        self._read_history()
        return self._gone

    def _read_history(self) -> None:
        """Look up by block what was said since the last time; where nobody asks, it costs nothing."""
        for event in self.said[self._read :]:
            data = event.event.data
            if isinstance(data, Stored):
                self._origin.update(zip(data.block_hashes, repeat(event)))
            elif isinstance(data, Removed):
                self._gone.update(zip(data.block_hashes, repeat(event)))
        self._read = len(self.said)

    def settle(self, blocks: Iterable[int]) -> None:
        """An event has said what these are: no longer implied by another, and no longer adrift."""
        if self.implied:
            self.implied.difference_update(blocks)
        if self.drifted:
            self.drifted.difference_update(blocks)

    def forget(self) -> None:
        """Nothing is held any more, and that is known."""
        device = list(self.tiers[StorageTier.DEVICE])
        self.emptied = tuple({device[0], device[len(device) // 2], device[-1]}) if device else ()
        for held in self.tiers.values():
            held.clear()
        self.implied.clear()
        self.drifted.clear()
        self.wound = None

    def take_hole(self, event_id: int) -> bool:
        """Whether the id was missing until now; it is not any more."""
        return _take(self.holes, event_id)

    def take_late(self, event_id: int) -> bool:
        """Whether the id was told by a recovery, and has not arrived by itself until now."""
        return event_id != self.next_id and _take(self.late, event_id)

    def fresh(self) -> Stream:
        """A stream of the same worker and rank that has said nothing yet."""
        key = (self.worker_id, self.dp_rank)
        return Stream(key, first_id=None, block_size=self.block_size, prefix_closed=self.prefix_closed)

    def copy(self) -> Stream:
        """What it has said so far, without what is missing of it."""
        copy = self.fresh()
        copy.recover(self, range(0))
        return copy

    def recover(self, said: Stream, ids: range) -> None:
        """Hold what the worker has said of itself, now that it was asked for some ids.

        Args:
            said: all that it has said, in the order in which it did.
            ids: what it was asked for, up to the newest. The wound stays where an id before them is missing.
        """
        self.tiers = {tier: dict(held) for tier, held in said.tiers.items()}
        self.implied = set(said.implied)
        self.said, self.emptied = list(said.said), said.emptied
        self._read = 0
        self._origin, self._gone = {}, {}
        self.drifted.clear()
        due = 0 if self.next_id is None else self.next_id
        missing = [*self.holes, range(due, ids.stop)]
        before = [range(hole.start, min(hole.stop, ids.start)) for hole in missing]
        told = [range(max(hole.start, ids.start), hole.stop) for hole in missing]
        self.holes = [hole for hole in before if hole]
        self.late += [part for part in told if part]
        self.next_id = ids.stop
        if not self.holes:
            self.wound = None

    def chain(self, block: int) -> list[int]:
        """Block hashes from the root to `block`, as last stored; from where history begins if no root is known."""
        out: list[int] = []
        seen: set[int] = set()
        current: int | None = block
        while current is not None and current not in seen:
            event = self.origin.get(current)
            if event is None:
                break
            data = event.event.data
            assert isinstance(data, Stored)
            upto = data.block_hashes.index(current) + 1
            run = data.block_hashes[:upto]
            seen.update(run)
            out[:0] = run
            current = data.parent_hash
        return out

    def parent(self, block: int) -> int | None:
        """The block before `block`, as last stored; None for a root and for what was never stored."""
        event = self.origin.get(block)
        if event is None:
            return None
        data = event.event.data
        assert isinstance(data, Stored)
        index = data.block_hashes.index(block)
        return data.block_hashes[index - 1] if index else data.parent_hash

    def local_hash(self, block: int) -> int:
        """Local hash of a block that was stored."""
        data = self.origin[block].event.data
        assert isinstance(data, Stored)
        return data.tokens_hashes[data.block_hashes.index(block)]

    def tokens(self, block: int) -> tuple[int, ...] | None:
        """Token ids of a block that was stored; None where they did not come."""
        event = self.origin[block]
        data = event.event.data
        assert isinstance(data, Stored)
        if event.token_ids is None:
            return None
        return tuple(event.token_ids[data.block_hashes.index(block)])

    def history(self, block: int) -> str:
        """What the stream said of a block, for messages."""
        if block in self.implied:
            return f"block {block_text(block)} is held as a parent only"
        tiers = [tier.value for tier, held in self.tiers.items() if block in held]
        if tiers:
            where = f" in {', '.join(tiers)}" if len(self.tiers) > 1 else ""
            return f"block {block_text(block)} is held{where} since event {self.origin[block].event.event_id}"
        removed, stored = self.gone.get(block), self.origin.get(block)
        if removed is not None:
            return f"block {block_text(block)} was removed by event {removed.event.event_id}"
        if stored is not None:
            return f"block {block_text(block)}, stored by event {stored.event.event_id}, was cleared, or forgotten with its worker"
        return f"block {block_text(block)} was never stored"


def _take(ranges: list[range], event_id: int) -> bool:
    """Take an id out of ranges; whether it was there."""
    for i, ids in enumerate(ranges):
        if event_id in ids:
            parts = (range(ids.start, event_id), range(event_id + 1, ids.stop))
            ranges[i : i + 1] = [part for part in parts if part]
            return True
    return False
