"""`RouterContract.reads_load_stream`: a right reader of load streams passes, and each wrong one is found."""

import pytest
from depth import each_parameter

from pytest_kvmock.testing import RouterContract
from pytest_kvmock.testing.router.router_stream import StreamedLoads

TESTS = [name for name in vars(StreamedLoads) if name.startswith("test_")]


class Reader:
    """Picks the least loaded worker by readings and by requests sent since; workers without a reading come last."""

    def __init__(self):
        self.sent = {}

    def is_known(self, reading):
        return reading is not None and reading.is_fresh

    def pick(self, request, candidates):
        known = [each for each in candidates if self.is_known(each.reading)] or candidates
        return min(known, key=lambda each: (self.load(request.now_ms, each), each.worker)).worker

    def load(self, now_ms, candidate):
        reading = candidate.reading
        said, read_ms = (0, 0.0) if reading is None else (candidate.active_requests, now_ms - reading.age_ms)
        return said + sum(ms >= read_ms for ms in self.sent.get(candidate.worker, ()))

    def dispatched(self, request, worker):
        self.sent.setdefault(worker, []).append(request.now_ms)


class BelievesOldReadings(Reader):
    def is_known(self, reading):
        return reading is not None


class TakesNoneForIdle(Reader):
    def is_known(self, reading):
        return reading is None or reading.is_fresh


class TakesJumpsForLoss(Reader):
    """Ignores a worker for ever after a gap in its numbers."""

    def is_known(self, reading):
        return super().is_known(reading) and reading.number < 100


def failing(make):
    class TestIt(RouterContract):
        reads_load_stream = True

        def make_router(self):
            return make()

    found = set()
    for name in TESTS:
        try:
            getattr(TestIt(), name)()
        except pytest.fail.Exception as error:
            found.add((name, str(error)))
    return found


def test_a_right_reader_of_loads_passes():
    assert failing(Reader) == set()


@pytest.mark.parametrize(
    ("make", "test", "text"),
    [
        (BelievesOldReadings, "test_a_reading_that_is_too_old_is_none", "worker 0 got 19 and worker 1 17; expected"),
        (TakesNoneForIdle, "test_a_worker_that_said_nothing_is_unknown_and_not_idle", "expected 9 at most, its even"),
        (TakesJumpsForLoss, "test_numbers_that_jump_are_no_loss", "the next message replaces those that are missing"),
    ],
)
@each_parameter
def test_a_wrong_reader_of_loads_is_found(make, test, text):
    ((name, message),) = failing(make)
    assert name == test
    assert text in message


def test_load_streams_are_not_judged_unless_they_are_declared():
    class TestIt(RouterContract):
        def make_router(self):
            return Reader()

    with pytest.raises(pytest.skip.Exception, match="reads_load_stream is False: a router that is fed by load"):
        TestIt().test_a_reading_that_is_too_old_is_none()
