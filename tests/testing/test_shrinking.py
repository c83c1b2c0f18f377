"""Shrinking a failure of `play` has a limit, and the failure says so."""

import itertools

import pytest
from depth import takes_long
from hypothesis import Phase, given, settings

from pytest_kvmock import EngineProfile, EventRulesBroken, RadixIndex, Removed, RouterHarness, testing
from pytest_kvmock.testing import Prefill, Program, Serve, ShrinkingStopped, play, traffic
from pytest_kvmock.testing.shrinking import SHRINKING


class KeepsLongRemovals(RadixIndex):
    def apply(self, event):
        if not (isinstance(event.data, Removed) and len(event.data.block_hashes) > 1):
            super().apply(event)


def failing_harness():
    return RouterHarness(EngineProfile(block_size=4, num_blocks=8, workers=2), index=KeepsLongRemovals())


def in_any_traffic(phases=tuple(Phase), **bound):
    @settings(database=None, derandomize=True, deadline=None, max_examples=100, phases=phases)
    @given(traffic(workers=2))
    def test(program):
        play(failing_harness(), program, **bound)

    test()


def test_beyond_its_limit_shrinking_stops_with_the_smallest_failing_program():
    with pytest.raises(ShrinkingStopped) as stopped:
        in_any_traffic(most_shrink_events=300)
    counted, program, failure = str(stopped.value).partition("Program(\n")
    assert counted.startswith("shrinking stopped after ")
    assert "(play: most_shrink_events=300, and at most 20 s); the smallest program that failed has " in counted
    assert isinstance(stopped.value.__cause__, EventRulesBroken)
    assert str(stopped.value.__cause__) in failure
    steps = eval(
        program + failure.partition("\n)\n")[0] + "\n)", {name: getattr(testing, name) for name in testing.__all__}
    )
    with pytest.raises(EventRulesBroken):
        play(failing_harness(), steps)


@takes_long
def test_an_ordinary_failure_is_shrunk_to_the_end(monkeypatch):
    monkeypatch.setattr(SHRINKING, "clock", lambda: 0.0)  # only events count: a busy machine takes any time
    with pytest.raises(EventRulesBroken) as failed:
        in_any_traffic()
    assert not [note for note in failed.value.__notes__ if "shrinking stopped" in note]


def test_shrinking_a_slow_index_stops_after_its_time_limit(monkeypatch):
    ticks = itertools.count(step=7.0)
    monkeypatch.setattr(SHRINKING, "clock", lambda: next(ticks))
    with pytest.raises(ShrinkingStopped, match=r"^shrinking stopped after [\d,]+ events and (21|28) s "):
        in_any_traffic()


def test_the_first_failure_counts_towards_the_limit():
    with pytest.raises(ShrinkingStopped):
        in_any_traffic((Phase.generate,), most_shrink_events=1)


def test_each_run_is_counted_separately_in_any_runner(monkeypatch):
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "")  # like outside pytest
    said = []
    for _ in range(3):
        with pytest.raises(EventRulesBroken):
            in_any_traffic((Phase.generate,), most_shrink_events=5_000)
        said.append(SHRINKING.events)
        SHRINKING.events = 4_999 if len(said) < 3 else 0  # a leftover count must not matter to the next run
    assert said[0] == said[1] == said[2]


def test_without_a_limit_shrinking_counts_nothing():
    with pytest.raises(EventRulesBroken):
        in_any_traffic((Phase.generate,), most_shrink_events=None)


def test_outside_hypothesis_every_failure_is_raised_unchanged():
    program = Program(*(Serve((n, n + 1, n + 2)) for n in range(8)))
    for _ in range(3):
        with pytest.raises(EventRulesBroken):
            play(failing_harness(), program, most_shrink_events=1)


def test_programs_that_pass_are_not_limited():
    @settings(database=None, derandomize=True, deadline=None, max_examples=30)
    @given(traffic())
    def test(program):
        play(RouterHarness(EngineProfile(block_size=4, num_blocks=8)), program, most_shrink_events=1)

    test()


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match=r"^play: most_shrink_events must be an integer of at least 1, got 0$"):
        play(failing_harness(), Program(Prefill("r0")), most_shrink_events=0)
