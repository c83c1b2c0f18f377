"""The hook `pytest_kvmock_dialects`: registered dialects are known by name during the run, or refused in one line."""

from __future__ import annotations

import sys

import pytest
from depth import takes_long

from pytest_kvmock.wire import DIALECTS
from pytest_kvmock.wire.codec.table import known_dialects

HOOK = """\
import pytest
from pytest_kvmock.wire import DIALECTS

def dialect(name="mine", **changes):
    return DIALECTS["vllm-0.33"].variant(name, **changes)

@pytest.hookimpl(optionalhook=True)
def pytest_kvmock_dialects(config): return """
REGISTERS = HOOK + '{"mine": dialect()}\n'
USES = """
from pytest_kvmock.wire import Batch, decode, encode, find_dialect

def test():
    assert find_dialect("mine").name == "mine"
    assert decode(encode(Batch([], 2.5), "mine"), "mine").timestamp == 2.5
"""


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = known_dialects()
    yield
    assert before == known_dialects()


@pytest.mark.parametrize("args", [[], pytest.param(["-n", "1"], marks=takes_long)], ids=["run", "xdist"])
def test_a_dialect_of_a_conftest_is_known_by_name(nested, args):
    plugins = ["xdist"] if args else ()
    nested(USES, *args, plugins=plugins, files={"conftest.py": REGISTERS}).assert_outcomes(passed=1)


def test_a_dialect_of_a_plugin_is_known_by_name(nested, pytester):
    pytester.syspathinsert()
    files = {"theirs.py": REGISTERS, "conftest.py": HOOK + '{"other": dialect("other")}\n'}

    nested(USES + "    find_dialect('other')", plugins=["theirs"], files=files).assert_outcomes(passed=1)


def test_a_misspelt_dialect_gets_the_nearest_one_of_a_conftest(nested):
    source = "from pytest_kvmock.wire import find_dialect\ndef test(): find_dialect('mein')"
    result = nested(source, files={"conftest.py": HOOK + '{"meine": dialect("meine")}\n'})

    result.stdout.fnmatch_lines(
        [f"E*ValueError: unknown dialect 'mein'; did you mean 'meine'? known: {', '.join(DIALECTS)}, meine"]
    )


def test_a_dialect_of_an_outer_run_is_not_known_in_an_inner_run(nested):
    source = """
        from pytest_kvmock.wire.codec.table import known_dialects
        def test(pytester):
            assert "mine" in known_dialects()
            pytester.makepyfile(test_inner="from pytest_kvmock.wire.codec.table import known_dialects\\ndef test(): assert 'mine' not in known_dialects()")
            pytester.runpytest_inprocess("-p", "kvmock").assert_outcomes(passed=1)
            assert "mine" in known_dialects()
        """  # noqa: E501
    nested(source, plugins=["pytester"], files={"conftest.py": REGISTERS}).assert_outcomes(passed=1)


@takes_long
def test_without_the_plugin_a_hook_implementation_does_no_harm(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)
    pytester.makeconftest(REGISTERS)
    pytester.makepyfile("def test(): pass")

    pytester.run(sys.executable, "-m", "pytest", "-p", "no:kvmock", "-q").assert_outcomes(passed=1)


NONSENSE = [
    ("None", "returned None; allowed: a mapping of names to Dialects"),
    ("[dialect()]", "returned [[]Dialect(*; allowed: a mapping of names to Dialects"),
    ("{'mine': 'array'}", ": 'mine' is 'array'; allowed: a Dialect, such as DIALECTS['vllm-0.33'].variant(...)"),
    ("{'other': dialect()}", ": the key 'other' is not the name of its dialect, 'mine'"),
    ("{'vllm-0.9': dialect('vllm-0.9')}", ": 'vllm-0.9' is the name of a built-in dialect; take another"),
    ("1 / 0", "raised ZeroDivisionError: division by zero (conftest.py:*; --full-trace shows the way there)"),
    (
        "{'mine': dialect(hashes='digests')}",
        (
            "raised ValueError: dialect 'mine': hashes must be 'unsigned' or 'signed' or 'either' or 'bytes', got "
            "'digests' (dialect.py:*"
        ),
    ),
]


@pytest.mark.parametrize(("returned", "message"), NONSENSE)
def test_an_invalid_hook_result_is_a_usage_error_that_names_the_plugin(nested, returned, message):
    result = nested(USES, files={"conftest.py": HOOK + returned})

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert len([line for line in result.errlines if line]) == 1
    where = "ERROR: pytest_kvmock_dialects of conftest.py"
    message = message.replace("[", "[[]", message.count("['"))
    result.stderr.fnmatch_lines([f"{where}{message}" if message[0] == ":" else f"{where} {message}"])


def test_a_dialect_registered_by_two_plugins_is_refused_with_both_names(nested, pytester):
    pytester.syspathinsert()

    result = nested(USES, plugins=["theirs"], files={"theirs.py": REGISTERS, "conftest.py": REGISTERS})

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        "ERROR: pytest_kvmock_dialects: theirs and conftest.py both register a dialect 'mine'"
    ]


def test_a_dialect_hook_in_a_late_conftest_is_refused_in_one_line(nested):
    result = nested(USES, files={"sub/conftest.py": REGISTERS, "sub/test_sub.py": USES})

    result.stdout.fnmatch_lines(["sub?conftest.py: pytest_kvmock_dialects comes too late here: it is read once, *"])
