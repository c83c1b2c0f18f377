"""Fleets of hybrid engines in a harness: correct routers cause no problem, even if promised blocks are not found."""

from random import Random

import pytest
from depth import examples

from pytest_kvmock import BACKENDS, EngineProfile, RadixIndex, RouterHarness
from pytest_kvmock.fleets import DynamoRouter, TraceRequest

HYBRID = [name for name, spec in BACKENDS.items() if spec.group == "hybrid"]


def test_a_report_names_the_cache_group_that_lacked_promised_blocks():
    """Three prompts share a beginning; the second finds no window there. Plain engines lack no block."""
    trace = [TraceRequest(1000.0 * n, 49 * 4, 1, (*range(32), *range(100 * n, 100 * n + 17))) for n in (1, 2, 3)]
    for backend, window in (
        ("vllm_gpt_oss", "sliding_window 4 (window 32)"),
        ("sglang_gpt_oss", "sliding_window 4 (window 31)"),
    ):
        with RouterHarness(EngineProfile(4, 600), backend) as kv:
            report = kv.fleet(DynamoRouter(), trace_block_size=4).run(trace)
        assert (32, {window: 32}) == (report.figure("promised_not_found"), report.lacking()) == (32, report.lacking(0))
        assert f"of 32 blocks promised and not found the attention group had 32: {window} lacked 32" in str(report)
        assert {window: 32} == report.to_json()["fleet"]["lacking"]
    with RouterHarness(EngineProfile(4, 600), "vllm") as kv:
        report = kv.fleet(DynamoRouter(), trace_block_size=4).run(trace)
    assert (report.figure("promised_not_found"), report.lacking()) == (0, {})
    assert "lacked" not in str(report)


def test_a_trace_of_hashes_becomes_tokens_for_engines_that_need_them():
    """Gemma 4 hashes units smaller than a block, so each id of the trace becomes a block of its own tokens."""
    with RouterHarness(EngineProfile(4, 600), "vllm_gemma4") as kv:
        report = kv.fleet(DynamoRouter()).run([TraceRequest(1000.0 * n, 38, 3, (*range(9), n)) for n in (20, 30)])
    assert [request.first_reused_tokens for request in report.completed] == [0, 36]


def requests(rng, size):
    """Return requests at random times; some share beginnings, some continue earlier ones."""
    ids, asked, now = iter(range(10**9)), [], 0.0
    for _ in range(30):
        now += rng.expovariate(1 / 20)
        before = rng.choice(asked) if asked and rng.random() < 0.7 else []
        blocks = [*before[: rng.randint(0, len(before))], *(next(ids) for _ in range(rng.randint(1, 6)))]
        asked.append(blocks)
        length = size * len(blocks) - rng.randrange(size)
        yield TraceRequest(now, length, rng.randint(1, 3 * size), tuple(blocks), with_tokens=True)


@pytest.mark.parametrize("backend", HYBRID)
def test_a_correct_router_over_eight_hybrid_engines_reports_no_problem(backend):
    size = 64 if backend == "vllm_deepseek_v4" else 4
    for seed in range(examples(2)):
        rng = Random(f"{backend} {seed}")
        profile = EngineProfile(size, rng.choice([600, 1000]) * (16 if size == 64 else 1), 8)
        with RouterHarness(profile, backend, RadixIndex(count_copies=True)) as kv:
            fleet = kv.fleet(DynamoRouter(rng=rng), trace_block_size=size, event_delay_ms=rng.choice([0.0, 5.0]))
            report = fleet.run(requests(rng, size))
            assert len(report.completed) == 30
            for prompt in [each.prompt for each in report.completed[:5]]:
                held = kv.overlap(prompt)
                assert all(tokens <= held.get(worker, 0) * size for worker, tokens in kv.reusable(prompt).items())
