"""A router's index under the traffic of a scheduler: 200 requests that arrive at once, chunks, preemption, eviction.

    pytest examples/scheduler_matrix
    pytest examples/scheduler_matrix -k "shared and cached"

The marker runs the test over the eight cases of Dynamo's scheduler matrix, on each backend of the test, here one. After
each body the events are checked, and the index is compared with the reference index.
"""

import pytest
from counting_router import CountingRouter


@pytest.fixture
def kv_index():
    return CountingRouter()


@pytest.mark.kv_scheduler_matrix
@pytest.mark.kv_backends("lru")
def test_the_router_knows_what_the_engine_has(kv_engine, kv_scheduler_case, kv_scheduler_requests, kv_index):
    for request in kv_scheduler_requests:
        kv_engine.submit(*request)
    report = kv_engine.run()

    assert sum(request.generated_tokens for request in report.requests) == 200 * 100
    assert (kv_engine.metrics.active_blocks, kv_engine.metrics.cache_usage) == (0, 0.0)
    if kv_scheduler_case.caching:
        assert len(kv_engine.worker.manager.resident()) == kv_index.num_blocks(0)
        assert kv_index.stored[0] - kv_index.removed[0] == kv_index.num_blocks(0)
        assert kv_engine.metrics.preemptions > 0
    else:
        assert kv_index.num_blocks(0) == 0  # nothing is published


@pytest.mark.kvmock(num_blocks=500, block_size=64, engine={"speedup_ratio": 1000.0, "semantics": "1.2.1"})
@pytest.mark.kv_backends("lineage", "vllm")
def test_turns_of_a_chat_find_what_was_said(kv_engine, kv_harness, kv_prompt):
    """Outside of the matrix: requests that arrive one after the other."""
    prompt = kv_prompt(blocks=4)
    kv_engine.submit(prompt, 100)
    kv_engine.run()
    followup = kv_engine.submit(kv_prompt(blocks=2, after=prompt), 100, arrival_ms=kv_engine.now_ms + 1000)
    kv_engine.run()

    assert followup.cached_tokens == 4 * 64
    assert followup.token_ms[0] > 1000
    assert kv_harness.overlap(followup.prompt) == {0: 6}
