"""Hashing beside Dynamo's Rust function."""

from __future__ import annotations

import random

from benchmarks.measure import Figure, alternating, dynamo, rate
from pytest_kvmock.tokens import block_hashes, sequence_hashes

BLOCKS, BLOCK_SIZE, PROMPTS = 512, 16, 40


def hashes():
    name = "local hashes from a list of tokens"
    core, version = dynamo()
    theirs = core.compute_block_hash_for_seq
    rng = random.Random(0)
    prompts = [[rng.randrange(100_000) for _ in range(BLOCKS * BLOCK_SIZE)] for _ in range(PROMPTS)]
    assert all(theirs(prompt, BLOCK_SIZE) == block_hashes(prompt, BLOCK_SIZE) for prompt in prompts)
    with_chain, ours, peer = alternating(
        15,
        lambda: [sequence_hashes(block_hashes(prompt, BLOCK_SIZE)) for prompt in prompts],
        lambda: [block_hashes(prompt, BLOCK_SIZE) for prompt in prompts],
        lambda: [theirs(prompt, BLOCK_SIZE) for prompt in prompts],
    )
    count = BLOCKS * PROMPTS
    ratio = peer / ours
    yield Figure(
        name,
        "no slower than the peer",
        f"{ours / count * 1e9:.0f} ns a block, {ratio:.2f} × the peer's speed",
        ratio >= 1,
        f"compute_block_hash_for_seq, {version}: {peer / count * 1e9:.0f} ns a block",
    )
    yield Figure(
        "local and sequence hashes from a list of tokens",
        "",
        f"{with_chain / count * 1e9:.0f} ns a block, {rate(count, with_chain)}",
    )
