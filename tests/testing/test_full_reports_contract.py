"""`IndexContract.full_reports`: right indexes in both readings pass, and each wrong one is found by name."""

import pytest
from contract_runs import failure_of
from depth import each_parameter
from forgetful_indexes import over
from reporting_indexes import REPORTED

from pytest_kvmock import RadixIndex
from pytest_kvmock.testing import IndexContract
from pytest_kvmock.testing.index.full_reports import FullReports

TESTS = [name for name in vars(FullReports) if name.startswith("test_")]


class Counting(RadixIndex):
    def __init__(self):
        super().__init__(count_copies=True)


class Ruled(RadixIndex):
    def __init__(self):
        super().__init__(count_copies=True, full_reports=True)


@pytest.mark.parametrize("make", [RadixIndex, Counting, Ruled])
@each_parameter
def test_an_index_in_either_reading_of_reports_passes(make, capsys):
    contract = over(make, full_reports=True)
    assert [name for name in TESTS if failure_of(contract, name) is not None] == []
    assert capsys.readouterr().out.startswith("full reports: answered as ")


@pytest.mark.parametrize(("mutant", "names", "ends_in"), REPORTED.each())
@each_parameter
def test_a_wrong_index_of_full_reports_is_found(mutant, names, ends_in):
    assert [name for name in names if failure_of(mutant, name, *ends_in) is None] == []


def test_full_reports_are_not_judged_unless_they_are_declared():
    class TestIt(IndexContract):
        def make_index(self):
            return RadixIndex()

    with pytest.raises(pytest.skip.Exception, match="full_reports is False: streams of requests that carry full"):
        TestIt().test_a_report_is_no_more_than_a_copy()
