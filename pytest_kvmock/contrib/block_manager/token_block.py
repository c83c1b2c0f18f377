"""Token blocks: the tokens of one full block with their hashes, the contents of blocks.

The names come from dynamo-llm 0.2.1. Hashes are salted: with the default salt 1337 they equal those of
`pytest_kvmock.values.tokens`, which routers compute themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NoReturn

from xxhash import xxh3_64_intdigest

from pytest_kvmock.values.checks import check_iterable, check_u64
from pytest_kvmock.values.tokens import SEED, Prompt, TokenIds, block_hashes, check_block_size

_pack_pair: Final = struct.Struct("<QQ").pack


@lru_cache(maxsize=64)
def _packer(block_size: int) -> struct.Struct:
    return struct.Struct(f"<{block_size}I")


class TokenBlock:
    """The tokens of one full block, and its hashes.

    Args:
        tokens: the token ids of the block, at least 1.
        salt_hash: u64 that all hashes of the sequence depend on.
        parent_sequence_hash: sequence hash of the previous block; None for a root, the first block of a sequence.

    Raises:
        TypeError: a token is not an integer.
        ValueError: there is no token, or a token or hash is out of range.
    """

    __slots__ = ("block_hash", "parent_sequence_hash", "salt_hash", "sequence_hash", "tokens")

    tokens: tuple[int, ...]
    salt_hash: int
    block_hash: int
    """Hash of only these tokens, the local hash of a router."""
    sequence_hash: int
    """Hash of the tokens and all tokens before them; for a root, its block hash."""
    parent_sequence_hash: int | None

    def __init__(self, tokens: TokenIds, salt_hash: int = SEED, parent_sequence_hash: int | None = None) -> None:
        self.tokens = tokens = tuple(check_iterable("TokenBlock", tokens, "token ids"))
        if not tokens:
            raise ValueError("a TokenBlock has at least 1 token, got none")
        self.salt_hash = check_u64("salt_hash", salt_hash)
        self.parent_sequence_hash = parent_sequence_hash
        try:
            data = _packer(len(tokens)).pack(*tokens)
        except struct.error:
            _raise_for_tokens(tokens)
        self.block_hash = own = xxh3_64_intdigest(data, salt_hash)
        if parent_sequence_hash is not None:
            check_u64("parent_sequence_hash", parent_sequence_hash)
            own = xxh3_64_intdigest(_pack_pair(parent_sequence_hash, own), salt_hash)
        self.sequence_hash = own

    @classmethod
    def of_hashes(cls, block_hash: int, sequence_hash: int, parent_sequence_hash: int | None) -> TokenBlock:
        """Return a block with unknown tokens, for copies of registered blocks, which keep no tokens."""
        block = object.__new__(cls)
        block.tokens = ()
        block.salt_hash = SEED
        block.block_hash = block_hash
        block.sequence_hash = sequence_hash
        block.parent_sequence_hash = parent_sequence_hash
        return block

    def __repr__(self) -> str:
        return f"<TokenBlock of {len(self.tokens)} tokens, sequence_hash 0x{self.sequence_hash:016x}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenBlock):
            return NotImplemented
        return (self.tokens, self.salt_hash, self.parent_sequence_hash) == (
            other.tokens,
            other.salt_hash,
            other.parent_sequence_hash,
        )

    def __hash__(self) -> int:
        return hash(self.sequence_hash)

    def next_block(self, tokens: TokenIds) -> TokenBlock:
        """Return the block of these tokens that follows this one in its sequence."""
        return TokenBlock(tokens, self.salt_hash, self.sequence_hash)


def token_blocks(
    tokens: TokenIds | Prompt, block_size: int, salt_hash: int = SEED, parent_sequence_hash: int | None = None
) -> list[TokenBlock]:
    """Return the full blocks of `tokens`, each the child of the previous one; a tail shorter than a block is left out.

    Args:
        tokens: token ids, or a prompt with tokens.
        block_size: tokens per block, at least 1.
        salt_hash: u64 that all hashes of the sequence depend on.
        parent_sequence_hash: sequence hash of the block before the first one.

    Raises:
        TypeError: a token is not an integer, or the prompt has hashes only.
        ValueError: a number is out of range.
    """
    check_block_size(block_size)
    check_u64("salt_hash", salt_hash)
    if parent_sequence_hash is not None:
        check_u64("parent_sequence_hash", parent_sequence_hash)
    prompt = Prompt.of(tokens)
    if prompt.tokens is None:
        raise TypeError("token_blocks needs token ids; this prompt has block hashes only")
    blocks: list[TokenBlock] = []
    for start in range(0, len(prompt.tokens) - block_size + 1, block_size):
        block = TokenBlock(prompt.tokens[start : start + block_size], salt_hash, parent_sequence_hash)
        parent_sequence_hash = block.sequence_hash
        blocks.append(block)
    return blocks


def check_tokens(tokens: Iterable[int]) -> list[int]:
    """Return token ids as a list.

    Raises:
        TypeError: one is not an integer.
        ValueError: one is out of range.
    """
    listed = list(tokens)
    try:
        _packer(len(listed)).pack(*listed)
    except struct.error:
        _raise_for_tokens(listed)
    return listed


def _raise_for_tokens(tokens: TokenIds) -> NoReturn:
    """Raise the error that names the first of `tokens` that is not a token id."""
    block_hashes(tokens, 1)
    raise TypeError(f"not token ids: {tokens!r:.80}")  # pragma: no cover - the line above raises
