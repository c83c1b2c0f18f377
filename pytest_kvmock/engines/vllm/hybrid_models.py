"""Hybrid models as vLLM 0.33.0 caches them: their cache groups at the model's own sizes or scaled to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType
from typing import Any, Final

from pytest_kvmock.engines.base.cache_group import FULL, CacheGroup
from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager
from pytest_kvmock.values.checks import check_integer

# Theory of operation
#
# vLLM puts the same number of layers into each group, the smallest number of layers of one kind, and numbers the groups
# by their first layers. The number of groups follows from the model's list of layers; windows and chunks are in its
# configuration. A block has 16 tokens by default. With states, its number of tokens is chosen so that its page is as
# large as a state, which depends on data types and parallelism; these are noted.
#
# Tests may use any block size. All numbers of tokens are scaled with it, so that caching, hits and events, counted in
# blocks, stay the same.

SMALLEST: Final = 16
"""The fewest tokens of a block if no size is requested."""


@dataclass(frozen=True, slots=True)
class HybridModel:
    """One model.

    Attributes:
        name: the name of its backend, without `vllm_`.
        model: the model, and the settings that its sizes depend on.
        groups: in vLLM's order, at the model's own sizes.
        source: source of the numbers.
        assumed: what was assumed instead; empty if nothing was.
    """

    name: str
    model: str
    groups: tuple[CacheGroup, ...]
    source: str
    assumed: str = ""

    @property
    def real_block_size(self) -> int:
        """Tokens of a block of the attention group at the model's own sizes."""
        return next(group.block_size for group in self.groups if group.kind in FULL)

    @property
    def base_block_size(self) -> int:
        """The smallest block of the attention group at which all token counts are integers."""
        return self.real_block_size // gcd(*(size for group in self.groups for size in _sizes(group)))

    @property
    def default_block_size(self) -> int:
        """The smallest valid block size that is not below `SMALLEST`."""
        base = self.base_block_size
        return -(-SMALLEST // base) * base

    def sized(self, block_size: int) -> tuple[CacheGroup, ...]:
        """Return the groups with `block_size` tokens per block of the attention group, and all other sizes scaled.

        Raises:
            ValueError: a scaled size would not be an integer; the message says which block sizes are valid.
        """
        check_integer("block_size", block_size, 1, " (tokens a block)")
        base, real = self.base_block_size, self.real_block_size
        if block_size % base:
            raise ValueError(
                f"block_size: the blocks of {self.name} have multiples of {base} tokens in its attention group, as all "
                f"groups are scaled with it ({real} at the model's own sizes); got {block_size}"
            )
        return tuple(
            replace(
                group,
                **{name: value * block_size // real for name, value in _named_sizes(group).items()},
                # At any size, a state is exported wherever hits may end.
                checkpoint=None if group.checkpoint is None else max(1, group.checkpoint * block_size // real),
            )
            for group in self.groups
        )


def _named_sizes(group: CacheGroup) -> dict[str, Any]:
    sizes = {"block_size": group.block_size, "window": group.window, "chunk": group.chunk}
    return {name: size for name, size in sizes.items() if size is not None}


def _sizes(group: CacheGroup) -> Sequence[int]:
    return list(_named_sizes(group).values())


def _windows(count: int, block_size: int, window: int, kind: str = "sliding_window") -> tuple[CacheGroup, ...]:
    return (CacheGroup(kind, block_size, window=window),) * count


def _states(count: int, block_size: int, checkpoint: int | None = None) -> tuple[CacheGroup, ...]:
    return (CacheGroup("mamba", block_size, checkpoint=checkpoint),) * count


def _full(block_size: int) -> tuple[CacheGroup, ...]:
    return (CacheGroup("full_attention", block_size),)


def _mla(block_size: int) -> tuple[CacheGroup, ...]:
    return (CacheGroup("mla_attention", block_size),)


_DEFAULT: Final = "vLLM's default block of 16 tokens"
_READ: Final = "the page of a state in vLLM 0.33.0, as published"

HYBRID_MODELS: Final = MappingProxyType(
    {
        model.name: model
        for model in (
            HybridModel(
                "gpt_oss",
                "gpt-oss (20b, 120b)",
                _windows(1, 16, 128) + _full(16),
                f"its configuration (every other layer, sliding_window 128); {_DEFAULT}",
            ),
            HybridModel(
                "gemma3",
                "Gemma 3 27b",
                _windows(6, 16, 1024) + _full(16),
                f"its configuration (62 layers, 10 of them global, sliding_window 1024); {_DEFAULT}",
            ),
            HybridModel(
                "gemma4",
                "Gemma 4 31b",
                _windows(5, 16, 1024) + _full(32),
                f"its configuration (5 local layers a global one, sliding_window 1024); {_DEFAULT}",
                "global blocks of 32 tokens, so that pages are equal",
            ),
            HybridModel(
                "qwen3_next",
                "Qwen3-Next 80B-A3B",
                _states(3, 544) + _full(544),
                f"its configuration (48 layers, each fourth of full attention); {_READ}: 544 tokens",
                "kernels that export no state (FlashInfer's do, at multiples of 64, with blocks of 576: a variant in "
                "the reference)",
            ),
            HybridModel(
                "kimi_linear",
                "Kimi-Linear 48B-A3B",
                _states(3, 1920) + _mla(1920),
                "its configuration (three layers of KDA a layer of MLA); the page of a state in vLLM 0.33.0",
                "kernels that export no state",
            ),
            HybridModel(
                "kimi_k3",
                "Kimi-K3 (tensor parallel 8, fp8)",
                _states(3, 1536, 16) + _mla(1536),
                f"its configuration (three layers of KDA a layer of MLA); {_READ}: 1536 tokens",
                "FlashKDA, which exports states at multiples of 16 tokens",
            ),
            HybridModel(
                "deepseek_v4",
                "DeepSeek-V4-Flash",
                _windows(2, 64, 128, "sliding_window_mla")
                + _mla(256)
                + _windows(1, 4, 8, "sliding_window_mla")
                + _windows(1, 8, 128, "sliding_window_mla"),
                "its layers in vLLM 0.33.0: windows, compressed MLA, and the states of its compressors",
                "the order and the sizes of the compressors' groups",
            ),
            HybridModel(
                "llama4",
                "Llama 4 Scout",
                (CacheGroup("chunked_local_attention", 16, chunk=8192),) * 3 + _full(16),
                f"its configuration (48 layers, each fourth global, attention_chunk_size 8192); {_DEFAULT}",
            ),
        )
    }
)
"""The models, by name."""


def hybrid_manager(model: str, *, block_size: int, **options: Any) -> VllmHybridManager:
    """Make the manager of a model with `block_size` tokens per block of its attention group.

    Raises:
        ValueError: the model cannot be scaled to that, or an option is invalid.
    """
    return VllmHybridManager(groups=HYBRID_MODELS[model].sized(block_size), backend=f"vllm_{model}", **options)
