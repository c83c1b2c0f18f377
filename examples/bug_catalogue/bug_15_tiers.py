"""A block leaves the host's memory, and the index removes it from the device, too."""

import pytest
from sound_index import HashIndex

from pytest_kvmock import Removed, StorageTier, Stored


@pytest.fixture
def kv_index():
    return HashIndex()  # does not check storage_tier


def test_a_block_is_there_while_the_device_has_it(kv_sink):
    kv_sink(Stored(None, (1,), (11,)))
    kv_sink(Stored(None, (1,), (11,)), StorageTier.HOST_PINNED)  # offloaded: a copy
    kv_sink(Removed((1,)), StorageTier.HOST_PINNED)
