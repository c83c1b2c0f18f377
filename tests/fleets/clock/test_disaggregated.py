"""Replays with prefill and decode engines equal recordings of Dynamo's mocker 1.2.1 bit for bit."""

import re

import pytest
from depth import few
from recorded_replays import check_summary, request_of, runs_of

from pytest_kvmock import MockEngine, replay
from pytest_kvmock.engines import MockEngineArgs, OutOfBlocks
from pytest_kvmock.fleets import EngineStalled, TraceRequest

RUNS = runs_of("replay_disaggregated.json.gz", "1.2.1")


def engines_of(case, kind, version, watched):
    args = MockEngineArgs.from_json(case[f"{kind}_engine"], semantics=version)
    engines = [MockEngine(args) for _ in range(case["replay"].get(f"num_{kind}_workers", 1))]
    for engine in engines if watched else ():
        engine.on_pass(lambda done: None)
    return engines


def play(case, version, watched):
    how = case["replay"]
    return replay(
        map(request_of, case["requests"]),
        engines_of(case, "decode", version, watched),
        engines_of(case, "prefill", version, watched),
        how.get("replay_concurrency"),
        how.get("arrival_speedup_ratio", 1.0),
        trace_block_size=how["trace_block_size"],
    )


@pytest.mark.parametrize("watched", [False, True], ids=["in-one-go", "each-pass"])
@pytest.mark.parametrize(("case", "version"), few(RUNS, 24))
def test_a_replay_with_handoffs_equals_the_recorded_one(case, version, watched):
    run = case["runs"][version]
    if "error" in run:
        with pytest.raises(EngineStalled):
            play(case, version, watched)
        return
    check_summary(run["summary"], play(case, version, watched))


def pair(blocks, **link):
    """Return a prefill engine and a decode engine with the given number of blocks of 4 tokens."""
    sizes = {"block_size": 4, "semantics": "1.6.1"}
    prefill = MockEngine(MockEngineArgs(worker_type="prefill", num_gpu_blocks=100, **sizes, **link))
    return prefill, MockEngine(MockEngineArgs(worker_type="decode", num_gpu_blocks=blocks, **sizes, **link))


def test_the_source_engine_keeps_its_blocks_until_the_transfer_ends():
    prefill, decode = pair(100, kv_bytes_per_token=1_000_000, kv_transfer_bandwidth=1.0)
    report = replay([TraceRequest(0, 8, 2, (1, 2))], [decode], [prefill], trace_block_size=4)
    row = report.per_request()[0]
    assert row["source_held_ms"] == row["destination_reserved_ms"]
    assert row["source_held_ms"] + 8.0 == row["destination_activated_ms"] == row["source_released_ms"]
    assert (prefill.metrics.active_blocks, decode.metrics.active_blocks) == (0, 0)


def test_a_prompt_larger_than_its_destination_fails_and_the_others_are_served():
    prefill, decode = pair(8)
    trace = [TraceRequest(0, 8, 2, (1, 2)), TraceRequest(1, 40, 2, tuple(range(10, 20))), TraceRequest(2, 8, 2, (5, 6))]
    report = replay(trace, [decode], [prefill], trace_block_size=4)
    assert [request.status for request in report.requests] == ["finished", "failed", "finished"]
    assert pytest.approx(report.figure("duration_ms")) == 80.319203
    assert prefill.metrics.active_blocks == 0


def test_a_refused_trace_leaves_all_engines_unchanged():
    prefill, decode = pair(8)
    trace = [TraceRequest(0, 8, 2, (1, 2)), TraceRequest(1, 32, 2, tuple(range(8)))]
    problem = "requests[1] of 32 tokens and 2 of output can never fit: 9 blocks are needed"
    with pytest.raises(OutOfBlocks, match=re.escape(problem)):
        replay(trace, [decode], [prefill], trace_block_size=4)
    for engine in (prefill, decode):
        assert (engine.passes, engine.metrics.active_blocks, engine.worker.requests) == (0, 0, [])
    assert [each.status for each in replay(trace[:1], [decode], [prefill], trace_block_size=4).requests] == ["finished"]


def test_a_prompt_rejected_by_every_prefill_engine_need_not_fit_a_decode_engine():
    prefill, decode = pair(102)
    trace = [TraceRequest(0, 8, 2, (1, 2)), TraceRequest(1, 404, 50, tuple(range(101)))]
    report = replay(trace, [decode], [prefill], trace_block_size=4)
    assert [each.prompt_tokens for each in report.requests if each.status == "rejected"] == [404]
    assert [each.prompt_tokens for each in report.completed] == [8]


def test_a_second_replay_continues_at_the_time_of_the_first():
    prefill, decode = pair(100, kv_bytes_per_token=1_000_000, kv_transfer_bandwidth=1.0)
    trace = [TraceRequest(0, 8, 2, (1, 2))]
    first, second = (replay(trace, [decode], [prefill], trace_block_size=4).requests[0] for _ in range(2))
    assert first.token_ms[-1] == second.arrival_ms
    assert second.arrival_ms < second.admitted_ms + 1e-9 < second.token_ms[0]


def test_an_engine_that_cannot_reserve_blocks_is_not_a_destination():
    sizes = {"engine_type": "sglang", "block_size": 4, "num_gpu_blocks": 50}
    prefill, decode = (MockEngine(MockEngineArgs(worker_type=kind, **sizes)) for kind in ("prefill", "decode"))
    with pytest.raises(ValueError, match=r"of semantics='1.2.1' over any backend, or of '1.6.1'; got .* of 'mixed'$"):
        replay([TraceRequest(0, 8, 2, (1, 2))], [decode], [prefill], trace_block_size=4)
    assert decode.is_idle
