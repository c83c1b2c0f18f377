"""The protocol between a block manager and the offload engine that keeps its evicted blocks in a further tier.

A manager passes on evicted blocks with their slots, and publishes the events that come back. The engine decides the
duration of transfers and the contents of the further tier; the manager decides what is published. Times are in ms.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from pytest_kvmock.engines.base.eviction_policy import Slot
from pytest_kvmock.values.events import BlockTokens, EventData, StorageTier
from pytest_kvmock.values.prompt_keys import EventExtra, LoraIds


class BlockDetails(NamedTuple):
    """A block with all data of its events, in any tier.

    Attributes:
        name: its sequence hash.
        plh: its lineage hash, the key in every tier.
        parent: sequence hash of the block before it; None for a root.
        local_hash: its local hash; 0 if none was given.
        token_ids: its tokens, if they were given.
    """

    name: int
    plh: int
    parent: int | None = None
    local_hash: int = 0
    token_ids: Sequence[int] | None = None


class TierEvent(NamedTuple):
    """An event of a further tier, for the manager to number and publish.

    Attributes:
        data: the event data.
        tier: the tier.
        token_ids: for a Stored, the tokens of each block, if known.
        extra: the extra data; see `RouterEvent`.
    """

    data: EventData
    tier: StorageTier
    token_ids: BlockTokens | None = None
    extra: EventExtra | None = None


class OffloadResult(NamedTuple):
    """The result of a step of an offload engine.

    Attributes:
        events: the events to publish, in order.
        slots: device slots that are free again.
    """

    events: Sequence[TierEvent]
    slots: Sequence[Slot]


class PinnedPrefix(Protocol):
    """The leading blocks of a prompt in a further tier, pinned there until they are released."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""

    @property
    def is_complete(self) -> bool:
        """Whether the transfer to the device is done."""


class OffloadEngine(Protocol):
    """Keeps evicted blocks in a further tier, and brings them back. Each manager has its own.

    Attributes:
        tier: the further tier.
        lost_to_pins: number of blocks that were lost on their way there because a swap-in had pinned other blocks.
    """

    tier: StorageTier
    lost_to_pins: int

    @property
    def num_blocks(self) -> int:
        """Capacity of the tier in blocks."""

    def take(self, evicted: Sequence[BlockDetails], slots: Sequence[Slot]) -> OffloadResult:
        """Take blocks that the device evicted, in order; their slots are held until the blocks are copied."""

    def tick(self, now: float) -> OffloadResult:
        """Move its time forward.

        Raises:
            ValueError: the time is not a finite number of at least 0.
        """

    def deadline(self) -> float | None:
        """Return the time at which the next transfer finishes if no other starts; None if none is under way."""

    def find(self, plhs: Sequence[int]) -> PinnedPrefix | None:
        """Pin the longest prefix that it holds; None if it does not hold the first."""

    def lookup(self, plhs: Sequence[int]) -> int:
        """Count the leading blocks that it holds. Changes nothing."""

    def start(self, prefix: PinnedPrefix, now: float | None) -> None:
        """Start the transfer of a pinned prefix to the device, now or at the time of the last tick."""

    def release(self, prefix: PinnedPrefix) -> None:
        """Unpin a prefix."""

    def resident(self) -> Collection[int]:
        """Return the sequence hashes of the blocks that it holds."""

    @property
    def unpublished(self) -> Container[int]:
        """Sequence hashes of the blocks that are in the tier without a published Stored.

        Their Removed may still be published.
        """

    def clear(self) -> Sequence[Slot]:
        """Cancel all transfers and drop all blocks, without events; return the slots that it had taken."""


class WriteThrough(Protocol):
    """The interface that a manager needs of a tier with copies of computed blocks, which stay when the device evicts.

    Attributes:
        tier: the tier.
    """

    tier: StorageTier

    def number_adapters(self, lora_ids: LoraIds) -> None:
        """Take the engine's numbers of adapters, which events carry."""

    def take_events(self) -> Sequence[TierEvent]:
        """Return the events since the last call, to be published after those of the device."""

    def resident_names(self, group: int = 0) -> list[int]:
        """Return the hashes of the loadable blocks of a group, as in events; repeated for each copy."""


@dataclass(frozen=True, slots=True)
class NoHits:
    """Nothing is swapped in: there is no engine, it holds none of the blocks, or the device has no slot for them."""


@dataclass(frozen=True, slots=True)
class BlockedOnG1Offload:
    """Nothing is swapped in yet: device blocks had to be evicted first, and are on their way to the host."""


class Scheduled:
    """A prefix is on its way to the device, where slots are reserved for it.

    Attributes:
        prefix: the blocks, pinned in their tier.
        slots: reserved device slots; empty once the swap-in was dropped or its blocks were registered.
    """

    __slots__ = ("is_open", "prefix", "slots")

    def __init__(self, prefix: PinnedPrefix | None, slots: list[Slot]) -> None:
        self.prefix = prefix
        self.slots = slots
        self.is_open = True  # its slots and pins are held

    def __repr__(self) -> str:
        state = "put down" if not self.is_open else "complete" if self.is_complete else "under way"
        return f"<Scheduled of {self.num_blocks} blocks, {state}>"

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.slots) if self.prefix is None else self.prefix.num_blocks

    @property
    def is_complete(self) -> bool:
        """Whether the blocks had arrived by the last tick or start of a transfer."""
        return self.prefix is not None and self.prefix.is_complete


SwapIn: TypeAlias = NoHits | BlockedOnG1Offload | Scheduled
"""The result of an attempt to bring a prefix back to the device."""
