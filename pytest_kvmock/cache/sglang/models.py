"""The hybrid models that SGLang serves with parts beside full attention, by their numbers; sizes follow the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from types import MappingProxyType
from typing import Final

from pytest_kvmock.cache.base import check_num_blocks, check_request_block_size
from pytest_kvmock.cache.sglang.geometry import Geometry

LEAST_PAGES: Final = 16
"""Pages for windows that a cache of a model has at least, or as many as for full attention: for caches of tests."""

LEAST_STATES: Final = 64
"""Slots that a cache of a model with states has at least: a request takes up to six."""

BLOCKS_A_STATE: Final = 16
"""Pages for each of which such a cache has a slot. An assumption: SGLang counts slots by memory (0.9 of that for KV)."""


@dataclass(frozen=True, slots=True)
class SglangModel:
    """One model at a page size at which its numbers are its own; at others they are in proportion.

    Attributes:
        page: tokens of that page.
        window: tokens of its window, as the model's config has it; None: it has none.
        is_exclusive: whether SGLang's window is one token less, as a token sees itself besides.
        ratio: room for windows, as a share of that for full attention.
        interval: as `Geometry.window_interval`.
        grid: as `Geometry.state_grid`; None: it has no states.
        track: as `Geometry.state_interval`.
    """

    page: int
    window: int | None = None
    is_exclusive: bool = True
    ratio: float = 0.8
    interval: int = 128
    grid: int | None = None
    track: int = 256

    def geometry(self, name: str, num_blocks: int, block_size: int) -> Geometry:
        """Return the parts of a cache of so many pages of so many tokens.

        Raises:
            ValueError: a number is not what it must be, or the model cannot be scaled to this page.
        """
        check_num_blocks(num_blocks)
        check_request_block_size(block_size)
        step = self.page // gcd(self.page, self.window or self.page, self.grid or self.page)
        if block_size % step:
            raise ValueError(
                f"backend {name!r} cannot be scaled to block_size {block_size}; it can to multiples of {step}, and has "
                f"{self.page} tokens a page itself"
            )

        def scaled(tokens: int) -> int:
            return max(1, tokens * block_size // self.page)

        if self.grid is None:
            assert self.window is not None
            window = scaled(self.window) - self.is_exclusive
            # A small cache has room for one window and a page more, or for 16 pages, whatever share that is.
            least = min(num_blocks, max(LEAST_PAGES, -(-window // block_size) + 1))
            pages = max(int(num_blocks * self.ratio), least)
            ratio = Fraction(pages, num_blocks)
            return Geometry(window=window, window_ratio=ratio, window_interval=scaled(self.interval))
        states = max(LEAST_STATES, num_blocks // BLOCKS_A_STATE)
        return Geometry(states=states, state_grid=scaled(self.grid), state_interval=scaled(self.track))


MODELS: Final[Mapping[str, SglangModel]] = MappingProxyType(
    {
        # Windows are those of the models' configs: sliding_window 128 (gpt-oss), 1024 (Gemma 4), attention_chunk_size 8192
        # (Llama 4, whose chunked layers SGLang treats as a window), 128 (DeepSeek-V4). SGLang takes any page for the first
        # three (1 by default, 64 on SM100); at 16 their windows have as many pages as they have blocks in vLLM.
        "sglang_gpt_oss": SglangModel(page=16, window=128),
        "sglang_gemma4": SglangModel(page=16, window=1024),
        "sglang_llama4": SglangModel(page=16, window=8192, is_exclusive=False),
        # Chunks of the linear attention have 64 tokens (`FLA_CHUNK_SIZE`), pages 64 on SM100, states are tracked at 256.
        "sglang_qwen3_next": SglangModel(page=64, grid=64),
        "sglang_kimi_linear": SglangModel(page=64, grid=64),
        "sglang_deepseek_v4": SglangModel(page=256, window=128, is_exclusive=False, ratio=0.1),
    }
)
"""The models by the names of their backends (SGLang 0.5.23)."""
