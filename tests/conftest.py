"""Fixtures and hooks that several test files need."""

import contextlib
import gc
import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from acme_dialect import acme  # noqa: F401 - a fixture
from depth import DEEP, MARKERS, MOST_CPU_S, examples, most_cpu_now
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
BEGAN = pytest.StashKey[float]()

# pytester removes from sys.modules what a nested test was the first to import. If pyzmq were imported a second time, it
# would have two classes `Again`: its core would raise one of them, and callers would catch the other.
with contextlib.suppress(ImportError):
    import zmq  # noqa: F401 - to have it imported

# A slow or busy machine is no failure; benchmarks/ measures what must be fast. CI tries the same examples each time, so
# it judges the change and not the luck of the day; local runs try new examples.
settings.register_profile(
    "kvmock",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("kvmock")


def pytest_collection_finish():
    """Freeze the collected items: they live until the end, so the garbage collector need not scan them again."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption(
        "--soak", action="store_true", help="run 5,000 rounds of the socket tests on a busy machine, and not 40"
    )
    parser.addoption(
        "--all-routers",
        action="store_true",
        help="run 1,280 right routers, to count how often assertions on reports fail",
    )
    parser.addoption(
        "--cpu",
        action="store_true",
        help="say at the end where the CPU time went: by room (a folder here), by file, by test; with -n as well",
    )
    parser.addoption(
        "--most-cpu",
        action="store_true",
        help=f"fail a quick run in which a test takes more than {MOST_CPU_S:g} s of CPU time and says nothing of it, "
        "and name it",
    )


def pytest_configure(config):
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def is_thinned(path):
    """Return whether a quick run has each test of a file with its first parameters: in each folder here except plugin.

    A fault of a Python or pytest version shows there with any parameters, but users see the plugin with all of them.
    """
    if DEEP or not path.is_relative_to(HERE):
        return False
    room = path.relative_to(HERE).parts[0]
    return room != "plugin" and (HERE / room).is_dir()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around everything that parametrises, including the plugin's matrix
def pytest_generate_tests(metafunc):
    """Keep only the first parameters before tests are made of them: otherwise 20,000 are collected for 8,000."""
    yield
    definition = metafunc.definition
    if is_thinned(definition.path) and not any(definition.iter_markers("each_parameter")):
        del metafunc._calls[1:]


def cpu_s():
    """Return the CPU seconds of this process and of the ended processes that it started."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[BEGAN] = cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.cpu_s = cpu_s() - item.stash[BEGAN]  # a worker of xdist sends it with the report
        if report.cpu_s > MOST_CPU_S and not any(item.iter_markers("worth_its_time")):
            report.most_cpu_s = most_cpu_now()
    return report


def pytest_terminal_summary(terminalreporter, config):
    reports = [each for each in terminalreporter.getreports("") if hasattr(each, "cpu_s")]  # only teardowns have it
    if config.getoption("--cpu"):
        cpu_times(terminalreporter, reports)
    if config.getoption("--most-cpu") and not DEEP:
        # A shared machine changes its speed within seconds: the limit is that of the slowest moment.
        unmarked = [each for each in reports if hasattr(each, "most_cpu_s")]
        most_s = max((each.most_cpu_s for each in unmarked), default=MOST_CPU_S)
        too_long = [each for each in unmarked if each.cpu_s > most_s]
        for report in too_long:
            terminalreporter.write_line(
                f"FAILED {report.nodeid} - {report.cpu_s:.1f} s of CPU time, over {most_s:.1f}: "
                "do less, or say @takes_long or @worth_its_time (tests/depth.py)"
            )
        if too_long:
            config.pluginmanager.get_plugin("session").exitstatus = pytest.ExitCode.TESTS_FAILED


def cpu_times(terminalreporter, reports):
    by_room, by_file, by_test = Counter(), Counter(), Counter()
    for report in reports:
        path, _, name = report.nodeid.partition("::")
        folders = path.split("/")[:-1]
        for counter, key in (
            (by_room, "/".join(folders[:2])),
            (by_file, path),
            (by_test, f"{path}::{name.partition('[')[0]}"),
        ):
            counter[key] += report.cpu_s
    terminalreporter.section(f"CPU time, {sum(by_room.values()):.0f} s in all")
    for title, counter, most in (("room", by_room, None), ("file", by_file, 25), ("test", by_test, 40)):
        terminalreporter.write_line(f"   s  {title}")
        for key, seconds in counter.most_common(most):
            terminalreporter.write_line(f"{seconds:6.1f}  {key}")


@pytest.fixture(scope="session")
def recording():
    """Return a function that reads a recording of a real program."""

    def read(name):
        path = Path(__file__).parent / "data" / name
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text()
        return json.loads(text)

    return read


@pytest.fixture(scope="session")
def traces_dir():
    """Return the directory of the published Mooncake traces: `$KVMOCK_TRACES`, or `../shared/traces` near the checkout.

    They are not part of the project. A test that needs them is skipped if they are missing; a missing directory that
    the variable names is a failure.
    """
    named = os.environ.get("KVMOCK_TRACES")
    found = Path(named) if named else Path(__file__).parents[2] / "shared" / "traces"
    if not found.is_dir():
        if named:
            pytest.fail(f"KVMOCK_TRACES={named} is not a directory")
        pytest.skip("the Mooncake traces are not here: set KVMOCK_TRACES to their directory")
    return found
