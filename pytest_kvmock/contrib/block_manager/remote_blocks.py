"""Remote blocks: blocks of another worker that transfers read or write (dynamo-llm 0.2.1).

A remote block is an address: set, number, and the generation of its descriptor. A transfer checks whether the block can
be reached, and is unchanged since it was described.
"""

from __future__ import annotations

from typing import TypeVar

from pytest_kvmock.contrib.block_manager.block_descriptors import BlockDescriptorList, BlockMutability
from pytest_kvmock.contrib.block_manager.block_set import BlockSetLayout, MemType
from pytest_kvmock.contrib.block_manager.fabric import NixlAgent
from pytest_kvmock.contrib.block_manager.local_block import Block, BlockState
from pytest_kvmock.contrib.block_manager.remote_errors import RemoteBlockSetError, StaleBlockDescriptor


class RemoteBlock:
    """A block of another worker.

    Attributes:
        worker_id: the worker that owns it.
        block_set_idx: number of its set in that worker's block sets.
        block_idx: its number in the set.
        generation: the generation of its descriptor.
        layout: size and memory of its set's blocks.
        agent: the worker that asked for it, and carries out transfers with it.
    """

    __slots__ = ("agent", "block_idx", "block_set_idx", "generation", "layout", "worker_id")

    def __init__(
        self,
        agent: NixlAgent,
        layout: BlockSetLayout,
        descriptors: BlockDescriptorList,
        block_idx: int,
        generation: int,
    ) -> None:
        self.agent = agent
        self.layout = layout
        self.worker_id = descriptors.worker_id
        self.block_set_idx = descriptors.block_set_idx
        self.block_idx = block_idx
        self.generation = generation

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.place}>"

    @property
    def place(self) -> str:
        """Its name in messages: "block 3 of set 1 of worker 7"."""
        return f"block {self.block_idx} of set {self.block_set_idx} of worker {self.worker_id}"

    @property
    def mem_type(self) -> MemType:
        """Kind of memory."""
        return self.layout.mem_type

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.layout.num_layers

    @property
    def page_size(self) -> int:
        """Capacity of the block in tokens."""
        return self.layout.page_size

    @property
    def inner_dim(self) -> int:
        """Numbers a token and layer."""
        return self.layout.inner_dim

    @property
    def block_bytes(self) -> int:
        """Capacity of the block in bytes."""
        return self.layout.block_bytes

    def block_to_read(self) -> Block:
        """Return the block itself, for transfers.

        Raises:
            WorkerUnreachable: its worker cannot be reached.
            StaleBlockDescriptor: it was returned or evicted since it was described.
            ProgressEngineShutdown: the manager that asked for it is closed.
        """
        pool = self.agent.reach(self.worker_id).pools.get(self.block_set_idx)
        if pool is None or self.block_idx >= pool.total_blocks:  # the block set was made by hand
            raise self._stale("its worker has no such block")
        block = pool.block(self.block_idx)
        if block.generation != self.generation:
            raise self._stale(
                f"it was given back, or evicted, since it was described (generation {block.generation}, not "
                f"{self.generation})"
            )
        return block

    def _stale(self, why: str) -> StaleBlockDescriptor:
        return StaleBlockDescriptor(
            f"the descriptor of {self.place} is stale: {why}", self.worker_id, self.block_set_idx, self.block_idx
        )


class ImmutableRemoteBlock(RemoteBlock):
    """A block of another worker that may be read."""

    __slots__ = ()


class MutableRemoteBlock(RemoteBlock):
    """A block of another worker that may be read and written, as long as its owner keeps it mutable."""

    __slots__ = ()

    def block_to_write(self) -> Block:
        """Return the block itself, for transfers.

        Raises:
            WorkerUnreachable: its worker cannot be reached.
            StaleBlockDescriptor: it was returned, evicted or registered since it was described.
            ProgressEngineShutdown: the manager that asked for it is closed.
        """
        block = self.block_to_read()
        if block.state is BlockState.REGISTERED:
            raise self._stale("it was registered since it was described, and may no longer be written")
        return block


RemoteT = TypeVar("RemoteT", bound=RemoteBlock)


def get_remote_blocks(agent: NixlAgent, descriptors: BlockDescriptorList, kind: type[RemoteT]) -> list[RemoteT]:
    """Return the remote blocks that a list describes; see `KvBlockManager.get_remote_blocks_mutable`."""
    step = "get_remote_blocks_mutable" if kind is MutableRemoteBlock else "get_remote_blocks_immutable"
    agent.check_open(step)
    if not isinstance(descriptors, BlockDescriptorList):
        raise TypeError(f"{step} takes a BlockDescriptorList, got {descriptors!r:.80}")
    if kind is MutableRemoteBlock and descriptors.mutability is not BlockMutability.MUTABLE:
        raise RemoteBlockSetError("Cannot get mutable remote blocks for immutable block descriptor set")
    block_set = agent.imported.get(descriptors.worker_id)
    layout = None if block_set is None else block_set.block_sets.get(descriptors.block_set_idx)
    if layout is None:
        raise RemoteBlockSetError(
            f"No remote blockset found for worker {descriptors.worker_id} and block_set_idx {descriptors.block_set_idx}"
        )
    for index in descriptors.block_indices:
        if index >= layout.num_blocks:
            raise RemoteBlockSetError(
                f"block index out of bounds: {index} >= {layout.num_blocks}, in set {descriptors.block_set_idx} of "
                f"worker {descriptors.worker_id}"
            )
    return [
        kind(agent, layout, descriptors, index, generation)
        for index, generation in zip(descriptors.block_indices, descriptors.generations, strict=True)
    ]
