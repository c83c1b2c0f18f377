"""The multi-tier block manager of dynamo-llm 0.2.1: a pool for each tier, block states, handles that own blocks."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_kvmock.contrib.block_manager.block_descriptors import BlockDescriptorList as BlockDescriptorList
    from pytest_kvmock.contrib.block_manager.block_descriptors import BlockMutability as BlockMutability
    from pytest_kvmock.contrib.block_manager.block_descriptors import as_block_descriptor_set as as_block_descriptor_set
    from pytest_kvmock.contrib.block_manager.block_errors import BlockClosed as BlockClosed
    from pytest_kvmock.contrib.block_manager.block_errors import BlockManagerError as BlockManagerError
    from pytest_kvmock.contrib.block_manager.block_errors import BlockNotComplete as BlockNotComplete
    from pytest_kvmock.contrib.block_manager.block_errors import BlockPoolError as BlockPoolError
    from pytest_kvmock.contrib.block_manager.block_errors import BlockStateInvalid as BlockStateInvalid
    from pytest_kvmock.contrib.block_manager.block_errors import InvalidMutableBlock as InvalidMutableBlock
    from pytest_kvmock.contrib.block_manager.block_errors import LayoutError as LayoutError
    from pytest_kvmock.contrib.block_manager.block_errors import NotEnoughBlocksAvailable as NotEnoughBlocksAvailable
    from pytest_kvmock.contrib.block_manager.block_errors import PayloadTooLarge as PayloadTooLarge
    from pytest_kvmock.contrib.block_manager.block_errors import ProgressEngineShutdown as ProgressEngineShutdown
    from pytest_kvmock.contrib.block_manager.block_errors import TokenBlockError as TokenBlockError
    from pytest_kvmock.contrib.block_manager.block_handles import BasicMetadata as BasicMetadata
    from pytest_kvmock.contrib.block_manager.block_handles import ImmutableBlock as ImmutableBlock
    from pytest_kvmock.contrib.block_manager.block_handles import MutableBlock as MutableBlock
    from pytest_kvmock.contrib.block_manager.block_lists import ImmutableBlocks as ImmutableBlocks
    from pytest_kvmock.contrib.block_manager.block_lists import MutableBlocks as MutableBlocks
    from pytest_kvmock.contrib.block_manager.block_set import BlockSetLayout as BlockSetLayout
    from pytest_kvmock.contrib.block_manager.block_set import MemType as MemType
    from pytest_kvmock.contrib.block_manager.block_set import NixlBlockSet as NixlBlockSet
    from pytest_kvmock.contrib.block_manager.fabric import CutLink as CutLink
    from pytest_kvmock.contrib.block_manager.fabric import Fabric as Fabric
    from pytest_kvmock.contrib.block_manager.fabric import Transfer as Transfer
    from pytest_kvmock.contrib.block_manager.kv_block_manager import KvBlockManager as KvBlockManager
    from pytest_kvmock.contrib.block_manager.local_block import BlockState as BlockState
    from pytest_kvmock.contrib.block_manager.manager_config import CancellationToken as CancellationToken
    from pytest_kvmock.contrib.block_manager.manager_config import KvBlockManagerConfig as KvBlockManagerConfig
    from pytest_kvmock.contrib.block_manager.manager_config import KvManagerLayoutConfig as KvManagerLayoutConfig
    from pytest_kvmock.contrib.block_manager.manager_config import KvManagerModelConfig as KvManagerModelConfig
    from pytest_kvmock.contrib.block_manager.manager_config import KvManagerRuntimeConfig as KvManagerRuntimeConfig
    from pytest_kvmock.contrib.block_manager.manager_config import NixlOptions as NixlOptions
    from pytest_kvmock.contrib.block_manager.remote_blocks import ImmutableRemoteBlock as ImmutableRemoteBlock
    from pytest_kvmock.contrib.block_manager.remote_blocks import MutableRemoteBlock as MutableRemoteBlock
    from pytest_kvmock.contrib.block_manager.remote_blocks import RemoteBlock as RemoteBlock
    from pytest_kvmock.contrib.block_manager.remote_errors import BlockDescriptorSetError as BlockDescriptorSetError
    from pytest_kvmock.contrib.block_manager.remote_errors import CountMismatch as CountMismatch
    from pytest_kvmock.contrib.block_manager.remote_errors import IncompatibleTypes as IncompatibleTypes
    from pytest_kvmock.contrib.block_manager.remote_errors import MismatchedWorkerID as MismatchedWorkerID
    from pytest_kvmock.contrib.block_manager.remote_errors import NixlSerializationError as NixlSerializationError
    from pytest_kvmock.contrib.block_manager.remote_errors import RemoteBlockSetError as RemoteBlockSetError
    from pytest_kvmock.contrib.block_manager.remote_errors import StaleBlockDescriptor as StaleBlockDescriptor
    from pytest_kvmock.contrib.block_manager.remote_errors import TransferError as TransferError
    from pytest_kvmock.contrib.block_manager.remote_errors import WorkerUnreachable as WorkerUnreachable
    from pytest_kvmock.contrib.block_manager.storage import CacheLevel as CacheLevel
    from pytest_kvmock.contrib.block_manager.storage import DeviceAllocator as DeviceAllocator
    from pytest_kvmock.contrib.block_manager.storage import DeviceStorage as DeviceStorage
    from pytest_kvmock.contrib.block_manager.storage import DType as DType
    from pytest_kvmock.contrib.block_manager.storage import LayoutType as LayoutType
    from pytest_kvmock.contrib.block_manager.storage import PinnedAllocator as PinnedAllocator
    from pytest_kvmock.contrib.block_manager.storage import PinnedStorage as PinnedStorage
    from pytest_kvmock.contrib.block_manager.storage import StorageType as StorageType
    from pytest_kvmock.contrib.block_manager.tier_offload import Flushed as Flushed
    from pytest_kvmock.contrib.block_manager.tier_pool import PoolCounts as PoolCounts
    from pytest_kvmock.contrib.block_manager.tier_pool import TierPool as TierPool
    from pytest_kvmock.contrib.block_manager.token_block import TokenBlock as TokenBlock
    from pytest_kvmock.contrib.block_manager.token_block import token_blocks as token_blocks
    from pytest_kvmock.contrib.block_manager.transfers import TransferRequest as TransferRequest
    from pytest_kvmock.contrib.block_manager.transfers import TransferRequestGet as TransferRequestGet
    from pytest_kvmock.contrib.block_manager.transfers import TransferRequestPut as TransferRequestPut

_HOME = {
    "BasicMetadata": "contrib.block_manager.block_handles",
    "BlockClosed": "contrib.block_manager.block_errors",
    "BlockDescriptorList": "contrib.block_manager.block_descriptors",
    "BlockDescriptorSetError": "contrib.block_manager.remote_errors",
    "BlockManagerError": "contrib.block_manager.block_errors",
    "BlockMutability": "contrib.block_manager.block_descriptors",
    "BlockNotComplete": "contrib.block_manager.block_errors",
    "BlockPoolError": "contrib.block_manager.block_errors",
    "BlockSetLayout": "contrib.block_manager.block_set",
    "BlockState": "contrib.block_manager.local_block",
    "BlockStateInvalid": "contrib.block_manager.block_errors",
    "CacheLevel": "contrib.block_manager.storage",
    "CancellationToken": "contrib.block_manager.manager_config",
    "CountMismatch": "contrib.block_manager.remote_errors",
    "CutLink": "contrib.block_manager.fabric",
    "DType": "contrib.block_manager.storage",
    "DeviceAllocator": "contrib.block_manager.storage",
    "DeviceStorage": "contrib.block_manager.storage",
    "Fabric": "contrib.block_manager.fabric",
    "Flushed": "contrib.block_manager.tier_offload",
    "ImmutableBlock": "contrib.block_manager.block_handles",
    "ImmutableBlocks": "contrib.block_manager.block_lists",
    "ImmutableRemoteBlock": "contrib.block_manager.remote_blocks",
    "IncompatibleTypes": "contrib.block_manager.remote_errors",
    "InvalidMutableBlock": "contrib.block_manager.block_errors",
    "KvBlockManager": "contrib.block_manager.kv_block_manager",
    "KvBlockManagerConfig": "contrib.block_manager.manager_config",
    "KvManagerLayoutConfig": "contrib.block_manager.manager_config",
    "KvManagerModelConfig": "contrib.block_manager.manager_config",
    "KvManagerRuntimeConfig": "contrib.block_manager.manager_config",
    "LayoutError": "contrib.block_manager.block_errors",
    "LayoutType": "contrib.block_manager.storage",
    "MemType": "contrib.block_manager.block_set",
    "MismatchedWorkerID": "contrib.block_manager.remote_errors",
    "MutableBlock": "contrib.block_manager.block_handles",
    "MutableBlocks": "contrib.block_manager.block_lists",
    "MutableRemoteBlock": "contrib.block_manager.remote_blocks",
    "NixlBlockSet": "contrib.block_manager.block_set",
    "NixlOptions": "contrib.block_manager.manager_config",
    "NixlSerializationError": "contrib.block_manager.remote_errors",
    "NotEnoughBlocksAvailable": "contrib.block_manager.block_errors",
    "PayloadTooLarge": "contrib.block_manager.block_errors",
    "PinnedAllocator": "contrib.block_manager.storage",
    "PinnedStorage": "contrib.block_manager.storage",
    "PoolCounts": "contrib.block_manager.tier_pool",
    "ProgressEngineShutdown": "contrib.block_manager.block_errors",
    "RemoteBlock": "contrib.block_manager.remote_blocks",
    "RemoteBlockSetError": "contrib.block_manager.remote_errors",
    "StaleBlockDescriptor": "contrib.block_manager.remote_errors",
    "StorageType": "contrib.block_manager.storage",
    "TierPool": "contrib.block_manager.tier_pool",
    "TokenBlock": "contrib.block_manager.token_block",
    "TokenBlockError": "contrib.block_manager.block_errors",
    "Transfer": "contrib.block_manager.fabric",
    "TransferError": "contrib.block_manager.remote_errors",
    "TransferRequest": "contrib.block_manager.transfers",
    "TransferRequestGet": "contrib.block_manager.transfers",
    "TransferRequestPut": "contrib.block_manager.transfers",
    "WorkerUnreachable": "contrib.block_manager.remote_errors",
    "as_block_descriptor_set": "contrib.block_manager.block_descriptors",
    "token_blocks": "contrib.block_manager.token_block",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table is the one list


def __getattr__(name: str) -> Any:
    """Load a name on first use: the plugin is loaded in every run of pytest, and needs none of them."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pytest_kvmock.{home}"), name)
    globals()[name] = value
    return value
