"""An index that forgets nodes of removed blocks changes only its memory."""

from __future__ import annotations

import gc
from itertools import product
from random import Random

import pytest

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, Stored
from pytest_kvmock.oracle import RadixIndex, RadixIndexError
from pytest_kvmock.oracle.index import tree

BLOCKS, LOCALS, DEPTH = range(100, 108), range(3), 3


def program(seed, length=60):
    """Yield events of no real engine: one name in several places, several names in one, parents removed first."""
    rng = Random(seed)
    for number in range(length):
        worker = rng.randrange(2)
        kind = rng.random()
        if kind < 0.55:
            parent = rng.choice([None, *BLOCKS])
            count = rng.randint(1, 2)
            data = Stored(parent, tuple(rng.sample(BLOCKS, count)), tuple(rng.choices(LOCALS, k=count)))
        else:
            data = Removed(tuple(rng.sample(BLOCKS, rng.randint(1, 3)))) if kind < 0.97 else Cleared()
        yield RouterEvent(worker, KvCacheEvent(number, data))


def answers(seed):
    """Yield the answer or error of an index after each event."""
    index = RadixIndex()
    for event in program(seed):
        try:
            index.apply(event)
            raised = None
        except RadixIndexError as error:
            raised = str(error)
        chains = (chain for depth in range(1, DEPTH + 1) for chain in product(LOCALS, repeat=depth))
        yield raised, [index.find_matches(chain).scores for chain in chains], len(index.dump_events())


@pytest.mark.parametrize("seed", range(4))
def test_an_index_that_forgets_nodes_at_once_gives_the_same_answers(seed, monkeypatch):
    forgetting_late = list(answers(seed))
    monkeypatch.setattr(tree, "_DEAD", 0)
    assert forgetting_late == list(answers(seed))


def nodes():
    """Return the number of nodes in this process."""
    gc.collect()
    return sum(type(each) is tree.Node for each in gc.get_objects())


@pytest.mark.parametrize("least", [0, 2**64 - 2_000])
def test_an_index_keeps_few_nodes_of_removed_blocks(least):
    before = nodes()
    index = RadixIndex()
    index.apply(RouterEvent(0, KvCacheEvent(0, Stored(None, (1,), (1,)))))
    for block in range(2, 2_000):
        for number, data in enumerate((Stored(1, (block,), (least + block,)), Removed((block,)))):
            index.apply(RouterEvent(0, KvCacheEvent(2 * block + number, data)))
    assert index.num_blocks(0) == 1
    assert nodes() - before < 500
