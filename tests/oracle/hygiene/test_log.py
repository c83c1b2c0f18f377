"""The event log: its counts, its entries and its text."""

import pytest

from pytest_kvmock import (
    Cleared,
    EventRulesBroken,
    KvCacheEvent,
    RadixIndex,
    Removed,
    RouterEvent,
    RouterHarness,
    StorageTier,
    Stored,
)
from pytest_kvmock.oracle.hygiene.log_text import log_text
from pytest_kvmock.oracle.hygiene.report import MOST_PROBLEMS, failure_text, problems_text
from pytest_kvmock.oracle.hygiene.story import story_of


@pytest.fixture
def kv():
    kv = RouterHarness(backend=None)
    kv.apply([Stored(None, (1, 2), (1, 2)), Removed((9,)), Stored(7, (3,), (3,)), Cleared()], worker_id=3)
    kv.apply([Stored(None, (1,), (1,))], worker_id=4)
    return kv


def test_the_log_lists_events_by_kind_and_their_blocks_in_order(kv):
    log = kv.events
    assert (len(log), len(log.stored), len(log.removed), len(log.cleared)) == (5, 3, 1, 1)
    assert log.stored_blocks == [1, 2, 3, 1]
    assert log.removed_blocks == [9]


def test_an_entry_names_the_problems_of_its_event(kv):
    first, second, third, *_ = kv.events
    assert (first.ok, first.status, first.kind) == (True, "ok", "stored")
    assert (second.ok, second.status, second.kind) == (False, "block_not_found", "removed")
    assert third.status == "parent_block_not_found"
    assert repr(second) == "<1  event 1  worker 3  Removed block 9  !! block_not_found>"


def test_for_worker_returns_the_events_and_counts_of_one_worker(kv):
    part = kv.events.for_worker(3)
    assert (len(part), len(part.errors)) == (4, 2)
    assert (part.counts.status("stored", "ok"), part.counts.status("removed", "block_not_found")) == (1, 1)
    assert kv.events.for_worker(4).errors == []
    assert len(kv.events.for_worker(3, dp_rank=1)) == 0


def test_taken_entries_leave_the_log_and_their_problems_stay(kv):
    assert len(kv.events.take()) == 5
    assert (len(kv.events), len(kv.events.errors), kv.events.total) == (0, 2, 5)
    assert kv.events.counts.status("stored", "ok") == 2


def test_assert_no_event_errors_raises_for_errors_and_for_too_few_events():
    kv = RouterHarness(backend=None)
    kv.events.assert_no_event_errors()
    with pytest.raises(EventRulesBroken, match="expected at least 1 KV events by now, 0 arrived"):
        kv.events.assert_no_event_errors(at_least=1)
    kv.apply([Removed((9,))])
    with pytest.raises(EventRulesBroken, match=r"1 KV event error: block_not_found \(worker 0, event 0\)"):
        kv.events.assert_no_event_errors()


def test_a_failure_describes_the_first_problems_and_names_the_others():
    kv = RouterHarness(backend=None)
    kv.apply([Removed((block,)) for block in range(MOST_PROBLEMS + 2)])
    text = failure_text(kv.judge().errors)
    assert text.startswith("5 KV event errors: block_not_found (worker 0, event 0), and 4 more\n")
    assert text.count("observed:") == MOST_PROBLEMS
    assert "and: block_not_found (worker 0, event 3), block_not_found (worker 0, event 4)" in text
    assert 'with kv_events.expect_error("block_not_found"):' in text


def test_a_failure_found_after_the_test_body_says_so():
    kv = RouterHarness(backend=None)
    kv.apply([Removed((9,))])
    headline = failure_text(kv.judge().errors, late=True).splitlines()[0]
    assert headline.endswith("it came after the test body, from a teardown")


def test_the_log_text_shows_the_last_events_and_earlier_ones_with_problems():
    kv = RouterHarness(backend=None)
    kv.apply([Removed((9,)), *(Stored(None, (block,), (block,)) for block in range(100, 130))])
    lines = log_text(kv.events, last=5).splitlines()
    assert lines[0] == "31 events, the last 5"
    assert lines[1].endswith("!! block_not_found")
    assert lines[2] == "  ..."
    assert len(lines) == 8


def test_a_log_of_one_event_uses_the_singular():
    kv = RouterHarness(backend=None)
    kv.apply([Cleared()])
    assert log_text(kv.events).splitlines() == ["1 event", "    0  event 0  worker 0  Cleared"]


def test_expectations_count_consequences_of_another_problem_too():
    kv = RouterHarness(backend=None)
    with kv.events.expect_error("event_id_gap"), kv.events.expect_error("block_not_found"):
        kv.apply([Stored(None, (1,), (1,))], worker_id=0)
        kv.drop_next()
        kv.apply([Stored(None, (2,), (2,)), Removed((9,))], worker_id=0)
    assert tuple(kv.judge()) == ([], [], [])


@pytest.mark.parametrize(("times", "come", "saw"), [(1, 0, "none"), (2, 1, "1"), (1, 2, "2")])
def test_an_unmet_expectation_gives_the_number_of_problems_seen(times, come, saw):
    kv = RouterHarness(backend=None)
    expectation = kv.events.expect_error("block_not_found", times=times)
    with (
        pytest.raises(EventRulesBroken, match=f"expected {times} block_not_found, saw {saw} in {come} KV event"),
        expectation,
    ):
        kv.apply([Removed((block,)) for block in range(come)])


def test_an_exception_in_the_with_block_of_an_expectation_is_kept():
    kv = RouterHarness(backend=None)
    with pytest.raises(KeyError), kv.events.expect_error("block_not_found"):
        raise KeyError


def test_an_expectation_without_a_with_block_holds_for_the_whole_test():
    kv = RouterHarness(backend=None)
    kv.events.expect_error("block_not_found", times=2)
    kv.apply([Removed((8,)), Removed((9,))])
    assert tuple(kv.judge()) == ([], [], [])
    kv = RouterHarness(backend=None)
    kv.events.expect_error("block_not_found")
    assert kv.judge().unmet == ["expected 1 block_not_found, saw none in 0 KV events"]


@pytest.mark.parametrize("rule", ["engine_drift", "not_flushed"])
def test_rules_found_only_at_the_end_cannot_be_expected_in_a_with_block(rule):
    kv = RouterHarness(backend=None)
    with pytest.raises(ValueError, match=f"{rule} is found only at the end"), kv.events.expect_error(rule):
        pass
    assert kv.judge().unmet == []


@pytest.mark.parametrize(
    ("rule", "times", "message"),
    [
        ("block_lost", 1, "unknown rule 'block_lost'; known: parent_block_not_found, "),
        (None, 1, "unknown rule None"),
        ("block_not_found", 0, "times must be an integer of at least 1, got 0"),
        ("block_not_found", True, "times must be an integer of at least 1, got True"),
    ],
)
def test_an_invalid_expectation_is_refused(rule, times, message):
    with pytest.raises(ValueError, match=message):
        RouterHarness(backend=None).events.expect_error(rule, times=times)


def test_assert_no_event_errors_allows_what_an_open_with_block_expects():
    kv = RouterHarness(backend=None)
    with kv.events.expect_error("block_not_found"):
        kv.apply(Removed((5,)))
        kv.events.assert_no_event_errors()
        kv.assert_no_event_errors()
    kv.events.assert_no_event_errors()


def test_expectations_of_one_rule_are_counted_together_except_those_of_a_with_block():
    kv = RouterHarness(backend=None)
    kv.events.expect_error("block_not_found")
    kv.events.expect_error("block_not_found")
    kv.apply([Removed((1,)), Removed((2,))])
    with kv.events.expect_error("block_not_found"):
        kv.apply(Removed((3,)))
    assert tuple(kv.judge()) == ([], [], [])


def test_a_failure_of_warnings_only_calls_them_warnings():
    kv = RouterHarness(backend=None)
    kv.apply([Stored(None, (1,), (1,)), Stored(None, (1,), (1,))])
    assert failure_text(kv.judge().warnings).startswith("1 KV event warning: duplicate_store (worker 0, event 1)")


def test_a_drift_names_the_entry_after_which_it_was_compared():
    kv = RouterHarness(backend=None)
    sink = kv.make_sink()
    sink.compare(list)
    sink(Stored(None, (1,), (1,)))
    with pytest.raises(EventRulesBroken, match="worker 65536, compared after entry 0 of the log"):
        kv.assert_in_sync()


# ---------------------------------------------------------------------------------- workers that begin anew


def one(block, parent=None):
    return Stored(parent, (block,), (block,))


@pytest.fixture
def removed():
    """Remove worker 3 between two events of its own; worker 4 continues."""
    kv = RouterHarness(backend=None)
    kv.apply(one(1), worker_id=3)
    kv.apply(one(1), worker_id=4)
    kv.remove_worker(3)
    kv.apply(one(2), worker_id=3)
    return kv


GONE = "       worker 3 removed, all ranks: your router drops its blocks"


def test_a_removed_worker_is_a_line_of_the_log_and_not_an_event(removed):
    log = removed.events
    assert log_text(log).splitlines() == [
        "3 events",
        "    0  event 0  worker 3  Stored block 1 as a root",
        "    1  event 0  worker 4  Stored block 1 as a root",
        GONE,
        "    2  event 0  worker 3  Stored block 2 as a root",
    ]
    assert (len(log), log.total, [entry.position for entry in log]) == (3, 3, [0, 1, 2])
    assert one(2) == log[2].event.event.data
    assert [(2, 3, None, GONE.strip())] == log.notes


def test_the_log_of_a_worker_has_only_its_own_lines(removed):
    assert removed.events.for_worker(4).notes == []
    assert log_text(removed.events.for_worker(3, dp_rank=0)).splitlines()[2] == GONE


@pytest.mark.parametrize("forget", ["take", "clear"])
def test_a_line_is_dropped_with_the_events_of_the_log(removed, forget):
    getattr(removed.events, forget)()
    assert log_text(removed.events) == "0 events"
    removed.remove_worker(4)
    assert ["0 events", GONE.replace("3", "4")] == log_text(removed.events).splitlines()


def test_lost_batches_are_a_line_of_the_log_at_their_place():
    kv = RouterHarness(backend=None)
    kv.apply([one(1), one(2)])
    kv.inside.lost_batches(0, 0, range(4, 7), "batches 4 to 6 did not arrive")
    kv.apply(one(3))
    kv.inside.lost_batches(0, 0, range(8, 9), f"batch 8 cannot be read ({'x' * 200})")
    for batch in range(9, 12):
        kv.inside.lost_batches(0, 0, range(batch, batch + 1), f"batch {batch} cannot be read")
    assert log_text(kv.events).splitlines() == [
        "3 events",
        "    0  event 0  worker 0  Stored block 1 as a root",
        "    1  event 1  worker 0  Stored block 2 as a root",
        "       worker 0: batches 4 to 6 did not arrive",
        "    2  event 2  worker 0  Stored block 3 as a root",
        f"       worker 0: batch 8 cannot be read ({'x' * 67}...; the same 3 times more",
    ]
    assert "\n  worker 0, after entry 1 of the log\n" in problems_text(kv.events.errors)


def test_batches_lost_before_any_event_are_the_first_line():
    kv = RouterHarness(backend=None)
    kv.inside.lost_batches(0, 1, range(1), "batch 0 did not arrive")
    assert log_text(kv.events).splitlines() == ["0 events", "       worker 0 rank 1: batch 0 did not arrive"]
    assert "\n  worker 0 rank 1, before any event\n" in problems_text(kv.events.errors)


def test_a_worker_removed_last_is_the_last_line(removed):
    removed.remove_worker(4)
    assert GONE.replace("3", "4") == log_text(removed.events).splitlines()[-1]


def test_workers_removed_after_one_event_are_lines_in_order_of_removal(removed):
    for worker_id in (4, 3):
        removed.remove_worker(worker_id)
    assert [GONE.replace("3", "4"), GONE] == log_text(removed.events).splitlines()[-2:]


def test_an_announced_restart_of_one_rank_is_a_line_of_the_log():
    kv = RouterHarness()
    kv.worker(0, dp_rank=1).restart(announced=True)
    kv.apply(Cleared())
    assert log_text(kv.events).splitlines() == [
        "1 event",
        "       worker 0 rank 1 restarted, announced: your router drops its blocks",
        "    0  event 0  worker 0  Cleared",
    ]
    assert len(kv.events.for_worker(0, dp_rank=1).notes) == 1
    assert kv.events.for_worker(0, dp_rank=0).notes == []


def test_a_long_log_shows_an_earlier_removal_of_the_problems_worker():
    kv = RouterHarness(backend=None)
    kv.apply(one(1), worker_id=3)
    kv.remove_worker(3)
    kv.remove_worker(4)
    kv.apply([one(block) for block in range(100, 130)], worker_id=3)
    kv.apply(Removed((1,)), worker_id=3)
    (problem,) = kv.judge().errors
    lines = log_text(kv.events, around=problem).splitlines()
    assert lines[:4] == [
        "32 events; those around the first problem, and those before that name its block",
        "    0  event 0  worker 3  Stored block 1 as a root",
        GONE,
        "  ...",
    ]
    assert len(lines) == 24


def test_an_event_before_a_restart_is_distinguished_from_one_with_the_same_id():
    kv = RouterHarness()
    worker = kv.worker(0)
    kv.apply([one(1), one(2), Removed((2,))])
    worker.restart(announced=True)
    kv.apply([one(1), one(2), Removed((1,)), Removed((1,))])
    (again,) = kv.judge().errors
    assert again.observed == "block 1 was removed by event 2"
    worker.restart(announced=True)
    kv.apply([one(3), Removed((1,)), Removed((2,))])
    first, second = kv.judge().errors
    assert [first.observed, second.observed] == [
        "block 1 was removed by event 3 (before the restart)",
        "block 2 was stored by event 1 and dropped when worker 0 restarted",
    ]
    headline, _, header, *_ = failure_text([first]).splitlines()
    assert headline == "1 KV event error: block_not_found (worker 0, event 1 after 2 restarts)"
    assert header == "  event 1 after 2 restarts  worker 0  Removed block 1"
    worker.restart(announced=True)
    kv.apply(Removed((3,)))
    kv.apply(Removed((2,)))
    _, last = kv.judge().errors
    assert last.observed == "block 2 was removed by event 2 (before the restart)"


def test_an_event_from_before_two_restarts_is_named_so():
    kv = RouterHarness()
    kv.apply([one(1), Removed((1,)), one(2)])
    for _ in range(2):
        kv.worker(0).restart(announced=True)
    kv.apply([Removed((1,)), Removed((2,))])
    assert [problem.observed for problem in kv.judge().errors] == [
        "block 1 was removed by event 1 (2 restarts ago)",
        "block 2 was stored by event 2 (2 restarts ago) and dropped when worker 0 restarted",
    ]


def test_ids_that_go_backwards_are_a_line_and_earlier_events_are_marked():
    kv = RouterHarness(backend=None)
    sink = kv.make_sink()
    for event_id, data in ((0, one(1)), (1, one(2)), (2, Removed((1,))), (0, one(3)), (1, Removed((2,)))):
        sink(KvCacheEvent(event_id, data))
    sink(KvCacheEvent(2, Removed((1,))))
    (gap,) = kv.judge().errors
    assert gap.rule == "event_id_gap"
    assert [p.observed for p in gap.folded] == ["block 1 was removed by event 2 (before ids went backwards)"]
    assert (
        failure_text([gap]).partition("\n")[0]
        == "1 KV event error: event_id_gap (worker 65536, event 0 after ids went backwards)"
    )
    assert log_text(kv.events).splitlines() == [
        "6 events",
        "    0  event 0  worker 65536  Stored block 1 as a root",
        "    1  event 1  worker 65536  Stored block 2 as a root",
        "    2  event 2  worker 65536  Removed block 1",
        "       worker 65536: event ids go backwards, as after an unannounced restart",
        "    3  event 0  worker 65536  Stored block 3 as a root  !! event_id_gap",
        "    4  event 1  worker 65536  Removed block 2",
        "    5  event 2  worker 65536  Removed block 1  !! block_not_found",
    ]


def test_events_of_a_removed_worker_and_of_a_new_one_with_its_id_are_distinguished():
    kv = RouterHarness()
    kv.apply(Removed((1,)))
    kv.remove_worker(0)
    kv.worker(0)
    kv.apply(Removed((1,)))
    first, second = kv.judge().errors
    assert "block_not_found (worker 0, event 0)" in failure_text([first])
    assert "block_not_found (worker 0, event 0 after the worker was removed)" in failure_text([second])


# ------------------------------------------------------------------------------------- what happened to a block

HISTORIES = {
    "block 1 was never stored": [],
    "block 1 was stored by event 0 and cleared by event 2": [one(1), one(2), Cleared(), one(2), Cleared()],
    "block 1 was stored by event 2 and cleared by event 3": [one(1), Removed((1,)), one(1), Cleared()],
    "block 1 was removed by event 3": [one(1), Cleared(), one(1), Removed((1,))],
}


@pytest.mark.parametrize("known", HISTORIES)
def test_the_history_of_a_block_names_the_event_that_dropped_it(known):
    kv = RouterHarness(backend=None)
    kv.apply([*HISTORIES[known], Removed((1,))])
    assert [known] == [problem.observed for problem in kv.judge().errors]


def test_a_restart_before_a_block_was_stored_did_not_drop_it():
    kv = RouterHarness()
    kv.worker(0).restart(announced=True)
    kv.apply([one(1), Cleared(), Removed((1,))])
    assert [problem.observed for problem in kv.judge().errors] == [
        "block 1 was stored by event 0 and cleared by event 1"
    ]


def test_the_history_of_a_block_counts_removed_copies():
    kv = RouterHarness(backend=None)
    sink = kv.make_sink(residency="counted")
    for data in (one(1), one(1), one(1), Removed((1,))):
        sink(data)
    sink.compare(list)
    (problem,) = kv.judge().errors
    known = "the engine does not hold block 1; block 1 was stored by event 2; event 3 removed a copy, and 2 are held"
    assert known == problem.observed


def test_a_block_removed_from_one_tier_has_a_history_in_the_other():
    kv = RouterHarness(backend=None)
    sink = kv.make_sink()
    sink(one(1))
    for data in (one(1), Removed((1,))):
        sink(data, StorageTier.HOST_PINNED)
    sink.compare(list)
    (problem,) = kv.judge().errors
    known = "the engine does not hold block 1 in device; block 1 was stored in device by event 0 and never removed"
    assert known == problem.observed


def test_a_block_only_named_as_a_parent_has_a_history_that_says_so():
    kv = RouterHarness(backend=None)
    sink = kv.make_sink()
    sink(one(2, parent=1))
    sink.compare(lambda: [2, 3])
    sink(one(3, parent=1))
    (problem,) = kv.judge().errors
    assert (problem.observed, problem.rule) == ("block 1 was never stored", "parent_block_not_found")
    assert story_of(kv.inside.streams[65536, 0], 1) == "block 1 was named as a parent and never stored"


@pytest.mark.parametrize(
    ("extra", "shown"),
    [
        (None, ""),
        ({"session_id": "s"}, ""),
        ({"extra_keys": [None, None]}, ""),
        ({"lora_name": "sql", "extra_keys": [("sql",), ("sql",)]}, " (adapter 'sql')"),
        ({"lora_id": 3}, " (adapter 3)"),
        ({"cache_salt": "tenant-1", "extra_keys": [("tenant-1",), None]}, " (salt 'tenant-1')"),
        ({"extra_keys": [("tenant-1",), None]}, " (salt 'tenant-1')"),  # as vLLM's wires have it
        (
            {"extra_keys": [(("ab" * 32, 1),), (("ab" * 32, -3), ("cd" * 32, 2))]},
            " (image abababababababab, image cdcdcdcdcdcdcdcd)",
        ),
        (
            {"lora_name": "sql", "cache_salt": "t", "extra_keys": [("sql", ("img", 0), "t"), ("sql",)]},
            " (adapter 'sql', salt 't', image img)",
        ),
        ({"group_idx": 1, "cache_salt": "t"}, " (cache group 1) (salt 't')"),
    ],
)
def test_a_line_of_the_log_shows_adapter_salt_and_images(extra, shown):
    kv = RouterHarness(backend=None)
    kv.apply([RouterEvent(0, KvCacheEvent(0, Stored(None, (1, 2), (1, 2))), extra=extra)])
    assert log_text(kv.events).splitlines()[1] == f"    0  event 0  worker 0{shown}  Stored blocks 1, 2 as a root"


class ForgetsAll(RadixIndex):
    """Forgets a whole worker at the first Removed."""

    def apply(self, event, token_ids=None):
        if isinstance(event.event.data, Removed):
            self.remove_worker(event.worker_id)
        else:
            super().apply(event)


def test_a_problem_found_after_later_events_names_the_entry_of_the_comparison():
    kv = RouterHarness(backend=None, index=ForgetsAll(), sync="burst")
    kv.apply([Stored(None, (1,), (1,)), Stored(None, (2,), (2,)), Removed((2,))])
    kv.flush()
    (problem,) = kv.events.errors
    assert (problem.rule, problem.position, problem.compared_at) == ("index_drift", 0, 2)
    assert "event 0  worker 0  Stored block 1 as a root, compared after entry 2 of the log" in problems_text([problem])


def test_a_problem_found_at_its_event_names_no_entry_of_a_comparison():
    kv = RouterHarness(backend=None, index=ForgetsAll())
    kv.apply([Stored(None, (1,), (1,)), Stored(1, (2,), (2,)), Removed((2,))])
    kv.flush()
    (problem,) = kv.events.errors
    assert (problem.position, problem.compared_at) == (2, None)
