"""The reference router index: which worker holds how much of a prompt's prefix, learned from KV events alone.

Theory of operation. A tree of blocks is keyed by *local* hash, so that a query needs no sequence hashes; every worker
and rank finds its own blocks in it by *sequence* hash, so that events need no path. A block held by several workers is
one node with several holders. The rules are those of Dynamo's `RadixTree` (kv-router 1.2.1), oddities included:

* a Removed takes its blocks from one holder and does not follow their children. A node without holders loses its
  children; its orphans stay in the holder's table, where a later Stored can find them and link them again. The node
  itself stays under its parent, for the next Stored of that place, until the parent loses its children too;
* the node under a parent is looked for by local hash first, and only then by sequence hash: two sequence hashes for
  one place share a node, one sequence hash in two places is one node with two parents. So this is a graph, it can
  have cycles, and nothing here may walk it without a bound;
* a Stored that makes a block its own child raises, after the edge was made. (1.2.1 panics when a later Stored walks
  that edge, and answers nothing any more; here that is the same error again.)

It differs where 1.2.1 is wrong by accident. 1.2.1 takes two sets of workers of one size for the same set while it
walks a query; this index intersects them. Its Cleared empties all ranks of the worker; here, as in 1.6.1, the one that
sent it (`semantics="e1"` brings the older rule back). Its dump does not end on a cycle; this one does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, NoReturn

from pytest_kvmock.events import (
    Cleared,
    EventData,
    KvCacheEvent,
    Removed,
    RouterEvent,
    StorageTier,
    Stored,
    block_text,
    value_text,
)
from pytest_kvmock.router.tree import Node, Tree, WorkerRank

# The three errors bear Dynamo's names, which its users look for.


class KvEventError(ValueError):
    """An event contradicts what the index holds.

    Attributes:
        worker_id: the worker that sent it.
        dp_rank: its rank.
        event_id: the event's id.
        block_hash: the sequence hash that is wrong: of the parent, of the first unknown block, of the self-parent.
        storage_tier: the tier that the event is about.
    """

    rule: ClassVar[str] = ""
    """Name of the broken rule, as Dynamo's metrics have it."""

    reason: ClassVar[str] = ""
    """Dynamo's own text."""

    _detail: ClassVar[str] = ""

    def __init__(
        self,
        worker_id: int,
        dp_rank: int,
        event_id: int,
        block_hash: int,
        storage_tier: StorageTier = StorageTier.DEVICE,
    ) -> None:
        super().__init__(worker_id, dp_rank, event_id, block_hash, storage_tier)
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.event_id = event_id
        self.block_hash = block_hash
        self.storage_tier = storage_tier

    def __repr__(self) -> str:
        return f"{type(self).__name__}{value_text(self.args)}"

    def __str__(self) -> str:
        tier = "" if self.storage_tier is StorageTier.DEVICE else f" in tier {self.storage_tier.value}"
        who = f"event {self.event_id} of worker {self.worker_id} rank {self.dp_rank}{tier}"
        return f"{self.reason}: {who} {self._detail.format(block_text(self.block_hash))}"


class ParentBlockNotFound(KvEventError):  # noqa: N818 - see above
    """A Stored names a parent that this worker and rank does not hold; nothing of it was applied."""

    rule = "parent_block_not_found"
    reason = "Failed to find parent block"
    _detail = "stores under block {}, which that rank does not hold"


class BlockNotFound(KvEventError):  # noqa: N818 - see above
    """A Removed names a block that this worker and rank does not hold; the others of the event were removed."""

    rule = "block_not_found"
    reason = "Failed to find block"
    _detail = "removes block {}, which that rank does not hold"


class InvalidBlockSequence(KvEventError):  # noqa: N818 - see above
    """A Stored makes a block its own parent; the blocks before it were stored."""

    rule = "invalid_block"
    reason = "Invalid block sequence"
    _detail = "stores block {} under itself"


@dataclass(slots=True)
class OverlapScores:
    """The depth to which each worker holds a query.

    Attributes:
        scores: leading blocks of the query that are cached, by `(worker_id, dp_rank)`; who has none is absent.
    """

    scores: dict[WorkerRank, int]


class RadixIndex:
    """A router's view of all caches, built from events; the reference that other indexes are compared with.

    It ends on every input, and an error leaves it as Dynamo 1.2.1 would be left (see the errors' own texts). Blocks of
    each storage tier have a tree of their own; a Stored in a lower tier may also stand under a block that the rank
    holds in another tier only, since offloaded children can come without their parents.

    Args:
        semantics: None: a Cleared empties the rank that sent it, in all tiers (Dynamo from 1.6). `"e1"`: it empties all ranks of
            that worker (Dynamo up to 1.3).
        count_copies: hold a block until it was removed as often as it was stored, for engines that publish copies (vLLM).
            Dynamo's tree does not count; a filter before it does (dynamo #8012). For engines that publish each block once
            leave it off: after a restart that nobody announced they store again what it still counts.

    Raises:
        ValueError: `semantics` is something else.
    """

    def __init__(self, *, semantics: Literal["e1"] | None = None, count_copies: bool = False) -> None:
        if semantics not in (None, "e1"):
            raise ValueError(f'semantics must be None or "e1", got {semantics!r}')
        self._semantics: Literal["e1"] | None = semantics
        self._clear_all_ranks = semantics == "e1"
        # By worker, rank and tier: how often a block was stored and not removed since. A Stored that is refused counts
        # too: the engine holds those blocks.
        self._copies: dict[tuple[WorkerRank, StorageTier], Counter[int]] | None = {} if count_copies else None
        self._device = Tree()
        self._trees = {tier: Tree() for tier in StorageTier} | {StorageTier.DEVICE: self._device}

    def new(self) -> RadixIndex:
        """An empty index that is made as this one was."""
        return type(self)(semantics=self._semantics, count_copies=self._copies is not None)

    def apply(self, event: RouterEvent) -> None:
        """Apply one event.

        Raises:
            ParentBlockNotFound: a Stored whose parent the rank does not hold; nothing changed.
            BlockNotFound: a Removed with a block that the rank does not hold; the others are removed.
            InvalidBlockSequence: a Stored with a block under itself; what stands before it is stored.
            TypeError: it is no `RouterEvent` with a Stored, Removed or Cleared.
        """
        if not isinstance(event, RouterEvent):
            raise TypeError(f"RadixIndex.apply takes a RouterEvent, got {event!r:.200}")
        inner, tier = event.event, event.storage_tier
        data: EventData = inner.data
        tree = self._device if tier is StorageTier.DEVICE else self._trees[StorageTier(tier)]
        key = (event.worker_id, inner.dp_rank)
        if isinstance(data, Stored):
            if self._copies is not None:
                self._copies.setdefault((key, tier), Counter()).update(data.block_hashes)
            self._store(tree, key, data, event)
        elif isinstance(data, Removed):
            rank, blocks = tree.ranks.get(key), data.block_hashes
            if self._copies is not None:
                blocks = self._last_copies((key, tier), blocks)
            unknown = blocks[0] if blocks else None
            if rank is not None:
                unknown = tree.remove(rank, blocks)
            if unknown is not None:
                _fail(BlockNotFound, event, unknown)
        elif isinstance(data, Cleared):
            for each in self._trees.values():
                for rank in each.ranks_of(event.worker_id):
                    if self._clear_all_ranks or rank.key == key:
                        each.clear(rank)
            self._forget_copies(event.worker_id, None if self._clear_all_ranks else inner.dp_rank)
        else:
            raise TypeError(f"the data of an event is a Stored, Removed or Cleared, got {data!r:.200}")

    def _last_copies(self, where: tuple[WorkerRank, StorageTier], blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Drop one copy of each block; return the blocks that have none left, and those that had none."""
        assert self._copies is not None
        copies = self._copies.setdefault(where, Counter())
        last = []
        for block in blocks:
            copies[block] -= 1
            if copies[block] <= 0:
                del copies[block]
                last.append(block)
        return tuple(last)

    def _forget_copies(self, worker_id: int, dp_rank: int | None = None) -> None:
        """Drop the copies of a worker, or of one rank of it."""
        for where in [where for where in self._copies or () if where[0][0] == worker_id]:
            if dp_rank is None or where[0][1] == dp_rank:
                assert self._copies is not None
                del self._copies[where]

    def _store(self, tree: Tree, key: WorkerRank, data: Stored, event: RouterEvent) -> None:
        parent_hash = data.parent_hash
        if parent_hash is None:
            parent = tree.root
        else:
            rank = tree.ranks.get(key)
            found = rank.blocks.get(parent_hash) if rank is not None else None
            found = found or self._anchor(tree, key, parent_hash)
            if found is None:
                _fail(ParentBlockNotFound, event, parent_hash)
            parent = found
        wrong = tree.store(tree.rank(key), parent, data)
        if wrong is not None:
            _fail(InvalidBlockSequence, event, wrong)

    def _anchor(self, tree: Tree, key: WorkerRank, parent_hash: int) -> Node | None:
        """A node for a parent that the rank holds in another tier only; None in the device tier, or if it holds none."""
        if tree is self._device:
            return None
        for other in self._trees.values():
            holder = other.ranks.get(key)
            if holder is not None and parent_hash in holder.blocks:
                return tree.rank(key).anchors.setdefault(parent_hash, Node())
        return None

    def find_matches(
        self, local_hashes: Iterable[int], early_exit: bool = False, *, tier: StorageTier = StorageTier.DEVICE
    ) -> OverlapScores:
        """Find how many leading blocks of a prompt each worker and rank holds.

        Args:
            local_hashes: local hash of each block, in order from the first.
            early_exit: stop at the first block that one rank alone holds; its score is then a lower bound.
            tier: which tier is asked; blocks of others do not count.
        """
        tree = self._device if tier is StorageTier.DEVICE else self._trees[StorageTier(tier)]
        return OverlapScores(tree.find(local_hashes, early_exit))

    def dump_events(self) -> list[RouterEvent]:
        """Events that build an index with the same answers from an empty one.

        One block an event, rank by rank, each breadth first; ids count from 0 and are nobody's. What no query can
        reach for a rank is left out: orphans of a removed block, and blocks under one that is in another tier. Where a rank gave one block two sequence hashes, the
        last is named; where it gave one sequence hash to two blocks, which no honest engine does, one of them may be
        missing.
        """
        events: list[RouterEvent] = []
        for tier, tree in self._trees.items():
            for (worker_id, dp_rank), rank in tree.ranks.items():
                for parent_hash, block_hash, local in tree.edges(rank):
                    data = Stored(parent_hash, (block_hash,), (local,))
                    events.append(RouterEvent(worker_id, KvCacheEvent(len(events), data, dp_rank), tier))
        return events

    def remove_worker(self, worker_id: int) -> None:
        """Forget a worker with all its ranks and tiers; an unknown one is none."""
        for tree in self._trees.values():
            for rank in tree.ranks_of(worker_id):
                tree.clear(rank)
                del tree.ranks[rank.key]
        self._forget_copies(worker_id)

    def remove_worker_dp_rank(self, worker_id: int, dp_rank: int) -> None:
        """Forget one rank of a worker; an unknown one is none."""
        for tree in self._trees.values():
            rank = tree.ranks.pop((worker_id, dp_rank), None)
            if rank is not None:
                tree.clear(rank)
        self._forget_copies(worker_id, dp_rank)

    def clear_all_blocks(self, worker_id: int) -> None:
        """Empty all ranks and tiers of a worker, which stays known; an unknown one is none."""
        for tree in self._trees.values():
            for rank in tree.ranks_of(worker_id):
                tree.clear(rank)
        self._forget_copies(worker_id)

    @property
    def workers(self) -> list[WorkerRank]:
        """Workers and ranks that have stored and were not removed since, sorted; some may hold nothing now."""
        return sorted({key for tree in self._trees.values() for key in tree.ranks})

    def num_blocks(self, worker_id: int, dp_rank: int = 0, *, tier: StorageTier = StorageTier.DEVICE) -> int:
        """Count the blocks that a worker and rank holds, orphans too; 0 for an unknown one."""
        rank = self._trees[StorageTier(tier)].ranks.get((worker_id, dp_rank))
        return len(rank.blocks) if rank is not None else 0


def _fail(error: type[KvEventError], event: RouterEvent, block_hash: int) -> NoReturn:
    raise error(event.worker_id, event.event.dp_rank, event.event.event_id, block_hash, event.storage_tier)
