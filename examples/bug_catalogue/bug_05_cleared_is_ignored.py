"""The index does not know Cleared, and ignores it."""

import pytest
from sound_index import HashIndex

from pytest_kvmock import Cleared


class IgnoresCleared(HashIndex):
    def apply(self, event):
        if not isinstance(event.event.data, Cleared):
            super().apply(event)


@pytest.fixture
def kv_index():
    return IgnoresCleared()


def test_a_cleared_worker_is_cold(kv_harness, kv_prompt):
    kv_harness.worker(0).serve(kv_prompt(blocks=2))
    kv_harness.worker(0).clear()
