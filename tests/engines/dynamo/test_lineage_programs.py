"""Blocks that are used again without those around them: `lineage` evicts as a plain model of it does."""

import pytest
from cache_helpers import Player, new_manager
from depth import few
from plain_lineage import Program

from pytest_kvmock import Removed


def test_a_block_that_is_due_becomes_evictable_when_its_last_child_is_used_again():
    manager = new_manager("lineage", 4)
    manager.use([1, 2, 3])
    for block in (1, 2, 3):  # root first: 1 and 2 wait for the blocks below them
        manager.deref(block)
    manager.use([7])
    manager.deref(7)
    manager.use([8])  # evicts 3; the turn of 1 has come, and 2 hangs below it
    manager.use([2])  # now nothing hangs below 1, and nothing was evicted
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
            if seed % 2:  # to ask for the order brings what was freed to the policy: the others do without
                assert program.orders[number] == player.manager.inactive_blocks(), (seed, number, operation)
