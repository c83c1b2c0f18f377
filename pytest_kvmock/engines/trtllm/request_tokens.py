"""The tokens of a request of TensorRT-LLM, and the names of its blocks."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pytest_kvmock.values.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from pytest_kvmock.engines.trtllm.hashes import V1Hasher, V2Hasher
    from pytest_kvmock.values.moves import Block


def checked_prompt(prompt: Prompt | TokenIds) -> Prompt:
    """Return a prompt that has tokens.

    Raises:
        ValueError: it is empty, or has only hashes.
    """
    prompt = Prompt.of(prompt)
    if prompt.tokens is None:
        raise ValueError("a prompt of hashes has no tokens, of which TensorRT-LLM matches parts of blocks")
    if not prompt.tokens:
        raise ValueError("the prompt is empty; a request needs at least one token")
    return prompt


class RequestTokens:
    """The tokens of a request of either manager, and the hasher that names its blocks. It grows at the end.

    Attributes:
        tokens: prompt and output so far.
        block_size: tokens a block.
        hasher: names its blocks, with its adapter and salt.
        num_prompt_tokens: length of the prompt.
    """

    def __init__(self, tokens: list[int], block_size: int, hasher: V1Hasher | V2Hasher, rng: Random) -> None:
        self.tokens, self.block_size, self.hasher, self._rng = tokens, block_size, hasher, rng
        self.num_prompt_tokens = len(tokens)
        self._names: list[int] = []
        self._last: bytes | None = None
        self._partial: tuple[int, UUID] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def names(self) -> list[int]:
        """Names of its full blocks; read-only."""
        names, size = self._names, self.block_size
        new = self.tokens[len(names) * size : len(self.tokens) // size * size]
        if new:
            digests = self.hasher.digests(new, size, len(names), self._last)
            self._last = digests[-1]
            names += [self.hasher.name(each) for each in digests]
        return names

    @property
    def blocks(self) -> list[Block]:
        """Names of its full blocks, and a UUID for a partial last one."""
        names: list[Any] = [*self.names]
        if len(self.tokens) % self.block_size:
            if self._partial is None or self._partial[0] != len(names):
                self._partial = len(names), UUID(int=self._rng.getrandbits(128), version=4)
            names.append(self._partial[1])
        return names
