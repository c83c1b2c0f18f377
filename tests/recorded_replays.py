"""Recorded replays of Dynamo's own programs, and the comparison of ours with them."""

import gzip
import json
from pathlib import Path

import pytest

from pytest_kvmock import MockEngine, replay
from pytest_kvmock.engines import MockEngineArgs, OutOfBlocks
from pytest_kvmock.fleets import EngineStalled, TraceRequest

DATA = Path(__file__).parent / "data"

COLUMNS = (
    "arrival_time_ms",
    "first_admit_ms",
    "first_token_ms",
    "last_token_ms",
    "input_length",
    "output_length",
    "reused_input_tokens",
)


def recorded(name):
    """Return the cases of one file."""
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


def runs_of(name, *versions):
    """Return parameters: each case of a file with each version that it was recorded with."""
    return [
        pytest.param(case, version, id=f"{case['id']}-{version}")
        for case in recorded(name)
        for version in versions
        if version in case["runs"]
    ]


def request_of(row):
    """Return a request of a trace from a parsed line."""
    return TraceRequest(
        row.get("timestamp"),
        row["input_length"],
        row["output_length"],
        tuple(row["hash_ids"]),
        row.get("session_id"),
        row.get("delay"),
    )


def engines_of(case, version, backend="lineage", *, watched=False):
    """Return the engines of a case; watched engines run each pass separately because they have a listener."""
    count = case["replay"].get("num_workers", 1)
    args = MockEngineArgs.from_json(case["engine"], semantics=version)
    engines = [MockEngine(args, backend=backend) for _ in range(count)]
    if watched:
        for engine in engines:
            engine.on_pass(lambda done: None)
    return engines


def play(case, version, backend="lineage", *, watched=False):
    """Replay a case."""
    how = case["replay"]
    return replay(
        map(request_of, case["requests"]),
        engines_of(case, version, backend, watched=watched),
        concurrency=how.get("replay_concurrency"),
        arrival_speedup=how.get("arrival_speedup_ratio", 1.0),
        trace_block_size=how["trace_block_size"],
    )


def rows_of(report):
    """Return one row per request, sorted."""
    return sorted((tuple(row[column] for column in COLUMNS) for row in report.per_request()), key=str)


def check_summary(expected, report):
    """Compare all figures: exactly, except means and deviations, which the original sums in another order."""
    actual = report.to_json()
    exact = {key: value for key, value in expected.items() if not key.startswith(("mean_", "std_"))}
    assert exact == {key: actual[key] for key in exact}
    for key in expected.keys() - exact.keys():
        assert actual[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-9), key


def check_run(case, version, backend="lineage", *, watched=False, semantics=None):
    """Replay a case as a version did; if that did not end, ours must raise a named error."""
    run = case["runs"][version]
    semantics = semantics or version
    if "error" in run:
        with pytest.raises((EngineStalled, OutOfBlocks)):
            play(case, semantics, backend, watched=watched)
        return
    report = play(case, semantics, backend, watched=watched)
    check_summary(run["summary"], report)
    if "per_request" in run:
        expected = sorted(map(tuple, run["per_request"]), key=str)
        assert rows_of(report) == expected
