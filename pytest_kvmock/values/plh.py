"""Positional lineage hashes (PLH): 128 bits of position, parent fragment and own fragment, the keys of block
managers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, overload

MAX_POSITION: Final = 2**24 - 1
"""The last position that a lineage hash can name."""

# Layout A of dynamo-tokens (1.2.1 and before), from the most significant bit: mode (2 bits), position, parent
# fragment, own fragment. The position determines the mode, and the mode the width of the fragments. An own fragment is
# cut to the width that the *next* position has for its parent fragment, so a child's parent fragment always equals its
# parent's own fragment, also across the borders at 256 and 65,536.

_FRAGMENT_BITS: Final = (59, 55, 51)  # by mode; the position has 8, 16 and 24 bits
_MASK59: Final = 2**59 - 1


# Ranges of positions with one layout: first position, position after the last, mode, bits of the parent fragment and of
# the own fragment.
_STRETCHES: Final = (
    (0, 2**8 - 1, 0, 59, 59),
    (2**8 - 1, 2**8, 0, 59, 55),
    (2**8, 2**16 - 1, 1, 55, 55),
    (2**16 - 1, 2**16, 1, 55, 51),
    (2**16, 2**24, 2, 51, 51),
)


def _mode(position: int) -> int:
    return 0 if position < 2**8 else 1 if position < 2**16 else 2


def lineage_hash(current: int, parent: int | None, position: int) -> int:
    """Return the positional lineage hash of a block, as a plain 128-bit integer.

    Args:
        current: the block's sequence hash, u64.
        parent: sequence hash of the block before it; None for a root.
        position: number of blocks before it, from 0 to 2**24 - 1.

    Raises:
        ValueError: the position is out of range.
    """
    if 0 <= position < 255:  # the usual case: no border is near
        return (position << 118) | (((parent or 0) & _MASK59) << 59) | (current & _MASK59)
    if not 0 <= position <= MAX_POSITION:
        raise ValueError(f"position must be from 0 to {MAX_POSITION}, got {position}")
    mode = _mode(position)
    bits = _FRAGMENT_BITS[mode]
    own_bits = _FRAGMENT_BITS[_mode(position + 1)]
    own = current & ((1 << own_bits) - 1)
    above = (parent or 0) & ((1 << bits) - 1)
    return (mode << 126) | (position << (2 * bits)) | (above << bits) | own


def lineage_hashes(sequence_hashes: Sequence[int], *, parent: int | None = None, start: int = 0) -> list[int]:
    """Return the lineage hashes of consecutive blocks; the first has position `start` and parent `parent`."""
    end = start + len(sequence_hashes)
    if start < 0 or end > MAX_POSITION + 1:  # lineage_hash says which position is out of range
        above = [parent, *sequence_hashes[:-1]]
        return list(map(lineage_hash, sequence_hashes, above, range(start, end)))
    plhs: list[int] = []
    before = parent or 0
    for first, last, mode, bits, own_bits in _STRETCHES:
        if first >= end:
            break
        low, high = max(first, start), min(last, end)
        if low >= high:
            continue
        # As in lineage_hash, without a call for each; + is faster than |.
        mask = (1 << own_bits) - 1
        own = [current & mask for current in sequence_hashes[low - start : high - start]]
        step = 1 << (2 * bits)
        positions = range((mode << 126) + low * step, (mode << 126) + high * step, step)
        rows = zip(positions, [before & ((1 << bits) - 1), *own], own, strict=False)
        plhs += [position + (above << bits) + current for position, above, current in rows]
        before = sequence_hashes[high - start - 1]
    return plhs


class LineageHashes(Sequence[int]):
    """The lineage hashes of consecutive blocks, made on demand; they compare like a list.

    Args:
        names: sequence hashes of the blocks; do not change the list.
        parent: the name of the block before the first; None for a root.
        start: the position of the first block.
    """

    __slots__ = ("_made", "_names", "_parent", "_start")

    def __init__(self, names: list[int], parent: int | None = None, start: int = 0) -> None:
        self._names, self._parent, self._start = names, parent, start
        self._made: list[int] | None = None

    def _all(self) -> list[int]:
        if self._made is None:
            self._made = lineage_hashes(self._names, parent=self._parent, start=self._start)
        return self._made

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        if self._made is None and isinstance(place, int) and 0 <= place < len(self._names):
            parent = self._names[place - 1] if place else self._parent
            return lineage_hash(self._names[place], parent, self._start + place)
        return self._all()[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, LineageHashes)):
            return NotImplemented
        return self._all() == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(self._all())

    def part(self, start: int, end: int) -> LineageHashes:
        """Return the hashes of some of the blocks."""
        parent = self._names[start - 1] if start else self._parent
        return LineageHashes(self._names[start:end], parent, self._start + start)

    def are_of(self, names: Sequence[int], parent: int | None, start: int) -> bool:
        """Whether they were made for these arguments; if not, they may still be equal."""
        return self._names == names and self._parent == parent and self._start == start


def are_lineage(plhs: Sequence[int], names: list[int], *, parent: int | None = None, start: int = 0) -> bool:
    """Whether these are the lineage hashes of consecutive blocks; see `lineage_hashes`."""
    if type(plhs) is LineageHashes and plhs.are_of(names, parent, start):
        return True
    return lineage_hashes(names, parent=parent, start=start) == list(plhs)


def lineage_position(plh: int) -> int:
    """Return the position of the block in its sequence, from 0."""
    bits = _FRAGMENT_BITS[plh >> 126]
    return (plh >> (2 * bits)) & ((1 << (126 - 2 * bits)) - 1)


def lineage_fragment(plh: int) -> int:
    """Return the low bits of the block's own sequence hash that the lineage hash keeps."""
    return plh & ((1 << _FRAGMENT_BITS[plh >> 126]) - 1)


def lineage_parent_fragment(plh: int) -> int:
    """Return the low bits of the parent's sequence hash that the lineage hash keeps; 0 for a root."""
    bits = _FRAGMENT_BITS[plh >> 126]
    return (plh >> bits) & ((1 << bits) - 1)
