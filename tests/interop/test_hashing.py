"""Block hashes against `compute_block_hash_for_seq`: any release (checked with 1.1.1, 1.2.1, 1.3.1 and 1.6.1)."""

import inspect
import random

import pytest
from peer import dynamo_core

from pytest_kvmock import block_hashes

core = dynamo_core()

TAKES_NAMESPACE = "cache_namespace" in inspect.signature(core.compute_block_hash_for_seq).parameters
"""The argument came after 1.3.1."""

U64 = 2**64 - 1


def theirs(tokens, block_size, *, lora_name=None, cache_namespace=None, mm_hashes=None, eagle=False):
    infos = None
    if mm_hashes is not None:
        infos = [
            None if hashes is None else {"mm_objects": [{"mm_hash": h, "offsets": [[0, 1]]} for h in hashes]}
            for hashes in mm_hashes
        ]
    options = {"cache_namespace": cache_namespace} if cache_namespace is not None else {}
    return core.compute_block_hash_for_seq(tokens, block_size, infos, lora_name, eagle, **options)


def case(rnd):
    """Return one call: a length of zero to a few blocks with a short tail, each option in a third of the cases."""
    block_size = rnd.choice([1, 2, 3, 4, 7, 16, 32, 64, 128])
    blocks = rnd.randrange(6)
    count = max(0, blocks * block_size + rnd.choice([0, 0, 1, block_size - 1]) - rnd.randrange(2))
    tokens = [rnd.choice([0, 1, 2**32 - 1, rnd.randrange(2**32), rnd.randrange(150_000)]) for _ in range(count)]
    options = {}
    if rnd.random() < 0.35:
        options["lora_name"] = rnd.choice(["", "a", "my-adapter", "Überlänge-模型", "x" * 300])
    if TAKES_NAMESPACE and rnd.random() < 0.35:
        options["cache_namespace"] = rnd.choice(["", "a", "tenant-a", "テナント", "y" * 300])
    if rnd.random() < 0.35:
        values = [0, 1, U64, rnd.randrange(2**64), rnd.randrange(2**64)]
        options["mm_hashes"] = [
            rnd.choice([None, [], [rnd.choice(values) for _ in range(rnd.randint(1, 4))]])
            for _ in range(rnd.randrange(8))
        ]
    if rnd.random() < 0.25:
        options["eagle"] = True
    return tokens, block_size, options


@pytest.mark.parametrize("seed", range(20))
def test_three_hundred_random_cases_have_equal_hashes(seed):
    rnd = random.Random(seed)
    for _ in range(300):
        tokens, block_size, options = case(rnd)
        expected = theirs(tokens, block_size, **options)
        assert block_hashes(tokens, block_size, **options) == expected, (tokens, block_size, options)


@pytest.mark.parametrize(
    "tokens",
    [(1, 2, 3, 4), range(4), b"\x01\x02\x03\x04", [True, False, 2, 3]],
    ids=["tuple", "range", "bytes", "bools"],
)
def test_any_sequence_of_integers_has_equal_hashes(tokens):
    assert core.compute_block_hash_for_seq(tokens, 2) == block_hashes(tokens, 2)


@pytest.mark.parametrize(
    ("tokens", "block_size"),
    [([-1], 1), ([2**32], 1), ([1.0], 1), (["1"], 1), ([None], 1), ("12", 1), (7, 1), ([1], 0), ([1], -1), ([1], 1.5)],
    ids=repr,
)
def test_tokens_that_the_binding_refuses_are_refused(tokens, block_size):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        core.compute_block_hash_for_seq(tokens, block_size)
    with pytest.raises((TypeError, ValueError)):
        block_hashes(tokens, block_size)
