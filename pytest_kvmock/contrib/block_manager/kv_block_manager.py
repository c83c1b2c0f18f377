"""The block manager of one worker: a pool for each of its tiers, offload between them, and remote blocks (dynamo-llm
0.2.1).

Closing it stops its pools. The original closes when it is dropped; here `close()`, the end of a `with`, or its
cancellation token does so, at a definite moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from pytest_kvmock.contrib.block_manager.block_descriptors import BlockDescriptorList
from pytest_kvmock.contrib.block_manager.block_handles import ImmutableBlock
from pytest_kvmock.contrib.block_manager.block_lists import ImmutableBlocks
from pytest_kvmock.contrib.block_manager.block_set import NixlBlockSet
from pytest_kvmock.contrib.block_manager.fabric import Fabric, NixlAgent
from pytest_kvmock.contrib.block_manager.local_block import LocalBlockSet
from pytest_kvmock.contrib.block_manager.manager_config import KvBlockManagerConfig
from pytest_kvmock.contrib.block_manager.remote_blocks import (
    ImmutableRemoteBlock,
    MutableRemoteBlock,
    get_remote_blocks,
)
from pytest_kvmock.contrib.block_manager.storage import TIER_OF, StorageType
from pytest_kvmock.contrib.block_manager.tier_offload import Flushed, TierOffload
from pytest_kvmock.contrib.block_manager.tier_pool import TierPool
from pytest_kvmock.engines.base.manager_base import EventPublisher
from pytest_kvmock.values.sinks import GivenSink, adapted


class KvBlockManager:
    """Pools of KV cache blocks on device and host.

    Args:
        config: its worker id, the size of a block, and the number of blocks.
        sink: receives its events. Without a sink a manager publishes nothing, like 0.2.1.
        fabric: the fabric in which it reaches other managers; None: it exchanges block sets, but transfers to others
            are refused.

    Raises:
        TypeError: the configuration, the sink or the fabric is invalid.
        ValueError: the cancellation token of the configuration is cancelled, or the fabric has an open manager of the
            same worker id.
    """

    __slots__ = ("__weakref__", "_agent", "_cancellation_token", "_device", "_host", "_offload", "_publisher", "config")

    def __init__(
        self, config: KvBlockManagerConfig, *, sink: GivenSink | None = None, fabric: Fabric | None = None
    ) -> None:
        if not isinstance(config, KvBlockManagerConfig):
            raise TypeError(f"KvBlockManager takes a KvBlockManagerConfig, got {config!r:.80}")
        sink = None if sink is None else adapted(sink, "KvBlockManager: sink")
        check_not_cancelled(config)
        self.config = config
        self._cancellation_token = config.runtime.cancellation_token
        self._publisher = EventPublisher(sink, 0)
        pools: dict[StorageType, TierPool] = {}
        # The host's set has the first number, as the original builds it first.
        for kind, name, layout in (
            (StorageType.PINNED, "host", config.host_layout),
            (StorageType.DEVICE, "device", config.device_layout),
        ):
            if layout is not None:
                block_set = LocalBlockSet(
                    worker_id=config.runtime.worker_id,
                    manager=self._publisher,  # not the manager, which would make a reference cycle
                    block_set_idx=len(pools) + 1,
                    tier=TIER_OF[kind],
                    name=name,
                    num_blocks=layout.num_blocks,
                    model=config.model,
                    cancellation_token=self._cancellation_token,
                )
                pools[kind] = TierPool(block_set, self._publisher)
        self._host = pools.get(StorageType.PINNED)
        self._device = pools.get(StorageType.DEVICE)
        self._offload = TierOffload(self._device, self._host)
        self._agent = NixlAgent(config, tuple(pools.values()), fabric, manager=self._publisher)

    def __repr__(self) -> str:
        pools = ", ".join(f"{pool.block_set.name} {pool.counts.total} blocks" for pool in self.pools) or "no pools"
        return f"<KvBlockManager of worker {self.worker_id()}: {pools}{', closed' if self.is_closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def worker_id(self) -> int:
        """Return the worker id."""
        return self.config.runtime.worker_id

    def device(self) -> TierPool | None:
        """Return the pool in GPU memory; None without a device layout."""
        return self._device

    def host(self) -> TierPool | None:
        """Return the pool in page-locked host memory; None without a host layout."""
        return self._host

    @property
    def pools(self) -> tuple[TierPool, ...]:
        """The pools, in the order of their block sets."""
        return tuple(pool for pool in (self._host, self._device) if pool is not None)

    @property
    def is_closed(self) -> bool:
        """Whether the manager was closed, or its cancellation token cancelled."""
        return self._cancellation_token.is_cancelled()

    def close(self) -> None:
        """Cancel the token of the configuration. This stops the pools, also those of other managers that share the
        token.

        Closing a closed manager changes nothing. Handles may still be closed, without effect.
        """
        self._cancellation_token.cancel()

    def flush(self) -> Flushed:
        """Take back the returned blocks of all pools, then copy the blocks that are queued for offload.

        Raises:
            ProgressEngineShutdown: the manager is closed.
        """
        self._agent.check_open("flush")
        returned = self._take_back()
        with self._publisher.one_call():
            copied = self._offload.run()
            if any(copied):
                self._take_back()
        return Flushed(returned, *copied)

    def offload(self, block: ImmutableBlock, priority: int = 0) -> None:
        """Queue a registered block of the device for a copy to the host at the next `flush()`.

        An addition: 0.2.1 has no offload. The queue does not hold the block; if it is evicted before, it is not copied.

        Args:
            block: an immutable block of the device pool.
            priority: the highest is copied first, in case of a tie the first queued; at least 0.

        Raises:
            BlockPoolError: there is no device or no host pool, or the block is of another pool.
            BlockClosed: the handle holds no block any more.
            ProgressEngineShutdown: the manager is closed.
            TypeError: `block` is not an immutable block.
            ValueError: the priority is not an integer of at least 0.
        """
        self._offload.queue(block, priority)

    def onboard(self, blocks: Iterable[ImmutableBlock]) -> ImmutableBlocks:
        """Copy registered blocks of the host to the device, and return handles of the device blocks.

        An addition, like `offload`. One device block is allocated for each given block, all or none. If the device
        already has a block, the result has the existing one, and the new copy is returned to the pool.

        Raises:
            NotEnoughBlocksAvailable: the device has fewer blocks available.
            BlockPoolError: there is no device or no host pool, or a block is of another pool.
            BlockClosed: a handle holds no block any more.
            ProgressEngineShutdown: the manager is closed.
            TypeError: a block is not immutable.
        """
        return self._offload.onboard(blocks)

    def export_local_blockset(self) -> NixlBlockSet:
        """Describe all pools for other workers, first the host's set, then the device's.

        The original returns it serialized; here its `to_bytes()` does that.

        Raises:
            ProgressEngineShutdown: the manager is closed.
        """
        return self._agent.export_local_blockset()

    def import_remote_blockset(self, block_set: NixlBlockSet | bytes) -> None:
        """Import the block set of another worker, or its bytes.

        Raises:
            RemoteBlockSetError: the set is of this worker, was imported before, has metadata of another agent or none,
                or this manager has no NIXL.
            NixlSerializationError: the bytes are not those of a block set.
            ProgressEngineShutdown: the manager is closed.
            TypeError: the argument is not a block set.
        """
        self._agent.import_remote_blockset(block_set)

    def get_remote_blocks_immutable(self, descriptors: BlockDescriptorList) -> list[ImmutableRemoteBlock]:
        """Return blocks of another worker for reading; the list may describe mutable blocks.

        Raises:
            RemoteBlockSetError: the block set was not imported, or has no such block.
            ProgressEngineShutdown: the manager is closed.
            TypeError: the argument is not a descriptor list.
        """
        return get_remote_blocks(self._agent, descriptors, ImmutableRemoteBlock)

    def get_remote_blocks_mutable(self, descriptors: BlockDescriptorList) -> list[MutableRemoteBlock]:
        """Return blocks of another worker for reading and writing.

        Raises:
            RemoteBlockSetError: the list describes immutable blocks, or the block set was not imported or has no such
                block.
            ProgressEngineShutdown: the manager is closed.
            TypeError: the argument is not a descriptor list.
        """
        return get_remote_blocks(self._agent, descriptors, MutableRemoteBlock)

    def _take_back(self) -> int:
        return sum(pool.flush() for pool in self.pools)


def check_not_cancelled(config: KvBlockManagerConfig) -> None:
    """Check that a manager of this configuration would be open.

    Raises:
        ValueError: its cancellation token is cancelled, perhaps because an earlier manager of the configuration was
            closed.
    """
    if config.runtime.cancellation_token.is_cancelled():
        raise ValueError(
            f"KvBlockManager: the cancellation token of the configuration of worker {config.runtime.worker_id} is "
            "cancelled already, so the manager would be closed; take a configuration with a new CancellationToken()"
        )
