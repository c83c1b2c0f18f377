"""A block that one worker evicts is removed from all workers."""

import pytest
from sound_index import HashIndex

from pytest_kvmock import Removed


class RemovesEverywhere(HashIndex):
    def apply(self, event):
        if isinstance(event.event.data, Removed):
            for blocks in self.held.values():
                for block in event.event.data.block_hashes:
                    blocks.pop(block, None)
        else:
            super().apply(event)


@pytest.fixture
def kv_index():
    return RemovesEverywhere()


@pytest.mark.kvmock(workers=2, num_blocks=4)
def test_an_eviction_is_one_workers_business(kv_harness, kv_prompt):
    prompt = kv_prompt(blocks=3)
    kv_harness.worker(0).serve(prompt)
    kv_harness.worker(1).serve(prompt)
    kv_harness.worker(0).serve(kv_prompt(blocks=3))
