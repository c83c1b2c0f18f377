"""Transfers: payloads of blocks are put into blocks of another worker or of the same one, or got from another worker.

Only payloads are transferred, neither tokens nor hashes nor the state of a block. In 0.2.1 a put to remote blocks is
checked and logged, but its copy is not implemented yet; here it copies as later versions do and the comments of 0.2.1
describe. 0.2.1 has only a placeholder for a get; here it mirrors the put.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeAlias

from pytest_kvmock.contrib.block_manager.block_errors import ProgressEngineShutdown
from pytest_kvmock.contrib.block_manager.block_handles import ImmutableBlock, MutableBlock
from pytest_kvmock.contrib.block_manager.fabric import Transfer
from pytest_kvmock.contrib.block_manager.local_block import Block
from pytest_kvmock.contrib.block_manager.remote_blocks import MutableRemoteBlock, RemoteBlock
from pytest_kvmock.contrib.block_manager.remote_errors import (
    CountMismatch,
    IncompatibleTypes,
    MismatchedWorkerID,
    TransferError,
)
from pytest_kvmock.values.checks import check_iterable

LocalBlock: TypeAlias = MutableBlock | ImmutableBlock
"""A block of the transferring worker."""

AnyBlock: TypeAlias = LocalBlock | RemoteBlock
"""A source or destination of a transfer."""


class TransferRequest:
    """The common part of puts and gets: their lists, and the checks of these.

    The lists are fixed on creation. `execute` transfers all payloads, or raises and transfers none.
    """

    __slots__ = ("_destinations", "_sources", "is_executed")

    kind: ClassVar[str]

    def __init__(self, sources: Sequence[AnyBlock], destinations: Sequence[AnyBlock]) -> None:
        self.is_executed = False
        if len(sources) != len(destinations):
            raise CountMismatch(len(sources), len(destinations))
        if not sources:
            raise TransferError("Sources cannot be empty")
        self._sources = sources
        self._destinations = destinations

    def __repr__(self) -> str:
        done = ", executed" if self.is_executed else ""
        return f"<{type(self).__name__} of {len(self._sources)} blocks{done}>"

    def validate_blocks(self) -> None:
        """Check that no destination occurs twice, or is a source, too.

        It looks only at the address of each block. `execute` also calls it; in the original it does not.

        Raises:
            TransferError: a destination occurs twice, or is a source.
            BlockClosed: a handle holds no block any more.
        """
        # A remote and a local block are the same if worker, set and number are equal: both sides share this key.
        is_one_sided = isinstance(self._sources[0], RemoteBlock) is isinstance(self._destinations[0], RemoteBlock)
        destinations = [_key(block) for block in self._destinations]
        unique = set(destinations)
        if len(unique) != len(destinations):
            twice = next(at for at, each in enumerate(destinations) if each in destinations[:at])
            raise TransferError(f"Duplicate destination blocks: {_place(self._destinations[twice])} is there twice")
        same = _key if is_one_sided else _address
        sources = {same(block) for block in self._sources}
        if both := sorted((block for block in self._destinations if same(block) in sources), key=_address):
            raise TransferError(
                f"Duplicate entries in source and destination list: {_place(both[0])} is in both"
                + (f", and {len(both) - 1} more" if both[1:] else "")
            )

    def execute(self) -> None:
        """Transfer all payloads, or none.

        Raises:
            TransferError: `validate_blocks` refuses the lists, blocks differ in size, or it was executed before.
            MismatchedWorkerID: a local block belongs to another worker than the one that carries the transfer out.
            WorkerUnreachable: the other worker cannot be reached.
            StaleBlockDescriptor: a remote block has changed since it was described.
            BlockClosed: a handle holds no block any more.
            ProgressEngineShutdown: the manager that carries the transfer out, or that of a local block, is closed.
        """
        if self.is_executed:
            raise TransferError(f"this {type(self).__name__} was executed before; make another")
        self.validate_blocks()
        self._check_workers()
        pairs = [
            (self._block_to_read(source), self._block_to_write(destination))
            for source, destination in zip(self._sources, self._destinations, strict=True)
        ]
        for source, destination in pairs:
            if source.set.block_bytes != destination.set.block_bytes:
                raise TransferError(
                    f"blocks differ in size: {source.place} has {source.set.block_bytes} bytes, "
                    f"{destination.place} has {destination.set.block_bytes}"
                )
        for source, destination in pairs:
            destination.payload = source.payload
        self.is_executed = True
        self._record([len(source.payload) for source, _ in pairs])

    def _check_workers(self) -> None:
        """Check that all local blocks belong to the worker that carries out the transfer, and that it asked for all
        remote ones.
        """
        remote = self._remote()
        manager, worker_id, _ = _carrier(remote[0] if remote else self._sources[0])
        is_closed = False
        for side, blocks in (("Source", self._sources), ("Destination", self._destinations)):
            for block in blocks:
                owner, found, closed = _carrier(block)
                is_closed |= closed
                # A closed manager may have the same worker id as its successor.
                if found != worker_id or (owner is not manager and not is_closed):
                    other = "another worker" if found != worker_id else "another manager"
                    raise MismatchedWorkerID(
                        f"Mismatched {side} worker ID: {found} != {worker_id}: {_place(block)} is "
                        f"{'asked for by' if isinstance(block, RemoteBlock) else 'of'} {other} than the one that "
                        f"carries the {self.kind} out{', with the same worker ID' if found == worker_id else ''}"
                    )
        if is_closed:
            raise ProgressEngineShutdown(
                f"Progress engine shutdown: a {self.kind} of worker {worker_id}, whose manager was closed or its "
                "cancellation token cancelled"
            )

    def _remote(self) -> list[RemoteBlock]:
        """Return the remote side; empty for a put between local blocks."""
        return [block for block in (*self._sources, *self._destinations) if isinstance(block, RemoteBlock)]

    def _record(self, sizes: Sequence[int]) -> None:
        """Record the transfer, once for each worker whose blocks took part."""
        remote = self._remote()
        by_worker: dict[int, list[int]] = {}
        for block, size in zip(remote, sizes, strict=False):  # without remote blocks nothing is recorded
            by_worker.setdefault(block.worker_id, []).append(size)
        for worker_id, moved in by_worker.items():
            agent = remote[0].agent
            agent.record(Transfer(self.kind, agent.worker_id, worker_id, len(moved), sum(moved)))

    @staticmethod
    def _block_to_read(block: AnyBlock) -> Block:
        return block.block_to_read() if isinstance(block, RemoteBlock) else block.held

    @staticmethod
    def _block_to_write(block: AnyBlock) -> Block:
        if isinstance(block, RemoteBlock):
            assert isinstance(block, MutableRemoteBlock)
            return block.block_to_write()
        return block.held


class TransferRequestPut(TransferRequest):
    """A put: payloads of local blocks are written into remote blocks, or into other local ones.

    Args:
        sources: local blocks, mutable or immutable; a block may occur twice.
        destinations: the same number of mutable blocks, all remote or all local.

    Raises:
        CountMismatch: the numbers of sources and destinations differ.
        TransferError: there are none.
        IncompatibleTypes: a source is not local, a destination not mutable, or some are remote and some local.
    """

    __slots__ = ()

    kind = "put"

    def __init__(
        self, sources: Iterable[LocalBlock], destinations: Iterable[MutableRemoteBlock] | Iterable[MutableBlock]
    ) -> None:
        source_list = list(check_iterable("TransferRequestPut", sources, "sources"))
        destination_list: list[MutableRemoteBlock | MutableBlock] = list(
            check_iterable("TransferRequestPut", destinations, "destinations")
        )
        for source in source_list:
            if not isinstance(source, MutableBlock | ImmutableBlock):
                raise _incompatible("the sources of a put are MutableBlocks or ImmutableBlocks of one's own", source)
        for destination in destination_list:
            if not isinstance(destination, MutableBlock | MutableRemoteBlock):
                raise _incompatible("the destinations of a put are MutableRemoteBlocks, or MutableBlocks", destination)
            if isinstance(destination, MutableBlock) is not isinstance(destination_list[0], MutableBlock):
                raise _incompatible("the destinations of a put are all remote, or all local", destination)
        super().__init__(source_list, destination_list)


class TransferRequestGet(TransferRequest):
    """A get: payloads of remote blocks are read into local ones. An addition, named after the put.

    Args:
        sources: remote blocks, mutable or immutable; a block may occur twice.
        destinations: the same number of mutable local blocks.

    Raises:
        CountMismatch: the numbers of sources and destinations differ.
        TransferError: there are none.
        IncompatibleTypes: a source is not remote, or a destination not mutable and local.
    """

    __slots__ = ()

    kind = "get"

    def __init__(self, sources: Iterable[RemoteBlock], destinations: Iterable[MutableBlock]) -> None:
        source_list = list(check_iterable("TransferRequestGet", sources, "sources"))
        destination_list = list(check_iterable("TransferRequestGet", destinations, "destinations"))
        for source in source_list:
            if not isinstance(source, RemoteBlock):
                raise _incompatible("the sources of a get are remote blocks", source)
        for destination in destination_list:
            if not isinstance(destination, MutableBlock):
                raise _incompatible("the destinations of a get are MutableBlocks of one's own", destination)
        super().__init__(source_list, destination_list)


def _incompatible(what: str, got: object) -> IncompatibleTypes:
    return IncompatibleTypes(f"Incompatible block types provided: {what}, got {got!r:.80}")


def _carrier(block: AnyBlock) -> tuple[object, int, bool]:
    """Return who carries out transfers with a block: the manager, its worker, and whether it is closed."""
    if isinstance(block, RemoteBlock):
        return block.agent.manager, block.agent.worker_id, block.agent.is_closed
    held = block.held.set
    return held.manager, held.worker_id, held.cancellation_token.is_cancelled()


def _key(block: AnyBlock) -> object:
    """Return a key that identifies a block on its side; for a local block, the block itself."""
    return _address(block) if isinstance(block, RemoteBlock) else block.held


def _address(block: AnyBlock) -> tuple[int, int, int]:
    """Return the address of a block: worker, set, number. It is the same from both sides."""
    if isinstance(block, RemoteBlock):
        return block.worker_id, block.block_set_idx, block.block_idx
    held = block.held
    return held.set.worker_id, held.set.block_set_idx, held.index


def _place(block: AnyBlock) -> str:
    address = _address(block)
    return f"block {address[2]} of set {address[1]} of worker {address[0]}"
