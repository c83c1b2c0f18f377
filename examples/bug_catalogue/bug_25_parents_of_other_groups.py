"""Parents are looked up in one list for all cache groups: a parent that a window removes is unknown to the attention
group, too.

The window removes its copy of a block, the attention group still has its own, and stores the next block. The index
refuses this block and all later ones, as the parent is missing.
"""

import pytest
from sound_index import HashIndex

from pytest_kvmock import Removed, Stored
from pytest_kvmock.values import group_extra

WINDOW, FULL = group_extra(0, "sliding_window", 32), group_extra(1, "full_attention")


class OneListOfParents(HashIndex):
    def __init__(self):
        super().__init__()
        self.known = {None}

    def owner(self, event):
        return event.worker_id, (event.extra or {}).get("group_idx", 0)

    def store(self, blocks, data):
        if data.parent_hash in self.known:
            super().store(blocks, data)
            self.known.update(data.block_hashes)

    def remove(self, blocks, block):
        super().remove(blocks, block)
        self.known.discard(block)

    def find_matches(self, local_hashes):
        return {worker: depth for (worker, group), depth in super().find_matches(local_hashes).items() if group == 1}


@pytest.fixture
def kv_index():
    return OneListOfParents()


def test_a_prefix_grows_behind_what_a_window_has_dropped(kv_sink):
    kv_sink(Stored(None, (1, 2), (11, 12)), extra=WINDOW)
    kv_sink(Stored(None, (1, 2), (11, 12)), extra=FULL)
    kv_sink(Removed((2,)), extra=group_extra(0))
    kv_sink(Stored(2, (3,), (13,)), extra=FULL)
