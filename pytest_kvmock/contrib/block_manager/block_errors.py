"""Errors of the block manager, one family; errors of dynamo-llm 0.2.1 have the same names here.

A refused call changes nothing: blocks keep their state and their owner, and pools their counts.
"""

from __future__ import annotations

from pytest_kvmock.values.checks import KvMockError


class BlockManagerError(KvMockError):
    """The base of all errors of the block manager, except those about a value of the wrong type or out of range."""


class LayoutError(BlockManagerError, ValueError):
    """The given storage does not fit the layout."""


class BlockStateInvalid(BlockManagerError):  # noqa: N818 - the original's name
    """A step that the state of a block does not allow."""


class TokenBlockError(BlockManagerError):
    """A partial block is full, empty, not full yet, or has fewer tokens than a pop requests."""


class PayloadTooLarge(BlockManagerError, ValueError):  # noqa: N818 - named for what it is, as its neighbours are
    """A payload has more bytes than a block.

    Attributes:
        size: bytes of the payload.
        block_bytes: bytes of a block.
    """

    def __init__(self, size: int, block_bytes: int, where: str) -> None:
        super().__init__(f"a payload of {size} bytes is larger than {where}, which has room for {block_bytes} bytes")
        self.size = size
        self.block_bytes = block_bytes


class BlockClosed(BlockManagerError):  # noqa: N818 - named for what it is, as its neighbours are
    """A handle that no longer holds a block was used or closed."""


class BlockPoolError(BlockManagerError):
    """The base class of a pool's errors."""


class NotEnoughBlocksAvailable(BlockPoolError):  # noqa: N818 - the original's name
    """Fewer blocks are available than were requested; none was allocated.

    Attributes:
        requested: blocks that were requested.
        available: blocks that the pool can give: reset ones, and registered ones without an owner.
    """

    def __init__(self, requested: int, available: int, note: str = "") -> None:
        super().__init__(f"Not enough blocks available, requested: {requested}, available: {available}{note}")
        self.requested = requested
        self.available = available


class BlockNotComplete(BlockPoolError):  # noqa: N818 - the original's name
    """A block that is to be registered is not Complete."""


class InvalidMutableBlock(BlockPoolError):  # noqa: N818 - the original's name
    """A block is given to a pool that does not own it, or is given twice."""


class ProgressEngineShutdown(BlockPoolError):  # noqa: N818 - the original's name
    """The manager was closed, or its cancellation token cancelled; its pools accept no more requests."""
