"""The index holds a block as long as any cache group has it: windows and states that outlive a prefix seem to be one.

The index counts copies, which is right for a model with one group. In a hybrid model each group evicts by itself: the
attention group loses the tail of the prefix, and a window still has it, but no request can resume from that.
"""

from collections import Counter

import pytest
from sound_index import HashIndex

from pytest_kvmock import Removed, Stored
from pytest_kvmock.values import group_extra

FULL, WINDOW = group_extra(0, "full_attention"), group_extra(1, "sliding_window", 32)


class AnyGroup(HashIndex):
    def __init__(self):
        super().__init__()
        self.copies = Counter()

    def store(self, blocks, data):
        super().store(blocks, data)
        self.copies.update(data.block_hashes)

    def remove(self, blocks, block):
        self.copies[block] -= 1
        if not self.copies[block]:
            del blocks[block]


@pytest.fixture
def kv_index():
    return AnyGroup()


def test_what_a_window_alone_has_is_no_prefix(kv_sink):
    kv_sink(Stored(None, (1, 2), (11, 12)), extra=FULL)
    kv_sink(Stored(None, (1, 2), (11, 12)), extra=WINDOW)
    kv_sink(Removed((2,)), extra=group_extra(0))
