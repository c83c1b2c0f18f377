"""What users say of the tiers below the device: `tiers={"host": 64, "gbps": 14.0}`, read in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isqrt
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.checks import check_integer, check_number, unknown_text
from pytest_kvmock.tiers.bandwidth import DEFAULT_GBPS
from pytest_kvmock.tiers.offload import HostOffload

if TYPE_CHECKING:
    from pytest_kvmock.cache.offload import OffloadEngine

DEFAULT_BYTES_PER_TOKEN: Final = 160_000
"""KV cache of a token: 70 billion parameters at 8 bits, roughly; 16 tokens take 0.18 ms at 14 GB/s."""

_MOST_BYTES: Final = 2**63 - 1
_SAME_AS_HOST: Final = "g2"
_NOT_BUILT: Final = ("disk", "g3", "external", "g4")
_KNOWN: Final = ("host", _SAME_AS_HOST, "gbps", "bytes_per_token", "batch")


@dataclass(frozen=True, slots=True)
class Tiers:
    """The host tier of one worker.

    Attributes:
        host: blocks that it has room for.
        gbps: bandwidth of the link to it and of the link back, in GB/s; 0 is infinite.
        bytes_per_token: bytes of KV cache a token.
        batch: blocks of one transfer to the host, and transfers at once; None: the largest whose square fits the host.

    Raises:
        ValueError: a number is not what it must be, or `batch` squared is more than `host`: with so many blocks under way
            the host could not hold a batch whole, which then is lost, with its slots on the device.
    """

    host: int
    gbps: float = DEFAULT_GBPS
    bytes_per_token: int = DEFAULT_BYTES_PER_TOKEN
    batch: int | None = None

    def __post_init__(self) -> None:
        check_integer("tiers: host", self.host, 1, " (blocks)")
        check_number("tiers: gbps", self.gbps, unit=" (GB/s; 0 is infinite)")
        check_integer("tiers: bytes_per_token", self.bytes_per_token, 0)
        if self.bytes_per_token > _MOST_BYTES:
            raise ValueError(
                "tiers: bytes_per_token must be an integer of at least 0 and at most 2**63 - 1, "
                f"got {self.bytes_per_token!r:.80}"
            )
        if self.batch is None:
            return
        check_integer("tiers: batch", self.batch, 1, ", or None")
        if self.batch**2 > self.host:
            raise ValueError(
                f"tiers: batch must be at most {isqrt(self.host)} for a host of {self.host} blocks, got {self.batch}: "
                "batch squared blocks may be on their way, and a batch that the host cannot hold whole is lost"
            )

    def __str__(self) -> str:
        return str(self.to_dict())

    @classmethod
    def of(cls, value: object) -> Tiers:
        """Read tiers from a mapping as users write it; tiers are returned as they are.

        Raises:
            ValueError: it is no mapping, a key is unknown or not built, the host is missing or given twice; or as above.
        """
        if isinstance(value, Tiers):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"tiers must be a mapping such as {{'host': 64, 'gbps': 14.0}}, got {value!r:.80}")  # noqa: TRY004 - one error
        for key in value:
            if key in _NOT_BUILT:
                raise ValueError(
                    f"tiers: {key!r} is not built: no released engine could be recorded with it. Events of disk and "
                    "external tiers are understood where you publish them yourself"
                )
            if key not in _KNOWN:
                raise ValueError(unknown_text("key of tiers", key, _KNOWN))
        given: dict[str, Any] = dict(value)
        if _SAME_AS_HOST in given:
            if "host" in given:
                raise ValueError("tiers: 'host' and 'g2' are the same; give one of them")
            given["host"] = given.pop(_SAME_AS_HOST)
        if "host" not in given:
            raise ValueError("tiers: 'host' is missing, the blocks that host memory has room for")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Return what `of` reads, without defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def make(self, block_size: int) -> OffloadEngine:
        """Make the engine of one manager whose blocks have so many tokens."""
        return HostOffload(
            self.host,
            block_bytes=self.bytes_per_token * block_size,
            batch_size=self.batch or isqrt(self.host),
            to_host_gbps=self.gbps,
            to_device_gbps=self.gbps,
        )
