"""The cost of the plugin for those who do not use it: modules, time, hooks."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import pytest_kvmock.plugin

MEASURE = """
import json, sys
import pytest
before = set(sys.modules)
from importlib import import_module
for name in import_module("pytest_kvmock.plugin").pytest_plugins:
    import_module(name)
print(json.dumps(sorted(name for name in set(sys.modules) - before if name != "importlib")))
"""

LIGHT = {
    "pytest_kvmock",
    "pytest_kvmock.plugin",
    "pytest_kvmock.plugin.fixtures",
    "pytest_kvmock.plugin.hooks",
    "pytest_kvmock.plugin.hookspecs",
    "pytest_kvmock.plugin.matrix",
    "pytest_kvmock.plugin.options",
    "pytest_kvmock.plugin.settings",
}

for _name in pytest_kvmock.plugin.pytest_plugins:
    if ".contrib." in _name:
        LIGHT |= {_name, _name.removesuffix(".plugin"), "pytest_kvmock.contrib"}


def in_a_new_process(code, *args):
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_plugin_loads_few_modules_and_no_other_library():
    # Its time is measured in benchmarks/: a timed test would fail on a busy machine.
    assert set(in_a_new_process(MEASURE)) == LIGHT
    assert len([name for name in LIGHT if ".contrib" not in name]) <= 8


def test_a_suite_that_does_not_use_the_plugin_loads_no_further_module(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import pytest, unittest
        @pytest.mark.parametrize("n", [1, 2])
        def test(n, tmp_path): pass
        def test_fails(): assert 0
        class T(unittest.TestCase):
            def test(self): pass
        """
    )
    code = """
import json, sys
import pytest
pytest.main(["-q", "-p", "kvmock", "-p", "no:cacheprovider"])
print()
print(json.dumps(sorted(m for m in sys.modules if m.startswith("pytest_kvmock") or m in ("yaml", "asyncio", "xxhash"))))
"""
    assert sorted(LIGHT) == in_a_new_process(code)


@pytest.mark.parametrize("with_tiers", [False, True])
def test_tiers_are_loaded_only_by_tests_that_use_them(pytester, monkeypatch, with_tiers):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        f"""
        import pytest
        @pytest.mark.kvmock(num_blocks=4, tiers={{"host": 9}} if {with_tiers} else None)
        def test(kv_worker, kv_harness, kv_prompt):
            for _ in range(4):
                kv_worker.serve(kv_prompt(3), 4)
            kv_harness.assert_in_sync()
        """
    )
    code = """
import json, sys
import pytest
pytest.main(["-q", "-p", "kvmock", "-p", "no:cacheprovider"])
print()
loaded = sorted(m for m in sys.modules if m.startswith("pytest_kvmock.engines"))
print(json.dumps([m for m in loaded if "tiers" in m or ".host" in m]))
"""
    loaded = in_a_new_process(code)
    assert with_tiers == bool(loaded), loaded


MODULES_OF_A_HARNESS = 95
"""Number of modules loaded when a test with `kv_harness` begins, without those of `contrib`. It may fall."""


def test_a_test_with_a_harness_loads_no_engines_and_no_fleets(pytester, monkeypatch):
    """A router's own tests need its index, but neither engines in virtual time nor fleets."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import json, sys
        def test(kv_harness):
            print()
            print(json.dumps(sorted(m for m in sys.modules if m.startswith("pytest_kvmock"))))
        """
    )
    code = (
        "import pytest; pytest.main(['-q', '-s', '-p', 'kvmock', '-p', 'no:cacheprovider', '--kv-backend', 'lineage'])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = json.loads(next(line for line in output.splitlines() if line.startswith("[")))

    core = [name for name in loaded if ".contrib" not in name]
    assert len(core) == MODULES_OF_A_HARNESS, (
        "who loads a module more says why such a test needs it; who needs less lowers it"
    )
    in_time = ("fleets", "engines.schedulers")
    assert [name for name in loaded if name.removeprefix("pytest_kvmock.").startswith(in_time)] == []


def test_only_these_hooks_run_for_every_test():
    """Each further hook costs every test of every suite with the plugin installed."""
    hooks = {
        name
        for module in pytest_kvmock.plugin.pytest_plugins
        for name in dir(importlib.import_module(module))
        if name.startswith("pytest_") and not name.startswith("pytest_kvmock")
    }
    once = {
        "pytest_addhooks",
        "pytest_addoption",
        "pytest_cmdline_main",
        "pytest_configure",
        "pytest_load_initial_conftests",
        "pytest_make_collect_report",  # once per class, and only if contracts are loaded
        "pytest_report_header",
        "pytest_terminal_summary",
    }

    assert hooks - once == {
        "pytest_collection_modifyitems",
        "pytest_generate_tests",
        "pytest_runtest_call",
        "pytest_runtest_teardown",
    }


def test_no_fixture_is_autouse(nested):
    result = nested("def test(request): print('has', sorted(request.fixturenames))", "-s")

    result.stdout.fnmatch_lines(["*has [[]'request']*"])


@pytest.mark.parametrize(
    ("fixture", "closure"),
    [
        ("kv_events", ["_kvmock_case", "kv_base_profile", "kv_events", "kv_index"]),
        (
            "kv_manager",
            ["_kvmock_case", "_kvmock_matrix", "kv_backend", "kv_base_profile", "kv_index", "kv_manager"],
        ),
        ("kv_backend", ["_kvmock_matrix", "kv_backend"]),
        (
            "kv_engine",
            [
                "_kvmock_case",
                "_kvmock_matrix",
                "kv_backend",
                "kv_base_profile",
                "kv_engine",
                "kv_index",
            ],
        ),
    ],
)
def test_the_fixture_closure_of_a_test_is_small(nested, fixture, closure):
    """Each fixture costs about 40 µs in pytest itself."""
    result = nested(f"def test({fixture}, request): print('has', [n for n in request.fixturenames if 'kv' in n])", "-s")

    (shown,) = {line.partition("has ")[2] for line in result.outlines if "has [" in line}
    assert closure == sorted(json.loads(shown.rstrip(" .").replace("'", '"')))
