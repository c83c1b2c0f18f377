"""Each contract finds broken subjects: mutants with the names of the tests that they must fail."""

import pytest
from contract_runs import failure_of
from depth import few
from mutants_indexes import INDEXES
from mutants_managers import MANAGERS
from mutants_policies import POLICIES
from mutants_workers import WORKERS

ALL = [POLICIES, MANAGERS, WORKERS, INDEXES]


@pytest.mark.parametrize(("mutant", "names", "ends_in"), few((case for mutants in ALL for case in mutants.each()), 40))
def test_a_mutant_fails_the_tests_of_its_fault(mutant, names, ends_in):
    assert [name for name in names if failure_of(mutant, name, *ends_in) is None] == []


@pytest.mark.parametrize("mutants", ALL, ids=lambda mutants: mutants.contract.__name__)
def test_every_test_of_a_contract_can_fail(mutants):
    assert mutants.never_failed() == []


@pytest.mark.parametrize("mutants", ALL, ids=lambda mutants: mutants.contract.__name__)
def test_each_contract_has_at_least_five_mutants(mutants):
    assert len(mutants.cases) >= 5
