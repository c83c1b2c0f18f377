"""Captures of workers with a host: equal in each run, with the same verdict at a check, late faults included."""

import contextlib
from random import Random

import pytest
from captured import Captured
from depth import each_parameter

from pytest_kvmock import EngineProfile, OutOfBlocks, Removed, RouterHarness
from pytest_kvmock.engines.base.driver import SlotsLost
from pytest_kvmock.servers import check_file
from pytest_kvmock.servers.capture.harness_capture import HarnessCapture
from pytest_kvmock.wire import Batch, encode

BACKENDS = ["lineage", "lru", "multi_lru"]
LATE = 45
SEEDS = (*range(12), 78)


def tiered(path, seed, *, fault=None):
    """Serve random traffic on a small host behind a slow link; `fault`, if any, is requested near the end."""
    rng = Random(seed)
    tiers = {"host": rng.choice([1, 2, 4, 8]), "gbps": rng.choice([0.00001, 0.0001, 1.0])}
    world = Captured(path, rng.choice(BACKENDS), EngineProfile(block_size=4, num_blocks=6, tiers=tiers))
    kv, prompts = world.kv, []
    worker = kv.worker(0)
    for step in range(60):
        repeated = prompts and rng.random() < 0.5
        prompts.append(rng.choice(prompts) if repeated else kv.prompt(rng.randint(1, 4)))
        with contextlib.suppress(OutOfBlocks, SlotsLost):
            worker.serve(prompts[-1])
        if rng.random() < 0.3:
            worker.tick(worker.now + rng.random() * 5)
        if step == LATE and fault is not None:
            fault(kv)
    return world


def doubled(kv):
    kv.faults.double(1)


def never(kv):
    kv.faults.at_random({"lose": 0})


def test_a_capture_of_a_worker_with_tiers_is_the_same_in_each_run(tmp_path):
    texts = []
    for name in ("a", "b"):
        tiered(tmp_path / name, 3).found()
        texts.append((tmp_path / name).read_text())

    assert len(set(texts)) == 1


def test_a_capture_of_a_worker_with_tiers_gets_the_same_verdict_at_a_check(tmp_path):
    differing = []
    for seed in SEEDS:
        world = tiered(tmp_path / f"{seed}", seed, fault=doubled)
        if world.found() != world.again():
            differing.append(seed)

    assert differing == []


def test_a_late_fault_causes_no_unattributed_problem(tmp_path):
    for seed in SEEDS:
        world = tiered(tmp_path / f"{seed}", seed, fault=doubled)
        world.found()
        assert {problem.rule for problem in world.kv.events.errors if problem.fault is None} == set()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_book_of_a_late_fault_holds_the_blocks_of_arrived_events(tmp_path, seed):
    world = tiered(tmp_path / "a", seed, fault=never)
    world.found()

    arrived, published = world.kv._judge.ledger.streams, world.kv._judge.book.ledger.streams

    assert {key: held(stream) for key, stream in arrived.items()} == {
        key: held(stream) for key, stream in published.items()
    }
    assert [problem for problem in world.kv.events.problems if problem.fault is not None] == []


def held(stream):
    return {tier: blocks for tier, blocks in stream.tiers.items() if blocks}


@pytest.mark.parametrize("described", [False, True])
def test_a_capture_of_a_host_that_survives_a_clear_gets_the_same_verdict_at_a_check(tmp_path, described):
    tiers = {"host": 8, "chunk": 2, "self_describing": described}
    world = Captured(tmp_path / "a", "vllm", EngineProfile(block_size=4, num_blocks=6, tiers=tiers))
    worker = world.kv.worker(0)
    for number in range(6):
        worker.serve(list(range(100 * number, 100 * number + 17)))
        worker.tick(worker.now + 5.0)
        if number == 2:
            assert worker.clear()

    assert [] == world.found() == world.again()


STORES = {
    "files": {"host": 64, "files": True, "self_describing": True},
    "mooncake": None,
    "lmcache": None,
    "hicache": {"host": 16, "storage": True, "prefetch_threshold": 4},
}


@each_parameter
@pytest.mark.parametrize("kind", STORES)
def test_a_capture_names_the_tiers_of_a_store(tmp_path, kind):
    """A store's blocks may be announced twice, and LMCache's chunks have their own size: neither breaks a rule."""
    pytest.importorskip("blake3")
    path = tmp_path / "capture.jsonl"
    profile = EngineProfile(block_size=4, num_blocks=24, workers=2, tiers=STORES[kind])
    capture = HarnessCapture(path, profile, "stores")
    stores = {"pool": {"kind": kind, "workers": [0, 1], **({"chunk": 16} if kind == "lmcache" else {})}}
    with RouterHarness(profile, None, stores=stores, journal=capture.journal) as kv:
        capture.of(kv)
        kv.inside.use_backend("sglang" if kind == "hicache" else "vllm")
        serve_and_clear(kv)
    capture.close()
    assert '"stores"' in path.read_text(encoding="utf-8")
    checked = check_file(path)
    assert checked.is_clean, checked.text(warnings=True)


def serve_and_clear(kv):
    for worker_id in (0, 1, 0):
        worker = kv.worker(worker_id)
        for first in (0, 1000, 2000):
            worker.serve(list(range(first, first + 83)))
            worker.tick(worker.now + 2000)
        worker.clear()
        kv.store("pool").drop(7)


def test_a_cleared_of_vllm_keeps_the_blocks_below_the_device(tmp_path):
    """Their Removed comes later and is no error: LMCache's server drops what the worker had announced."""
    pytest.importorskip("blake3")
    stores = {"pool": {"kind": "lmcache", "workers": [0], "chunk": 16}}
    with RouterHarness(EngineProfile(block_size=4, num_blocks=24), "vllm", stores=stores) as kv:
        worker = kv.worker(0)
        worker.serve(list(range(83)))
        worker.tick(20)
        worker.clear()
        kv.store("pool").drop(7)
        worker.tick(40)
        events = [entry.event for entry in kv.events]
    assert isinstance(events[-1].event.data, Removed)
    path = tmp_path / "payloads"
    path.write_bytes(b"".join(encode(Batch([event], 1.5, 0), "vllm-0.33") for event in events))
    checked = check_file(path, dialect="vllm-0.33")
    assert checked.is_clean, checked.text(warnings=True)
