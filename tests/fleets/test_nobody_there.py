"""Fleets without workers: from the start, or after the last one crashes, leaves, or is lost before a later run."""

import asyncio
from dataclasses import replace
from random import Random

import pytest
from depth import seeds
from planned import planned

from pytest_kvmock import EngineProfile, Fleet, MockEngine, MockEngineArgs, RouterHarness
from pytest_kvmock.fleets import (
    DynamoRouter,
    LeastLoaded,
    MostCached,
    RoundRobin,
    RouterError,
    RouterStalled,
    TraceRequest,
)
from pytest_kvmock.fleets.report.page_data import fleet_data
from pytest_kvmock.testing import RightRouter

ARGS = MockEngineArgs(num_gpu_blocks=96, block_size=4, max_num_batched_tokens=32)


def engines(count=2):
    return [MockEngine(ARGS, seed=seed) for seed in range(count)]


def requests(count=12, output=8):
    return [TraceRequest(10.0 * n, 12, output, (n, n + 100, n + 200)) for n in range(count)]


class Asked(RoundRobin):
    """A router that records the requests and candidates of its picks."""

    def __init__(self):
        super().__init__()
        self.asked, self.hooks = [], []

    def started(self, workers):
        self.hooks.append(("started", workers))

    def pick(self, request, candidates):
        self.asked.append((request.now_ms, request.number, [each.worker for each in candidates]))
        return super().pick(request, candidates)

    def worker_added(self, worker):
        self.hooks.append(("added", worker))

    def worker_removed(self, worker):
        self.hooks.append(("removed", worker))


class Needing(Asked):
    """A router that needs candidates."""

    needs_candidates = True

    def pick(self, request, candidates):
        assert candidates
        return super().pick(request, candidates)

    def next_waiting(self, requests):
        self.asked.append(("next", len(requests)))
        return requests[0]


# ------------------------------------------------------------------------------------------------- an empty fleet


@pytest.mark.parametrize("router", [Asked, Needing, DynamoRouter, LeastLoaded, MostCached, lambda: RightRouter([])])
def test_a_fleet_can_start_without_workers(router):
    fleet = Fleet([], router(), args=ARGS)
    assert fleet.at(55).join() == 0
    report = fleet.run(requests())
    assert 12 == len(report.completed) == report.arrived
    assert {pick.worker for pick in report.picks} == {0}
    assert min(pick.ms for pick in report.picks) == 55
    assert list(range(12)) == [pick.number for pick in report.picks]
    assert list(fleet.engines) == [0]
    assert fleet.engines[0].args == ARGS
    assert not report.beliefs


def test_the_router_of_an_empty_fleet_is_notified_of_its_empty_worker_list():
    router = Asked()
    fleet = Fleet([], router, args=ARGS)
    fleet.at(55).join()
    fleet.run(requests())
    assert router.hooks == [("started", []), ("added", 0)]


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("semantics", ["1.2.1", "1.6.1"])
def test_workers_that_join_an_empty_fleet_have_ranks(semantics, record):
    args = replace(ARGS, dp_size=2, semantics=semantics)
    fleet = Fleet([], RightRouter([]), args=args, record=record)
    fleet.at(5).join()
    again = [replace(each, timestamp=400.0 + each.timestamp) for each in requests()]
    report = fleet.run([*requests(), *again])
    assert len(report.completed) == 24
    assert {(0, 0), (0, 1)} == {pick.worker for pick in report.picks} == set(fleet.engines)
    assert report.figure("overlap_best") > 0
    assert not report.beliefs


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Fleet([], RoundRobin()), ValueError, r"no engines, so args=MockEngineArgs\(\.\.\.\) must say"),
        (lambda: Fleet({}, RoundRobin()), ValueError, "there are no engines"),
        (lambda: Fleet([], RoundRobin(), args=3), TypeError, "args must be MockEngineArgs, got 3"),
        (lambda: Fleet(engines(), RoundRobin(), args=ARGS), ValueError, "args are for a fleet without engines"),
        (
            lambda: Fleet([], RoundRobin(), args=replace(ARGS, worker_type="prefill")),
            ValueError,
            "args must have worker_type='aggregated', got 'prefill'",
        ),
        (
            lambda: Fleet([], RoundRobin(), args=ARGS).at(5).join(engine=MockEngine(replace(ARGS, block_size=8))),
            ValueError,
            "one block_size",
        ),
        (
            lambda: Fleet([], RoundRobin(), args=ARGS).at(5).crash(0),
            ValueError,
            r"at\(5\)\.crash\(0\): there is no such worker at that time; no worker is there",
        ),
    ],
    ids=["no-args", "empty-mapping", "no-such-args", "both", "prefill", "another-size", "nobody-to-crash"],
)
def test_an_invalid_fleet_without_engines_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


# --------------------------------------------------------------------------------------------- the last one goes


@pytest.mark.parametrize("plans", [True, False], ids=["plans", "each-pass"])
@pytest.mark.parametrize("happens", ["crash", "leave"])
@pytest.mark.parametrize("router", [Asked, Needing, DynamoRouter, LeastLoaded, MostCached, lambda: RightRouter([0, 1])])
def test_requests_wait_for_a_worker_that_joins_after_the_last_one_left(router, happens, plans):
    fleet = planned(Fleet(engines(), router()), plans=plans)
    getattr(fleet.at(30), happens)(0)
    getattr(fleet.at(35), happens)(1)
    assert fleet.at(75).join() == 2
    report = fleet.run(requests())
    assert len(report.completed) == 12
    assert not [pick for pick in report.picks if 35 < pick.ms < 75]
    assert [pick.number for pick in report.picks if pick.ms == 75 and pick.attempt == 1] == [4, 5, 6, 7]
    assert not report.beliefs
    assert report.run.facts.nobody_from_ms is None
    assert "no worker was there" not in str(report)


def test_a_router_without_candidates_is_asked_as_often_as_for_any_waiting_request():
    class Refusing(Asked):
        def pick(self, request, candidates):
            worker = super().pick(request, candidates)
            return None if 15 < request.now_ms < 45 else worker

    alone, refusing = Asked(), Refusing()
    fleet = Fleet(engines(1), alone)
    fleet.at(15).leave(0)
    fleet.at(45).join()
    fleet.run(requests(5))
    fleet = Fleet(engines(1), refusing)
    fleet.at(45).join()
    fleet.run(requests(5))
    picks = [[each[:2] for each in router.asked] for router in (alone, refusing)]
    assert picks[0] == picks[1]
    assert len([ms for ms, _ in picks[0] if 15 < ms < 45]) > 1
    assert {tuple(workers): True for ms, _, workers in alone.asked if ms > 15} == {(): True, (1,): True}


def test_without_workers_waiting_requests_are_offered_at_each_arrival():
    router = Asked()
    Fleet([], router, args=ARGS).run(requests(3))
    assert [(ms, number) for ms, number, _ in router.asked] == [(0, 0), (10, 0), (10, 1), (20, 0), (20, 1), (20, 2)]


def test_a_router_that_needs_candidates_is_not_called_without_workers():
    router = Needing()
    fleet = Fleet(engines(1), router)
    fleet.at(15).crash(0)
    fleet.at(45).join()
    report = fleet.run(requests(5))
    assert len(report.completed) == 5
    assert [each[0] for each in router.asked[:2]] == [0.0, 10.0]
    assert router.asked[2] == ("next", 5)
    assert [pick.number for pick in report.picks if pick.ms == 45] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("router", [Asked, Needing])
def test_a_run_without_workers_ends_if_no_worker_will_join(router):
    fleet = Fleet(engines(), router())
    fleet.at(30).leave(1)
    fleet.at(35).crash(0)
    report = fleet.run(requests())
    assert report.run.facts.nobody_from_ms == 35
    assert "no worker was there from 35 ms on" in str(report).splitlines()
    assert report.to_json()["fleet"]["nobody_from_ms"] == 35
    assert any(note == "No worker was there from 35 ms on." for note in fleet_data(report)["notes"])
    assert report.arrived == 12
    assert {each.status for each in report.requests} == {"finished", "unfinished"}
    assert fleet.engines == {}


def test_a_router_sees_the_unfinished_status_of_its_requests():
    seen = {}

    class Router(Needing):
        def finished(self, request):
            seen[request.number] = request

        def pick(self, request, candidates):
            seen[request.number] = request
            return super().pick(request, candidates)

    fleet = Fleet(engines(1), Router())
    fleet.at(15).crash(0)
    report = fleet.run(requests(4))
    assert [seen[each].status for each in (0, 1)] == ["unfinished", "unfinished"]
    assert [each["status"] for each in report.per_request()] == ["unfinished", "unfinished"]
    assert report.arrived == 4


def test_a_report_without_any_worker_can_be_read(tmp_path):
    report = Fleet([], RoundRobin(), args=ARGS, record=True).run(requests(3))
    assert report.run.facts.nobody_from_ms == 0
    assert report.arrived == 3
    assert [] == list(report.requests) == list(report.picks) == report.workers
    assert "no worker was there from 0 ms on" in str(report)
    assert report.figure("completed") == 0
    report.to_html(tmp_path / "page.html")
    assert str(report.compare(report).differences or "") == ""
    with pytest.raises(AssertionError, match=r"0 of 3 requests.*; no worker was there from 0 ms on"):
        report.assert_slo(ttft_ms=1e9)


def test_requests_to_the_last_worker_return_until_its_crash_is_noticed():
    fleet = Fleet(engines(1), RoundRobin())
    fleet.at(15).crash(0, notice_ms=20)
    report = fleet.run(requests(5))
    assert report.run.facts.nobody_from_ms == 35
    assert [pick.ms for pick in report.picks if pick.ms > 15][:1] == [20.0]
    assert not report.completed


def test_a_router_that_picks_no_worker_although_some_exist_stalls():
    class Never:
        def pick(self, request, candidates):
            return None

    fleet = Fleet(engines(), Never())
    fleet.at(5).crash(0)
    with pytest.raises(RouterStalled):
        fleet.run(requests(2))


def test_a_stopped_run_reports_since_when_it_has_no_worker():
    fleet = Fleet(engines(1), RoundRobin(), stop_ms=60)
    fleet.at(15).leave(0)
    fleet.at(100).join()
    report = fleet.run(requests())
    assert report.run.facts.nobody_from_ms == 15
    assert [(each.kind, each.worker) for each in report.missed] == [("join", 1)]


# ------------------------------------------------------------------------------------------------- a later run


def test_a_later_run_of_an_empty_fleet_serves_only_if_workers_join():
    router = Asked()
    fleet = Fleet(engines(), router)
    fleet.at(30).crash(0)
    fleet.at(35).leave(1)
    first = fleet.run(requests())
    assert fleet.engines == {}
    second = fleet.run(requests(3))
    assert second.run.facts.nobody_from_ms >= max(each.ended_ms or 0.0 for each in first.requests)
    assert fleet.at(10).join() == 2
    third = fleet.run(requests())
    assert len(third.completed) == 12
    assert [each for each in router.hooks if each[0] == "started"] == [("started", [0, 1])]
    times = [each[0] for each in router.asked]
    assert sorted(times) == times  # the time that a router sees never goes back


def test_a_worker_id_of_an_earlier_run_is_not_reused():
    fleet = Fleet(engines(3), RoundRobin())
    fleet.at(30).crash(2)
    fleet.run(requests())
    assert fleet.at(10).join() == 3
    with pytest.raises(
        ValueError, match=r"join\(2\): there is such a worker, or was; on bare engines only a worker whose crash"
    ):
        fleet.at(10).join(2)


# ------------------------------------------------------------------------------------------- what is wrong of it


def test_a_router_error_without_candidates_says_that_no_worker_was_there():
    class First:
        def pick(self, request, candidates):
            return candidates[0].worker

    with pytest.raises(
        RouterError, match=r"First\.pick\(\) raised IndexError.*: no worker was there.*needs_candidates = True"
    ) as raised:
        Fleet([], First(), args=ARGS).run(requests())
    assert isinstance(raised.value.__cause__, IndexError)
    assert raised.value.request.number == 0


def test_picking_a_worker_of_an_empty_fleet_is_a_router_error():
    class Zero:
        def pick(self, request, candidates):
            return 0

    fleet = Fleet(engines(1), Zero())
    fleet.at(15).crash(0)
    with pytest.raises(RouterError, match=r"Zero\.pick\(\) returned 0: no worker was there"):
        fleet.run(requests())


def test_needs_candidates_must_be_a_boolean():
    class Router(RoundRobin):
        needs_candidates = "yes"

    with pytest.raises(TypeError, match=r"Router\.needs_candidates must be True or False, got 'yes'"):
        Fleet(engines(), Router())


def test_knowing_a_worker_of_an_empty_fleet_is_a_wrong_belief():
    class Router(RoundRobin):
        def workers(self):
            return [0]

    fleet = Fleet(engines(1), Router())
    fleet.at(15).crash(0)
    (belief,) = fleet.run(requests()).beliefs
    assert belief.rule == "worker_drift"
    assert "knows worker 0, which is not there" in belief.observed
    assert belief.expected == "none, as no worker was there"


def test_an_async_router_with_needs_candidates_waits_for_workers():
    class Router:
        needs_candidates = True

        async def pick(self, request, candidates):
            return candidates[0].worker

    fleet = Fleet(engines(1), Router())
    fleet.at(15).crash(0)
    fleet.at(45).join()
    assert len(asyncio.run(fleet.arun(requests())).completed) == 12


def test_the_dynamo_router_explains_a_request_without_workers():
    class Watching(DynamoRouter):
        def pick(self, request, candidates):
            self.last = request
            return super().pick(request, candidates)

    router = Watching()
    Fleet([], router, args=ARGS).run(requests(1))
    assert "no worker was there: the request waits" in router.explain(router.last)


# ------------------------------------------------------------------------------------------------- with a verdict


def test_a_harness_checks_a_fleet_whose_last_worker_is_gone():
    with RouterHarness(EngineProfile(block_size=4, num_blocks=96, workers=2), "lineage") as harness:
        fleet = harness.fleet(RightRouter([0, 1]))
        fleet.at(30).crash(0)
        fleet.at(35).leave(1)
        assert fleet.run(requests()).run.facts.nobody_from_ms == 35
        assert fleet.at(20).join() == 2
        report = fleet.run(requests())
        assert len(report.completed) == 12
        assert [] == list(report.beliefs) == list(report.run.event_errors)


def test_a_harness_reports_beliefs_about_a_worker_when_none_is_left():
    router = RightRouter([0])
    router.worker_removed = lambda worker: None
    harness = RouterHarness(EngineProfile(block_size=4, num_blocks=96, workers=1), "lineage")
    with harness.events.expect_error("worker_drift"), harness.events.expect_error("overlap_drift"):
        fleet = harness.fleet(router)
        fleet.at(35).crash(0)
        beliefs = fleet.run(requests()).beliefs
    assert [(belief.rule, belief.worker, belief.expected) for belief in beliefs] == [
        ("worker_drift", 0, "none, as no worker was there"),
        ("overlap_drift", 0, "none, as that worker is gone"),
    ]


def test_a_fleet_of_a_harness_without_workers_needs_args():
    with RouterHarness(EngineProfile(block_size=4, num_blocks=96, workers=1), "lineage") as harness:
        harness.worker(0)
        harness.remove_worker(0)
        with pytest.raises(ValueError, match=r"Fleet: there are no engines, so args="):
            harness.fleet()
        fleet = harness.fleet(args=ARGS)
        worker = fleet.at(20).join()
        assert len(fleet.run(requests()).completed) == 12
        assert worker in fleet.engines


@pytest.mark.parametrize("seed", seeds(40))
def test_runs_without_workers_are_the_same_with_and_without_plans(seed):
    rng = Random(seed)
    options = {"concurrency": rng.choice([None, 3]), "event_delay_ms": rng.choice([0, 20]), "record": True}
    happenings = [
        (round(rng.uniform(1, 120), rng.randrange(4)), rng.choice(["crash", "late", "leave", "drop", "join"]))
        for _ in range(8)
    ]
    kinds, count = rng.choice([RightRouter, Asked, Needing, DynamoRouter]), rng.randrange(3)

    def serve(plans):
        router = kinds(range(count)) if kinds is RightRouter else kinds()
        fleet = planned(Fleet(engines(count), router, args=None if count else ARGS, **options), plans=plans)
        there, coming = list(range(count)), count
        for ms, kind in sorted(happenings):
            if kind == "join" or not there:
                there.append(fleet.at(ms).join(coming))
                coming += 1
            elif kind == "leave":
                fleet.at(ms).leave(there.pop(0))
            else:
                fleet.at(ms).crash(
                    there.pop(0), lost="drop" if kind == "drop" else "resubmit", notice_ms=10 * (kind == "late")
                )
        fleet.at(130).join(coming)
        report = fleet.run(requests(14))
        left = {each.status for each in report.requests}
        assert left <= {"finished", "lost"}
        assert len(report.requests) == 14
        assert not report.beliefs
        return report.to_json(), report.per_request(), report.picks, report.missed

    assert serve(True) == serve(False)
