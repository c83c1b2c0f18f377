"""The block manager of Dynamo's newer mocker, on kvbm-logical (`KvManager` of dynamo-mocker 1.2.1).

One subject: the manager's public interface; its two forms implement the effects of a move on blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Protocol
from uuid import UUID

from pytest_kvmock.engines.base.cache_trace import OF_1_2_1, TRACE_LEVEL, trace
from pytest_kvmock.engines.base.eviction_policy import EvictionPolicy, Slot
from pytest_kvmock.engines.base.manager import PrefillCost, SequenceBlocks
from pytest_kvmock.engines.base.manager_base import LOG, ManagerBase
from pytest_kvmock.engines.base.offload import BlockDetails, OffloadEngine, Scheduled, SwapIn
from pytest_kvmock.engines.dynamo import move_checks
from pytest_kvmock.engines.dynamo.cached_slots import CachedSlots, Pin
from pytest_kvmock.engines.dynamo.offloading import Offloading
from pytest_kvmock.engines.dynamo.pool import BlockPool, PoolMetrics, Used
from pytest_kvmock.engines.dynamo.runs import Runs
from pytest_kvmock.engines.dynamo.short_forms import LineageShortForms
from pytest_kvmock.values.events import StorageTier, Stored
from pytest_kvmock.values.moves import Block, Deref, Destroy, Move, MoveError, Promote, Use
from pytest_kvmock.values.sinks import Sink

# A manager keeps its full blocks in one of two forms. `Runs` is quick and handles only the moves of schedulers:
# managers of `lineage` and `lru` begin with it. `CachedSlots` handles every move, and asks the policy. At the first
# move that `Runs` cannot handle, a manager switches to `CachedSlots` for good. Both count slots in the same pool, and
# change the same partial blocks.


class Form(Protocol):
    """The full blocks of a manager: the cached ones, and the references to each.

    Attributes:
        references: number of references to full blocks.
    """

    references: int

    @property
    def num_inactive(self) -> int:
        """Cached blocks that no request uses."""

    def held(self) -> Mapping[int, int]:
        """Return the number of references to each block in use."""

    def references_of(self, name: int) -> int:
        """Count the references to one full block."""

    def inactive(self) -> list[int]:
        """Return the cached blocks that no request uses, in the order in which they would be evicted."""

    def resident(self) -> Collection[int]:
        """Return the cached blocks, in the order in which they were stored."""

    def has_plh(self, plh: int) -> bool:
        """Return whether a block is cached under exactly this lineage hash."""

    def plh_of(self, name: int) -> int | None:
        """Return the lineage hash of a block; None if it is not cached."""

    def overlap(self, blocks: Sequence[Block], plhs: Sequence[int]) -> int:
        """Count the leading blocks that are in use by this name, or cached under this lineage hash."""

    def use(self, move: Use, leading: int) -> Used | None:
        """Carry out a Use that begins with `leading` full blocks; all but its lineage hashes was checked.

        Returns:
            Its effects; None, with nothing changed, if this form cannot handle the Use.
        """

    def deref(self, blocks: Sequence[Block]) -> bool:
        """Carry out a Deref; return False, with nothing changed, if this form cannot handle it."""

    def promote(self, move: Promote) -> bool | None:
        """Carry out a Promote that was checked.

        Returns:
            Whether a block was stored; None, with nothing changed, if this form cannot handle the Promote.
        """

    def clear(self) -> None:
        """Drop all blocks; none is in use."""


class LogicalManager(LineageShortForms, ManagerBase):
    """Allocates blocks, caches them by lineage hash, evicts by a policy, and publishes the changes.

    Args:
        backend: name of the behaviour.
        eviction: the order in which inactive blocks are evicted; one policy belongs to one manager.
        num_blocks: capacity in blocks, at least 1.
        block_size: tokens a block, a power of two from 2 to 1024.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None to publish nothing and consume no event id.
        offload: engine that keeps evicted blocks in a further tier; None for no further tier. See `attach_offload`.
        in_runs: whether it begins in the form of `Runs`, which is quicker and asks no policy. Only for the unmodified
            policies of `lineage` and `lru`, which evict the same blocks as that form.

    Raises:
        ValueError: a number is invalid.
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
        self._pool = BlockPool(num_blocks, eviction)
        self._partials: dict[UUID, Slot] = {}
        self._form: Form = Runs(self._pool, self._partials) if in_runs else self._new_slots()
        self._below = Offloading(self, self._slots, self._pool, self._publisher)
        if offload is not None:
            self.attach_offload(offload)

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def num_active_blocks(self) -> int:
        """Physical blocks in use."""
        return self.num_blocks - self.num_inactive_blocks - self._pool.reset_len

    @property
    def num_active_block_refs(self) -> int:
        """References to blocks in use; a partial block has one."""
        return len(self._partials) + self._form.references

    @property
    def num_inactive_blocks(self) -> int:
        """Cached blocks that no request uses."""
        return self._form.num_inactive

    @property
    def active_blocks(self) -> Mapping[Block, int]:
        """References to each block in use, partial ones included."""
        blocks: dict[Block, int] = dict.fromkeys(self._partials, 1)
        blocks.update(self._form.held().items())
        return blocks

    def references(self, block: Block) -> int:
        """Count the references to one block; 0 if it is not in use."""
        if isinstance(block, UUID):
            return int(block in self._partials)
        return self._form.references_of(block)

    def inactive_blocks(self) -> list[int]:
        """Return the cached blocks that no request uses, in the order of their eviction. May cost a sort."""
        return self._form.inactive()

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Return the sequence hashes, as stored, of the blocks that are physically cached in a tier."""
        return self._form.resident() if tier == StorageTier.DEVICE else self._below.resident(tier)

    def check_presence(self, plhs: Iterable[int]) -> list[tuple[int, bool]]:
        """Return, with each lineage hash, whether a block is cached under exactly this hash. Changes nothing."""
        return [(plh, self._form.has_plh(plh)) for plh in plhs]

    def metrics(self) -> PoolMetrics:
        """Take a snapshot of the pool's counters and gauges."""
        return self._pool.metrics(
            mutable=len(self._partials) + self._below.num_outside,
            immutable=self._form.references,
            inactive=self.num_inactive_blocks,
        )

    def prefill_cost(self, sequence: SequenceBlocks) -> PrefillCost:
        """Return the cost of prefilling this sequence now. Changes nothing, recency included.

        A block counts as cached if its name is in use, or if the manager has an entry for its lineage hash. (A block
        that one Use evicted and stored again has no entry.)
        """
        blocks, plhs = sequence.unique_blocks, sequence.positional_lineage_hashes
        overlap = self._form.overlap(blocks, plhs) if sequence.enable_prefix_caching else 0
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

    def _new_slots(self, runs: Runs | None = None) -> CachedSlots:
        return CachedSlots(self.backend, self._pool, self._partials, runs)

    def _slots(self) -> CachedSlots:
        """Return the blocks in slots; switch to this form for good if needed."""
        form = self._form
        if not isinstance(form, CachedSlots):
            assert isinstance(form, Runs)
            form = self._form = self._new_slots(form)
        return form

    def _deref(self, blocks: Sequence[Block]) -> int:
        if not self._form.deref(blocks):
            move_checks.check_held(blocks, self.references)  # a refused move does not end the quick form
            self._slots().deref(blocks)
        return 1

    def _use(self, move: Use) -> int:
        leading = move_checks.check_use(move)
        used = self._form.use(move, leading)
        if used is None:
            move_checks.check_use_plhs(move)  # as above
            used = self._slots().use(move, leading)
        victims: list[Slot] = []
        if self._below.engine is not None:
            if used.stored:
                self._below.note_stored(move, used)
            victims = self._slots().evict_for(move, used)
        used.publish(self._publisher, self._pool)
        if (used.stored or used.removed) and LOG.isEnabledFor(TRACE_LEVEL):
            trace(self, "allocation", used.stored, form=OF_1_2_1)
            if not victims:
                trace(self, "eviction", used.removed, form=OF_1_2_1)
        if victims:
            self._below.hand_over(victims, used)
        return used.served

    def _promote(self, move: Promote) -> int:
        move_checks.check_promote(move, self._partials)
        plh = move_checks.check_promote_plh(move)
        is_new = self._form.promote(move)
        if is_new is None:
            is_new = self._slots().promote(move)
        if is_new:
            self._pool.registrations += 1
            self._below.note(BlockDetails(move.block, plh, move.parent, move.local_hash, move.token_ids))
            tokens = None if move.token_ids is None else [move.token_ids]
            self._publisher.publish(Stored(move.parent, (move.block,), (move.local_hash,)), tokens)
            if LOG.isEnabledFor(TRACE_LEVEL):
                trace(self, "allocation", (move.block,), form=OF_1_2_1)
        return 1

    # ---------------------------------------------------------------------------------------------- the rest

    def clear(self) -> bool:
        """Drop every cached block and publish a Cleared; do nothing and return False while any block is in use.

        Transfers under way are cancelled, and the further tier is emptied too.
        """
        if self.num_active_block_refs:
            return False
        self._below.clear()
        self._form.clear()
        return self._cleared()

    def _plh_of(self, name: int) -> int | None:
        return self._form.plh_of(name)

    # ----------------------------------------------------------------------------------------- the further tier

    @property
    def offload(self) -> OffloadEngine | None:
        """The offload engine; None if there is no further tier."""
        return self._below.engine

    def attach_offload(self, engine: OffloadEngine) -> None:
        """Attach an offload engine, which takes the blocks that are evicted from now on.

        Args:
            engine: this manager's engine; two managers cannot share one.

        Raises:
            ValueError: there is an engine already, or blocks are cached or in use. (The further tier's events repeat
                the facts of the device's events, and a manager without an engine does not keep these facts.)
        """
        self._below.attach(engine)

    def tick(self, now: float) -> None:
        """Move the time of the further tier forward to `now` (ms), and publish what happened there.

        Nothing happens without an offload engine.

        Raises:
            ValueError: the time is not a finite number of at least 0, or is before the last one.
        """
        self._below.tick(now)

    @property
    def offload_now(self) -> float:
        """The latest time, in ms, that the further tier was moved to; 0 before the first."""
        return self._below.now

    def offload_deadline(self) -> float | None:
        """Return when the next transfer finishes if nothing else starts; None if none is under way."""
        return None if self.offload is None else self.offload.deadline()

    @property
    def num_outside(self) -> int:
        """Slots that hold no block: quarantined while their evicted block is copied, or reserved for a block that comes
        back.
        """
        return self._below.num_outside

    @property
    def num_reserved(self) -> int:
        """Slots, among `num_outside`, that are reserved for blocks that come back."""
        return self._below.num_reserved

    def unpublished(self, tier: StorageTier) -> Container[int]:
        """Return the blocks of a further tier that events do not show; see `OffloadEngine`."""
        return self._below.unpublished(tier)

    def swap_in(self, plhs: Sequence[int], now: float | None = None) -> SwapIn:
        """Start to load the longest prefix of these blocks that the further tier holds back to the device.

        Args:
            plhs: lineage hashes of the blocks, in order, from the first that the device lacks.
            now: the time, in ms; None: the time of the last tick.

        Returns:
            `NoHits`; or `BlockedOnG1Offload` if blocks must be evicted first (this has begun); or `Scheduled`: register
            its blocks when it is complete (`register_swapped_in`), or give it up (`put_down`).

        Raises:
            ValueError: the time is not a finite number of at least 0.
            MoveError: something is not a lineage hash.
        """
        return self._below.swap_in(plhs, now)

    def put_down(self, scheduled: Scheduled) -> None:
        """Give up a swap-in: free its slots, and unpin its blocks in the further tier.

        Raises:
            ValueError: it was put down already, its blocks were registered, or it was cancelled; or it belongs to
                another manager.
        """
        self._below.put_down(scheduled)

    def register_swapped_in(self, blocks: Sequence[BlockDetails], parent: int | None, scheduled: Scheduled) -> int:
        """Cache the blocks that a swap-in brought, inactive, and publish them as stored on the device.

        If the device has a block by now, its reserved slot is freed, and the next blocks are stored below the block.
        The `parent` of a block in `blocks` is ignored: its parent is the block before it.

        Args:
            blocks: the blocks, in order.
            parent: sequence hash of the block before the first; None for a root.
            scheduled: the swap-in, which has the slots; it is closed after this.

        Returns:
            Number of blocks that were taken: no more than there are slots.

        Raises:
            ValueError: see `put_down`.
        """
        return self._below.register(blocks, parent, scheduled)

    def cancel_offload(self) -> None:
        """Cancel all transfers, put down swap-ins and pins, and empty the further tier, without an event.

        Nothing happens without an offload engine. The device keeps its blocks.
        """
        self._below.cancel()

    def pin(self, plhs: Sequence[int]) -> Pin | None:
        """Keep these blocks active until `unpin`, without a request; return None if not all are cached.

        The look-up is that of a Use, even if it fails: inactive blocks become the youngest.

        Raises:
            MoveError: something is not a lineage hash.
        """
        move_checks.check_plhs(plhs)
        return self._slots().pin(plhs)

    def unpin(self, pin: Pin) -> None:
        """Drop a pin: blocks without another holder become inactive, in order.

        Raises:
            ValueError: it was dropped already, or cancelled.
        """
        if not self._slots().has_pin(pin):
            raise ValueError(f"{pin!r} is not a pin of {self!r}: a pin is dropped once")
        self._slots().unpin(pin)

    def num_held_by(self, pins: Iterable[Pin]) -> int:
        """Count the blocks that only these pins keep active."""
        return self._slots().num_held_by(pins)
