"""Each data-parallel rank has a separate cache, but the router adds up the blocks of a worker's ranks."""

from collections import Counter

import pytest
from sound_index import HashIndex

from pytest_kvmock import Prompt
from pytest_kvmock.fleets import FleetRequest


class MostCached:
    def __init__(self):
        self.index = HashIndex()
        self.ranks = []

    def overlap(self, request):
        whole = Counter()
        for (worker, _), blocks in self.index.find_matches(request.local_hashes).items():
            whole[worker] += blocks
        return {(worker, rank): whole[worker] for worker, rank in self.ranks}

    def pick(self, request, candidates):
        self.ranks = [each.worker for each in candidates]
        held = self.overlap(request)
        return min(candidates, key=lambda each: (-held[each.worker], each.active_requests)).worker

    def apply(self, event):
        self.index.apply(event)


@pytest.fixture
def kv_router():
    return MostCached()


@pytest.mark.kvmock(workers=2, dp_size=2)
def test_ranks_are_told_apart(kv_fleet):
    kv_fleet.run([FleetRequest(Prompt(range(64)), 4, 400.0 * at) for at in range(3)])
