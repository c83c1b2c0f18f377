"""Cordoned workers of a fleet complete their requests and are no candidates."""

from dataclasses import replace
from random import Random

import pytest
from depth import seeds
from planned import planned

from pytest_kvmock import EngineProfile, Fleet, MockEngine, MockEngineArgs, RouterHarness
from pytest_kvmock.fleets import DynamoRouter, LeastLoaded, MostCached, RoundRobin, RouterError, TraceRequest
from pytest_kvmock.fleets.report.page_data import fleet_data
from pytest_kvmock.testing import RightRouter

ARGS = MockEngineArgs(num_gpu_blocks=96, block_size=4, max_num_batched_tokens=32)


def engines(count=3):
    return [MockEngine(ARGS, seed=seed) for seed in range(count)]


def requests(count=12, output=8):
    return [TraceRequest(10.0 * n, 12, output, (n, n + 100, n + 200)) for n in range(count)]


class Watched(RightRouter):
    """A router that records its candidates at each time and its worker hooks."""

    def __init__(self, workers):
        super().__init__(workers)
        self.seen, self.told = [], []

    def pick(self, request, candidates):
        self.seen.append((request.now_ms, [each.worker for each in candidates]))
        return super().pick(request, candidates)

    def worker_added(self, worker):
        self.told.append(("added", worker))
        super().worker_added(worker)

    def worker_removed(self, worker):
        self.told.append(("removed", worker))
        super().worker_removed(worker)


@pytest.mark.parametrize("router", [RoundRobin, LeastLoaded, MostCached, DynamoRouter, lambda: RightRouter(range(3))])
@pytest.mark.parametrize("loads", ["router", "engine"])
def test_a_cordoned_worker_gets_no_request_until_it_is_uncordoned(router, loads):
    fleet = Fleet(engines(), router(), loads=loads, loads_every_ms=20)
    fleet.at(25).cordon(1)
    fleet.at(75).uncordon(1)
    report = fleet.run(requests(40))
    assert len(report.completed) == 40
    assert not [pick for pick in report.picks if 25 < pick.ms < 75 and pick.worker == 1]
    assert [pick for pick in report.picks if pick.ms > 75 and pick.worker == 1]
    assert [each[1:3] for each in report.run.incidents] == [("cordon", 1), ("uncordon", 1)]
    assert not report.beliefs


def test_a_cordoned_worker_completes_its_requests_and_stays_in_the_fleet():
    router = Watched(range(3))
    fleet = Fleet(engines(), router, record=True)
    fleet.at(25).cordon(1)
    report = fleet.run(requests(12, output=60))
    assert all((1 in workers) == (ms < 25) for ms, workers in router.seen)
    assert router.told == []
    of_it = [each for each in report.run.served if each.worker == 1]
    assert of_it
    assert all(each.request.status == "finished" and each.request.e2e_ms > 25 for each in of_it)
    assert {tuple(each.worker for each in report.run.recorder.pick(at).candidates) for at in range(3, 12)} == {(0, 2)}
    assert set(fleet.engines) == {0, 1, 2}


@pytest.mark.parametrize("happens", ["crash", "leave"])
def test_a_cordoned_worker_that_leaves_is_reported_as_gone(happens):
    class OneAtLast:
        def pick(self, request, candidates):
            return 1 if request.now_ms > 40 else candidates[0].worker

    fleet = Fleet(engines(), OneAtLast())
    fleet.at(25).cordon(1)
    getattr(fleet.at(35), happens)(1)
    with pytest.raises(RouterError, match=r"returned 1; that worker is gone\. Candidates: 0, 2"):
        fleet.run(requests())


def test_picking_a_cordoned_worker_is_a_router_error():
    class One:
        def pick(self, request, candidates):
            return 1

    fleet = Fleet(engines(), One())
    fleet.at(25).cordon(1)
    with pytest.raises(RouterError, match=r"One\.pick\(\) returned 1; worker 1 is cordoned\. Candidates: 0, 2"):
        fleet.run(requests())
    fleet = Fleet(engines(2), One())
    fleet.at(5).cordon(1)
    fleet.at(6).cordon(0)
    with pytest.raises(RouterError, match=r"returned 1; worker 1 is cordoned\. Candidates: none"):
        fleet.run(requests())


@pytest.mark.parametrize("semantics", ["1.2.1", "1.6.1"])
def test_all_ranks_of_a_worker_are_cordoned(semantics):
    args = replace(ARGS, dp_size=2, semantics=semantics)
    names = [(worker, rank) for worker in range(2) for rank in range(2)]
    router = Watched(names)
    fleet = Fleet([MockEngine(args, seed=seed) for seed in range(4)], router)
    fleet.at(25).cordon(0)
    fleet.at(75).uncordon(0)
    report = fleet.run(requests())
    assert all(([*names] if not 25 < ms < 75 else names[2:]) == workers for ms, workers in router.seen)
    assert len(report.completed) == 12
    assert not report.beliefs

    class One:
        def pick(self, request, candidates):
            return (0, 1)

    fleet = Fleet([MockEngine(args, seed=seed) for seed in range(4)], One())
    fleet.at(5).cordon(0)
    with pytest.raises(RouterError, match=r"returned \(0, 1\); worker 0 is cordoned"):
        fleet.run(requests())


def test_if_all_workers_are_cordoned_requests_wait():
    router = Watched(range(2))
    fleet = Fleet(engines(2), router)
    for worker in range(2):
        fleet.at(25).cordon(worker)
    fleet.at(55).uncordon(1)
    report = fleet.run(requests())
    assert len(report.completed) == 12
    assert [pick.number for pick in report.picks if pick.ms == 55] == [3, 4, 5]
    assert all(workers == [] for ms, workers in router.seen if 25 < ms < 55)
    fleet = Fleet(engines(2), RoundRobin())
    fleet.at(25).cordon(0)
    fleet.at(35).leave(1)
    report = fleet.run(requests())
    assert report.run.facts.nobody_from_ms == 35
    assert "no worker was there from 35 ms on" in str(report)
    assert report.completed == [each for each in report.requests if each.status == "finished"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_restarted_worker_stays_cordoned(announced):
    router = Watched(range(3))
    fleet = Fleet(engines(), router)
    fleet.at(25).cordon(1)
    fleet.at(45).restart(1, announced=announced)
    fleet.at(85).uncordon(1)
    report = fleet.run(requests())
    assert all((1 in workers) != (25 < ms < 85) for ms, workers in router.seen)
    assert len(report.completed) == 12


@pytest.mark.parametrize("happens", ["leave", "crash", "late"])
def test_a_leave_or_crash_ends_a_cordon(happens):
    router = Watched(range(3))
    fleet = Fleet(engines(), router)
    fleet.at(25).cordon(1)
    if happens == "leave":
        fleet.at(45).leave(1)
    else:
        fleet.at(45).crash(1, notice_ms=20 if happens == "late" else 0)
    with pytest.raises(
        ValueError, match=r"Fleet\.at\(50\)\.uncordon\(1\): there is no such worker at that time; there are 0, 2"
    ):
        fleet.at(50).uncordon(1)
    report = fleet.run(requests())
    assert all(1 not in workers for ms, workers in router.seen if ms > 25)
    assert len(report.completed) == 12
    assert set(fleet.engines) == {0, 2}
    assert len(fleet.run(requests()).completed) == 12


def test_a_worker_stays_cordoned_in_later_runs():
    fleet = Fleet(engines(), LeastLoaded())
    fleet.at(25).cordon(1)
    fleet.run(requests())
    again = fleet.run(requests())
    assert 1 not in {pick.worker for pick in again.picks}
    assert set(fleet.engines) == {0, 1, 2}
    again.assert_balanced()
    start = max(engine.now_ms for engine in fleet.engines.values())
    fleet.at(25).uncordon(1)
    last = fleet.run(requests(20))
    assert all(pick.ms > start + 25 for pick in last.picks if pick.worker == 1)
    assert 1 in {pick.worker for pick in last.picks}


def test_a_cordoned_worker_lost_at_the_end_of_a_run_is_not_in_later_runs():
    fleet = Fleet(engines(), LeastLoaded())
    fleet.at(5).cordon(1)
    fleet.at(100).crash(1, notice_ms=1e6)
    fleet.run(requests())
    assert len(fleet.run(requests()).completed) == 12


def test_repeated_cordons_and_uncordons_have_no_effect():
    def serve(*more):
        fleet = Fleet(engines(), LeastLoaded())
        fleet.at(25).cordon(1)
        for ms, kind, worker in more:
            getattr(fleet.at(ms), kind)(worker)
        fleet.at(75).uncordon(1)
        report = fleet.run(requests())
        return report.to_json(), report.picks, [(each.ms, each.kind) for each in report.run.incidents]

    expected = serve()
    assert expected[2] == [(25, "cordon"), (75, "uncordon")]
    assert serve((10, "uncordon", 1), (30, "cordon", 1), (50, "uncordon", 2), (80, "uncordon", 1)) == expected


@pytest.mark.parametrize("kind", ["cordon", "uncordon"])
def test_a_cordon_of_an_unknown_worker_is_refused_and_nothing_is_planned(kind):
    fleet = Fleet(engines(2), LeastLoaded())
    expected = fleet.run(requests()).to_json()
    fleet = Fleet(engines(2), LeastLoaded())
    for worker in (7, "a", (0, 0), None):
        text = rf"Fleet\.at\(5\)\.{kind}\(.*\): there is no such worker at that time; there are 0, 1"
        with pytest.raises(ValueError, match=text):
            getattr(fleet.at(5), kind)(worker)
    with pytest.raises(ValueError, match=r"Fleet\.at: ms must be a finite number"):
        fleet.at("soon")
    with pytest.raises(ValueError, match=r"Fleet\.at: ms"):
        fleet.at(-1)
    assert fleet.run(requests()).to_json() == expected


def test_a_cordon_planned_after_the_end_of_the_run_is_missed():
    fleet = Fleet(engines(), LeastLoaded())
    fleet.at(1e6).cordon(1)
    report = fleet.run(requests())
    assert [each[1:3] for each in report.missed] == [("cordon", 1)]
    assert "the run ended before 1e+06 ms: no cordon of worker 1" in str(report)
    assert 1 in {pick.worker for pick in fleet.run(requests()).picks}


def test_a_hook_can_cordon_a_worker_during_the_run():
    class Planning(Watched):
        def dispatched(self, request, worker):
            super().dispatched(request, worker)
            if request.number == 3:
                self.fleet.at(request.now_ms).cordon(0)

    router = Planning(range(3))
    fleet = router.fleet = Fleet(engines(), router)
    assert len(fleet.run(requests()).completed) == 12
    assert all((0 in workers) == (ms <= 30) for ms, workers in router.seen)


# ----------------------------------------------------------------------------------------------- what is believed


@pytest.mark.parametrize("method", ["workers", "overlap", "loads"])
def test_only_loads_must_include_a_cordoned_worker(method):
    class OfCandidates(RightRouter):
        """Reports only workers that were candidates at the last pick."""

        there = (0, 1, 2)

        def pick(self, request, candidates):
            self.there = [each.worker for each in candidates]
            return super().pick(request, candidates)

        def workers(self):
            found = super().workers()
            return [each for each in found if each in self.there] if method == "workers" else found

        def overlap(self, request):
            found = super().overlap(request)
            return {each: found.get(each, 0) for each in self.there} if method == "overlap" else found

        def loads(self):
            found = super().loads()
            return {each: found[each] for each in self.there} if method == "loads" else found

        def cost(self, request, worker, overlap):
            return request.number % 3 != worker

    fleet = Fleet(engines(), OfCandidates(range(3)))
    fleet.at(55).cordon(1)
    fleet.at(105).uncordon(1)
    found = fleet.run([replace(each, hash_ids=(1, 2, 3)) for each in requests(20, output=30)]).beliefs
    assert ["load_drift"] * (method == "loads") == [each.rule for each in found]


def test_an_uncordoned_worker_must_be_known_once_it_was_a_candidate():
    class Losing(RightRouter):
        there = (0, 1, 2)

        def pick(self, request, candidates):
            self.there = [each.worker for each in candidates if each.worker in self.there]
            return super().pick(request, candidates)

        def workers(self):
            return [each for each in super().workers() if each in self.there]

    fleet = Fleet(engines(), Losing(range(3)))
    fleet.at(25).cordon(1)
    fleet.at(45).uncordon(1)
    (belief,) = fleet.run(requests()).beliefs
    assert (belief.rule, belief.worker, belief.ms) == ("worker_drift", 1, 60)


def test_wrong_beliefs_about_a_cordoned_worker_are_reported():
    class Forgetting(RightRouter):
        """Treats a worker that is no candidate as gone."""

        def pick(self, request, candidates):
            for worker in set(range(3)) - {each.worker for each in candidates}:
                self.index.remove_worker(worker)
            return super().pick(request, candidates)

    fleet = Fleet(engines(), Forgetting(range(3)))
    fleet.at(95).cordon(1)
    fleet.at(155).uncordon(1)
    again = [replace(each, timestamp=each.timestamp + 160) for each in requests()]
    found = {each.rule: each for each in fleet.run([*requests(), *again]).beliefs}
    assert found["overlap_drift"].worker == 1
    assert found["overlap_drift"].ms > 100


# ------------------------------------------------------------------------------------------------- figures


def test_balance_counts_only_picks_with_the_worker_as_candidate():
    fleet = Fleet(engines(), RoundRobin())
    fleet.at(5).cordon(1)
    fleet.at(85).uncordon(1)
    report = fleet.run(requests(17))
    (row,) = [each for each in report.run.services if each.worker == 1]
    assert row.picks == 17 - 8  # the first pick, and those from 90 ms on
    _, there = report.run.counts("requests")
    assert there[1] == 9 / 17
    report.assert_balanced()


def test_open_requests_count_only_at_picks_with_their_worker_as_candidate():
    class First(RoundRobin):
        def pick(self, request, candidates):
            return 0 if request.number == 0 else 1

    fleet = Fleet(engines(2), First())
    fleet.at(15).cordon(0)
    fleet.at(35).uncordon(0)
    report = fleet.run(requests(6, output=40))
    assert report.requests[0].ended_ms > 50
    (row,) = [each for each in report.run.services if each.worker == 0]
    assert row.open_requests == 1 + 2  # at request 1, and at 4 and 5


def test_the_best_overlap_of_a_pick_is_that_of_a_candidate():
    fleet = Fleet(engines(2), RoundRobin())
    fleet.at(300).cordon(0)
    trace = [TraceRequest(at, 12, 2, (1, 2, 3)) for at in (0.0, 400.0)]
    report = fleet.run(trace)
    assert [pick.worker for pick in report.picks] == [0, 1]
    assert (report.picks[1].best_overlap, report.picks[1].best_held) == (0, 0)
    assert report.figure("overlap_regret") == 0


def test_a_page_and_the_report_show_a_cordon():
    fleet = Fleet(engines(), RoundRobin())
    fleet.at(25).cordon(1)
    report = fleet.run(requests())
    assert [(each["kind"], each["worker"]) for each in fleet_data(report)["marks"]] == [("cordon", "1")]
    assert "25 ms: cordon of worker 1" in str(report).splitlines()


# ------------------------------------------------------------------------------------------------ with a verdict


@pytest.mark.parametrize("backend", ["lineage", "vllm", "sglang", "hash_cache"])
def test_a_harness_checks_a_fleet_with_cordons(backend):
    with RouterHarness(EngineProfile(block_size=4, num_blocks=96, workers=3), backend) as harness:
        fleet = harness.fleet(RightRouter(range(3), copies=backend == "vllm"), event_delay_ms=15)
        fleet.at(25).cordon(1)
        fleet.at(45).restart(1)
        fleet.at(75).uncordon(1)
        report = fleet.run(requests(30))
        assert len(report.completed) == 30
        assert [] == list(report.beliefs) == list(report.run.event_errors)


@pytest.mark.parametrize("seed", seeds(40))
@pytest.mark.parametrize("backend", ["lineage", "vllm", "mocker_sglang_1_6"])
def test_runs_with_cordons_are_the_same_with_and_without_plans(backend, seed):
    rng = Random(seed)
    args = replace(ARGS, engine_type="sglang" if "sglang" in backend else "vllm")
    options = {
        "concurrency": rng.choice([None, 3]),
        "event_delay_ms": rng.choice([0, 20]),
        "record": rng.choice([False, True]),
        "loads": rng.choice(["router", "engine"]),
    }
    kinds = ["cordon", "cordon", "uncordon", "restart", "silent", "crash", "late", "leave", "join"]
    happenings = [(round(rng.uniform(1, 200), rng.randrange(4)), rng.choice(kinds), rng.random()) for _ in range(10)]
    count, kind = rng.randint(1, 4), rng.choice([RightRouter, RoundRobin, DynamoRouter])
    # A silent restart makes a correct router's index differ from its engine, but not from an index of the same events.

    def serve(plans):
        router = RightRouter(range(count), copies=backend == "vllm") if kind is RightRouter else kind()
        fleet = planned(
            Fleet([MockEngine(args, backend=backend, seed=each) for each in range(count)], router, **options),
            plans=plans,
        )
        there, coming = list(range(count)), count
        for ms, what, draw in sorted(happenings):
            if what == "join" or not there:
                there.append(fleet.at(ms).join())
                coming += 1
                continue
            worker = there[int(draw * len(there))]
            if what in ("crash", "late"):
                fleet.at(ms).crash(worker, notice_ms=15 * (what == "late"))
            elif what == "silent":
                fleet.at(ms).restart(worker, announced=False)
            else:
                getattr(fleet.at(ms), what)(worker)
            if what in ("crash", "late", "leave"):
                there.remove(worker)
        fleet.at(220).join()
        report = fleet.run(requests(24))
        assert len(report.completed) == 24
        assert not report.beliefs
        return report.to_json(), report.per_request(), report.picks, report.missed, report.run.incidents

    assert serve(True) == serve(False)
