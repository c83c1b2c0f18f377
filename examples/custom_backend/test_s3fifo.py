"""Your own backend in the matrix: tests for every backend, and tests for this one only.

The backend is an eviction policy (`s3fifo.py`), which a hook registers (`../conftest.py`).
"""

import pytest
from custom_backend.s3fifo import S3FIFO

from pytest_kvmock import RouterHarness, create_manager

pytestmark = pytest.mark.kv_backends("lineage", "lru", "multi_lru", "s3fifo")


def test_what_is_served_is_known_to_the_router(kv_harness, kv_prompt):
    prompt = kv_prompt(blocks=4)
    kv_harness.worker(0).serve(prompt)
    assert kv_harness.overlap(prompt) == {0: 4}


@pytest.mark.kvmock(num_blocks=16)
def test_stream_and_engine_agree_under_pressure(kv_harness, kv_worker, kv_prompt, kv_events):
    for _ in range(20):
        first = kv_prompt(blocks=3)
        kv_worker.serve(first)
        kv_worker.serve(kv_prompt(blocks=3, after=first))
    kv_harness.assert_in_sync()
    assert len(kv_events.stored_blocks) - len(kv_events.removed_blocks) == 16


@pytest.mark.kvmock(num_blocks=8, block_size=4)
def test_blocks_go_in_the_order_that_was_foretold(kv_manager, kv_events):
    kv_manager.use([0, 1, 2])
    kv_manager.use([10, 11])
    kv_manager.use([20, 21, 22])
    kv_manager.deref([2, 1, 0])
    kv_manager.deref([22, 21, 20])
    kv_manager.deref([11, 10])
    foretold = kv_manager.inactive_blocks()
    for block in range(100, 108):
        kv_manager.use([block])
    assert foretold == kv_events.removed_blocks


@pytest.mark.kv_backends("lru", "s3fifo")
@pytest.mark.kvmock(num_blocks=40)
def test_a_scan_does_not_drive_out_what_is_used_again(kv_backend, kv_worker, kv_prompt):
    system_prompt = kv_prompt(blocks=4)
    for _ in range(3):
        kv_worker.serve(system_prompt)
    for _ in range(20):  # five times the capacity, each prompt asked for once
        kv_worker.serve(kv_prompt(blocks=10))

    cached = kv_worker.cached_tokens(system_prompt)
    assert (64 if kv_backend == "s3fifo" else 0) == cached


# ------------------------------------------------------------------------------------------ the queues themselves


def manager_of(num_blocks):
    """Return the manager by itself, without pytest's fixtures: a spec is accepted wherever a backend's name is."""
    return create_manager(S3FIFO, num_blocks=num_blocks)


def once(manager, *blocks):
    """Use and free each block by itself."""
    for block in blocks:
        manager.use([block])
        manager.deref([block])


def test_what_was_used_once_goes_first_in_first_out():
    manager = manager_of(4)
    once(manager, 1, 2, 3, 1)
    assert manager.inactive_blocks() == [1, 2, 3]


def test_what_was_used_again_goes_on_to_the_main_queue():
    manager = manager_of(4)
    once(manager, 1, 2, 3, 1, 1)  # stored, and used twice since
    assert manager.inactive_blocks() == [2, 3, 1]


def test_what_comes_back_goes_to_the_main_queue_at_once():
    manager = manager_of(4)
    once(manager, 1, 2, 3, 4, 5)  # 1 is a ghost now
    assert manager.inactive_blocks() == [2, 3, 4, 5]
    once(manager, 1)  # 2 was evicted for it
    assert manager.inactive_blocks() == [3, 4, 5, 1]
    once(manager, 6, 7, 8, 9)
    assert manager.inactive_blocks() == [7, 8, 9, 1]


def test_a_ghost_is_forgotten_after_a_while():
    manager = manager_of(4)
    once(manager, 1, 2, 3, 4)
    once(manager, 5, 6, 7, 8)  # room for three ghosts, 2 to 4
    once(manager, 1)
    once(manager, 9, 10, 11, 12)
    assert manager.inactive_blocks() == [9, 10, 11, 12]


def test_a_use_in_the_main_queue_is_one_more_round():
    manager = manager_of(3)
    once(manager, 1, 1, 1, 6, 6, 6, 7)
    once(manager, 8)  # 1 and 6 move to the main queue
    once(manager, 1, 1, 6)
    assert manager.inactive_blocks() == [8, 6, 1]


def test_a_block_in_use_is_passed_over():
    manager = manager_of(3)
    once(manager, 1)
    manager.use([1])
    once(manager, 2, 3)
    assert manager.inactive_blocks() == [2, 3]
    once(manager, 4, 5)
    assert manager.active_blocks == {1: 1}
    assert manager.inactive_blocks() == [4, 5]


def test_a_harness_takes_the_spec_itself():
    with RouterHarness(backend=S3FIFO) as kv_harness:
        prompt = kv_harness.prompt()
        kv_harness.worker(0).serve(prompt)
        assert kv_harness.overlap(prompt) == {0: 4}
