"""TensorRT-LLM's V1 manager by hand: refused calls, unchanged state, and additions of this project to the
recordings.
"""

import pytest

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    Cleared,
    EngineProfile,
    OutOfBlocks,
    Prompt,
    Removed,
    RouterHarness,
    StorageTier,
    Stored,
)
from pytest_kvmock.engines.trtllm.v1_manager import V1Manager
from pytest_kvmock.engines.trtllm.v1_request import Retention
from pytest_kvmock.values import Updated

ONE_TO_TEN = [*range(1, 11)]
ONE, TWO, PART, FULL = 924206229973855, 2728178455351807326, 477185028293711010, 10011707017105896989


def made(num_blocks=8, **options):
    sink = CapturingSink()
    manager = V1Manager(num_blocks=num_blocks, block_size=4, sink=sink, **options)
    manager.flush()
    sink.take()
    return manager, sink


def serve(manager, prompt, output=(0,)):
    """Serve a request from its start to its end; returns the hit tokens."""
    request = manager.new_request(prompt)
    hit = manager.add(request)
    manager.new_token(request, output[0])
    manager.store_context_blocks(request)
    for token in output[1:]:
        manager.add_token(request)
        manager.new_token(request, token)
    manager.remove(request)
    return hit


def data(sink):
    return [event.data for event in sink.events]


def test_generated_tokens_are_stored_with_a_partial_block():
    manager, sink = made()
    assert serve(manager, ONE_TO_TEN, (11, 12, 13)) == 0
    assert sink.events == []  # not before the end of the iteration
    manager.flush()
    first, second = sink.router_events
    assert (first.data.parent_hash, first.data.block_hashes) == (None, (ONE, TWO))
    assert (second.data.parent_hash, second.data.block_hashes) == (TWO, (FULL,))
    assert second.token_ids == [(9, 10, 11, 12)]
    assert second.extra["cache_levels"] == [0]
    assert second.extra["priorities"] == [35]


def test_a_leaf_that_a_partial_match_takes_is_dropped_without_an_event():
    manager, sink = made()
    serve(manager, ONE_TO_TEN, (11, 12, 13))
    manager.flush()
    sink.take()
    assert serve(manager, ONE_TO_TEN, (50,)) == 9
    manager.flush()
    assert [(each.parent_hash, each.block_hashes) for each in data(sink)] == [(TWO, (PART,))]
    assert {*manager.resident()} == {ONE, TWO, PART}
    assert sink.router_events[-1].extra["silently_gone"] == [FULL]
    assert {*manager.announced()} == {ONE, TWO, PART, FULL}
    serve(manager, ONE_TO_TEN, (11, 12, 13))
    manager.flush()
    # It was an exact hit, and is taken nevertheless.
    assert sink.router_events[-1].extra["silently_gone"] == [PART]
    assert {*manager.announced()} == {ONE, TWO, PART, FULL}
    assert {*manager.resident()} == {ONE, TWO, FULL}


def test_an_offloaded_block_gets_an_updated_and_is_on_the_host():
    manager, sink = made(6, secondary_blocks=4)
    serve(manager, [*range(1, 18)])
    manager.flush()
    sink.take()
    names = {*manager.resident()}
    serve(manager, [*range(101, 118)])
    manager.flush()
    moved = [each for each in data(sink) if isinstance(each, Updated)]
    assert [each.levels for each in moved] == [(0, 1)] * 4
    assert {each.block_hash for each in moved} == {*manager.resident(StorageTier.HOST_PINNED)} < names
    assert not any(isinstance(each, Removed) for each in data(sink))


def test_the_events_of_a_window_carry_its_sizes():
    sink = CapturingSink()
    manager = V1Manager(num_blocks=8, block_size=4, sink=sink, windows=[(8, 6, 2), 32])
    manager.flush()
    assert [Cleared(), Cleared()] == data(sink)
    short, full = (event.extra for event in sink.router_events)
    assert short == {
        "window_size": 8,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 8,
        "blocks_per_level": (6, 2),
        "silently_gone": [],
    }
    assert full == {"window_size": 32, "group_idx": 1, "blocks_per_level": (8, 0), "silently_gone": []}


def test_only_the_full_length_window_stores_blocks_while_a_request_runs():
    manager, sink = made(windows=[8, 32], max_seq_len=32)
    request = manager.new_request([*range(1, 10)])
    manager.add(request)
    manager.new_token(request, 10)
    manager.store_context_blocks(request)
    manager.flush()
    assert [event.extra["window_size"] for event in sink.router_events] == [32]
    manager.remove(request)
    manager.flush()
    assert [event.extra["window_size"] for event in sink.router_events] == [32, 8, 32]


def test_a_request_that_does_not_fit_changes_nothing():
    manager, sink = made(4)
    request = manager.new_request([*range(1, 14)])
    manager.add(request)
    with pytest.raises(ValueError, match=r"^add: 3 blocks are needed, 0 are free$"):
        manager.add(manager.new_request([*range(100, 110)]))
    for _ in range(3):
        assert manager.add_token(request) == {}
    with pytest.raises(ValueError, match=r"^add_token: 1 block is needed, 0 are free$"):
        manager.add_token(request)
    assert request.length == 16
    with pytest.raises(ValueError, match="has blocks already"):
        manager.add(request)
    manager.remove(request, store=False)
    manager.flush()
    assert sink.events == []
    assert manager.num_free_blocks == 4


def test_a_full_event_buffer_drops_the_oldest_events_and_leaves_a_gap_of_ids():
    manager, sink = made(event_buffer=1)
    for first in (1, 101, 201):
        serve(manager, [*range(first, first + 4)])
    manager.flush()
    assert [event.event_id for event in sink.events] == [3]


def test_clear_removes_all_cached_blocks():
    manager, sink = made()
    request = manager.new_request(ONE_TO_TEN)
    manager.add(request)
    assert not manager.clear()
    manager.new_token(request, 11)
    manager.remove(request)
    sink.take()
    assert manager.clear()
    assert isinstance(data(sink)[0], Stored)
    assert {ONE, TWO} < {name for each in data(sink)[1:] for name in each.block_hashes}
    assert [*manager.resident()] == []


def test_adapters_are_numbered_in_the_order_of_first_use():
    manager, _ = made()
    names = ["b", "a", "b", None]
    found = [manager.new_request(Prompt([1], lora_name=name)).hasher.adapter for name in names]
    assert found == [1, 2, 1, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer of at least 1 (tokens a block), got 0"),
        ({"secondary_blocks": -1}, "secondary_blocks must be an integer of at least 0, got -1"),
        (
            {"windows": [3]},
            "a window has at least a block of 4 tokens, 1 block and 0 secondary blocks; got 3",
        ),
        (
            {"windows": [(8, 4, -1)]},
            "a window has at least a block of 4 tokens, 1 block and 0 secondary blocks; got (8, 4, -1)",
        ),
        ({"windows": []}, "windows are tokens, or (tokens, blocks, secondary blocks), each once; got []"),
        ({"windows": [8, 8]}, "windows are tokens, or (tokens, blocks, secondary blocks), each once; got [8, 8]"),
        ({"windows": [8], "max_seq_len": 4}, "a window has at most max_seq_len tokens, 4; got 8"),
        ({"offload_min_priority": 101}, "offload_min_priority must be an integer from 0 to 100, got 101"),
        ({"event_buffer": 0}, "event_buffer must be an integer of at least 1 events, or None, got 0"),
        ({"removed_order": "1.3"}, "removed_order: got '1.3'; allowed: 1.2, 2026-03"),
        ({"onboard": 1}, "onboard must be True or False, got 1"),
    ],
)
def test_an_invalid_option_is_refused(options, message):
    with pytest.raises(ValueError) as caught:
        V1Manager(**{"num_blocks": 8, "block_size": 4, **options})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (
            [(8, 4, 35, None)],
            "a retention range has a first token of at least 0, and an end after it, or None; got 8 to 4",
        ),
        (
            [(5, 5, 35, None)],
            "a retention range has a first token of at least 0, and an end after it, or None; got 5 to 5",
        ),
        *(
            (
                [(start, end, 35, None) for start, end in ranges],
                f"retention ranges do not overlap, and the last alone may have no end; got {text}",
            )
            for ranges, text in (
                ([(64, 128), (0, None)], "0 to None, and 64 to 128"),
                ([(0, 64), (30, 128)], "0 to 64, and 30 to 128"),
                ([(0, None), (0, None)], "0 to None, and 0 to None"),
            )
        ),
        ([(0, 4, 101, None)], "a retention priority is an integer from 0 to 100, got 101"),
        ([(0, 4, 50, -1)], "a retention duration is a number of at least 0 (ms), or None; got -1"),
    ],
)
def test_an_invalid_retention_is_refused(ranges, message):
    with pytest.raises(ValueError) as caught:
        Retention(tuple(ranges))
    assert str(caught.value) == message


def test_retention_ranges_can_be_unordered_adjacent_or_have_gaps():
    kept = Retention(((50, 100, 1, None), (30, 40, 2, None)))
    assert [kept.of_block(first)[0] for first in (0, 30, 40, 99)] == [None, 2, None, 1]
    Retention(((0, 30, 35, None), (30, 50, 35, None), (60, None, 35, None)))


def test_a_prompt_of_hashes_and_an_empty_prompt_are_refused():
    manager, _ = made()
    with pytest.raises(ValueError, match="a prompt of hashes has no tokens"):
        manager.new_request(Prompt(hashes=[1, 2]))
    with pytest.raises(ValueError, match="the prompt is empty"):
        manager.new_request([])


def test_an_endless_eviction_is_reported_in_one_line():
    manager, _ = made(windows=[(8, 3, 0)], max_seq_len=64)
    serve(manager, range(8), range(50, 56))  # at 12 tokens the first block is dropped, and at 13 it is added again
    message = "TensorRT-LLM ends here: a request took back a block that had left its window of 8 tokens"
    with pytest.raises(RuntimeError, match=f"^{message}"):
        serve(manager, range(100, 112), (60,))


def test_out_of_blocks_names_the_window():
    spec = BACKENDS["trtllm"].variant("trtllm_two_windows", windows=(64, 3200))
    worker = RouterHarness(EngineProfile(block_size=32, num_blocks=24), spec).worker(0)
    with pytest.raises(OutOfBlocks, match=r"^40 blocks are needed and 24 are available of the 24 of the window of 64 "):
        worker.serve(range(32 * 40))
