"""Workers of a fleet that crash, restart, leave and join while it serves."""

from dataclasses import replace
from random import Random

import pytest
from depth import seeds
from planned import planned

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs
from pytest_kvmock.fleets import DynamoRouter, LeastLoaded, RoundRobin, RouterError, TraceRequest

ARGS = MockEngineArgs(num_gpu_blocks=96, block_size=4, max_num_batched_tokens=32)


def engines(count=2):
    return [MockEngine(ARGS, seed=seed) for seed in range(count)]


def requests(count=12, output=20):
    return [TraceRequest(10.0 * n, 12, output, (n, n + 100, n + 200)) for n in range(count)]


class Watched(RoundRobin):
    """A router that records its hooks and its candidates at each time."""

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
    fleet = planned(Fleet(engines(3), router), plans=plans)
    fleet.at(60).crash(1)
    report = fleet.run(requests())
    assert 12 == len(report.completed) == len(report.requests)
    assert ("removed", 1) in router.calls
    lost = [call for call in router.calls if call[0] == "lost"]
    assert lost
    assert all(attempt == 1 for _, _, attempt in lost)
    assert {number for _, number, _ in lost} == {pick.number for pick in report.picks if pick.attempt == 2}
    assert all(1 not in workers for ms, workers in router.seen if ms > 60)
    assert set(fleet.engines) == {0, 2}


def test_a_crash_is_the_same_with_and_without_plans():
    def serve(plans):
        fleet = planned(Fleet(engines(3), LeastLoaded()), plans=plans)
        fleet.at(75.5).crash(0)
        fleet.at(130).restart(2)
        report = fleet.run(requests())
        return report.to_json(), report.picks, report.run.served_by

    assert serve(True) == serve(False)


def test_lost_requests_can_be_dropped_instead_of_sent_again():
    router = Watched()
    fleet = Fleet(engines(3), router)
    fleet.at(60).crash(1, lost="drop")
    report = fleet.run(requests())
    dropped = {call[1] for call in router.calls if call[0] == "lost"}
    assert dropped
    assert 12 - len(dropped) == len(report.completed)
    assert {pick.attempt for pick in report.picks} == {1}


def test_requests_sent_to_a_crashed_worker_are_returned():
    router = Watched()
    fleet = Fleet(engines(2), router)
    fleet.at(35).crash(1, notice_ms=40)
    report = fleet.run(requests())
    assert len(report.completed) == 12
    assert any(35 < ms < 75 and 1 in workers for ms, workers in router.seen)
    assert all(1 not in workers for ms, workers in router.seen if ms > 75)
    assert any(pick.worker == 1 and pick.ms > 35 for pick in report.picks)


def test_the_first_token_before_a_crash_counts_as_first_token():
    fleet = Fleet(engines(2), RoundRobin())
    fleet.at(150).crash(0)
    report = fleet.run(requests(1, output=60))
    alone = Fleet(engines(2), RoundRobin()).run(requests(1, output=60))
    assert alone.per_request()[0]["first_token_ms"] == report.per_request()[0]["first_token_ms"]
    assert alone.per_request()[0]["last_token_ms"] < report.per_request()[0]["last_token_ms"]


def test_the_first_token_before_two_crashes_counts_as_first_token():
    fleet = Fleet(engines(3), RoundRobin())
    alone = Fleet(engines(3), RoundRobin()).run(requests(1, output=60)).per_request()[0]
    fleet.at(alone["first_token_ms"] + 20).crash(0)
    fleet.at(2 * alone["first_token_ms"] + 80).crash(2)
    report = fleet.run(requests(1, output=60))
    assert [pick.worker for pick in report.picks] == [0, 2, 1]
    assert alone["first_token_ms"] == report.per_request()[0]["first_token_ms"]


def test_the_router_is_notified_of_an_announced_restart_and_not_of_a_silent_one():
    announced, silent = Watched(), Watched()
    for router, says in ((announced, True), (silent, False)):
        fleet = Fleet(engines(2), router)
        fleet.at(60).restart(0, announced=says)
        assert len(fleet.run(requests()).completed) == 12
    told = [call for call in announced.calls if call[0] in ("added", "removed")]
    assert told == [("removed", 0), ("added", 0)]
    assert not [call for call in silent.calls if call[0] in ("added", "removed")]


def test_after_an_announced_restart_no_overlap_is_promised():
    seen = []

    class Router:
        def pick(self, request, candidates):
            seen.append(candidates[0].overlap)
            return 0

    for announced in (True, False):
        fleet = Fleet(engines(2), Router())
        fleet.at(400).restart(0, announced=announced)
        fleet.run([TraceRequest(at, 8, 2, (1, 2)) for at in (0.0, 300.0, 500.0)])
    assert seen == [0, 2, 0, 0, 2, 2]


@pytest.mark.parametrize("delay", [0, 30])
@pytest.mark.parametrize("ranks", [1, 2])
def test_after_an_announced_restart_a_router_receives_every_event(ranks, delay):
    heard = []

    class Router(Watched):
        def apply(self, event):
            heard.append((event.key, event.event.event_id, type(event.data).__name__))

        def worker_added(self, worker):
            heard.clear()

    args = replace(ARGS, engine_type="sglang", dp_size=ranks)
    fleet = Fleet(
        [MockEngine(args, backend="sglang", seed=seed) for seed in range(2 * ranks)], Router(), event_delay_ms=delay
    )
    fleet.at(60).restart(1)
    fleet.run(requests())
    for rank in range(ranks):
        own = [each[1:] for each in heard if each[0] == (1, rank)]
        assert own[0] == (0, "Cleared")
        assert list(range(len(own))) == [number for number, _ in own]


def test_a_leaving_worker_completes_its_requests():
    router = Watched()
    fleet = Fleet(engines(2), router)
    fleet.at(35).leave(0)
    report = fleet.run(requests())
    assert len(report.completed) == 12
    assert ("removed", 0) in router.calls
    assert not [call for call in router.calls if call[0] == "lost"]
    assert all(workers == [1] for ms, workers in router.seen if ms > 35)


def test_a_worker_that_joins_gets_a_new_id():
    router = Watched()
    fleet = Fleet(engines(2), router)
    fleet.at(20).leave(1)
    assert fleet.at(30).join(engine=MockEngine(ARGS)) == 2
    report = fleet.run(requests())
    assert ("added", 2) in router.calls
    assert 2 in {pick.worker for pick in report.picks}
    assert sorted(fleet.engines) == [0, 2]


@pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        (lambda fleet: fleet.at(-1), ValueError, "Fleet.at: ms"),
        (
            lambda fleet: fleet.at(5).crash(7),
            ValueError,
            r"Fleet\.at\(5\)\.crash\(7\): there is no such worker at that time",
        ),
        (lambda fleet: fleet.at(5).crash(0, lost="gone"), ValueError, "lost 'gone'"),
        (lambda fleet: fleet.at(5).crash(0, notice_ms=-1), ValueError, "notice_ms"),
        (lambda fleet: fleet.at(5).join(1), ValueError, r"Fleet\.at\(5\)\.join\(1\): there is such a worker, or was"),
        (lambda fleet: fleet.at(5).join("a"), ValueError, "join: worker must be an integer"),
        (lambda fleet: fleet.at(5).join(after_ms=-1), ValueError, "join: after_ms"),
        (lambda fleet: fleet.at(5).join(engine=3), TypeError, "join takes a MockEngine"),
        (lambda fleet: fleet.at(5).join(engine=MockEngine(MockEngineArgs(block_size=8))), ValueError, "one block_size"),
        (
            lambda fleet: [fleet.at(5).crash(0), fleet.at(6).crash(0)],
            ValueError,
            "there is no such worker at that time",
        ),
    ],
    ids=[
        "past",
        "unknown",
        "lost",
        "notice",
        "used-id",
        "wrong-id",
        "wrong-start",
        "wrong-engine",
        "other-engine",
        "twice",
    ],
)
def test_invalid_incidents_are_refused(plan, error, text):
    with pytest.raises(error, match=text):
        plan(Fleet(engines(), RoundRobin()))


def test_a_join_can_have_an_id_and_a_delay():
    router = Watched()
    fleet = Fleet(engines(2), router)
    assert fleet.at(10).join(7, after_ms=20) == 7
    assert fleet.at(15).join() == 8
    fleet.run(requests())
    assert [call for call in router.calls if call[0] == "added"] == [("added", 8), ("added", 7)]
    assert all(7 not in workers for ms, workers in router.seen if ms < 30)
    assert any(7 in workers for ms, workers in router.seen if ms >= 30)


def test_a_hook_can_plan_incidents_of_the_current_run():
    class Planning(Watched):
        def dispatched(self, request, worker):
            if request.number == 2:
                self.fleet.at(request.now_ms + 5).crash(0)
            if request.number == 6:
                with pytest.raises(ValueError, match=r"Fleet\.at: 5 ms is in the past; the run is at \d+ ms"):
                    self.fleet.at(5)
                with pytest.raises(ValueError, match="there is no such worker at that time"):
                    self.fleet.at(500).crash(0)

    router = Planning()
    fleet = router.fleet = Fleet(engines(3), router)
    assert len(fleet.run(requests()).completed) == 12
    assert ("removed", 0) in router.calls
    assert set(fleet.engines) == {1, 2}


def test_picking_a_worker_that_is_gone_is_a_router_error():
    class First:
        def pick(self, request, candidates):
            return 0

    fleet = Fleet(engines(2), First())
    fleet.at(35).crash(0)
    with pytest.raises(RouterError, match=r"First\.pick\(\) returned 0; that worker is gone\. Candidates: 1"):
        fleet.run(requests())


HAPPENINGS = {
    "crash": lambda fleet: fleet.at(60).crash(1),
    "noticed-later": lambda fleet: fleet.at(60).crash(1, notice_ms=30),
    "dropped": lambda fleet: fleet.at(60).crash(1, lost="drop"),
    "restart": lambda fleet: fleet.at(60).restart(1),
    "silent": lambda fleet: fleet.at(60).restart(1, announced=False),
    "leave": lambda fleet: fleet.at(60).leave(1),
    "join": lambda fleet: fleet.at(60).join(),
}


@pytest.mark.parametrize("happen", HAPPENINGS.values(), ids=HAPPENINGS)
@pytest.mark.parametrize(("semantics", "backend"), [("1.2.1", "lineage"), ("1.6.1", "vllm")])
def test_incidents_affect_all_ranks_of_a_worker_at_once(semantics, backend, happen):
    router = Watched()
    args = replace(ARGS, semantics=semantics, dp_size=2)
    fleet = Fleet([MockEngine(args, backend=backend, seed=seed) for seed in range(4)], router)
    happen(fleet)
    report = fleet.run(requests(24))
    told = {worker for name, worker, *_ in router.calls if name in ("added", "removed")}
    assert told in (set(), {(1, 0), (1, 1)}, {(2, 0), (2, 1)})
    lost = {number for name, number, *_ in router.calls if name == "lost"}
    again = {pick.number for pick in report.picks if pick.attempt > 1}
    assert 24 - len(lost - again) == len(report.completed)
    assert len(fleet.run(requests(24)).completed) == 24  # the remaining workers serve another run


def test_incidents_after_the_end_are_reported_as_missed():
    fleet = Fleet(engines(), Watched())
    fleet.at(1e6).restart(1)
    fleet.at(20).restart(0)
    report = fleet.run(requests())
    assert [(each.kind, each.worker) for each in report.run.incidents] == [("restart", 0)]
    assert [(each.ms, each.kind, each.worker) for each in report.missed] == [(1e6, "restart", 1)]
    assert "the run ended before 1e+06 ms: no restart of worker 1" in str(report)
    assert fleet.run(requests()).missed == ()


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("backend", ["lineage", "vllm", "mocker_sglang_1_6"])
def test_incidents_are_the_same_with_and_without_plans(backend, seed):
    rng = Random(seed)
    args = replace(ARGS, engine_type="sglang" if "sglang" in backend else "vllm")
    plan = [(rng.choice(list(HAPPENINGS)), rng.uniform(0, 400)) for _ in range(3)]

    def serve(plans):
        fleet = planned(
            Fleet(
                [MockEngine(args, backend=backend, seed=each) for each in range(4)],
                DynamoRouter(),
                concurrency=(None, 5)[seed % 2],
                event_delay_ms=(0, 20)[seed % 3 == 0],
            ),
            plans=plans,
        )
        for each, (name, ms) in enumerate(plan):
            moment = fleet.at(round(ms, seed % 5))
            if name == "join":
                moment.join()
            elif name == "leave":
                moment.leave(each)
            elif name[0] == "r" or name == "silent":
                moment.restart(each, announced=name != "silent")
            else:
                moment.crash(each, lost="drop" if name == "dropped" else "resubmit", notice_ms=15 * (name[0] == "n"))
        report = fleet.run(requests(24, output=30))
        return (
            report.to_json(),
            report.per_request(),
            report.picks,
            report.run.passes,
            report.run.served_by,
            sorted(fleet.engines),
        )

    assert serve(True) == serve(False)


def test_stop_ms_can_end_a_run_before_a_crash_is_noticed():
    class First:
        def pick(self, request, candidates):
            return 0

    fleet = Fleet(engines(2), First(), stop_ms=100)
    fleet.at(50).crash(0, notice_ms=200)
    report = fleet.run(requests(4))
    assert report.completed == []
