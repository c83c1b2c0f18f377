"""TensorRT-LLM's V2 manager by hand: the examples of its rules, refused calls, and its state reports."""

import pytest

from pytest_kvmock import CapturingSink, Cleared, Prompt, Removed, StorageTier, Stored
from pytest_kvmock.engines.trtllm.v2_manager import V2Manager
from pytest_kvmock.values import Updated

ONE, TWO, PART, FULL = 924206229973855, 2728178455351807326, 477185028293711010, 10011707017105896989
SHA = bytes.fromhex("e432228522a304ab556d66e6e40979ad05575f28b19b554264dd3c6277aaf073")


def made(num_blocks=8, **options):
    sink = CapturingSink()
    manager = V2Manager(num_blocks=num_blocks, block_size=4, sink=sink, **options)
    manager.flush()
    return manager, sink


def begin(manager, prompt):
    """Start a request and compute its prompt; returns it and the hit tokens."""
    request = manager.new_request(prompt)
    hit, is_resumed = manager.prepare_context(request)
    assert is_resumed
    assert manager.resize_context(request, len(request))
    manager.update_context(request, len(request))
    return request, hit


def serve(manager, prompt):
    """Serve a request from its start to its end; returns the hit tokens."""
    request, hit = begin(manager, prompt)
    manager.close(request)
    return hit


def data(manager, sink):
    """Return the event data since the last call."""
    sink.take()
    manager.flush()
    return [event.data for event in sink.events]


def test_a_prompt_is_stored_with_its_last_token_and_output_is_never_stored():
    manager, sink = made()
    request, hit = begin(manager, [*range(1, 11)])
    for _ in range(5):
        assert manager.try_allocate_generation(request)
        assert manager.update_generation(request, request.history + 1)
    manager.close(request)
    assert hit == 0
    assert [each.block_hashes for each in data(manager, sink)] == [(ONE, TWO, PART)]
    assert sink.router_events[0].extra["priorities"] == [35] * 3


def test_a_longer_block_replaces_its_shorter_sibling():
    manager, sink = made()
    serve(manager, [*range(1, 11)])
    data(manager, sink)
    assert serve(manager, [*range(1, 11)]) == 9
    assert data(manager, sink) == []  # covered
    assert serve(manager, [*range(1, 13)]) == 10
    gone, new = data(manager, sink)
    assert Removed((PART,)) == gone
    assert (new.parent_hash, new.block_hashes) == (TWO, (FULL,))


def test_evicted_pages_move_to_the_host_and_are_loaded_back():
    manager, sink = made(6, levels=(4,))
    serve(manager, [*range(1, 18)])
    serve(manager, [*range(100, 117)])
    fallen = [each for each in data(manager, sink) if isinstance(each, Updated)]
    assert [each.levels for each in fallen] == [(0, 1)] * 4
    assert {each.block_hash for each in fallen} == {*manager.resident(StorageTier.HOST_PINNED)}
    assert serve(manager, [*range(1, 18)]) == 16
    gone, *moved, tail = data(manager, sink)
    assert tail.block_hashes == (3646255374819992052,)  # its last token is computed again
    assert gone.block_hashes == (3646255374819992052, 5503380140038869326, 14139067582760148978)
    assert [each.levels for each in moved] == [(0, 1), (1, 0), (1, 0), (1, 0), (0, 1)]
    assert manager.tier_sizes == {StorageTier.DEVICE: 6, StorageTier.HOST_PINNED: 4}


def test_events_carry_the_layer_group_and_the_longest_window_counts_as_attention():
    manager, sink = made([6, 8], groups=[(8, 0), (None, 0)], pool_groups=[0, 1], max_seq_len=64)
    assert [Cleared(), Cleared()] == [event.data for event in sink.events]
    short, full = (event.extra for event in sink.router_events)
    assert short == {
        "window_size": 8,
        "layer_group_id": 0,
        "hash_algo": "v1_block_key",
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 8,
        "blocks_per_level": (14,),
    }
    assert (full["window_size"], full["layer_group_id"], full["group_idx"]) == (64, 1, 1)
    assert (manager.attention_group, manager.num_blocks) == (1, 8)
    serve(manager, [*range(1, 18)])
    assert [len(each.block_hashes) for each in data(manager, sink)] == [5, 5]
    assert [event.extra["layer_group_id"] for event in sink.router_events] == [0, 1]
    assert len(manager.resident()) == 5


@pytest.mark.parametrize("algo", ["v2_sha256", "v2_sha256_64"])
def test_a_sha256_block_name_is_its_first_8_bytes(algo):
    manager, sink = made(hash_algo=algo)
    serve(manager, [1, 2, 3, 4])
    (stored,) = data(manager, sink)
    assert (int.from_bytes(SHA[:8], "big"),) == (16443243144690205867,) == stored.block_hashes
    digests = sink.router_events[-1].extra.get("digests")
    assert {"v2_sha256": (None, (SHA,)), "v2_sha256_64": None}[algo] == digests


def test_a_request_is_not_resumed_above_max_util_for_resume():
    manager, _ = made(8, max_util_for_resume=0.5)
    first, _ = begin(manager, [*range(1, 25)])
    second = manager.new_request([100, 101])
    assert manager.prepare_context(second) == (0, False)
    manager.close(first)
    assert manager.resume(second)
    with pytest.raises(ValueError, match=r"^prepare_context: the request has begun already$"):
        manager.prepare_context(second)


def test_a_request_is_suspended_if_its_first_chunk_has_no_room_and_keeps_its_pages():
    manager, sink = made(4, levels=(4,))
    first, _ = begin(manager, [*range(1, 17)])
    second = manager.new_request([*range(100, 110)])
    assert manager.prepare_context(second) == (0, False)
    manager.suspend(first)
    assert manager.resume(second)
    assert not manager.resize_context(second, 40)
    assert not second.is_active
    assert manager.resume(second)
    assert manager.resize_context(second, 10)
    assert {each.levels for each in data(manager, sink) if isinstance(each, Updated)} == {(0, 1)}
    manager.close(second)
    assert manager.try_allocate_generation(first) is False  # 5 pages of 4
    assert [block.pages[0].level for block in first.held] == [0] * 4
    assert 4 == manager.num_active_blocks == manager.num_active_block_refs


def test_clear_removes_all_cached_blocks():
    manager, sink = made()
    request, _ = begin(manager, [*range(1, 11)])
    assert not manager.clear()
    manager.close(request)
    assert manager.inactive_blocks() == [PART, TWO, ONE]
    assert manager.clear()
    assert [Cleared, Stored, Removed] == [type(event.data) for event in sink.events]
    assert [*manager.resident()] == []
    assert manager.free_slots() == [[[8, 0]]]


def test_each_adapter_and_salt_has_its_own_tree():
    manager, _ = made()
    serve(manager, Prompt([1, 2, 3, 4, 5], lora_name="a"))
    assert manager.lookup(manager.new_request([1, 2, 3, 4, 5])) == 0
    assert manager.lookup(manager.new_request(Prompt([1, 2, 3, 4, 5], lora_name="a"))) == 4
    assert manager.lookup(manager.new_request(Prompt([1, 2, 3, 4, 5], lora_name="a"), cache_salt=7)) == 0


GROUPS = "groups are (window in tokens or None, sink tokens), at least one; got "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": ()}, GROUPS + "()"),
        ({"groups": [8]}, GROUPS + "[8]"),
        (
            {"groups": [(0, 0)]},
            (
                "a layer group has a window of at least 1 token, or None, and sinks of at least 0, with a window "
                "alone; got (0, 0)"
            ),
        ),
        (
            {"groups": [(None, 4)]},
            (
                "a layer group has a window of at least 1 token, or None, and sinks of at least 0, with a window "
                "alone; got (None, 4)"
            ),
        ),
        ({"pool_groups": [1]}, "pool_groups must be a pool of each of 1 layer groups, from 0, or None; got [1]"),
        ({"levels": (0,)}, "a level has at least 1 page in each of 1 pools; got 0"),
        ({"levels": ([4, 4],)}, "a level has at least 1 page in each of 1 pools; got [4, 4]"),
        ({"levels": 4}, "levels are pages of each of at most 2 levels below the device; got 4"),
        ({"num_blocks": [8, 8]}, "a level has at least 1 page in each of 1 pools; got [8, 8]"),
        ({"num_blocks": [0]}, "num_blocks must be an integer of at least 1, got 0"),
        ({"max_util_for_resume": 1.1}, "max_util_for_resume must be a number from 0 to 1, got 1.1"),
        ({"max_util_for_resume": "1"}, "max_util_for_resume must be a number from 0 to 1, got '1'"),
        ({"hash_algo": "sha"}, "hash_algo: got 'sha'; allowed: v1_block_key, v2_sha256, v2_sha256_64"),
        ({"event_buffer": 0}, "event_buffer must be an integer of at least 1 events, or None, got 0"),
        ({"partial_reuse": 1}, "partial_reuse must be True or False, got 1"),
        ({"max_seq_len": 0}, "max_seq_len must be an integer of at least 1 tokens, or None, got 0"),
    ],
)
def test_an_invalid_option_is_refused(options, message):
    with pytest.raises(ValueError) as caught:
        V2Manager(**{"num_blocks": 8, "block_size": 4, **options})
    assert str(caught.value) == message


def test_a_page_in_use_has_no_name_after_its_block_left_the_tree():
    """Both windows have passed block 0; the other prompt evicts its page of the first; this removes the block."""
    manager, sink = made([3, 6], groups=[(4, 0), (8, 0)], pool_groups=[0, 1])
    request = manager.new_request([1, 2, 3, 4])
    assert manager.prepare_context(request) == (0, True)
    assert manager.resize_context(request, 12)
    manager.update_context(request, 4)
    assert manager.update_generation(request, 11)
    assert manager.inactive_blocks() == [ONE]
    other = manager.new_request(range(20, 28))
    manager.prepare_context(other)
    assert manager.resize_context(other, 8)
    assert manager.free_slots() == [[[0, 0], [1, 1]]]
    assert manager.inactive_blocks() == []
    assert manager.probe([1, 2, 3, 4]) == 0
    assert data(manager, sink)[-2:] == [Removed([ONE]), Removed([ONE])]
