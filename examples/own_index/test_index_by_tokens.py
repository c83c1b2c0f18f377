"""An index of your own that is asked by tokens: how it hashes them is its own business.

The token ids of each block travel beside the event.
"""

from collections import Counter
from itertools import takewhile

import pytest

from pytest_kvmock import BACKENDS, Cleared, StorageTier, Stored
from pytest_kvmock.testing import IndexContract


class TokenIndex:
    """Holds, for each block of each worker and rank, all tokens from the root to its end."""

    def __init__(self, block_size, count_copies=False):
        self.size, self.count_copies, self.ranks = block_size, count_copies, {}

    def apply(self, event):
        key, data = (event.worker_id, event.event.dp_rank), event.event.data
        if isinstance(data, Cleared):
            self.ranks.pop(key, None)
        elif event.storage_tier is StorageTier.DEVICE:
            chains, copies = self.ranks.setdefault(key, ({}, Counter()))
            if isinstance(data, Stored):
                chain = () if data.parent_hash is None else chains[data.parent_hash]
                for block, tokens in zip(data.block_hashes, event.token_ids, strict=True):
                    chain = chains[block] = (*chain, *tokens)
                    copies[block] += 1
            else:
                for block in data.block_hashes:
                    copies[block] -= 1
                    if not (self.count_copies and copies[block] > 0):
                        del copies[block]
                        chains.pop(block, None)

    def match_tokens(self, tokens):
        asked = [tuple(tokens[:n]) for n in range(self.size, len(tokens) + 1, self.size)]
        return {k: len([*takewhile(set(chains.values()).__contains__, asked)]) for k, (chains, _) in self.ranks.items()}

    def remove_worker(self, worker_id):
        self.ranks = {key: held for key, held in self.ranks.items() if key[0] != worker_id}


@pytest.fixture
def kv_index(kv_profile, kv_traits):
    return TokenIndex(kv_profile.block_size, kv_traits.copies)


@pytest.mark.kvmock(workers=2, num_blocks=8)
def test_it_knows_who_has_what(kv_harness, kv_prompt):
    prompt = kv_prompt(blocks=4)
    kv_harness.worker(0).serve(prompt)
    kv_harness.worker(1).serve(prompt.tokens[:40])
    assert {0: 4, 1: 2} == kv_harness.overlap(prompt)

    kv_harness.worker(0).serve(kv_prompt(blocks=6))  # evicts the last two
    kv_harness.worker(1).clear()
    assert {0: 2} == kv_harness.overlap(prompt)


class TestTokenIndex(IndexContract):
    backends = tuple(BACKENDS)

    def make_index(self, block_size):
        return TokenIndex(block_size, self.traits.copies)
