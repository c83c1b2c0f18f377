"""A worker restarts: its event ids begin with 0 again, its cache is empty, and the index believes in what it had."""

import pytest
from sound_index import HashIndex


@pytest.fixture
def kv_index():
    return HashIndex()  # looks at no event id


@pytest.mark.kvmock(survive=["restart"])
def test_a_restarted_worker_is_cold(kv_harness, kv_prompt):
    kv_harness.worker(0).serve(kv_prompt(blocks=2))
    kv_harness.faults.restart()
    kv_harness.worker(0).serve(kv_prompt(blocks=2))
