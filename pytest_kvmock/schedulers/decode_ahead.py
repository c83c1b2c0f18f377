"""Many passes that only decode in one go, blocks included, for an engine that nobody watches.

Theory of operation. While all requests run and none is to end, a pass gives each of them a token. Most tokens lie inside a
block and change nothing but numbers; the others open a block or fill one, and these have to meet the block manager in the
order in which the passes would do it: pass by pass, in a pass in the order of the running requests. So the tokens of all passes
are generated first, request by request (each has a source of its own), then the blocks are opened and filled in that order, and
the numbers are moved on at the end. What it costs is by request and by block, and not by token.

Nobody may be preempted or admitted meanwhile. As nothing is freed, blocks run short exactly when more of them are to be opened
than there are, which is counted before; and a request that could not be admitted before cannot be as room shrinks. How long the
passes take is known before, too, by the lengths of the requests (`DecodeTimes`).

It needs an engine that allocates a block when the first of its tokens is computed, so that a token by itself needs none; and
nobody who receives events, as who does could tell that other engines on the same clock have not come so far yet.

How long passes take that only decode: Dynamo's default model goes by nothing but the tokens in use, of which there are as many values as an
engine has tokens, and a trace meets the same ones again and again. So durations are kept in an array by tokens, 8 bytes each,
which engines alike share, and the passes of a plan, whose tokens grow by the same number each, are a slice of it with that step.
What is not known yet is 0 there (no pass takes so little), and is asked for one by one. A model of another kind is asked each
time, as it goes by the mean length too, and a user's own may go by anything. Sums are made pass by pass, as the original
makes them: so all moments are the same to the bit, however they are found.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from pytest_kvmock.schedulers.performance import PolynomialModel, rounded_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_kvmock.drivers.driver import PoolSchedulerDriver
    from pytest_kvmock.schedulers.performance import PerformanceModel
    from pytest_kvmock.schedulers.scheduler import ScheduledRequest


def passes_that_fit(driver: PoolSchedulerDriver, running: Sequence[ScheduledRequest], most: int) -> int:
    """Return how many passes find a block for each token that they compute.

    Args:
        driver: brings the requests to the block manager.
        running: all requests; of each the last token is to be computed.
        most: so many passes are asked for.
    """
    room, need = driver.room(), driver.need

    def opened(passes: int) -> int:
        return sum(need(request.state, len(request) + passes - 1) for request in running)

    if opened(most) <= room:
        return most
    return bisect_right(range(1, most), room, key=opened)


def decode_ahead(driver: PoolSchedulerDriver, running: Sequence[ScheduledRequest], ends: list[float]) -> None:
    """Run so many passes, which fit.

    Args:
        driver: as above.
        running: all requests, in their order.
        ends: when the passes end.
    """
    count, size = len(ends), driver.manager.block_size
    steps: list[tuple[int, int]] = []
    for place, request in enumerate(running):
        length = len(request)
        driver.generate_ahead(request.state, request.next_tokens(count))
        for first in {-length % size, (1 - length) % size}:  # a pass that fills a block, and one that opens the next
            steps += zip(range(first, count, size), repeat(place))
    steps.sort()
    allocate = driver.allocate
    for done, place in steps:
        request = running[place]
        allocate(request.state, len(request) + done)
    for request in running:
        driver.step_inside(request.state, len(request) + count - 1)
        request.generated_tokens += count
        request.computed_tokens += count
        request.token_ms += ends


_KEPT: Final = 2**21
"""So many durations are kept at most, 16 MB."""

_TABLES: Final[WeakValueDictionary[tuple[PerformanceModel, int, float], array[float]]] = WeakValueDictionary()
"""The durations by model, tokens of all blocks and speedup, while an engine that has these is there."""

_AT_ONCE: Final = 64
"""So many passes are looked up before anybody looks at the time."""


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
