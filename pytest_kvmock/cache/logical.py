"""The block manager of Dynamo's newer mocker, on kvbm-logical (`KvManager` of dynamo-mocker 1.2.1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from pytest_kvmock.cache.manager import PrefillCost, Publisher, SequenceBlocks
from pytest_kvmock.cache.names import Names
from pytest_kvmock.cache.pool import BlockPool, EvictionPolicy, PoolMetrics, Slot
from pytest_kvmock.cache.rules import (
    are_plhs,
    check_dp_rank,
    check_full,
    check_logical_block_size,
    check_num_blocks,
    entries_of,
    flatten,
)
from pytest_kvmock.events import Cleared, Removed, StorageTier, Stored
from pytest_kvmock.moves import Block, Deref, Destroy, Move, MoveError, Promote, Use
from pytest_kvmock.sinks import Sink
from pytest_kvmock.tokens import lineage_fragment, lineage_hash, lineage_position

# Theory of operation
#
# Three names meet here. Moves and events name blocks by sequence hash; the pool caches them by lineage hash (PLH); a
# slot is where one is. Reuse is decided by PLH, so a slot that was stored under one sequence hash may be held under
# others that come with the same PLH; its Removed names the first. `Names` knows who holds what. Nearly always a slot is
# held by its own name alone; while there are others, aliases, the loops below go their careful way.
#
# Within one Use evictions happen at once and are told at the end: one Stored, then one Removed. Only then does the
# manager drop its entries of what was evicted, by PLH. So a block that the same Use evicted and stored again loses its
# new entry, a Removed follows its Stored, and its real eviction will say nothing (`Slot.known`). The real manager does
# this; it is not ours to mend.


class LogicalManager:
    """Hands out blocks, caches them by lineage hash, evicts by a policy, and publishes what changed.

    Args:
        backend: name of the behaviour.
        eviction: the order in which inactive blocks go; one policy belongs to one manager.
        num_blocks: capacity in blocks, at least 1.
        block_size: tokens a block, a power of two from 2 to 1024.
        dp_rank: data-parallel rank that events name.
        sink: who hears the events.

    Raises:
        ValueError: a number is not what it must be.
    """

    def __init__(
        self,
        *,
        backend: str,
        eviction: EvictionPolicy,
        num_blocks: int,
        block_size: int = 16,
        dp_rank: int = 0,
        sink: Sink | None = None,
    ) -> None:
        self.backend = backend
        self.max_capacity = check_num_blocks(num_blocks)
        self.block_size = check_logical_block_size(block_size)
        self.dp_rank = check_dp_rank(dp_rank)
        self._publisher = Publisher(sink, dp_rank)
        self._pool = BlockPool(num_blocks, eviction)
        self._partials: dict[UUID, Slot] = {}
        self._names = Names()
        self._references = 0
        self._num_inactive = 0

    def __repr__(self) -> str:
        return (
            f"<LogicalManager {self.backend}: {self.num_active_blocks} active, "
            f"{self.num_inactive_blocks} inactive of {self.max_capacity}>"
        )

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def sink(self) -> Sink | None:
        """Who hears the events."""
        return self._publisher.sink

    @sink.setter
    def sink(self, sink: Sink | None) -> None:
        self._publisher.sink = sink

    @property
    def num_active_blocks(self) -> int:
        """Physical blocks in use."""
        return self.max_capacity - self._pool.reset_len - self._num_inactive

    @property
    def num_active_block_refs(self) -> int:
        """References to blocks in use; a partial block has one."""
        return len(self._partials) + self._references

    @property
    def num_inactive_blocks(self) -> int:
        """Cached blocks that nobody uses."""
        return self._num_inactive

    @property
    def active_perc(self) -> float:
        """Share of the capacity that is in use, from 0 to 1."""
        return self.num_active_blocks / self.max_capacity

    @property
    def active_blocks(self) -> Mapping[Block, int]:
        """References to each block in use, partial ones included."""
        blocks: dict[Block, int] = dict.fromkeys(self._partials, 1)
        blocks.update(self._names.references().items())
        return blocks

    def references(self, block: Block) -> int:
        """References to one block now; 0 for what is not in use."""
        if isinstance(block, UUID):
            return int(block in self._partials)
        return self._names.references_of(block)

    def inactive_blocks(self) -> list[int]:
        """Cached blocks that nobody uses, in the order in which they would be evicted. May cost a sort."""
        return [slot.name for slot in self._pool.inactive.order()]

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Sequence hashes of what is physically cached in a tier; a block has the one it was stored under."""
        if tier != StorageTier.DEVICE:
            return []
        return [slot.name for slot in self._pool.registered.values()]

    def check_presence(self, plhs: Iterable[int]) -> list[tuple[int, bool]]:
        """Say of each lineage hash whether a block is cached under exactly it. Changes nothing."""
        registered = self._pool.registered
        return [(plh, plh in registered) for plh in plhs]

    def metrics(self) -> PoolMetrics:
        """Take a snapshot of the pool's counters and gauges."""
        return self._pool.metrics(mutable=len(self._partials), immutable=self._references, inactive=self._num_inactive)

    def prefill_cost(self, sequence: SequenceBlocks) -> PrefillCost:
        """What it would cost to prefill this sequence now. Looks, and does not touch.

        A block counts as cached when its name is in use, or when the manager has an entry of its lineage hash: a
        block that was evicted and stored again in one Use has none.
        """
        blocks = sequence.unique_blocks
        registered, held_by = self._pool.registered, self._names.held_by
        overlap = 0
        if sequence.enable_prefix_caching:
            for block, plh in zip(blocks, sequence.positional_lineage_hashes, strict=False):
                slot = registered.get(plh)
                if (slot is None or not slot.known) and (isinstance(block, UUID) or held_by(block) is None):
                    break
                overlap += 1
        cached = min(overlap * self.block_size, sequence.num_input_tokens)
        return PrefillCost(len(blocks) - overlap, sequence.num_input_tokens - cached, cached)

    # --------------------------------------------------------------------------------------------------- moves

    def process(self, move: Move) -> int:
        """Do what the move says; see `KvManager.process`."""
        kind = type(move)
        if kind is Deref:
            return self._deref(move.blocks)  # type: ignore[union-attr]
        if kind is Use:
            return self._use(move)  # type: ignore[arg-type]
        if kind is Promote:
            return self._promote(move)  # type: ignore[arg-type]
        if kind is Destroy:
            raise MoveError(f"Destroy: {self.backend} has no such move; it belongs to hash_cache. Use Deref")
        raise MoveError(f"expected a Use, Deref or Promote, got {move!r:.200}")

    def _use(self, move: Use) -> int:
        entries = entries_of(move)
        pool, policy, partials = self._pool, self._pool.inactive, self._partials
        names, registered = self._names, pool.registered
        named, aliases = names.own, names.alias_slots
        remove, register = policy.remove, policy.register
        find = policy.find if policy.finds_by_place else None
        evicted: list[int] = []  # lineage hashes
        removed: list[int | None] = []  # what to call them in the event; None for what the manager has no entry of
        stored: list[int] = []
        stored_locals: list[int] = []
        stored_tokens: list[Sequence[int]] = []
        # The event's anchor moves with hits alone, even with those that come after new blocks; the parent in a slot's
        # entry is the full block before it, hit or new.
        anchor: Any = move.parent
        parent: Any = anchor
        served = partial = woken = shared = refused = 0

        for name, plh, local, tokens in entries:
            own = named.get(name)
            if own is not None and own.refs and not aliases:
                own.refs += 1
                anchor = name
            elif plh is None:
                # A partial block has no references to count, and moves neither anchor nor parent.
                if name not in partials:
                    slot = self._allocate(evicted, removed)
                    if slot is None:
                        break
                    partials[name] = slot
                partial += 1
                served += 1
                continue
            elif own is not None and own.plh == plh and not aliases:
                remove(own)
                own.refs = 1
                woken += 1
                anchor = name
            elif aliases and self._names.held_by(name) is not None:
                self._names.hold_again(name)
                anchor = name
            else:
                slot = registered.get(plh)
                if slot is None and find is not None:
                    slot = find(plh)
                if slot is None:
                    slot = self._allocate(evicted, removed)
                    if slot is None:
                        refused = 1
                        break
                    slot.plh = plh
                    slot.name = name
                    slot.known = True
                    slot.parent = parent
                    slot.local_hash = local
                    slot.token_ids = tokens
                    registered[plh] = slot
                    if own is None:
                        named[name] = slot
                        slot.refs = 1
                    else:
                        self._names.hold_new(slot)
                    register(slot)
                    stored.append(name)
                    stored_locals.append(local)
                    if tokens is not None:
                        stored_tokens.append(tokens)
                else:
                    if slot.refs or slot.aliases:
                        shared += 1
                        policy.touch(slot)
                    else:
                        woken += 1
                        remove(slot)
                    self._names.hold(slot, name)
                    anchor = name
            parent = name
            served += 1

        self._references += served - partial
        self._num_inactive -= woken + len(evicted)
        pool.match_blocks_returned += woken + shared
        pool.match_hashes_requested += woken + shared + len(stored) + refused
        if stored:
            pool.registrations += len(stored)
            beside = None if move.token_ids is None else stored_tokens
            self._publisher.publish(Stored(anchor, tuple(stored), tuple(stored_locals)), beside)
        if evicted:
            self._handle_evictions(evicted, removed)
        return served

    def _allocate(self, evicted: list[int], removed: list[int | None]) -> Slot | None:
        """Take one empty slot: from the reset pool while it has any, else by evicting. None when nothing can go.

        This and `_handle_evictions` are where an offload engine would come in: it holds the evicted slot while its
        block travels to the next tier.
        """
        pool = self._pool
        if not pool.reset_is_empty:
            return pool.take_reset()
        slot = pool.inactive.evict()
        if slot is not None:
            del pool.registered[slot.plh]
            evicted.append(slot.plh)
            removed.append(slot.name if slot.known else None)
            if self._names.homonyms:
                self._names.drop(slot)
            else:
                del self._names.own[slot.name]
        return slot

    def _handle_evictions(self, evicted: list[int], removed: list[int | None]) -> None:
        """Drop the entries of what one move evicted, and publish them as one Removed."""
        registered = self._pool.registered
        self._pool.evictions += len(evicted)
        if not registered.keys().isdisjoint(evicted):
            # Evicted and stored again by the same move: the entry that goes now is the new one.
            for i, plh in enumerate(evicted):
                again = registered.get(plh)
                if again is not None:
                    removed[i] = again.name
                    again.known = False
        names = tuple([name for name in removed if name is not None])
        if names:
            self._publisher.publish(Removed(names))

    def _deref(self, blocks: Sequence[Block]) -> int:
        if self._names.alias_slots or self._pool.inactive.collisions:
            return self._deref_carefully(blocks)
        named = self._names.own
        try:
            if len(blocks) == 1:
                slot = named[blocks[0]]  # type: ignore[index]
                refs = slot.refs
                if not refs:
                    return self._deref_carefully(blocks)
                slot.refs = refs - 1
                self._references -= 1
                if refs == 1:
                    self._pool.inactive.insert(slot)
                    self._num_inactive += 1
                return 1
            slots = [named[block] for block in blocks]  # type: ignore[index]
        except (KeyError, TypeError):
            return self._deref_carefully(blocks)
        counts = [slot.refs for slot in slots]
        if 0 in counts or len(set(slots)) < len(slots):
            return self._deref_carefully(blocks)
        insert = self._pool.inactive.insert
        for slot, refs in zip(slots, counts, strict=True):
            slot.refs = refs - 1
            if refs == 1:
                insert(slot)
        self._references -= len(slots)
        self._num_inactive += counts.count(1)
        return 1

    def _deref_carefully(self, blocks: Sequence[Block]) -> int:
        self._check_deref(blocks)
        for block in blocks:
            if isinstance(block, UUID):
                self._pool.give_back(self._partials.pop(block))
            else:
                self._references -= 1
                slot = self._names.let_go(block)
                if not slot.refs and not slot.aliases:
                    self._pool.inactive.insert(slot)
                    self._num_inactive += 1
        return 1

    def _check_deref(self, blocks: Sequence[Block]) -> None:
        """Raise if a block has fewer references than `blocks` drops, or could not become inactive."""
        asked: dict[Block, int] = {}
        for block in blocks:
            if not isinstance(block, UUID):
                check_full(block, "Deref of block")
            asked[block] = asked.get(block, 0) + 1
        last: list[int] = []
        for block, times in asked.items():
            if isinstance(block, UUID):
                has = int(block in self._partials)
            else:
                has = self._names.references_of(block)
                if has == times:
                    last.append(block)
            if times > has:
                kind = "partial block" if isinstance(block, UUID) else "block"
                why = f"it has {has} reference(s), and the move drops {times}" if has else "it is not active"
                raise MoveError(f"Deref of {kind} {block}: {why}")
        if self._pool.inactive.collisions:
            self._check_collisions(last)

    def _check_collisions(self, last: list[int]) -> None:
        """Raise if the policy cannot take the slots of which these are the last names to be dropped."""
        names: dict[Slot, int] = {}
        falling: list[Slot] = []
        for name in last:
            slot = self._names.held_by(name)
            assert slot is not None
            names[slot] = names.get(slot, 0) + 1
            if names[slot] == slot.aliases + (slot.refs > 0):
                falling.append(slot)
        refused = self._pool.inactive.refused(falling)
        if refused is not None:
            raise MoveError(
                f"Deref of block {refused.name}: hash collision. Another block has the same position and fragment as "
                f"its lineage hash {refused.plh:#034x}, and {self.backend} cannot have both inactive"
            )

    def _promote(self, move: Promote) -> int:
        self._check_promote(move)
        name, plh, pool = move.block, move.plh, self._pool
        assert plh is not None
        mutable = self._partials.pop(move.partial)
        self._references += 1
        if self._names.held_by(name) is not None:
            self._names.hold_again(name)
            pool.give_back(mutable)
            return 1
        pool.match_hashes_requested += 1
        slot = pool.match(plh)
        if slot is not None:
            pool.match_blocks_returned += 1
            if slot.refs or slot.aliases:
                pool.inactive.touch(slot)
            else:
                pool.inactive.remove(slot)
                self._num_inactive -= 1
            self._names.hold(slot, name)
            pool.give_back(mutable)
            return 1
        mutable.plh = plh
        mutable.name = name
        mutable.known = True
        mutable.parent = move.parent
        mutable.local_hash = move.local_hash
        mutable.token_ids = move.token_ids
        pool.registered[plh] = mutable
        self._names.hold_new(mutable)
        pool.inactive.register(mutable)
        pool.registrations += 1
        beside = None if move.token_ids is None else [move.token_ids]
        self._publisher.publish(Stored(move.parent, (name,), (move.local_hash,)), beside)
        return 1

    def _check_promote(self, move: Promote) -> None:
        what = f"Promote of partial block {move.partial}"
        if not isinstance(move.partial, UUID) or move.partial not in self._partials:
            raise MoveError(f"{what}: it is not active")
        check_full(move.block, f"{what} to block")
        if isinstance(move.parent, UUID):
            raise MoveError(f"{what} to block {move.block}: its parent {move.parent} is partial")
        if move.parent is not None:
            check_full(move.parent, f"{what} to block {move.block}: parent")
        check_full(move.local_hash, f"{what} to block {move.block}: local hash")
        if move.plh is None or not are_plhs((move.plh,)):
            raise MoveError(f"{what} to block {move.block}: plh must be a lineage hash, got {move.plh!r}")

    # ------------------------------------------------------------------------------------------- clear and short forms

    def clear(self) -> bool:
        """Drop every cached block and publish a Cleared; False, and nothing happens, while any block is in use."""
        if self._references or self._partials:
            return False
        self._pool.drain()
        self._names = Names()
        self._num_inactive = 0
        self._publisher.publish(Cleared())
        return True

    def take_event_id(self) -> int:
        """Use up the next event id, for an event that somebody else publishes in the manager's name."""
        return self._publisher.take_id()

    def use(
        self,
        blocks: Iterable[Block],
        *,
        local_hashes: Sequence[int] | None = None,
        plhs: Sequence[int] | None = None,
        token_ids: Sequence[Sequence[int]] | None = None,
        parent: Block | None = None,
    ) -> int:
        """Short form of Use; see `KvManager.use`."""
        blocks = list(blocks)
        full: list[int] = [block for block in blocks if not isinstance(block, UUID)]
        for block in full:
            check_full(block, "Use of block")
        above = self._parent_plh(parent, "Use")
        if plhs is None:
            plhs = self._lineage(full, above)
        return self._use(Use(blocks, full if local_hashes is None else local_hashes, plhs, token_ids, parent))

    def deref(self, *blocks: Block | Iterable[Block]) -> None:
        """Short form of Deref; see `KvManager.deref`."""
        self._deref(flatten(blocks))

    def promote(
        self,
        partial: UUID,
        block: int,
        *,
        parent: int | None = None,
        local_hash: int | None = None,
        plh: int | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> None:
        """Short form of Promote; see `KvManager.promote`."""
        check_full(block, f"Promote of partial block {partial} to block")
        above = self._parent_plh(parent, "Promote")
        if plh is None:
            plh = self._lineage([block], above)[0]
        self._promote(Promote(partial, block, parent, block if local_hash is None else local_hash, plh, token_ids))

    def _find_name(self, name: int) -> Slot | None:
        """Return the slot that a name holds; else the one that was stored under it."""
        slot = self._names.held_by(name) or self._names.own.get(name)
        if slot is None and self._names.homonyms:
            same = (slot for slot in self._pool.registered.values() if slot.name == name)
            slot = next(same, None)
        return slot

    def _parent_plh(self, parent: Block | None, what: str) -> int | None:
        if parent is None or isinstance(parent, UUID):  # a partial parent is refused by the move
            return None
        check_full(parent, f"{what}: parent")
        slot = self._find_name(parent)
        if slot is None:
            raise MoveError(f"{what}: parent {parent} is not cached; a block's parent must be active or inactive")
        return slot.plh

    def _lineage(self, names: Iterable[int], above: int | None) -> list[int]:
        """Lineage hashes of `names`, each below the one before it, unless it has one; the first is below `above`."""
        plhs: list[int] = []
        for name in names:
            slot = self._find_name(name)
            if slot is not None:
                above = slot.plh
            elif above is None:
                above = lineage_hash(name, None, 0)
            else:
                # The parent's own fragment, not its name: a slot may be held under a name that its PLH does not have.
                above = lineage_hash(name, lineage_fragment(above), lineage_position(above) + 1)
            plhs.append(above)
        return plhs
