"""Tiers of an engine that publishes locations of names, as vLLM does with offload: recorded and hand-made streams."""

from collections import Counter
from contextlib import nullcontext

import pytest
from hybrid_streams import Prompt, named, payload, written

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored, block_hashes
from pytest_kvmock.oracle import RadixIndex
from pytest_kvmock.oracle.index import locations
from pytest_kvmock.oracle.index.index import BlockNotFound
from pytest_kvmock.values import Located, group_extra
from pytest_kvmock.wire import decode

DEVICE, HOST, DISK, _ = StorageTier


def programs_of(recording):
    """Yield the programs in which the host is never reset: no event reports a reset."""
    value = recording("vllm_0.33.0_offload_streams.json.gz")
    for number, program in enumerate(value["programs"]):
        if not any(entry[0] == "reset" and entry[2] for entry in program["log"]):
            yield number, program, value["fields"]


def answers(index, program, fields):
    """Yield after each batch, for the last prompts: blocks that the index finds on device and host, and right ones."""
    size, chunk = program["config"]["block_size"], program["config"]["blocks_per_chunk"]
    held, prompts, next_id = {"GPU": Counter(), "CPU": Counter()}, [], 0
    for kind, *entry in program["log"]:
        if kind == "add":
            prompts.append(Prompt([*entry[1]]).names(size) | {0: entry[1]})
        if kind != "step" or not entry[0].get("events"):
            continue
        batch = [written(named(event, fields)) for event in entry[0]["events"]]
        for wire, event in zip(batch, decode(payload(batch), "vllm-0.33", first_event_id=next_id).events, strict=True):
            index.apply(event)
            if wire["type"] == "AllBlocksCleared":
                held["GPU"].clear()
                continue
            for block in wire["block_hashes"]:
                held[wire["medium"]][block] += 1 if wire["type"] == "BlockStored" else -1
        next_id += len(batch)
        for names in prompts[-6:]:
            blocks = len(names) - 1
            device = 0
            while device < blocks and held["GPU"][names[device + 1]] > 0:
                device += 1
            end = device // chunk * chunk
            while end + chunk <= blocks and held["CPU"][names[end + chunk]] > 0:
                end += chunk
            found = index.find_tiered(block_hashes(names[0], size))
            right = device, (end - device) * (end - device >= chunk)
            yield tuple(found.get(tier, {}).get((0, 0), 0) for tier in (DEVICE, HOST)), right


def test_the_index_returns_what_the_engine_would_reuse(recording):
    looks = below = 0
    for number, program, fields in programs_of(recording):
        if number == 13:  # a fault of the engine: it removes a block that it never stored
            continue
        index = RadixIndex(count_copies=True, chunk=program["config"]["blocks_per_chunk"], clears_below=False)
        for found, right in answers(index, program, fields):
            assert right == found, number
            looks, below = looks + 1, below + (right[1] > 0)
    assert looks > 3000
    assert below > 500


def test_chunks_of_one_block_need_no_chunk_option(recording):
    seen = 0
    for number, program, fields in programs_of(recording):
        if program["config"]["blocks_per_chunk"] == 1:
            for found, right in answers(RadixIndex(count_copies=True, clears_below=False), program, fields):
                assert right == found, number
                seen += 1
    assert seen > 1000


# ---------------------------------------------------------------------------------------------------- by hand


class Index:
    def __init__(self, **options):
        self.index = RadixIndex(**{"clears_below": False, **options})
        self.next_id = 0

    def __call__(self, data, tier=DEVICE, extra=None, worker=0):
        self.index.apply(RouterEvent(worker, KvCacheEvent(self.next_id, data), tier, extra=extra))
        self.next_id += 1

    def found(self, *local):
        return {tier.value: scores[0, 0] for tier, scores in self.index.find_tiered(local).items() if (0, 0) in scores}


CHAIN = Stored(None, (1, 2, 3, 4), (11, 12, 13, 14))
LOCAL = (11, 12, 13, 14)


def test_a_match_goes_from_the_device_to_the_host_and_not_back():
    index = Index()
    index(CHAIN)
    index(Located((4, 2, 3)), HOST)  # the order does not matter
    assert index.found(*LOCAL) == {"device": 4}
    index(Removed((2,)))
    assert index.found(*LOCAL) == {"device": 1, "host_pinned": 3}
    index(Removed((3,)), HOST)
    assert index.found(*LOCAL) == {"device": 1, "host_pinned": 1}
    index(Removed((1,)))
    assert index.found(*LOCAL) == {}


def test_a_location_may_come_before_its_block_is_stored_and_after_it_is_removed():
    index = Index(chunk=1)
    index(Located((2,)), HOST)
    index(CHAIN)
    index(Removed((4, 3, 2)))
    assert index.found(*LOCAL) == {"device": 1, "host_pinned": 1}
    index(Located((3,)), HOST)
    assert index.found(*LOCAL) == {"device": 1, "host_pinned": 2}


def test_blocks_of_an_incomplete_chunk_do_not_count():
    index = Index(chunk=2)
    index(CHAIN)
    index(Located((2, 4)), HOST)  # each is the last block of its chunk
    index(Removed((4,)))
    assert index.found(*LOCAL) == {"device": 3}
    index(Removed((3, 2)))
    assert index.found(*LOCAL) == {"device": 1, "host_pinned": 3}
    assert index.found(*LOCAL[:3]) == {"device": 1}


def test_copies_are_counted_below_the_device_even_if_they_are_not_on_the_device():
    index = Index(chunk=2)
    for last in (3, 4):
        index(Stored(None, (1, 2, last), (11, 12, last)), HOST)
    index(Removed((1, 2, 3)), HOST)
    assert index.found(11, 12, 4) == {"host_pinned": 2}
    assert index.index.num_blocks(0, tier="host") == 3
    index(Removed((1, 2, 4)), HOST)
    assert (index.found(11, 12, 4), index.index.num_blocks(0, tier="host")) == ({}, 0)


@pytest.mark.parametrize("clears", ["rank", "worker"])
def test_since_1_6_a_removed_below_the_device_may_name_unknown_blocks(clears):
    index = Index(chunk=2, clears=clears)
    with pytest.raises(BlockNotFound) if clears == "worker" else nullcontext():
        index(Removed((2, 9)), HOST)


@pytest.mark.parametrize("clears_below", [True, False])
def test_a_cleared_empties_the_tiers_that_clears_below_says(clears_below):
    index = Index(clears_below=clears_below)
    index(CHAIN)
    index(Located((1, 2)), HOST)
    index(Located((3,)), DISK)
    index(Cleared())
    assert ({} if clears_below else {"host_pinned": 2, "disk": 1}) == index.found(*LOCAL)
    index.index.clear_all_blocks(0)
    assert index.found(*LOCAL) == {}
    assert index.index.workers == [(0, 0)]
    index.index.remove_worker(0)
    assert index.index.workers == []


def test_host_blocks_from_before_the_first_location_stay():
    index = Index()
    index(CHAIN)
    index(Stored(2, (3,), (13,)), HOST)
    index(Located((4,)), HOST)
    index(Removed((4, 3)))
    assert index.found(*LOCAL) == {"device": 2, "host_pinned": 2}
    index(CHAIN, worker=1)
    index(Removed((4, 3)), worker=1)
    assert index.index.find_tiered(LOCAL)[HOST] == {(0, 0): 2}


def test_locations_of_other_groups_do_not_count_for_the_attention_group():
    index = Index(chunk=1)
    index(CHAIN, extra=group_extra(1))
    index(Removed((4,)), extra=group_extra(1))
    index(Located((4,)), HOST)  # of a window
    assert index.found(*LOCAL) == {"device": 3}
    index(Located((4,)), HOST, group_extra(1))
    assert index.found(*LOCAL) == {"device": 3, "host_pinned": 1}
    index(Removed((4,)), HOST)
    assert index.found(*LOCAL) == {"device": 3, "host_pinned": 1}


def test_a_dump_builds_an_index_with_the_same_answers():
    index = Index(chunk=1)
    index(CHAIN)
    index(Located((3, 4, 4, 9)), HOST)
    index(Removed((4, 3)))
    again = index.index.new()
    for event in index.index.dump_events():
        again.apply(event)
    assert {DEVICE: {(0, 0): 2}, HOST: {(0, 0): 2}} == index.index.find_tiered(LOCAL) == again.find_tiered(LOCAL)


def test_names_of_blocks_in_no_tier_are_eventually_forgotten(monkeypatch):
    monkeypatch.setattr(locations, "MOST_NAMES", 3)
    index = Index(chunk=1)
    index(Located((2,)), HOST)
    for block in range(1, 20):
        index(Stored(None, (block,), (block + 10,)))
        index(Removed((block,)))
    for block in (3, 19):
        index(Located((block,)), HOST)
    assert [index.found(block + 10).get("host_pinned", 0) for block in (2, 3, 19)] == [1, 0, 1]


def test_an_invalid_chunk_is_refused():
    with pytest.raises(ValueError, match="chunk must be an integer of at least 1, got 0"):
        RadixIndex(chunk=0)
