"""A worker restarts, the router is notified, and its index keeps the worker's old blocks."""

import pytest
from sound_index import HashIndex

from pytest_kvmock import Prompt
from pytest_kvmock.fleets import FleetRequest


class MostCached:
    def __init__(self):
        self.index = HashIndex()

    def overlap(self, request):
        return {worker: blocks for (worker, _), blocks in self.index.find_matches(request.local_hashes).items()}

    def pick(self, request, candidates):
        held = self.overlap(request)
        return max(candidates, key=lambda each: (held.get(each.worker, 0), -each.active_requests)).worker

    def apply(self, event):
        self.index.apply(event)

    def worker_removed(self, worker):
        """Close the connection, for example, but forget the index."""


@pytest.fixture
def kv_router():
    return MostCached()


@pytest.mark.kvmock(workers=2)
def test_a_restarted_worker_is_cold(kv_fleet):
    kv_fleet.at(500).restart(0)
    kv_fleet.run([FleetRequest(Prompt(range(64)), 4, 400.0 * at) for at in range(4)])
