"""Passes as stages of a run: they start, are planned, and a plan ends early when its engine changes."""

import math

import pytest

from pytest_kvmock import MockEngine, MockEngineArgs, Prompt
from pytest_kvmock.fleets.clock.passes import EngineRun, Passes


class Decoding(EngineRun):
    """One engine with passes of 10 ms each; tests submit its requests directly."""

    def __init__(self):
        super().__init__(0.0)
        args = MockEngineArgs(num_gpu_blocks=64, block_size=32, performance_model=(10.0, 10.0), semantics="1.6.1")
        self.engine = MockEngine(args)
        self.recorded, self.noted = 0, []
        self.passes = Passes(self, args.release)
        self.passes.add([self.engine])
        self.request = self.give(output=14)
        self.do(self.passes.start)
        self.end(10.0)  # one pass for the prompt; the next 12 passes are one plan
        self.do(self.passes.start)

    next_ms = property(lambda self: self.passes.next_ms)

    @property
    def token_ms(self):
        """The token times of its request; reading them brings the plan up to date."""
        self.engine.catch_up()
        return self.request.token_ms

    def plans_until(self, seat):
        return math.inf

    def record(self, seat, passes):
        self.recorded += passes

    def ended(self, seat, done):
        self.noted.append((self.now_ms, done is None))
        return ()

    def check_served(self):
        raise AssertionError("it is stalled")

    def give(self, output=1):
        self.passes.touch(self.engine, self.now_ms)
        return self.engine.inside.dispatch(Prompt(range(10)), output, self.now_ms)

    def do(self, stage):
        for _ in stage(self.now_ms):
            pass

    def end(self, now_ms):
        self.now_ms = now_ms
        self.do(self.passes.end)


def test_consecutive_decode_passes_are_one_plan():
    run = Decoding()
    assert run.next_ms == 130.0
    run.end(130.0)
    assert run.token_ms == [10.0 * step for step in range(1, 14)]
    assert (run.noted, run.recorded) == ([(10.0, False), (130.0, True)], 13)


@pytest.mark.parametrize(("now_ms", "end_ms"), [(51.0, 60.0), (60.0, 60.0)])
def test_a_new_request_ends_a_plan_after_the_current_pass(now_ms, end_ms):
    """A pass that would start at that time has not begun, so it computes the new prompt."""
    run = Decoding()
    run.now_ms = now_ms
    other = run.give()
    assert run.next_ms == end_ms
    run.end(end_ms)
    assert (run.token_ms[-1], run.recorded) == (end_ms, 6)
    run.do(run.passes.start)
    assert other.token_ms == [end_ms + 20.0]  # prefill, and decode of the first request


def test_a_lost_engine_has_recorded_only_its_finished_passes():
    run = Decoding()
    run.now_ms = 55.0
    run.passes.lose(run.engine, run.now_ms)
    assert run.token_ms == [10.0, 20.0, 30.0, 40.0, 50.0]
    assert (run.next_ms, run.recorded) == (math.inf, 5)


def test_an_engine_is_free_between_two_passes_of_its_plan():
    run = Decoding()
    run.now_ms = 50.0
    assert not run.passes.is_busy(run.engine, run.now_ms)
    assert run.token_ms[-1] == 50.0
    run.do(run.passes.start)
    assert run.passes.is_busy(run.engine, run.now_ms)
    assert run.next_ms == 60.0
