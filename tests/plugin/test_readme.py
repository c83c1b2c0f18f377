"""README is run: its Python blocks are tests that pass, its failure is what pytest prints, its tables are the code's."""

import ast
import inspect
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from pytest_kvmock import RouterHarness, plugin, testing
from pytest_kvmock.backends import BACKENDS, EngineProfile
from pytest_kvmock.faults.kinds import FAULTS
from pytest_kvmock.hygiene.rules import RULES
from pytest_kvmock.plugin import hookspecs
from pytest_kvmock.plugin.markers import KVMOCK_KEYS
from pytest_kvmock.plugin.options import OPTIONS
from pytest_kvmock.plugin.precedence import Policy

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

IN_MATRIX = sum(spec.in_matrix for spec in BACKENDS.values())
BLOCKS = re.findall(r"^(?:<!-- (\w+) -->\n)?```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PASSING = [text for mark, language, text in BLOCKS if language == "python" and not mark]
(CONFTEST,) = (text for mark, _, text in BLOCKS if mark == "conftest")
(PROFILES,) = (text for mark, _, text in BLOCKS if mark == "profiles")
(FAILING,) = (text for mark, language, text in BLOCKS if language == "python" and mark == "fails")
(SCENARIO,) = (text for mark, _, text in BLOCKS if mark == "scenario")
(OUTPUT,) = (text for mark, _, text in BLOCKS if mark == "output")


def first_cells(heading):
    """What stands in code in the first column of the tables under a heading."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]*)`", section, re.MULTILINE)


def name_of(block):
    """The first class or test that a block defines."""
    defined = [node.name for node in ast.parse(block).body if hasattr(node, "name")]
    return next(name for name in defined if not name.startswith(("kv_", "anyio_")))


@pytest.mark.parametrize("block", PASSING, ids=name_of)
def test_a_python_block_is_a_module_of_tests_that_pass(nested, block):
    each = (
        1
        if "kv_sink" in block
        or "kv_cache_manager" in block
        or ("RouterHarness(" in block and "kv_backend" not in block)
        else IN_MATRIX
    )
    if named := re.search(r"^@pytest\.mark\.kv_backends\((.*)\)$", block, re.MULTILINE):
        each = len(named[1].split(","))
    expected = block.count("def test_") * each  # a sink or a harness by itself needs no backend
    for contract in re.findall(r"^class \w+\((\w+Contract)\)", block, re.MULTILINE):
        expected += sum(name.startswith("test_") for name in dir(getattr(testing, contract)))

    result = nested("", plugins=["anyio"], files={"test_it.py": block})

    result.assert_outcomes(passed=expected)


def test_the_failure_is_what_pytest_prints(nested, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    result = nested("", files={"test_it.py": FAILING})

    result.assert_outcomes(failed=1)
    assert OUTPUT in result.stdout.str() + "\n"


def test_the_scenario_file_passes(nested):
    ini = "[pytest]\nkvmock_scenarios = *\n"
    result = nested("", files={"pytest.ini": ini, "a.kv.yaml": SCENARIO})
    result.assert_outcomes(passed=IN_MATRIX)


def test_the_backend_of_the_conftest_is_in_the_matrix_and_works(nested):
    test = """
    @pytest.mark.kvmock(num_blocks=4)
    def test(kv_manager, kv_events):
        kv_manager.use([1, 2, 3])
        kv_manager.deref([3, 2, 1])
        kv_manager.use([3])
        if kv_manager.backend == "newest":
            assert kv_manager.inactive_blocks() == [1, 2]
            kv_manager.use([4, 5])
            assert kv_events.removed_blocks == [1]
    """

    nested(test, files={"conftest.py": CONFTEST}).assert_outcomes(passed=IN_MATRIX + 1)


def test_the_profiles_are_read(nested):
    source = """
    from pytest_kvmock import EngineProfile
    @pytest.mark.kvmock(profile="small-fleet")
    def test(kv_profile): assert kv_profile == EngineProfile(block_size=16, num_blocks=64, workers=4)
    """

    ini = "[pytest]\nkvmock_profiles = profiles.yaml\n"
    nested(source, files={"pytest.ini": ini, "profiles.yaml": PROFILES}).assert_outcomes(passed=1)


def test_the_hooks_are_those_of_the_code():
    hooks = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("pytest_")}
    expected = [f"{name}({', '.join(inspect.signature(hook).parameters)})" for name, hook in hooks.items()]
    assert expected == first_cells("Hooks")


def test_the_first_test_has_ten_lines():
    assert 10 == len(PASSING[0].strip().splitlines())


def test_the_rules_are_those_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| ((?:error|warning)\b[^|]*) \| (.*) \|$", README, re.MULTILINE)
    assert [(rule.name, rule.kind_text, rule.broken_when) for rule in RULES.values()] == rows


def test_the_faults_are_those_of_the_code():
    section = README.split("\n## Faults on purpose\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (yes)? ?\|$", section, re.MULTILINE)
    assert [(kind.name, kind.does, "yes" if kind.has_rate else "") for kind in FAULTS.values()] == rows


def test_every_fixture_is_listed():
    public = [name for name in plugin.__all__ if re.match(r"(make_)?kv_", name)]
    assert sorted(public) == sorted(first_cells("Fixtures"))


def test_every_key_of_the_marker_is_listed_with_its_default():
    section = README.split("\n## Markers\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| `?([^`|]*?)`? \|$", section, re.MULTILINE))
    assert set(KVMOCK_KEYS) == set(rows)
    profile, policy = EngineProfile(), Policy()
    defaults = {key: getattr(profile, key) for key in KVMOCK_KEYS if hasattr(profile, key)}
    defaults |= {"event_errors": policy.event_errors, "event_warnings": policy.event_warnings}
    defaults |= {
        "allow": tuple(policy.allow),
        "sync": "auto",
        "index_semantics": None,
        "profile": None,
        "faults": {},
        "survive": (),
    }
    assert defaults == {key: ast.literal_eval(value) for key, value in rows.items()}


def test_every_option_is_listed():
    section = README.split("\n## Options and ini settings\n")[1].split("\n## ")[0]
    known = [name for option in OPTIONS for name in (option.flag, option.ini) if name]
    assert sorted([*known, "--kv-list-backends", "--kv-list-profiles"]) == sorted(
        set(re.findall(r"`(--[\w-]+|kvmock_\w+)[ `]", section))
    )


def test_the_files_it_names_exist():
    named = re.findall(r"`((?:examples|tests)/[\w/.]*)`", README)
    assert named
    assert [] == [name for name in named if not (ROOT / name).exists()]


def test_the_indexes_are_those_of_the_examples():
    for file in ("test_index_by_hashes.py", "test_index_by_tokens.py", "test_async_index.py"):
        example = (ROOT / "examples/own_index" / file).read_text(encoding="utf-8")
        methods = re.search(r"    def __init__.*?\n\n\n", example, re.DOTALL)
        assert methods is not None
        assert methods[0] in README


OVER_ALL = """

from pytest_kvmock import BACKENDS
from pytest_kvmock.testing import IndexContract

class TestIt(IndexContract):
    backends = tuple(BACKENDS)

    def make_index(self, block_size):
        return {index}
"""


@pytest.mark.parametrize(
    "index", ["HashIndex(self.traits.copies)", "TokenIndex(block_size, self.traits.copies)"], ids=["hashes", "tokens"]
)
def test_an_index_that_is_copied_keeps_the_contract_over_all_backends(nested, index):
    (block,) = [block for block in PASSING if f"class {index.partition('(')[0]}:" in block]

    result = nested("", "-k", "TestIt", files={"test_it.py": block + OVER_ALL.format(index=index)})

    result.assert_outcomes(
        passed=sum(name.startswith("test_") for name in dir(testing.IndexContract)), deselected=IN_MATRIX
    )


def test_the_table_of_traits_is_true():
    """Of each engine, as a worker of it says."""
    table = README.partition("| `kv_worker.traits` |")[2].partition("\n\n")[0].splitlines()
    columns = [re.findall(r"`(\w+)`", cell) for cell in table[0].split("|")[:-1]]
    assert sorted(BACKENDS) == sorted(name for names in columns for name in names)
    said = {name: {} for name in BACKENDS}
    for line in table[2:]:
        trait, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for names, cell in zip(columns, cells, strict=True):
            for name in names:
                said[name][re.match(r"`(\w+)`", trait)[1]] = cell.strip('"')
    for name, traits in said.items():
        worker = RouterHarness(backend=name).worker(0)
        assert {field: str(value) for field, value in asdict(worker.traits).items()} == traits, name


def test_the_table_of_engines_has_all_of_them():
    table = README.partition("| backend | engine |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    said = {name: row for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert list(BACKENDS) == list(said)
    for name, (_, engine, default) in said.items():
        assert BACKENDS[name].models.startswith(engine.partition(",")[0].partition(";")[0]), name
        assert ("yes" if BACKENDS[name].in_matrix else "no") == default, name
