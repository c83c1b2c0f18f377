"""Requests of TensorRT-LLM's V1, and the retention of their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from pytest_kvmock.engines.trtllm.cache_block import DEFAULT_PRIORITY, BlockHolder
from pytest_kvmock.engines.trtllm.hashes import BlockKey, V1Hasher
from pytest_kvmock.engines.trtllm.request_tokens import RequestTokens
from pytest_kvmock.values.checks import is_integer

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import PromptKeys

Range: TypeAlias = tuple[int, int | None, int, float | None]
"""First token, the one after the last (None: to the end), priority, duration in ms (None: forever)."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention of a request's blocks (`KvCacheRetentionConfig`).

    Attributes:
        ranges: ranges of the prompt, in any order. A block belongs to the range of its first token; outside of all
            ranges it has priority 35.
        decode: priority and duration of the blocks of output.

    Raises:
        ValueError: a priority is outside 0 to 100, a range is empty or overlaps another, a range without an end is not
            the last, or a duration is below 0 (`KvCacheRetentionConfig` also throws for these).
    """

    ranges: tuple[Range, ...] = ()
    decode: tuple[int, float | None] = (DEFAULT_PRIORITY, None)

    def __post_init__(self) -> None:
        for start, end, priority, duration in self.ranges:
            if not is_integer(start, 0) or not (end is None or is_integer(end, start + 1)):
                raise ValueError(
                    "a retention range has a first token of at least 0, and an end after it, or None; got "
                    f"{start!r:.80} to {end!r:.80}"
                )
            _check_priority(priority, duration)
        in_order = sorted(self.ranges, key=lambda each: each[0])
        for (start, end, *_), (following, last, *_) in pairwise(in_order):
            if end is None or end > following:
                raise ValueError(
                    f"retention ranges do not overlap, and the last alone may have no end; got {start} to {end}, "
                    f"and {following} to {last}"
                )
        _check_priority(*self.decode)

    def of_block(self, first: int) -> tuple[int | None, float | None]:
        """Return the priority and duration of a block of the prompt by its first token; None outside of all ranges."""
        for start, end, priority, duration in self.ranges:
            if start <= first and (end is None or first < end):
                return priority, duration
        return None, None


def _check_priority(priority: object, duration: object) -> None:
    if not is_integer(priority, 0) or priority > 100:
        raise ValueError(f"a retention priority is an integer from 0 to 100, got {priority!r:.80}")
    if duration is not None and (isinstance(duration, bool) or not isinstance(duration, int | float) or duration < 0):
        raise ValueError(f"a retention duration is a number of at least 0 (ms), or None; got {duration!r:.80}")


class V1Request(RequestTokens, BlockHolder):
    """One request, and its blocks in each window. It grows at the end.

    Args:
        tokens: tokens of its prompt, at least one.
        block_size: tokens a block.
        hasher: names its blocks, with its adapter and salt.
        keys: what its prompt carries in addition to its tokens; None if nothing.
        retention: retention of its blocks.
        rng: source of the names of partial blocks.

    Attributes:
        tokens: prompt and output so far.
        length: number of tokens that have room in its blocks; 0 without blocks.
    """

    hasher: V1Hasher

    def __init__(
        self,
        tokens: list[int],
        block_size: int,
        hasher: V1Hasher,
        keys: PromptKeys | None,
        *,
        retention: Retention,
        rng: Random,
    ) -> None:
        RequestTokens.__init__(self, tokens, block_size, hasher, rng)
        BlockHolder.__init__(self, keys)
        self.retention = retention
        self._full_keys: list[BlockKey] = []
        self._tail: tuple[int, BlockKey] | None = None

    def forget(self) -> None:
        """Drop its blocks: it starts over with its present tokens."""
        super().forget()
        self.length = 0

    def block_keys(self, count: int, *, partial: bool) -> list[BlockKey]:
        """Return the keys of its first tokens, block by block; each key is made once.

        Args:
            count: number of tokens.
            partial: whether to include a partial last block.
        """
        size, key, full = self.block_size, self.hasher.key, self._full_keys
        for at in range(len(full) * size, count // size * size, size):
            full.append(key(self.tokens[at : at + size]))
        keys = full[: count // size]
        if partial and count % size:
            if self._tail is None or self._tail[0] != count:
                self._tail = count, key(self.tokens[len(keys) * size : count])
            keys.append(self._tail[1])
        return keys
