"""What the page of a fleet shows: its data, from a report."""

import json

import pytest

from pytest_kvmock import EngineProfile, Fleet, MockEngine, MockEngineArgs, Removed, RouterHarness, replay
from pytest_kvmock.fleet import FleetRequest
from pytest_kvmock.report import Objectives, page_data
from pytest_kvmock.report.routing_figures import got_nothing
from pytest_kvmock.router import DynamoRouter, MostCached, RadixIndex, RoundRobin
from pytest_kvmock.traces import synthetic_trace

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
    """Hears no Removed."""

    def apply(self, event):
        if not isinstance(event.event.data, Removed):
            super().apply(event)


def report(router=None, args=ARGS, trace=None, **options):
    engines = [MockEngine(args, seed=at) for at in range(2)]
    trace = TRACE if trace is None else trace
    return Fleet(engines, router, **options).run(trace)


def data_of(path):
    return json.loads(path.read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0])


def test_a_page_has_a_row_a_request_and_a_column_a_fact(tmp_path):
    found = report(record=True)
    found.to_html(tmp_path / "fleet.html")
    data = data_of(tmp_path / "fleet.html")
    requests = data["requests"]
    assert {len(found.served)} == {len(column) for column in requests.values()}
    for row, each in enumerate(found.served):
        first = each.request.token_ms[0] - each.request.arrival_ms
        stretches = [requests[name][row] for name in ("router_ms", "engine_ms", "prefill_ms")]
        assert pytest.approx(first, abs=0.2) == sum(stretches)
        assert found.picks[requests["pick"][row]].number == each.number
    assert ["0", "1"] == data["workers"]
    assert ["all", "0", "1"] == [row["worker"] for row in data["figures"]]
    assert found.figure("ttft_p95") == data["figures"][0]["ttft_p95"]
    assert "DynamoRouter on" in data["title"]


def test_regret_is_that_of_the_selector_and_its_picks_have_all_candidates():
    found = report(RoundRobin(), record=True)
    data = found.page_data()
    regret = found.regret(DynamoRouter())
    assert {str(each.at) for each in regret.picks} <= set(data["picks"])
    assert "DynamoRouter" == data["regret_by"]
    pick = data["picks"][str(regret.worst.at)]
    costs = {each["worker"]: each["cost"] for each in pick["candidates"]}
    assert pytest.approx(regret.worst.blocks, abs=0.01) == costs[pick["chosen"]] - min(costs.values())


def test_the_worker_with_most_work_is_the_one_that_the_report_blames():
    """A crash early on: by plain sums each of the others did more than the mean."""
    engines = [MockEngine(ARGS, seed=at) for at in range(3)]
    fleet = Fleet(engines, RoundRobin())
    fleet.at(60).crash(1)
    found = fleet.run(TRACE)
    lead = found.page_data()["most_work"]
    assert found.figure("balance_prompt_tokens") == lead["times"] < 1.25
    assert lead["is_even"]
    with pytest.raises(AssertionError, match=f"worker {lead['worker']} has "):
        found.assert_balanced(1.0, of="prompt_tokens")


def test_one_hot_worker_is_named_and_one_worker_is_not():
    class Hot(RoundRobin):
        def pick(self, request, candidates):
            return 1 if request.number % 4 else super().pick(request, candidates)

    lead = report(Hot()).page_data()["most_work"]
    assert ("1", False) == (lead["worker"], lead["is_even"])
    alone = Fleet([MockEngine(ARGS)], RoundRobin()).run(TRACE)
    assert alone.page_data()["most_work"] is None


def test_who_got_nothing_is_said_first():
    class First(RoundRobin):
        def pick(self, request, candidates):
            return 0

    found = Fleet([MockEngine(ARGS) for _ in range(4)], First()).run(TRACE)
    assert "workers 1 to 3 got none of 40 requests" == found.page_data()["got_nothing"]
    text = (
        "^workers 1 to 3 got none of 40 requests; worker 0 has 4.00 times the mean of requests, must be at most 2 times"
    )
    with pytest.raises(AssertionError, match=text):
        found.assert_balanced()
    assert report().page_data()["got_nothing"] == ""


@pytest.mark.parametrize(
    ("counts", "there", "text"),
    [
        ({0: 9, 1: 0}, None, "worker 1 got none of 9 pears"),
        ({0: 0, 1: 9, 2: 0}, None, "workers 0 and 2 got none of 9 pears"),
        ({0: 0, 1: 9, 2: 0, 4: 0}, None, "workers 0, 2 and 4 got none of 9 pears"),
        ({(0, 0): 9, (0, 1): 0, (1, 0): 0, (1, 1): 0}, None, "workers (0, 1), (1, 0) and (1, 1) got none of 9 pears"),
        ({0: 2, 1: 0, 2: 0}, None, ""),  # two cannot be enough for three
        ({0: 9, 1: 0}, {0: 1.0, 1: 0.1}, ""),  # it came late
        ({0: 0, 1: 0}, None, ""),
        ({}, None, ""),
    ],
)
def test_who_got_nothing_was_due_one_at_least(counts, there, text):
    assert text == got_nothing("pears", counts, there)


def test_without_a_record_it_says_what_is_missing():
    data = report().page_data()
    assert data["samples"] is None
    assert {} == data["picks"]
    assert "blocks of overlap" == data["regret_by"]
    assert any("record=True" in note for note in data["notes"])


def test_samples_are_of_their_worker():
    found = report(record=True)
    samples = found.page_data()["samples"]
    assert [found.recorder.samples["position"].count(at) for at in range(2)] == [len(each["ms"]) for each in samples]


def test_what_is_thinned_is_said(monkeypatch):
    monkeypatch.setattr(page_data, "MOST_POINTS", 5)
    monkeypatch.setattr(page_data, "MOST_REQUESTS", 10)
    monkeypatch.setattr(page_data, "MOST_PICKS", 2)
    data = report(RoundRobin(), record=True).page_data()
    assert 10 == len(data["requests"]["number"])
    assert 2 == len(data["picks"])
    assert [5, 5] == [len(each["ms"]) for each in data["samples"]]
    assert "10 of 40 requests" in " ".join(data["notes"])
    assert "at most 5 of" in " ".join(data["notes"])
    assert "2 picks of most regret" in " ".join(data["notes"])


def test_compared_are_a_report_and_the_json_of_one(tmp_path):
    found, other = report(), report(RoundRobin())
    found.to_html(tmp_path / "a.html", compare=[other, other.to_json()])
    names = [each["name"] for each in data_of(tmp_path / "a.html")["reports"]]
    assert ["DynamoRouter", "RoundRobin", "RoundRobin"] == names
    _, live, read = data_of(tmp_path / "a.html")["reports"]
    for what in ("ttft", "tpot", "e2e"):
        at = dict(map(tuple, live["curves"][what]))
        assert {0.0, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0} == {share for share, _ in read["curves"][what]}
        for share, ms in read["curves"][what]:
            assert pytest.approx(ms, abs=0.01) == at[share]
    assert pytest.approx(read["throughput"], rel=1e-3) == live["throughput"]
    assert 2 == len(found.page_data(compare=other)["reports"])


@pytest.mark.parametrize("other", [3, {}, [None]])
def test_what_is_no_report_cannot_be_beside_it(tmp_path, other):
    with pytest.raises(TypeError, match="must be a Report"):
        report().to_html(tmp_path / "a.html", compare=other)
    assert [] == [*tmp_path.iterdir()]


def test_latencies_are_distributions_beside_the_limits_of_the_fleet():
    found = report(slo=Objectives(ttft_ms=30, e2e_ms=200))
    data = found.page_data()
    assert {"ttft": 30, "e2e": 200} == data["slo"]
    curves = data["reports"][0]["curves"]
    for what in ("ttft", "tpot", "e2e"):
        points = dict(map(tuple, curves[what]))
        assert pytest.approx(found.figure(f"{what}_p95"), abs=0.01) == points[0.95]
    assert {} == report().page_data()["slo"]


def test_what_no_router_served_has_a_page():
    data = replay(TRACE, [MockEngine(ARGS) for _ in range(2)]).page_data()
    assert ("no router", ["0", "1"]) == (data["router"], data["workers"])
    assert 40 == len(data["requests"]["number"])


def test_a_selector_must_be_one(tmp_path):
    with pytest.raises(TypeError, match="it must be an object"):
        report().to_html(tmp_path / "a.html", selector=DynamoRouter)


@pytest.mark.parametrize("record", [False, True])
def test_a_report_without_requests_is_a_page_that_says_so(tmp_path, record):
    found = report(stop_ms=0, record=record)
    found.to_html(tmp_path / "empty.html")
    data = data_of(tmp_path / "empty.html")
    assert "This report has no requests." in data["notes"]
    assert [] == data["requests"]["number"]


def test_a_page_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match="none"):
        report().to_html(tmp_path / "none" / "a.html")


def test_names_with_markup_stay_text(tmp_path):
    router = type(EVIL, (MostCached,), {})()
    trace = [FleetRequest([*range(32)], 2, timestamp=0.0, session_id=EVIL)]
    found = report(router, trace=trace)
    found.to_html(tmp_path / "a.html", title=f"of {EVIL}")
    assert "<img" not in (tmp_path / "a.html").read_text(encoding="utf-8")
    data = data_of(tmp_path / "a.html")
    assert (EVIL, [EVIL]) == (data["router"], data["requests"]["session"])


def test_incidents_are_marks():
    engines = [MockEngine(ARGS, seed=at) for at in range(2)]
    fleet = Fleet(engines)
    fleet.at(100.0).crash(1)
    data = fleet.run(TRACE).page_data()
    marks = data["marks"]
    assert 100.0 == data["there"][1][1] < data["there"][0][1]
    assert [(100.0, "crash", "1")] == [(each["ms"], each["kind"], each["worker"]) for each in marks]


def test_one_that_was_preempted_says_when():
    found = report(
        args=MockEngineArgs(block_size=16, num_gpu_blocks=14),
        trace=[FleetRequest([*range(at * 100, at * 100 + 48)], 60, timestamp=0.0) for at in range(8)],
    )
    assert found.figure("preemptions")
    requests = found.page_data()["requests"]
    stops = [each for each in requests["preempted"] if each]
    assert found.figure("preemptions") == sum(map(len, stops))
    assert all(start >= 0 and took >= 0 for each in stops for start, took in each)


def test_faults_and_errors_of_events_are_marks(monkeypatch):
    def run():
        kv = RouterHarness(EngineProfile(block_size=4, num_blocks=96, workers=2), backend="lru", name="marks")
        kv.faults.lose(3, kind="stored")
        fleet = kv.fleet(workers=2)
        found = fleet.run(TRACE)
        assert found is fleet.report is kv.fleets[0].report
        return found

    data = run().page_data()
    faults = [each for each in data["marks"] if each["kind"] == "fault lose"]
    assert 3 == len(faults)
    assert all(each["text"].startswith("lose, event ") and each["ms"] >= 0 for each in faults)
    assert sorted(data["marks"], key=lambda each: each["ms"]) == data["marks"]
    monkeypatch.setattr(page_data, "MOST_MARKS", 2)
    data = run().page_data()
    assert 2 == len(data["marks"])
    assert any("the first 2 are marked" in note for note in data["notes"])


def test_what_is_wrong_with_events_has_a_mark_with_its_time():
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=96, workers=2), backend="lru", index=Deaf())
    marks = kv.fleet(workers=2).run(TRACE).page_data()["marks"]
    assert "index_drift" in {each["kind"] for each in marks}
