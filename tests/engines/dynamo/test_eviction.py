"""Eviction policies alone: kvbm-logical's own examples, and their eviction orders."""

import pytest
from cache_helpers import POLICIES

from pytest_kvmock.engines.base.eviction_policy import Slot
from pytest_kvmock.engines.dynamo.eviction.lineage import LineagePolicy
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy
from pytest_kvmock.engines.dynamo.eviction.multi_lru import MultiLruPolicy
from pytest_kvmock.values import lineage_hash


def new_slot(policy, name, plh):
    slot = Slot()
    slot.name, slot.plh = name, plh
    policy._on_register([slot])
    return slot


def chain(policy, names, start=0, parent=None):
    """Return registered slots, each the child of the previous one."""
    slots = []
    for position, name in enumerate(names, start):
        slots.append(new_slot(policy, name, lineage_hash(name, parent, position)))
        parent = name
    return slots


def insert(policy, slots):
    policy.insert(slots)


def evict_all(policy):
    names = []
    while slots := policy.evict(1):
        names.append(slots[0].name)
    return names


def names(slots):
    return [slot.name for slot in slots]


@pytest.fixture(params=sorted(POLICIES))
def policy(request):
    return POLICIES[request.param](100)


# ------------------------------------------------------------------------------------------------ what all promise


def test_an_empty_policy_evicts_nothing(policy):
    assert policy.evict(1) == []
    assert policy.order() == []


def test_order_lists_the_slots_in_eviction_order(policy):
    tree = [*chain(policy, range(5)), *chain(policy, [15, 16], 2, 1), *chain(policy, [20])]
    insert(policy, [tree[i] for i in (3, 0, 7, 6, 4, 1, 5, 2)])
    policy.remove([tree[4]])
    policy.remove([tree[0]])
    policy.insert([tree[4]])
    expected = names(policy.order())
    assert len(expected) == 7
    assert evict_all(policy) == expected


def test_a_chain_freed_tail_first_is_evicted_tail_first(policy):
    slots = chain(policy, range(5))
    insert(policy, slots[::-1])
    assert evict_all(policy) == [4, 3, 2, 1, 0]


def test_a_slot_that_is_inserted_again_moves_to_the_end_of_the_eviction_order(policy):
    slots = [*chain(policy, [1]), *chain(policy, [2]), *chain(policy, [3])]
    insert(policy, slots)
    policy.remove([slots[0]])
    policy.insert([slots[0]])
    assert evict_all(policy) == [2, 3, 1]


def test_a_touch_alone_does_not_change_the_eviction_order(policy):
    slots = [*chain(policy, [1]), *chain(policy, [2])]
    policy._on_touch(slots[0])
    insert(policy, slots)
    assert evict_all(policy) == [1, 2]


def test_reuse_without_eviction_does_not_grow_the_queue(policy):
    slots = chain(policy, range(8))
    insert(policy, slots[::-1])
    for _ in range(1000):
        for slot in slots:
            policy.remove([slot])
        insert(policy, slots[::-1])
    for queue in getattr(policy, "_queues", [policy]):
        assert len(queue._queue) < 2 * 8 + 1024 + 9
    assert evict_all(policy) == [7, 6, 5, 4, 3, 2, 1, 0]


def test_a_slot_can_be_registered_again(policy):
    slots = chain(policy, range(3))
    insert(policy, slots[::-1])
    first = policy.evict(1)[0]
    first.name, first.plh = 9, lineage_hash(9, None, 0)
    policy._on_register([first])
    policy.insert([first])
    assert evict_all(policy) == [1, 0, 9]


def test_a_cleared_policy_holds_no_slot(policy):
    slots = chain(policy, range(4))
    insert(policy, slots[::-1])
    policy.remove([slots[0]])
    policy.clear()
    assert policy.order() == []
    again = chain(policy, range(3))
    insert(policy, again)
    assert sorted(names(again)) == sorted(evict_all(policy))


# ---------------------------------------------------------------------------------------------------------- lineage


def test_lineage_evicts_a_single_root():
    policy = LineagePolicy()
    insert(policy, chain(policy, [1]))
    assert evict_all(policy) == [1]
    assert policy._nodes == {}


def test_lineage_evicts_the_child_before_its_older_parent():
    policy = LineagePolicy()
    insert(policy, chain(policy, [1, 2]))
    assert evict_all(policy) == [2, 1]


def test_lineage_evicts_a_child_before_a_parent_that_was_inserted_later():
    policy = LineagePolicy()
    parent, child = chain(policy, [1, 2])
    policy.insert([child])
    assert names(policy.order()) == [2]
    policy.insert([parent])
    assert evict_all(policy) == [2, 1]


def test_lineage_keeps_no_node_for_the_missing_parent_of_an_evicted_block():
    policy = LineagePolicy()
    insert(policy, chain(policy, [3], start=7, parent=2))
    assert evict_all(policy) == [3]
    assert policy._nodes == {}


def test_lineage_treats_only_the_tail_of_a_chain_as_a_leaf():
    policy = LineagePolicy()
    insert(policy, chain(policy, [1, 2, 3]))
    insert(policy, chain(policy, [11, 12, 13]))
    assert policy.evict(1)[0].name == 3
    assert names(policy.order()) == [2, 1, 13, 12, 11]


def test_lineage_evicts_all_of_an_older_chain_before_a_newer_one():
    policy = LineagePolicy()
    insert(policy, chain(policy, range(5)))
    insert(policy, chain(policy, range(10, 15)))
    assert evict_all(policy) == [4, 3, 2, 1, 0, 14, 13, 12, 11, 10]


def test_lineage_evicts_a_parent_without_children_in_its_original_turn():
    policy = LineagePolicy()
    insert(policy, chain(policy, [1, 2]))
    insert(policy, chain(policy, [11, 12]))
    assert evict_all(policy) == [2, 1, 12, 11]


def test_lineage_keeps_its_order_when_either_end_of_a_long_chain_is_removed():
    policy = LineagePolicy()
    slots = chain(policy, range(1000))
    insert(policy, slots)
    policy.remove([slots[-1]])
    assert list(range(998, -1, -1)) == names(policy.order())
    policy.remove([slots[0]])
    assert list(range(998, 0, -1)) == evict_all(policy)


def test_lineage_keeps_the_children_of_a_reused_block_evictable():
    policy = LineagePolicy()
    slots = chain(policy, [1, 2, 3])
    insert(policy, slots[::-1])
    policy.remove([slots[1]])
    assert names(policy.order()) == [3, 1]
    policy.insert([slots[1]])
    assert evict_all(policy) == [3, 2, 1]


def test_lineage_evicts_the_root_of_a_chain_freed_root_first_only_as_a_leaf():
    policy = LineagePolicy()
    slots = chain(policy, [1, 2, 3])
    insert(policy, slots)
    later = chain(policy, [9])
    insert(policy, later)
    assert [policy.evict(1)[0].name, policy.evict(1)[0].name] == [3, 2]
    insert(policy, chain(policy, [4], 1, 1))  # a new child of 1, which is due
    assert names(policy.order()) == [9, 4, 1]
    assert evict_all(policy) == [9, 4, 1]


def test_lineage_links_parents_and_children_across_position_mode_boundaries():
    for border in (256, 65536):
        policy = LineagePolicy()
        names_ = [2**64 - 1 - i for i in range(4)]
        insert(policy, chain(policy, names_, start=border - 2, parent=5))
        assert names_[::-1] == evict_all(policy)


def test_lineage_finds_a_block_by_position_and_fragment_not_by_parent():
    policy = LineagePolicy()
    slot = new_slot(policy, 1, lineage_hash(0xAA, 0x11, 5))
    policy.insert([slot])
    assert slot is policy._find(lineage_hash(0xAA, 0x22, 5))
    assert policy._find(lineage_hash(0xAB, 0x11, 5)) is None
    assert policy._find(lineage_hash(0xAA, 0x11, 6)) is None
    policy.remove([slot])
    assert policy._find(lineage_hash(0xAA, 0x22, 5)) is None


def test_lineage_counts_blocks_with_the_same_position_and_fragment_as_collisions():
    policy = LineagePolicy()
    first = new_slot(policy, 1, lineage_hash(0xAA, 0x11, 5))
    assert policy._collisions == 0
    second = new_slot(policy, 2, lineage_hash(0xAA, 0x22, 5))
    assert policy._collisions == 1
    assert None is policy._first_refused([first])
    assert second is policy._first_refused([first, second])
    policy.insert([first])
    assert second is policy._first_refused([second])
    assert first is policy.evict(1)[0]
    assert policy._collisions == 0


def test_lineage_never_evicts_a_parent_whose_in_use_child_was_replaced():
    # A block with another parent takes the place of `child` while `child` is in use and has a child: the old parent
    # then counts `child` forever (kvbm-logical 1.2.1).
    policy = LineagePolicy()
    parent, child, grandchild = chain(policy, [1, 2, 3])
    insert(policy, [parent, child, grandchild])
    policy.remove([child])
    rival = new_slot(policy, 4, lineage_hash(2, 77, 1))
    policy.insert([rival])
    assert names(policy.order()) == [3, 4, 1]
    assert evict_all(policy) == [3, 4]


# -------------------------------------------------------------------------------------------------------------- lru


def test_lru_evicts_in_the_order_of_insertion():
    policy = LruPolicy()
    insert(policy, chain(policy, [1, 2, 3]))
    assert policy.evict(1)[0].name == 1
    assert names(policy.order()) == [2, 3]
    assert evict_all(policy) == [2, 3]


def test_lru_evicts_a_chain_freed_root_first_from_its_root():
    policy = LruPolicy()
    insert(policy, chain(policy, range(5)))
    assert evict_all(policy) == [0, 1, 2, 3, 4]


# -------------------------------------------------------------------------------------------------------- multi_lru


def reuse(policy, slot, times=1):
    for _ in range(times):
        policy.remove([slot])
        policy.insert([slot])


def test_multi_lru_keeps_four_levels_and_empties_the_coldest_first():
    policy = MultiLruPolicy(100)
    hottest, hot, warm, cold = (new_slot(policy, name, lineage_hash(name, None, 0)) for name in (4, 3, 2, 1))
    for slot, more in ((hottest, 14), (hot, 13), (warm, 6), (cold, 1)):  # the registration counted one
        for _ in range(more):
            policy._on_touch(slot)
    insert(policy, [hottest, hot, warm, cold])
    assert names(policy.order()) == [1, 2, 3, 4]
    assert names(policy.evict(2)) == [1, 2]
    assert names(policy.evict(5)) == [3, 4]


@pytest.mark.parametrize(("touches", "level"), [(1, 0), (2, 1), (6, 1), (7, 2), (13, 2), (14, 3), (40, 3)])
def test_multi_lru_places_a_block_in_a_level_by_its_frequency_count(touches, level):
    policy = MultiLruPolicy(100)
    slot = new_slot(policy, 1, lineage_hash(1, None, 0))
    for _ in range(touches):
        policy._on_touch(slot)
    policy.insert([slot])
    assert [[slot] if i == level else [] for i in range(4)] == [queue.order() for queue in policy._queues]


def test_multi_lru_moves_a_block_to_a_warmer_level_on_its_first_reuse():
    policy = MultiLruPolicy(100)
    reused, later = (new_slot(policy, name, lineage_hash(name, None, 0)) for name in (1, 2))
    policy.insert([reused])
    reuse(policy, reused)  # two counts, in addition to that of the registration
    policy.insert([later])
    assert evict_all(policy) == [2, 1]


def test_multi_lru_evicts_in_the_order_of_insertion_within_a_level():
    policy = MultiLruPolicy(100)
    slots = chain(policy, range(6))
    insert(policy, slots)
    for slot in (slots[4], slots[1], slots[3]):
        reuse(policy, slot)
    assert evict_all(policy) == [0, 2, 5, 4, 1, 3]


def test_multi_lru_never_moves_a_block_while_it_is_inactive():
    policy = MultiLruPolicy(100)
    first, second = (new_slot(policy, name, lineage_hash(name, None, 0)) for name in (1, 2))
    insert(policy, [first, second])
    for _ in range(15):
        policy._on_touch(first)
    assert names(policy.order()) == [1, 2]


def test_multi_lru_remembers_a_block_that_was_evicted():
    policy = MultiLruPolicy(100)
    slot = new_slot(policy, 1, lineage_hash(1, None, 0))
    policy.insert([slot])
    reuse(policy, slot)
    assert [slot] == policy.evict(1)
    policy._on_register([slot])
    policy.insert([slot, *chain(policy, [2])])
    assert evict_all(policy) == [2, 1]


def test_multi_lru_evicts_a_parent_held_by_another_request_before_its_reused_child():
    policy = MultiLruPolicy(100)
    parent, child = chain(policy, [1, 2])
    policy.insert([child])
    reuse(policy, child)  # another request holds the parent all the time, so its count stays the same
    policy.insert([parent])
    assert evict_all(policy) == [1, 2]


@pytest.mark.parametrize("num_blocks", [0, -1, 1.5, "8", None, True])
def test_multi_lru_refuses_an_invalid_capacity(num_blocks):
    with pytest.raises(ValueError, match="num_blocks must be an integer of at least 1, got"):
        MultiLruPolicy(num_blocks)
