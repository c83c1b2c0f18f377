"""Passes that only decode: which requests sleep through them and until when, and when the passes end.

Theory of operation. A request that runs and has its prompt behind it generates a token in each pass, and mostly
touches no block. How many passes that goes on is known (`quiet_tokens`), so it sleeps until the first pass that does
more, or until it wakes for another reason: it is preempted, called off or looked at. Of the passes it has slept through
only the ends are kept, in one row for all; it has a token for each. What a run costs is by request and by block, and
not by token.

How long such passes take: Dynamo's default model depends only on the tokens in use, of which there are as many values
as an engine has tokens, and a trace meets the same ones again and again. So durations are kept in an array by tokens, 8
bytes each, which engines alike share, and the passes of a plan, whose tokens grow by the same number each, are a slice
of it with that step. What is not known yet is 0 there (no pass takes so little), and is asked for one by one. A model
of another kind is asked each time, as it goes by the mean length too, and a user's own may use anything. Sums are made
pass by pass, as the original makes them: so all moments are the same to the bit, however they are found.
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
"""About how many passes' ends are kept before all requests are woken."""

_KEPT: Final = 2**21
"""Most durations that are kept, 16 MB."""

_TABLES: Final[WeakValueDictionary[tuple[PerformanceModel, int, float], array[float]]] = WeakValueDictionary()
"""The durations by model, tokens of all blocks and speedup, while an engine that has these is there."""

_AT_ONCE: Final = 64
"""Passes that are looked up between two looks at the time."""


place_of: Final = attrgetter("place")
"""The place of a request among those that run."""


class Calendar:
    """The running requests of one scheduler that sleep, by the pass that each is due in.

    Attributes:
        passes: how many passes have been run.
    """

    __slots__ = ("_due", "_ends", "_first", "_lengths", "_since", "_slept", "passes")

    def __init__(self) -> None:
        self.passes = 0
        self._ends: list[float] = []
        self._first = 0  # the number of the pass that the first of these is of
        self._since: dict[ScheduledRequest, int] = {}
        # (pass, number of the sleep, request): one that has woken before its time is woken again for nothing.
        self._due: list[tuple[int, int, ScheduledRequest]] = []
        self._slept = 0
        self._lengths = 0  # of all that sleep, each less the passes that had been run when it fell asleep

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, request: ScheduledRequest) -> bool:
        return request in self._since

    @property
    def sleepers(self) -> list[ScheduledRequest]:
        """All requests that sleep, in the order in which they run."""
        return sorted(self._since, key=place_of)

    @property
    def tokens(self) -> int:
        """The lengths of all that sleep together, tokens of the passes that they slept through included."""
        return self._lengths + self.passes * len(self._since)

    @property
    def quiet_passes(self) -> int:
        """How many passes are left before the first request is due."""
        return self._due[0][0] - self.passes if self._since else 0

    @property
    def is_full(self) -> bool:
        """Whether all should be woken, as too many ends are kept."""
        return len(self._ends) > _ENDS_KEPT

    def sleep(self, request: ScheduledRequest, passes: int) -> None:
        """Let a request sleep through `passes` passes, at least one."""
        now = self.passes
        self._since[request] = now
        self._lengths += request.prompt_tokens + request.generated_tokens - now
        self._slept += 1
        heappush(self._due, (now + passes, self._slept, request))

    def wake(self, request: ScheduledRequest) -> list[float]:
        """Wake a request that sleeps; returns when the passes ended that it has slept through."""
        since = self._since.pop(request)
        self._lengths -= request.prompt_tokens + request.generated_tokens - since
        missed = self._ends[since - self._first :]
        if not self._since:
            self._ends.clear()
            self._due.clear()
        return missed

    def due(self, passes: int) -> list[ScheduledRequest]:
        """Return those that are due when `passes` more passes are run, in their order; each is to be woken."""
        due, now = self._due, self.passes + passes
        found: dict[ScheduledRequest, None] = {}
        while due and due[0][0] <= now:
            request = heappop(due)[2]
            if request in self._since:
                found[request] = None
        return sorted(found, key=place_of) if len(found) > 1 else list(found)

    def ran(self, ends: list[float]) -> None:
        """Note passes that were run, by their ends."""
        if self._since:
            if not self._ends:
                self._first = self.passes
            self._ends += ends
        self.passes += len(ends)


class DecodeTimes:
    """Knows how long the decode of a pass takes.

    Args:
        model: predicts it.
        total_tokens: tokens of all blocks.
        speedup: what times are divided by.
    """

    __slots__ = ("_kept", "_model", "_speedup", "_total")

    def __init__(self, model: PerformanceModel, total_tokens: int, speedup: float) -> None:
        self._model, self._total, self._speedup = model, total_tokens, speedup
        # By tokens, those that were asked for, others 0; as long as the largest of them. None: they are not kept.
        self._kept: array[float] | None = None
        if type(model) is PolynomialModel:
            self._kept = _TABLES.setdefault((model, total_tokens, speedup), array("d"))

    def ms(self, tokens: int, count: int) -> float:
        """Return how long a pass takes.

        Args:
            tokens: lengths of the requests that get a token, together.
            count: how many these are.
        """
        return rounded_ms(self._model.decode_ms(tokens, self._total, tokens // count), self._speedup)

    def ends(self, now_ms: float, until_ms: float, lengths: range) -> list[float]:
        """Return when passes end that follow each other, as long as each starts before a moment.

        Args:
            now_ms: when the first starts; before `until_ms`.
            until_ms: the moment.
            lengths: of each pass the lengths of its requests together; its step is how many these are.
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
            # The first starts at the first of these moments, the next when it ends, and so on.
            started = bisect_left(found, until_ms)
            ends += found[1 : started + 1]
            if started < len(found):
                break
            end = found[-1]
        return ends

    def _known(self, lengths: range) -> array[float]:
        """Return the durations of passes by the lengths of their requests together."""
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
