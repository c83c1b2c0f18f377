"""The tokens of a request of TensorRT-LLM, and the names of its blocks."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from pytest_kvmock.cache.trtllm.hashes import V1Hasher, V2Hasher
    from pytest_kvmock.moves import Block


class RequestTokens:
    """What a request of both managers has: its tokens so far, and who names its blocks. It grows at the end.

    Attributes:
        tokens: prompt and output so far.
        block_size: tokens a block.
        hasher: names its blocks, by its adapter and salt.
        num_prompt_tokens: length of the prompt.
    """

    __slots__ = ()

    tokens: list[int]
    block_size: int
    hasher: V1Hasher | V2Hasher
    num_prompt_tokens: int
    _rng: Random
    _names: list[bytes]
    _partial: tuple[int, UUID] | None

    def _begin(self, tokens: list[int], block_size: int, hasher: V1Hasher | V2Hasher, rng: Random) -> None:
        self.tokens, self.block_size, self.hasher, self._rng = tokens, block_size, hasher, rng
        self.num_prompt_tokens = len(tokens)
        self._names, self._partial = [], None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def names(self) -> list[int]:
        """The names of its full blocks."""
        digests, size = self._names, self.block_size
        done = len(digests)
        new = self.tokens[done * size : len(self.tokens) // size * size]
        digests += self.hasher.digests(new, size, done, digests[-1] if digests else None)
        return [self.hasher.name(each) for each in digests]

    @property
    def blocks(self) -> list[Block]:
        """Names of its full blocks, and a UUID for a last one that is not full."""
        names: list[Any] = [*self.names]
        if len(self.tokens) % self.block_size:
            if self._partial is None or self._partial[0] != len(names):
                self._partial = len(names), UUID(int=self._rng.getrandbits(128), version=4)
            names.append(self._partial[1])
        return names
