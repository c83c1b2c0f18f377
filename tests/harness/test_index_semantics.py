"""A Cleared empties the rank that published it or, in an older Dynamo, all ranks of its worker."""

import pytest

from pytest_kvmock import Cleared, Prompt, RadixIndex, Removed, RouterHarness, Stored
from pytest_kvmock.oracle import RadixIndexError

ONE = Stored(None, (1, 2), (1, 2))


def two_ranks(index=None, clears="rank", **options):
    kv = RouterHarness(index=index, sync="every", clears=clears, **options)
    for rank in (0, 1):
        kv.apply(ONE, dp_rank=rank)
    kv.apply(ONE, worker_id=1)
    kv.apply(Cleared())
    return kv


def test_a_cleared_empties_its_rank_or_all_ranks_of_its_worker():
    kv = two_ranks()
    assert (kv.recording.clears, kv.overlap(Prompt(hashes=[1, 2]))) == ("rank", {(0, 1): 2, 1: 2})
    kv = two_ranks(clears="worker")
    assert (kv.recording.clears, kv.overlap(Prompt(hashes=[1, 2]))) == ("worker", {1: 2})


@pytest.mark.parametrize("survive", [(), ["lose"]], ids=["plain", "surviving"])
@pytest.mark.parametrize("clears", ["rank", "worker"])
def test_an_index_with_the_same_rule_of_cleared_is_right_and_with_the_other_drifts(clears, survive):
    other = "worker" if clears == "rank" else "rank"
    assert two_ranks(RadixIndex(clears=clears), clears, survive=survive).judge().errors == []
    rules = {problem.rule for problem in two_ranks(RadixIndex(clears=other), clears, survive=survive).judge().errors}
    assert rules == {"index_drift"}


class Refuses(RadixIndex):
    refused = 0

    def apply(self, event):
        try:
            super().apply(event)
        except RadixIndexError:
            self.refused += 1
            raise


def test_an_index_may_raise_on_blocks_that_a_cleared_of_another_rank_removed():
    """The engine is right: its other rank still holds the parent."""
    index = Refuses(clears="worker")
    kv = two_ranks(index, "worker")
    kv.apply([Stored(2, (3,), (3,)), Removed((2,))], dp_rank=1)
    assert index.refused == 2
    assert kv.judge().errors == []
