"""Passes that only decode: the requests that sleep through them, and the ends of the passes.

Theory of operation. A running request whose prompt is computed generates a token in each pass, and mostly touches no
block. The number of such quiet passes is known (`quiet_tokens`). So the request sleeps until the first pass that does
more, or until it wakes for another reason: it is preempted, called off or inspected. Only the ends of slept passes are
kept, in one list for all requests; each end is one token of the request. So the cost of a run depends on requests and
blocks, not on tokens.

The duration of such passes: Dynamo's default model depends only on the tokens in use. These have no more values than an
engine has tokens, and a trace meets the same values many times. So durations are kept in an array by tokens, 8 bytes
each, which equal engines share. The tokens of the passes of a plan grow by a constant step, so their durations are a
slice of the array with this step. An unknown duration is 0 there (no pass takes 0 ms), and is computed one by one. Any
other model is called each time, because it also depends on the mean length, or, if it is the user's, on anything. Sums
are made pass by pass, as in the original, so all times are equal to the bit, however they are found.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from heapq import heappop, heappush
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from pytest_kvmock.engines.schedulers.performance import PolynomialModel, rounded_ms

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.engines.schedulers.performance import PerformanceModel

_ENDS_KEPT: Final = 2**16
"""Approximate number of ends that are kept before all requests are woken."""

_KEPT: Final = 2**21
"""Maximum number of durations that are kept, 16 MB."""

_TABLES: Final[WeakValueDictionary[tuple[PerformanceModel, int, float], array[float]]] = WeakValueDictionary()
"""The durations by model, tokens of all blocks and speedup, as long as an engine with these exists."""

_AT_ONCE: Final = 64
"""Number of passes that are looked up between two checks of the time."""


place_of: Final = attrgetter("place")
"""The place of a request among the running ones."""


class Calendar:
    """The sleeping requests of one scheduler, by the pass in which each is due.

    Attributes:
        passes: number of passes that were run.
    """

    __slots__ = ("_due", "_ends", "_first", "_lengths", "_since", "_slept", "passes")

    def __init__(self) -> None:
        self.passes = 0
        self._ends: list[float] = []
        self._first = 0  # number of the pass of the first end
        self._since: dict[ScheduledRequest, int] = {}
        # (pass, number of the sleep, request); a stale entry of a request that woke early may end its next sleep early.
        self._due: list[tuple[int, int, ScheduledRequest]] = []
        self._slept = 0
        self._lengths = 0  # sum over the sleepers: each length less the number of passes when it fell asleep

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, request: ScheduledRequest) -> bool:
        return request in self._since

    @property
    def sleepers(self) -> list[ScheduledRequest]:
        """All sleeping requests, in the order in which they run."""
        return sorted(self._since, key=place_of)

    @property
    def tokens(self) -> int:
        """Sum of the lengths of all sleepers, including the tokens of slept passes."""
        return self._lengths + self.passes * len(self._since)

    @property
    def quiet_passes(self) -> int:
        """Number of passes before the first request is due."""
        return self._due[0][0] - self.passes if self._since else 0

    @property
    def is_full(self) -> bool:
        """Whether all should be woken, because too many ends are kept."""
        return len(self._ends) > _ENDS_KEPT

    def sleep(self, request: ScheduledRequest, passes: int) -> None:
        """Let a request sleep through `passes` passes, at least one."""
        now = self.passes
        self._since[request] = now
        self._lengths += request.prompt_tokens + request.generated_tokens - now
        self._slept += 1
        heappush(self._due, (now + passes, self._slept, request))

    def wake(self, request: ScheduledRequest) -> list[float]:
        """Wake a request; return the ends of the passes that it slept through."""
        since = self._since.pop(request)
        self._lengths -= request.prompt_tokens + request.generated_tokens - since
        missed = self._ends[since - self._first :]
        if not self._since:
            self._ends.clear()
            self._due.clear()
        return missed

    def due(self, passes: int) -> list[ScheduledRequest]:
        """Return the requests that are due after `passes` more passes, in running order; the caller wakes each."""
        due, now = self._due, self.passes + passes
        found: dict[ScheduledRequest, None] = {}
        while due and due[0][0] <= now:
            request = heappop(due)[2]
            if request in self._since:
                found[request] = None
        return sorted(found, key=place_of) if len(found) > 1 else list(found)

    def ran(self, ends: list[float]) -> None:
        """Record passes that were run, by their ends."""
        if self._since:
            if not self._ends:
                self._first = self.passes
            self._ends += ends
        self.passes += len(ends)


class DecodeTimes:
    """The durations of decode passes.

    Args:
        model: the model that predicts them.
        total_tokens: tokens of all blocks.
        speedup: divisor of times.
    """

    __slots__ = ("_kept", "_model", "_speedup", "_total")

    def __init__(self, model: PerformanceModel, total_tokens: int, speedup: float) -> None:
        self._model, self._total, self._speedup = model, total_tokens, speedup
        # Durations by tokens, 0 if not computed yet; it ends behind the largest known one. None: they are not kept.
        self._kept: array[float] | None = None
        if type(model) is PolynomialModel:
            self._kept = _TABLES.setdefault((model, total_tokens, speedup), array("d"))

    def ms(self, tokens: int, count: int) -> float:
        """Return the duration of a pass.

        Args:
            tokens: sum of the lengths of the requests that get a token.
            count: number of these requests.
        """
        return rounded_ms(self._model.decode_ms(tokens, self._total, tokens // count), self._speedup)

    def ends(self, now_ms: float, until_ms: float, lengths: range) -> list[float]:
        """Return the ends of consecutive passes that start before `until_ms`.

        Args:
            now_ms: start of the first pass; before `until_ms`.
            until_ms: no pass starts at this time or later.
            lengths: for each pass the sum of its requests' lengths; the step is the number of requests.
        """
        ends: list[float] = []
        end = now_ms
        for at in range(0, len(lengths), _AT_ONCE):
            some = lengths[at : at + _AT_ONCE]
            if self._kept is None:
                for tokens in some:
                    if end >= until_ms:
                        return ends
                    end += self.ms(tokens, lengths.step)
                    ends.append(end)
                continue
            found = list(accumulate(self._known(some), initial=end))
            # The first pass starts at the first of these times, the next when it ends, and so on.
            started = bisect_left(found, until_ms)
            ends += found[1 : started + 1]
            if started < len(found):
                break
            end = found[-1]
        return ends

    def _known(self, lengths: range) -> array[float]:
        """Return the durations of passes by the sum of their requests' lengths."""
        kept, last = self._kept, lengths[-1]
        assert kept is not None
        if last >= _KEPT:
            return array("d", [self.ms(tokens, lengths.step) for tokens in lengths])
        if last >= len(kept):
            kept.frombytes(bytes(8 * (max(last + 1, 2 * len(kept)) - len(kept))))
        found = kept[lengths.start : last + 1 : lengths.step]
        if 0.0 in found:
            for place, tokens in enumerate(lengths):
                if not found[place]:
                    found[place] = kept[tokens] = self.ms(tokens, lengths.step)
        return found
