"""The tokens of a request on an engine with a draft model, and their complete blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from pytest_kvmock.engines.base.hashed import BlockHasher, HashedTokens
from pytest_kvmock.values.tokens import Prompt, keyed_block_hashes


class LookaheadTokens(HashedTokens):
    """The tokens of a request whose block names also cover the next tokens; a block is complete once these are known.

    Args:
        prompt: a prompt of tokens; hashes do not suffice.
        block_size: tokens a block.
        hasher: a hasher that looks ahead.
        rng: see `HashedTokens`.
        lookahead: number of next tokens that a name covers.

    Raises:
        ValueError: the prompt is empty, or has no tokens.

    Attributes:
        lookahead: as given.
    """

    __slots__ = ("lookahead",)

    def __init__(self, prompt: Prompt, block_size: int, hasher: BlockHasher, rng: Random, lookahead: int) -> None:
        if not prompt.has_tokens:
            raise ValueError(
                "a prompt of hashes has no tokens, and with this draft model blocks are named by the tokens after "
                "them, too; give tokens"
            )
        self.lookahead = lookahead
        super().__init__(prompt, block_size, hasher, rng)
        self._local = None

    @property
    def local_hashes(self) -> list[int]:
        """The router's hash of each complete block, over the window of its tokens and the next tokens."""
        if self._local is None:
            local = self._prompt.block_hashes(self.block_size, self.lookahead)
            self._local = local.copy() if self._grown else local
        local, size, end = self._local, self.block_size, len(self.names)
        if len(local) < end:
            start = len(local)
            tokens = self.cut(start * size, end * size + self.lookahead)
            local += keyed_block_hashes(tokens, size, self.keys, start, self.lookahead)
        return local

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens; blocks that they complete are named at once."""
        if not self._grown:
            self._unshare()
        assert self._tokens is not None
        self._tokens.output.extend(tokens)
        self.num_tokens += len(tokens)
        size, first, hasher, before = self.block_size, len(self.names), self._hasher, self._last
        end = (self.num_tokens - self.lookahead) // size
        if end > first:
            assert hasher is not None
            assert not isinstance(before, int)
            digests = hasher.digests(self.cut(first * size, end * size + self.lookahead), size, first, before)
            self.names += map(hasher.name, digests)
            self._made_digests().extend(digests)
            self._last = digests[-1]

    def block_tokens(self, start: int, end: int) -> Sequence[tuple[Any, ...]] | None:
        """Return the token ids of the complete blocks from `start` to `end`, without the next tokens."""
        return self.rows(start, end, self.block_size)

    def _made_digests(self) -> list[bytes]:
        if self._digests is None:
            assert self._hasher is not None
            tokens = self.cut(0, len(self.names) * self.block_size + self.lookahead)
            self._digests = self._hasher.digests(tokens, self.block_size, 0, None)
        return self._digests

    def after(self, ends: Iterable[int]) -> list[list[int]]:
        """Return the next tokens that each block's name covers; `ends` are the positions of the blocks' ends."""
        return [list(self.cut(end, end + self.lookahead)) for end in ends]
