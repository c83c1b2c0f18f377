"""How long copies between device and host take where each direction copies one group after the other, as SGLang's HiCache does."""

from __future__ import annotations

from pytest_kvmock.tiers.bandwidth import BYTES_PER_MS


class HostLinks:
    """The links of one worker to its host and back.

    Args:
        gbps: bandwidth of each, in GB/s (10**9 bytes); 0 is infinite.
        block_bytes: bytes of a block.

    Attributes:
        gbps: as above.
        block_bytes: as above.
    """

    __slots__ = ("block_bytes", "gbps")

    def __init__(self, gbps: float, block_bytes: int) -> None:
        self.gbps = gbps
        self.block_bytes = block_bytes

    def __repr__(self) -> str:
        return f"<HostLinks of {self.gbps} GB/s, {self.block_bytes} bytes a block>"

    def ms(self, blocks: int) -> float:
        """How long a copy of so many blocks takes by itself, in ms."""
        return blocks * self.block_bytes / (self.gbps * BYTES_PER_MS) if self.gbps else 0.0
