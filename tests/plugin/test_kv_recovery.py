"""The fixture `kv_recovery`: it belongs to the test's harness, whichever of the two is made first."""

INDEX = """
from contextlib import suppress
from pytest_kvmock import RadixIndexError, RadixIndex
from pytest_kvmock.oracle import RouterCursor, TreeDump

class Recovering:
    def __init__(self, ask):
        self.ask, self.tree, self.cursor = ask, RadixIndex(), RouterCursor()
    def apply(self, event):
        step = self.cursor.observe(event)
        self.take(event, step)
        while step.ask is not None:
            step = self.cursor.answered(step.ask, self.ask(*step.ask))
            self.take(event, step)
    def take(self, event, step):
        if step.replace:
            self.tree.remove_worker_dp_rank(event.worker_id, event.event.dp_rank)
        for each in step.apply:
            with suppress(RadixIndexError):
                self.tree.apply(each)
    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)

def lose_one(kv_harness, kv_prompt):
    for n in range(3):
        with kv_harness.drop_next() if n == 1 else suppress():
            kv_harness.worker(0).serve(kv_prompt(2))
"""


def test_a_custom_index_can_query_kv_recovery(nested):
    result = nested(
        INDEX
        + """
@pytest.fixture
def kv_index(kv_recovery):
    return Recovering(kv_recovery)

@pytest.mark.parametrize("ring", [1, 4096])
def test(kv_harness, kv_events, kv_recovery, kv_prompt, ring):
    kv_recovery.ring = ring
    with kv_events.expect_error("event_id_gap"):
        lose_one(kv_harness, kv_prompt)
    kv_harness.assert_in_sync()
    assert len(kv_recovery.queries) == 2
    assert isinstance(kv_recovery.answers[-1], TreeDump) == (ring == 1)
""",
        "--kv-backend=lru",
    )

    result.assert_outcomes(passed=2)


def test_kv_recovery_joins_an_existing_harness(nested):
    result = nested(
        """
        def test(kv_sink, kv_recovery):
            kv_sink(GOOD)
            assert len(kv_recovery(kv_sink.worker_id).events) == 1

        def test_the_order_of_fixtures_does_not_matter(kv_recovery, kv_sink):
            kv_sink(GOOD)
            assert len(kv_recovery(kv_sink.worker_id).events) == 1

        @pytest.mark.kvmock(workers=2)
        def test_with_workers(kv_harness, kv_recovery, kv_prompt):
            kv_harness.worker(1).serve(kv_prompt(3))
            assert len(kv_recovery(1).events) == 3
        """,
        "--kv-backend=lru",
    )

    result.assert_outcomes(passed=3)


def test_kv_recovery_is_refused_after_the_first_event(nested):
    result = nested(
        """
        @pytest.fixture
        def warm(kv_harness, kv_prompt):
            kv_harness.worker(0).serve(kv_prompt())

        def test(warm, kv_recovery): pass
        """,
        "--kv-backend=lru",
    )

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            (
                "kvmock: kv_recovery: use_recovery() must be called before any event is published; earlier events "
                "were not kept; ask*"
            ),
        ]
    )


def test_kv_recovery_without_a_harness_raises_when_it_is_called(nested):
    result = nested(
        """
        def test(kv_recovery):
            with pytest.raises(RuntimeError, match="belongs to no RouterHarness"):
                kv_recovery(0)
        """
    )

    result.assert_outcomes(passed=1)


def test_an_index_that_ignores_an_answer_fails_the_test(nested):
    result = nested(
        INDEX
        + """
class Adds(Recovering):
    def take(self, event, step):
        super().take(event, step._replace(apply=()))

@pytest.fixture
def kv_index(kv_recovery):
    return Adds(kv_recovery)

def test(kv_harness, kv_events, kv_prompt):
    kv_events.expect_error("event_id_gap")
    lose_one(kv_harness, kv_prompt)
""",
        "--kv-backend=lru",
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["* KV event errors: index_drift (worker 0, event 0), and * more"])


def test_each_run_of_a_test_has_its_own_recovery(nested):
    result = nested(
        """
        seen = []
        def test(kv_recovery, kv_sink):
            assert kv_recovery not in seen
            seen.append(kv_recovery)
            kv_sink(GOOD)
            kv_recovery(kv_sink.worker_id)
            assert len(kv_recovery.queries) == 1
            assert len(seen) == 2
        """,
        "--reruns=1",
        plugins=["rerunfailures"],
    )

    assert "1 passed, 1 rerun" in result.stdout.str()


def test_kv_recovery_needs_no_matrix(ids):
    assert ids("def test(kv_recovery, kv_sink): pass") == ["test"]


def test_an_index_that_queries_survives_lost_and_doubled_events(nested):
    result = nested(
        INDEX
        + """
@pytest.fixture
def kv_index(kv_recovery):
    return Recovering(kv_recovery)

@pytest.mark.kvmock(num_blocks=16, faults={"lose": 0.1, "double": 0.1}, survive=["lose", "double"], sync="every")
@pytest.mark.parametrize("ring", [1, 4096])
def test(kv_harness, kv_recovery, kv_prompt, ring):
    kv_recovery.ring = ring
    for n in range(60):
        kv_harness.worker(0).serve(kv_prompt(3))
    assert 5 < len(kv_recovery.queries)

@pytest.mark.kvmock(survive=["delay", "reorder", "late_join"])
def test_late(kv_harness, kv_prompt):
    with kv_harness.faults.late_join():
        kv_harness.worker(0).serve(kv_prompt(3))
    for fault in (kv_harness.faults.delay, kv_harness.faults.reorder):
        fault(1)
        for n in range(4):
            kv_harness.worker(0).serve(kv_prompt(3))
""",
        "--kv-backend=lru",
    )

    result.assert_outcomes(passed=3)
