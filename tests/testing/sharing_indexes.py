"""Indexes that misread stores shared by workers."""

from contract_runs import Mutants

from pytest_kvmock import Cleared, RadixIndex, Removed, RouterEvent, StorageTier
from pytest_kvmock.testing import IndexContract

STORES = {"disk": {"kind": "files", "workers": [0, 1]}, "mooncake": {"kind": "mooncake", "workers": [0, 2]}}
SHARED = Mutants(IndexContract)
TIERS = (StorageTier.DISK, StorageTier.EXTERNAL)


def sharing(kind, stores=STORES, backends=("vllm",)):
    """Return the contract of an index that is given the stores."""

    def make_index(self):
        traits = self.traits
        return kind(
            stores=self.stores, count_copies=traits.copies, chunk=traits.chunk, clears_below=traits.clears_below
        )

    return type(kind.__name__, (IndexContract,), {"make_index": make_index, "stores": stores, "backends": backends})


class CreditsThePublisher(RadixIndex):
    """Credits a store's block to its publisher."""

    def __init__(self, *, stores, **traits):
        super().__init__(**traits)


class CreditsAll(RadixIndex):
    """Credits a store's block to all known workers."""

    def find_tiered(self, local_hashes, **more):
        found = super().find_tiered(local_hashes, **more)
        for tier in TIERS:
            end = max((blocks for blocks in found.get(tier, {}).values()), default=0)
            known = self.workers if end else ()
            found[tier] = {**dict.fromkeys(known, end), **found.get(tier, {})}
        return found


class CountsAnnouncements(RadixIndex):
    """Keeps a block until each worker that announced it has removed it."""

    def __init__(self, **more):
        super().__init__(**more)
        self.copies = {}

    def apply(self, event):
        data, tier = event.event.data, event.storage_tier
        if tier in TIERS and not isinstance(data, Cleared):
            for block in data.block_hashes:
                self.copies[tier, block] = self.copies.get((tier, block), 0) + (-1 if isinstance(data, Removed) else 1)
            if isinstance(data, Removed) and any(self.copies[tier, block] > 0 for block in data.block_hashes):
                return
        super().apply(event)


class WithholdsFromTheCleared(RadixIndex):
    """Credits no store block to a worker after a Cleared."""

    cleared = None

    def apply(self, event):
        super().apply(event)
        if isinstance(event.event.data, Cleared):
            self.cleared = event.worker_id

    def find_tiered(self, local_hashes, **more):
        found = super().find_tiered(local_hashes, **more)
        for tier in TIERS:
            found.get(tier, {}).pop((self.cleared, 0), None)
        return found


class CreditsWhoHasLeft(RadixIndex):
    """Promises a store's blocks to a removed worker."""

    def remove_worker(self, worker_id):
        super().remove_worker(worker_id)
        self._owners._gone.clear()


class ForgetsWhoComesBack(RadixIndex):
    """Credits no store block to a worker that was removed and has returned."""

    def __init__(self, **more):
        super().__init__(**more)
        self.left = set()

    def remove_worker(self, worker_id):
        super().remove_worker(worker_id)
        self.left.add((worker_id, 0))

    def find_tiered(self, local_hashes, **more):
        found = super().find_tiered(local_hashes, **more)
        return {
            tier: {key: blocks for key, blocks in scores.items() if tier not in TIERS or key not in self.left}
            for tier, scores in found.items()
        }


class JumpsHoles(RadixIndex):
    """Counts a store's blocks at any position of a prompt."""

    def find_tiered(self, local_hashes, **more):
        found = super().find_tiered(local_hashes, **more)
        for spec in self.stores.values():
            known = self._owners.by_name[spec.name].blocks
            if known and len(known) >= 4:
                found[spec.tier] = {(worker, 0): len(local_hashes) for worker in spec.workers}
        return found


class TakesItForTheDevice(RadixIndex):
    """Takes an unknown tier for the device."""

    def apply(self, event):
        if event.storage_tier in TIERS:
            event = RouterEvent(event.worker_id, event.event, StorageTier.DEVICE, event.token_ids, event.extra)
        super().apply(event)


class MakesAWorkerOfIt(RadixIndex):
    """Makes a store a worker with an id of its own."""

    def apply(self, event):
        super().apply(event)
        if event.storage_tier in TIERS and not isinstance(event.event.data, Cleared):
            super().apply(RouterEvent(99, event.event, StorageTier.DEVICE, event.token_ids, event.extra))


class ClearsItWithAWorker(RadixIndex):
    """Clears a store when one of its workers is cleared or removed."""

    def apply(self, event):
        super().apply(event)
        if isinstance(event.event.data, Cleared):
            for name in self.stores:
                self.clear_store(name)

    def remove_worker(self, worker_id):
        super().remove_worker(worker_id)
        for name in self.stores:
            self.clear_store(name)


class RemovesFromTheWorkersToo(RadixIndex):
    """Removes a block from all places at a Removed of the store."""

    def apply(self, event):
        super().apply(event)
        if isinstance(event.event.data, Removed):
            for owned in self._owners.by_name.values():
                owned.drop(event.event.data.block_hashes)


class ReadsAPartOfAChunk(RadixIndex):
    """Takes a chunk of a store for one block, whatever its size."""

    def __init__(self, *, chunk, **more):
        super().__init__(chunk=None if chunk is None else 1, **more)


CREDITED = "test_a_store_is_credited_alike_to_its_workers_and_to_no_other"
CLEARED = "test_a_cleared_takes_nothing_from_a_store"
LEAVES = "test_a_worker_that_leaves_takes_nothing_from_a_store"
for subject, tests in {
    CreditsThePublisher: (CREDITED, "test_it_follows_workers_that_share_a_folder"),
    CreditsAll: (CREDITED,),
    ReadsAPartOfAChunk: ("test_it_follows_workers_that_share_a_folder",),
    CountsAnnouncements: ("test_what_is_announced_twice_is_in_a_store_once",),
    WithholdsFromTheCleared: (CLEARED,),
    TakesItForTheDevice: (CREDITED,),
    MakesAWorkerOfIt: (CREDITED,),
    ClearsItWithAWorker: (CLEARED, LEAVES),
    RemovesFromTheWorkersToo: ("test_what_leaves_a_store_stays_with_its_workers",),
    CreditsWhoHasLeft: (LEAVES,),
    ForgetsWhoComesBack: (LEAVES,),
    JumpsHoles: ("test_a_hole_ends_what_a_store_promises",),
}.items():
    SHARED.breaks(*tests)(sharing(subject))


def naming(names, kind, **options):
    """The contract of an index that looks for blocks of a store by the names that `names(tokens)` computes."""
    stores = {"store": {"kind": kind, "workers": [0, 1], **options}}
    contract = sharing(RadixIndex, stores, ("vllm",))
    return type("Naming", (contract,), {"store_names": lambda self, store, tokens: names(tokens)})


SHARED.breaks("test_names_that_it_computes_are_in_the_stream_of_a_store")(naming(lambda tokens: [1, 2, 3], "mooncake"))
