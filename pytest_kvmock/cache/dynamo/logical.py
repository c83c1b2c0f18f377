"""The block manager of Dynamo's newer mocker, on kvbm-logical (`KvManager` of dynamo-mocker 1.2.1).

One subject: what each move does to slots, names and references.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from uuid import UUID

from pytest_kvmock.cache.base import LOG, ManagerBase
from pytest_kvmock.cache.cache_trace import OF_1_2_1, TRACE_LEVEL, trace
from pytest_kvmock.cache.dynamo import move_checks
from pytest_kvmock.cache.dynamo.eviction.policy import EvictionPolicy, Slot
from pytest_kvmock.cache.dynamo.names import Names
from pytest_kvmock.cache.dynamo.offloading import Offloading
from pytest_kvmock.cache.dynamo.pool import BlockPool, PendingEvents, PoolMetrics
from pytest_kvmock.cache.dynamo.runs import Runs, Used
from pytest_kvmock.cache.dynamo.short_forms import LineageShortForms
from pytest_kvmock.cache.manager import PrefillCost, SequenceBlocks
from pytest_kvmock.cache.offload import BlockDetails, OffloadEngine
from pytest_kvmock.events import Cleared, Removed, StorageTier, Stored, value_text
from pytest_kvmock.moves import Block, Deref, Destroy, Move, MoveError, Promote, Use
from pytest_kvmock.sinks import Sink

# Theory of operation
#
# Three names meet here. Moves and events name blocks by sequence hash; the pool caches them by lineage hash (PLH); a
# slot is where one is. Reuse is decided by PLH, so a slot that was stored under one sequence hash may be held under
# others that come with the same PLH; its Removed names the first. `Names` keeps who holds what. Nearly always a slot is
# held by its own name alone; while there are others, aliases, blocks are taken one by one.
# What a Use publishes of all this, and when: see `PendingEvents` in pool.py.
#
# The managers of `lineage` and `lru` begin in another form, `Runs`, which is quick, and knows none of these oddities. With
# the first move that is not for it a manager leaves that form, and goes on here.


class LogicalManager(Offloading, LineageShortForms, ManagerBase):
    """Hands out blocks, caches them by lineage hash, evicts by a policy, and publishes what changed.

    Args:
        backend: name of the behaviour.
        eviction: the order in which inactive blocks are evicted; one policy belongs to one manager.
        num_blocks: capacity in blocks, at least 1.
        block_size: tokens a block, a power of two from 2 to 1024.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None: nowhere, and no event id is consumed.
        offload: what keeps evicted blocks in a further tier; None: nothing does. See `attach_offload`.
        in_runs: whether it begins in the form of `Runs`, which is quicker and asks no policy. Only for the policies of
            `lineage` and `lru`, as they are: they evict what that form evicts.

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
        offload: OffloadEngine | None = None,
        in_runs: bool = False,
    ) -> None:
        super().__init__(
            backend=backend,
            num_blocks=num_blocks,
            block_size=move_checks.check_logical_block_size(block_size),
            dp_rank=dp_rank,
            sink=sink,
        )
        self._start_offload()
        self._pool = BlockPool(num_blocks, eviction)
        self._partials: dict[UUID, Slot] = {}
        self._names = Names()
        self._references = 0
        self._num_inactive = 0
        self._freed: list[Slot] = []  # inactive, and the policy does not know it yet
        # While there are runs, they have the full blocks, and count them.
        self._runs = Runs(self._pool, self._partials) if in_runs else None
        if offload is not None:
            self.attach_offload(offload)

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def num_active_blocks(self) -> int:
        """Physical blocks in use."""
        return self.max_capacity - self._pool.reset_len - self.num_inactive_blocks

    @property
    def num_active_block_refs(self) -> int:
        """References to blocks in use; a partial block has one."""
        return len(self._partials) + (self._references if self._runs is None else self._runs.references)

    @property
    def num_inactive_blocks(self) -> int:
        """Cached blocks that nobody uses."""
        if self._runs is not None:
            return self._runs.num_inactive
        return self._num_inactive + len(self._freed)

    @property
    def active_blocks(self) -> Mapping[Block, int]:
        """References to each block in use, partial ones included."""
        blocks: dict[Block, int] = dict.fromkeys(self._partials, 1)
        if self._runs is None:
            blocks.update(self._names.references().items())
        else:
            blocks.update({name: run.refs for name, run in self._runs.blocks().items() if run.refs})
        return blocks

    def references(self, block: Block) -> int:
        """References to one block now; 0 for what is not in use."""
        if isinstance(block, UUID):
            return int(block in self._partials)
        return self._names.references_of(block) if self._runs is None else self._runs.references_of(block)

    def inactive_blocks(self) -> list[int]:
        """Cached blocks that nobody uses, in the order in which they would be evicted. May cost a sort."""
        if self._runs is not None:
            return [name for run in self._runs.idle() for name in reversed(run.names)]
        self._flush_freed()
        return [slot.name for slot in self._pool.inactive.order()]

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Sequence hashes of what is physically cached in a tier; a block has the one it was stored under."""
        if tier != StorageTier.DEVICE:
            return self._resident_below(tier)
        if self._runs is not None:
            return self._runs.blocks().keys()
        return [slot.name for slot in self._pool.registered.values()]

    def check_presence(self, plhs: Iterable[int]) -> list[tuple[int, bool]]:
        """Return each lineage hash with whether a block is cached under exactly it. Changes nothing."""
        caches = self._pool.registered.__contains__ if self._runs is None else self._runs.has_plh
        return [(plh, caches(plh)) for plh in plhs]

    def metrics(self) -> PoolMetrics:
        """Take a snapshot of the pool's counters and gauges."""
        return self._pool.metrics(
            mutable=len(self._partials) + self._num_outside,
            immutable=self._references if self._runs is None else self._runs.references,
            inactive=self.num_inactive_blocks,
        )

    def prefill_cost(self, sequence: SequenceBlocks) -> PrefillCost:
        """Return the cost of prefilling this sequence now. Changes nothing, recency included.

        A block counts as cached when its name is in use, or when the manager has an entry of its lineage hash: a
        block that was evicted and stored again in one Use has none.
        """
        blocks, plhs = sequence.unique_blocks, sequence.positional_lineage_hashes
        overlap = 0
        if not sequence.enable_prefix_caching:
            pass
        elif self._runs is not None:
            overlap = self._runs.overlap(blocks, plhs)
        else:
            registered, unknown, held_by = self._pool.registered, self._pool.unknown, self._names.held_by
            for block, plh in zip(blocks, plhs, strict=False):
                slot = registered.get(plh)
                if (slot is None or slot in unknown) and (isinstance(block, UUID) or held_by(block) is None):
                    break
                overlap += 1
        cached = min(overlap * self.block_size, sequence.num_input_tokens)
        return PrefillCost(len(blocks) - overlap, sequence.num_input_tokens - cached, cached)

    # --------------------------------------------------------------------------------------------------- moves

    def process(self, move: Move) -> int:
        """Carry out a move; see `KvManager.process`."""
        kind = type(move)
        if kind is Deref:
            return self._deref(move.blocks)  # type: ignore[union-attr]  # by its class, which mypy does not follow
        if kind is Use:
            answer = self._use(move)  # type: ignore[arg-type]  # as above
        elif kind is Promote:
            answer = self._promote(move)  # type: ignore[arg-type]  # as above
        elif kind is Destroy:
            raise MoveError(f"Destroy: {self.backend} has no such move; it belongs to hash_cache. Use Deref")
        else:
            raise MoveError(f"expected a Use, Deref or Promote, got {move!r:.200}")
        if self._publisher.failure is not None:
            self._publisher.surface()
        return answer

    def _use(self, move: Use) -> int:
        leading, runs = move_checks.check_use(move), self._runs
        if runs is not None:
            used = runs.use(move, leading)
            if used is not None:
                self._publish(move, used)
                return used.served
        move_checks.check_use_plhs(move)
        self._flush_freed()
        pending, pool = PendingEvents(move.parent), self._pool
        served = 0
        # In bulk while every name can only mean the slot that was stored under it.
        if leading and not self._names.alias_slots and not self._names.homonyms:
            served = self._hold_leading(move, pending)
            if served < leading:
                served = self._store_unknown(move, served, leading, pending)
        if served < len(move.blocks) and not pending.refused:
            served = self._use_one_by_one(move, served, pending)
        victims = None if self._offload is None else self._offload_use(move, served, pending)
        pending.publish(self._publisher, pool)
        if (pending.stored or pending.evicted) and LOG.isEnabledFor(TRACE_LEVEL):
            trace(self, "allocation", pending.stored, form=OF_1_2_1)
            if not victims:
                trace(self, "eviction", pending.removed, form=OF_1_2_1)
        if victims:
            self._hand_over(victims, pending)
        return served

    def _publish(self, move: Use, used: Used) -> None:
        """Publish what a Use in runs stored, then what it evicted."""
        stored, removed = used.stored, used.removed
        if stored:
            start, end = used.hits, used.hits + len(stored)
            local_hashes = tuple(move.local_hashes[start:end]) or (0,) * len(stored)
            token_ids = move.token_ids[start:end] if move.token_ids else None
            self._publisher.publish(Stored(used.anchor, tuple(stored), local_hashes), token_ids)
        if removed:
            self._publisher.publish(Removed(tuple(removed)))
        if (stored or removed) and LOG.isEnabledFor(TRACE_LEVEL):
            trace(self, "allocation", stored, form=OF_1_2_1)
            trace(self, "eviction", removed, form=OF_1_2_1)

    def _hold_leading(self, move: Use, pending: PendingEvents) -> int:
        """Hold the leading blocks that are cached, up to the first that is not: they are most of most Uses."""
        own = self._names.own
        woken: list[Slot] = []
        held = 0
        for slot, plh in zip(map(own.get, move.blocks), move.plhs, strict=False):  # type: ignore[arg-type]  # no partial block is among the keys
            if slot is None:
                break
            refs = slot.refs
            if not refs:
                if slot.plh != plh:
                    break
                woken.append(slot)
            slot.refs = refs + 1
            held += 1
        if held:
            pending.anchor = move.blocks[held - 1]
            self._references += held
        if woken:
            self._pool.inactive.remove(woken)
            self._pool.match_hashes_requested += len(woken)
            self._pool.match_blocks_returned += len(woken)
            self._num_inactive -= len(woken)
        return held

    def _store_unknown(self, move: Use, start: int, end: int, pending: PendingEvents) -> int:
        """Store the blocks from `start` to `end`, if none of them is cached or held under any name; returns where it stopped.

        All slots are taken at once then. Nothing that is evicted for them can be asked for by a later block of the run, nor
        can one block of it meet another: so the order in which they are taken and filled shows nowhere.
        """
        names, plhs, pool = move.blocks[start:end], move.plhs[start:end], self._pool
        own, policy = self._names.own, pool.inactive
        if len(set(names)) < len(names) or not own.keys().isdisjoint(names):
            return start
        places = None
        if policy._finds_by_place:
            places = policy._free_places(plhs)
            if places is None:
                return start
        elif len(set(plhs)) < len(plhs) or not pool.registered.keys().isdisjoint(plhs):
            return start
        slots = self._allocate(len(names), pending)
        count = len(slots)
        if count < len(names):
            pending.refused = True
            names, plhs, places = names[:count], plhs[:count], places and places[:count]
        local_hashes = move.local_hashes[start : start + count] or (0,) * count
        for slot, name, plh in zip(slots, names, plhs, strict=True):
            slot.name = name  # type: ignore[assignment]  # the leading blocks are full ones
            slot.plh = plh
            slot.refs = 1
        own.update(zip(names, slots, strict=True))  # type: ignore[arg-type]  # as above
        pool.registered.update(zip(plhs, slots, strict=True))
        policy._on_register(slots, places)
        pending.stored.extend(names)  # type: ignore[arg-type]  # as above
        pending.local_hashes.extend(local_hashes)
        if move.token_ids:
            pending.token_ids.extend(move.token_ids[start : start + count])
        self._references += count
        pool.match_hashes_requested += count + pending.refused
        return start + count

    def _use_one_by_one(self, move: Use, start: int, pending: PendingEvents) -> int:
        """Use the blocks from `start` on one by one; returns where it stopped."""
        pool, policy, partials = self._pool, self._pool.inactive, self._partials
        names, registered = self._names, pool.registered
        named, aliases = names.own, names.alias_slots
        find = policy._find if policy._finds_by_place else None
        # It moves with hits alone, even with those that come after new blocks.
        anchor = pending.anchor
        pending.in_bulk = False
        served = partial = woken = shared = stored = 0

        for name, plh, local, tokens in move_checks.iter_blocks(move, start):
            own = named.get(name)
            if own is not None and own.refs and not aliases:
                own.refs += 1
                anchor = name
            elif plh is None:
                # A partial block has no references to count, and moves neither anchor nor parent.
                if name not in partials:
                    empty = self._allocate(1, pending)
                    if not empty:
                        break
                    partials[name] = empty[0]
                partial += 1
                served += 1
                continue
            elif own is not None and own.plh == plh and not aliases:
                policy.remove((own,))
                own.refs = 1
                self._num_inactive -= 1
                woken += 1
                anchor = name
            elif aliases and names.held_by(name) is not None:
                names.hold_again(name)
                anchor = name
            else:
                slot = registered.get(plh)
                if slot is None and find is not None:
                    slot = find(plh)
                if slot is None:
                    empty = self._allocate(1, pending)
                    if not empty:
                        pending.refused = True
                        break
                    slot = empty[0]
                    slot.name, slot.plh = name, plh
                    registered[plh] = slot
                    names.hold_new(slot)
                    policy._on_register((slot,))
                    stored += 1
                    pending.stored.append(name)
                    pending.local_hashes.append(local)
                    if tokens is not None:
                        pending.token_ids.append(tokens)
                else:
                    if slot.refs or slot.aliases:
                        shared += 1
                        policy._on_touch(slot)
                    else:
                        woken += 1
                        self._num_inactive -= 1
                        policy.remove((slot,))
                    names.hold(slot, name)
                    anchor = name
            served += 1

        pending.anchor = anchor
        self._references += served - partial
        pool.match_blocks_returned += woken + shared
        pool.match_hashes_requested += woken + shared + stored + pending.refused
        return start + served

    def _allocate(self, count: int, pending: PendingEvents) -> list[Slot]:
        """Take empty slots: from the reset pool while it has any, then by evicting. Fewer when nothing more can be evicted.

        With an offload engine none is evicted here: an evicted slot is its, while the block travels to the next tier.
        """
        slots = self._pool.take_reset(count)
        if len(slots) == count or self._offload is not None:
            return slots
        return slots + self._evict(count - len(slots), pending)

    def _evict(self, count: int, pending: PendingEvents) -> list[Slot]:
        """Evict the blocks whose turn it is, fewer where no more can be evicted; returns the slots they were in."""
        pool, own = self._pool, self._names.own
        wanted = min(count, self._num_inactive)
        victims = pool.inactive.evict(count)
        if (
            not isinstance(victims, list)
            or len(set(victims)) != wanted
            or len(victims) != wanted
            or any(slot.refs for slot in victims)
        ):
            raise RuntimeError(
                f"the eviction policy {type(pool.inactive).__name__} is wrong: evict({count}) gave "
                f"{value_text(victims):.200}; {wanted} different slots that nobody holds could go"
            )
        plhs = [slot.plh for slot in victims]
        for plh in plhs:
            del pool.registered[plh]
        pending.evicted += plhs
        names = [slot.name for slot in victims]
        if self._names.homonyms:
            for slot in victims:
                self._names.drop(slot)
        else:
            for name in names:
                del own[name]
        pending.removed += names if not pool.unknown else [pool.name_to_publish(slot) for slot in victims]
        self._num_inactive -= len(victims)
        return victims

    def _deref(self, blocks: Sequence[Block]) -> int:
        if self._runs is not None:
            try:
                if self._runs.deref(blocks):
                    return 1
            except TypeError:  # what is no list, or no block, is refused by the check
                pass
            move_checks.check_held(blocks, self.references)
            self._leave_runs()
        if self._names.alias_slots or self._pool.inactive._collisions:
            return self._deref_one_by_one(blocks)
        own = self._names.own
        slots: list[Slot] = []
        try:
            if len(blocks) == 1:  # as the real scheduler sends them
                slot = own[blocks[0]]  # type: ignore[index]  # a partial block is a KeyError
                refs = slot.refs
                if refs:
                    slot.refs = refs - 1
                    self._references -= 1
                    if refs == 1:
                        self._freed.append(slot)
                    return 1
            else:
                slots = list(map(own.__getitem__, blocks))  # type: ignore[arg-type]  # likewise
        except (KeyError, TypeError):  # a partial block, or one that is not there
            pass
        if not slots:
            return self._deref_one_by_one(blocks)
        idle: list[Slot] = []
        for i, slot in enumerate(slots):
            refs = slot.refs = slot.refs - 1
            if not refs:
                idle.append(slot)
            elif refs < 0:
                for undo in slots[: i + 1]:
                    undo.refs += 1
                return self._deref_one_by_one(blocks)
        self._references -= len(slots)
        self._freed += idle
        return 1

    def _leave_runs(self) -> None:
        """Go on block by block, for good."""
        runs, self._runs = self._runs, None
        if runs is None:
            return
        own, registered, policy = self._names.own, self._pool.registered, self._pool.inactive
        blocks = runs.blocks()
        plhs = {name: plh for run in set(blocks.values()) for name, plh in zip(run.names, runs.plhs(run), strict=True)}
        for name, run in blocks.items():
            own[name] = registered[plhs[name]] = slot = Slot()
            slot.name, slot.plh, slot.refs = name, plhs[name], run.refs
        policy._on_register(list(own.values()))
        policy.insert([own[name] for run in runs.idle() for name in reversed(run.names)])
        self._references, self._num_inactive = runs.references, runs.num_inactive

    def _flush_freed(self) -> None:
        """Insert what was freed since the last time into the policy: schedulers free block by block, it takes many at once.

        Whoever calls this goes on with slots.
        """
        self._leave_runs()
        freed = self._freed
        if freed:
            self._pool.inactive.insert(freed)
            self._num_inactive += len(freed)
            freed.clear()

    def _deref_one_by_one(self, blocks: Sequence[Block]) -> int:
        self._flush_freed()
        move_checks.check_deref(blocks, self.references, self._names, self._pool.inactive, self.backend)
        for block in blocks:
            if isinstance(block, UUID):
                self._pool.give_back(self._partials.pop(block))
            else:
                self._references -= 1
                slot = self._names.release(block)
                if not slot.refs and not slot.aliases:
                    self._pool.inactive._insert_one(slot)
                    self._num_inactive += 1
        return 1

    def _promote(self, move: Promote) -> int:
        move_checks.check_promote(move, self._partials)
        name, plh, pool = move.block, move_checks.check_promote_plh(move), self._pool
        if self._runs is not None:
            is_new = self._runs.promote(move)
            if is_new is not None:
                if is_new:
                    self._publish_promoted(move)
                return 1
        self._flush_freed()
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
                pool.inactive._on_touch(slot)
            else:
                pool.inactive.remove((slot,))
                self._num_inactive -= 1
            self._names.hold(slot, name)
            pool.give_back(mutable)
            return 1
        mutable.name, mutable.plh = name, plh
        pool.registered[plh] = mutable
        self._names.hold_new(mutable)
        pool.inactive._on_register((mutable,))
        pool.registrations += 1
        if self._offload is not None:
            self._details[plh] = BlockDetails(name, plh, move.parent, move.local_hash, move.token_ids)
        self._publish_promoted(move)
        return 1

    def _publish_promoted(self, move: Promote) -> None:
        beside = None if move.token_ids is None else [move.token_ids]
        self._publisher.publish(Stored(move.parent, (move.block,), (move.local_hash,)), beside)
        if LOG.isEnabledFor(TRACE_LEVEL):
            trace(self, "allocation", (move.block,), form=OF_1_2_1)

    # ---------------------------------------------------------------------------------------------- the rest

    def clear(self) -> bool:
        """Drop every cached block and publish a Cleared; False, and nothing happens, while any block is in use.

        Transfers under way are cancelled, and the further tier is emptied too.
        """
        if self.num_active_block_refs:
            return False
        if self._runs is not None:
            self._runs.clear()
        else:
            self._flush_freed()
            self.cancel_offload()
            self._details.clear()
            self._pool.drain()
            self._names = Names()
            self._num_inactive = 0
        self._publisher.publish(Cleared())
        if self._publisher.failure is not None:
            self._publisher.surface()
        return True

    def _plh_of(self, name: int) -> int | None:
        if self._runs is not None:
            return self._runs.plh_of(name)
        slot = self._names.held_by(name) or self._names.own.get(name)
        if slot is None and self._names.homonyms:
            same = (slot for slot in self._pool.registered.values() if slot.name == name)
            slot = next(same, None)
        return None if slot is None else slot.plh
