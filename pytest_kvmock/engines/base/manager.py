"""The protocol of block managers that take moves, and the results of their queries."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol
from uuid import UUID

from pytest_kvmock.values.events import StorageTier
from pytest_kvmock.values.moves import Block, Move
from pytest_kvmock.values.sinks import Sink


class PrefillCost(NamedTuple):
    """The cost of prefilling a sequence now.

    Attributes:
        new_blocks: uncached blocks of the sequence, including the partial one.
        new_tokens: prompt tokens to compute.
        cached_tokens: cached prompt tokens; with `new_tokens` they are the whole prompt.
    """

    new_blocks: int
    new_tokens: int
    cached_tokens: int


class SequenceBlocks(Protocol):
    """A sequence as `prefill_cost` reads it; `ActiveSequence` is one."""

    @property
    def unique_blocks(self) -> Sequence[Block]:
        """All blocks, in order."""

    @property
    def positional_lineage_hashes(self) -> Sequence[int]:
        """Lineage hash of each full block."""

    @property
    def num_input_tokens(self) -> int:
        """Length of the prompt in tokens."""

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether it may share blocks."""


class KvManager(Protocol):
    """A block manager: it takes moves, and publishes their changes.

    Attributes:
        backend: name of the backend, as in tests and options.
        num_blocks: number of its blocks.
        block_size: tokens a block.
        dp_rank: data-parallel rank that its events name.
        sink: receives the events; None: no event is published, and no event id is used.
    """

    backend: str
    num_blocks: int
    block_size: int
    dp_rank: int
    sink: Sink | None

    def process(self, move: Move) -> int:
        """Carry out a move.

        Returns:
            For a Use, the number of leading blocks served; for other moves 1.

        Raises:
            MoveError: the move breaks a rule; nothing has changed.
        """

    def use(
        self,
        blocks: Iterable[Block],
        *,
        local_hashes: Sequence[int] | None = None,
        plhs: Sequence[int] | None = None,
        token_ids: Sequence[Sequence[int]] | None = None,
        parent: Block | None = None,
    ) -> int:
        """Short form of Use: fill in missing arguments so that the stream is valid.

        A missing local hash is the block itself. A cached block keeps its lineage. The parent of another block is the
        nearest full block before it in the call, else `parent`; without either it is a root.

        Returns:
            The number of leading blocks served.

        Raises:
            MoveError: see `process`; also if `parent` is not cached.
        """

    def deref(self, *blocks: Block | Iterable[Block]) -> None:
        """Short form of Deref: drop one reference to each block, given one by one or as a list.

        Raises:
            MoveError: see `process`.
        """

    def promote(
        self,
        partial: UUID,
        block: int,
        *,
        parent: int | None = None,
        local_hash: int | None = None,
        plh: int | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> None:
        """Short form of Promote; missing arguments are filled in as in `use`.

        Raises:
            MoveError: see `process`; also if `parent` is not cached.
        """

    def clear(self) -> bool:
        """Drop every cached block and publish a Cleared; do nothing and return False while any block is in use."""

    def take_event_id(self) -> int:
        """Use the next event id for an event that another object publishes for this manager."""

    @property
    def num_active_blocks(self) -> int:
        """Physical blocks in use."""

    @property
    def num_active_block_refs(self) -> int:
        """References to blocks in use; a partial block has one."""

    @property
    def num_inactive_blocks(self) -> int:
        """Cached blocks that no request uses."""

    @property
    def active_perc(self) -> float:
        """Share of the capacity that is in use, from 0 to 1."""

    @property
    def active_blocks(self) -> Mapping[Block, int]:
        """References to each block in use, partial ones included."""

    def references(self, block: Block) -> int:
        """Count the references to one block; 0 if it is not in use."""

    def inactive_blocks(self) -> Sequence[Block]:
        """Return the cached blocks that no request uses, in eviction order. May cost a sort."""

    def prefill_cost(self, sequence: SequenceBlocks) -> PrefillCost:
        """Return the cost of prefilling this sequence now. Changes nothing, not even recency."""

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Return the sequence hashes of the blocks in a tier, in use or not; repeated for each copy."""


def protocol_mismatch(subject: object, protocol: type) -> str | None:
    """Describe the members of a protocol or base class that an object lacks; None if it lacks none."""
    if isinstance(subject, type):
        return f"the class {subject.__name__}; it must be an object, {subject.__name__}()"
    members = [*protocol.__annotations__, *vars(protocol)]
    missing = [name for name in dict.fromkeys(members) if not name.startswith("_") and not hasattr(subject, name)]
    if not missing:
        if getattr(protocol, "_is_protocol", False) or isinstance(subject, protocol):
            return None
        return f"{subject!r:.80} ({type(subject).__name__}), which does not derive from {protocol.__name__}"
    names = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
    article = "an" if protocol.__name__[0] in "AEIOU" else "a"
    return f"{subject!r:.80} ({type(subject).__name__}), which is not {article} {protocol.__name__}: it has no {names}"
