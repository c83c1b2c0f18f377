"""Captures of workers that share a store name the owner of each block, and a check uses it."""

import json

import pytest
from captured import Captured

from pytest_kvmock import EngineProfile, KvCacheEvent, Removed, RouterEvent, StorageTier
from pytest_kvmock.engines import Tiers
from pytest_kvmock.servers import check_file
from pytest_kvmock.servers.capture.lines import CaptureError

STORES = {"disk": {"kind": "files", "workers": [0, 1]}}


def captured(path, stores=STORES):
    tiers = Tiers.of({"host": 8, "files": True})
    world = Captured(path, "vllm", EngineProfile(4, 8, 3, tiers=tiers), stores=stores)
    for number, first in enumerate((0, 100, 200, 300, 0, 100)):
        worker = world.kv.worker(number // 3)
        worker.serve(range(first, first + 27))
        worker.tick(worker.now + 20)
    return world


def removed_by_another(world):
    """Let another worker of the store remove a block that it has not announced."""
    *_, block = (
        entry.event.event.data.block_hashes[0]
        for entry in world.kv.events
        if entry.event.storage_tier is StorageTier.DISK and entry.event.worker_id == 0
    )
    event_id = world.kv.publisher.next_ids[1, 0]
    world.kv.apply(RouterEvent(1, KvCacheEvent(event_id, Removed((block,))), StorageTier.DISK))


def test_a_check_judges_store_blocks_as_the_test_did(tmp_path):
    world = captured(tmp_path / "capture.jsonl")
    removed_by_another(world)
    assert world.found() == world.again() == []
    lines = [json.loads(line) for line in (tmp_path / "capture.jsonl").read_text().splitlines()]
    streams = [line["stream"] for line in lines if "stream" in line]
    assert [each.get("stores") for each in streams] == [{"disk": "disk"}, {"disk": "disk"}, None]


def test_without_stores_a_removed_of_another_worker_is_an_error_in_test_and_check(tmp_path):
    world = captured(tmp_path / "capture.jsonl", stores=None)
    removed_by_another(world)
    assert world.found() == world.again() != []


@pytest.mark.parametrize("stores", ['"disk"', '{"dsk":"a"}'])
def test_an_unreadable_store_is_refused_in_one_line(tmp_path, stores):
    path = tmp_path / "capture.jsonl"
    captured(path).found()
    path.write_text(path.read_text().replace('"stores":{"disk":"disk"}', f'"stores":{stores}'))
    with pytest.raises(CaptureError, match=r"stores must map tiers to stores|unknown tier 'dsk'"):
        check_file(path)
