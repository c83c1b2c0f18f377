"""The block manager of dynamo-llm: full cycles of blocks, and memory."""

from __future__ import annotations

import gc
import tracemalloc
from functools import cache

from benchmarks.measure import Figure
from pytest_kvmock.contrib.block_manager import (
    DeviceAllocator,
    KvBlockManager,
    KvBlockManagerConfig,
    KvManagerLayoutConfig,
    KvManagerModelConfig,
    KvManagerRuntimeConfig,
    token_blocks,
)

PAGE_SIZE = 16
CAPACITY = 8192
CHAIN = 32
REQUESTS = 1_000
BYTES = 400


def manager():
    config = KvBlockManagerConfig(
        runtime=KvManagerRuntimeConfig(worker_id=0),
        model=KvManagerModelConfig(num_layers=3, page_size=PAGE_SIZE, inner_dim=16),
        device_layout=KvManagerLayoutConfig(num_blocks=CAPACITY, allocator=DeviceAllocator()),
    )
    return KvBlockManager(config)


def prompt(number):
    return range(number * CHAIN * PAGE_SIZE, (number + 1) * CHAIN * PAGE_SIZE)


@cache
def chains():
    made = [token_blocks(prompt(number), PAGE_SIZE) for number in range(REQUESTS)]
    return [(chain, [block.sequence_hash for block in chain]) for chain in made]


def cycles(pool, chains):
    """Allocate, fill, register, match and return each chain; from the 257th chain on, each block evicts another."""
    for chain, hashes in chains:
        blocks = pool.allocate_blocks_blocking(len(chain))
        for block, content in zip(blocks, chain, strict=True):
            block.apply_token_block(content)
        held = pool.register_blocks_blocking(blocks)
        matched = pool.match_sequence_hashes_blocking(hashes)
        matched.close()
        held.close()
        pool.flush()


def full_cycles() -> int:
    """Run all cycles; return the number of blocks that were allocated, filled, registered, matched and returned."""
    cycles(manager().device(), chains())
    return REQUESTS * CHAIN


def memory():
    chains = [token_blocks(prompt(number), PAGE_SIZE) for number in range(CAPACITY // CHAIN)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    pool = manager().device()
    for chain in chains:
        held = pool.allocate_blocks_blocking(CHAIN)
        for block, content in zip(held, chain, strict=True):
            block.apply_token_block(content)
        pool.register_blocks_blocking(held).close()
        pool.flush()
    assert pool.counts.inactive == CAPACITY
    del held, block
    gc.collect()
    # Hashes are integers of the token blocks, which are not counted; if only the pool kept them, they would cost 32 B
    # each.
    used = (tracemalloc.get_traced_memory()[0] - before) / CAPACITY + 3 * 32
    tracemalloc.stop()
    yield Figure("memory of a registered block in KvBlockManager, its hashes counted", used, BYTES, unit="B", most=True)
