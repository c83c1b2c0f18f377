"""Requests that are open at the end of a test: of its body, of a fixture, or of both."""

import pytest

TABLE = {
    "finished": ("def test(kv_worker): kv_worker.prefill([1] * 16).finish()", {"passed": 1}, ""),
    "left open": (
        "def test(kv_worker): kv_worker.prefill([1] * 16)",
        {"failed": 1},
        "1 request is open, with 1 blocks",
    ),
    "a fixture's": (
        """
        @pytest.fixture
        def warm(kv_worker):
            with kv_worker.prefill([1] * 16) as request:
                yield request

        def test(warm): warm.decode(20)
        """,
        {"passed": 1},
        "",
    ),
    "a fixture's, and nobody finished it": (
        """
        @pytest.fixture
        def warm(kv_worker): return kv_worker.prefill([1] * 16)

        def test(warm): pass
        """,
        {"passed": 1, "errors": 1},
        "*it came after the test body*",
    ),
    "a fixture's and the body's": (
        """
        @pytest.fixture
        def warm(kv_worker):
            with kv_worker.prefill([1] * 16):
                yield

        def test(warm, kv_worker): kv_worker.prefill([2] * 32)
        """,
        {"failed": 1},
        "1 request is open, with 2 blocks",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_open_requests_are_a_warning_that_may_fail_a_test(nested, case):
    source, outcomes, shown = TABLE[case]
    result = nested(source, "--kv-backend=lru", "--kv-event-warnings=fail")
    result.assert_outcomes(**outcomes)
    if shown:
        result.stdout.fnmatch_lines([f"*{shown}*"])
    nested("", "--kv-backend=lru").assert_outcomes(passed=1)  # it is only counted by default
