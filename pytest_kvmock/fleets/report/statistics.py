"""Mean, percentiles and deviation of many values, by Dynamo's keys: exact, or sketched as in 1.6.1."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from operator import mul, sub
from typing import Final, TypeAlias

_MOST_SORTED: Final = 100_000
PERCENTILES: Final = {"median": 50.0, "p75": 75.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
"""The percentiles that are calculated, by their keys, in percent."""

POINTS: Final = ("mean", *PERCENTILES, "max", "min", "std")
"""The statistics of many values."""


Counted: TypeAlias = tuple[Sequence[float], Sequence[int]]
"""Values and their counts; a value may be listed more than once."""


def statistics(
    values: Sequence[float], counted: Mapping[float, int] | None = None, sketch: Sketch | None = None
) -> dict[str, float]:
    """Return mean, minimum, maximum, exact percentiles and deviation of values (`POINTS`); 0 if there are none.

    A percentile is the value at `round((n - 1) * q)` of the n sorted values (half up); the standard deviation is that
    of the population.

    Args:
        values: the values, in their order.
        counted: with a sketch, the result of `few_values` for them.
        sketch: a sketch of these values, whose percentiles replace the exact ones; the other statistics are exact.
    """
    count = len(values)
    if not count:
        return dict.fromkeys(POINTS, 0.0)
    tally = None
    # There are millions of gaps between tokens with a few thousand different values. They are counted, because a sorted
    # list would take much memory.
    if count > _MOST_SORTED:
        tally = Counter(values) if sketch is None else counted
        if tally is not None and len(tally) > _MOST_SORTED:
            tally = None
    out = {"mean": sum(values) / count, "min": min(tally or values), "max": max(tally or values)}
    ordered: Sequence[float] = [] if tally is None else sorted(tally)
    counts = None if tally is None else [tally[each] for each in ordered]
    out |= _exact(ordered or sorted(values), counts, count) if sketch is None else sketch.percentiles()
    out["std"] = _deviation(values if counts is None else ordered, counts)
    return out


def few_values(parts: Sequence[Counted]) -> Mapping[float, int] | None:
    """Return the count of each value in all parts together; None if there are too many values for counting to pay
    off.
    """
    known: set[float] = set()
    for values, _ in parts:
        known.update(values)
        if len(known) > _MOST_SORTED:
            return None
    whole: Counter[float] = Counter()
    for values, times in parts:
        for value, count in zip(values, times, strict=True):
            whole[value] += count
    return whole


def _exact(ordered: Sequence[float], counts: Sequence[int] | None, count: int) -> dict[str, float]:
    """Return the percentiles of `count` values. `ordered` has the different values in order, `counts` the count of
    each; None: one each.
    """
    upto = None if counts is None else list(accumulate(counts))
    places = {key: math.floor((count - 1) * (percent / 100) + 0.5) for key, percent in PERCENTILES.items()}
    return {key: ordered[place if upto is None else bisect_right(upto, place)] for key, place in places.items()}


def _deviation(values: Sequence[float], counts: Sequence[int] | None = None) -> float:
    """Return the standard deviation of the population. It is computed from differences to one value, which keeps all
    digits.

    Args:
        values: the values.
        counts: the count of each value; None: one each.
    """
    pivot, count = values[0], len(values) if counts is None else sum(counts)
    apart = array("d", map(sub, values, repeat(pivot)))
    weighted = apart if counts is None else array("d", map(mul, apart, counts))
    mean = math.fsum(weighted) / count
    return math.sqrt(max(0.0, math.fsum(map(mul, weighted, apart)) / count - mean * mean))


# DDSketch (Masson, Rim, Lee, 2019) counts values in buckets whose bounds grow by a fixed factor. So a percentile is
# within 0.1 % of a real value, and may exceed the maximum. Rank and rounding are those of dynamo-mocker 1.6.1.

_ACCURACY: Final = 0.001
_GAMMA: Final = 1.0 + 2.0 * _ACCURACY / (1.0 - _ACCURACY)
_PER_KEY: Final = 1.0 / math.log1p(2.0 * _ACCURACY / (1.0 - _ACCURACY))
_LEAST: Final = 1e-300
"""Smaller values count as 0."""


class Sketch:
    """Percentiles of values of at least 0, from the counts of buckets; sketches can be added.

    Args:
        values: the values.
        times: the count of each value.
    """

    __slots__ = ("_buckets", "_first", "_zeros", "count")

    def __init__(self, values: Sequence[float] = (), times: Sequence[int] = ()) -> None:
        self.count = sum(times)
        self._first = values[0] if values else 0.0
        self._zeros = 0
        if values and min(values) <= _LEAST:
            self._zeros = sum(count for value, count in zip(values, times, strict=True) if value <= _LEAST)
            kept = [(value, count) for value, count in zip(values, times, strict=True) if value > _LEAST]
            values, times = [value for value, _ in kept], [count for _, count in kept]
        buckets: dict[int, int] = {}
        known = buckets.get
        for key, count in zip(map(math.ceil, map(mul, map(math.log, values), repeat(_PER_KEY))), times, strict=True):
            buckets[key] = known(key, 0) + count
        self._buckets = buckets

    @classmethod
    def of_all(cls, sketches: Iterable[Sketch]) -> Sketch:
        """Return one sketch of the values of several sketches."""
        whole = cls()
        for each in sketches:
            whole.add(each)
        return whole

    def add(self, other: Sketch) -> None:
        """Add the values of another sketch."""
        if not self.count:
            self._first = other._first
        self.count += other.count
        self._zeros += other._zeros
        buckets = self._buckets
        for key, count in other._buckets.items():
            buckets[key] = buckets.get(key, 0) + count

    def percentiles(self) -> dict[str, float]:
        """Return the percentiles by key; 0 if there are no values."""
        count, zeros, buckets = self.count, self._zeros, self._buckets
        if count < 2:
            return dict.fromkeys(PERCENTILES, self._first)
        ordered = sorted(buckets)
        out: dict[str, float] = {}
        seen, at = zeros, -1
        for name, percent in PERCENTILES.items():  # percentiles rise
            element = _element(count, percent)
            while seen <= element:
                at += 1
                seen += buckets[ordered[at]]
            out[name] = 0.0 if element < zeros else math.exp(ordered[at] * (1.0 / _PER_KEY)) * (2.0 / (1.0 + _GAMMA))
        return out


def _element(count: int, percent: float) -> int:
    """Return the index of a percentile among `count` sorted values."""
    span = count - 1
    rank = math.floor(span * percent / 100.0 + 0.5)
    quantile = 1.0 if not span or rank >= span else (rank + 0.5) / span
    return int(quantile * span)
