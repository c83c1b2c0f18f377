"""The numbers of hybrid models that SGLang serves with windows or states; sizes scale with the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from types import MappingProxyType
from typing import Final

from pytest_kvmock.engines.base.manager_base import check_num_blocks, check_request_block_size
from pytest_kvmock.engines.sglang.geometry import Geometry

LEAST_PAGES: Final = 16
"""Least number of window pages of a model's cache, unless full attention has fewer; for the small caches of tests."""

LEAST_STATES: Final = 64
"""Least number of state slots of a model's cache: a request takes up to six."""

BLOCKS_A_STATE: Final = 16
"""Pages per state slot of such a cache. This is an assumption: SGLang sizes slots by memory (0.9 of that for KV)."""


@dataclass(frozen=True, slots=True)
class SglangModel:
    """One model at the page size of its real numbers; at other page sizes they scale in proportion.

    Attributes:
        page: tokens per page at that size.
        window: tokens of its window, by the model's config; None if it has none.
        is_exclusive: whether SGLang's window is one token shorter, as it does not include the token itself.
        ratio: size of the window pool as a share of the full attention pool.
        interval: see `Geometry.window_interval`.
        grid: see `Geometry.state_grid`; None if it has no states.
        track: see `Geometry.state_interval`.
    """

    page: int
    window: int | None = None
    is_exclusive: bool = True
    ratio: float = 0.8
    interval: int = 128
    grid: int | None = None
    track: int = 256

    def geometry(self, name: str, num_blocks: int, block_size: int) -> Geometry:
        """Return the parts of a cache of `num_blocks` pages of `block_size` tokens.

        Raises:
            ValueError: a number is invalid, or the model cannot be scaled to this page size.
        """
        check_num_blocks(num_blocks)
        check_request_block_size(block_size)
        step = self.page // gcd(self.page, self.window or self.page, self.grid or self.page)
        if block_size % step:
            raise ValueError(
                f"backend {name!r} cannot be scaled to block_size {block_size}; it can be scaled to multiples of "
                f"{step}, and its own pages have {self.page} tokens"
            )

        def scaled(tokens: int) -> int:
            return max(1, tokens * block_size // self.page)

        if self.grid is None:
            assert self.window is not None
            window = scaled(self.window) - self.is_exclusive
            # A small cache has room for one window plus a page, or for 16 pages, whatever the ratio gives.
            least = min(num_blocks, max(LEAST_PAGES, -(-window // block_size) + 1))
            pages = max(int(num_blocks * self.ratio), least)
            ratio = Fraction(pages, num_blocks)
            return Geometry(window=window, window_ratio=ratio, window_interval=scaled(self.interval))
        states = max(LEAST_STATES, num_blocks // BLOCKS_A_STATE)
        return Geometry(states=states, state_grid=scaled(self.grid), state_interval=scaled(self.track))


MODELS: Final[Mapping[str, SglangModel]] = MappingProxyType(
    {
        # Windows are those of the models' configs: sliding_window 128 (gpt-oss), 1024 (Gemma 4), attention_chunk_size
        # 8192 (Llama 4, whose chunked layers SGLang treats as a window), 128 (DeepSeek-V4). SGLang accepts any page
        # size for the first three (1 by default, 64 on SM100); at 16 a window has as many pages as it has blocks in
        # vLLM.
        "sglang_gpt_oss": SglangModel(page=16, window=128),
        "sglang_gemma4": SglangModel(page=16, window=1024),
        "sglang_llama4": SglangModel(page=16, window=8192, is_exclusive=False),
        # Linear attention has chunks of 64 tokens (`FLA_CHUNK_SIZE`), pages of 64 on SM100, and tracks states every
        # 256.
        "sglang_qwen3_next": SglangModel(page=64, grid=64),
        "sglang_kimi_linear": SglangModel(page=64, grid=64),
        "sglang_deepseek_v4": SglangModel(page=256, window=128, is_exclusive=False, ratio=0.1),
    }
)
"""The models, by backend name (SGLang 0.5.23)."""
