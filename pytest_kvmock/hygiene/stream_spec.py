"""What is known of the engine behind a stream, before anything of it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from pytest_kvmock.checks import unknown_text
from pytest_kvmock.events import StorageTier
from pytest_kvmock.hygiene.content import Chain, DynamoChain

Residency: TypeAlias = Literal["unique", "counted"]
"""Whether a block is published once while it is held, or every copy of it."""
RESIDENCIES: Final[tuple[Residency, ...]] = ("unique", "counted")


def check_residency(value: object, where: str = "") -> Residency:
    """Return `value` if it is a residency.

    Args:
        value: what was passed in.
        where: what the message begins with: "make_kv_sink: ".

    Raises:
        ValueError: it is none; the nearest and both are listed.
    """
    for residency in RESIDENCIES:
        if residency == value:
            return residency
    raise ValueError(f"{where}{unknown_text('residency', value, RESIDENCIES)}")


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """What is known of the engine of a worker and rank.

    Attributes:
        block_size: tokens a block, to judge token ids by; None: unknown.
        num_blocks: how many blocks it has on the device; None: unknown, and over_capacity is not judged.
        tier_blocks: how many it has in each tier below; a tier without is unknown. None: there is none.
        residency: see `BackendSpec`; where it is "counted", a block may be stored and removed several times.
        prefix_closed: see `BackendSpec`; where it is false a wrong hash by Dynamo's chain is a warning, and an orphaned child is none.
        chain: makes the rule by which it names blocks, to judge `wrong_hash` by: each stream has its own, as a chain of hashes
            has a state.
        clears_below: whether a Cleared, which has no tier, empties the tiers below the device, too; vLLM's is of the device alone.
        chunk: blocks of a chunk below the device, which no event says (`Traits.chunk`).
        hash: by which of vLLM's hashes the blocks of a sink are named, where that was said: who looks back makes `chain` of it.
        seed: of the hash; None: that of the release.
    """

    block_size: int | None = None
    num_blocks: int | None = None
    tier_blocks: Mapping[StorageTier, int] | None = None
    residency: Residency = "unique"
    prefix_closed: bool = True
    chain: Callable[[], Chain] = DynamoChain
    clears_below: bool = True
    chunk: int | None = None
    hash: str | None = None
    seed: str | None = None

    def capacity(self, tier: StorageTier) -> int | None:
        """How many blocks the engine has in a tier; None: unknown."""
        return self.num_blocks if tier is StorageTier.DEVICE else (self.tier_blocks or {}).get(tier)


UNKNOWN: Final = StreamSpec()
"""The spec of a stream of which nothing is known."""
