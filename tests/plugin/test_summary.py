"""The last line of a run with judged events: warnings are visible in a green run."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from depth import few, takes_long, worth_its_time
from scenario_files import need_scenario_files

FAIL = "(--kv-event-warnings=fail makes them fail)"

BARE = "; 1 sink never compared with its engine (kv_sink.compare)"
IDLE = "; 1 sink without events (kv_sink)"
TWO_BARE = "; 2 sinks never compared with their engines (kv_sink.compare)"

HOLE = """
        @pytest.mark.kv_backends("multi_lru")
        @pytest.mark.kvmock(num_blocks=3)
        def test_hole(kv_harness, kv_worker, kv_prompt):
            a, c, d = kv_prompt(1), kv_prompt(1), kv_prompt(1)
            a_b = kv_prompt(1, after=a)
            with kv_worker.prefill(a):
                kv_worker.serve(a_b)
                kv_worker.serve(a_b)
            kv_worker.serve(c)
            kv_worker.serve(c)
            with kv_worker.prefill(d):
                kv_worker.serve(a_b)
"""

BOTH = f"2 evicted_and_restored {FAIL}; the engines' own: 1 evicted_and_restored"


def line_of(result):
    lines = [line for line in result.outlines if line.startswith("kvmock:") and "backends=" not in line]
    assert len(lines) < 2
    return lines[0] if lines else None


def properties_of(pytester):
    cases = ET.parse(pytester.path / "out.xml").iter("testcase")
    return [{one.get("name"): one.get("value") for one in case.iter("property")} for case in cases]


RUNS = {
    "one event": ("def test(kv_sink): kv_sink(GOOD)", f"kvmock: 1 test; 1 event; no warnings{BARE}"),
    "a matrix": (
        "def test(kv_worker, kv_prompt): kv_worker.serve(kv_prompt(2))",
        "kvmock: 3 tests on lineage, lru, multi_lru; 3 events; no warnings",
    ),
    "backends in the order of the list": (
        """
        @pytest.mark.parametrize("kv_backend", ["vllm", "multi_lru", "lru"])
        def test(kv_worker, kv_prompt): kv_worker.serve(kv_prompt(2))
        """,
        "kvmock: 3 tests on lru, multi_lru, vllm; 3 events; no warnings",
    ),
    "with and without a backend": (
        """
        def test_engines(kv_worker, kv_prompt): kv_worker.serve(kv_prompt(2))
        def test_sink(kv_sink): kv_sink(GOOD); kv_sink(TWICE)
        """,
        f"kvmock: 4 tests on lineage, lru, multi_lru; 5 events; warnings: 1 duplicate_store {FAIL}{BARE}",
    ),
    "a warning": (
        "def test(kv_sink): kv_sink(GOOD); kv_sink(TWICE)",
        f"kvmock: 1 test; 2 events; warnings: 1 duplicate_store {FAIL}{BARE}",
    ),
    "several rules": (
        """
        def test_one(kv_sink):
            kv_sink(Stored(None, (1, 2, 3), (1, 2, 3)))
            kv_sink(Removed((1,)))
        def test_two(kv_sink):
            kv_sink(GOOD)
            kv_sink(TWICE)
            kv_sink(TWICE)
        @pytest.mark.kv_backends("lru")
        def test_three(kv_worker, kv_prompt):
            kv_worker.prefill(kv_prompt(1))
        """,
        (
            "kvmock: 3 tests on lru; 6 events; warnings: 2 duplicate_store, 1 orphaned_child, 1 leaked_requests "
            f"{FAIL}{TWO_BARE}"
        ),
    ),
    "a test that failed, one that was expected to, one without events": (
        """
        def test_fails(kv_sink): kv_sink(GOOD); kv_sink(TWICE); kv_sink(BAD)
        @pytest.mark.xfail
        def test_xfails(kv_sink): kv_sink(GOOD); kv_sink(TWICE); assert 0
        def test_nothing(kv_sink): pass
        def test_another(): pass
        """,
        f"kvmock: 2 tests; 5 events; warnings: 2 duplicate_store {FAIL}{IDLE}{TWO_BARE}",
    ),
    "what is allowed or expected": (
        """
        @pytest.mark.kvmock(allow=["duplicate_store"])
        def test(kv_sink): kv_sink(GOOD); kv_sink(TWICE)
        def test_expected(kv_sink, kv_events):
            kv_events.expect_error("duplicate_store")
            kv_sink(GOOD); kv_sink(TWICE)
        """,
        f"kvmock: 2 tests; 4 events; no warnings{TWO_BARE}",
    ),
    "after the body": (
        """
        @pytest.fixture
        def engine(kv_sink):
            yield
            kv_sink(GOOD)
            kv_sink(TWICE)
        def test(engine): pass
        """,
        f"kvmock: 1 test; 2 events; warnings: 1 duplicate_store {FAIL}{BARE}",
    ),
    "what a faithful engine does by itself": (
        HOLE,
        "kvmock: 1 test on multi_lru; 7 events; warnings: none but the engines' own: 1 evicted_and_restored",
    ),
    "and what a test does by hand": (
        """
        @pytest.mark.kv_backends("multi_lru")
        def test_by_hand(kv_harness):
            kv_harness.apply([GOOD, TWICE, Removed((2,))])
        def test_sink(make_kv_sink):
            sink = make_kv_sink(prefix_closed=False)
            sink(GOOD); sink(TWICE); sink(Removed((2,)))
        """
        + HOLE,
        f"kvmock: 3 tests on multi_lru; 13 events; warnings: {BOTH}{BARE}",
    ),
    "a test of a TestCase": (
        """
        class T(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def _kv(self, kv_sink): self.sink = kv_sink
            def test(self): self.sink(GOOD); self.sink(TWICE)
        """,
        f"kvmock: 1 test; 2 events; warnings: 1 duplicate_store {FAIL}{BARE}",
    ),
    "sinks whose engine was compared": (
        """
        def test_compared(make_kv_sink):
            one, other, third = make_kv_sink(), make_kv_sink(), make_kv_sink()
            one(GOOD); one.compare(lambda: [2])
            other(GOOD)
        def test_again(kv_sink): kv_sink(GOOD)
        """,
        f"kvmock: 2 tests; 3 events; no warnings{IDLE}{TWO_BARE}",
    ),
    "faults at random that were never injected": (
        """
        @pytest.mark.kvmock(faults={"double": 1e-9, "lose": 1e-9, "delay": 0})
        @pytest.mark.kv_backends("lru")
        def test_both(kv_worker, kv_prompt):
            kv_worker.serve(kv_prompt(1))
        @pytest.mark.kvmock(faults={"double": 1, "lose": 1e-9}, allow=["duplicate_store", "event_id_gap"])
        @pytest.mark.kv_backends("lru")
        def test_one(kv_worker, kv_prompt):
            kv_worker.serve(kv_prompt(1))
        @pytest.mark.kvmock(faults={"double": 1e-9})
        def test_none(kv_prompt): pass
        """,
        (
            "kvmock: 2 tests on lru; 3 events; no warnings; "
            "faults at random that were never injected: double (2 tests), lose (2 tests)"
        ),
    ),
    "no event": ("def test(kv_sink): pass", f"kvmock: {IDLE[2:]}"),
    "faults for which no event came": (
        """
        @pytest.mark.kvmock(faults={"double": 1e-9})
        def test_none(kv_prompt): pass
        """,
        "kvmock: faults at random that were never injected: double (1 test)",
    ),
    "no use of the plugin": ("def test(record_property): record_property('events', 7)", None),
}


@pytest.mark.parametrize(("source", "line"), [pytest.param(*case, id=name) for name, case in RUNS.items()])
def test_the_summary_line_counts_judged_tests_and_events(nested, source, line):
    assert line == line_of(nested(source, plugins=["xdist"]))


# Workers send the counts of each test, which are summed up as in one process. Each run starts two more processes.
UNDER_XDIST = (
    "several rules",
    "backends in the order of the list",
    "a test that failed, one that was expected to, one without events",
    "sinks whose engine was compared",
    "faults at random that were never injected",
)


@worth_its_time
@pytest.mark.parametrize("name", few(UNDER_XDIST))
def test_the_summary_line_is_the_same_under_xdist(nested, name):
    source, line = RUNS[name]

    assert line == line_of(nested(source, "-n", "2", plugins=["xdist"]))


@pytest.mark.parametrize("args", [["-qq"], ["--collect-only"], ["-p", "no:terminal"]])
def test_runs_without_events_have_no_summary_line(nested, args):
    assert line_of(nested("def test(kv_sink): kv_sink(GOOD); kv_sink(TWICE)", *args, plugins=["xdist"])) is None


@pytest.mark.parametrize("args", [["-q"], pytest.param(["-q", "-n", "1"], marks=takes_long)])
def test_a_quiet_run_lists_only_requests_without_effect(nested, args):
    line = line_of(nested("def test(kv_sink): kv_sink(GOOD); kv_sink(TWICE)", *args, plugins=["xdist"]))
    assert line == "kvmock: 1 sink never compared with its engine (kv_sink.compare)"
    compared = "def test(kv_sink): kv_sink(GOOD); kv_sink.compare(lambda: [1])"
    assert line_of(nested(compared, *args, plugins=["xdist"])) is None


@pytest.mark.parametrize(
    ("args", "ini"),
    [(["--kv-event-warnings=fail"], ""), ([], "kvmock_event_warnings = fail")],
    ids=["command line", "ini"],
)
def test_the_summary_gives_no_advice_on_failing_if_warnings_already_fail(nested, args, ini):
    files = {"pytest.ini": f"[pytest]\n{ini}\n"}
    result = nested("def test(kv_sink): kv_sink(GOOD); kv_sink(TWICE)", *args, files=files)

    result.assert_outcomes(failed=1)
    assert line_of(result) == f"kvmock: 1 test; 2 events; warnings: 1 duplicate_store{BARE}"


def test_the_option_that_the_summary_names_makes_warnings_fail(nested):
    source = "def test(kv_sink): kv_sink(GOOD); kv_sink(TWICE)"
    nested(source).assert_outcomes(passed=1)

    nested("", "--kv-event-warnings=fail").assert_outcomes(failed=1)


@pytest.mark.parametrize("args", [[], pytest.param(["-n", "1"], marks=takes_long)], ids=["alone", "xdist"])
def test_a_rerun_is_not_counted_twice_in_the_summary(nested, args):
    result = nested(
        """
        import pathlib
        def test(kv_sink):
            kv_sink(GOOD)
            kv_sink(TWICE)
            ran = pathlib.Path("ran")
            if not ran.exists():
                ran.touch()
                assert 0
        """,
        "--reruns=2",
        *args,
        plugins=["xdist", "rerunfailures"],
    )

    assert line_of(result) == f"kvmock: 1 test; 2 events; warnings: 1 duplicate_store {FAIL}{BARE}"


def test_tests_of_scenario_files_count_in_the_summary(nested):
    need_scenario_files()
    files = {
        "pytest.ini": "[pytest]\nkvmock_scenarios = *.kv.yaml\n",
        "a.kv.yaml": "backends: [lru, multi_lru]\nsteps: [{event: {stored: [1]}}, {event: {stored: [1]}}]\n",
        "b.kv.yaml": "backends: [multi_lru]\n"
        "steps: [{event: {stored: [1]}}, {event: {stored: [1]}}, {event: {removed: [1]}}]\n",
    }
    result = nested("", files=files)

    result.assert_outcomes(passed=3)
    warnings = "2 duplicate_store, 1 evicted_and_restored"
    assert line_of(result) == f"kvmock: 3 tests on lru, multi_lru; 7 events; warnings: {warnings} {FAIL}"


@pytest.mark.parametrize("args", [[], pytest.param(["-n", "1"], marks=takes_long)], ids=["alone", "xdist"])
def test_junit_has_a_property_for_warnings_only_if_there_are_any(nested, pytester, args):
    nested(
        "def test(kv_sink): kv_sink(GOOD); kv_sink(TWICE); kv_sink(TWICE)\n"
        "def test_none(kv_sink): kv_sink(GOOD)\n" + HOLE.replace("\n        ", "\n"),
        "--junit-xml=out.xml",
        *args,
        plugins=["xdist"],
    )

    counts = {"kvmock.errors": "0"}
    assert [
        {"kvmock.events": "3", **counts, "kvmock.warnings": "2 duplicate_store", "kvmock.uncompared_sinks": "1"},
        {"kvmock.events": "1", **counts, "kvmock.uncompared_sinks": "1"},
        {
            "kvmock.backend": "multi_lru",
            "kvmock.events": "7",
            **counts,
            "kvmock.engine_warnings": "1 evicted_and_restored",
        },
    ] == properties_of(pytester)


def test_events_of_a_teardown_count_in_the_properties(nested, pytester):
    nested(
        """
        @pytest.fixture
        def engine(kv_sink):
            kv_sink(GOOD)
            yield
            kv_sink(Removed((2,)))
        def test(engine): pass
        """,
        "--junit-xml=out.xml",
    )

    assert properties_of(pytester) == [{"kvmock.events": "2", "kvmock.errors": "0", "kvmock.uncompared_sinks": "1"}]


def test_an_engine_that_never_runs_is_counted_as_leaked_requests(nested):
    result = nested("def test(kv_engine, kv_prompt): kv_engine.submit(kv_prompt(4), 4)", "--kv-backend=lineage")

    result.assert_outcomes(passed=1)
    assert line_of(result) == f"kvmock: 1 test on lineage; 0 events; warnings: 1 leaked_requests {FAIL}"


def test_the_warning_of_an_open_engine_request_says_how_to_end_it(nested):
    result = nested(
        "def test(kv_engine, kv_prompt): kv_engine.submit(kv_prompt(4), 4)",
        "--kv-backend=lineage",
        "--kv-event-warnings=fail",
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*an engine runs to its end, or aborts what is open (run, abort, close)*"])


@pytest.mark.parametrize("args", [[], pytest.param(["-n", "1"], marks=takes_long)], ids=["alone", "xdist"])
def test_the_log_names_random_faults_that_were_never_injected(nested, args):
    source = """
        @pytest.mark.kv_backends("lru")
        @pytest.mark.kvmock(faults={"double": 1e-9, "lose": 1e-9})
        def test(kv_worker, kv_prompt):
            kv_worker.serve(kv_prompt(1))
            assert 0
        """
    result = nested(source, *args, plugins=["xdist"])

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["1 event", "*", "faults at random that were never injected: double, lose"])


def test_the_log_does_not_mention_random_faults_that_were_injected(nested):
    source = """
        @pytest.mark.kv_backends("lru")
        @pytest.mark.kvmock(faults={"double": 1})
        def test(kv_worker, kv_prompt):
            kv_worker.serve(kv_prompt(1))
            assert 0
        """
    result = nested(source)

    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*never injected*")


def test_junit_has_a_property_for_random_faults_that_were_never_injected(nested, pytester):
    nested(
        """
        @pytest.mark.kv_backends("lru")
        @pytest.mark.kvmock(faults={"double": 1e-9, "lose": 1e-9})
        def test(kv_worker, kv_prompt): kv_worker.serve(kv_prompt(1))
        """,
        "--junit-xml=out.xml",
    )

    (properties,) = properties_of(pytester)
    assert properties["kvmock.unused_faults"] == "1 double, 1 lose"


USED = "def test_used(kv_sink): kv_sink(GOOD); kv_sink.compare(lambda: [2])"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def test(kv_sink): pass", 1),
        ("def test(make_kv_sink): make_kv_sink(), make_kv_sink()", 2),
        ("def test(kv_sink, kv_worker, kv_prompt): kv_worker.serve(kv_prompt())", 1),
        ("def test(kv_sink, kv_worker, kv_prompt): kv_sink.compare(list); kv_worker.serve(kv_prompt())", 1),
        ("def test(kv_sink): kv_sink.compare(list)", 0),  # an engine may hold nothing
        ("def test(kv_sink): kv_sink(GOOD)", 0),
    ],
)
def test_sinks_without_any_event_are_counted(nested, source, count):
    marked = f"@pytest.mark.kv_backends('lru')\n{source}\n\n{USED}"
    line = line_of(nested(marked))
    sinks = f"; {count} sink{'s' * (count != 1)} without events (kv_sink)"
    assert (sinks in line) is bool(count)
    assert "that no event came to" not in line.replace(sinks, "")


def test_a_sink_without_any_event_fails_if_warnings_fail(nested):
    result = nested(f"def test_unused(kv_sink): pass\n\n{USED}", "--kv-event-warnings=fail")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*the sink of worker 65536 was never used: no event came to it (kv_sink, make_kv_sink)*"]
    )
