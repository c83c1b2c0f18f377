"""The structure of the package: no import cycles, modules of one subject, distinguishable names."""

import ast
import inspect
import io
import re
import tokenize
from collections import Counter
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from depth import worth_its_time
from plugin_parts import FIXTURES, OPTIONS
from public_doors import public_names

import pytest_kvmock
from pytest_kvmock import EvictionPolicy
from pytest_kvmock.fleets import Report
from pytest_kvmock.oracle.hygiene.rules import RULES
from pytest_kvmock.plugin.markers import KVMOCK_KEYS
from pytest_kvmock.servers import KvServer

pytestmark = worth_its_time  # the first test to run parses all modules

HOME = Path(pytest_kvmock.__file__).parent
MODULES = {
    ".".join(("pytest_kvmock", *path.relative_to(HOME).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(HOME.rglob("*.py"))
}

MOST_LINES = 400
MOST_OF_ONE_SUBJECT = 800
LEAST_LINES = 60
MOST_FILES = 26  # in a folder, including `__init__.py`

DOORS = ["contrib", "engines", "fleets", "harness", "oracle", "plugin", "servers", "testing", "values", "wire"]

SHORT_ON_PURPOSE = {
    "hookspecs",  # pluggy gets the whole module, and authors of other plugins look here first
    "captures",  # only users of captures load it and the files that it needs
    "vectors_command",  # only users of the command load more
    "plugin",  # what pytest sees of a folder of contrib, however little that is
}

TOLD_APART_BY_FOLDERS = {
    "verdict",  # of a test's events; in plugin, what it does to the test
    "events",  # values that travel; in reduce, the reduction of a stream of them
    "hashes",  # vLLM's and SGLang's
    "index",  # the router's; in testing, the contract of one
    "manager",  # the protocol of block managers; in testing, the contract of one
    "offload",  # the protocol of further tiers; in tiers, the host
    "plugin",  # fixtures, options and hooks of each folder of contrib
    "program",  # a played program; in reduce, a reduced one
    "replay",  # of a trace on engines; in reduce, of what a harness recorded
    "recovery",  # what workers keep and routers request; in harness, the test's access to it
    "report",  # of problems; in plugin, of a run of pytest
    "speculative",  # vLLM's and SGLang's
    "text",  # of problems; in reduce, of reproductions
    "worker",  # an engine; in harness, a watched one; in testing, the contract of one
}


@cache
def nodes_of(path):
    """Return all nodes of a module, its own first. A module is parsed once for all queries."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def imported(path, name):
    """Return the modules of the package that a module imports at its top, in functions, or only for types."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:  # `from room import module` is an import of the module
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


@pytest.fixture(scope="module")
def graph():
    """Return, for each module, the modules that it imports."""
    return {
        # The root has the names of all its folders, and loads each only when a name is used.
        name: {each for each in imported(path, name) if each in MODULES and each != name} - {"pytest_kvmock"}
        for name, path in MODULES.items()
        if name != "pytest_kvmock"
    }


def cycles(graph):
    """Return sets of modules that all reach each other (Tarjan's strongly connected components)."""
    number, low, stack, found = {}, {}, [], []

    def visit(name):
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            component = set()
            while name not in component:
                component.add(stack.pop())
            found.append(component)

    for name in sorted(graph):
        if name not in number:
            visit(name)
    return sorted((component for component in found if len(component) > 1), key=sorted)


def lines_of(name):
    return len(MODULES[name].read_text(encoding="utf-8").splitlines())


def docstring_of(name):
    return ast.get_docstring(nodes_of(MODULES[name])[0]) or ""


def is_a_reexport(name):
    """Return whether a module has only imports and the list of imported names."""
    body = nodes_of(MODULES[name])[0].body
    return all(isinstance(each, ast.Import | ast.ImportFrom | ast.Assign | ast.Expr) for each in body)


def test_a_cycle_of_imports_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert cycles(graph) == [{"a", "b", "c"}, {"d", "e"}]


def test_imports_in_functions_and_for_types_count(graph):
    assert "pytest_kvmock.engines.dynamo.logical" in graph["pytest_kvmock.engines.makers"]  # in a function
    assert "pytest_kvmock.engines.base.driver" in graph["pytest_kvmock.engines.makers"]  # for types
    assert "pytest_kvmock.plugin.hookspecs" in graph["pytest_kvmock.plugin.hooks"]  # a module from its package


def test_no_imports_form_a_cycle(graph):
    assert cycles(graph) == []


KINDS = {"vllm", "sglang", "1.2.1", "mixed", "1.6.1"}


def compared(node):
    """Yield the strings that an expression compares something with."""
    if isinstance(node, ast.Compare):
        for side in (node.left, *node.comparators):
            for each in ast.walk(side):
                if isinstance(each, ast.Constant):
                    yield each.value


def strings_of(path):
    return {node.value for node in nodes_of(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_engine_types_and_releases_of_schedulers_are_compared_in_one_place_each():
    found = {
        name for name, path in MODULES.items() if any(not KINDS.isdisjoint(compared(node)) for node in nodes_of(path))
    }
    assert found == {
        "pytest_kvmock.engines.backends",  # built-in names, for which no engine is imported
        "pytest_kvmock.engines.schedulers.performance",  # the times of a release
    }


def test_rule_names_are_strings_in_one_place():
    found = {
        name: strings & {*RULES}
        for name, path in MODULES.items()
        if not (strings := strings_of(path)).isdisjoint(RULES) and name != "pytest_kvmock.oracle.hygiene.rules"
    }
    a_fault = {"sink_failure"}  # a fault with the name of the rule that it breaks
    assert {
        "pytest_kvmock.oracle.faults.kinds": a_fault,
        "pytest_kvmock.harness.faults": a_fault,
        "pytest_kvmock.oracle.hygiene.injection": a_fault,
        # An index and its judge do not import each other, and these are Dynamo's names of index errors.
        "pytest_kvmock.oracle.index.index": {"parent_block_not_found", "block_not_found", "invalid_block"},
    } == found


def test_each_ignored_mypy_error_has_a_reason():
    lines = [(name, line) for name, path in MODULES.items() for line in path.read_text(encoding="utf-8").splitlines()]
    ignored = [(name, line) for name, line in lines if "# type: ignore" in line]
    assert ignored
    assert [(name, line) for name, line in ignored if not re.search(r"# type: ignore\[[\w, -]+\]  # \w", line)] == []


def test_a_long_module_states_its_one_subject():
    long = {name: lines for name in MODULES if (lines := lines_of(name)) > MOST_LINES}
    assert {name: lines for name, lines in long.items() if lines > MOST_OF_ONE_SUBJECT} == {}
    assert [name for name in long if "One subject" not in docstring_of(name)] == []


def test_no_module_is_too_short_unless_it_only_reexports_or_is_listed():
    short = {name for name in MODULES if lines_of(name) < LEAST_LINES and not is_a_reexport(name)}
    rest = {name for name in short if MODULES[name].stem not in {"__init__", *SHORT_ON_PURPOSE}}
    assert rest == set()


def test_two_modules_share_a_name_only_if_their_folders_distinguish_them():
    names = Counter(path.stem for path in MODULES.values() if path.stem != "__init__")
    assert {name for name, count in names.items() if count > 1} - TOLD_APART_BY_FOLDERS == set()


def test_the_package_has_ten_doors():
    found = {path.relative_to(HOME).parts[0] for path in MODULES.values()}
    assert sorted(found - {"__init__.py", "__main__.py"}) == DOORS


def test_no_folder_has_too_many_files():
    files = Counter(path.parent.relative_to(HOME).as_posix() for path in MODULES.values())
    large = {folder: count for folder, count in files.items() if count > MOST_FILES}
    assert large == {}, "join what is one subject, or make a folder of its own; do not raise the number"


def names_of_classes(path):
    """Return the names of all classes that a module defines, including nested ones."""
    return [node.name for node in nodes_of(path) if isinstance(node, ast.ClassDef)]


def twins(names):
    """Return the names that occur more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def test_classes_within_classes_and_functions_are_counted_too(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("class A:\n    class B: ...\n\ndef make():\n    class A: ...\n", encoding="utf-8")
    assert sorted(names_of_classes(module)) == ["A", "A", "B"]
    assert twins(names_of_classes(module)) == ["A"]


def test_no_two_public_classes_share_a_name():
    names = [name for path in MODULES.values() for name in names_of_classes(path) if not name.startswith("_")]
    assert twins(names) == []


def test_no_two_private_classes_of_a_folder_share_a_name():
    names = [
        (path.relative_to(HOME).parts[0], name)
        for path in MODULES.values()
        for name in names_of_classes(path)
        if name.startswith("_")
    ]
    assert twins(names) == []


def test_a_policy_that_users_derive_has_five_methods():
    public = [name for name in dir(EvictionPolicy) if not name.startswith("_")]
    assert ["clear", "evict", "insert", "order", "remove"] == sorted(EvictionPolicy.__abstractmethods__) == public


# -------------------------------------------------------------------------------- scope: who needs more asks for it

STOREYS = {
    "contrib": (("contrib/*",), 4_650),
    "pytest": (("plugin/*",), 2_340),
    "for authors": (("testing/*", "harness/reduce/*"), 11_510),
    "P/D pairs": (
        (
            "engines/base/hand_over.py",
            "engines/base/pair_options.py",
            "engines/vllm/pairs/*",
            "engines/vllm/deferred_frees.py",
            "engines/sglang/pairs/*",
            "engines/*pair_requests.py",
            "fleets/clock/pair_handoff.py",
            "fleets/clock/vllm_handoff.py",
            "fleets/clock/sglang_*.py",
            "fleets/pairs/*",
            "harness/roles.py",
        ),
        4_265,
    ),
    "hybrid models": (
        (
            "engines/base/cache_group.py",
            "engines/vllm/hybrid*.py",
            "engines/vllm/group*.py",
            "engines/vllm/state_groups.py",
            "engines/vllm/coordinator.py",
            "engines/sglang/hybrid*.py",
            "engines/sglang/parts.py",
            "engines/sglang/models.py",
        ),
        2_745,
    ),
    "shared stores": (
        (
            "engines/shared.py",
            "engines/vllm/host/file_tier.py",
            "engines/vllm/host/lmcache_*.py",
            "engines/vllm/host/mooncake_*.py",
            "engines/vllm/host/store_host.py",
            "engines/sglang/host/mooncake_*.py",
            "oracle/index/master_pages.py",
            "wire/sockets/master_sockets.py",
            "oracle/index/owners.py",
            "values/shared_stores.py",
        ),
        1_730,
    ),
    "tiers": (
        (
            "engines/tiers.py",
            "engines/base/bandwidth.py",
            "engines/base/host_time.py",
            "engines/base/offload.py",
            "engines/*/host/*",
            "engines/dynamo/offloading.py",
            "oracle/index/lower_tier.py",
            "oracle/index/locations.py",
        ),
        5_090,
    ),
    "bytes and servers": (("wire/*", "values/dialect.py", "servers/*"), 10_700),
    "pages and command": (
        (
            "values/pages/*",
            "__main__.py",
            "values/programs/*",
            "values/strict_yaml.py",
            "engines/profiles.py",
        ),
        1_350,
    ),
    "engines in time": (
        (
            "engines/schedulers/*",
            "engines/base/scheduled_request.py",
            "fleets/*",
            "values/long_runs.py",
        ),
        10_480,
    ),
    "core": (("*",), 20_450),
}
"""The files of each storey, and its budget in lines of code. A module belongs to the first storey that matches it.

A commit that needs more lines raises the budget, and its message says what was removed instead, or why nothing could
be removed.
"""


@cache
def code_lines(path):
    """Return the number of lines with code: no docstrings, comments or blank lines."""
    text = path.read_text(encoding="utf-8")
    documentation = set()
    for node in nodes_of(path):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for each in body:  # a string statement documents what precedes it
                if (
                    isinstance(each, ast.Expr)
                    and isinstance(each.value, ast.Constant)
                    and isinstance(each.value.value, str)
                ):
                    documentation |= set(range(each.lineno, each.end_lineno + 1))
    without = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in without:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documentation)


def storey_of(path):
    name = path.relative_to(HOME).as_posix()
    return next(storey for storey, (patterns, _) in STOREYS.items() if any(fnmatch(name, each) for each in patterns))


def test_code_lines_are_counted_without_comments_and_docstrings(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""What\nfor."""\n\n# why\nA = (\n    1,\n)\n"""An A."""\n\n\ndef f():\n    """F."""\n    return A  # so\n'
    )
    assert code_lines(module) == 5


@pytest.mark.parametrize("storey", STOREYS)
def test_a_storey_keeps_its_budget(storey):
    _, budget = STOREYS[storey]
    lines = sum(code_lines(path) for path in MODULES.values() if storey_of(path) == storey)
    assert budget - BUDGET_SLACK <= lines <= budget, (
        f"{storey}: {lines} lines of code, and a budget of {budget}: who needs more raises it here, and says in the "
        "message of the commit what fell instead; who needs less lowers it"
    )


BUDGET_SLACK = 100
"""A storey may be this far below its budget; then the budget must be lowered."""


def test_every_storey_with_a_budget_has_modules():
    assert {storey_of(path) for path in MODULES.values()} == set(STOREYS)


def test_other_modules_import_the_block_manager_only_by_its_door(graph):
    door, inside = "pytest_kvmock.contrib.block_manager", "pytest_kvmock.contrib.block_manager."
    over_the_wall = {
        (name, other)
        for name, others in graph.items()
        for other in others
        if other.startswith(inside) and not name.startswith(door)
    }
    assert over_the_wall == set(), f"import it from {door}, which has the names that are for others"


def test_a_door_has_tests_under_its_name():
    tests = Path(__file__).parent
    rooms = {path.relative_to(HOME).parts[0].removesuffix(".py") for path in MODULES.values()}
    tested = {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
    tested |= {path.name for path in tests.iterdir() if any(path.glob("**/test_*.py"))}
    assert rooms - tested == set(WITHOUT_TESTS), "a door has a folder tests/DOOR, or a file tests/test_DOOR.py"


WITHOUT_TESTS = {
    "__init__": "test_public.py has the names of the root",
    "__main__": "a subcommand is tested where it is made",
}
"""Modules without tests under their names, and where their tests are."""


COUNTS = {
    "names of the root": (lambda: len(pytest_kvmock.__all__) - 1, 31),
    "names that the doors hand out": (
        lambda: len({name for door, names in public_names().items() if ".contrib" not in door for name in names}),
        150,
    ),
    "members of RouterHarness": (lambda: len(members(pytest_kvmock.RouterHarness)), 25),
    "members of MockEngine": (lambda: len(members(pytest_kvmock.MockEngine)), 16),
    "members of Report": (lambda: len(members(Report)), 27),
    "members of KvServer": (lambda: len(members(KvServer)), 30),
    "arguments of Fleet": (lambda: len(inspect.signature(pytest_kvmock.Fleet).parameters), 19),
    "arguments of KvServer": (lambda: len(inspect.signature(KvServer).parameters), 18),
    "fixtures": (lambda: len(FIXTURES), 30),
    "keys of the marker": (lambda: len(KVMOCK_KEYS), 21),
    "options of the command line": (lambda: len(OPTIONS), 25),
}
"""Counts of what a user must learn, with a maximum each. A maximum may be lowered."""


def members(a_class):
    return [name for name in dir(a_class) if not name.startswith("_")]


@pytest.mark.parametrize("what", COUNTS)
def test_the_counts_of_public_names_do_not_grow(what):
    count, most = COUNTS[what]
    assert most == count(), (
        f"{what}: there are {count()}, and {most} were agreed on: a new one takes another one away, or raises the "
        "number in the same commit, which says why; who takes one away lowers it"
    )


# ------------------------------------------------------------------------------- twins, and what skips ahead

REPOSITORY = Path(__file__).parents[1]
DESIGN = REPOSITORY / "docs" / "design.md"


def table_of(heading):
    """Return the rows of the table below a heading of the page on design, each with its cells."""
    text = DESIGN.read_text(encoding="utf-8").partition(f"### {heading}\n")[2].partition("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def functions_of(path):
    return {node.name for node in nodes_of(path) if isinstance(node, ast.FunctionDef)}


def test_modules_with_a_quick_form_are_listed_as_twins():
    rows = table_of("Twins")
    listed = {re.match(r"`([\w/.]+)`", quick)[1] for quick, *_ in rows}
    quick = {
        path.relative_to(HOME).as_posix() for name, path in MODULES.items() if "quick form of" in docstring_of(name)
    }
    assert quick == listed, (
        "a module that is the quick form of another says so in its docstring, and has a row in docs/design.md"
    )
    results = (REPOSITORY / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    for cells in rows:
        row = re.search(r'"([^"]+)"', cells[-1])
        assert row, f"{cells[0]} names no row of benchmarks/RESULTS.md"
        assert f"| {row[1]} |" in results, f"{cells[0]}: benchmarks/RESULTS.md has no row {row[1]!r}"
        tests = re.findall(r"`(tests/[\w/.]+)`", cells[2])
        assert tests
        assert all((REPOSITORY / each).is_file() for each in tests), tests


SKIPPING = {"run_plan", "generate_quietly", "quiet_tokens"}
"""Functions that run several steps in one, or say how many steps may be run so."""


def test_code_that_skips_steps_has_a_property_test():
    rows = table_of("What skips ahead")
    named = " ".join(where for _, where, _ in rows)
    skipping = {name: functions_of(path) & SKIPPING for name, path in MODULES.items()}
    places = {
        "fleets": "fleets/clock/",
        "engines.schedulers": "plan` of the schedulers",
        "engines": "of drivers and managers",
    }
    for name, functions in skipping.items():
        if functions:
            inside = name.removeprefix("pytest_kvmock.")
            place = next(place for folder, place in places.items() if inside.startswith(f"{folder}."))
            assert place in named, (
                f"{name} skips ahead ({', '.join(functions)}): docs/design.md says by which property it is held"
            )
    for what, _, held in rows:
        (test,) = re.findall(r"`(tests/[\w/.]+)`", held)
        assert (REPOSITORY / test).is_file(), f"{what}: there is no {test}"
