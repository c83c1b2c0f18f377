"""One worker holds two blocks with the same tokens; right indexes may differ there."""

import sys
from pathlib import Path

import pytest

from pytest_kvmock import EngineProfile, KvCacheEvent, Removed, RouterEvent, RouterHarness, Stored

sys.path.append(str(Path(__file__).parents[2] / "examples" / "own_index"))

from test_index_by_hashes import HashIndex

A, B, C = 101, 102, 103  # local hashes


class Forgetful(HashIndex):
    """Forgets every block at once."""

    def find_matches(self, local_hashes):
        return dict.fromkeys(super().find_matches(local_hashes), 0)


class Generous(HashIndex):
    """Finds every block of any lookup."""

    def find_matches(self, local_hashes):
        return {rank: len(local_hashes) for rank in super().find_matches(local_hashes)}


def drifts(index):
    steps = [
        Stored(None, (1, 2), (A, B)),
        Stored(1, (9,), (B,)),  # as 2, under another name
        Stored(9, (10,), (C,)),
        Removed((2,)),
    ]
    kv = RouterHarness(EngineProfile(block_size=4), index=index, name="alike")
    sink = kv.make_sink()
    for number, data in enumerate(steps):
        sink(RouterEvent(0, KvCacheEvent(number, data)))
    kv.judge()
    return [problem.event_id for problem in kv.events.errors if problem.rule == "index_drift"]


def test_an_index_that_has_both_blocks_of_the_same_tokens_is_right():
    assert drifts(HashIndex()) == []


@pytest.mark.parametrize("index", [Forgetful, Generous])
def test_an_index_that_returns_fewer_or_more_blocks_than_are_held_is_wrong(index):
    assert drifts(index())
