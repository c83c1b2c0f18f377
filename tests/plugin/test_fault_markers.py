"""Faults in a run of pytest: by marker and by hand, survived faults, and unused faults."""

from __future__ import annotations

from pytest_kvmock import BACKENDS

SERVE = """
def serve(kv_harness, n=1):
    for _ in range(n):
        kv_harness.worker(0).serve(kv_harness.prompt(1))
"""

INDEX = """
@pytest.fixture
def kv_index():
    class Index:
        def apply(self, event): pass
        def find_matches(self, hashes): return {}
    return Index()
"""

ONE = "--kv-backend=lineage"


def test_an_injected_fault_fails_the_test_and_is_named(nested):
    result = nested(SERVE + "def test(kv_harness):\n kv_harness.faults.lose()\n serve(kv_harness, 2)", ONE)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "1 KV event error: event_id_gap (worker 0, event 1)",
            "    fault:     injected: lose, event 0 of worker 0",
            '  must it be survived?     kv_harness.faults.survive("lose")',
            "*!! event_id_gap (injected: lose, event 0 of worker 0)",
        ]
    )


def test_faults_of_a_marker_are_injected_into_the_same_events_in_each_run(nested):
    source = SERVE + "@pytest.mark.kvmock(faults={'lose': 0.3})\ndef test(kv_harness):\n serve(kv_harness, 20)"
    runs = [[line for line in nested(source, ONE).outlines if "injected: lose, event" in line] for _ in range(2)]

    assert runs[0]
    assert runs[0] == runs[1]
    other = [line for line in nested(source, ONE, "--kv-seed=1").outlines if "injected: lose, event" in line]
    assert runs[0] != other


def test_the_faults_of_the_inner_marker_win(nested):
    source = (
        SERVE
        + "pytestmark = pytest.mark.kvmock(faults={'lose': 1})\n"
        + "@pytest.mark.kvmock(faults={})\ndef test(kv_harness, kv_events):\n serve(kv_harness, 2)\n assert "
        "len(kv_events) == 2"
    )
    nested(source, ONE).assert_outcomes(passed=1)


def test_a_survived_fault_is_excused_and_shown_in_the_log(nested):
    source = (
        SERVE
        + "@pytest.mark.kvmock(faults={'lose': 0.5}, survive=['lose'])\ndef test(kv_harness):\n serve(kv_harness, 10)"
    )
    result = nested(source, ONE, "--kv-show-log=all", "-rA")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*~ event_id_gap (injected: lose, event * of worker 0; the router survives it)"])


def test_an_index_that_does_not_survive_fails(nested):
    source = (
        SERVE + INDEX + "@pytest.mark.kvmock(survive=['lose'])\ndef test(kv_harness):\n kv_harness.faults.lose()\n "
        "serve(kv_harness, 2)"
    )
    result = nested(source, ONE)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*KV event error*: index_drift (worker 0*", "*expected:  1 block, as was published"])


def test_a_fault_that_was_never_injected_fails(nested):
    result = nested(
        SERVE + "def test(kv_harness):\n kv_harness.faults.lose(3, kind='cleared')\n serve(kv_harness)", ONE
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kv_harness.faults.lose(3, kind='cleared'): unused, no event matched"])


def test_a_fault_injected_less_often_than_requested_fails(nested):
    source = (
        SERVE + "@pytest.mark.kvmock(allow=['event_id_gap'])\ndef test(kv_harness):\n kv_harness.drop_next(3)\n "
        "serve(kv_harness, 2)"
    )
    result = nested(source, ONE)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kv_harness.faults.lose(3): 2 of 3 injected"])


def test_a_failing_body_is_not_reported_with_unused_faults(nested):
    result = nested("def test(kv_harness):\n kv_harness.faults.lose()\n assert 0", ONE)

    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*unused, no event matched*")


def test_survive_can_be_called_in_the_body_over_every_backend_before_and_after_events(nested):
    source = f"""
    @pytest.mark.kv_backends{tuple(BACKENDS)}
    @pytest.mark.parametrize("before", [0, 3])
    def test(kv_harness, before):
        def serve(times):
            for _ in range(times):
                kv_harness.worker(0).serve(kv_harness.prompt(2))
        serve(before)
        kv_harness.faults.survive("lose")
        with kv_harness.faults.lose(2):
            serve(4)
    """
    nested(source).assert_outcomes(passed=2 * len(BACKENDS))
