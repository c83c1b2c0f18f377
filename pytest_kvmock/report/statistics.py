"""Mean, percentiles and deviation of many values, by Dynamo's keys: exact ones, and those that 1.6.1 sketches."""

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
"""What is calculated of many values."""


Counted: TypeAlias = tuple[Sequence[float], Sequence[int]]
"""Values, and how often each of them is there; one may stand there more than once."""


def statistics(
    values: Sequence[float], counted: Mapping[float, int] | None = None, sketch: Sketch | None = None
) -> dict[str, float]:
    """Return mean, least, greatest, exact percentiles and deviation of values (`POINTS`); 0 where there are none.

    A percentile is the value at `round((n - 1) * q)` of the n sorted ones (half up), a standard deviation that of the population.

    Args:
        values: the values, in their order.
        counted: with a sketch, what `few_values` returns of them.
        sketch: of these values: its percentiles, in place of exact ones; all else is exact.
    """
    count = len(values)
    if not count:
        return dict.fromkeys(POINTS, 0.0)
    tally = None
    # Gaps between tokens are millions, of a few thousand values: these are counted, as a sorted list would take much memory.
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
    """Return how often each value is there, of all parts together; None: they are too many for a gain."""
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
    """Return the percentiles of so many values, the different ones in order; `counts`: how often each is there; None: once."""
    upto = None if counts is None else list(accumulate(counts))
    places = {key: math.floor((count - 1) * (percent / 100) + 0.5) for key, percent in PERCENTILES.items()}
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


# DDSketch (Masson, Rim, Lee, 2019) counts a value in a bucket whose bounds grow by a fixed factor, so that a percentile is
# within 0.1 % of a value that was there, and may be above the greatest. Rank and rounding are those of dynamo-mocker 1.6.1.

_ACCURACY: Final = 0.001
_GAMMA: Final = 1.0 + 2.0 * _ACCURACY / (1.0 - _ACCURACY)
_PER_KEY: Final = 1.0 / math.log1p(2.0 * _ACCURACY / (1.0 - _ACCURACY))
_LEAST: Final = 1e-300
"""Values below count as 0."""


class Sketch:
    """Percentiles of values of at least 0, by how many fall into each bucket; sketches add up.

    Args:
        values: the values.
        times: how often each is there.
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
        """Return the sketch of all values of several."""
        whole = cls()
        for each in sketches:
            whole.add(each)
        return whole

    def add(self, other: Sketch) -> None:
        """Take the values of another sketch, too."""
        if not self.count:
            self._first = other._first
        self.count += other.count
        self._zeros += other._zeros
        buckets = self._buckets
        for key, count in other._buckets.items():
            buckets[key] = buckets.get(key, 0) + count

    def percentiles(self) -> dict[str, float]:
        """Return the percentiles, each by its key; 0 where there are no values."""
        count, zeros, buckets = self.count, self._zeros, self._buckets
        if count < 2:
            return dict.fromkeys(PERCENTILES, self._first)
        ordered = sorted(buckets)
        out: dict[str, float] = {}
        seen, at = zeros, -1
        for name, percent in PERCENTILES.items():  # which rise
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
