"""SGLang's radix cache by hand: events and their times, namespaces, requests, and refused inputs."""

import logging

import pytest

from pytest_kvmock import (
    CapturingSink,
    Cleared,
    EngineProfile,
    Prompt,
    Removed,
    RouterHarness,
    StorageTier,
    Stored,
    block_hashes,
    create_manager,
)
from pytest_kvmock.engines import SglangSpeculative
from pytest_kvmock.engines.sglang.radix_cache import RadixCacheManager
from pytest_kvmock.values import MoveError, Use


def new(num_blocks=8, block_size=2, **options):
    return create_manager("sglang", num_blocks=num_blocks, block_size=block_size, sink=CapturingSink(), **options)


def expected_message(manager):
    return [event.data for event in manager.sink.take()]


def test_a_new_radix_cache_publishes_a_cleared():
    assert [Cleared()] == expected_message(new())


def test_a_stored_has_the_router_hash_and_tokens_of_each_page():
    manager = new()
    manager.insert([1, 2, 3, 4])
    _, stored = manager.sink.router_events
    assert tuple(block_hashes([1, 2, 3, 4], 2)) == stored.event.data.tokens_hashes
    assert stored.token_ids == [(1, 2), (3, 4)]


def test_with_a_draft_model_events_carry_token_pairs_and_eagle_hashes():
    manager = RadixCacheManager(num_blocks=4, block_size=2, sink=CapturingSink(), speculative=SglangSpeculative())
    assert manager.insert([1, 2, 3, 4, 5]) == 0
    _, stored = manager.sink.router_events
    assert stored.token_ids == [((1, 2), (2, 3)), ((3, 4), (4, 5))]
    assert tuple(block_hashes([1, 2, 3, 4, 5], 2, eagle=True)) == stored.event.data.tokens_hashes


def test_a_page_with_a_token_beyond_32_bits_uses_its_name_as_local_hash():
    manager = new()
    manager.insert([1, 2, 2**32, 4])
    stored = expected_message(manager)[1]
    assert (block_hashes([1, 2], 2)[0], stored.block_hashes[1] % 2**64) == stored.tokens_hashes


def test_a_prompt_of_hashes_is_stored_under_signed_dynamo_hashes_without_tokens():
    manager, prompt = new(), Prompt(hashes=[1, 2**64 - 1])
    manager.insert(prompt)
    _, stored = manager.sink.router_events
    assert stored.token_ids is None
    assert [*prompt.sequence_hashes(2)] == [name % 2**64 for name in stored.event.data.block_hashes]
    assert manager.match_prefix(prompt).tokens == 4


def test_a_split_publishes_nothing():
    manager = new()
    manager.insert([1, 2, 3, 4])
    expected_message(manager)
    whole = manager.match_prefix([1, 2, 3, 4]).node
    part = manager.match_prefix([1, 2, 9, 9])
    assert (part.tokens, whole.parent is part.node) == (2, True)
    assert expected_message(manager) == []


def test_the_same_page_in_two_namespaces_is_stored_and_removed_twice_under_one_name():
    manager = new()
    manager.insert([1, 2])
    manager.insert([1, 2], extra_key="lora")
    _, stored, copy = expected_message(manager)
    (name,) = stored.block_hashes
    assert stored == copy
    assert [name, name] == manager.resident() == manager.inactive_blocks()
    manager.evict(2)
    manager.evict(2)
    assert [Removed((name,)), Removed((name,))] == expected_message(manager)


def test_in_dynamo_event_format_each_namespace_publishes_its_own_names():
    manager = new(dynamo_kv_event_format=True)
    manager.insert([1, 2])
    manager.insert([1, 2], extra_key="lora")
    manager.insert([1, 2], extra_key="lora", cache_salt="s")
    assert len(set(manager.resident())) == 3
    assert manager.match_prefix([1, 2, 3], extra_key="lora").tokens == 2


def test_held_events_are_merged_until_they_are_taken():
    manager = new()
    manager.hold_events = True
    expected_message(manager)
    manager.insert([1, 2])
    manager.insert([1, 2, 3, 4])
    manager.insert([1, 2, 3, 4, 5, 6], cache_salt="s")
    assert expected_message(manager) == []
    taken = manager.take_events()
    assert [(event.extra, len(event.data.block_hashes), event.token_ids) for event in taken] == [
        (None, 2, [(1, 2), (3, 4)]),
        ({"cache_salt": "s"}, 3, [(1, 2), (3, 4), (5, 6)]),
    ]
    assert [event.data for event in taken] == expected_message(manager)
    assert manager.take_events() == []


def test_a_stored_with_tokens_is_not_merged_with_one_without():
    manager = RadixCacheManager(num_blocks=4, block_size=2, hold_events=True)
    manager.insert([1, 2])
    manager.insert(Prompt(hashes=[5]))
    assert [Cleared, Stored, Stored] == [type(event.data) for event in manager.take_events()]


def test_clear_is_refused_while_a_node_is_locked_but_reset_is_not():
    manager = new()
    manager.insert([1, 2])
    manager.inc_lock_ref(manager.match_prefix([1, 2]).node)
    expected_message(manager)
    assert not manager.clear()
    assert expected_message(manager) == []
    manager.reset()
    assert [Cleared()] == expected_message(manager)
    assert (manager.available_size(), manager.evictable_size(), manager.protected_size()) == (16, 0, 0)
    assert manager.clear()


def test_a_radix_cache_without_a_host_has_no_host_pages():
    manager = new()
    manager.insert([1, 2])
    assert manager.resident(StorageTier.HOST_PINNED) == []


def test_a_locked_page_is_active_and_its_locks_are_its_references():
    manager = new()
    manager.insert([1, 2, 3, 4])
    one, two = manager.resident()
    for tokens in ([1, 2, 3, 4], [1, 2]):
        manager.inc_lock_ref(manager.match_prefix(tokens).node)
    assert {one: 2, two: 1} == manager.active_blocks
    assert (manager.num_active_blocks, manager.num_active_block_refs, manager.num_inactive_blocks) == (2, 3, 0)
    assert [manager.references(block) for block in (one, two, 3)] == [2, 1, 0]
    assert manager.active_perc == 0.25


def test_insertions_and_evictions_are_written_to_the_debug_log(caplog):
    manager = new()
    with caplog.at_level(logging.DEBUG, "pytest_kvmock.engines"):
        manager.insert([1, 2, 3, 4])
        manager.evict(1)
    names = [record.block_ids for record in caplog.records]
    assert [record.event for record in caplog.records] == ["allocation", "eviction"]
    assert names[0] == names[1]


@pytest.mark.parametrize(("threshold", "gone"), [(None, 4), (2, 4), (3, 2), (4, 1)])
def test_slru_evicts_the_oldest_node_with_fewer_hits_than_the_threshold(threshold, gone):
    manager = new(policy="slru", protected_threshold=threshold)
    names = {}
    for page, hits in ((1, 3), (2, 2), (3, 4), (4, 1)):  # the first page is the oldest
        for _ in range(hits):
            manager.insert([page, page])
        names[expected_message(manager)[-1].block_hashes] = page
    manager.evict(1)
    assert [gone] == [names[removed.block_hashes] for removed in expected_message(manager)]


# -------------------------------------------------------------------------------------------------- what is refused

POLICIES = "policy must be one of lru, lfu, fifo, mru, filo, priority, slru, got "
REFUSED = [
    ({"policy": "tlru"}, POLICIES + "'tlru'"),
    ({"policy": "LRU"}, POLICIES + "'LRU'"),
    ({"policy": None}, POLICIES + "None"),
    ({"policy": ["lru"]}, POLICIES + "['lru']"),
    ({"block_size": 0}, "block_size must be an integer of at least 1 (tokens a block), got 0"),
    ({"block_size": -16}, "block_size must be an integer of at least 1 (tokens a block), got -16"),
    ({"block_size": 1.0}, "block_size must be an integer of at least 1 (tokens a block), got 1.0"),
    ({"num_blocks": 0}, "num_blocks must be an integer of at least 1, got 0"),
    ({"dynamo_kv_event_format": 1}, "dynamo_kv_event_format must be True or False, got 1"),
    (
        {"page_size": 4},
        (
            "backend 'sglang' has no option 'page_size'; it has policy, protected_threshold, dynamo_kv_event_format, "
            "speculative, window, window_ratio, window_interval, window_gates, release_window, states, state_grid, "
            "state_interval, state_strategy, states_per_path, tiers, unified, dcp"
        ),
    ),
    *(
        (
            {"policy": "slru", "protected_threshold": value},
            f"protected_threshold must be an integer of at least 1 (hits), got {value!r}",
        )
        for value in (0, -1, 2.0, "3", True)
    ),
    (
        {"policy": "lfu", "protected_threshold": 3},
        "protected_threshold is an option of policy \"slru\", got policy 'lfu'",
    ),
    ({"protected_threshold": 2}, "protected_threshold is an option of policy \"slru\", got policy 'lru'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_arguments_unknown_to_sglang_are_refused(options, message):
    with pytest.raises(ValueError) as raised:
        new(**options)
    assert str(raised.value) == message


@pytest.mark.parametrize("name", ["dynamo_kv_event_format", "hold_events"])
def test_options_for_direct_calls_must_be_booleans(name):
    with pytest.raises(ValueError, match=rf"^{name} must be True or False, got 'yes'$"):
        RadixCacheManager(num_blocks=1, **{name: "yes"})


@pytest.mark.parametrize("size", [1, 3, 16, 100])
def test_any_page_size_is_accepted(size):
    assert new(block_size=size).insert(list(range(2 * size))) == 0


BY_HAND = {
    "insert: 3 pages are new and 2 are free; evict first": lambda m: m.insert([9] * 6),
    "token -1: a token id is an integer from 0 to 2**63 - 1": lambda m: m.insert([9, -1]),
    "tokens must be a sequence of token ids, or a Prompt; got 5": lambda m: m.match_prefix(5),
    "tokens must be a sequence of token ids, or a Prompt; got 'text'": lambda m: m.touch("text"),
    "extra_key must be a string, or None, got 7": lambda m: m.match_prefix([1, 2], extra_key=7),
    "cache_salt must be a string, or None, got b's'": lambda m: m.insert([1, 2], cache_salt=b"s"),
    "dec_lock_ref: the node is not locked": lambda m: m.dec_lock_ref(m.match_prefix([1, 2]).node),
}


@pytest.mark.parametrize("message", BY_HAND)
def test_an_invalid_call_raises_and_changes_nothing(message):
    manager = new(num_blocks=4)
    manager.insert([1, 2, 3, 4])

    def state():
        return (manager.resident(), manager.inactive_blocks(), manager.available_size(), list(manager.sink.events))

    manager.match_prefix([1, 2])
    before = state()
    with pytest.raises((ValueError, TypeError)) as raised:
        BY_HAND[message](manager)
    assert str(raised.value) == message
    assert before == state()


def test_a_node_that_was_evicted_or_dropped_cannot_be_locked():
    manager = new()
    manager.insert([1, 2])
    evicted = manager.match_prefix([1, 2]).node
    manager.evict(2)
    with pytest.raises(ValueError, match=r"^inc_lock_ref: the node is no longer in the tree; match its tokens again$"):
        manager.inc_lock_ref(evicted)
    manager.insert([1, 2])
    dropped = manager.match_prefix([1, 2]).node
    manager.inc_lock_ref(dropped)
    manager.reset()
    with pytest.raises(ValueError, match=r"^dec_lock_ref: the node is no longer in the tree; a reset dropped it$"):
        manager.dec_lock_ref(dropped)
    assert (manager.evictable_size(), manager.protected_size()) == (0, 0)


@pytest.mark.parametrize("send", ["process", "use", "deref", "promote"])
def test_a_move_is_refused(send):
    manager = new()
    with pytest.raises(MoveError, match=r"takes requests, not moves \(match_prefix, insert, inc_lock_ref, "):
        getattr(manager, send)(Use([1]) if send == "process" else 1)


def test_a_cache_is_not_reset_while_requests_have_pages():
    worker = RouterHarness(EngineProfile(block_size=4, num_blocks=8), "sglang").worker(0)
    request = worker.prefill(range(9))
    with pytest.raises(ValueError, match=r"^reset: 1 requests have pages; release them first$"):
        worker.manager.reset()
    assert {len(list(worker.manager.resident()))} == {2}
    request.finish()
    worker.manager.reset()
    assert list(worker.manager.resident()) == []


@pytest.mark.parametrize(("policy", "left"), [("fifo", [3, 3]), ("filo", [1, 1])])
def test_the_upper_half_of_a_split_node_keeps_the_age_of_the_node(policy, left):
    """This is the unified tree; in `RadixCache` the split creates the upper part, which is therefore the newest."""
    manager = new(policy=policy)
    manager.insert([1, 1, 2, 2])
    manager.insert([3, 3])
    assert tuple(manager.match_prefix(tokens).tokens for tokens in ([1, 1], [3, 3])) == (2, 2)
    other = manager.match_prefix([3, 3]).node
    manager.inc_lock_ref(other)
    assert manager.evict(2) == [2]  # the lower part
    manager.dec_lock_ref(other)
    assert manager.evict(2) == [2]
    assert [left] == [tokens for tokens in ([1, 1], [3, 3]) if manager.match_prefix(tokens).tokens]
