"""Which moves a manager processes in runs, and which make it continue block by block. Other tests check the effects."""

from uuid import UUID

import pytest
from cache_helpers import POLICIES, event_rows, new_manager, state_of
from test_properties import CarefulManager

from pytest_kvmock import CapturingSink
from pytest_kvmock.engines.dynamo.cached_slots import CachedSlots
from pytest_kvmock.engines.dynamo.runs import Runs
from pytest_kvmock.values import Deref, MoveError, Promote, Use, lineage_hash, lineage_hashes

P1, P2 = (UUID(int=number, version=4) for number in (1, 2))


def use(*blocks, after=()):
    """Return a Use of a chain below another block."""
    full = [block for block in blocks if not isinstance(block, UUID)]
    parent = after[-1] if after else None
    return Use(list(blocks), full, lineage_hashes(full, parent=parent, start=len(after)), None, parent)


def promote(partial, *chain):
    *above, block = chain
    parent = above[-1] if above else None
    return Promote(partial, block, parent, block, lineage_hash(block, parent, len(above)))


def free(*blocks):
    return Deref(list(blocks))


def one_by_one(*blocks):
    return [Deref([block]) for block in blocks]


SCHEDULERS = {
    "a chain": [use(1, 2, 3), free(3, 2, 1)],
    "again": [use(1, 2, 3), free(3, 2, 1), use(1, 2, 3), free(3, 2, 1)],
    "two that part": [use(1, 2, 3), use(1, 4), free(3, 2, 1), free(4, 1)],
    "three that part": [use(1, 2, 3, 4), use(1, 2, 5), use(1, 6), free(4, 3, 2, 1), free(5, 2, 1), free(6, 1)],
    "a part of one": [use(1, 2, 3), free(3, 2, 1), use(1, 2), free(2, 1), use(1, 2, 3)],
    "a part of one, and on from there": [use(1, 2, 3), free(3, 2, 1), use(1, 4), free(4, 1), use(1, 2, 3)],
    "one by one": [use(1, 2, 3), *one_by_one(3, 2, 1), use(1, 2, 3)],
    "one by one over two runs": [use(1, 2), use(1, 3, 4), *one_by_one(4, 3, 1), *one_by_one(2, 1), use(1, 3, 4)],
    "one by one, and used between": [use(1, 2, 3, 4), *one_by_one(4, 3), use(1, 2, 5), *one_by_one(2, 1)],
    "the tail": [use(1, 2, 3, 4), free(4, 3), use(3, 4, after=[1, 2]), free(4, 3, 2, 1)],
    "in chunks": [use(1, 2), use(3, 4, after=[1, 2]), use(5, P1, after=[1, 2, 3, 4]), free(P1, 5, 4, 3, 2, 1)],
    "in chunks over what is cached": [
        use(1, 2, 3, 4),
        free(4, 3, 2, 1),
        use(1, 2),
        use(3, 9, after=[1, 2]),
        free(9, 3, 2, 1),
    ],
    "partial blocks": [use(P1), use(P1), *one_by_one(P1), use(P1), use(P2), free(P2, P1)],
    "a block is generated": [use(1, P1), promote(P1, 1, 2), use(P2), promote(P2, 1, 2, 3), free(3, 2, 1), use(1, 2, 3)],
    "the first block is generated": [use(P1), promote(P1, 1), free(1)],
    "two generate the same": [
        use(1, P1),
        use(1, P2),
        promote(P1, 1, 2),
        promote(P2, 1, 2),
        free(2, 1),
        use(1, 2, 3),
        free(2, 1),
    ],
    "one generates what is cached": [use(1, 2, 3), free(3, 2, 1), use(1, P1), promote(P1, 1, 2), free(2, 1)],
    "one below the middle of a chain": [use(1, 2, 3), use(1, P1), promote(P1, 1, 4), free(4, 1), free(3, 2, 1)],
    "evictions": [
        use(1, 2, 3, 4),
        free(4, 3, 2, 1),
        use(1, 5, 6, 7, 8, 9, 10),
        free(10, 9, 8, 7, 6, 5, 1),
        use(11, 12),
    ],
    "no room": [use(1, 2, 3, 4, 5, 6, 7, 8, 9), use(P1), free(8, 7, 6, 5, 4, 3, 2, 1), use(1, 2, P1)],
    "nothing": [use(), free(), use(1)],
}
ODD = {
    "a free from the root on": [use(1, 2, 3), free(1, 2, 3)],
    "a parent is freed before its child": [use(1, 2), use(1, 3), free(2), free(1), free(1)],
    "so it is, of what was used again": [
        use(1, 2),
        use(1, 3),
        free(3, 1),
        free(2, 1),
        use(1, 2),
        free(1),
    ],
    "so it is, one by one": [use(1, 2), use(1, 3), *one_by_one(1, 1)],
    "so it is, where two hold it": [use(1, 2, 3), use(1, 2, 4), free(2, 1), free(2, 1)],
    "one by one, and not the next one": [use(1, 2, 3, 4), *one_by_one(4, 2)],
    "one by one, and not the next one but one": [use(1, 2, 3, 4), *one_by_one(4, 3, 1)],
    "a block twice in a free": [use(1, 2), use(1, 2), free(2, 2)],
    "partial blocks amid others": [use(1, P1, 2)],
    "two partial blocks": [use(1, P1, P2)],
    "roots together": [Use([1, 2], [1, 2], [lineage_hash(1, None, 0), lineage_hash(2, None, 0)])],
    "a chain that begins in the middle": [Use([3], [3], [lineage_hash(3, 2, 2)])],
    "below a block that nobody uses": [use(1, 2), free(2, 1), use(3, after=[1, 2])],
    "below a block that is not cached": [use(3, after=[1, 2])],
    "below the middle of a run": [use(1, 2, 3), use(4, after=[1])],
    "a lineage hash of another name": [Use([1], [1], [lineage_hash(2, None, 0)])],
    "another name of a cached block": [use(1), Use([7], [7], [lineage_hash(1, None, 0)])],
    "a block below another parent": [use(1, 2), use(3, 2)],
    "a block below another parent that is hit": [use(1), use(3, 2), use(3, 4), use(1, 2)],
    "one name twice": [use(1, 2, 1)],
    "names that share their low bits": [use(1), use(1 + 2**60)],
    "so they do in one Use": [use(1, 1 + 2**55)],
    "a generated block below one that is not in use": [use(1, P1), free(P1, 1), use(P1), promote(P1, 1, 2)],
    "a generated block below one that is not cached": [use(P1), promote(P1, 1, 2)],
    "a generated block with another lineage hash": [use(1, P1), Promote(P1, 2, 1, 2, lineage_hash(2, 1, 2))],
    "a generated block that is cached elsewhere": [use(5, 6), use(1, P1), promote(P1, 1, 6)],
    "a generated block that begins a run elsewhere": [use(5, 6), use(5, 7), use(1, P1), promote(P1, 1, 6)],
}


def play(backend, moves):
    """Play moves in runs and block by block with the same effect; return the manager that started in runs."""
    in_runs = new_manager(backend, 8)
    careful = CarefulManager(backend=backend, eviction=POLICIES[backend](8), num_blocks=8, sink=CapturingSink())
    for move in moves:
        assert careful.process(move) == in_runs.process(move)
    assert state_of(careful) == state_of(in_runs)
    assert list(careful.resident()) == list(in_runs.resident())
    assert careful.metrics() == in_runs.metrics()
    assert event_rows(careful.sink.events) == event_rows(in_runs.sink.events)
    return in_runs


@pytest.mark.parametrize("backend", ["lineage", "lru"])
@pytest.mark.parametrize("case", SCHEDULERS)
def test_the_moves_of_a_scheduler_are_processed_in_runs(case, backend):
    assert isinstance(play(backend, SCHEDULERS[case])._form, Runs)


@pytest.mark.parametrize("backend", ["lineage", "lru"])
@pytest.mark.parametrize("case", ODD)
def test_a_move_that_no_scheduler_makes_is_processed_block_by_block(case, backend):
    *before, last = ODD[case]
    assert isinstance(play(backend, before)._form, Runs)
    assert isinstance(play(backend, [*before, last])._form, CachedSlots)


def test_a_manager_in_runs_stays_in_runs_after_a_refused_move():
    manager = new_manager("lineage", 8)
    manager.process(use(1, 2))
    for move in (free(3), free(2, 2), free("x"), Deref(5), Use([3], [3], ["x"]), Promote(P1, 3)):
        with pytest.raises(ValueError, match=r"Deref|Use|Promote"):
            manager.process(move)
    assert isinstance(manager._form, Runs)


def test_references_are_counted_when_blocks_of_a_run_are_freed_one_by_one():
    manager = new_manager("lru", 8)
    manager.process(use(1, 2, 3))
    manager.process(use(1, 2))
    manager.process(Deref([3]))
    assert [manager.references(block) for block in (1, 2, 3, 4)] == [2, 2, 0, 0]
    manager.process(Deref([2]))
    assert [manager.references(block) for block in (1, 2)] == [2, 1]
    manager.process(Deref([1]))
    assert manager.active_blocks == {1: 1, 2: 1}
    assert (manager.inactive_blocks(), manager.num_inactive_blocks) == ([3], 1)
    plhs = lineage_hashes([1, 2, 3])
    assert [(plh, True) for plh in plhs] == manager.check_presence(plhs)
    assert isinstance(manager._form, Runs)


def test_a_block_evicted_within_a_run_is_not_cached():
    manager = new_manager("lineage", 4)
    manager.process(use(1, 2, 3, 4))
    assert manager.references(4) == 1
    manager.process(free(4, 3, 2, 1))
    manager.process(use(5, 6))
    with pytest.raises(MoveError, match="parent 4 is not cached"):
        manager.use([7], parent=4)
    assert isinstance(manager._form, Runs)


def test_a_cleared_manager_processes_new_moves_in_runs():
    manager = new_manager("lru", 4)
    for first in (10, 20):
        manager.process(use(*range(first, first + 4)))
        manager.process(free(*reversed(range(first, first + 4))))
        assert manager.clear()
    manager.process(use(1, 2, 3))
    manager.process(free(3, 2, 1))
    manager.process(use(4, 5))
    assert [[row[0], row[2]] for row in event_rows(manager.sink.events) if row[0] == "R"] == [["R", [3]]]
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (2, 2)
    assert isinstance(manager._form, Runs)
