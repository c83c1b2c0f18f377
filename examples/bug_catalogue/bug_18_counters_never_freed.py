"""A request is counted when it is dispatched, and stays counted if it is lost with its worker."""

import pytest

from pytest_kvmock import Prompt
from pytest_kvmock.fleets import FleetRequest


class CountsRequests:
    def __init__(self):
        self.open = {}
        self.sent = {}

    def pick(self, request, candidates):
        return min(candidates, key=lambda each: self.open.get(each.worker, 0)).worker

    def dispatched(self, request, worker):
        self.open[worker] = self.open.get(worker, 0) + 1
        self.sent[request] = worker

    def finished(self, request):
        if request.status == "finished":  # requests that end in another way are missing
            self.open[self.sent.pop(request)] -= 1

    def loads(self):
        return {worker: (None, None, requests) for worker, requests in self.open.items()}


@pytest.fixture
def kv_router():
    return CountsRequests()


@pytest.mark.kvmock(workers=2)
def test_it_counts_through_a_restart(kv_fleet):
    kv_fleet.at(45).restart(1, lost="drop")
    kv_fleet.run([FleetRequest(Prompt(range(100 * at, 100 * at + 64)), 16, 10.0 * at) for at in range(9)])
