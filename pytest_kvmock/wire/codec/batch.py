"""Values of a wire: a batch of events, the block hashes in it, and a decoded payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pytest_kvmock.values.events import Cleared, RouterEvent, Stored, renamed
from pytest_kvmock.wire.codec.defects import EncodeError, WireDefect, WireProblem, shown_hash

DIGESTS: Final = "digests"
"""In `RouterEvent.extra`: (parent's digest or None, digest of each block), of an event whose hashes came as bytes."""

SIZE: Final = "block_size"
"""In `RouterEvent.extra`: the block size of a Stored without blocks, or of a location where it is not 0."""


SMALL: Final = 2**32
"""Block ids below are numbers written by hand: no digest is so small, and llm-d refuses the short forms of msgpack."""

WIDE: Final = 0xB10C << 48
"""What is added to such an id on the wire: block 5 is 0xb10c000000000005 there."""

_U64: Final = 2**64 - 1


def wire_hash(block_hash: int) -> int:
    """Return the u64 that names a block on the wire, where an id below 2^32 has its own full-width value.

    Raises:
        EncodeError: it has more than 64 bits.
    """
    if 0 <= block_hash < SMALL:
        return block_hash + WIDE
    if -(2**63) <= block_hash <= _U64:
        return block_hash & _U64
    raise EncodeError(f"block hash {shown_hash(block_hash)} has more than 64 bits")


def block_of(wire_hash: int) -> int:
    """Return the block that a u64 or i64 from the wire stands for, as `wire_hash` wrote it."""
    unsigned = wire_hash & _U64
    return unsigned - WIDE if WIDE <= unsigned < WIDE + SMALL else unsigned


def widened(event: RouterEvent) -> RouterEvent:
    """Return the event with full-width block hashes, in parents and removals too; most events are returned as they
    are.
    """
    data = event.event.data
    if isinstance(data, Cleared):
        return event
    parent = data.parent_hash if isinstance(data, Stored) else None
    if (parent is None or parent >= SMALL) and min(data.block_hashes, default=SMALL) >= SMALL:
        return event  # most of vLLM's events, without a check of each
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
        events: in order; of one rank, and of one worker, which a dialect over ZMQ does not name.
        timestamp: seconds since the epoch. It is a number that the caller passes: nothing here has a clock.
        dp_rank: the rank, as a publisher fills it in; None: that of the events, or 0 if there is none, or nil where the
            structs of the dialect have it so (`Dialect.rank`).
    """

    events: Sequence[RouterEvent]
    timestamp: float = 0.0
    dp_rank: int | None = None


@dataclass(slots=True)
class Decoded:
    """The contents of a payload.

    Attributes:
        events: the good events, as the ledger and an index take them. Their ids count all events of the batch, so that
            one that could not be read leaves a gap.
        problems: what was wrong, in the order of the payload; of an event that was kept, too (`WireProblem.is_kept`).
        num_events: how many events the batch had, as far as that could be read.
        timestamp: of the batch; None if there is none.
        dp_rank: of the batch; None if the slot is nil, or bad.
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
