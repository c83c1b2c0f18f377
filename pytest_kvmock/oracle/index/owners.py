"""Blocks that belong to a store and to no worker, as far as a router can know them.

Theory of operation. A worker's stream announces the blocks that the worker puts into a store; every worker that can
load from the store can use them. So the announced blocks of a store are one set. It is credited equally to all its
workers, to each from the end of its own tiers. It is a set and not a count, because the same block is announced
repeatedly. A worker that leaves, or is cleared, removes nothing from it. No stream announces what a store drops, so the
set holds the blocks that may be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from pytest_kvmock.oracle.index.locations import Locations
from pytest_kvmock.oracle.index.tree import WorkerRank
from pytest_kvmock.values.events import Cleared, Located, Removed, RouterEvent, SparseStored, StorageTier, Stored
from pytest_kvmock.values.shared_stores import StoreSpec
from pytest_kvmock.values.tokens import block_hashes

Depths: TypeAlias = Mapping[Any, int]
"""Number of leading blocks of a prompt, by worker."""


class OwnedBlocks:
    """What one store has, according to the streams of its workers.

    Args:
        spec: the store.

    Attributes:
        spec: the store.
    """

    __slots__ = ("_places", "spec")

    def __init__(self, spec: StoreSpec) -> None:
        self.spec = spec
        self._places = Locations()

    @property
    def blocks(self) -> set[int]:
        """The names of the held blocks."""
        return {*self._places.copies.get(self.spec.tier, ())}

    def take_event(self, event: RouterEvent) -> bool:
        """Apply an event of a worker that can load from the store; return whether the event is about the store."""
        data, of_store = event.event.data, event.storage_tier is self.spec.tier
        if isinstance(data, Stored) and not isinstance(data, SparseStored):
            self.learn(data, by_store=of_store)
        if not of_store or isinstance(data, Cleared):
            return False
        if isinstance(data, Stored | Located):
            self.take(data.block_hashes)
        elif isinstance(data, Removed):
            self.drop(data.block_hashes)
        return True

    def left(self, key: WorkerRank) -> None:
        """Record that a worker left; the store keeps its blocks."""

    def learn(self, data: Stored, *, by_store: bool) -> None:
        """Record parents and local hashes of a worker's Stored, in any tier.

        Args:
            data: the Stored.
            by_store: whether it is about the store. Such a Stored leaves out adapter and salt, even for blocks that
                have one (Mooncake below vLLM), so it does not overwrite a known name.
        """
        if not by_store:
            self._places.stored(data, ())
            return
        parent = data.parent_hash
        for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            if not self._places.knows(block):
                self._places.know(parent, block, local)
            parent = block

    def take(self, blocks: Iterable[int]) -> None:
        """Add blocks to the store; a block that is already there is counted once."""
        there = self._places.copies.get(self.spec.tier, ())
        self._places.located(self.spec.tier, [block for block in dict.fromkeys(blocks) if block not in there])

    def drop(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the store, for all workers; skip those that are not there."""
        there = self._places.copies.get(self.spec.tier)
        if there is not None:
            for block in blocks:
                there.pop(block, None)

    def clear(self) -> None:
        """Remove all blocks from the store."""
        self._places.clear()

    def extends(self, local_hashes: Sequence[int], depth: int, chunk: int) -> int:
        """Return by how many blocks the store extends the faster tiers of a worker; see `Locations.extends`."""
        return self._places.extends(self.spec.tier, local_hashes, depth, chunk)


class OwnedChunks(OwnedBlocks):
    """What LMCache's server has, according to the streams of its workers: chunks of several blocks with their own
    chain of hashes.

    A chunk's tokens are split into blocks of the size that the workers' own events show. Until that size is known, the
    chunk waits; an event without tokens adds nothing. A chunk is there as long as one stream announces it, because each
    stream withdraws only its own announcements. A chunk of a worker that left stays until another worker withdraws it.
    """

    __slots__ = ("_by", "_size", "_units", "_waiting")

    def __init__(self, spec: StoreSpec) -> None:
        super().__init__(spec)
        self._size: int | None = None
        self._units = 1  # blocks per chunk
        self._by: dict[int, set[WorkerRank]] = {}
        self._waiting: dict[int, tuple[int | None, Sequence[int]]] = {}

    def take_event(self, event: RouterEvent) -> bool:
        """Apply an event of a worker; return whether it is about the server."""
        data = event.event.data
        if event.storage_tier is not self.spec.tier or isinstance(data, Cleared):
            if self._size is None and isinstance(data, Stored) and event.token_ids:
                self._size = len(event.token_ids[0])
                for chunk, (parent, tokens) in self._waiting.items():
                    self._know(chunk, parent, tokens)
                self._waiting.clear()
            return False
        if isinstance(data, Stored):
            parent = data.parent_hash
            for chunk, tokens in zip(data.block_hashes, event.token_ids or (), strict=False):
                self._by.setdefault(chunk, set()).add(event.key)
                self.take([chunk])
                if self._size is None:
                    self._waiting[chunk] = parent, tokens
                elif not self._places.knows(chunk):
                    self._know(chunk, parent, tokens)
                parent = chunk
        elif isinstance(data, Removed):
            for chunk in data.block_hashes:
                by = self._by.get(chunk, set())
                by.discard(event.key)
                if not by:
                    self._by.pop(chunk, None)
                    self.drop([chunk])
        return True

    def _know(self, chunk: int, parent: int | None, tokens: Sequence[int]) -> None:
        """Record the blocks of a chunk: the last has the chunk's name, the others have names that no engine uses."""
        assert self._size is not None
        local = block_hashes(tokens, self._size)
        self._units = max(1, len(local))
        for place, each in enumerate(local, 1):
            name = chunk if place == len(local) else (chunk + 1) * 2**64 + place
            self._places.know(parent, name, each)
            parent = name

    def left(self, key: WorkerRank) -> None:
        """Record that a worker left: chunks that others also announce depend on those only."""
        for by in self._by.values():
            if len(by) > 1:
                by.discard(key)

    def clear(self) -> None:
        """Remove all blocks from the server."""
        super().clear()
        self._by.clear()

    def extends(self, local_hashes: Sequence[int], depth: int, chunk: int) -> int:  # noqa: ARG002 - it has its own
        """Return by how many blocks the server's chunks extend the faster tiers of a worker."""
        start = depth // self._units * self._units
        return max(0, super().extends(local_hashes, start, self._units) - (depth - start))


class Owners:
    """The stores of a fleet, and which workers can load from each.

    Args:
        specs: the stores, by name.

    Attributes:
        by_name: the blocks of each store.
    """

    __slots__ = ("_by_worker", "_gone", "by_name")

    def __init__(self, specs: Mapping[str, StoreSpec]) -> None:
        self.by_name = {
            name: OwnedChunks(spec) if spec.kind == "lmcache" else OwnedBlocks(spec) for name, spec in specs.items()
        }
        self._by_worker: dict[int, list[OwnedBlocks]] = {}
        for owned in self.by_name.values():
            for worker_id in owned.spec.workers:
                self._by_worker.setdefault(worker_id, []).append(owned)
        self._gone: set[WorkerRank] = set()

    def take(self, event: RouterEvent) -> bool:
        """Apply an event of a worker; return whether it is about a store, and so not about the worker's own tiers."""
        if self._gone:
            self._gone.discard(event.key)
        taken = [owned.take_event(event) for owned in self._by_worker.get(event.worker_id, ())]
        return any(taken)

    def left(self, key: WorkerRank) -> None:
        """Record that a rank of a worker was removed: it can load nothing, and its stores keep their blocks."""
        self._gone.add(key)
        for owned in self._by_worker.get(key[0], ()):
            owned.left(key)

    def loaders(self, tier: StorageTier, known: Iterable[WorkerRank]) -> list[tuple[OwnedBlocks, WorkerRank]]:
        """Return each store of a tier with each rank that can load from it: the known ranks of a worker, or rank 0."""
        ranks: dict[int, list[WorkerRank]] = {}
        for key in known:
            ranks.setdefault(key[0], []).append(key)
        return [
            (owned, key)
            for owned in self.by_name.values()
            if owned.spec.tier is tier
            for worker_id in owned.spec.workers
            for key in ranks.get(worker_id, [(worker_id, 0)])
            if key not in self._gone
        ]

    def _may_load(self, key: object, owned: OwnedBlocks) -> bool:
        """Whether a key is a rank of a worker of the store, which need not have published anything."""
        return isinstance(key, tuple) and key[0] in owned.spec.workers and key not in self._gone

    def allowed(
        self,
        expected: Mapping[StorageTier, dict[WorkerRank, int]],
        answered: Mapping[StorageTier, Mapping[Any, int]],
    ) -> dict[StorageTier, dict[WorkerRank, int]]:
        """Return the answer that another index may give: `expected`, or less of a store, equally for all its workers.

        Fewer blocks of a store are allowed, because a store drops blocks without an event, and an index that only knows
        workers leaves stores out.

        Args:
            expected: the answer of this index, tier by tier.
            answered: the answer of the other index, by worker and rank, or by worker.
        """
        out = dict(expected)
        for owned in self.by_name.values():
            tier = owned.spec.tier
            promised, given = expected.get(tier, {}), answered.get(tier, {})
            ours = {key: blocks for key, blocks in promised.items() if key[0] in owned.spec.workers}
            # An index that does not distinguish ranks answers by worker.
            found = {key: given.get(key, given.get(key[0], 0)) for key in ours}
            further = {key: blocks for key, blocks in given.items() if self._may_load(key, owned) and key not in ours}
            ranks = {key for scores in expected.values() for key in scores if key[0] in owned.spec.workers}
            depths = depths_above(tier, expected, ranks | {*further})
            ends = {key: depths[key] + promised.get(key, 0) for key in ranks}
            # A rank that has published nothing can load as much as the others.
            ends |= dict.fromkeys(further.keys() - ends.keys(), max(ends.values(), default=0))
            theirs = {key: blocks for key, blocks in (found | further).items() if blocks}
            if wrong_promise(ends, depths, theirs) is None:
                out[tier] = {key: blocks for key, blocks in out.get(tier, {}).items() if key not in ours} | theirs
        return out


def depths_above(tier: StorageTier, found: Mapping[StorageTier, Mapping[Any, int]], keys: Iterable[Any]) -> Depths:
    """Return how many leading blocks the tiers faster than `tier` hold, by worker, in an index's answer."""
    faster = [scores for each, scores in found.items() if _is_faster(each, tier)]
    return {key: sum(scores.get(key, 0) for scores in faster) for key in keys}


class WrongPromise(NamedTuple):
    """A wrong number of blocks that a worker is promised from a store.

    Attributes:
        store: the store's name.
        worker: the worker.
        blocks: the number that it is promised.
        expected: what it may be promised, in words.
    """

    store: str
    worker: Any
    blocks: int
    expected: str


def first_wrong_promise(
    stores: Mapping[str, StoreSpec],
    found: Mapping[StorageTier, Mapping[Any, int]],
    said: Mapping[str, Mapping[Any, int]],
    loaders: Callable[[StoreSpec], Iterable[Any]],
    known: Sequence[Depths] = (),
) -> WrongPromise | None:
    """Return the first wrong promise of any store; None: all are right.

    A promise begins where the known faster tiers end: all of them, only the device, or one of `known`.

    Args:
        stores: the stores.
        found: what an index of owners finds, tier by tier.
        said: how many blocks each worker is promised, by store.
        loaders: returns the workers of a store that are checked.
        known: further numbers of leading blocks that the faster tiers may be known to hold, by worker.
    """
    for name, spec in stores.items():
        there, promised, ours = found.get(spec.tier, {}), said.get(name, {}), [*loaders(spec)]
        above = depths_above(spec.tier, found, ours)
        ends = {worker: above[worker] + there.get(worker, 0) for worker in ours}
        wrong = [wrong_promise(ends, depths, promised) for depths in (above, found.get(StorageTier.DEVICE, {}), *known)]
        if None not in wrong and wrong[0] is not None:
            worker, expected = wrong[0]
            return WrongPromise(name, worker, promised.get(worker, 0), expected)
    return None


def wrong_promise(ends: Depths, depths: Depths, said: Mapping[Any, int]) -> tuple[Any, str] | None:
    """Return the first worker of a store with a wrong promise, and the allowed promise; None: all are right.

    The workers may be promised all blocks that are there, or all of them fewer, up to one common end: a store drops
    blocks without an event.

    Args:
        ends: number of leading blocks after which each worker of the store can load no more.
        depths: number of leading blocks in the faster tiers of each.
        said: number of blocks that each is promised from there on; absent workers are promised none.
    """
    for key, blocks in said.items():
        if blocks and key not in ends:
            return key, "0: it cannot load from there"
    most = {key: max(0, end - depths.get(key, 0)) for key, end in ends.items()}
    told = {key: said.get(key, 0) for key in ends}
    if told == most:
        return None
    for key, blocks in told.items():
        if blocks > most[key]:
            return key, f"at most {most[key]}"
    end = max((depths.get(key, 0) + blocks for key, blocks in told.items() if blocks), default=0)
    for key, blocks in told.items():
        alike = min(most[key], max(0, end - depths.get(key, 0)))
        if blocks != alike:
            return key, f"{alike}: all workers of it can load the same"
    return None


_ORDER: Final = list(StorageTier)


def _is_faster(tier: StorageTier, than: StorageTier) -> bool:
    return _ORDER.index(tier) < _ORDER.index(than)
