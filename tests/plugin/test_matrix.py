"""The backends over which tests run: every way to choose them, and what is refused."""

from __future__ import annotations

import os
import re
import sys

import pytest
from depth import takes_long

from pytest_kvmock import BACKENDS

ALL = ["lineage", "lru", "multi_lru"]

follows_overrides = pytest.mark.skipif(
    pytest.version_tuple < (9, 0), reason="before 9.0 a closure does not follow an override that calls its original"
)


def ran(result):
    """Return the backend of each test that passed, by its harness: tests print `ran on <backend>`."""
    return re.findall(r"ran on (\S+)", result.stdout.str())


USES = "def test(kv_harness): print('ran on', kv_harness.backend)"

HYBRID = [name for name, spec in BACKENDS.items() if spec.group == "hybrid"]


def test_a_group_name_stands_for_its_backends_in_markers_and_on_the_command_line(ids):
    assert [f"test[{name}]" for name in HYBRID] == ids(f"@pytest.mark.kv_backends('hybrid')\n{USES}")
    left = [name for name in HYBRID if name != "sglang_gpt_oss"]
    marker = "@pytest.mark.kv_backends('hybrid', 'lru', exclude=['sglang_gpt_oss'])"
    assert [f"test[{name}]" for name in left] == ids(f"{marker}\n{USES}", "--kv-backend", "hybrid")
    assert [f"test[{name}]" for name in HYBRID] == ids(USES, "-o", "kvmock_backends=hybrid")
    assert [f"test[{name}]" for name in HYBRID] == ids(USES, "--kv-backend", "hybrid")
    assert ids(USES, "--kv-backend", "hybrid", "-o", "kvmock_backends=lru") == []


# ---------------------------------------------------------------------------------------------------- who is in


@pytest.mark.parametrize("fixture", ["kv_backend", "kv_harness", "kv_worker", "kv_manager", "make_kv_manager"])
def test_fixtures_that_need_an_engine_bring_in_the_matrix(ids, fixture):
    assert [f"test[{name}]" for name in ALL] == ids(f"def test({fixture}): pass")


@pytest.mark.parametrize(
    "fixture",
    [
        "kv_events",
        "kv_sink",
        "make_kv_sink",
        "kv_index",
        "kv_profile",
        "kv_base_profile",
        "kv_prompt",
        "kv_trace",
        "kv_traits",
    ],
)
def test_fixtures_that_need_no_engine_do_not_bring_in_the_matrix(ids, fixture):
    assert ids(f"def test({fixture}): pass") == ["test"]


def test_the_matrix_is_brought_in_through_other_fixtures(ids):
    assert [f"test[{name}]" for name in ALL] == ids(
        """
        @pytest.fixture
        def inner(kv_manager): return kv_manager
        @pytest.fixture
        def outer(inner): return inner
        def test(outer): pass
        """
    )


def test_usefixtures_and_autouse_bring_in_the_matrix(ids):
    assert [f"{test}[{name}]" for test in ("test", "TestC::test") for name in ALL] == ids(
        """
        @pytest.mark.usefixtures("kv_backend")
        def test(): pass
        class TestC:
            @pytest.fixture(autouse=True)
            def manager(self, kv_manager): pass
            def test(self): pass
        """
    )


def test_the_users_own_parameters_come_first_in_the_test_id(ids):
    assert [f"test[{n}-{name}]" for n in (1, 2) for name in ALL] == ids(
        "@pytest.mark.parametrize('n', [1, 2])\ndef test(kv_backend, n): pass"
    )


def test_the_matrix_multiplies_with_the_backends_of_anyio(ids):
    assert len(ids("@pytest.mark.anyio\nasync def test(kv_harness): pass", plugins=["anyio"])) == 2 * 3


def test_every_fixture_of_a_test_has_the_backend_of_its_id(nested):
    result = nested(
        """
        def test(kv_backend, kv_harness, kv_worker, kv_manager, make_kv_manager, request):
            assert type(kv_backend) is str
            assert request.node.name == f"test[{kv_backend}]"
            assert kv_harness.backend == kv_backend
            assert kv_manager.backend == kv_backend
            assert kv_worker is kv_harness.worker(0)
            assert kv_worker.manager is kv_manager
            more = make_kv_manager()
            assert more is not kv_manager
            assert more.backend == kv_backend
        """
    )

    result.assert_outcomes(passed=3)


# ---------------------------------------------------------------------------------------------------- overrides

OVERRIDES = {
    "conftest": (USES, {"conftest.py": "import pytest\n@pytest.fixture\ndef kv_backend(): return 'lru'"}, ["lru"]),
    "module": ("@pytest.fixture\ndef kv_backend(): return 'lru'\n" + USES, {}, ["lru"]),
    "class": (
        """
        class TestC:
            @pytest.fixture
            def kv_backend(self): return "lru"
            def test(self, kv_harness): print('ran on', kv_harness.backend)
        """,
        {},
        ["lru"],
    ),
    "session fixture": ("@pytest.fixture(scope='session')\ndef kv_backend(): return 'lru'\n" + USES, {}, ["lru"]),
    "parametrised fixture": (
        "@pytest.fixture(params=['lru', 'lineage'])\ndef kv_backend(request): return request.param\n" + USES,
        {},
        ["lru", "lineage"],
    ),
    "direct parametrize": (
        "@pytest.mark.parametrize('kv_backend', ['lru', 'lineage'])\n" + USES,
        {},
        ["lru", "lineage"],
    ),
    "direct parametrize with another": (
        "@pytest.mark.parametrize('n, kv_backend', [(1, 'lru')])\n" + USES.replace("(kv_harness", "(n, kv_harness"),
        {},
        ["lru"],
    ),
    "direct parametrize by keywords": (
        "@pytest.mark.parametrize(argnames=['kv_backend'], argvalues=[['lru']])\n" + USES,
        {},
        ["lru"],
    ),
    "indirect parametrize": (
        "@pytest.mark.parametrize('kv_backend', ['lru'], indirect=True)\n" + USES,
        {},
        ["lru"],
    ),
    "marker on the function": ("@pytest.mark.kv_backends('lru')\n" + USES, {}, ["lru"]),
    "marker on the module": ("pytestmark = pytest.mark.kv_backends('lru')\n" + USES, {}, ["lru"]),
    "marker that excludes": (
        "@pytest.mark.kv_backends(exclude=['lineage', 'multi_lru'])\n" + USES,
        {},
        ["lru"],
    ),
    "marker that excludes one, as a string": (
        "@pytest.mark.kv_backends(exclude='lineage')\n" + USES,
        {},
        ["lru", "multi_lru"],
    ),
    "marker in another order": (
        "@pytest.mark.kv_backends('multi_lru', 'lru', 'lineage')\n" + USES,
        {},
        ALL,
    ),
    "marker without names": ("@pytest.mark.kv_backends()\n" + USES, {}, ALL),
    "ini": (USES, {"pytest.ini": "[pytest]\nkvmock_backends = lru"}, ["lru"]),
    "ini, all": (USES, {"pytest.ini": "[pytest]\nkvmock_backends = all"}, list(BACKENDS)),
    "a direct parametrisation is not touched by a marker": (
        "@pytest.mark.kv_backends('lineage')\n@pytest.mark.parametrize('kv_backend', ['lru'])\n" + USES,
        {},
        ["lru"],
    ),
    "class and method markers: the method's counts": (
        """
        @pytest.mark.kv_backends("lineage")
        class TestC:
            @pytest.mark.kv_backends("lru")
            def test(self, kv_harness): print('ran on', kv_harness.backend)
            def test_outer(self, kv_harness): print('ran on', kv_harness.backend)
        """,
        {},
        ["lru", "lineage"],
    ),
    "class and method markers: names are not inherited": (
        """
        @pytest.mark.kv_backends("lineage")
        class TestC:
            @pytest.mark.kv_backends(exclude=["lineage"])
            def test(self, kv_harness): print('ran on', kv_harness.backend)
        """,
        {},
        ["lru", "multi_lru"],
    ),
}


@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in OVERRIDES.items()])
def test_each_way_to_set_the_backend_is_followed(nested, row):
    source, files, expected = row

    result = nested(source, "-s", files=files)

    result.assert_outcomes(passed=len(expected))
    assert ran(result) == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--kv-backend", "lru"], ["lru"]),
        (["--kv-backend", "lru", "--kv-backend", "lineage"], ["lineage", "lru"]),
        (["--kv-backend", "all"], ALL),
        (["--kv-backend", "lru", "--kv-backend", "all"], ALL),
        (["--kv-backend", "lru", "--kv-backend", "hybrid"], ["lru", *HYBRID]),
    ],
)
def test_the_command_line_narrows_the_matrix(nested, args, expected):
    assert ran(nested(USES, "-s", *args)) == expected


def test_the_command_line_does_not_change_a_test_that_fixes_its_backend(nested):
    result = nested(
        """
        @pytest.mark.parametrize("kv_backend", ["lru"])
        def test(kv_harness): print("ran on", kv_harness.backend)
        class TestC:
            @pytest.fixture
            def kv_backend(self): return "lru"
            def test(self, kv_harness): print("ran on", kv_harness.backend)
        """,
        "-s",
        "--kv-backend=lineage",
    )

    assert ran(result) == ["lru", "lru"]


@follows_overrides
@pytest.mark.parametrize("name", ["kv_harness", "kv_manager"])
def test_an_override_that_calls_its_original_keeps_the_matrix(nested, name):
    source = f"@pytest.fixture\ndef {name}({name}): return {name}\ndef test({name}): print('ran on', {name}.backend)"

    assert ran(nested(source, "-s")) == ALL


@pytest.mark.parametrize("name", ["kv_harness", "kv_manager"])
def test_an_override_that_uses_its_original_and_kv_backend_keeps_the_matrix_in_every_pytest(nested, name):
    source = (
        f"@pytest.fixture\ndef {name}({name}, kv_backend): return {name}\n"
        f"def test({name}): print('ran on', {name}.backend)"
    )

    assert ran(nested(source, "-s")) == ALL


@follows_overrides
def test_an_override_of_kv_backend_that_calls_its_original_keeps_the_matrix(nested):
    assert ran(nested("@pytest.fixture\ndef kv_backend(kv_backend): return kv_backend\n" + USES, "-s")) == ALL


on_8_3 = pytest.mark.skipif(pytest.version_tuple < (8, 4), reason="8.3 compares with the scope of the parameter")


@pytest.mark.parametrize("scope", ["function", "class", "module", "package", pytest.param("session", marks=on_8_3)])
def test_fixtures_of_any_scope_may_use_kv_backend(nested, scope):
    result = nested(
        f"""
        @pytest.fixture(scope="{scope}")
        def mine(kv_backend): return kv_backend
        def test_1(mine, kv_harness):
            assert mine == kv_harness.backend
            print("ran on", mine)
        def test_2(mine): print("ran on", mine)
        """,
        "-s",
    )

    assert ran(result) == ALL + ALL  # without reordering


def test_tests_are_not_reordered_by_the_matrix(ids):
    before, after = ([f"{test}[{name}]" for name in ALL] for test in ("test_b", "test_a"))
    assert [*before, "test_x", *after] == ids(
        "def test_b(kv_harness): pass\ndef test_x(): pass\ndef test_a(kv_harness): pass"
    )


# ---------------------------------------------------------------------------------------------------- no parameter

TEST_CASE = """
class T(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _kv(self, kv_harness): self.router = kv_harness
    {marker}
    def test(self): print("ran on", self.router.backend)
"""


def test_getfixturevalue_runs_on_the_only_backend(nested):
    source = "@pytest.mark.kv_backends('lru')\ndef test(request): print('ran on', request.getfixturevalue('kv_harness').backend)"  # noqa: E501

    assert ran(nested(source, "-s")) == ["lru"]
    assert ran(nested(source.partition("\n")[2], "-s", "--kv-backend=lru")) == ["lru"]


def test_getfixturevalue_with_several_backends_says_which_marker_to_add(nested):
    result = nested("def test(request): request.getfixturevalue('kv_manager')")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            (
                "*backend of this test is open (lineage, lru, "
                'multi_lru)*usefixtures("kv_backend")*@pytest.mark.kv_backends("lineage")*'
            )
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_kvmock/plugin*")


def test_usefixtures_gives_getfixturevalue_the_full_matrix(nested):
    source = """
    @pytest.mark.usefixtures("kv_backend")
    def test(request): print("ran on", request.getfixturevalue("kv_harness").backend)
    """

    assert ran(nested(source, "-s")) == ALL


def test_a_testcase_runs_on_the_only_backend(nested):
    source = TEST_CASE.format(marker="@pytest.mark.kv_backends('lru')")

    assert ran(nested(source, "-s")) == ["lru"]


def test_a_testcase_with_several_backends_says_which_marker_to_add(nested):
    result = nested(TEST_CASE.format(marker=""))

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*backend of this test is open (lineage, lru, multi_lru)*TestCase*@pytest.mark.kv_backends(*lineage*)*"]
    )
    result.stdout.no_fnmatch_line("*pytest_kvmock/plugin*")
    result.stdout.no_fnmatch_line("*usefixtures*")


def test_a_testcase_with_no_backend_left_is_skipped(nested):
    result = nested(TEST_CASE.format(marker="@pytest.mark.kv_backends('lru')"), "--kv-backend=lineage", "-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*no backend is left*"])


def test_the_placeholder_of_kv_backend_is_refused_as_a_backend_with_the_reason(nested):
    result = nested(
        """
        from pytest_kvmock import RouterHarness
        def test(request): RouterHarness(backend=request.getfixturevalue("kv_backend"))
        """
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E *ValueError: unknown backend*kv_backend has no value here: this test is not param*"]
    )


# ---------------------------------------------------------------------------------------------------- deselection


def test_a_test_without_a_backend_left_is_deselected_and_counted(nested):
    result = nested(
        """
        @pytest.mark.kv_backends("lineage")
        def test_gone(kv_harness): pass
        @pytest.mark.kv_backends(exclude=["lineage", "lru", "multi_lru"])
        def test_gone_too(kv_harness): pass
        def test_stays(kv_harness): print("ran on", kv_harness.backend)
        def test_unused(): pass
        """,
        "-s",
        "--kv-backend=lru",
    )

    result.assert_outcomes(passed=2, deselected=2)
    assert ran(result) == ["lru"]


@takes_long
def test_deselection_is_the_same_under_xdist(nested):
    result = nested(
        "@pytest.mark.kv_backends('lineage')\ndef test_gone(kv_harness): pass\ndef test_stays(kv_harness): pass",
        "--kv-backend=lru",
        "-n",
        "2",
        plugins=["xdist"],
    )

    result.assert_outcomes(passed=1)


def test_a_marker_of_a_parameter_deselects_other_backends(ids):
    assert ["test[a-lru]", *(f"test[b-{name}]" for name in ALL)] == ids(
        """
        @pytest.mark.parametrize("n", [
            pytest.param(1, id="a", marks=pytest.mark.kv_backends("lru")),
            pytest.param(2, id="b"),
        ])
        def test(kv_harness, n): pass
        """
    )


def test_a_marker_added_by_a_conftest_deselects_other_backends(nested):
    result = nested(
        USES,
        "-s",
        files={
            "conftest.py": """
            import pytest
            def pytest_collection_modifyitems(items):
                for item in items:
                    item.add_marker(pytest.mark.kv_backends(exclude=["lineage"]))
            """
        },
    )

    result.assert_outcomes(passed=2, deselected=1)
    assert ran(result) == ["lru", "multi_lru"]


def test_a_late_marker_does_not_undo_an_earlier_one(nested):
    result = nested(
        "@pytest.mark.kv_backends('lineage')\n" + USES,
        files={
            "conftest.py": """
            import pytest
            def pytest_collection_modifyitems(items):
                for item in items:
                    item.add_marker(pytest.mark.kv_backends("lru"), append=False)
            """
        },
    )

    result.assert_outcomes(deselected=1)


def test_tests_of_the_matrix_can_be_selected_by_keyword(nested):
    assert ran(nested(USES, "-s", "-k", "lru")) == ["lru", "multi_lru"]
    assert ran(nested(USES, "-s", "-k", "not multi_lru")) == ["lineage", "lru"]


# ---------------------------------------------------------------------------------------------------- refused

GENERATE = """
def pytest_generate_tests(metafunc):
    if "kv_backend" in metafunc.fixturenames:
        metafunc.parametrize("kv_backend", ["lru"], indirect={indirect})
"""


@pytest.mark.parametrize("indirect", [True, False])
@pytest.mark.parametrize("place", ["conftest", "module"])
def test_pytest_generate_tests_over_kv_backend_is_refused(nested, place, indirect):
    generate = GENERATE.format(indirect=indirect)
    result = nested(USES, files={"conftest.py": generate}) if place == "conftest" else nested(generate + USES)

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_it.py::test: kv_backend is parametrised twice:*@pytest.mark.kv_backends(*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_an_error_of_a_custom_parametrisation_is_unchanged(nested):
    result = nested("@pytest.mark.parametrize('missing', [1])\ndef test(kv_harness): pass")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*uses no *'missing'*"])
    result.stdout.no_fnmatch_line("*parametrised twice*")


@pytest.mark.parametrize("value", ["'lruu'", "None", "('lru', {})"])
@pytest.mark.parametrize(
    "source",
    ["@pytest.mark.parametrize('kv_backend', [{}])\n" + USES, "@pytest.fixture\ndef kv_backend(): return {}\n" + USES],
    ids=["parametrize", "override"],
)
def test_an_unknown_backend_of_a_user_is_refused_in_one_line(nested, source, value):
    result = nested(source.replace("{}", value, 1))

    result.assert_outcomes(errors=1)
    nearest = "; did you mean 'lru'[?] known" if value == "'lruu'" else "; known"
    result.stdout.fnmatch_lines([f"kvmock: kv_backend is {value}{nearest}: {', '.join(BACKENDS)}"])
    result.stdout.no_fnmatch_line("*pytest_kvmock/plugin*")


def test_a_backend_whose_manager_has_another_name_is_refused(nested):
    result = nested(
        USES,
        files={
            "conftest.py": """
            import dataclasses, types
            from pytest_kvmock.engines import backends
            specs = dict(backends.BACKENDS)
            specs["lru"] = dataclasses.replace(specs["lru"], make=specs["lineage"].make)
            import pytest
            @pytest.fixture(autouse=True)
            def liar(monkeypatch):
                monkeypatch.setattr(backends, "BACKENDS", types.MappingProxyType(specs))
            """
        },
    )

    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["kvmock: backend lru: *calls itself 'lineage'*"])


# ---------------------------------------------------------------------------------------------------- order


def test_collection_is_the_same_with_any_hash_seed(nested, monkeypatch):
    source = """
    @pytest.mark.kv_backends("lru", "lineage")
    def test_1(kv_harness): pass
    @pytest.mark.kv_backends(exclude={"multi_lru", "lru"} - {"lru"})
    def test_2(kv_harness): pass
    def test_3(kv_manager, kv_events): pass
    """
    seen = []
    for seed in "01":
        monkeypatch.setitem(os.environ, "PYTHONHASHSEED", seed)
        result = nested(source, "--collect-only", "-q", subprocess=True)
        seen.append([line for line in result.outlines if "::" in line])

    assert len(seen[0]) == 2 + 2 + 3
    assert seen[0] == seen[1]


def test_the_plugin_works_with_strict_configuration(nested):
    strict = "[pytest]\naddopts = --strict-markers --strict-config\nxfail_strict = true\nkvmock_backends = lru\n"
    if pytest.version_tuple >= (9, 0):
        strict = "[pytest]\nstrict = true\nkvmock_backends = lru\n"

    result = nested(
        "@pytest.mark.kvmock(num_blocks=8)\n@pytest.mark.kv_backends('lru')\n" + USES,
        "-m",
        "kvmock and kv_backends",
        "-W",
        "error",
        files={"pytest.ini": strict},
    )

    result.assert_outcomes(passed=1)


@takes_long
def test_the_plugin_can_be_switched_off(pytester):
    pytester.makepyfile("def test(): pass")

    result = pytester.run(sys.executable, "-m", "pytest", "-p", "no:kvmock", "-q")

    result.assert_outcomes(passed=1)
