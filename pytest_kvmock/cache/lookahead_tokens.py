"""The tokens of a request of an engine with a draft model, and the blocks that they complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from pytest_kvmock.cache.hashed import BlockHasher, HashedTokens
from pytest_kvmock.tokens import Prompt, keyed_block_hashes


class LookaheadTokens(HashedTokens):
    """The tokens of a request whose blocks have names that cover some of the next tokens too: a block is complete with these.

    Args:
        prompt: tokens; one of hashes has none to look at.
        block_size: tokens a block.
        hasher: names the blocks, and looks ahead.
        rng: as `HashedTokens`.
        lookahead: how many tokens.

    Raises:
        ValueError: the prompt is empty, or has no tokens.

    Attributes:
        lookahead: as above.
    """

    __slots__ = ("lookahead",)

    def __init__(self, prompt: Prompt, block_size: int, hasher: BlockHasher, rng: Random, lookahead: int) -> None:
        if prompt.tokens is None:
            raise ValueError(
                "a prompt of hashes has no tokens, and with this draft model blocks are named by the tokens after them, too; "
                "give tokens"
            )
        self.lookahead = lookahead
        super().__init__(prompt, block_size, hasher, rng)
        self._local = None

    @property
    def local_hashes(self) -> list[int]:
        """The router's hash of each complete block: that of the window of its tokens and the next ones."""
        if self._local is None:
            local = self._prompt.block_hashes(self.block_size, self.lookahead)
            self._local = local.copy() if self._grown else local
        local, size, end = self._local, self.block_size, len(self.names)
        if len(local) < end:
            assert self.tokens is not None
            start = len(local)
            tokens = self.tokens[start * size : end * size + self.lookahead]
            local += keyed_block_hashes(tokens, size, self.keys, start, self.lookahead)
        return local

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens; the blocks that they complete have their names at once."""
        if not self._grown:
            self._unshare()
        assert isinstance(self.tokens, list)
        self.tokens += tokens
        self.num_tokens += len(tokens)
        size, first, hasher, before = self.block_size, len(self.names), self._hasher, self._last
        end = (self.num_tokens - self.lookahead) // size
        if end > first:
            assert hasher is not None
            assert not isinstance(before, int)
            digests = hasher.digests(self.tokens[first * size : end * size + self.lookahead], size, first, before)
            self.names += map(hasher.name, digests)
            self._digests += digests
            self._last = digests[-1]

    def block_tokens(self, start: int, end: int) -> list[tuple[Any, ...]] | None:
        """Token ids of the complete blocks from `start` to `end`, their own alone."""
        assert self.tokens is not None
        size = self.block_size
        return [tuple(self.tokens[at : at + size]) for at in range(start * size, end * size, size)]

    def after(self, ends: Iterable[int]) -> list[list[int]]:
        """The tokens that the name of each block covers beside its own, by the tokens up to its end."""
        assert self.tokens is not None
        return [list(self.tokens[end : end + self.lookahead]) for end in ends]
