"""What a report shows of many problems and of a long log."""

import pytest

from pytest_kvmock import EngineProfile, Removed, RouterHarness, Stored
from pytest_kvmock.hygiene.report import log_text, problems_text

SEVERAL = 14
"""More problems than are told in full, and more than are named one by one."""


def positions(text):
    return [line.split()[0] for line in text.splitlines()[1:]]


def test_of_many_problems_the_first_of_each_rule_is_told_and_the_others_are_counted():
    kv = RouterHarness()
    kv.apply([Removed((n,)) for n in range(1, SEVERAL)])
    kv.apply(Stored(5000, (1,), (1,)))
    kv.apply([Removed((n,)) for n in range(101, 1301)])
    text = problems_text(kv.judge().errors)

    lines = text.splitlines()
    assert "1,214 KV event errors: block_not_found (worker 0, event 0), and 1,213 more" == lines[0]
    assert ["block 1 was never stored", "block 5000 was never stored"] == [
        line.partition("known:")[2].strip() for line in lines if "known:" in line
    ]
    assert "  and 1,212 more: 1,212 block_not_found" == lines[-1]


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
    assert problem.known.startswith(f"block {text} ")


def test_what_one_event_breaks_many_times_is_one_mark():
    kv = RouterHarness()
    sink = kv.make_sink()
    sink(Removed((1,)))
    sink.compare(lambda: {1})
    kv.judge()
    entry = kv.events[0]
    entry.problems = entry.problems * 3

    assert (
        "    0  event 0  worker 65536  Removed block 1  !! block_not_found (3 times)"
        == log_text(kv.events).splitlines()[1]
    )


@pytest.fixture
def long():
    """A hundred events, of which 3 and 40 name block 7, and 60 is wrong about it."""
    kv = RouterHarness()
    for n in range(100):
        special = {3: Stored(None, (7,), (7,)), 40: Removed((7,)), 60: Removed((7,))}
        kv.apply(special.get(n, Stored(None, (1000 + n,), (n,))))
    kv.judge()
    return kv


def test_a_short_log_is_shown_whole():
    kv = RouterHarness()
    kv.apply([Stored(None, (n,), (n,)) for n in range(1, 21)])

    text = log_text(kv.events)
    assert "20 events" == text.splitlines()[0]
    assert [str(n) for n in range(20)] == positions(text)


def test_a_long_log_is_shown_around_the_first_problem_and_where_its_block_is_named(long):
    text = log_text(long.events, around=long.events.errors[0])

    assert "100 events; those around the first problem, and those before that name its block" == text.splitlines()[0]
    assert ["3", "40", "...", *map(str, range(48, 68)), "..."] == positions(text)


def test_of_a_log_that_was_taken_from_the_rest_is_shown_around_the_problem():
    kv = RouterHarness()
    kv.apply([Stored(None, (n,), (n,)) for n in range(30)])
    kv.events.take()
    kv.apply([Stored(None, (n,), (n,)) if n != 70 else Removed((999,)) for n in range(30, 100)])
    text = log_text(kv.events, around=kv.events.errors[0])

    assert "70 events; those around the first problem" == text.splitlines()[0]
    assert [*map(str, range(58, 78)), "..."] == positions(text)


def test_around_a_problem_of_the_last_event_nothing_is_left_out_behind_it():
    kv = RouterHarness()
    kv.apply([Stored(None, (n,), (n,)) for n in range(30)])
    kv.apply(Removed((999,)))

    assert [str(n) for n in range(11, 31)] == positions(log_text(kv.events, around=kv.events.errors[0]))


def test_without_a_problem_its_end_is_shown(long):
    assert ["60", "...", *map(str, range(80, 100))] == positions(log_text(long.events))


def test_what_a_comparison_found_is_shown_around_the_last_event_that_names_its_block():
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


def test_a_block_far_down_in_an_event_is_named():
    kv = RouterHarness(EngineProfile(num_blocks=100))
    kv.apply([Stored(None, (n,), (n,)) for n in range(1, 31)])
    kv.apply([Removed(tuple(range(1, 9))), Removed((7,))])
    kv.judge()
    lines = log_text(kv.events, around=kv.events.errors[0]).splitlines()

    assert "   30  event 30  worker 0  Removed blocks 1, 2, 3, 4 and 4 more  (block 7 among them)" in lines
    assert "    6  event 6  worker 0  Stored block 7 as a root" in lines


@pytest.mark.parametrize(("position", "first"), [(0, 0), (5, 0), (50, 38), (99, 80)])
def test_wherever_the_problem_is_as_much_is_shown(long, position, first):
    problem = long.events.errors[0]
    problem.position = position

    shown = [number for number in positions(log_text(long.events, around=problem)) if number != "..."]
    assert [*map(str, range(first, first + 20))] == shown[-20:]
