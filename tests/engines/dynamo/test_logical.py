"""The logical manager: the tests of Dynamo's original (kvbm_backend.rs), and the errors in place of its panics."""

import logging
from uuid import UUID

import pytest
from cache_helpers import event_rows, new_manager, state_of

from pytest_kvmock import StorageTier, Stored
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy
from pytest_kvmock.engines.dynamo.logical import LogicalManager
from pytest_kvmock.engines.dynamo.sequence import ActiveSequence
from pytest_kvmock.values import Deref, Destroy, MoveError, Promote, Use, lineage_hash

P1, P2 = UUID(int=1, version=4), UUID(int=2, version=4)

PARENTS = [None, 0, 1, 2, 3, 1, 5, 2, 7, 8, None, 10, 11, None]  # 0-1-2-3-4, 1-5-6, 2-7-8-9, 10-11-12, 13


def plh(value):
    return lineage_hash(value, None, 0)


def chain_plh(block):
    depth, parent = 0, PARENTS[block]
    while parent is not None:
        depth, parent = depth + 1, PARENTS[parent]
    return lineage_hash(block, PARENTS[block], depth)


def use_full(manager, block, lineage):
    return manager.process(Use([block], [], [lineage]))


def use_roots(manager, blocks):
    return manager.process(Use(blocks, [], [plh(block) for block in blocks]))


def take(manager):
    return event_rows(manager.sink.take())


def refuse(manager, move, *words):
    """Assert that the move is refused with these words and changes nothing."""
    before = state_of(manager)
    with pytest.raises(MoveError) as error:
        manager.process(move)
    assert before == state_of(manager)
    assert error.value.__context__ is None  # pytest would print the state before the move
    for word in words:
        assert word in str(error.value)


# ---------------------------------------------------------------------------------------------------- use and deref


def test_a_new_block_is_allocated_and_active(make_manager):
    manager = make_manager(10)
    assert use_full(manager, 1, plh(100)) == 1
    assert manager.num_active_blocks == 1
    assert manager.active_blocks == {1: 1}


def test_the_same_use_twice_makes_two_references_to_one_block(make_manager):
    manager = make_manager(10)
    use_full(manager, 1, plh(100))
    use_full(manager, 1, plh(100))
    assert manager.num_active_blocks == 1
    assert manager.num_active_block_refs == 2
    assert manager.active_blocks == {1: 2}


def test_a_full_manager_allocates_no_further_block(make_manager):
    manager = make_manager(4)
    assert [use_full(manager, i, plh(i + 100)) for i in range(5)] == [1, 1, 1, 1, 0]


def test_a_freed_block_is_inactive(make_manager):
    manager = make_manager(4)
    use_full(manager, 1, plh(100))
    assert manager.process(Deref([1])) == 1
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (0, 1)
    assert manager.inactive_blocks() == [1]


def test_a_block_is_reused_by_lineage_hash_without_an_event(make_manager):
    manager = make_manager(10)
    use_full(manager, 1, plh(100))
    manager.process(Deref([1]))
    take(manager)
    assert use_full(manager, 2, plh(100)) == 1
    assert take(manager) == []
    assert manager.active_blocks == {2: 1}


def test_a_block_reused_under_another_name_is_removed_under_its_first_name(make_manager):
    manager = make_manager(1)
    use_full(manager, 1, plh(100))
    manager.process(Deref([1]))
    use_full(manager, 2, plh(100))
    manager.process(Deref([2]))
    take(manager)
    use_full(manager, 3, plh(300))
    assert take(manager) == [["S", 1, None, [[3, 0]]], ["R", 2, [1]]]


def test_a_block_held_under_two_names_is_inactive_after_both_are_dereferenced(make_manager):
    manager = make_manager(4)
    use_full(manager, 1, plh(100))
    use_full(manager, 1, plh(100))
    use_full(manager, 2, plh(100))
    assert manager.active_blocks == {1: 2, 2: 1}
    assert (manager.num_active_blocks, manager.num_active_block_refs) == (1, 3)
    manager.process(Deref([1, 1]))
    assert manager.active_blocks == {2: 1}
    refuse(manager, Deref([1]), "block 1", "not active")
    manager.process(Deref([2]))
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (0, 1)
    assert manager.inactive_blocks() == [1]


def test_blocks_with_one_name_and_different_lineage_hashes_are_two_copies(make_manager):
    manager = make_manager(4)
    use_full(manager, 1, plh(100))
    manager.process(Deref([1]))
    use_full(manager, 1, plh(200))
    manager.process(Deref([1]))
    assert manager.inactive_blocks() == [1, 1]
    assert list(manager.resident(StorageTier.DEVICE)) == [1, 1]
    use_full(manager, 1, plh(100))
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (1, 1)


def test_inactive_blocks_are_evicted_for_new_ones(make_manager):
    manager = make_manager(4)
    for block in range(4):
        assert use_full(manager, block, plh(block + 100)) == 1
    for block in range(4):
        manager.process(Deref([block]))
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (0, 4)
    assert [use_full(manager, block, plh(block + 1000)) for block in (10, 11)] == [1, 1]
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (2, 2)
    assert [use_full(manager, block, plh(block + 1000)) for block in (12, 13)] == [1, 1]
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (4, 0)


def test_after_a_batch_fills_the_manager_the_next_use_allocates_nothing(make_manager):
    manager = make_manager(10)
    assert use_roots(manager, range(10)) == 10
    assert manager.num_active_blocks == 10
    take(manager)
    assert use_roots(manager, [10]) == 0
    assert take(manager) == []


def test_a_use_that_runs_out_of_blocks_keeps_its_leading_blocks(make_manager):
    manager = make_manager(3)
    assert use_roots(manager, [1, 2, 3, 4, 5]) == 3
    assert take(manager) == [["S", 0, None, [[1, 0], [2, 0], [3, 0]]]]
    assert manager.active_blocks == {1: 1, 2: 1, 3: 1}


def test_a_shared_prefix_counts_as_active_once_and_as_references_twice(make_manager):
    manager = make_manager(8)
    use_roots(manager, [10, 11, 12])
    assert (manager.num_active_blocks, manager.num_active_block_refs) == (3, 3)
    use_roots(manager, [10, 11, 13])
    assert (manager.num_active_blocks, manager.num_active_block_refs) == (4, 6)


# ----------------------------------------------------------------------------------------------------------- events


def test_reactivation_publishes_nothing(make_manager):
    manager = make_manager(4)
    use_full(manager, 1, plh(100))
    manager.process(Deref([1]))
    use_full(manager, 1, plh(100))
    assert take(manager) == [["S", 0, None, [[1, 0]]]]


def test_a_new_suffix_is_stored_below_the_last_block_reused(make_manager):
    manager = make_manager(8)
    use_roots(manager, [10, 11])
    manager.process(Deref([10]))
    manager.process(Deref([11]))
    take(manager)
    use_roots(manager, [10, 11, 12])
    assert take(manager) == [["S", 1, 11, [[12, 0]]]]


def test_an_eviction_is_published_once_after_the_stored_blocks(make_manager):
    manager = make_manager(2)
    use_roots(manager, [10, 11])
    manager.process(Deref([10]))
    manager.process(Deref([11]))
    take(manager)
    use_full(manager, 12, plh(12))
    assert take(manager) == [["S", 1, None, [[12, 0]]], ["R", 2, [10]]]


def test_a_stored_has_local_hashes_and_token_ids_only_of_the_blocks_that_it_stores(make_manager):
    manager = make_manager(8)
    manager.process(Use([1, 2], [11, 12], [plh(1), plh(2)]))
    take(manager)
    tokens = [(1,) * 16, (2,) * 16, (3,) * 16]
    manager.process(Use([1, P1, 3, 2], [11, 13, 12], [plh(1), plh(3), plh(2)], tokens))
    assert event_rows(manager.sink.events) == [["S", 1, 2, [[3, 13]]]]
    assert manager.sink.router_events[0].token_ids == [(2,) * 16]


def test_events_carry_no_token_ids_where_none_were_given(make_manager):
    manager = make_manager(8)
    use_full(manager, 1, plh(1))
    assert [event.token_ids for event in manager.sink.router_events] == [None]


def test_a_chunk_is_stored_below_the_chunk_before_it(make_manager):
    manager = make_manager(256, 64)
    sequence = ActiveSequence(range(512), 100, 64)
    manager.process(sequence.allocate_blocks_for_chunk(256))
    manager.process(sequence.allocate_blocks_for_chunk(512))
    first, second = (event.data for event in manager.sink.events)
    assert (None, sequence.unique_blocks[3]) == (first.parent_hash, second.parent_hash)
    assert (len(first.block_hashes), len(second.block_hashes)) == (4, 4)


def test_without_a_sink_no_event_id_is_used(make_manager):
    manager = make_manager(4, silent=True)
    use_full(manager, 1, plh(1))
    sink = make_manager(1).sink
    manager.sink = sink
    use_full(manager, 2, plh(2))
    assert [event.event_id for event in sink.events] == [0]


def test_events_name_the_rank(make_manager):
    manager = make_manager(4, dp_rank=3)
    use_full(manager, 1, plh(1))
    assert [event.dp_rank for event in manager.sink.events] == [3]


def test_a_sink_error_uses_up_the_event_id_and_is_logged_and_raised_after_the_move(make_manager, caplog):
    manager = make_manager(4)
    good = manager.sink

    class BadSink:
        def publish(self, event, storage_tier, token_ids):
            raise RuntimeError("no ears")

    use_full(manager, 1, plh(1))
    manager.sink = BadSink()
    with caplog.at_level(logging.WARNING, logger="pytest_kvmock.engines"), pytest.raises(RuntimeError, match="no ears"):
        use_full(manager, 2, plh(2))
    assert [record.name for record in caplog.records] == ["pytest_kvmock.engines"]
    assert "no ears" in caplog.text
    manager.sink = good
    use_full(manager, 3, plh(3))
    assert [event.event_id for event in good.events] == [0, 2]
    assert manager.active_blocks == {1: 1, 2: 1, 3: 1}


# ------------------------------------------------------------------------------------------------- the two hazards


def test_a_block_evicted_and_stored_again_in_one_use_is_published_as_removed(make_manager):
    manager = make_manager(3)
    use_roots(manager, [1, 2, 3])
    for block in (1, 2, 3):
        manager.process(Deref([block]))
    take(manager)
    assert use_roots(manager, [4, 1]) == 2  # 4 takes the slot of 1, which is stored again in the slot of 2
    assert take(manager) == [["S", 1, None, [[4, 0], [1, 0]]], ["R", 2, [1, 2]]]
    assert manager.active_blocks == {4: 1, 1: 1}
    assert list(manager.resident()) == [3, 4, 1]
    manager.process(Deref([1]))
    take(manager)
    use_roots(manager, [5, 6])  # its later eviction publishes no event
    assert take(manager) == [["S", 3, None, [[5, 0], [6, 0]]], ["R", 4, [3]]]
    assert list(manager.resident()) == [4, 5, 6]


def test_multi_lru_evicts_and_restores_a_block_in_one_use_under_scheduler_traffic():
    # Chains are used completely and freed tail first. A request holds block 1 all the time, so it is not counted.
    streams = {}
    for backend in ("lineage", "lru", "multi_lru"):
        manager = new_manager(backend, 4)
        manager.use([9])
        manager.deref([9])
        manager.use([1])
        for _ in range(2):
            manager.use([1, 2])
            manager.deref([2, 1])  # block 2 was reused once: it is warm
        manager.use([9])
        manager.deref([9])  # also warm, and more recent than block 2
        manager.deref([1])  # counted once: it is cold
        manager.use([3])
        manager.use([4])  # evicts block 1 before block 2; the other backends evict block 9
        manager.sink.take()
        assert manager.use([1, 2]) == 2
        streams[backend] = [row[2:] for row in take(manager)]
    assert streams["multi_lru"] == [[None, [[1, 1], [2, 2]]], [[2, 9]]]
    assert streams["lineage"] == streams["lru"] != streams["multi_lru"]


def test_a_new_block_that_occurs_twice_in_one_use_is_its_own_parent(make_manager):
    manager = make_manager(4)
    assert use_roots(manager, [7, 7]) == 2
    assert take(manager) == [["S", 0, 7, [[7, 0]]]]
    assert manager.active_blocks == {7: 2}


# ------------------------------------------------------------------------------------------------- partial blocks


def test_promotion_makes_a_partial_block_full(make_manager):
    manager = make_manager(10)
    manager.process(Use([P1]))
    assert manager.active_blocks == {P1: 1}
    assert manager.process(Promote(P1, 42, None, 7, plh(500))) == 1
    assert manager.active_blocks == {42: 1}
    assert take(manager) == [["S", 0, None, [[42, 7]]]]


def test_promotion_to_an_active_block_frees_the_partial_block(make_manager):
    manager = make_manager(10)
    use_full(manager, 42, plh(500))
    manager.process(Use([P1]))
    take(manager)
    manager.process(Promote(P1, 42, None, 7, plh(500)))
    assert (manager.num_active_blocks, manager.num_active_block_refs, take(manager)) == (1, 2, [])


def test_promotion_to_an_inactive_block_activates_it(make_manager):
    manager = make_manager(10)
    use_full(manager, 42, plh(500))
    manager.process(Deref([42]))
    manager.process(Use([P1]))
    take(manager)
    manager.process(Promote(P1, 43, None, 7, plh(500)))
    assert (manager.active_blocks, manager.num_inactive_blocks, take(manager)) == ({43: 1}, 0, [])


def test_promotion_to_a_lineage_hash_held_under_another_name_shares_it(make_manager):
    manager = make_manager(10)
    use_full(manager, 42, plh(500))
    manager.process(Use([P1]))
    manager.process(Promote(P1, 43, None, 7, plh(500)))
    assert manager.active_blocks == {42: 1, 43: 1}
    assert manager.num_active_blocks == 1


def test_a_freed_partial_block_is_not_cached(make_manager):
    manager = make_manager(10)
    manager.process(Use([P1]))
    manager.process(Deref([P1]))
    assert (manager.active_blocks, manager.num_active_block_refs, manager.num_inactive_blocks) == ({}, 0, 0)
    assert take(manager) == []


def test_a_partial_block_used_again_has_one_reference(make_manager):
    manager = make_manager(10)
    assert manager.process(Use([P1, P1])) == 2
    assert (manager.active_blocks, manager.num_active_blocks) == ({P1: 1}, 1)


def test_freed_slots_are_reused_in_the_order_of_their_release(make_manager):
    manager = make_manager(3)
    manager.process(Use([P1, P2]))
    first, second = manager._partials[P1], manager._partials[P2]
    manager.process(Deref([P2]))
    manager.process(Deref([P1]))
    use_roots(manager, [1, 2, 3])
    assert manager._form.names.own[1] not in {first, second}  # never used before
    assert [second, first] == [manager._form.names.own[block] for block in (2, 3)]


# --------------------------------------------------------------------------------------------------- whole requests


def test_the_prefill_cost_of_an_uncached_prompt_is_all_its_tokens(make_manager):
    sequence = ActiveSequence(range(35), 10, 16)
    assert make_manager(10).prefill_cost(sequence) == (3, 35, 0)


def test_the_prefill_cost_of_a_fully_cached_prompt_is_zero(make_manager):
    manager = make_manager(10)
    sequence = ActiveSequence(range(32), 10, 16)
    manager.process(sequence.take_creation_signal())
    assert manager.prefill_cost(sequence) == (0, 0, 32)
    for move in sequence.reset_with_signal():
        manager.process(move)
    assert manager.prefill_cost(sequence) == (0, 0, 32)
    assert manager.prefill_cost(ActiveSequence(range(32), 10, 16, enable_prefix_caching=False)) == (2, 32, 0)
    assert manager.prefill_cost(ActiveSequence([*range(16), *range(8)], 10, 16)) == (1, 8, 16)


def test_a_second_preemption_frees_only_reallocated_blocks(make_manager):
    manager = make_manager(16, 4)
    sequence = ActiveSequence(range(6), 16, 4)
    assert manager.process(sequence.take_creation_signal()) == 2
    for _ in range(3):
        for move in sequence.generate():
            manager.process(move)
        sequence.commit_allocation(len(sequence))
    assert manager.num_active_blocks == 3
    for move in sequence.reset_with_signal():
        manager.process(move)
    assert manager.num_active_blocks == 0
    assert manager.process(sequence.allocate_blocks_for_chunk(sequence.num_input_tokens)) == 2
    assert manager.num_active_blocks == 2
    for move in sequence.reset_with_signal():
        manager.process(move)
    assert manager.num_active_blocks == 0


def test_without_prefix_caching_a_preempted_request_finds_its_own_blocks(make_manager):
    manager = make_manager(8)
    sequence = ActiveSequence(range(64), 100, 16, enable_prefix_caching=False)
    assert manager.process(sequence.take_creation_signal()) == 4
    for move in sequence.reset_with_signal():
        manager.process(move)
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (0, 4)
    assert manager.process(sequence.take_creation_signal()) == 4
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (4, 0)
    assert sum(isinstance(event.data, Stored) for event in manager.sink.events) == 1


# ------------------------------------------------------------------------------------------------ the master example


def test_uses_and_derefs_give_the_events_and_pools_of_the_original_example():
    manager = new_manager("lineage", 10)

    def use(*blocks):
        return manager.process(Use(blocks, [], [chain_plh(block) for block in blocks]))

    def stored(event_id, blocks, parent):
        return ["S", event_id, parent, [[block, 0] for block in blocks]]

    assert use(0, 1, 2, 3, 4) == 5
    assert [stored(0, [0, 1, 2, 3, 4], None)] == take(manager)
    assert use(0, 1, 5, 6) == 4
    assert [stored(1, [5, 6], 1)] == take(manager)
    assert manager.active_blocks == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1}
    manager.process(Deref([4, 3, 2, 1, 0]))
    assert manager.active_blocks == {0: 1, 1: 1, 5: 1, 6: 1}
    assert manager.inactive_blocks() == [4, 3, 2]
    manager.process(Deref([6, 5, 1, 0]))
    assert manager.active_blocks == {}
    assert manager.inactive_blocks() == [4, 3, 2, 6, 5, 1, 0]
    assert take(manager) == []
    assert use(0, 1, 2, 7, 8, 9) == 6
    assert [stored(2, [7, 8, 9], 2)] == take(manager)
    assert manager.active_blocks == {0: 1, 1: 1, 2: 1, 7: 1, 8: 1, 9: 1}
    assert manager.inactive_blocks() == [4, 3, 6, 5]
    assert use(10, 11, 12) == 3
    assert [stored(3, [10, 11, 12], None), ["R", 4, [4, 3, 6]]] == take(manager)
    assert manager.inactive_blocks() == [5]
    presence = manager.check_presence([chain_plh(block) for block in (5, 6, 9)])
    assert [present for _, present in presence] == [True, False, True]
    assert use(13) == 1
    assert [stored(5, [13], None), ["R", 6, [5]]] == take(manager)
    assert dict.fromkeys([0, 1, 2, 7, 8, 9, 10, 11, 12, 13], 1) == manager.active_blocks
    assert manager.num_inactive_blocks == 0


# ----------------------------------------------------------------------------------------------------------- refusals


def test_lists_that_do_not_match_the_number_of_blocks_are_refused(make_manager):
    manager = make_manager(10, 4)
    lineages = [plh(100), plh(200)]
    refuse(manager, Use([1, 2], [101, 102], lineages, [[1, 2, 3, 4]]), "block 1", "1 token_ids for 2 full blocks")
    refuse(manager, Use([1, 2], [101], lineages), "block 1", "1 local_hashes for 2 full blocks")
    refuse(manager, Use([1, 2], [], [plh(100)]), "block 1", "1 plhs for 2 full blocks")
    refuse(manager, Use([1, 2]), "block 1", "0 plhs for 2 full blocks")
    refuse(manager, Use([1, P1], [], lineages), "block 1", "2 plhs for 1 full blocks")


def test_a_partial_parent_is_refused(make_manager):
    manager = make_manager(10)
    manager.process(Use([P1]))
    refuse(manager, Use([1], [], [plh(1)], parent=P1), "block 1", str(P1), "partial")
    refuse(manager, Use([P2], parent=P1), "partial")
    refuse(manager, Promote(P1, 1, P2, 0, plh(1)), str(P1), "partial")  # type: ignore[arg-type]


def test_deref_of_an_inactive_block_is_refused(make_manager):
    manager = make_manager(10)
    use_roots(manager, [1, 2])
    manager.process(Use([P1]))
    manager.process(Deref([2]))
    refuse(manager, Deref([3]), "block 3", "not active")
    refuse(manager, Deref([2]), "block 2", "not active")
    refuse(manager, Deref([P2]), str(P2), "not active")
    refuse(manager, Deref([1, 3]), "block 3", "not active")


def test_deref_counts_repeats(make_manager):
    manager = make_manager(10)
    use_roots(manager, [1, 1, 2])
    manager.process(Use([P1]))
    refuse(manager, Deref([1, 2, 1, 1]), "block 1", "2 reference(s)", "drops 3")
    refuse(manager, Deref([P1, P1]), str(P1), "1 reference(s)")
    manager.process(Deref([1, 2, 1, P1]))
    assert manager.active_blocks == {}


def test_promotion_of_an_unknown_partial_block_is_refused(make_manager):
    manager = make_manager(10)
    refuse(manager, Promote(P1, 42, None, 0, plh(500)), str(P1), "not active")
    refuse(manager, Promote(42, 42, None, 0, plh(500)), "42")  # type: ignore[arg-type]


def test_promotion_with_a_value_that_is_not_a_hash_is_refused(make_manager):
    manager = make_manager(10)
    manager.process(Use([P1]))
    refuse(manager, Promote(P1, -1, None, 0, plh(1)), "-1", "sequence hash")
    refuse(manager, Promote(P1, 2**64, None, 0, plh(1)), str(2**64))
    refuse(manager, Promote(P1, 1, -5, 0, plh(1)), "parent -5")
    refuse(manager, Promote(P1, 1, None, -6, plh(1)), "local hash -6")
    refuse(manager, Promote(P1, 1, None, 0), "plh", "None")
    refuse(manager, Promote(P1, 1, None, 0, 2**128), "plh")


@pytest.mark.parametrize("block", [-1, 2**64, 1.5, "1", None, [1], True], ids=repr)
def test_a_value_that_is_not_a_block_is_refused(make_manager, block):
    manager = make_manager(10)
    use_full(manager, 7, plh(7))
    if block is not True:  # an int to the checks that run in C
        refuse(manager, Use([7, block], [], [plh(7), plh(8)]), repr(block))
    refuse(manager, Deref([7, block]), repr(block))


@pytest.mark.parametrize(
    "move",
    [Use(5), Use([9], 5, [1]), Use([9], [], 5), Use([9], [], [1], 5), Use([9], [], None), Deref(5), Use("ab")],
    ids=repr,
)
def test_a_value_that_is_not_a_list_is_refused(make_manager, move):
    manager = make_manager(10)
    use_full(manager, 7, plh(7))
    refuse(manager, move, "expected")


def test_a_short_form_takes_only_lists(make_manager):
    with pytest.raises(MoveError, match="Use: a list of blocks is expected, got 5"):
        make_manager(10).use(5)


@pytest.mark.parametrize("bad", [-1, 3 << 126, 2**128, 1.5, None, "x"], ids=repr)
def test_a_value_that_is_not_a_lineage_hash_is_refused(make_manager, bad):
    manager = make_manager(10)
    refuse(manager, Use([7, 8], [], [plh(7), bad]), "block 7", repr(bad), "lineage hash")


def test_a_local_hash_that_is_not_a_u64_is_refused(make_manager):
    refuse(make_manager(10), Use([7], [-3], [plh(7)]), "local hash -3")


def test_a_parent_that_is_not_a_block_is_refused(make_manager):
    refuse(make_manager(10), Use([7], [], [plh(7)], parent="x"), "'x'")  # type: ignore[arg-type]


def test_lineage_hashes_on_both_sides_of_a_position_mode_boundary_are_accepted(make_manager):
    manager = make_manager(10)
    plhs = [lineage_hash(1, None, 65535), lineage_hash(2, 1, 65536)]
    assert manager.process(Use([1, 2], [], plhs)) == 2


def test_a_refused_destroy_names_the_backend_and_hash_cache(make_manager, backend):
    refuse(make_manager(10), Destroy([1]), "Destroy", backend, "hash_cache")


def test_a_value_that_is_not_a_move_is_refused(make_manager):
    refuse(make_manager(10), "use", "expected a Use, Deref or Promote")


def test_lineage_refuses_to_cache_two_blocks_with_the_same_position_and_fragment():
    manager = new_manager("lineage", 8)
    ours, theirs = lineage_hash(77, 5, 3), lineage_hash(77, 6, 3)
    manager.process(Use([1, 2, 3], [], [ours, theirs, plh(3)]))
    refuse(manager, Deref([3, 1, 2]), "block 2", "hash collision")
    manager.process(Deref([3, 1]))
    refuse(manager, Deref([2]), "block 2", "hash collision")
    assert use_full(manager, 4, ours) == 1
    manager.process(Deref([2]))
    refuse(manager, Deref([4]), "block 1", "hash collision")


def test_lru_distinguishes_two_blocks_with_the_same_position_and_fragment():
    manager = new_manager("lru", 8)
    manager.process(Use([1, 2], [], [lineage_hash(77, 5, 3), lineage_hash(77, 6, 3)]))
    manager.process(Deref([1, 2]))
    assert manager.inactive_blocks() == [1, 2]


def test_lineage_matches_a_block_by_position_and_fragment_without_its_parent():
    manager = new_manager("lineage", 4)
    ours, theirs = lineage_hash(0xAA, 0x11, 5), lineage_hash(0xAA, 0x22, 5)
    use_full(manager, 1, ours)
    manager.process(Deref([1]))
    take(manager)
    assert use_full(manager, 2, theirs) == 1
    assert (take(manager), manager.active_blocks) == ([], {2: 1})
    assert [(ours, True), (theirs, False)] == manager.check_presence([ours, theirs])


@pytest.mark.parametrize("num_blocks", [0, -1, 1.5, None, True, "8"], ids=repr)
def test_an_invalid_capacity_is_refused(make_manager, num_blocks):
    with pytest.raises(ValueError, match=r"num_blocks must be an integer of at least 1, got"):
        make_manager(num_blocks)


@pytest.mark.parametrize("block_size", [0, 1, -2, 3, 48, 2048, 16.0, None, True], ids=repr)
def test_a_block_size_that_is_not_a_power_of_two_is_refused(make_manager, block_size):
    with pytest.raises(ValueError, match=r"block_size must be a power of two from 2 to 1024 .*, got"):
        make_manager(8, block_size)


@pytest.mark.parametrize("dp_rank", [-1, 2**32, 0.5], ids=repr)
def test_a_rank_that_is_not_a_u32_is_refused(make_manager, dp_rank):
    with pytest.raises(ValueError, match="dp_rank must be an integer from 0 to 4294967295, got"):
        make_manager(8, dp_rank=dp_rank)


# ------------------------------------------------------------------------------------------------------------ queries


def test_the_repr_of_a_manager_names_its_sizes(make_manager, backend):
    manager = make_manager(8, 32, dp_rank=2)
    assert (backend, 8, 32, 2) == (manager.backend, manager.num_blocks, manager.block_size, manager.dp_rank)
    use_roots(manager, [1, 2])
    assert manager.active_perc == 0.25


def test_without_offload_all_blocks_are_resident_on_the_device(make_manager):
    manager = make_manager(8)
    use_roots(manager, [1, 2])
    manager.process(Deref([1]))
    assert list(manager.resident(StorageTier.DEVICE)) == [1, 2]
    assert list(manager.resident(StorageTier.HOST_PINNED)) == []


def test_metrics_count_allocations_evictions_registrations_and_matches(make_manager):
    manager = make_manager(3)
    manager.process(Use([1, 2, P1], [], [plh(1), plh(2)]))
    manager.process(Deref([1]))
    use_roots(manager, [1, 2])
    manager.process(Deref([1, 2, 2]))
    use_roots(manager, [3])
    use_roots(manager, [4, 5])
    metrics = manager.metrics()
    assert (metrics.allocations, metrics.allocations_from_reset, metrics.evictions) == (5, 3, 2)
    assert (metrics.registrations, metrics.stagings) == (4, 4)
    # 1, 2, again 1, then 3, 4 and 5; found: the inactive 1
    assert (metrics.match_hashes_requested, metrics.match_blocks_returned) == (6, 1)
    assert (metrics.inflight_mutable, metrics.inflight_immutable) == (1, 2)
    assert (metrics.reset_pool_size, metrics.inactive_pool_size) == (0, 0)


def test_clear_drops_the_cache_and_publishes_a_cleared(make_manager):
    manager = make_manager(4)
    use_roots(manager, [1, 2])
    first, second = manager._form.names.own[1], manager._form.names.own[2]
    manager.process(Deref([2, 1]))
    take(manager)
    assert manager.clear() is True
    assert take(manager) == [["C", 1]]
    assert (manager.inactive_blocks(), list(manager.resident())) == ([], [])
    assert manager.metrics().reset_pool_size == 4
    assert use_roots(manager, [1, 2, 3, 4]) == 4
    # The reset pool has two unused slots first, then the dropped ones in eviction order.
    assert {manager._form.names.own[1], manager._form.names.own[2]}.isdisjoint({first, second})
    assert [second, first] == [manager._form.names.own[block] for block in (3, 4)]


def test_clear_does_nothing_while_a_block_is_in_use(make_manager):
    manager = make_manager(4)
    use_roots(manager, [1, 2])
    manager.process(Deref([1]))
    take(manager)
    before = state_of(manager)
    assert manager.clear() is False
    manager.process(Deref([2]))
    manager.process(Use([P1]))
    assert manager.clear() is False
    manager.process(Deref([P1]))
    assert before[4] == manager.sink.events


# -------------------------------------------------------------------------------------------------------- short forms


def test_short_forms_give_the_evictions_of_the_original_example():
    manager = new_manager("lineage", 10)
    assert manager.use([0, 1, 2, 3, 4]) == 5
    assert manager.use([0, 1, 5, 6]) == 4
    manager.deref([4, 3, 2, 1, 0])
    manager.deref(6, 5, 1, 0)
    assert manager.use([0, 1, 2, 7, 8, 9]) == 6
    assert manager.use([10, 11, 12]) == 3
    assert manager.use([13]) == 1
    assert [row[2] for row in take(manager) if row[0] == "R"] == [[4, 3, 6], [5]]
    assert [(chain_plh(9), True)] == manager.check_presence([chain_plh(9)])


def test_a_missing_local_hash_defaults_to_the_block_id(make_manager):
    manager = make_manager(8)
    manager.use([4, 5])
    manager.use([6, 7], local_hashes=[60, 70])
    manager.use([P1])
    manager.promote(P1, 8, parent=7)
    assert [row[3] for row in take(manager)] == [[[4, 4], [5, 5]], [[6, 60], [7, 70]], [[8, 8]]]


def test_a_new_block_gets_the_lineage_of_the_given_parent(make_manager):
    manager = make_manager(8)
    manager.use([1, 2])
    manager.use([3], parent=2)
    manager.deref([3])
    manager.use([4], parent=3)  # an inactive parent is accepted
    assert [row[2] for row in take(manager)] == [None, 2, 3]
    assert [lineage_hash(3, 2, 2), lineage_hash(4, 3, 3)] == [manager._form.names.own[block].plh for block in (3, 4)]


def test_a_block_that_is_used_again_keeps_its_lineage_hash(make_manager):
    manager = make_manager(8)
    manager.use([1, 2])
    manager.use([2, 3])  # as a root 2 would have another lineage hash
    assert manager.active_blocks == {1: 1, 2: 2, 3: 1}
    assert lineage_hash(3, 2, 2) == manager._form.names.own[3].plh
    manager.deref([2, 3, 2, 1])
    assert manager.use([2]) == 1
    assert manager.num_active_blocks == 1
    assert manager.num_inactive_blocks == 2


def test_a_promoted_block_is_a_child_of_the_given_parent(make_manager):
    manager = make_manager(8)
    manager.use([1, P1])
    manager.promote(P1, 2, parent=1)
    assert take(manager)[1] == ["S", 1, 1, [[2, 2]]]
    assert [(lineage_hash(2, 1, 1), True)] == manager.check_presence([lineage_hash(2, 1, 1)])


@pytest.mark.parametrize("parent", [99, P1, "x"], ids=str)
def test_a_parent_that_is_not_cached_is_refused(make_manager, parent):
    manager = make_manager(8)
    manager.use([1, P2])
    before = state_of(manager)
    with pytest.raises(MoveError, match=str(parent)):
        manager.use([2], parent=parent)
    with pytest.raises(MoveError, match=str(parent)):
        manager.promote(P2, 2, parent=parent)
    assert before == state_of(manager)


def test_an_evicted_parent_is_not_cached(make_manager):
    manager = make_manager(1)
    manager.use([1])
    manager.deref(1)
    manager.use([2])
    with pytest.raises(MoveError, match="parent 1 is not cached"):
        manager.use([3], parent=1)


def test_the_short_form_finds_a_block_by_name_while_one_of_two_copies_is_cached():
    manager = new_manager("lru", 3)
    use_full(manager, 1, plh(100))
    manager.process(Deref([1]))
    use_full(manager, 1, plh(200))
    manager.process(Deref([1]))
    use_roots(manager, [3, 4])  # the second evicts the first copy
    assert manager.inactive_blocks() == [1]
    assert manager.use([1]) == 1
    assert plh(200) == manager._pool.registered[plh(200)].plh
    assert manager.active_blocks == {1: 1, 3: 1, 4: 1}


def test_the_short_deref_takes_blocks_one_by_one_or_as_a_list(make_manager):
    manager = make_manager(8)
    manager.use([1, 1, 2, P1])
    manager.deref(1)
    manager.deref([1, P1])
    manager.deref(2)
    assert manager.active_blocks == {}
    with pytest.raises(MoveError, match="'xyz'"):
        manager.deref("xyz")


class _Shorts(LruPolicy):
    def evict(self, count):
        return super().evict(count - 1)


class _Twice(LruPolicy):
    def evict(self, count):
        return super().evict(1) * count


class _Nothing(LruPolicy):
    def evict(self, count):
        super().evict(count)


@pytest.mark.parametrize("policy", [_Shorts, _Twice, _Nothing])
def test_an_eviction_policy_that_returns_wrong_blocks_is_named_in_the_error(policy):
    manager = LogicalManager(backend="wrong", eviction=policy(), num_blocks=3)
    manager.use([1, 2, 3])
    manager.deref([3, 2, 1])
    with pytest.raises(RuntimeError, match=rf"^the eviction policy {policy.__name__} is wrong: evict\(2\) gave .*; 2 "):
        manager.use([4, 5])


def test_queries_for_invalid_blocks_find_nothing(make_manager):
    manager = make_manager(4)
    manager.use([1, 2])
    assert (manager.references("x"), manager.references(1.5)) == (0, 0)
    no_plhs = ["x", None, -1, 3 << 126]
    assert [(each, False) for each in no_plhs] == manager.check_presence(no_plhs)
