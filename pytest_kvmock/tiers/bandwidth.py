"""A link between two tiers, whose bandwidth all transfers under way share equally (processor sharing).

Pure arithmetic on times that the caller passes, in milliseconds; equal to the last digit to `BandwidthSharingModel` of
dynamo-mocker 1.2.1. So the order of operations below matters: `smallest / (rate / count)`, and never its equals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Final

from pytest_kvmock.checks import check_integer, check_number, check_time

_EARLY: Final = 1e-9
"""So many ms before its time a transfer is done; on the time, not on the bytes (the original's rule)."""

DEFAULT_GBPS: Final = 14.0
"""Bandwidth of each direction, in GB/s."""

BYTES_PER_MS: Final = 1e6
"""Bytes that one GB/s moves in a millisecond."""


class Link:
    """One direction of a connection: n transfers under way get a n-th of the bandwidth each.

    Args:
        gbps: bandwidth in GB/s (10**9 bytes); 0, or less as in the original, is infinite.
        ids: where the ids of its transfers come from; links that share it have different ones.

    Raises:
        ValueError: `gbps` is no finite number.

    Attributes:
        gbps: as above; 0 is infinite.
    """

    __slots__ = ("_ids", "_last", "_rate", "_transfers", "gbps")

    def __init__(self, gbps: float, ids: Iterator[int] | None = None) -> None:
        if isinstance(gbps, int | float) and -math.inf < gbps < 0:
            gbps = 0.0
        self.gbps = check_number("a bandwidth", gbps, unit=" (GB/s; 0 is infinite)")
        self._rate = self.gbps * BYTES_PER_MS if self.gbps else math.inf
        self._ids = count() if ids is None else ids
        self._last = 0.0
        self._transfers: list[tuple[int, float]] = []  # (id, remaining bytes)

    @property
    def active(self) -> int:
        """How many transfers are under way."""
        return len(self._transfers)

    def start(self, now: float, num_bytes: int) -> int:
        """Start a transfer; returns its id.

        It credits no progress to those under way: advance first. A time before the link's own counts as that.

        Raises:
            ValueError: the time is no finite number of at least 0, or the bytes are no integer of at least 0.
        """
        now = check_time(now)
        check_integer("bytes", num_bytes, 0, " (bytes of a transfer)")
        check_number("bytes", num_bytes, unit=" (bytes of a transfer)")
        self._last = max(now, self._last)
        number = next(self._ids)
        self._transfers.append((number, float(num_bytes) if self._rate < math.inf else 0.0))
        return number

    def advance(self, now: float) -> list[int]:
        """Move the link's time forward; returns the ids of the transfers that finished, in that order.

        A time before the link's own changes nothing: bytes that were copied stay copied.

        Raises:
            ValueError: the time is no finite number of at least 0.
        """
        now = check_time(now)
        done: list[int] = []
        if now < self._last:
            return done
        transfers = self._transfers
        while transfers:
            index, duration = self._next()
            share = self._rate / len(transfers)
            if self._last + duration > now + _EARLY:
                self._move((now - self._last) * share)
                break
            self._move(duration * share)
            self._last += duration
            done.append(transfers[index][0])
            # As the original removes it: which of two equal ones comes first depends on it.
            last = transfers.pop()
            if index < len(transfers):
                transfers[index] = last
        self._last = now
        return done

    def earliest(self) -> float | None:
        """Return when the next transfer finishes if no other starts; None if none is under way."""
        return self._last + self._next()[1] if self._transfers else None

    def cancel(self) -> None:
        """Forget all transfers."""
        self._transfers.clear()

    def _next(self) -> tuple[int, float]:
        """Which transfer finishes next, the first of equal ones, and in how many ms."""
        left = [remaining for _, remaining in self._transfers]
        smallest = min(left)
        return left.index(smallest), smallest / (self._rate / len(left))

    def _move(self, each: float) -> None:
        """Subtract so many bytes from every transfer; not a number where the bandwidth is infinite and no time passed."""
        if each > 0 and self._rate < math.inf:
            self._transfers[:] = [(number, max(remaining - each, 0.0)) for number, remaining in self._transfers]
