"""The cache groups of a hybrid model are one to the index, so a window that slides takes blocks of full attention.

Such a model publishes each block once for each of its groups, under the same hash. The window of group 1 moves on, and
its first block goes; the prefix is still there in group 0.
"""

import pytest
from sound_index import HashIndex

from pytest_kvmock import Removed, Stored


@pytest.fixture
def kv_index():
    return HashIndex()  # looks at no group_idx


def test_a_prefix_is_there_while_full_attention_has_it(kv_sink):
    kv_sink(Stored(None, (1, 2), (11, 12)), extra={"group_idx": 0})
    kv_sink(Stored(None, (1, 2), (11, 12)), extra={"group_idx": 1})
    kv_sink(Removed((2,)), extra={"group_idx": 1})
