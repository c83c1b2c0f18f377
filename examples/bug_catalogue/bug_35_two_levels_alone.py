"""Only two levels are known: TensorRT-LLM's V2 has three, and a block comes back to the device from any of them.

The index applies only moves to and from the first level below the device.
"""

import pytest

from pytest_kvmock import RadixIndex, Stored
from pytest_kvmock.values import Updated


class TwoLevels(RadixIndex):
    takes_updates = True

    def apply(self, event):
        if not isinstance(event.data, Updated) or event.data.levels in ((0, 1), (1, 0)):
            super().apply(event)


@pytest.fixture
def kv_index():
    return TwoLevels()


def test_a_block_comes_back_from_the_last_level(kv_sink):
    kv_sink(Stored(None, (1, 2), (11, 12)), extra={"window_size": 1024})
    for levels in ((0, 1), (1, 2), (2, 0)):
        kv_sink(Updated(2, levels=levels), extra={"window_size": 1024})
