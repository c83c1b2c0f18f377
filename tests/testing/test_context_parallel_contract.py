"""`IndexContract.dcp`: an index that is given the page size detects the block size, or refuses larger blocks."""

import pytest
from untold_indexes import DropsLargerBlocks

from pytest_kvmock import RadixIndex, Stored
from pytest_kvmock.testing import IndexContract

NAME = "test_a_block_of_several_pages_is_found"


class RefusesLargerBlocks(DropsLargerBlocks):
    def apply(self, event):
        if isinstance(event.event.data, Stored) and any(len(each) != self.block_size for each in event.token_ids):
            raise ValueError("blocks of another size than the page")
        super().apply(event)


def contract(make, **attributes):
    return type("TestIt", (IndexContract,), {"block_size": 64, "make_index": make, **attributes})()


@pytest.mark.parametrize(
    "make",
    [lambda self: RadixIndex(), lambda self, block_size: RefusesLargerBlocks(block_size)],
    ids=["finds out", "refuses"],
)
def test_an_index_that_detects_or_refuses_larger_blocks_passes(make):
    getattr(contract(make, dcp=4), NAME)()


def test_an_index_that_assumes_the_page_size_is_found():
    with pytest.raises(AssertionError):
        getattr(contract(lambda self, block_size: DropsLargerBlocks(block_size), dcp=4), NAME)()


@pytest.mark.parametrize(("dcp", "text"), [(3, "dcp must divide block_size, 64 tokens, into pages; got 3")])
def test_pages_that_are_not_part_of_a_block_are_refused(dcp, text):
    with pytest.raises(pytest.fail.Exception, match=text):
        getattr(contract(lambda self: RadixIndex(), dcp=dcp), NAME)()


def test_context_parallelism_is_not_judged_unless_it_is_declared():
    with pytest.raises(pytest.skip.Exception, match="dcp is 1: an index that is given the page"):
        getattr(contract(lambda self: RadixIndex()), NAME)()
