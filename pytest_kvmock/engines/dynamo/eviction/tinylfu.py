"""The frequency tracker of kvbm-logical: a sketch that estimates how often a hash was counted."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import Final, TypeAlias

from xxhash import xxh3_64_intdigest

# Theory of operation (kvbm-logical, `TinyLFUSketch`; a count-min sketch)
#
# A table has `max(1, capacity // 4)` words, and each word has sixteen counters of four bits. Four hashes give a key
# four counters: `hash % words` is the word, `hash & 15` the counter in it. The count of a key is its lowest counter.
#
# Both numbers come from one hash, so `hash % lcm(words, 16)` stands for both. This is the number of a counter here;
# each counter has its own byte. If the number of words is even, these are at most half of the original's counters; the
# original never uses the other counters either.
#
# Hash i is the XXH3-64 of the key's 16 bytes, little endian, with the secret of seed i. For this length a secret is
# only a mask that is XORed with the input, and seed 0 has the default secret. So the key is XORed with the difference
# of the masks of seeds i and 0, and the plain XXH3-64 of the result is hash i.

_U64: Final = 2**64 - 1
_U32: Final = 2**32 - 1

# Words of XXH3's default secret at bytes 24, 32, 40 and 48. A seed is subtracted from the first of each pair and added
# to the second.
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
    """Counts keys of 128 bits, up to 15 each; after enough counts all counters are halved.

    Args:
        capacity: number of keys that it is sized for, at least 1.

    Attributes:
        counters: the counters, a byte each; always the same object.
        size: number of counts since the last decay, plus the size that this decay left.
    """

    __slots__ = ("_sample", "_words", "counters", "size")

    def __init__(self, capacity: int) -> None:
        self._words = max(1, capacity // 4)
        self._sample = min(10 * capacity, _U32)
        self.counters = bytearray(self._words * 16 // gcd(self._words, 16))
        self.size = 0

    def places(self, keys: Iterable[int]) -> list[Place]:
        """Return the place of each key. This is the slow part: keep the result."""
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
                continue  # all four counters are at their maximum
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
        """Return the estimated count of a place's key, from 0 to 15."""
        return min([self.counters[number] for number in place])

    def _decay(self, size: int) -> int:
        """Halve all counters; return the new size."""
        odd = len(self.counters.translate(None, _EVEN))
        self.counters[:] = self.counters.translate(_HALVED)
        return max(0, (size >> 1) - (odd >> 2))

    def words(self) -> list[int]:
        """Return the table in the original's form: words of 64 bits, with sixteen counters each."""
        words = [0] * self._words
        for number, count in enumerate(self.counters):
            words[number % self._words] |= count << 4 * (number & 15)
        return words
