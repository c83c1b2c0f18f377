"""The multi-tier block manager of dynamo-llm 0.2.1: pools a tier, block states, handles that own blocks."""

from pytest_kvmock.block_manager.block_descriptors import (
    BlockDescriptorList,
    BlockMutability,
    as_block_descriptor_set,
)
from pytest_kvmock.block_manager.block_errors import (
    BlockClosed,
    BlockManagerError,
    BlockNotComplete,
    BlockPoolError,
    BlockStateInvalid,
    InvalidMutableBlock,
    LayoutError,
    NotEnoughBlocksAvailable,
    PayloadTooLarge,
    ProgressEngineShutdown,
    TokenBlockError,
)
from pytest_kvmock.block_manager.block_handles import BasicMetadata, ImmutableBlock, MutableBlock
from pytest_kvmock.block_manager.block_lists import ImmutableBlocks, MutableBlocks
from pytest_kvmock.block_manager.block_set import (
    BlockSetLayout,
    MemType,
    NixlBlockSet,
)
from pytest_kvmock.block_manager.fabric import (
    CutLink,
    Fabric,
    Transfer,
)
from pytest_kvmock.block_manager.kv_block_manager import KvBlockManager
from pytest_kvmock.block_manager.kv_block_manager import check_not_cancelled as check_not_cancelled
from pytest_kvmock.block_manager.local_block import BlockState
from pytest_kvmock.block_manager.manager_config import (
    CancellationToken,
    KvBlockManagerConfig,
    KvManagerLayoutConfig,
    KvManagerModelConfig,
    KvManagerRuntimeConfig,
    NixlOptions,
)
from pytest_kvmock.block_manager.remote_blocks import (
    ImmutableRemoteBlock,
    MutableRemoteBlock,
    RemoteBlock,
)
from pytest_kvmock.block_manager.remote_errors import (
    BlockDescriptorSetError,
    CountMismatch,
    IncompatibleTypes,
    MismatchedWorkerID,
    NixlSerializationError,
    RemoteBlockSetError,
    StaleBlockDescriptor,
    TransferError,
    WorkerUnreachable,
)
from pytest_kvmock.block_manager.storage import (
    CacheLevel,
    DeviceAllocator,
    DeviceStorage,
    DType,
    LayoutType,
    PinnedAllocator,
    PinnedStorage,
    StorageType,
)
from pytest_kvmock.block_manager.tier_offload import Flushed
from pytest_kvmock.block_manager.tier_pool import PoolCounts, TierPool
from pytest_kvmock.block_manager.token_block import TokenBlock, token_blocks
from pytest_kvmock.block_manager.transfers import (
    TransferRequest,
    TransferRequestGet,
    TransferRequestPut,
)

__all__ = [
    "BasicMetadata",
    "BlockClosed",
    "BlockDescriptorList",
    "BlockDescriptorSetError",
    "BlockManagerError",
    "BlockMutability",
    "BlockNotComplete",
    "BlockPoolError",
    "BlockSetLayout",
    "BlockState",
    "BlockStateInvalid",
    "CacheLevel",
    "CancellationToken",
    "CountMismatch",
    "CutLink",
    "DType",
    "DeviceAllocator",
    "DeviceStorage",
    "Fabric",
    "Flushed",
    "ImmutableBlock",
    "ImmutableBlocks",
    "ImmutableRemoteBlock",
    "IncompatibleTypes",
    "InvalidMutableBlock",
    "KvBlockManager",
    "KvBlockManagerConfig",
    "KvManagerLayoutConfig",
    "KvManagerModelConfig",
    "KvManagerRuntimeConfig",
    "LayoutError",
    "LayoutType",
    "MemType",
    "MismatchedWorkerID",
    "MutableBlock",
    "MutableBlocks",
    "MutableRemoteBlock",
    "NixlBlockSet",
    "NixlOptions",
    "NixlSerializationError",
    "NotEnoughBlocksAvailable",
    "PayloadTooLarge",
    "PinnedAllocator",
    "PinnedStorage",
    "PoolCounts",
    "ProgressEngineShutdown",
    "RemoteBlock",
    "RemoteBlockSetError",
    "StaleBlockDescriptor",
    "StorageType",
    "TierPool",
    "TokenBlock",
    "TokenBlockError",
    "Transfer",
    "TransferError",
    "TransferRequest",
    "TransferRequestGet",
    "TransferRequestPut",
    "WorkerUnreachable",
    "as_block_descriptor_set",
    "token_blocks",
]
