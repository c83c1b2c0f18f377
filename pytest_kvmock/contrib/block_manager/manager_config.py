"""Configuration of a block manager: runtime, model, and a layout for each pool; checked on creation.

Each builder of dynamo-llm 0.2.1 is a frozen dataclass here, with the same name and fields. It refuses the same values
as the builder and its validators, and names the field and its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pytest_kvmock.contrib.block_manager.block_errors import LayoutError
from pytest_kvmock.contrib.block_manager.storage import (
    DType,
    LayoutType,
    Storage,
    StorageAllocator,
    StorageType,
    block_bytes,
)
from pytest_kvmock.values.checks import check_integer, check_member, check_u64


class CancellationToken:
    """A flag that stays set once it is cancelled; several managers may share it.

    The names come from tokio. In Rust copies share the flag; here the object itself is shared.

    Args:
        parent: a token with which this one is cancelled too.
    """

    __slots__ = ("_is_cancelled", "_parent")

    def __init__(self, parent: CancellationToken | None = None) -> None:
        if parent is not None and not isinstance(parent, CancellationToken):
            raise TypeError(f"CancellationToken: parent must be a CancellationToken or None, got {parent!r:.80}")
        self._is_cancelled = False
        self._parent = parent

    def __repr__(self) -> str:
        return f"<CancellationToken, {'cancelled' if self.is_cancelled() else 'not cancelled'}>"

    def cancel(self) -> None:
        """Cancel this token and its children, not its parent. Cancelling it again changes nothing."""
        self._is_cancelled = True

    def is_cancelled(self) -> bool:
        """Return whether this token or one above it was cancelled.

        A token that finds its parent cancelled becomes cancelled itself, so that later calls do not check the parent.
        """
        if self._is_cancelled:
            return True
        parent = self._parent
        if parent is not None and parent.is_cancelled():
            self._is_cancelled = True
            self._parent = None
            return True
        return False

    def child_token(self) -> CancellationToken:
        """Return a token that is cancelled with this one, and can be cancelled separately.

        For a test that stops one of several managers, with the others or alone.
        """
        return CancellationToken(self)


class NixlOptions(StrEnum):
    """Whether other workers can read and write blocks."""

    ENABLED = "enabled"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class KvManagerRuntimeConfig:
    """The worker id of a manager, and the token that stops it.

    Attributes:
        worker_id: id of the worker, u64; managers that exchange blocks have different ones.
        cancellation_token: cancelling it stops the manager's pools; closing the manager cancels it, for all managers
            that share it.
        nixl: whether block sets can be imported, and remote blocks read and written.

    Raises:
        ValueError: the worker id is not a u64, or `nixl` is not an option.
        TypeError: the token is invalid.
    """

    worker_id: int
    cancellation_token: CancellationToken = field(default_factory=CancellationToken)
    nixl: NixlOptions = NixlOptions.ENABLED

    def __post_init__(self) -> None:
        check_u64("KvManagerRuntimeConfig.worker_id", self.worker_id)
        _check_type("KvManagerRuntimeConfig.cancellation_token", self.cancellation_token, CancellationToken)
        object.__setattr__(self, "nixl", check_member("KvManagerRuntimeConfig.nixl", self.nixl, NixlOptions))


@dataclass(frozen=True, slots=True)
class KvManagerModelConfig:
    """The size of a block: keys and values of `page_size` tokens in each layer.

    Attributes:
        num_layers: layers of the model, at least 1.
        page_size: tokens per block, at least 1.
        inner_dim: numbers per token and layer, at least 1.
        dtype: type of the numbers.

    Raises:
        ValueError: a number is invalid, or `dtype` is not a data type.
    """

    num_layers: int
    page_size: int
    inner_dim: int
    dtype: DType = DType.FP16

    def __post_init__(self) -> None:
        check_integer("KvManagerModelConfig.num_layers", self.num_layers, 1)
        check_integer("KvManagerModelConfig.page_size", self.page_size, 1, " (tokens a block)")
        check_integer("KvManagerModelConfig.inner_dim", self.inner_dim, 1)
        object.__setattr__(self, "dtype", check_member("KvManagerModelConfig.dtype", self.dtype, DType))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return block_bytes(self.num_layers, self.page_size, self.inner_dim, self.dtype)


@dataclass(frozen=True, slots=True)
class KvManagerLayoutConfig:
    """The number of blocks of a pool, and its memory.

    Attributes:
        num_blocks: number of blocks, at least 1.
        layout_type: arrangement of the blocks in memory.
        storage: the memory itself, one region; give exactly one of this and `allocator`.
        allocator: the allocator of the memory.

    Raises:
        ValueError: the number is below 1, both or neither of storage and allocator are given, or one has the wrong
            type.
    """

    num_blocks: int
    layout_type: LayoutType = LayoutType.FULLY_CONTIGUOUS
    storage: Sequence[Storage] | None = None
    allocator: StorageAllocator | None = None

    def __post_init__(self) -> None:
        check_integer("KvManagerLayoutConfig.num_blocks", self.num_blocks, 1)
        layout_type = check_member("KvManagerLayoutConfig.layout_type", self.layout_type, LayoutType)
        object.__setattr__(self, "layout_type", layout_type)
        if self.storage is not None and self.allocator is not None:
            raise ValueError("KvManagerLayoutConfig: cannot provide both storage and allocator; give exactly one")
        if self.allocator is not None:
            _check_type("KvManagerLayoutConfig.allocator", self.allocator, StorageAllocator)
            return
        if self.storage is None:
            raise ValueError("KvManagerLayoutConfig: must provide either storage or allocator")
        if not isinstance(self.storage, Sequence) or not all(isinstance(each, Storage) for each in self.storage):
            raise ValueError(
                "KvManagerLayoutConfig.storage must be a sequence of DeviceStorage or PinnedStorage, "
                f"got {self.storage!r:.80}"
            )
        object.__setattr__(self, "storage", tuple(self.storage))

    @property
    def storage_types(self) -> set[StorageType]:
        """Kinds of the given memory, or of the memory that the allocator makes."""
        if self.allocator is not None:
            return {self.allocator.storage_type}
        return {each.storage_type for each in self.storage or ()}


@dataclass(frozen=True, slots=True)
class KvBlockManagerConfig:
    """The whole configuration of a block manager.

    Attributes:
        runtime: the manager's worker id and settings.
        model: the sizes of a block.
        device_layout: blocks in GPU memory; None: no device pool.
        host_layout: blocks in page-locked host memory; None: no host pool.

    Raises:
        TypeError: a part is of another class.
        ValueError: a layout's memory has the wrong kind.
        LayoutError: the storage of a layout is not one region, or is smaller than its blocks.
    """

    runtime: KvManagerRuntimeConfig
    model: KvManagerModelConfig
    device_layout: KvManagerLayoutConfig | None = None
    host_layout: KvManagerLayoutConfig | None = None

    def __post_init__(self) -> None:
        _check_type("KvBlockManagerConfig.runtime", self.runtime, KvManagerRuntimeConfig)
        _check_type("KvBlockManagerConfig.model", self.model, KvManagerModelConfig)
        for name, expected in (("device_layout", StorageType.DEVICE), ("host_layout", StorageType.PINNED)):
            layout = getattr(self, name)
            if layout is None:
                continue
            where = f"KvBlockManagerConfig.{name}"
            _check_type(where, layout, KvManagerLayoutConfig)
            if layout.storage is not None and len(layout.storage) != 1:
                raise LayoutError(f"{where}: a fully contiguous layout takes one region, got {len(layout.storage)}")
            if layout.storage_types != {expected}:
                got = ", ".join(layout.storage_types)  # one storage, as there is one region
                raise ValueError(f"{where}: its memory must be of type {expected}, got {got}")
            needed = layout.num_blocks * self.model.block_bytes
            if layout.storage is not None and layout.storage[0].size < needed:
                raise LayoutError(
                    f"{where}: storage size {layout.storage[0].size} is less than required size {needed} "
                    f"({layout.num_blocks} blocks of {self.model.block_bytes} bytes)"
                )


def _check_type(where: str, value: object, wanted: Any) -> None:
    if not isinstance(value, wanted):
        name = getattr(wanted, "__name__", None) or " or ".join(each.__name__ for each in wanted.__args__)
        raise TypeError(f"{where} must be a {name}, got {value!r:.80}")
