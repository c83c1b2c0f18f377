"""Indexes under test over stores that exist only below the device: right ones pass, wrong ones are found."""

import pytest
from depth import each_parameter

from pytest_kvmock import EngineProfile, RadixIndex, RouterEvent, RouterHarness, StorageTier
from pytest_kvmock.oracle.index.owners import OwnedBlocks, OwnedChunks

PROMPTS = [list(range(first, first + 35)) for first in (0, 1000, 2000)]
STORES = {
    "mooncake": {"pool": {"kind": "mooncake", "workers": [0, 1]}},
    "lmcache": {"pool": {"kind": "lmcache", "workers": [0, 1], "chunk": 8}},
}
TIER = {"mooncake": StorageTier.EXTERNAL, "lmcache": StorageTier.HOST_PINNED}
KINDS = [*STORES]


def played(kind, make, *, told=True):
    """Return the verdict over an index: two workers share a store, one has none; each serves the others' prompts."""
    index = make(count_copies=True, clears_below=False, stores=STORES[kind] if told else None)
    index.tier = TIER[kind]
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=12, workers=3), "vllm", index, stores=STORES[kind])
    for worker_id, prompts in ((0, PROMPTS[:2]), (1, PROMPTS[1:]), (2, PROMPTS[:1]), (1, PROMPTS[:1])):
        worker = kv.worker(worker_id)
        for prompt in prompts:
            worker.serve(prompt)
            if worker_id < 2:
                worker.tick(worker.now + 20)
    kv.overlap(PROMPTS[0], tier=None)
    kv.remove_worker(1)
    kv.overlap(PROMPTS[0], tier=None)
    return kv.judge()


class LeavesStoresOut(RadixIndex):
    """An index of workers only."""

    def apply(self, event):
        if event.storage_tier is StorageTier.DEVICE:
            super().apply(event)


class Lowers(RadixIndex):
    """An index that promises a store's blocks up to the fourth block of a prompt, to all workers alike."""

    def find_tiered(self, local_hashes, **more):
        found = super().find_tiered(local_hashes, **more)
        device = found.get(StorageTier.DEVICE, {})
        lowered = {key: min(n, 4 - device.get(key, 0)) for key, n in found.get(self.tier, {}).items()}
        return {**found, self.tier: {key: n for key, n in lowered.items() if n > 0}}


@each_parameter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [RadixIndex, LeavesStoresOut, Lowers])
def test_a_right_index_passes(kind, make):
    pytest.importorskip("blake3")
    assert played(kind, make).errors == []


class AnUnknownMediumIsTheDevice(RadixIndex):
    """Counts a store's blocks as blocks of the device."""

    def apply(self, event):
        super().apply(RouterEvent(event.worker_id, event.event, StorageTier.DEVICE, event.token_ids, event.extra))


class AStoreIsAWorker(RadixIndex):
    """Makes a store a worker with an id of its own."""

    def apply(self, event):
        super().apply(event)
        if event.storage_tier is not StorageTier.DEVICE:
            super().apply(RouterEvent(99, event.event, StorageTier.DEVICE, event.token_ids, event.extra))


class JumpsAHole(RadixIndex):
    """Promises blocks behind a hole to all workers of the store."""

    def find_tiered(self, local_hashes, **more):
        found = super().find_tiered(local_hashes, **more)
        device = found.get(StorageTier.DEVICE, {})
        more_of = {(each, 0): len(local_hashes) - device.get((each, 0), 0) for each in (0, 1)}
        return {**found, self.tier: {key: n for key, n in more_of.items() if n > 0}}


class CreditsTheStranger(RadixIndex):
    """Promises the store to a worker that does not share it."""

    def find_tiered(self, local_hashes, **more):
        found = super().find_tiered(local_hashes, **more)
        of_store = found.get(self.tier, {})
        return {**found, self.tier: {**of_store, (2, 0): max(of_store.values())}} if of_store else found


WRONG = {
    "mooncake": (AnUnknownMediumIsTheDevice, AStoreIsAWorker, JumpsAHole, CreditsTheStranger),
    "lmcache": (JumpsAHole, CreditsTheStranger),  # the other kinds read nothing of a foreign chain
}


@each_parameter
@pytest.mark.parametrize(("kind", "make"), [(kind, make) for kind in KINDS for make in WRONG[kind]])
def test_a_wrong_index_is_found(kind, make):
    pytest.importorskip("blake3")
    errors = played(kind, make).errors
    assert errors
    assert {problem.rule for problem in errors} <= {"index_drift", "index_failure"}


class CreditsAllRanks(RadixIndex):
    """Knows that each worker has two ranks, and that any of them can load from the store."""

    def find_tiered(self, local_hashes, **more):
        found = super().find_tiered(local_hashes, **more)
        device, pool = found.get(StorageTier.DEVICE, {}), found.get(StorageTier.EXTERNAL, {})
        end = self.owned.extends(local_hashes, 0, 1)
        if end:
            silent = {(worker, rank) for worker in (0, 1) for rank in (0, 1)} - device.keys()
            found[StorageTier.EXTERNAL] = dict.fromkeys(silent, end + self.more) | pool
        return found


@pytest.mark.parametrize(("more", "rules"), [(0, set()), (1, {"index_drift"})])
def test_a_rank_that_has_published_nothing_may_be_promised_what_the_others_can_load(more, rules):
    index = CreditsAllRanks(count_copies=True, clears_below=False, stores=STORES["mooncake"])
    index.more, index.owned = more, index._owners.by_name["pool"]
    profile = EngineProfile(block_size=4, num_blocks=12, workers=2, dp_size=2)
    kv = RouterHarness(profile, "vllm", index, stores=STORES["mooncake"])
    worker = kv.worker(0, dp_rank=1)
    for prompt in PROMPTS:
        worker.serve(prompt)
        worker.tick(worker.now + 20)
    kv.overlap(PROMPTS[0], tier=None)
    for dp_rank in (0, 1):
        for worker_id in (0, 1):  # the last one alone does not have it on its device
            kv.overlap(PROMPTS[0], tier=None)
            kv.worker(worker_id, dp_rank=dp_rank).serve(PROMPTS[0])
    assert {error.rule for error in kv.judge().errors} == rules


def test_an_index_that_credits_a_store_block_to_its_publisher_is_found():
    errors = played("mooncake", RadixIndex, told=False).errors
    assert {problem.rule for problem in errors} == {"index_drift"}
    assert "the store 'pool' has it, and worker 1 can load from it" in str(errors[0])


def test_each_kind_of_store_has_blocks_or_chunks():
    kinds = {kind: type(RadixIndex(stores=stores)._owners.by_name["pool"]) for kind, stores in STORES.items()}
    assert kinds == {"mooncake": OwnedBlocks, "lmcache": OwnedChunks}
