"""The depth of a run of these tests, which tests a quick run has, and how long each may take."""

from pathlib import Path

import depth
import pytest

HERE = Path(__file__).parent


def test_a_deep_run_tries_everything(monkeypatch):
    monkeypatch.setattr(depth, "DEEP", True)
    assert (100, range(20), [1, 2, 3]) == (depth.examples(100), depth.seeds(20), depth.few([1, 2, 3]))


def test_a_quick_run_tries_a_tenth_and_the_first_seeds(monkeypatch):
    monkeypatch.setattr(depth, "DEEP", False)
    assert (30, range(5)) == (depth.examples(300), depth.seeds(20))


def test_a_quick_run_tries_at_least_ten_examples_but_no_more_than_a_deep_run(monkeypatch):
    monkeypatch.setattr(depth, "DEEP", False)
    assert [depth.examples(deep) for deep in (30, 10, 7)] == [10, 10, 7]
    assert range(2) == depth.seeds(2)


@pytest.mark.parametrize(("quick", "expected"), [(1, [0]), (2, [0, 5]), (3, [0, 3, 6]), (10, list(range(10)))])
def test_a_quick_run_tries_few_of_many_similar_values_spread_over_all(monkeypatch, quick, expected):
    monkeypatch.setattr(depth, "DEEP", False)
    assert depth.few(range(10), quick) == expected


def test_a_quick_run_tries_all_values_if_there_are_few(monkeypatch):
    monkeypatch.setattr(depth, "DEEP", False)
    assert depth.few(iter("ab"), 3) == ["a", "b"]


FILE = """
import pytest

@pytest.fixture(params=["x", "y"])
def axis(request): return request.param

@pytest.mark.parametrize("value", [1, 2, 3])
def test_value(value): pass

@pytest.mark.parametrize("value", [1, 2])
def test_of_an_axis(axis, value): pass

@pytest.mark.each_parameter
@pytest.mark.parametrize("value", [1, 2])
def test_each(value): pass

def test_none(): pass

def test_of_a_matrix(kv_backend): pass
"""


@pytest.fixture
def conftest(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin(str(HERE / "conftest.py"))


@pytest.fixture
def hooks_of(conftest, monkeypatch):
    """Return a maker of a plugin with some of the hooks of these tests, in a quick run or in a deep one."""

    def make(*names, deep):
        monkeypatch.setattr(conftest, "DEEP", deep)
        hooks = {f"pytest_{name}": staticmethod(getattr(conftest, f"pytest_{name}")) for name in names}
        return type("Hooks", (), hooks)()

    return make


@pytest.fixture
def collected(conftest, hooks_of, pytester, monkeypatch):
    """Return a function that collects FILE at a path below `tests/` and returns the names of its tests."""

    def run(path, *, deep):
        monkeypatch.setattr(conftest, "HERE", pytester.path)
        file = pytester.path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(FILE)
        plugin = hooks_of("generate_tests", "configure", deep=deep)
        options = ("--collect-only", "--kv-backend=lru", "--kv-backend=multi_lru", "-p", "no:asyncio")
        result = pytester.inline_run(file, *options, plugins=[plugin])
        return [call.item.name for call in result.getcalls("pytest_itemcollected")]

    return run


ALL = ["test_value[1]", "test_value[2]", "test_value[3]"]
ALL += [f"test_of_an_axis[{axis}-{value}]" for axis in "xy" for value in (1, 2)]
ALL += ["test_each[1]", "test_each[2]", "test_none", "test_of_a_matrix[lru]", "test_of_a_matrix[multi_lru]"]
FIRST = ["test_value[1]", "test_of_an_axis[x-1]", "test_each[1]", "test_each[2]", "test_none", "test_of_a_matrix[lru]"]


def test_a_quick_run_of_a_folder_has_each_test_with_its_first_parameters(collected):
    assert sorted(collected("engines/vllm/test_a.py", deep=False)) == sorted(FIRST)


@pytest.mark.parametrize("path", ["plugin/test_a.py", "test_a.py"])
def test_a_quick_run_has_all_tests_of_the_plugin_and_the_top_level(collected, path):
    assert sorted(collected(path, deep=False)) == sorted(ALL)


def test_a_deep_run_of_a_folder_has_all_tests(collected):
    assert sorted(collected("engines/vllm/test_a.py", deep=True)) == sorted(ALL)


def test_a_class_for_deep_runs_is_not_collected_in_a_quick_run(monkeypatch):
    for deep in (True, False):
        monkeypatch.setattr(depth, "DEEP", deep)
        assert depth.only_deep(type("TestIt", (), {})).__test__ is deep


LONG = """
import pytest
def test_long(): pass
@pytest.mark.worth_its_time
def test_worth(): pass
def test_short(): pass
"""


QUICK, SLOW = 1.5, 2.5  # limits at the speed of a machine, in s


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (("quick", QUICK, "--most-cpu"), 1),
        (("quick", SLOW, "--most-cpu"), 0),
        (("quick", QUICK), 0),
        (("deep", QUICK, "--most-cpu"), 0),
    ],
)
def test_a_quick_lane_fails_for_a_slow_test_without_a_mark(conftest, hooks_of, pytester, run, code):
    names = ("configure", "addoption", "runtest_protocol", "runtest_makereport", "terminal_summary")
    which, limit_s, *options = run
    plugin = hooks_of(*names, deep=which == "deep")
    around_each_test = iter([0.0, 2.0, 2.0, 4.0, 4.0, 5.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conftest, "cpu_s", around_each_test.__next__)
        patch.setattr(conftest, "most_cpu_now", lambda: limit_s)
        result = pytester.inline_run(pytester.makepyfile(LONG), "-p", "no:asyncio", *options, plugins=[plugin])
    assert (result.ret, result.countoutcomes()) == (code, [3, 0, 0])


@pytest.mark.parametrize(("work_s", "limit_s"), [(0.02, 1.5), (0.04, 1.5), (0.08, 3.0)])
def test_the_cpu_limit_grows_with_the_slowness_of_the_machine(monkeypatch, work_s, limit_s):
    monkeypatch.setattr(depth, "_fixed_work", lambda: work_s)
    assert depth.most_cpu_now() == limit_s
