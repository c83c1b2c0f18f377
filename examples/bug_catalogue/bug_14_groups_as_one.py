"""The index takes the cache groups of a hybrid model for one: a sliding window removes blocks of full attention.

The engine publishes each block once for each group, under the same hash. The window of group 1 moves on, and its first
block is removed; group 0 still holds the prefix.
"""

import pytest
from sound_index import HashIndex

from pytest_kvmock import Removed, Stored


@pytest.fixture
def kv_index():
    return HashIndex()  # does not check group_idx


def test_a_prefix_is_there_while_full_attention_has_it(kv_sink):
    kv_sink(Stored(None, (1, 2), (11, 12)), extra={"group_idx": 0})
    kv_sink(Stored(None, (1, 2), (11, 12)), extra={"group_idx": 1})
    kv_sink(Removed((2,)), extra={"group_idx": 1})
