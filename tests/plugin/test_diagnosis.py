"""The report of a failure in a large test: the first problem, its place in the log, the smallest reproduction."""

import re
from itertools import count
from types import SimpleNamespace

import pytest
from depth import takes_long, whole_trace, worth_its_time
from scenario_files import need_scenario_files

SECTION = "*Captured kvmock smallest reproduction call*"

FORGETFUL = """
from pytest_kvmock import RadixIndex

class Forgetful:
    'Forgets one Removed: the first of more than two blocks.'
    def __init__(self):
        self.tree, self.forgets = RadixIndex(), 1
    def apply(self, event):
        data = event.event.data
        if self.forgets and isinstance(data, Removed) and len(data.block_hashes) > 2:
            self.forgets -= 1
        else:
            self.tree.apply(event)
    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)

@pytest.fixture
def kv_index():
    return Forgetful()
"""

LARGE = """
def test(kv_sink):
    for n in range(100, 140):
        kv_sink(Stored(None, (n,), (n,)))
    kv_sink(Removed((110, 111)))
    kv_sink(Removed((111,)))
"""

FAULTY_BACKEND = """
from types import MappingProxyType
from pytest_kvmock import KvCacheEvent, Removed
from pytest_kvmock.engines import backends
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy
from pytest_kvmock.engines.dynamo.logical import LogicalManager

class Sink:
    'Does not name the last of more than two blocks that are evicted at once.'
    def __init__(self, sink):
        self.sink = sink
    def publish(self, event, storage_tier, token_ids):
        data = event.data
        if isinstance(data, Removed) and len(data.block_hashes) > 2:
            event = KvCacheEvent(event.event_id, Removed(data.block_hashes[:-1]), event.dp_rank)
        self.sink.publish(event, storage_tier, token_ids)

def make(*, sink, **sizes):
    return LogicalManager(backend="quiet", eviction=LruPolicy(), sink=Sink(sink), **sizes)

quiet = backends.BackendSpec("quiet", "nothing", make)
backends.BACKENDS = MappingProxyType({**backends.BACKENDS, "quiet": quiet})
"""


def reproduction_of(result):
    """Return the text to paste, from its first line to the next heading."""
    text = result.stdout.str()
    found = re.search(r"-+ Captured kvmock smallest reproduction call -+\n(.*?)\n(?=[-=_]{10,})", text, re.DOTALL)
    assert found is not None
    return found[1] + "\n"


def test_a_large_failure_is_cut_and_the_pasted_text_fails_for_the_same_rule(nested):
    pasted = reproduction_of(nested(LARGE))

    assert "# cut from 42 events to 3\n" in pasted
    result = nested("", files={"test_it.py": pasted})
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*1 KV event error: block_not_found (worker 65536, event 2)"])


def test_a_reproduction_with_an_index_is_pasted_next_to_its_fixture(nested):
    source = (
        FORGETFUL
        + """
@pytest.mark.kvmock(num_blocks=30)
@pytest.mark.kv_backends("lru")
def test(kv_worker, kv_prompt):
    for _ in range(40):
        kv_worker.serve(kv_prompt(blocks=5))
"""
    )
    result = nested(source)
    pasted = reproduction_of(result)

    assert "def test_reproduction(kv_index):\n" in pasted
    again = nested(FORGETFUL + pasted)
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["*KV event error*: index_drift (worker 0, event *"])


@worth_its_time
def test_a_fault_of_an_engine_is_reproduced_by_requests(nested):
    traffic = """
@pytest.mark.kvmock(num_blocks=12)
@pytest.mark.kv_backends("quiet")
def test(kv_worker, kv_prompt):
    for _ in range(20):
        kv_worker.serve(kv_prompt(blocks=5))
"""
    files = {"conftest.py": FAULTY_BACKEND}
    # The runs need their own processes: the backend stays in the registry.
    pasted = reproduction_of(nested(traffic, files=files, subprocess=True))

    assert "# cut from 20 requests to 2\n" in pasted
    assert "kv.worker(0).serve([*range(48)])\n" in pasted
    again = nested("", files={**files, "test_it.py": pasted}, subprocess=True)
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["*KV event error*: engine_drift (worker 0*"])


WITH_AN_INDEX = (
    FORGETFUL
    + """
@pytest.mark.kvmock(num_blocks=30)
@pytest.mark.kv_backends("lru")
def test(kv_harness, kv_worker, kv_prompt):
    first = kv_prompt(blocks=5)
    kv_worker.serve(first)
    for _ in range(40):
        kv_worker.serve(kv_prompt(blocks=5))
    assert {} == kv_harness.overlap(first)
"""
)


def test_a_body_that_fails_because_of_a_wrong_index_is_cut_too(nested):
    """The failure is still the test's own."""
    result = nested(WITH_AN_INDEX)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E       assert {} == {0: 5}", "E *kvmock: also * KV event error*: index_drift *", SECTION]
    )
    again = nested(FORGETFUL + reproduction_of(result))
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["*KV event error*: index_drift (worker 0, event *"])


def test_a_failing_body_with_open_requests_is_cut_too(nested):
    result = nested(
        FAULTY_BACKEND
        + """
@pytest.mark.kvmock(num_blocks=12, event_warnings="fail")
@pytest.mark.kv_backends("quiet")
def test(kv_worker, kv_prompt):
    for _ in range(20):
        kv_worker.serve(kv_prompt(blocks=5))
    kv_worker.prefill(kv_prompt(blocks=5))
    assert 0
""",
        subprocess=True,
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E       assert 0", SECTION, "# cut from 21 requests to 2"])


REQUESTS = """
@pytest.mark.kvmock(event_warnings="fail")
@pytest.mark.kv_backends("lru")
def test(kv_worker, kv_prompt):
    for _ in range(20):
        kv_worker.prefill(kv_prompt(blocks=1))
"""


def test_requests_left_open_by_a_failing_body_are_not_what_is_reduced(nested):
    result = nested(REQUESTS + "    assert 0")

    result.stdout.fnmatch_lines(["E       assert 0", "E *kvmock: also 1 KV event *: leaked_requests*"])
    result.stdout.no_fnmatch_line(SECTION)
    nested(REQUESTS).stdout.fnmatch_lines([SECTION])


@pytest.mark.parametrize(
    ("mark", "args"),
    [
        ("condition=False, reason='other'", []),
        ("False, reason='other'", []),
        ("'sys.platform == 0', reason='evaluated by pytest'", []),
        ("raises=KeyError", []),
        ("raises=(KeyError, OSError)", []),
        ("strict=True", ["--runxfail"]),
    ],
)
def test_a_failure_that_no_xfail_mark_expects_is_cut(nested, mark, args):
    result = nested(f"@pytest.mark.xfail({mark})" + LARGE + "    assert 0\n", *args)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E       assert 0", SECTION, "# cut from 42 events to 3"])


def test_reductions_for_failing_bodies_count_towards_the_time_of_the_run(nested, monkeypatch):
    monkeypatch.setattr("pytest_kvmock.plugin.report._SESSION", 0)

    nested(LARGE + "    assert 0\n").stdout.fnmatch_lines(
        ["E       assert 0", SECTION, "none: 0 seconds of this run went into those of other tests; run this one alone"]
    )


def test_a_failure_of_an_assertion_on_events_is_cut_too(nested):
    result = nested(LARGE.replace("kv_sink)", "kv_sink, kv_events)") + "    kv_events.assert_no_event_errors()\n")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([SECTION, "# cut from 42 events to 3"])


@pytest.mark.parametrize(
    "source",
    [
        "def test(kv_sink): kv_sink(BAD)",
        "def test(kv_sink):\n    for n in range(100): kv_sink(Stored(None, (n,), (n,)))",
        "def test(kv_sink):\n    kv_sink(BAD)\n    assert 0",
        "def test(kv_sink):\n    for n in range(100): kv_sink(Stored(None, (n,), (n,)))\n    assert 0",
        "@pytest.mark.kvmock(event_errors='ignore')" + LARGE,
        "@pytest.mark.kvmock(event_errors='ignore')" + LARGE + "    assert 0\n",
        "@pytest.mark.kvmock(event_errors='warn')" + LARGE + "    assert 0\n",
        LARGE + "    pytest.skip('why')\n",
        LARGE + "    raise unittest.SkipTest('why')\n",
        LARGE + "    pytest.xfail('why')\n",
        "@pytest.mark.xfail" + LARGE + "    assert 0\n",
        "@pytest.mark.xfail(condition=True, reason='why', strict=True)" + LARGE + "    assert 0\n",
        "@pytest.mark.xfail(sys.version_info > (3,), raises=(AssertionError, OSError))" + LARGE + "    assert 0\n",
    ],
    ids=[
        "small",
        "passes",
        "fails, small",
        "fails, nothing wrong",
        "ignored",
        "fails, ignored",
        "fails, warned of",
        "skipped",
        "unittest",
        "xfailed",
        "xfail",
        "xfail, strict",
        "xfail, raises",
    ],
)
def test_a_test_without_an_unexpected_event_error_is_not_cut(nested, source):
    nested(source, "-rA", "--xfail-tb").stdout.no_fnmatch_line(SECTION)


@pytest.mark.parametrize("args", [["--kv-reduce=off"], ["-o", "kvmock_reduce=off"]])
def test_reproductions_can_be_switched_off(nested, args):
    result = nested(LARGE, *args)

    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line(SECTION)


def test_kv_reduce_on_the_command_line_overrides_the_ini_file(nested):
    nested(LARGE, "--kv-reduce=1", "-o", "kvmock_reduce=off").stdout.fnmatch_lines([SECTION])


@pytest.mark.parametrize("value", ["on", "0", "-1", "nan", "inf", ""])
def test_an_invalid_time_is_refused(nested, value):
    result = nested("def test(): pass", f"--kv-reduce={value}")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    message = f"ERROR: --kv-reduce: got {value!r}; allowed: a number of seconds above 0, or off"
    assert [line for line in result.errlines if line] == [message]


def test_a_missing_reproduction_is_explained_in_one_line(nested):
    source = FORGETFUL.replace("def __init__(self)", "def __init__(self, name)").replace("Forgetful()", "Forgetful(1)")
    result = nested(
        source
        + """
@pytest.mark.kvmock(num_blocks=30)
@pytest.mark.kv_backends("lru")
def test(kv_worker, kv_prompt):
    for _ in range(40):
        kv_worker.serve(kv_prompt(blocks=5))
"""
    )

    result.stdout.fnmatch_lines(
        [
            SECTION,
            (
                "none: could not rebuild your index for the replay (its class needs 'name'): give Forgetful a method "
                "`new()` *"
            ),
        ]
    )


@pytest.mark.parametrize(
    ("step", "expected_message"),
    [
        (2, "none: no part of the events broke the rule again before the limit was reached (--kv-reduce=3)"),
        (0.5, "# cut from 42 events to *; perhaps not the smallest, because --kv-reduce=3 ended the search"),
    ],
)
def test_a_search_that_takes_too_long_is_stopped(nested, monkeypatch, step, expected_message):
    clock = count(step=step)
    monkeypatch.setattr("pytest_kvmock.plugin.report.time", SimpleNamespace(monotonic=lambda: next(clock)))

    result = nested(LARGE, "--kv-reduce=3")

    result.stdout.fnmatch_lines([SECTION, expected_message])


def test_a_run_spends_at_most_ten_times_the_limit_on_reductions(nested, monkeypatch):
    monkeypatch.setattr("pytest_kvmock.plugin.report._SESSION", 0)
    result = nested(LARGE)

    result.stdout.fnmatch_lines(
        [SECTION, "none: 0 seconds of this run went into those of other tests; run this one alone"]
    )


def test_a_search_that_raises_keeps_the_verdict(nested, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("no")

    monkeypatch.setattr("pytest_kvmock.harness.reduce.reproduce", broken)
    result = nested(LARGE)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*1 KV event error: block_not_found*", SECTION, "none: the search ended in ZeroDivisionError: no"]
    )


# --------------------------------------------------------------------------------- indexes that are compared later

OVERFLOWS = """
from pytest_kvmock import RadixIndex

class Overflows(RadixIndex):
    'Its queue has room for 10 events until it is flushed.'
    def __init__(self):
        super().__init__()
        self.queue = []
    def apply(self, event):
        if len(self.queue) < 10:
            self.queue.append(event)
    def flush(self):
        for event in self.queue:
            super().apply(event)
        self.queue.clear()

@pytest.fixture
def kv_index():
    return Overflows()
"""


def test_a_test_with_sync_end_is_pasted_with_sync_end(nested):
    need_scenario_files()
    test = """
@pytest.mark.kvmock(sync="end")
def test(kv_sink):
    for n in range(40):
        kv_sink(Stored(None, (n,), (n,)))
"""
    result = nested(OVERFLOWS + test, "--kv-save-scenario=saved", "--kv-reduce=60")
    pasted = reproduction_of(result)

    assert pasted.startswith(
        "# cut from 40 events to 11\n"
        "# not saved: a scenario flushes the index after each step, and this needs sync='end'\n"
    )
    assert '    with RouterHarness(index=kv_index, sync="end") as kv:\n' in pasted
    again = nested(OVERFLOWS + pasted)
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["*1 KV event error: index_drift (worker 65536)"])


AWAITED = """
import asyncio
from pytest_kvmock import RadixIndex

class Forgets:
    def __init__(self):
        self.tree, self.queue = RadixIndex(), asyncio.Queue()
    async def apply(self, event):
        await self.queue.put(event)
    async def flush(self):
        while not self.queue.empty():
            event = await self.queue.get()
            if not isinstance(event.event.data, Removed):
                self.tree.apply(event)
    async def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)

@pytest.fixture
def kv_index():
    return Forgets()

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""

SYNC_BODY = """
def test(kv_harness, kv_sink):
    async def body():
        for n in range(40):
            kv_sink(Stored(None, (n,), (n,)))
        kv_sink(Removed((20,)))
        await kv_harness.aflush()
    asyncio.run(body())
"""

ASYNC_BODY = """
async def test(kv_harness, kv_sink):
    for n in range(40):
        kv_sink(Stored(None, (n,), (n,)))
    kv_sink(Removed((20,)))
    await kv_harness.aflush()
"""


@pytest.mark.parametrize(
    ("test", "begins", "plugins", "args"),
    [
        (SYNC_BODY, ["def test_reproduction(kv_index):", "    async def body():"], [], []),
        ("@pytest.mark.anyio" + ASYNC_BODY, ["@pytest.mark.anyio", "async def test_reproduction("], ["anyio"], []),
        (
            "@pytest.mark.asyncio" + ASYNC_BODY,
            ["@pytest.mark.asyncio", "async def test_reproduction("],
            ["pytest_asyncio.plugin"],
            [],
        ),
        (
            ASYNC_BODY,
            ["async def test_reproduction(kv_index):"],
            ["pytest_asyncio.plugin"],
            ["-o", "asyncio_mode=auto"],
        ),
        (
            "@pytest.mark.asyncio" + ASYNC_BODY + "    assert 0\n",
            ["async def test_reproduction(kv_index):"],
            ["pytest_asyncio.plugin"],
            [],
        ),
    ],
    ids=["none", "anyio", "asyncio", "asyncio, auto", "fails by itself"],
)
def test_a_reproduction_of_an_async_index_is_awaited_like_its_test(nested, test, begins, plugins, args):
    need_scenario_files()
    test = '@pytest.mark.kv_backends("lru")\n' + test.lstrip()
    result = nested(AWAITED + test, "--kv-save-scenario=saved", "--kv-reduce=60", *args, plugins=plugins)
    result.assert_outcomes(failed=1)
    pasted = reproduction_of(result)

    assert pasted.startswith("# cut from 41 events to 2\n# not saved: a scenario cannot await an async index\n")
    assert "".join(f"{line}\n" for line in begins[:-1]) + begins[-1] in pasted
    assert "await kv.aflush()\n" in pasted
    again = nested(AWAITED + pasted, *args, plugins=plugins)
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["*1 KV event error: index_drift (worker 65536, event 1)"])


# ------------------------------------------------------------------------------------------- logs of passing tests

PASSING = """
def test_one(kv_sink): kv_sink(GOOD)
def test_two(kv_sink): kv_sink(GOOD); kv_sink(TWICE)
def test_three(): print("mine")
@pytest.mark.xfail(strict=False)
def test_four(kv_sink): kv_sink(GOOD)
"""


@pytest.mark.parametrize(
    ("args", "plugins"), [([], []), (["-q"], []), pytest.param(["-n", "2"], ["xdist"], marks=takes_long)]
)
def test_all_logs_are_shown_without_further_options(nested, args, plugins):
    result = nested(PASSING, "--kv-show-log=all", *args, plugins=plugins)

    result.assert_outcomes(passed=3, xpassed=1)
    shown = [line for line in result.outlines if "kvmock events" in line or "Stored block" in line]
    assert sorted(
        [
            "kvmock events of test_it.py::test_one",
            "    0  event 0  worker 65536  Stored block 2 as a root",
            "kvmock events of test_it.py::test_two",
            "    0  event 0  worker 65536  Stored block 2 as a root",
            "    1  event 1  worker 65536  Stored block 2 as a root  ! duplicate_store",
            "kvmock events of test_it.py::test_four",
            "    0  event 0  worker 65536  Stored block 2 as a root",
        ]
    ) == sorted(line.strip("_ ") if "kvmock" in line else line for line in shown)
    result.stdout.no_fnmatch_line("*mine*")


@pytest.mark.parametrize("args", [["-rA"], ["-rP"], ["-rPX"]])
def test_a_log_is_shown_once_if_pytest_shows_it_too(nested, args):
    result = nested("def test(kv_sink): kv_sink(GOOD)", "--kv-show-log=all", *args)

    assert result.stdout.str().count("Stored block 2") == 1


@pytest.mark.parametrize("args", [[], ["--kv-show-log=failed"], ["--kv-show-log=none"]])
def test_no_log_of_a_passing_test_is_shown_by_default(nested, args):
    nested(PASSING, *args).stdout.no_fnmatch_line("*Stored block*")


# ------------------------------------------------------------------------------------------------------ cache trace


def test_the_cache_trace_is_logged_through_pytests_logging(nested):
    source = "def test(kv_manager): kv_manager.use([1, 2]); assert 0"

    nested(source, "--log-level=DEBUG", "--kv-backend=lru").stdout.fnmatch_lines(
        ["INFO*pytest_kvmock.engines:*KV cache trace * event=allocation * backend=lru * block_ids=[[]1, 2[]]"]
    )
    nested(source).stdout.no_fnmatch_line("*KV cache trace*")


# ----------------------------------------------------------------------------------------------------- whole traces

ON_A_TRACE = (
    FORGETFUL
    + """
@pytest.mark.kvmock(block_size=512, num_blocks=1000)
@pytest.mark.kv_backends("lru")
def test(kv_worker, kv_trace):
    for request in kv_trace:
        kv_worker.serve(request.prompt(whole_blocks=True))
    assert len(kv_trace) == {requests}
"""
)


def check_report_of_a_trace(result):
    """Check that the report has a few screens and names the first problem, its place, and a short reproduction."""
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert len(text.splitlines()) < 100
    result.stdout.fnmatch_lines(
        [
            "*KV event error*: index_drift (worker 0, event *",
            "    observed:  find_matches() of your index (Forgetful) returned *; block * was removed by event *",
            "    expected:  *, as the reference index returned",
            "*Captured kvmock events call*",
            "* events; those around the first problem*",
            "*Removed blocks *  !! index_drift*",
            SECTION,
            "# cut from * events to *",
            "def test_reproduction(kv_index):",
            "            Removed((*)),",
        ]
    )


@worth_its_time
def test_the_failure_of_a_long_trace_is_readable(nested):
    check_report_of_a_trace(nested(ON_A_TRACE.replace("{requests}", "2000"), "--kv-trace-limit=2000"))


@whole_trace
def test_the_failure_of_the_whole_conversation_trace_is_readable(nested, traces_dir):
    trace = traces_dir / "mooncake_conversation_trace.jsonl"
    check_report_of_a_trace(nested(ON_A_TRACE.replace("{requests}", "12031"), f"--kv-trace={trace}"))


def test_the_log_of_a_failure_shows_where_a_worker_was_removed(nested):
    """Events of the worker from before and after are distinguished in message and log."""
    source = """
    def test(kv_harness):
        kv_harness.apply([GOOD, Removed((2,))])
        kv_harness.remove_worker(0)
        kv_harness.apply([Removed((2,))])
    """

    printed = nested(source, "--kv-backend=lineage").stdout.str()

    start = printed.index("1 KV event error")
    assert printed[start:].splitlines()[:5] == [
        "1 KV event error: block_not_found (worker 0, event 0 after the worker was removed)",
        "",
        "  event 0 after the worker was removed  worker 0  Removed block 2",
        "    rule:      block_not_found: a Removed names a block that this worker and rank does not hold in that tier",
        "    observed:  block 2 was removed by event 1 (before the worker was removed)",
    ]
    log = printed[printed.index("3 events\n") :].splitlines()
    assert log[:4] == [
        "3 events",
        "    0  event 0  worker 0  Stored block 2 as a root",
        "    1  event 1  worker 0  Removed block 2",
        "       worker 0 removed, all ranks: your router drops its blocks",
    ]


COPIES = """
import pytest
from pytest_kvmock import RadixIndex, Removed

class Counts(RadixIndex):
    def __init__(self, copies):
        self.copies = copies
        super().__init__(count_copies=copies)
    def new(self):
        return type(self)(self.copies)
    def apply(self, event):
        if not {bug} or not isinstance(event.event.data, Removed):
            super().apply(event)

@pytest.fixture
def kv_index(kv_traits):
    return Counts(kv_traits.copies)

"""


def test_a_reproduction_keeps_the_engine_for_an_index_that_reads_its_traits(nested):
    test = """
    @pytest.mark.kv_backends("vllm")
    @pytest.mark.kvmock(num_blocks=8)
    def test(kv_worker, kv_prompt):
        prompt = kv_prompt(blocks=3)
        for _ in range(4):
            with kv_worker.prefill(prompt), kv_worker.prefill(prompt):
                pass
            kv_worker.serve(kv_prompt(blocks=5))
    """
    result = nested(test, files={"conftest.py": COPIES.replace("{bug}", "True")})
    printed = result.stdout.str().partition("smallest reproduction call -")[2].partition("\n")[2].partition("\n==")[0]
    assert '@pytest.mark.parametrize("kv_backend", ["vllm"])' in printed.splitlines()

    nested(printed, files={"conftest.py": COPIES.replace("{bug}", "True")}).assert_outcomes(failed=1)
    nested(printed, files={"conftest.py": COPIES.replace("{bug}", "False")}).assert_outcomes(passed=1)
