"""The load message of an SGLang rank, the times at which it is sent, and a reading of it, for any transport.

Source: `disaggregation/kv_events.py` of 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple, Self

from pytest_kvmock.values.checks import check_integer

HEARTBEAT_S: Final = 1.0
"""Seconds after which a rank repeats an unchanged load."""

DEFAULT_INTERVAL: Final = 15
"""Every 15th call that is not forced publishes (`--load-snapshot-publish-interval`)."""

FIRST_VERSION: Final = 6
"""Entries of a message of the first version."""

_TAG: Final = "LoadStat"


@dataclass(frozen=True, slots=True)
class LoadStat:
    """The load of one rank, in the order of the wire.

    Attributes:
        running: requests that run.
        waiting: requests that wait.
        used_tokens: tokens of the pool that are in use; cached tokens that no request holds count as free.
        max_tokens: tokens that the pool has room for.
        rank: the rank; a stream's rank is known by its port, not by this field.
        waiting_uncached_tokens: an estimate of the tokens that waiting requests have to compute.
        total_tokens: tokens in use and queued.
        max_running: the most requests that may run.
        prefill_tokens: prompt tokens computed since the start.
        prefill_us: microseconds spent on these tokens.
    """

    running: int
    waiting: int
    used_tokens: int
    max_tokens: int
    rank: int = 0
    waiting_uncached_tokens: int = 0
    total_tokens: int = 0
    max_running: int = 0
    prefill_tokens: int = 0
    prefill_us: int = 0

    @classmethod
    def of(cls, message: object) -> Self:
        """Read a decoded payload by position: the first version had six entries, and entries of later versions are
        ignored.

        Raises:
            ValueError: the message is not an array with this tag and at least six entries, or an entry is not an
                integer.
        """
        if not isinstance(message, Sequence) or isinstance(message, str | bytes) or len(message) < FIRST_VERSION:
            raise ValueError(f"a {_TAG} is an array of at least {FIRST_VERSION} entries, got {message!r:.80}")
        if message[0] != _TAG:
            raise ValueError(f"a {_TAG} begins with its tag, got {message[0]!r:.80}")
        values = list(message[1 : 1 + len(fields(cls))])
        for value in values:
            if type(value) is not int:
                raise ValueError(f"a {_TAG} has integers alone, got {value!r:.80}")
        return cls(*values)

    @property
    def entries(self) -> list[Any]:
        """The form on the wire: the tag and ten numbers."""
        return [_TAG, *(getattr(self, field.name) for field in fields(self))]


class LoadPublisher:
    """Decides for one rank when to publish its load, and numbers the messages.

    Args:
        interval: every n-th call that is not forced publishes.
    """

    __slots__ = ("_calls", "_interval", "_last", "_last_s", "number")

    def __init__(self, interval: int = DEFAULT_INTERVAL) -> None:
        check_integer("interval", interval, 1)
        self._interval = interval
        self._calls = 0
        self._last: LoadStat | None = None
        self._last_s = 0.0
        self.number = 0

    def is_due(self, *, force: bool = False) -> bool:
        """Count a call; return whether the load is to be read and published."""
        self._calls += 1
        if not force and self._calls < self._interval:
            return False
        self._calls = 0
        return True

    def next_number(self, stat: LoadStat, now_s: float) -> int | None:
        """Return the number of a load message; None if the load is unchanged within the heartbeat, so it is not
        sent.
        """
        if stat == self._last and now_s - self._last_s < HEARTBEAT_S:
            return None
        number, self.number = self.number, self.number + 1
        return number

    def sent(self, stat: LoadStat, now_s: float) -> None:
        """Note that a load was sent. A failed message also uses its number."""
        self._last, self._last_s = stat, now_s


class LoadReading(NamedTuple):
    """The last reading of a rank's load.

    Attributes:
        stat: the load.
        number: the number of the message; for polled loads, the number of polls answered before.
        age_ms: time since it was sent or polled, in milliseconds.
    """

    stat: LoadStat
    number: int
    age_ms: float

    @property
    def is_fresh(self) -> bool:
        """Whether it is at most three heartbeats old, which allows for a lost message."""
        return self.age_ms <= 3000.0 * HEARTBEAT_S
