"""An index of your own that is asked by tokens: how it hashes them is its own business.

The token ids of each block travel beside the event.
"""

from collections import defaultdict
from itertools import takewhile

import pytest

from pytest_kvmock import Stored
from pytest_kvmock.testing import IndexContract


class TokenIndex:
    """Holds, for each block of each worker, all tokens from the root to its end."""

    def __init__(self, block_size):
        self.size, self.held = block_size, defaultdict(dict)

    def apply(self, event):
        blocks, data = self.held[event.worker_id], event.event.data
        if isinstance(data, Stored):
            prefix = () if data.parent_hash is None else blocks[data.parent_hash]
            for block, tokens in zip(data.block_hashes, event.token_ids, strict=True):
                prefix = blocks[block] = (*prefix, *tokens)
        else:
            for block in list(getattr(data, "block_hashes", blocks)):  # a Cleared names none and means all
                blocks.pop(block)

    def match_tokens(self, tokens):
        prefixes = [tuple(tokens[:n]) for n in range(self.size, len(tokens) + 1, self.size)]
        return {w: len([*takewhile(set(held.values()).__contains__, prefixes)]) for w, held in self.held.items()}


@pytest.fixture
def kv_index(kv_profile):
    return TokenIndex(kv_profile.block_size)


@pytest.mark.kvmock(workers=2, num_blocks=8)
def test_it_knows_who_has_what(kv_router, kv_prompt):
    prompt = kv_prompt(blocks=4)
    kv_router.worker(0).serve(prompt)
    kv_router.worker(1).serve(prompt.tokens[:40])
    assert {0: 4, 1: 2} == kv_router.overlap(prompt)

    kv_router.worker(0).serve(kv_prompt(blocks=6))  # evicts the last two
    kv_router.worker(1).clear()
    assert {0: 2} == kv_router.overlap(prompt)


class TestTokenIndex(IndexContract):
    tells_ranks_apart = False  # it knows workers alone

    def make_index(self, block_size):
        return TokenIndex(block_size)
