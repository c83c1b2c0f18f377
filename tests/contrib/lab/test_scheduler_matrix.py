"""The scheduler matrix on our engines, and the tests that accompany it in Dynamo."""

from __future__ import annotations

from random import Random

import pytest
from depth import DEEP

from pytest_kvmock import CapturingSink, Cleared, MockEngine, Removed, RouterHarness, Stored
from pytest_kvmock.contrib.lab.scheduler_cases import SchedulerCase, make_scheduler_requests
from pytest_kvmock.engines import MockEngineArgs

ENGINES_OWN = ("wrong_hash", "evicted_and_restored")
"""The warnings caused by multi_lru, which may evict a block before its children."""

COUNT = 200 if DEEP else 80
"""The number of served requests of a case: 80 do not fit in the cache. examples/scheduler_matrix serves all of them."""


@pytest.mark.kv_scheduler_matrix
def test_token_generation_patterns(kv_engine, kv_scheduler_case, kv_scheduler_requests, kv_harness):
    for request in kv_scheduler_requests[:COUNT]:
        kv_engine.submit(*request)
    report = kv_engine.run()

    assert [request.generated_tokens for request in report.requests] == [100] * COUNT
    metrics = kv_engine.metrics
    assert (metrics.active_blocks, metrics.running, metrics.waiting) == (0, 0, 0)
    assert metrics.cache_usage == 0.0
    assert metrics.total_blocks == 500
    assert kv_engine.is_idle
    kv_harness.assert_no_event_errors()
    # Without publishing, the events that the manager would publish are still judged.
    judged = kv_harness.inside.streams[0, 0].events
    assert {Stored, Removed} == {type(event.event.data) for event in judged}
    reused = sum(request.cached_tokens for request in report.requests)
    if not kv_scheduler_case.caching:
        assert reused == 0
        assert kv_harness.overlap(kv_scheduler_requests[-1].prompt) == {}
    else:
        assert (reused > COUNT // 2 * 448) == kv_scheduler_case.shared  # 7 blocks of the 500 shared tokens


@pytest.mark.parametrize(
    ("backend", "published"),
    [
        ("lineage", {Stored, Removed}),
        ("lru", {Stored, Removed}),
        ("multi_lru", {Stored, Removed}),
        ("hash_cache", {Stored, Removed}),
        ("vllm", set()),
        ("vllm_0_19", set()),
        ("sglang", {Cleared}),  # when its cache starts
        ("mocker_sglang_1_6", set()),
    ],
)
def test_without_prefix_caching_unpublished_events_differ_by_manager(backend, published):
    case = SchedulerCase(shared=True, caching=False, chunked=False)
    engine = {"num_gpu_blocks": 500, "block_size": 64, "enable_prefix_caching": False, **case.engine}
    with RouterHarness(backend=backend, engine=engine, judge_unpublished=True) as kv:
        requests = make_scheduler_requests(case, Random(0))[:50]
        for request in requests:
            kv.engine(0).submit(*request)
        report = kv.engine(0).run()

        assert published == {type(event.event.data) for event in kv.inside.streams[0, 0].events}
        assert kv.overlap(requests[0].prompt) == {}
        assert not any(request.cached_tokens for request in report.requests)


# ---------------------------------------------------------------------------------------------------- beside it


@pytest.mark.kvmock(engine={"num_gpu_blocks": 500, "block_size": 64, "speedup_ratio": 1000.0}, event_warnings="fail")
def test_engine_requests_complete_and_store_their_blocks(kv_engine, kv_harness, kv_events):
    for start in range(5):
        kv_engine.submit(range(start * 1000, start * 1000 + 200), 20)
    kv_engine.run()

    assert [request.generated_tokens for request in kv_engine.requests] == [20] * 5
    assert kv_harness.events.counts.ok("stored") > 0
    assert kv_harness.events.counts.warnings == {}
    assert kv_events.removed == []


@pytest.mark.kvmock(num_blocks=10, block_size=4, event_warnings="fail", allow=ENGINES_OWN)
def test_a_request_is_preempted_and_computed_again(kv_engine, kv_harness):
    for start in range(3):
        kv_engine.submit(range(start * 100, start * 100 + 12), 16)
    kv_engine.run()

    assert [request.generated_tokens for request in kv_engine.requests] == [16] * 3
    assert kv_engine.metrics.preemptions > 0
    assert sum(request.preemptions for request in kv_engine.requests) == kv_engine.metrics.preemptions
    assert kv_harness.events.counts.ok("removed") > 0
    assert kv_harness.events.counts.warnings.keys() <= {*ENGINES_OWN}
    assert kv_engine.metrics.active_blocks == 0


@pytest.mark.kvmock(engine={"num_gpu_blocks": 500, "block_size": 64}, event_warnings="fail")
def test_ten_identical_prompts_complete(kv_engine):
    for _ in range(10):
        kv_engine.submit(range(65), 100)
    kv_engine.run()

    assert [request.generated_tokens for request in kv_engine.requests] == [100] * 10
    assert [request.cached_tokens for request in kv_engine.requests] == [0, *[64] * 9]
    assert kv_engine.metrics.active_blocks == 0


def test_eight_requests_of_one_repeated_token_complete_on_six_blocks(kv_harness):
    args = MockEngineArgs(num_gpu_blocks=6, block_size=2, semantics="1.2.1")
    with MockEngine(args, backend=kv_harness.backend) as engine:
        for _ in range(8):
            engine.submit([42] * 8, 2)
        engine.run()
        assert [request.generated_tokens for request in engine.requests] == [2] * 8
        assert engine.metrics.active_blocks == 0


# ---------------------------------------------------------------------------------------------------- an engine is
# dropped


@pytest.mark.kvmock(num_blocks=20, block_size=4, event_warnings="fail", allow=ENGINES_OWN)
@pytest.mark.parametrize("passes", [0, 1, 3, 20])
def test_a_closed_engine_frees_all_blocks(kv_engine, kv_harness, passes):
    with kv_engine:
        requests = [kv_engine.submit(range(start * 100, start * 100 + 20), 30) for start in range(4)]
        requests.append(kv_engine.submit([1], 1, arrival_ms=1e9))
        for _ in range(passes):
            kv_engine.step()
        assert (passes > 0) == (kv_engine.metrics.active_blocks > 0)
    assert (
        kv_engine.metrics.active_blocks,
        kv_engine.metrics.running,
        kv_engine.metrics.waiting,
        kv_engine.metrics.arriving,
    ) == (0, 0, 0, 0)
    assert [request.status for request in requests] == ["aborted"] * 5
    assert kv_engine.worker.requests == []
    assert kv_engine.is_idle
    kv_engine.close()  # a second close has no effect

    again = kv_engine.submit(range(20), 2)  # the worker still exists, and full blocks are still cached
    kv_engine.run()
    assert again.status == "finished"
    assert (20 if passes else 0) == again.cached_tokens


def test_an_engine_frees_its_blocks_when_the_with_block_raises():
    engine = MockEngine(MockEngineArgs(num_gpu_blocks=20, block_size=4))
    engine.submit(range(20), 30)
    engine.step()
    assert engine.metrics.active_blocks > 0
    with pytest.raises(KeyError), engine:
        raise KeyError
    assert engine.metrics.active_blocks == 0


def test_events_held_until_the_end_of_a_pass_are_published_when_the_engine_is_closed():
    sink = CapturingSink()
    engine = MockEngine(MockEngineArgs(num_gpu_blocks=20, block_size=4, events_visible="pass_end"), sink=sink)
    engine.submit(range(20), 30)
    engine.inside.start_pass(0.0)
    assert len(sink.events) == 0
    engine.close()
    assert [Stored] == [type(event.data) for event in sink.events]
    assert not engine.is_in_pass


@pytest.mark.kv_backends("lineage", "hash_cache", "vllm", "sglang", "mocker_sglang_1_6")
@pytest.mark.kvmock(engine={"num_gpu_blocks": 500, "block_size": 64, "speedup_ratio": 1000.0})
def test_closing_an_engine_frees_all_blocks_over_every_backend(kv_engine):
    with kv_engine:
        for start in range(9):
            kv_engine.submit(range(start * 1000, start * 1000 + 500), 100)
        for _ in range(5):
            kv_engine.step()
        assert kv_engine.metrics.active_blocks > 0
    assert kv_engine.metrics.active_blocks == 0
