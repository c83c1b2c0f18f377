"""Requests of TensorRT-LLM's V1, and what they want of the blocks that they leave."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from pytest_kvmock.cache.trtllm.cache_block import DEFAULT_PRIORITY, BlockHolder
from pytest_kvmock.cache.trtllm.hashes import BlockKey, V1Hasher
from pytest_kvmock.cache.trtllm.request_tokens import RequestTokens
from pytest_kvmock.checks import is_integer

if TYPE_CHECKING:
    from pytest_kvmock.prompt_keys import PromptKeys

Range: TypeAlias = tuple[int, int | None, int, float | None]
"""First token, the one after the last (None: to the end), priority, duration in ms (None: for ever)."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the blocks of a request are to be kept (`KvCacheRetentionConfig`).

    Attributes:
        ranges: of the prompt; a block is in the first one that has its first token, and of priority 35 in none.
        decode: priority and duration of the blocks of what is generated.

    Raises:
        ValueError: a priority outside 0 to 100, a range that ends before it begins, a duration below 0.
    """

    ranges: tuple[Range, ...] = ()
    decode: tuple[int, float | None] = (DEFAULT_PRIORITY, None)

    def __post_init__(self) -> None:
        for start, end, priority, duration in self.ranges:
            if not is_integer(start, 0) or not (end is None or is_integer(end, start)):
                raise ValueError(
                    f"a retention range has a first token of at least 0, and an end that is not before it, or None; got {start!r:.80} "
                    f"to {end!r:.80}"
                )
            _check_priority(priority, duration)
        _check_priority(*self.decode)

    def of_block(self, first: int) -> tuple[int | None, float | None]:
        """Priority and duration of a block of the prompt by its first token; None where none are wanted."""
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
    """One request, and the blocks that it has in each window. It grows at the end.

    Args:
        tokens: of its prompt, at least one.
        block_size: tokens a block.
        hasher: names its blocks, by its adapter and salt.
        keys: what its prompt carries beside its tokens; None: nothing.
        retention: of its blocks.
        rng: source of the names of partial blocks.

    Attributes:
        tokens: prompt and output so far.
        length: tokens that it has blocks for; 0: it has none.
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

    def forget(self) -> None:
        """Forget its blocks: it begins anew, with the tokens that it has."""
        super().forget()
        self.length = 0

    def block_keys(self, count: int, *, partial: bool) -> list[BlockKey]:
        """The keys of its first tokens, block by block.

        Args:
            count: so many tokens.
            partial: with a last block that is not full.
        """
        size, key, tokens = self.block_size, self.hasher.key, self.tokens
        return [
            key(tokens[at : min(at + size, count)]) for at in range(0, count if partial else count // size * size, size)
        ]
