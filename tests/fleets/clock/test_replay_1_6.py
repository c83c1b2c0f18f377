"""Replays equal recordings of ai-dynamo-runtime 1.6.1 bit for bit: figures and rows."""

import pytest
from depth import few
from recorded_replays import recorded, request_of

from pytest_kvmock import MockEngine, replay
from pytest_kvmock.engines import MockEngineArgs, OutOfBlocks
from pytest_kvmock.fleets import EngineStalled, Objectives

BACKENDS = {"vllm": "vllm", "sglang": "mocker_sglang_1_6", "trtllm": "vllm"}
FILES = ("vllm", "sglang", "trtllm", "disaggregated", "moments", "ranks")
CASES = {name: recorded(f"replay_1.6.1_{name}.json.gz") for name in FILES}
RUNS = [pytest.param(case, id=f"{name}-{case['seed']}") for name, cases in CASES.items() for case in few(cases, 29)]


OPTIONS = {"max_sim_time_ms": "stop_ms"}
LIMITS = {"sla_ttft_ms": "ttft_ms", "sla_itl_ms": "itl_ms", "sla_e2e_ms": "e2e_ms"}


def engines_of(case, kind, number, watched):
    ranks = case.get("dp_size", 1)
    args = MockEngineArgs.from_json({"engine": case[kind], "dp_size": ranks})
    count = case["replay"].get(number, 1) * ranks
    engines = [MockEngine(args, backend=BACKENDS[args.engine_type]) for _ in range(count)]
    for engine in engines if watched else ():
        engine.on_pass(lambda done: None)
    return engines


def play(case, *, watched=False, **options):
    how, prefill = case["replay"], []
    if "engine" in case:
        decode = engines_of(case, "engine", "num_workers", watched)
    else:
        decode = engines_of(case, "decode_engine", "num_decode_workers", watched)
        prefill = engines_of(case, "prefill_engine", "num_prefill_workers", watched)
    return replay(
        map(request_of, case["requests"]),
        decode,
        prefill,
        how.get("replay_concurrency"),
        how.get("arrival_speedup_ratio", 1.0),
        trace_block_size=how["trace_block_size"],
        **{ours: how[theirs] for theirs, ours in OPTIONS.items() if theirs in how},
        slo=Objectives(**{ours: how[theirs] for theirs, ours in LIMITS.items() if theirs in how}),
        **options,
    )


def by_text(rows):
    return sorted(rows, key=str)


def check_figures(summary, report):
    """Compare figures bit for bit, except those that the original sums in another order."""
    actual = report.to_json()
    summed = {key for key in summary if key.startswith(("mean_", "std_", "gpu_hours")) or "seconds" in key}
    exact = {key: value for key, value in summary.items() if key not in summed}
    assert exact == {key: actual[key] for key in exact}
    for key in summed:
        assert summary[key] == pytest.approx(actual[key], rel=1e-9, abs=1e-9), key


def check(run, report):
    """Compare figures and rows with the recording."""
    check_figures(run["summary"], report)
    # The recording leaves out None values, with a few exceptions.
    columns = {column for row in run["per_request"] for column in row}
    expected = [{column: row.get(column) for column in columns} for row in run["per_request"]]
    rows = [{column: row[column] for column in columns} for row in report.per_request()]
    assert by_text([tuple(sorted(row.items())) for row in rows]) == by_text(
        [tuple(sorted(row.items())) for row in expected]
    )


@pytest.mark.parametrize("watched", [False, True], ids=["in-one-go", "each-pass"])
@pytest.mark.parametrize("case", RUNS)
def test_a_replay_equals_the_recorded_one(case, watched):
    run = case["runs"]["1.6.1"]
    if "error" in run:
        with pytest.raises((EngineStalled, OutOfBlocks)):
            play(case, watched=watched)
        return
    check(run, play(case, watched=watched))
