"""What the plugin costs: to import, to suites that do not use it, to a test that does.

Suites run in processes of their own, with the other installed plugins off, and CPU time is compared: run-to-run noise
of the wall clock is larger than what is measured here. Bytecode must be writable, as it is for users.

    python benchmarks/bench_plugin.py [pairs]
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

TESTS = 1_000
IMPORT = """
import json, sys, time
import pytest
before = set(sys.modules)
start = time.process_time()
import pytest_kvmock.plugin
seconds = time.process_time() - start
print(json.dumps([seconds, len(set(sys.modules) - before)]))
"""
# Chain and harness in turn, in one run: what slows the machine down slows both.
USED = """
import pytest

@pytest.fixture
def f0(): return 0
{chain}
{tests}
"""
# Time a test, all phases, into a file.
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
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "PYTHONDONTWRITE"))}


def others_off():
    """The other plugins are blocked by name, not by switching autoloading off: finding plugins has its cost too."""
    names = {point.name for point in entry_points(group="pytest11")} - {"kvmock"}
    return [part for name in sorted(names) for part in ("-p", f"no:{name}")]


def cpu_seconds(directory, *args):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *others_off(), *args]
    subprocess.run(command, cwd=directory, env=environment(), stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def importing(runs=7):
    command = [sys.executable, "-c", IMPORT]
    out = [json.loads(subprocess.check_output(command, env=environment(), text=True)) for _ in range(runs)]
    return statistics.median(seconds for seconds, _ in out), out[0][1]


def unused(pairs):
    """CPU seconds that a run of 1,000 empty tests takes without the plugin, and how much more with it."""
    without, more = [], []
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "test_empty.py").write_text("".join(f"def test_{n}(): pass\n" for n in range(TESTS)))
        cpu_seconds(directory)
        for pair in range(pairs):
            times = {}
            for blocked in (pair % 2, 1 - pair % 2):
                times[blocked] = cpu_seconds(directory, *(["-p", "no:kvmock"] if blocked else []))
            without.append(times[1])
            more.append(times[0] - times[1])
    return statistics.median(without), statistics.median(more)


def used(tests=500):
    """Median CPU seconds of a test: a chain of ten empty fixtures; `kv_manager` and `kv_events`."""
    chain = "".join(f"@pytest.fixture\ndef f{n}(f{n - 1}): return {n}\n" for n in range(1, 10))
    each = "".join(
        f"def test_empty_{n}(): pass\n"
        f"def test_chain_{n}(f9): pass\n"
        f"@pytest.mark.kv_backends('lineage')\ndef test_kv_{n}(kv_manager, kv_events): pass\n"
        for n in range(tests)
    )
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "conftest.py").write_text(CONFTEST)
        Path(directory, "test_used.py").write_text(USED.format(chain=chain, tests=each))
        cpu_seconds(directory)
        seconds = json.loads(Path(directory, "seconds.json").read_text())
    return {name: statistics.median(values) for name, values in seconds.items()}


def main():
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    seconds, modules = importing()
    print(f"import after pytest: {seconds * 1e3:.1f} ms, {modules} modules")
    times = used()
    empty, chain, mine = times["test_empty"], times["test_chain"], times["test_kv"]
    print(f"a test, CPU: empty {empty * 1e6:.0f} us, ten empty fixtures {chain * 1e6:.0f} us, ours {mine * 1e6:.0f} us")
    print(f"  ours over empty: {(mine - empty) / (chain - empty):.2f} x that of ten empty fixtures")
    base, more = unused(pairs)
    print(f"{TESTS:,} tests that do not use it, CPU: {base * 1e3:.0f} ms, with the plugin {more * 1e3:+.1f} ms")


if __name__ == "__main__":
    main()
