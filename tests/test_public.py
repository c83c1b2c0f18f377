"""The public names: each exists, is documented, and is loaded only when it is used."""

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
def test_a_public_name_exists_and_is_documented(name):
    value = getattr(pytest_kvmock, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value)


def test_an_unknown_name_raises_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        pytest_kvmock.Nothing  # noqa: B018 - to look it up is the test


def test_importing_the_package_loads_none_of_its_modules():
    code = "import sys, pytest_kvmock; print(*sorted(m for m in sys.modules if m.startswith('pytest_kvmock')))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == ["pytest_kvmock"]


def test_everything_but_the_plugin_works_without_pytest():
    code = (
        "import sys; sys.modules['pytest'] = None\nimport pytest_kvmock as k\nwith k.RouterHarness() as kv:\n    "
        "prompt = kv.prompt()\n    kv.worker(0).serve(prompt)\n    print(kv.overlap(prompt))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "{0: 4}\n"


def test_dir_lists_the_public_names():
    assert sorted(pytest_kvmock.__all__) == dir(pytest_kvmock)


def test_type_checkers_see_the_names_of_the_table():
    """The names are listed twice: as imports for type checkers, and as a table for loading on use."""
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
def test_names_of_one_subject_are_in_its_module(module, names):
    home = importlib.import_module(f"pytest_kvmock.{module}")
    assert {*names.split()} <= {*home.__all__}
    assert not {*names.split()} & {*pytest_kvmock.__all__}


def test_the_types_of_public_fixtures_have_public_names():
    """For a fixture that makes things, the type made; its name is at the root or in the module of its subject."""
    functions = [each for module in MODULES for each in ast.parse(inspect.getsource(module)).body]
    given = {each.name: ast.unparse(each.returns) for each in functions if getattr(each, "name", "") in FIXTURES}
    assert set(given) == set(FIXTURES)
    names = {name for annotation in given.values() for name in re.findall(r"\w+", annotation)}
    modules = [importlib.import_module(f"pytest_kvmock.{name}") for name in SUBJECTS]
    public = {*pytest_kvmock.__all__}.union(*(module.__all__ for module in modules))
    assert names - {"Any", "Callable", "Iterator", "Sequence", "str"} - public == set()


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_public_module_has_the_names_that_it_lists(name):
    module = importlib.import_module(f"pytest_kvmock.{name}")
    values = [getattr(module, name) for name in module.__all__]
    assert [each for each in values if inspect.isclass(each) and not inspect.getdoc(each)] == []


def test_the_testing_module_has_exactly_the_contracts_that_it_lists():
    from pytest_kvmock import testing

    assert sorted(testing.__all__) == sorted(dir(testing))
    assert all(getattr(testing, name) for name in testing.__all__)
    with pytest.raises(AttributeError, match=r"^module 'pytest_kvmock.testing' has no attribute 'IndexContracts'$"):
        testing.IndexContracts  # noqa: B018 - it raises


def test_exceptions_of_the_mocks_derive_from_one_class():
    """A verdict is an assertion, and does not derive from it."""
    modules = [importlib.import_module(f"pytest_kvmock.{name}") for name in SUBJECTS]
    values = [getattr(module, name) for module in (pytest_kvmock, *modules) for name in module.__all__]
    raised = {each for each in values if inspect.isclass(each) and issubclass(each, Exception)}
    apart = {each for each in raised if issubclass(each, AssertionError | Warning)}
    assert {"EventRulesBroken", "KvEventWarning"} <= {each.__name__ for each in apart}
    assert sorted(each.__name__ for each in raised - apart if not issubclass(each, pytest_kvmock.KvMockError)) == []


IMPORTED = re.compile(r"^\s*(?:from|import) (pytest_kvmock[\w.]*)", re.MULTILINE)


def test_documentation_and_examples_import_only_from_doors():
    root = Path(__file__).parents[1]
    read = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.py")]
    behind = {
        (path.relative_to(root).as_posix(), name)
        for path in read
        for name in IMPORTED.findall(path.read_text(encoding="utf-8"))
        if name not in DOORS
    }
    assert behind == set()


def test_tests_as_users_write_them_import_only_from_doors():
    """They are strings in our tests, which pytester writes to files."""
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
