"""Hashing, compared with Dynamo's Rust function."""

from __future__ import annotations

import random

from benchmarks.measure import Figure, alternating, dynamo
from pytest_kvmock import block_hashes

BLOCKS, BLOCK_SIZE, PROMPTS = 512, 16, 40


def hashes():
    core, version = dynamo()
    theirs = core.compute_block_hash_for_seq
    rng = random.Random(0)
    prompts = [[rng.randrange(100_000) for _ in range(BLOCKS * BLOCK_SIZE)] for _ in range(PROMPTS)]
    assert all(theirs(prompt, BLOCK_SIZE) == block_hashes(prompt, BLOCK_SIZE) for prompt in prompts)
    ours, peer = alternating(
        15,
        lambda: [block_hashes(prompt, BLOCK_SIZE) for prompt in prompts],
        lambda: [theirs(prompt, BLOCK_SIZE) for prompt in prompts],
    )
    yield Figure("local hashes from a list of tokens", peer / ours, 1, f"compute_block_hash_for_seq, {version}")
