"""Loads are polled at intervals: until the next poll, all requests go to the worker that was idle at the last poll."""

import pytest

from pytest_kvmock import Prompt
from pytest_kvmock.fleets import FleetRequest, RoundRobin


class FewestRequests:
    def pick(self, request, candidates):
        return min(candidates, key=lambda each: each.active_requests + each.waiting).worker


@pytest.mark.kvmock(workers=4, num_blocks=4096, prefix_caching=False)
def test_polled_loads_are_no_worse_than_turns(kv_harness):
    trace = [FleetRequest(Prompt(range(1000 * at, 1000 * at + 800)), 16, 30.0 * at) for at in range(60)]
    turns = kv_harness.fleet(RoundRobin()).run(trace, name="one by one")
    fleet = kv_harness.fleet(FewestRequests(), loads="engine", loads_every_ms=500)
    fleet.run(trace, name="one by one").assert_no_worse(than=[turns], ttft_p95=1.5)
