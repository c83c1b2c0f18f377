"""Blocks of a pool: the four states, the contents of a block, and its return.

A block always belongs to its pool. Its owner has a handle (`block_handles`).
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING

from pytest_kvmock.contrib.block_manager.block_errors import BlockStateInvalid, PayloadTooLarge

if TYPE_CHECKING:
    from pytest_kvmock.contrib.block_manager.manager_config import CancellationToken, KvManagerModelConfig
    from pytest_kvmock.contrib.block_manager.token_block import TokenBlock
    from pytest_kvmock.values.events import StorageTier


class BlockState(StrEnum):
    """The state of a block's contents.

    Reset -> Partial -> Complete -> Registered; a token block makes a Reset block Complete at once.
    """

    RESET = "Reset"
    """No contents."""
    PARTIAL = "Partial"
    """Tokens of a sequence root, not committed."""
    COMPLETE = "Complete"
    """A full block of tokens, with its hashes."""
    REGISTERED = "Registered"
    """A block that the pool finds by its sequence hash; its tokens are not kept."""


class LocalBlockSet:
    """The common data of the blocks of one pool: their owner, their size, and the queue for their return.

    Attributes:
        worker_id: the worker that owns them.
        manager: an object that identifies the manager of the pool.
        block_set_idx: number of the set in the worker's block sets: host first, then device, from 1.
        tier: the tier in events.
        name: the name of the pool in messages: "device" or "host".
        num_blocks: number of blocks.
        model: the sizes of a block.
        page_size: tokens per block.
        block_bytes: bytes per block.
        cancellation_token: stops the pool when it is cancelled.
        returned: returned blocks that wait for the pool, in order.
    """

    __slots__ = (
        "block_bytes",
        "block_set_idx",
        "cancellation_token",
        "manager",
        "model",
        "name",
        "num_blocks",
        "page_size",
        "returned",
        "tier",
        "worker_id",
    )

    def __init__(
        self,
        *,
        worker_id: int,
        manager: object,
        block_set_idx: int,
        tier: StorageTier,
        name: str,
        num_blocks: int,
        model: KvManagerModelConfig,
        cancellation_token: CancellationToken,
    ) -> None:
        self.worker_id = worker_id
        self.manager = manager
        self.block_set_idx = block_set_idx
        self.tier = tier
        self.name = name
        self.num_blocks = num_blocks
        self.model = model
        self.page_size = model.page_size
        self.block_bytes = model.block_bytes
        self.cancellation_token = cancellation_token
        self.returned: deque[Block] = deque()


class RingLink:
    """A link in a ring of blocks; by itself, the head of an empty ring."""

    __slots__ = ("next", "prev")

    prev: RingLink | None
    next: RingLink | None

    def __init__(self) -> None:
        self.prev = self.next = self


class PartialTokens:
    """Tokens of a root block that is being filled, and the salt of its hashes."""

    __slots__ = ("salt_hash", "tokens")

    def __init__(self, salt_hash: int) -> None:
        self.salt_hash = salt_hash
        self.tokens: list[int] = []


class Block(RingLink):
    """One block of a pool, for internal use by pools and transfers; users have handles.

    Attributes:
        set: the common data of the pool's blocks.
        index: its number in the set, from 0.
        state: the state of its contents.
        content: the tokens of a Partial or Complete block.
        sequence_hash, block_hash, parent_sequence_hash: the hashes of a Registered block.
        payload: its bytes; empty until they are written, and after its pool has reset it.
        refs: number of handles that own it; 0: it waits for its return, or is in the pool.
        generation: how often its contents were dropped. A descriptor of an earlier generation is stale.
        priority, returned_tick, acquired_tick: its metadata.
        next, prev: its links among the inactive blocks of its priority; `next` is None if it is not inactive.
    """

    __slots__ = (
        "acquired_tick",
        "block_hash",
        "content",
        "generation",
        "index",
        "parent_sequence_hash",
        "payload",
        "priority",
        "refs",
        "returned_tick",
        "sequence_hash",
        "set",
        "state",
    )

    content: PartialTokens | TokenBlock | None
    parent_sequence_hash: int | None

    def __init__(self, block_set: LocalBlockSet, index: int) -> None:
        self.prev = self.next = None
        self.set = block_set
        self.index = index
        self.state = BlockState.RESET
        self.content = None
        self.sequence_hash = self.block_hash = 0
        self.parent_sequence_hash = None
        self.payload = b""
        self.refs = self.generation = 0
        self.priority = self.returned_tick = self.acquired_tick = 0

    def __repr__(self) -> str:
        return f"<{self.place}, {self.state}>"

    @property
    def place(self) -> str:
        """Its name in messages: "block 3 of the host pool of worker 7"."""
        return f"block {self.index} of the {self.set.name} pool of worker {self.set.worker_id}"

    def reset(self) -> None:
        """Drop tokens, hashes, payload and priority."""
        self.state = BlockState.RESET
        self.content = None
        self.payload = b""
        self.priority = 0


def give_back(block: Block) -> None:
    """Return a block that is not registered: its descriptors are stale from now on."""
    block.refs = 0
    block.generation += 1
    block.set.returned.append(block)


def write_payload(block: Block, value: bytes) -> None:
    """Write the bytes of a block.

    Raises:
        TypeError: `value` is not bytes.
        PayloadTooLarge: it is larger than the block.
    """
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"a payload is bytes, got {value!r:.80}")
    value = bytes(value)
    if len(value) > block.set.block_bytes:
        raise PayloadTooLarge(len(value), block.set.block_bytes, block.place)
    block.payload = value


def illegal_step(block: Block, step: str, why: str) -> BlockStateInvalid:
    """Return the error for a step that the state of a block does not allow."""
    return BlockStateInvalid(f"{why}: {step} on {block.place}, which is {block.state}")
