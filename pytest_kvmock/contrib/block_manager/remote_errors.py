"""Errors of block sets, remote blocks and transfers; a name that dynamo-llm 0.2.1 has is the same here.

A refused call changes nothing: no set is imported, no byte of any block is written.
"""

from __future__ import annotations

from pytest_kvmock.contrib.block_manager.block_errors import BlockManagerError


class NixlSerializationError(BlockManagerError, ValueError):
    """Bytes are not a block set, or no descriptor list: foreign, or truncated."""


class RemoteBlockSetError(BlockManagerError):
    """A block set cannot be imported, or none was imported that has the blocks that are asked for.

    Where the original panics, for a set of its own worker and for metadata of another, this is raised as well.
    """


class BlockDescriptorSetError(BlockManagerError, ValueError):
    """Blocks cannot be described by one list: there are none, they are of several sets, or a handle holds no block."""


class TransferError(BlockManagerError):
    """The base class of a transfer's errors; also raised for invalid lists of blocks."""


class CountMismatch(TransferError):  # noqa: N818 - the original's name
    """A transfer has more sources than destinations, or fewer.

    Attributes:
        sources: how many there are.
        destinations: how many there are.
    """

    def __init__(self, sources: int, destinations: int) -> None:
        super().__init__(f"Mismatched source/destination counts: {sources} sources, {destinations} destinations")
        self.sources = sources
        self.destinations = destinations


class IncompatibleTypes(TransferError, TypeError):  # noqa: N818 - the original's name
    """Blocks that a transfer cannot take: remote ones where local ones are needed, or immutable ones as destinations.

    In Rust that does not compile.
    """


class MismatchedWorkerID(TransferError):  # noqa: N818 - the original's name
    """A local block of a transfer is of another worker than the one that carries it out."""


class StaleBlockDescriptor(TransferError):  # noqa: N818 - named for what it is, as its neighbours are
    """A remote block is not what it was when it was described: it was given back, evicted or registered since.

    An addition: the original reads and writes memory, whatever is in it by then.

    Attributes:
        worker_id: the worker that owns the block.
        block_set_idx: number of the block's set.
        block_idx: number of the block in the set.
    """

    def __init__(self, message: str, worker_id: int, block_set_idx: int, block_idx: int) -> None:
        super().__init__(message)
        self.worker_id = worker_id
        self.block_set_idx = block_set_idx
        self.block_idx = block_idx


class WorkerUnreachable(TransferError):  # noqa: N818 - named for what it is, as its neighbours are
    """Two workers are to exchange blocks that are not connected: a link is cut, one is closed, or in no fabric or
    another.

    Attributes:
        worker_id: the worker that carries the transfer out.
        remote_worker_id: the worker that it does not reach.
    """

    def __init__(self, worker_id: int, remote_worker_id: int, why: str) -> None:
        super().__init__(f"worker {worker_id} does not reach worker {remote_worker_id}: {why}")
        self.worker_id = worker_id
        self.remote_worker_id = remote_worker_id
