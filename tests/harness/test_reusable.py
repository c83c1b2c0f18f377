"""Tokens that workers would reuse, next to the tokens that events promise: fewer on hybrid models, and never more."""

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import BACKENDS, EngineProfile, RouterHarness
from pytest_kvmock.testing import play, traffic

HYBRID = [name for name, spec in BACKENDS.items() if spec.group == "hybrid"]


def harness_of(backend, index=None, *, num_blocks=None, workers=1, **options):
    size, blocks = (64, 320) if backend == "vllm_deepseek_v4" else (4, 40)  # one of its groups has one-token blocks
    num_blocks = num_blocks or blocks
    return RouterHarness(EngineProfile(size, num_blocks, workers), backend, index, **options)


def prompts_of(program, size):
    """Yield each prompt of a program: whole, without its last token, and one block longer."""
    for blocks in sorted({step.blocks for step in program if getattr(step, "blocks", ())}):
        tokens = [number for number in blocks for _ in range(size)]
        yield from (tokens, tokens[:-1], [*tokens, *range(7, 7 + size)])


@pytest.mark.parametrize("backend", [*HYBRID, "lineage", "vllm", "sglang"])
@settings(max_examples=examples(12))
@given(data=st.data())
def test_no_engine_reuses_more_than_its_events_promise(backend, data):
    with harness_of(backend, workers=2) as kv:
        program = data.draw(traffic(workers=2, most_blocks=14, most_steps=20, most_in_a_burst=0, near_hashes=False))
        play(kv, program)
        size = kv.profile.block_size
        for tokens in prompts_of(program, size):
            held, found = kv.overlap(tokens), kv.reusable(tokens)
            for worker, reused in found.items():
                assert reused <= min(held.get(worker, 0) * size, len(tokens)), (worker, tokens)
            assert (held, found) == (kv.overlap(tokens), kv.reusable(tokens))
            if not BACKENDS[backend].traits.promises_more:
                promised = {worker: blocks * size for worker, blocks in held.items()}
                whole = {worker: min(each, (len(tokens) - 1) // size * size) for worker, each in promised.items()}
                assert found in (promised, {worker: each for worker, each in whole.items() if each})
            for key, worker in kv.workers.items():  # a worker that lacks blocks reuses less than all
                assert not worker.lacking(tokens) or found.get(key, 0) < held[key] * size, (key, tokens)


LACKED = {
    "vllm_gpt_oss": "sliding_window 4 (window 32)",
    "vllm_qwen3_next": "mamba 4",
    "sglang_gpt_oss": "sliding_window 4 (window 31)",
    "sglang_qwen3_next": "mamba 4",
}


@pytest.mark.parametrize("backend", LACKED)
def test_the_second_prompt_with_a_prefix_cannot_reuse_what_is_promised_and_the_third_can(backend):
    with harness_of(backend, num_blocks=200) as kv:
        size = kv.profile.block_size
        shared = kv.prompt(32)
        worker = kv.worker(0)
        assert kv.reusable(shared) == {}
        served = []
        for _ in range(3):
            prompt = kv.prompt(16, after=shared, tail=1)
            assert worker.lacking(prompt) == ((LACKED[backend],) if len(served) == 1 else ())
            assert kv.overlap(prompt) == ({0: 32} if served else {})
            assert kv.reusable(prompt).get(0, 0) == worker.cached_tokens(prompt)
            served.append(worker.serve(prompt).cached_tokens)
        assert [0, 0, 32 * size] == served


def test_a_prompt_that_an_engine_cannot_name_is_refused():
    with harness_of("vllm_gpt_oss") as kv, pytest.raises(ValueError, match="token"):
        kv.reusable([2**32])
