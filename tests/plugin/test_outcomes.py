"""The outcome of a test whose events were wrong: one table over everything that decides an outcome."""

from __future__ import annotations

import gc
import warnings
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field

import pytest
from depth import few

ERROR = "1 KV event error: block_not_found (worker 65536, event 0)*"
LATE = "1 KV event error: block_not_found (worker 65536, event 0)*after the test body*"
NOTE = "*kvmock: also 1 KV event error: block_not_found (worker 65536, event 0)"
LOG = "*Captured kvmock events call*"
LATE_LOG = "*Captured kvmock events teardown*"

subtests = pytest.mark.skipif(pytest.version_tuple < (9, 0), reason="subtests came with pytest 9.0")


@dataclass
class Row:
    """A test, its arguments, its outcomes, and lines that are shown in this order or hidden."""

    source: str
    outcomes: dict[str, int]
    shown: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    args: list[str] = field(default_factory=list)
    plugins: list[str] = field(default_factory=list)
    marks: list[object] = field(default_factory=list)


INDEX = """
from pytest_kvmock.oracle import RadixIndex

class Index:
        def __init__(self): self.inner = RadixIndex()
"""

ASYNC_INDEX = (
    INDEX
    + """
        async def apply(self, event): self.inner.apply(event)
        async def find_matches(self, hashes): return self.inner.find_matches(hashes)

@pytest.fixture
def kv_index(): return Index()
"""
)

TABLE = {
    "pass": Row("def test(kv_sink): kv_sink(GOOD)", {"passed": 1}, hidden=["*kvmock*events*", "*KV event*"]),
    "unused": Row("def test(): pass", {"passed": 1}, hidden=["*KV event*"]),
    # ------------------------------------------------------------------------------------ body and events
    "event error": Row(
        "def test(kv_sink): kv_sink(BAD)",
        {"failed": 1},
        shown=[
            "*___ test ___*",
            ERROR,
            LOG,
            "*event 0*Removed*block_not_found*",
            "FAILED*::test - Failed: 1 KV event*",
        ],
        hidden=["*hidden*", "*pytest_kvmock/plugin*"],
    ),
    "body failure": Row(
        "def test(kv_sink):\n kv_sink(GOOD)\n assert 0", {"failed": 1}, shown=["E *assert 0", LOG], hidden=["*also*"]
    ),
    "body failure without events": Row("def test(kv_sink): assert 0", {"failed": 1}, hidden=["*kvmock events*"]),
    "both": Row(
        "def test(kv_sink):\n kv_sink(BAD)\n assert 0",
        {"failed": 1},
        shown=["E *assert 0", f"E {NOTE}", LOG, "FAILED*::test - assert 0"],
    ),
    "both, and the body's failure tells already": Row(
        "def test(kv_sink, kv_events):\n kv_sink(BAD)\n kv_events.assert_no_event_errors()",
        {"failed": 1},
        shown=["E *1 KV event error: block_not_found*", LOG],
        hidden=["*kvmock: also*"],
    ),
    "the code under test swallows everything": Row(
        "def test(kv_sink):\n try: kv_sink(BAD)\n except Exception: pass", {"failed": 1}, shown=[ERROR]
    ),
    "asked for in the body": Row(
        "def test(request): request.getfixturevalue('kv_sink')(BAD)", {"failed": 1}, shown=[ERROR]
    ),
    "set-up error": Row(
        """
        @pytest.fixture
        def broken(kv_sink):
            kv_sink(BAD)
            raise OSError("mine")
        def test(broken): pass
        """,
        {"errors": 1},
        shown=["E *OSError: mine"],
        hidden=["*KV event error*"],
    ),
    # ------------------------------------------------------------------------------------ other rules
    "an event is lost": Row(
        "def test(kv_harness, kv_prompt):\n kv_harness.drop_next()\n kv_harness.worker(0).serve(kv_prompt())",
        {"failed": 3},
        shown=["1 KV event error: event_id_gap (worker 0*", "FAILED*test?lru?*1 KV event error: event_id_gap*"],
    ),
    "an index forgets": Row(
        INDEX
        + """
        def apply(self, event):
            if isinstance(event.event.data, Stored):
                self.inner.apply(event)
        def find_matches(self, hashes): return self.inner.find_matches(hashes)

@pytest.fixture
def kv_index(): return Index()

def test(kv_harness, kv_prompt):
    worker = kv_harness.worker(0)
    worker.serve(kv_prompt())
    worker.clear()
        """,
        {"failed": 3},
        shown=["1 KV event error: index_drift (worker 0*"],
    ),
    "an index raises": Row(
        INDEX
        + """
        def apply(self, event): raise OSError("full")
        def find_matches(self, hashes): return {}

@pytest.fixture
def kv_index(): return Index()

def test(kv_sink): kv_sink(GOOD)
        """,
        {"failed": 1},
        shown=["1 KV event error: index_failure (worker 65536, event 0)*"],
    ),
    "what a sink is compared with raises": Row(
        "def test(kv_sink):\n kv_sink(GOOD)\n kv_sink.compare(lambda: 1 / 0)",
        {"failed": 1},
        shown=["*ZeroDivisionError*"],
    ),
    "what a sink is compared with raises, and so did the body": Row(
        "def test(kv_sink):\n kv_sink(GOOD)\n kv_sink.compare(lambda: 1 / 0)\n assert 0",
        {"failed": 1},
        shown=["E *assert 0", "FAILED*::test - assert 0"],
    ),
    # ------------------------------------------------------------------------------------ skip and xfail
    "skip": Row("def test(kv_sink):\n kv_sink(BAD)\n pytest.skip('why')", {"skipped": 1}, hidden=["*KV event*"]),
    "SkipTest": Row("def test(kv_sink):\n kv_sink(BAD)\n raise unittest.SkipTest('why')", {"skipped": 1}),
    "imperative xfail": Row("def test(kv_sink):\n kv_sink(BAD)\n pytest.xfail('why')", {"xfailed": 1}),
    "xfail": Row("@pytest.mark.xfail\ndef test(kv_sink): kv_sink(BAD)", {"xfailed": 1}),
    "xfail strict": Row("@pytest.mark.xfail(strict=True)\ndef test(kv_sink): kv_sink(BAD)", {"xfailed": 1}),
    "xfail and body failure": Row(
        "@pytest.mark.xfail(strict=True)\ndef test(kv_sink):\n kv_sink(BAD)\n assert 0", {"xfailed": 1}
    ),
    "xfail, nothing wrong": Row("@pytest.mark.xfail\ndef test(kv_sink): kv_sink(GOOD)", {"xpassed": 1}),
    "xfail strict, nothing wrong": Row(
        "@pytest.mark.xfail(strict=True)\ndef test(kv_sink): kv_sink(GOOD)", {"failed": 1}, shown=["*XPASS(strict)*"]
    ),
    "xfail raises Failed": Row(
        "@pytest.mark.xfail(raises=pytest.fail.Exception)\ndef test(kv_sink): kv_sink(BAD)", {"xfailed": 1}
    ),
    "limit: xfail raises AssertionError": Row(
        "@pytest.mark.xfail(raises=AssertionError)\ndef test(kv_sink): kv_sink(BAD)", {"failed": 1}, shown=[ERROR]
    ),
    # ------------------------------------------------------------------------------------ expected and allowed
    "expected": Row(
        "def test(kv_sink, kv_events):\n with kv_events.expect_error('block_not_found'): kv_sink(BAD)", {"passed": 1}
    ),
    "expected for the test": Row(
        "def test(kv_sink, kv_events):\n kv_events.expect_error('block_not_found')\n kv_sink(BAD)", {"passed": 1}
    ),
    "expected and not seen": Row(
        "def test(kv_sink, kv_events):\n kv_events.expect_error('block_not_found')\n kv_sink(GOOD)",
        {"failed": 1},
        shown=["expected 1 block_not_found, saw none in 1 KV event*", LOG],
    ),
    "expected and not seen, and errors are ignored": Row(
        "@pytest.mark.kvmock(event_errors='ignore')\n"
        "def test(kv_sink, kv_events): kv_events.expect_error('block_not_found')",
        {"failed": 1},
    ),
    "allowed": Row("@pytest.mark.kvmock(allow=['block_not_found'])\ndef test(kv_sink): kv_sink(BAD)", {"passed": 1}),
    "another rule allowed": Row(
        "@pytest.mark.kvmock(allow=['invalid_block'])\ndef test(kv_sink): kv_sink(BAD)", {"failed": 1}
    ),
    # ------------------------------------------------------------------------------------ policies
    "errors ignored": Row("@pytest.mark.kvmock(event_errors='ignore')\ndef test(kv_sink): kv_sink(BAD)", {"passed": 1}),
    "errors ignored, body failure": Row(
        "@pytest.mark.kvmock(event_errors='ignore')\ndef test(kv_sink):\n kv_sink(BAD)\n assert 0",
        {"failed": 1},
        shown=["E *assert 0", LOG],
        hidden=["*kvmock: also*"],
    ),
    "errors warned of": Row(
        "@pytest.mark.kvmock(event_errors='warn')\ndef test(kv_sink): kv_sink(BAD)",
        {"passed": 1, "warnings": 1},
        shown=["*test_it.py:9: KvEventWarning: 1 KV event error: block_not_found*"],
    ),
    "errors warned of, under -W error": Row(
        "@pytest.mark.kvmock(event_errors='warn')\ndef test(kv_sink): kv_sink(BAD)",
        {"failed": 1},
        shown=[f"KvEventWarning: {ERROR}", LOG],
        hidden=["*pytest_kvmock/plugin*"],
        args=["-W", "error"],
    ),
    "errors warned of, and the warning filtered": Row(
        "@pytest.mark.kvmock(event_errors='warn')\ndef test(kv_sink): kv_sink(BAD)",
        {"passed": 1},
        args=["-W", "ignore::pytest_kvmock.plugin.KvEventWarning"],
    ),
    "warnings are recorded": Row("def test(kv_sink):\n kv_sink(GOOD)\n kv_sink(TWICE)", {"passed": 1}),
    "warnings are shown with the log": Row(
        "def test(kv_sink):\n kv_sink(GOOD)\n kv_sink(TWICE)\n assert 0",
        {"failed": 1},
        shown=["*duplicate_store*"],
        hidden=["*kvmock: also*"],
    ),
    "warnings fail": Row(
        "@pytest.mark.kvmock(event_warnings='fail')\ndef test(kv_sink):\n kv_sink(GOOD)\n kv_sink(TWICE)",
        {"failed": 1},
        shown=["*duplicate_store (worker 65536, event 1)*"],
    ),
    "warnings warned of": Row(
        "@pytest.mark.kvmock(event_warnings='warn')\ndef test(kv_sink):\n kv_sink(GOOD)\n kv_sink(TWICE)",
        {"passed": 1, "warnings": 1},
        shown=["*KvEventWarning*duplicate_store*"],
    ),
    "log of passed tests": Row(
        "def test(kv_sink): kv_sink(GOOD)", {"passed": 1}, shown=[LOG], args=["--kv-show-log", "all", "-rP"]
    ),
    "no log": Row(
        "def test(kv_sink): kv_sink(BAD)",
        {"failed": 1},
        shown=[ERROR],
        hidden=["*kvmock events*"],
        args=["--kv-show-log", "none"],
    ),
    # ------------------------------------------------------------------------------------ late events
    "late, from a fixture set up after ours": Row(
        """
        @pytest.fixture
        def engine(kv_sink):
            yield
            kv_sink(BAD)
        def test(engine): pass
        """,
        {"passed": 1, "errors": 1},
        shown=["*ERROR at teardown of test*", LATE, LATE_LOG],
    ),
    "late, from a fixture set up before ours": Row(
        """
        @pytest.fixture
        def box():
            box = []
            yield box
            box[0](BAD)
        def test(box, kv_sink): box.append(kv_sink)
        """,
        {"passed": 1, "errors": 1},
        shown=["*ERROR at teardown of test*", LATE, LATE_LOG],
    ),
    "late, from a fixture of the module": Row(
        """
        @pytest.fixture(scope="module")
        def box():
            box = []
            yield box
            box[0](BAD)
        def test(box, kv_sink): box.append(kv_sink)
        """,
        {"passed": 1, "errors": 1},
        shown=[LATE],
    ),
    "late, and nothing wrong": Row(
        """
        @pytest.fixture
        def engine(kv_sink):
            yield
            kv_sink(GOOD)
        def test(engine): pass
        """,
        {"passed": 1},
    ),
    "late, after an error in the body": Row(
        """
        @pytest.fixture
        def engine(kv_sink):
            yield kv_sink
            kv_sink(BAD)
        def test(engine): engine(BAD)
        """,
        {"failed": 1},
        shown=[ERROR],
        hidden=["*after the test body*"],
    ),
    "late, after a body failure": Row(
        """
        @pytest.fixture
        def engine(kv_sink):
            yield
            kv_sink(BAD)
        def test(engine): assert 0
        """,
        {"failed": 1},
        hidden=["*after the test body*"],
    ),
    "late, after a skip": Row(
        """
        @pytest.fixture
        def engine(kv_sink):
            yield
            kv_sink(BAD)
        def test(engine): pytest.skip("why")
        """,
        {"skipped": 1},
        hidden=["*after the test body*"],
    ),
    "late, and the teardown failed by itself": Row(
        """
        @pytest.fixture
        def engine(kv_sink):
            yield
            kv_sink(BAD)
            raise OSError("mine")
        def test(engine): pass
        """,
        {"passed": 1, "errors": 1},
        shown=["E *OSError: mine", f"E {NOTE}", LATE_LOG],
        hidden=["*ExceptionGroup*"],
    ),
    "unused, and the teardown fails": Row(
        """
        @pytest.fixture
        def mine():
            yield
            raise OSError("mine")
        def test(mine): pass
        """,
        {"passed": 1, "errors": 1},
        shown=["E *OSError: mine"],
        hidden=["*KV event*", "*kvmock:*"],
    ),
    "late, and only warned of": Row(
        """
        @pytest.fixture
        def engine(kv_sink):
            yield
            kv_sink(BAD)
        @pytest.mark.kvmock(event_errors="warn")
        def test(engine): pass
        """,
        {"passed": 1, "warnings": 1},
        shown=["*KvEventWarning*after the test body*"],
    ),
    "limit: late, under a strict xfail": Row(
        """
        @pytest.fixture
        def engine(kv_sink):
            yield
            kv_sink(BAD)
        @pytest.mark.xfail(strict=True)
        def test(engine): pass
        """,
        {"failed": 1},
        shown=["*XPASS(strict)*"],
        hidden=["*after the test body*"],
    ),
    # ------------------------------------------------------------------------------------ subtests
    "subtests pass": Row(
        """
        def test(kv_sink, subtests):
            for n in range(2):
                with subtests.test(n=n): pass
            kv_sink(BAD)
        """,
        {"failed": 1},
        shown=[ERROR],
        marks=[subtests],
    ),
    "limit: a subtest fails too": Row(
        """
        def test(kv_sink, subtests):
            with subtests.test(): assert 0
            kv_sink(BAD)
        """,
        {"failed": 2},
        shown=["*SUBFAIL*", "FAILED*::test - Failed: 1 KV event error*"],
        marks=[subtests],
    ),
    # ------------------------------------------------------------------------------------ unittest
    "TestCase passes": Row(
        """
        class T(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def _kv(self, kv_sink): self.sink = kv_sink
            def test(self): self.sink(GOOD)
        """,
        {"passed": 1},
    ),
    "TestCase, event error": Row(
        """
        class T(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def _kv(self, kv_sink): self.sink = kv_sink
            def test(self): self.sink(BAD)
        """,
        {"failed": 1},
        shown=[ERROR, LOG],
    ),
    "limit: TestCase, both: the log, and no note": Row(
        """
        class T(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def _kv(self, kv_sink): self.sink = kv_sink
            def test(self):
                self.sink(BAD)
                self.assertEqual(1, 2)
        """,
        {"failed": 1},
        shown=["E *AssertionError: 1 != 2", LOG],
        hidden=["*kvmock: also*"],
    ),
    "TestCase, late after a body failure": Row(
        """
        class T(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def _kv(self, kv_sink):
                yield
                kv_sink(BAD)
            def test(self): self.assertEqual(1, 2)
        """,
        {"failed": 1},
        hidden=["*after the test body*"],
    ),
    "TestCase, skip": Row(
        """
        class T(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def _kv(self, kv_sink): self.sink = kv_sink
            def test(self):
                self.sink(BAD)
                self.skipTest("why")
        """,
        {"skipped": 1},
    ),
    "limit: TestCase, expectedFailure": Row(
        """
        class T(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def _kv(self, kv_sink): self.sink = kv_sink
            @unittest.expectedFailure
            def test(self): self.sink(BAD)
        """,
        {"failed": 1},
        shown=["*nexpected success*"],
    ),
    "doctest": Row(
        '''
        def f():
            """
            >>> from test_it import BAD
            >>> sink = getfixture("kv_sink")
            >>> sink(BAD)
            """
        ''',
        {"failed": 1},
        shown=[ERROR],
        args=["--doctest-modules"],
    ),
    # ------------------------------------------------------------------------------------ other plugins
    "asyncio": Row(
        "@pytest.mark.asyncio\nasync def test(kv_sink): kv_sink(BAD)",
        {"failed": 1},
        shown=[ERROR],
        plugins=["pytest_asyncio.plugin"],
    ),
    "asyncio, both": Row(
        "@pytest.mark.asyncio\nasync def test(kv_sink):\n kv_sink(BAD)\n assert 0",
        {"failed": 1},
        shown=["E *assert 0", f"E {NOTE}"],
        plugins=["pytest_asyncio.plugin"],
    ),
    "anyio": Row(
        "@pytest.mark.anyio\nasync def test(kv_sink): kv_sink(BAD)",
        {"failed": 2},
        shown=["FAILED*test?asyncio?*1 KV event error*", "FAILED*test?trio?*1 KV event error*"],
        plugins=["anyio"],
    ),
    "anyio, both": Row(
        "@pytest.mark.anyio\nasync def test(kv_sink):\n kv_sink(BAD)\n assert 0",
        {"failed": 2},
        shown=["E *assert 0", f"E {NOTE}"],
        plugins=["anyio"],
    ),
    "asyncio, an async index is not flushed": Row(
        ASYNC_INDEX + "\n@pytest.mark.asyncio\nasync def test(kv_sink): kv_sink(GOOD)",
        {"failed": 1},
        shown=["1 KV event error: not_flushed (worker 65536, event 0)*"],
        plugins=["pytest_asyncio.plugin"],
    ),
    "asyncio, an async index is flushed": Row(
        ASYNC_INDEX
        + """
@pytest.mark.asyncio
async def test(kv_harness, kv_worker, kv_prompt):
    prompt = kv_prompt()
    kv_worker.serve(prompt)
    await kv_harness.aflush()
    assert await kv_harness.aoverlap(prompt) == {0: 4}
        """,
        {"passed": 3},
        plugins=["pytest_asyncio.plugin"],
    ),
    "anyio, an async index is flushed": Row(
        ASYNC_INDEX
        + """
@pytest.mark.anyio
async def test(kv_harness, kv_worker, kv_prompt):
    prompt = kv_prompt()
    kv_worker.serve(prompt)
    await kv_harness.aflush()
    assert await kv_harness.aoverlap(prompt) == {0: 4}
        """,
        {"passed": 6},
        plugins=["anyio"],
    ),
    "anyio, late": Row(
        """
        @pytest.fixture
        def anyio_backend(): return "asyncio"
        @pytest.fixture
        async def engine(kv_sink):
            yield
            kv_sink(BAD)
        @pytest.mark.anyio
        async def test(engine): pass
        """,
        {"passed": 1, "errors": 1},
        shown=[LATE],
        plugins=["anyio"],
    ),
    "xdist": Row(
        """
        def test_good(kv_sink): kv_sink(GOOD)
        def test_bad(kv_sink): kv_sink(BAD)
        def test_both(kv_sink):
            kv_sink(BAD)
            assert 0
        @pytest.mark.xfail(strict=True)
        def test_xfail(kv_sink): kv_sink(BAD)
        @pytest.mark.kvmock(event_errors="warn")
        def test_warn(kv_sink): kv_sink(BAD)
        """,
        {"passed": 2, "failed": 2, "xfailed": 1, "warnings": 1},
        shown=["*KvEventWarning: 1 KV event error*", "FAILED*test_b*"],
        args=["-n", "2"],
        plugins=["xdist"],
    ),
    "reruns, mended": Row(
        """
        runs = []
        def test(kv_sink):
            runs.append(1)
            kv_sink(GOOD if len(runs) > 1 else BAD)
        """,
        {"passed": 1, "rerun": 1},
        args=["--reruns", "1"],
        plugins=["rerunfailures"],
    ),
    "reruns, not mended": Row(
        "def test(kv_sink): kv_sink(BAD)",
        {"failed": 1, "rerun": 2},
        shown=[ERROR],
        args=["--reruns", "2"],
        plugins=["rerunfailures"],
    ),
    "reruns, mended by not asking any more": Row(
        """
        runs = []
        def test(request):
            runs.append(1)
            if len(runs) == 1:
                request.getfixturevalue("kv_sink")(BAD)
        """,
        {"passed": 1, "rerun": 1},
        args=["--reruns", "1"],
        plugins=["rerunfailures"],
    ),
    "hypothesis over the matrix": Row(
        """
        from hypothesis import given, settings, strategies as st
        from pytest_kvmock import RouterHarness

        @settings(max_examples=5, database=None)
        @given(blocks=st.integers(1, 4))
        def test(kv_backend, blocks):
            harness = RouterHarness(backend=kv_backend)
            assert harness.worker(0).manager.backend == kv_backend
        """,
        {"passed": 3},
        plugins=["hypothesispytest"],
    ),
}


@pytest.mark.parametrize("row", [pytest.param(row, id=name, marks=row.marks) for name, row in few(TABLE.items(), 25)])
def test_each_combination_has_its_outcome(nested, row):
    result = nested(row.source, *row.args, plugins=row.plugins)
    if row.plugins:
        # Plugins that run event loops may leave one to the garbage collector, which would then warn in another test.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    counted = result.parseoutcomes()
    assert row.outcomes == {_plural(key): counted[key] for key in counted if key != "seconds"}
    result.stdout.fnmatch_lines(row.shown)
    for line in row.hidden:
        result.stdout.no_fnmatch_line(line)


def _plural(noun):
    return {"error": "errors", "warning": "warnings", "reruns": "rerun"}.get(noun, noun)


# ---------------------------------------------------------------------------------------------------- junit


def _properties(case):
    return [(one.get("name"), one.get("value")) for one in case.iter("property")]


def test_junit_has_one_testcase_with_backend_events_and_errors_as_properties(nested, pytester):
    nested(
        """
        @pytest.mark.kv_backends("lru")
        def test(kv_harness, kv_sink):
            kv_sink(GOOD)
            kv_sink(BAD)
            assert 0
        """,
        "--junit-xml=out.xml",
    )

    (case,) = ET.parse(pytester.path / "out.xml").iter("testcase")
    counts = [("kvmock.events", "2"), ("kvmock.errors", "1"), ("kvmock.uncompared_sinks", "1")]
    assert [("kvmock.backend", "lru"), *counts] == _properties(case)
    assert [one.tag for one in case if one.tag in ("failure", "error")] == ["failure"]


def test_properties_work_under_xdist_and_omit_an_unknown_backend(nested, pytester):
    nested("def test(kv_sink): kv_sink(BAD)", "--junit-xml=out.xml", "-n", "1", plugins=["xdist"])

    (case,) = ET.parse(pytester.path / "out.xml").iter("testcase")
    counts = [("kvmock.events", "1"), ("kvmock.errors", "1"), ("kvmock.uncompared_sinks", "1")]
    assert counts == _properties(case)


def test_properties_are_replaced_on_reruns(nested, pytester):
    nested(
        """
        runs = []
        def test(kv_sink):
            runs.append(1)
            for _ in range(len(runs)):
                kv_sink(BAD)
        """,
        "--junit-xml=out.xml",
        "--reruns",
        "2",
        plugins=["rerunfailures"],
    )

    properties = [pair for case in ET.parse(pytester.path / "out.xml").iter("testcase") for pair in _properties(case)]
    counts = [("kvmock.events", "3"), ("kvmock.errors", "3"), ("kvmock.uncompared_sinks", "1")]
    assert counts == [p for p in properties if p[0].startswith("kvmock")][-3:]
    last = list(ET.parse(pytester.path / "out.xml").iter("testcase"))[-1]
    assert len([name for name, _ in _properties(last) if name.startswith("kvmock")]) == 3


def test_a_late_error_is_counted_in_the_properties(nested, pytester):
    nested(
        """
        @pytest.fixture
        def engine(kv_sink):
            yield
            kv_sink(BAD)
        def test(engine): pass
        """,
        "--junit-xml=out.xml",
    )

    (case,) = ET.parse(pytester.path / "out.xml").iter("testcase")
    counts = [("kvmock.events", "1"), ("kvmock.errors", "1"), ("kvmock.uncompared_sinks", "1")]
    assert counts == _properties(case)


# ---------------------------------------------------------------------------------------------------- debugger


def test_pdb_stops_once_and_the_run_continues(nested, pytester):
    pytester.makepyfile(
        quiet_pdb="""
        class Pdb:
            quitting = False
            def __init__(self, *args, **options): pass
            def reset(self): pass
            def interaction(self, frame, traceback): print("STOPPED HERE")
            def set_trace(self, *args): pass
        """
    )
    pytester.syspathinsert()

    result = nested(
        """
        def test_bad(kv_sink): kv_sink(BAD)
        def test_good(kv_sink): kv_sink(GOOD)
        """,
        "--pdb",
        "--pdbcls=quiet_pdb:Pdb",
        "-s",
    )

    result.assert_outcomes(failed=1, passed=1)
    assert result.stdout.str().count("STOPPED HERE") == 1
    result.stdout.fnmatch_lines([ERROR])


@pytest.mark.parametrize("end", ["pytest.exit('enough')", "raise KeyboardInterrupt"])
def test_a_test_that_ends_the_session_is_not_judged(nested, end):
    result = nested(f"def test(kv_sink):\n kv_sink(BAD)\n {end}", subprocess=True)

    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.no_fnmatch_line("*KV event error*")


def test_a_test_does_not_get_the_errors_of_an_earlier_one(nested):
    result = nested(
        """
        def test_bad(kv_sink): kv_sink(BAD)
        def test_good(kv_sink): kv_sink(GOOD)
        def test_unused(): pass
        """
    )

    result.assert_outcomes(failed=1, passed=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "kv_harness.events.assert_no_event_errors(at_least=1)",
            "*EventRulesBroken: expected at least 1 KV events by now, 0 arrived",
        ),
        (
            "\n with kv_harness.events.expect_error('block_not_found'): pass",
            "*EventRulesBroken: expected 1 block_not_found*",
        ),
        ("kv_harness.apply(BAD); kv_harness.assert_no_event_errors()", "*EventRulesBroken: 1 KV event error*"),
    ],
)
def test_a_failure_inside_a_call_of_the_plugin_shows_no_frames_of_the_plugin(nested, call, message):
    result = nested(f"@pytest.mark.kv_backends('lru')\ndef test(kv_harness): {call}")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*pytest_kvmock/*.py:*")
