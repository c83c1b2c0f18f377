"""The index of Dynamo's router, plugged in: it receives events as the JSON that it reads.

It needs `pip install --group interop`, on Linux; without it this module is skipped. Up to 1.3, a Cleared is about all
ranks of its worker, which the tests declare: `clears="worker"`. The JSON has no cache groups, so hybrid models are left
to the other indexes of this directory.
"""

from importlib import metadata

import pytest

from pytest_kvmock import StorageTier
from pytest_kvmock.testing import IndexContract

dynamo = pytest.importorskip(
    "dynamo._core", reason="ai-dynamo-runtime is not installed: dependency group `interop`, Linux only"
)

RELEASE = tuple(map(int, metadata.version("ai-dynamo-runtime").split(".")[:2]))
CLEARS = "worker" if RELEASE < (1, 6) else "rank"


class DynamoIndex:
    """`dynamo._core.RadixTree` with the methods of an index. The tree covers only the device."""

    def __init__(self):
        self.tree = dynamo.RadixTree()

    def apply(self, event):
        if event.storage_tier is StorageTier.DEVICE:
            self.tree.apply_event(event.worker_id, event.event.to_json().encode())

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)

    def remove_worker(self, worker_id):
        self.tree.remove_worker(worker_id)


@pytest.fixture
def kv_index():
    return DynamoIndex()


@pytest.mark.kvmock(workers=2, num_blocks=8)
def test_it_knows_who_has_what(kv_harness, kv_prompt):
    prompt = kv_prompt(blocks=4)
    kv_harness.worker(0).serve(prompt)
    kv_harness.worker(1).serve(prompt.tokens[:40])
    assert kv_harness.overlap(prompt) == {0: 4, 1: 2}

    kv_harness.worker(0).serve(kv_prompt(blocks=6))  # evicts the last two
    kv_harness.worker(1).restart(announced=True)
    assert kv_harness.overlap(prompt) == {0: 2}


@pytest.mark.kvmock(dp_size=2, clears=CLEARS)
def test_a_cleared_is_about_a_rank_or_in_older_releases_about_its_worker(kv_harness, kv_prompt):
    prompt = kv_prompt(blocks=4)
    for rank in (0, 1):
        kv_harness.worker(0, dp_rank=rank).serve(prompt)
    kv_harness.worker(0, dp_rank=0).clear()
    assert kv_harness.overlap(prompt) == ({} if CLEARS == "worker" else {(0, 1): 4})
    kv_harness.worker(0, dp_rank=1).serve(kv_prompt(blocks=2, after=prompt))  # an older tree does not have the parent


class TestDynamoIndex(IndexContract):
    clears = CLEARS

    def make_index(self):
        return DynamoIndex()

    @pytest.mark.xfail(
        RELEASE < (1, 6), strict=True, reason="it takes two sets of workers that are as large for the same set"
    )
    def test_a_removed_block_stays_with_other_workers(self):
        super().test_a_removed_block_stays_with_other_workers()
