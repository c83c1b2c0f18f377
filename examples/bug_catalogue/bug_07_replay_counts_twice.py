"""A replay after a gap repeats an event that had arrived: its blocks are counted twice, and never removed."""

from collections import Counter

import pytest
from sound_index import HashIndex


class CountsCopies(HashIndex):
    def __init__(self):
        super().__init__()
        self.copies = Counter()

    def store(self, blocks, data):
        super().store(blocks, data)
        self.copies.update(data.block_hashes)

    def remove(self, blocks, block):
        self.copies[block] -= 1
        if not self.copies[block]:
            super().remove(blocks, block)


@pytest.fixture
def kv_index():
    return CountsCopies()


@pytest.mark.kvmock(survive=["double"], num_blocks=4)
def test_an_event_that_comes_twice_counts_once(kv_harness, kv_prompt):
    with kv_harness.faults.double(kind="stored"):
        kv_harness.worker(0).serve(kv_prompt(blocks=3))
    kv_harness.worker(0).serve(kv_prompt(blocks=4))  # evicts the three
