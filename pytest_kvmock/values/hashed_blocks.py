"""Token ids of an event together with the engine's hashes of them, so that a check of the event need not hash them
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pytest_kvmock.values.tokens import TokenRows

if TYPE_CHECKING:
    from pytest_kvmock.values.events import BlockTokens, Stored
    from pytest_kvmock.values.prompt_keys import EventExtra


class Chain(Protocol):
    """The naming rule of one engine's blocks; an object belongs to one stream and may have state.

    If block names depend on more than tokens (`Prompt.keys`), both methods get the event's extra fields as one more
    argument. With a true attribute `reads_extra`, they always get them, and the tokens as received. An attribute
    `named_by` describes the rule for messages.
    """

    def expected(
        self,
        data: Stored,
        token_ids: BlockTokens | None,
        block_size: int | None,
        extra: EventExtra | None = ...,
        /,
    ) -> Sequence[int] | None:
        """Return the expected names of a Stored's blocks; None if they cannot be computed.

        Args:
            data: the Stored.
            token_ids: the token ids of each block; None if there are none, empty if a block does not have `block_size`
                of them.
            block_size: tokens per block; None: unknown.
            extra: the event's extra fields.
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
        """Return the name of one block below a parent; None if it cannot be computed.

        Args:
            parent: its parent; None for a root.
            local: its local hash.
            tokens: its token ids; None if the event has none.
            block_size: tokens per block; None: unknown.
            extra: the extra fields of an event with only this block.
        """


class HashedBlocks(TokenRows):
    """Token ids of full blocks in an event, and the names that an engine made from them.

    A check of the event need not hash them again if the event's hashes equal these (`proves`); an event that was
    changed on its way has others. A copy is a plain list.

    Args:
        rows: token ids of each block.
        parent: the name of the block before the first; None for a root.
        names: the names of the blocks.
        local_hashes: the local hashes of the blocks.
        digests: the digests that the names are taken from; empty for Dynamo's names.
        hasher: makes the digests of tokens; None for Dynamo's names.
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
        """Whether the hashes of a Stored were made from these tokens, after its parent."""
        return (
            data.block_hashes == self.names
            and data.tokens_hashes == self.local_hashes
            and data.parent_hash == self.parent
            and self.size == block_size
        )

    def part(self, start: int, end: int) -> HashedBlocks:
        """Return some of the blocks, unchanged."""
        if not start and end >= self._count:
            return self
        parent = self.names[start - 1] if start else self.parent
        places = slice(start, end)
        names, local_hashes, digests = self.names[places], self.local_hashes[places], self.digests[places]
        return HashedBlocks(super().part(start, end), parent, names, local_hashes, digests=digests, hasher=self.hasher)


def part_of(token_ids: BlockTokens, start: int, end: int) -> BlockTokens:
    """Return the token ids of some blocks, with their hashes if an engine has made them."""
    return token_ids.part(start, end) if isinstance(token_ids, TokenRows) else list(token_ids[start:end])


def own_blocks(
    data: Stored, token_ids: BlockTokens | None, block_size: int | None, extra: EventExtra | None
) -> HashedBlocks | None:
    """Return the blocks of an event if they are proved to be unchanged; None: a check must hash them."""
    if extra is None and type(token_ids) is HashedBlocks and token_ids.proves(data, block_size):
        return token_ids
    return None
