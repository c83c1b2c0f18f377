"""A link between two tiers. All transfers under way share its bandwidth equally (processor sharing).

Pure arithmetic on times that the caller passes, in milliseconds; equal to the last digit to `BandwidthSharingModel` of
dynamo-mocker 1.2.1. So the order of operations below matters: `smallest / (rate / count)` must not be rewritten
algebraically.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Final

from pytest_kvmock.values.checks import check_integer, check_number, check_time

_EARLY: Final = 1e-9
"""A transfer counts as done this many ms before its end, by time and not by bytes (the original's rule)."""

DEFAULT_GBPS: Final = 14.0
"""Bandwidth of each direction, in GB/s."""

BYTES_PER_MS: Final = 1e6
"""Bytes that one GB/s moves in a millisecond."""


class Link:
    """One direction of a connection: each of n transfers under way gets 1 / n of the bandwidth.

    Args:
        gbps: bandwidth in GB/s (10**9 bytes); 0 or less is infinite, as in the original.
        ids: source of transfer ids; links that share it never give the same id.

    Raises:
        ValueError: `gbps` is not a finite number.

    Attributes:
        gbps: as given; 0 is infinite.
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
        """Number of transfers under way."""
        return len(self._transfers)

    def start(self, now: float, num_bytes: int) -> int:
        """Start a transfer, and return its id.

        It does not advance the transfers under way: call `advance` first. A time before the link's own time is replaced
        by the link's time.

        Raises:
            ValueError: the time is not a finite number of at least 0, or the bytes are not an integer of at least 0.
        """
        now = check_time(now)
        check_integer("bytes", num_bytes, 0, " (bytes of a transfer)")
        check_number("bytes", num_bytes, unit=" (bytes of a transfer)")
        self._last = max(now, self._last)
        number = next(self._ids)
        self._transfers.append((number, float(num_bytes) if self._rate < math.inf else 0.0))
        return number

    def advance(self, now: float) -> list[int]:
        """Move the link's time forward; return the ids of finished transfers, in the order in which they finished.

        A time before the link's own changes nothing.

        Raises:
            ValueError: the time is not a finite number of at least 0.
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
            # Removed as in the original, because this decides which of two equal transfers comes first.
            last = transfers.pop()
            if index < len(transfers):
                transfers[index] = last
        self._last = now
        return done

    def earliest(self) -> float | None:
        """Return the time at which the next transfer finishes if no other starts; None if none is under way."""
        return self._last + self._next()[1] if self._transfers else None

    def cancel(self) -> None:
        """Drop all transfers."""
        self._transfers.clear()

    def _next(self) -> tuple[int, float]:
        """Return the index of the transfer that finishes next (the first among equal ones), and the ms until then."""
        left = [remaining for _, remaining in self._transfers]
        smallest = min(left)
        return left.index(smallest), smallest / (self._rate / len(left))

    def _move(self, each: float) -> None:
        """Subtract `each` bytes from every transfer; `each` is not a number if the bandwidth is infinite and no time
        passed.
        """
        if each > 0 and self._rate < math.inf:
            self._transfers[:] = [(number, max(remaining - each, 0.0)) for number, remaining in self._transfers]


class HostLinks:
    """The links of one SGLang worker to its host and back. Each copies one group after the other.

    Args:
        gbps: bandwidth of each, in GB/s (10**9 bytes); 0 is infinite.
        block_bytes: bytes of a block.

    Attributes:
        gbps: as given.
        block_bytes: as given.
    """

    __slots__ = ("block_bytes", "gbps")

    def __init__(self, gbps: float, block_bytes: int) -> None:
        self.gbps = gbps
        self.block_bytes = block_bytes

    def __repr__(self) -> str:
        return f"<HostLinks of {self.gbps} GB/s, {self.block_bytes} bytes a block>"

    def ms(self, blocks: int) -> float:
        """Return the duration of a copy of `blocks` blocks in ms, without other copies."""
        return blocks * self.block_bytes / (self.gbps * BYTES_PER_MS) if self.gbps else 0.0
