"""A prompt's tail is counted as a block: it is half of one, and another prompt may share it and continue differently.

If hashes cover fewer tokens than blocks, an engine also names the last whole unit of a prompt: a Stored of one block
with fewer tokens. The index walks through the tokens piece by piece, and counts each piece.
"""

from collections import defaultdict

import pytest

from pytest_kvmock import Removed, Stored, block_hashes
from pytest_kvmock.values import group_extra

FULL = group_extra(3, "full_attention")


class CountsPieces:
    def __init__(self):
        self.after = defaultdict(dict)  # by parent: the tokens of each piece
        self.parents = {}

    def apply(self, event):
        data = event.event.data
        for block in data.block_hashes:
            if isinstance(data, Removed):
                del self.after[self.parents[block]][block]
        parent = getattr(data, "parent_hash", None)
        for block, tokens in zip(data.block_hashes, event.token_ids or (), strict=False):
            self.after[parent][block], self.parents[block] = tuple(tokens), parent
            parent = block

    def match_tokens(self, tokens):
        parent, pieces, tokens = None, 0, tuple(tokens)
        while True:
            here = [each for each in self.after[parent].items() if tokens[: len(each[1])] == each[1]]
            if not here:
                return {65536: pieces}
            (parent, piece), pieces = max(here, key=lambda each: len(each[1])), pieces + 1
            tokens = tokens[len(piece) :]


@pytest.fixture
def kv_index():
    return CountsPieces()


def test_half_a_block_is_none(kv_sink):
    first, second = range(16), range(100, 116)
    kv_sink(Stored(None, (1, 2), tuple(block_hashes([*first, *second], 16))), token_ids=[first, second], extra=FULL)
    kv_sink(Removed((2,)), extra=group_extra(3))
    kv_sink(Stored(1, (9,), tuple(block_hashes(second[:8], 8))), token_ids=[second[:8]], extra=FULL)
