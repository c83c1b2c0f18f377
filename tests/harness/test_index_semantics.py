"""What a Cleared empties: the rank that published it, or, in an older Dynamo, all ranks of its worker."""

import pytest

from pytest_kvmock import RadixIndex, RouterHarness
from pytest_kvmock.events import Cleared, Removed, Stored
from pytest_kvmock.router.index import RadixIndexError

ONE = Stored(None, (1, 2), (1, 2))


def two_ranks(index=None, semantics=None, **options):
    kv = RouterHarness(index=index, sync="every", index_semantics=semantics, **options)
    for rank in (0, 1):
        kv.apply(ONE, dp_rank=rank)
    kv.apply(ONE, worker_id=1)
    kv.apply(Cleared())
    return kv


def test_a_cleared_empties_its_rank_or_with_e1_all_ranks_of_the_worker():
    kv = two_ranks()
    assert (None, {(0, 1): 2, 1: 2}) == (kv.recording.index_semantics, kv.overlap_for_hashes([1, 2]))
    kv = two_ranks(semantics="e1")
    assert ("e1", {1: 2}) == (kv.recording.index_semantics, kv.overlap_for_hashes([1, 2]))


@pytest.mark.parametrize("survive", [(), ["lose"]], ids=["plain", "surviving"])
@pytest.mark.parametrize("semantics", [None, "e1"])
def test_an_index_of_the_same_semantics_is_right_and_another_drifts(semantics, survive):
    other = "e1" if semantics is None else None
    assert [] == two_ranks(RadixIndex(semantics=semantics), semantics, survive=survive).judge().errors
    rules = {
        problem.rule for problem in two_ranks(RadixIndex(semantics=other), semantics, survive=survive).judge().errors
    }
    assert {"index_drift"} == rules


class Refuses(RadixIndex):
    refused = 0

    def apply(self, event):
        try:
            super().apply(event)
        except RadixIndexError:
            self.refused += 1
            raise


def test_an_index_may_refuse_what_an_e1_cleared_of_another_rank_has_taken():
    """The engine is right: its other rank still holds the parent."""
    index = Refuses(semantics="e1")
    kv = two_ranks(index, "e1")
    kv.apply([Stored(2, (3,), (3,)), Removed((2,))], dp_rank=1)
    assert 2 == index.refused
    assert [] == kv.judge().errors
