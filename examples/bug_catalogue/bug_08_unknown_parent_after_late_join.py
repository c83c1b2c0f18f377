"""A router that joins late has no parents of the blocks that it receives; it drops them, and requests no replay."""

import pytest
from sound_index import HashIndex


class DropsOrphans(HashIndex):
    def store(self, blocks, data):
        if data.parent_hash is None or data.parent_hash in blocks:
            super().store(blocks, data)


@pytest.fixture
def kv_index():
    return DropsOrphans()


@pytest.mark.kvmock(survive=["late_join"])
def test_a_late_router_catches_up(kv_harness, kv_prompt):
    system_prompt = kv_prompt(blocks=3)
    with kv_harness.faults.late_join():
        kv_harness.worker(0).serve(system_prompt)
    kv_harness.worker(0).serve(kv_prompt(blocks=1, after=system_prompt))
