"""Arrival times of a trace: worked examples of open loops, closed loops and sessions, as in Dynamo's replay."""

import math

import pytest

from pytest_kvmock import Prompt
from pytest_kvmock.fleets import TraceRequest
from pytest_kvmock.fleets.clock.arrivals import Arrivals, Turn


def turn(name, timestamp=None, session=None, delay=None):
    return Turn(TraceRequest(timestamp, 1, 1, (name,), session, delay), Prompt([name]))


def arrivals(turns, concurrency=None, speedup=1.0, *, sessions_keep_place=False, **start):
    return Arrivals(turns, concurrency, speedup, sessions_keep_place=sessions_keep_place, **start)


def played(queue, serve_ms):
    """Serve each request for `serve_ms` from its arrival; return (name, arrival) of each, in order."""
    seen, under_way, now = [], [], 0.0
    while now < math.inf:
        for end, done in sorted(under_way, key=lambda pair: pair[0]):
            if end <= now:
                under_way.remove((end, done))
                queue.done(done, now)
        for arrived, at in queue.take(now):
            seen.append((arrived.trace.hash_ids[0], at))
            under_way.append((now + serve_ms, arrived))
        now = min([queue.next_ms, *(end for end, _ in under_way)])
    return seen


@pytest.mark.parametrize(
    ("expected", "timestamps", "concurrency", "speedup"),
    [
        pytest.param([(1, 0), (2, 5), (3, 7)], (3, 8, 10), None, 1.0, id="the first arrives at 0"),
        pytest.param([(2, 0), (3, 2), (1, 7)], (10, 3, 5), None, 1.0, id="by timestamp, whatever their order"),
        pytest.param([(1, 0), (2, 2.5)], (0, 5), None, 2.0, id="faster"),
        pytest.param([(1, 0), (2, 0), (3, 0)], (4, 4, 4), None, 1.0, id="at once: in the order of the trace"),
        pytest.param([(1, 0), (2, 100), (3, 200)], (10, 3, 5), 1, 1.0, id="closed loop: in the order of the trace"),
        pytest.param([(1, 0), (2, 0), (3, 100)], (0, 500, 900), 2, 1.0, id="closed loop of two"),
    ],
)
def test_requests_without_sessions_arrive_in_the_expected_order(expected, timestamps, concurrency, speedup):
    turns = [turn(name, timestamp) for name, timestamp in enumerate(timestamps, 1)]
    assert played(arrivals(turns, concurrency, speedup), 100) == expected


@pytest.mark.parametrize(
    ("expected", "concurrency"), [([(1, 100), (2, 104)], None), ([(1, 100), (2, 200)], 1)], ids=["open", "closed"]
)
def test_the_first_request_arrives_at_the_start_of_the_clock(expected, concurrency):
    queue = arrivals([turn(1, 3), turn(2, 11)], concurrency, 2.0, start_ms=100.0)
    assert queue.next_ms == 100.0
    assert played(queue, 100) == expected


@pytest.mark.parametrize(
    ("expected", "second", "speedup"),
    [
        pytest.param(150, {"delay": 50}, 1.0, id="a delay after the end of the turn before"),
        pytest.param(125, {"delay": 50}, 2.0, id="divided by the speedup"),
        pytest.param(107, {"timestamp": 7}, 1.0, id="the difference of timestamps"),
        pytest.param(150, {"timestamp": 7, "delay": 50}, 1.0, id="a delay counts more than a timestamp"),
        pytest.param(100, {}, 1.0, id="neither"),
    ],
)
def test_a_turn_waits_for_the_previous_turn_of_its_session(expected, second, speedup):
    turns = [turn(1, 0, "a"), turn(2, session="a", **second)]
    assert played(arrivals(turns, speedup=speedup), 100) == [(1, 0), (2, expected)]


def test_the_gap_of_a_timestamp_counts_from_the_last_turn_with_a_timestamp():
    turns = [turn(1, 10, "a"), turn(2, session="a", delay=5), turn(3, 40, "a")]
    assert played(arrivals(turns), 100) == [(1, 0), (2, 105), (3, 235)]


@pytest.mark.parametrize(
    ("expected", "keep_place"),
    [
        pytest.param([(1, 0), (3, 100), (2, 200), (4, 300)], False, id="1.2.1: others are served in the delay"),
        pytest.param([(1, 0), (2, 150), (3, 250), (4, 400)], True, id="1.6.1: a session keeps its place"),
    ],
)
def test_sessions_keep_their_place_in_a_closed_loop_only_in_1_6_1(expected, keep_place):
    turns = [turn(1, 0, "a"), turn(2, session="a", delay=50), turn(3, 0, "b"), turn(4, session="b", delay=50)]
    assert played(arrivals(turns, 1, sessions_keep_place=keep_place), 100) == expected


def test_turns_ready_at_the_same_time_arrive_in_the_order_of_their_sessions():
    turns = [turn(1, 0, "a"), turn(2, 0, "b"), turn(3, 0, "c"), turn(4, session="a", delay=10)]
    queue = arrivals([*turns, turn(5, session="b", delay=10)], 2)
    first, second = (arrived for arrived, _ in queue.take(0.0))
    queue.done(second, 100.0)
    queue.done(first, 100.0)
    (third,) = (arrived for arrived, _ in queue.take(100.0) if arrived.trace.hash_ids == (3,))
    queue.done(third, 110.0)
    assert [arrived.trace.hash_ids[0] for arrived, _ in queue.take(110.0)] == [4, 5]
