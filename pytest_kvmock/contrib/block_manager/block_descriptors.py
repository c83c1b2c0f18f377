"""Descriptor lists: the blocks of a worker that another worker may read or write (dynamo-llm 0.2.1).

The owner describes its blocks and sends the list; the receiver asks its own manager for the remote blocks of the list.
A list holds no block: the owner may release them at any time. A generation for each block shows whether it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from pytest_kvmock.contrib.block_manager.block_handles import BlockHandle, ImmutableBlock, MutableBlock
from pytest_kvmock.contrib.block_manager.json_fields import from_json, to_json
from pytest_kvmock.contrib.block_manager.remote_errors import BlockDescriptorSetError, NixlSerializationError
from pytest_kvmock.values.checks import check_integer, check_iterable, check_member, check_u64, is_integer

_FIELDS: Final = ("worker_id", "block_set_idx", "mutability", "block_indices", "generations")


class BlockMutability(StrEnum):
    """The access that others have to the blocks of a descriptor list."""

    IMMUTABLE = "immutable"
    """Read only."""
    MUTABLE = "mutable"
    """Read and write."""


@dataclass(frozen=True, slots=True)
class BlockDescriptorList:
    """Blocks of one set of one worker, described for others.

    Made from handles: by `as_block_descriptor_set()` of the lists that pools return, or by the class methods here.

    Attributes:
        worker_id: the worker that owns them.
        block_set_idx: number of their set in the worker's block sets.
        mutability: whether they may be written.
        block_indices: numbers of the blocks in the set, in the order of the list.
        generations: the generation of each block when it was described. An addition to the original, see
            `StaleBlockDescriptor`.

    Raises:
        BlockDescriptorSetError: there is no block.
        ValueError: a number is invalid, or the numbers of indices and generations differ.
    """

    worker_id: int
    block_set_idx: int
    mutability: BlockMutability
    block_indices: tuple[int, ...]
    generations: tuple[int, ...]

    def __post_init__(self) -> None:
        check_u64("BlockDescriptorList.worker_id", self.worker_id)
        check_integer("BlockDescriptorList.block_set_idx", self.block_set_idx, 0)
        mutability = check_member("BlockDescriptorList.mutability", self.mutability, BlockMutability)
        object.__setattr__(self, "mutability", mutability)
        for name in ("block_indices", "generations"):
            given = getattr(self, name)
            numbers = tuple(given) if isinstance(given, Iterable) else ()
            wrong = [number for number in numbers if not is_integer(number, 0)]
            if wrong or not isinstance(given, Iterable):
                raise ValueError(
                    f"BlockDescriptorList.{name} must be integers of at least 0, got {(wrong or [given])[0]!r:.80}"
                )
            object.__setattr__(self, name, numbers)
        if not self.block_indices:
            raise BlockDescriptorSetError("Input block list cannot be empty")
        if len(self.block_indices) != len(self.generations):
            raise ValueError(
                f"BlockDescriptorList: {len(self.block_indices)} block_indices and {len(self.generations)} "
                "generations; each block has one"
            )

    def __len__(self) -> int:
        """Return the number of described blocks."""
        return len(self.block_indices)

    @classmethod
    def from_mutable_blocks(cls, blocks: Iterable[MutableBlock]) -> Self:
        """Describe blocks that others may read and write.

        Raises:
            BlockDescriptorSetError: there are none, they are of several sets, or a handle holds no block.
            TypeError: one is not a mutable block.
        """
        listed = list(check_iterable("from_mutable_blocks", blocks, "mutable blocks"))
        return cls._describe(listed, MutableBlock, BlockMutability.MUTABLE)

    @classmethod
    def from_immutable_blocks(cls, blocks: Iterable[ImmutableBlock]) -> Self:
        """Describe blocks that others may read.

        Raises:
            BlockDescriptorSetError: there are none, they are of several sets, or a handle holds no block.
            TypeError: one is not an immutable block.
        """
        listed = list(check_iterable("from_immutable_blocks", blocks, "immutable blocks"))
        return cls._describe(listed, ImmutableBlock, BlockMutability.IMMUTABLE)

    @classmethod
    def _describe(cls, handles: Sequence[BlockHandle], kind: type[BlockHandle], mutability: BlockMutability) -> Self:
        blocks = []
        for handle in handles:
            if not isinstance(handle, kind):
                raise TypeError(f"a descriptor list of {mutability} blocks takes {kind.__name__}s, got {handle!r:.80}")
            block = handle._block
            if block is None:
                raise BlockDescriptorSetError(
                    "An invalid block handle was encountered: it was closed, or given to register_blocks"
                )
            blocks.append(block)
        if not blocks:
            raise BlockDescriptorSetError("Input block list cannot be empty")
        block_set = blocks[0].set
        for block in blocks:
            if block.set is not block_set:
                raise BlockDescriptorSetError(
                    "Blocks in the input list are not homogeneous (worker_id, block_set_idx mismatch): "
                    f"{blocks[0].place} and {block.place}"
                )
        return cls(
            worker_id=block_set.worker_id,
            block_set_idx=block_set.block_set_idx,
            mutability=mutability,
            block_indices=tuple([block.index for block in blocks]),
            generations=tuple([block.generation for block in blocks]),
        )

    def to_bytes(self) -> bytes:
        """Return the list as bytes."""
        return to_json({name: getattr(self, name) for name in _FIELDS})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a list from bytes.

        Raises:
            NixlSerializationError: the bytes are of another kind, or truncated.
            TypeError: `data` is not bytes.
        """
        fields = from_json("descriptor list", data, _FIELDS)
        try:
            return cls(
                worker_id=fields.integer("worker_id"),
                block_set_idx=fields.integer("block_set_idx"),
                mutability=fields.member("mutability", BlockMutability),
                block_indices=fields.integers("block_indices"),
                generations=fields.integers("generations"),
            )
        except NixlSerializationError:
            raise
        except ValueError as error:
            raise NixlSerializationError(f"in a descriptor list, {error}") from None


def as_block_descriptor_set(blocks: Iterable[BlockHandle]) -> BlockDescriptorList:
    """Describe blocks: immutable blocks for reading, mutable blocks for reading and writing.

    Raises:
        BlockDescriptorSetError: there are none, they are of several sets, or a handle holds no block.
        TypeError: they are neither all mutable blocks nor all immutable ones.
    """
    listed = list(check_iterable("as_block_descriptor_set", blocks, "blocks"))
    if listed and all(isinstance(each, ImmutableBlock) for each in listed):
        return BlockDescriptorList._describe(listed, ImmutableBlock, BlockMutability.IMMUTABLE)
    return BlockDescriptorList._describe(listed, MutableBlock, BlockMutability.MUTABLE)
