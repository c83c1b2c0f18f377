"""A worker restarts: its event ids begin with 0 again, its cache is empty, and the index keeps its old blocks."""

import pytest
from sound_index import HashIndex


@pytest.fixture
def kv_index():
    return HashIndex()  # does not check event ids


@pytest.mark.kvmock(survive=["restart"])
def test_a_restarted_worker_is_cold(kv_harness, kv_prompt):
    kv_harness.worker(0).serve(kv_prompt(blocks=2))
    kv_harness.faults.restart()
    kv_harness.worker(0).serve(kv_prompt(blocks=2))
