"""The cost of the plugin: of its import, for suites that do not use it, and for a test that does.

Suites run in separate processes, with the other installed plugins off. CPU time is compared, as the noise of the wall
clock is larger than these figures. Bytecode must be writable, as it is for users.

If the project is not installed, it is loaded by `-p`; the search for its entry point is then not measured.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

from benchmarks.measure import Figure

TESTS, PAIRS = 1_000, 21
IMPORT = """
import json, sys, time
start = time.process_time()
import pytest
middle, before = time.process_time(), set(sys.modules)
import pytest_kvmock.plugin
print(json.dumps([(time.process_time() - middle) / (middle - start), len(set(sys.modules) - before)]))
"""
# Chain and harness in turn, in one run: a slow machine affects both.
USED = """
import pytest

@pytest.fixture
def f0(): return 0
{chain}
{tests}
"""
# Writes the time of each test, all phases, into a file.
CONFTEST = """
import collections, json, time
import pytest

SECONDS = collections.defaultdict(list)

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    start = time.process_time()
    result = yield
    SECONDS[item.originalname.rpartition("_")[0]].append(time.process_time() - start)
    return result

def pytest_sessionfinish():
    with open("seconds.json", "w") as out:
        json.dump(SECONDS, out)
"""


def environment():
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "PYTHONDONTWRITE"))}
    root = str(Path(__file__).parents[1])
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH"))))}


def plugins():
    return {point.name for point in entry_points(group="pytest11")}


def others_off():
    """Return options that block the other plugins by name. Autoloading stays on: the search for plugins has a cost,
    too.
    """
    return [part for name in sorted(plugins() - {"kvmock"}) for part in ("-p", f"no:{name}")]


def switch(*, on):
    if "kvmock" in plugins():
        return [] if on else ["-p", "no:kvmock"]
    return ["-p", "pytest_kvmock.plugin"] if on else []


def run_suite(directory, *args, on=True):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *others_off(), *switch(on=on), *args]
    subprocess.run(command, cwd=directory, env=environment(), stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def importing(runs=7):
    """Return the CPU time of importing the plugin relative to importing pytest, and the number of modules that it
    loads.
    """
    command = [sys.executable, "-c", IMPORT]
    out = [json.loads(subprocess.check_output(command, env=environment(), text=True)) for _ in range(runs)]
    return statistics.median(share for share, _ in out), out[0][1]


def unused(pairs):
    """Return the CPU seconds of a run of 1,000 empty tests without the plugin, and the increase with it."""
    without, more = [], []
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "test_empty.py").write_text("".join(f"def test_{n}(): pass\n" for n in range(TESTS)))
        run_suite(directory)
        run_suite(directory, on=False)
        for pair in range(pairs):
            times = {}
            for blocked in (pair % 2, 1 - pair % 2):
                times[blocked] = run_suite(directory, on=not blocked)
            without.append(times[1])
            more.append(times[0] - times[1])
    return statistics.median(without), statistics.median(more)


def used(tests=500):
    """Return the median CPU seconds of three tests: an empty one, one with a chain of ten empty fixtures, and one with
    `kv_manager` and `kv_events`.
    """
    chain = "".join(f"@pytest.fixture\ndef f{n}(f{n - 1}): return {n}\n" for n in range(1, 10))
    each = "".join(
        f"def test_empty_{n}(): pass\ndef test_chain_{n}(f9): pass\n@pytest.mark.kv_backends('lineage')\ndef "
        f"test_kv_{n}(kv_manager, kv_events): pass\n"
        for n in range(tests)
    )
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "conftest.py").write_text(CONFTEST)
        Path(directory, "test_used.py").write_text(USED.format(chain=chain, tests=each))
        run_suite(directory)
        seconds = json.loads(Path(directory, "seconds.json").read_text())
    return {name: statistics.median(values) for name, values in seconds.items()}


def import_cost():
    share, modules = importing()
    name = "importing the plugin: its time beside the peer's"
    yield Figure(name, share, 0.04, "importing pytest", most=True)
    yield Figure("importing the plugin: modules it brings", modules, 8, unit="modules", most=True)


def unused_cost():
    base, more = unused(PAIRS)
    name = f"a suite of {TESTS:,} tests that does not use the plugin: its time beside the peer's"
    yield Figure(name, 1 + more / base, 1.02, "the same suite without the plugin", most=True)


def used_cost():
    times = used()
    empty, chain, mine = times["test_empty"], times["test_chain"], times["test_kv"]
    yield Figure(
        "a test that uses kv_manager and kv_events: its time beyond an empty one, beside the peer's",
        (mine - empty) / (chain - empty),
        1.3,
        "a chain of ten empty fixtures",
        most=True,
        why="a harness, a manager and a log are made for each test",
    )
