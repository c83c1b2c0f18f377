"""Workers of a fleet that crash, restart, leave and join while it serves."""

import pytest

from pytest_kvmock.fleet import Fleet, MockEngine, MockEngineArgs
from pytest_kvmock.router import LeastLoaded, RoundRobin
from pytest_kvmock.traces import TraceRequest

ARGS = MockEngineArgs(num_gpu_blocks=96, block_size=4, max_num_batched_tokens=32)


def engines(count=2):
    return [MockEngine(ARGS, seed=seed) for seed in range(count)]


def requests(count=12, output=20):
    return [TraceRequest(10.0 * n, 12, output, (n, n + 100, n + 200)) for n in range(count)]


class Watched(RoundRobin):
    """Notes hooks, and which workers it could pick at each time."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = [], []

    def pick(self, request, candidates):
        self.seen.append((request.now_ms, [each.worker for each in candidates]))
        return super().pick(request, candidates)

    def worker_added(self, worker):
        self.calls.append(("added", worker))

    def worker_removed(self, worker):
        self.calls.append(("removed", worker))

    def finished(self, request):
        self.calls.append((request.status, request.number, request.attempt))


@pytest.mark.parametrize("plans", [True, False], ids=["plans", "each-pass"])
def test_requests_of_a_crashed_worker_are_served_by_others(plans):
    router = Watched()
    fleet = Fleet(engines(3), router, plans=plans)
    fleet.at(60).crash(1)
    report = fleet.run(requests())
    assert 12 == len(report.completed) == len(report.requests)
    assert ("removed", 1) in router.calls
    lost = [call for call in router.calls if call[0] == "lost"]
    assert lost
    assert all(attempt == 1 for _, _, attempt in lost)
    assert {number for _, number, _ in lost} == {pick.number for pick in report.picks if pick.attempt == 2}
    assert all(1 not in workers for ms, workers in router.seen if ms > 60)
    assert {0, 2} == set(fleet.engines)


def test_with_and_without_plans_a_crash_is_the_same():
    def serve(plans):
        fleet = Fleet(engines(3), LeastLoaded(), plans=plans)
        fleet.at(75.5).crash(0)
        fleet.at(130).restart(2)
        report = fleet.run(requests())
        return report.to_json(), report.picks, report.served_by

    assert serve(True) == serve(False)


def test_lost_requests_may_be_dropped():
    router = Watched()
    fleet = Fleet(engines(3), router)
    fleet.at(60).crash(1, lost="drop")
    report = fleet.run(requests())
    dropped = {call[1] for call in router.calls if call[0] == "lost"}
    assert dropped
    assert 12 - len(dropped) == len(report.completed)
    assert {1} == {pick.attempt for pick in report.picks}


def test_what_is_sent_to_a_dead_worker_comes_back():
    router = Watched()
    fleet = Fleet(engines(2), router)
    fleet.at(35).crash(1, notice_ms=40)
    report = fleet.run(requests())
    assert 12 == len(report.completed)
    assert any(35 < ms < 75 and 1 in workers for ms, workers in router.seen)
    assert all(1 not in workers for ms, workers in router.seen if ms > 75)
    assert any(pick.worker == 1 and pick.ms > 35 for pick in report.picks)


def test_the_first_token_ever_counts():
    fleet = Fleet(engines(2), RoundRobin())
    fleet.at(150).crash(0)
    report = fleet.run(requests(1, output=60))
    alone = Fleet(engines(2), RoundRobin()).run(requests(1, output=60))
    assert alone.per_request()[0]["first_token_ms"] == report.per_request()[0]["first_token_ms"]
    assert alone.per_request()[0]["last_token_ms"] < report.per_request()[0]["last_token_ms"]


def test_a_restart_that_is_announced_is_told_and_a_silent_one_is_not():
    announced, silent = Watched(), Watched()
    for router, says in ((announced, True), (silent, False)):
        fleet = Fleet(engines(2), router)
        fleet.at(60).restart(0, announced=says)
        assert 12 == len(fleet.run(requests()).completed)
    told = [call for call in announced.calls if call[0] in ("added", "removed")]
    assert [("removed", 0), ("added", 0)] == told
    assert not [call for call in silent.calls if call[0] in ("added", "removed")]


def test_after_an_announced_restart_nothing_is_promised():
    seen = []

    class Router:
        def pick(self, request, candidates):
            seen.append(candidates[0].overlap)
            return 0

    for announced in (True, False):
        fleet = Fleet(engines(2), Router())
        fleet.at(400).restart(0, announced=announced)
        fleet.run([TraceRequest(at, 8, 2, (1, 2)) for at in (0.0, 300.0, 500.0)])
    assert [0, 2, 0, 0, 2, 2] == seen


def test_a_worker_that_leaves_ends_what_it_has():
    router = Watched()
    fleet = Fleet(engines(2), router)
    fleet.at(35).leave(0)
    report = fleet.run(requests())
    assert 12 == len(report.completed)
    assert ("removed", 0) in router.calls
    assert not [call for call in router.calls if call[0] == "lost"]
    assert all([1] == workers for ms, workers in router.seen if ms > 35)


def test_a_worker_that_joins_has_an_id_of_its_own():
    router = Watched()
    fleet = Fleet(engines(2), router)
    fleet.at(20).leave(1)
    assert 2 == fleet.at(30).join(MockEngine(ARGS))
    report = fleet.run(requests())
    assert ("added", 2) in router.calls
    assert 2 in {pick.worker for pick in report.picks}
    assert [0, 2] == sorted(fleet.engines)


@pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        (lambda fleet: fleet.at(-1), ValueError, "Fleet.at: ms"),
        (lambda fleet: fleet.at(5).crash(7), ValueError, r"Fleet\.at\(5\)\.crash\(7\): there is no such worker then"),
        (lambda fleet: fleet.at(5).crash(0, lost="gone"), ValueError, "lost 'gone'"),
        (lambda fleet: fleet.at(5).crash(0, notice_ms=-1), ValueError, "notice_ms"),
        (lambda fleet: fleet.at(5).join(), TypeError, "needs a MockEngine"),
        (lambda fleet: fleet.at(5).join(3), TypeError, "join takes a MockEngine"),
        (lambda fleet: [fleet.at(5).leave(0), fleet.at(6).leave(1)], ValueError, "no worker would be left"),
        (lambda fleet: [fleet.at(5).crash(0), fleet.at(6).crash(0)], ValueError, "there is no such worker then"),
    ],
    ids=["past", "unknown", "lost", "notice", "no-engine", "wrong-engine", "nobody-left", "twice"],
)
def test_incidents_that_cannot_be_are_refused(plan, error, text):
    with pytest.raises(error, match=text):
        plan(Fleet(engines(), RoundRobin()))
