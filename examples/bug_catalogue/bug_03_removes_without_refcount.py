"""A block that is held twice and removed once is dropped.

The index knows workers, but not ranks. Both ranks of a worker hold the block; one of them evicts it.
"""

import pytest
from sound_index import HashIndex


class NoRefcount(HashIndex):
    def owner(self, event):
        return event.worker_id

    def remove(self, blocks, block):
        blocks.pop(block, None)  # instead of counting one holder less


@pytest.fixture
def kv_index():
    return NoRefcount()


@pytest.mark.kvmock(dp_size=2, num_blocks=4)
def test_a_block_is_there_while_a_rank_has_it(kv_harness, kv_prompt):
    prompt = kv_prompt(blocks=2)
    kv_harness.worker(0, dp_rank=0).serve(prompt)
    kv_harness.worker(0, dp_rank=1).serve(prompt)
    kv_harness.worker(0, dp_rank=0).serve(kv_prompt(blocks=4))  # evicts both
