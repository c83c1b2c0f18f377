"""Tests of an index that asks its workers for missed events.

`kv_recovery` answers as the workers would. Its answers count as arrived: `kv_index` is then compared as always, and an
error in applying an answer fails the test.
"""

import pytest
from recovering_index import Dynamo7072, KeepsWhatItHad, RecoveringIndex

from pytest_kvmock import EventRulesBroken
from pytest_kvmock.oracle import Events, TreeDump, WorkerQuery


@pytest.fixture
def kv_index(request, kv_recovery):
    """The index under test; a test may name another kind by `parametrize(..., indirect=True)`."""
    return getattr(request, "param", RecoveringIndex)(kv_recovery)


@pytest.fixture
def lose_one(kv_harness, kv_events, kv_prompt):
    """Make a worker lose an event between two others."""

    def lose():
        worker, prompt = kv_harness.worker(0), kv_prompt(blocks=3)
        worker.serve(kv_prompt(blocks=1))
        with kv_events.expect_error("event_id_gap"):  # the ledger reports the gap; the index recovers
            kv_harness.drop_next()
            worker.serve(prompt)
            worker.serve(kv_prompt(blocks=1))
        return prompt

    return lose


@pytest.fixture
def evict_in_silence(kv_harness, kv_events, kv_recovery, kv_prompt):
    """Make a worker of four blocks lose the Removed of a prompt, and answer with a dump."""

    def evict():
        kv_recovery.ring = 1
        worker, old = kv_harness.worker(0), kv_prompt(blocks=2)
        worker.serve(old)
        worker.serve(kv_prompt(blocks=2))
        with kv_events.expect_error("event_id_gap"):
            kv_harness.drop_next(kind="removed")
            worker.serve(kv_prompt(blocks=2))  # evicts the old prompt
            worker.serve(kv_prompt(blocks=1))
        return old

    return evict


def test_a_lost_event_is_asked_for(lose_one, kv_harness, kv_recovery):
    prompt = lose_one()

    assert kv_harness.overlap(prompt) == {0: 3}
    assert [WorkerQuery(0), WorkerQuery(0, start=1)] == kv_recovery.queries  # at the first event, and at the gap
    assert isinstance(kv_recovery.answers[-1], Events)


def test_what_the_ring_has_no_more_comes_as_a_dump(lose_one, kv_harness, kv_recovery):
    kv_recovery.ring = 1

    prompt = lose_one()

    assert isinstance(kv_recovery.answers[-1], TreeDump)
    assert kv_harness.overlap(prompt) == {0: 3}


@pytest.mark.kvmock(num_blocks=4)
def test_a_lost_eviction_is_mended_by_a_dump(evict_in_silence, kv_harness):
    old = evict_in_silence()

    assert kv_harness.overlap(old) == {}


def test_after_a_restart_all_is_asked_for_again(kv_harness, kv_recovery, kv_prompt):
    worker, old, new = kv_harness.worker(0), kv_prompt(), kv_prompt()
    worker.serve(old)

    worker.restart(announced=True)
    worker.serve(new)

    assert [WorkerQuery(0), WorkerQuery(0)] == kv_recovery.queries
    assert (kv_harness.overlap(old), kv_harness.overlap(new)) == ({}, {0: 4})


@pytest.mark.kvmock(
    workers=2, num_blocks=16, faults={"lose": 0.1, "double": 0.1, "delay": 0.1}, survive=["lose", "double", "delay"]
)
def test_it_ends_right_whatever_is_lost_or_late_or_comes_twice(kv_harness, kv_recovery, kv_prompt):
    for i in range(60):
        kv_harness.worker(i % 2).serve(kv_prompt(blocks=3))

    assert len(kv_recovery.queries) > 2  # more than at the first event of each worker


def test_nothing_is_asked_while_nothing_is_missing(kv_harness, kv_recovery, kv_prompt):
    for _ in range(10):
        kv_harness.worker(0).serve(kv_prompt())

    assert len(kv_recovery.queries) == 1


@pytest.mark.kvmock(num_blocks=4)
@pytest.mark.parametrize(
    ("kv_index", "questions_an_event"), [(RecoveringIndex, 0), (Dynamo7072, 1)], indirect=["kv_index"]
)
def test_dynamo_7072_shows_in_the_number_of_questions(
    lose_one, kv_harness, kv_events, kv_recovery, kv_prompt, questions_an_event
):
    kv_recovery.ring = 1
    for _ in range(5):
        kv_harness.worker(0).serve(kv_prompt(blocks=1))
    lose_one()
    kv_recovery.queries.clear()
    events = kv_events.total

    for _ in range(3):  # nothing is lost any more
        kv_harness.worker(0).serve(kv_prompt(blocks=1))

    print(*kv_recovery.queries, sep="\n")
    assert (kv_events.total - events) * questions_an_event == len(kv_recovery.queries)


@pytest.mark.kvmock(num_blocks=4, allow=["index_drift"])
@pytest.mark.parametrize("kv_index", [KeepsWhatItHad], indirect=True)
def test_a_dump_that_is_added_to_what_was_there_shows_as_drift(evict_in_silence, kv_harness):
    old = evict_in_silence()

    assert kv_harness.overlap(old) == {0: 2}  # it was dropped
    with pytest.raises(EventRulesBroken, match="index_drift") as drift:
        kv_harness.assert_in_sync()
    print(drift.value)
