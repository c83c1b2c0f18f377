"""Blocks of a pool: the four states, what a block holds, and how it is given back.

A block lives in its pool forever. Its owner has a handle (`block_handles`).
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
    """The contents of a block.

    Reset -> Partial -> Complete -> Registered; a token block makes a Complete of a Reset at once.
    """

    RESET = "Reset"
    """Nothing."""
    PARTIAL = "Partial"
    """Tokens of a sequence root, not committed."""
    COMPLETE = "Complete"
    """A full block of tokens, with its hashes."""
    REGISTERED = "Registered"
    """A block that the pool finds by its sequence hash; its tokens are not kept."""


class LocalBlockSet:
    """What the blocks of one pool have in common: where they belong, how large they are, and the way back.

    Attributes:
        worker_id: the worker whose they are.
        manager: an object that is the same for the pools of one manager, and for no others.
        block_set_idx: number of the set in the worker's block sets: host first, then device, from 1.
        tier: the tier that events name.
        name: what messages call the pool: "device" or "host".
        num_blocks: how many blocks there are.
        model: what a block holds.
        page_size: tokens of a block.
        block_bytes: bytes of a block.
        cancellation_token: when it is cancelled the pool is stopped.
        returned: blocks that were given back and wait for the pool, the first first.
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
    """A place in a ring of blocks; by itself, the head of an empty ring."""

    __slots__ = ("next", "prev")

    prev: RingLink | None
    next: RingLink | None

    def __init__(self) -> None:
        self.prev = self.next = self


class PartialTokens:
    """Tokens of a root that is being filled, and the salt of its hashes."""

    __slots__ = ("salt_hash", "tokens")

    def __init__(self, salt_hash: int) -> None:
        self.salt_hash = salt_hash
        self.tokens: list[int] = []


class Block(RingLink):
    """One block of a pool, for the pool itself and for what copies payloads; users have handles.

    Attributes:
        set: what it has in common with the other blocks of its pool.
        index: its number in the set, from 0.
        state: what it holds.
        content: the tokens of a Partial or Complete block.
        sequence_hash, block_hash, parent_sequence_hash: the hashes of a Registered block.
        payload: its bytes; empty until somebody writes them, and once it is reset by its pool.
        refs: handles that own it; 0: it waits to be returned, or is in the pool.
        generation: how often it was given up with what it held. A descriptor of an earlier generation is stale.
        priority, returned_tick, acquired_tick: its metadata.
        next, prev: its place among the inactive blocks of its priority; `next` is None while it has none.
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
        """What messages call it: "block 3 of the host pool of worker 7"."""
        return f"block {self.index} of the {self.set.name} pool of worker {self.set.worker_id}"

    def reset(self) -> None:
        """Forget tokens, hashes, payload and priority."""
        self.state = BlockState.RESET
        self.content = None
        self.payload = b""
        self.priority = 0


def give_back(block: Block) -> None:
    """Give back a block that is not registered: what it holds is stale from now on."""
    block.refs = 0
    block.generation += 1
    block.set.returned.append(block)


def write_payload(block: Block, value: bytes) -> None:
    """Write the bytes of a block.

    Raises:
        TypeError: these are not bytes.
        PayloadTooLarge: these are more than the block has room for.
    """
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"a payload is bytes, got {value!r:.80}")
    value = bytes(value)
    if len(value) > block.set.block_bytes:
        raise PayloadTooLarge(len(value), block.set.block_bytes, block.place)
    block.payload = value


def illegal_step(block: Block, step: str, why: str) -> BlockStateInvalid:
    """Return the error of a step that the state of a block does not allow."""
    return BlockStateInvalid(f"{why}: {step} on {block.place}, which is {block.state}")
