"""Errors that a test expects, and the event log of a harness."""

import pytest

from pytest_kvmock import EventRulesBroken, Removed, RouterEvent, Stored


def one_block(number):
    return Stored(None, (number,), (number,))


@pytest.fixture
def kv(make_kv):
    return make_kv(workers=2)


def test_an_error_expected_in_a_with_block_is_no_error_at_the_end(kv):
    with kv.events.expect_error("event_id_gap"):
        kv.drop_next()
        kv.worker(0).serve(kv.prompt(1))
        kv.worker(0).serve(kv.prompt(1))
    kv.worker(0).clear()
    assert tuple(kv.judge()) == ([], [], [])
    assert len(kv.events.errors) == 1


def test_leaving_the_with_block_flushes_and_finds_a_lost_last_event(kv):
    with kv.events.expect_error("event_id_gap"), kv.drop_next():
        kv.worker(0).serve(kv.prompt(1))


def test_an_error_before_the_with_block_does_not_count(kv):
    kv.apply(Removed((7,)))
    with (
        pytest.raises(EventRulesBroken, match="expected 1 block_not_found, saw none in 2 KV events"),
        kv.events.expect_error("block_not_found"),
    ):
        kv.apply(one_block(1))


def test_more_errors_than_expected_are_a_failure_and_the_rest_stand(kv, rules_of):
    with (
        pytest.raises(EventRulesBroken, match="expected 1 block_not_found, saw 2 in 2 KV events"),
        kv.events.expect_error("block_not_found"),
    ):
        kv.apply([Removed((7,)), Removed((8,))])
    assert rules_of(kv.judge().errors) == ["block_not_found"]


def test_an_error_that_follows_from_another_fault_meets_its_expectation(kv):
    with kv.events.expect_error("event_id_gap"), kv.events.expect_error("parent_block_not_found"):
        kv.drop_next()
        kv.apply([one_block(1), Stored(1, (2,), (2,))])
    assert kv.judge().errors == []


def test_an_error_other_than_the_expected_one_stands(kv, rules_of):
    with kv.events.expect_error("event_id_gap"):
        kv.drop_next()
        kv.apply([one_block(1), one_block(2)])
        kv.apply(Removed((7,)), worker_id=1)
    assert rules_of(kv.judge().errors) == ["block_not_found"]


def test_drift_can_be_expected_for_the_whole_test(kv):
    kv.events.expect_error("engine_drift")
    kv.worker(0).serve(kv.prompt(1))
    kv.apply(one_block(1))
    assert tuple(kv.judge()) == ([], [], [])


def test_the_log_can_be_read_by_worker_and_rank(make_kv):
    kv = make_kv(dp_size=2, workers=2)
    for worker in kv.workers.values():
        worker.serve(kv.prompt(1))
    assert (
        len(kv.events.for_worker(0)),
        len(kv.events.for_worker(0, dp_rank=1)),
        len(kv.events.for_worker(5)),
    ) == (2, 1, 0)


def test_taken_events_are_router_events_and_later_ones_are_still_judged(kv):
    asked = kv.prompt(1)
    kv.worker(1).serve(asked)
    (taken,) = kv.events.take()
    assert isinstance(taken, RouterEvent)
    assert (taken.worker_id, taken.event.event_id) == (1, 0)
    assert list(kv.events) == []
    kv.worker(1).serve(kv.prompt(1, after=asked))
    assert [entry.event.event.event_id for entry in kv.events] == [1]
    kv.events.assert_no_event_errors(at_least=2)
    kv.assert_in_sync()
