"""Fleet reports: figures per worker and in total, worked out by hand; comparisons, records and assertions."""

import json
import re
from itertools import pairwise
from random import Random

import pytest
from depth import few, seeds

from pytest_kvmock import EngineProfile, Fleet, MockEngine, MockEngineArgs, Prompt, RouterHarness, replay
from pytest_kvmock.engines.schedulers.nested_args import SglangArgs
from pytest_kvmock.fleets import (
    DynamoRouter,
    FleetRequest,
    LeastLoaded,
    MostCached,
    Objectives,
    Report,
    RoundRobin,
    TraceRequest,
    synthetic_trace,
)
from pytest_kvmock.fleets.report.figures import FIGURES, MOST_WIDE, PRINTED, folded, leading_blocks, names_of
from pytest_kvmock.fleets.report.page_data import fleet_data
from pytest_kvmock.fleets.report.routing_figures import Choice, assert_balanced, jain, max_to_mean, of_best
from pytest_kvmock.fleets.report.statistics import Sketch, statistics
from pytest_kvmock.testing import RightRouter
from pytest_kvmock.values.tokens import TokenRuns

ARGS = MockEngineArgs(num_gpu_blocks=96, block_size=4, max_num_batched_tokens=32)


def request(at, blocks, output=2, **more):
    return TraceRequest(at, 4 * len(blocks), output, tuple(blocks), **more)


def trace(count=40, seed=0, **options):
    options = {"groups": 3, "prefix_blocks": (3, 3), "turns": (1, 3), "interval_ms": 10, "delay_ms": (5, 50), **options}
    sizes = {"block_size": 4, "input_tokens": (4, 24), "output_tokens": (1, 12)}
    return list(synthetic_trace(count, seed=seed, **sizes, **options))


def fleet(router=None, count=2, args=ARGS, **options):
    return Fleet([MockEngine(args, seed=seed) for seed in range(count)], router, **options)


class Fixed:
    """A router that picks the given workers in turn."""

    def __init__(self, *workers):
        self.left = list(workers)

    def pick(self, request, candidates):
        return self.left.pop(0)


class Own:
    """A minimal selector: its cost is the number of blocks that are not cached."""

    def cost(self, request, candidate):
        return len(request.local_hashes) - candidate.overlap


# ------------------------------------------------------------------------------------------------------ arithmetic


def test_figure_functions_accept_plain_rows():
    choices = [Choice("a", 3, 4), Choice("b", 0, 4), Choice("a", 0, 0)]
    assert of_best(choices) == 3 / 8
    assert [choice.regret for choice in choices] == [1, 4, 0]
    assert of_best([]) is None
    assert max_to_mean({"a": 3, "b": 1}) == 1.5
    assert max_to_mean({"a": 0}) is None
    assert jain({"a": 3, "b": 1}) == 16 / 20
    assert jain({}) is None


def test_balance_is_weighted_by_the_share_of_picks_with_the_worker_as_candidate():
    counts, alive = {0: 4, 1: 2, 2: 0}, {0: 1.0, 1: 0.5, 2: 0.0}
    assert max_to_mean(counts, alive) == 1.0
    assert jain(counts, alive) == 1.0
    assert_balanced("requests", counts, 1.0, alive)


@pytest.mark.parametrize(("count", "limit"), [(2, 1.5), (3, 1.8), (4, 2.0), (8, 2.0)])
def test_the_default_limit_of_balance_depends_on_the_number_of_workers(count, limit):
    """Of 1000 requests the first worker has exactly the limit, then one more."""
    most = round(1000 * limit / count)
    for first, is_right in ((most, True), (most + 1, False)):
        rest = (1000 - first) / (count - 1)
        counts = {0: first, **dict.fromkeys(range(1, count), rest)}
        if is_right:
            assert_balanced("requests", counts)
        else:
            with pytest.raises(AssertionError, match=f"times the mean of requests, must be at most {limit:g} times"):
                assert_balanced("requests", counts)


@pytest.mark.parametrize("there", [1.0, 0.5, 0.1, 0.01])
def test_a_worker_with_all_requests_is_unbalanced_by_default(there):
    """The second worker was there for a share of the run and got nothing: no assignment is more uneven."""
    with pytest.raises(AssertionError, match="worker 0 has"):
        assert_balanced("requests", {0: 1000, 1: 0}, there={0: 1.0, 1: there})
    assert_balanced("requests", {0: 1000 * (1 - there / 2), 1: 1000 * there / 2}, there={0: 1.0, 1: there})


@pytest.mark.parametrize("within", [None, 1.0, 2.0])
def test_a_single_worker_is_always_balanced(within):
    assert_balanced("requests", {0: 9}, within)
    assert_balanced("requests", {0: 9, 1: 3}, within, {0: 0.75, 1: 0.25})  # one worker after the other
    fleet(Fixed(0, 0), count=1).run([request(500 * each, [each]) for each in range(2)]).assert_balanced(within)


def test_a_balance_limit_that_can_never_fail_is_refused():
    report = fleet(Fixed(1, 1, 1, 1)).run([request(500 * each, [1, each + 2]) for each in range(4)])
    text = (
        r"^assert_balanced: within=2 can never fail: a pick had 2 candidates, so that no worker can have more than 2 "
        r"times the mean of "
        r"requests; give less, or nothing for 1\.5$"
    )
    with pytest.raises(ValueError, match=text):
        report.assert_balanced(2.0)
    with pytest.raises(ValueError, match="within=2 can never fail: a pick had 2 candidates"):
        report.assert_balanced(2.0, of="prompt_tokens")
    for within in (1.99, None):
        with pytest.raises(AssertionError, match=r"worker 1 has 2\.00 times the mean"):
            report.assert_balanced(within)
    there = {0: 1.0, 1: 1.0, 2: 0.2}
    with pytest.raises(ValueError, match=r"within=2\.2 can never fail: a pick had 2\.2 candidates on the mean"):
        assert_balanced("requests", {0: 9, 1: 1, 2: 0}, 2.2, there)
    # A worker that was there for a short time may have computed all tokens: 2.2 / 0.2 times the mean.
    with pytest.raises(AssertionError, match=r"worker 2 has 11\.00 times"):
        assert_balanced("prompt tokens", {0: 0, 1: 0, 2: 50}, 10.9, there)
    with pytest.raises(ValueError, match="no worker can have more than 11 times"):
        assert_balanced("prompt tokens", {0: 0, 1: 0, 2: 50}, 11, there)


def test_assert_balanced_names_the_overloaded_worker():
    with pytest.raises(AssertionError) as failure:
        assert_balanced("requests", {0: 9, 1: 1}, 1.5)
    assert str(failure.value) == "worker 0 has 1.80 times the mean of requests, must be at most 1.5 times (0: 9, 1: 1)"


# --------------------------------------------------------------------------------------------------------- figures


def test_figures_equal_those_worked_out_by_hand():
    """Three requests share a prefix of two blocks; the second goes to the other worker, the third to the first."""
    rows = [request(0, [1, 2, 3]), request(500, [1, 2, 4]), request(1000, [1, 2, 5])]
    report = fleet(Fixed(0, 1, 0)).run(rows)
    whole, first, second = report.rows()[None], report.rows()[0], report.rows()[1]
    assert (whole["requests"], first["requests"], second["requests"]) == (3, 2, 1)
    assert (whole["hit_ratio"], first["hit_ratio"], second["hit_ratio"]) == (2 / 9, 2 / 6, 0.0)
    assert (whole["ideal_hit_ratio"], whole["of_ideal"]) == (4 / 9, 0.5)
    assert (whole["overlap_selected"], whole["overlap_best"], whole["of_best"]) == (2, 4, 0.5)
    assert whole["overlap_regret"] == 2 / 3
    assert (whole["promised_not_found"], whole["found_not_promised"]) == (0, 0)
    assert tuple(row["prompt_tokens_computed"] for row in (whole, first, second)) == (28, 16, 12)
    assert whole["balance_requests"] == 4 / 3
    assert whole["balance_prompt_tokens"] == 16 / 14
    assert whole["balance_open_requests"] is None  # no request was open when the next one arrived
    assert whole["goodput"] is None


@pytest.mark.parametrize("seed", seeds(30))
@pytest.mark.parametrize("backend", ["lineage", "vllm", "sglang", "mocker_sglang_1_6"])
def test_no_router_exceeds_the_ideal_hit_ratio(backend, seed):
    """In any serving order, a block that is new to one endless cache is new to some engine."""
    kind = "sglang" if "sglang" in backend else "vllm"
    args = MockEngineArgs(num_gpu_blocks=64 if seed % 2 else 400, block_size=4, engine_type=kind)
    workers = [MockEngine(args, backend=backend) for _ in range(1 + seed % 3)]
    played = Fleet(workers, MostCached())
    played.at(100).restart(0)
    report = played.run(trace(seed=seed))
    assert len(report.completed) == report.arrived
    assert 0 < report.figure("of_ideal") <= 1


def test_evicted_blocks_are_counted_by_worker():
    small = MockEngineArgs(num_gpu_blocks=4, block_size=4)
    rows = [request(500 * each, [10 * each, 10 * each + 1, 10 * each + 2], 1) for each in range(3)]
    report = fleet(Fixed(0, 0, 1), args=small).run(rows)
    assert tuple(report.figure("blocks_evicted", worker) for worker in (None, 0, 1)) == (3, 3, 0)


def test_open_requests_are_counted_at_each_pick():
    """Worker 0 has one open request at the second pick and two at the third, which is the last."""
    report = fleet(Fixed(0, 0, 1)).run([request(0, [each], 20) for each in range(3)])
    assert {each.worker: each.open_requests for each in report.run.services} == {0: 3, 1: 0}
    assert report.figure("balance_open_requests") == 2.0


def test_with_late_events_evicted_blocks_count_as_promised_but_not_found():
    """An evicted block is still promised until its event arrives."""
    small = MockEngineArgs(num_gpu_blocks=5, block_size=4)
    rows = [request(0, [1, 2, 3], 1), request(500, [4, 5, 6], 1), request(600, [1, 2, 3, 7], 1)]
    late = fleet(Fixed(0, 0, 0), args=small, event_delay_ms=200).run(rows)
    assert late.per_request()[2]["promised_blocks"] == 3
    assert late.figure("promised_not_found") > 0
    assert fleet(Fixed(0, 0, 0), args=small).run(rows).figure("promised_not_found") == 0


def test_waiting_times_in_router_and_engine_are_separate_figures():
    class Later:
        """A router that holds the second request until the first ends."""

        def __init__(self):
            self.open = False

        def pick(self, request, candidates):
            if self.open:
                return None
            self.open = True
            return 0

        def finished(self, request):
            self.open = False

    report = fleet(Later()).run([request(0, [1]), request(0, [2])])
    rows = report.per_request()
    assert 0 == rows[0]["router_wait_ms"] == rows[0]["engine_wait_ms"]
    assert rows[0]["last_token_ms"] == rows[1]["router_wait_ms"] == rows[1]["picked_ms"]
    assert rows[1]["router_wait_ms"] / 2 == report.figure("router_wait_ms")


@pytest.mark.parametrize("semantics", ["1.2.1", "1.6.1"])
def test_goodput_is_a_share_of_all_arrived_requests(semantics):
    args = MockEngineArgs(num_gpu_blocks=96, block_size=4, max_num_batched_tokens=32, semantics=semantics)
    rows = trace()
    times = [row["ttft_ms"] for row in fleet(args=args).run(rows).per_request()]
    limit = sorted(times)[19]
    report = fleet(args=args, slo=Objectives(ttft_ms=limit)).run(rows)
    assert sum(time <= limit for time in times) / 40 == report.figure("goodput")  # the limit is inclusive
    assert semantics != "1.6.1" or 40 * report.figure("goodput") == report.to_json()["goodput_completed_requests"]
    stopped = fleet(args=args, slo=Objectives(ttft_ms=limit), stop_ms=50).run(rows)
    assert stopped.figure("goodput") < 20 / stopped.arrived


def test_the_json_of_a_fleet_report_has_dynamo_keys_and_one_fleet_key():
    report = fleet(Fixed(0, 1, 0)).run([request(0, [1, 2, 3]), request(500, [1, 2, 4]), request(1000, [1, 2, 5])])
    whole = json.loads(json.dumps(report.to_json()))
    routed = whole.pop("fleet")
    assert {"fleet": routed} == {name: value for name, value in report.to_json().items() if name not in whole}
    assert routed["router"] == "Fixed"
    assert routed["all"]["of_best"] == 0.5
    assert [row["worker"] for row in routed["workers"]] == [0, 1]
    assert report.figure("ttft_p95", 1) == routed["workers"][1]["ttft_p95"]


def test_figures_of_saved_reports_keep_their_json_keys():
    routed = fleet(RoundRobin()).run(trace()).to_json()["fleet"]
    counts = "requests completed hit_ratio overlap_selected overlap_best overlap_regret of_best promised_not_found believed_not_found"  # noqa: E501
    work = "found_not_promised prompt_tokens_computed blocks_evicted preemptions router_wait_ms engine_wait_ms goodput"
    balance = [f"{how}_{of}" for how in ("balance", "jain") for of in ("requests", "prompt_tokens", "open_requests")]
    assert {*counts.split(), *work.split(), "ideal_hit_ratio", "of_ideal", *balance} <= set(routed["all"])
    points = [
        f"{what}_{at}" for what in ("ttft", "tpot", "e2e") for at in ("mean", "p50", "p75", "p90", "p95", "p99", "max")
    ]
    assert {*counts.split(), *work.split(), *points, "worker", "since_ms", "until_ms"} <= set(routed["workers"][0])


def test_a_single_engine_and_a_fleet_of_one_have_the_same_percentiles():
    """One run of one engine has one p90 of its gaps in every report; from 1.6.1 on it comes from a sketch."""
    rows = [request(10.0 * each, range(each, each + 2 + each % 3), 2 + each % 7) for each in range(30)]
    for semantics, differ in (("1.2.1", False), ("1.6.1", True)):
        args = MockEngineArgs(num_gpu_blocks=96, block_size=4, semantics=semantics)
        engine = MockEngine(args, backend="vllm" if differ else "lineage")
        for each in rows:
            engine.submit(Prompt(hashes=each.hash_ids), each.output_length, each.timestamp)
        alone = engine.run().to_json()
        gaps = [later - token for done in engine.requests for token, later in pairwise(done.token_ms)]
        exact = statistics(gaps)["p90"]
        assert differ == (exact != alone["p90_itl_ms"])
        names = ("itl_ms", "output_token_throughput_per_user", "ttft_ms", "e2e_latency_ms")
        served = Fleet([MockEngine(args, backend=engine.worker.backend)], RoundRobin()).run(rows).to_json()
        for name in names:
            for point in ("mean", "median", "p90", "p99", "max"):
                assert served[f"{point}_{name}"] == alone[f"{point}_{name}"], (semantics, point, name)


def test_every_figure_can_be_read_by_its_name():
    report = fleet(slo=Objectives(ttft_ms=100)).run(trace())
    row = report.rows()[None]
    assert set(names_of("all", "worker", "latency")) == set(row)
    assert row == {name: report.figure(name) for name in row}
    assert {each.name for each in FIGURES.values() if each.shown == "asked"}.isdisjoint(row)
    summary = report.to_json()
    assert (summary["p95_itl_ms"], summary["median_ttft_ms"]) == (row["itl_p95"], row["ttft_p50"])


def test_every_figure_is_explained():
    """Either by its full name or by a prefix of it."""
    explained = set(re.findall(r"`(\w+?)(?:_\.\.\.)?`", Report.__doc__))
    names = {name: {name, name.partition("_")[0]} for name in names_of("all", "worker", "latency")}
    assert [name for name, known in names.items() if explained.isdisjoint(known)] == []


def test_a_report_is_printed_as_a_table():
    one = fleet(RoundRobin())
    one.at(30).crash(1)
    lines = str(one.run(trace(), name="small")).splitlines()
    assert lines[0] == "Report: RoundRobin on small"
    assert [line.split()[0] for line in lines[1:9]] == ["worker", "all", "0", "1"] * 2
    assert lines[10].startswith("30 ms: crash of worker 1")


def test_a_table_that_exactly_fits_the_width_is_not_folded():
    named, columns = [["worker", "0"]], [["x" * 10, "1"]] * 9
    assert [len(line) for line in folded(named, [*columns, ["y" * 4, "2"]]).splitlines()[:1]] == [MOST_WIDE]
    assert len(folded(named, [*columns, ["y" * 5, "2"]]).splitlines()) == 4


def test_a_sketch_distinguishes_zero_from_the_first_value_above_zero():
    """The median of ten values is the sixth."""
    assert [round(Sketch([0.0, 1.0], [zeros, 10 - zeros]).percentiles()["median"], 2) for zeros in (6, 5)] == [0.0, 1.0]


@pytest.mark.parametrize("seed", seeds(50))
def test_a_merged_sketch_equals_the_sketch_of_all_values(seed):
    draw = Random(seed)
    values = [draw.choice([0.0, 1e-301, draw.random(), draw.uniform(1, 1e6)]) for _ in range(draw.randrange(40))]
    cut = sorted(draw.randrange(len(values) + 1) for _ in range(3))
    parts = [values[start:end] for start, end in pairwise([0, *cut, len(values)])]
    sketches = [Sketch(part, [1] * len(part)) for part in parts]
    assert Sketch(values, [1] * len(values)).percentiles() == Sketch.of_all(sketches).percentiles()


@pytest.mark.parametrize("seed", seeds(100))
def test_repeated_leading_blocks_are_the_same_by_ids_and_by_tokens(seed):
    """Ids with equal low 32 bits have the same tokens; a block may contain several ids."""
    draw, times, size = Random(seed), 12, 4
    rows = [draw.choices([1, 2, 2**32 + 1], k=draw.randint(1, 4)) for _ in range(30)]
    runs = [TokenRuns(ids, times, draw.randint(1, times * len(ids))) for ids in rows]
    by_tokens = [Prompt(run.tokens()) for run in runs]
    expected = list(leading_blocks(by_tokens, size))
    assert sum(expected)
    assert list(leading_blocks([Prompt(run) for run in runs], size)) == expected
    assert list(leading_blocks([*map(Prompt, runs[:15]), *by_tokens[15:]], size)) == expected  # mixed
    assert [*leading_blocks(by_tokens, 5)] == list(leading_blocks([Prompt(run) for run in runs], 5))


@pytest.mark.parametrize("semantics", ["1.2.1", "1.6.1"])
def test_figures_of_a_report_do_not_depend_on_earlier_calls(semantics):
    """JSON, text and single figures are the same in any order as from a fresh report."""

    def report():
        args = MockEngineArgs(num_gpu_blocks=96, block_size=4, max_num_batched_tokens=32, semantics=semantics)
        return fleet(DynamoRouter(semantics), 3, args, slo=Objectives(ttft_ms=20)).run(trace(60), name="small")

    def asked_of(each):
        return {
            "json": each.to_json,
            "text": lambda: str(each),
            "rows": each.rows,
            "figure": lambda: {
                (name, worker): each.figure(name, worker) for name in FIGURES for worker in (None, 0, 2)
            },
        }

    fresh = {name: asked_of(report())[name]() for name in asked_of(report())}
    for first in fresh:
        once = asked_of(report())
        once[first]()
        assert fresh == {name: ask() for name, ask in once.items()}, first


def test_a_report_of_a_running_engine_is_updated():
    engine = MockEngine(ARGS)
    engine.submit(Prompt(hashes=[1, 2]), 4, 0.0)
    report = engine.report
    assert report.figure("completed") == 0
    engine.run()
    assert report.figure("completed") == 1


def test_a_printed_table_fits_a_terminal():
    """Columns without room continue below, and each part repeats the row names."""
    engines = {(worker, 0): MockEngine(ARGS) for worker in (10, 2000)}
    report = Fleet(engines, RightRouter(list(engines)), slo=Objectives(ttft_ms=20)).run(trace(), name="small")
    lines = report.run.table(report.rows()).splitlines()
    assert max(map(len, lines)) <= 120
    heads = [line.split()[1:] for line in lines if line.split()[0] == "worker"]
    titles = [FIGURES[name].title for name in PRINTED if report.figure(name) is not None]
    assert " ".join(titles).split() == [word for head in heads for word in head]
    assert ["worker", "all", "(10, 0)", "(2000, 0)"] * len(heads) == [line[:9].strip() for line in lines]


def test_a_run_without_a_router_has_a_report():
    engine = MockEngine(ARGS)
    served = replay(trace(), [engine, MockEngine(ARGS)])
    assert str(served).startswith(
        f"Report: {len(served.completed)} of {len(served.requests)} requests finished\nworker"
    )
    assert served.workers == [0, 1]
    assert engine.prefill_tokens == served.figure("prompt_tokens_computed", 0)
    assert served.figure("hit_ratio") == served.figure("first_admission_prefix_cache_reused_ratio") > 0
    assert {served.figure(name) for name in ("of_best", "promised_not_found", "elsewhere")} == {None}
    with pytest.raises(ValueError, match="of_best has no value here"):
        served.assert_hit_ratio(of_best=0.5)
    with pytest.raises(ValueError, match="assert_no_drift: there was no router"):
        served.assert_no_drift()
    served.assert_slo(ttft_ms=served.figure("ttft_max"), at=1.0)
    alone = engine.report
    assert (engine.passes, len(engine.requests)) == (alone.run.passes, alone.figure("completed"))


def test_reports_of_single_engines_with_different_requests_are_different_traces():
    reports = []
    for prompt in (range(12), range(12), range(16)):
        engine = MockEngine(ARGS)
        engine.submit(prompt, 2)
        reports.append(engine.run())
    one, same, other = reports
    assert one.compare(same).notes == []
    assert [note.partition(":")[0] for note in one.compare(other).notes] == ["these are two traces"]
    with pytest.raises(ValueError, match="the other report is of another trace"):
        one.assert_no_worse(other, ttft_p95=1.0)


def test_a_dynamo_figure_has_the_value_of_its_json_key():
    report = fleet(slo=Objectives(ttft_ms=100)).run(trace())
    keys = {each.name: each.key for each in FIGURES.values() if each.key is not None and not each.is_long}
    whole = report.to_json()
    assert {key: whole[key] for key in keys.values()} == {key: report.figure(name) for name, key in keys.items()}


@pytest.mark.parametrize("semantics", ["1.2.1", "1.6.1"])
def test_the_repr_of_a_report_is_one_line(semantics):
    args = MockEngineArgs(num_gpu_blocks=96, block_size=4, semantics=semantics)
    report = fleet(RoundRobin(), args=args, stop_ms=400, record=True).run(trace(), name="mine")
    done = len(report.completed)
    assert 0 < done < report.arrived < 40
    assert repr(report) == f"<Report: RoundRobin on mine, {done} of {len(report.requests)} requests finished>"
    engine = MockEngine(args)
    engine.submit([1, 2, 3], 2)
    assert repr(engine.run()) == "<Report: 1 of 1 requests finished>"


def test_a_worker_that_joined_late_counts_by_its_share_of_picks():
    rows = [request(100 * each, [each], 1) for each in range(11)]
    one = fleet(Fixed(0, 1, 0, 1, 0, 1, 2, 0, 1, 2, 0))
    one.at(500).join(engine=MockEngine(ARGS))
    report = one.run(rows)
    counts, alive = report.run.counts("requests")
    assert (counts, alive) == ({0: 5, 1: 4, 2: 2}, {0: 1.0, 1: 1.0, 2: 6 / 11})
    assert report.figure("balance_requests") == 5 / (11 / (2 + 6 / 11))


@pytest.mark.parametrize("of", ["requests", "prompt_tokens", "open_requests"])
def test_balance_is_weighted_by_picks_and_not_by_time(of):
    """One late request stretches the run a hundredfold; the worker that left was there for half of the picks."""
    rows = [request(100 * each, [each], 1) for each in range(7)]
    one = fleet(Fixed(0, 1, 0, 1, 0, 0, 0, 0), count=2)
    one.at(350).leave(1)
    report = one.run([*rows, request(60_000, [9], 1)])
    assert report.run.counts(of)[1] == {0: 1.0, 1: 0.5}
    assert (6 / 8 * 1.5) == report.figure("balance_requests") == report.figure("balance_prompt_tokens")


def test_a_crashed_worker_is_a_candidate_until_the_router_is_notified():
    """Picks whose requests came back count too, because they were sent there."""
    rows = [request(100 * each, [each], 1) for each in range(6)]
    one = fleet(Fixed(0, 1, 0, 1, 0, 0, 0))
    one.at(250).crash(1, notice_ms=100)
    report = one.run(rows)
    assert len(report.picks) == 7
    assert report.run.counts("requests") == ({0: 5, 1: 2}, {0: 1.0, 1: 4 / 7})
    assert report.to_json()["fleet"]["workers"][1]["until_ms"] == 250


@pytest.mark.parametrize("seed", few(range(5), 2))
@pytest.mark.parametrize("happen", ["crash", "leave"])
@pytest.mark.parametrize("router", [RoundRobin, LeastLoaded, DynamoRouter])
@pytest.mark.parametrize("count", [2, 4])
def test_correct_routers_are_balanced_after_one_worker_is_gone(router, happen, count, seed):
    """Late turns of sessions stretch the run to several times the period with most of the picks."""
    one = fleet(router(), count)
    getattr(one.at(800), happen)(1)
    rows = trace(200, seed, groups=8, delay_ms=(50, 400), interval_ms=20)
    report = one.run([*rows, request(rows[-1].timestamp + 60_000, [1, 2, 3])])
    report.assert_balanced()


def test_request_rows_contain_the_overlaps_of_their_pick():
    report = fleet(Fixed(0, 1)).run([request(0, [1, 2, 3]), request(500, [1, 2, 4])])
    row = report.per_request()[1]
    assert tuple(
        row[f"{name}_blocks"] for name in ("selected_overlap", "best_available_overlap", "overlap_regret")
    ) == (0, 2, 2)


def test_in_1_6_the_routing_history_contains_the_pick():
    args = MockEngineArgs(num_gpu_blocks=96, block_size=4, semantics="1.6.1")
    report = Fleet([MockEngine(args, backend="vllm") for _ in range(2)], Fixed(0, 1)).run(
        [request(0, [1, 2, 3]), request(500, [1, 2, 4])]
    )
    history = report.per_request()[1]["routing_history"][0]
    assert tuple(
        history[f"{name}_blocks"] for name in ("selected_overlap", "best_available_overlap", "overlap_regret")
    ) == (0, 2, 2)


class Queues(Fixed):
    """A router that lets requests wait while one is open."""

    open = 0

    def pick(self, request, candidates):
        return None if self.open else super().pick(request, candidates)

    def dispatched(self, request, worker):
        self.open += 1

    def finished(self, request):
        self.open -= 1


@pytest.mark.parametrize("semantics", ["1.2.1", "1.6.1"])
def test_overlaps_of_a_request_that_waited_are_those_at_its_arrival(semantics):
    """All three arrive at empty engines; the third waits until both engines hold its prefix."""
    args = MockEngineArgs(num_gpu_blocks=96, block_size=4, semantics=semantics)
    backend = "vllm" if semantics == "1.6.1" else "lineage"
    rows = [request(0, [1, 2, 3]), request(0, [1, 2, 4]), request(0, [1, 2, 5])]
    report = Fleet([MockEngine(args, backend=backend) for _ in range(2)], Queues(0, 1, 0)).run(rows)
    third = report.picks[2]
    assert third.waited_ms > 0
    assert (third.overlap, third.best_overlap) == (0, 0)
    assert (third.held, third.best_held) == (2, 2)
    row = report.per_request()[2]
    for of in (row, *row.get("routing_history", ())):
        assert tuple(
            of[f"{name}_blocks"] for name in ("selected_overlap", "best_available_overlap", "overlap_regret")
        ) == (0, 0, 0)
    # Regret and promises use what the workers held at the time of the pick.
    assert (row["promised_blocks"], row["found_blocks"]) == (2, 2)
    whole = report.rows()[None]
    assert (whole["overlap_selected"], whole["overlap_best"], whole["of_best"]) == (2, 4, 0.5)
    assert whole["overlap_regret"] == 2 / 3
    assert (whole["promised_not_found"], whole["found_not_promised"]) == (0, 0)
    page = fleet_data(report)["requests"]
    assert (page["overlap"], page["best_overlap"]) == ([0, 0, 2], [0, 2, 2])


def test_a_resent_request_has_the_overlaps_of_its_second_arrival():
    rows = [request(0, [1, 2, 3], 2), request(500, [1, 2, 4], 60)]
    one = fleet(Fixed(0, 1, 0))
    one.at(520).crash(1)
    report = one.run(rows)
    assert [(pick.overlap, pick.best_overlap) for pick in report.picks[1:]] == [(0, 2), (2, 2)]


@pytest.mark.parametrize(
    ("semantics", "backend", "reused"),
    [("mixed", "sglang", 8), ("1.6.1", "mocker_sglang_1_6", 60)],
)
def test_before_1_6_a_prefill_of_sglang_reads_at_most_one_chunk_of_a_prefix(semantics, backend, reused):
    """`of_ideal` is therefore low there for every router, as its docstring says."""
    args = MockEngineArgs(
        "sglang", num_gpu_blocks=96, block_size=4, semantics=semantics, sglang=SglangArgs(chunked_prefill_size=8)
    )
    rows = [request(0, range(16)), request(5000, range(16))]
    report = Fleet([MockEngine(args, backend=backend)], Fixed(0, 0)).run(rows)
    assert reused / 64 == report.figure("of_ideal")
    assert "at most one chunk" in " ".join(Report.assert_hit_ratio.__doc__.split())


REUSES = ["lineage", "multi_lru", "hash_cache", "vllm", "sglang", "mocker_sglang_1_6"]


@pytest.mark.parametrize("backend", REUSES)
def test_promised_blocks_are_those_that_an_engine_can_reuse(backend):
    """Of four cached whole blocks, an engine that recomputes the last token reuses three, any other all four."""
    args = MockEngineArgs("sglang" if "sglang" in backend else "vllm", num_gpu_blocks=96, block_size=4)
    engine = MockEngine(args, backend=backend)
    report = Fleet([engine], Fixed(0, 0)).run([request(0, [1, 2, 3, 4]), request(500, [1, 2, 3, 4])])
    blocks = 3 if engine.worker.traits.recomputes_last_token else 4
    row = report.per_request()[1]
    assert (blocks, blocks) == (row["promised_blocks"], row["found_blocks"])
    assert tuple(report.figure(name) for name in ("promised_not_found", "found_not_promised")) == (0, 0)


@pytest.mark.parametrize(("kind", "backend"), [("vllm", "vllm"), ("sglang", "mocker_sglang_1_6")])
@pytest.mark.parametrize(("output", "blocks"), [(0, 4), (1, 3)])
def test_in_1_6_a_request_without_output_can_reuse_its_last_token(kind, backend, output, blocks):
    args = MockEngineArgs(kind, num_gpu_blocks=96, block_size=4, semantics="1.6.1")
    rows = [request(0, [1, 2, 3, 4]), request(500, [1, 2, 3, 4], output)]
    report = Fleet([MockEngine(args, backend=backend)], Fixed(0, 0)).run(rows)
    row = report.per_request()[1]
    assert (blocks, blocks) == (row["promised_blocks"], row["found_blocks"])


# --------------------------------------------------------------------------------------------------------- compare


def test_compare_returns_both_values_and_prints_a_table():
    rows = trace()
    one, other = fleet(MostCached()).run(rows), fleet(RoundRobin()).run(rows)
    compared = one.compare(other)
    assert (one.figure("hit_ratio"), other.figure("hit_ratio")) == compared["hit_ratio"]
    assert compared.notes == []
    assert str(compared).splitlines()[0].split() == ["figure", "MostCached", "RoundRobin", "difference", "times"]
    assert dict(compared) == dict(one.compare(json.loads(json.dumps(other.to_json()))))


def test_a_comparison_distinguishes_improvements_from_noise():
    one, other = fleet(MostCached()).run(trace()), fleet(RoundRobin()).run(trace())
    compared = one.compare(other)
    assert (compared.verdict("hit_ratio"), compared.verdict("overlap_selected")) == ("better", "")
    assert other.compare(one).verdict("hit_ratio") == "worse"
    assert next(line for line in str(compared).splitlines() if line.split()[0] == "hit_ratio").split()[-1] == "better"
    near = json.loads(json.dumps(one.to_json()))
    near["fleet"]["all"]["hit_ratio"] *= 1.09
    assert one.compare(near).verdict("hit_ratio") == "within noise"
    near["fleet"]["all"]["hit_ratio"] *= 1.09
    assert one.compare(near).verdict("hit_ratio") == "worse"


def test_equal_reports_compare_as_equal():
    one, other = (fleet(DynamoRouter(tie="first")).run(trace()) for _ in range(2))
    assert str(one.compare(other)) == "DynamoRouter and DynamoRouter: all figures are equal"


def test_comparing_two_runs_of_a_random_router_adds_a_note():
    one, other = (fleet(DynamoRouter(rng=Random(seed))).run(trace()) for seed in range(2))
    (note,) = one.compare(other).notes
    assert note.startswith("the same trace and DynamoRouter twice, but different picks")


def test_comparing_runs_with_different_initial_caches_adds_a_note():
    served = fleet(RoundRobin())
    first, second = served.run(trace()), served.run(trace())
    assert 0 == first.run.facts.held_before < second.run.facts.held_before
    note = f"RoundRobin began with 0 blocks in its engines, RoundRobin with {second.run.facts.held_before}"
    assert note in str(first.compare(second))
    assert note in str(first.compare(json.loads(json.dumps(second.to_json()))))
    assert f"the engines held {second.run.facts.held_before} blocks before this run" in str(second)
    assert "before this run" not in str(first)
    for require in (
        lambda: first.assert_hit_ratio(times=(1.0, second)),
        lambda: first.assert_no_worse(than=second, hit_ratio=1.0),
    ):
        with pytest.raises(AssertionError, match=f"note: {note}"):
            require()
    with pytest.raises(AssertionError) as failure:
        first.assert_hit_ratio(times=(2.0, first))
    assert "note" not in str(failure.value)


def test_comparing_runs_of_different_traces_adds_a_note():
    one, other = fleet().run(trace(), name="mine"), fleet().run(trace(seed=1), name="yours")
    assert one.compare(other).notes == ["these are two traces: mine, and yours"]


@pytest.mark.parametrize("other", [None, 3, {}, {"fleet": {}}])
def test_a_value_that_is_not_a_report_cannot_be_compared(other):
    with pytest.raises(TypeError, match="other must be a Report, or what its to_json"):
        fleet().run(trace()).compare(other)


# ---------------------------------------------------------------------------------------------------------- record


def test_a_record_has_passes_and_candidates_and_changes_nothing():
    rows = trace()
    plain, recorded = (fleet(DynamoRouter(tie="first"), record=record).run(rows) for record in (False, True))
    assert plain.compare(recorded).differences == {}
    assert plain.run.recorder is None
    samples = recorded.run.recorder.samples
    assert list(samples["ms"]) == sorted(samples["ms"])
    assert set(samples["position"]) == {0, 1}
    assert recorded.figure("prompt_tokens_computed") == sum(
        max(
            row[1] for row in zip(samples["position"], samples["prompt_tokens_computed"], strict=True) if row[0] == each
        )
        for each in (0, 1)
    )
    assert len(recorded.picks) == len(recorded.run.recorder)
    pick, record = recorded.picks[20], recorded.run.recorder.pick(20)
    assert (pick.worker, pick.ms, pick.number) == (record.chosen, record.request.now_ms, record.request.number)
    assert pick.best_overlap == max(each.overlap for each in record.candidates)


def test_a_record_has_the_loads_of_the_load_book_whatever_the_router_is_shown():
    shown = []

    class Watching(RoundRobin):
        def pick(self, request, candidates):
            shown.append([each.active_requests for each in candidates])
            return super().pick(request, candidates)

    report = fleet(Watching(), loads="engine", loads_every_ms=10_000, record=True).run(trace())
    true = [[each.active_requests for each in report.run.recorder.pick(at).candidates] for at in range(40)]
    assert {load for row in shown for load in row} == {0}
    assert max(map(max, true)) > 0


# ---------------------------------------------------------------------------------------------------------- regret


@pytest.mark.parametrize("backend", ["lineage", "multi_lru", "hash_cache", "vllm", "mocker_sglang_1_6", "sglang"])
@pytest.mark.parametrize("happen", ["nothing", "crash", "restart", "leave", "join"])
def test_a_correct_router_has_no_regret(backend, happen):
    args = MockEngineArgs("sglang", num_gpu_blocks=96, block_size=4) if "sglang" in backend else ARGS
    engines = [MockEngine(args, backend=backend, seed=seed) for seed in range(3)]
    one = Fleet(engines, DynamoRouter(rng=Random(3)), record=True)
    if happen == "join":
        one.at(100).join(engine=MockEngine(args, backend=backend))
    elif happen != "nothing":
        getattr(one.at(100), happen)(1)
    report = one.run(trace())
    assert report.regret(DynamoRouter()).share == 0.0
    report.assert_regret(DynamoRouter())


def test_regret_is_the_cost_of_a_pick_above_the_cheapest():
    rows = [request(0, [1, 2, 3]), request(500, [1, 2, 4]), request(1000, [1, 2, 5])]
    regret = fleet(Fixed(0, 1, 0), record=True).run(rows).regret(Own())
    assert regret.picks == [(1, 2)]
    assert (regret.share, regret.mean, regret.worst) == (1 / 3, 2 / 3, (1, 2))
    assert "costs 0: 1, 1: 3\nthe router picked 1" in regret.explain()
    with pytest.raises(
        AssertionError, match=r"must be at most 0\.00%: 1 of 3 picks \(33\.33%\) were not among the cheapest"
    ):
        fleet(Fixed(0, 1, 0), record=True).run(rows).assert_regret(Own())


def test_regret_uses_true_caches_although_events_arrive_late():
    rows = [request(0, [1, 2, 3], 200), request(500, [1, 2, 4])]
    late = fleet(MostCached(), record=True, event_delay_ms=10_000).run(rows).regret(Own())
    assert late.picks == [(1, 2)]
    assert "the router was shown overlaps 0, 0" in late.explain()


def test_a_regret_failure_notes_that_loads_were_polled():
    """A correct router with outdated polled loads has some regret, so the failure says that loads were polled."""
    polled = fleet(DynamoRouter(tie="first"), loads="engine", loads_every_ms=500, record=True).run(trace())
    with pytest.raises(AssertionError) as failure:
        polled.assert_regret(DynamoRouter())
    assert str(failure.value).endswith(
        "note: the router was shown the loads of the engines, up to 500 ms old, and regret is by the true ones of the "
        "load book: a right router has some too"
    )
    with pytest.raises(AssertionError) as failure:
        fleet(Fixed(0, 1), record=True).run([request(0, [1, 2]), request(500, [1, 2])]).assert_regret(DynamoRouter())
    assert "note" not in str(failure.value)


def test_regret_needs_a_record_and_a_selector():
    report = fleet().run(trace())
    with pytest.raises(ValueError, match=r"regret needs the candidates of each pick: make the fleet with record=True"):
        report.regret(DynamoRouter())
    with pytest.raises(TypeError, match=r"selector is the class DynamoRouter; it must be an object, DynamoRouter\(\)"):
        report.regret(DynamoRouter)
    with pytest.raises(TypeError, match=r"selector is the class DynamoRouter; it must be an object"):
        report.assert_regret(DynamoRouter)
    with pytest.raises(TypeError, match=r"selector must have a method cost\(request, candidate\), got <RoundRobin>"):
        report.assert_regret(RoundRobin())


# ------------------------------------------------------------------------------------------------------ assertions


def test_assert_slo_shows_the_worst_request_and_its_pick():
    report = fleet(Fixed(0, 1)).run([request(0, [1, 2, 3]), request(500, [1, 2, 4])])
    slow = max(row["ttft_ms"] for row in report.per_request())
    report.assert_slo(ttft_ms=slow, at=1.0)
    with pytest.raises(AssertionError) as failure:
        report.assert_slo(ttft_ms=slow - 1e-3, e2e_ms=1000)
    lines = str(failure.value).splitlines()
    assert lines[0].endswith("(0.0%) keep ttft_ms=" + f"{slow - 1e-3:g}, e2e_ms=1000, must be 95.0%. The worst:")
    assert lines[1].startswith(
        "request 1 of 12 + 2 tokens on worker 1, finished: first token after 24.09 ms (router 0,"
    )
    assert lines[2].startswith("the worst pick 1 at 500 ms: request 1 went to worker 1, which held 0 blocks of it")


def test_an_unfinished_request_does_not_meet_its_slo():
    report = fleet(stop_ms=50).run(trace())
    with pytest.raises(AssertionError, match=f"of {report.arrived} requests"):
        report.assert_slo(e2e_ms=1e6, at=1.0)


def test_assert_hit_ratio_checks_each_of_its_limits():
    rows = [request(0, [1, 2, 3]), request(500, [1, 2, 4]), request(1000, [1, 2, 5])]
    good, bad = fleet(Fixed(0, 0, 0)).run(rows), fleet(Fixed(0, 1, 0)).run(rows)
    good.assert_hit_ratio(at_least=4 / 9, of_ideal=1.0, of_best=1.0, times=(2.0, bad))
    good.assert_hit_ratio(times=(2.0, bad.to_json()))
    for required in ({"at_least": 0.3}, {"of_ideal": 0.6}, {"of_best": 0.6}, {"times": (1.0, good)}):
        with pytest.raises(
            AssertionError, match="the worst pick 1 at 500 ms: request 1 went to worker 1, which held 0"
        ) as e:
            bad.assert_hit_ratio(**required)
        assert "all" in str(e.value)


def test_assert_balanced_shows_the_row_of_the_worker():
    report = fleet(Fixed(1, 1, 1, 0)).run([request(500 * each, [1, each + 2]) for each in range(4)])
    report.assert_balanced()
    with pytest.raises(AssertionError) as failure:
        report.assert_balanced(1.4)
    lines = str(failure.value).splitlines()
    assert lines[0] == "worker 1 has 1.50 times the mean of requests, must be at most 1.4 times (0: 1, 1: 3)"
    assert lines[2].split()[0] == "1"
    with pytest.raises(AssertionError, match="times the mean of prompt tokens"):
        report.assert_balanced(1.0, of="prompt_tokens")


def test_assert_no_worse_compares_with_the_best_other_report():
    rows = trace()
    one, other = fleet(MostCached()).run(rows), fleet(RoundRobin()).run(rows)
    one.assert_no_worse([one, other], ttft_p95=10, hit_ratio=0.1)
    one.assert_no_worse(one.to_json(), ttft_p95=1.0, hit_ratio=1.0)
    one.assert_no_worse(other, hit_ratio=1.0)
    with pytest.raises(AssertionError, match=r"hit_ratio is .*, must be at least 1 times .*, that of MostCached"):
        other.assert_no_worse(than=[one], hit_ratio=1.0)
    with pytest.raises(AssertionError, match=r"ttft_p95 is .*, must be at most 0\.5 times"):
        other.assert_no_worse(than=[one], ttft_p95=0.5)


def test_assertions_that_compare_different_traces_name_both():
    one, other = fleet().run(trace(), name="mine"), fleet().run(trace(seed=1))
    text = rf"the other report is of another trace: trace {other.run.trace_digest} of 40 requests; this one is of mine"
    with pytest.raises(ValueError, match=text):
        one.assert_no_worse([other], ttft_p95=1.0)
    with pytest.raises(ValueError, match=text):
        one.assert_hit_ratio(times=(1.0, other.to_json()))


@pytest.mark.parametrize(
    "require",
    [
        lambda report: report.assert_slo(ttft_ms=1),
        lambda report: report.assert_hit_ratio(at_least=0.1),
        lambda report: report.assert_balanced(),
        lambda report: report.assert_no_worse([report], ttft_p95=1),
        lambda report: report.assert_regret(DynamoRouter()),
        lambda report: report.assert_no_drift(),
    ],
    ids=["slo", "hit-ratio", "balanced", "no-worse", "regret", "no-drift"],
)
def test_assertions_on_a_report_without_requests_are_refused(require):
    with pytest.raises(ValueError, match="the report has no requests: none arrived"):
        require(fleet(RightRouter(range(2)), stop_ms=0).run(trace()))


def test_assertions_on_a_harness_report_without_requests_are_refused():
    world = RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=2))
    report = world.fleet(RoundRobin(), stop_ms=0).run(trace())
    with pytest.raises(ValueError, match="assert_no_event_errors: the report has no requests: none arrived"):
        report.assert_no_event_errors()


@pytest.mark.parametrize(
    ("require", "text"),
    [
        (lambda r: r.assert_slo(), r"assert_slo needs a limit"),
        (lambda r: r.assert_slo(ttft_ms=-1), r"assert_slo: ttft_ms must be a finite number of at least 0"),
        (lambda r: r.assert_slo(ttft_ms=1, at=95), r"assert_slo: at must be a finite number from 0 to 1, got 95"),
        (lambda r: r.assert_hit_ratio(), r"assert_hit_ratio needs at_least="),
        (lambda r: r.assert_hit_ratio(at_least=2), r"assert_hit_ratio: at_least must be a finite number from 0 to 1"),
        (lambda r: r.assert_balanced(0.5), r"assert_balanced: within must be a finite number of at least 1"),
        (lambda r: r.assert_balanced(of="request"), r"unknown of 'request'.*requests"),
        (lambda r: r.assert_no_worse([r]), r"assert_no_worse needs figures"),
        (lambda r: r.assert_no_worse([], ttft_p95=1), r"than must have a report at least"),
        (lambda r: r.assert_no_worse([r], ttft_p96=1), r"unknown figure 'ttft_p96'"),
        (lambda r: r.assert_no_worse([r], goodput=1), r"goodput has no value here: it was not recorded"),
        (lambda r: r.assert_no_worse([r], overlap_best=1), r"neither more nor less of overlap_best is better"),
        (lambda r: r.assert_no_event_errors(), r"events of bare engines are not judged; use kv_fleet"),
        (lambda r: r.figure("hits"), r"unknown figure 'hits'"),
        (lambda r: r.figure(["hit_ratio"]), r"unknown figure \['hit_ratio'\]"),
        (lambda r: r.assert_regret(DynamoRouter()), r"regret needs the candidates of each pick: .* record=True"),
        (lambda r: r.figure("hit_ratio", 7), r"there is no worker 7; there are 0, 1"),
        (
            lambda r: r.run.counts("request"),
            r"unknown count 'request'; did you mean 'requests' .*known: requests, prompt_tokens",
        ),
        (lambda r: r.run.values("ttfb"), r"unknown distribution 'ttfb'; .*known: ttft, ttst, tpot, e2e, itl, per_user"),
        (lambda r: r.explain_pick(40), r"there is no pick 40; there are 40, counted from 0"),
    ],
    ids=map(str, range(20)),
)
def test_invalid_arguments_of_assertions_are_refused(require, text):
    with pytest.raises(ValueError, match=text):
        require(fleet().run(trace()))


def test_of_best_has_no_value_if_no_worker_held_a_block():
    report = fleet(RoundRobin()).run([request(500 * each, [each]) for each in range(3)])
    assert report.figure("of_best") is None
    with pytest.raises(ValueError, match="of_best has no value here: there was nothing to count"):
        report.assert_hit_ratio(of_best=0.5)


def test_assert_no_worse_refuses_reports_without_latencies():
    nothing = fleet(args=MockEngineArgs(num_gpu_blocks=96, block_size=4, max_model_len=2, semantics="1.6.1")).run(
        trace()
    )
    assert (nothing.figure("completed"), nothing.to_json()["p95_ttft_ms"]) == (0, 0)
    something = fleet().run(trace())
    for one, other in ((nothing, something), (something, nothing), (nothing, nothing.to_json())):
        with pytest.raises(ValueError, match=r"assert_no_worse: ttft_p95 has no value here: .* nothing to count"):
            one.assert_no_worse(other, ttft_p95=1.5)
    something.assert_no_worse([nothing, something], ttft_p95=1)


def test_times_of_assert_hit_ratio_must_be_a_factor_and_a_report():
    report = fleet().run(trace())
    with pytest.raises(TypeError, match=r"assert_hit_ratio: times must be \(factor, report\), got 1.5"):
        report.assert_hit_ratio(times=1.5)
    with pytest.raises(TypeError, match=r"assert_hit_ratio: times\[1\]: other must be a Report"):
        report.assert_hit_ratio(times=(1.0, 2.0))


@pytest.mark.parametrize("name", ["ttft_ms", "itl_ms", "e2e_ms"])
@pytest.mark.parametrize("value", [-1, "1"])
def test_limits_of_objectives_must_be_times(name, value):
    with pytest.raises(ValueError, match=f"Objectives: {name} must be a finite number of at least 0"):
        Objectives(**{name: value})


def test_slo_must_be_an_objectives_object():
    with pytest.raises(TypeError, match=r"^Fleet: slo must be Objectives\(ttft_ms=, itl_ms=, e2e_ms=\), got 500$"):
        fleet(slo=500)


def test_prompts_of_tokens_have_overlap_figures():
    rows = [FleetRequest(range(12), 2, 500.0 * each) for each in range(2)]
    report = fleet(Fixed(0, 0)).run(rows)
    assert report.figure("overlap_selected") == 3
    assert report.figure("promised_not_found") == 0
