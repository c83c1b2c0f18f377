"""Token ids that travel with an event, and what its engine made of them: who judges the event need not hash them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_kvmock.tokens import TokenRows

if TYPE_CHECKING:
    from pytest_kvmock.events import BlockTokens, Stored
    from pytest_kvmock.prompt_keys import EventExtra


class HashedBlocks(TokenRows):
    """Token ids of complete blocks, as they travel with an event, and what an engine made of them.

    Who judges the event does not hash them again where the hashes in it are those that were made here (`proves`): what was
    changed on its way has others. A copy is a plain list.

    Args:
        rows: token ids of each block.
        parent: the name of the block before the first; None: it is a root.
        names: of the blocks.
        local_hashes: of the blocks.
        digests: what the names are taken from; none where these are Dynamo's.
        hasher: makes the digests of tokens; None where the names are Dynamo's.
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
        super().__init__(*rows.given)
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
        """Return some of the blocks, as they were given."""
        if not start and end >= len(self):
            return self
        parent = self.names[start - 1] if start else self.parent
        places = slice(start, end)
        names, local_hashes, digests = self.names[places], self.local_hashes[places], self.digests[places]
        return HashedBlocks(super().part(start, end), parent, names, local_hashes, digests=digests, hasher=self.hasher)


def part_of(token_ids: BlockTokens, start: int, end: int) -> BlockTokens:
    """Return the token ids of some blocks; of those that an engine has hashed, with what it made of them."""
    return token_ids.part(start, end) if isinstance(token_ids, TokenRows) else list(token_ids[start:end])


def own_blocks(
    data: Stored, token_ids: BlockTokens | None, block_size: int | None, extra: EventExtra | None
) -> HashedBlocks | None:
    """The blocks of an event that are proved to be as its engine made them; None: whoever judges it has to hash them."""
    if extra is None and type(token_ids) is HashedBlocks and token_ids.proves(data, block_size):
        return token_ids
    return None
