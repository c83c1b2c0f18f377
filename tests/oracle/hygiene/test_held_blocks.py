"""Rules about held blocks: capacity, blocks removed right after being stored again, orphans, copies."""

import re
from collections import Counter

import pytest

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.oracle.hygiene.entries import Counted, Recovered, Resident, WorkerRemoved
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.hygiene.story import story_of

DEVICE, HOST, DISK, _ = StorageTier


def stored(*blocks, parent=None):
    return Stored(parent, blocks, blocks)


class Stream:
    """Events of one worker, with consecutive ids unless an id is given."""

    def __init__(self, **options):
        self.ledger = Ledger()
        self.known = self.ledger.open((0, 0), first_id=0, **options)
        self.next_id = 0
        self.problems = []

    def observe(self, data, event_id=None, *, tier=StorageTier.DEVICE):
        if event_id is None:
            event_id = self.next_id
        self.next_id = event_id + 1
        problems = self.ledger.take(RouterEvent(0, KvCacheEvent(event_id, data), tier))
        return self.note(problems)

    def observe_all(self, events):
        return [rule for data in events for rule in self.observe(data)]

    def flush(self):
        return self.note(self.ledger.take(Counted()))

    def drift(self, resident, tier=StorageTier.DEVICE):
        return self.note(self.ledger.take(Resident((0, 0), tier, resident)))

    def note(self, problems):
        self.problems += problems
        return [p.rule if p.cause is None else f"({p.rule})" for p in problems]


# ------------------------------------------------------------------------------------------------- over_capacity


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([stored(1, 2), stored(3)], [], id="as many as there are"),
        pytest.param([stored(1, 2, 3, 4), stored(5), Removed((5,))], ["over_capacity"], id="at the next Stored"),
        pytest.param(
            [stored(1, 2, 3, 4), Removed((4,)), stored(5), Removed((5,))], [], id="Stored before Removed is no breach"
        ),
        pytest.param([stored(1, 2, 3, 4), Removed((4,))], [], id="nothing follows"),
        pytest.param([stored(1, 2, 3, 4)], ["over_capacity"], id="at the flush"),
        pytest.param([stored(1, 2, 3, 4), stored(5), stored(6)], ["over_capacity"], id="once while it does not fit"),
        pytest.param(
            [stored(1, 2, 3, 4), stored(5), Removed((5, 4)), stored(6), stored(7), Removed((7, 6))],
            ["over_capacity"] * 2,
            id="again once it has fitted",
        ),
        pytest.param([stored(1, 2, 3, 4), Cleared(), stored(5)], [], id="cleared"),
    ],
)
def test_over_capacity_is_an_error_at_the_next_stored_or_at_the_flush(events, expected):
    stream = Stream(num_blocks=3)
    assert stream.observe_all(events) + stream.flush() == expected
    assert all(problem.is_error for problem in stream.problems)
    assert Stream().observe_all(events) == []  # nothing is checked without a capacity


def test_num_blocks_is_the_capacity_of_the_device_only():
    stream = Stream(num_blocks=3)
    stream.observe(stored(1, 2, 3), tier=HOST)
    stream.observe(stored(1, 2, 3))
    assert stream.flush() == []
    assert stream.observe(stored(4), tier=HOST) == []


def test_over_capacity_names_no_block_and_gives_the_number_of_held_blocks():
    stream = Stream(num_blocks=1)
    stream.observe_all([stored(1, 2), stored(3)])
    (problem,) = stream.problems
    assert (problem.observed, problem.blocks) == ("according to the events, 2 blocks are held after event 0", ())
    assert (problem.expected, problem.event_id) == ("the engine has 1 block; what it evicts is published as Removed", 1)


def test_over_capacity_found_at_a_flush_is_placed_after_the_last_event():
    stream = Stream(num_blocks=1)
    stream.observe(stored(1, 2))
    assert stream.flush() == ["over_capacity"]
    assert (stream.problems[0].position, stream.problems[0].event) == (0, None)
    assert stream.flush() == []


def test_over_capacity_follows_from_a_lost_removed():
    stream = Stream(num_blocks=2)
    stream.observe(stored(1, 2))
    assert stream.observe(stored(3), 2) == ["event_id_gap"]
    assert stream.flush() == ["(over_capacity)"]


def test_copies_count_against_the_capacity():
    stream = Stream(num_blocks=3, residency="counted")
    stream.observe_all([stored(1, 2), stored(2, parent=1)])
    assert stream.flush() == []
    stream.observe(stored(2, parent=1))
    assert stream.flush() == ["over_capacity"]


# ------------------------------------------------------------------------------------------ evicted_and_restored

HAZARD = [stored(1, 2, 3), stored(10, 1, 2), Removed((1, 2))]
"""One Use of 10, 1 and 2, where 10 takes the place of 1, and so on: the blocks are held although they were removed."""


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param(HAZARD, ["evicted_and_restored"] * 2, id="stored again, then removed"),
        pytest.param([*HAZARD[:2], Removed((3,))], [], id="another block is removed"),
        pytest.param([*HAZARD[:2], Removed((3, 2))], ["evicted_and_restored"], id="one of those removed"),
        pytest.param([stored(1), stored(2, parent=1), Removed((2,))], [], id="removed right after it was new"),
        pytest.param([*HAZARD[:2], stored(20), Removed((2,))], [], id="an event between"),
        pytest.param([*HAZARD[:2], Removed((3,)), Removed((2,))], [], id="a Removed between"),
        pytest.param([*HAZARD[:2], Cleared(), stored(2), Removed((2,))], [], id="cleared between"),
        pytest.param([stored(1), stored(1), Removed((1,))], ["(duplicate_store)", "evicted_and_restored"], id="alone"),
    ],
)
def test_a_block_that_is_removed_right_after_it_was_stored_again_is_still_held(events, expected):
    stream = Stream(prefix_closed=False)
    stream.observe_all(events)
    assert [p.rule if p.cause is None else f"({p.rule})" for p in stream.problems] == expected
    assert not any(problem.is_error for problem in stream.problems)


def test_with_counted_copies_a_removed_after_a_second_stored_takes_one_copy():
    assert Stream(residency="counted").observe_all([stored(1, 2, 3), stored(10, 1, 2), Removed((2, 1))]) == []


def test_the_last_copy_is_an_orphan_when_its_parent_goes_in_the_same_event():
    ledger = Ledger()
    ledger.open((0, 0), first_id=0, residency="counted")
    events = [stored(2), stored(1, 2), Removed((2, 1))]
    found = [ledger.take(RouterEvent(0, KvCacheEvent(number, data))) for number, data in enumerate(events)]
    assert [[(p.rule, p.blocks) for p in problems] for problems in found] == [[], [], [("orphaned_child", (2,))]]


def test_evicted_and_restored_names_the_block_and_both_events():
    stream = Stream()
    stream.observe_all(HAZARD)
    first = stream.problems[0]
    assert (first.blocks, first.event_id) == ((1,), 2)
    assert first.observed == "block 1 was held already when event 1 stored it again"


def test_evicted_and_restored_needs_consecutive_ids_and_one_tier():
    stream = Stream()
    stream.observe(stored(1), tier=HOST)
    stream.observe_all([stored(1), stored(1)])
    assert stream.observe(Removed((1,)), tier=HOST) == []
    stream = Stream(prefix_closed=False)
    stream.observe_all(HAZARD[:2])
    assert stream.observe(Removed((1, 2)), 3) == ["event_id_gap"]


def test_a_late_removed_does_not_belong_to_the_use_before_it():
    stream = Stream(prefix_closed=False)
    stream.observe(HAZARD[0])
    assert stream.observe(HAZARD[1], 2) == ["event_id_gap"]
    assert stream.observe(HAZARD[2], 1) == []


def test_a_repeated_event_between_stored_and_removed_does_not_matter():
    stream = Stream(prefix_closed=False)
    stream.observe_all(HAZARD[:2])
    stream.observe(HAZARD[1], 1)
    assert stream.observe(HAZARD[2]) == ["evicted_and_restored"] * 2


def test_a_repeated_stored_does_not_count_as_storing_again():
    stream = Stream()
    stream.observe(stored(1, 2))
    stream.observe(stored(1, 2), 0)
    assert stream.observe(Removed((2,))) == []


def test_later_problems_of_the_block_are_listed_under_the_first():
    stream = Stream(prefix_closed=False)
    stream.observe_all(HAZARD)
    one, two = stream.problems
    assert stream.drift([10, 1, 2, 3]) == ["(engine_drift)", "(engine_drift)"]
    assert stream.observe(stored(4, parent=2)) == ["(parent_block_not_found)"]
    assert stream.observe(Removed((1,))) == ["(block_not_found)"]
    assert Counter(p.rule for p in one.folded) == {"engine_drift": 1, "block_not_found": 1}
    assert Counter(p.rule for p in two.folded) == {"engine_drift": 1, "parent_block_not_found": 1}
    known = two.folded[1].observed
    assert known == "block 2 was removed by event 2, right after it was stored again"


def test_problems_of_other_blocks_are_separate():
    stream = Stream(prefix_closed=False)
    stream.observe_all(HAZARD)
    assert sorted(["block_not_found", "(block_not_found)"]) == sorted(stream.observe(Removed((99, 1))))
    assert sorted(["engine_drift", "(engine_drift)"]) == sorted(stream.drift([10, 2, 3, 98]))


@pytest.mark.parametrize("named", [stored(2), Removed((2,))], ids=["stored", "removed"])
def test_problems_are_separate_once_an_event_names_the_block(named):
    stream = Stream(prefix_closed=False)
    stream.observe_all([*HAZARD, named, stored(9), Removed((2,))])
    assert stream.observe(Removed((2,))) == ["block_not_found"]


def test_evicted_and_restored_may_happen_to_a_block_again():
    """The engine still holds the block: it may silently evict it and store it again in one move."""
    stream = Stream(prefix_closed=False)
    stream.observe_all(HAZARD)
    _, two = stream.problems
    assert stream.observe(stored(2, parent=10)) == []
    assert stream.observe(Removed((2,))) == ["(evicted_and_restored)"]
    assert stream.observe(stored(4, parent=2)) == ["(parent_block_not_found)"]
    assert [p.rule for p in two.folded] == ["evicted_and_restored", "parent_block_not_found"]


@pytest.mark.parametrize(
    "end",
    [lambda s: s.observe(Cleared()), lambda s: s.ledger.take(WorkerRemoved(0, None, None, ((0, 0),)))],
    ids=["cleared", "restarted"],
)
def test_evicted_and_restored_ends_when_the_block_is_dropped(end):
    stream = Stream(prefix_closed=False)
    stream.observe_all(HAZARD)
    end(stream)
    assert stream.observe(Removed((2,))) == ["block_not_found"]


def test_in_a_gap_a_problem_is_listed_under_the_gap_unless_its_block_was_named_since():
    stream = Stream(prefix_closed=False)
    stream.observe_all([stored(1, 2, 3), stored(4)])
    assert stream.observe(stored(2, 30), 3) == ["event_id_gap"]
    stream.observe(stored(10, 1, 2))
    assert stream.observe(Removed((1, 2))) == ["(evicted_and_restored)", "evicted_and_restored"]
    unknown, known = stream.problems[-2:]
    assert (unknown.blocks, known.blocks) == ((1,), (2,))


def test_later_problems_are_listed_under_a_gap():
    stream = Stream(prefix_closed=False)
    stream.observe_all(HAZARD)
    stream.observe(stored(20), 9)
    stream.observe(stored(4, parent=2))
    assert stream.problems[-1].cause.rule == "event_id_gap"


def test_evicted_and_restored_blocks_of_a_recovery_are_reported_and_later_problems_follow_from_them():
    published, stream = Stream(prefix_closed=False), Stream(prefix_closed=False)
    published.observe_all([*HAZARD, stored(30)])
    stream.observe(HAZARD[0])
    assert stream.observe(stored(30), 3) == ["event_id_gap"]
    news = stream.ledger.take(Recovered(published.known, range(1, 4)))
    assert [problem.blocks for problem in news] == [(1,), (2,)]
    assert stream.ledger.take(Recovered(published.known, range(1, 4))) == []
    assert stream.observe(stored(4, parent=2)) == ["(parent_block_not_found)"]
    assert news[1] is stream.problems[-1].cause
    assert published.problems[1].folded == []


def test_the_last_event_of_a_recovery_counts_as_the_event_before():
    published, stream = Stream(prefix_closed=False), Stream(prefix_closed=False)
    published.observe_all(HAZARD[:2])
    stream.observe(HAZARD[0])
    stream.ledger.take(Recovered(published.known.copy(), range(1, 2)))
    assert stream.observe(HAZARD[2], 2) == ["evicted_and_restored"] * 2


def test_a_recovery_keeps_a_parent_that_was_not_held():
    published, stream = Stream(), Stream()
    published.observe(stored(2, parent=9))
    stream.ledger.take(Recovered(published.known.copy(), range(1)))
    assert stream.observe(stored(9), 1) + stream.observe(Removed((9,))) == ["orphaned_child"]


def test_recovered_blocks_have_children_and_copies():
    published, stream = Stream(residency="counted", num_blocks=3), Stream(residency="counted", num_blocks=3)
    published.observe_all([stored(1, 2), stored(3, parent=1), stored(3, parent=1)])
    stream.ledger.take(Recovered(published.known.copy(), range(3)))
    assert stream.flush() + stream.observe(Removed((1,)), 3) == ["over_capacity", "orphaned_child"]
    assert stream.problems[-1].blocks == (2, 3)
    assert stream.drift([2, 3, 3]) == []


# ------------------------------------------------------------------------------------------------ orphaned_child


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([stored(1, 2, 3), Removed((3,)), Removed((2,))], [], id="tail first"),
        pytest.param([stored(1, 2, 3), Removed((1, 2, 3))], [], id="root first in one event"),
        pytest.param([stored(1, 2, 3), Removed((1, 3))], [(2,)], id="without its child"),
        pytest.param([stored(1, 2, 3), Removed((1,))], [(2,)], id="and the child's child is no orphan"),
        pytest.param([stored(1, 2), stored(3, parent=1), Removed((2, 1))], [(3,)], id="the younger of two children"),
        pytest.param([stored(1, 2), stored(3, parent=1), Removed((3, 1))], [(2,)], id="the elder of two children"),
        pytest.param([stored(1, 2), stored(3, parent=1), Removed((1,))], [(2, 3)], id="both"),
        pytest.param([stored(1, 2), stored(3, parent=1), Removed((2, 3, 1))], [], id="neither"),
        pytest.param([stored(1, 2), Removed((2,)), stored(3, parent=1), Removed((1,))], [(3,)], id="after another"),
        pytest.param([stored(1, 2, 3), Removed((1,)), Removed((2, 3))], [(2,)], id="reported once"),
        pytest.param(
            [stored(1, 2), Removed((1,)), stored(1), Removed((1,))], [(2,), (2,)], id="a parent that came back"
        ),
        pytest.param([stored(1, 2), stored(3), stored(2, parent=3), Removed((1,))], [], id="another parent since"),
        pytest.param([stored(1, 2), Cleared(), stored(1), Removed((1,))], [], id="cleared"),
        pytest.param([stored(2, parent=9), stored(9), Removed((9,))], [(2,)], id="stored before its parent"),
        pytest.param([stored(1, 2, 1, 3), Removed((3, 1))], [(2,)], id="a parent that is named twice"),
        pytest.param([stored(1, 2), stored(2, 3, parent=1), Removed((2,))], [(3,)], id="stored again with a child"),
    ],
)
def test_an_orphan_is_a_warning_for_prefix_closed_streams_only(events, expected):
    stream = Stream()
    stream.observe_all(events)
    found = [p for p in stream.problems if p.rule == "orphaned_child"]
    assert [problem.blocks for problem in found] == expected
    assert not any(problem.is_error for problem in found)
    stream = Stream(prefix_closed=False)
    stream.observe_all(events)
    assert "orphaned_child" not in {p.rule for p in stream.problems}


def test_an_orphan_warning_names_the_child_and_its_parent():
    stream = Stream()
    stream.observe_all([stored(1, 2), stored(3, parent=1), Removed((1,))])
    (problem,) = stream.problems
    assert (
        problem.observed
        == "block 2 was stored by event 0 and never removed, and its parent 1 is no longer held; the same for 1 more"
    )


def test_orphans_are_reported_on_the_device_only():
    stream = Stream()
    stream.observe(stored(1, 2))
    stream.observe(stored(1, 2), tier=HOST)
    assert stream.observe(Removed((1,)), tier=HOST) == []
    assert stream.observe(Removed((1,))) == [
        "orphaned_child"
    ]  # a router's tree of the device does not reach 2 any more
    stream = Stream()
    stream.observe(stored(1))
    stream.observe(stored(2, parent=1), tier=HOST)
    assert stream.observe(Removed((1,))) == []


def test_a_parent_must_be_held_on_the_device_only():
    stream = Stream()
    assert stream.observe(stored(3, parent=2), tier=HOST) == []
    assert stream.observe(stored(2, parent=1), tier=HOST) == []
    assert stream.observe(stored(4, parent=3)) == ["parent_block_not_found"]
    assert stream.problems[-1].observed == "block 3 was stored in host_pinned by event 0 and never removed"
    assert stream.observe(stored(5, parent=5), tier=HOST) == ["invalid_block"]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([stored(1), (Removed((1,)), DEVICE)], "removed from device by event 1; in no tier since"),
        (
            [stored(1), (Removed((1,)), DEVICE), (stored(1), HOST)],
            "removed from device by event 1; in host_pinned since event 2",
        ),
        (
            [stored(1), (stored(1), HOST), (stored(1), DISK), (Removed((1,)), DEVICE)],
            "removed from device by event 3; in host_pinned since event 1, in disk since event 2",
        ),
        (
            [stored(1), (Removed((1,)), DEVICE), (stored(1), HOST), (Removed((1,)), HOST)],
            "removed from device by event 1; in no tier since",
        ),
        ([(stored(1), HOST), (Removed((1,)), HOST)], "removed from host_pinned by event 1; in no tier since"),
        ([(stored(1), HOST)], "stored in host_pinned by event 0 and never removed"),
        ([stored(1), (stored(2), HOST)], "stored in device by event 0 and never removed"),
        ([stored(1), (stored(2), HOST), (Cleared(), DEVICE)], "stored in device by event 0 and cleared by event 2"),
        (
            [stored(1), (Removed((1,)), DEVICE), (stored(1), HOST), (Cleared(), DEVICE)],
            "removed from device by event 1, stored in host_pinned by event 2 and cleared by event 3",
        ),
        (
            [stored(1), (stored(1), HOST)],
            "stored in device by event 0, in host_pinned by event 1, and never removed",
        ),
        (
            [(stored(1), HOST), stored(1), (Cleared(), DEVICE)],
            "stored in device by event 1, in host_pinned by event 0, and cleared by event 2",
        ),
        (
            [(stored(1), HOST), stored(1), (Removed((1,)), HOST)],
            "stored in device by event 1 and never removed",
        ),
        (
            [(stored(1), HOST), stored(1), (Removed((1,)), HOST), (Cleared(), DEVICE)],
            "stored in device by event 1 and cleared by event 3",
        ),
        (
            [stored(1), (Cleared(), DEVICE), (stored(1), HOST), (Removed((1,)), HOST), (Cleared(), DEVICE)],
            "removed from host_pinned by event 3",
        ),
        (
            [stored(1), (Cleared(), DEVICE), (stored(1), HOST), (Cleared(), DEVICE)],
            "stored in host_pinned by event 2 and cleared by event 3",
        ),
    ],
)
def test_the_history_of_a_block_names_its_tier(events, expected):
    stream = Stream()
    stream.observe(stored(9), tier=DISK)
    for event in events:
        data, tier = event if isinstance(event, tuple) else (event, DEVICE)
        stream.observe(data, tier=tier)
    # The first event is on disk, so all others have an id one higher.
    later = re.sub(r"event (\d)", lambda found: f"event {int(found[1]) + 1}", expected)
    assert story_of(stream.known, 1) == f"block 1 was {later}"


def test_a_block_that_a_lower_tier_removed_is_reported_with_that_tier():
    stream = Stream()
    for data, tier in ((stored(1), DEVICE), (stored(1), HOST), (Removed((1,)), HOST)):
        stream.observe(data, tier=tier)
    assert stream.observe(Removed((1,)), tier=HOST) == ["block_not_found"]
    assert stream.problems[-1].observed == "block 1 was removed from host_pinned by event 2; in device since event 0"


def test_each_tier_has_its_own_capacity():
    stream = Stream(num_blocks=3, tier_blocks={HOST: 2})
    stream.observe(stored(1, 2, 3), tier=HOST)
    assert stream.observe(stored(1, 2, 3), tier=DISK) == ["over_capacity"]
    stream.observe(stored(1, 2, 3))
    problem = stream.problems[-1]
    assert problem.observed == "according to the events, 3 blocks are held in host_pinned after event 0"
    assert problem.expected == "the engine has 2 blocks there; what it evicts is published as Removed"
    assert (stream.observe(stored(4), tier=DISK), stream.observe_all([stored(5), stored(6)])) == ([], ["over_capacity"])
    assert [problem.storage_tier for problem in stream.problems[1:]] == [DEVICE]
    stream.observe(Removed((1,)), tier=HOST)
    assert stream.flush() == []
    stream.observe(stored(7), tier=HOST)
    assert stream.flush() == ["over_capacity"]


def test_a_block_that_differs_in_two_tiers_is_reported_in_each():
    stream = Stream()
    stream.observe(stored(1))
    stream.observe(stored(1), tier=HOST)
    assert (
        stream.drift([]),
        stream.drift([], HOST),
        stream.drift([], HOST),
    ) == (["engine_drift"], ["engine_drift"], [])
    assert [
        f"the engine does not hold block 1 in {tier}; block 1 was stored in device by event 0, in host_pinned by event "
        "1, and never removed"
        for tier in (DEVICE, HOST)
    ] == [problem.observed for problem in stream.problems]


def test_a_worker_with_tiers_names_tiers_in_messages_before_it_uses_them():
    stream = Stream(num_blocks=1, tier_blocks={HOST: 2})
    stream.observe(stored(1))
    stream.observe(stored(2))
    assert (stream.flush(), stream.drift([2])) == (["over_capacity"], ["engine_drift"])
    assert [problem.observed for problem in stream.problems] == [
        "according to the events, 2 blocks are held in device after event 1",
        "the engine does not hold block 1 in device; block 1 was stored in device by event 0 and never removed",
    ]


def test_an_event_resyncs_a_block_only_in_its_own_tier():
    stream = Stream()
    stream.observe(stored(1, 2))
    assert stream.observe(stored(2), 2, tier=HOST) == ["event_id_gap"]  # the device's Removed is lost
    assert stream.drift([1]) == ["(engine_drift)"]
    assert stream.drift([], HOST) == ["engine_drift"]


def test_a_child_has_a_parent_as_long_as_one_copy_of_it_is_left():
    stream = Stream(residency="counted")
    stream.observe_all([stored(1, 2), stored(1)])
    assert stream.observe(Removed((1,))) == []
    assert stream.observe(Removed((1,))) == ["orphaned_child"]


def test_an_orphan_of_an_evicted_and_restored_parent_is_listed_under_that_warning():
    stream = Stream()
    stream.observe_all([stored(1, 2, 3), stored(10, 2), Removed((2,))])
    restored, orphaned = stream.problems
    assert (restored, (3,)) == (orphaned.cause, orphaned.blocks)


def test_in_a_gap_an_orphan_is_separate_only_if_it_was_named_since():
    stream = Stream()
    stream.observe_all([stored(1, 2), stored(3, 4)])
    stream.observe(stored(4, parent=3), 3)
    assert sorted(stream.observe(Removed((1, 3)))) == ["(orphaned_child)", "orphaned_child"]
    assert {p.blocks for p in stream.problems if p.rule == "orphaned_child"} == {(2,), (4,)}
    assert next(p.blocks for p in stream.problems if p.rule == "orphaned_child" and not p.cause) == (4,)


# ----------------------------------------------------------------------------------------------------- counted


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([stored(1, 2), stored(1, 2)], [], id="stored twice"),
        pytest.param([stored(1), stored(1), Removed((1,)), Removed((1,))], [], id="removed as often"),
        pytest.param([stored(1), stored(1), Removed((1, 1))], [], id="in one event"),
        pytest.param([stored(1), stored(1), *[Removed((1,))] * 3], ["block_not_found"], id="removed once more"),
        pytest.param([stored(1), stored(1), Removed((1,)), stored(2, parent=1)], [], id="a copy is a parent"),
        pytest.param(
            [stored(1), stored(1), Removed((1,)), Removed((1,)), stored(2, parent=1)],
            ["parent_block_not_found"],
            id="no copy is none",
        ),
        pytest.param(
            [stored(1), stored(1), Cleared(), Removed((1,))], ["block_not_found"], id="cleared with its copies"
        ),
    ],
)
def test_copies_are_stored_and_removed_one_by_one(events, expected):
    assert Stream(residency="counted").observe_all(events) == expected


TWO_COPIES = "block 2 was stored by event 1 and never removed; 2 copies are held"


@pytest.mark.parametrize(
    ("resident", "known"),
    [
        ([1, 2, 2], None),
        ([2, 1, 2], None),
        (
            [1, 2],
            f"the engine holds fewer copies of block 2; {TWO_COPIES}",
        ),
        (
            [1, 2, 2, 2],
            f"the engine holds more copies of block 2; {TWO_COPIES}",
        ),
        ([1, 1, 2, 2], "the engine holds more copies of block 1; block 1 was stored by event 0 and never removed"),
        ([2, 2], "the engine does not hold block 1; block 1 was stored by event 0 and never removed"),
        ([1, 2, 2, 3], "the engine holds block 3; block 3 was never stored"),
    ],
)
def test_numbers_of_copies_are_compared_with_the_engine(resident, known):
    stream = Stream(residency="counted")
    stream.observe_all([stored(1, 2), stored(2, parent=1)])
    stream.drift(resident)
    assert [known] * bool(known) == [problem.observed for problem in stream.problems]
    assert stream.drift(resident) == []  # reported once


def test_without_counted_copies_resident_blocks_are_compared_as_a_set():
    stream = Stream()
    stream.observe(stored(1))
    assert stream.drift([1, 1]) == []


def test_tiers_have_their_own_copies():
    stream = Stream(residency="counted")
    stream.observe_all([stored(1), stored(1)])
    stream.observe(stored(1), tier=HOST)
    assert stream.drift([1], HOST) + stream.drift([1, 1]) == []
    assert stream.observe(Removed((1, 1)), tier=HOST) == ["block_not_found"]
    assert story_of(stream.known, 1) == "block 1 was stored in device by event 1 and never removed; 2 copies are held"


def test_an_unopened_rank_has_the_options_of_the_first_rank_of_its_worker():
    ledger = Ledger()
    ledger.open((5, 0), first_id=0, num_blocks=1, residency="counted", prefix_closed=False, block_size=4)
    rank = ledger.stream((5, 3))
    spec = rank.spec
    traits = (spec.num_blocks, spec.residency, spec.prefix_closed, spec.block_size, rank.next_id)
    assert traits == (1, "counted", False, 4, None)
    assert ledger.stream((5, 3)) is rank


@pytest.mark.parametrize(
    ("residency", "copies", "known"),
    [
        ("unique", 1, "block 1 is named 2 times, and was held 1"),
        ("counted", 2, "block 1 is named 3 times, and was held 2"),
    ],
)
def test_a_removed_that_names_a_block_too_often_is_reported_with_the_number_of_copies(residency, copies, known):
    stream = Stream(residency=residency)
    stream.observe_all([stored(1)] * copies)
    assert stream.observe(Removed((1,) * (copies + 1))) == ["block_not_found"]
    assert known == stream.problems[-1].observed


# ------------------------------------------------------------------------- a Cleared of the device alone


def below_cleared():
    """Publish blocks on the device and one on the host, then a Cleared of the device."""
    stream = Stream(clears_below=False)
    stream.observe_all([stored(1, 2)])
    stream.observe(stored(1), tier=HOST)
    stream.observe(Cleared())
    return stream


def test_a_drift_on_the_host_names_the_stored_there_after_a_cleared_of_the_device():
    stream = below_cleared()
    assert stream.drift([], HOST) == ["engine_drift"]
    assert (
        stream.problems[-1].observed
        == "the engine does not hold block 1 in host_pinned; block 1 was stored in host_pinned by event 1 and never "
        "removed"
    )


def test_a_drift_on_the_device_names_the_cleared_and_the_tier_that_still_has_the_block():
    stream = below_cleared()
    assert stream.drift([1]) == ["engine_drift"]
    assert stream.problems[-1].observed.endswith(
        "block 1 was stored by event 0 and cleared by event 2; in host_pinned since event 1"
    )
    assert stream.drift([2]) == ["engine_drift"]
    assert stream.problems[-1].observed.endswith("block 2 was stored in device by event 0 and cleared by event 2")


def test_a_cleared_of_all_tiers_is_named_in_a_drift_on_the_host():
    stream = Stream()
    stream.observe_all([stored(1, 2)])
    stream.observe(stored(1), tier=HOST)
    stream.observe(Cleared())
    assert stream.drift([1], HOST) == ["engine_drift"]
    assert stream.problems[-1].observed.endswith("in host_pinned by event 1, and cleared by event 2")
