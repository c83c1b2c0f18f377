"""The number of drafts that a step accepts: drawn by rates, as in Dynamo's mocker, or given as counts."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Final

from pytest_kvmock.values.checks import is_integer

# Theory of operation (dynamo-mocker 1.6.1)
#
# A step accepts drafts until the first rejected one: draft i is accepted if a 64-bit word of ChaCha12 is below its rate
# * 2**64. The key of the cipher is eight words of PCG32, as in `seed_from_u64` of Rust's rand. A rate of 1 uses no
# word.

USUAL_RATES: Final = (0.85, 0.3)
"""Rates of acceptance if none are given, cut to the drafts of a step."""

USUAL_SEED: Final = 42
"""The seed if none is given (`aic_mtp_seed`)."""

_U32: Final = 2**32 - 1
_U64: Final = 2**64 - 1


def checked_acceptance(
    value: object, drafts: int, name: str = "speculative: acceptance"
) -> tuple[float, ...] | list[int]:
    """Return the rates of drafts as floats, or the counts of steps.

    Args:
        value: rates from 0 to 1, at most one per draft; or a non-empty list of integers from 0 to `drafts`.
        drafts: the most drafts that a step may accept.
        name: the name of the argument.

    Raises:
        ValueError: it is neither.
    """
    if value is USUAL_RATES:
        return USUAL_RATES[:drafts]
    if isinstance(value, list) and value and all(is_integer(count, 0) for count in value):
        if max(value) <= drafts:
            return value.copy()
    elif isinstance(value, (tuple, list)) and len(value) <= drafts and all(_is_rate(rate) for rate in value):
        return tuple(map(float, value))
    raise ValueError(
        f"{name} must be at most {drafts} rates from 0 to 1, one a draft, or a list of how many drafts are accepted "
        f"in turn, integers from 0 to {drafts}; got {value!r:.80}"
    )


def _is_rate(rate: object) -> bool:
    return isinstance(rate, (int, float)) and not isinstance(rate, bool) and isfinite(rate) and 0 <= rate <= 1


class AcceptedDrafts:
    """The number of drafts that each step of one engine accepts, step by step.

    Args:
        acceptance: as `checked_acceptance` returns it.
        drafts: number of drafts of a step; a draft without a rate is tried but never accepted.
        seed: the seed of the generator.

    Attributes:
        drafts: as given.
    """

    __slots__ = ("_bounds", "_counts", "_step", "_words", "drafts")

    def __init__(self, acceptance: Sequence[float] | list[int], drafts: int, seed: int = USUAL_SEED) -> None:
        self.drafts = drafts
        self._counts = acceptance.copy() if isinstance(acceptance, list) else None
        rates = () if isinstance(acceptance, list) else (*acceptance, *(0.0,) * drafts)[:drafts]
        self._bounds = [None if rate >= 1 else int(rate * 2**64) for rate in rates]
        self._words = _words(seed & _U64)
        self._step = 0

    def draw(self) -> int:
        """Return the number of drafts that the next step accepts."""
        if self._counts is not None:
            self._step += 1
            return self._counts[(self._step - 1) % len(self._counts)]
        for accepted, bound in enumerate(self._bounds):
            if bound is not None and next(self._words) >= bound:
                return accepted
        return len(self._bounds)


def _words(seed: int) -> Iterator[int]:
    """Yield the 64-bit words of ChaCha12, low half first."""
    key = tuple(_pcg32(seed))
    for counter in range(2**64):
        block = _chacha12(key, counter)
        yield from struct.unpack("<8Q", struct.pack("<16I", *block))


def _pcg32(state: int) -> Iterator[int]:
    for _ in range(8):
        state = (state * 6364136223846793005 + 11634580027462260723) & _U64
        word, turn = (((state >> 18) ^ state) >> 27) & _U32, state >> 59
        yield (word >> turn | word << (32 - turn)) & _U32


def _chacha12(key: Sequence[int], counter: int) -> list[int]:
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *key, counter & _U32, counter >> 32, 0, 0]
    words = start.copy()
    for _ in range(6):
        for at in range(4):
            _quarter(words, at, 4 + at, 8 + at, 12 + at)
        for at in range(4):
            _quarter(words, at, 4 + (at + 1) % 4, 8 + (at + 2) % 4, 12 + (at + 3) % 4)
    return [(one + two) & _U32 for one, two in zip(words, start, strict=True)]


def _quarter(words: list[int], a: int, b: int, c: int, d: int) -> None:
    for to, plus, turned, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        words[to] = (words[to] + words[plus]) & _U32
        mixed = words[turned] ^ words[to]
        words[turned] = (mixed << turn | mixed >> (32 - turn)) & _U32
