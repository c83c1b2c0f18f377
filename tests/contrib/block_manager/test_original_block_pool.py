"""The tests of dynamo-llm 0.2.1 for its BlockPool, in Python."""

import asyncio

import pytest

from pytest_kvmock.contrib.block_manager import (
    DeviceAllocator,
    KvBlockManager,
    KvBlockManagerConfig,
    KvManagerLayoutConfig,
    KvManagerModelConfig,
    KvManagerRuntimeConfig,
    TokenBlockError,
)

EXPECTED_SEQUENCE_HASH = 14643705804678351452


@pytest.fixture
def pool():
    """Return a pool of 7 blocks of 4 tokens, as in the tests of dynamo-llm."""
    config = KvBlockManagerConfig(
        KvManagerRuntimeConfig(42),
        KvManagerModelConfig(5, 4, 13),
        KvManagerLayoutConfig(7, allocator=DeviceAllocator()),
    )
    return KvBlockManager(config).device()


def test_block_pool_state(pool):
    assert pool.available_blocks == 7
    blocks = pool.allocate_blocks_blocking(1)
    assert (pool.available_blocks, len(blocks)) == (6, 1)
    del blocks
    pool.flush()
    assert pool.available_blocks == 7
    blocks = pool.allocate_blocks_blocking(1)
    assert (pool.available_blocks, len(blocks)) == (6, 1)
    block = blocks.pop()
    block.init_sequence(1337)
    for token in (1, 2, 3, 4):
        block.add_token(token)
    with pytest.raises(TokenBlockError, match=r"^TokenBlock is full"):
        block.add_token(5)


def test_block_pool(pool):
    async def step():
        return await pool.allocate_blocks(1)

    blocks = asyncio.run(step())
    assert (pool.available_blocks, len(blocks)) == (6, 1)
    del blocks
    assert pool.available_blocks == 6  # before the pool's step; 7 after it
    assert pool.flush() == 1
    assert pool.available_blocks == 7


def test_block_pool_blocking(pool):
    assert pool.match_sequence_hashes_blocking([EXPECTED_SEQUENCE_HASH]) == []
    (block,) = pool.allocate_blocks_blocking(1)
    block.init_sequence(1337)
    for token in (1, 2, 3, 4):
        block.add_token(token)
    with pytest.raises(TokenBlockError):
        block.add_token(5)
    block.commit()
    assert block.state == "Complete"
    assert block.sequence_hash == EXPECTED_SEQUENCE_HASH

    immutable_blocks = pool.register_blocks_blocking([block])
    block = immutable_blocks.pop()
    assert (block.state, block.sequence_hash) == ("Registered", EXPECTED_SEQUENCE_HASH)

    # After the drop it stays inactive in the pool until it is matched or evicted; a match needs no flush().
    del block
    (matched,) = pool.match_sequence_hashes_blocking([EXPECTED_SEQUENCE_HASH])
    assert matched.sequence_hash == EXPECTED_SEQUENCE_HASH
