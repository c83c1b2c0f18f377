"""When passes end that only decode: how long each takes by the lengths of its requests, looked up where that is known.

Theory of operation. Dynamo's default model goes by nothing but the tokens in use, of which there are as many values as an
engine has tokens, and a trace meets the same ones again and again. So durations are kept in an array by tokens, 8 bytes each,
which engines alike share, and the passes of a plan, whose tokens grow by the same number each, are a slice of it with that step.
What is not known yet is 0 there (no pass takes so little), and is asked for one by one. A model of another kind is asked each
time, as it goes by the mean length too, and a user's own may go by anything. Sums are made pass by pass, as the original
makes them: so all moments are the same to the bit, however they are found.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from pytest_kvmock.engine.performance import PolynomialModel
from pytest_kvmock.engine.timing import rounded_ms

if TYPE_CHECKING:
    from pytest_kvmock.engine.performance import PerformanceModel

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
