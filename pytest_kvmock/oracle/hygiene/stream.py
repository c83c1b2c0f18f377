"""The stream of one worker and rank: its events, the held blocks, and the unknown blocks.

One subject: the state of a stream between two events. The ledger judges the events.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise, repeat
from typing import Final

from pytest_kvmock.oracle.hygiene.history import Below, History, Links
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.hygiene.stream_spec import UNKNOWN, StreamSpec
from pytest_kvmock.values.events import Cleared, RouterEvent, SparseStored, StorageTier, Stored, StreamKey
from pytest_kvmock.values.prompt_keys import (
    group_of,
    is_attention_group,
    is_of_group,
    is_report,
    is_tail,
    may_be_sparse,
)

LAST: Final = 2**64
"""Mark of a block without a child."""
FORK: Final = 2**64 + 1
"""Mark of a block with several children; see `Stream.forks`."""


_OF_A_GROUP: Final = (
    *(
        "events",
        "resets",
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
    *("moved", "gone", "untold", "doubtful"),
    *("removed_but_resident", "orphaned", "links", "below", "unconfirmed", "emptied"),
)
"""The attributes of a `Stream` that belong to one cache group."""


class Desync:
    """The state of a stream that is out of sync: events are missing since `cause`, and a block is unknown until an
    event names it again.

    Attributes:
        cause: the problem that shows this.
        resynced: the device blocks that events have named since then.
        below: the same for each lower tier, as an event counts only for its own tier.
    """

    __slots__ = ("below", "cause", "resynced")

    def __init__(self, cause: Problem) -> None:
        self.cause = cause
        self.resynced: set[int] = set()
        self.below: dict[StorageTier, set[int]] = {}

    def named(self, tier: StorageTier) -> set[int]:
        """Return the blocks of a tier that events have named since then."""
        return self.resynced if tier is StorageTier.DEVICE else self.below.setdefault(tier, set())


class Stream(History):
    """The events of one worker and rank, and the blocks that they leave held.

    Attributes:
        spec: the known properties of its engine.
        unpublished: blocks that the next Removed below the device names although no Stored did (`entries.Unpublished`).
        hash_chain: the engine's rule for names.
        tiers: by tier, the held blocks, each with the child that was stored after it, or `LAST` or `FORK`. This is
            cheap, and at a Removed it gives the children that the block may still have. Below the device, where
            children do not matter, the value is always `LAST`.
        device: the device tier.
        forks: children of blocks with several children on the device, and of blocks that are not held there.
        unmarked: blocks with an entry in `forks` but no mark in `device`, because they are not held.
        copies: by tier, blocks with several held copies, and the number of copies after the first.
        implied: parents that a Stored on the device named although no event had stored them there. They count as held,
            so that each is reported once.
        restarts: the reason for each time that event ids began again, also if the earlier events were dropped (see
            `recover`).
        emptied: a sample of the blocks that the last Cleared removed: the first, a middle one and the last of each
            tier.
        next_id: the id that is due; None: any.
        holes: ids that did not arrive.
        skipped: ids that the worker left out and that were not reported as a gap yet.
        late: ids that did not arrive and were brought by a recovery (see `recover`).
        second_names: number of held names of prompts' tails on the device.
        unconfirmed: each orphaned_child and over_capacity since the last comparison with the engine, with its tier.
        desync: set while blocks are unknown.
        restored: blocks of the previous event, a Stored, that were held already. Each has the cause of the desync that
            made it unknown, or the problem that left it resident after a Removed, or None.
        doubled: the duplicate_store of the previous event, if it had one.
        removed_but_resident: blocks that the engine holds although a Removed named them, each with its
            evicted_and_restored.
        orphaned: device blocks whose parent was removed before them, held or not, each with its orphaned_child.
        group_idx: number of the cache group of its blocks; each group of a hybrid model has separate copies. None if no
            full attention group is known.
        groups: the other cache groups of the worker and rank, by number, each with its held blocks. All groups share
            the event ids.
        links: the children of each block, for chains of local hashes.
        below: the children of each block below the device.
        overfull: tiers that were reported to exceed their capacity.
        moved: blocks of `device` that an Updated moved to the host; they may come back.
        gone: blocks of `device` that the engine reports as dropped without a Removed.
        untold: whether the engine drops blocks without an event and without a report, so that the number of its blocks
            is unknown.
        doubtful: by block, the number of Stored that may be a full report or a copy; up to this many additional
            Removed may come (`StreamSpec.full_reports`).
        drifted: blocks that were reported to differ from the engine, each with its tier.
    """

    __slots__ = (
        "below",
        "copies",
        "desync",
        "device",
        "doubled",
        "doubtful",
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
        self.doubtful: dict[int, int] = {}
        self.drifted: set[tuple[StorageTier, int]] = set()
        self.emptied: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it has no state other than held blocks: no open problem, and nothing that the next event may undo."""
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
        """Whether only the names of a Stored's blocks matter, not their parents and tokens.

        This is true in a sparse cache group, and for a prompt's tail.
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
        """Return the held blocks of a tier; see `tiers`."""
        return self.device if tier is StorageTier.DEVICE else self.tiers.setdefault(tier, {})

    def last_below(self, block: int) -> int:
        """Return the end of the longest chain that follows a block in the tiers below the device.

        If there is no such chain, return the block itself.
        """
        if len(self.tiers) == 1:
            return block
        lower = [held for tier, held in self.tiers.items() if tier is not StorageTier.DEVICE]
        self.below.read(self.events)
        return self.below.deepest(
            block, lambda parent, child: any(child in held for held in lower) and self.parent(child) == parent
        )

    def add(self, held: dict[int, int], hashes: tuple[int, ...], parent: int | None) -> None:
        """Hold new blocks under a held parent, the usual case of a Stored."""
        held.update(pairwise(hashes))
        if hashes:
            held[hashes[-1]] = LAST
            if parent is not None:
                self._link(held, parent, hashes[0])
        if self.unmarked:
            for block in self.unmarked.intersection(hashes):
                self._link(held, block, FORK)

    def add_again(self, hashes: tuple[int, ...], parent: int | None, again: set[int]) -> None:
        """Hold any device blocks under any parent.

        Args:
            hashes: the blocks, in order; some may be named twice.
            parent: the block before the first.
            again: the blocks that are held already.
        """
        held = self.device
        before = {block: held[block] for block in again}
        self.add(held, hashes, parent)
        for block, child in (*before.items(), *pairwise(hashes)):
            self._link(held, block, child)
        self._add_copies(StorageTier.DEVICE, hashes, again)

    def add_names(self, tier: StorageTier, hashes: tuple[int, ...], again: set[int]) -> None:
        """Hold blocks with known names only, or below the device; `again` are held already."""
        self.held(tier).update(dict.fromkeys(hashes, LAST))
        self._add_copies(tier, hashes, again)

    def take_names(self, event: RouterEvent) -> None:
        """Apply an event of which only the block names matter."""
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
        """Count copies after the first, if residency is counted."""
        if self.spec.stores_again and tier is not StorageTier.DEVICE:
            return
        if self.spec.residency == "counted" and (again or len(set(hashes)) < len(hashes)):
            copies, seen = self.copies.setdefault(tier, {}), again.copy()
            for block in hashes:
                if block in seen:
                    copies[block] = copies.get(block, 0) + 1
                seen.add(block)

    def _link(self, held: dict[int, int], parent: int, child: int) -> None:
        """Record a child; `FORK` means the children in `forks`."""
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
        """Remove a device block if one copy of it and no child is held there; return whether it was removed."""
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
        """Return whether the device holds a child of a block. A child dropped without a Removed does not count."""
        children = self.forks.get(block, ()) if child == FORK else (child,)
        return any(each in self.device and each not in self.gone for each in children)

    def remove(self, tier: StorageTier, held: dict[int, int], blocks: tuple[int, ...]) -> tuple[int | None, ...]:
        """Remove blocks, or one copy of each, from a tier; return the entry of each in `held`, or None if it was not
        there.
        """
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

    def take_report(self, event: RouterEvent, data: Stored) -> bool:
        """Apply a Stored that is, or may be, a full report; return whether it was applied as a report, without counting
        copies.
        """
        said = is_report(event.extra)
        if not said and not (
            self.spec.full_reports and data.parent_hash is None and event.storage_tier is StorageTier.DEVICE
        ):
            return False
        hashes = data.block_hashes
        if not (said and may_be_sparse(event.extra)) and not self.device.keys() >= set(hashes):
            return False
        if not said:
            self.doubtful |= {block: self.doubtful.get(block, 0) + 1 for block in hashes}
        self.events.append(event)
        if self.desync is not None:
            self.desync.resynced.update(hashes)
        return True

    def takes_doubt(self, block: int) -> bool:
        """Return whether a Removed of a block that is not held may belong to a copy; if so, count it as such."""
        left = self.doubtful.get(block, 0)
        if left:
            self.doubtful[block] = left - 1
        return left > 0

    def take_gone(self, blocks: Iterable[int]) -> None:
        """Record blocks that an engine reports as dropped without a Removed; a router still holds them."""
        self.gone.update(block for block in blocks if block in self.device)

    def give_way(self, hashes: tuple[int, ...], *, is_told: bool) -> None:
        """Drop blocks that an engine dropped without an event and now stores again.

        Args:
            hashes: the blocks of a Stored.
            is_told: whether the engine reports dropped blocks; if not, any block without a child may have been dropped.
        """
        self.untold = not is_told
        for block in self.gone.intersection(hashes) if is_told else hashes:
            if self.drop_leaf(block):
                self.gone.discard(block)
                self.moved.discard(block)

    def move(self, block: int, level: int) -> None:
        """Move a block to the host (level 1), or back to the device (0)."""
        if level:
            self.held(StorageTier.HOST_PINNED)  # makes sure that the tier exists
            self.moved.add(block)
        else:
            self.moved.discard(block)

    def in_tier(self, tier: StorageTier) -> Iterable[int]:
        """Return the held blocks of a tier, corrected by blocks that moved there or away."""
        if not self.moved:
            return self.held(tier)
        if tier is StorageTier.DEVICE:
            return [block for block in self.device if block not in self.moved]
        return [*self.held(tier), *self.moved] if tier is StorageTier.HOST_PINNED else self.held(tier)

    def orphans(self, block: int, child: int | None) -> list[int]:
        """Return the children of a removed block that the device holds; empty while it holds a copy of the block.

        Args:
            block: the removed block.
            child: its entry in `device`.
        """
        held = self.device
        if block in held or (block not in self.forks and child not in held):
            return []
        children = self.forks.pop(block, set())
        self.unmarked.discard(block)
        if child is not None:
            children.add(child)
        left = sorted(c for c in children if c in held and self.parent(c) == block)
        if left:  # for the next time that the block is stored and removed
            self.forks[block] = set(left)
            self.unmarked.add(block)
        return left

    def count(self, tier: StorageTier) -> int:
        """Return the number of held blocks in a tier, in all cache groups, with every copy but without second names."""
        names = len(self.held(tier)) + sum(self.copies.get(tier, {}).values())
        if tier is StorageTier.DEVICE:
            names -= self.second_names + len(self.moved) + len(self.gone)
        elif tier is StorageTier.HOST_PINNED:
            names += len(self.moved)
        return names + sum(part.count(tier) for part in self.groups.values())

    def begin_anew(self, why: str) -> None:
        """Record that event ids begin again; `why` is a key of `EVENTS_BEGAN_ANEW`."""
        self.resets.append((len(self.events), why))
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
        """Clear the stream: empty the device and, if `below`, the tiers below it. No block is unknown afterwards."""
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
            self.doubtful,
            self.restored,
            self.removed_but_resident,
        ):
            group.clear()
        for part in self.groups.values():
            part.clear(below=below)
        self.copies.update(left)
        self.second_names = 0
        self.orphaned = {}  # a new dict, as the old one is shared
        self.unconfirmed = []
        self.desync = self.doubled = None

    def take_skipped(self, missing: range) -> tuple[list[range], list[range]]:
        """Split missing ids into lost ones and those that the worker left out."""
        skipped, self.skipped = self.skipped, [ids for ids in self.skipped if ids.start >= missing.stop]
        left_out = [range(max(ids.start, missing.start), min(ids.stop, missing.stop)) for ids in skipped]
        left_out = sorted(filter(None, left_out), key=lambda ids: ids.start)
        starts = [missing.start, *(ids.stop for ids in left_out)]
        stops = [*(ids.start for ids in left_out), missing.stop]
        return [ids for ids in map(range, starts, stops) if ids], left_out

    def take_hole(self, event_id: int) -> bool:
        """Remove an id from the missing ones; return whether it was there."""
        return _take(self.holes, event_id)

    def is_late(self, event_id: int) -> bool:
        """Whether a recovery brought this id and its event has not arrived yet."""
        return event_id != self.next_id and any(event_id in ids for ids in self.late)

    def take_late(self, event_id: int) -> bool:
        """Remove an id from the recovered ones; return whether it was there."""
        return _take(self.late, event_id)

    def part(self, group_idx: int) -> Stream:
        """Return the part of a cache group; this stream itself if the group is unknown."""
        return self if group_idx == self.group_idx else self.groups.get(group_idx, self)

    def part_of(self, event: RouterEvent) -> Stream:
        """Return the part of the cache group that an event is about; a new part holds nothing.

        The attention group is the stream itself, as routers look up its blocks. It is group 0, or, if that group stores
        nothing or does not keep complete prefixes, the first group that does.
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
        """Return the part of another cache group. It has no capacity, as all groups share one pool."""
        part = self.groups.get(group_idx)
        if part is None:
            part = self.groups[group_idx] = self.fresh()
            part.group_idx, part.spec = group_idx, replace(self.spec, num_blocks=None, tier_blocks=None)
            part.hash_chain = self.hash_chain
            part.desync = None if self.desync is None else Desync(self.desync.cause)
        return part

    def _exchange(self, group_idx: int | None) -> None:
        """Make another cache group the stream itself; None: no group, because the attention group is unknown."""
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
        """Return a copy with the same held blocks, without missing ids and desync."""
        copy = self.fresh()
        copy.group_idx, copy.block_size = self.group_idx, self.block_size
        copy.recover(self, range(0))
        return copy

    def twin(self) -> Stream:
        """Return a copy including missing ids and desync."""
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
        """Drop the events that did not last store a held block."""
        needed = {*self.implied, *self.forks, *(block for blocks in self.tiers.values() for block in blocks)}
        self.forget(needed)
        if hasattr(self.hash_chain, "forget"):  # only some chains keep data
            self.hash_chain.forget(needed)
        self.links, self.below = Links(), Below()
        for part in self.groups.values():
            part.forget_history()

    def recover(self, published: Stream, ids: range) -> None:
        """Take over the published events of a worker that was asked for some ids.

        Args:
            published: all events that the worker published, in order.
            ids: the requested ids, up to the newest. The desync stays if an earlier id is missing.
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
        self.events, self.emptied, self.resets = list(published.events), published.emptied, list(published.resets)
        self.group_idx, self.tails = published.group_idx, set(published.tails)
        self.second_names = published.second_names
        self.moved, self.gone, self.untold = set(published.moved), set(published.gone), published.untold
        self.doubtful = dict(published.doubtful)
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
    """Remove an id from ranges; return whether it was there."""
    for i, ids in enumerate(ranges):
        if event_id in ids:
            parts = (range(ids.start, event_id), range(event_id + 1, ids.stop))
            ranges[i : i + 1] = [part for part in parts if part]
            return True
    return False
