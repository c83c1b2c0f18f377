"""Two policies in front of eight engines of hybrid models: one uses the promise of events, one what engines can
reuse.
"""

from random import Random

import pytest
from chain_ends import ChainEnds, PlainOverlap

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs
from pytest_kvmock.fleets import TraceRequest

BLOCK, ENGINES = 16, 8
MODELS = ["vllm_gpt_oss", "vllm_qwen3_next", "sglang_gpt_oss", "sglang_qwen3_next"]


def documents(count=240, seed=0):
    """Yield requests with one question about one of 24 documents; each document gets ten questions on average."""
    rng, ids = Random(seed), iter(range(10**9))
    texts = [[next(ids) for _ in range(rng.randint(20, 60))] for _ in range(24)]
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(1 / 60)
        blocks = [*rng.choice(texts), *(next(ids) for _ in range(rng.randint(1, 4)))]
        yield TraceRequest(now, BLOCK * len(blocks) - 5, rng.randint(8, 64), tuple(blocks), with_tokens=True)


def conversations(count=240, seed=0):
    """Yield requests that each continue one of 12 texts. Two in five replace a part of the end, and half of the results
    become the text.
    """
    rng, ids = Random(seed), iter(range(10**9))
    texts = [[next(ids) for _ in range(rng.randint(20, 60))] for _ in range(12)]
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(1 / 60)
        text = rng.choice(texts)
        cut = rng.randint(len(text) // 2, len(text)) if rng.random() < 0.4 else len(text)
        blocks = [*text[:cut], *(next(ids) for _ in range(rng.randint(1, 4)))]
        if rng.random() < 0.5:
            text[:] = blocks
        yield TraceRequest(now, BLOCK * len(blocks) - 5, rng.randint(8, 64), tuple(blocks), with_tokens=True)


def served(backend, router, requests=documents):
    """Return the share of requests whose reused blocks the router knew exactly, and the share of reused tokens."""
    scheduler = "sglang" if backend.startswith("sglang") else "vllm"
    args = MockEngineArgs(engine_type=scheduler, num_gpu_blocks=1600, block_size=BLOCK)
    fleet = Fleet([MockEngine(args, backend=backend) for _ in range(ENGINES)], router, trace_block_size=BLOCK)
    report = fleet.run(requests())
    assert len(report.completed) == 240
    exact = [router.counted[each.prompt.tokens] == each.cached_tokens // BLOCK for each in report.completed]
    return sum(exact) / len(exact), report.figure("prefix_cache_reused_ratio")


@pytest.mark.parametrize("backend", MODELS)
def test_who_counts_ends_of_chains_knows_what_is_reused(backend):
    plain, reused = served(backend, PlainOverlap())
    assert served(backend, ChainEnds()) == (1.0, reused)
    assert plain < 0.95


@pytest.mark.parametrize("backend", ["vllm_qwen3_next", "sglang_qwen3_next"])
def test_where_conversations_branch_the_plain_one_is_often_wrong_about_states(backend):
    plain, _ = served(backend, PlainOverlap(), conversations)
    ends, _ = served(backend, ChainEnds(), conversations)
    assert plain < 0.7
    assert ends > 0.95


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_of_plain_models_the_plain_one_is_right(backend):
    plain, _ = served(backend, PlainOverlap())
    ends, _ = served(backend, ChainEnds())
    assert ends < plain == 1.0
