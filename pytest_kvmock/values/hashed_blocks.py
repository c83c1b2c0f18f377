"""Token ids that travel with an event, with the hashes that its engine made of them: a judge of the event need not
hash them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pytest_kvmock.values.tokens import TokenRows

if TYPE_CHECKING:
    from pytest_kvmock.values.events import BlockTokens, Stored
    from pytest_kvmock.values.prompt_keys import EventExtra


class Chain(Protocol):
    """The rule by which one engine names its blocks; an object belongs to one stream, and may have state.

    Where blocks are named by more than tokens (`Prompt.keys`), both methods are given what travels with the event as
    one more argument. One with an attribute `reads_extra` that is true always is, and is given the tokens as they came.
    One that has an attribute `named_by` says there by what it names blocks, for messages.
    """

    def expected(
        self,
        data: Stored,
        token_ids: BlockTokens | None,
        block_size: int | None,
        extra: EventExtra | None = ...,
        /,
    ) -> Sequence[int] | None:
        """The names that the blocks of a Stored should have; None if they cannot be computed.

        Args:
            data: the Stored.
            token_ids: of each block; None if none came, empty where they are not `block_size` of each block.
            block_size: tokens a block; None: unknown.
            extra: what travels with the event.
        """

    def name(
        self,
        parent: int | None,
        local: int,
        tokens: Sequence[int] | None,
        block_size: int | None,
        extra: EventExtra | None = ...,
        /,
    ) -> int | None:
        """The name of one block below a parent; None if it cannot be computed.

        Args:
            parent: the block before it; None for a root.
            local: its local hash.
            tokens: its token ids; None if none came with the event.
            block_size: tokens a block; None: unknown.
            extra: what travels with an event of this block alone.
        """


class HashedBlocks(TokenRows):
    """Token ids of complete blocks, as an event carries them, and the names that an engine made of them.

    A judge of the event does not hash them again where its hashes are those that were made here (`proves`): an event
    that was changed on its way has others. A copy is a plain list.

    Args:
        rows: token ids of each block.
        parent: the name of the block before the first; None for a root.
        names: of the blocks.
        local_hashes: of the blocks.
        digests: what the names are taken from; none where these are Dynamo's.
        hasher: makes the digests of tokens; None if the names are Dynamo's.
    """

    __slots__ = ("digests", "hasher", "local_hashes", "names", "parent")

    def __init__(
        self,
        rows: TokenRows,
        parent: int | None,
        names: tuple[int, ...],
        local_hashes: tuple[int, ...],
        *,
        digests: Sequence[bytes] = (),
        hasher: object = None,
    ) -> None:
        self._source, self._start, self._count, self.size = rows.given
        self.parent, self.names, self.local_hashes = parent, names, local_hashes
        self.digests, self.hasher = digests, hasher

    def proves(self, data: Stored, block_size: int | None) -> bool:
        """Whether the hashes of a Stored were made of these tokens, after the parent that it has."""
        return (
            data.block_hashes == self.names
            and data.tokens_hashes == self.local_hashes
            and data.parent_hash == self.parent
            and self.size == block_size
        )

    def part(self, start: int, end: int) -> HashedBlocks:
        """Return some of the blocks unchanged."""
        if not start and end >= self._count:
            return self
        parent = self.names[start - 1] if start else self.parent
        places = slice(start, end)
        names, local_hashes, digests = self.names[places], self.local_hashes[places], self.digests[places]
        return HashedBlocks(super().part(start, end), parent, names, local_hashes, digests=digests, hasher=self.hasher)


def part_of(token_ids: BlockTokens, start: int, end: int) -> BlockTokens:
    """Return the token ids of some blocks, with the hashes of those that an engine has hashed."""
    return token_ids.part(start, end) if isinstance(token_ids, TokenRows) else list(token_ids[start:end])


def own_blocks(
    data: Stored, token_ids: BlockTokens | None, block_size: int | None, extra: EventExtra | None
) -> HashedBlocks | None:
    """The blocks of an event that are proved to be as its engine made them; None: whoever judges it has to hash
    them.
    """
    if extra is None and type(token_ids) is HashedBlocks and token_ids.proves(data, block_size):
        return token_ids
    return None
