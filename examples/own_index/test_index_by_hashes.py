"""Your own index, queried by local hashes like Dynamo's: one hash per block."""

import pytest
from attention_group import AttentionGroup

from pytest_kvmock import BACKENDS, Cleared, StorageTier, Stored
from pytest_kvmock.testing import IndexContract


class HashIndex:
    """Holds, for each block of each worker and rank, the block before it and its local hash."""

    def __init__(self, count_copies=False):
        self.count_copies = count_copies
        self.held = {}  # by worker and rank: each block's parent and local hash, once for each copy of the block

    def apply(self, event):
        blocks = self.held.setdefault((event.worker_id, event.event.dp_rank), {})
        data = event.event.data
        if isinstance(data, Cleared):
            blocks.clear()
        elif event.storage_tier is not StorageTier.DEVICE:
            return
        elif isinstance(data, Stored):
            parent = data.parent_hash
            assert parent is None or parent in blocks
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                copies = blocks.get(block, []) if self.count_copies else []
                blocks[block] = [(parent, local), *copies]
                parent = block
        else:
            for block in data.block_hashes:
                copies_left = blocks.pop(block, [])[1:]
                if copies_left:
                    blocks[block] = copies_left

    def find_matches(self, local_hashes):
        matches = {}
        for rank, blocks in self.held.items():
            after = {copies[0]: block for block, copies in blocks.items()}
            depth, block = 0, None
            while depth < len(local_hashes) and (block, local_hashes[depth]) in after:
                block, depth = after[block, local_hashes[depth]], depth + 1
            matches[rank] = depth
        return matches

    def remove_worker(self, worker_id):
        for rank in [*self.held]:
            if rank[0] == worker_id:
                del self.held[rank]


class OfAttention(HashIndex):
    """The same index, also for hybrid models: it follows only the attention group."""

    def __init__(self, block_size, count_copies=False):
        super().__init__(count_copies)
        self.group = AttentionGroup(block_size)

    def apply(self, event):
        if self.group.has(event):
            super().apply(event)


@pytest.fixture
def kv_index(kv_profile, kv_traits):
    return OfAttention(kv_profile.block_size, kv_traits.copies)


@pytest.mark.kvmock(workers=2, num_blocks=8)
def test_it_knows_who_has_what(kv_harness, kv_prompt):
    prompt = kv_prompt(blocks=4)
    kv_harness.worker(0).serve(prompt)
    kv_harness.worker(1).serve(prompt.tokens[:40])
    assert kv_harness.overlap(prompt) == {0: 4, 1: 2}

    kv_harness.worker(0).serve(kv_prompt(blocks=6))  # evicts the last two
    kv_harness.worker(1).clear()
    assert kv_harness.overlap(prompt) == {0: 2}


class TestHashIndex(IndexContract):
    backends = tuple(name for name in BACKENDS if name != "vllm_deepseek_v4")  # whose blocks have 64 tokens at least

    def make_index(self, block_size):
        return OfAttention(block_size, self.traits.copies)
