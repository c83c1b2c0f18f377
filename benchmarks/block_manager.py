"""The block manager of dynamo-llm: full cycles of blocks, and memory."""

from __future__ import annotations

import gc
import statistics
import tracemalloc

from benchmarks.measure import Figure, cpu_seconds, profile_of, rate
from pytest_kvmock.block_manager import (
    DeviceAllocator,
    KvBlockManager,
    KvBlockManagerConfig,
    KvManagerLayoutConfig,
    KvManagerModelConfig,
    KvManagerRuntimeConfig,
    TokenBlock,
    token_blocks,
)
from pytest_kvmock.sinks import CapturingSink

PAGE_SIZE = 16
CAPACITY = 8192
CHAIN = 32
REQUESTS = 2000
BAR = 200_000
BYTES = 400


def manager(sink=None, capacity=CAPACITY):
    config = KvBlockManagerConfig(
        runtime=KvManagerRuntimeConfig(worker_id=0),
        model=KvManagerModelConfig(num_layers=3, page_size=PAGE_SIZE, inner_dim=16),
        device_layout=KvManagerLayoutConfig(num_blocks=capacity, allocator=DeviceAllocator()),
    )
    return KvBlockManager(config, sink=sink)


def prompt(number):
    return range(number * CHAIN * PAGE_SIZE, (number + 1) * CHAIN * PAGE_SIZE)


def cycles(pool, chains, by_tokens):
    """Allocate, fill, register, match and return each chain; from the 257th on each block evicts another."""
    for chain, hashes in chains:
        blocks = pool.allocate_blocks_blocking(len(chain))
        if by_tokens:
            for block, content in zip(blocks, chain, strict=True):
                block.initialize_sequence()
                block.add_tokens(content.tokens)
                block.commit()
        else:
            for block, content in zip(blocks, chain, strict=True):
                block.apply_token_block(content)
        held = pool.register_blocks_blocking(blocks)
        matched = pool.match_sequence_hashes_blocking(hashes)
        matched.close()
        held.close()
        pool.flush()


def with_hashes(chains):
    return [(chain, [block.sequence_hash for block in chain]) for chain in chains]


def speed():
    chained = with_hashes([token_blocks(prompt(number), PAGE_SIZE) for number in range(REQUESTS)])
    # Only a root can be filled token by token, so these have a block each of their own.
    roots = with_hashes([[TokenBlock(block.tokens) for block in chain] for chain, _ in chained])
    for name, work, by_tokens, sink, bar in (
        ("token blocks", chained, False, None, BAR),
        ("token blocks, with a capturing sink", chained, False, CapturingSink, None),
        ("tokens, hashed at commit", roots, True, None, None),
    ):

        def run(work=work, by_tokens=by_tokens, sink=sink):
            cycles(manager(sink and sink()).device(), work, by_tokens)

        total = REQUESTS * CHAIN
        seconds = statistics.median(cpu_seconds(run) for _ in range(5))
        met = None if bar is None else total / seconds >= bar
        yield Figure(
            f"full cycles of blocks (allocate, fill, register, match, return) through KvBlockManager, {name}",
            "" if bar is None else "200 k/s",
            rate(total, seconds),
            met,
            profile=profile_of(run) if met is False else "",
        )


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
    # Hashes are integers of the token blocks, which are not counted; where the pool alone kept them they would cost 32 B each.
    used = (tracemalloc.get_traced_memory()[0] - before) / CAPACITY + 3 * 32
    tracemalloc.stop()
    yield Figure(
        "memory of KvBlockManager, its hashes counted", f"{BYTES} B a registered block", f"{used:.0f} B", used <= BYTES
    )
