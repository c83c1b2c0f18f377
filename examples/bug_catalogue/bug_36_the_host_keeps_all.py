"""The index takes blocks that SGLang's host drops to be in its storage, though no event says so.

With `write_through` and a host no larger than the device, such an index promises prompts that are held nowhere.
"""

import pytest

from pytest_kvmock import RadixIndex, Removed, StorageTier


class HostKeepsAll(RadixIndex):
    def apply(self, event):
        if not (isinstance(event.data, Removed) and event.storage_tier is StorageTier.HOST_PINNED):
            super().apply(event)


@pytest.fixture
def kv_index():
    return HostKeepsAll()


@pytest.mark.kv_backends("sglang")
@pytest.mark.kvmock(num_blocks=6, tiers={"host": 6})
def test_what_the_host_gave_up_is_nowhere(kv_worker, kv_prompt):
    for turn in range(3):
        kv_worker.serve(kv_prompt(blocks=5))
        kv_worker.tick(100.0 * turn + 100)  # the copy is done
