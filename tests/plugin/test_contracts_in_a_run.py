"""Contracts in a run of pytest, as a third party uses them: inherited by a test class."""

import ast
from pathlib import Path

from pytest_kvmock import testing

SOURCE = """
from pytest_kvmock import BackendSpec, RadixIndex, create_manager
from pytest_kvmock.testing import IndexContract, WorkerContract, EvictionContract

class Forgetful(RadixIndex):
    def apply(self, event):
        if not isinstance(event.event.data, Cleared):
            super().apply(event)

class TestForgetful(IndexContract):
    def make_index(self):
        return Forgetful()

class TestNothing(EvictionContract):
    def make_policy(self):
        return {}
"""


def test_only_subclasses_of_a_contract_are_collected(ids):
    found = ids(SOURCE)
    assert {name.partition("::")[0] for name in found} == {"TestForgetful", "TestNothing"}
    assert "TestForgetful::test_a_cleared_worker_has_nothing" in found


def test_a_broken_promise_is_one_failed_test_without_frames_of_the_plugin(nested):
    result = nested(SOURCE, "-k", "TestForgetful and test_a_cleared_worker")

    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            ">       index.expect(*abcd*, {1: 3})",
            "E       AssertionError: looked up abcd: expected {1: 3}, the index answered {(1, 0): 3, (0, 0): 4}",
            "E *the index was given, in this order:",
            "E * worker 0 stored abcd",
            "E * worker 0 stored xy",
            "E * worker 1 stored abc",
            "E * worker 0 cleared all",
        ]
    )
    result.stdout.no_fnmatch_line("*index_driver.py*")
    result.stdout.no_fnmatch_line("E *assert *")
    result.stdout.no_fnmatch_line("E *where *")


def test_pytest_does_not_rewrite_the_assertions_of_a_contract():
    """Pytest rewrites the modules of a plugin unless their docstring forbids it."""
    for path in sorted(Path(testing.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        says = any(isinstance(node, ast.Assert) and node.msg is not None for node in ast.walk(tree))
        assert says == ("PYTEST_DONT_REWRITE" in (ast.get_docstring(tree) or "")), path.name


def test_a_subject_that_contradicts_its_declaration_is_one_line_per_test(nested):
    result = nested(SOURCE, "-k", "TestNothing and test_order")

    result.assert_outcomes(failed=2)
    lines = [line for line in result.outlines if line.startswith("TestNothing: ")]
    assert [line.partition(":")[0] + ":" + line.partition(":")[2].partition(":")[0] for line in lines] == [
        "TestNothing: make_policy gave {} (dict), which is not an EvictionPolicy"
    ] * 2
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line(">*")


def test_a_contract_works_with_a_backend_of_a_conftest(nested):
    conftest = """
        from pytest_kvmock import BackendSpec, create_manager

        def make(**sizes):
            manager = create_manager("lru", **sizes)
            manager.backend = "mine"
            return manager

        def pytest_kvmock_backends():
            return {"mine": BackendSpec("mine", "nobody", make)}
    """
    source = """
        from pytest_kvmock.testing import WorkerContract

        class TestMine(WorkerContract):
            backend = "mine"
    """
    result = nested(source, "-k", "cached", files={"conftest.py": conftest})

    assert result.parseoutcomes()["passed"] >= 5
    assert "failed" not in result.parseoutcomes()
