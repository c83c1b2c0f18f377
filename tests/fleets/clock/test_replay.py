"""Several engines on one clock."""

import pickle
import re

import pytest

from pytest_kvmock import MockEngine, replay
from pytest_kvmock.engines import MockEngineArgs, OutOfBlocks
from pytest_kvmock.fleets import EngineStalled, TraceRequest


def engine(**fields):
    return MockEngine(MockEngineArgs(**{"block_size": 4, "num_gpu_blocks": 100, **fields}))


def request(timestamp, ids, output=1, **session):
    return TraceRequest(timestamp, 4 * len(ids), output, tuple(ids), **session)


def test_engines_take_requests_in_turn():
    report = replay([request(float(i), [i]) for i in range(5)], [engine(), engine()])
    assert tuple(report.run.served_by) == (0, 1, 0, 1, 0)
    assert [each.arrival_ms for each in report.requests] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_requests_are_sorted_by_their_timestamps_and_the_first_arrives_at_0():
    report = replay([request(30.0, [3]), request(10.0, [1]), request(10.0, [2])], [engine()], arrival_speedup=2.0)
    assert [(each.arrival_ms, list(each.prompt.block_hashes(4))) for each in report.requests] == [
        (0.0, [1]),
        (0.0, [2]),
        (10.0, [3]),
    ]


def test_in_a_closed_loop_a_request_arrives_when_another_is_done():
    report = replay([request(None, [i], 3) for i in range(4)], [engine()], concurrency=2)
    first, second, third, fourth = report.requests
    assert 0.0 == first.arrival_ms == second.arrival_ms
    assert first.token_ms[-1] == third.arrival_ms == fourth.arrival_ms


def test_the_next_turn_of_a_session_waits_for_the_previous_turn():
    report = replay(
        [
            request(0.0, [1, 2], 2, session_id="chat"),
            request(5.0, [1, 2, 3], 1, session_id="chat", delay=50.0),
            request(9.0, [1, 2, 3, 4], 1, session_id="chat"),
        ],
        [engine()],
    )
    first, second, third = report.requests
    assert first.token_ms[-1] + 50.0 == second.arrival_ms
    assert second.token_ms[-1] + 4.0 == third.arrival_ms  # the difference of their timestamps
    assert [each.cached_tokens for each in report.requests] == [0, 8, 12]


def test_a_session_of_two_turns_has_the_duration_of_the_worked_example():
    """Reference 3.11: 8 tokens and 2 outputs; after a delay of 50 ms a turn of 12 tokens, 8 of them cached."""
    report = replay(
        [request(0.0, [1, 2], 2, session_id="s"), request(None, [1, 2, 3], 1, session_id="s", delay=50.0)],
        [engine()],
        trace_block_size=4,
    )
    assert pytest.approx(report.figure("duration_ms"), abs=1e-6) == 104.669246


@pytest.mark.parametrize(
    ("on_time", "fields", "backend"),
    [
        (False, {"semantics": "1.2.1"}, "lineage"),
        (True, {"semantics": "1.6.1"}, "vllm"),
        (False, {"engine_type": "sglang"}, "sglang"),
    ],
)
def test_before_1_6_a_single_engine_in_a_closed_loop_takes_a_turn_when_its_pass_ends(on_time, fields, backend):
    """Recorded live: before 1.6 the original's loop for one engine checks the clock only between passes."""
    long = request(0.0, [9], 20)
    turns = [request(0.0, [1], session_id="s"), request(None, [1, 2], session_id="s", delay=30.0)]
    engines = [MockEngine(MockEngineArgs(block_size=4, num_gpu_blocks=100, **fields), backend=backend)]
    first, other, second = replay([turns[0], long, turns[1]], engines, concurrency=2).requests
    ready = first.token_ms[-1] + 30.0
    pass_end = next(end for end in other.token_ms if end > ready)
    assert (ready if on_time else pass_end) == second.arrival_ms


def test_hash_ids_are_hashes_unless_a_trace_block_size_makes_tokens_of_them():
    by_hashes = replay([request(0.0, [1, 2]), request(0.0, [1, 3])], [engine()])
    by_tokens = replay([request(0.0, [1, 2]), request(0.0, [1, 3])], [engine()], trace_block_size=4)
    assert by_hashes.to_json() == by_tokens.to_json()
    assert by_hashes.requests[0].prompt.tokens is None
    assert tuple(by_tokens.requests[0].prompt.tokens) == (1, 1, 1, 1, 2, 2, 2, 2)


def test_a_trace_with_tokens_keeps_them_if_an_id_is_one_block():
    trace = [TraceRequest(0.0, 7, 1, (1, 2), with_tokens=True)]
    assert tuple(replay(trace, [engine()]).requests[0].prompt.tokens) == (1, 1, 1, 1, 2, 2, 2)


def test_ids_of_another_block_size_become_tokens():
    engines = [MockEngine(MockEngineArgs(block_size=4, num_gpu_blocks=20))]
    requests = [TraceRequest(0.0, 20, 3, (1, 2, 3)), TraceRequest(1.0, 24, 3, (1, 2, 3))]
    report = replay(requests, engines, concurrency=1, trace_block_size=8)
    assert [each.reused_tokens for each in report.requests] == [0, 20]
    with pytest.raises(
        ValueError, match="a prompt of 20 tokens has 3 hash ids, where the engines' block size of 4 makes 5"
    ):
        replay(requests, [engine()])


def test_a_prompt_larger_than_the_pool_is_rejected_by_1_6_1():
    requests = [request(0.0, range(25), 3), request(0.0, [90, 91], 2)]
    report = replay(requests, [engine(num_gpu_blocks=10, semantics="1.6.1")], concurrency=1)
    assert [each.status for each in report.requests] == ["rejected", "finished"]
    assert report.requests[0].status == "rejected"
    assert (report.to_json()["num_requests"], report.to_json()["completed_requests"]) == (2, 1)
    assert report.per_request()[0]["first_token_ms"] is None


@pytest.mark.parametrize(("semantics", "blocks", "output"), [("1.2.1", 25, 3), ("1.2.1", 10, 3)])
def test_a_request_that_can_never_fit_raises_out_of_blocks_in_1_2_1(semantics, blocks, output):
    with pytest.raises(OutOfBlocks):
        replay([request(0.0, range(blocks), output)], [engine(num_gpu_blocks=10, semantics=semantics)])


def test_a_request_that_can_never_fit_is_refused_before_the_replay_starts():
    one = engine(num_gpu_blocks=10)
    trace = [request(0.0, [1, 2]), request(5.0, range(9), 5, session_id="a"), request(9.0, [3])]
    with pytest.raises(OutOfBlocks) as caught:
        replay(trace, [one])
    assert str(caught.value) == (
        "replay: requests[1] of 36 tokens and 5 of output can never fit: 11 blocks are needed for prompt and output, "
        "and num_gpu_blocks is 10 in engines (of a test: @pytest.mark.kvmock(num_blocks=...))"
    )
    assert (caught.value.requested, caught.value.available) == (11, 10)
    assert str(caught.value) == str(pickle.loads(pickle.dumps(caught.value)))
    assert (one.passes, one.now_ms, one.requests) == (0, 0.0, [])


def test_every_request_must_fit_every_engine():
    with pytest.raises(
        OutOfBlocks, match=r"requests\[0\] .* can never fit: 5 blocks are needed for .* num_gpu_blocks is 4 "
    ):
        replay([request(0.0, range(4))], [engine(), engine(num_gpu_blocks=4)])


def test_a_livelock_of_the_original_raises_engine_stalled():
    stuck = engine(max_num_batched_tokens=4, enable_chunked_prefill=False)
    with pytest.raises(EngineStalled):
        replay([request(0.0, [1, 2])], [stuck])


def test_a_report_counts_completed_requests_and_their_tokens():
    report = replay([request(0.0, [1, 2], 3), request(0.0, [1, 2], 1)], [engine()])
    figures = report.to_json()
    assert {
        "num_requests": 2,
        "completed_requests": 2,
        "total_input_tokens": 16,
        "total_output_tokens": 4,
        "prefix_cache_reused_ratio": 0.5,
        "first_admission_prefix_cache_reused_ratio": 0.5,
    }.items() <= figures.items()
    assert figures["duration_ms"] == report.figure("duration_ms") == report.requests[0].token_ms[-1]
    assert 1000 * 4 / report.figure("duration_ms") == pytest.approx(figures["output_throughput_tok_s"])


def test_engines_can_replay_again_and_keep_their_caches():
    engines = [engine()]
    reports = [replay([request(7.0, [1, 2], 2)], engines) for _ in range(2)]
    assert [report.figure("prefix_cache_reused_ratio") for report in reports] == [0.0, 1.0]
    assert [report.run.passes for report in reports] == [2, 2]
    first, second = (report.requests[0] for report in reports)
    assert (0.0, first.token_ms[-1]) == (first.arrival_ms, second.arrival_ms)


@pytest.mark.parametrize("concurrency", [None, 1])
def test_a_replay_starts_at_the_time_of_the_most_advanced_engine(concurrency):
    new, old = engine(), engine()
    old.run(until_ms=1000.0)
    trace = [request(20.0, [1, 2], 2), request(50.0, [3, 4], 2), request(120.0, [5, 6], 2)]
    later = replay(trace, [new, old], concurrency=concurrency)
    first = replay(trace, [engine(), engine()], concurrency=concurrency)
    assert [1000.0 + each.arrival_ms for each in first.requests] == pytest.approx(
        [each.arrival_ms for each in later.requests]
    )
    assert first.figure("duration_ms") == pytest.approx(later.figure("duration_ms"))
    assert new.now_ms > 1000.0


def test_engines_and_requests_can_be_iterators():
    report = replay(iter(ONE), iter([engine(worker_type="decode")]), iter([engine(worker_type="prefill")]))
    assert [each.status for each in report.requests] == ["finished"]


def test_a_report_without_requests_is_all_zero():
    figures = MockEngine().report.to_json()
    assert set(figures.values()) == {0}


# --------------------------------------------------------------------------------------------------------- bad input


ONE = [request(0.0, [1])]


@pytest.mark.parametrize(
    ("requests", "engines", "options", "message"),
    [
        ([], 1, {}, "replay: there is no request$"),
        (
            (each for each in ()),
            1,
            {},
            "replay: there is no request: the trace is a generator that has nothing left: it",
        ),
        (ONE, 0, {}, "replay: engines must be at least one, got none"),
        (ONE, 1, {"concurrency": 0}, "replay: concurrency must be an integer of at least 1, or None, got 0"),
        (ONE, 1, {"concurrency": 1.5}, "replay: concurrency must be an integer"),
        (ONE, 1, {"arrival_speedup": 0}, "replay: arrival_speedup must be a finite number above 0, got 0"),
        (ONE, 1, {"arrival_speedup": float("nan")}, "replay: arrival_speedup must be .* got nan"),
        (ONE, 1, {"trace_block_size": 0}, "replay: trace_block_size must be an integer of at least 1"),
    ],
)
def test_an_invalid_argument_of_a_replay_is_refused(requests, engines, options, message):
    with pytest.raises(ValueError, match=message):
        replay(requests, [engine() for _ in range(engines)], **options)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"timestamp": NAN}, "timestamp must be a finite number (milliseconds), or None, got nan"),
        ({"timestamp": INFINITE}, "timestamp must be a finite number (milliseconds), or None, got inf"),
        ({"timestamp": "7"}, "timestamp must be a finite number (milliseconds), or None, got '7'"),
        ({"timestamp": 10**400}, "timestamp must be a finite number (milliseconds), or None, got 1000"),
        ({"delay": NAN}, "delay must be a finite number of at least 0 (milliseconds), or None, got nan"),
        ({"delay": -50}, "delay must be a finite number of at least 0 (milliseconds), or None, got -50"),
        ({"timestamp": 4.0}, "timestamp must be at least 5.0, that of the turn before it in session 'a', got 4.0"),
        ({"delay": 3.0, "session_id": None}, "delay must be 0 or None, as no turn of a session is before it, got 3.0"),
        ({"delay": 3.0, "session_id": "b"}, "delay must be 0 or None, as no turn of a session is before it, got 3.0"),
        ({"output_length": 0}, "output_length must be an integer of at least 1 (tokens), got 0"),
        ({"output_length": -3}, "output_length must be an integer of at least 1 (tokens), got -3"),
        ({"output_length": None}, "output_length must be an integer of at least 1 (tokens), got None"),
        ({"input_length": 0, "hash_ids": ()}, "input_length must be an integer of at least 1 (tokens), got 0"),
        ({"input_length": 4.0}, "input_length must be an integer of at least 1 (tokens), got 4.0"),
        ({"input_length": 8}, "a prompt of 8 tokens has 1 hash ids, where "),
    ],
)
@pytest.mark.parametrize("concurrency", [None, 1])
def test_an_invalid_field_of_a_request_is_refused_before_the_replay_starts(bad, message, concurrency):
    one = engine()
    fields = {"timestamp": 6.0, "input_length": 4, "output_length": 1, "hash_ids": (2,), "session_id": "a", **bad}
    trace = [request(0.0, [1]), request(5.0, [1], session_id="a"), TraceRequest(**fields)]
    with pytest.raises(ValueError, match=re.escape(f"requests[2]: {message}")):
        replay(trace, [one], concurrency=concurrency)
    assert one.requests == []


def test_a_turn_earlier_than_the_previous_turn_of_its_session_is_refused():
    trace = [request(at, [1], session_id="a") for at in (0.0, 5.0, 4.0)]
    with pytest.raises(ValueError, match=r"requests\[2\]: timestamp must be at least 5.0, .* in session 'a', got 4.0"):
        replay(trace, [engine()])


def test_a_session_can_begin_without_a_timestamp():
    turns = [request(None, [1], session_id="a"), request(None, [1, 2], session_id="a", delay=30.0)]
    first, second = replay(turns, [engine()], concurrency=1).requests
    assert second.arrival_ms >= first.arrival_ms + 30.0


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(
        ValueError, match=r"requests\[0\]: a prompt of 4 tokens has 0 hash ids, where trace_block_size of 4 makes 1"
    ):
        replay([TraceRequest(0.0, 4, 1, ())], [engine()], trace_block_size=4)


def test_negative_timestamps_are_accepted():
    report = replay([request(5.0, [1]), request(-10.0, [2])], [engine()])
    assert [each.arrival_ms for each in report.requests] == [0.0, 15.0]


@pytest.mark.parametrize(
    ("requests", "engines", "prefill", "message"),
    [
        (7, [engine()], (), "replay: requests must be a sequence of TraceRequest objects, got 7"),
        ([{"input_length": 4}], [engine()], (), "replay: requests[0] must be a TraceRequest, got {'input_length': 4}"),
        ([*ONE, None], [engine()], (), "replay: requests[1] must be a TraceRequest, got None"),
        (ONE, engine(), (), "replay: engines must be a sequence of MockEngine objects, got <MockEngine"),
        (ONE, [engine(), MockEngineArgs], (), "replay: engines[1] must be a MockEngine, got <class"),
        (ONE, [engine()], None, "replay: prefill must be a sequence of MockEngine objects, got None"),
        (ONE, [engine()], ["prefill"], "replay: prefill[0] must be a MockEngine, got 'prefill'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(requests, engines, prefill, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        replay(requests, engines, prefill)


@pytest.mark.parametrize("worker_type", ["prefill", "decode"])
def test_without_prefill_engines_only_aggregated_engines_are_accepted(worker_type):
    message = f"engines must have worker_type='aggregated', got '{worker_type}': prefill is empty"
    with pytest.raises(ValueError, match=message):
        replay(ONE, [engine(worker_type=worker_type)])


def test_busy_mixed_or_duplicate_engines_are_refused():
    one = engine()
    with pytest.raises(ValueError, match="an engine is given twice"):
        replay(ONE, [one, one])
    with pytest.raises(ValueError, match="all engines must have one block_size, got 4, 8"):
        replay(ONE, [one, engine(block_size=8)])
    with pytest.raises(ValueError, match=r"all engines must have one scheduler_semantics, got '1.2.1', '1.6.1'"):
        replay(ONE, [one, engine(semantics="1.6.1")])
    with pytest.raises(ValueError, match="prefill must have worker_type='prefill', got 'aggregated'"):
        replay(ONE, [engine(worker_type="decode")], [one])
    with pytest.raises(ValueError, match="engines must have worker_type='decode', got 'aggregated'"):
        replay(ONE, [one], [engine(worker_type="prefill")])
    one.submit([1, 2, 3], 5)
    with pytest.raises(ValueError, match="has open requests; engines must be idle"):
        replay(ONE, [one])
    assert len(one.requests) == 1
