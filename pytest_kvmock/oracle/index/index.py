"""The reference router index: which worker holds how much of a prompt's prefix, according to KV events only.

One subject: the rules of the index. Its tables have separate modules.

Theory of operation. A tree of blocks is keyed by *local* hash, so that a query needs no sequence hashes. Each worker
and rank has a table that finds its blocks in the tree by *sequence* hash, so that events need no path. A block held by
several workers is one node with several holders. The rules are those of Dynamo's `RadixTree` (kv-router 1.2.1),
oddities included:

* A Removed takes its blocks from one holder and leaves their children alone. A node without holders loses its
  children; these orphans stay in the holder's table, where a later Stored can find them and link them again. The node
  itself stays under its parent, for the next Stored of that place, until the parent loses its children too. Here nodes
  that nothing else leads to are also dropped when there are many: a new node would be equal.
* The node under a parent is looked up by local hash first, and only then by sequence hash: two sequence hashes for one
  place share a node, and one sequence hash in two places is one node with two parents. So this is a graph that can
  have cycles, and every walk needs a bound.
* A Stored that makes a block its own child raises, after the edge was made. (1.2.1 panics when a later Stored walks
  that edge, and then answers no query; here the same error is raised again.)

Below the device there is no tree: each tier has a set of edges (see `lower_tier.py`). A query follows them from the end
of the device's match. The blocks of a tier are those by which it extends the match of the faster tiers.

A Removed follows the rules of 1.6.1: a block that is not held is an error only on the device, and a block that the same
Removed already took is no error. `clears="worker"` restores the rules of 1.2.1, where both are errors.

This index differs where 1.2.1 is wrong by accident. While 1.2.1 walks a query, it takes two sets of workers of equal
size for the same set; this index intersects them. A Cleared of 1.2.1 empties all ranks of the worker; here, as in
1.6.1, it empties the rank that sent it (`clears="worker"` restores the older rule). The dump of 1.2.1 does not end on a
cycle; this one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NoReturn, TypeAlias

from pytest_kvmock.oracle.index.attention_group import AttentionGroup
from pytest_kvmock.oracle.index.locations import Locations
from pytest_kvmock.oracle.index.lower_tier import LowerTier, Match
from pytest_kvmock.oracle.index.tree import Tree, WorkerRank
from pytest_kvmock.values.checks import KvMockError, check_integer, unknown_text
from pytest_kvmock.values.events import (
    Cleared,
    EventData,
    KvCacheEvent,
    Located,
    Removed,
    RouterEvent,
    SparseStored,
    StorageTier,
    Stored,
    Updated,
    block_text,
    value_text,
)
from pytest_kvmock.values.prompt_keys import group_extra, is_of_group, is_report

if TYPE_CHECKING:
    from pytest_kvmock.oracle.index.owners import Owners
    from pytest_kvmock.values.shared_stores import StoreSpec

# The three errors have Dynamo's names, because its users search for them.


Edge: TypeAlias = tuple[int | None, int, int]
"""A block and its place: the parent's sequence hash (None for a root), the block's sequence hash, its local hash."""


Clears: TypeAlias = Literal["rank", "worker"]
"""What a Cleared empties."""

CLEARS: Final = ("rank", "worker")


class RadixIndexError(KvMockError, ValueError):
    """An event contradicts the index's blocks.

    Attributes:
        worker_id: the worker that sent it.
        dp_rank: its rank.
        event_id: the event's id.
        block_hash: the wrong sequence hash: of the parent, of the first unknown block, or of the self-parent.
        storage_tier: the tier that the event is about.
    """

    rule: ClassVar[str] = ""
    """Name of the broken rule in Dynamo's metrics."""

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


class ParentBlockNotFound(RadixIndexError):  # noqa: N818 - see above
    """A Stored names a parent that this worker and rank does not hold; no part of it was applied."""

    rule = "parent_block_not_found"
    reason = "Failed to find parent block"
    _detail = "stores under block {}, which that rank does not hold"


class BlockNotFound(RadixIndexError):  # noqa: N818 - see above
    """A Removed names a block that this worker and rank does not hold; the event's other blocks were removed."""

    rule = "block_not_found"
    reason = "Failed to find block"
    _detail = "removes block {}, which that rank does not hold"


class InvalidBlockSequence(RadixIndexError):  # noqa: N818 - see above
    """A Stored makes a block its own parent; the blocks before it were stored."""

    rule = "invalid_block"
    reason = "Invalid block sequence"
    _detail = "stores block {} under itself"


@dataclass(slots=True)
class OverlapScores:
    """The depth to which each worker holds a query.

    Attributes:
        scores: leading blocks of the query that are cached, by `(worker_id, dp_rank)`; ranks without any are absent.
    """

    scores: dict[WorkerRank, int]


class Copies:
    """How many copies of each block a worker and rank holds in a tier: a set, and counts of further copies."""

    __slots__ = ("_further", "_there")

    def __init__(self) -> None:
        self._there: set[int] = set()
        self._further: dict[int, int] = {}

    def add(self, blocks: Sequence[int]) -> None:
        """Count one more copy of each block."""
        there, new = self._there, set(blocks)
        if len(new) == len(blocks) and there.isdisjoint(new):  # the usual case
            there |= new
            return
        for block in blocks:
            if block in there:
                self._further[block] = self.further(block) + 1
            there.add(block)

    def has(self, blocks: Sequence[int]) -> bool:
        """Whether all these blocks are held."""
        return self._there.issuperset(blocks)

    def take(self, blocks: Sequence[int]) -> Sequence[int]:
        """Count one copy fewer of each block; return the blocks that have none left, and those that had none."""
        further = self._further
        if further and not further.keys().isdisjoint(blocks):
            last = []
            for block in blocks:
                more = further.pop(block, 0)
                if not more:
                    last.append(block)
                elif more > 1:
                    further[block] = more - 1
            blocks = last
        self._there.difference_update(blocks)
        return blocks

    def further(self, block: int) -> int:
        """Return how many copies a block has in addition to the first."""
        return self._further.get(block, 0)


class RadixIndex:
    """A router's view of all caches, built from events; the reference that other indexes are compared with.

    It terminates on every input, and an error leaves it in the state of Dynamo 1.2.1 (see the error classes). On the
    device a Stored needs its parent. In the tiers below it does not: offloaded blocks arrive in the order of their
    eviction, the last of a chain first.

    Args:
        clears: what a Cleared empties, in all tiers: the "rank" that sent it (Dynamo from 1.6), or all ranks of its
            "worker" (Dynamo up to 1.3). With "worker" a Removed also follows the older rule: it raises for a block that
            is not held in the tiers below the device too, and in every tier for a block that it names twice.
        count_copies: hold a block until it was removed as often as it was stored, for engines that publish copies
            (vLLM). Dynamo's tree does not count; a filter before it does (dynamo #8012). Leave it off for engines that
            publish each block once: after an unannounced restart they store blocks again that are still counted.
        full_reports: with `count_copies`, for vLLM requests that ask for full reports: a Stored without a parent raises
            no count if all its blocks are held. So an answer lies between the counted one and that of a set. No rule is
            exact, because nothing in an event distinguishes a report from a copy.
        chunk: blocks per chunk below the device, for engines that offload as vLLM does; no event has this number.
            None: 1, and tokens and parents of blocks are kept from a rank's first location on, so a location of a block
            that was removed earlier is ignored.
        clears_below: whether a Cleared also empties the tiers below the device; vLLM's empties only the device.
        stores: stores that workers share, by name, such as `{"disk": {"kind": "files", "workers": [0, 1]}}`. Their
            blocks are credited equally to all these workers, in the tier that events name.

    Raises:
        ValueError: an invalid `clears`, `chunk` below 1 or no integer, or an invalid store (see `read_stores`).
    """

    def __init__(
        self,
        *,
        clears: Clears = "rank",
        count_copies: bool = False,
        full_reports: bool = False,
        chunk: int | None = None,
        clears_below: bool = True,
        stores: Mapping[str, Any] | None = None,
    ) -> None:
        self._owners: Owners | None = None
        if stores:
            from pytest_kvmock.oracle.index.owners import Owners
            from pytest_kvmock.values.shared_stores import read_stores

            self._owners = Owners(read_stores(stores))
        if full_reports and not count_copies:
            raise ValueError("full_reports goes with count_copies: an index that counts nothing needs no such rule")
        self._full_reports = full_reports
        if clears not in CLEARS:
            raise ValueError(unknown_text("clears", clears, CLEARS))
        self._chunk = None if chunk is None else check_integer("chunk", chunk, 1)
        self._has_names = chunk is not None
        self._chunks: dict[WorkerRank, int] = {}  # for workers that are known to offload like vLLM
        self._clears_below = clears_below
        self._located: dict[
            WorkerRank, Locations
        ] = {}  # workers that offload like vLLM; their lower tiers are not in `_lower`
        self._clears: Clears = clears
        self._clear_all_ranks = self._strict_removed = clears == "worker"
        # By worker, rank and tier: number of stores of a block without a Removed since. A rejected Stored counts too:
        # the engine holds its blocks.
        self._copies: dict[tuple[WorkerRank, StorageTier], Copies] | None = {} if count_copies else None
        self._moved: dict[
            WorkerRank, set[int]
        ] = {}  # blocks of the device's tree that an Updated has moved to the host
        self._groups: dict[WorkerRank, AttentionGroup] = {}  # where events name a cache group
        self._device = Tree()
        # In the order in which a query continues from tier to tier.
        lower = (tier for tier in StorageTier if tier is not StorageTier.DEVICE)
        self._lower: dict[StorageTier, LowerTier] = {tier: LowerTier() for tier in lower}

    def new(self) -> RadixIndex:
        """Return an empty index with the same arguments."""
        index = type(self)(
            clears=self._clears,
            count_copies=self._copies is not None,
            full_reports=self._full_reports,
            chunk=self._chunk,
            clears_below=self._clears_below,
            stores=self.stores,
        )
        for key, chunk in self._chunks.items():
            index.offloads_in_chunks(*key, chunk)
        return index

    @property
    def stores(self) -> dict[str, StoreSpec]:
        """The shared stores, by name."""
        return {} if self._owners is None else {name: each.spec for name, each in self._owners.by_name.items()}

    def clear_store(self, name: str) -> None:
        """Remove all blocks of a store; the workers' own blocks stay.

        Raises:
            ValueError: an unknown store.
        """
        if name not in self.stores:
            raise ValueError(unknown_text("store", name, self.stores))
        assert self._owners is not None
        self._owners.by_name[name].clear()

    def allowed(
        self,
        expected: Mapping[StorageTier, dict[WorkerRank, int]],
        answered: Mapping[StorageTier, Mapping[Any, int]],
    ) -> Mapping[StorageTier, dict[WorkerRank, int]]:
        """Return the answer that another index may give: `expected`, or fewer blocks of stores (`Owners.allowed`)."""
        return expected if self._owners is None else self._owners.allowed(expected, answered)

    def offloads_in_chunks(self, worker_id: int, dp_rank: int, chunk: int | None) -> None:
        """Use this `chunk`, and no `clears_below`, for one worker and rank. Call it before the rank's first event.

        Args:
            worker_id: the worker.
            dp_rank: its rank.
            chunk: see `Traits.chunk`; None changes nothing.

        Raises:
            ValueError: `chunk` is not an integer of at least 1.
        """
        if chunk is not None:
            self._chunks[worker_id, dp_rank], self._has_names = check_integer("chunk", chunk, 1), True

    def apply(self, event: RouterEvent) -> None:
        """Apply one event.

        For a hybrid model only the attention group counts. An event of another group, or of a prompt's tail, changes
        nothing.

        Raises:
            ParentBlockNotFound: a Stored whose parent the rank does not hold; nothing changed.
            BlockNotFound: a Removed on the device, or an Updated, names a block that is not held; the others are
                removed.
            InvalidBlockSequence: a Stored puts a block under itself; the blocks before it are stored.
            TypeError: it is not a `RouterEvent` with a Stored, Removed, Located, Updated or Cleared.
            ValueError: its tier is invalid.
        """
        if not isinstance(event, RouterEvent):
            raise TypeError(f"RadixIndex.apply takes a RouterEvent, got {event!r:.200}")
        if self._owners is not None and self._owners.take(event):
            return
        inner, tier = event.event, event.storage_tier
        data: EventData = inner.data
        group = None
        if event.extra is not None or self._groups:
            group = self._groups.get((event.worker_id, inner.dp_rank))
            if group is None and is_of_group(event.extra):
                group = self._groups[event.worker_id, inner.dp_rank] = AttentionGroup()
            if group is not None:
                found = group.data_of(event, self._device.ranks)
                if group.has_changed:
                    self._clear(event.worker_id, inner.dp_rank)
                if found is None:
                    return
                data = found
        lower = None
        if tier is not StorageTier.DEVICE:
            tier = StorageTier.of(tier)
            lower = self._lower.get(tier)
        key = (event.worker_id, inner.dp_rank)
        kind = type(data)
        if isinstance(data, Updated):
            self._update(key, data, event)
            return
        if (self._has_names or (kind is not Stored and kind is not Removed)) and self._take_names(
            key, tier, data, event
        ):
            return
        if isinstance(data, Stored):
            if self._copies is not None:
                copies = self._copies_in((key, tier))
                may_report = is_report(event.extra) or (self._full_reports and data.parent_hash is None)
                if not (may_report and copies.has(data.block_hashes)):
                    copies.add(data.block_hashes)
            if lower is None:
                self._store(key, data, event)
                if event.extra is not None and "cache_levels" in event.extra:
                    for block, level in zip(data.block_hashes, event.extra["cache_levels"], strict=False):
                        self._move(key, block, level)
            else:
                lower.store(key, data)
        elif isinstance(data, Removed):
            blocks: Sequence[int] = data.block_hashes
            if self._copies is not None:
                blocks = self._copies_in((key, tier)).take(blocks)
            if not self._strict_removed and len(blocks) > 1:
                blocks = [*dict.fromkeys(blocks)]
            unknown = blocks[0] if blocks else None
            if lower is not None:
                unknown = lower.remove(key, blocks)
                unknown = unknown if self._strict_removed else None
            elif (rank := self._device.ranks.get(key)) is not None:
                unknown = self._device.remove(rank, blocks)
                if self._moved:
                    self._moved.get(key, set()).difference_update(blocks)
            if unknown is not None and (group is None or group.is_whole):
                _fail(BlockNotFound, event, unknown)
        elif isinstance(data, Cleared):
            below = self._clears_below and key not in self._chunks
            self._clear(event.worker_id, None if self._clear_all_ranks else inner.dp_rank, below=below)
        else:
            raise TypeError(
                f"the data of an event is a Stored, Removed, Located, Updated or Cleared, got {data!r:.200}"
            )

    def remove(self, worker_id: int, dp_rank: int, blocks: Sequence[int]) -> None:
        """Apply a Removed on the device for each of these blocks; skip those that the rank does not hold."""
        key = (worker_id, dp_rank)
        if self._has_names or key in self._groups:
            for block in blocks:
                with suppress(RadixIndexError):
                    self.apply(RouterEvent(worker_id, KvCacheEvent(0, Removed((block,)), dp_rank)))
            return
        if self._copies is not None:
            blocks = self._copies_in((key, StorageTier.DEVICE)).take(blocks)
        if (rank := self._device.ranks.get(key)) is not None:
            self._device.remove(rank, blocks)
            if self._moved:
                self._moved.get(key, set()).difference_update(blocks)

    def _update(self, key: WorkerRank, data: Updated, event: RouterEvent) -> None:
        """Move a block between the device and the host; its node stays in the tree."""
        rank = self._device.ranks.get(key)
        if rank is None or data.block_hash not in rank.blocks:
            _fail(BlockNotFound, event, data.block_hash)
        if data.levels is not None:
            self._move(key, data.block_hash, data.levels[1])

    def _move(self, key: WorkerRank, block: int, level: int) -> None:
        moved = self._moved.setdefault(key, set())
        if level:
            moved.add(block)
        else:
            moved.discard(block)

    def _take_names(self, key: WorkerRank, tier: StorageTier, data: EventData, event: RouterEvent) -> bool:
        """Apply what an event says about names and locations; return whether the event needs nothing else."""
        if isinstance(data, SparseStored):
            return True
        found, rank = self._located.get(key), self._device.ranks.get(key)
        if found is None:
            if self._chunk is None and key not in self._chunks and not isinstance(data, Located):
                return False
            self._has_names = True
            found = self._located[key] = Locations()
            for edge in () if rank is None else self._device.edges(rank):
                found.know(*edge)
            for below, lower in self._lower.items():
                for edge in lower.ranks.pop(key, ()):
                    found.know(*edge)
                    found.located(below, edge[1:2])
        if isinstance(data, Stored):
            found.stored(data, () if rank is None else rank.blocks)
        if tier is StorageTier.DEVICE or isinstance(data, Cleared):
            return isinstance(data, Located)
        if not isinstance(data, Removed):
            found.located(tier, data.block_hashes)
        elif (unknown := found.removed(tier, data.block_hashes)) is not None and self._strict_removed:
            _fail(BlockNotFound, event, unknown)
        return True

    def _clear(self, worker_id: int, dp_rank: int | None = None, *, below: bool = True) -> None:
        """Empty one rank of a worker, or all of them, on the device and, if `below`, in the tiers below it."""
        for rank in self._device.ranks_of(worker_id):
            if dp_rank is None or rank.key[1] == dp_rank:
                self._device.clear(rank)
                self._moved.pop(rank.key, None)
        for lower in self._lower.values() if below else ():
            lower.clear(worker_id, dp_rank)
        for (worker, rank_of), found in self._located.items() if below else ():
            if worker == worker_id and dp_rank in (None, rank_of):
                found.clear()
        self._forget_copies(worker_id, dp_rank, below=below)

    def _copies_in(self, where: tuple[WorkerRank, StorageTier]) -> Copies:
        """Return the copies of a worker and rank in a tier."""
        assert self._copies is not None
        found = self._copies.get(where)
        if found is None:
            found = self._copies[where] = Copies()
        return found

    def _forget_copies(self, worker_id: int, dp_rank: int | None = None, *, below: bool = True) -> None:
        """Drop the copies of a worker, or of one of its ranks; those below the device only if `below`."""
        for where in [where for where in self._copies or () if where[0][0] == worker_id]:
            if dp_rank in (None, where[0][1]) and (below or where[1] is StorageTier.DEVICE):
                assert self._copies is not None
                del self._copies[where]

    def _store(self, key: WorkerRank, data: Stored, event: RouterEvent) -> None:
        tree, parent_hash = self._device, data.parent_hash
        if parent_hash is None:
            parent = tree.root
        else:
            rank = tree.ranks.get(key)
            found = rank.blocks.get(parent_hash) if rank is not None else None
            if found is None:
                _fail(ParentBlockNotFound, event, parent_hash)
            parent = found
        wrong = tree.store(tree.rank(key), parent, data)
        if wrong is not None:
            _fail(InvalidBlockSequence, event, wrong)

    def find_matches(self, local_hashes: Iterable[int], early_exit: bool = False) -> OverlapScores:
        """Find how many leading blocks of a prompt each worker and rank holds on the device.

        Args:
            local_hashes: local hash of each block, in order from the first.
            early_exit: stop at the first block that only one rank holds; its score is then a lower bound.
        """
        return OverlapScores(self._device.find(local_hashes, early_exit))

    def find_tiered(
        self, local_hashes: Iterable[int], *, updated: bool = True
    ) -> dict[StorageTier, dict[WorkerRank, int]]:
        """Find how many leading blocks of a prompt each worker and rank holds, tier by tier.

        For the device the number is that of `find_matches`. For each tier below, in the order of `StorageTier`, it is
        the number of blocks by which the tier extends the match of the tiers before it. A block that several tiers hold
        counts in the fastest. If an Updated moved blocks, each leading block counts in the tier where it is now, even
        if a block on the device follows it.

        Args:
            local_hashes: local hash of each block, in order from the first.
            updated: whether moves by Updated count; otherwise moved blocks count on the device.

        Returns:
            Blocks by `(worker_id, dp_rank)`, by tier; workers and tiers without any are absent.
        """
        hashes = list(local_hashes)
        device = self._device.find(hashes, False)
        found = {StorageTier.DEVICE: device} if device else {}
        matches: dict[WorkerRank, Match] = {}
        path = None
        for tier, lower in self._lower.items():
            extension = {}
            for key, edges in lower.ranks.items():
                match = matches.get(key)
                if match is None:
                    depth = device.get(key, 0)
                    if depth and path is None:
                        path = self._device.path(hashes)
                    if depth and path is not None:
                        match = edges.after_device(hashes, depth, path[depth - 1], self._device.ranks[key])
                    else:
                        match = Match(depth, None)
                if match is not None and (extended := edges.extend(hashes, match)) is not match:
                    matches[key] = extended
                    extension[key] = extended.depth - match.depth
            for key, located in self._located.items():
                depth = matches[key].depth if key in matches else device.get(key, 0)
                if more := located.extends(tier, hashes, depth, self._chunks.get(key, self._chunk or 1)):
                    matches[key], extension[key] = Match(depth + more, None), more
            for owned, key in () if self._owners is None else self._owners.loaders(tier, self._keys()):
                depth = matches[key].depth if key in matches else device.get(key, 0)
                if more := owned.extends(hashes, depth, self._chunks.get(key, self._chunk or 1)):
                    matches[key], extension[key] = Match(depth + more, None), more
            if extension:
                found[tier] = extension
        if self._moved and updated:
            self._split(hashes, device, found)
        return found

    def _split(
        self,
        hashes: list[int],
        device: dict[WorkerRank, int],
        found: dict[StorageTier, dict[WorkerRank, int]],
    ) -> None:
        """Count blocks that were moved to the host in the host's tier."""
        path = self._device.path(hashes)
        for key, moved in self._moved.items():
            depth = device.get(key, 0)
            if not moved or not depth:
                continue
            blocks = self._device.ranks[key].blocks
            places = {blocks[block] for block in moved if block in blocks}
            on_host = sum(node in places for node in path[:depth])
            if on_host:
                device[key] -= on_host
                below = found.setdefault(StorageTier.HOST_PINNED, {})
                below[key] = below.get(key, 0) + on_host
                if not device[key]:
                    del device[key]
        if not device:
            found.pop(StorageTier.DEVICE, None)

    def dump_events(self) -> list[RouterEvent]:
        """Return events that build an index with the same answers from an empty one.

        Each event has one block, tier by tier and rank by rank, and is repeated for each further copy that is counted.
        Ids count from 0 and belong to no worker. Blocks of the device come breadth first; blocks that no query can
        reach for a rank (orphans of a removed block) are left out. If a rank gave one block two sequence hashes, the
        last is used. If it gave one sequence hash to two blocks, which no correct engine does, one of them may be
        missing. Below the device all blocks are included, in the order of their Stored. For an engine that publishes
        locations only blocks with known tokens are included, and blocks inside a chunk may be missing. For a hybrid
        model the events have the number of the attention group.
        """
        extras = {key: group_extra(group.group_idx) for key, group in self._groups.items()}
        found = list(self.edges())
        if self._copies is not None:
            found += [each for each in found for _ in range(self._copies_in((each[1], each[0])).further(each[2][1]))]
        events: list[tuple[WorkerRank, EventData, StorageTier]] = [
            (key, Stored(parent, (block,), (local,)), tier) for tier, key, (parent, block, local) in found
        ]
        for key, moved in self._moved.items():
            there = (each[2][1] for each in found if each[1] == key and each[2][1] in moved)
            events += [(key, Updated(block, (0, 1)), StorageTier.DEVICE) for block in dict.fromkeys(there)]
        return [
            RouterEvent(key[0], KvCacheEvent(place, data, key[1]), tier, None, extras.get(key))
            for place, (key, data, tier) in enumerate(events)
        ]

    def edges(self, worker_id: int | None = None) -> Iterator[tuple[StorageTier, WorkerRank, Edge]]:
        """Yield the tier, the worker and rank, and the block of each event of `dump_events`, in the same order.

        Args:
            worker_id: the worker; None for all.
        """
        for key, rank in self._device.ranks.items():
            if worker_id in (None, key[0]):
                yield from ((StorageTier.DEVICE, key, edge) for edge in self._device.edges(rank))
        for tier, lower in self._lower.items():
            for key, edges in lower.ranks.items():
                if worker_id in (None, key[0]):
                    yield from ((tier, key, edge) for edge in edges)
        for key, located in self._located.items():
            if worker_id in (None, key[0]):
                yield from ((tier, key, edge) for tier, edge in located)

    def remove_worker(self, worker_id: int) -> None:
        """Remove a worker with all its ranks and tiers; an unknown worker is ignored."""
        for dp_rank in {dp_rank for worker, dp_rank in self._keys() if worker == worker_id}:
            self.remove_worker_dp_rank(worker_id, dp_rank)
        if self._owners is not None:
            self._owners.left((worker_id, 0))  # the worker may not have published anything
        self._forget_copies(worker_id)

    def remove_worker_dp_rank(self, worker_id: int, dp_rank: int) -> None:
        """Remove one rank of a worker; an unknown rank is ignored."""
        rank = self._device.ranks.pop((worker_id, dp_rank), None)
        if rank is not None:
            self._device.clear(rank)
        for lower in self._lower.values():
            lower.ranks.pop((worker_id, dp_rank), None)
        self._groups.pop((worker_id, dp_rank), None)
        self._moved.pop((worker_id, dp_rank), None)
        self._located.pop((worker_id, dp_rank), None)
        if self._owners is not None:
            self._owners.left((worker_id, dp_rank))
        self._forget_copies(worker_id, dp_rank)

    def clear_all_blocks(self, worker_id: int) -> None:
        """Empty all ranks and tiers of a worker without removing it; an unknown worker is ignored."""
        self._clear(worker_id)

    @property
    def workers(self) -> list[WorkerRank]:
        """Workers and ranks that stored blocks and were not removed since, sorted; some may hold nothing now."""
        return sorted(self._keys())

    def _keys(self) -> set[WorkerRank]:
        return set(self._device.ranks).union(self._located, *(lower.ranks for lower in self._lower.values()))

    takes_updates: ClassVar[bool] = True
    """Whether it is given Updated events and tells their levels apart."""

    def num_blocks(self, worker_id: int, dp_rank: int = 0, *, tier: StorageTier | str = StorageTier.DEVICE) -> int:
        """Count the blocks that a worker and rank holds in a tier, including orphans; 0 for an unknown rank."""
        key = (worker_id, dp_rank)
        # A fleet calls this for every worker at every pick.
        lower = None if tier is StorageTier.DEVICE else self._lower.get(StorageTier.of(tier))
        if lower is not None:
            located = self._located.get(key)
            moved = len(self._moved.get(key, ())) if tier == StorageTier.HOST_PINNED else 0
            return moved + (
                lower.num_blocks(key) if located is None else len(located.copies.get(StorageTier.of(tier), ()))
            )
        rank = self._device.ranks.get(key)
        return len(rank.blocks) - len(self._moved.get(key, ())) if rank is not None else 0


def _fail(error: type[RadixIndexError], event: RouterEvent, block_hash: int) -> NoReturn:
    raise error(event.worker_id, event.event.dp_rank, event.event.event_id, block_hash, event.storage_tier)
