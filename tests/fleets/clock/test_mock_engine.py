"""Mock engines: requests in; passes, tokens, events and a report out."""

import pytest

from pytest_kvmock import CapturingSink, MockEngine, Prompt, Removed, Stored
from pytest_kvmock.engines import KvWorker, MockEngineArgs, OutOfBlocks, RequestError, backend_spec
from pytest_kvmock.engines.base.driver import Powers
from pytest_kvmock.fleets import EngineStalled

BACKENDS = ("lineage", "lru", "multi_lru", "hash_cache", "vllm", "vllm_0_19")


def engine_of(backend="lineage", sink=None, **fields):
    args = MockEngineArgs(**{"block_size": 4, "num_gpu_blocks": 100, **fields})
    return MockEngine(args, backend=backend, sink=sink)


def tokens(count, first=0):
    return list(range(first, first + count))


# ------------------------------------------------------------------------------------------------------- one request


def test_an_engine_has_the_sizes_and_backend_of_dynamo_by_default():
    engine = MockEngine()
    assert engine.metrics.total_blocks == 16384
    assert engine.worker.manager.block_size == 64
    assert repr(engine) == "<MockEngine vllm over lineage at 0 ms>"


def test_a_request_goes_from_waiting_to_finished():
    engine = engine_of(max_num_batched_tokens=8)
    request = engine.submit(tokens(12), 3)
    assert (request.status, request.computed_tokens, request.generated_tokens) == ("waiting", 0, 0)
    engine.step()  # a budget of 8 tokens, of 12
    assert (request.status, request.computed_tokens, request.generated_tokens) == ("running", 8, 0)
    engine.step()
    assert (request.status, request.computed_tokens, request.generated_tokens) == ("running", 12, 1)
    engine.step()
    engine.step()
    assert (request.status, request.generated_tokens) == ("finished", 3)
    assert engine.is_idle
    assert engine.worker.requests == []
    assert request.admitted_ms == 0.0
    assert engine.now_ms == request.token_ms[-1]
    assert len(request.token_ms) == 3


def test_a_pass_reports_its_scheduled_requests_and_times():
    engine = engine_of()
    first, second = engine.submit(tokens(8), 2), engine.submit(tokens(12), 1)
    done = engine.step()
    assert [(first, 8, 8, 0), (second, 4, 4, 8)] == [tuple(each) for each in done.scheduled]
    assert [first, second] == done.admitted == done.generated
    assert [second] == done.finished
    assert (done.preempted, done.running, done.waiting) == ([], 1, ())
    assert (0.0, engine.now_ms) == (done.start_ms, done.end_ms)
    assert done.end_ms == done.start_ms + done.prefill_ms + done.decode_ms
    done = engine.step()
    assert ([first], [9]) == (done.generated, done.decode_lengths)
    assert done.prefill_ms == 0.0
    metrics = engine.step().to_json(worker_id=3, dp_rank=1, counter_id=7)  # no request is open
    assert tuple(
        metrics[key] for key in ("worker_id", "dp_rank", "counter_id", "num_decode_requests", "wall_time_secs")
    ) == (3, 1, 7, 0, 0.0)


def test_forward_pass_metrics_have_the_keys_of_dynamo():
    engine = engine_of(num_gpu_blocks=8, max_num_seqs=2)
    engine.submit(tokens(8), 8)
    engine.submit(tokens(4, 100), 8)
    engine.submit(tokens(6, 200), 2)
    metrics = engine.step().to_json()
    assert {
        "num_prefill_requests": 2,
        "sum_prefill_tokens": 12,
        "var_prefill_length": 4.0,
        "sum_prefill_kv_tokens": 0,
        "num_decode_requests": 0,
        "num_queued_prefill": 1,
        "sum_queued_prefill_tokens": 6,
        "num_queued_decode": 0,
    }.items() <= metrics.items()
    metrics = engine.step().to_json()
    assert tuple(metrics[key] for key in ("num_decode_requests", "sum_decode_kv_tokens", "var_decode_kv_tokens")) == (
        2,
        14,
        4.0,
    )


def test_reasoning_encloses_the_thinking_tokens_in_start_and_end_tokens():
    engine = engine_of(
        reasoning={"start_thinking_token_id": 7, "end_thinking_token_id": 8, "thinking_ratio": 0.5},
    )
    request = engine.submit(tokens(4), 10)
    engine.run()
    generated = request.state.tokens[4:]
    assert (generated[0], generated[4]) == (7, 8)
    assert not {7, 8} & {*generated[1:4], *generated[5:]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_stepping_and_running_give_the_same_report_and_events(backend):
    reports, events = [], []
    for stepwise in (False, True):
        sink = CapturingSink()
        engine = engine_of(backend, sink, num_gpu_blocks=15, max_num_batched_tokens=16)
        for i in range(6):
            engine.submit(tokens(9, 3 * (i % 3)), 20, arrival_ms=30.0 * i)
        if stepwise:
            while not engine.is_idle:
                engine.step()
        reports.append(engine.run().to_json())
        events.append(sink.events)
    assert reports[0] == reports[1]
    assert events[0] == events[1]
    assert any(isinstance(event.data, Removed) for event in events[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_engines_with_the_same_seed_publish_the_same_events(backend):
    streams = []
    for seed in (1, 1, 2):
        sink = CapturingSink()
        engine = MockEngine(MockEngineArgs(block_size=4, num_gpu_blocks=10), backend=backend, sink=sink, seed=seed)
        engine.submit(tokens(6), 9)
        engine.run()
        streams.append(sink.events)
    assert streams[0] == streams[1]
    assert streams[0] != streams[2]


# ----------------------------------------------------------------------------------------------------------- time


def test_run_stops_before_a_pass_that_would_start_too_late():
    engine = engine_of()
    engine.submit(tokens(8), 50)
    report = engine.run(until_ms=100.0)
    assert len(report.completed) == 0
    assert 100.0 <= engine.now_ms == engine.requests[0].token_ms[-1]
    assert engine.requests[0].token_ms[-2] < 100.0
    report = engine.run()
    assert len(report.completed) == 1


def test_run_waits_for_arrivals_until_the_given_time():
    engine = engine_of()
    request = engine.submit(tokens(8), 1, arrival_ms=500.0)
    assert engine.metrics.arriving == 1
    engine.run(until_ms=200.0)
    assert engine.now_ms == 200.0
    engine.run(until_ms=500.0)
    assert (request.status, engine.now_ms) == ("waiting", 500.0)
    engine.run()
    assert request.admitted_ms == 500.0


def test_a_step_waits_for_the_next_arrival():
    engine = engine_of()
    engine.submit(tokens(8), 1, arrival_ms=50.0)
    done = engine.step()
    assert done.start_ms == 50.0


def test_a_step_of_an_idle_engine_does_nothing():
    engine = engine_of()
    done = engine.step()
    assert (done.start_ms, done.end_ms, done.generated, done.scheduled) == (0.0, 0.0, [], [])


def test_a_request_that_arrives_during_a_pass_waits_for_its_end():
    engine = engine_of()
    engine.submit(tokens(8), 1)
    late = engine.submit(tokens(8, 50), 1, arrival_ms=5.0)
    end = engine.step().end_ms
    assert end > 5.0
    engine.step()
    assert end == late.admitted_ms


def test_requests_that_arrive_at_the_same_time_are_batched():
    engine = engine_of()
    for first in (0, 100):
        engine.submit(tokens(8, first), 1)
    assert engine.run().to_json()["max_ttft_ms"] == 24.603679


def test_a_listener_sees_each_pass():
    engine = engine_of()
    seen = []
    engine.on_pass(seen.append)
    engine.submit(tokens(8), 12)
    engine.run()
    assert 12 == len(seen) == engine.passes


# ------------------------------------------------------------------------------------------------- preemption, aborts


def test_a_preempted_request_waits_at_the_front_and_keeps_its_tokens():
    engine = engine_of(num_gpu_blocks=6, max_num_batched_tokens=12)
    first, second, third = (engine.submit(tokens(8, first), 6) for first in (0, 100, 200))
    while not engine.metrics.preemptions:
        done = engine.step()
    assert [second] == done.preempted
    assert (second.status, second.computed_tokens) == ("preempted", 0)
    assert second is engine.inside.scheduler.waiting[0]  # 1.2.1: the third was admitted in its place
    assert third.status == "running"
    assert first.generated_tokens > 0
    report = engine.run()
    assert len(report.completed) == 3
    assert (
        report.figure("preemptions") == engine.metrics.preemptions == sum(r.preemptions for r in (first, second, third))
    )


def test_eight_identical_requests_complete_on_six_blocks():
    engine = engine_of(num_gpu_blocks=6, max_num_batched_tokens=12)
    for _ in range(8):
        engine.submit([42] * 8, 6)
    assert len(engine.run().completed) == 8
    assert engine.metrics.active_blocks == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_aborted_request_frees_all_its_blocks(backend):
    engine = engine_of(backend)
    running, waiting = engine.submit(tokens(8), 20), engine.submit(tokens(8, 50), 20, arrival_ms=1e6)
    engine.step()
    assert engine.metrics.active_blocks > 0
    running.abort()
    waiting.abort()
    assert (running.status, waiting.status) == ("aborted", "aborted")
    assert (engine.metrics.active_blocks, engine.metrics.cache_usage) == (0, 0.0)
    assert engine.is_idle
    assert engine.worker.requests == []
    assert engine.report.completed == []
    with pytest.raises(RequestError, match="abort on a request that is aborted; it must be waiting, running or preemp"):
        running.abort()


# ---------------------------------------------------------------------------------------------------------- events


def test_prefix_blocks_are_stored_when_the_pass_starts():
    sink = CapturingSink()
    engine = engine_of(sink=sink)
    engine.submit(tokens(8), 1)
    engine.inside.start_pass(0.0)
    assert [Stored] == [type(event.data) for event in sink.events]
    engine.inside.finish_pass()
    assert len(sink.events) == 1


def test_events_can_be_held_until_the_pass_ends():
    sink = CapturingSink()
    engine = engine_of(sink=sink, events_visible="pass_end")
    engine.submit(tokens(8), 1)
    engine.inside.start_pass(0.0)
    assert sink.events == []
    engine.inside.finish_pass()
    assert len(sink.events) == 1


@pytest.mark.parametrize("fields", [{"enable_prefix_caching": False}, {"worker_type": "decode"}])
def test_an_engine_without_prefix_caching_or_for_decode_publishes_nothing(fields):
    sink = CapturingSink()
    engine = engine_of(sink=sink, **fields)
    engine.submit(tokens(8), 9)
    engine.run()
    assert sink.events == []


def test_engine_events_carry_token_ids():
    sink = CapturingSink()
    engine = engine_of(sink=sink)
    engine.submit(tokens(8), 1)
    engine.run()
    assert tuple(map(tuple, sink.router_events[0].token_ids)) == ((0, 1, 2, 3), (4, 5, 6, 7))


# ------------------------------------------------------------------------------------------------------- its worker


def test_requests_of_an_engine_are_requests_of_its_worker():
    engine = engine_of()
    request = engine.submit(tokens(8), 5)
    assert [request] == engine.worker.requests
    assert not engine.worker.clear()
    engine.run()
    assert engine.worker.clear()
    assert engine.worker.cached_tokens(tokens(8)) == 0


def test_a_restart_empties_the_engine():
    engine = engine_of()
    running, arriving = engine.submit(tokens(8), 5), engine.submit(tokens(8), 5, arrival_ms=900.0)
    engine.step()
    before = engine.now_ms
    engine.worker.restart()
    assert (running.status, arriving.status) == ("lost", "lost")
    assert engine.is_idle
    assert (0, before) == (engine.metrics.active_blocks, engine.now_ms)
    after = engine.submit(tokens(8), 5)
    engine.run()
    assert (after.status, after.cached_tokens) == ("finished", 0)


def test_a_worker_can_have_only_one_engine():
    engine = engine_of()
    with pytest.raises(ValueError, match=r"is used by <MockEngine vllm over lineage at 0 ms>; a worker has one engine"):
        MockEngine(engine.args, worker=engine.worker)


def test_sizes_that_contradict_those_of_the_worker_are_refused():
    spec = backend_spec("lineage")
    worker = KvWorker(lambda sink: spec.make(num_blocks=9, block_size=4, dp_rank=0, sink=sink))
    with pytest.raises(ValueError, match=r"num_gpu_blocks=8, and <KvWorker 0 .*> was made with 9; they must be equal"):
        MockEngine(MockEngineArgs(num_gpu_blocks=8, block_size=4), worker=worker)


def test_closing_an_engine_frees_blocks_reserved_for_an_external_prompt():
    engine = engine_of("vllm", worker_type="decode")
    serve = engine.worker.serve(tokens(8))
    request = engine.inside.expect(Prompt(tokens(18)), 3, 0.0)
    assert engine.inside.reserve(request)
    assert (serve.cached_tokens, engine.worker.manager.num_active_blocks) == (0, 5)
    engine.close()
    assert (request.status, engine.worker.manager.num_active_blocks) == ("aborted", 0)


def test_an_invalid_driver_for_schedulers_is_refused():
    class OldDriver:
        """A driver as a custom backend may have: it drives workers only."""

        powers = Powers()

        def __init__(self, manager, prefix_caching, rng):
            self.manager = manager

    spec = backend_spec("lineage")
    worker = KvWorker(lambda sink: spec.make(num_blocks=9, block_size=4, dp_rank=0, sink=sink), driver=OldDriver)
    with pytest.raises(ValueError, match=r"no engine can use .* which is not a SchedulerDriver: it has no "):
        MockEngine(MockEngineArgs(num_gpu_blocks=9, block_size=4), worker=worker)


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([], 1), {}, "prompt is empty"),
        ((tokens(8), 0), {}, r"max_output_tokens must be an integer of at least 1 \(tokens\), got 0"),
        ((tokens(8), -1), {}, "at least 1"),
        ((tokens(8), 1.5), {}, "at least 1"),
        ((tokens(8), 1, -1.0), {}, r"arrival_ms must be a finite number of at least 0 \(milliseconds\), got -1.0"),
        ((tokens(8), 1, float("nan")), {}, "got nan"),
        ((tokens(8), 1, float("inf")), {}, "got inf"),
        ((tokens(8), 1, "1"), {}, "got '1'"),
        ((tokens(8), 1, 39.0), {}, "arrival_ms must be at least 40.0, the arrival of the request before it, got 39.0"),
        ((tokens(8), 1), {"priority": 1}, "priority is for engines whose policy has priorities"),
        ((tokens(8), 1), {"priority": "high"}, "priority must be an integer, got 'high'"),
    ],
)
def test_an_invalid_request_is_refused_and_changes_nothing(arguments, options, message):
    engine = engine_of()
    engine.submit(tokens(4), 1, arrival_ms=40.0)
    with pytest.raises(ValueError, match=message):
        engine.submit(*arguments, **options)
    assert (len(engine.requests), len(engine.worker.requests)) == (1, 1)
    assert len(engine.run().completed) == 1


@pytest.mark.parametrize(("prompt", "output", "fits"), [(36, 4, True), (37, 4, False), (40, 1, False), (44, 1, False)])
def test_a_request_that_can_never_fit_is_refused(prompt, output, fits):
    engine = engine_of(num_gpu_blocks=10)
    if fits:
        engine.submit(tokens(prompt), output)
        assert len(engine.run().completed) == 1
        return
    with pytest.raises(
        OutOfBlocks,
        match=rf"a request of {prompt} \+ {output} tokens can never fit: {-(-(prompt + output) // 4)} blocks are needed",  # noqa: E501
    ):
        engine.submit(tokens(prompt), output)
    assert engine.is_idle


def test_a_prompt_beyond_the_budget_without_chunking_stalls_the_engine():
    engine = engine_of(max_num_batched_tokens=8, enable_chunked_prefill=False)
    engine.submit(tokens(12), 1)
    with pytest.raises(
        EngineStalled, match=r"makes no progress: .* generated no token, with 0 requests running and 1 wai"
    ):
        engine.run()


def test_a_prompt_of_many_passes_is_not_a_stall():
    engine = engine_of(num_gpu_blocks=5000, max_num_batched_tokens=4)
    request = engine.submit(tokens(4 * 3000), 1)
    engine.run()
    assert (request.status, engine.passes) == ("finished", 3000)


@pytest.mark.parametrize("until", [-1.0, float("nan"), float("inf"), "now", True])
def test_an_invalid_until_ms_is_refused(until):
    engine = engine_of()
    with pytest.raises(ValueError, match=r"until_ms must be a finite number of at least 0 "):
        engine.run(until)


def test_running_until_a_past_time_does_nothing():
    """A pass may end after `until_ms`, so a caller that follows arrivals need not check the time."""
    engine = engine_of()
    engine.submit(tokens(8), 3)
    engine.run(until_ms=1.0)
    now = engine.now_ms
    assert now > 1.0
    engine.run(until_ms=2.0)
    assert (now, 1) == (engine.now_ms, engine.passes)


def test_an_engine_of_type_sglang_has_its_own_backend():
    engine = MockEngine(MockEngineArgs(engine_type="sglang"))
    assert engine.worker.backend == "sglang"


def test_a_hash_prompt_is_served_and_its_output_has_its_own_hashes():
    sink = CapturingSink()
    engine = engine_of(sink=sink)
    engine.submit(Prompt(hashes=[11, 12]), 6)
    engine.submit(Prompt(hashes=[11, 12, 13]), 1, arrival_ms=1000.0)
    engine.run()
    assert [request.cached_tokens for request in engine.requests] == [0, 8]
    assert [len(event.data.block_hashes) for event in sink.events] == [2, 1, 1]


# ------------------------------------------------------------------------------------------ what goes wrong midway


@pytest.mark.parametrize(("engine_type", "backend"), [("vllm", "lineage"), ("sglang", "sglang")])
def test_a_prefill_model_that_fails_loses_no_request(engine_type, backend):
    answers = iter([float("nan"), 5.0])
    engine = engine_of(backend, engine_type=engine_type, performance_model=(lambda *asked: next(answers), 5.0))
    request = engine.submit(tokens(8), 3)
    with pytest.raises(
        ValueError, match=r"prefill time for batch=1, isl=8, prefix=0 must be a finite number .* got nan"
    ):
        engine.run()
    assert [request] == engine.worker.requests
    engine.run()
    assert request.status == "finished"
    assert (engine.metrics.active_blocks, engine.worker.requests) == (0, [])


def test_a_decode_model_that_fails_leaves_no_partial_token():
    answers = iter([5.0, None, 5.0, 5.0])
    engine = engine_of(performance_model=(5.0, lambda *asked: next(answers)))
    engine.on_pass(lambda done: None)  # pass by pass
    request = engine.submit(tokens(8), 3)
    with pytest.raises(ValueError, match="got None"):
        engine.run()
    assert 1 == request.generated_tokens == len(request.token_ms)
    engine.run()
    assert request.token_ms == [10.0, 15.0, 20.0]
    assert engine.worker.requests == []


def test_a_model_is_called_once_per_pass():
    asked = []
    engine = engine_of(performance_model=(5.0, lambda *given: asked.append(given) or 12.0))
    engine.submit(tokens(5), 12)
    engine.submit(tokens(5, 50), 1, arrival_ms=30.0)
    engine.run()
    assert engine.passes == len(asked)


def test_a_prompt_of_many_small_chunks_is_not_a_stall_over_sglang():
    engine = engine_of(
        "mocker_sglang_1_6", engine_type="sglang", num_gpu_blocks=2000, sglang={"chunked_prefill_size": 4}
    )
    engine.submit(tokens(4 * 1100), 1)
    assert len(engine.run().completed) == 1


@pytest.mark.parametrize("backend", ["lineage", "hash_cache"])
def test_an_aborted_waiting_request_frees_the_blocks_that_it_already_has(backend):
    engine = engine_of(backend, num_gpu_blocks=8)
    held = engine.worker.prefill(tokens(24))
    request = engine.submit([*tokens(8), *tokens(8, 900)], 2)
    engine.step()
    request.abort()
    held.finish()
    assert engine.metrics.active_blocks == 0


def test_an_aborted_or_lost_future_request_does_not_delay_later_ones():
    engine = engine_of()
    engine.submit(tokens(8), 1, arrival_ms=1000.0).abort()
    assert engine.submit(tokens(8), 1).arrival_ms == 0.0
    engine.submit(tokens(8), 1, arrival_ms=1000.0)
    engine.worker.restart()
    assert engine.submit(tokens(8), 1, arrival_ms=5.0).arrival_ms == 5.0


def test_start_pass_and_finish_pass_must_alternate():
    engine = engine_of()
    with pytest.raises(RequestError, match=r"finish_pass while no pass of .* is under way"):
        engine.inside.finish_pass()
    engine.inside.start_pass(0.0)
    with pytest.raises(RequestError, match=r"start_pass while a pass of .* is under way"):
        engine.inside.start_pass(0.0)


def test_an_engine_aborts_only_its_own_open_requests():
    engine, other = engine_of(), engine_of()
    request = other.submit(tokens(8), 1)
    with pytest.raises(RequestError, match="which is not an open request of <MockEngine"):
        engine.abort(request)
    other.run()
    with pytest.raises(RequestError, match="which is not an open request of <MockEngine"):
        other.abort(request)


@pytest.mark.parametrize("wrong", [{"args": {"block_size": 4}}, {"worker": 3}])
def test_arguments_of_the_wrong_type_are_refused(wrong):
    with pytest.raises(ValueError, match=r"(args must be MockEngineArgs|worker must be a KvWorker, or None), got "):
        MockEngine(**wrong)


def test_a_worker_refused_by_one_engine_can_be_used_by_another():
    worker = KvWorker(lambda sink: backend_spec("lineage").make(num_blocks=9, block_size=4, dp_rank=0, sink=sink))
    with pytest.raises(ValueError, match="engine_type 'sglang' schedules over a radix cache"):
        MockEngine(MockEngineArgs(num_gpu_blocks=9, block_size=4, engine_type="sglang"), worker=worker)
    engine = MockEngine(MockEngineArgs(num_gpu_blocks=9, block_size=4), worker=worker)
    engine.submit(tokens(8), 1)
    assert len(engine.run().completed) == 1


def test_watching_a_worker_keeps_the_driver_of_its_engine():
    engine = engine_of(num_gpu_blocks=64, worker_type="decode")
    seen = CapturingSink()
    engine.worker.watch(seen)
    engine.submit(tokens(20), 3)
    engine.run()
    assert seen.events
    assert engine.worker.manager.num_inactive_blocks > 0
