"""The report of many problems and of a long log."""

import asyncio
from uuid import UUID

import pytest

from pytest_kvmock import (
    Cleared,
    EngineProfile,
    EventRulesBroken,
    KvCacheEvent,
    Problem,
    RadixIndex,
    RadixIndexError,
    Removed,
    RouterEvent,
    RouterHarness,
    Stored,
    create_manager,
)
from pytest_kvmock.harness.reduce import Breach
from pytest_kvmock.harness.reduce.program import Reproduction
from pytest_kvmock.oracle.hygiene.log_text import log_text
from pytest_kvmock.oracle.hygiene.report import failure_text, problems_text
from pytest_kvmock.oracle.index.index import BlockNotFound
from pytest_kvmock.testing.manager.manager_checks import expect_references
from pytest_kvmock.values import Deref, Promote, Use

SEVERAL = 14
"""More problems than are shown in full, and more than are listed one by one."""


def positions(text):
    return [line.split()[0] for line in text.splitlines()[1:]]


def test_a_report_shows_the_first_problem_of_each_rule_and_counts_the_others():
    kv = RouterHarness()
    kv.apply([Removed((n,)) for n in range(1, SEVERAL)])
    kv.apply(Stored(5000, (1,), (1,)))
    kv.apply([Removed((n,)) for n in range(101, 1301)])
    text = problems_text(kv.judge().errors)

    lines = text.splitlines()
    assert lines[0] == "1,214 KV event errors: block_not_found (worker 0, event 0), and 1,213 more"
    assert [line.partition("observed:")[2].strip() for line in lines if "observed:" in line] == [
        "block 1 was never stored",
        "block 5000 was never stored",
    ]
    assert lines[-1] == "  and 1,212 more: 1,212 block_not_found"


def stored(event_id, block):
    return KvCacheEvent(event_id, Stored(None, (block,), (block,)))


def lose_a_batch(kv):
    kv.inside.lost_batches(0, 0, range(3, 4))


def begin_batches_anew(kv):
    kv.inside.lost_batches(0, 0, range(3, 3), "numbers went backwards")


def lose_the_last_event(kv):
    kv.drop_next()
    kv.apply(stored(1, 2))


@pytest.mark.parametrize(
    ("happens", "broken_when"),
    [
        (lambda kv: kv.apply(stored(2, 2)), "an event id is above the next one: ids between them are missing"),
        (lambda kv: kv.apply(stored(0, 1)), "the event before arrived again"),
        (lambda kv: kv.apply(stored(0, 2)), "event ids go backwards, and no event of this id is missing"),
        (lose_the_last_event, "a published event never arrived"),
        (lose_a_batch, "the events of a batch of a wire are missing"),
        (begin_batches_anew, "batch numbers of a wire go backwards"),
    ],
)
def test_an_event_id_gap_states_its_kind(happens, broken_when):
    kv = RouterHarness()
    kv.apply(stored(0, 1))
    happens(kv)
    text = problems_text([problem for problem in kv.judge().errors if problem.rule == "event_id_gap"][:1])
    assert f"    rule:      event_id_gap: {broken_when}" in text.splitlines()


@pytest.mark.parametrize("rule", ["index_drift", "index_failure", "not_flushed"])
def test_problems_of_the_index_under_test_are_not_offered_as_allowed(rule):
    text = failure_text([Problem(rule, 0, 0, "observed", "expected")])
    assert f'expected? for the test:  kv_events.expect_error("{rule}")' in text
    assert "not your concern?" not in text
    assert "not your concern?" in failure_text([Problem("engine_drift", 0, 0, "observed", "expected")])


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (2**16 - 1, "65535"),
        (2**16, "0x0000000000010000"),
        (2**64 - 1, "0xffffffffffffffff"),
        (1 - 2**16, "-65535"),
        (-(2**16), "-0x0000000000010000"),
    ],
)
def test_hashes_below_65536_are_decimal_and_others_are_16_digits(block, text):
    kv = RouterHarness()
    kv.make_sink()(Removed((block,)))
    (problem,) = kv.events.errors
    assert problem.observed.startswith(f"block {text} ")


def test_many_problems_of_one_event_are_one_mark():
    kv = RouterHarness()
    sink = kv.make_sink()
    sink(Removed((1,)))
    sink.compare(lambda: {1})
    kv.judge()
    entry = kv.events[0]
    entry.problems = entry.problems * 3

    assert (
        log_text(kv.events).splitlines()[1]
        == "    0  event 0  worker 65536  Removed block 1  !! block_not_found (3 times)"
    )


@pytest.fixture
def long():
    """A hundred events; events 3 and 40 name block 7, and event 60 is wrong about it."""
    kv = RouterHarness()
    for n in range(100):
        special = {3: Stored(None, (7,), (7,)), 40: Removed((7,)), 60: Removed((7,))}
        kv.apply(special.get(n, Stored(None, (1000 + n,), (n,))))
    kv.judge()
    return kv


def test_a_short_log_is_shown_in_full():
    kv = RouterHarness()
    kv.apply([Stored(None, (n,), (n,)) for n in range(1, 21)])

    text = log_text(kv.events)
    assert text.splitlines()[0] == "20 events"
    assert [str(n) for n in range(20)] == positions(text)


def test_a_long_log_is_shown_around_the_first_problem_and_at_events_that_name_its_block(long):
    text = log_text(long.events, around=long.events.errors[0])

    assert text.splitlines()[0] == "100 events; those around the first problem, and those before that name its block"
    assert ["3", "40", "...", *map(str, range(48, 68)), "..."] == positions(text)


def test_a_log_without_its_taken_events_is_shown_around_the_problem():
    kv = RouterHarness()
    kv.apply([Stored(None, (n,), (n,)) for n in range(30)])
    kv.events.take()
    kv.apply([Stored(None, (n,), (n,)) if n != 70 else Removed((999,)) for n in range(30, 100)])
    text = log_text(kv.events, around=kv.events.errors[0])

    assert text.splitlines()[0] == "70 events; those around the first problem"
    assert [*map(str, range(58, 78)), "..."] == positions(text)


def test_a_problem_at_the_last_event_is_shown_with_the_events_before_it():
    kv = RouterHarness()
    kv.apply([Stored(None, (n,), (n,)) for n in range(30)])
    kv.apply(Removed((999,)))

    assert [str(n) for n in range(11, 31)] == positions(log_text(kv.events, around=kv.events.errors[0]))


def test_without_a_problem_the_end_of_the_log_is_shown(long):
    assert ["60", "...", *map(str, range(80, 100))] == positions(log_text(long.events))


def test_a_drift_is_shown_around_the_last_event_that_names_its_block():
    kv = RouterHarness()
    sink = kv.make_sink()
    sink.compare(lambda: range(1, 100))
    for n in range(1, 101):
        sink(Stored(None, (n,), (n,)) if n != 30 else Stored(None, (30, 500), (30, 500)))
    kv.judge()
    (problem,) = [p for p in kv.events.errors if 500 in p.blocks]
    text = log_text(kv.events, around=problem)

    assert [*map(str, range(17, 37)), "..."] == positions(text)
    assert "   29  event 29  worker 65536  Stored blocks 30, 500 as a root" in text


def test_a_line_names_the_problems_block_if_its_list_is_shortened():
    kv = RouterHarness(EngineProfile(num_blocks=100))
    kv.apply([Stored(None, (n,), (n,)) for n in range(1, 31)])
    kv.apply([Removed(tuple(range(1, 9))), Removed((7,))])
    kv.judge()
    lines = log_text(kv.events, around=kv.events.errors[0]).splitlines()

    assert "   30  event 30  worker 0  Removed blocks 1, 2, 3, 4 and 4 more  (block 7 among them)" in lines
    assert "    6  event 6  worker 0  Stored block 7 as a root" in lines


@pytest.mark.parametrize(("position", "first"), [(0, 0), (5, 0), (50, 38), (99, 80)])
def test_the_same_number_of_events_is_shown_wherever_the_problem_is(long, position, first):
    problem = long.events.errors[0]
    problem.position = position

    shown = [number for number in positions(log_text(long.events, around=problem)) if number != "..."]
    assert [*map(str, range(first, first + 20))] == shown[-20:]


# ------------------------------------------------------------------------------------- the block that is named


def test_a_short_log_and_the_message_name_a_block_of_a_shortened_list():
    """Also if the digits of its number occur elsewhere in the line."""
    kv = RouterHarness(backend=None)
    kv.apply([Stored(None, (n,), (n,)) for n in (9, 3, 4, 2, 5)])
    kv.apply(Removed((9, 3, 4, 2, 5, 6)))
    problem = kv.judge().errors[0]
    line = "event 5  worker 0  Removed blocks 9, 3, 4, 2 and 2 more  (block 6 among them)"

    assert problems_text([problem]).splitlines()[2] == f"  {line}"
    assert log_text(kv.events, around=problem).splitlines()[-1] == f"    5  {line}  !! block_not_found"
    assert log_text(kv.events).splitlines()[-1] == f"    5  {line}  !! block_not_found"


def test_a_block_of_a_shortened_list_is_named_although_its_digits_occur_in_the_line():
    kv = RouterHarness(backend=None)
    kv.apply([Stored(None, (10, 11, 12, 13, 1), (1, 2, 3, 4, 5)), Removed((1,)), Removed((1,))])
    problem = kv.judge().errors[0]

    assert log_text(kv.events, around=problem).splitlines() == [
        "3 events",
        "    0  event 0  worker 0  Stored blocks 10, 11, 12, 13 and 1 more as a root  (block 1 among them)",
        "    1  event 1  worker 0  Removed block 1",
        "    2  event 2  worker 0  Removed block 1  !! block_not_found",
    ]


def test_the_parent_of_an_orphan_warning_is_named_in_its_line():
    kv = RouterHarness(backend=None)
    kv.apply([Stored(None, (n,), (n,)) for n in (1, 2, 3, 4, 5)])
    kv.apply([Stored(5, (6,), (6,)), Removed((1, 2, 3, 4, 5))])
    (problem,) = kv.judge().warnings

    assert (
        log_text(kv.events, around=problem).splitlines()[-1]
        == "    6  event 6  worker 0  Removed blocks 1, 2, 3, 4 and 1 more  (block 5 among them)  ! orphaned_child"
    )


class SaysTwo:
    """An index that returns worker 2 for every lookup."""

    def apply(self, event):
        pass

    def find_matches(self, local_hashes):
        return {2: len(local_hashes)}


def test_a_block_that_only_another_worker_stored_is_shown():
    kv = RouterHarness(backend=None, index=SaysTwo(), sync="end")
    kv.apply(Stored(None, (1, 2, 3, 4, 5), (1, 2, 3, 4, 5)), worker_id=1)
    kv.apply([Cleared()], worker_id=1)
    kv.apply([Stored(None, (n,), (n,)) for n in range(100, 130)], worker_id=2)
    problem = next(p for p in kv.judge().errors if p.block == 1)

    lines = log_text(kv.events, around=problem).splitlines()
    assert lines[1] == "    0  event 0  worker 1  Stored blocks 1, 2, 3, 4 and 1 more as a root"


def test_drift_names_blocks_in_the_order_in_which_they_were_stored():
    kv = RouterHarness(backend=None)
    sink = kv.make_sink()
    for data in (
        Stored(None, (7,), (7,)),
        Stored(None, (9, 8), (9, 8)),
        Removed((8,)),
        Stored(9, (8,), (8,)),
        Stored(None, (6,), (6,)),
        Stored(None, (20, 21), (1, 2)),
        Removed((21,)),
        Removed((20,)),
    ):
        sink(data)
    sink.compare(lambda: {1, 21, 20})
    kv.judge()

    assert [problem.blocks for problem in kv.events.errors] == [(7, 9, 8, 6), (20, 21, 1)]


def test_drifts_of_several_workers_are_listed_by_the_event_that_stored_their_block():
    kv = RouterHarness(backend=None)
    first, second = kv.make_sink(), kv.make_sink()
    for sink, block in ((second, 1), (first, 2), (second, 3)):
        sink(Stored(None, (block,), (block,)))
    first.compare(lambda: [4])
    second.compare(lambda: [1])
    kv.judge()

    assert [problem.blocks for problem in kv.events.errors] == [(2,), (3,), (4,)]


def test_assert_in_sync_names_the_oldest_drift_first():
    kv = RouterHarness(backend=None)
    first, second = kv.make_sink(), kv.make_sink()
    first.compare(list)
    second.compare(list)
    second(Stored(None, (1,), (1,)))
    first(Stored(None, (2,), (2,)))

    with pytest.raises(EventRulesBroken) as error:
        kv.assert_in_sync()
    assert str(error.value).partition("\n")[0] == "2 KV event errors: engine_drift (worker 65537), and 1 more"


class Deaf:
    """An async index that applies nothing."""

    async def apply(self, event):
        pass

    async def find_matches(self, local_hashes):
        return {}


def test_drifts_found_by_one_flush_are_listed_oldest_first():
    kv = RouterHarness(backend=None, index=Deaf())
    kv.apply([Stored(None, (n,), (n,)) for n in (3, 1, 2)])
    asyncio.run(kv.aflush())

    assert [problem.block for problem in kv.judge().errors] == [3, 1, 2]


def test_drifts_found_at_the_end_of_a_test_are_listed_oldest_first():
    kv = RouterHarness(backend=None, index=SaysTwo(), sync="end")
    for worker, block in ((1, 3), (0, 1), (1, 2)):
        kv.apply(Stored(None, (block,), (block,)), worker_id=worker)

    assert [problem.block for problem in kv.judge().errors] == [3, 1, 2]


# ----------------------------------------------------------------------------------------------------- hashes

LARGE, SIGNED = 0xFEDC_BA98_7654_3210, -0x0123_4567_89AB_CDEF
TEXT, SIGNED_TEXT = "0xfedcba9876543210", "-0x0123456789abcdef"


RUN = tuple(range(LARGE, LARGE + 8))


@pytest.mark.parametrize(("block", "text"), [(LARGE, TEXT), (SIGNED, SIGNED_TEXT), (65535, "65535"), (-5, "-5")])
def test_a_hash_is_written_alike_in_log_message_and_details(block, text):
    kv = RouterHarness(backend=None)
    kv.apply([Stored(None, (block,), (65536,)), Removed((block,)), Removed((block,))])
    problem = kv.judge().errors[0]

    lines = problems_text([problem]).splitlines()
    assert [
        lines[2],
        lines[4],
    ] == [f"  event 2  worker 0  Removed block {text}", f"    observed:  block {text} was removed by event 1"]
    assert log_text(kv.events).splitlines()[1] == f"    0  event 0  worker 0  Stored block {text} as a root"


def test_a_reproduction_writes_hashes_like_the_log():
    breach = Breach("block_not_found", is_error=True, worker=(0, 0), block=LARGE, story="")
    events = (Stored(SIGNED, RUN, (1, 65535, 65536, 4, 5, 6, 7, 9)), Removed((SIGNED, 5)))
    steps = tuple(RouterEvent(0, KvCacheEvent(i, data)) for i, data in enumerate(events))
    found = Reproduction(breach, "events", "lineage", EngineProfile(), steps)

    run = f"*range({TEXT}, 0xfedcba9876543218)"
    assert found.as_test().splitlines()[6:8] == [
        f"            Stored({SIGNED_TEXT}, ({run},), (1, 65535, 0x0000000000010000, 4, 5, 6, 7, 9)),",
        f"            Removed(({SIGNED_TEXT}, 5)),",
    ]
    assert f"block={TEXT}," in repr(breach)


def refused(call, *arguments, **options):
    with pytest.raises((ValueError, RadixIndexError)) as error:
        call(*arguments, **options)
    return str(error.value)


def test_managers_and_the_reference_index_write_hashes_like_the_log():
    manager = create_manager("lineage", num_blocks=4)
    partial = UUID(int=7, version=4)
    gone = f"Deref of block {TEXT}: it is not active"
    assert gone == refused(manager.deref, [LARGE])
    assert (
        refused(manager.use, [1], parent=LARGE)
        == f"Use: parent {TEXT} is not cached; a block's parent must be active or inactive"
    )
    assert (
        refused(manager.use, [SIGNED])
        == f"Use of block {SIGNED_TEXT}: expected a sequence hash, an integer from 0 to 2**64 - 1"
    )
    assert (
        refused(manager.process, Use([LARGE, 1], plhs=[1]))
        == f"Use of block {TEXT}: 1 plhs for 2 full blocks; expected one for each full block"
    )
    assert f"Promote of partial block {partial} to block {TEXT}: parent {SIGNED_TEXT}: expected" in refused(
        manager.process, Promote(manager.use([partial]) and partial, LARGE, parent=SIGNED)
    )
    index = RadixIndex()
    assert f"Failed to find block: event 3 of worker 0 rank 0 removes block {TEXT}, which" in refused(
        index.apply, RouterEvent(0, KvCacheEvent(3, Removed((LARGE,))))
    )


def test_events_and_moves_write_hashes_like_the_log():
    stored = Stored(SIGNED, (LARGE, 1), (65536, 2))
    text = (
        f"Stored(parent_hash={SIGNED_TEXT}, block_hashes=({TEXT}, 1), tokens_hashes=(0x0000000000010000, 2), "
        "start_position=None, mm_extra_info=None)"
    )
    assert repr(stored) == text
    assert stored == eval(text)
    assert repr(Removed((LARGE,))) == f"Removed(block_hashes=({TEXT},))"
    assert (
        repr(stored.blocks[0]) == f"StoredBlock(block_hash={TEXT}, tokens_hash=0x0000000000010000, mm_extra_info=None)"
    )
    use = Use([LARGE], token_ids=[[128_000, 1]])
    assert repr(use) == f"Use(blocks=[{TEXT}], local_hashes=(), plhs=(), token_ids=[[128000, 1]], parent=None)"
    assert repr(Deref({LARGE})) == f"Deref(blocks={{{TEXT}}})"
    error = BlockNotFound(0, 0, 3, LARGE)
    assert repr(error) == f"BlockNotFound(0, 0, 3, {TEXT}, <StorageTier.DEVICE: 'device'>)"


def test_a_fault_writes_its_parent_like_the_log():
    kv = RouterHarness()
    fault = kv.faults.wrong_parent(parent=LARGE)
    assert repr(fault) == f"<kv_harness.faults.wrong_parent(1, parent={TEXT}): 0 injected>"
    fault.stop()


def test_a_contract_writes_resident_blocks_like_the_log():
    manager = create_manager("lineage", num_blocks=4)
    manager.use([LARGE])
    with pytest.raises(AssertionError) as error:
        expect_references(manager, {LARGE: 2})
    assert str(error.value).partition("\n")[0] == f"active_blocks is {{{TEXT}: 1}}; expected {{{TEXT}: 2}}"
