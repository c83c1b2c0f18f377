"""The frequency tracker of kvbm-logical: a sketch of how often a hash was seen."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import Final, TypeAlias

from xxhash import xxh3_64_intdigest

# Theory of operation (kvbm-logical, `TinyLFUSketch`; a count-min sketch)
#
# A table of `max(1, capacity // 4)` words has sixteen counters of four bits each. A key has four of them, by four
# hashes: `hash % words` is the word, `hash & 15` the counter in it. The lowest of its counters is the count of the key.
#
# Both numbers come from one hash, and so together they are `hash % lcm(words, 16)`: that is the number of a counter
# here, in its own byte. Where the words are even in number, that is at most half of the original's counters; it never
# touches the others either.
#
# Hash i is the XXH3-64 of the key's 16 bytes, little endian, with the secret of seed i. For this length a secret is
# only a mask that is laid over the input. So laying over the difference to the mask of seed 0, whose secret is the
# default one, makes it a plain XXH3-64.

_U64: Final = 2**64 - 1
_U32: Final = 2**32 - 1

# Words of XXH3's default secret at bytes 24, 32, 40 and 48. A seed is taken from the first of each pair and added to
# the second one.
_SECRET: Final = ((0x1F67B3B7A4A44072, 0x78E5C0CC4EE679CB), (0x2172FFCC7DD05A82, 0x8E2443F7744608B8))


def _mask(seed: int) -> int:
    low, high = (((less - seed) & _U64) ^ ((more + seed) & _U64) for less, more in _SECRET)
    return low | high << 64


_MASK_1: Final = _mask(1) ^ _mask(0)
_MASK_2: Final = _mask(2) ^ _mask(0)
_MASK_3: Final = _mask(3) ^ _mask(0)

_FULL: Final = 15
_HALVED: Final = bytes(count >> 1 for count in range(256))
_EVEN: Final = bytes(range(0, 256, 2))

Place: TypeAlias = tuple[int, int, int, int]
"""The four counters of a key, by number."""


class TinyLfu:
    """Counts keys of 128 bits, up to 15 each; after enough counts all are halved.

    Args:
        capacity: how many keys it is made for, at least 1.

    Attributes:
        counters: the counters, a byte each; always the same object.
        size: how many counts were noted since the last decay, and what that left of those before it.
    """

    __slots__ = ("_sample", "_words", "counters", "size")

    def __init__(self, capacity: int) -> None:
        self._words = max(1, capacity // 4)
        self._sample = min(10 * capacity, _U32)
        self.counters = bytearray(self._words * 16 // gcd(self._words, 16))
        self.size = 0

    def places(self, keys: Iterable[int]) -> list[Place]:
        """Return the place of each key. This is what costs time: keep it."""
        digest, number = xxh3_64_intdigest, len(self.counters)
        return [
            (
                digest(key.to_bytes(16, "little")) % number,
                digest((key ^ _MASK_1).to_bytes(16, "little")) % number,
                digest((key ^ _MASK_2).to_bytes(16, "little")) % number,
                digest((key ^ _MASK_3).to_bytes(16, "little")) % number,
            )
            for key in keys
        ]

    def count(self, places: Iterable[Place]) -> None:
        """Count the key of each place once, in this order."""
        counters, size, sample = self.counters, self.size, self._sample
        for first, second, third, fourth in places:
            if _FULL == counters[first] == counters[second] == counters[third] == counters[fourth]:
                continue  # there are no counters
            # One after the other: two may be the same counter, which is then raised twice.
            if (count := counters[first]) != _FULL:
                counters[first] = count + 1
            if (count := counters[second]) != _FULL:
                counters[second] = count + 1
            if (count := counters[third]) != _FULL:
                counters[third] = count + 1
            if (count := counters[fourth]) != _FULL:
                counters[fourth] = count + 1
            size += 1
            if size >= sample:
                size = self._decay(size)
        self.size = size

    def estimate(self, place: Place) -> int:
        """Return how often the key of a place was counted, as far as is known: from 0 to 15."""
        return min([self.counters[number] for number in place])

    def _decay(self, size: int) -> int:
        """Halve all counters; return the new size."""
        odd = len(self.counters.translate(None, _EVEN))
        self.counters[:] = self.counters.translate(_HALVED)
        return max(0, (size >> 1) - (odd >> 2))

    def words(self) -> list[int]:
        """Return the table as the original has it: words of 64 bits, of sixteen counters each."""
        words = [0] * self._words
        for number, count in enumerate(self.counters):
            words[number % self._words] |= count << 4 * (number & 15)
        return words
