"""Run the tests of a contract by hand, and collect mutants with the tests that they fail."""

import pytest


def names_of_tests(contract):
    return [name for name in dir(contract) if name.startswith("test_") and callable(getattr(contract, name))]


def failure_of(contract, name, *ends_in):
    """Return the failure message of a contract's test for its subject, or None if it passes.

    An exception that is not a failure of the test must be one of `ends_in`: otherwise a mutant that does not run at
    all would count as found.
    """
    try:
        getattr(contract(), name)()
    except (AssertionError, pytest.fail.Exception, *ends_in) as error:
        return f"{type(error).__name__}: {error}"
    return None


class Mutants:
    """Broken subjects of one contract, each a subclass of it; `breaks` names the tests that it must fail.

    A mutant may end these tests by its own exceptions, which `breaks` names as `ends_in`.
    """

    def __init__(self, contract):
        self.contract = contract
        self.cases = []

    def breaks(self, *names, ends_in=()):
        def note(mutant):
            assert set(names) <= set(names_of_tests(self.contract)), names
            self.cases.append((mutant, names, ends_in))
            return mutant

        return note

    def each(self):
        """Return the mutants for `parametrize`."""
        return [
            pytest.param(mutant, names, ends_in, id=f"{self.contract.__name__}-{mutant.__name__}")
            for mutant, names, ends_in in self.cases
        ]

    def never_failed(self):
        """Return the tests of the contract that no mutant fails."""
        return sorted(set(names_of_tests(self.contract)).difference(*(names for _, names, _ in self.cases)))
