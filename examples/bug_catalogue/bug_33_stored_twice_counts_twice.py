"""A block that is stored twice is counted twice: in TensorRT-LLM a leaf that a partial match takes leaves without a
Removed.

The leaf becomes another block; when its old content is computed again, a second Stored names it. One Removed then
removes it.
"""

import pytest
from sound_index import HashIndex


class CountsCopies(HashIndex):
    def __init__(self):
        super().__init__()
        self.copies = {}

    def store(self, blocks, data):
        super().store(blocks, data)
        for block in data.block_hashes:
            self.copies[block] = self.copies.get(block, 0) + 1

    def remove(self, blocks, block):
        self.copies[block] -= 1
        if not self.copies[block]:
            super().remove(blocks, block)


@pytest.fixture
def kv_index():
    return CountsCopies()


@pytest.mark.kv_backends("trtllm")
@pytest.mark.kvmock(block_size=4, num_blocks=5)
def test_one_removed_takes_what_was_stored_twice(kv_harness):
    worker = kv_harness.worker(0)
    worker.serve(range(12))
    worker.serve([*range(10), 90])  # takes the third block for its first two tokens
    worker.serve(range(12))  # stores it again
    worker.serve(range(100, 112))  # evicts it
