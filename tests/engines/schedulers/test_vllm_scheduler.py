"""The scheduler of Dynamo's mock of vLLM: worked examples, and differences of its two releases."""

import pytest

from pytest_kvmock import MockEngine
from pytest_kvmock.engines import MockEngineArgs


def engine_of(backend="lineage", **fields):
    return MockEngine(MockEngineArgs(**{"block_size": 4, **fields}), backend=backend)


def submit(engine, *prompts, output=4):
    """Submit requests with prompts of these lengths that share no block."""
    return [engine.submit(range(1000 * i, 1000 * i + length), output) for i, length in enumerate(prompts)]


def test_prompts_share_the_token_budget_and_the_rest_of_a_prompt_is_computed_later():
    engine = engine_of(num_gpu_blocks=6, max_num_batched_tokens=12)
    first, second = submit(engine, 8, 8)
    done = engine.step()
    assert [first] == done.generated
    assert [first, second] == list(engine.inside.scheduler.running)
    assert (first.computed_tokens, second.computed_tokens) == (8, 4)
    assert engine.metrics.active_blocks == 4  # two for the first prompt, one each for its output and the second prompt


def test_running_requests_are_served_before_waiting_ones():
    engine = engine_of(num_gpu_blocks=6, max_num_batched_tokens=4)
    first, second = submit(engine, 8, 8)
    engine.step()
    assert ([first], [second]) == (list(engine.inside.scheduler.running), list(engine.inside.scheduler.waiting))
    done = engine.step()
    assert [(first, 4)] == [(each.request, each.tokens) for each in done.scheduled]
    assert second.status == "waiting"


def test_a_waiting_request_preempts_a_running_one_in_1_2_1():
    """8 tokens have 2 of 4 blocks; 12 tokens ask for 3: they get the two free ones and preempt for the third."""
    engine = engine_of(num_gpu_blocks=4)
    first, _ = submit(engine, 8, 12, output=1)
    late = engine.submit(range(9000, 9004), 1, arrival_ms=0.0)
    done = engine.step()
    assert ([first], first) == (done.preempted, engine.inside.scheduler.waiting[0])
    assert late not in done.admitted  # no request is admitted after a preemption
    assert len(engine.run().completed) == 3


def test_a_waiting_request_waits_until_all_its_blocks_are_free_in_1_6_1():
    engine = engine_of("vllm", num_gpu_blocks=6, max_num_batched_tokens=12)
    first, second, third = submit(engine, 8, 8, 12)
    engine.step()
    assert [each.status for each in (first, second, third)] == ["running", "running", "waiting"]
    assert (second.computed_tokens, engine.metrics.preemptions) == (4, 0)
    report = engine.run()
    assert third.preemptions == 0
    assert len(report.completed) == 3


@pytest.mark.parametrize(("mode", "position"), [("lifo", -1), ("fifo", 0)])
def test_the_preemption_mode_preempts_the_newest_or_the_oldest_request(mode, position):
    engine = engine_of(num_gpu_blocks=9, preemption_mode=mode)
    requests = submit(engine, 11, 11, 11, output=6)
    while not engine.metrics.preemptions:
        done = engine.step()
    assert [requests[position]] == done.preempted


def test_no_request_is_admitted_in_a_pass_that_preempted():
    engine = engine_of(num_gpu_blocks=6, max_num_batched_tokens=12)
    _, second = submit(engine, 8, 16)
    late = engine.submit(range(9000, 9004), 1)
    engine.step()
    done = engine.step()  # the second has one block and asks for three more
    assert [second] == done.preempted
    assert done.admitted == []
    assert [second, late] == list(engine.inside.scheduler.waiting)


def test_two_identical_prompts_in_one_pass_share_their_blocks():
    engine = engine_of(num_gpu_blocks=100)
    engine.submit(range(8), 1)
    twin = engine.submit(range(8), 1)
    done = engine.step()
    assert pytest.approx(done.end_ms, abs=1e-6) == 23.432818
    assert twin.reused_tokens == 8


def test_over_vllm_the_last_token_of_a_cached_prompt_is_computed():
    engine = engine_of("vllm", num_gpu_blocks=100)
    engine.submit(range(8), 1)
    twin = engine.submit(range(8), 1)
    engine.step()
    assert twin.reused_tokens == 4


def test_without_chunked_prefill_a_prompt_beyond_the_budget_waits():
    engine = engine_of(num_gpu_blocks=100, max_num_batched_tokens=12, enable_chunked_prefill=False)
    _, second = submit(engine, 8, 8, output=1)
    engine.step()
    assert second.status == "waiting"
    assert pytest.approx(engine.run().to_json()["max_ttft_ms"], abs=1e-6) == 46.865636


def test_max_num_seqs_limits_the_number_of_running_requests():
    engine = engine_of(num_gpu_blocks=100, max_num_seqs=1)
    submit(engine, 8, 8, output=2)
    engine.step()
    assert (engine.metrics.running, engine.metrics.waiting) == (1, 1)
    assert pytest.approx(engine.run().figure("duration_ms"), abs=1e-6) == 61.539904


def test_a_chunk_that_leaves_one_token_of_the_prompt_is_not_a_decode():
    """One remaining token looks like decode, but it is prefill and costs as much."""
    engines = [engine_of(num_gpu_blocks=100, max_num_batched_tokens=8) for _ in range(2)]
    engines[1].on_pass(lambda done: None)  # each pass runs separately
    for engine in engines:
        engine.submit(range(9), 3)
    assert engines[0].run().to_json() == engines[1].run().to_json()
    assert engines[0].passes == 4


def test_prefill_engines_charge_only_prefill_and_decode_engines_only_decode():
    ends = {}
    for worker_type in ("aggregated", "prefill", "decode"):
        engine = engine_of(num_gpu_blocks=100, worker_type=worker_type)
        engine.submit(range(8), 1)
        done = engine.step()
        ends[worker_type] = (done.prefill_ms > 0, done.decode_ms > 0)
    assert ends == {"aggregated": (True, True), "prefill": (True, False), "decode": (False, True)}


def test_both_speedup_ratios_divide_the_decode_time():
    times = []
    for fields in ({}, {"speedup_ratio": 2.0}, {"speedup_ratio": 2.0, "decode_speedup_ratio": 3.0}):
        engine = engine_of(num_gpu_blocks=100, **fields)
        engine.submit(range(8), 1)
        done = engine.step()
        times.append((done.prefill_ms, done.decode_ms))
    (prefill, decode), *sped_up = times
    assert [(prefill / 2, decode / 2), (prefill / 2, decode / 6)] == [pytest.approx(pair, abs=1e-6) for pair in sped_up]
