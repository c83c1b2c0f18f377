"""Errors of block sets, remote blocks and transfers; errors of dynamo-llm 0.2.1 have the same names here.

A refused call changes nothing: no set is imported, and no byte of any block is written.
"""

from __future__ import annotations

from pytest_kvmock.contrib.block_manager.block_errors import BlockManagerError


class NixlSerializationError(BlockManagerError, ValueError):
    """Bytes are not a block set or descriptor list: they are of another kind, or truncated."""


class RemoteBlockSetError(BlockManagerError):
    """A block set cannot be imported, or no imported set has the requested blocks.

    It is also raised where the original panics: for a set of the manager's own worker, and for metadata of another
    worker.
    """


class BlockDescriptorSetError(BlockManagerError, ValueError):
    """One list cannot describe the blocks: there are none, they are of several sets, or a handle holds no block."""


class TransferError(BlockManagerError):
    """The base class of a transfer's errors; also raised for invalid lists of blocks."""


class CountMismatch(TransferError):  # noqa: N818 - the original's name
    """A transfer has different numbers of sources and destinations.

    Attributes:
        sources: number of sources.
        destinations: number of destinations.
    """

    def __init__(self, sources: int, destinations: int) -> None:
        super().__init__(f"Mismatched source/destination counts: {sources} sources, {destinations} destinations")
        self.sources = sources
        self.destinations = destinations


class IncompatibleTypes(TransferError, TypeError):  # noqa: N818 - the original's name
    """A transfer got blocks that it cannot take: remote instead of local ones, or immutable destinations.

    In Rust this does not compile.
    """


class MismatchedWorkerID(TransferError):  # noqa: N818 - the original's name
    """A local block of a transfer belongs to another worker than the one that carries it out."""


class StaleBlockDescriptor(TransferError):  # noqa: N818 - named for what it is, as its neighbours are
    """A remote block has changed since it was described: it was returned, evicted or registered.

    An addition: the original reads and writes the memory, whatever it then contains.

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
    """A transfer is between two workers that are not connected: the link is cut, a worker is closed, or they do not
    share a fabric.

    Attributes:
        worker_id: the worker that carries the transfer out.
        remote_worker_id: the worker that cannot be reached.
    """

    def __init__(self, worker_id: int, remote_worker_id: int, why: str) -> None:
        super().__init__(f"worker {worker_id} does not reach worker {remote_worker_id}: {why}")
        self.worker_id = worker_id
        self.remote_worker_id = remote_worker_id
