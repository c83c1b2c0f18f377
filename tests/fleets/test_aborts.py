"""Aborted requests of a fleet: wherever they are, the router is notified once, and they leave no entry or block."""

from collections import Counter

import pytest
from depth import examples, worth_its_time
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import planned

from pytest_kvmock import EngineProfile, Fleet, MockEngine, MockEngineArgs, RouterHarness
from pytest_kvmock.fleets import DynamoRouter, FleetRequest, Objectives, RouterError, synthetic_trace
from pytest_kvmock.testing import RightRouter

SIZE = 4


class Told(RightRouter):
    """A correct router that records its hooks and can let requests wait."""

    def __init__(self, workers=2, most=None, **options):
        super().__init__(range(workers) if isinstance(workers, int) else workers, **options)
        self.told = []
        self.asked = []
        self.most = most

    def pick(self, request, candidates):
        self.asked.append((request.number, request.now_ms))
        if self.most is not None and sum(load.requests for load in self.book.loads.values()) >= self.most:
            return None
        return super().pick(request, candidates)

    def dispatched(self, request, worker):
        self.told.append(("dispatched", request.number, request.status))
        super().dispatched(request, worker)

    def first_token(self, request):
        self.told.append(("first_token", request.number, request.status))
        super().first_token(request)

    def finished(self, request):
        self.told.append(("finished", request.number, request.status))
        super().finished(request)

    def withdrawn(self, request):
        self.told.append(("withdrawn", request.number, request.status))

    def of(self, number):
        return [(hook, status) for hook, at, status in self.told if at == number]


def engines(count=2, backend="vllm", blocks=400, **options):
    kind = "sglang" if "sglang" in backend else "vllm"
    args = MockEngineArgs(engine_type=kind, num_gpu_blocks=blocks, block_size=SIZE, **options)
    return [MockEngine(args, backend=backend) for _ in range(count)]


def requests(count=6, output=20, length=40, apart=10.0, **of_one):
    """Return requests with distinct prompts; `of_one` has further fields of single requests, by "_number"."""
    fields = {int(name[1:]): value for name, value in of_one.items()}
    return [
        FleetRequest(range(1000 * at, 1000 * at + length), output, apart * at, **fields.get(at, {}))
        for at in range(count)
    ]


def check_told(router, report):
    """Assert one `finished` for each `dispatched`, none without, no hook after it, and empty load books."""
    open_now = set()
    over = set()
    for hook, number, status in router.told:
        assert number not in over, f"{hook} of request {number}, which is over"
        if hook == "dispatched":
            assert number not in open_now
            open_now.add(number)
        elif hook == "first_token":
            assert number in open_now
        elif hook == "finished":
            open_now.remove(number)
            if status != "lost":
                over.add(number)
        else:
            assert (hook, status) == ("withdrawn", "aborted")
            assert number not in open_now
            over.add(number)
    assert not open_now
    assert set(router.loads().values()) == {(0, 0, 0)}
    assert not report.beliefs


# ------------------------------------------------------------------------------------------------ where it may strike


def test_a_request_aborted_in_the_queue_of_its_engine_gets_no_token():
    router = Told()
    report = Fleet(engines(max_num_seqs=1), router).run(requests(apart=1.0, _4={"abort_after_ms": 30}))
    assert router.of(4) == [("dispatched", "running"), ("finished", "aborted")]
    assert (
        report.requests[4].status,
        report.requests[4].generated_tokens,
        report.requests[4].computed_tokens,
    ) == ("aborted", 0, 0)
    assert (report.aborted, len(report.completed), report.arrived) == (1, 5, 6)
    check_told(router, report)


def test_a_request_aborted_between_prefill_chunks_gets_no_token():
    router = Told()
    fleet = Fleet(engines(max_num_batched_tokens=16), router)
    report = fleet.run(requests(2, length=200, _1={"abort_after_ms": 40}))
    gone = report.requests[1]
    assert (gone.status, gone.generated_tokens) == ("aborted", 0)
    assert 0 < gone.computed_tokens < 200
    assert router.of(1) == [("dispatched", "running"), ("finished", "aborted")]
    check_told(router, report)


def test_a_request_aborted_in_decode_gets_no_token_of_the_current_pass():
    router = Told(1)
    fleet = planned(Fleet(engines(1), router), plans=False)
    fleet.at(100.0).abort(0)
    report = fleet.run(requests(1, output=50))
    gone = report.requests[0]
    assert router.of(0) == [("dispatched", "running"), ("first_token", "running"), ("finished", "aborted")]
    assert gone.token_ms[-1] <= 100 < gone.ended_ms
    check_told(router, report)


def test_an_abort_during_prefill_drops_the_first_token_and_its_hook():
    router = Told(1)
    report = Fleet(engines(1), router).run(requests(1, _0={"abort_after_ms": 1}))
    assert router.of(0) == [("dispatched", "running"), ("finished", "aborted")]
    assert (
        report.requests[0].status,
        report.requests[0].token_ms,
        report.requests[0].computed_tokens,
    ) == ("aborted", [], 40)


def test_an_abort_drops_the_last_token_of_the_current_pass():
    router = Told(1)
    report = Fleet(engines(1), router).run(requests(1, output=1, _0={"abort_after_ms": 1}))
    assert router.of(0) == [("dispatched", "running"), ("finished", "aborted")]
    assert (report.requests[0].status, report.requests[0].generated_tokens, report.aborted) == ("aborted", 0, 1)


def test_abort_after_tokens_aborts_a_request_after_n_tokens():
    router = Told()
    report = Fleet(engines(), router).run(requests(_0={"abort_after_tokens": 1}, _3={"abort_after_tokens": 7}))
    assert [report.requests[at].generated_tokens for at in (0, 3)] == [1, 7]
    assert router.of(0) == [("dispatched", "running"), ("first_token", "running"), ("finished", "aborted")]
    check_told(router, report)


def test_a_request_aborted_in_the_router_queue_is_withdrawn():
    router = Told(most=1)
    fleet = Fleet(engines(), router)
    fleet.at(60.0).abort(2)
    report = fleet.run(requests(4))
    assert router.of(2) == [("withdrawn", "aborted")]
    assert [ms for number, ms in router.asked if number == 2 and ms > 60] == []
    assert (report.aborted, len(report.completed), len(report.requests), report.arrived) == (1, 3, 3, 4)
    check_told(router, report)


def test_a_withdrawn_request_is_no_longer_offered_to_next_waiting():
    offered = []

    class Ordered(Told):
        def next_waiting(self, waiting):
            offered.append(([each.number for each in waiting], ("withdrawn", 2, "aborted") in self.told))
            return waiting[0]

    router = Ordered(most=1)
    fleet = Fleet(engines(), router)
    fleet.at(250.0).abort(2)
    fleet.run(requests(4))
    before, after = ([numbers for numbers, is_gone in offered if is_gone == wanted] for wanted in (False, True))
    assert [2, 3] in before
    assert after == [[3]] * len(after) != []


def test_a_request_behind_an_aborted_one_is_picked_even_if_nothing_runs():
    class Never(Told):
        def pick(self, request, candidates):
            return None if request.number == 0 else super().pick(request, candidates)

        def next_waiting(self, waiting):
            return waiting[0] if waiting[0].number else None

    router = Never()
    fleet = Fleet(engines(), router)
    fleet.at(500.0).abort(0)
    report = fleet.run(requests(3))
    assert (report.aborted, len(report.completed)) == (1, 2)
    assert router.of(0) == [("withdrawn", "aborted")]


def test_a_router_without_a_withdrawn_hook_sees_the_abort_in_the_request_status():
    seen = []

    class Silent(RightRouter):
        def pick(self, request, candidates):
            seen.append(request)
            return None if request.number == 0 else super().pick(request, candidates)

    fleet = Fleet(engines(), Silent(range(2)))
    fleet.at(500.0).abort(0)
    report = fleet.run(requests(1))
    assert (seen[0].status, report.aborted, tuple(report.beliefs)) == ("aborted", 1, ())


def test_a_lost_request_that_waits_is_withdrawn_and_not_finished_again():
    class Reluctant(Told):
        def pick(self, request, candidates):
            return None if request.attempt > 1 else super().pick(request, candidates)

    router = Reluctant()
    fleet = Fleet(engines(), router)
    fleet.at(100.0).crash(0)
    for number in range(6):
        fleet.at(400.0).abort(number)
    report = fleet.run(requests(6, output=30))
    lost = [number for number in range(6) if ("finished", "lost") in router.of(number)]
    assert lost
    for number in lost:
        assert router.of(number)[-2:] == [("finished", "lost"), ("withdrawn", "aborted")]
        assert report.requests[number].status == "aborted"
    check_told(router, report)


def test_an_aborted_request_on_a_crashed_engine_is_not_sent_again():
    router = Told()
    fleet = Fleet(engines(), router)
    fleet.at(100.0).abort(0)
    fleet.at(101.0).crash(router_worker := 0)
    fleet.at(100.0).abort(1)
    report = fleet.run(requests(2, output=200))
    gone = [number for number in (0, 1) if report.picks[number].worker == router_worker]
    assert gone
    for number in gone:
        assert router.of(number) == [("dispatched", "running"), ("first_token", "running"), ("finished", "aborted")]
    assert (report.aborted, len(report.picks)) == (2, 2)
    check_told(router, report)


@pytest.mark.parametrize("backend", ["sglang", "mocker_sglang_1_6"])
def test_sglang_engines_of_a_fleet_end_an_aborted_request_as_alone(backend):
    router = Told()
    report = Fleet(engines(backend=backend), router).run(requests(_2={"abort_after_tokens": 5}))
    assert 5 + (backend == "sglang") == report.requests[2].generated_tokens
    check_told(router, report)


def test_a_listener_of_an_engine_can_abort_a_request():
    router = Told()
    fleet = Fleet(made := engines(), router)
    made[0].on_pass(lambda done: [each.abort() for each in done.generated if len(each.token_ms) == 3 and each.is_open])
    report = fleet.run(requests())
    assert {each.status for each in report.requests} == {"aborted", "finished"}
    assert {each.generated_tokens for each in report.requests if each.status == "aborted"} == {3}
    check_told(router, report)
    assert [each.inside.on_abort for each in made] == [None, None]


def test_a_router_can_abort_a_request_in_a_hook():
    class Impatient(Told):
        def first_token(self, request):
            super().first_token(request)
            if request.number == 1:
                fleet.at(request.now_ms).abort(request)

    router = Impatient()
    fleet = Fleet(engines(), router)
    report = fleet.run(requests())
    assert (report.requests[1].status, report.requests[1].generated_tokens) == ("aborted", 1)
    check_told(router, report)


def test_a_planned_abort_after_stop_ms_is_missed():
    class Never(Told):
        def pick(self, request, candidates):
            return None

    router = Never()
    report = Fleet(engines(), router, stop_ms=200.0).run(requests(1, _0={"abort_after_ms": 300}))
    assert (report.aborted, router.told, [each.number for each in report.missed]) == (0, [], [0])


# ------------------------------------------------------------------------------------------- what comes after it


def test_the_next_turn_of_a_session_follows_an_aborted_turn():
    rows = [
        FleetRequest(range(40), 50, 0.0, "one", abort_after_ms=100),
        FleetRequest(range(60), 4, None, "one", 25.0),
    ]
    report = Fleet(engines(), Told()).run(rows)
    first, second = report.requests
    assert (first.status, second.status) == ("aborted", "finished")
    assert first.ended_ms + 25 == second.arrival_ms


@pytest.mark.parametrize("backend", ["lineage", "vllm"])
def test_an_aborted_request_frees_its_place_in_a_closed_loop(backend):
    rows = requests(3, output=50, _0={"abort_after_ms": 100})
    report = Fleet(engines(backend=backend), Told(), concurrency=1).run(rows)
    assert [each.status for each in report.requests] == ["aborted", "finished", "finished"]
    assert report.requests[0].ended_ms == report.requests[1].arrival_ms


@pytest.mark.parametrize("concurrency", [None, 1])
def test_retry_after_ms_submits_a_new_request_after_an_abort(concurrency):
    rows = [
        FleetRequest(range(40), 30, 0.0, "one", abort_after_tokens=2, retry_after_ms=70.0),
        FleetRequest(range(60), 4, None, "one", 25.0),
    ]
    router = Told()
    report = Fleet(engines(), router, concurrency=concurrency).run(rows)
    first, again, second = report.requests
    assert [each.status for each in report.requests] == ["aborted", "finished", "finished"]
    assert tuple(each.generated_tokens for each in report.requests) == (2, 30, 4)
    assert first.ended_ms + 70 == again.arrival_ms
    assert again.ended_ms + 25 == pytest.approx(second.arrival_ms)
    assert (report.arrived, report.aborted, list(report.run.numbers)) == (3, 1, [0, 1, 2])
    check_told(router, report)


# ------------------------------------------------------------------------------------------------------ the report


def test_an_aborted_request_counts_for_its_worker_but_not_as_completed():
    rows = requests(8, _1={"abort_after_tokens": 2}, _5={"abort_after_ms": 1})
    report = Fleet(engines(), Told(), slo=Objectives(ttft_ms=1e6)).run(rows)
    assert (
        report.aborted,
        report.figure("aborted"),
        report.figure("requests"),
        sum(report.run.counts("requests")[0].values()),
    ) == (2, 2, 8, 8)
    assert (report.figure("completed"), len(report.run.values("ttft")), report.figure("goodput")) == (6, 6, 1.0)
    assert sum(report.figure("aborted", worker) for worker in report.workers) == 2
    report.assert_slo(ttft_ms=1e6, at=1.0)
    assert "2 of 8 requests were called off" in str(report)
    assert report.to_json()["fleet"]["aborted"] == 2
    assert "aborted" not in Fleet(engines(), Told()).run(requests()).to_json()["fleet"]
    with pytest.raises(AssertionError, match=r"^0 of 6 requests \(0.0%\) keep ttft_ms=0, must be 95.0%"):
        report.assert_slo(ttft_ms=0)


def test_blocks_of_an_aborted_request_count_for_the_ideal_hit_ratio():
    rows = [
        FleetRequest(range(40), 20, 0.0, abort_after_ms=1.0),
        FleetRequest(range(41), 4, 400.0),
    ]
    report = Fleet(engines(1), Told(1)).run(rows)
    assert pytest.approx(report.figure("ideal_hit_ratio")) == 40 / 41
    assert report.figure("hit_ratio")


def test_assert_balanced_notes_the_aborted_requests_of_a_worker():
    class First(Told):
        def pick(self, _request, candidates):
            return candidates[0].worker

    report = Fleet(engines(), First()).run(requests(8, _1={"abort_after_tokens": 2}, _2={"abort_after_tokens": 2}))
    with pytest.raises(
        AssertionError, match=r"(?s)worker 0 has 2.00 times the mean of requests.*\n2 of its requests were called off\n"
    ):
        report.assert_balanced()


def test_aborts_that_did_not_happen_are_reported_as_missed():
    fleet = Fleet(engines(), Told())
    fleet.at(5.0).abort(3)  # the request arrives later
    fleet.at(7.0).abort(77)
    fleet.at(1e6).abort(0)
    rows = requests(4, output=6, _1={"abort_after_tokens": 6}, _2={"abort_after_ms": 5e5, "abort_after_tokens": 2})
    report = fleet.run(rows)
    assert report.aborted == 1
    assert [(each.kind, each.number) for each in report.missed] == [
        ("abort", 3),
        ("abort", 77),
        ("abort", 1),
        ("abort", 0),
    ]
    first = "request 3 was not called off at 5 ms: it was over by then, or had not arrived"
    assert f"4 aborts did not happen; the first: {first}" in str(report).splitlines()
    assert report.figure("duration_ms") < 1e4


def test_an_abort_is_missed_if_sglang_ends_the_request_first():
    router = Told()
    report = Fleet(engines(backend="sglang"), router).run(requests(1, output=1, _0={"abort_after_ms": 1}))
    assert (report.aborted, [each.number for each in report.missed], report.requests[0].status) == (0, [0], "finished")
    check_told(router, report)


def test_assert_slo_is_refused_if_all_requests_were_aborted():
    report = Fleet(engines(), Told()).abort_share(1.0, within_ms=1.0).run(requests(4, output=1))
    assert report.aborted == 4
    with pytest.raises(ValueError, match=r"^assert_slo: all 4 requests were called off: there was nothing to judge$"):
        report.assert_slo(ttft_ms=1e6)


def test_planned_aborts_change_the_trace_digest():
    digests = [
        Fleet(engines(), Told()).run(requests(_0=fields)).run.trace_digest
        for fields in ({}, {"abort_after_ms": 5e5}, {"abort_after_tokens": 5})
    ]
    assert len(set(digests)) == 3


def test_a_page_can_be_made_of_a_run_with_aborts(tmp_path):
    rows = requests(12, apart=3.0, _3={"abort_after_ms": 1}, _5={"abort_after_tokens": 2}, _9={"abort_after_ms": 1})
    report = Fleet(engines(), Told(most=6), record=True).run(rows)
    assert (report.aborted, report.run.facts.withdrawn) == (3, 1)
    report.to_html(tmp_path / "page.html")
    assert "3 of 12 requests were called off" in str(report)
    assert [row.request.status for row in report.run.served if row.request.status != "finished"] == ["aborted"] * 2


def test_planned_aborts_apply_to_one_run():
    fleet = Fleet(engines(), Told())
    fleet.at(100.0).abort(0)
    assert (fleet.run(requests(output=50)).aborted, fleet.run(requests(output=50)).aborted) == (1, 0)


# ------------------------------------------------------------------------------------------------------------ a share


def test_abort_share_aborts_a_reproducible_share_of_any_trace():
    trace = list(
        synthetic_trace(
            150, seed=3, block_size=SIZE, input_tokens=(1, 60), output_tokens=(2, 40), interval_ms=20, turns=(1, 3)
        )
    )
    found = []
    for seed in (1, 1, 2):
        router = Told()
        report = Fleet(engines(), router).abort_share(0.3, seed=seed).run(trace)
        check_told(router, report)
        found.append([each.status for each in report.requests])
        planned = report.aborted + len(report.missed)
        assert 30 < planned < 60
        assert report.aborted > 20
        tokens = Counter(each.generated_tokens > 0 for each in report.requests if each.status == "aborted")
        assert set(tokens) == {True, False}
    assert found[0] == found[1] != found[2]
    assert Fleet(engines(), Told()).abort_share(0).run(trace).aborted == 0


def test_abort_share_does_not_change_requests_with_their_own_abort():
    rows = requests(20, _3={"abort_after_tokens": 5})
    report = Fleet(engines(), Told()).abort_share(1.0, within_ms=0).run(rows)
    assert (report.aborted, report.requests[3].generated_tokens) == (20, 5)


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda fleet: fleet.at(5).abort(-1),
            "Fleet.at(5).abort: a request is named by its number, which must be an integer of at least 0, got -1",
        ),
        (
            lambda fleet: fleet.at(5).abort("first"),
            "Fleet.at(5).abort: a request is named by its number, which must be an integer of at least 0, got 'first'",
        ),
        (
            lambda fleet: fleet.at(-5).abort(1),
            "Fleet.at: ms must be a finite number of at least 0 (milliseconds), got -5",
        ),
        (
            lambda fleet: fleet.at(float("nan")).abort(1),
            "Fleet.at: ms must be a finite number of at least 0 (milliseconds), got nan",
        ),
        (lambda fleet: fleet.abort_share(1.5), "abort_share: share must be a finite number from 0 to 1, got 1.5"),
        (lambda fleet: fleet.abort_share(-0.1), "abort_share: share must be a finite number from 0 to 1, got -0.1"),
        (lambda fleet: fleet.abort_share("half"), "abort_share: share must be a finite number from 0 to 1, got 'half'"),
        (lambda fleet: fleet.abort_share(0.5, seed=-1), "abort_share: seed must be an integer of at least 0, got -1"),
        (
            lambda fleet: fleet.abort_share(0.5, within_ms=-1),
            "abort_share: within_ms must be a finite number of at least 0 (milliseconds), got -1",
        ),
        (
            lambda fleet: fleet.run(requests(2, _1={"abort_after_ms": -3})),
            "Fleet: requests[1]: abort_after_ms must be a finite number of at least 0 (milliseconds), or None, got -3",
        ),
        (
            lambda fleet: fleet.run(requests(2, _1={"abort_after_tokens": 0.5})),
            "Fleet: requests[1]: abort_after_tokens must be an integer of at least 0 (tokens), or None, got 0.5",
        ),
        (
            lambda fleet: fleet.run(requests(2, _1={"retry_after_ms": float("inf")})),
            "Fleet: requests[1]: retry_after_ms must be a finite number of at least 0 (milliseconds), or None, got inf",
        ),
    ],
)
def test_invalid_aborts_are_refused_in_one_line_and_change_nothing(call, message):
    fleet = Fleet(engines(), Told())
    with pytest.raises(ValueError) as raised:
        call(fleet)
    assert str(raised.value) == message
    report = fleet.run(requests(2))
    assert (report.aborted, report.missed, len(report.completed)) == (0, (), 2)


def test_a_request_of_another_run_is_refused():
    seen = []

    class Keeps(Told):
        def pick(self, request, candidates):
            seen.append(request)
            return super().pick(request, candidates)

    fleet = Fleet(engines(), Keeps())
    fleet.run(requests(1))
    with pytest.raises(
        ValueError,
        match=r"^Fleet.at\(5\).abort: <request 0 of .*> is not a request of the run under way; give its number$",
    ):
        fleet.at(5).abort(seen[0])


# ----------------------------------------------------------------------------------------------- however it is computed


@st.composite
def worlds(draw):
    count = draw(st.integers(1, 14))
    backend = draw(
        st.sampled_from(["lineage", "vllm", "vllm_gpt_oss", "sglang", "mocker_sglang_1_6", "sglang_qwen3_next"])
    )
    size = 16 if "_" in backend and backend != "mocker_sglang_1_6" else SIZE
    rows = []
    for at in range(count):
        start = 1000 * draw(st.integers(0, 4))
        rows.append(
            FleetRequest(
                range(start, start + draw(st.integers(1, 60))),
                draw(st.integers(1, 30)),
                float(draw(st.integers(0, 200))),
                session_id=draw(st.sampled_from([None, None, f"s{at % 3}"])),
                delay=None,
                abort_after_ms=draw(st.none() | st.integers(0, 300)),
                abort_after_tokens=draw(st.none() | st.integers(0, 25)),
                retry_after_ms=draw(st.none() | st.integers(0, 50)),
            )
        )
    rows.sort(key=lambda each: each.timestamp)
    return {
        "backend": backend,
        "size": size,
        "rows": rows,
        "most": draw(st.none() | st.integers(1, 3)),
        "concurrency": draw(st.none() | st.integers(1, 4)),
        "seqs": draw(st.sampled_from([1, 2, 64])),
        "budget": draw(st.sampled_from([32, 2048])),
        "crash": draw(st.none() | st.integers(0, 400)),
        "restart": draw(st.none() | st.integers(0, 400)),
        "aborts": draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 14)), max_size=4)),
        "ranks": draw(st.sampled_from([1, 1, 2])),
    }


def run_world(world, *, plans):
    ranks, backend = world["ranks"], world["backend"]
    kind = "sglang" if "sglang" in backend else "vllm"
    options = {"dp_size": ranks, "max_num_seqs": world["seqs"]}
    if kind == "vllm":
        options["max_num_batched_tokens"] = world["budget"]
    names = list(range(3)) if ranks == 1 else [(at, rank) for at in range(3) for rank in range(ranks)]
    args = MockEngineArgs(engine_type=kind, num_gpu_blocks=600, block_size=world["size"], **options)
    made = [MockEngine(args, backend=backend) for _ in names]
    router = Told(names, world["most"], copies=backend.startswith("vllm"))
    fleet = planned(Fleet(made, router, concurrency=world["concurrency"]), plans=plans)
    if world["crash"] is not None:
        fleet.at(world["crash"]).crash(0)
    if world["restart"] is not None:
        fleet.at(world["restart"]).restart(1)
    for ms, number in world["aborts"]:
        fleet.at(ms).abort(number)
    report = fleet.run(world["rows"])
    check_told(router, report)
    assert report.arrived == len(report.completed) + report.aborted
    assert {each.metrics.active_blocks for each in fleet.engines.values()} == {0}
    assert not any(each.worker.requests for each in fleet.engines.values())
    served = [(each.status, each.generated_tokens, each.token_ms, each.ended_ms) for each in report.requests]
    return router.told, router.asked, served, report.missed, report.to_json()


@worth_its_time
@given(worlds())
@settings(max_examples=examples(600), deadline=None)
def test_runs_with_aborts_are_the_same_with_and_without_plans(world):
    assert run_world(world, plans=True) == run_world(world, plans=False)


# ------------------------------------------------------------------------------------------------------ in a harness


@pytest.mark.parametrize("backend", ["lineage", "vllm", "sglang", "mocker_sglang_1_6", "vllm_gpt_oss"])
def test_a_reproduction_replays_aborts(backend):
    size = 16
    with RouterHarness(EngineProfile(block_size=size, num_blocks=400, workers=2), backend) as kv:
        fleet = kv.fleet(Told(copies=backend == "vllm"))
        fleet.at(90.0).abort(0)
        report = fleet.run(
            [
                FleetRequest(
                    range(1000 * at, 1000 * at + 3 * size), 40, 10.0 * at, abort_after_tokens=20 if at == 1 else None
                )
                for at in range(4)
            ]
        )
        assert (report.aborted, report.run.event_errors) == (2, [])
        events = [str(each.event) for each in kv.events]
        operations = [step for step, _ in kv.recording.recorded()]
    assert sorted({type(step).__name__ for step in operations}) == ["Abort", "RunPasses", "Submit"]
    with RouterHarness(EngineProfile(block_size=size, num_blocks=400, workers=2), backend) as kv:
        from pytest_kvmock.values.programs.forms import Doer

        doer = Doer(kv)
        for step in operations:
            step.do(doer)
        assert sorted(events) == sorted(str(each.event) for each in kv.events)


def test_a_router_that_leaks_aborted_requests_is_reported():
    class Leaks(Told):
        def finished(self, request):
            if request.status != "aborted":
                super().finished(request)

    report = Fleet(engines(), Leaks()).run(requests(_1={"abort_after_tokens": 2}))
    (belief,) = report.beliefs
    assert belief.rule == "load_drift"
    assert "they differ since finished(request 1)" in belief.observed


def test_an_error_in_the_withdrawn_hook_is_a_router_error():
    class Fails(Told):
        def withdrawn(self, request):
            raise KeyError(request.number)

    fleet = Fleet(engines(), Fails(most=1))
    fleet.at(60.0).abort(2)
    with pytest.raises(RouterError, match=r"^Fails.withdrawn\(\) raised KeyError\(2\) .* \(at 60 ms, <request 2"):
        fleet.run(requests(4))


def test_the_dynamo_router_keeps_no_entry_of_aborted_requests():
    router = DynamoRouter("1.6.1", router_queue_threshold=0.1)
    fleet = Fleet(engines(max_num_batched_tokens=64), router).abort_share(0.7, seed=4, within_ms=300)
    report = fleet.run(requests(60, apart=2.0))
    assert report.aborted
    assert report.figure("router_wait_ms")
    kept = {name: len(value) for name, value in vars(router).items() if isinstance(value, dict) and value}
    assert {name: count for name, count in kept.items() if name in ("_best", "_sent")} == {}
