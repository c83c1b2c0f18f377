"""Short forms of the moves, which fill in omitted arguments (`KvManager.use`, `deref`, `promote`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from uuid import UUID

from pytest_kvmock.engines.dynamo.move_checks import check_full, flatten
from pytest_kvmock.values.events import block_text, value_text
from pytest_kvmock.values.moves import Block, Deref, Move, MoveError, Promote, Use
from pytest_kvmock.values.plh import lineage_fragment, lineage_hash, lineage_position


class ShortForms(ABC):
    """The short forms of a manager that does not cache by lineage hash: no lineage hash is filled in."""

    @abstractmethod
    def process(self, move: Move) -> int:
        """Carry out a move; see `KvManager.process`."""

    @abstractmethod
    def _caches(self, block: int) -> bool:
        """Return whether a full block is cached, in use or not."""

    def _lineage(self, names: Sequence[int], parent: int | None) -> list[int]:  # noqa: ARG002 - for those who define it
        """Return the lineage hashes of `names`, the first below `parent`; empty where the manager needs none."""
        return []

    def use(
        self,
        blocks: Iterable[Block],
        *,
        local_hashes: Sequence[int] | None = None,
        plhs: Sequence[int] | None = None,
        token_ids: Sequence[Sequence[int]] | None = None,
        parent: Block | None = None,
    ) -> int:
        """Short form of Use; see `KvManager.use`."""
        if not isinstance(blocks, Iterable):
            raise MoveError(f"Use: a list of blocks is expected, got {value_text(blocks):.80}")
        blocks = list(blocks)
        full: list[int] = [block for block in blocks if not isinstance(block, UUID)]
        for block in full:
            check_full(block, "Use of block")
        above = self._known(parent, "Use")
        if plhs is None:
            plhs = self._lineage(full, above)
        return self.process(Use(blocks, full if local_hashes is None else local_hashes, plhs, token_ids, parent))

    def deref(self, *blocks: Block | Iterable[Block]) -> None:
        """Short form of Deref; see `KvManager.deref`."""
        self.process(Deref(flatten(blocks)))

    def promote(
        self,
        partial: UUID,
        block: int,
        *,
        parent: int | None = None,
        local_hash: int | None = None,
        plh: int | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> None:
        """Short form of Promote; see `KvManager.promote`."""
        check_full(block, f"Promote of partial block {partial} to block")
        above = self._known(parent, "Promote")
        if plh is None:
            plh = next(iter(self._lineage([block], above)), None)
        self.process(Promote(partial, block, parent, block if local_hash is None else local_hash, plh, token_ids))

    def _known(self, parent: Block | None, what: str) -> int | None:
        """Return the parent if it is a full block; it must be cached."""
        if parent is None or isinstance(parent, UUID):  # a partial parent is refused by the move
            return None
        check_full(parent, f"{what}: parent")
        if not self._caches(parent):
            raise MoveError(
                f"{what}: parent {block_text(parent)} is not cached; a block's parent must be active or inactive"
            )
        return parent


class LineageShortForms(ShortForms):
    """The short forms of a manager that caches by lineage hash."""

    @abstractmethod
    def _plh_of(self, name: int) -> int | None:
        """Return the lineage hash of the block that a name holds, or else of a block stored under that name.

        None if no such block is cached.
        """

    def _caches(self, block: int) -> bool:
        return self._plh_of(block) is not None

    def _lineage(self, names: Sequence[int], parent: int | None) -> list[int]:
        """Return the lineage hashes of `names`: the known ones, and new ones for a chain that begins below `parent`."""
        above = None if parent is None else self._plh_of(parent)
        plhs: list[int] = []
        for name in names:
            known = self._plh_of(name)
            if known is not None:
                above = known
            elif above is None:
                above = lineage_hash(name, None, 0)
            else:
                # The fragment of the parent's PLH, not its name: a slot may be held under a name that its PLH lacks.
                above = lineage_hash(name, lineage_fragment(above), lineage_position(above) + 1)
            plhs.append(above)
        return plhs
