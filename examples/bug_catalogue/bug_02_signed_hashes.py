"""Hashes are read as unsigned numbers in one place and as signed ones in another.

Here the decoder of Removed reads an i64. Half of all hashes become negative, and their blocks are never removed.
"""

import pytest
from sound_index import HashIndex


class SignedRemoved(HashIndex):
    def remove(self, blocks, block):
        blocks.pop(block, None)  # "cannot happen": the block is not there


@pytest.fixture
def kv_index():
    return SignedRemoved()


@pytest.mark.kvmock(num_blocks=4)
def test_evicted_blocks_leave_the_index(kv_harness, kv_prompt):
    with kv_harness.faults.signed(kind="removed"):
        for _ in range(3):
            kv_harness.worker(0).serve(kv_prompt(blocks=3))
