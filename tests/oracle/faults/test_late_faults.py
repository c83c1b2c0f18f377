"""Faults that a test asks for late: problems from before are kept apart from their effects."""

import json
from dataclasses import replace

import pytest

from pytest_kvmock import EngineProfile, KvCacheEvent, Removed, RouterEvent, RouterHarness, Stored
from pytest_kvmock.harness import Recovery
from pytest_kvmock.servers import CaptureFile, CapturingJournal, check_file

PROFILE = EngineProfile(block_size=4, num_blocks=24)


def stored(event_id, *blocks, parent=None):
    return RouterEvent(0, KvCacheEvent(event_id, Stored(parent, blocks, blocks)))


def test_the_book_of_a_late_fault_omits_what_an_earlier_recovery_delivered():
    recovery = Recovery()
    kv = RouterHarness(PROFILE, recovery=recovery)
    late = []
    kv.publisher.transport = lambda event: [] if event.event.event_id == 1 and not late.append(event) else [event]
    kv.apply([stored(0, 1), stored(1, 2, parent=1), stored(2, 3, parent=2)])  # the second is still under way
    recovery(0, 1)
    kv.publisher.transport = lambda event: [*late, event]
    kv.apply(stored(3, 4, parent=3))
    kv.publisher.transport = None
    before = [problem.rule for problem in kv.events.problems]

    kv.faults.lose(1)
    arrived, published = kv._judge.ledger.streams[0, 0], kv._judge.book.ledger.streams[0, 0]
    assert arrived.tiers == published.tiers
    assert [] == arrived.late == published.late
    kv.apply([Removed((4,)), Removed((3,))])

    assert before == ["event_id_gap", "parent_block_not_found"]
    assert before == [problem.rule for problem in kv.events.problems if problem.fault is None]


@pytest.mark.parametrize("late", [False, True])
def test_a_sink_failure_before_a_late_fault_stays_the_cause_of_its_consequences(late):
    class FailsOnce:
        def __init__(self):
            self.events = 0

        def publish(self, event, tier, tokens):
            self.events += 1
            if self.events == 2:
                raise OSError("the disk is full")

    kv = RouterHarness(PROFILE)
    kv.add_sink(FailsOnce(), before=True)
    if not late:
        kv.faults.at_random({"lose": 0})
    kv.apply([stored(0, 1), stored(1, 2, parent=1)])
    kv.faults.at_random({"double": 0})
    kv.apply([stored(2, 3, parent=2), Removed((3,)), Removed((9,))])
    kv.flush()

    problems = {problem.rule: problem for problem in kv.events.problems}
    assert list(problems) == ["sink_failure", "parent_block_not_found", "block_not_found"]
    assert problems["sink_failure"] is problems["parent_block_not_found"].cause is problems["block_not_found"].cause
    assert {problem.fault for problem in kv.events.problems} == {None}


def test_a_problem_found_at_a_flush_before_a_late_fault_is_found_once():
    kv = RouterHarness(PROFILE)
    kv.worker(0).serve(kv.prompt(2))
    kv.apply(Stored(None, (1,), (1,)))
    kv.flush()
    kv.faults.at_random({"lose": 0})
    kv.flush()

    assert [problem.rule for problem in kv.events.problems] == ["engine_drift"]
    assert [problem.fault for problem in kv.events.problems] == [None]


def test_the_book_of_a_late_fault_contains_problems_found_at_an_earlier_flush():
    kv = RouterHarness(PROFILE)
    kv.worker(0).serve(kv.prompt(2))
    kv.apply(Stored(None, (1,), (1,)))
    kv.flush()
    kv.faults.at_random({"lose": 0})

    arrived, published = kv._judge.ledger.streams[0, 0], kv._judge.book.ledger.streams[0, 0]
    assert len(arrived.drifted) == 1
    assert arrived.drifted == published.drifted


def test_events_that_a_recovery_waits_for_end_with_a_restart_in_captures_and_books_too(tmp_path):
    recovery = Recovery()
    with CaptureFile(tmp_path / "a.jsonl", {}) as file:
        kv = RouterHarness(PROFILE, recovery=recovery, journal=CapturingJournal(file))
        kv.publisher.transport = lambda event: [] if event.event_id == 1 else [event]
        kv.apply([stored(0, 1), stored(1, 2, parent=1), stored(2, 3, parent=2)])
        recovery(0, 1)
        assert kv._judge.ledger.streams[0, 0].late
        kv.worker(0).restart()
        kv.faults.at_random({"lose": 0})
        assert [] == kv._judge.ledger.streams[0, 0].late == kv._judge.book.ledger.streams[0, 0].late
        kv.apply(stored(0, 5))

    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line)["anew"] for line in lines if '"anew"' in line] == [True]
    again = [(problem.rule, problem.position) for problem in check_file(tmp_path / "a.jsonl").log.problems]
    assert again == [(problem.rule, problem.position) for problem in kv.events.problems]


def test_an_event_of_a_request_that_is_published_again_by_hand_has_free_hashes():
    kv = RouterHarness(PROFILE)
    kv.worker(0).serve(kv.prompt(2))
    (event,) = kv.events.take()
    assert event.event.data.block_hashes

    again = replace(event, worker_id=7, event=KvCacheEvent(0, Stored(None, (5, 6), (7, 8))))
    kv.apply(again)
    kv.make_sink(chained=False).publish(again)

    assert kv.events.problems == []


def test_hashes_in_events_of_a_request_must_be_the_engines_chain():
    class Alters:
        """An engine that gives a block a wrong hash."""

        def __init__(self, sink):
            self.sink = sink

        def publish(self, event, *beside):
            if isinstance(event.data, Stored):
                event = replace(
                    event, data=replace(event.data, block_hashes=tuple(b ^ 1 for b in event.data.block_hashes))
                )
            self.sink.publish(event, *beside)

    kv = RouterHarness(PROFILE)
    worker = kv.worker(0)
    worker.manager.sink = Alters(worker.manager.sink)
    worker.manager.use([1, 2], local_hashes=[1, 2])
    assert kv.events.problems == []  # a move by hand has free hashes

    worker.serve(kv.prompt(1))

    assert [problem.rule for problem in kv.events.errors] == ["wrong_hash"]
