"""Resets, pauses and sleeps of a worker: when its cache is empty, and when its events report this."""

from functools import partial
from random import Random

import pytest

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    EngineProfile,
    MockEngine,
    MockEngineArgs,
    RouterHarness,
    create_manager,
)
from pytest_kvmock.engines import KvWorker, RequestError

SIZE = 4
TOKENS = list(range(18))


@pytest.fixture
def sink():
    return CapturingSink()


def worker_over(sink, backend="vllm"):
    make = partial(create_manager, backend, num_blocks=12, block_size=SIZE)
    return KvWorker(lambda given: make(sink=given), sink=sink, rng=Random(1), driver=BACKENDS[backend].driver)


def kinds(sink):
    return [event.data.kind for event in sink.take()]


def test_the_cleared_of_a_reset_is_published_with_the_next_request_before_its_stored(sink):
    worker = worker_over(sink)
    worker.serve(TOKENS)
    sink.take()
    assert worker.clears_with_a_step
    assert worker.reset()
    assert kinds(sink) == []
    assert worker.cached_tokens(TOKENS) == 0
    worker.serve(range(300, 306))
    assert kinds(sink) == ["cleared", "stored"]


def test_other_engines_publish_the_cleared_of_a_reset_at_once(sink):
    worker = worker_over(sink, "sglang")
    worker.serve(TOKENS)
    sink.take()
    assert not worker.clears_with_a_step
    assert worker.reset()
    assert kinds(sink) == ["cleared"]


def test_a_reset_is_refused_while_a_request_runs(sink):
    worker = worker_over(sink)
    with worker.prefill(TOKENS):
        sink.take()
        assert not worker.reset()
        worker.serve(range(300, 304))
        assert kinds(sink) == ["stored"]


def test_a_reset_with_running_requests_preempts_and_recomputes_them(sink):
    worker = worker_over(sink)
    request = worker.prefill(TOKENS)
    sink.take()
    assert worker.reset(running=True)
    assert request.status == "preempted"
    request.resume()
    assert kinds(sink) == ["cleared", "stored"]


def test_a_sleeping_worker_refuses_requests_and_publishes_nothing(sink):
    worker = worker_over(sink)
    request = worker.prefill(TOKENS)
    sink.take()
    worker.sleep()
    assert (request.status, worker.is_sleeping, kinds(sink)) == ("finished", True, [])
    with pytest.raises(RequestError, match=r"worker 0, which sleeps: wake_up\(\) it first \(vLLM answers 503\)"):
        worker.prefill(TOKENS)
    worker.wake_up()
    worker.serve(range(300, 306))
    assert kinds(sink) == ["cleared", "stored"]


def test_a_pause_in_wait_mode_clears_the_cache_after_the_last_request_ends(sink):
    worker = worker_over(sink)
    request = worker.prefill(TOKENS)
    worker.pause("wait")
    request.decode(2)
    assert worker.cached_tokens(TOKENS) == 16
    request.finish()
    assert worker.cached_tokens(TOKENS) == 0


def test_a_pause_in_keep_mode_freezes_requests_and_keeps_their_blocks(sink):
    worker = worker_over(sink)
    request = worker.prefill(TOKENS)
    worker.pause("keep", clear_cache=False)
    sink.take()
    with pytest.raises(RequestError, match="is paused"):
        request.decode(1)
    worker.resume()
    request.decode(1)
    assert (request.status, kinds(sink)) == ("running", [])


def test_an_engine_publishes_the_cleared_of_a_reset_with_its_next_pass(sink):
    engine = MockEngine(MockEngineArgs(num_gpu_blocks=12, block_size=SIZE), backend="vllm", sink=sink)
    engine.submit(TOKENS, 1)
    engine.run()
    sink.take()
    assert engine.worker.reset()
    assert kinds(sink) == []
    engine.submit(range(300, 306), 1)
    engine.run()
    assert kinds(sink) == ["cleared", "stored"]


def test_an_unknown_pause_mode_is_refused(sink):
    with pytest.raises(ValueError, match="unknown mode of a pause 'halt'"):
        worker_over(sink).pause("halt")


def test_a_harness_does_not_compare_between_a_reset_and_its_cleared():
    with RouterHarness(EngineProfile(block_size=SIZE, num_blocks=12), "vllm") as harness:
        worker = harness.worker(0)
        worker.serve(TOKENS)
        assert worker.reset()
        harness.assert_in_sync()
        assert harness.overlap(TOKENS) == {0: 4}
        worker.serve(range(300, 306))
        harness.assert_in_sync()
        assert harness.overlap(TOKENS) == {}
        assert list(harness.events.errors) == []
