"""Stores that workers share: who owns a block, who can load it, and what an index may return."""

import pytest

from pytest_kvmock import (
    EngineProfile,
    KvCacheEvent,
    Prompt,
    RadixIndex,
    RouterEvent,
    RouterHarness,
    StorageTier,
    Stored,
)
from pytest_kvmock.engines import Tiers
from pytest_kvmock.values.shared_stores import read_stores

PROMPTS = [list(range(first, first + 27)) for first in (0, 100, 200)]
STORES = {"disk": {"kind": "files", "workers": [0, 1]}}


def harness_of(index=None, workers=3, stores=STORES, **described):
    tiers = Tiers.of({"host": 8, "files": True, **described})
    profile = EngineProfile(block_size=4, num_blocks=8, workers=workers, tiers=tiers)
    return RouterHarness(profile, "vllm", index, stores=stores, name="stores")


def served(worker, prompts=PROMPTS):
    """Serve prompts one after the other, with time to write what they store."""
    for prompt in prompts:
        worker.serve(prompt)
        worker.tick(worker.now + 20)


def test_a_store_block_is_credited_equally_to_all_workers_that_can_load_it():
    with harness_of() as kv:
        served(kv.worker(0))
        assert kv.overlap(PROMPTS[0], owner="disk") == {0: 6, 1: 6}
        assert kv.overlap(PROMPTS[0], tier="disk") == {0: 6, 1: 6}
        assert kv.overlap(PROMPTS[2], owner="disk") == {1: 6}  # worker 0 has it on its device
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 24
        assert kv.worker(2).serve(PROMPTS[0]).cached_tokens == 0


def test_without_stores_a_folder_belongs_to_its_worker():
    with harness_of(stores=None) as kv:
        served(kv.worker(0))
        assert kv.overlap(PROMPTS[0], tier="disk") == {0: 6}
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 0


def test_a_removed_worker_takes_nothing_out_of_the_store():
    with harness_of() as kv:
        served(kv.worker(0))
        kv.remove_worker(0)
        assert kv.overlap(PROMPTS[0], owner="disk") == {1: 6}


def test_a_clear_or_restart_of_a_worker_leaves_the_store_unchanged():
    with harness_of() as kv:
        served(kv.worker(0))
        kv.worker(0).clear()
        assert kv.overlap(PROMPTS[2], owner="disk") == {1: 6}  # vLLM's host is not cleared
        kv.worker(0).restart(announced=True)
        assert kv.overlap(PROMPTS[0], owner="disk") == {1: 6}  # announced: worker 0 is missing until it publishes
        served(kv.worker(0), [[7] * 9])
        assert kv.overlap(PROMPTS[0], owner="disk") == {0: 6, 1: 6}


def test_a_block_announced_twice_counts_once():
    with harness_of() as kv:
        served(kv.worker(0))
        kv.worker(0).storage.lose(PROMPTS[0])
        served(kv.worker(0), PROMPTS[:1])  # computed again
        disk = [entry.event for entry in kv.events if entry.event.storage_tier is StorageTier.DISK]
        named = [block for event in disk for block in event.data.block_hashes]
        assert len(named) > len({*named})
        assert kv._judge.ledger.owned["disk"] == {*named}


def test_a_deleted_file_leaves_a_stale_promise():
    with harness_of() as kv:
        served(kv.worker(0))
        kv.worker(1).storage.lose(PROMPTS[0])
        assert kv.overlap(PROMPTS[0], owner="disk") == {0: 6, 1: 6}
        assert kv.reusable(PROMPTS[0], tier="storage") == {}


@pytest.mark.parametrize(
    ("load_tiers", "cached"),
    [
        (None, 24),
        ([], 0),
        ([{"medium": "STORAGE"}], 24),
        ([{"medium": "CPU"}], 0),
        ([{"locality": "LOCAL"}], 24),
        ([{"medium": "STORAGE", "locality": "REMOTE"}], 0),
        ([{}], 24),
    ],
)
def test_a_request_chooses_the_tiers_that_it_loads_from(load_tiers, cached):
    with harness_of(file_locality="LOCAL") as kv:
        served(kv.worker(0))
        prompt = Prompt(PROMPTS[0], load_tiers=load_tiers)
        assert kv.overlap(prompt, owner="disk") == {0: 6, 1: 6}  # no event shows load_tiers
        assert kv.worker(1).storage.reusable(prompt) == cached
        assert kv.worker(1).serve(prompt).cached_tokens == cached


def test_a_tier_without_a_locality_matches_any_and_load_tiers_never_restrict_the_host():
    with harness_of() as kv:
        served(kv.worker(0), PROMPTS[1:])
        served(kv.worker(0), PROMPTS[:1])
        remote = Prompt(PROMPTS[2], load_tiers=[{"medium": "STORAGE", "locality": "REMOTE"}])
        assert kv.worker(1).serve(remote).cached_tokens == 24
        served(kv.worker(0), PROMPTS[1:])
        on_host = kv.worker(0).cached_tokens(PROMPTS[0], "host_pinned")
        on_device = kv.worker(0).cached_tokens(PROMPTS[0])
        nothing = Prompt(PROMPTS[0], load_tiers=[])
        assert kv.worker(0).serve(nothing).cached_tokens == on_device + on_host


def test_an_unknown_medium_is_ignored_with_a_warning_and_without_any_all_tiers_are_allowed():
    with pytest.warns(UserWarning, match=r"load_tiers: \{'medium': 'DISK'\} is not a medium \(GPU, CPU, STORAGE\)"):
        prompt = Prompt(PROMPTS[0], load_tiers=[{"medium": "DISK"}])
    assert prompt.keys is None
    with pytest.warns(UserWarning, match="is not a medium"):
        prompt = Prompt(PROMPTS[0], load_tiers=[{"medium": "DISK"}, {"medium": "CPU"}])
    assert prompt.keys.given == {"load_tiers": (("CPU", None),)}
    assert Prompt(PROMPTS[0], **prompt.keys.given).keys == prompt.keys
    assert Prompt(PROMPTS[0], load_tiers=[]).keys.given == {"load_tiers": ()}
    with pytest.raises(ValueError, match=r"load_tiers must be a list of mappings such as .*, got 3"):
        Prompt(PROMPTS[0], load_tiers=3)


class LeavesStoresOut(RadixIndex):
    """An index of workers only."""

    def apply(self, event):
        if event.storage_tier is not StorageTier.DISK:
            super().apply(event)


def of_vllm(kind, **more):
    return kind(count_copies=True, chunk=1, clears_below=False, **more)


class Lowers(RadixIndex):
    """An index that promises at most the first three blocks of a store, to all workers alike."""

    def find_tiered(self, local_hashes, **more):
        found = super().find_tiered(local_hashes, **more)
        own = [scores for tier, scores in found.items() if tier is not StorageTier.DISK]
        for key, blocks in [*found.get(StorageTier.DISK, {}).items()]:
            more_than_own = min(blocks, 3 - sum(scores.get(key, 0) for scores in own))
            found[StorageTier.DISK][key] = max(more_than_own, 0)
        return found


@pytest.mark.parametrize(
    "index", [of_vllm(LeavesStoresOut), of_vllm(RadixIndex, stores=STORES), of_vllm(Lowers, stores=STORES)]
)
def test_a_right_index_over_shared_stores_passes(index):
    with harness_of(index) as kv:
        served(kv.worker(0), PROMPTS[:2])
        served(kv.worker(1), PROMPTS[2:])
        kv.worker(1).serve(PROMPTS[0])
        kv.remove_worker(0)


class ClearsTheStoreWithTheWorker(RadixIndex):
    """Clears the store when the worker that wrote it is removed."""

    def remove_worker(self, worker_id):
        super().remove_worker(worker_id)
        self.clear_store("disk")


class AStoreIsAWorker(RadixIndex):
    """Makes a store a worker with an id of its own."""

    def apply(self, event):
        if event.storage_tier is StorageTier.DISK:
            event = RouterEvent(99, event.event, event.storage_tier, event.token_ids, event.extra)
        super().apply(event)


class JumpsAHole(RadixIndex):
    """Promises blocks behind a hole."""

    def find_tiered(self, local_hashes, **more):
        found = super().find_tiered(local_hashes, **more)
        return {**found, StorageTier.DISK: {(0, 0): len(local_hashes)}}


@pytest.mark.parametrize(
    "index",
    [
        of_vllm(RadixIndex),  # it credits the publisher
        of_vllm(AStoreIsAWorker),
        of_vllm(JumpsAHole, stores=STORES),
    ],
)
def test_a_wrong_index_over_shared_stores_is_found(index):
    kv = harness_of(index, self_describing=True)
    served(kv.worker(0))
    verdict = kv.judge()
    assert {problem.rule for problem in verdict.errors} == {"index_drift"}
    assert any(problem.storage_tier is StorageTier.DISK for problem in verdict.errors)


def test_a_drift_names_the_store_that_has_the_block():
    kv = harness_of(of_vllm(RadixIndex), self_describing=True)
    served(kv.worker(0))
    assert "; the store 'disk' has it, and worker 1 can load from it" in str(kv.judge().errors[0])


def test_an_index_that_clears_the_store_with_a_removed_worker_is_no_error_yet():
    """A lowered promise looks the same, so it is no error until the store announces blocks again."""
    with harness_of(of_vllm(ClearsTheStoreWithTheWorker, stores=STORES)) as kv:
        served(kv.worker(0))
        kv.remove_worker(0)
        assert kv.overlap(PROMPTS[0], owner="disk") == {}


def test_clearing_a_store_keeps_the_workers_own_blocks():
    index = RadixIndex(stores=STORES)
    event = RouterEvent(0, KvCacheEvent(0, Stored(None, (1,), (11,))))
    index.apply(event)
    index.apply(RouterEvent(0, KvCacheEvent(1, Stored(None, (1, 2), (11, 12))), StorageTier.DISK))
    assert index.find_tiered([11, 12]) == {
        StorageTier.DEVICE: {(0, 0): 1},
        StorageTier.DISK: {(0, 0): 1, (1, 0): 2},
    }
    index.clear_store("disk")
    assert index.find_tiered([11, 12]) == {StorageTier.DEVICE: {(0, 0): 1}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "stores must be a mapping such as {'disk': {'kind': 'files', 'workers': [0, 1]}}, got 3"),
        ({"a": 3}, "stores['a'] must be a mapping of 'kind' and 'workers', got 3"),
        (
            {"a": {"kind": "files", "worker": [0]}},
            "stores['a']: unknown key 'worker'; did you mean 'workers'? known: kind, workers",
        ),
        (
            {"a": {"kind": "disk", "workers": [0]}},
            "stores['a']: unknown kind 'disk'; known: files, objects, mooncake, lmcache, hicache",
        ),
        (
            {"a": {"kind": "files", "workers": []}},
            "stores['a']: workers must be a list of worker ids, at least one, got []",
        ),
        (
            {"a": {"kind": "files", "workers": [0]}, "b": {"kind": "objects", "workers": [0]}},
            "stores: worker 0 is in 'a' and in 'b', which are one tier to its events (disk); no event would say which",
        ),
    ],
)
def test_a_wrong_description_of_stores_is_refused_in_one_line(given, message):
    with pytest.raises(ValueError) as error:
        read_stores(given)
    assert str(error.value) == message


def test_an_unknown_owner_and_files_without_a_host_are_refused():
    with harness_of() as kv, pytest.raises(ValueError, match="unknown store 'dsk'; did you mean 'disk'"):
        kv.overlap(PROMPTS[0], owner="dsk")
    with pytest.raises(ValueError, match=r"stores\['disk'\]: files are below a host: give the workers tiers="):
        RouterHarness(EngineProfile(workers=2), "vllm", stores=STORES)
    with pytest.raises(ValueError, match="a store of kind 'files' is below a host"):
        RouterHarness(EngineProfile(workers=2, tiers=Tiers.of({"host": 4})), "vllm", stores=STORES)
