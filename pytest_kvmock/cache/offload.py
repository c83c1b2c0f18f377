"""The protocol between a block manager and what keeps its evicted blocks in a further tier.

A manager hands evicted blocks over, with the slots they were in, and publishes what comes back as events. It does not
know how long a transfer takes, nor what the further tier holds; the engine does not know who publishes. Times are in ms.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from pytest_kvmock.cache.dynamo.eviction.policy import Slot
from pytest_kvmock.events import BlockTokens, EventData, StorageTier
from pytest_kvmock.prompt_keys import EventExtra, LoraIds


class BlockDetails(NamedTuple):
    """A block with all that an event says of it, in whatever tier.

    Attributes:
        name: its sequence hash.
        plh: its lineage hash, by which every tier caches it.
        parent: sequence hash of the block before it; None for a root.
        local_hash: its local hash; 0 where none was given.
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
        data: what happened.
        tier: where.
        token_ids: for a Stored, the tokens of each block, where they are known.
        extra: what else travels beside it; see `RouterEvent`.
    """

    data: EventData
    tier: StorageTier
    token_ids: BlockTokens | None = None
    extra: EventExtra | None = None


class OffloadResult(NamedTuple):
    """What came of a step of an offload engine.

    Attributes:
        events: to publish, in this order.
        slots: slots of the device that are free again.
    """

    events: Sequence[TierEvent]
    slots: Sequence[Slot]


class PinnedPrefix(Protocol):
    """Blocks of a further tier, the first of a prompt, that stay there until they are released."""

    @property
    def num_blocks(self) -> int:
        """How many blocks."""

    @property
    def is_complete(self) -> bool:
        """Whether their transfer to the device was started, and is done."""


class OffloadEngine(Protocol):
    """Keeps evicted blocks in a further tier, and brings them back. One engine belongs to one manager.

    Attributes:
        tier: where it keeps them.
        lost_to_pins: blocks that were lost on their way there because a swap-in pinned others.
    """

    tier: StorageTier
    lost_to_pins: int

    @property
    def num_blocks(self) -> int:
        """Blocks that it has room for."""

    def take(self, evicted: Sequence[BlockDetails], slots: Sequence[Slot]) -> OffloadResult:
        """Take blocks that the device evicted, in order, and their slots until they have been copied."""

    def tick(self, now: float) -> OffloadResult:
        """Move its time forward.

        Raises:
            ValueError: the time is no finite number of at least 0.
        """

    def deadline(self) -> float | None:
        """Return when the next transfer finishes if nothing else starts; None if none is under way."""

    def find(self, plhs: Sequence[int]) -> PinnedPrefix | None:
        """Pin the longest prefix that it holds; None if it does not hold the first."""

    def lookup(self, plhs: Sequence[int]) -> int:
        """Count how many of these it holds, from the first on. Changes nothing."""

    def start(self, prefix: PinnedPrefix, now: float | None) -> None:
        """Start the transfer of a pinned prefix to the device, now or at the time of the last tick."""

    def release(self, prefix: PinnedPrefix) -> None:
        """Pin a prefix no more."""

    def resident(self) -> Collection[int]:
        """Sequence hashes of what it holds."""

    @property
    def unpublished(self) -> Container[int]:
        """Sequence hashes of blocks that came there without a Stored, until they have one.

        Their Removed may be published all the same.
        """

    def clear(self) -> Sequence[Slot]:
        """Cancel all transfers and forget all blocks, without events; returns the slots that it had taken."""


class WriteThrough(Protocol):
    """A tier that has copies of what the device computed, whatever the device keeps; what a manager needs of it.

    Attributes:
        tier: where it keeps them.
    """

    tier: StorageTier

    def number_adapters(self, lora_ids: LoraIds) -> None:
        """Take the numbers that the engine has for adapters, which its events carry."""

    def take_events(self) -> Sequence[TierEvent]:
        """Take the events since the last time, to be published after those of the device."""

    def resident_names(self, group: int = 0) -> list[int]:
        """Hashes of what can be loaded of a group, as events name it; repeated where two of them do."""


@dataclass(frozen=True, slots=True)
class NoHits:
    """Nothing is swapped in: no engine, none of the blocks in it, or no slot on the device that could be had for them."""


@dataclass(frozen=True, slots=True)
class BlockedOnG1Offload:
    """Nothing is swapped in yet: blocks had to be evicted from the device first, and are on their way to the host."""


class Scheduled:
    """A prefix is on its way to the device, where slots are reserved for it.

    Attributes:
        prefix: the blocks, pinned where they come from.
        slots: reserved on the device; none any more once it was put down or its blocks were registered.
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
        """How many blocks come."""
        return len(self.slots) if self.prefix is None else self.prefix.num_blocks

    @property
    def is_complete(self) -> bool:
        """Whether they are there, as seen by the last tick or start of a transfer."""
        return self.prefix is not None and self.prefix.is_complete


SwapIn: TypeAlias = NoHits | BlockedOnG1Offload | Scheduled
"""What came of an attempt to bring a prefix back to the device."""
