"""Your own index, queried by tokens: it may hash them in any way.

The token ids of each block are passed next to the event.
"""

import pytest
from attention_group import AttentionGroup

from pytest_kvmock import BACKENDS, Cleared, StorageTier, Stored
from pytest_kvmock.testing import IndexContract


class TokenIndex:
    """Holds, for each block of each worker and rank, the block before it and its tokens."""

    def __init__(self, block_size, count_copies=False):
        self.block_size, self.count_copies = block_size, count_copies
        self.held = {}  # by worker and rank: each block's parent and tokens, once for each copy of the block

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
            for block, tokens in zip(data.block_hashes, event.token_ids, strict=True):
                copies = blocks.get(block, []) if self.count_copies else []
                blocks[block] = [(parent, tuple(tokens)), *copies]
                parent = block
        else:
            for block in data.block_hashes:
                copies_left = blocks.pop(block, [])[1:]
                if copies_left:
                    blocks[block] = copies_left

    def match_tokens(self, tokens):
        starts = range(0, len(tokens) - self.block_size + 1, self.block_size)
        asked = [tuple(tokens[start : start + self.block_size]) for start in starts]
        matches = {}
        for rank, blocks in self.held.items():
            after = {copies[0]: block for block, copies in blocks.items()}
            depth, block = 0, None
            while depth < len(asked) and (block, asked[depth]) in after:
                block, depth = after[block, asked[depth]], depth + 1
            matches[rank] = depth
        return matches

    def remove_worker(self, worker_id):
        for rank in [*self.held]:
            if rank[0] == worker_id:
                del self.held[rank]


class OfAttention(TokenIndex):
    """The same index, also for hybrid models: it follows only the attention group."""

    def __init__(self, block_size, count_copies=False):
        super().__init__(block_size, count_copies)
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


class TestTokenIndex(IndexContract):
    # Blocks of DeepSeek-V4 have at least 64 tokens; with a draft model, a block's name also depends on the next token,
    # but this index hashes only the block.
    backends = tuple(
        name for name, spec in BACKENDS.items() if name != "vllm_deepseek_v4" and not spec.traits.looks_ahead
    )

    def make_index(self, block_size):
        return OfAttention(block_size, self.traits.copies)
