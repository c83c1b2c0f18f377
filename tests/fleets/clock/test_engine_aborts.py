"""Aborted requests of an engine: their tokens, the blocks that are freed, and the events."""

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import CapturingSink, Fleet, MockEngine
from pytest_kvmock.engines import MockEngineArgs, RequestError
from pytest_kvmock.fleets import FleetRequest, RoundRobin, TraceRequest, replay

SIZE = 4
BACKENDS = ["lineage", "lru", "hash_cache", "vllm", "vllm_gpt_oss", "sglang", "mocker_sglang_1_6", "sglang_qwen3_next"]
"""One backend for each kind of driver and scheduler."""

HAS_LAST_PASS = {"sglang", "sglang_qwen3_next"}


def engine_of(backend="vllm", **options):
    kind = "sglang" if "sglang" in backend else "vllm"
    args = MockEngineArgs(engine_type=kind, num_gpu_blocks=400, block_size=16 if "_" in backend else SIZE, **options)
    return MockEngine(args, backend=backend)


def prompt(length, start=0):
    return range(start, start + length)


def statuses(*requests):
    return [(request.status, request.generated_tokens, len(request.token_ms)) for request in requests]


# ------------------------------------------------------------------------------------------- while a pass is under way


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - HAS_LAST_PASS))
def test_an_abort_drops_the_token_of_the_current_pass(backend):
    engine = engine_of(backend)
    gone, stays = engine.submit(prompt(40), 9), engine.submit(prompt(40, 1000), 9)
    engine.step()
    begun = engine.inside.start_pass(engine.now_ms)
    before = statuses(gone)
    gone.abort()
    assert before == statuses(gone)  # the request stays open until the end of the pass
    done = engine.inside.finish_pass()
    assert done is begun
    assert ([gone], [stays], 1) == (done.aborted, done.generated, len(done.tokens))
    assert statuses(gone, stays) == [("aborted", 1, 1), ("running", 2, 2)]
    assert done.end_ms == gone.ended_ms
    engine.run()
    assert (stays.status, engine.metrics.active_blocks) == ("finished", 0)


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - HAS_LAST_PASS))
def test_an_abort_drops_the_last_token_of_a_request_in_the_current_pass(backend):
    engine = engine_of(backend)
    gone = engine.submit(prompt(40), 2)
    engine.step()
    engine.inside.start_pass(engine.now_ms)
    gone.abort()
    done = engine.inside.finish_pass()
    assert ([gone], [], [], []) == (done.aborted, done.finished, done.generated, done.tokens)
    assert statuses(gone) == [("aborted", 1, 1)]
    assert (engine.is_idle, engine.metrics.active_blocks, engine.worker.requests) == (True, 0, [])
    assert engine.report.completed == []
    assert engine.report.aborted == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_aborted_waiting_request_leaves_at_the_end_of_the_current_pass(backend):
    engine = engine_of(backend, max_num_seqs=1)
    runs, waits = engine.submit(prompt(40), 9), engine.submit(prompt(40, 1000), 9)
    engine.step()
    engine.inside.start_pass(engine.now_ms)
    waits.abort()
    assert waits.status == "waiting"
    assert [waits] == engine.inside.finish_pass().aborted
    assert statuses(waits) == [("aborted", 0, 0)]
    engine.run()
    assert (runs.status, engine.metrics.active_blocks) == ("finished", 0)


# ---------------------------------------------------------------------------------------------------- what is published


def test_an_abort_over_vllm_publishes_nothing_and_leaves_full_blocks_cached():
    sink = CapturingSink()
    engine = MockEngine(MockEngineArgs(num_gpu_blocks=20, block_size=SIZE), backend="vllm", sink=sink)
    gone = engine.submit(prompt(10), 9)
    engine.step()
    sink.take()
    gone.abort()
    assert sink.take() == []
    again = engine.submit(prompt(10), 1)
    engine.run()
    assert again.cached_tokens == 8


def test_an_aborted_running_request_of_sglang_gets_one_more_pass_and_a_checkpoint():
    sink = CapturingSink()
    args = MockEngineArgs(engine_type="sglang", num_gpu_blocks=40, block_size=SIZE)
    engine = MockEngine(args, backend="sglang", sink=sink)
    gone = engine.submit(prompt(6), 9)
    engine.step()
    engine.step()
    sink.take()
    gone.abort()
    assert statuses(gone) == [("running", 2, 2)]
    assert sink.take() == []
    done = engine.step()
    assert ([gone], [gone], []) == (done.aborted, done.generated, done.finished)
    assert statuses(gone) == [("aborted", 3, 3)]
    (stored,) = sink.take()
    assert len(stored.data.block_hashes) == 1  # 8 tokens are computed, so the second page is full
    assert (engine.is_idle, engine.metrics.active_blocks) == (True, 0)


def test_an_aborted_request_that_sglang_completes_in_its_last_pass_is_finished():
    engine = engine_of("sglang")
    request = engine.submit(prompt(8), 2)
    engine.step()
    engine.inside.start_pass(engine.now_ms)
    request.abort()
    assert engine.inside.finish_pass().aborted == []
    assert statuses(request) == [("finished", 2, 2)]


def test_an_aborted_retracted_request_of_sglang_ends_with_its_next_pass():
    args = MockEngineArgs(
        engine_type="sglang",
        num_gpu_blocks=9,
        block_size=SIZE,
        sglang={"schedule_conservativeness": 0.0, "clip_max_new_tokens": 4},
    )
    engine = MockEngine(args, backend="sglang")
    requests = [engine.submit(prompt(12, 100 * at), 12) for at in range(2)]
    while not engine.metrics.preemptions and not engine.is_idle:
        victim = min(engine.inside.scheduler.running, key=lambda each: each.generated_tokens, default=None)
        if victim is not None and victim.generated_tokens == 3:
            victim.abort()
        engine.step()
    engine.run()
    assert {request.status for request in requests} == {"aborted", "finished"}
    assert engine.metrics.active_blocks == 0


@pytest.mark.parametrize("backend", ["sglang", "sglang_qwen3_next"])
def test_an_abort_between_two_chunks_makes_no_checkpoint_in_sglang(backend):
    sink = CapturingSink()
    size = 16
    args = MockEngineArgs(
        engine_type="sglang", num_gpu_blocks=400, block_size=size, sglang={"chunked_prefill_size": 128}
    )
    engine = MockEngine(args, backend=backend, sink=sink)
    request = engine.submit(prompt(400), 9)
    engine.step()
    first = sum(len(event.data.block_hashes) for event in sink.take() if hasattr(event.data, "tokens_hashes"))
    engine.inside.start_pass(engine.now_ms)
    request.abort()
    assert [request] == engine.inside.finish_pass().aborted
    sink.take()  # of the current chunk
    assert (sink.take(), engine.metrics.active_blocks) == ([], 0)
    assert first
    assert engine.is_idle


def test_an_abort_in_the_dynamo_mock_of_sglang_caches_no_further_page():
    """Follow aisimulate-core 0.13.0: `cancel_active_request` releases the lease and inserts no page."""
    sink = CapturingSink()
    args = MockEngineArgs(engine_type="sglang", num_gpu_blocks=40, block_size=SIZE)
    engine = MockEngine(args, backend="mocker_sglang_1_6", sink=sink)
    request = engine.submit(prompt(10), 9)
    engine.step()
    cached = engine.worker.manager.num_inactive_blocks + engine.worker.manager.num_active_blocks
    request.abort()
    assert request.status == "aborted"
    assert (engine.metrics.active_blocks, engine.worker.manager.num_inactive_blocks < cached) == (0, True)


# ----------------------------------------------------------------------------------------------------- planned by
# submit


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - HAS_LAST_PASS))
def test_a_request_can_be_aborted_after_n_tokens(backend):
    engine = engine_of(backend)
    gone, stays = engine.submit(prompt(40), 90, abort_after_tokens=7), engine.submit(prompt(40, 1000), 9)
    report = engine.run()
    assert statuses(gone, stays) == [("aborted", 7, 7), ("finished", 9, 9)]
    assert ([stays], 1, 0) == (report.completed, report.aborted, engine.metrics.active_blocks)
    assert gone.token_ms[-1] == gone.ended_ms


def test_a_request_can_be_aborted_n_ms_after_its_arrival():
    engine = engine_of()
    gone = engine.submit(prompt(8), 500, arrival_ms=1000.0, abort_after_ms=100.0)
    engine.run()
    assert gone.status == "aborted"
    assert 0 < gone.generated_tokens < 500
    assert all(ms <= 1100 for ms in gone.token_ms)
    assert 1100 < gone.ended_ms < 1120


@pytest.mark.parametrize("nth", [1, 3])
def test_a_request_aborted_at_the_end_of_a_pass_keeps_its_token(nth):
    alike = engine_of()
    served = alike.submit(prompt(8), 5)
    alike.run()
    moment = served.token_ms[nth - 1]
    engine, fleet = engine_of(), Fleet([engine_of()], RoundRobin())
    gone = engine.submit(prompt(8), 5, abort_after_ms=moment)
    engine.run()
    assert ([("aborted", nth, nth)], moment) == (statuses(gone), gone.ended_ms)
    fleet.at(moment).abort(0)
    (served,) = fleet.run([FleetRequest(prompt(8), 5)]).requests
    assert ([("aborted", nth, nth)], moment) == (statuses(served), served.ended_ms)


@pytest.mark.parametrize("after", [{"abort_after_ms": 0}, {"abort_after_tokens": 0}])
def test_a_request_aborted_on_arrival_is_never_computed(after):
    engine = engine_of()
    gone = engine.submit(prompt(8), 5, arrival_ms=50.0, **after)
    engine.run()
    assert (statuses(gone), gone.ended_ms, engine.prefill_tokens) == ([("aborted", 0, 0)], 50.0, 0)


def test_a_request_that_ends_before_its_planned_abort_is_finished():
    engine = engine_of()
    request = engine.submit(prompt(8), 2, abort_after_ms=1e6, abort_after_tokens=2)
    report = engine.run()
    assert (statuses(request), report.aborted) == ([("finished", 2, 2)], 0)
    assert engine.now_ms < 1e5


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (
            {"abort_after_ms": -1},
            "abort_after_ms must be a finite number of at least 0 (milliseconds), or None, got -1",
        ),
        (
            {"abort_after_ms": "soon"},
            "abort_after_ms must be a finite number of at least 0 (milliseconds), or None, got 'soon'",
        ),
        ({"abort_after_tokens": -1}, "abort_after_tokens must be an integer of at least 0 (tokens), or None, got -1"),
        ({"abort_after_tokens": 1.5}, "abort_after_tokens must be an integer of at least 0 (tokens), or None, got 1.5"),
    ],
)
def test_an_invalid_abort_time_or_count_is_refused_and_changes_nothing(after, message):
    engine = engine_of()
    with pytest.raises(ValueError) as raised:
        engine.submit(prompt(8), 2, **after)
    assert str(raised.value) == message
    assert (engine.requests, engine.is_idle) == ([], True)


def test_a_request_aborted_on_arrival_does_not_advance_the_clock():
    engine = engine_of()
    engine.submit(prompt(8), 5, arrival_ms=50.0, abort_after_ms=0)
    late = engine.submit(prompt(8), 5, arrival_ms=500.0)
    engine.run(until_ms=100.0)
    assert (engine.now_ms, engine.passes, late.status) == (100.0, 0, "waiting")
    engine.step()
    assert statuses(late) == [("running", 1, 1)]


planned = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt
        st.integers(1, 20),  # output
        st.none() | st.floats(0, 200),
        st.none() | st.integers(0, 20),
    ),
    min_size=1,
    max_size=8,
)


@given(planned, st.sampled_from(BACKENDS))
@settings(max_examples=examples(400), deadline=None)
def test_passes_with_aborts_are_the_same_in_one_go_and_one_by_one(requests, backend):
    runs = []
    for in_one_go in (True, False):
        engine = engine_of(backend)
        if not in_one_go:
            engine.on_pass(lambda _done: None)
        for at, (length, output, after_ms, after_tokens) in enumerate(requests):
            engine.submit(
                prompt(length, 100 * (at % 3)),
                output,
                arrival_ms=7.0 * at,
                abort_after_ms=after_ms,
                abort_after_tokens=after_tokens,
            )
        engine.run()
        runs.append([(each.status, each.generated_tokens, each.token_ms, each.ended_ms) for each in engine.requests])
        assert (engine.is_idle, engine.metrics.active_blocks, engine.worker.requests) == (True, 0, [])
    assert runs[0] == runs[1]


@given(planned, st.sampled_from(BACKENDS))
@settings(max_examples=examples(400), deadline=None)
def test_an_engine_and_a_fleet_of_one_engine_agree_on_aborts(requests, backend):
    rows = [
        FleetRequest(prompt(length, 100 * (at % 3)), output, 7.0 * at, abort_after_ms=ms, abort_after_tokens=tokens)
        for at, (length, output, ms, tokens) in enumerate(requests)
    ]
    alone = engine_of(backend)
    for each in rows:
        alone.submit(
            each.prompt,
            each.output_tokens,
            arrival_ms=each.timestamp,
            abort_after_ms=each.abort_after_ms,
            abort_after_tokens=each.abort_after_tokens,
        )
    alone.run()
    report = Fleet([engine_of(backend)], RoundRobin()).run(rows)
    found = [
        [(each.status, each.generated_tokens, each.token_ms, each.ended_ms) for each in served]
        for served in (alone.requests, report.requests)
    ]
    assert found[0] == found[1]


# ----------------------------------------------------------------------------------------------------------- a replay


def trace(count=6, output=30):
    return [TraceRequest(10.0 * at, 8, output, (2 * at, 2 * at + 1)) for at in range(count)]


@pytest.mark.parametrize("backend", ["lineage", "vllm", "sglang", "mocker_sglang_1_6"])
def test_a_listener_of_a_replay_can_abort_a_request(backend):
    engines = [engine_of(backend) for _ in range(2)]
    rows = [TraceRequest(each.timestamp, 2 * engines[0].args.block_size, 30, each.hash_ids) for each in trace()]

    def leave(done):
        for request in done.generated:
            if len(request.token_ms) == 3 and request.is_open and request is engines[0].requests[1]:
                request.abort()

    engines[0].on_pass(leave)
    report = replay(rows, engines)
    gone = engines[0].requests[1]
    extra = backend in HAS_LAST_PASS
    assert [("aborted", 3 + extra, 3 + extra)] == statuses(gone)
    assert (len(report.completed), report.aborted) == (5, 1)
    assert [engine.metrics.active_blocks for engine in engines] == [0, 0]
    assert [engine.inside.on_abort for engine in engines] == [None, None]


def test_a_listener_can_abort_a_request_of_another_engine_during_its_plan():
    """The other engine runs its passes in one go; the abort ends its plan with the current pass."""
    reports = []
    for other_listens in (True, False):
        engines = [engine_of() for _ in range(2)]
        moments = []

        def leave(done, engines=engines, moments=moments):
            others = engines[1].requests
            if done.end_ms > 90 and others and others[0].is_open and not moments:
                moments.append(done.end_ms)
                others[0].abort()

        engines[0].on_pass(leave)
        if other_listens:
            engines[1].on_pass(lambda _done: None)
        replay(trace(2, 60), engines)
        gone = engines[1].requests[0]
        reports.append((gone.status, gone.generated_tokens, gone.token_ms, gone.ended_ms, moments))
    assert reports[0] == reports[1]
    assert reports[0][0] == "aborted"


def test_a_request_handed_over_between_two_engines_cannot_be_aborted():
    prefill = MockEngine(MockEngineArgs(num_gpu_blocks=50, block_size=SIZE, worker_type="prefill"))
    decode = MockEngine(MockEngineArgs(num_gpu_blocks=50, block_size=SIZE, worker_type="decode"))
    decode.on_pass(lambda _done: [each.abort() for each in decode.requests if each.is_open])
    with pytest.raises(RequestError, match=r"^abort of <.*> in a replay with prefill engines: what is handed over"):
        replay(trace(), [decode], [prefill])
    assert decode.inside.on_abort is None


def test_an_abort_frees_a_place_in_a_closed_loop():
    engine = engine_of()
    engine.on_pass(lambda _done: engine.requests[0].is_open and engine.requests[0].abort())
    report = replay(trace(3, 4), [engine], concurrency=1)
    assert (
        [each.status for each in engine.requests],
        len(report.completed),
    ) == (["aborted", "finished", "finished"], 2)
