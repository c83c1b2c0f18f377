"""The plan that a worker requests from a driver before it admits a prompt: once, with the answers for a scheduler."""

import sys
from itertools import pairwise

import pytest
from depth import each_parameter
from hybrid_sizes import block_size_of

from pytest_kvmock import BACKENDS, EngineProfile, OutOfBlocks, Prompt, RouterHarness
from pytest_kvmock.engines.sglang.radix_cache import RadixCacheManager
from pytest_kvmock.engines.trtllm.v1_manager import V1Manager
from pytest_kvmock.engines.vllm.block_pool import BlockPoolManager


def worker_of(backend, num_blocks=64):
    size = block_size_of(BACKENDS[backend], 4)
    return RouterHarness(EngineProfile(block_size=size, num_blocks=num_blocks), backend).worker(0), size


@each_parameter
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_plan_combines_the_answers_of_need_room_and_lookup(backend):
    worker, size = worker_of(backend, 1024)
    worker.serve(Prompt(range(3 * size)))
    with worker.prefill(Prompt(range(2 * size))):
        driver = worker._driver
        for prompt in (Prompt(range(5 * size + 1)), Prompt(range(9000, 9000 + size))):
            state = driver.open(prompt)
            asked = driver.need(state, len(state)), driver.room(), driver.lookup(state)
            assert driver.plan(state, len(state))[:3] == asked


@each_parameter
@pytest.mark.parametrize(
    ("backend", "manager", "looks"),
    [
        ("vllm", BlockPoolManager, "get_computed_blocks"),
        ("sglang", RadixCacheManager, "find"),
        ("trtllm", V1Manager, "look"),
    ],
)
def test_a_served_prompt_is_looked_up_only_once(monkeypatch, backend, manager, looks):
    worker, size = worker_of(backend)
    looked, original = [], getattr(manager, looks)
    monkeypatch.setattr(manager, looks, lambda *given: looked.append(given) or original(*given))
    assert (worker.serve(Prompt(range(3 * size))).cached_tokens, len(looked)) == (0, 1)
    assert (worker.serve(Prompt(range(3 * size))).cached_tokens > 0, len(looked)) == (True, 2)
    with pytest.raises(OutOfBlocks):
        worker.serve(Prompt(range(65 * size)))
    assert len(looked) == 3


def test_the_block_keys_of_a_request_are_created_only_once():
    worker, size = worker_of("trtllm")
    request = worker.manager.new_request(range(3 * size))
    keys = request.block_keys(3 * size - 1, partial=True)
    worker.manager.new_token(request, 7)
    again = request.block_keys(3 * size - 1, partial=True)
    longer = request.block_keys(3 * size + 1, partial=True)
    assert [*map(id, again)] == [*map(id, keys)]
    assert ([*map(id, longer[:2])], longer[2:]) == (
        [*map(id, keys[:2])],
        [((*range(2 * size, 3 * size),), None, None), ((7,), None, None)],
    )


@each_parameter
@pytest.mark.parametrize(("backend", "most_calls", "most_changes"), [("lineage", 165, 95), ("trtllm", 400, 165)])
def test_serving_a_prompt_stays_within_its_limit_of_function_calls(backend, most_calls, most_changes):
    """Count calls and changes of file from `serve` to the verdict of its event; justify a change that needs more."""
    worker = RouterHarness(backend=backend, index=None).worker(0)
    worker.serve(Prompt(range(64)))
    files = []

    def note(frame, event, _):
        if event == "call" and "pytest_kvmock" in frame.f_code.co_filename:
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        worker.serve(Prompt(range(1000, 1064)))
    finally:
        sys.setprofile(before)
    changes = sum(one != other for one, other in pairwise(files))
    assert len(files) <= most_calls
    assert changes <= most_changes
