"""Links with shared bandwidth: recordings, worked examples, properties, and invalid input."""

import math
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock.engines.base.bandwidth import Link

MB = 1_000_000


@pytest.mark.parametrize("number", range(8))
def test_a_link_gives_exactly_the_recorded_answers(recording, number):
    links = recording("offload.json.gz")["links"]
    assert len(links) == 8
    program = links[number]
    link = Link(program["link"])
    answers = {"start": link.start, "advance": link.advance, "earliest": link.earliest, "active": lambda: link.active}
    assert program["results"] == [answers[kind](*arguments) for kind, *arguments in program["ops"]]


@pytest.mark.parametrize(
    ("starts", "finishes"),
    [
        ([0.0], [1.0]),
        ([0.0, 0.0], [2.0, 2.0]),
        ([0.0, 0.5], [1.5, 2.0]),
        ([0.0] * 10, [10.0] * 10),
    ],
    ids=["alone", "two at once", "a second on the way", "ten at once"],
)
def test_concurrent_transfers_share_the_bandwidth_of_a_link_equally(starts, finishes):
    link = Link(1.0)
    for now in starts:
        assert link.advance(now) == []
        link.start(now, MB)
    found = []
    while (deadline := link.earliest()) is not None:
        found += [deadline] * len(link.advance(deadline))
    assert finishes == pytest.approx(found, abs=1e-9)


@pytest.mark.parametrize("gbps", [0.0, 0, -1.0])
def test_a_transfer_without_a_bandwidth_limit_completes_at_once(gbps):
    link = Link(gbps)
    link.start(3.0, 7 * MB)
    assert link.earliest() == 3.0
    assert link.advance(3.0) == [0]


def test_an_earlier_time_does_not_move_the_clock_of_a_link_back():
    link = Link(1.0)
    link.start(0.0, 4 * MB)
    assert link.advance(2.0) == []
    assert link.advance(1.0) == []
    assert link.earliest() == 4.0
    link.start(1.0, MB)  # starts at 2.0, the link's own time
    assert link.earliest() == 4.0


def test_links_that_share_a_counter_give_unique_transfer_ids():
    ids = count()
    there, back = Link(1.0, ids), Link(2.0, ids)
    assert [there.start(0.0, 1), back.start(0.0, 1), there.start(0.0, 1)] == [0, 1, 2]


def test_a_cancelled_link_has_no_active_transfer():
    link = Link(1.0)
    link.start(0.0, MB)
    link.cancel()
    assert (link.active, link.earliest(), link.advance(9.0)) == (0, None, [])


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5 * MB)), min_size=1, max_size=12), st.data())
def test_every_transfer_arrives_as_early_and_as_late_as_the_bandwidth_allows(gaps, data):
    link, now, started, done = Link(1.0), 0.0, {}, {}

    def advance(to):
        done.update((number, to) for number in link.advance(to))

    for gap, size in gaps:
        advance(now := now + gap)
        started[link.start(now, size)] = now, size
        if data.draw(st.booleans()) and (deadline := link.earliest()) is not None:
            advance(now := deadline)
    while (deadline := link.earliest()) is not None:
        advance(now := deadline)
    assert started.keys() == done.keys()
    for number, (at, size) in started.items():
        assert done[number] >= at + size / MB - 1e-6
    assert now <= max(at for at, _ in started.values()) + sum(size for _, size in started.values()) / MB + 1e-6


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf, -1.0, "1", None, True])
def test_an_invalid_time_is_refused(now):
    link = Link(1.0)
    link.start(0.0, MB)
    for call in (link.advance, lambda now: link.start(now, 1)):
        with pytest.raises(ValueError) as error:
            call(now)
        assert str(error.value) == f"a time must be a finite number of at least 0 (ms), got {now!r}"
    assert (link.active, link.earliest()) == (1, 1.0)


@pytest.mark.parametrize("size", [-1, 1.5, math.nan, math.inf, None, True])
def test_invalid_bytes_are_refused(size):
    link = Link(1.0)
    with pytest.raises(ValueError) as error:
        link.start(5.0, size)
    assert str(error.value) == f"bytes must be an integer of at least 0 (bytes of a transfer), got {size!r}"
    assert (link.active, link.earliest()) == (0, None)


def test_a_byte_count_beyond_the_range_of_floats_is_refused():
    link = Link(1.0)
    with pytest.raises(
        ValueError, match=r"^bytes must be a finite number of at least 0 \(bytes of a transfer\), got 10"
    ):
        link.start(5.0, 10**400)
    assert (link.active, link.earliest()) == (0, None)


@pytest.mark.parametrize("gbps", [math.nan, math.inf, -math.inf, "14", True])
def test_an_invalid_bandwidth_is_refused(gbps):
    with pytest.raises(ValueError) as error:
        Link(gbps)
    assert str(error.value) == f"a bandwidth must be a finite number of at least 0 (GB/s; 0 is infinite), got {gbps!r}"
