"""Percentiles by DDSketch, as Dynamo's replay computes those of gaps between tokens since 1.6.

A value is counted in a bucket whose bounds grow by a fixed factor, so that a percentile is within 0.1 % of a value
that was there, and may be above the greatest. (Masson, Rim, Lee: "DDSketch", 2019; the rules of rank and
rounding are those of dynamo-mocker 1.6.1.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

ACCURACY: Final = 0.001

_GAMMA: Final = 1.0 + 2.0 * ACCURACY / (1.0 - ACCURACY)
_PER_KEY: Final = 1.0 / math.log1p(2.0 * ACCURACY / (1.0 - ACCURACY))
_LEAST: Final = 1e-300
"""Values below count as 0."""


def sketched(values: Iterable[float], percentiles: Mapping[str, float]) -> dict[str, float]:
    """Return percentiles of values of at least 0, by name.

    Args:
        values: at least one.
        percentiles: from 0 to 100, by name.
    """
    values = list(values)
    count = len(values)
    if count == 1:
        return dict.fromkeys(percentiles, values[0])
    ceil, log = math.ceil, math.log
    buckets = Counter(ceil(log(value) * _PER_KEY) if value > _LEAST else None for value in values)
    zeros = buckets.pop(None, 0)
    ordered = sorted(key for key in buckets if key is not None)
    wanted = sorted((_element(count, share), name) for name, share in percentiles.items())
    out: dict[str, float] = {}
    seen, at = zeros, -1
    for element, name in wanted:
        while seen <= element:
            at += 1
            seen += buckets[ordered[at]]
        out[name] = 0.0 if element < zeros else math.exp(ordered[at] * (1.0 / _PER_KEY)) * (2.0 / (1.0 + _GAMMA))
    return {name: out[name] for name in percentiles}


def _element(count: int, percentile: float) -> int:
    """Which of so many values in order, from 0, a percentile looks for."""
    span = count - 1
    rank = math.floor(span * percentile / 100.0 + 0.5)
    quantile = 1.0 if not span or rank >= span else (rank + 0.5) / span
    return int(quantile * span)
