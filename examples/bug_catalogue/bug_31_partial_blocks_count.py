"""A partial block is counted as a block: TensorRT-LLM stores the last block of a sequence with the tokens that it has.

The index walks through the tokens piece by piece, and counts each piece. No prompt has a partial block among its whole
blocks.
"""

from collections import defaultdict

import pytest

from pytest_kvmock import Removed, Stored


class CountsPieces:
    def __init__(self):
        self.after = defaultdict(dict)  # by parent: the tokens of each piece
        self.parents = {}

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Removed):
            for block in data.block_hashes:
                del self.after[self.parents[block]][block]
        elif isinstance(data, Stored):
            parent = data.parent_hash
            for block, tokens in zip(data.block_hashes, event.token_ids, strict=True):
                self.after[parent][block], self.parents[block] = tuple(tokens), parent
                parent = block

    def match_tokens(self, tokens):
        parent, pieces, tokens = None, 0, tuple(tokens)
        while True:
            here = [each for each in self.after[parent].items() if tokens[: len(each[1])] == each[1]]
            if not here:
                return {0: pieces}
            (parent, piece), pieces = max(here, key=lambda each: len(each[1])), pieces + 1
            tokens = tokens[len(piece) :]


@pytest.fixture
def kv_index():
    return CountsPieces()


@pytest.mark.kv_backends("trtllm")
@pytest.mark.kvmock(block_size=4)
def test_a_part_of_a_block_is_none(kv_harness):
    worker = kv_harness.worker(0)
    worker.serve(range(10))  # two blocks, and one of two tokens
    worker.serve(range(12))
    worker.serve([*range(10), 90, 91])
