"""Block sets: a worker's description of its pools, by which others can read and write its blocks (dynamo-llm 0.2.1).

The set of a worker is a value. It is exchanged as an object or as bytes; the original has only the serialized form. The
user carries it to other workers, as the discovery plane does in Dynamo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Self

from pytest_kvmock.contrib.block_manager.json_fields import JsonFields, from_json, to_json
from pytest_kvmock.contrib.block_manager.remote_errors import NixlSerializationError
from pytest_kvmock.contrib.block_manager.storage import DType, block_bytes
from pytest_kvmock.values.checks import check_integer, check_member, check_u64

_FIELDS: Final = ("worker_id", "agent_id", "incarnation", "block_sets")
_NUMBERS: Final = ("num_blocks", "num_layers", "page_size", "inner_dim")
_LAYOUT_FIELDS: Final = ("block_set_idx", "mem_type", "device_id", *_NUMBERS, "dtype")


class MemType(StrEnum):
    """Kind of memory in NIXL's terms, limited to the kinds from which 0.2.1 imports block sets."""

    DRAM = "dram"
    """Host memory."""
    VRAM = "vram"
    """GPU memory."""


@dataclass(frozen=True, slots=True)
class BlockSetLayout:
    """The size of a pool: its number of blocks, its memory, and the size of a block.

    Attributes:
        mem_type: kind of memory.
        num_blocks: number of blocks, at least 1.
        num_layers, page_size, inner_dim: sizes of the model, each at least 1.
        dtype: type of the numbers.
        device_id: number of the GPU; 0 for the host.

    Raises:
        ValueError: a number is invalid, or the kind of memory or data type is unknown.
    """

    mem_type: MemType
    num_blocks: int
    num_layers: int
    page_size: int
    inner_dim: int
    dtype: DType = DType.FP16
    device_id: int = 0

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            check_integer(f"BlockSetLayout.{name}", getattr(self, name), 1)
        check_integer("BlockSetLayout.device_id", self.device_id, 0)
        object.__setattr__(self, "mem_type", check_member("BlockSetLayout.mem_type", self.mem_type, MemType))
        object.__setattr__(self, "dtype", check_member("BlockSetLayout.dtype", self.dtype, DType))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return block_bytes(self.num_layers, self.page_size, self.inner_dim, self.dtype)


@dataclass(frozen=True, slots=True)
class NixlBlockSet:
    """All pools of one worker, as `export_local_blockset` describes them and `import_remote_blockset` takes them.

    Attributes:
        worker_id: the worker that owns them, u64.
        block_sets: the layouts by the number of the set, from 1: first the host's, then the device's.
        agent_id: name of the worker's NIXL agent, which is its worker id in decimal; empty for a manager without NIXL.
        incarnation: number of earlier managers with this worker id in its fabric. An addition to the original: it shows
            a restart.

    Raises:
        ValueError: a number is invalid.
        TypeError: a layout is invalid, the layouts are not a mapping, or the agent id is not text.
    """

    worker_id: int
    block_sets: Mapping[int, BlockSetLayout]
    agent_id: str = ""
    incarnation: int = 0

    def __post_init__(self) -> None:
        check_u64("NixlBlockSet.worker_id", self.worker_id)
        check_integer("NixlBlockSet.incarnation", self.incarnation, 0)
        if not isinstance(self.agent_id, str):
            raise TypeError(f"NixlBlockSet.agent_id must be text, got {self.agent_id!r:.80}")
        if not isinstance(self.block_sets, Mapping):
            raise TypeError(
                f"NixlBlockSet.block_sets must be a mapping from numbers to layouts, got {self.block_sets!r:.80}"
            )
        for index, layout in self.block_sets.items():
            check_integer("NixlBlockSet.block_sets: the number of a set", index, 0)
            if not isinstance(layout, BlockSetLayout):
                raise TypeError(f"NixlBlockSet.block_sets[{index}] must be a BlockSetLayout, got {layout!r:.80}")
        object.__setattr__(self, "block_sets", MappingProxyType(dict(self.block_sets)))

    def __hash__(self) -> int:
        return hash((self.worker_id, self.agent_id, self.incarnation, frozenset(self.block_sets)))

    def to_bytes(self) -> bytes:
        """Return the set as bytes; equal sets have equal bytes."""
        layouts = [
            {
                "block_set_idx": index,
                "mem_type": layout.mem_type.value,
                "device_id": layout.device_id,
                **{name: getattr(layout, name) for name in _NUMBERS},
                "dtype": layout.dtype.value,
            }
            for index, layout in sorted(self.block_sets.items())
        ]
        fields = {"worker_id": self.worker_id, "agent_id": self.agent_id, "incarnation": self.incarnation}
        return to_json({**fields, "block_sets": layouts})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a set from bytes.

        Raises:
            NixlSerializationError: the bytes are of another kind, or truncated.
            TypeError: `data` is not bytes.
        """
        fields = from_json("block set", data, _FIELDS)
        block_sets: dict[int, BlockSetLayout] = {}
        for each in fields.objects("block_sets", _LAYOUT_FIELDS):
            index = each.integer("block_set_idx")
            if index in block_sets:
                raise NixlSerializationError(f"a block set names set {index} twice")
            block_sets[index] = _layout_of(each)
        return cls(fields.integer("worker_id"), block_sets, fields.text("agent_id"), fields.integer("incarnation"))


def _layout_of(fields: JsonFields) -> BlockSetLayout:
    """Make a layout from its fields."""
    return BlockSetLayout(
        mem_type=fields.member("mem_type", MemType),
        **{name: fields.integer(name, 1) for name in _NUMBERS},
        dtype=fields.member("dtype", DType),
        device_id=fields.integer("device_id"),
    )
