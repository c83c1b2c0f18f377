"""Mean, percentiles and deviation of many values, by Dynamo's keys: exact ones, and those that 1.6.1 sketches."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, repeat
from operator import mul, sub
from typing import Final

_MOST_SORTED: Final = 100_000
_PERCENTILES: Final = {"median": 50.0, "p75": 75.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}

POINTS: Final = ("mean", *_PERCENTILES, "max", "min", "std")
"""What is calculated of many values."""


def statistics(
    values: Sequence[float], counted: Counter[float] | None = None, percentiles: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return mean, least, greatest, exact percentiles and deviation of values (`POINTS`); 0 where there are none.

    A percentile is the value at `round((n - 1) * q)` of the n sorted ones (half up), a standard deviation that of the population.

    Args:
        values: the values, in their order.
        counted: how often each is there, where that is known.
        percentiles: these, in place of exact ones.
    """
    count = len(values)
    if not count:
        return dict.fromkeys(POINTS, 0.0)
    # Gaps between tokens are millions, of a few thousand values: these are counted, as a sorted list would take much memory.
    tally = (Counter(values) if counted is None else counted) if count > _MOST_SORTED else None
    if tally is not None and len(tally) > _MOST_SORTED:
        tally = None
    out = {"mean": sum(values) / count, "min": min(counted or values), "max": max(counted or values)}
    ordered: Sequence[float] = [] if tally is None else sorted(tally)
    counts = None if tally is None else [tally[each] for each in ordered]
    out |= _exact(ordered or sorted(values), counts, count) if percentiles is None else percentiles
    out["std"] = _deviation(values if counts is None else ordered, counts)
    return out


def _exact(ordered: Sequence[float], counts: Sequence[int] | None, count: int) -> dict[str, float]:
    """Return the percentiles of so many values, the different ones in order; `counts`: how often each is there; None: once."""
    upto = None if counts is None else list(accumulate(counts))
    places = {key: math.floor((count - 1) * (percent / 100) + 0.5) for key, percent in _PERCENTILES.items()}
    return {key: ordered[place if upto is None else bisect_right(upto, place)] for key, place in places.items()}


def _deviation(values: Sequence[float], counts: Sequence[int] | None = None) -> float:
    """Return the standard deviation of the population, by differences from one value, which lose no digits.

    Args:
        values: the values.
        counts: how often each is there; None: once.
    """
    pivot, count = values[0], len(values) if counts is None else sum(counts)
    apart = array("d", map(sub, values, repeat(pivot)))
    weighted = apart if counts is None else array("d", map(mul, apart, counts))
    mean = math.fsum(weighted) / count
    return math.sqrt(max(0.0, math.fsum(map(mul, weighted, apart)) / count - mean * mean))


def sketched_statistics(values: Sequence[float], counted: Counter[float] | None = None) -> dict[str, float]:
    """Return the same with percentiles that are sketched; mean and deviation, least and greatest value are not."""
    counted = Counter(values) if counted is None else counted
    return statistics(values, counted, _sketched(counted) if counted else None)


# DDSketch (Masson, Rim, Lee, 2019) counts a value in a bucket whose bounds grow by a fixed factor, so that a percentile is
# within 0.1 % of a value that was there, and may be above the greatest. Rank and rounding are those of dynamo-mocker 1.6.1.

_ACCURACY: Final = 0.001
_GAMMA: Final = 1.0 + 2.0 * _ACCURACY / (1.0 - _ACCURACY)
_PER_KEY: Final = 1.0 / math.log1p(2.0 * _ACCURACY / (1.0 - _ACCURACY))
_LEAST: Final = 1e-300
"""Values below count as 0."""


def _sketched(counted: Counter[float]) -> dict[str, float]:
    """Return the percentiles of values of at least 0, by how often each is there."""
    count = counted.total()
    if count == 1:
        return dict.fromkeys(_PERCENTILES, next(iter(counted)))
    ceil, log = math.ceil, math.log
    buckets: Counter[int | None] = Counter()
    for value, times in counted.items():
        buckets[ceil(log(value) * _PER_KEY) if value > _LEAST else None] += times
    zeros = buckets.pop(None, 0)
    ordered = sorted(key for key in buckets if key is not None)
    out: dict[str, float] = {}
    seen, at = zeros, -1
    for name, percent in _PERCENTILES.items():  # which rise
        element = _element(count, percent)
        while seen <= element:
            at += 1
            seen += buckets[ordered[at]]
        out[name] = 0.0 if element < zeros else math.exp(ordered[at] * (1.0 / _PER_KEY)) * (2.0 / (1.0 + _GAMMA))
    return out


def _element(count: int, percent: float) -> int:
    """Which of so many values in order, from 0, a percentile looks for."""
    span = count - 1
    rank = math.floor(span * percent / 100.0 + 0.5)
    quantile = 1.0 if not span or rank >= span else (rank + 0.5) / span
    return int(quantile * span)
