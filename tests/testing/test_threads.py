"""Indexes that receive events from several threads: each wrong one is found in each run, and no right one is."""

import pytest
from contract_runs import failure_of
from depth import DEEP, worth_its_time
from threaded_indexes import RIGHT, WRONG, Holders

from pytest_kvmock import RadixIndex
from pytest_kvmock.testing import IndexContract

AT_ONCE = "test_events_may_come_from_threads"


def contract_of(kind, **body):
    return type("TestMine", (IndexContract,), {"threads": True, "make_index": lambda self: kind(), **body})


@pytest.mark.parametrize("kind", WRONG)
def test_an_index_with_an_interrupted_critical_section_is_found_in_each_run(kind):
    assert [run for run in range(20 if DEEP else 2) if failure_of(contract_of(kind), AT_ONCE) is None] == []


@worth_its_time
@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_index_passes_in_each_run(kind):
    assert [failure for run in range(20 if DEEP else 1) if (failure := failure_of(contract_of(kind), AT_ONCE))] == []


@worth_its_time
def test_an_index_without_remove_worker_receives_events_from_threads_too():
    class Keeps(Holders):
        remove_worker = None

    assert failure_of(contract_of(Keeps), AT_ONCE) is None


@pytest.mark.parametrize(
    ("method", "shown"), [("apply", "apply raised OSError: no"), ("remove_worker", "remove_worker raised OSError: no")]
)
def test_an_exception_of_an_index_in_a_thread_is_shown(method, shown):
    class Raises(Holders):
        pass

    def raises(self, given):
        if method == "remove_worker" or given.worker_id == 2:
            raise OSError("no")
        Holders.apply(self, given)

    setattr(Raises, method, raises)
    failure = failure_of(contract_of(Raises), AT_ONCE)
    assert failure.endswith(f": {shown}")
    assert "6 workers published" in failure


def test_tests_of_threads_are_skipped_unless_they_are_declared():
    with pytest.raises(pytest.skip.Exception) as skipped:
        getattr(contract_of(RadixIndex, threads=False)(), AT_ONCE)()
    assert skipped.value.msg == (
        "TestMine.threads is not set: events of several workers that are applied at once were not checked"
    )
