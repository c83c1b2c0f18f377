"""The known properties of a stream's engine, before any event arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from pytest_kvmock.oracle.hygiene.content import DynamoChain
from pytest_kvmock.values.checks import unknown_text
from pytest_kvmock.values.events import StorageTier
from pytest_kvmock.values.hashed_blocks import Chain

Residency: TypeAlias = Literal["unique", "counted"]
"""Whether a block is published once while it is held, or once for each copy."""
RESIDENCIES: Final[tuple[Residency, ...]] = ("unique", "counted")


def check_residency(value: object, where: str = "") -> Residency:
    """Check and return a residency.

    Args:
        value: the given value.
        where: start of the message, such as "make_kv_sink: ".

    Raises:
        ValueError: an unknown residency; the message names the nearest one and lists both.
    """
    for residency in RESIDENCIES:
        if residency == value:
            return residency
    raise ValueError(f"{where}{unknown_text('residency', value, RESIDENCIES)}")


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """The known properties of the engine of a worker and rank.

    Attributes:
        block_size: tokens per block, for checks of token ids; None if unknown.
        num_blocks: number of device blocks; None if unknown: over_capacity is not judged.
        tier_blocks: number of blocks of each lower tier; a missing tier is unknown. None if there is no lower tier.
        residency: see `BackendSpec`; if "counted", a block may be stored and removed several times.
        prefix_closed: see `BackendSpec`; if False, a wrong hash by Dynamo's chain is a warning, and orphaned children
            are not reported.
        chain: makes the engine's rule for names, which `wrong_hash` needs. Chains have state, so each stream makes one.
        clears_below: whether a Cleared, which has no tier, also empties the tiers below the device; vLLM's does not.
        chunk: blocks per chunk below the device; events do not name chunks (`Traits.chunk`).
        stores_again: see `Traits.stores_again`.
        hash: vLLM's hash that names the blocks of a sink, if given; `chain` is made from it.
        seed: seed of the hash; None: that of the release.
        restores: whether it may publish a Stored and then a Removed of a block that it keeps (Dynamo's `multi_lru`).
            Then only the warning reports blocks that readers lack.
        full_reports: whether requests of vLLM ask for full reports. Then a Stored without a parent whose blocks are all
            held is a report or a copy, so one additional Removed of them may follow, or none.
        compares_tokens: whether the tokens of a Stored are compared with its names although the rule for names is
            unknown; contradictions are warnings (`wrong_hash`).
        stores: by tier, the shared store that its blocks belong to; other tiers belong to the worker.
    """

    block_size: int | None = None
    num_blocks: int | None = None
    tier_blocks: Mapping[StorageTier, int] | None = None
    residency: Residency = "unique"
    prefix_closed: bool = True
    chain: Callable[[], Chain] = DynamoChain
    clears_below: bool = True
    chunk: int | None = None
    stores_again: bool = False
    hash: str | None = None
    seed: str | None = None
    restores: bool = True
    full_reports: bool = False
    compares_tokens: bool = False
    stores: Mapping[StorageTier, str] | None = None

    def capacity(self, tier: StorageTier) -> int | None:
        """Return the engine's number of blocks in a tier; None if unknown."""
        return self.num_blocks if tier is StorageTier.DEVICE else (self.tier_blocks or {}).get(tier)


UNKNOWN: Final = StreamSpec()
"""The spec of a stream of an unknown engine."""
