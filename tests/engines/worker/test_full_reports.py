"""Requests of vLLM that carry `kv_cache_report_mode="full"`: when they report, and the effect on the engine."""

from functools import partial
from random import Random

import pytest
from depth import each_parameter

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    EngineProfile,
    MockEngine,
    MockEngineArgs,
    OutOfBlocks,
    Prompt,
    RadixIndex,
    RouterEvent,
    RouterHarness,
    create_manager,
)
from pytest_kvmock.engines import FullReportError, KvWorker, RequestError

SIZE = 4
TOKENS = list(range(18))


def worker_over(sink, backend="vllm", **options):
    make = partial(create_manager, backend, num_blocks=12, block_size=SIZE, **options)
    return KvWorker(lambda given: make(sink=given), sink=sink, rng=Random(1), driver=BACKENDS[backend].driver)


def asks_full(tokens):
    return Prompt(tokens, report_mode="full")


@pytest.fixture
def sink():
    return CapturingSink()


@pytest.fixture
def worker(sink):
    return worker_over(sink)


def stored(sink):
    return [(event.data.parent_hash, len(event.data.block_hashes)) for event in sink.events]


def test_a_full_report_covers_the_hit_from_the_root_before_new_blocks_are_stored(worker, sink):
    worker.serve(TOKENS)
    sink.events.clear()
    worker.serve(asks_full([*TOKENS, 1, 2, 3]))
    (root, reported), (parent, new) = stored(sink)
    assert (root, reported, new) == (None, 4, 1)
    assert parent == sink.events[0].data.block_hashes[-1]


def test_only_report_mode_full_publishes_a_report(worker, sink):
    worker.serve(TOKENS)
    sink.events.clear()
    with pytest.warns(UserWarning, match="report_mode must be 'full' or 'incremental'; 'Full' is ignored"):
        prompt = Prompt(TOKENS, report_mode="Full")
    worker.serve(prompt)
    worker.serve(Prompt(TOKENS, report_mode="incremental"))
    assert stored(sink) == []


def test_a_request_that_does_not_fit_still_publishes_its_report(worker, sink):
    worker.serve(TOKENS)
    with worker.prefill(range(100, 128)):
        sink.events.clear()
        with pytest.raises(OutOfBlocks):
            worker.prefill(asks_full([*TOKENS[:8], *range(200, 230)]))
    assert stored(sink) == [(None, 2)]


def test_engines_other_than_vllm_publish_no_report():
    sink = CapturingSink()
    worker = worker_over(sink, "sglang")
    worker.serve(TOKENS)
    sink.events.clear()
    worker.serve(asks_full(TOKENS))
    assert stored(sink) == []


def test_with_dcp_a_full_report_crashes_the_engine_and_loses_its_requests():
    sink = CapturingSink()
    worker = worker_over(sink, dcp=2)
    request = worker.prefill(TOKENS)
    before = len(sink.events)
    with pytest.raises(FullReportError, match="resolves the hashes of a hit by the page, 2 tokens"):
        worker.prefill(asks_full(TOKENS))
    assert request.status == "lost"
    with pytest.raises(RequestError):
        request.finish()
    worker.serve(TOKENS)
    assert len(sink.events) == before


def test_a_waiting_request_of_an_engine_publishes_its_report_in_each_pass():
    sink = CapturingSink()
    args = MockEngineArgs(num_gpu_blocks=9, block_size=SIZE)
    engine = MockEngine(args, backend="vllm", sink=sink)
    engine.submit([*range(15), 16], 10)
    engine.step()
    sink.events.clear()
    engine.submit(asks_full([*TOKENS[:8], *range(200, 224)]), 1)
    for _ in range(3):
        engine.step()
    assert [row for row in stored(sink) if row[0] is None] == [(None, 2)] * 3


def test_an_index_with_full_reports_does_not_count_reports_as_copies(worker, sink):
    counted, ruled = RadixIndex(count_copies=True), RadixIndex(count_copies=True, full_reports=True)
    for _ in range(3):
        worker.serve(asks_full(TOKENS))
    worker.serve(range(300, 348))  # all blocks
    for event in sink.events:
        plain = RouterEvent(0, event)  # in wire form
        counted.apply(plain)
        ruled.apply(plain)
    local = Prompt(TOKENS).block_hashes(SIZE)
    assert counted.find_matches(local).scores == {(0, 0): 4}
    assert ruled.find_matches(local).scores == {}


def test_full_reports_requires_count_copies():
    with pytest.raises(ValueError, match="full_reports goes with count_copies"):
        RadixIndex(full_reports=True)


@pytest.mark.parametrize("backend", ["vllm", "vllm_gpt_oss"])
@each_parameter
def test_full_reports_break_no_event_rule(backend):
    with RouterHarness(EngineProfile(num_blocks=24, block_size=16), BACKENDS[backend]) as harness:
        worker, prompt = harness.workers[0], harness.prompt(4)
        for _ in range(3):
            worker.serve(asks_full(prompt.tokens), 4)
        for _ in range(6):
            worker.serve(harness.prompt(5))
