"""An index of your own that is asked by local hashes, as Dynamo's is: one hash a block."""

from collections import defaultdict
from itertools import takewhile

import pytest

from pytest_kvmock import Stored
from pytest_kvmock.testing import IndexContract


class HashIndex:
    """Holds, for each block of each worker, the local hashes from the root to the block."""

    def __init__(self):
        self.held = defaultdict(dict)

    def apply(self, event):
        blocks, data = self.held[event.worker_id], event.event.data
        if isinstance(data, Stored):
            chain = () if data.parent_hash is None else blocks[data.parent_hash]
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                chain = blocks[block] = (*chain, local)
        else:
            for block in list(getattr(data, "block_hashes", blocks)):  # a Cleared names none and means all
                blocks.pop(block)

    def find_matches(self, local_hashes):
        chains = [tuple(local_hashes[:n]) for n in range(1, len(local_hashes) + 1)]
        return {w: len([*takewhile(set(held.values()).__contains__, chains)]) for w, held in self.held.items()}


@pytest.fixture
def kv_index():
    return HashIndex()


@pytest.mark.kvmock(workers=2, num_blocks=8)
def test_it_knows_who_has_what(kv_router, kv_prompt):
    prompt = kv_prompt(blocks=4)
    kv_router.worker(0).serve(prompt)
    kv_router.worker(1).serve(prompt.tokens[:40])
    assert {0: 4, 1: 2} == kv_router.overlap(prompt)

    kv_router.worker(0).serve(kv_prompt(blocks=6))  # evicts the last two
    kv_router.worker(1).clear()
    assert {0: 2} == kv_router.overlap(prompt)


class TestHashIndex(IndexContract):
    tells_ranks_apart = False  # it knows workers alone

    def make_index(self):
        return HashIndex()
