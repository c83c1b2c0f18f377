"""An index of your own that is asked by local hashes, as Dynamo's is: one hash a block."""

import pytest
from attention_group import AttentionGroup

from pytest_kvmock import BACKENDS, Cleared, StorageTier, Stored
from pytest_kvmock.testing import IndexContract


class HashIndex:
    """Holds, for each block of each worker and rank, the local hashes from the root to the block."""

    def __init__(self, count_copies=False):
        self.count_copies = count_copies
        self.held = {}  # by worker and rank: each block's local hashes from the root, once for each copy of the block

    def apply(self, event):
        blocks = self.held.setdefault((event.worker_id, event.event.dp_rank), {})
        data = event.event.data
        if isinstance(data, Cleared):
            blocks.clear()
        elif event.storage_tier is not StorageTier.DEVICE:
            return
        elif isinstance(data, Stored):
            chain = () if data.parent_hash is None else blocks[data.parent_hash][0]
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                chain = (*chain, local)
                copies = blocks.get(block, []) if self.count_copies else []
                blocks[block] = [chain, *copies]
        else:
            for block in data.block_hashes:
                copies_left = blocks.pop(block, [])[1:]
                if copies_left:
                    blocks[block] = copies_left

    def find_matches(self, local_hashes):
        matches = {}
        for rank, blocks in self.held.items():
            chains = {copies[0] for copies in blocks.values()}
            depth = 0
            while depth < len(local_hashes) and tuple(local_hashes[: depth + 1]) in chains:
                depth += 1
            matches[rank] = depth
        return matches

    def remove_worker(self, worker_id):
        for rank in [*self.held]:
            if rank[0] == worker_id:
                del self.held[rank]


class OfAttention(HashIndex):
    """The same, for hybrid models too: of their cache groups it follows the attention group."""

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
    assert {0: 4, 1: 2} == kv_harness.overlap(prompt)

    kv_harness.worker(0).serve(kv_prompt(blocks=6))  # evicts the last two
    kv_harness.worker(1).clear()
    assert {0: 2} == kv_harness.overlap(prompt)


class TestHashIndex(IndexContract):
    backends = tuple(name for name in BACKENDS if name != "vllm_deepseek_v4")  # whose blocks have 64 tokens at least

    def make_index(self, block_size):
        return OfAttention(block_size, self.traits.copies)
