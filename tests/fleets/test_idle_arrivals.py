"""Arrivals in an idle fleet behind waiting requests: no request ends there, so each arrival asks the router again."""

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs
from pytest_kvmock.fleets import RoundRobin, TraceRequest


class LateForTheFirst(RoundRobin):
    """A router that lets the first request wait until another one has arrived."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def pick(self, request, candidates):
        self.asked.append((request.number, request.now_ms))
        if len(self.asked) == 1:
            return None
        return super().pick(request, candidates)


def test_an_arrival_in_an_idle_fleet_offers_waiting_requests_again():
    router = LateForTheFirst()
    fleet = Fleet([MockEngine(MockEngineArgs(num_gpu_blocks=96, block_size=4))], router)
    report = fleet.run([TraceRequest(0.0, 12, 4, (1, 2, 3)), TraceRequest(500.0, 12, 4, (4, 5, 6))])
    assert router.asked == [(0, 0.0), (0, 500.0), (1, 500.0)]
    assert len(report.completed) == 2
