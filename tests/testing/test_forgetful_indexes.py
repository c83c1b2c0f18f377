"""Indexes that keep, queue, leak or mix up: each right one passes; the wrong ones are among the mutants."""

import pytest
from contract_runs import failure_of
from forgetful_indexes import RIGHT

from pytest_kvmock import RadixIndex
from pytest_kvmock.testing import IndexContract


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_index_passes_its_tests(name):
    contract, *tests = RIGHT[name]
    failures = {}
    for test in tests:
        try:
            failures[test] = failure_of(contract, test)
        except pytest.skip.Exception:
            failures[test] = None
    assert failures == dict.fromkeys(tests)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"keeps": "recently_used"},
            "keeps = 'recently_used' is for an index that forgets: set bounded, too, the blocks that it keeps at least",
        ),
        ({"keeps": "lru", "bounded": 9}, "keeps must be 'recently_used' or 'recently_stored', or None, got 'lru'"),
        ({"async_bound": 100}, "async_bound must be True or False, got 100"),
    ],
)
def test_a_wrong_declaration_is_refused_in_one_line(declared, message):
    contract = type("TestMine", (IndexContract,), {"make_index": lambda self: RadixIndex(), **declared})
    with pytest.raises(pytest.fail.Exception, match=r"^TestMine: ") as failed:
        contract().test_a_new_index_is_empty()
    assert failed.value.msg == f"TestMine: {message}"


def test_a_wrong_declaration_is_reported_at_collection(pytester):
    pytester.makepyfile("""
        from pytest_kvmock import RadixIndex
        from pytest_kvmock.testing import IndexContract

        class TestMine(IndexContract):
            keeps = "recently_used"

            def make_index(self):
                return RadixIndex()

        def test_another():
            pass
    """)
    result = pytester.runpytest("--continue-on-collection-errors")
    result.assert_outcomes(errors=1, passed=1)
    assert [each for each in result.outlines if each.startswith("TestMine")] == [
        (
            "TestMine: keeps = 'recently_used' is for an index that forgets: set bounded, too, the blocks that it "
            "keeps at least"
        )
    ]
