"""The hooks: backends of other packages, and waived problems."""

from __future__ import annotations

import sys

import pytest
from depth import takes_long, worth_its_time

from pytest_kvmock import BACKENDS
from pytest_kvmock.engines.backends import known_backends

MATRIX = [name for name, spec in BACKENDS.items() if spec.in_matrix]
BUILT_IN = [f"test[{name}]" for name in MATRIX]

MINE = """\
import pytest
from pytest_kvmock import BackendSpec
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy

def spec(name="mine", **fields):
    return BackendSpec.of_policy(name, lambda num_blocks: LruPolicy(), models="nobody", **fields)

"""
HOOK = "@pytest.hookimpl(optionalhook=True)\ndef pytest_kvmock_backends(config): return "
REGISTERS = MINE + HOOK + '{"mine": spec()}\n'
USES = "def test(kv_harness): pass"
IN_USE = """
from pytest_kvmock import RouterHarness, create_manager

def test(kv_backend, kv_harness, kv_manager, make_kv_manager, kv_prompt):
    assert kv_backend == kv_harness.backend == kv_manager.backend
    prompt = kv_prompt()
    kv_harness.worker(0).serve(prompt)
    assert kv_harness.overlap(prompt) == {0: 4}
    assert make_kv_manager("mine").backend == "mine" == create_manager("mine", num_blocks=1).backend
    with RouterHarness(backend=kv_backend) as of_its_own:
        assert of_its_own.backend == kv_backend
"""


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = known_backends()
    yield
    assert before == known_backends()


# ---------------------------------------------------------------------------------------------------- in the matrix


def test_a_backend_of_a_conftest_is_in_the_matrix(nested, ids):
    files = {"conftest.py": REGISTERS}

    assert ids(IN_USE, files=files) == [*BUILT_IN, "test[mine]"]
    nested("", files=files).assert_outcomes(passed=len(BUILT_IN) + 1)
    assert ids("", "--kv-backend=mine") == ["test[mine]"]
    assert ids("", files={"pytest.ini": "[pytest]\nkvmock_backends = mine lru"}) == ["test[lru]", "test[mine]"]


@takes_long
def test_a_backend_of_a_conftest_is_in_the_matrix_under_xdist(nested):
    nested(IN_USE, "-n", "2", plugins=["xdist"], files={"conftest.py": REGISTERS}).assert_outcomes(
        passed=len(BUILT_IN) + 1
    )


def test_a_backend_of_a_conftest_is_in_the_matrix_of_another_process(nested):
    nested(IN_USE, subprocess=True, files={"conftest.py": REGISTERS}).assert_outcomes(passed=len(BUILT_IN) + 1)


def test_a_backend_of_a_plugin_is_in_the_matrix(nested, ids, pytester):
    pytester.syspathinsert()
    files = {"theirs.py": REGISTERS, "conftest.py": MINE + HOOK + '{"other": spec("other")}\n'}

    assert ids(USES, plugins=["theirs"], files=files) == [*BUILT_IN, "test[mine]", "test[other]"]


def test_a_backend_of_a_plugin_registered_in_configure_is_in_the_matrix(ids):
    later = REGISTERS.replace(
        "def pytest_kvmock", "class Theirs:\n  @staticmethod\n  @pytest.hookimpl\n  def pytest_kvmock", 1
    )
    later = later.replace("@pytest.hookimpl(optionalhook=True)\n", "", 1)
    later += "def pytest_configure(config): config.pluginmanager.register(Theirs, 'theirs')\n"

    assert ids(USES, files={"conftest.py": later}) == [*BUILT_IN, "test[mine]"]


def test_a_backend_outside_the_default_matrix_runs_if_named(ids):
    source = (
        USES
        + """
@pytest.mark.kv_backends("mine", "lru")
def test_marked(kv_harness): pass
@pytest.mark.parametrize("kv_backend", ["mine"])
def test_parametrized(kv_harness): assert kv_harness.backend == "mine"
"""
    )
    files = {"conftest.py": MINE + HOOK + '{"mine": spec(in_matrix=False)}\n'}
    named = ["test_marked[lru]", "test_marked[mine]", "test_parametrized[mine]"]

    assert [*BUILT_IN, *named] == ids(source, files=files)
    assert ids("", "--kv-backend=mine") == ["test_marked[mine]", "test_parametrized[mine]"]
    everything = [f"test[{name}]" for name in BACKENDS]
    assert [*everything, "test[mine]", *named] == ids("", files={"pytest.ini": "[pytest]\nkvmock_backends = all"})


def test_the_list_names_the_plugin_that_registered_a_backend(nested):
    result = nested("", "--kv-list-backends", files={"conftest.py": REGISTERS})

    assert result.outlines[-1].split(maxsplit=1) == ["mine", "nobody (from conftest.py)"]


def test_the_header_counts_a_registered_backend(nested):
    nested(USES, "-v", files={"conftest.py": REGISTERS}).stdout.fnmatch_lines(
        [f"kvmock: backends={','.join(MATRIX)},mine (of {len(BACKENDS) + 1})*"]
    )


def test_a_backend_of_an_outer_run_is_not_known_in_an_inner_run(nested):
    result = nested(
        f"""
        def test(pytester, kv_manager):
            pytester.makepyfile(test_inner="def test(kv_manager): pass")
            pytester.runpytest_inprocess("-p", "kvmock").assert_outcomes(passed={len(BUILT_IN)})
        """,
        plugins=["pytester"],
        files={"conftest.py": REGISTERS},
    )

    result.assert_outcomes(passed=len(BUILT_IN) + 1)


@worth_its_time
def test_without_the_plugin_a_hook_implementation_does_no_harm(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)
    pytester.makeconftest(REGISTERS + EVENTS.format("True"))
    pytester.makepyfile("def test(): pass")

    result = pytester.run(sys.executable, "-m", "pytest", "-p", "no:kvmock", "-q")

    result.assert_outcomes(passed=1)


# ---------------------------------------------------------------------------------------------------- nonsense

NONSENSE = [
    pytest.param("None", "returned None; allowed: a mapping of names to BackendSpecs", id="nothing"),
    pytest.param("[spec()]", "returned [[]BackendSpec(*; allowed: a mapping of names to BackendSpecs", id="a list"),
    pytest.param(
        "{'mine': LruPolicy}", "'mine' is <class *LruPolicy'>; allowed: a BackendSpec, such as *", id="a class"
    ),
    pytest.param("{'mine': None}", "'mine' is None; allowed: a BackendSpec, such as *", id="no spec"),
    pytest.param("{'other': spec()}", "the key 'other' is not the name of its backend, 'mine'", id="another name"),
    pytest.param("{7: spec()}", "the key 7 is not the name of its backend, 'mine'", id="a number"),
    pytest.param("{'lru': spec('lru')}", "'lru' is the name of a built-in backend; take another", id="built in"),
]


@pytest.mark.parametrize(("returned", "message"), NONSENSE)
@pytest.mark.parametrize(
    "args", [[], ["--kv-list-backends"], pytest.param(["-n", "1"], marks=takes_long)], ids=["run", "list", "xdist"]
)
def test_an_invalid_hook_result_is_a_usage_error_that_names_the_plugin(nested, returned, message, args):
    files = {"conftest.py": MINE + HOOK + returned}
    result = nested(USES, *args, files=files, plugins=["xdist"] if "-n" in args else ())

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert len([line for line in result.errlines if line]) == 1
    result.stderr.fnmatch_lines(
        [f"ERROR: pytest_kvmock_backends of conftest.py: {message}".replace(": returned", " returned")]
    )


RAISES = [
    ("1 / 0", "raised ZeroDivisionError: division by zero (conftest.py:9; --full-trace shows the way there)"),
    (
        "{'a b': spec('a b')}",
        "raised ValueError: a backend's name has letters, *; got 'a b' (backends.py:*; --full-trace *)",
    ),
]


@pytest.mark.parametrize(("returned", "message"), RAISES)
def test_a_hook_that_raises_is_a_usage_error_that_names_the_plugin(nested, returned, message):
    result = nested(USES, files={"conftest.py": MINE + HOOK + returned})

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert len([line for line in result.errlines if line]) == 1
    result.stderr.fnmatch_lines([f"ERROR: pytest_kvmock_backends of conftest.py {message}"])


def test_full_trace_shows_the_whole_traceback_of_a_hook(nested):
    result = nested(USES, "--full-trace", files={"conftest.py": MINE + HOOK + "1 / 0"})

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: pytest_kvmock_backends of conftest.py raised:", "*return 1 / 0", "ZeroDivisionError: division by zero"]
    )


def test_a_backend_registered_by_two_plugins_is_refused_with_both_names(nested, pytester):
    pytester.syspathinsert()

    result = nested(USES, plugins=["theirs"], files={"theirs.py": REGISTERS, "conftest.py": REGISTERS})

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        "ERROR: pytest_kvmock_backends: theirs and conftest.py both register a backend 'mine'"
    ]


def test_a_manager_with_another_name_is_refused_in_one_line(nested):
    lies = MINE + HOOK + "{'mine': BackendSpec('mine', 'nobody', spec('yours').make)}"

    result = nested(USES, files={"conftest.py": lies})

    result.assert_outcomes(passed=len(BUILT_IN), errors=1)
    result.stdout.fnmatch_lines(["kvmock: backend mine: backend 'mine' made a manager that calls itself 'yours'; *"])


@pytest.mark.parametrize("args", [[], ["-n", "1"]], ids=["run", "xdist"])
def test_a_hook_in_a_late_conftest_is_refused_in_one_line(nested, args):
    result = nested(
        USES, *args, plugins=["xdist"] if args else (), files={"sub/conftest.py": REGISTERS, "sub/test_sub.py": USES}
    )

    assert result.parseoutcomes()["error" if "error" in result.parseoutcomes() else "errors"] == 1
    result.stdout.fnmatch_lines(["sub?conftest.py: pytest_kvmock_backends comes too late here: it is read once, *"])
    result.stdout.no_fnmatch_line("*pytest_kvmock/plugin*")


def test_a_hook_is_in_time_if_its_directory_is_named(nested):
    files = {"sub/conftest.py": REGISTERS, "sub/test_sub.py": USES}

    nested("", "sub", files=files).assert_outcomes(passed=len(BUILT_IN) + 1)
    nested("", files={"pytest.ini": "[pytest]\ntestpaths = sub\n"}).assert_outcomes(passed=len(BUILT_IN) + 1)


def test_a_late_conftest_without_the_hook_is_ignored(nested):
    nested(USES, files={"sub/conftest.py": "x = 1", "sub/test_sub.py": USES}).assert_outcomes(passed=2 * len(BUILT_IN))


# ---------------------------------------------------------------------------------------------------- waiving

EVENTS = """\
@pytest.hookimpl(optionalhook=True)
def pytest_kvmock_event_error(item, problem):
    return {}
"""
WAIVES = "import pytest\n" + EVENTS


def test_a_waived_problem_does_not_fail_the_test_and_is_shown_in_the_log(nested):
    result = nested(
        """
        def test_waived(kv_sink, kv_events):
            kv_sink(BAD)
            kv_events.assert_no_event_errors()
        def test_other(kv_sink): kv_sink(BAD)
        """,
        "--kv-show-log=all",
        "-rA",
        files={"conftest.py": WAIVES.format("'waived' in item.name and problem.rule == 'block_not_found'")},
    )

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["    0  event 0  worker 65536  Removed block 1  !! block_not_found, waived"])
    result.stdout.fnmatch_lines(["    0  event 0  worker 65536  Removed block 1  !! block_not_found"])


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ({"conftest.py": "True"}, "passed"),
        ({"conftest.py": "False"}, "failed"),
        ({"conftest.py": "None"}, "failed"),
        ({"conftest.py": "True", "sub/conftest.py": "None"}, "passed"),
        ({"conftest.py": "True", "sub/conftest.py": "False"}, "failed"),
        ({"conftest.py": "False", "sub/conftest.py": "True"}, "passed"),
        ({"other/conftest.py": "True"}, "failed"),
        ({"conftest.py": "None", "other/conftest.py": "True"}, "failed"),
    ],
)
def test_the_closest_hook_with_an_answer_decides(nested, answers, outcome):
    files = {name: WAIVES.format(answer) for name, answer in answers.items()}
    files["sub/test_sub.py"] = "from pytest_kvmock import Removed\ndef test(kv_sink): kv_sink(Removed((1,)))"

    nested("", "other", "sub", files={"other/x": "", **files}).assert_outcomes(**{outcome: 1})


def test_the_hook_is_called_once_for_each_problem_that_counts(nested):
    result = nested(
        """
        @pytest.mark.kvmock(event_warnings="warn")
        def test(kv_sink, kv_events):
            kv_events.expect_error("parent_block_not_found")
            kv_sink(Stored(7, (8,), (8,)))  # expected
            kv_sink(BAD)
            kv_events.assert_no_event_errors()
            kv_events.assert_no_event_errors()
            kv_sink(GOOD)
            kv_sink(TWICE)
        @pytest.mark.kvmock(allow=["block_not_found"])
        def test_allowed(kv_sink): kv_sink(BAD)
        @pytest.mark.kvmock(event_errors="ignore")
        def test_ignored(kv_sink): kv_sink(BAD)
        """,
        "-s",
        files={"conftest.py": WAIVES.format("print('it is:', problem.rule) or True")},
    )

    result.assert_outcomes(passed=3)
    assert [line.partition("it is: ")[2] for line in result.outlines if "it is:" in line] == [
        "block_not_found",
        "duplicate_store",
    ]


def test_consequences_of_a_waived_problem_are_waived_too(nested):
    result = nested(
        """
        def test(kv_sink):
            kv_sink(Stored(7, (8,), (8,)))
            kv_sink(Stored(8, (9,), (9,)))
            kv_sink(Removed((9,)))
        """,
        files={"conftest.py": WAIVES.format("problem.rule == 'parent_block_not_found'")},
    )

    result.assert_outcomes(passed=1)


def test_problems_of_a_teardown_can_be_waived(nested):
    result = nested(
        """
        @pytest.fixture
        def late(kv_sink):
            yield
            kv_sink(BAD)
        def test(late): pass
        """,
        files={"conftest.py": WAIVES.format("True")},
    )

    result.assert_outcomes(passed=1)


def test_waived_errors_do_not_count_in_the_properties(nested, pytester):
    result = nested(
        "def test(kv_sink): kv_sink(BAD)",
        "--junitxml=out.xml",
        files={"conftest.py": WAIVES.format("True")},
    )

    result.assert_outcomes(passed=1)
    assert '<property name="kvmock.errors" value="0" />' in (pytester.path / "out.xml").read_text()


BODIES = {
    "passed": ("def test(kv_sink): kv_sink(BAD)", []),
    "checked in the body": ("def test(kv_sink, kv_events):\n kv_sink(BAD)\n kv_events.assert_no_event_errors()", []),
    "in a teardown": ("@pytest.fixture\ndef late(kv_sink):\n yield\n kv_sink(BAD)\ndef test(late): pass", ["passed"]),
}


@pytest.mark.parametrize("answer", ["1 / 0", "'yes'"])
@pytest.mark.parametrize(("source", "also"), BODIES.values(), ids=BODIES)
def test_a_waiving_hook_that_raises_is_reported_in_one_line_with_the_log(nested, source, also, answer):
    result = nested(source, files={"conftest.py": WAIVES.format(answer)})

    expected_message = {
        "1 / 0": "of conftest.py raised ZeroDivisionError: division by zero (conftest.py:4; --full-trace shows the "
        "way *",
        "'yes'": "returned 'yes'; allowed: True, False or None",
    }
    assert {*also, "errors" if also else "failed"} == set(result.parseoutcomes())
    result.stdout.fnmatch_lines(
        [
            f"*kvmock: pytest_kvmock_event_error {expected_message[answer]}",
            "*Captured kvmock events*",
            "*Removed block 1*",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_kvmock/*.py:*")


def test_full_trace_shows_the_traceback_of_a_waiving_hook(nested):
    result = nested("def test(kv_sink): kv_sink(BAD)", "--full-trace", files={"conftest.py": WAIVES.format("1 / 0")})

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([">       return 1 / 0", "E*ZeroDivisionError: division by zero"])


JUDGES_BADLY = {
    "1": "pytest_kvmock_event_error returned 1; allowed: True, False or None",
    "1 / 0": "pytest_kvmock_event_error of conftest.py raised ZeroDivisionError: division by zero (conftest.py:4; *",
    "pytest.fail('no')": "no",
    "pytest.skip('no')": "*no*",
}


@pytest.mark.parametrize(("answer", "note"), JUDGES_BADLY.items())
def test_a_failing_waiving_hook_does_not_replace_the_failure_of_the_body(nested, answer, note):
    result = nested("def test(kv_sink):\n kv_sink(BAD)\n assert 2 == 3", files={"conftest.py": WAIVES.format(answer)})

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*assert 2 == 3", f"E*kvmock: the events could not be judged: {note}", "*Captured kvmock events*"]
    )


BADLY_MADE = {
    "lambda **_: object()": "backend 'mine' made <object *> (object), which is not a KvManager: it has no backend, *",
    "lambda **_: None": "backend 'mine' made None (NoneType), which is not a KvManager: it has no backend, *",
    "lambda **_: 1 / 0": "backend 'mine': make raised ZeroDivisionError: division by zero",
    "lambda: None": "backend 'mine': make raised TypeError: *<lambda>() got an unexpected keyword argument *",
}


@pytest.mark.parametrize(("make", "message"), BADLY_MADE.items())
def test_a_backend_that_makes_no_manager_is_refused_in_one_line(nested, make, message):
    files = {"conftest.py": MINE + HOOK + f"{{'mine': BackendSpec('mine', 'nobody', {make})}}"}

    result = nested(USES, files=files)

    result.assert_outcomes(passed=len(BUILT_IN), errors=1)
    result.stdout.fnmatch_lines([f"kvmock: backend mine: {message}"])
    result.stdout.no_fnmatch_line("*block_size must*")


def test_a_refused_block_size_names_its_source(nested):
    refuses = "def make(**_): raise ValueError('no licence')\n"
    files = {"conftest.py": MINE + refuses + HOOK + "{'mine': BackendSpec('mine', 'nobody', make)}"}

    result = nested("@pytest.mark.kvmock(block_size=3)\n@pytest.mark.kv_backends('mine', 'lru')\n" + USES, files=files)

    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["kvmock: backend lru: block_size must be *, got 3 (kvmock(block_size=3))"])
    result.stdout.fnmatch_lines(["kvmock: backend mine: no licence"])


def test_a_hook_may_end_the_session(nested):
    conftest = """
        import pytest
        def pytest_kvmock_event_error(item, problem):
            pytest.exit("enough")
    """
    result = nested(
        "def test(kv_sink): kv_sink(BAD)\ndef test_next(): pass", files={"conftest.py": conftest}, subprocess=True
    )

    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*Exit: enough*"])
