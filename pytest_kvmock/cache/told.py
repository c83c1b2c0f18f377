"""What one Use has to tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_kvmock.cache.manager import Publisher
from pytest_kvmock.cache.pool import BlockPool
from pytest_kvmock.events import Removed, Stored

# Theory of operation
#
# Within one Use evictions happen at once and are told at the end: one Stored, then one Removed. Only then does the
# manager drop its entries of what was evicted, by PLH. So a block that the same Use evicted and stored again loses its
# new entry, a Removed follows its Stored, and its real eviction will say nothing (`BlockPool.unknown`). The real manager does
# this; it is not ours to mend. (Blocks that are stored in bulk were not registered before, so no victim is among them.)


class Told:
    """What one Use has to tell at its end."""

    __slots__ = ("anchor", "evicted", "in_bulk", "local_hashes", "refused", "removed", "stored", "token_ids")

    def __init__(self, parent: Any) -> None:
        self.anchor = parent  # the Stored's parent: the last hit
        self.stored: list[int] = []
        self.local_hashes: list[int] = []
        self.token_ids: list[Sequence[int]] = []
        self.evicted: list[int] = []  # lineage hashes
        self.removed: list[int | None] = []  # what the Removed calls them; None for what the manager has no entry of
        self.refused = False  # there was no slot for a full block
        self.in_bulk = True  # so was everything stored

    def publish(self, publisher: Publisher, pool: BlockPool) -> None:
        """Publish what was stored, then what was evicted, whose entries are dropped only now."""
        if self.stored:
            pool.registrations += len(self.stored)
            stored = Stored(self.anchor, tuple(self.stored), tuple(self.local_hashes))
            publisher.publish(stored, self.token_ids or None)
        if not self.evicted:
            return
        pool.evictions += len(self.evicted)
        if not self.in_bulk and not pool.registered.keys().isdisjoint(self.evicted):
            # Evicted and stored again by the same move: the entry that goes now is the new one.
            for i, plh in enumerate(self.evicted):
                again = pool.registered.get(plh)
                if again is not None:
                    self.removed[i] = again.name
                    pool.unknown.add(again)
        names = tuple(self.removed)
        if None in names:
            names = tuple([name for name in names if name is not None])
        if names:
            publisher.publish(Removed(names))  # type: ignore[arg-type]
