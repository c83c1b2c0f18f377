"""Running the tests of a contract by hand, and mutants that say which of them they fail."""

import pytest


def names_of_tests(contract):
    return [name for name in dir(contract) if name.startswith("test_")]


def failure_of(contract, name):
    """What a test of a contract says against its subject; None when it passes."""
    try:
        getattr(contract(), name)()
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - whatever a broken subject comes to
        return f"{type(error).__name__}: {error}"
    return None


class Mutants:
    """Broken subjects of one contract, each a subclass of it; `breaks` names the tests that it must fail."""

    def __init__(self, contract):
        self.contract = contract
        self.cases = []

    def breaks(self, *names):
        def note(mutant):
            assert set(names) <= set(names_of_tests(self.contract)), names
            self.cases.append((mutant, names))
            return mutant

        return note

    def each(self):
        """The mutants, for `parametrize`."""
        return [
            pytest.param(mutant, names, id=f"{self.contract.__name__}-{mutant.__name__}")
            for mutant, names in self.cases
        ]

    def never_failed(self):
        """Tests of the contract that no mutant fails."""
        return sorted(set(names_of_tests(self.contract)).difference(*(names for _, names in self.cases)))
