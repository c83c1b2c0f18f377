"""One set of hashes for all layer groups: a Removed of one group removes a block for all.

TensorRT-LLM's V2 stores a prompt in each layer group, and a window's page may be lost while full attention still has
its own.
"""

import pytest
from sound_index import HashIndex

from pytest_kvmock import Removed, Stored
from pytest_kvmock.values import group_extra

FULL, WINDOW = group_extra(0, "full_attention"), group_extra(1, "sliding_window", 32)


class OneSet(HashIndex):
    def remove(self, blocks, block):
        blocks.pop(block, None)


@pytest.fixture
def kv_index():
    return OneSet()


def test_a_block_of_full_attention_outlives_that_of_a_window(kv_sink):
    kv_sink(Stored(None, (1, 2), (11, 12)), extra=FULL)
    kv_sink(Stored(None, (1, 2), (11, 12)), extra=WINDOW)
    kv_sink(Removed((2,)), extra=group_extra(1))
    kv_sink(Removed((2,)), extra=group_extra(0))
