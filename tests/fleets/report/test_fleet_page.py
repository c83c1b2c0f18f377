"""The data that a fleet page shows, taken from a report."""

import json

import pytest

from pytest_kvmock import EngineProfile, Fleet, MockEngine, MockEngineArgs, Removed, RouterHarness, replay
from pytest_kvmock.fleets import DynamoRouter, FleetRequest, MostCached, Objectives, RoundRobin, synthetic_trace
from pytest_kvmock.fleets.report import page_data
from pytest_kvmock.fleets.report.page_data import fleet_data
from pytest_kvmock.fleets.report.routing_figures import got_nothing
from pytest_kvmock.oracle import RadixIndex

ARGS = MockEngineArgs(num_gpu_blocks=96, block_size=4, max_num_batched_tokens=32)
TRACE = [
    *synthetic_trace(
        40,
        seed=3,
        block_size=4,
        input_tokens=(4, 24),
        output_tokens=(1, 12),
        groups=3,
        prefix_blocks=(3, 3),
        interval_ms=10,
    )
]
EVIL = "<img src=x onerror=alert(1)>"


class Deaf(RadixIndex):
    """A router that ignores Removed."""

    def apply(self, event):
        if not isinstance(event.event.data, Removed):
            super().apply(event)


def report(router=None, args=ARGS, trace=None, **options):
    engines = [MockEngine(args, seed=at) for at in range(2)]
    trace = TRACE if trace is None else trace
    return Fleet(engines, router, **options).run(trace)


def data_of(path):
    return json.loads(path.read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0])


def test_a_fleet_page_has_one_row_per_request(tmp_path):
    found = report(record=True)
    found.to_html(tmp_path / "fleet.html")
    data = data_of(tmp_path / "fleet.html")
    requests = data["requests"]
    assert {len(found.run.served)} == {len(column) for column in requests.values()}
    for row, each in enumerate(found.run.served):
        first = each.request.token_ms[0] - each.request.arrival_ms
        stretches = [requests[name][row] for name in ("router_ms", "engine_ms", "prefill_ms")]
        assert pytest.approx(first, abs=0.2) == sum(stretches)
        assert found.picks[requests["pick"][row]].number == each.number
    assert data["workers"] == ["0", "1"]
    assert [row["worker"] for row in data["figures"]] == ["all", "0", "1"]
    assert found.figure("ttft_p95") == data["figures"][0]["ttft_p95"]
    assert "DynamoRouter on" in data["title"]


def test_the_picks_with_regret_show_the_costs_of_all_candidates():
    found = report(RoundRobin(), record=True)
    data = fleet_data(found)
    regret = found.regret(DynamoRouter())
    assert {str(each.at) for each in regret.picks} <= set(data["picks"])
    assert data["regret_by"] == "DynamoRouter"
    pick = data["picks"][str(regret.worst.at)]
    costs = {each["worker"]: each["cost"] for each in pick["candidates"]}
    assert pytest.approx(regret.worst.blocks, abs=0.01) == costs[pick["chosen"]] - min(costs.values())


def test_the_page_and_assert_balanced_name_the_same_busiest_worker():
    """One worker crashes early, so by plain sums each other worker did more than the mean."""
    engines = [MockEngine(ARGS, seed=at) for at in range(3)]
    fleet = Fleet(engines, RoundRobin())
    fleet.at(60).crash(1)
    found = fleet.run(TRACE)
    lead = fleet_data(found)["most_work"]
    assert found.figure("balance_prompt_tokens") == lead["times"] < 1.25
    assert lead["is_even"]
    with pytest.raises(AssertionError, match=f"worker {lead['worker']} has "):
        found.assert_balanced(1.0, of="prompt_tokens")


def test_an_overloaded_worker_is_named_unless_it_is_the_only_one():
    class Hot(RoundRobin):
        def pick(self, request, candidates):
            return 1 if request.number % 4 else super().pick(request, candidates)

    lead = fleet_data(report(Hot()))["most_work"]
    assert (lead["worker"], lead["is_even"]) == ("1", False)
    alone = Fleet([MockEngine(ARGS)], RoundRobin()).run(TRACE)
    assert fleet_data(alone)["most_work"] is None


def test_workers_without_requests_are_named_first():
    class First(RoundRobin):
        def pick(self, request, candidates):
            return 0

    found = Fleet([MockEngine(ARGS) for _ in range(4)], First()).run(TRACE)
    assert fleet_data(found)["got_nothing"] == "workers 1 to 3 got none of 40 requests"
    text = (
        "^workers 1 to 3 got none of 40 requests; worker 0 has 4.00 times the mean of requests, must be at most 2 times"
    )
    with pytest.raises(AssertionError, match=text):
        found.assert_balanced()
    assert fleet_data(report())["got_nothing"] == ""


@pytest.mark.parametrize(
    ("counts", "there", "text"),
    [
        ({0: 9, 1: 0}, None, "worker 1 got none of 9 pears"),
        ({0: 0, 1: 9, 2: 0}, None, "workers 0 and 2 got none of 9 pears"),
        ({0: 0, 1: 9, 2: 0, 4: 0}, None, "workers 0, 2 and 4 got none of 9 pears"),
        ({(0, 0): 9, (0, 1): 0, (1, 0): 0, (1, 1): 0}, None, "workers (0, 1), (1, 0) and (1, 1) got none of 9 pears"),
        ({0: 2, 1: 0, 2: 0}, None, ""),  # two workers there cannot account for three
        ({0: 9, 1: 0}, {0: 1.0, 1: 0.1}, ""),  # it joined late
        ({0: 0, 1: 0}, None, ""),
        ({}, None, ""),
    ],
)
def test_only_a_worker_whose_share_was_at_least_one_is_named_as_empty(counts, there, text):
    assert got_nothing("pears", counts, there) == text


def test_a_page_without_a_record_notes_the_missing_data():
    data = fleet_data(report())
    assert data["samples"] is None
    assert data["picks"] == {}
    assert data["regret_by"] == "blocks of overlap"
    assert any("record=True" in note for note in data["notes"])


def test_each_worker_has_its_own_samples_on_the_page():
    found = report(record=True)
    samples = fleet_data(found)["samples"]
    assert [found.run.recorder.samples["position"].count(at) for at in range(2)] == [
        len(each["ms"]) for each in samples
    ]


def test_a_page_notes_that_its_data_was_thinned(monkeypatch):
    monkeypatch.setattr(page_data, "MOST_POINTS", 5)
    monkeypatch.setattr(page_data, "MOST_REQUESTS", 10)
    monkeypatch.setattr(page_data, "MOST_PICKS", 2)
    data = fleet_data(report(RoundRobin(), record=True))
    assert len(data["requests"]["number"]) == 10
    assert len(data["picks"]) == 2
    assert [len(each["ms"]) for each in data["samples"]] == [5, 5]
    assert "10 of 40 requests" in " ".join(data["notes"])
    assert "at most 5 of" in " ".join(data["notes"])
    assert "2 picks of most regret" in " ".join(data["notes"])


def test_a_page_can_be_compared_with_reports_and_their_json(tmp_path):
    found, other = report(), report(RoundRobin())
    found.to_html(tmp_path / "a.html", compare=[other, other.to_json()])
    names = [each["name"] for each in data_of(tmp_path / "a.html")["reports"]]
    assert names == ["DynamoRouter", "RoundRobin", "RoundRobin"]
    _, live, read = data_of(tmp_path / "a.html")["reports"]
    for what in ("ttft", "tpot", "e2e"):
        at = dict(map(tuple, live["curves"][what]))
        assert {share for share, _ in read["curves"][what]} == {0.0, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0}
        for share, ms in read["curves"][what]:
            assert pytest.approx(ms, abs=0.01) == at[share]
    assert pytest.approx(read["throughput"], rel=1e-3) == live["throughput"]
    assert len(fleet_data(found, compare=other)["reports"]) == 2


@pytest.mark.parametrize("other", [3, {}, [None]])
def test_only_reports_can_be_compared_on_a_page(tmp_path, other):
    with pytest.raises(TypeError, match="must be a Report"):
        report().to_html(tmp_path / "a.html", compare=other)
    assert [*tmp_path.iterdir()] == []


def test_a_page_shows_latency_distributions_and_the_objectives_of_the_fleet():
    found = report(slo=Objectives(ttft_ms=30, e2e_ms=200))
    data = fleet_data(found)
    assert data["slo"] == {"ttft": 30, "e2e": 200}
    curves = data["reports"][0]["curves"]
    for what in ("ttft", "tpot", "e2e"):
        points = dict(map(tuple, curves[what]))
        assert pytest.approx(found.figure(f"{what}_p95"), abs=0.01) == points[0.95]
    assert fleet_data(report())["slo"] == {}


def test_a_run_without_a_router_has_a_page():
    data = fleet_data(replay(TRACE, [MockEngine(ARGS) for _ in range(2)]))
    assert (data["router"], data["workers"]) == ("no router", ["0", "1"])
    assert len(data["requests"]["number"]) == 40


def test_an_invalid_selector_of_a_page_is_refused(tmp_path):
    with pytest.raises(TypeError, match="it must be an object"):
        report().to_html(tmp_path / "a.html", selector=DynamoRouter)


@pytest.mark.parametrize("record", [False, True])
def test_a_report_without_requests_makes_a_page_with_that_message(tmp_path, record):
    found = report(stop_ms=0, record=record)
    found.to_html(tmp_path / "empty.html")
    data = data_of(tmp_path / "empty.html")
    assert "This report has no requests." in data["notes"]
    assert data["requests"]["number"] == []


def test_writing_a_page_to_a_missing_directory_raises_an_os_error(tmp_path):
    with pytest.raises(OSError, match="none"):
        report().to_html(tmp_path / "none" / "a.html")


def test_markup_in_names_of_a_fleet_page_is_escaped(tmp_path):
    router = type(EVIL, (MostCached,), {})()
    trace = [FleetRequest([*range(32)], 2, timestamp=0.0, session_id=EVIL)]
    found = report(router, trace=trace)
    found.to_html(tmp_path / "a.html", title=f"of {EVIL}")
    assert "<img" not in (tmp_path / "a.html").read_text(encoding="utf-8")
    data = data_of(tmp_path / "a.html")
    assert (data["router"], data["requests"]["session"]) == (EVIL, [EVIL])


def test_incidents_are_marks_on_the_page():
    engines = [MockEngine(ARGS, seed=at) for at in range(2)]
    fleet = Fleet(engines)
    fleet.at(100.0).crash(1)
    data = fleet_data(fleet.run(TRACE))
    marks = data["marks"]
    assert 100.0 == data["there"][1][1] < data["there"][0][1]
    assert [(each["ms"], each["kind"], each["worker"]) for each in marks] == [(100.0, "crash", "1")]


def test_a_preempted_request_shows_the_time_of_its_preemptions():
    found = report(
        args=MockEngineArgs(block_size=16, num_gpu_blocks=14),
        trace=[FleetRequest([*range(at * 100, at * 100 + 48)], 60, timestamp=0.0) for at in range(8)],
    )
    assert found.figure("preemptions")
    requests = fleet_data(found)["requests"]
    stops = [each for each in requests["preempted"] if each]
    assert found.figure("preemptions") == sum(map(len, stops))
    assert all(start >= 0 and took >= 0 for each in stops for start, took in each)


def test_faults_and_event_errors_are_marks_on_the_page(monkeypatch):
    def run():
        kv = RouterHarness(EngineProfile(block_size=4, num_blocks=96, workers=2), backend="lru", name="marks")
        kv.faults.lose(3, kind="stored")
        fleet = kv.fleet(workers=2)
        found = fleet.run(TRACE)
        assert found is fleet.report is kv.fleets[0].report
        return found

    data = fleet_data(run())
    faults = [each for each in data["marks"] if each["kind"] == "fault lose"]
    assert len(faults) == 3
    assert all(each["text"].startswith("lose, event ") and each["ms"] >= 0 for each in faults)
    assert sorted(data["marks"], key=lambda each: each["ms"]) == data["marks"]
    monkeypatch.setattr(page_data, "MOST_MARKS", 2)
    data = fleet_data(run())
    assert len(data["marks"]) == 2
    assert any("the first 2 are marked" in note for note in data["notes"])


def test_event_problems_are_marks_with_their_time():
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=96, workers=2), backend="lru", index=Deaf())
    marks = fleet_data(kv.fleet(workers=2).run(TRACE))["marks"]
    assert "index_drift" in {each["kind"] for each in marks}
