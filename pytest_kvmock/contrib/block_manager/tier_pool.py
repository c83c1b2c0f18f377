"""The pool of one tier: allocation, registration, matching, and the return of blocks (dynamo-llm 0.2.1, `BlockPool`).

One subject: the owner of each block of a tier. A block is in exactly one place: free (Reset, in the pool),
inactive (Registered, in the pool, evictable), active (owned by a handle), or returning (returned, waiting for
`flush()`). A pool is used from one thread. Its requests return at once; the awaitable ones have the original's names,
and behave like their `_blocking` forms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from pytest_kvmock.contrib.block_manager.block_errors import (
    BlockNotComplete,
    InvalidMutableBlock,
    NotEnoughBlocksAvailable,
    ProgressEngineShutdown,
)
from pytest_kvmock.contrib.block_manager.block_handles import ImmutableBlock, MutableBlock
from pytest_kvmock.contrib.block_manager.block_lists import ImmutableBlocks, MutableBlocks
from pytest_kvmock.contrib.block_manager.local_block import Block, BlockState, LocalBlockSet, RingLink, give_back
from pytest_kvmock.contrib.block_manager.token_block import TokenBlock
from pytest_kvmock.engines.base.manager_base import EventPublisher
from pytest_kvmock.values.checks import check_iterable, check_u64, is_integer
from pytest_kvmock.values.events import Stored

_REGISTERED: Final = BlockState.REGISTERED
_COMPLETE: Final = BlockState.COMPLETE
_RESET: Final = BlockState.RESET

# Handles are made without their constructor, which would take a tenth of a block's time.
_new: Final = object.__new__


class PoolCounts(NamedTuple):
    """Counts of a pool's blocks by state; they add up to `total`."""

    total: int
    free: int
    """Reset, in the pool."""
    inactive: int
    """Registered, in the pool: found by their hash, and evictable."""
    active: int
    """Owned by a handle."""
    returning: int
    """Returned, but not in the pool before the next `flush()`."""


class TierPool:
    """The blocks of one tier.

    Made by a `KvBlockManager`, which has one for each layout of its configuration.

    Args:
        block_set: the common data of its blocks.
        publisher: publishes its events.
    """

    __slots__ = (
        "_blocks",
        "_free",
        "_num_inactive",
        "_priorities",
        "_publisher",
        "_registered",
        "_returned",
        "_rings",
        "_tick",
        "block_set",
    )

    def __init__(self, block_set: LocalBlockSet, publisher: EventPublisher) -> None:
        self.block_set = block_set
        self._publisher = publisher
        self._blocks = [Block(block_set, index) for index in range(block_set.num_blocks)]
        self._free = deque(self._blocks)
        self._returned = block_set.returned
        self._registered: dict[int, Block] = {}
        # Inactive blocks, in a ring for each priority, in the order of their return. Ticks rise, so this is also the
        # order of (returned, acquired, hash), and blocks need no keys.
        self._rings: dict[int, RingLink] = {}
        self._priorities: list[int] = []  # a heap of the existing rings
        self._num_inactive = 0
        self._tick = 0

    def __repr__(self) -> str:
        return f"<TierPool {self.block_set.name} of worker {self.block_set.worker_id}: {self.counts}>"

    # -------------------------------------------------------------------------------------------------- counts

    @property
    def total_blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def available_blocks(self) -> int:
        """Number of blocks that can be allocated: free and inactive ones."""
        return len(self._free) + self._num_inactive

    @property
    def counts(self) -> PoolCounts:
        """Numbers of free, inactive, active and returning blocks."""
        total, free, returning = len(self._blocks), len(self._free), len(self._returned)
        return PoolCounts(total, free, self._num_inactive, total - free - self._num_inactive - returning, returning)

    def block(self, index: int) -> Block:
        """Return a block by its number, for transfers, without allocating it.

        Raises:
            IndexError: the set has no such block.
        """
        if not is_integer(index, 0) or index >= len(self._blocks):
            raise IndexError(
                f"block index out of bounds: {index!r:.80}; the {self.block_set.name} pool of worker "
                f"{self.block_set.worker_id} has blocks 0 to {len(self._blocks) - 1}"
            )
        return self._blocks[index]

    def registered_hashes(self) -> list[int]:
        """Return the sequence hashes that the pool would match, in the order of registration."""
        return list(self._registered)

    # ------------------------------------------------------------------------------------------------ requests

    async def allocate_blocks(self, count: int) -> MutableBlocks:
        """Allocate blocks; the original's asynchronous form of `allocate_blocks_blocking`."""
        return self.allocate_blocks_blocking(count)

    def allocate_blocks_blocking(self, count: int) -> MutableBlocks:
        """Allocate `count` blocks, all or none: first free ones, in the order of their return, then by eviction.

        The inactive block with the lowest (priority, returned tick, acquired tick, hash) is evicted first, whether or
        not it is the parent of others.

        Raises:
            NotEnoughBlocksAvailable: fewer are free and inactive. Returning blocks count after `flush()`.
            ProgressEngineShutdown: the pool is stopped.
            ValueError: the count is not an integer of at least 0.
        """
        self.check_running("allocate_blocks")
        if not is_integer(count, 0):
            raise ValueError(f"allocate_blocks: count must be an integer of at least 0, got {count!r:.80}")
        free = self._free
        available = len(free) + self._num_inactive
        if count > available:
            waiting = len(self._returned)
            note = f" ({waiting} more were returned and wait for flush())" if waiting else ""
            raise NotEnoughBlocksAvailable(count, available, note)
        blocks = [free.popleft() for _ in range(min(count, len(free)))]
        evicted = self._evict(count - len(blocks)) if count > len(blocks) else []
        hashes = [block.sequence_hash for block in evicted]
        blocks += evicted
        tick, new = self._tick, _new
        handles = MutableBlocks()
        append = handles.append
        for block in blocks:
            tick += 1
            block.acquired_tick = tick
            block.refs = 1
            handle = new(MutableBlock)
            handle._block = block
            append(handle)
        self._tick = tick
        if hashes:  # the pool is complete before the first of these is published, whatever the sink does
            self._publisher.publish_removed(hashes, self.block_set.tier)
            if self._publisher.failure is not None:
                self._surface(handles)
        return handles

    async def register_blocks(self, blocks: Iterable[MutableBlock]) -> ImmutableBlocks:
        """Register blocks; the original's asynchronous form of `register_blocks_blocking`."""
        return self.register_blocks_blocking(blocks)

    def register_blocks_blocking(self, blocks: Iterable[MutableBlock]) -> ImmutableBlocks:
        """Register Complete blocks, and return an immutable handle for each; the mutable ones hold no block any more.

        If the hash of a block is already registered, the block is returned, and its handle is one of the registered
        block. With a sink, one Stored is published for each chain of new blocks, parents first.

        Raises:
            BlockNotComplete: a block is not Complete; no block was registered.
            InvalidMutableBlock: a block is of another pool, or given twice; as above.
            BlockClosed: a handle holds no block any more; as above.
            ProgressEngineShutdown: the pool is stopped.
        """
        self.check_running("register_blocks")
        given = list(check_iterable("register_blocks", blocks, "mutable blocks"))
        self._check_registrable(given)
        registered, new = self._registered, _new
        out = ImmutableBlocks()
        append = out.append
        stored: list[TokenBlock] = []
        for handle in given:
            block = handle._block
            handle._block = None
            assert block is not None
            content = block.content
            assert type(content) is TokenBlock
            sequence_hash = content.sequence_hash
            present = registered.get(sequence_hash)
            if present is None:
                block.state = _REGISTERED
                block.sequence_hash = sequence_hash
                block.block_hash = content.block_hash
                block.parent_sequence_hash = content.parent_sequence_hash
                block.content = None
                registered[sequence_hash] = present = block
                stored.append(content)
            else:
                self._share(present)
                give_back(block)
            shared = new(ImmutableBlock)
            shared._block = present
            append(shared)
        if stored and self._publisher.sink is not None:
            self._publish_stored(stored)
            if self._publisher.failure is not None:
                self._surface(out)
        return out

    async def match_sequence_hashes(self, sequence_hashes: Iterable[int]) -> ImmutableBlocks:
        """Match hashes; the original's asynchronous form of `match_sequence_hashes_blocking`."""
        return self.match_sequence_hashes_blocking(sequence_hashes)

    def match_sequence_hashes_blocking(self, sequence_hashes: Iterable[int]) -> ImmutableBlocks:
        """Return handles of the longest run of registered blocks, from the first hash on.

        Raises:
            ProgressEngineShutdown: the pool is stopped.
            ValueError: the run ends at a value that is not a sequence hash; no block was matched.
        """
        new = _new
        out = ImmutableBlocks()
        append = out.append
        for block in self._leading_run("match_sequence_hashes", sequence_hashes):
            if block.refs:
                block.refs += 1
            else:
                self._share(block)
            shared = new(ImmutableBlock)
            shared._block = block
            append(shared)
        return out

    async def touch_blocks(self, sequence_hashes: Iterable[int]) -> None:
        """Touch blocks; the original's asynchronous form of `touch_blocks_blocking`."""
        self.touch_blocks_blocking(sequence_hashes)

    def touch_blocks_blocking(self, sequence_hashes: Iterable[int]) -> None:
        """Move the inactive blocks of the leading run of registered blocks to the end of their priority, as if just
        returned.

        An addition of later versions; 0.2.1 has no such request.

        Raises:
            ProgressEngineShutdown: the pool is stopped.
            ValueError: the run ends at a value that is not a sequence hash; no block was touched.
        """
        for block in self._leading_run("touch_blocks", sequence_hashes):
            if not block.refs:
                self._take_out(block)
                self._take_back((block,))

    def flush(self) -> int:
        """Take all returned blocks back into the pool, in order; return their number.

        Raises:
            ProgressEngineShutdown: the pool is stopped.
        """
        self.check_running("flush")
        returned = self._returned
        # One by one: the garbage collector may drop handles in between, whose blocks must stay in the queue.
        blocks = [returned.popleft() for _ in range(len(returned))]
        self._take_back(blocks)
        return len(blocks)

    def copy_in(self, sources: Sequence[Block]) -> ImmutableBlocks:
        """Allocate a block for each of these registered blocks of another pool, copy payload and hashes, and register
        it.

        Raises:
            NotEnoughBlocksAvailable: fewer blocks are available than `sources`; none was copied.
            ProgressEngineShutdown: the pool is stopped.
        """
        with self._publisher.one_call():
            handles = self.allocate_blocks_blocking(len(sources))
            for handle, source in zip(handles, sources, strict=True):
                block = handle.held
                block.payload = source.payload
                block.content = TokenBlock.of_hashes(
                    source.block_hash, source.sequence_hash, source.parent_sequence_hash
                )
                block.state = _COMPLETE
            return self.register_blocks_blocking(handles)

    # ------------------------------------------------------------------------------------------------- in here

    def check_running(self, request: str) -> None:
        """Check that the pool is running.

        Raises:
            ProgressEngineShutdown: it was stopped; the message names the request.
        """
        if self.block_set.cancellation_token.is_cancelled():
            raise ProgressEngineShutdown(
                f"Progress engine shutdown: {request} on the {self.block_set.name} pool of worker "
                f"{self.block_set.worker_id}, whose manager was closed or its cancellation token cancelled"
            )

    def _surface(self, handles: MutableBlocks | ImmutableBlocks) -> None:
        """Raise the sink's error, like `EventPublisher.surface`; the caller then gets no handles, and the blocks are
        returned.
        """
        try:
            self._publisher.surface()
        except Exception:
            handles.close()  # now, not when the last frame of the traceback is gone
            raise

    def _leading_run(self, request: str, sequence_hashes: Iterable[int]) -> list[Block]:
        """Return the longest run of registered blocks, from the first hash on, without moving them."""
        self.check_running(request)
        registered = self._registered
        run: list[Block] = []
        for sequence_hash in list(check_iterable(request, sequence_hashes, "sequence hashes")):
            try:
                run.append(registered[sequence_hash])
            except (KeyError, TypeError):
                # A token block or a string is an invalid argument, not a missing block.
                check_u64(f"{request}: sequence_hashes[{len(run)}]", sequence_hash)
                break
        return run

    def _check_registrable(self, handles: Sequence[MutableBlock]) -> None:
        block_set, complete = self.block_set, _COMPLETE
        indices = []
        for handle in handles:
            if type(handle) is not MutableBlock:
                raise TypeError(f"register_blocks takes mutable blocks, got {handle!r:.80}")
            block = handle._block
            if block is None:
                handle._raise_closed()
            if block.set is not block_set:
                raise InvalidMutableBlock(
                    f"Invalid MutableBlock: {block.place} is not of the {block_set.name} pool of worker "
                    f"{block_set.worker_id}"
                )
            if block.state is not complete:
                raise BlockNotComplete(
                    f"Block is not complete: register_blocks on {block.place}, which is {block.state}"
                )
            indices.append(block.index)
        if len(set(indices)) != len(indices):
            raise InvalidMutableBlock("Invalid MutableBlock: register_blocks was given a block twice")

    def _share(self, block: Block) -> None:
        """Count one more owner of a registered block; take the block out of the pool if it had none."""
        if not block.refs:
            self._take_out(block)
        block.refs += 1

    def _take_out(self, block: Block) -> None:
        """Take a registered block without an owner out of the pool, or out of the queue of returned blocks."""
        if block.next is not None:
            self._unlink(block)
            return
        # Earlier returned blocks are taken back first, as when the original waits for such a block.
        returned = self._returned
        while (other := returned.popleft()) is not block:
            self._take_back((other,))

    def _take_back(self, blocks: Iterable[Block]) -> None:
        """Take blocks back, in this order: registered ones become inactive, all others free."""
        tick, rings = self._tick, self._rings
        for block in blocks:
            tick += 1
            block.returned_tick = tick
            if block.state is not _REGISTERED:
                if block.state is not _RESET:
                    block.reset()
                block.payload = b""  # the original keeps metadata of a Reset block, but a free block has no payload
                self._free.append(block)
                continue
            ring = rings.get(block.priority)
            if ring is None:
                ring = rings[block.priority] = RingLink()
                heappush(self._priorities, block.priority)
            last = ring.prev
            assert last is not None
            block.prev = last
            block.next = ring
            last.next = ring.prev = block
            self._num_inactive += 1
        self._tick = tick

    def _unlink(self, block: Block) -> None:
        before, after = block.prev, block.next
        assert before is not None
        assert after is not None
        before.next = after
        after.prev = before
        block.prev = block.next = None
        self._num_inactive -= 1

    def _evict(self, count: int) -> list[Block]:
        """Take the first `count` inactive blocks, which must exist, out of the pool and reset them. Their hashes stay
        readable.
        """
        priorities, rings, registered = self._priorities, self._rings, self._registered
        ring = rings[priorities[0]]
        evicted: list[Block] = []
        for _ in range(count):
            while (block := ring.next) is ring:
                del rings[heappop(priorities)]
                ring = rings[priorities[0]]
            assert type(block) is Block
            ring.next = after = block.next
            assert after is not None
            after.prev = ring
            block.prev = block.next = None
            del registered[block.sequence_hash]
            block.reset()
            block.generation += 1
            evicted.append(block)
        self._num_inactive -= count
        return evicted

    def _publish_stored(self, blocks: Sequence[TokenBlock]) -> None:
        """Publish one Stored for each chain of new blocks, a parent before its children."""
        children: dict[int, list[TokenBlock]] = {}
        stored = {block.sequence_hash for block in blocks}
        starts: deque[TokenBlock] = deque()
        for block in blocks:
            parent = block.parent_sequence_hash
            if parent is None or parent not in stored:
                starts.append(block)
            else:
                children.setdefault(parent, []).append(block)
        while starts:
            chain = [starts.popleft()]
            while following := children.get(chain[-1].sequence_hash):
                chain.append(following[0])
                starts.extend(following[1:])
            data = Stored(
                chain[0].parent_sequence_hash,
                tuple([each.sequence_hash for each in chain]),
                tuple([each.block_hash for each in chain]),
            )
            # Copies have no tokens, and are registered separately.
            tokens = [each.tokens for each in chain] if chain[0].tokens else None
            self._publisher.publish(data, tokens, self.block_set.tier)
