"""The block manager of Dynamo's newer mocker, on kvbm-logical (`KvManager` of dynamo-mocker 1.2.1)."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import repeat
from operator import or_
from typing import Any
from uuid import UUID

from pytest_kvmock.cache.manager import (
    PrefillCost,
    Publisher,
    SequenceBlocks,
    check_dp_rank,
    check_full,
    check_logical_block_size,
    check_num_blocks,
    flatten,
    is_full,
)
from pytest_kvmock.cache.pool import BlockPool, EvictionPolicy, PoolMetrics, Slot
from pytest_kvmock.events import BlockTokens, Cleared, Removed, StorageTier, Stored
from pytest_kvmock.moves import Block, Deref, Destroy, Move, MoveError, Promote, Use
from pytest_kvmock.sinks import Sink
from pytest_kvmock.tokens import lineage_fragment, lineage_hash, lineage_position

# Theory of operation
#
# Three names meet here. Moves and events name blocks by sequence hash; the pool caches them by lineage hash (PLH); a
# slot is where one is. A slot is stored under one sequence hash and may later be held under others that come with the
# same PLH: reuse is decided by PLH, and the Removed names the first. `_held` has the slot of each name that holds one;
# nearly always a slot has one name (`Slot.held_as`) and `Slot.refs` are that name's references. Only where it has more
# does `_shares` count them by name.
#
# Within one Use evictions happen at once and are told at the end: one Stored, then one Removed. Only then does the
# manager drop its entries of what was evicted, by PLH. So a block that the same Use evicted and stored again loses its
# new entry, a Removed follows its Stored, and its real eviction will say nothing (`Slot.known`). The real manager does
# this; it is not ours to mend.


_PLH_END = 3 << 126


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
        self._held: dict[int, Slot] = {}
        self._shares: dict[int, int] = {}  # references by name, of slots with several names
        self._extra_names = 0  # names in _held beyond one a slot
        # Slots by the name they were stored under, for the short forms; made when one of them is first used.
        self._by_name: dict[int, Slot] | None = None

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
        return len(self._partials) + len(self._held) - self._extra_names

    @property
    def num_active_block_refs(self) -> int:
        """References to blocks in use; a partial block has one."""
        return len(self._partials) + sum(map(self._references, self._held))

    @property
    def num_inactive_blocks(self) -> int:
        """Cached blocks that nobody uses."""
        return len(self._pool.registered) - len(self._held) + self._extra_names

    @property
    def active_perc(self) -> float:
        """Share of the capacity that is in use, from 0 to 1."""
        return self.num_active_blocks / self.max_capacity

    @property
    def active_blocks(self) -> Mapping[Block, int]:
        """References to each block in use, partial ones included."""
        blocks: dict[Block, int] = {name: self._references(name) for name in self._held}
        blocks.update(dict.fromkeys(self._partials, 1))
        return blocks

    def _references(self, name: int) -> int:
        return self._shares.get(name) or self._held[name].refs

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
        partials = len(self._partials)
        references = self.num_active_block_refs - partials
        return self._pool.metrics(mutable=partials, immutable=references, inactive=self.num_inactive_blocks)

    def prefill_cost(self, sequence: SequenceBlocks) -> PrefillCost:
        """What it would cost to prefill this sequence now. Looks, and does not touch.

        A block counts as cached when its name is in use, or when the manager has an entry of its lineage hash: a
        block that was evicted and stored again in one Use has none.
        """
        blocks = sequence.unique_blocks
        overlap = 0
        if sequence.enable_prefix_caching:
            for block, plh in zip(blocks, sequence.positional_lineage_hashes, strict=False):
                if block not in self._held:
                    slot = self._pool.registered.get(plh)
                    if slot is None or not slot.known:
                        break
                overlap += 1
        cached = min(overlap * self.block_size, sequence.num_input_tokens)
        return PrefillCost(len(blocks) - overlap, sequence.num_input_tokens - cached, cached)

    # --------------------------------------------------------------------------------------------------- moves

    def process(self, move: Move) -> int:
        """Do what the move says; see `KvManager.process`."""
        kind = type(move)
        if kind is Use:
            return self._use(move)  # type: ignore[arg-type]
        if kind is Deref:
            return self._deref(move)  # type: ignore[arg-type]
        if kind is Promote:
            return self._promote(move)  # type: ignore[arg-type]
        if kind is Destroy:
            raise MoveError(f"Destroy: {self.backend} has no such move; it belongs to hash_cache. Use Deref")
        raise MoveError(f"expected a Use, Deref or Promote, got {move!r:.200}")

    def _use(self, move: Use) -> int:
        entries = _entries(move)
        pool, held, partials = self._pool, self._held, self._partials
        registered, policy, by_name = pool.registered, pool.inactive, self._by_name
        finds_by_place, register = policy.finds_by_place, policy.register
        evicted: list[int] = []  # lineage hashes
        removed: list[int | None] = []  # what to call them in the event; None for what the manager has no entry of
        stored: list[int] = []
        stored_locals: list[int] = []
        stored_tokens: list[Sequence[int]] = []
        # The event's anchor moves with hits alone, even with those that come after new blocks; the parent in a slot's
        # entry is the full block before it, hit or new.
        anchor: Any = move.parent
        parent: Any = anchor
        matched = asked = served = 0

        for name, plh, local, tokens in entries:
            slot = held.get(name)
            if slot is not None:
                slot.refs += 1
                if slot.held_as is None:
                    self._shares[name] += 1
                anchor = parent = name
            elif plh is None:
                # A partial block has no references to count, and moves neither anchor nor parent.
                if name not in partials:
                    slot = self._allocate(evicted, removed)
                    if slot is None:
                        break
                    partials[name] = slot
            else:
                slot = registered.get(plh)
                if slot is None and finds_by_place:
                    slot = policy.find(plh)
                if slot is None:
                    slot = self._allocate(evicted, removed)
                    if slot is None:
                        asked = 1  # of the pool, in vain
                        break
                    slot.plh = plh
                    slot.name = slot.held_as = name
                    slot.known = True
                    slot.parent = parent
                    slot.local_hash = local
                    slot.token_ids = tokens
                    slot.refs = 1
                    held[name] = registered[plh] = slot
                    register(slot)
                    stored.append(name)
                    stored_locals.append(local)
                    if tokens is not None:
                        stored_tokens.append(tokens)
                    if by_name is not None:
                        by_name[name] = slot
                    parent = name
                else:
                    matched += 1
                    if slot.refs:
                        self._share(slot, name)
                    else:
                        policy.remove(slot)
                        slot.refs = 1
                        slot.held_as = name
                        held[name] = slot
                    anchor = parent = name
            served += 1

        pool.match_blocks_returned += matched
        pool.match_hashes_requested += matched + len(stored) + asked
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
        slot = self._pool.take_reset()
        if slot is None:
            slot = self._pool.evict()
            if slot is not None:
                evicted.append(slot.plh)
                removed.append(slot.name if slot.known else None)
                if self._by_name is not None:
                    self._forget_name(slot)
        return slot

    def _handle_evictions(self, evicted: list[int], removed: list[int | None]) -> None:
        """Drop the entries of what one move evicted, and publish them as one Removed."""
        registered = self._pool.registered
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

    def _share(self, slot: Slot, name: int) -> None:
        """Hold an active slot under one name more."""
        self._pool.inactive.touch(slot)
        if slot.held_as is not None:
            self._shares[slot.held_as] = slot.refs
            slot.held_as = None
        self._shares[name] = 1
        self._extra_names += 1
        slot.refs += 1
        self._held[name] = slot

    def _deref(self, move: Deref) -> int:
        blocks = move.blocks
        held, insert = self._held, self._pool.inactive.insert
        self._check_deref(blocks)
        for name in blocks:
            slot = held.get(name)  # type: ignore[arg-type]
            if slot is None:  # partial, by the check above
                self._pool.give_back(self._partials.pop(name))  # type: ignore[arg-type]
                continue
            slot.refs -= 1
            if slot.held_as is None and self._unshare(slot, name):  # type: ignore[arg-type]
                continue
            if not slot.refs:
                del held[name]  # type: ignore[arg-type]
                insert(slot)
        return 1

    def _unshare(self, slot: Slot, name: int) -> bool:
        """Take one reference from a name that has or had others beside it. True if the slot stays active."""
        self._shares[name] -= 1
        if not self._shares[name]:
            del self._shares[name]
            if slot.refs:
                del self._held[name]
                self._extra_names -= 1
        return slot.refs > 0

    def _check_deref(self, blocks: Sequence[Block]) -> None:
        """Raise if a block has fewer references than `blocks` drops, or could not become inactive."""
        held = self._held
        if not self._pool.inactive.collisions:  # else the policy is to be asked
            try:
                if len(blocks) == 1:
                    if blocks[0] in held:
                        return
                else:
                    names = set(blocks)
                    if len(names) == len(blocks) and names <= held.keys():
                        return
            except TypeError:  # a block that cannot be hashed: the careful way names it
                pass
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
                has = self._references(block) if block in held else 0
                if has == times:
                    last.append(block)
            if times > has:
                kind = "partial block" if isinstance(block, UUID) else "block"
                why = f"it has {has} reference(s), and the move drops {times}" if has else "it is not active"
                raise MoveError(f"Deref of {kind} {block}: {why}")
        if self._pool.inactive.collisions:
            self._check_collisions(last)

    def _check_collisions(self, last: list[int]) -> None:
        """Raise if the policy cannot take the slots that lose their last name."""
        left: dict[Slot, int] = {}
        becoming_inactive: list[Slot] = []
        for name in last:
            slot = self._held[name]
            left[slot] = left.get(slot, slot.refs) - self._references(name)
            if not left[slot]:
                becoming_inactive.append(slot)
        refused = self._pool.inactive.refused(becoming_inactive)
        if refused is not None:
            raise MoveError(
                f"Deref of block {refused.name}: hash collision. Another block has the same position and fragment as "
                f"its lineage hash {refused.plh:#034x}, and {self.backend} cannot have both inactive"
            )

    def _promote(self, move: Promote) -> int:
        self._check_promote(move)
        name, plh, pool, held = move.block, move.plh, self._pool, self._held
        assert plh is not None
        slot = self._partials.pop(move.partial)
        found = held.get(name)
        if found is not None:
            found.refs += 1
            if found.held_as is None:
                self._shares[name] += 1
            pool.give_back(slot)
            return 1
        pool.match_hashes_requested += 1
        found = pool.registered.get(plh)
        if found is None and pool.inactive.finds_by_place:
            found = pool.inactive.find(plh)
        if found is not None:
            pool.match_blocks_returned += 1
            if found.refs:
                self._share(found, name)
            else:
                pool.inactive.remove(found)
                found.refs = 1
                found.held_as = name
                held[name] = found
            pool.give_back(slot)
            return 1
        slot.plh = plh
        slot.name = slot.held_as = name
        slot.known = True
        slot.parent = move.parent
        slot.local_hash = move.local_hash
        slot.token_ids = move.token_ids
        slot.refs = 1
        held[name] = pool.registered[plh] = slot
        pool.inactive.register(slot)
        pool.registrations += 1
        if self._by_name is not None:
            self._by_name[name] = slot
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
        if move.plh is None or not _are_plhs((move.plh,)):
            raise MoveError(f"{what} to block {move.block}: plh must be a lineage hash, got {move.plh!r}")

    # ------------------------------------------------------------------------------------------- clear and short forms

    def clear(self) -> bool:
        """Drop every cached block and publish a Cleared; False, and nothing happens, while any block is in use."""
        if self._held or self._partials:
            return False
        self._pool.drain()
        self._by_name = None
        self._publisher.publish(Cleared())
        return True

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
        self._deref(Deref(flatten(blocks)))

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
        """Return the slot that holds a name, or was stored under it."""
        slot = self._held.get(name)
        if slot is None:
            if self._by_name is None:
                self._by_name = {slot.name: slot for slot in self._pool.registered.values()}
            slot = self._by_name.get(name)
        return slot

    def _forget_name(self, slot: Slot) -> None:
        """Take an evicted slot out of `_by_name`."""
        by_name = self._by_name
        assert by_name is not None
        if len(by_name) == len(self._pool.registered) + 1:
            del by_name[slot.name]
        else:  # some slots have one name: find out anew which is left
            self._by_name = None

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


# ------------------------------------------------------------------------------------------------- a Use, checked


def _are_plhs(plhs: Sequence[int]) -> bool:
    """Whether these are lineage hashes: 128 bits, of which the two highest are not both set."""
    try:
        # One pass in C, in which a negative one and one too large show; and so does what is no integer.
        bits = reduce(or_, plhs, 0)
    except TypeError:
        return False
    if bits >> 126 == 3:  # one, or two together
        return all(plh >> 126 < 3 for plh in plhs)
    return 0 <= bits < _PLH_END


def _are_u64(values: Sequence[Any]) -> bool:
    """Whether these are integers from 0 to 2**64 - 1; checked in C."""
    try:
        array("Q", values)
    except (TypeError, OverflowError):
        return False
    return True


def _entries(move: Use) -> Iterator[tuple[Any, int | None, int, Sequence[int] | None]]:
    """Check a Use, and line its lists up: name, lineage hash (None for a partial block), local hash, token ids.

    Raises:
        MoveError: the Use breaks a rule.
    """
    blocks, plhs, local_hashes, token_ids = move.blocks, move.plhs, move.local_hashes, move.token_ids
    all_full = _are_u64(blocks)
    num_full = len(blocks) if all_full else _count_full(blocks)
    if len(plhs) != num_full:
        raise MoveError(_lengths("plhs", len(plhs), num_full, blocks))
    if local_hashes and len(local_hashes) != num_full:
        raise MoveError(_lengths("local_hashes", len(local_hashes), num_full, blocks, "none, or "))
    if token_ids is not None and len(token_ids) != num_full:
        raise MoveError(_lengths("token_ids", len(token_ids), num_full, blocks, "None, or "))
    if move.parent is not None:
        if isinstance(move.parent, UUID):
            raise MoveError(f"Use{_first(blocks)}: its parent {move.parent} is partial")
        check_full(move.parent, f"Use{_first(blocks)}: parent")
    if not _are_plhs(plhs):
        bad = next(plh for plh in plhs if not _are_plhs((plh,)))
        raise MoveError(f"Use{_first(blocks)}: {bad!r} is no lineage hash, an integer of 128 bits")
    if not _are_u64(local_hashes):
        for local in local_hashes:
            check_full(local, f"Use{_first(blocks)}: local hash")
    if all_full:
        return zip(blocks, plhs, local_hashes or repeat(0), token_ids or repeat(None), strict=False)
    return _line_up(blocks, plhs, local_hashes, token_ids)


def _line_up(
    blocks: Sequence[Block], plhs: Sequence[int], local_hashes: Sequence[int], token_ids: BlockTokens | None
) -> Iterator[tuple[Any, int | None, int, Sequence[int] | None]]:
    rest = zip(plhs, local_hashes or repeat(0), token_ids or repeat(None), strict=False)
    for block in blocks:
        yield (block, None, 0, None) if isinstance(block, UUID) else (block, *next(rest))


def _count_full(blocks: Sequence[Block]) -> int:
    full = 0
    for block in blocks:
        if not isinstance(block, UUID):
            if not is_full(block):
                raise MoveError(
                    f"Use of block {block!r}: a block is a sequence hash (an integer from 0 to 2**64 - 1) or a UUID"
                )
            full += 1
    return full


def _first(blocks: Sequence[Block]) -> str:
    return f" of block {blocks[0]}" if blocks else ""


def _lengths(what: str, got: int, expected: int, blocks: Sequence[Block], also: str = "") -> str:
    return f"Use{_first(blocks)}: {got} {what} for {expected} full blocks; expected {also}one for each full block"
