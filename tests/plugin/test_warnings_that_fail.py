"""`event_warnings="fail"` applies to `kv_events.assert_no_event_errors()` too, and the order of listed problems."""

import pytest

WARNED = """
{marker}
def test(kv_sink, kv_events):
    kv_sink(GOOD)
    kv_sink(TWICE)
    kv_events.assert_no_event_errors()
    print("checked")
"""
TWO = """
{marker}
def test(kv_sink):
    kv_sink(GOOD)
    kv_sink(TWICE)
    kv_sink(BAD)
"""
FAIL = "@pytest.mark.kvmock(event_warnings='fail')"
ALLOW = "@pytest.mark.kvmock(event_warnings='fail', allow=['duplicate_store'])"


def headline(result):
    return next(line for line in result.outlines if " KV event " in line).removeprefix("E       ")


@pytest.mark.parametrize(("marker", "outcome"), [("", "passed"), (FAIL, "failed"), (ALLOW, "passed")])
def test_assert_no_event_errors_raises_for_a_warning_if_warnings_fail(nested, marker, outcome):
    result = nested(WARNED.format(marker=marker), "-rA")
    result.assert_outcomes(**{outcome: 1})
    assert (outcome == "passed") == ("checked" in result.outlines)
    if outcome == "failed":
        message = "1 KV event warning: duplicate_store (worker 65536, event 1)"
        assert headline(result) == f"pytest_kvmock.oracle.hygiene.problem.EventRulesBroken: {message}"


def test_assert_no_event_errors_allows_a_warning_that_a_hook_waives(nested):
    conftest = "def pytest_kvmock_event_error(item, problem): return problem.rule == 'duplicate_store'"
    nested(WARNED.format(marker=FAIL), files={"conftest.py": conftest}).assert_outcomes(passed=1)


def test_an_earlier_warning_is_listed_before_an_error(nested):
    result = nested(TWO.format(marker=FAIL))
    result.assert_outcomes(failed=1)
    assert headline(result) == "2 KV event problems: duplicate_store (worker 65536, event 1), and 1 more"


def test_if_warnings_do_not_fail_only_the_error_is_listed(nested):
    result = nested(TWO.format(marker=""))
    result.assert_outcomes(failed=1)
    assert headline(result) == "1 KV event error: block_not_found (worker 65536, event 2)"


def test_problems_that_only_warn_are_listed_in_order_too(nested):
    marker = "@pytest.mark.kvmock(event_warnings='warn', event_errors='warn')"
    result = nested(TWO.format(marker=marker))
    result.assert_outcomes(passed=1, warnings=1)
    assert "2 KV event problems: duplicate_store (worker 65536, event 1), and 1 more" in result.stdout.str()


def test_assert_no_event_errors_lists_problems_in_order(nested):
    result = nested(
        TWO.format(marker=FAIL).replace("kv_sink)", "kv_sink, kv_events)") + "    kv_events.assert_no_event_errors()\n"
    )
    result.assert_outcomes(failed=1)
    message = "2 KV event problems: duplicate_store (worker 65536, event 1), and 1 more"
    assert headline(result) == f"pytest_kvmock.oracle.hygiene.problem.EventRulesBroken: {message}"
    assert "kvmock: also" not in result.stdout.str()
