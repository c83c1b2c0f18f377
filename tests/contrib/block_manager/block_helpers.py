"""Managers with the sizes of Dynamo's own tests, and prompts for them."""

from pytest_kvmock.contrib.block_manager import (
    DeviceAllocator,
    KvBlockManager,
    KvBlockManagerConfig,
    KvManagerLayoutConfig,
    KvManagerModelConfig,
    KvManagerRuntimeConfig,
    PinnedAllocator,
    token_blocks,
)

PAGE = 4
MODEL = KvManagerModelConfig(num_layers=3, page_size=PAGE, inner_dim=16)
BLOCK_BYTES = 3 * 4 * 16 * 2


def device_layout(num_blocks=8):
    return KvManagerLayoutConfig(num_blocks=num_blocks, allocator=DeviceAllocator(0))


def host_layout(num_blocks=16):
    return KvManagerLayoutConfig(num_blocks=num_blocks, allocator=PinnedAllocator())


def make_manager(worker_id=1337, device=8, host=16, sink=None, **runtime):
    """Make a manager with 3 layers, pages of 4 tokens and inner dimension 16; None blocks: no such pool."""
    config = KvBlockManagerConfig(
        runtime=KvManagerRuntimeConfig(worker_id=worker_id, **runtime),
        model=MODEL,
        device_layout=device and device_layout(device),
        host_layout=host and host_layout(host),
    )
    return KvBlockManager(config, sink=sink)


def make_pool(num_blocks=4, sink=None):
    return make_manager(device=num_blocks, host=None, sink=sink).device()


def chain(blocks, start=0, parent=None):
    """Return token blocks of new tokens from `start` on."""
    return token_blocks(range(start, start + PAGE * blocks), PAGE, parent_sequence_hash=parent)


def hashes(contents):
    return [content.sequence_hash for content in contents]


def fill(pool, contents):
    """Allocate and fill a block for each token block."""
    blocks = pool.allocate_blocks_blocking(len(contents))
    for block, content in zip(blocks, contents, strict=True):
        block.apply_token_block(content)
    return blocks


def register(pool, contents):
    """Allocate, fill and register; returns the immutable blocks."""
    return pool.register_blocks_blocking(fill(pool, contents))


def cache(pool, contents):
    """Register blocks, and return them to the pool."""
    register(pool, contents).close()
    pool.flush()
