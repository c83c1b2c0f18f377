"""Two ways in which workers of an engine share prefixes: a worker gets blocks from a peer, or a peer puts them.

`test_prefix_exchange.py` tests this code on the mock of dynamo-llm's block manager. Workers exchange messages, which
are bytes, and payloads, which the block managers transfer. A worker that cannot get a block computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_kvmock.contrib.block_manager import (
    BlockDescriptorList,
    ImmutableBlocks,
    KvBlockManager,
    MutableBlock,
    MutableBlocks,
    StaleBlockDescriptor,
    TokenBlock,
    TransferRequestGet,
    TransferRequestPut,
    WorkerUnreachable,
    token_blocks,
)


def compute(content: TokenBlock) -> bytes:
    """Return the keys and values of a block; a real engine computes them with its model."""
    return content.sequence_hash.to_bytes(8, "little") * 4


@dataclass(frozen=True, slots=True)
class Served:
    """The sources of a prompt's blocks, as counts."""

    cached: int
    received: int
    computed: int


class Worker:
    """A worker whose blocks are on the device.

    Attributes:
        manager: its block manager.
        peer: the worker that it asks for blocks; None: no peer.
        on_lend: called after blocks were described for a peer, before the peer gets them; for tests.
    """

    def __init__(self, manager: KvBlockManager, on_lend: Callable[[], None] = lambda: None) -> None:
        pool = manager.device()
        assert pool is not None
        self.manager = manager
        self.pool = pool
        self.peer: Worker | None = None
        self.on_lend = on_lend
        self._lent: list[ImmutableBlocks] = []
        self._reserved: list[MutableBlocks] = []

    def chain(self, tokens: Sequence[int]) -> list[TokenBlock]:
        """Return the full blocks of a prompt."""
        return token_blocks(tokens, self.manager.config.model.page_size)

    # ------------------------------------------------------------------------------------------------- prompts

    def serve(self, tokens: Sequence[int]) -> Served:
        """Serve a prompt: use cached blocks first, then the peer's, and compute the rest."""
        chain = self.chain(tokens)
        hashes = [content.sequence_hash for content in chain]
        with self.pool.match_sequence_hashes_blocking(hashes) as cached:
            missing = chain[len(cached) :]
            blocks = self.pool.allocate_blocks_blocking(len(missing))
            received = self._get(hashes[len(cached) :], blocks) if missing else 0
            for at, (block, content) in enumerate(zip(blocks, missing, strict=True)):
                if at >= received:
                    block.payload = compute(content)
                block.apply_token_block(content)
            self.pool.register_blocks_blocking(blocks).close()
        self.manager.flush()
        return Served(len(cached), received, len(missing) - received)

    def _get(self, hashes: list[int], blocks: Sequence[MutableBlock]) -> int:
        """Get as many of these blocks as the peer has, and return their number."""
        message = self.peer.lend(hashes) if self.peer is not None else None
        if self.peer is None or message is None:
            return 0
        remote = self.manager.get_remote_blocks_immutable(BlockDescriptorList.from_bytes(message))
        try:
            TransferRequestGet(remote, blocks[: len(remote)]).execute()
        except (StaleBlockDescriptor, WorkerUnreachable):
            return 0  # nothing was transferred
        finally:
            self.peer.take_back()
        return len(remote)

    # ------------------------------------------------------------------------------------- messages of its peer

    def lend(self, hashes: Sequence[int]) -> bytes | None:
        """Describe the cached leading run of these blocks, and hold them until they are taken back."""
        found = self.pool.match_sequence_hashes_blocking(hashes)
        if not found:
            return None
        self._lent.append(found)
        message = found.as_block_descriptor_set().to_bytes()
        self.on_lend()
        return message

    def take_back(self) -> None:
        """Release the blocks that were lent first; the peer has them, or will not get them."""
        if self._lent:
            self._lent.pop(0).close()
            self.manager.flush()

    def reserve(self, count: int) -> bytes:
        """Describe `count` blocks for the peer to write."""
        blocks = self.pool.allocate_blocks_blocking(count)
        self._reserved.append(blocks)
        return blocks.as_block_descriptor_set().to_bytes()

    def receive(self, tokens: Sequence[int]) -> None:
        """Register the blocks that were reserved first, which the peer has written for this prompt."""
        blocks = self._reserved.pop(0)
        for block, content in zip(blocks, self.chain(tokens), strict=True):
            block.apply_token_block(content)
        self.pool.register_blocks_blocking(blocks).close()
        self.manager.flush()

    def push(self, tokens: Sequence[int], to: Worker) -> None:
        """Put all blocks of a prompt into blocks of another worker, as a prefill worker does for a decode worker."""
        self.serve(tokens)
        hashes = [content.sequence_hash for content in self.chain(tokens)]
        targets = self.manager.get_remote_blocks_mutable(BlockDescriptorList.from_bytes(to.reserve(len(hashes))))
        with self.pool.match_sequence_hashes_blocking(hashes) as blocks:
            TransferRequestPut(blocks, targets).execute()
        to.receive(tokens)
