"""The memory of a pool: data types, storages and allocators.

Only sizes are counted: no device or page-locked host memory is allocated. A written block keeps its payload as Python
bytes. Names come from dynamo-llm 0.2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import ClassVar, Final, TypeAlias

from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.events import StorageTier


class CacheLevel(StrEnum):
    """The place of KV cache blocks."""

    G1 = "G1"
    """GPU memory."""
    G2 = "G2"
    """CPU memory, page-locked."""
    G3 = "G3"
    """Local NVMe; 0.2.1 has no pool of it."""
    G4 = "G4"
    """Remote NVMe; 0.2.1 has no pool of it."""


class DType(Enum):
    """Type of the numbers in the cache."""

    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def size_in_bytes(self) -> int:
        """Bytes of one number: the bits at the end of its name, divided by 8."""
        return int(self.value.lstrip("bfp")) // 8


def block_bytes(num_layers: int, page_size: int, inner_dim: int, dtype: DType) -> int:
    """Return the bytes of one block: layers x page size x inner dimension x bytes of a number."""
    return num_layers * page_size * inner_dim * dtype.size_in_bytes


class LayoutType(StrEnum):
    """The arrangement of blocks in memory."""

    FULLY_CONTIGUOUS = "fully_contiguous"
    """All blocks, and their layers, one after the other in one region: the only layout of 0.2.1."""


class StorageType(StrEnum):
    """Kind of memory."""

    DEVICE = "device"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True)
class DeviceStorage:
    """A region of GPU memory, described by its size.

    Attributes:
        size: bytes, at least 1.
        device_id: number of the GPU.

    Raises:
        ValueError: a number is invalid.
    """

    storage_type: ClassVar[StorageType] = StorageType.DEVICE
    size: int
    device_id: int = 0

    def __post_init__(self) -> None:
        check_integer("DeviceStorage.size", self.size, 1, " (bytes)")
        check_integer("DeviceStorage.device_id", self.device_id, 0)


@dataclass(frozen=True, slots=True)
class PinnedStorage:
    """A region of page-locked host memory, described by its size.

    Attributes:
        size: bytes, at least 1.

    Raises:
        ValueError: the size is not an integer of at least 1.
    """

    storage_type: ClassVar[StorageType] = StorageType.PINNED
    size: int

    def __post_init__(self) -> None:
        check_integer("PinnedStorage.size", self.size, 1, " (bytes)")


@dataclass(frozen=True, slots=True)
class DeviceAllocator:
    """An allocator of GPU memory.

    Attributes:
        device_id: number of the GPU.

    Raises:
        ValueError: the number is not an integer of at least 0.
    """

    storage_type: ClassVar[StorageType] = StorageType.DEVICE
    device_id: int = 0

    def __post_init__(self) -> None:
        check_integer("DeviceAllocator.device_id", self.device_id, 0)

    def allocate(self, size: int) -> DeviceStorage:
        """Return a region of `size` bytes."""
        return DeviceStorage(size, self.device_id)


@dataclass(frozen=True, slots=True)
class PinnedAllocator:
    """An allocator of page-locked host memory."""

    storage_type: ClassVar[StorageType] = StorageType.PINNED

    def allocate(self, size: int) -> PinnedStorage:
        """Return a region of `size` bytes."""
        return PinnedStorage(size)


Storage: TypeAlias = DeviceStorage | PinnedStorage
"""A region of memory."""

StorageAllocator: TypeAlias = DeviceAllocator | PinnedAllocator
"""An allocator of regions."""

TIER_OF: Final = {StorageType.DEVICE: StorageTier.DEVICE, StorageType.PINNED: StorageTier.HOST_PINNED}
"""The tier in events, by the kind of a pool's memory."""
