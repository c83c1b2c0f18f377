"""Workers that tie for the least cost share the picks: examples by hand, and correct routers."""

from random import Random

import pytest
from depth import few

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs
from pytest_kvmock.fleets import DynamoRouter, RoundRobin, TraceRequest
from pytest_kvmock.testing import RightRouter


class Fixed:
    """A router that picks the given workers in turn."""

    def __init__(self, *workers):
        self.left = list(workers)

    def pick(self, request, candidates):
        return self.left.pop(0)


class Costs:
    """A selector with a fixed cost per worker."""

    def __init__(self, *costs):
        self.costs_of = costs

    def cost(self, request, candidate):
        return self.costs_of[candidate.worker]


def report_of(router, count=16, workers=3, apart_ms=500.0, **options):
    """Return the report of requests with one distinct block each, so that no worker holds it."""
    args = MockEngineArgs(num_gpu_blocks=96, block_size=4)
    fleet = Fleet([MockEngine(args) for _ in range(workers)], router, **options)
    return fleet.run([TraceRequest(apart_ms * at, 4, 2, (at,)) for at in range(count)])


def picked(*workers, **options):
    return report_of(Fixed(*workers), len(workers), record=True, **options)


def test_each_of_two_workers_must_get_three_of_sixteen_ties():
    picked(*[0] * 13, *[1] * 3).assert_ties_shared(Costs(1, 1, 2))
    with pytest.raises(AssertionError) as failure:
        picked(*[0] * 14, *[1] * 2).assert_ties_shared(Costs(1, 1, 2))
    assert str(failure.value) == (
        "worker 1 had 2 of the picks in which it tied with others for the least cost by Costs, and its due was 8; "
        "must be from a third of that to 2.5 times that (0: 14 of 8, 1: 2 of 8)"
    )


def test_workers_with_too_many_ties_are_named_before_those_with_too_few():
    picked(*[0] * 20, 1, 1, 1, 2, 2, 2).assert_ties_shared(Costs(1, 1, 1))  # 20 is 2.3 times 8.67
    with pytest.raises(
        AssertionError, match=r"^worker 0 had 24 of .* its due was 8; .* \(0: 24 of 8, 1: 0 of 8, 2: 0 of 8\)$"
    ):
        picked(*[0] * 24).assert_ties_shared(Costs(1, 1, 1))


def test_costs_that_differ_only_by_float_rounding_tie():
    with pytest.raises(AssertionError, match=r"its due was 8"):
        picked(*[0] * 16).assert_ties_shared(Costs(0.1 + 0.2, 0.3, 1))


def test_a_due_share_below_eight_is_not_checked():
    picked(*[0] * 15).assert_ties_shared(Costs(1, 1, 2))


def test_a_pick_of_a_worker_outside_the_tie_counts_for_no_tied_worker():
    with pytest.raises(AssertionError, match=r"^worker 0 had 0 of .* its due was 8; .* \(0: 0 of 8, 1: 0 of 8\)$"):
        picked(*[2] * 16).assert_ties_shared(Costs(1, 1, 2))


def test_assert_ties_shared_fails_if_nothing_tied():
    text = r"^nothing tied: at none of 3 picks did several workers have the least cost by Costs$"
    with pytest.raises(AssertionError, match=text):
        picked(0, 1, 0).assert_ties_shared(Costs(1, 2, 2))
    with pytest.raises(AssertionError, match=r"^nothing tied: at none of 16 picks"):
        report_of(RoundRobin(), workers=1, record=True).assert_ties_shared(DynamoRouter())


def test_a_failure_with_polled_loads_notes_that_ties_use_true_loads():
    polled = {"loads": "engine", "loads_every_ms": 500}
    with pytest.raises(
        AssertionError, match=r"(?s)1: 0 of 8\)\nnote: .* up to 500 ms old, and ties are by the true ones"
    ):
        picked(*[0] * 16, **polled).assert_ties_shared(Costs(1, 1, 2))


def test_assert_ties_shared_needs_a_record_a_selector_and_requests():
    report = report_of(RoundRobin())
    with pytest.raises(
        ValueError, match=r"^assert_ties_shared needs the candidates of each pick: make the fleet with record=True$"
    ):
        report.assert_ties_shared(DynamoRouter())
    with pytest.raises(TypeError, match=r"^selector is the class DynamoRouter; it must be an object"):
        report.assert_ties_shared(DynamoRouter)
    stopped = report_of(RoundRobin(), stop_ms=0, record=True)
    with pytest.raises(ValueError, match=r"^assert_ties_shared: the report has no requests: none arrived$"):
        stopped.assert_ties_shared(DynamoRouter())


@pytest.mark.parametrize("seed", few(range(30)))
@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("router", [DynamoRouter, RightRouter])
def test_correct_routers_share_ties(router, workers, seed):
    made = RightRouter(range(workers), seed) if router is RightRouter else DynamoRouter(rng=Random(seed))
    report_of(made, 120, workers, record=True).assert_ties_shared(DynamoRouter())


def test_a_router_that_picks_the_first_of_equal_workers_does_not_share_ties():
    with pytest.raises(AssertionError, match=r"^worker 0 had 120 of the picks .* by DynamoRouter, and its due was 30"):
        report_of(DynamoRouter(tie="first"), 120, 4, record=True).assert_ties_shared(DynamoRouter())
