"""The router splits prompts into blocks of another size than the engine's."""

from collections import defaultdict
from itertools import takewhile

import pytest

from pytest_kvmock import Stored


class TokenIndex:
    """Holds, for each block of each worker, all tokens from the root to its end."""

    def __init__(self, block_size):
        self.size, self.held = block_size, defaultdict(dict)

    def apply(self, event):
        blocks, data = self.held[event.worker_id], event.event.data
        if isinstance(data, Stored):
            prefix = () if data.parent_hash is None else blocks[data.parent_hash]
            for block, tokens in zip(data.block_hashes, event.token_ids, strict=True):
                prefix = blocks[block] = (*prefix, *tokens)
        else:
            for block in list(getattr(data, "block_hashes", blocks)):  # a Cleared names no blocks and means all
                blocks.pop(block)

    def match_tokens(self, tokens):
        prefixes = [tuple(tokens[:n]) for n in range(self.size, len(tokens) + 1, self.size)]
        return {w: len([*takewhile(set(held.values()).__contains__, prefixes)]) for w, held in self.held.items()}


@pytest.fixture
def kv_index():
    return TokenIndex(block_size=32)  # a default from elsewhere; the engine's is 16


def test_a_warm_prompt_is_known(kv_harness, kv_prompt):
    kv_harness.worker(0).serve(kv_prompt(blocks=4))
