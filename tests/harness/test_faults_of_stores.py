"""Faults of stores: which events they cause, what is injected, and what an index may return."""

import pytest

from pytest_kvmock import EngineProfile, RadixIndex, Removed, RouterHarness, StorageTier
from pytest_kvmock.oracle import MasterPages

PROMPTS = [list(range(first, first + 35)) for first in (0, 1000, 2000)]
TIERS = {"files": {"host": 8, "files": True}, "hicache": {"host": 16, "storage": True, "prefetch_threshold": 4}}


def harness_of(kind, index=None, **options):
    backend = "sglang" if kind == "hicache" else "vllm"
    profile = EngineProfile(block_size=4, num_blocks=12, workers=2, tiers=TIERS.get(kind))
    stores = {"pool": {"kind": kind, "workers": [0, 1], **options}}
    kv = RouterHarness(profile, backend, index, stores=stores, name="faults of stores")
    for prompt in PROMPTS:
        kv.worker(0).serve(prompt)
        kv.worker(0).tick(kv.worker(0).now + 2000)
    return kv


def read(kv):
    for worker in kv.workers.values():
        worker.tick(worker.now + 2000)


def injected(kv):
    return [str(injection) for injection in kv._judge.book.attribution.injections]


STORES = {"pool": {"kind": "files", "workers": [0, 1]}}


def index_of_vllm(kind=RadixIndex):
    return kind(count_copies=True, chunk=1, clears_below=False, stores=STORES)


def test_deleted_files_leave_a_stale_overlap_that_no_event_takes_back():
    with harness_of("files", index_of_vllm()) as kv:
        promised, events = kv.overlap(PROMPTS[0], owner="pool"), kv.events.total
        assert promised == {0: 8, 1: 8}
        kv.faults.evict("pool")
        read(kv)
        assert kv.events.total == events
        assert kv.overlap(PROMPTS[0], owner="pool") == promised
        assert kv.worker(1).storage.reusable(PROMPTS[0]) == 0
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 0  # the miss
        assert injected(kv) == ["evict of the store 'pool'"]
        assert kv.judge().errors == []


def test_a_mooncake_master_below_vllm_evicts_and_restarts_without_events():
    with harness_of("mooncake") as kv:
        events = kv.events.total
        kv.faults.evict("pool", 3)
        read(kv)
        assert kv.events.total == events
        assert kv.overlap(PROMPTS[0], owner="pool") == {0: 8, 1: 8}
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 0
        kv.faults.restart_store("pool")
        assert kv.worker(1).serve(PROMPTS[1]).cached_tokens == 0
        assert injected(kv) == ["evict of the store 'pool'", "restart_store of the store 'pool'"]


def test_lmcache_workers_publish_what_their_server_drops():
    with harness_of("lmcache", chunk=8) as kv:
        read(kv)
        assert kv.overlap(PROMPTS[0], owner="pool") == {0: 8, 1: 8}
        kv.faults.evict("pool", 4)
        read(kv)
        assert kv.overlap(PROMPTS[0], owner="pool") == {}
        assert injected(kv) == ["evict of the store 'pool'"]


def test_a_restart_of_lmcaches_server_makes_each_worker_publish_one_removed_of_all_blocks():
    with harness_of("lmcache", chunk=8) as kv:
        read(kv)
        before = kv.events.total
        kv.faults.restart_store("pool")
        read(kv)
        said = [entry.event for entry in kv.events][before:]
        assert [(event.worker_id, type(event.event.data)) for event in said] == [(0, Removed), (1, Removed)]
        assert {len(event.event.data.block_hashes) for event in said} == {12}
        assert kv.overlap(PROMPTS[0], owner="pool") == {}


def test_a_trimmed_lmcache_log_hides_what_the_server_holds():
    with harness_of("lmcache", chunk=8) as kv:
        kv.faults.trim_log("pool", 2)
        read(kv)
        by_worker = [sum(entry.event.worker_id == each for entry in kv.events) for each in (0, 1)]
        assert by_worker[1] == 2  # no loss at the first contact
        kv.worker(0).serve(list(range(3000, 3035)))
        kv.worker(0).tick(kv.worker(0).now + 2000)
        kv.faults.trim_log("pool")
        read(kv)
        last = list(kv.events)[-1].event
        assert (last.worker_id, type(last.event.data)) == (1, Removed)
        assert len(kv.store("pool").held) == 16
        assert kv.reusable(PROMPTS[0], tier="host_pinned")[1] == 32
        assert injected(kv) == ["trim_log of the store 'pool'"] * 2


def test_a_hicache_master_reports_evictions_and_not_its_restart():
    with harness_of("hicache") as kv:
        master, events = kv.store("pool"), kv.events.total
        pages = MasterPages(master.layout.keys)
        kv.faults.evict("pool", 5)
        for message in master.messages:
            pages.take(message)
        assert pages.objects == {*master.objects}
        kv.faults.restart_store("pool")
        assert pages.objects != set()
        assert kv.events.total == events  # no worker publishes any of it
        assert injected(kv) == ["evict of the store 'pool'", "restart_store of the store 'pool'"]


def test_an_index_error_about_a_dropped_block_is_not_attributed_to_the_store_fault():
    """The stream is unchanged, so an index that promises too much is wrong by itself."""

    class TooMuch(RadixIndex):
        def find_tiered(self, local_hashes, **more):
            found = super().find_tiered(local_hashes, **more)
            return {**found, StorageTier.DISK: {(0, 0): len(local_hashes)}}

    kv = harness_of("files", index_of_vllm(TooMuch))
    kv.faults.evict("pool")
    kv.worker(1).serve(PROMPTS[0])
    assert {problem.fault for problem in kv.judge().errors} == {None}


@pytest.mark.parametrize(
    ("kind", "strike", "message"),
    [
        ("files", lambda faults: faults.evict("pol"), "evict: unknown store 'pol'; did you mean 'pool'"),
        ("files", lambda faults: faults.evict("pool", 0), "evict: n must be an integer of at least 1, got 0"),
        ("files", lambda faults: faults.restart_store("pool"), "restart_store: 'pool' is a FileStore, which has none"),
        ("mooncake", lambda faults: faults.trim_log("pool"), "trim_log: 'pool' is a MooncakeObjects, which has none"),
    ],
)
def test_a_fault_that_a_store_cannot_have_is_refused_in_one_line(kind, strike, message):
    with harness_of(kind) as kv, pytest.raises(ValueError, match=f"kv_harness.faults.{message}"):
        strike(kv.faults)


def test_store_faults_are_refused_without_stores():
    kv = RouterHarness(EngineProfile(), "vllm")
    with pytest.raises(ValueError, match=r"faults.evict: no worker shares a store, got 'pool'"):
        kv.faults.evict("pool")
    with pytest.raises(ValueError, match="store: this harness has none, got 'pool'"):
        kv.store("pool")
