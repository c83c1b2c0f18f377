"""Blocks that are reused without their neighbours: `lineage` evicts in the same order as a plain model."""

import pytest
from cache_helpers import Player, new_manager
from depth import few
from plain_lineage import Program

from pytest_kvmock import Removed


def test_a_block_that_is_due_becomes_evictable_when_its_last_child_is_used_again():
    manager = new_manager("lineage", 4)
    manager.use([1, 2, 3])
    for block in (1, 2, 3):  # root first: 1 and 2 wait for their descendants
        manager.deref(block)
    manager.use([7])
    manager.deref(7)
    manager.use([8])  # evicts 3; 1 is due, but 2 is its child
    manager.use([2])  # now 1 has no child, and no block was evicted
    assert manager.inactive_blocks() == [1, 7]
    manager.use([9])
    manager.use([10])
    assert [event.data.block_hashes for event in manager.sink.events if type(event.data) is Removed] == [
        (3,),
        (1,),
        (7,),
    ]


def test_the_plain_model_gives_the_answers_of_the_real_manager(recording):
    for program in recording("logical_lineage_woken.json.gz")["programs"]:
        assert program["steps"] == Program(program["seed"]).steps, program["seed"]


@pytest.mark.parametrize("first", few(range(0, 500, 100), 2))
def test_lineage_evicts_in_the_order_of_the_model_when_any_block_of_a_chain_is_reused(first):
    for seed in range(first, first + 100):
        program = Program(seed)
        player = Player(new_manager("lineage", program.capacity))
        for number, (operation, *expected) in enumerate(program.steps):
            assert player.play(operation) == expected, (seed, number, operation)
            if seed % 2:  # asking for the order flushes freed blocks into the policy; even seeds do without
                assert program.orders[number] == player.manager.inactive_blocks(), (seed, number, operation)
