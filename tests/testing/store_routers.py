"""Routers that misread stores shared by workers, and right ones."""

import sys
from pathlib import Path

from pytest_kvmock import Cleared, RadixIndex, StorageTier
from pytest_kvmock.testing import RightRouter, RouterContract

sys.path.append(str(Path(__file__).parents[1] / "fleets"))

from store_fleets import OfOwners

STORES = {"disk": {"kind": "files", "workers": [0, 1]}}
OWN = "test_a_block_of_a_store_is_no_worker_s_own"
OUTLIVES = "test_a_store_outlives_what_happens_to_its_workers"
HOLE = "test_a_hole_ends_a_promise_of_a_store"
LOWERED = "test_a_promise_that_was_broken_is_lowered"
ALL = (OWN, OUTLIVES, HOLE, LOWERED)


def contract(kind, seed=0, **traits):
    def make_router(self, workers):
        router = kind(workers)
        router.rng.seed(seed)
        return router

    return type(f"Of{kind.__name__}", (RouterContract,), {"make_router": make_router, "stores": STORES, **traits})


class Counting(OfOwners):
    """Sends a prompt to the worker that can load most of it, from a store too."""

    def cost(self, request, worker, overlap):
        return super().cost(request, worker, overlap + self.promised(request).get(worker, 0))

    def promised(self, request):
        return self.overlap_by_owner(request)["disk"]


class LeavesStoresOut(RightRouter):
    """Ignores events of a store."""

    def apply(self, event):
        if event.storage_tier is not StorageTier.DISK:
            super().apply(event)


class LeavesThemOutOfItsAnswers(OfOwners):
    def overlap_by_owner(self, request):
        return {"disk": {}}


class LowersAfterAMiss(Counting):
    """Does not repeat a promise that an engine did not keep, for any worker."""

    def __init__(self, workers):
        super().__init__(workers)
        self.missed, self.sent = set(), {}

    def dispatched(self, request, worker):
        super().dispatched(request, worker)
        self.sent[request] = self.promised(request).get(worker, 0)

    def finished(self, request):
        super().finished(request)
        if request.reused_tokens < self.sent.pop(request) * request.block_size:
            self.missed.update(request.local_hashes[:1])

    def overlap_by_owner(self, request):
        gone = self.missed.intersection(request.local_hashes)
        return {"disk": {}} if gone else super().overlap_by_owner(request)


FAR = {"far": {"kind": "mooncake", "workers": [0, 1]}}
CHUNKS = {"chunks": {"kind": "lmcache", "workers": [0, 1], "chunk": 64}}


class OfFar(OfOwners):
    def __init__(self, workers):
        super().__init__(workers, stores=FAR)


class OfChunks(OfOwners):
    def __init__(self, workers):
        super().__init__(workers, stores=CHUNKS)


class CreditsAPartOfAChunk(OfChunks):
    """Splits a chunk and credits its blocks one by one."""

    def overlap_by_owner(self, request):
        found = super().overlap_by_owner(request)["chunks"]
        return {"chunks": {key: blocks + 3 * (blocks < 7) for key, blocks in found.items()}}


class CountsFarAsTheDevice(RightRouter):
    """Counts Mooncake's blocks as the device's."""

    def __init__(self, workers):
        super().__init__(workers, copies=True)

    def apply(self, event):
        if event.storage_tier is StorageTier.EXTERNAL:
            event = type(event)(event.worker_id, event.event, StorageTier.DEVICE, event.token_ids, event.extra)
        super().apply(event)


RIGHT = (OfOwners, Counting, LeavesStoresOut, LeavesThemOutOfItsAnswers, LowersAfterAMiss)


class CountsTheTierAsTheDevice(RightRouter):
    """Takes an unknown medium for the device."""

    def __init__(self, workers):
        super().__init__(workers, copies=True)

    def apply(self, event):
        if event.storage_tier is StorageTier.DISK:
            event = type(event)(event.worker_id, event.event, StorageTier.DEVICE, event.token_ids, event.extra)
        super().apply(event)


class MakesAWorkerOfAStore(RightRouter):
    """Makes each unknown tier a worker."""

    def apply(self, event):
        super().apply(event)
        if event.storage_tier is StorageTier.DISK and 99 not in self.book.loads:
            self.book.add_worker(99)


class CreditsThePublisher(Counting):
    """Credits a store's block to its publisher."""

    def __init__(self, workers):
        super().__init__(workers)
        self.index = RadixIndex(count_copies=True, chunk=1, clears_below=False)

    def promised(self, request):
        found = self.index.find_tiered(request.local_hashes).get(StorageTier.DISK, {})
        return {key[0]: blocks for key, blocks in found.items()}

    def overlap_by_owner(self, request):
        return {"disk": self.promised(request)}


class SendsToThePublisher(CreditsThePublisher):
    """The same, without reporting it."""

    overlap_by_owner = None


class CreditsAll(Counting):
    """Credits a store's blocks to all workers."""

    def overlap_by_owner(self, request):
        most = max(super().overlap_by_owner(request)["disk"].values(), default=0)
        return {"disk": dict.fromkeys(self.workers(), most)}


class ClearsAStoreWithAWorker(Counting):
    """Clears a store when one of its workers is removed."""

    def worker_removed(self, worker):
        super().worker_removed(worker)
        self.index.clear_store("disk")


class ClearsAStoreByACleared(Counting):
    def apply(self, event):
        super().apply(event)
        if isinstance(event.event.data, Cleared):
            self.index.clear_store("disk")


class CreditsWhoHasLeft(Counting):
    def overlap_by_owner(self, request):
        promised = super().overlap_by_owner(request)["disk"]
        most = max(promised.values(), default=0)
        return {"disk": {0: most, 1: most}} if 0 not in self.workers() else {"disk": promised}


class JumpsHoles(Counting):
    """Counts a store's blocks at any position of a prompt."""

    def __init__(self, workers):
        super().__init__(workers)
        self.there = set()

    def apply(self, event):
        super().apply(event)
        if event.storage_tier is StorageTier.DISK:
            self.there.update(getattr(event.event.data, "tokens_hashes", ()))

    def overlap_by_owner(self, request):
        there = sum(each in self.there for each in request.local_hashes)
        return {"disk": dict.fromkeys((0, 1), there)} if there else super().overlap_by_owner(request)


WRONG = {
    CountsTheTierAsTheDevice: (
        OWN,
        "CountsTheTierAsTheDevice.overlap() says ... of 8 blocks on worker 0 ... expected 0, by the",
    ),
    MakesAWorkerOfAStore: (OWN, "MakesAWorkerOfAStore.workers() knows worker 99, which is not there"),
    CreditsThePublisher: (OWN, "promises worker 1 0 of 8 blocks from the store 'disk'"),
    SendsToThePublisher: (OWN, "all of them went to worker 0; expected some at the others: workers 0, 1 can load them"),
    CreditsAll: (OWN, "promises worker 2 8 of 8 blocks from the store 'disk'"),
    ClearsAStoreWithAWorker: (OUTLIVES, "and restarts: it promises worker 1 0 blocks of one; expected 8"),
    ClearsAStoreByACleared: (OUTLIVES, "and was cleared: it promises worker 1 0 blocks of one; expected 8"),
    CreditsWhoHasLeft: (OUTLIVES, "promises worker 0 8 of 8 blocks from the store 'disk'"),
    JumpsHoles: (HOLE, "promises worker 0 4 of 8 blocks from the store 'disk'"),
}
