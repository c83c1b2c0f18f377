"""Worked examples of Dynamo 1.6.1 with figures printed by the running program, and the arguments that it refuses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import EngineProfile, MockEngine, MockEngineArgs, RouterHarness, replay
from pytest_kvmock.engines import OutOfBlocks
from pytest_kvmock.fleets import EngineStalled, Objectives, TraceRequest


def args_of(dp_size=1, **engine):
    return MockEngineArgs.from_json({"engine": {"block_size": 4, **engine}, "dp_size": dp_size})


def trace_of(*rows, size=4):
    """Return requests of (timestamp, prompt, output); prompts share no block unless a fourth item is their first id."""
    requests = []
    for number, (at, prompt, output, *first) in enumerate(rows):
        start = first[0] if first else 1000 * (number + 1)
        requests.append(TraceRequest(at, prompt, output, tuple(range(start, start + -(-prompt // size)))))
    return requests


def play(rows, *, count=1, dp_size=1, concurrency=None, size=4, options=None, **engine):
    args = args_of(dp_size, block_size=size, **engine)
    engines = [MockEngine(args) for _ in range(count * dp_size)]
    trace = rows if isinstance(rows[0], TraceRequest) else trace_of(*rows, size=size)
    return replay(trace, engines, (), concurrency, trace_block_size=size, **(options or {}))


def rounded(values):
    return [round(value, 6) for value in values]


def times(report):
    return [rounded(request.token_ms) for request in report.requests]


def test_the_prefill_gives_the_first_token_and_later_tokens_take_time_by_length():
    report = play([(0, 128, 3)], size=64, num_gpu_blocks=100)
    assert [rounded([18.451798, 18.451798 + 6.818182, 18.451798 + 6.818182 + 6.826458])] == times(report)
    assert report.to_json()["median_itl_ms"] == 6.827783797542894  # from a sketch: above the greatest gap


def test_a_fixed_timing_model_gives_constant_pass_times():
    report = play([(0, 8, 3)], timing_model={"type": "fixed", "prefill_ms": 10, "decode_ms": 0.5})
    assert times(report) == [[10.0, 10.5, 11.0]]


def test_a_fixed_prefill_time_is_not_charged_for_a_cached_prompt():
    rows = [(0, 8, 1, 7), (100, 8, 0, 7)]
    report = play(rows, backend="sglang", timing_model={"type": "fixed", "prefill_ms": 10, "decode_ms": 1})
    assert [request.ended_ms for request in report.requests] == [10.0, 100.0]


def test_the_last_token_of_a_prompt_is_always_computed():
    report = play([(0, 128, 1, 7), (100, 128, 1, 7), (200, 130, 1, 7)], size=64)
    assert [request.reused_tokens for request in report.requests] == [0, 64, 128]
    assert times(report)[1:] == [[117.474885], [216.531789]]
    alike = play([(0, 8, 1, 7), (0, 8, 1, 7)])
    assert (times(alike), [request.reused_tokens for request in alike.requests]) == ([[16.683682]] * 2, [0, 4])


def test_a_block_is_allocated_in_the_pass_that_computes_its_first_token():
    assert times(play([(0, 8, 5)], num_gpu_blocks=3))[0][-1] == 148.895414
    with pytest.raises(OutOfBlocks):
        play([(0, 8, 6)], num_gpu_blocks=3)


def test_a_prompt_that_can_never_fit_is_rejected_when_its_turn_comes():
    report = play([(0, 8, 3), (1, 16, 3), (1, 4, 3)], num_gpu_blocks=3)
    assert [request.status for request in report.requests] == ["finished", "rejected", "finished"]
    assert round(report.requests[2].admitted_ms, 6) == 81.264997
    assert report.per_request()[1]["terminal_status"] == "rejected"
    assert report.to_json()["completed_requests"] == 2


def test_a_request_ends_at_max_model_len():
    report = play([(0, 8, 9), (0, 12, 9)], max_model_len=12)
    assert [(each.generated_tokens, each.status) for each in report.requests] == [(4, "finished"), (0, "rejected")]
    assert [row["requested_output_length"] for row in report.per_request()] == [9, 9]


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_request_without_output_ends_when_its_prompt_is_computed(backend):
    report = play([(0, 8, 0)], backend=backend)
    assert (
        round(report.requests[0].ended_ms, 6),
        report.requests[0].status,
        report.requests[0].token_ms,
    ) == (16.622914, "finished", [])


def test_a_preempted_request_hits_the_blocks_that_it_generated():
    report = play([(0, 8, 6), (0, 8, 6)], num_gpu_blocks=5)
    assert [(own[0], own[-1]) for own in times(report)] == [(16.744463, 154.396713), (16.744463, 308.611123)]
    assert [request.reused_tokens for request in report.requests] == [0, 4]
    assert report.to_json()["committed_prefill_tokens"] == 21
    assert [row["admission_count"] for row in report.per_request()] == [1, 2]


def test_a_turn_of_a_closed_loop_arrives_exactly_after_its_delay():
    requests = [
        TraceRequest(0, 8, 2, (1, 2), "a"),
        TraceRequest(None, 12, 2, (3, 4, 5), "a", 50),
        TraceRequest(0, 8, 30, (6, 7), "b"),
    ]
    second = play(requests, concurrency=2, num_gpu_blocks=100, options={"arrival_speedup": 2.0}).requests[2]
    assert tuple(rounded((second.arrival_ms, second.admitted_ms))) == (74.862790, 77.135244)


def test_goodput_counts_the_requests_that_meet_all_objectives():
    rows = [(0, 8, 4, 7), (10, 8, 4, 7), (20, 8, 4, 7)]
    figures = play(rows, num_gpu_blocks=100, options={"slo": Objectives(ttft_ms=17)}).to_json()
    assert tuple(
        figures[f"goodput_{name}"]
        for name in ("completed_requests", "request_throughput_rps", "output_throughput_tok_s")
    ) == (1, 11.075033941933398, 44.30013576773359)
    assert (
        play(rows, num_gpu_blocks=100, options={"slo": Objectives(itl_ms=6)}).to_json()["goodput_completed_requests"]
        == 0
    )
    assert play(rows, options={"slo": Objectives(e2e_ms=1000)}).to_json()["goodput_completed_requests"] == 3
    assert not any(name.startswith("goodput") for name in play(rows).to_json())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"slo": Objectives(ttft_ms=0)},
            r"replay: slo: a limit must be above 0, got Objectives\(ttft_ms=0, itl_ms=None, e2e_ms=None\)",
        ),
        (
            {"slo": Objectives(e2e_ms=1, itl_ms=1)},
            "replay: slo: e2e_ms cannot be given together with ttft_ms or itl_ms",
        ),
        ({"stop_ms": -1}, "replay: stop_ms must be a finite number of at least 0 .milliseconds., or None, got -1"),
    ],
)
def test_invalid_objectives_and_stop_times_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        play([(0, 8, 4)], options=options)


def test_stop_ms_ends_a_replay():
    rows = [(0, 8, 4), (10, 8, 4), (20, 8, 4)]
    figures = play(rows, options={"stop_ms": 20}).to_json()
    assert tuple(
        figures[name] for name in ("num_requests", "completed_requests", "duration_ms", "decode_worker_seconds")
    ) == (3, 0, 0.0, 0.02)
    assert play(rows, options={"stop_ms": 0}).to_json()["num_requests"] == 1
    engine = MockEngine(args_of())
    replay(trace_of(*rows), [engine], stop_ms=20, trace_block_size=4)
    assert engine.is_idle


@pytest.mark.parametrize(
    ("stop_ms", "completed", "tokens", "prefilled", "clock"),
    [
        (0, 0, 0, 0, 0),
        (30, 0, 0, 8, 30),
        (60, 0, 0, 16, 40.188022),
        (80, 1, 4, 24, 74.704297),
        (300, 2, 8, 24, 291.742738),
    ],
)
def test_requests_that_end_after_stop_ms_do_not_count(stop_ms, completed, tokens, prefilled, clock):
    rows = [(0, 8, 4), (10, 8, 4), (30, 8, 30)]
    report = play(rows, num_gpu_blocks=100, options={"stop_ms": stop_ms})
    figures = report.to_json()
    assert (completed, tokens, prefilled, clock) == (
        figures["completed_requests"],
        figures["total_output_tokens"],
        figures["committed_prefill_tokens"],
        round(figures["decode_worker_seconds"] * 1000, 6),
    )
    assert ["completed"] * completed == [row["terminal_status"] for row in report.per_request()]
    assert all(moment <= stop_ms for request in report.requests for moment in request.token_ms)
    assert {"aborted"} >= {request.status for request in report.requests if request.ended_ms is None}


@pytest.mark.parametrize(("concurrency", "stop_ms"), [(None, None), (2, None), (None, 50)])
def test_in_a_trace_with_sessions_a_request_without_one_is_named_by_its_row(concurrency, stop_ms):
    """Also in an open loop whose trace has a session of two turns, even if the second turn is not reached."""
    rows = [
        TraceRequest(0, 8, 4, (1, 2), "a"),
        TraceRequest(100, 8, 4, (3, 4), "a"),
        TraceRequest(0, 8, 1, (5, 6)),
    ]
    report = play(rows, concurrency=concurrency, num_gpu_blocks=100, options={"stop_ms": stop_ms})
    named = {("a", 0), ("a", 1), ("request_3", 0)} - ({("a", 1)} if stop_ms else set())
    assert named == {(row["session_id"], row["turn_index"]) for row in report.per_request()}


def test_an_sglang_engine_without_progress_stalls_before_stop_ms():
    """As in the original, whatever else would happen; the second prompt with its output has no room here."""
    rows = [(0, 8, 2), (0, 40, 8), (300, 8, 2)]
    with pytest.raises(EngineStalled) as caught:
        play(rows, count=2, backend="sglang", size=8, num_gpu_blocks=6, options={"stop_ms": 200})
    assert caught.value.now_ms < 200


def test_an_sglang_pass_either_computes_prompts_or_generates_tokens():
    report = play([(0, 8, 6), (20, 8, 2)], backend="sglang", num_gpu_blocks=100)
    first, second = times(report)
    assert (first[0], first[-1]) == (16.622914, 70.446501)
    assert second == [40.188022, 48.435421]


def test_sglang_requests_without_output_end_before_the_others_of_their_pass():
    """Their pages are older and evicted first: the third request evicts a page of the second, none of the first."""
    rows = [(0, 8, 1, 10), (0, 8, 0, 20), (100, 12, 1, 30), (200, 12, 1, 10)]
    last = play(rows, backend="sglang", num_gpu_blocks=6).requests[3]
    assert (last.reused_tokens, rounded(last.token_ms)) == (8, [216.56216])


def test_sglang_sorts_its_queue_even_in_passes_that_admit_no_request():
    """The last request overtakes the one that waits with a chunk, because more of its prompt was cached when sorted."""
    rows = [(0, 8, 0, 2), (0, 8, 8, 1), (0, 2, 3, 1), (0, 5, 0, 3), (73, 8, 2, 2)]
    requests = [TraceRequest(at, prompt, output, (name,)) for at, prompt, output, name in rows]
    sglang = {"schedule_policy": "lpm", "chunked_prefill_size": 8}
    engine = MockEngine(args_of(backend="sglang", num_gpu_blocks=8, prefill_decode_interval=2, sglang=sglang))
    waited, last = replay(requests, [engine], trace_block_size=16).requests[3:]
    assert (round(waited.ended_ms, 6), rounded(last.token_ms)) == (227.816678, [156.151793, 186.857496])


def test_later_chunks_of_an_sglang_prompt_reuse_no_tokens():
    sglang = {"chunked_prefill_size": 8}
    request = play([(0, 20, 1)], backend="sglang", sglang=sglang).requests[0]
    assert (rounded(request.token_ms), request.reused_tokens) == ([49.807988], 0)


def test_the_ranks_of_a_worker_run_in_lock_step():
    report = play([(0, 8, 4), (10, 8, 4), (20, 8, 4)], dp_size=2, num_gpu_blocks=100)
    assert report.run.served_by == (0, 1, 0)
    second = report.requests[1]
    assert tuple(rounded((second.admitted_ms, second.token_ms[0]))) == (16.622914, 33.245828)
    assert [row["routing_history"][0]["dp_rank"] for row in report.per_request()] == [0, 1, 0]


def test_a_pass_that_defers_prefills_defers_a_prompt_even_if_the_budget_has_room():
    """The pass defers prefills, although decode leaves one token of the budget for the third prompt."""
    report = play(
        [(0, 2, 20), (0, 2, 20), (11.5, 6, 2)],
        dp_size=2,
        num_gpu_blocks=100,
        max_num_batched_tokens=2,
        prefill_schedule_interval=2,
        timing_model={"type": "fixed", "prefill_ms": 10, "decode_ms": 1},
    )
    third = report.requests[2]
    assert (third.admitted_ms, third.token_ms) == (13.0, [84.0, 85.0])


def test_an_incomplete_set_of_ranks_is_refused():
    engines = [MockEngine(args_of(2)) for _ in range(3)]
    with pytest.raises(ValueError, match=r"engines are the ranks of workers, dp_size=2 each"):
        replay(trace_of((0, 8, 1)), engines, trace_block_size=4)


def test_a_chunk_smaller_than_one_token_per_rank_is_refused():
    args = args_of(3, backend="sglang", block_size=1, sglang={"chunked_prefill_size": 2})
    with pytest.raises(ValueError, match=r"sglang.chunked_prefill_size must be at least dp_size, 3"):
        MockEngine(args)


def test_events_are_published_when_a_pass_ends():
    engine = MockEngine(args_of(num_gpu_blocks=20))
    assert engine.args.events_visible_at == "pass_end"
    assert (engine.args.semantics, engine.worker.backend) == ("1.6.1", "vllm")


@pytest.mark.parametrize("backend", ["lineage", "hash_cache", "sglang"])
def test_a_backend_unknown_to_1_6_1_is_refused(backend):
    kind = "sglang" if "sglang" in backend else "vllm"
    hint = r" \(of a test: @pytest.mark.kv_backends\('\w+'\)\)$"
    with pytest.raises(
        ValueError, match=rf"^semantics='1.6.1' of engine_type '{kind}' schedules over .*; got '{backend}'" + hint
    ):
        MockEngine(MockEngineArgs(engine_type=kind, block_size=4, semantics="1.6.1"), backend=backend)


@pytest.mark.parametrize(
    "field",
    [{"max_model_len": 9}, {"prefill_schedule_interval": 2}, {"kv_transfer_timing_mode": "destination_missing"}],
)
def test_arguments_of_1_6_1_are_refused_by_engines_of_other_semantics(field):
    with pytest.raises(
        ValueError, match=r"is an argument of 1.6.1; this engine follows 1.2.1 \(semantics='1.6.1' has it\)$"
    ):
        MockEngine(MockEngineArgs(block_size=4, **field), backend="lineage")
    assert MockEngine(MockEngineArgs(block_size=4, **field), backend="vllm")


def test_a_request_that_is_never_admitted_stalls_the_engine():
    with pytest.raises(EngineStalled):  # it fits but is never admitted: the free room must exceed what it takes
        play([(0, 8, 4)], backend="sglang", num_gpu_blocks=3)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**20),
    blocks=st.integers(6, 30),
    size=st.sampled_from((1, 2, 4)),
    caching=st.booleans(),
)
def test_pages_of_the_sglang_mock_of_1_6_are_free_cached_or_held(seed, blocks, size, caching):
    from random import Random

    rng = Random(seed)
    profile = EngineProfile(block_size=size, num_blocks=blocks, prefix_caching=caching, seed=seed)
    with RouterHarness(profile, backend="mocker_sglang_1_6") as kv:
        worker, prompts, running = kv.worker(0), [], []
        manager = worker.manager
        for _ in range(40):
            if running and rng.random() < 0.5:
                request = running.pop(rng.randrange(len(running)))
                if rng.random() < 0.3:
                    request.preempt()
                request.finish()
            else:
                after = rng.choice(prompts) if prompts and rng.random() < 0.6 else None
                prompt = kv.prompt(rng.randrange(1, 4), after=after)
                try:
                    running.append(worker.prefill(prompt))
                    running[-1].decode(rng.randrange(2 * size))
                    prompts.append(prompt)
                except OutOfBlocks:
                    pass
            held = sum(each.allocated - each.protected for each in manager.requests)
            assert blocks == manager.free_pages + manager.num_inactive_blocks + held + manager._tree.protected
        for request in running:
            request.finish()
        assert manager.num_active_blocks == 0
