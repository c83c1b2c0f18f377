"""An index of your own that is asked by local hashes, as Dynamo's is: one hash a block."""

from collections import Counter
from itertools import takewhile

import pytest

from pytest_kvmock import BACKENDS, Cleared, StorageTier, Stored
from pytest_kvmock.testing import IndexContract


class HashIndex:
    """Holds, for each block of each worker and rank, the local hashes from the root to the block."""

    def __init__(self, count_copies=False):
        self.count_copies, self.ranks = count_copies, {}

    def apply(self, event):
        key, data = (event.worker_id, event.event.dp_rank), event.event.data
        if isinstance(data, Cleared):
            self.ranks.pop(key, None)
        elif event.storage_tier is StorageTier.DEVICE:
            chains, copies = self.ranks.setdefault(key, ({}, Counter()))
            if isinstance(data, Stored):
                chain = () if data.parent_hash is None else chains[data.parent_hash]
                for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                    chain = chains[block] = (*chain, local)
                    copies[block] += 1
            else:
                for block in data.block_hashes:
                    copies[block] -= 1
                    if not (self.count_copies and copies[block] > 0):
                        del copies[block]
                        chains.pop(block, None)

    def find_matches(self, local_hashes):
        asked = [tuple(local_hashes[:n]) for n in range(1, len(local_hashes) + 1)]
        return {k: len([*takewhile(set(chains.values()).__contains__, asked)]) for k, (chains, _) in self.ranks.items()}

    def remove_worker(self, worker_id):
        self.ranks = {key: held for key, held in self.ranks.items() if key[0] != worker_id}


@pytest.fixture
def kv_index(kv_traits):
    return HashIndex(kv_traits.copies)


@pytest.mark.kvmock(workers=2, num_blocks=8)
def test_it_knows_who_has_what(kv_harness, kv_prompt):
    prompt = kv_prompt(blocks=4)
    kv_harness.worker(0).serve(prompt)
    kv_harness.worker(1).serve(prompt.tokens[:40])
    assert {0: 4, 1: 2} == kv_harness.overlap(prompt)

    kv_harness.worker(0).serve(kv_prompt(blocks=6))  # evicts the last two
    kv_harness.worker(1).clear()
    assert {0: 2} == kv_harness.overlap(prompt)


class TestHashIndex(IndexContract):
    backends = tuple(BACKENDS)

    def make_index(self):
        return HashIndex(self.traits.copies)
