"""The stream of one worker and rank: its events, which blocks are held, and which of them are unknown.

One subject: the state of a stream between two events. The ledger judges what changes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise, repeat
from typing import Final

from pytest_kvmock.events import Cleared, RouterEvent, SparseStored, StorageTier, Stored, StreamKey
from pytest_kvmock.hygiene.history import Below, History, Links
from pytest_kvmock.hygiene.problem import Problem
from pytest_kvmock.hygiene.stream_spec import UNKNOWN, StreamSpec
from pytest_kvmock.prompt_keys import group_of, is_attention_group, is_of_group, is_tail

LAST: Final = 2**64
"""Stands for the block after another where there is none."""
FORK: Final = 2**64 + 1
"""Stands for the block after another where there are several; see `Stream.forks`."""


_OF_A_GROUP: Final = (
    *(
        "events",
        "anew",
        "tails",
        "second_names",
        "block_size",
        "on_device",
        "_read",
        "_last_stored",
        "_last_removed",
        "_cleared",
    ),
    *("device", "tiers", "copies", "forks", "unmarked", "implied", "desync", "restored", "doubled", "drifted"),
    *("moved", "gone", "untold"),
    *("removed_but_resident", "orphaned", "links", "below", "unconfirmed", "emptied"),
)
"""The attributes of a `Stream` that are those of one cache group."""


class Desync:
    """A stream out of sync: events are missing since `cause`, and a block is unknown until an event names it again.

    Attributes:
        cause: what shows that they are missing.
        resynced: the blocks of the device that events have named since.
        below: those of the tiers below, by tier: an event says nothing of a block in another tier.
    """

    __slots__ = ("below", "cause", "resynced")

    def __init__(self, cause: Problem) -> None:
        self.cause = cause
        self.resynced: set[int] = set()
        self.below: dict[StorageTier, set[int]] = {}

    def named(self, tier: StorageTier) -> set[int]:
        """The blocks of a tier that events have named since."""
        return self.resynced if tier is StorageTier.DEVICE else self.below.setdefault(tier, set())


class Stream(History):
    """The events of one worker and rank, and the blocks that are held according to them.

    Attributes:
        spec: what is known of its engine.
        unpublished: the blocks that the next Removed below the device names and no Stored did (`entries.Unpublished`).
        hash_chain: how the engine names blocks.
        tiers: per tier what is held: each block, and the child that was stored after it, `LAST` or `FORK`. That costs
            nothing to keep, and shows at a Removed which children the block may still have. Below the device, where
            that is no matter, it is always `LAST`.
        device: the device tier.
        forks: children of blocks that have several on the device, and of those that are not held there.
        unmarked: blocks with an entry in `forks` and no mark in `device`, because they are not held.
        copies: per tier the blocks of which several copies are held, and how many beyond the first.
        implied: parents that a Stored of the device named though no event had stored them there: taken as held, so
            reported once.
        restarts: why event ids began anew, each time, also where the events before are dropped (see `recover`).
        emptied: a sample of the blocks that the last Cleared removed: of each tier the first, one in the middle, and the
            last.
        next_id: the id that is due; None when any may come.
        holes: ids that did not arrive.
        skipped: ids that the worker left out when it published, of which no gap was reported yet.
        late: ids that did not arrive either, but were part of a recovery since (see `Ledger.recovered`).
        second_names: how many names of prompts' tails are held on the device.
        unconfirmed: every orphaned_child and over_capacity since the last comparison with the engine, with its tier.
        desync: open while blocks are unknown.
        restored: blocks of the event before, a Stored, that were held already; each with the cause of the desync that
            made it unknown then, or with what left it resident after a Removed, or None.
        doubled: the duplicate_store that the event before was, if it was one.
        removed_but_resident: blocks that the engine holds though a Removed named them, each with the evicted_and_restored of it.
        orphaned: blocks of the device whose parent was removed before them, still held or not, each with its orphaned_child.
        group_idx: of which cache group its blocks are; a hybrid model has several, each with copies of its own. None: it has none
            of full attention, as far as is known.
        groups: the other cache groups of the worker and rank by their numbers, each with the blocks that it holds. Event ids
            are counted over all of them.
        links: which blocks were stored after which, for chains through those.
        below: which blocks were stored after which below the device.
        overfull: the tiers that hold more than the engine has there, where that was reported.
        moved: blocks of `device` that an Updated has moved to the host, from where they may come back.
        gone: blocks of `device` that their engine has dropped without a Removed, as it says itself.
        untold: the engine drops blocks without a word, and does not say which: how many it holds is not known.
        drifted: the blocks that were reported to differ from what the engine holds, each with its tier.
    """

    __slots__ = (
        "below",
        "copies",
        "desync",
        "device",
        "doubled",
        "dp_rank",
        "drifted",
        "emptied",
        "forks",
        "gone",
        "group_idx",
        "groups",
        "hash_chain",
        "holes",
        "implied",
        "last",
        "late",
        "links",
        "moved",
        "next_id",
        "orphaned",
        "overfull",
        "removed_but_resident",
        "restarts",
        "restored",
        "second_names",
        "skipped",
        "spec",
        "tiers",
        "unconfirmed",
        "unmarked",
        "unpublished",
        "untold",
        "worker_id",
    )

    def __init__(self, key: StreamKey, spec: StreamSpec = UNKNOWN, *, first_id: int | None = None) -> None:
        super().__init__(spec.block_size)
        self.worker_id, self.dp_rank = key
        self.spec = spec
        self.next_id = first_id
        self.hash_chain = spec.chain()
        self.unpublished: frozenset[int] = frozenset()
        self.device: dict[int, int] = {}
        self.tiers: dict[StorageTier, dict[int, int]] = {StorageTier.DEVICE: self.device}
        self.forks: dict[int, set[int]] = {}
        self.group_idx: int | None = 0
        self.groups: dict[int, Stream] = {}
        self.unmarked: set[int] = set()
        self.copies: dict[StorageTier, dict[int, int]] = {}
        self.implied: set[int] = set()
        self.restarts: tuple[str, ...] = ()
        self.holes: list[range] = []
        self.late: list[range] = []
        self.skipped: list[range] = []
        self.last: RouterEvent | None = None
        self.desync: Desync | None = None
        self.restored: dict[int, Problem | None] = {}
        self.doubled: Problem | None = None
        self.removed_but_resident: dict[int, Problem] = {}
        self.orphaned: dict[int, Problem] = {}
        self.links = Links()
        self.below = Below()
        self.unconfirmed: list[tuple[StorageTier, Problem]] = []
        self.second_names = 0
        self.overfull: set[StorageTier] = set()
        self.moved: set[int] = set()
        self.gone: set[int] = set()
        self.untold = False
        self.drifted: set[tuple[StorageTier, int]] = set()
        self.emptied: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether nothing is known of it but what it holds: no fault, and nothing that the next event may undo."""
        return not (
            self.unpublished
            or self.restored
            or self.removed_but_resident
            or self.drifted
            or self.implied
            or self.desync
            or self.second_names
            or self.moved
            or self.gone
        )

    def names_alone(self, event: RouterEvent) -> bool:
        """Whether of the blocks of a Stored no more than the names counts, as nothing hangs on their parents and tokens.

        So it is in a sparse cache group, and of a prompt's tail.
        """
        data, tokens = event.event.data, event.token_ids
        if isinstance(data, SparseStored) or not is_attention_group(event.extra):
            return True
        if not tokens or not (self.groups or is_of_group(event.extra)):
            return False
        assert isinstance(data, Stored)
        missing = data.parent_hash is not None and data.parent_hash not in self.device
        if is_tail(len(data.block_hashes), tokens, self.block_size, parent_is_missing=missing):
            self.tails.update(data.block_hashes)
            return True
        if self.spec.block_size is None:
            self.block_size = max(len(tokens[0]), self.block_size or 0)
        return False

    def held(self, tier: StorageTier) -> dict[int, int]:
        """The blocks that are held in a tier: see `tiers`."""
        return self.device if tier is StorageTier.DEVICE else self.tiers.setdefault(tier, {})

    def last_below(self, block: int) -> int:
        """The block at which the longest chain ends that goes on from a block through those held below the device.

        It is the block itself where none does.
        """
        if len(self.tiers) == 1:
            return block
        lower = [held for tier, held in self.tiers.items() if tier is not StorageTier.DEVICE]
        self.below.read(self.events)
        return self.below.deepest(
            block, lambda parent, child: any(child in held for held in lower) and self.parent(child) == parent
        )

    def add(self, held: dict[int, int], hashes: tuple[int, ...], parent: int | None) -> None:
        """Hold blocks of which none is held yet, under a parent that is: nearly every Stored."""
        held.update(pairwise(hashes))
        if hashes:
            held[hashes[-1]] = LAST
            if parent is not None:
                self._link(held, parent, hashes[0])
        if self.unmarked:
            for block in self.unmarked.intersection(hashes):
                self._link(held, block, FORK)

    def add_again(self, hashes: tuple[int, ...], parent: int | None, again: set[int]) -> None:
        """Hold any blocks on the device, under any parent.

        Args:
            hashes: the blocks, in order; some may be named twice.
            parent: the block before the first.
            again: those that are held already.
        """
        held = self.device
        before = {block: held[block] for block in again}
        self.add(held, hashes, parent)
        for block, child in (*before.items(), *pairwise(hashes)):
            self._link(held, block, child)
        self._add_copies(StorageTier.DEVICE, hashes, again)

    def add_names(self, tier: StorageTier, hashes: tuple[int, ...], again: set[int]) -> None:
        """Hold blocks of which no more than the names is known, or that are below the device; some, `again`, are held already."""
        self.held(tier).update(dict.fromkeys(hashes, LAST))
        self._add_copies(tier, hashes, again)

    def take_names(self, event: RouterEvent) -> None:
        """Take an event that names blocks, and of which nothing else is judged."""
        data, tier = event.event.data, event.storage_tier
        assert not isinstance(data, Cleared)
        hashes = data.block_hashes
        self.add_names(tier, hashes, self.held(tier).keys() & hashes)
        if tier is StorageTier.DEVICE and self.tails:
            self.second_names += sum(block in self.tails for block in hashes)
        self.restored = {}
        self.events.append(event)
        self.mark_named(hashes, tier)
        if self.desync is not None:
            self.desync.named(tier).update(hashes)

    def _add_copies(self, tier: StorageTier, hashes: tuple[int, ...], again: set[int]) -> None:
        """Count the copies beyond the first, where they are counted."""
        if self.spec.residency == "counted" and (again or len(set(hashes)) < len(hashes)):
            copies, seen = self.copies.setdefault(tier, {}), again.copy()
            for block in hashes:
                if block in seen:
                    copies[block] = copies.get(block, 0) + 1
                seen.add(block)

    def _link(self, held: dict[int, int], parent: int, child: int) -> None:
        """Record a child; `FORK` stands for those that `forks` has."""
        known = held.get(parent)
        if child in (known, LAST):
            return
        if known is None:
            self.forks.setdefault(parent, set()).add(child)
            self.unmarked.add(parent)
        elif child != FORK and (known == LAST or (known != FORK and known not in held)):
            held[parent] = child
        else:
            self.forks.setdefault(parent, set()).update({known, child} - {LAST, FORK})
            held[parent] = FORK
            self.unmarked.discard(parent)

    def drop_leaf(self, block: int) -> bool:
        """Remove a block from the device, if one copy of it is held there and no child of it; return whether it was."""
        held = self.device
        child = held.get(block)
        if child is None or (child != LAST and self._has_child(block, child)):
            return False
        if self.copies and block in self.copies.get(StorageTier.DEVICE, ()):
            return False
        del held[block]
        if child == FORK:
            self.forks.pop(block, None)
        return True

    def _has_child(self, block: int, child: int) -> bool:
        """Whether a child of a block is held on the device, and is not gone without a Removed."""
        children = self.forks.get(block, ()) if child == FORK else (child,)
        return any(each in self.device and each not in self.gone for each in children)

    def remove(self, tier: StorageTier, held: dict[int, int], blocks: tuple[int, ...]) -> tuple[int | None, ...]:
        """Remove blocks from a tier, or one copy of each; return what `held` had of each: None if it was not there."""
        if tier is StorageTier.DEVICE:
            if self.second_names:
                self.second_names -= sum(block in self.tails and block in held for block in blocks)
            self.moved.difference_update(blocks)
            self.gone.difference_update(blocks)
        copies = self.copies.get(tier) if self.copies else None
        if not copies or copies.keys().isdisjoint(blocks):
            return tuple(map(held.pop, blocks, repeat(None)))
        out: list[int | None] = []
        for block in blocks:
            left = copies.pop(block, 0)
            if left > 1:
                copies[block] = left - 1
            out.append(LAST if left else held.pop(block, None))
        return tuple(out)

    def take_gone(self, blocks: Iterable[int]) -> None:
        """Take what an engine says that it has dropped without a Removed; a router holds it all the same."""
        self.gone.update(block for block in blocks if block in self.device)

    def give_way(self, hashes: tuple[int, ...], *, is_told: bool) -> None:
        """Drop what an engine has dropped without a word and stores again.

        Args:
            hashes: the blocks of a Stored.
            is_told: whether it says what it has dropped; else a block that has no child may be such.
        """
        self.untold = not is_told
        for block in self.gone.intersection(hashes) if is_told else hashes:
            if self.drop_leaf(block):
                self.gone.discard(block)
                self.moved.discard(block)

    def move(self, block: int, level: int) -> None:
        """Move a block to the host (level 1), or back to the device (0)."""
        if level:
            self.held(StorageTier.HOST_PINNED)  # from now on there is one
            self.moved.add(block)
        else:
            self.moved.discard(block)

    def in_tier(self, tier: StorageTier) -> Iterable[int]:
        """The blocks that are held in a tier, those that moved there or away counted."""
        if not self.moved:
            return self.held(tier)
        if tier is StorageTier.DEVICE:
            return [block for block in self.device if block not in self.moved]
        return [*self.held(tier), *self.moved] if tier is StorageTier.HOST_PINNED else self.held(tier)

    def orphans(self, block: int, child: int | None) -> list[int]:
        """The children of a removed block that are held on the device; none while it is held there, by a copy.

        Args:
            block: the block that was removed there.
            child: what `device` had of it.
        """
        held = self.device
        if block in held or (block not in self.forks and child not in held):
            return []
        children = self.forks.pop(block, set())
        self.unmarked.discard(block)
        if child is not None:
            children.add(child)
        left = sorted(c for c in children if c in held and self.parent(c) == block)
        if left:  # for the next time it is stored and removed
            self.forks[block] = set(left)
            self.unmarked.add(block)
        return left

    def count(self, tier: StorageTier) -> int:
        """How many blocks are held in a tier, every copy counted, in all cache groups; second names are no blocks."""
        names = len(self.held(tier)) + sum(self.copies.get(tier, {}).values())
        if tier is StorageTier.DEVICE:
            names -= self.second_names + len(self.moved) + len(self.gone)
        elif tier is StorageTier.HOST_PINNED:
            names += len(self.moved)
        return names + sum(part.count(tier) for part in self.groups.values())

    def begin_anew(self, why: str) -> None:
        """Record that event ids begin anew from here on; `why` is a key of `EVENTS_BEGAN_ANEW`."""
        self.anew.append((len(self.events), why))
        self.restarts = (*self.restarts, why)
        self.skipped = []
        for part in self.groups.values():
            part.begin_anew(why)

    def mark_named(self, blocks: Iterable[int], tier: StorageTier) -> None:
        """Mark blocks of a tier as named by an event: no longer drifted, implied or removed_but_resident there."""
        if self.drifted:
            self.drifted.difference_update((tier, block) for block in blocks)
        if tier is not StorageTier.DEVICE:
            return
        if self.implied:
            self.implied.difference_update(blocks)
        if self.removed_but_resident:
            for block in blocks:
                self.removed_but_resident.pop(block, None)

    def clear(self, *, below: bool = True) -> None:
        """Clear the stream: nothing is held on the device, nor, if `below`, in the tiers below it, and no block is unknown."""
        cleared = [tier for tier in self.tiers if below or tier is StorageTier.DEVICE]
        left = {tier: copies for tier, copies in self.copies.items() if tier not in cleared}
        samples = [list(self.tiers[tier]) for tier in cleared if self.tiers[tier]]
        picked = [{blocks[0], blocks[len(blocks) // 2], blocks[-1]} for blocks in samples]
        self.emptied = tuple(dict.fromkeys(block for some in picked for block in some))
        for tier in cleared:
            self.tiers[tier].clear()
        for group in (
            self.forks,
            self.unmarked,
            self.copies,
            self.implied,
            self.drifted,
            self.moved,
            self.gone,
            self.restored,
            self.removed_but_resident,
        ):
            group.clear()
        for part in self.groups.values():
            part.clear(below=below)
        self.copies.update(left)
        self.second_names = 0
        self.orphaned = {}  # a new one: the old one is shared
        self.unconfirmed = []
        self.desync = self.doubled = None

    def take_skipped(self, missing: range) -> tuple[list[range], list[range]]:
        """Split missing ids into those that were lost, and those that the worker left out."""
        skipped, self.skipped = self.skipped, [ids for ids in self.skipped if ids.start >= missing.stop]
        left_out = [range(max(ids.start, missing.start), min(ids.stop, missing.stop)) for ids in skipped]
        left_out = sorted(filter(None, left_out), key=lambda ids: ids.start)
        starts = [missing.start, *(ids.stop for ids in left_out)]
        stops = [*(ids.start for ids in left_out), missing.stop]
        return [ids for ids in map(range, starts, stops) if ids], left_out

    def take_hole(self, event_id: int) -> bool:
        """Take an id out of the missing ones; return whether it was there."""
        return _take(self.holes, event_id)

    def is_late(self, event_id: int) -> bool:
        """Whether an id is one of the recovered ones, and had not arrived by itself until now."""
        return event_id != self.next_id and any(event_id in ids for ids in self.late)

    def take_late(self, event_id: int) -> bool:
        """Take an id out of the recovered ones; return whether it was there."""
        return _take(self.late, event_id)

    def part(self, group_idx: int) -> Stream:
        """The blocks of a cache group; those of this stream itself where nothing is known of such a group."""
        return self if group_idx == self.group_idx else self.groups.get(group_idx, self)

    def part_of(self, event: RouterEvent) -> Stream:
        """The blocks of the cache group that an event is about, of which nothing is held at first.

        Those of the attention group are this stream's own, as routers ask for them. That is group 0, or, where nothing is stored
        there or no whole prefix kept, the first that keeps one.
        """
        extra, group_idx = event.extra, group_of(event.extra)
        if isinstance(event.event.data, Stored):
            is_whole = is_attention_group(extra)
            if group_idx == self.group_idx and not is_whole:
                self._exchange(None)
            elif group_idx != self.group_idx and is_whole and not self.stored_at:
                self._exchange(group_idx)
        return self if group_idx == self.group_idx else self._group(group_idx)

    def _group(self, group_idx: int) -> Stream:
        """The blocks of another cache group. They have no number of their own: there is one pool for all groups."""
        part = self.groups.get(group_idx)
        if part is None:
            part = self.groups[group_idx] = self.fresh()
            part.group_idx, part.spec = group_idx, replace(self.spec, num_blocks=None, tier_blocks=None)
            part.hash_chain = self.hash_chain
            part.desync = None if self.desync is None else Desync(self.desync.cause)
        return part

    def _exchange(self, group_idx: int | None) -> None:
        """Have the blocks of another cache group as this stream's own; None: of none, as the attention group is not known."""
        taken = None if group_idx is None else self._group(group_idx)
        if self.group_idx is not None:
            self._exchange_with(self._group(self.group_idx))
        if taken is not None:
            self._exchange_with(taken)
            del self.groups[taken.group_idx]  # type: ignore[arg-type]  # a part has a number
        self.group_idx = group_idx

    def _exchange_with(self, part: Stream) -> None:
        for name in _OF_A_GROUP:
            ours, theirs = getattr(self, name), getattr(part, name)
            setattr(self, name, theirs)
            setattr(part, name, ours)

    def fresh(self) -> Stream:
        """Return an empty stream of the same worker and rank."""
        return Stream((self.worker_id, self.dp_rank), self.spec)

    def copy(self) -> Stream:
        """Return a copy that holds the same, without what is missing of it."""
        copy = self.fresh()
        copy.group_idx, copy.block_size = self.group_idx, self.block_size
        copy.recover(self, range(0))
        return copy

    def twin(self) -> Stream:
        """Return a copy in which the same is missing, too."""
        twin = self.copy()
        twin.next_id, twin.restarts = self.next_id, self.restarts
        twin.hash_chain = deepcopy(self.hash_chain)
        twin.holes, twin.late, twin.skipped = list(self.holes), list(self.late), list(self.skipped)
        if self.desync is not None:
            twin.desync = Desync(self.desync.cause)
            twin.desync.resynced |= self.desync.resynced
            twin.desync.below = {tier: set(named) for tier, named in self.desync.below.items()}
        return twin

    def forget_history(self) -> None:
        """Drop the events that no block which is held was last stored by."""
        needed = {*self.implied, *self.forks, *(block for blocks in self.tiers.values() for block in blocks)}
        self.forget(needed)
        if hasattr(self.hash_chain, "forget"):  # one that keeps what it was shown
            self.hash_chain.forget(needed)
        self.links, self.below = Links(), Below()
        for part in self.groups.values():
            part.forget_history()

    def recover(self, published: Stream, ids: range) -> None:
        """Take over what the worker has published, now that it was asked for some ids.

        Args:
            published: all that it has published, in order.
            ids: the ids that it was asked for, up to the newest. The desync stays where an id before them is missing.
        """
        desync, removed_but_resident, orphaned, unconfirmed = (
            self.desync,
            dict(self.removed_but_resident),
            self.orphaned,
            self.unconfirmed,
        )
        self.clear()
        self.unconfirmed = unconfirmed
        for tier, held in published.tiers.items():
            self.tiers.setdefault(tier, {}).update(held)
        self.implied |= published.implied
        self.forks = {block: set(children) for block, children in published.forks.items()}
        self.unmarked |= published.unmarked
        self.copies = {tier: dict(copies) for tier, copies in published.copies.items()}
        self.restored, self.last = dict(published.restored), published.last
        self.removed_but_resident = {
            block: removed_but_resident.get(block, problem) for block, problem in published.removed_but_resident.items()
        }
        self.orphaned = {block: orphaned.get(block, problem) for block, problem in published.orphaned.items()}
        self.events, self.emptied, self.anew = list(published.events), published.emptied, list(published.anew)
        self.group_idx, self.tails = published.group_idx, set(published.tails)
        self.second_names = published.second_names
        self.moved, self.gone, self.untold = set(published.moved), set(published.gone), published.untold
        self.groups = {group: part.copy() for group, part in published.groups.items()}
        self._reset_index()
        self.links = Links()
        self.below = Below()
        due = 0 if self.next_id is None else self.next_id
        missing = [*self.holes, range(due, ids.stop)]
        before = [range(hole.start, min(hole.stop, ids.start)) for hole in missing]
        answered = [range(max(hole.start, ids.start), hole.stop) for hole in missing]
        self.holes = [hole for hole in before if hole]
        self.late += [part for part in answered if part]
        self.next_id = ids.stop
        self.desync = desync if self.holes else None


def _take(ranges: list[range], event_id: int) -> bool:
    """Take an id out of ranges; return whether it was there."""
    for i, ids in enumerate(ranges):
        if event_id in ids:
            parts = (range(ids.start, event_id), range(event_id + 1, ids.stop))
            ranges[i : i + 1] = [part for part in parts if part]
            return True
    return False
