"""Virtual time: durations in whole nanoseconds, moments in milliseconds.

There is no clock here. A moment is a number of milliseconds that the caller passes, as in Dynamo's mocker, whose sums are repeated
to the bit: a duration is rounded to whole nanoseconds when it is made, and once more when a speedup divides it
(`Duration::from_secs_f64`: exact, ties to even); it is added to a moment as its seconds times 1,000.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, repeat
from typing import Final

_NS: Final = 10**9
_NEAR_TIE: Final = 1e-3


def whole_nanoseconds(seconds: float) -> int:
    """Round to whole nanoseconds, exactly, ties to even.

    Raises:
        ValueError: the number is negative, infinite or NaN.
    """
    if not 0 <= seconds < math.inf:
        raise ValueError(f"a duration must be a finite number of seconds of at least 0, got {seconds!r}")
    near = seconds * _NS
    if near < 2**40 and abs(near % 1.0 - 0.5) > _NEAR_TIE:  # the product is off by far less
        return round(near)
    numerator, denominator = seconds.as_integer_ratio()
    whole, rest = divmod(numerator * _NS, denominator)
    if 2 * rest > denominator or (2 * rest == denominator and whole & 1):
        whole += 1
    return whole


def _seconds(nanoseconds: int) -> float:
    """The seconds of a duration (`Duration::as_secs_f64`): the whole ones, and the rest divided."""
    whole, rest = divmod(nanoseconds, _NS)
    return whole + rest / _NS


@lru_cache(maxsize=4096)
def rounded_ms(ms: float, speedup: float = 1.0) -> float:
    """Round a duration, divide it by a speedup, and round it again.

    Args:
        ms: the duration in milliseconds.
        speedup: by what it is divided; 0 divides by nothing (Dynamo's rule for `speedup_ratio`).

    Returns:
        Milliseconds, of which there are whole nanoseconds.

    Raises:
        ValueError: the duration is negative, infinite or NaN.
    """
    nanoseconds = whole_nanoseconds(ms / 1000)
    if speedup > 0:
        nanoseconds = whole_nanoseconds(_seconds(nanoseconds) / speedup)
    return _seconds(nanoseconds) * 1000.0


def moments(start_ms: float, step_ms: float, count: int) -> list[float]:
    """Return the ends of `count` passes of one duration, summed one by one as if each was a pass of its own."""
    ends = accumulate(repeat(step_ms, count), initial=start_ms)
    next(ends)
    return list(ends)
