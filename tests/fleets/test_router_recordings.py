"""Dynamo's router over our engines compared with recordings of the original: candidate costs, times, figures.

The original draws among equal costs. Our replay therefore follows its recorded choices and fails if a choice is not
among the cheapest.
"""

from itertools import permutations
from random import Random

import pytest
from depth import few
from follower import Follower
from planned import planned
from recorded_replays import check_summary, recorded, request_of
from test_replay_1_6 import BACKENDS as BACKENDS_1_6
from test_replay_1_6 import check_figures

from pytest_kvmock import Fleet, MockEngine
from pytest_kvmock.engines import MockEngineArgs
from pytest_kvmock.fleets import DynamoRouter, EngineStalled, TraceRequest

PICKS = recorded("replay_kv_picks.json.gz")["cases"]
SUMMARIES = recorded("replay_kv_router.json.gz")["cases"]
OF_WORKERS = {  # our report of 1.2.1 lacks these
    "prefill_worker_seconds",
    "decode_worker_seconds",
    "prefill_gpus_per_worker",
    "decode_gpus_per_worker",
    "gpu_hours",
}


def engines_of(case, version):
    args = MockEngineArgs.from_json(case["engine"], **({} if version is None else {"semantics": version}))
    return [MockEngine(args) for _ in range(case["replay"]["num_workers"])]


def fleet_of(case, version, router, **options):
    how = case["replay"]
    return Fleet(
        engines_of(case, version),
        router,
        concurrency=how.get("replay_concurrency"),
        arrival_speedup=how.get("arrival_speedup_ratio", 1.0),
        trace_block_size=how["trace_block_size"],
        **options,
    )


@pytest.mark.parametrize("plans", [True, False], ids=["plans", "each-pass"])
@pytest.mark.parametrize(
    "case", few([pytest.param(case, id=f"{case['version']}-{case['scheduler']}-{case['seed']}") for case in PICKS], 40)
)
def test_every_candidate_has_the_recorded_cost(case, plans):
    version = case["version"]
    router = Follower(case["picks"], version, **case["router"])
    requests = [
        TraceRequest(timestamp, input_length, output_length, tuple(hash_ids), session, delay)
        for timestamp, input_length, output_length, hash_ids, session, delay in case["requests"]
    ]
    report = planned(fleet_of(case, version, router), plans).run(requests)
    assert not router.left
    check_summary(case["summary"], report)
    if "rows" in case:
        columns = (
            "arrival_time_ms",
            "first_admit_ms",
            "first_token_ms",
            "last_token_ms",
            "input_length",
            "output_length",
        )
        rows = [
            [*(row[name] for name in columns), row["reused_input_tokens"], worker]
            for row, worker in zip(report.per_request(), report.run.served_by, strict=True)
        ]
        assert sorted(case["rows"], key=str) == sorted(rows, key=str)


@pytest.mark.parametrize(
    ("case", "version"),
    [pytest.param(case, version, id=f"{case['seed']}-{version}") for case in SUMMARIES for version in case["runs"]],
)
def test_a_replay_behind_the_router_has_the_recorded_figures(case, version):
    router = DynamoRouter(version, rng=Random(1))
    report = fleet_of(case, version, router).run(map(request_of, case["requests"]))
    recorded_figures = case["runs"][version]["summary"]
    check_summary({name: recorded_figures[name] for name in recorded_figures.keys() - OF_WORKERS}, report)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case["seed"])) for case in recorded("replay_1.6.1_kv_trtllm.json.gz")]
)
def test_a_replay_of_trtllm_behind_the_router_has_the_recorded_figures_and_rows(case):
    """Compare everything except the worker of a request, which is drawn among equal candidates."""
    run = case["runs"]["1.6.1"]
    fleet = fleet_of({**case, "engine": {"engine": case["engine"]}}, None, DynamoRouter("1.6.1", rng=Random(1)))
    if "error" in run:
        with pytest.raises(EngineStalled):
            fleet.run(map(request_of, case["requests"]))
        return
    report = fleet.run(map(request_of, case["requests"]))
    check_figures(run["summary"], report)
    columns = sorted({name for row in run["per_request"] for name in row} - {"decode_worker_idx"})
    expected, ours = (
        sorted(str([row.get(name) for name in columns]) for row in rows)
        for rows in (run["per_request"], report.per_request())
    )
    assert ours == expected


LATER = {name: recorded(f"replay_1.6.1_{name}.json.gz")["cases"] for name in ("kv_router", "kv_sglang")}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{name}-{case['seed']}") for name, cases in LATER.items() for case in few(cases, 24)],
)
def test_a_replay_behind_the_router_of_1_6_equals_the_recorded_one(case):
    options = {name: value for name, value in case.get("router", {}).items() if name != "kv_event_lag_ms"}
    args = MockEngineArgs.from_json({"engine": case["engine"]})
    how, run = case["replay"], case["runs"]["1.6.1"]
    engines = [MockEngine(args, backend=BACKENDS_1_6[args.engine_type]) for _ in range(how["num_workers"])]
    fleet = Fleet(
        engines,
        DynamoRouter("1.6.1", rng=Random(1), **options),
        concurrency=how.get("replay_concurrency"),
        arrival_speedup=how.get("arrival_speedup_ratio", 1.0),
        trace_block_size=how["trace_block_size"],
        event_delay_ms=how.get("kv_event_lag_ms", case.get("router", {}).get("kv_event_lag_ms", 0.0)),
    )
    report = fleet.run(map(request_of, case["requests"]))
    rows = [{name: row[name] for name in row.keys() - {"route"}} for row in run["per_request"]]
    columns = sorted({name for row in rows for name in row} - {"decode_worker_idx"})
    check_figures(run["summary"], report)

    def lines(rows, picks, worker_of):
        """Return one line per request: times and counts, worker, its overlap, greatest overlap."""
        return sorted(
            (str([row.get(name) for name in columns]), worker_of[row["decode_worker_idx"]], *overlaps)
            for row, overlaps in zip(rows, picks, strict=True)
        )

    recorded_overlaps = [
        (row["route"]["selected_overlap_blocks"], row["route"]["best_available_overlap_blocks"])
        for row in run["per_request"]
    ]
    own_overlaps = [(pick.overlap, pick.best_overlap) for pick in report.picks]
    workers = range(len(engines))
    expected = lines(rows, recorded_overlaps, workers)
    # The recording names workers in the order of their first use.
    own = (lines(report.per_request(), own_overlaps, names) for names in permutations(workers))
    assert expected in own
