"""Tests of a KV-aware router that hashes token ids itself.

`kv_index` is overridden with the router's index. Every event of a mock engine then goes to this index and is checked,
and the index's answers are compared with the reference index; a test contains only its special part. Each test runs
once for each eviction backend. (Hybrid models publish several cache groups: `examples/own_index` and
`examples/engine_matrix` have indexes that follow one of them.)
"""

import pytest
from prefix_router import PrefixRouter, TokenIndex


@pytest.fixture
def kv_index(kv_profile):
    return TokenIndex(kv_profile.block_size)


@pytest.fixture
def router(kv_index, kv_harness):
    return PrefixRouter(kv_index, len(kv_harness.workers))


@pytest.mark.kvmock(workers=2)
def test_a_warm_worker_is_preferred(router, kv_harness, kv_prompt):
    system_prompt = kv_prompt(blocks=4)
    kv_harness.worker(1).serve(system_prompt)

    question = kv_prompt(blocks=1, after=system_prompt)

    assert kv_harness.overlap(question) == {1: 4}  # our index returns this
    assert router.route(question.tokens) == 1


@pytest.mark.kvmock(workers=2)
def test_load_beats_a_small_overlap(router, kv_harness, kv_prompt):
    system_prompt = kv_prompt(blocks=1)
    kv_harness.worker(0).serve(system_prompt)
    first, second, third = (kv_prompt(blocks=3, after=system_prompt).tokens for _ in range(3))
    assert router.route(first) == 0  # 4 blocks, of which 3 are to prefill: 3 against 4

    assert router.route(second) == 1  # 3 and the 4 that run there, against 4

    router.finish(0, first)
    assert router.route(third) == 0


def test_blocks_of_the_answer_count(router, kv_harness, kv_prompt):
    prompt = kv_prompt(blocks=2)
    with kv_harness.worker(0).prefill(prompt) as request:
        request.decode(range(17))  # one block of 16, published with the 17th token

    assert kv_harness.overlap([*prompt.tokens, *range(16)]) == {0: 3}


@pytest.mark.kvmock(num_blocks=4)
def test_an_eviction_reaches_the_router(router, kv_harness, kv_events, kv_prompt):
    worker, old, new = kv_harness.worker(0), kv_prompt(blocks=4), kv_prompt(blocks=3)
    stored = worker.serve(old).stored_blocks

    worker.serve(new)

    assert [*stored[:0:-1]] == kv_events.removed_blocks  # the tail is evicted first
    assert kv_harness.overlap(old) == {0: 1}
    assert kv_harness.overlap(new) == {0: 3}


@pytest.mark.kvmock(workers=2)
def test_a_lost_event_is_detected(router, kv_harness, kv_events, kv_prompt):
    worker, prompt = kv_harness.worker(0), kv_prompt(blocks=4)
    worker.serve(prompt)

    with kv_harness.drop_next(), kv_events.expect_error("event_id_gap"):
        worker.serve(kv_prompt(blocks=2))  # its Stored is lost
        worker.serve(kv_prompt(blocks=2))  # so the id of this one is not the next

    assert router.index.stale == {0}
    assert router.route(prompt.tokens) == 1  # blocks of a stale worker do not count


@pytest.mark.kvmock(workers=2)
def test_a_restart_that_nobody_announced_is_detected(router, kv_harness, kv_events, kv_prompt):
    worker, prompt = kv_harness.worker(0), kv_prompt(blocks=4)
    worker.serve(prompt)

    worker.restart()
    kv_events.expect_error("event_id_gap")
    worker.serve(kv_prompt(blocks=2))  # event 0 again

    assert router.index.stale == {0}
    assert router.route(prompt.tokens) == 1


@pytest.mark.kvmock(workers=2)
def test_a_worker_that_restarted_is_cold(router, kv_harness, kv_prompt):
    worker, prompt = kv_harness.worker(0), kv_prompt(blocks=4)
    worker.serve(prompt)

    worker.restart(announced=True)

    assert kv_harness.overlap(prompt) == {}
    worker.serve(kv_prompt(blocks=2))
    assert router.index.stale == set()
    assert router.route(prompt.tokens) == 1  # both are cold, and worker 1 has more room
