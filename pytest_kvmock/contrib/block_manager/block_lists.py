"""Lists of block handles, as pools return them; they close all handles in order."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, Self, TypeVar

from pytest_kvmock.contrib.block_manager.block_descriptors import BlockDescriptorList, as_block_descriptor_set
from pytest_kvmock.contrib.block_manager.block_errors import BlockClosed
from pytest_kvmock.contrib.block_manager.block_handles import BlockHandle, ImmutableBlock, MutableBlock

HandleT = TypeVar("HandleT", bound=BlockHandle)


class _BlockList(list[HandleT], Generic[HandleT]):
    """A list of handles that is a context manager: it closes the open ones at the end, from first to last.

    The order matters: blocks that are returned first are evicted first. A list that Python drops closes its handles
    from last to first.

    A slice, sum or copy is a plain list of the same handles, and no context manager: only one list closes them.
    `split_off` splits a list in two.
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self:
            if handle.is_open:
                handle.close()

    def close(self) -> None:
        """Close all handles, from first to last.

        Raises:
            BlockClosed: a handle holds no block any more, or is in the list twice; no handle was closed.
        """
        for handle in self:
            if handle._block is None:
                handle._raise_closed()
        if len(set(map(id, self))) != len(self):
            raise BlockClosed("a handle is in the list twice; none was closed")
        for handle in self:
            handle.close()

    def as_block_descriptor_set(self) -> BlockDescriptorList:
        """Describe the blocks for other workers, for reading, and, if they are mutable, for writing.

        Raises:
            BlockDescriptorSetError: there are none, they are of several sets, or a handle holds no block.
        """
        return as_block_descriptor_set(self)

    def split_off(self, at: int) -> Self:
        """Remove the handles from position `at` on from this list, and return them as another list.

        Raises:
            IndexError: the list has fewer handles.
        """
        if not 0 <= at <= len(self):
            raise IndexError(f"split_off at {at} of a list of {len(self)} blocks; 0 to {len(self)} is allowed")
        rest = type(self)(self[at:])
        del self[at:]
        return rest


class MutableBlocks(_BlockList[MutableBlock]):
    """Mutable blocks, as `allocate_blocks` returns them."""

    __slots__ = ()


class ImmutableBlocks(_BlockList[ImmutableBlock]):
    """Immutable blocks, as `register_blocks` and `match_sequence_hashes` return them."""

    __slots__ = ()
