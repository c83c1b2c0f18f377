"""Values of a wire: a batch of events, the block hashes in it, and a decoded payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pytest_kvmock.values.events import Cleared, RouterEvent, Stored, renamed
from pytest_kvmock.wire.codec.defects import EncodeError, WireDefect, WireProblem, shown_hash

DIGESTS: Final = "digests"
"""In `RouterEvent.extra`: (parent's digest or None, digest of each block), for an event whose hashes came as bytes."""

SIZE: Final = "block_size"
"""In `RouterEvent.extra`: the block size of a Stored without blocks, or of a location if it is not 0."""


SMALL: Final = 2**32
"""Smaller block ids are handwritten: no digest is so small, and llm-d refuses the short forms of msgpack."""

WIDE: Final = 0xB10C << 48
"""The number added to such an id on the wire: block 5 becomes 0xb10c000000000005."""

_U64: Final = 2**64 - 1


def wire_hash(block_hash: int) -> int:
    """Return the u64 that names a block on the wire; an id below 2^32 becomes a full-width value.

    Raises:
        EncodeError: the hash has more than 64 bits.
    """
    if 0 <= block_hash < SMALL:
        return block_hash + WIDE
    if -(2**63) <= block_hash <= _U64:
        return block_hash & _U64
    raise EncodeError(f"block hash {shown_hash(block_hash)} has more than 64 bits")


def block_of(wire_hash: int) -> int:
    """Return the block for a u64 or i64 from the wire; the inverse of `wire_hash`."""
    unsigned = wire_hash & _U64
    return unsigned - WIDE if WIDE <= unsigned < WIDE + SMALL else unsigned


def widened(event: RouterEvent) -> RouterEvent:
    """Return the event with full-width block hashes, also in parents and removals; most events are returned
    unchanged.
    """
    data = event.event.data
    if isinstance(data, Cleared):
        return event
    parent = data.parent_hash if isinstance(data, Stored) else None
    if (parent is None or parent >= SMALL) and min(data.block_hashes, default=SMALL) >= SMALL:
        return event  # most of vLLM's events, without a check of each hash
    if all(not 0 <= block < SMALL for block in data.block_hashes) and (parent is None or not 0 <= parent < SMALL):
        return event
    hashes = tuple(map(wire_hash, data.block_hashes))
    if not isinstance(data, Stored):
        return replace(event, event=replace(event.event, data=renamed(data, hashes)))
    wide = replace(data, block_hashes=hashes, parent_hash=None if parent is None else wire_hash(parent))
    return replace(event, event=replace(event.event, data=wide))


@dataclass(slots=True)
class Batch:
    """The events of one step of one rank, as one message carries them.

    Attributes:
        events: the events, in order; of one rank and one worker, which a dialect over ZMQ does not name.
        timestamp: seconds since the epoch, given by the caller, because nothing here has a clock.
        dp_rank: the rank, as a publisher fills it in; None: the rank of the events, 0 without events, or nil if the
            structs of the dialect have nil (`Dialect.rank`).
    """

    events: Sequence[RouterEvent]
    timestamp: float = 0.0
    dp_rank: int | None = None


@dataclass(slots=True)
class Decoded:
    """The contents of a payload.

    Attributes:
        events: the good events, as the ledger and an index take them. Their ids count all events of the batch, so an
            unreadable event leaves a gap.
        problems: the problems, in the order of the payload, also those of kept events (`WireProblem.is_kept`).
        num_events: number of events of the batch, as far as it could be read.
        timestamp: timestamp of the batch; None if there is none.
        dp_rank: rank of the batch; None if the slot is nil or invalid.
    """

    events: list[RouterEvent] = field(default_factory=list)
    problems: list[WireProblem] = field(default_factory=list)
    num_events: int = 0
    timestamp: float | None = None
    dp_rank: int | None = None

    @property
    def extra(self) -> list[Mapping[str, Any] | None]:
        """For each event, the values that an ordinary one lacks: `RouterEvent.extra`."""
        return [event.extra for event in self.events]

    @property
    def defects(self) -> list[WireDefect]:
        """The names of the problems."""
        return [problem.name for problem in self.problems]
