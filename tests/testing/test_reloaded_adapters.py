"""`adapter_loaded(name, path)` of an index: it must forget the adapter's blocks after a reload from another path."""

import pytest
from untold_indexes import DropsAllAdapters, DropsOnReload, KeepsAll

from pytest_kvmock import RadixIndex
from pytest_kvmock.testing import IndexContract

NAME = "test_an_adapter_of_another_path_promises_nothing_of_before"


def contract(make):
    return type("TestIt", (IndexContract,), {"make_index": lambda self: make()})()


def test_an_index_that_drops_the_blocks_of_a_reloaded_adapter_passes():
    getattr(contract(DropsOnReload), NAME)()


@pytest.mark.parametrize(
    ("make", "text"), [(KeepsAll, "expected {}, the index answered"), (DropsAllAdapters, "tenant-b")]
)
def test_an_index_that_keeps_a_reloaded_adapter_is_found(make, text):
    with pytest.raises(AssertionError, match=text):
        getattr(contract(make), NAME)()


def test_an_index_that_is_not_notified_of_reloads_is_not_judged():
    with pytest.raises(pytest.skip.Exception, match=r"RadixIndex has no adapter_loaded\(name, path\)"):
        getattr(contract(RadixIndex), NAME)()
