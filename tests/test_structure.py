"""The shape of the house: no imports in a circle, modules of one subject, names that are told apart."""

import ast
import inspect
import io
import re
import tokenize
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest
from plugin_parts import FIXTURES, OPTIONS

import pytest_kvmock
from pytest_kvmock import EvictionPolicy
from pytest_kvmock.hygiene.rules import RULES
from pytest_kvmock.plugin.markers import KVMOCK_KEYS
from pytest_kvmock.report import Report
from pytest_kvmock.serve import KvServer

HOME = Path(pytest_kvmock.__file__).parent
MODULES = {
    ".".join(("pytest_kvmock", *path.relative_to(HOME).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(HOME.rglob("*.py"))
}

MOST_LINES = 400
MOST_OF_ONE_SUBJECT = 800
LEAST_LINES = 60
MOST_COLUMNS = 120
LONG_LINES = 1631  # outside tables; it falls, and does not rise
MOST_FILES = 17  # in each of the rooms around engines, `__init__.py` counted

SHORT_ON_PURPOSE = {
    "hookspecs",  # it is given to pluggy whole, and where authors of other plugins look first
    "captures",  # only who captures loads it, and the files that it needs
    "vectors_command",  # only who types it loads more
    "plugin",  # a folder of contrib as pytest sees it, however little that is
}

TOLD_APART_BY_FOLDERS = {
    "verdict",  # of a test's events; in plugin, what it does to the test
    "events",  # values that travel; in reduce, cutting down a stream of them
    "hashes",  # vLLM's and SGLang's
    "index",  # the router's; in testing, the contract of one
    "manager",  # the protocol of block managers; in testing, the contract of one
    "offload",  # the protocol of further tiers; in tiers, the host
    "plugin",  # fixtures, options and hooks of each folder of contrib
    "program",  # what is played; in reduce, the one that is cut down
    "replay",  # of a trace on engines; in reduce, of what a harness recorded
    "recovery",  # what workers keep and routers ask; in harness, the test's hold on it
    "report",  # of problems; in plugin, of a run of pytest
    "speculative",  # vLLM's and SGLang's
    "text",  # of problems; in reduce, of reproductions
    "worker",  # an engine; in harness, one that is watched; in testing, the contract of one
}


def imported(path, name):
    """The modules of the package that one module imports, wherever in it: at its top, in a function, for types only."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
    """Which modules each module imports."""
    return {
        # The root knows all rooms by name, and loads each when somebody asks for it.
        name: {each for each in imported(path, name) if each in MODULES and each != name} - {"pytest_kvmock"}
        for name, path in MODULES.items()
        if name != "pytest_kvmock"
    }


def cycles(graph):
    """Sets of modules each of which reaches all others of its set (Tarjan's strongly connected components)."""
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
    return ast.get_docstring(ast.parse(MODULES[name].read_text(encoding="utf-8"))) or ""


def is_a_reexport(name):
    """Whether a module has imports, and the list of what they bring, and nothing else."""
    body = ast.parse(MODULES[name].read_text(encoding="utf-8")).body
    return all(isinstance(each, ast.Import | ast.ImportFrom | ast.Assign | ast.Expr) for each in body)


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert [{"a", "b", "c"}, {"d", "e"}] == cycles(graph)


def test_imports_in_functions_and_for_types_count(graph):
    assert "pytest_kvmock.cache.dynamo.logical" in graph["pytest_kvmock.makers"]  # in a function
    assert "pytest_kvmock.drivers.driver" in graph["pytest_kvmock.makers"]  # for types
    assert "pytest_kvmock.plugin.hookspecs" in graph["pytest_kvmock.plugin.hooks"]  # a module from its package


def test_no_imports_run_in_a_circle(graph):
    assert [] == cycles(graph)


KINDS = {"vllm", "sglang", "1.2.1", "mixed", "1.6.1"}


def compared(node):
    """The strings that an expression compares something with."""
    if isinstance(node, ast.Compare):
        for side in (node.left, *node.comparators):
            for each in ast.walk(side):
                if isinstance(each, ast.Constant):
                    yield each.value


def strings_of(path):
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_engine_types_and_releases_of_schedulers_are_compared_at_one_place_each():
    found = {
        name
        for name, path in MODULES.items()
        if any(not KINDS.isdisjoint(compared(node)) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert {
        "pytest_kvmock.backends",  # built-in names, for which no engine is imported
        "pytest_kvmock.schedulers.performance",  # the times of a release
    } == found


def test_names_of_rules_are_strings_at_one_place():
    found = {
        name: strings & {*RULES}
        for name, path in MODULES.items()
        if not (strings := strings_of(path)).isdisjoint(RULES) and name != "pytest_kvmock.hygiene.rules"
    }
    a_fault = {"sink_failure"}  # of the same name as the rule that it breaks
    assert {
        "pytest_kvmock.faults.kinds": a_fault,
        "pytest_kvmock.harness.faults": a_fault,
        "pytest_kvmock.hygiene.injection": a_fault,
        # An index and its judge import nothing of each other, and these are Dynamo's names of the errors of one.
        "pytest_kvmock.router.index": {"parent_block_not_found", "block_not_found", "invalid_block"},
    } == found


def test_what_mypy_is_told_to_ignore_has_a_reason():
    lines = [(name, line) for name, path in MODULES.items() for line in path.read_text(encoding="utf-8").splitlines()]
    ignored = [(name, line) for name, line in lines if "# type: ignore" in line]
    assert ignored
    assert [] == [(name, line) for name, line in ignored if not re.search(r"# type: ignore\[[\w, -]+\]  # \w", line)]


def test_a_long_module_says_which_its_one_subject_is():
    long = {name: lines for name in MODULES if (lines := lines_of(name)) > MOST_LINES}
    assert {} == {name: lines for name, lines in long.items() if lines > MOST_OF_ONE_SUBJECT}
    assert [] == [name for name in long if "One subject" not in docstring_of(name)]


def test_a_short_module_is_joined_to_its_subject():
    short = {name for name in MODULES if lines_of(name) < LEAST_LINES and not is_a_reexport(name)}
    rest = {name for name in short if MODULES[name].stem not in {"__init__", *SHORT_ON_PURPOSE}}
    assert set() == rest


def test_two_modules_of_one_name_are_told_apart_by_their_folders():
    names = Counter(path.stem for path in MODULES.values() if path.stem != "__init__")
    assert set() == {name for name, count in names.items() if count > 1} - TOLD_APART_BY_FOLDERS


def test_no_more_lines_are_too_long_to_read_than_there_were():
    lines = [line for path in MODULES.values() for line in path.read_text(encoding="utf-8").splitlines()]
    too_long = [line for line in lines if len(line) > MOST_COLUMNS and not line.lstrip().startswith("|")]
    assert len(too_long) <= LONG_LINES, "break what you wrote; where you broke older lines, lower the number"


@pytest.mark.parametrize("room", ["engine", "drivers", "schedulers"])
def test_a_room_around_engines_is_small_enough_to_look_over(room):
    files = sorted(path.name for path in (HOME / room).iterdir() if path.suffix == ".py")
    assert len(files) <= MOST_FILES, "join what is one subject, or make a room of its own; do not raise the number"


def names_of_classes(path):
    """The names of all classes that one module defines, wherever in it."""
    return [
        node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
    ]


def twins(names):
    """What stands more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def test_a_class_in_a_class_or_in_a_function_has_a_name_too(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("class A:\n    class B: ...\n\ndef make():\n    class A: ...\n", encoding="utf-8")
    assert ["A", "A", "B"] == sorted(names_of_classes(module))
    assert ["A"] == twins(names_of_classes(module))


def test_no_public_name_of_a_class_stands_twice():
    names = [name for path in MODULES.values() for name in names_of_classes(path) if not name.startswith("_")]
    assert [] == twins(names)


def test_no_private_name_of_a_class_stands_twice_within_a_room():
    names = [
        (path.relative_to(HOME).parts[0], name)
        for path in MODULES.values()
        for name in names_of_classes(path)
        if name.startswith("_")
    ]
    assert [] == twins(names)


def test_a_policy_that_users_derive_has_five_methods():
    public = [name for name in dir(EvictionPolicy) if not name.startswith("_")]
    assert ["clear", "evict", "insert", "order", "remove"] == sorted(EvictionPolicy.__abstractmethods__) == public


# -------------------------------------------------------------------------------- scope: who needs more asks for it

STOREYS = {
    "hybrid models": (
        (
            "cache/vllm/hybrid*.py",
            "cache/vllm/group*.py",
            "cache/vllm/state_groups.py",
            "cache/vllm/coordinator.py",
            "cache/sglang/hybrid*.py",
            "cache/sglang/parts.py",
            "cache/sglang/models.py",
            "drivers/hybrid*.py",
            "testing/hybrid*.py",
        ),
        2_620,
    ),
    "tiers": (
        (
            "tiers/*",
            "cache/offload.py",
            "cache/dynamo/offloading.py",
            "cache/sglang/hicache*.py",
            "*/*host_time.py",
            "drivers/offload*.py",
            "drivers/hicache*.py",
            "testing/tiers_below.py",
            "router/lower_tier.py",
            "router/locations.py",
        ),
        3_600,
    ),
    "contrib": (("contrib/*", "block_manager/*"), 4_650),
    "pytest": (("plugin/*",), 2_250),
    "for authors": (("testing/*", "reduce/*"), 7_560),
    "bytes and servers": (("wire/*", "capture/*", "serve/*"), 8_900),
    "pages and command": (("pages/*", "__main__.py", "programs/*", "strict_yaml.py", "profiles.py"), 1_350),
    "engines in time": (("clock/*", "schedulers/*", "fleet/*", "report/*", "traces/*", "long_runs.py"), 9_150),
    "core": (("*",), 19_710),
}
"""What a storey is made of, and its budget in lines of code. The first that has a module is its storey.

Who needs more lines raises the budget in the same commit, and says in its message what fell instead, or why nothing could.
"""


def code_lines(path):
    """The lines that have code: no docstrings, comments or blank lines."""
    text = path.read_text(encoding="utf-8")
    documentation = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for each in body:  # a text that stands by itself documents what is before it
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


def test_lines_of_code_are_counted_without_what_explains_them(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""What\nfor."""\n\n# why\nA = (\n    1,\n)\n"""An A."""\n\n\ndef f():\n    """F."""\n    return A  # so\n'
    )
    assert 5 == code_lines(module)


@pytest.mark.parametrize("storey", STOREYS)
def test_a_storey_keeps_its_budget(storey):
    _, budget = STOREYS[storey]
    lines = sum(code_lines(path) for path in MODULES.values() if storey_of(path) == storey)
    assert budget - BUDGET_SLACK <= lines <= budget, (
        f"{storey}: {lines} lines of code, and a budget of {budget}: who needs more raises it here, and says in the message of the "
        "commit what fell instead; who needs less lowers it"
    )


BUDGET_SLACK = 100
"""So much below its budget a storey may be before that is lowered."""


def test_who_has_a_budget_has_modules():
    assert set(STOREYS) == {storey_of(path) for path in MODULES.values()}


def test_the_block_manager_is_reached_by_its_door(graph):
    door, inside = "pytest_kvmock.block_manager", "pytest_kvmock.block_manager."
    over_the_wall = {
        (name, other)
        for name, others in graph.items()
        for other in others
        if other.startswith(inside) and not name.startswith(door)
    }
    assert set() == over_the_wall, f"import it from {door}, which has the names that are for others"


def test_a_room_has_its_tests_under_its_name():
    tests = Path(__file__).parent
    rooms = {path.relative_to(HOME).parts[0].removesuffix(".py") for path in MODULES.values()}
    tested = {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
    tested |= {path.name for path in tests.iterdir() if any(path.glob("**/test_*.py"))}
    assert set(WITHOUT_TESTS) == rooms - tested, "a room has a folder tests/ROOM, or a file tests/test_ROOM.py"


WITHOUT_TESTS = {
    "__init__": "test_public.py has the names of the root",
    "__main__": "a subcommand is tested where it is made",
    "acceptance": "tests/cache/vllm, with the drafts that it draws",
    "hashed_blocks": "tests/cache/vllm and tests/hygiene, with the hashes that it compares",
    "makers": "tests/test_backends.py, as what a backend makes",
    "moves": "tests/cache/dynamo, with the managers that take them",
    "plh": "tests/test_tokens.py",
}
"""Rooms without tests under their name, and where these are."""


COUNTS = {
    "names of the root": (lambda: len(pytest_kvmock.__all__) - 1, 31),
    "members of RouterHarness": (lambda: len(members(pytest_kvmock.RouterHarness)), 36),
    "members of Report": (lambda: len(members(Report)), 43),
    "members of KvServer": (lambda: len(members(KvServer)), 38),
    "arguments of Fleet": (lambda: len(inspect.signature(pytest_kvmock.Fleet).parameters), 18),
    "arguments of KvServer": (lambda: len(inspect.signature(KvServer).parameters), 20),
    "fixtures": (lambda: len(FIXTURES), 33),
    "keys of the marker": (lambda: len(KVMOCK_KEYS), 19),
    "options of the command line": (lambda: len(OPTIONS), 48),
}
"""What a user must learn, and how much of it there is. It may fall."""


def members(a_class):
    return [name for name in dir(a_class) if not name.startswith("_")]


@pytest.mark.parametrize("what", COUNTS)
def test_what_must_be_learned_does_not_grow_by_itself(what):
    count, most = COUNTS[what]
    assert most == count(), (
        f"{what}: there are {count()}, and {most} were agreed on: a new one takes another one away, or raises the number in the same "
        "commit, which says why; who takes one away lowers it"
    )


# ------------------------------------------------------------------------------- twins, and what skips ahead

REPOSITORY = Path(__file__).parents[1]
DESIGN = REPOSITORY / "docs" / "design.md"


def table_of(heading):
    """The rows of the table below a heading of the page on design, each with its cells."""
    text = DESIGN.read_text(encoding="utf-8").partition(f"### {heading}\n")[2].partition("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def functions_of(path):
    return {
        node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)
    }


def test_twins_stand_in_one_list():
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
"""Functions that run several steps in one, or say how many may be."""


def test_what_skips_ahead_has_its_property():
    rows = table_of("What skips ahead")
    named = " ".join(where for _, where, _ in rows)
    skipping = {name: functions_of(path) & SKIPPING for name, path in MODULES.items()}
    rooms = {
        "clock": "clock/",
        "schedulers": "plan` of the schedulers",
        "drivers": "of drivers",
        "cache": "and managers",
    }
    for name, functions in skipping.items():
        if functions:
            assert rooms[name.split(".")[1]] in named, (
                f"{name} skips ahead ({', '.join(functions)}): docs/design.md says by which property it is held"
            )
    for what, _, held in rows:
        (test,) = re.findall(r"`(tests/[\w/.]+)`", held)
        assert (REPOSITORY / test).is_file(), f"{what}: there is no {test}"
