"""Fleets whose router gets loads from the load stream of its engines: the readings, and lost messages."""

import pytest

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs
from pytest_kvmock.fleets import FleetRequest, LoadFeed
from pytest_kvmock.values.load_stat import LoadReading, LoadStat

SIZE = 16


def engines(count=2, **args):
    sizes = {"engine_type": "sglang", "num_gpu_blocks": 100, "block_size": SIZE, "performance_model": (10.0, 10.0)}
    return [MockEngine(MockEngineArgs(**sizes, **args)) for _ in range(count)]


class Watching:
    """A router that picks worker 0 first and then the configured worker, and records its candidates."""

    def __init__(self, others=0):
        self.seen, self.others = [], others

    def pick(self, request, candidates):
        self.seen.append((request.now_ms, {each.worker: each for each in candidates}))
        return self.others if request.number else 0

    def readings(self, worker):
        return [(now_ms, shown[worker].reading) for now_ms, shown in self.seen]


def played(rows, loads="stream", count=2, **args):
    router = Watching()
    Fleet(engines(count, **args), router, loads=loads).run(rows)
    return router


def request(ms, output=4, first=0):
    return FleetRequest(range(first, first + 2 * SIZE), output, ms)


def test_an_idle_rank_reports_once_a_second():
    seen = played([request(0.0), request(3500.0, first=1000)]).readings(1)
    idle = LoadStat(0, 0, 0, 1600, max_running=256)
    assert seen == [(0.0, LoadReading(idle, 0, 0.0)), (3500.0, LoadReading(idle, 3, 500.0))]


def test_a_prompt_is_reported_at_once_and_decode_steps_every_interval():
    moments = [5.0, 35.0, 315.0, 325.0]
    rows = [request(0.0, output=40), *(FleetRequest(range(SIZE), 1, ms) for ms in moments)]
    router = Watching(others=1)
    Fleet(engines(), router, loads="stream").run(rows)
    found = [(reading.number, reading.age_ms, reading.stat.running) for _, reading in router.readings(0)]
    assert found == [(0, 0.0, 0), (0, 5.0, 0), (1, 15.0, 1), (1, 295.0, 1), (2, 5.0, 1)]


def test_a_candidate_shows_the_reported_loads():
    router = played([request(0.0, output=40), request(21.0, first=1000)])
    shown = router.seen[1][1][0]
    assert (shown.active_requests, shown.decode_blocks, shown.usage) == (1, 3, 0.03)
    assert shown.reading.stat.prefill_tokens == 2 * SIZE
    assert shown.reading.stat.prefill_us == 10_000


def test_a_worker_without_reports_has_no_reading():
    router = played([request(0.0), request(2500.0)], LoadFeed(silent={1: 0.0}))
    assert router.readings(1) == [(0.0, None), (2500.0, None)]


def test_a_silent_worker_keeps_its_last_reading_with_a_growing_age():
    router = played([request(0.0), request(4500.0)], LoadFeed(silent={1: 1500.0}))
    (_, first), (_, last) = router.readings(1)
    assert (first.is_fresh, last.number, last.age_ms, last.is_fresh) == (True, 1, 3500.0, False)


def test_a_failed_poll_keeps_the_earlier_reading():
    feed = LoadFeed("engine", every_ms=100.0, silent={0: 50.0, 1: 0.0})
    router = played([request(0.0, output=90), request(200.0), request(420.0)], feed)
    assert [reading and reading.age_ms for _, reading in router.readings(0)] == [0.0, 200.0, 420.0]
    assert router.readings(1) == [(0.0, None), (200.0, None), (420.0, None)]


def test_a_feed_can_skip_numbers_and_shorten_messages():
    router = played([request(0.0), request(1500.0)], LoadFeed(jumps={1: 9}, short=[1], late_ms=600.0))
    (_, first), (_, second) = router.readings(1)
    assert (first, second.number, second.age_ms) == (None, 9, 1500.0)
    assert second.stat == LoadStat(0, 0, 0, 1600)


def test_a_restarted_worker_numbers_its_readings_from_0():
    router, fleet_engines = Watching(), engines()
    fleet = Fleet(fleet_engines, router, loads="stream")
    fleet.at(2500.0).restart(1)
    fleet.run([request(0.0), request(2000.0), request(2600.0)])
    assert [reading.number for _, reading in router.readings(1)] == [0, 2, 0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LoadFeed("mine"), "unknown loads 'mine'"),
        (lambda: LoadFeed(silent={0: -1}), r"LoadFeed: silent\[0\] must be"),
        (lambda: LoadFeed(interval=0), "LoadFeed: interval must be"),
        (lambda: LoadFeed(jumps={0: 0.5}), r"LoadFeed: jumps\[0\] must be"),
    ],
)
def test_an_invalid_feed_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
