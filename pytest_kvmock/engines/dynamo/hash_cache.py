"""The block manager of Dynamo's mocker before kvbm-logical (`KvManager` and `HashCache` of dynamo-mocker 1.0.2).

It reproduces the faults of the original:

- *local hashes from the end*: a Stored of n blocks has the last n local hashes of its Use. If a cached block follows a
  stored one, or if there is an extra hash, blocks get hashes of other blocks (hygiene: `wrong_hash`);
- *anchor by hits*: the parent of a Stored is the last cached full block of its Use, wherever it is, and the blocks
  stored before and after it are published as one run (`wrong_hash`; `invalid_block` if a Use names a block twice,
  which is then its own parent);
- *a failed Use keeps the blocks that it took*, and does not publish them (`engine_drift`);
- *a Deref of a block that is not in use* is ignored, so a request that frees a block twice silently drops another
  request's reference;
- *a freed partial block* stays in the pool until it is evicted without an event, although no request can find it;
- *a Destroy* takes a block from all its users;
- *tokens by place*: token ids are found by a block's place among all blocks of the Use, partial ones included
  (`wrong_hash` if a partial block is not the last one);
- a Use whose last hit is a partial block is refused.

`strict=True` corrects all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar
from uuid import UUID

from pytest_kvmock.engines.base.cache_trace import OF_1_0_2, TRACE_LEVEL, trace
from pytest_kvmock.engines.base.manager import PrefillCost, SequenceBlocks
from pytest_kvmock.engines.base.manager_base import LOG, ManagerBase
from pytest_kvmock.engines.dynamo import move_checks
from pytest_kvmock.engines.dynamo.hash_cache_use import (
    UsePlan,
    check_lengths,
    check_token_places,
    evicted_one_by_one,
    full_blocks,
    stored_as_1_0_2,
    stored_runs,
)
from pytest_kvmock.engines.dynamo.short_forms import ShortForms
from pytest_kvmock.values.events import BlockTokens, Removed, StorageTier, Stored
from pytest_kvmock.values.moves import Block, Deref, Destroy, Move, MoveError, Promote, Use
from pytest_kvmock.values.sinks import Sink

T = TypeVar("T", bound=Hashable)


class LruEvictor(Generic[T]):
    """Objects in the order in which dynamo-mocker 1.0.2 evicts them (`LRUEvictor`).

    The original gives each object a signed number, and evicts the smallest: `insert` counts up from 0, `push_front`
    counts down. So an inserted object is evicted last, and an object pushed to the front first. An object that comes
    again has only its new place.
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, item: object) -> bool:
        return item in self._order

    def __iter__(self) -> Iterator[T]:
        """Iterate in the order of eviction."""
        return iter(self._order)

    def insert(self, item: T) -> None:
        """Insert an object at the end."""
        self._order[item] = None
        self._order.move_to_end(item)

    def push_front(self, item: T) -> None:
        """Insert an object at the front."""
        self._order[item] = None
        self._order.move_to_end(item, last=False)

    def remove(self, item: T) -> bool:
        """Remove an object; return False if it is not there."""
        if item not in self._order:
            return False
        del self._order[item]
        return True

    def evict(self) -> T | None:
        """Remove and return the first object; None if there is none."""
        return self._order.popitem(last=False)[0] if self._order else None

    def clear(self) -> None:
        """Remove all objects."""
        self._order.clear()


# Theory of operation
#
# A block, full or partial, is in one of two pools under its name: in use, with references, or inactive, in the order of
# eviction. There are no slots; the two sizes together are the used capacity.
#
# A Use is planned before it is carried out, because the original finds errors only half-way, and panics. The original
# publishes each eviction at once, and the stored blocks at the end. So all Removed of a Use come first, one a block,
# then the Stored, and the mock can publish after the plan. (If local hashes are missing, the original panics only with
# a listener; the mock always refuses the Use.) A Use fits if and only if the blocks in use and the blocks that it names
# do not exceed the capacity: inactive blocks can always be evicted.


class HashCacheManager(ShortForms, ManagerBase):
    """A block manager that caches blocks by name, and evicts the least recently used one.

    `process` answers a Use with the number of its blocks, or with 0 if it failed.

    In 1.0.2 a Use has no parent: if its first block is stored, the run is a root. Here `Use.parent` can name a parent.
    Lineage hashes are ignored.

    Args:
        backend: name of the behaviour.
        num_blocks: capacity in blocks, at least 1.
        block_size: tokens a block, at least 2.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None to publish nothing and consume no event id.
        strict: correct the faults of the original (see the module). A Use has one local hash and one list of token ids
            for each full block, in order (optionally also for a last partial block: 1.0.2's sequences add them when
            all its tokens are there). Each run is stored below the block right before it. A Use that does not fit
            changes nothing. A Deref of a block that is not in use, and a Destroy of a block with several references,
            are refused. A freed partial block is dropped.

    Raises:
        ValueError: an argument is invalid.

    Attributes:
        strict: as given.
    """

    def __init__(
        self,
        *,
        backend: str = "hash_cache",
        num_blocks: int,
        block_size: int = 16,
        dp_rank: int = 0,
        sink: Sink | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__(
            backend=backend,
            num_blocks=num_blocks,
            block_size=move_checks.check_sequence_block_size(block_size),
            dp_rank=dp_rank,
            sink=sink,
        )
        if not isinstance(strict, bool):
            raise ValueError(f"strict must be True or False, got {strict!r:.80}")  # noqa: TRY004 - one error a manager
        self.strict = strict
        self._active: dict[Block, int] = {}
        self._inactive: LruEvictor[Block] = LruEvictor()

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def num_active_blocks(self) -> int:
        """Blocks in use."""
        return len(self._active)

    @property
    def num_active_block_refs(self) -> int:
        """References to blocks in use."""
        return sum(self._active.values())

    @property
    def num_inactive_blocks(self) -> int:
        """Blocks that no request uses, including freed partial ones, which no request can find."""
        return len(self._inactive)

    @property
    def active_blocks(self) -> Mapping[Block, int]:
        """References to each block in use, partial ones included."""
        return dict(self._active)

    def references(self, block: Block) -> int:
        """Count the references to one block; 0 if it is not in use."""
        return self._active.get(block, 0)

    def inactive_blocks(self) -> list[Block]:
        """Return the blocks that no request uses, including freed partial ones, in the order of their eviction."""
        return list(self._inactive)

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Return the sequence hashes of the full blocks in both pools."""
        if tier != StorageTier.DEVICE:
            return []
        return [*full_blocks(self._active), *full_blocks(self._inactive)]

    def probe_new_blocks(self, blocks: Iterable[Block]) -> int:
        """Count the given blocks that are in neither pool; repeats count."""
        return sum(block not in self._active and block not in self._inactive for block in blocks)

    @property
    def current_capacity(self) -> int:
        """Blocks in both pools."""
        return len(self._active) + len(self._inactive)

    @property
    def current_capacity_perc(self) -> float:
        """Share of the capacity that both pools take, from 0 to 1."""
        return self.current_capacity / self.num_blocks

    def prefill_cost(self, sequence: SequenceBlocks) -> PrefillCost:
        """Return the cost of prefilling this sequence now. Changes nothing, recency included.

        Its leading blocks in either pool count as cached, including a partial one. This also holds without prefix
        caching, where only the sequence's own blocks can be there.
        """
        blocks = sequence.unique_blocks
        overlap = 0
        for block in blocks:
            if block not in self._active and block not in self._inactive:
                break
            overlap += 1
        cached = min(overlap * self.block_size, sequence.num_input_tokens)
        return PrefillCost(len(blocks) - overlap, sequence.num_input_tokens - cached, cached)

    # --------------------------------------------------------------------------------------------------- moves

    def process(self, move: Move) -> int:
        """Carry out a move.

        Returns:
            For a Use, the number of its blocks, or 0 if they did not fit; for other moves 1.

        Raises:
            MoveError: the move breaks a rule; nothing has changed. The original panics in this case.
        """
        kind = type(move)
        if kind is Use:
            answer = self._use(move)  # type: ignore[arg-type]  # by its class, which mypy does not follow
        elif kind is Deref:
            return self._deref(move.blocks)  # type: ignore[union-attr]  # as above
        elif kind is Promote:
            answer = self._promote(move)  # type: ignore[arg-type]  # as above
        elif kind is Destroy:
            answer = self._destroy(move.blocks)  # type: ignore[union-attr]  # as above
        else:
            raise MoveError(f"expected a Use, Deref, Destroy or Promote, got {move!r:.200}")
        if self._publisher.failure is not None:
            self._publisher.surface()
        return answer

    def destroy(self, *blocks: Block | Iterable[Block]) -> None:
        """Short form of Destroy: delete blocks that are given one by one or as a list.

        Raises:
            MoveError: see `process`.
        """
        self.process(Destroy(move_checks.flatten(blocks)))

    def _caches(self, block: int) -> bool:
        return block in self._active or block in self._inactive

    def _use(self, move: Use) -> int:
        blocks = move.blocks
        _, num_full = move_checks.check_names(move)
        if self.strict:
            check_lengths(move, num_full)
        plan = self._plan_use(blocks)
        fits = plan.served == len(blocks)
        if not self.strict:
            check_token_places(move, plan)
        elif not fits:
            return 0
        published: list[tuple[Stored, BlockTokens | None]] = []
        if fits:
            published = list(stored_runs(move, plan) if self.strict else stored_as_1_0_2(move, plan))

        active, inactive = self._active, self._inactive
        is_traced = (plan.evicted or published) and LOG.isEnabledFor(TRACE_LEVEL)
        if is_traced:
            for block, sizes in evicted_one_by_one(blocks, plan, len(active), len(inactive)):
                trace(self, "eviction", full_blocks([block]), sizes=sizes, form=OF_1_0_2)
        for block in plan.evicted:
            inactive.remove(block)
            if not isinstance(block, UUID):
                self._publisher.publish(Removed((block,)))
        for block in plan.woken:
            inactive.remove(block)
        for block in blocks[: plan.served]:
            active[block] = active.get(block, 0) + 1
        for stored, token_ids in published:
            self._publisher.publish(stored, token_ids)
            if is_traced:
                trace(self, "allocation", stored.block_hashes, form=OF_1_0_2)
        return len(blocks) if fits else 0

    def _plan_use(self, blocks: Sequence[Block]) -> UsePlan:
        """Plan a Use of these blocks; it ends before the first block without room."""
        active, inactive = self._active, self._inactive
        room = self.num_blocks - len(active) - len(inactive)
        hits: list[int] = []
        stored: list[int] = []
        woken: list[Block] = []
        evicted: dict[Block, None] = {}
        taken: set[Block] = set()
        going = iter(inactive)
        for place, block in enumerate(blocks):
            if block in active or block in taken:
                hits.append(place)
                continue
            if block in inactive and block not in evicted:
                hits.append(place)
                woken.append(block)
            elif room:
                room -= 1
                stored.append(place)
            else:
                victim = next((other for other in going if other not in taken), None)
                if victim is None:
                    return UsePlan(place, hits, stored, woken, list(evicted))
                evicted[victim] = None
                stored.append(place)
            taken.add(block)
        return UsePlan(len(blocks), hits, stored, woken, list(evicted))

    def _deref(self, blocks: Sequence[Block]) -> int:
        if self.strict:
            move_checks.check_held(blocks, self.references)
        else:
            move_checks.count_blocks(blocks, "Deref")
        active = self._active
        for block in blocks:
            references = active.get(block)
            if references is None:
                continue
            if references > 1:
                active[block] = references - 1
                continue
            del active[block]
            if not (self.strict and isinstance(block, UUID)):
                self._inactive.insert(block)
        return 1

    def _destroy(self, blocks: Sequence[Block]) -> int:
        for block, times in move_checks.count_blocks(blocks, "Destroy").items():
            references = self.references(block)
            what = f"Destroy of {move_checks.called(block)}"
            if not references:
                raise MoveError(f"{what}: it is not active")
            if times > 1:
                raise MoveError(f"{what}: the move names it {times} times, and the first destroys it")
            if self.strict and references > 1:
                raise MoveError(f"{what}: it has {references} references, and others use it (strict)")
        for block in blocks:
            del self._active[block]
        destroyed = tuple(full_blocks(blocks))
        if destroyed:
            self._publisher.publish(Removed(destroyed))
            if LOG.isEnabledFor(TRACE_LEVEL):
                trace(self, "eviction", destroyed, form=OF_1_0_2)
        return 1

    def _promote(self, move: Promote) -> int:
        move_checks.check_promote(move, self._active)
        references = self._active[move.partial]
        if references > 1:
            raise MoveError(f"Promote of partial block {move.partial}: it has {references} references, expected one")
        del self._active[move.partial]
        new = not self._caches(move.block)
        self._inactive.remove(move.block)
        self._active[move.block] = self.references(move.block) + 1
        if new:
            tokens = None if move.token_ids is None else [move.token_ids]
            self._publisher.publish(Stored(move.parent, (move.block,), (move.local_hash,)), tokens)
            if LOG.isEnabledFor(TRACE_LEVEL):
                trace(self, "allocation", (move.block,), form=OF_1_0_2)
        return 1

    def clear(self) -> bool:
        """Drop every cached block and publish a Cleared; do nothing and return False while any block is in use.

        The original has no such operation.
        """
        if self._active:
            return False
        self._inactive.clear()
        return self._cleared()
