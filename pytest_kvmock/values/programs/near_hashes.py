"""Nearly equal hashes: pairs that differ, but agree in the bits that a truncating index keeps.

An index that keeps fewer than the 64 bits of a hash confuses two blocks. Random traffic does not show this: the first
two hashes that agree in 32 bits appear after about 77,000 blocks.

A local hash can be chosen freely (`hash_pair`): a prompt of hashes has it, and it names the first block. An index that
is queried by tokens needs tokens with such hashes (`token_pair`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from pytest_kvmock.values.tokens import block_hashes

Tokens: TypeAlias = tuple[int, ...]


class Truncation(NamedTuple):
    """A part of a hash that an index may keep.

    Attributes:
        differs: a bit in which two hashes may differ and still agree in that part.
        words: the name in messages of the part in which two such hashes agree.
        otherwise: the truncation used instead if tokens with such hashes are not known.
    """

    differs: int
    words: str
    otherwise: str


TRUNCATIONS: Final[Mapping[str, Truncation]] = MappingProxyType(
    {
        "low32": Truncation(44, "in their low 32 bits", "low32"),
        "high32": Truncation(20, "in their high 32 bits", "high32"),
        "low53": Truncation(57, "in their low 53 bits", "low32"),
        "float53": Truncation(2, "as floats of 53 bits", "high32"),
        "low63": Truncation(63, "in all bits but that of the sign", "low32"),
    }
)
"""The parts of a hash that are kept, by name; the most common truncations come first."""

_FIRST: Final = 0x9E37_79B9_7F4A_7A11  # any number whose last bits are not near the point where a float rounds up


def truncated(value: int, name: str) -> int | float:
    """Return the part of a hash that an index with this truncation keeps.

    Args:
        value: the hash; it may be signed.
        name: the truncation.

    Raises:
        KeyError: an unknown truncation.
    """
    value &= 2**64 - 1
    kept = {"low32": value % 2**32, "high32": value >> 32, "low53": value % 2**53, "low63": value % 2**63}
    return float(value) if name == "float53" else kept[name]


def hash_pair(name: str) -> tuple[int, int]:
    """Return two hashes that differ in one bit that this truncation drops.

    Raises:
        KeyError: an unknown truncation.
    """
    return _FIRST, _FIRST ^ 1 << TRUNCATIONS[name].differs


_FOUND: Final[Mapping[tuple[int, str], tuple[Tokens, Tokens]]] = MappingProxyType(
    {
        (4, "low32"): ((0, 0, 12687, 33235), (0, 0, 23197, 43141)),
        (4, "high32"): ((0, 0, 16178, 65315), (0, 0, 35446, 26122)),
        (4, "low53"): ((29, 51953, 22726, 55689), (25, 3889, 8880, 37499)),
        (4, "float53"): ((13, 23443, 5083, 54896), (15, 29347, 27515, 63053)),
        (4, "low63"): ((20482, 58869, 2762, 48918), (29597, 9356, 33015, 64240)),
        (8, "low32"): ((0, 0, 6151, 32685), (0, 0, 44829, 3337)),
        (8, "high32"): ((0, 0, 37699, 21235), (0, 0, 3571, 48667)),
        (8, "low53"): ((22, 5564, 37729, 53587), (27, 48215, 22976, 35905)),
        (8, "float53"): ((26, 47175, 22083, 32461), (23, 25250, 36160, 21995)),
        (8, "low63"): ((10696, 46375, 37509, 8074), (21585, 61872, 57975, 29306)),
        (16, "low32"): ((0, 0, 50122, 51606), (0, 0, 59784, 60180)),
        (16, "high32"): ((0, 0, 30776, 51476), (0, 0, 10920, 45433)),
        (16, "low53"): ((9, 24445, 46672, 893), (13, 61828, 52171, 31418)),
        (16, "float53"): ((15, 17251, 46825, 61535), (12, 59039, 40185, 65353)),
        (16, "low63"): ((8063, 56671, 46769, 16241), (15712, 20394, 33410, 29753)),
        (32, "low32"): ((0, 0, 14114, 46761), (0, 0, 21368, 10484)),
        (32, "high32"): ((0, 0, 19794, 58665), (0, 0, 51347, 12547)),
        (32, "low53"): ((11, 18609, 9371, 23523), (13, 54815, 32861, 27418)),
        (32, "float53"): ((16, 58354, 34094, 22512), (16, 23477, 33923, 31998)),
        (32, "low63"): ((16494, 12219, 11847, 39232), (32500, 3018, 26418, 22228)),
        (64, "low32"): ((0, 0, 11024, 18398), (0, 0, 64773, 1220)),
        (64, "high32"): ((0, 0, 45760, 22631), (0, 0, 17684, 34405)),
        (64, "low53"): ((12, 63786, 5365, 40672), (1, 55337, 63813, 19490)),
        (64, "float53"): ((4, 22243, 47411, 38824), (6, 42182, 37987, 21537)),
        (64, "low63"): ((20032, 40927, 49493, 30920), (6229, 33515, 27006, 24528)),
    }
)
"""The last four tokens of two blocks, by tokens per block and truncation; the tokens before them are 0.

Found by van Oorschot and Wiener's search for collisions ("Parallel Collision Search with Cryptanalytic Applications",
with distinguished points) in a C program around XXH3-64 with seed 1337: from a number to four tokens of 16 bits, to the
hash of the block, to its truncated part, which is the next number; two paths that meet give a pair. 32 bits take
milliseconds, 53 bits seconds, 63 bits a minute or two.
"""


def token_pair(block_size: int, name: str) -> tuple[Tokens, Tokens]:
    """Return the tokens of two blocks whose local hashes differ but agree in the part that a truncation keeps.

    For blocks of 4, 8, 16, 32 and 64 tokens, all pairs are known. For other sizes, a birthday search (a tenth of a
    second, once) finds a pair of 32 bits, which replaces the others.

    Raises:
        KeyError: an unknown truncation.
    """
    found = _FOUND.get((block_size, name))
    if found is None:
        return _birthday_search(block_size, TRUNCATIONS[name].otherwise)
    before = (0,) * (block_size - 4)
    return (*before, *found[0]), (*before, *found[1])


@lru_cache(maxsize=64)
def _birthday_search(block_size: int, name: str) -> tuple[Tokens, Tokens]:
    """Return the first two blocks, of zeros and a last token that counts up, whose hashes agree in 32 bits."""
    before, seen, first = (0,) * (block_size - 1), dict[int | float, Tokens](), 0
    while True:
        blocks = [(*before, last) for last in range(first, first + 10_000)]
        hashes = block_hashes([token for block in blocks for token in block], block_size)
        for block, local in zip(blocks, hashes, strict=True):
            other = seen.setdefault(truncated(local, name), block)
            if other is not block:
                return other, block
        first += 10_000
