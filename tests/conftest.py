"""What several test files need."""

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

# pytester takes out of sys.modules what a test within a test has imported first. Imported a second time, pyzmq has two
# classes `Again`: one that its core raises, and one that is caught.
with contextlib.suppress(ImportError):
    import zmq  # noqa: F401 - to have it imported

# A slow or busy machine is no failure; what must be fast is measured in benchmarks/. CI tries the same examples each
# time, so that a change is judged and not the luck of the day; at a desk new ones are tried.
settings.register_profile(
    "kvmock",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("kvmock")


def pytest_collection_finish():
    """What is collected lives until the end: the garbage collector need not look through it a hundred times."""
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
    """Whether a quick run has each test of a file with its first parameters: in each room here but the plugin's.

    What a Python or pytest breaks in a room shows with any parameters; what a user sees of the plugin is in each of
    them.
    """
    if DEEP or not path.is_relative_to(HERE):
        return False
    room = path.relative_to(HERE).parts[0]
    return room != "plugin" and (HERE / room).is_dir()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around all that parametrises, the matrix of the plugin as well
def pytest_generate_tests(metafunc):
    """Leave the first parameters before a test is made of any: 20,000 are collected for 8,000 otherwise."""
    yield
    definition = metafunc.definition
    if is_thinned(definition.path) and not any(definition.iter_markers("each_parameter")):
        del metafunc._calls[1:]


def cpu_s():
    """CPU seconds of this process and of the ones that it started and that have ended."""
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
    reports = [each for each in terminalreporter.getreports("") if hasattr(each, "cpu_s")]  # those of teardowns
    if config.getoption("--cpu"):
        cpu_times(terminalreporter, reports)
    if config.getoption("--most-cpu") and not DEEP:
        too_long = [each for each in reports if each.cpu_s > getattr(each, "most_cpu_s", each.cpu_s)]
        for report in too_long:
            terminalreporter.write_line(
                f"FAILED {report.nodeid} - {report.cpu_s:.1f} s of CPU time, over {report.most_cpu_s:.1f}: "
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
    """Read a recording of a real program."""

    def read(name):
        path = Path(__file__).parent / "data" / name
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text()
        return json.loads(text)

    return read


@pytest.fixture(scope="session")
def traces_dir():
    """Directory of the published Mooncake traces: `$KVMOCK_TRACES`, or `../shared/traces` beside the checkout.

    They are not part of the project. A test that needs them is skipped where they are not there; a directory that was
    named and is not there is a failure.
    """
    named = os.environ.get("KVMOCK_TRACES")
    found = Path(named) if named else Path(__file__).parents[2] / "shared" / "traces"
    if not found.is_dir():
        if named:
            pytest.fail(f"KVMOCK_TRACES={named} is not a directory")
        pytest.skip("the Mooncake traces are not here: set KVMOCK_TRACES to their directory")
    return found
