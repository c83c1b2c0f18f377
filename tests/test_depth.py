"""How deep a run of these tests looks, and which of them are a smoke of a room."""

from pathlib import Path
from types import SimpleNamespace

import depth
import pytest

HERE = Path(__file__).parent


def test_a_deep_run_tries_all(monkeypatch):
    monkeypatch.setattr(depth, "DEEP", True)
    assert (100, range(20), [1, 2, 3]) == (depth.examples(100), depth.seeds(20), depth.few([1, 2, 3]))


def test_a_quick_run_tries_a_tenth_and_the_first_seeds(monkeypatch):
    monkeypatch.setattr(depth, "DEEP", False)
    assert (30, range(5)) == (depth.examples(300), depth.seeds(20))


def test_a_quick_run_tries_no_more_than_a_deep_one_and_no_less_than_ten(monkeypatch):
    monkeypatch.setattr(depth, "DEEP", False)
    assert [10, 10, 7] == [depth.examples(deep) for deep in (30, 10, 7)]
    assert range(2) == depth.seeds(2)


@pytest.mark.parametrize(("quick", "expected"), [(1, [0]), (2, [0, 5]), (3, [0, 3, 6]), (10, list(range(10)))])
def test_a_quick_run_tries_few_of_many_alike_spread_over_all(monkeypatch, quick, expected):
    monkeypatch.setattr(depth, "DEEP", False)
    assert expected == depth.few(range(10), quick)


def test_a_quick_run_tries_all_where_there_are_no_more(monkeypatch):
    monkeypatch.setattr(depth, "DEEP", False)
    assert ["a", "b"] == depth.few(iter("ab"), 3)


@pytest.fixture
def left(pytestconfig):
    """The ids that are left of some, with `--smoke` or without."""
    conftest = pytestconfig.pluginmanager.get_plugin(str(HERE / "conftest.py"))

    def run(*ids, smoke=True):
        items = [SimpleNamespace(path=HERE.parent / each.partition("::")[0], nodeid=each) for each in ids]
        hook = SimpleNamespace(pytest_deselected=lambda items: None)
        conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: smoke, hook=hook), items)
        return [item.nodeid for item in items]

    return run


@pytest.mark.parametrize("room", ["tests/cache/vllm/test_a.py", "examples/a/test_a.py"])
def test_a_smoke_of_a_room_and_of_the_examples_is_each_test_once(left, room):
    found = left(f"{room}::test[1]", f"{room}::test[2]", f"{room}::TestC::test[1]", f"{room}::test_other")
    assert [f"{room}::test[1]", f"{room}::TestC::test[1]", f"{room}::test_other"] == found


@pytest.mark.parametrize("file", ["tests/plugin/test_a.py", "tests/test_a.py"])
def test_a_smoke_has_all_of_the_plugin_and_the_top_level(left, file):
    assert [f"{file}::test[1]", f"{file}::test[2]"] == left(f"{file}::test[1]", f"{file}::test[2]")


def test_without_the_option_all_are_left(left):
    ids = ["tests/cache/test_a.py::test[1]", "tests/cache/test_a.py::test[2]"]
    assert ids == left(*ids, smoke=False)
