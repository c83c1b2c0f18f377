"""Blocks that belong to a store and to no worker, as a router can know them.

Theory of operation. A worker's stream says what it has put into a store; the block is everybody's who can load from it.
So what streams say of a store is one set, which its workers are credited alike, each from where its own tiers end. It
is a set and not a count: the same block is announced again and again. A worker that leaves, or is cleared, takes
nothing of it. No stream says what a store has dropped, so this is what may be there.
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
"""Blocks from the first of a prompt, by worker."""


class OwnedBlocks:
    """What one store has, according to the streams of its workers.

    Args:
        spec: which store.

    Attributes:
        spec: as given.
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
        """Take an event of a worker that can load from it; return whether it is about it."""
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
        """A worker has left; it takes nothing of it."""

    def learn(self, data: Stored, *, by_store: bool) -> None:
        """Learn what the blocks of a worker's Stored stand for, wherever they are.

        Args:
            data: what was stored.
            by_store: it is about the store. Such a Stored has neither adapter nor salt, of blocks that have one too
                (Mooncake below vLLM), so it says nothing new of a name that is known.
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
        """Take blocks as being there; those that are there already are there once."""
        there = self._places.copies.get(self.spec.tier, ())
        self._places.located(self.spec.tier, [block for block in dict.fromkeys(blocks) if block not in there])

    def drop(self, blocks: Iterable[int]) -> None:
        """Take blocks as being there no more, for all workers; those that are not there are passed over."""
        there = self._places.copies.get(self.spec.tier)
        if there is not None:
            for block in blocks:
                there.pop(block, None)

    def clear(self) -> None:
        """Take it as empty."""
        self._places.clear()

    def extends(self, local_hashes: Sequence[int], depth: int, chunk: int) -> int:
        """By how many blocks it extends what the faster tiers of a worker have; see `Locations.extends`."""
        return self._places.extends(self.spec.tier, local_hashes, depth, chunk)


class OwnedChunks(OwnedBlocks):
    """What LMCache's server has, according to the streams of its workers: chunks of several blocks, by a chain of their
    own.

    A chunk is taken apart into blocks by its tokens, of the size that the workers' own events show; where that is not
    known yet it waits, and an event without tokens says nothing. A chunk is there while any stream announces it, as
    each takes back what it announced itself; what a worker announced that has left is there until another takes it
    back.
    """

    __slots__ = ("_by", "_size", "_units", "_waiting")

    def __init__(self, spec: StoreSpec) -> None:
        super().__init__(spec)
        self._size: int | None = None
        self._units = 1  # blocks a chunk
        self._by: dict[int, set[WorkerRank]] = {}
        self._waiting: dict[int, tuple[int | None, Sequence[int]]] = {}

    def take_event(self, event: RouterEvent) -> bool:
        """Take an event of a worker; return whether it is about the server."""
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
        """Know a chunk by its blocks, the last of which has its name, and the others some that no engine gives."""
        assert self._size is not None
        local = block_hashes(tokens, self._size)
        self._units = max(1, len(local))
        for place, each in enumerate(local, 1):
            name = chunk if place == len(local) else (chunk + 1) * 2**64 + place
            self._places.know(parent, name, each)
            parent = name

    def left(self, key: WorkerRank) -> None:
        """A worker has left: what others announce too is theirs to take back."""
        for by in self._by.values():
            if len(by) > 1:
                by.discard(key)

    def clear(self) -> None:
        """Take it as empty."""
        super().clear()
        self._by.clear()

    def extends(self, local_hashes: Sequence[int], depth: int, chunk: int) -> int:  # noqa: ARG002 - it has its own
        """By how many blocks whole chunks of it extend what the faster tiers of a worker have."""
        start = depth // self._units * self._units
        return max(0, super().extends(local_hashes, start, self._units) - (depth - start))


class Owners:
    """The stores of a fleet, and which workers can load from each.

    Args:
        specs: the stores, by name.

    Attributes:
        by_name: what each has.
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
        """Take an event of a worker; return whether it is about a store, and so about nothing of the worker's."""
        if self._gone:
            self._gone.discard(event.key)
        taken = [owned.take_event(event) for owned in self._by_worker.get(event.worker_id, ())]
        return any(taken)

    def left(self, key: WorkerRank) -> None:
        """A rank of a worker was removed: nothing can be loaded by it, and its stores keep what they have."""
        self._gone.add(key)
        for owned in self._by_worker.get(key[0], ()):
            owned.left(key)

    def loaders(self, tier: StorageTier, known: Iterable[WorkerRank]) -> list[tuple[OwnedBlocks, WorkerRank]]:
        """Each store of a tier with each rank that can load from it: those that are known, and the first of others."""
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

    def allowed(
        self,
        expected: Mapping[StorageTier, dict[WorkerRank, int]],
        answered: Mapping[StorageTier, Mapping[Any, int]],
    ) -> dict[StorageTier, dict[WorkerRank, int]]:
        """What an index may answer, of what this one would: of a store less, if all its workers are credited alike.

        A promise may be lowered, as a block may be gone without a word, and an index of workers leaves stores out.

        Args:
            expected: what this one would answer, tier by tier.
            answered: what the other did, by worker and rank, or by worker.
        """
        out = dict(expected)
        for owned in self.by_name.values():
            tier = owned.spec.tier
            promised, given = expected.get(tier, {}), answered.get(tier, {})
            ours = {key: blocks for key, blocks in promised.items() if key[0] in owned.spec.workers}
            # An index that does not tell ranks apart answers by worker.
            found = {key: given.get(key, given.get(key[0], 0)) for key in ours}
            theirs = {key: blocks for key, blocks in found.items() if blocks}
            depths = depths_above(tier, expected, ours)
            if wrong_promise({key: depths[key] + blocks for key, blocks in ours.items()}, depths, theirs) is None:
                out[tier] = {key: blocks for key, blocks in promised.items() if key not in ours} | theirs
        return out


def depths_above(tier: StorageTier, found: Mapping[StorageTier, Mapping[Any, int]], keys: Iterable[Any]) -> Depths:
    """Where the tiers that are faster than one end, by worker, of what an index found."""
    faster = [scores for each, scores in found.items() if _is_faster(each, tier)]
    return {key: sum(scores.get(key, 0) for scores in faster) for key in keys}


class WrongPromise(NamedTuple):
    """What is wrong with what is promised of a store.

    Attributes:
        store: its name.
        worker: the worker.
        blocks: what that is promised.
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
    """The first wrong promise of any store; None: all are right.

    Where promises begin depends on what is known of the faster tiers: of all of them, of the device alone, or else.

    Args:
        stores: the stores.
        found: what an index of owners finds, tier by tier.
        said: how many blocks each worker is promised, by store.
        loaders: returns the workers of a store that are looked at.
        known: further numbers of blocks that may be known of the faster tiers, by worker.
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
    """The first worker of a store that is promised what it must not be, and what it may be; None: all is right.

    Each may be promised what is there, or all of them alike less, as a block may be gone without a word.

    Args:
        ends: where what each worker of the store can load ends, in blocks from the first of a prompt.
        depths: where the faster tiers of each end.
        said: how many blocks each is promised from there on; those that are left out get none.
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
