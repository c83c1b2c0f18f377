"""Wrong input is reported in one line: what was given, what is allowed, and where."""

from __future__ import annotations

import re
import textwrap
from fnmatch import fnmatchcase

import pytest
from depth import takes_long, worth_its_time
from plugin_parts import OPTIONS as EVERY_OPTION

from pytest_kvmock import BACKENDS
from pytest_kvmock.oracle.hygiene.rules import RULES
from pytest_kvmock.plugin.markers import KVMOCK_KEYS
from pytest_kvmock.plugin.options import LISTS, SYNCS
from pytest_kvmock.plugin.options import OPTIONS as OPTIONS_OF_KVMOCK

KNOWN = ", ".join(BACKENDS)

# ---------------------------------------------------------------------------------------------------- options

OPTIONS = [
    ("--kv-backend=lruu", f"unknown backend 'lruu'; did you mean 'lru'? known: {KNOWN}"),
    ("--kv-event-errors=oops", "got 'oops'; allowed: fail, warn, ignore"),
    ("--kv-event-warnings=", "got ''; allowed: fail, warn, ignore"),
    ("--kv-show-log=some", "got 'some'; allowed: failed, all, none"),
    ("--kv-seed=1.5", "got '1.5'; allowed: an integer"),
    ("--kv-trace=missing.jsonl", "no such file: '*missing.jsonl'"),
    ("--kv-trace-limit=0", "got '0'; allowed: an integer of at least 1"),
]


@pytest.mark.parametrize(("option", "message"), OPTIONS)
@pytest.mark.parametrize("more", [[], ["--kv-list-backends"]], ids=["run", "list"])
def test_a_wrong_option_is_a_usage_error(nested, option, message, more):
    result = nested("def test(): pass", option, *more)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if "Traceback" in line] == []
    result.stderr.fnmatch_lines([f"ERROR: {option.partition('=')[0]}: {message}"])


def test_a_wrong_option_is_a_usage_error_under_xdist(nested):
    result = nested("def test(): pass", "--kv-show-log=some", "-n", "1", plugins=["xdist"])

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        "ERROR: --kv-show-log: got 'some'; allowed: failed, all, none"
    ]


INI = [
    ("kvmock_backends = lineage lruu", f"unknown backend 'lruu'; did you mean 'lru'? known: {KNOWN}"),
    ("kvmock_event_errors = oops", "got 'oops'; allowed: fail, warn, ignore"),
    ("kvmock_event_warnings =", "got ''; allowed: fail, warn, ignore"),
    ("kvmock_show_log = some", "got 'some'; allowed: failed, all, none"),
    ("kvmock_seed = x", "*"),  # since 8.4 pytest parses integers, with its own message
    ("kvmock_trace = missing.jsonl", "no such file: '*missing.jsonl'"),
    ("kvmock_trace_limit = -1", "got *-1*; allowed: an integer of at least 1"),
    ("kvmock_profiles = missing/*.yaml", "no such file: 'missing/[*].yaml'"),
    ("kvmock_profile = small", "unknown profile 'small'; none is known: ini kvmock_profiles names their files"),
    ("kvmock_allow = nonsense", "unknown rule 'nonsense'; known: parent_block_not_found, *"),
    ("kvmock_block_size = 0", "block_size must be *, got 0"),
    ("kvmock_num_blocks = 0", "num_blocks must be *, got 0"),
    ("kvmock_workers = 65\nkvmock_dp_size = 1024", "workers times dp_size must be at most 65536, got *"),
    ("kvmock_prefix_caching = maybe", "*"),
]


@pytest.mark.parametrize(("line", "message"), INI)
def test_a_wrong_ini_value_is_a_usage_error(nested, line, message):
    result = nested("def test(): pass", files={"pytest.ini": f"[pytest]\n{line}\n"})

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if "Traceback" in line] == []
    result.stderr.fnmatch_lines([f"ERROR: pytest.ini: {line.partition(' ')[0]}: {message}"])


def test_a_wrong_override_of_an_ini_value_names_the_override(nested):
    result = nested("def test(): pass", "-o", "kvmock_event_errors=oops", files={"pytest.ini": "[pytest]\n"})

    result.stderr.fnmatch_lines(["ERROR: -o kvmock_event_errors: got 'oops'; *"])


def test_pyproject_values_may_be_typed(nested):
    toml = "[tool.pytest.ini_options]\n"
    numbers = '"4"'
    if pytest.version_tuple >= (9, 0):
        toml, numbers = "[tool.pytest]\n", "4"
    result = nested(
        "def test(kv_profile): assert (kv_profile.block_size, kv_profile.prefix_caching) == (4, False)\n"
        "def test_matrix(kv_backend): pass",
        files={
            "pyproject.toml": f"{toml}kvmock_block_size = {numbers}\nkvmock_prefix_caching = false\n"
            'kvmock_backends = ["lru"]\n'
        },
    )

    result.assert_outcomes(passed=2)


OF_CONTRIB = [option.flag for option in EVERY_OPTION if option not in OPTIONS_OF_KVMOCK and option.flag]
FLAGS = [*(option.flag for option in OPTIONS_OF_KVMOCK if option.flag), *LISTS, *OF_CONTRIB]
SETTINGS = [option.ini for option in OPTIONS_OF_KVMOCK if option.ini]


@pytest.mark.parametrize(
    ("args", "flag", "nearest"),
    [
        (["--kv-backnd=lru"], "--kv-backnd", "--kv-backend"),
        (["--kv-backends", "lru"], "--kv-backends", "--kv-backend"),
        (["--kv-list-backend"], "--kv-list-backend", "--kv-list-backends"),
        (["--kv-event-warning=fail"], "--kv-event-warning", "--kv-event-warnings"),
        (["-v", "--kv-backnd=lru", "."], "--kv-backnd", "--kv-backend"),
    ],
)
def test_a_misspelt_option_gets_the_nearest_one(nested, args, flag, nearest):
    result = nested("def test(): pass", *args)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = (line for line in result.errlines if line)
    assert line.startswith(f"ERROR: unknown option '{flag}'; did you mean '{nearest}'")
    assert line.endswith(f"? known: {', '.join(FLAGS)}")


def test_an_option_unlike_any_of_the_plugin_is_left_to_pytest(nested):
    result = nested("def test(): pass", "--kv-zzzzzzzzzz")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*: error: unrecognized arguments: --kv-zzzzzzzzzz"])


def test_options_of_other_plugins_are_ignored(nested):
    conftest = "def pytest_addoption(parser): parser.addoption('--kv-backnd')"

    nested("def test(): pass", "--kv-backnd=7", files={"conftest.py": conftest}).assert_outcomes(passed=1)


TOML = "[tool.pytest.ini_options]\nkvmock_bakends = ['lru']\n[tool.other]\nkvmock_sede = 1\n"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pytest.ini", "[pytest]\nkvmock_bakends = lru\n"),
        ("pytest.ini", "[pytest]\nmarkers =\n  kvmock_slow: mine\nkvmock_bakends: lru\n"),
        ("setup.cfg", "[other]\nkvmock_sede = 1\n[tool:pytest]\nkvmock_bakends=lru\n"),
        ("pyproject.toml", TOML),
        ("pyproject.toml", TOML.replace(".ini_options", "")),
        ("pytest.toml", "[pytest]\nkvmock_bakends = ['lru']\n"),
    ],
    ids=["ini", "ini with others", "cfg", "toml", "native toml", "pytest.toml"],
)
def test_a_misspelt_setting_is_refused_with_the_nearest_name(nested, file, text):
    if pytest.version_tuple < (9, 0) and (file == "pytest.toml" or text == TOML.replace(".ini_options", "")):
        pytest.skip("pytest 9 reads such files")
    result = nested("def test(): pass", files={file: text})

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    expected = f"unknown setting 'kvmock_bakends'; did you mean 'kvmock_backends'? known: {', '.join(SETTINGS)}"
    assert [line for line in result.errlines if line] == [f"ERROR: {file}: {expected}"]


def test_a_misspelt_override_of_a_setting_is_refused(nested):
    result = nested("def test(): pass", "-o", "kvmock_zzzzzz=1")

    assert [line for line in result.errlines if line] == [
        f"ERROR: -o: unknown setting 'kvmock_zzzzzz'; known: {', '.join(SETTINGS)}"
    ]


def test_settings_of_other_plugins_are_ignored(nested):
    files = {
        "conftest.py": "def pytest_addoption(parser): parser.addini('kvmock_bakends', 'mine')",
        "pytest.ini": "[pytest]\nkvmock_bakends = 7\n",
    }
    nested("def test(): pass", "-o", "kvmock_bakends=8", files=files).assert_outcomes(passed=1)


# ---------------------------------------------------------------------------------------------------- markers

MARKERS = [
    ("kv_backends('lruu')", f"unknown backend 'lruu'; did you mean 'lru'? known: {KNOWN}"),
    ("kv_backends(7)", "got 7; allowed: names, as strings"),
    ("kv_backends(exclude=['lruu'])", f"unknown backend 'lruu'; did you mean 'lru'? known: {KNOWN}"),
    ("kv_backends(exclude=7)", "got 7; allowed: a name, or a list of names"),
    ("kv_backends(excluding='lru')", "unknown key 'excluding'; did you mean 'exclude'? known: exclude"),
    ("kvmock(8)", "takes keywords only; known: block_size, *"),
    ("kvmock(blok_size=8)", "unknown key 'blok_size'; did you mean 'block_size'? known: block_size, num_blocks, *"),
    (
        "kvmock(profile='small')",
        "profile: unknown profile 'small'; none is known: ini kvmock_profiles names their files",
    ),
    ("kvmock(profile=7)", "profile: got 7; allowed: the name of a profile"),
    ("kvmock(num_blocks=0)", "num_blocks*must be an integer of at least 1, got 0"),
    ("kvmock(block_size='16')", "block_size*must be *, got '16'"),
    ("kvmock(seed=None)", "seed*must be an integer, got None"),
    ("kvmock(tiers=64)", "tiers: tiers must be a mapping such as {'host': 64, 'gbps': 14.0}, got 64"),
    ("kvmock(tiers={'hots': 64})", "tiers: unknown key of tiers 'hots'; did you mean 'host'? known: host, g2, *"),
    ("kvmock(tiers={'gbps': 7})", "tiers: 'host' is missing, the number of blocks that fit host memory"),
    ("kvmock(tiers={'host': 0})", "tiers: host must be an integer of at least 1 (blocks), got 0"),
    (
        "kvmock(tiers={'host': 64, 'batch': 9})",
        (
            "tiers: batch must be at most 8 for a host of 64 blocks, got 9: batch squared blocks may be on their way, "
            "and *"
        ),
    ),
    (
        "kvmock(tiers={'g3': 64})",
        (
            "tiers: 'g3' is not a key: 'files': True puts a folder below the host of vllm, and no other engine is "
            "mocked *"
        ),
    ),
    (
        "kvmock(tiers={'host': 64, 'gbps': -1})",
        "tiers: gbps must be a finite number of at least 0 (GB/s; 0 is infinite), got -1",
    ),
    ("kvmock(event_errors='oops')", "event_errors: got 'oops'; allowed: fail, warn, ignore"),
    ("kvmock(event_warnings=True)", "event_warnings: got True; allowed: fail, warn, ignore"),
    ("kvmock(trace_tokens=1)", "trace_tokens: got 1; allowed: True, False"),
    ("kvmock(sync='never')", "sync: got 'never'; did you mean 'every'? allowed: every, auto, burst, end"),
    ("kvmock(clears='e2')", "clears: got 'e2'; allowed: rank, worker"),
    ("kvmock(allow=['nonsense'])", "allow: unknown rule 'nonsense'; known: parent_block_not_found, *"),
    ("kvmock(allow=7)", "allow: got 7; allowed: a name, or a list of names"),
    (
        "kvmock(faults={'loose': 0.1})",
        "faults: unknown fault 'loose'; did you mean 'lose'? known: lose, double, reorder, *",
    ),
    ("kvmock(faults={'lose': 1.5})", "faults: lose: got 1.5; allowed: a rate from 0 to 1"),
    ("kvmock(faults={'lose': -0.1})", "faults: lose: got -0.1; allowed: a rate from 0 to 1"),
    ("kvmock(faults={'lose': True})", "faults: lose: got True; allowed: a rate from 0 to 1"),
    ("kvmock(faults={'lose': '0.1'})", "faults: lose: got '0.1'; allowed: a rate from 0 to 1"),
    (
        "kvmock(faults={'restart': 0.1})",
        "faults: `restart` cannot strike at random; call `faults.restart()`; allowed at random: lose, double, *",
    ),
    ("kvmock(faults='lose')", "faults: got 'lose'; allowed: a mapping of faults to rates"),
    ("kvmock(survive=('lose', 'loose'))", "survive: unknown fault 'loose'; did you mean 'lose'? known: lose, *"),
    ("kvmock(survive=['block_size'])", "survive: no router can survive `block_size`"),
    ("kvmock(survive=7)", "survive: got 7; allowed: a fault, or a list of faults"),
]


def pattern(text):
    """Return a text escaped for fnmatch."""
    return text.replace("[", "[[]")


@pytest.mark.parametrize(("marker", "message"), MARKERS)
def test_a_wrong_marker_is_one_line_at_collection(nested, marker, message):
    result = nested(f"@pytest.mark.{marker}\ndef test(kv_harness): pass\ndef test_other(): pass")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"test_it.py::test: {pattern(marker)}: {message}"])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*pytest_kvmock/plugin*")


# One run covers them all: each message is made in one place, and these are the other ways to reach it.
def test_each_wrong_marker_of_a_module_is_one_line_at_collection(nested):
    result = nested(
        "\n".join(
            f"@pytest.mark.{marker}\ndef test_{number}(kv_sink): pass" for number, (marker, _) in enumerate(MARKERS)
        )
    )

    result.assert_outcomes(errors=1)
    for number, (marker, message) in enumerate(MARKERS):
        result.stdout.fnmatch_lines_random([f"test_it.py::test_{number}: {pattern(marker)}: {message}"])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*pytest_kvmock/plugin*")


def test_a_wrong_marker_is_found_on_a_test_without_fixtures_of_the_plugin(nested):
    result = nested("@pytest.mark.kvmock(foo=1)\ndef test(): pass\ndef test_other(): pass")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_it.py::test: kvmock(foo=1): unknown key 'foo'; known: block_size, *"])


def test_a_block_size_that_the_backend_refuses_is_reported_with_its_marker(nested):
    result = nested("@pytest.mark.kvmock(block_size=12)\ndef test(kv_harness): pass\ndef test_other(kv_sink): pass")

    result.assert_outcomes(errors=3, passed=1)
    result.stdout.fnmatch_lines(["kvmock: backend lru: block_size must be *, got 12 (kvmock(block_size=12))"])


@takes_long
def test_a_wrong_marker_gives_the_same_line_under_xdist(nested):
    result = nested("@pytest.mark.kvmock(num_blocks=0)\ndef test(kv_sink): pass", "-n", "2", plugins=["xdist"])

    result.stdout.fnmatch_lines(["test_it.py::test: kvmock(num_blocks=0): num_blocks*must be *, got 0"])
    result.stdout.no_fnmatch_line("*pytest_kvmock/plugin*")


@pytest.mark.parametrize("place", ["class", "module"])
def test_a_wrong_marker_of_a_class_or_module_is_found(nested, place):
    marks = {"class": "", "module": "", place: "pytestmark = pytest.mark.kvmock(nonsense=1)"}
    result = nested(
        f"{marks['module']}\nclass TestC:\n    {marks['class'] or 'x = 1'}\n    def test(self, kv_sink): pass"
    )

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_it.py::TestC::test: kvmock(nonsense=1): unknown key 'nonsense'; known: *"])


KEYS = ", ".join(KVMOCK_KEYS)


def unknown(name, nearest, what="key", known=KEYS):
    return f"unknown {what} {name!r}; did you mean {nearest!r}? known: {known}"


def errors_of(result):
    """Return the lines of the report between the headline of each error and the summary."""
    lines = iter(result.outlines)
    found = []
    for line in lines:
        if "short test summary" in line:  # in CI it has whole messages
            break
        if "ERROR collecting" in line:
            found.append([line.strip("_ ").removeprefix("ERROR collecting ")])
        elif line.startswith(("=", "!")):
            continue
        elif found and not line.startswith("ERROR "):
            found[-1].append(line)
    return found


def test_all_wrong_markers_of_a_file_are_reported_at_once(nested):
    result = nested(
        """
        pytestmark = [pytest.mark.kvmock(wrokers=2)]

        def test_right(kv_sink): pass

        @pytest.mark.kvmock(event_warning="fail", aloww=["wrong_hash"])
        @pytest.mark.kv_backends("lineag")
        def test_two(kv_sink): pass

        @pytest.mark.kvmock(chunk=0)
        class TestAll:
            def test_first(self, kv_sink): pass
            def test_second(self, kv_sink): pass
            @pytest.mark.kvmock(allow=["parent_not_found"])
            def test_third(self, kv_sink): pass
            class TestInner:
                @pytest.mark.kvmock(sync="alto")
                def test(self, kv_sink): pass

        @pytest.mark.kvmock(blocks_size=8)
        def no_test(): pass
        """
    )

    result.assert_outcomes(errors=1)
    two = "kvmock(event_warning='fail', aloww=['wrong_hash'])"
    third = "allow=['parent_not_found']"
    least = "chunk must be an integer of at least 1 tokens, or None, got 0"
    sync = "got 'alto'; did you mean 'auto'? allowed: " + ", ".join(SYNCS)
    assert [
        [
            "test_it.py",
            f"test_it.py::test_right: kvmock(wrokers=2): {unknown('wrokers', 'workers')}",
            f"test_it.py::test_two: kv_backends('lineag'): {unknown('lineag', 'lineage', 'backend', KNOWN)}",
            f"test_it.py::test_two: {two}: {unknown('event_warning', 'event_warnings')}",
            f"test_it.py::test_two: {two}: {unknown('aloww', 'allow')}",
            f"test_it.py::TestAll::test_first: kvmock(chunk=0): chunk: {least}",
            f"test_it.py::TestAll::test_third: kvmock({third}): allow: "
            + unknown("parent_not_found", "parent_block_not_found", "rule", ", ".join(RULES)),
            f"test_it.py::TestAll::TestInner::test: kvmock(sync='alto'): sync: {sync}",
        ]
    ] == errors_of(result)


@pytest.mark.parametrize("args", [[], pytest.param(["-n", "2"], marks=takes_long)], ids=["alone", "xdist"])
def test_wrong_markers_of_several_files_and_classes_are_all_reported(nested, args):
    wrong = "@pytest.mark.kvmock(sede=1)\n{}def test{}(kv_sink): pass\n"
    method = "    @pytest.mark.kvmock(sede=1)\n    def test(self, kv_sink): pass\n"
    files = {
        "test_a.py": "import pytest\n" + wrong.format("", 1) + wrong.format("", 2),
        "test_b.py": "import pytest\ndef test(kv_sink): pass\nclass TestA:\n" + method + "class TestB:\n" + method,
    }

    result = nested("", *args, plugins=["xdist"], files=files)

    result.assert_outcomes(errors=3, passed=1 if args else 0)  # pytest-xdist continues
    line = f"kvmock(sede=1): {unknown('sede', 'seed')}"
    assert sorted(errors_of(result)) == [
        ["test_a.py", f"test_a.py::test1: {line}", f"test_a.py::test2: {line}"],
        ["test_b.py", f"test_b.py::TestA::test: {line}"],
        ["test_b.py", f"test_b.py::TestB::test: {line}"],
    ]


def test_a_marker_from_a_hook_is_reported_with_its_test(nested):
    files = {
        "conftest.py": """
        import pytest

        @pytest.hookimpl(wrapper=True)
        def pytest_pycollect_makeitem(collector, name, obj):
            if getattr(obj, "late", False):
                obj.pytestmark = [pytest.mark.kvmock(sede=1).mark]
            return (yield)
        """
    }
    result = nested("def test_a(kv_sink): pass\ntest_a.late = True\ndef test_b(kv_sink): pass", files=files)

    result.assert_outcomes(errors=1)
    assert errors_of(result) == [["test_it.py", f"test_it.py::test_a: kvmock(sede=1): {unknown('sede', 'seed')}"]]


def lines_of_setups(result):
    """Return the lines about the setup of each test: `{name: [lines that begin with kvmock:]}`."""
    found = {}
    for line in result.outlines:
        if title := re.fullmatch(r"_+ ERROR at setup of (\S+) _+", line):
            expected_message = found[title[1]] = []
        elif line.startswith("kvmock: ") and found:
            expected_message.append(line)
    return found


def test_a_wrong_marker_of_a_testcase_is_one_line_at_setup(nested):
    methods = [
        f"    @pytest.mark.{marker}\n    def test_{number}(self): pass" for number, (marker, _) in enumerate(MARKERS)
    ]
    result = nested(
        "class T(unittest.TestCase):\n    @pytest.fixture(autouse=True)\n    def _kv(self, kv_sink): pass\n"
        + "\n".join(methods)
    )

    result.assert_outcomes(errors=len(MARKERS))
    found = lines_of_setups(result)
    for number, (marker, message) in enumerate(MARKERS):
        (expected_message,) = found[f"T.test_{number}"]
        assert fnmatchcase(expected_message, f"kvmock: {pattern(marker)}: {message}"), expected_message
    result.stdout.no_fnmatch_line("*pytest_kvmock/plugin*")
    result.stdout.no_fnmatch_line("*During handling*")


LATE = """
import pytest
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.{marker})
"""


def test_a_wrong_marker_added_after_collection_is_one_line_at_setup(nested):
    markers = "".join(f"    pytest.mark.{marker},\n" for marker, _ in MARKERS)
    late = (
        f"import pytest\nMARKERS = [\n{markers}]\ndef pytest_collection_modifyitems(items):\n    for item in items:\n"
        "        item.add_marker(MARKERS[int(item.originalname.removeprefix('test_'))])\n"
    )
    source = "\n".join(f"def test_{number}(kv_harness): pass" for number in range(len(MARKERS)))

    result = nested(source, files={"conftest.py": late})

    result.assert_outcomes(errors=3 * len(MARKERS))
    found = lines_of_setups(result)
    for number, (marker, message) in enumerate(MARKERS):
        for backend in ("lineage", "lru", "multi_lru"):
            (expected_message,) = found[f"test_{number}[{backend}]"]
            assert fnmatchcase(expected_message, f"kvmock: {pattern(marker)}: {message}"), expected_message


@takes_long
def test_a_wrong_marker_added_after_collection_is_the_same_line_over_the_matrix_and_xdist(nested):
    files = {"conftest.py": LATE.replace("{marker}", "kv_backends('lruu')")}

    result = nested("def test(kv_harness): pass", "-n", "2", plugins=["xdist"], files=files)

    result.assert_outcomes(errors=3)
    result.stdout.fnmatch_lines(
        [f"kvmock: kv_backends('lruu'): unknown backend 'lruu'; did you mean 'lru'? known: {KNOWN}"]
    )


# ---------------------------------------------------------------------------------------------------- fixtures

FIXTURES = {
    "an index without apply": (
        "@pytest.fixture\ndef kv_index(): return object()",
        "kvmock: the index under test (object) has no apply(event)*",
    ),
    "an index that cannot be asked": (
        "class Index:\n def apply(self, event): pass\n@pytest.fixture\ndef kv_index(): return Index()",
        "kvmock: the index under test (Index) has none of find_matches(local_hashes), match_tokens(tokens)*",
    ),
    "an index that is not empty": (
        """
        class Index:
            def apply(self, event): pass
            def find_matches(self, hashes): return {}
            def dump_events(self): return [1]
        @pytest.fixture
        def kv_index(): return Index()
        """,
        "kvmock: the index under test (Index) is not empty at the start*",
    ),
    "an index that raises when it is made": (
        "@pytest.fixture\ndef kv_index(): raise OSError('no index today')",
        "E *OSError: no index today",
    ),
    "a base profile of another type": (
        "@pytest.fixture\ndef kv_base_profile(): return {'block_size': 4}",
        "kvmock: kv_base_profile must return an EngineProfile, got {'block_size': 4}",
    ),
}


MISSPELT = {
    "an argument": ("def test(kv_evnts): pass", "kv_evnts", "'kv_events'"),
    "one beside a right one": ("def test(kv_sink, kv_event): pass", "kv_event", "'kv_events'"),
    "of a fixture": (
        "@pytest.fixture\ndef engine(make_kv_snk): pass\ndef test(engine): pass",
        "make_kv_snk",
        "'make_kv_sink'",
    ),
    "by usefixtures": ("@pytest.mark.usefixtures('kv_manger')\ndef test(): pass", "kv_manger", "'kv_manager'"),
}


@pytest.mark.parametrize(("source", "name", "nearest"), [pytest.param(*c, id=name) for name, c in MISSPELT.items()])
@pytest.mark.parametrize("args", [[], pytest.param(["-n", "1"], marks=takes_long)], ids=["alone", "xdist"])
def test_a_misspelt_fixture_gets_the_nearest_one(nested, source, name, nearest, args):
    result = nested(source, *args, plugins=["xdist"])

    result.assert_outcomes(errors=1)
    (expected_message,) = (line for line in result.outlines if "did you mean" in line)
    assert expected_message.startswith(f"fixture '{name}' not found; did you mean {nearest}")
    result.stdout.fnmatch_lines([f"E *fixture '{name}' not found", "*available fixtures: *", "*Captured kvmock setup*"])


def test_a_fixture_unlike_any_of_the_plugin_is_left_to_pytest(nested):
    result = nested("def test(kv_zzzzzzzz): pass\ndef test_other(evnts): pass")

    result.assert_outcomes(errors=2)
    result.stdout.no_fnmatch_line("*did you mean*")
    result.stdout.no_fnmatch_line("*Captured kvmock*")


def test_fixtures_of_other_plugins_are_ignored(nested):
    source = "@pytest.fixture\ndef kv_event(): return 7\ndef test(kv_event): assert 7 == kv_event"

    nested(source).assert_outcomes(passed=1)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in FIXTURES.items()])
@pytest.mark.parametrize("fixture", ["kv_sink", "kv_events"])
def test_a_wrong_override_of_a_fixture_is_one_error(nested, case, fixture):
    source, message = case

    result = nested(f"{textwrap.dedent(source)}\ndef test({fixture}): pass")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*pytest_kvmock/*:*")
    result.stdout.no_fnmatch_line("*During handling*")


@pytest.mark.parametrize("block_size", [1, 3, 2048])
def test_a_block_size_that_the_backend_refuses_is_one_line(nested, block_size):
    result = nested(f"@pytest.mark.kvmock(block_size={block_size})\ndef test(kv_manager): pass")

    result.assert_outcomes(errors=3)
    refused = [f"kvmock: backend {backend}: *block_size*" for backend in ("lineage", "lru", "multi_lru")]
    result.stdout.fnmatch_lines(refused)
    result.stdout.no_fnmatch_line("*pytest_kvmock/*:*")


@worth_its_time
def test_full_trace_shows_frames_of_the_plugin(nested):
    result = nested("@pytest.mark.kvmock(block_size=3)\ndef test(kv_manager): pass", "--full-trace")

    result.stdout.fnmatch_lines(["*pytest_kvmock*"])


def test_a_truncated_trace_names_file_and_line(nested):
    result = nested(
        "def test(kv_trace): pass",
        "--kv-trace=trace.jsonl",
        files={"trace.jsonl": '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n{"timesta'},
    )

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["kvmock: kv_trace: *trace.jsonl*2*"])
    result.stdout.no_fnmatch_line("*pytest_kvmock/*:*")


@pytest.mark.parametrize("event", ["None", "7", "{'type': 'stored'}", "'stored'"])
def test_an_event_of_the_wrong_type_is_an_error_of_the_body(nested, event):
    result = nested(f"def test(kv_sink): kv_sink({event})")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E *TypeError: a kv_sink takes Stored, Removed, Located, Updated, Cleared, KvCacheEvent or RouterEvent*"]
    )
