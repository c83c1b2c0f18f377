"""What a Stored shows by itself, without memory of the stream: its own parent, hashes, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pytest_kvmock.events import BlockTokens, RouterEvent, Stored, block_text
from pytest_kvmock.tokens import block_hashes, sequence_hashes


class Chain(Protocol):
    """How one engine names its blocks; it follows one stream, and may remember what it has seen."""

    def expected(self, data: Stored, token_ids: BlockTokens | None, block_size: int | None) -> Sequence[int] | None:
        """The names that the blocks of a Stored should have; None where they cannot be known.

        Args:
            data: what was said.
            token_ids: of each block; None where none came, empty where they are not `block_size` of each block.
            block_size: tokens a block; None: unknown.
        """


class DynamoChain:
    """Dynamo's rule: the hash of the parent's name and the local hash."""

    @staticmethod
    def expected(data: Stored, token_ids: BlockTokens | None, block_size: int | None) -> Sequence[int]:  # noqa: ARG004
        """As `Chain.expected`."""
        return sequence_hashes(data.tokens_hashes, parent=data.parent_hash)


class Flaw(NamedTuple):
    """What is wrong with one block of a Stored: the block, what is known, what would be right."""

    block: int
    known: str
    right: str


def own_parent(hashes: tuple[int, ...], parent: int | None) -> int | None:
    """The first block that stands right after itself, if any; a longer cycle is legal (DESIGN 7: multi_lru)."""
    for block in hashes:
        if block == parent:
            return block
        parent = block
    return None


def sparse(event: RouterEvent, data: Stored, size: int | None) -> Flaw | None:
    """The first block whose tokens do not come with it, where token ids do; None where they are all there.

    Args:
        event: with token ids or without.
        data: its Stored.
        size: tokens a block; None: unknown, then it is enough that each block has some.
    """
    tokens, hashes = event.token_ids, data.block_hashes
    if tokens is None:
        return None
    try:
        sizes = list(map(len, tokens))
    except TypeError:
        known = "token ids came, and not as one sequence for each block"
        return Flaw(hashes[0], known, "each block has its tokens") if hashes else None
    if len(sizes) == len(hashes) and (size is None or sizes.count(size) == len(sizes)):
        return None
    right = "one sequence of token ids a block" if size is None else f"each block has its {size} tokens"
    for block, count in zip(hashes, sizes, strict=False):
        if size is not None and count != size:
            return Flaw(block, f"block {block_text(block)} came with {count} token id{'s' * (count != 1)}", right)
    if not hashes:
        return None
    block = hashes[min(len(sizes), len(hashes) - 1)]
    return Flaw(block, f"token ids came for {len(sizes)} of {len(hashes)} blocks", right)


def wrong_hash(event: RouterEvent, data: Stored, size: int | None, chain: Chain) -> Flaw | None:
    """The first block whose hashes do not follow from what came with it.

    Args:
        event: with token ids or without.
        data: its Stored.
        size: tokens a block, to judge local hashes by tokens; None: they are not judged.
        chain: how the engine names blocks.
    """
    tokens = event.token_ids
    if tokens is not None and (size is None or sparse(event, data, size) is not None):
        tokens = ()
    if tokens and size is not None:
        flat = [token for ids in tokens for token in ids]
        for block, local, right in zip(data.block_hashes, data.tokens_hashes, block_hashes(flat, size), strict=False):
            if local != right:
                return Flaw(
                    block,
                    f"block {block_text(block)} has local hash {block_text(local)}",
                    f"its {size} tokens have local hash {block_text(right)}",
                )
    rights = chain.expected(data, tokens, size)
    if rights is not None and tuple(rights) != data.block_hashes:
        for block, local, right in zip(data.block_hashes, data.tokens_hashes, rights, strict=True):
            if block != right:
                parent = "no parent" if data.parent_hash is None else f"parent {block_text(data.parent_hash)}"
                return Flaw(
                    block,
                    f"block {block_text(block)} is stored with local hash {block_text(local)}; the event has {parent}",
                    f"the chain of parent and local hash is {block_text(right)}",
                )
    return None
