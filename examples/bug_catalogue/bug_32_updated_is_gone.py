"""An Updated is taken for a loss: TensorRT-LLM offloads a block to its host, and still has it.

The index receives Updated, and drops blocks that move to level 1.
"""

import pytest

from pytest_kvmock import RadixIndex, Removed, RouterEvent, Stored
from pytest_kvmock.values import Updated


class DropsWhatIsOffloaded(RadixIndex):
    takes_updates = True

    def apply(self, event):
        if isinstance(event.data, Updated):
            if event.data.levels != (0, 1):
                return
            event = RouterEvent(event.worker_id, type(event.event)(event.event_id, Removed(event.data.block_hashes)))
        super().apply(event)


@pytest.fixture
def kv_index():
    return DropsWhatIsOffloaded()


def test_what_is_offloaded_is_held(kv_sink):
    kv_sink(Stored(None, (1, 2, 3), (11, 12, 13)), extra={"window_size": 1024})
    kv_sink(Updated(3, levels=(0, 1)), extra={"window_size": 1024})
