"""The public names: all there, all documented, and none loaded before it is used."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_parts import FIXTURES, MODULES
from public_doors import DOORS, SUBJECTS

import pytest_kvmock


@pytest.mark.parametrize("name", sorted(set(pytest_kvmock.__all__) - {"__version__"}))
def test_a_public_name_is_there_and_says_what_it_is(name):
    value = getattr(pytest_kvmock, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        pytest_kvmock.Nothing  # noqa: B018 - to look it up is the test


def test_importing_the_package_loads_none_of_its_rooms():
    code = "import sys, pytest_kvmock; print(*sorted(m for m in sys.modules if m.startswith('pytest_kvmock')))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == ["pytest_kvmock"]


def test_everything_but_the_plugin_works_without_pytest():
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "import pytest_kvmock as k\n"
        "with k.RouterHarness() as kv:\n"
        "    prompt = kv.prompt()\n"
        "    kv.worker(0).serve(prompt)\n"
        "    print(kv.overlap(prompt))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "{0: 4}\n"


def test_the_readable_names_are_the_table_of_homes():
    assert sorted(pytest_kvmock.__all__) == dir(pytest_kvmock)


def test_type_checkers_see_the_names_of_the_table():
    """The names stand twice: as imports, for those who read types, and as a table, by which they are loaded late."""
    tree = ast.parse(inspect.getsource(pytest_kvmock))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = [(node.module, alias.name, alias.asname) for node in block.body for alias in node.names]
    assert sorted((f"pytest_kvmock.{home}", name, name) for name, home in pytest_kvmock._HOME.items()) == sorted(
        imported
    )


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "engines",
            "PagedCacheManager PagedRequest PolynomialModel Tiers Traits WouldWait",
        ),
        ("fleets", "EngineStalled FleetRequest Report RouterError TraceRequest"),
        ("harness", "Faults Recovery"),
        ("harness.reduce", "reproduce"),
        ("oracle", "OverlapScores"),
        ("values", "Located MoveError"),
        ("wire", "KvWire"),
        ("wire.sockets", "KvPublisher KvSubscriber"),
    ],
)
def test_the_names_of_one_subject_are_in_its_module(module, names):
    home = importlib.import_module(f"pytest_kvmock.{module}")
    assert {*names.split()} <= {*home.__all__}
    assert not {*names.split()} & {*pytest_kvmock.__all__}


def test_what_public_fixtures_give_has_a_public_name():
    """Of one that makes things, what it makes; the name is at the root, or in the module of its subject."""
    functions = [each for module in MODULES for each in ast.parse(inspect.getsource(module)).body]
    given = {each.name: ast.unparse(each.returns) for each in functions if getattr(each, "name", "") in FIXTURES}
    assert set(FIXTURES) == set(given)
    names = {name for annotation in given.values() for name in re.findall(r"\w+", annotation)}
    modules = [importlib.import_module(f"pytest_kvmock.{name}") for name in SUBJECTS]
    public = {*pytest_kvmock.__all__}.union(*(module.__all__ for module in modules))
    assert set() == names - {"Any", "Callable", "Iterator", "Sequence", "str"} - public


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_module_of_public_names_has_what_it_lists(name):
    module = importlib.import_module(f"pytest_kvmock.{name}")
    values = [getattr(module, name) for name in module.__all__]
    assert [each for each in values if inspect.isclass(each) and not inspect.getdoc(each)] == []


def test_the_contracts_are_listed_and_nothing_else_is_there():
    from pytest_kvmock import testing

    assert sorted(testing.__all__) == sorted(dir(testing))
    assert all(getattr(testing, name) for name in testing.__all__)
    with pytest.raises(AttributeError, match=r"^module 'pytest_kvmock.testing' has no attribute 'IndexContracts'$"):
        testing.IndexContracts  # noqa: B018 - it raises


def test_what_a_mock_raises_is_of_one_family():
    """A verdict is an assertion, and stands apart."""
    modules = [importlib.import_module(f"pytest_kvmock.{name}") for name in SUBJECTS]
    values = [getattr(module, name) for module in (pytest_kvmock, *modules) for name in module.__all__]
    raised = {each for each in values if inspect.isclass(each) and issubclass(each, Exception)}
    apart = {each for each in raised if issubclass(each, AssertionError | Warning)}
    assert {"EventRulesBroken", "KvEventWarning"} <= {each.__name__ for each in apart}
    assert sorted(each.__name__ for each in raised - apart if not issubclass(each, pytest_kvmock.KvMockError)) == []


IMPORTED = re.compile(r"^\s*(?:from|import) (pytest_kvmock[\w.]*)", re.MULTILINE)


def test_what_users_read_imports_from_doors_alone():
    root = Path(__file__).parents[1]
    read = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.py")]
    behind = {
        (path.relative_to(root).as_posix(), name)
        for path in read
        for name in IMPORTED.findall(path.read_text(encoding="utf-8"))
        if name not in DOORS
    }
    assert behind == set()


def test_tests_that_users_would_write_import_from_doors_alone():
    """They stand in strings here, which pytester makes files of."""
    root = Path(__file__).parent
    written = {
        (path.relative_to(root).as_posix(), name)
        for path in root.rglob("*.py")
        if "pytester" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "def test_" in node.value
        for name in IMPORTED.findall(node.value)
    }
    assert len(written) >= 10
    assert {each for each in written if each[1] not in DOORS} == set()
