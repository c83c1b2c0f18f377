"""Two block managers that exchange block sets and blocks: the tests of dynamo-llm 0.2.1, with the part that
is commented out there.
"""

import asyncio
from itertools import count

import pytest

from pytest_kvmock.contrib.block_manager import (
    DeviceAllocator,
    Fabric,
    KvBlockManager,
    KvBlockManagerConfig,
    KvManagerLayoutConfig,
    KvManagerModelConfig,
    KvManagerRuntimeConfig,
    PinnedAllocator,
    TransferError,
    TransferRequestPut,
)

WORKER_IDS = count(1337)


def create_reference_block_manager(fabric=None):
    config = KvBlockManagerConfig(
        runtime=KvManagerRuntimeConfig(worker_id=next(WORKER_IDS)),
        model=KvManagerModelConfig(num_layers=3, page_size=4, inner_dim=16),
        host_layout=KvManagerLayoutConfig(num_blocks=16, allocator=PinnedAllocator()),
        device_layout=KvManagerLayoutConfig(num_blocks=8, allocator=DeviceAllocator(0)),
    )
    return KvBlockManager(config, fabric=fabric)


def test_reference_block_manager_inherited_async_runtime():
    async def make():
        with create_reference_block_manager() as block_manager:
            return block_manager.host().total_blocks, block_manager.device().total_blocks

    assert asyncio.run(make()) == (16, 8)


def test_reference_block_manager_blocking():
    block_manager = create_reference_block_manager()
    assert (block_manager.host().total_blocks, block_manager.device().total_blocks) == (16, 8)
    block_manager.close()


def test_reference_block_managers():
    asyncio.run(exchange(Fabric()))


async def exchange(fabric):
    # create two block managers - mimics two unique dynamo workers
    kvbm_0 = create_reference_block_manager(fabric)
    kvbm_1 = create_reference_block_manager(fabric)

    assert kvbm_0.worker_id() != kvbm_1.worker_id()

    # in dynamo, we would exchange the blocksets via the discovery plane
    blockset_0 = kvbm_0.export_local_blockset()
    blockset_1 = kvbm_1.export_local_blockset()

    # in dynamo, we would be watching the discovery plane for remote blocksets
    kvbm_0.import_remote_blockset(blockset_1)
    kvbm_1.import_remote_blockset(blockset_0)

    # Worker 0
    # Allocate 4 mutable blocks on the host
    blocks_0 = await kvbm_0.host().allocate_blocks(4)

    # Create a BlockDescriptorList for the mutable blocks
    blockset_0 = blocks_0.as_block_descriptor_set()

    # Worker 1
    # Create a RemoteBlock list from blockset_0
    blocks_1 = await kvbm_1.host().allocate_blocks(4)
    remote_blocks_0 = kvbm_1.get_remote_blocks_mutable(blockset_0)
    assert [(kvbm_0.worker_id(), 1, index) for index in range(4)] == [
        (block.worker_id, block.block_set_idx, block.block_idx) for block in remote_blocks_0
    ]

    # The rest is commented out there, because it waits for a transfer engine.
    for number, block in enumerate(blocks_1):
        block.payload = bytes([number]) * block.block_bytes

    # Create a TransferRequestPut for the mutable blocks
    transfer_request = TransferRequestPut(blocks_0, remote_blocks_0)

    # In this case, we expect an error because we have overlapping blocks as we are sending to/from the same blocks
    with pytest.raises(
        TransferError,
        match=r"^Duplicate entries in source and destination list: block 0 of set 1 of worker \d+ is in both",
    ):
        transfer_request.validate_blocks()

    # This is proper request - PUT from worker 1 (local) to worker 0 (remote)
    transfer_request = TransferRequestPut(blocks_1, remote_blocks_0)
    transfer_request.validate_blocks()

    # Execute the transfer request
    transfer_request.execute()
    assert [block.payload for block in blocks_1] == [block.payload for block in blocks_0]
    assert [("put", kvbm_1.worker_id(), kvbm_0.worker_id(), 4, 4 * 384)] == fabric.transfers

    # Its separate builder of a put is the constructor of the request here.

    # Create a Put request direct between two local blocks
    # split the blocks into two vecs each with 2 blocks
    slice_0 = blocks_1.split_off(2)
    slice_1 = blocks_1

    transfer_request = TransferRequestPut(slice_0, slice_1)
    transfer_request.validate_blocks()

    # Execute the transfer request
    transfer_request.execute()
    assert [bytes([number]) * 384 for number in (2, 3)] == [block.payload for block in slice_1]
    assert [bytes([number]) * 384 for number in (2, 3)] == [block.payload for block in slice_0]
    assert len(fabric.transfers) == 1  # this transfer did not leave the worker
