"""Every engine under any mix of requests: no event is wrong, no block is lost, and none is kept."""

from collections import Counter

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import EngineProfile, OutOfBlocks, Prompt, RouterHarness
from pytest_kvmock.backends import BACKENDS
from pytest_kvmock.testing import traffic
from pytest_kvmock.testing.drafts import Player

CAPACITY, SIZE = 8, 4
ENGINES = {
    **{
        name: spec for name, spec in BACKENDS.items() if name not in ("vllm_gemma4", "vllm_deepseek_v4")
    },  # they need tokens
    "hash_cache_strict": BACKENDS["hash_cache"].variant("hash_cache_strict", prefix_closed=True, strict=True),
}

WITH_ONE_CACHE = {name: spec for name, spec in ENGINES.items() if not (spec.group and spec.scheduler == "vllm")}
"""Those in which a block of a prompt takes one block."""

MAY_WARN = {
    "hash_cache": {"wrong_hash"},
    "multi_lru": {"evicted_and_restored", "wrong_hash", "orphaned_child"},
}
"""What the events of an engine may be warned of, because the original does it."""


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=examples(60))
@given(
    program=traffic(workers=2, most_steps=40, most_blocks=6, most_tokens=9),
    chunk=st.sampled_from([None, None, 1, 3, SIZE]),
    num_blocks=st.sampled_from([2, 5, CAPACITY]),
)
def test_any_traffic(engine, program, chunk, num_blocks):
    profile = EngineProfile(block_size=SIZE, num_blocks=num_blocks, workers=2, chunk=chunk)
    kv = RouterHarness(profile, ENGINES[engine])
    player = Player(kv)
    for step in program:
        player.do(step)
        kv.events.check()
        for worker in kv.workers.values():
            conserved(worker, num_blocks)
    for worker in kv.workers.values():
        for request in list(worker.requests):
            request.finish()
        manager = worker.manager
        assert (0, 0) == (manager.num_active_blocks, manager.num_active_block_refs)
        assert manager.num_inactive_blocks == len(manager.resident())
        assert worker.clear()
        assert [] == list(manager.resident())
    verdict = kv.judge()
    assert [] == verdict.errors
    assert {problem.rule for problem in kv.events.warnings} <= MAY_WARN.get(engine, set())


def conserved(worker, num_blocks):
    """What is in use and what is cached fits, and each inactive block is resident."""
    manager = worker.manager
    active, inactive = manager.num_active_blocks, manager.num_inactive_blocks
    assert min(active, inactive) >= 0
    assert active + inactive <= num_blocks
    resident, idle = Counter(manager.resident()), Counter(manager.inactive_blocks())
    assert idle <= resident
    assert inactive == idle.total()
    assert active / num_blocks == manager.active_perc
    if not worker.traits.copies and worker.backend != "multi_lru":
        assert set(resident.values()) <= {1}
    running = sum(request.status == "running" for request in worker.requests)
    assert bool(running) == bool(active)
    assert sum(manager.active_blocks.values()) == manager.num_active_block_refs


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_open_at_the_end_is_a_leak_of_requests_and_of_nothing_else(engine):
    kv = RouterHarness(EngineProfile(block_size=SIZE, num_blocks=4 * CAPACITY), ENGINES[engine])
    kv.worker(0).prefill(kv.prompt(2, tail=1))
    verdict = kv.judge()
    assert [] == verdict.errors
    assert ["leaked_requests"] == [problem.rule for problem in verdict.warnings]


@pytest.mark.parametrize("engine", WITH_ONE_CACHE)
def test_a_request_longer_than_the_whole_cache_is_refused(engine):
    with RouterHarness(EngineProfile(block_size=SIZE, num_blocks=CAPACITY), ENGINES[engine]) as kv:
        worker = kv.worker(0)
        worker.serve(kv.prompt(2))
        before = (sorted(worker.manager.resident()), kv.events.total)
        with pytest.raises(OutOfBlocks, match="9 blocks are needed and 8 are available"):
            worker.serve(kv.prompt(CAPACITY, tail=1))
        assert before == (sorted(worker.manager.resident()), kv.events.total)


@pytest.mark.parametrize("engine", WITH_ONE_CACHE)
def test_output_after_a_prompt_of_hashes_goes_on_with_its_chain(engine):
    with RouterHarness(EngineProfile(block_size=SIZE, num_blocks=CAPACITY), ENGINES[engine]) as kv:
        for number in range(6):
            prompt = Prompt(hashes=[2**64 - 1 - number])  # signed, its name is below 0
            kv.worker(0).serve(prompt, output_tokens=3 * SIZE + 1)  # models with states keep one at 16 tokens
            assert {0: 1} == kv.overlap(prompt)
        assert 6 * 4 == len(kv.events.stored_blocks)
