"""Virtual time: whole nanoseconds, ties to even, and the order of summation."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock.engines.schedulers.performance import moments, rounded_ms, whole_nanoseconds


@pytest.mark.parametrize(
    ("seconds", "nanoseconds"),
    [
        (0.0, 0),
        (1.0, 1_000_000_000),
        (1e-9, 1),
        (2**-31, 0),  # 0.4656... ns
        (1.5 / 2**30, 1),  # 1.3969... ns
        (0.0000000005, 1),  # the nearest float is a little above half a nanosecond
        (2**-10 + 2**-12, 1_220_703),  # 1220703.125 ns
        (3 * 2**-10, 2_929_688),  # 2929687.5 ns: to even, which is up
        (2**-10, 976_562),  # 976562.5 ns: to even, which is down
    ],
)
def test_seconds_are_rounded_to_whole_nanoseconds_ties_to_even(seconds, nanoseconds):
    assert nanoseconds == whole_nanoseconds(seconds)


@given(st.floats(min_value=0, max_value=1e9))
def test_durations_are_rounded_exactly(seconds):
    assert round(Fraction(seconds) * 10**9) == whole_nanoseconds(seconds)


@pytest.mark.parametrize("seconds", [-1e-9, float("nan"), float("inf")])
def test_a_value_that_is_not_a_duration_is_refused(seconds):
    with pytest.raises(ValueError, match="a finite number of seconds of at least 0, got"):
        whole_nanoseconds(seconds)


@pytest.mark.parametrize(
    ("ms", "speedup", "rounded"),
    [
        (16.6237244, 1.0, 16.623724),
        (16.6237244, 0.0, 16.623724),  # 0 means no division
        (16.6237244, 2.0, 8.311862),
        (0.000003, 2.0, 0.000001),  # as a float, half of three nanoseconds is below 1.5
        (10.0, 3.0, 3.333333),
        (10.0, 0.5, 20.0),
    ],
)
def test_a_speedup_divides_the_rounded_time_and_rounds_it_again(ms, speedup, rounded):
    assert rounded == pytest.approx(rounded_ms(ms, speedup), abs=1e-12)


def test_the_times_of_passes_in_one_go_are_summed_one_by_one():
    ends, at = [], 0.1
    for _ in range(1000):
        at += 7.337134
        ends.append(at)
    assert ends == moments(0.1, 7.337134, 1000)
    assert ends[-1] != 0.1 + 1000 * 7.337134
    assert moments(5.0, 1.0, 0) == []
