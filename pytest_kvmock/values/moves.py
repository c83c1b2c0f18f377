"""Moves, the calls of a scheduler to a block manager: Use, Deref, Destroy, Promote.

A block is named by its sequence hash (`int`) once it is full, and by a `uuid.UUID` while it is partial. The moves and
their rules come from `MoveBlock` in Dynamo's mocker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias
from uuid import UUID

from pytest_kvmock.values.checks import KvMockError
from pytest_kvmock.values.events import value_text
from pytest_kvmock.values.plh import LineageHashes

Block: TypeAlias = int | UUID
"""A full block (its sequence hash, u64) or a partial one (a UUID)."""


class MoveError(KvMockError, ValueError):
    """A move breaks a rule of its manager; nothing has changed. The message names block and rule."""


class _Move:
    """Base of moves, with a repr that shows hashes as messages do."""

    __slots__ = ()

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):  # type: ignore[arg-type]  # all are dataclasses
            value = getattr(self, field.name)
            if isinstance(value, LineageHashes):
                value = list(value)
            shown.append(f"{field.name}={repr(value) if field.name == 'token_ids' else value_text(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"


# As in events.py: not frozen, because one is made for every step of every request.


@dataclass(slots=True, repr=False)
class Use(_Move):
    """Make these blocks active, in order.

    Attributes:
        blocks: the blocks; full blocks that are not cached are stored, partial ones get an empty block.
        local_hashes: local hash of each *full* block of `blocks`; if empty, events have 0.
        plhs: lineage hash of each full block; None or empty: unknown.
        token_ids: token ids of each full block, sent with the event; None: unknown.
        parent: the block before the first; None when the first is a root.
    """

    blocks: Sequence[Block]
    local_hashes: Sequence[int] = ()
    plhs: Sequence[int] = ()
    token_ids: Sequence[Sequence[int]] | None = None
    parent: Block | None = None

    def __post_init__(self) -> None:
        if self.plhs is None:
            self.plhs = ()


@dataclass(slots=True, repr=False)
class Deref(_Move):
    """Drop one reference to each of these blocks."""

    blocks: Sequence[Block]


@dataclass(slots=True, repr=False)
class Destroy(_Move):
    """Delete these blocks regardless of references; only dynamo-mocker 1.0.2 has this move."""

    blocks: Sequence[Block]


@dataclass(slots=True, repr=False)
class Promote(_Move):
    """A partial block became full.

    Attributes:
        partial: the partial block's name.
        block: its sequence hash from now on.
        parent: sequence hash of the block before it; None for a root.
        local_hash: its local hash.
        plh: its lineage hash.
        token_ids: its token ids, sent with the event.
    """

    partial: UUID
    block: int
    parent: int | None = None
    local_hash: int = 0
    plh: int | None = None
    token_ids: Sequence[int] | None = None


Move: TypeAlias = Use | Deref | Destroy | Promote
