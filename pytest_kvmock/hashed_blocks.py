"""Token ids that travel with an event, and what its engine made of them: who judges the event need not hash them again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from pytest_kvmock.events import BlockTokens, Stored
    from pytest_kvmock.prompt_keys import EventExtra


class HashedBlocks(list[tuple[int, ...]]):
    """Token ids of complete blocks, as they travel with an event, and what an engine made of them.

    Who judges the event does not hash them again where the arrays in it are the very ones that were made here (`proves`): what
    was changed on its way has others. A copy is a plain list.

    Args:
        tokens: of each block.
        data: the Stored of these blocks, whose hashes were made of them.
        digests: what the names of the blocks are taken from.
        hasher: makes these of tokens.
    """

    __slots__ = ("_given", "digests", "hasher", "local_hashes", "names", "parent")

    def __init__(
        self,
        tokens: Iterable[tuple[int, ...]],
        data: Stored,
        digests: Sequence[bytes],
        hasher: object,
    ) -> None:
        super().__init__(tokens)
        self._given = tuple(self)
        self.parent, self.names, self.local_hashes = data.parent_hash, data.block_hashes, data.tokens_hashes
        self.digests, self.hasher = digests, hasher

    def proves(self, data: Stored, block_size: int | None) -> bool:
        """Whether the hashes of a Stored were made of these tokens, after the parent that it has."""
        return (
            data.block_hashes is self.names
            and data.tokens_hashes is self.local_hashes
            and data.parent_hash == self.parent
            and tuple(self) == self._given
            and len(self._given[0]) == block_size
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return list, (list(self),)


def own_blocks(
    data: Stored, token_ids: BlockTokens | None, block_size: int | None, extra: EventExtra | None
) -> HashedBlocks | None:
    """The blocks of an event that are proved to be as its engine made them; None: whoever judges it has to hash them."""
    if extra is None and type(token_ids) is HashedBlocks and token_ids.proves(data, block_size):
        return token_ids
    return None
