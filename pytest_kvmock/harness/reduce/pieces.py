"""Parts of arrivals, from which the reduction of events chooses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_kvmock.oracle.hygiene.entries import Arrival, BatchesLost, NoEvent, WorkerRemoved
from pytest_kvmock.values.events import Removed, RouterEvent, Stored

if TYPE_CHECKING:
    from pytest_kvmock.values.events import StreamKey


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an arrival.

    Attributes:
        arrival: the complete arrival.
        jumps: the difference between its event id and a count of its stream's events so far.
        places: the positions of the blocks that are left of a Stored or Removed; None: all.
    """

    arrival: Arrival
    jumps: int
    places: tuple[int, ...] | None = None

    @property
    def event(self) -> RouterEvent | None:
        """The complete event; None if the arrival is no event."""
        return None if isinstance(self.arrival, NoEvent) else self.arrival

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks of the event that are left."""
        if self.event is None:
            return ()
        blocks = blocks_of(self.event)
        return blocks if self.places is None else tuple(blocks[i] for i in self.places)

    @property
    def key(self) -> StreamKey:
        """Its stream: (worker_id, dp_rank)."""
        if self.event is None:
            assert isinstance(self.arrival, NoEvent)
            return self.arrival.worker_id, self.arrival.dp_rank or 0
        return self.event.worker_id, self.event.event.dp_rank

    def only(self, blocks: frozenset[int]) -> Piece:
        """Return the piece with only these blocks."""
        if self.event is None:
            return self
        named = blocks_of(self.event)
        places = range(len(named)) if self.places is None else self.places
        return replace(self, places=tuple(i for i in places if named[i] in blocks))


def blocks_of(event: RouterEvent) -> tuple[int, ...]:
    """Return the blocks that an event names; empty for a Cleared."""
    blocks: tuple[int, ...] = getattr(event.event.data, "block_hashes", ())
    return blocks


def names_blocks(piece: Piece) -> bool:
    """Whether a piece is part of a Stored or Removed."""
    return piece.event is not None and isinstance(piece.event.event.data, (Stored, Removed))


def pieces_of(arrivals: Iterable[Arrival]) -> Iterator[Piece]:
    """Yield complete arrivals as pieces, each with the jumps of its stream's ids so far."""
    counts: dict[StreamKey, int] = {}
    for arrival in arrivals:
        if isinstance(arrival, WorkerRemoved):
            of, rank = arrival.worker_id, arrival.dp_rank
            counts = {key: n for key, n in counts.items() if key[0] != of or rank not in (None, key[1])}
            yield Piece(arrival, 0)
            continue
        if isinstance(arrival, BatchesLost):
            yield Piece(arrival, 0)
            continue
        number = counts[arrival.key] = counts.get(arrival.key, -1) + 1
        yield Piece(arrival, arrival.event_id - number)


def longest_stored(pieces: Iterable[Piece]) -> int | None:
    """Return the block with the most events between its Stored and its Removed."""
    stored: dict[int, int] = {}
    longest, most = None, 0
    for i, piece in enumerate(pieces):
        if piece.event is not None and isinstance(piece.event.event.data, Stored):
            stored.update(dict.fromkeys(piece.blocks, i))
            continue
        for block in piece.blocks:
            if (age := i - stored.pop(block, i)) > most:
                longest, most = block, age
    return longest


def parents_of(arrivals: Iterable[Arrival]) -> dict[StreamKey, dict[int, int | None]]:
    """Return the parent of each block of each stream, as last stored."""
    out: dict[StreamKey, dict[int, int | None]] = {}
    for arrival in arrivals:
        if not isinstance(arrival, NoEvent) and isinstance(data := arrival.data, Stored):
            parents = out.setdefault(arrival.key, {})
            parents.update(zip(data.block_hashes, (data.parent_hash, *data.block_hashes), strict=False))
    return out
