"""The index takes the minimum over all cache groups, as all of them are needed: there is never a hit.

Of a long prompt a state group keeps the state at its end, and a window group the last blocks. Neither has a prefix from
the first block on, but both have what the next request needs.
"""

from collections import defaultdict

import pytest

from pytest_kvmock import RadixIndex, RouterEvent
from pytest_kvmock.values import SparseStored


class LeastOfGroups:
    def __init__(self):
        self.groups = defaultdict(RadixIndex)

    def apply(self, event):
        tree = self.groups[(event.extra or {}).get("group_idx", 0)]
        if not isinstance(event.event.data, SparseStored):  # a span does not show which blocks were kept
            tree.apply(RouterEvent(event.worker_id, event.event, event.storage_tier))

    def find_matches(self, local_hashes):
        found = [tree.find_matches(local_hashes).scores for tree in self.groups.values()]
        return {worker: min(scores.get(worker, 0) for scores in found) for worker in set().union(*found)}


@pytest.fixture
def kv_index():
    return LeastOfGroups()


@pytest.mark.kv_backends("vllm_kimi_k3")
def test_a_prompt_that_was_served_is_known(kv_worker, kv_prompt):
    kv_worker.serve(kv_prompt(blocks=4, tail=1))
