"""Offload from device to host and back: an addition to dynamo-llm 0.2.1."""

import pytest
from block_helpers import cache, chain, hashes, make_manager, register

from pytest_kvmock import CapturingSink, EngineProfile, Removed, RouterHarness, StorageTier
from pytest_kvmock.contrib.block_manager import (
    BlockClosed,
    BlockPoolError,
    Flushed,
    NotEnoughBlocksAvailable,
    ProgressEngineShutdown,
    TokenBlock,
)

ROOTS = [TokenBlock([number] * 4) for number in range(8)]


def registered(pool, contents):
    held = register(pool, contents)
    for block, content in zip(held, contents, strict=True):
        pool.block(block.block_idx).payload = str(content.tokens).encode()
    return held


def payloads(blocks):
    return [block.payload for block in blocks]


def test_a_queued_block_is_copied_at_flush_with_its_payload():
    manager = make_manager()
    device, host = manager.device(), manager.host()
    contents = chain(2)
    with registered(device, contents) as held:
        for block in held:
            manager.offload(block)
    assert host.registered_hashes() == []
    assert Flushed(returned=2, offloaded=2, evicted_before=0, present=0, no_room=0) == manager.flush()
    assert hashes(contents) == host.registered_hashes()
    assert (host.counts.inactive, device.counts.inactive) == (2, 2)
    with host.match_sequence_hashes_blocking(hashes(contents)) as found:
        assert [str(each.tokens).encode() for each in contents] == payloads(found)
    assert Flushed(2, 0, 0, 0, 0) == manager.flush()


def test_a_block_evicted_from_the_device_can_be_onboarded_from_the_host():
    manager = make_manager(device=2)
    device, host = manager.device(), manager.host()
    contents = chain(2)
    with registered(device, contents) as held:
        for block in held:
            manager.offload(block)
        manager.flush()
    manager.flush()
    with device.allocate_blocks_blocking(2):
        assert device.match_sequence_hashes_blocking(hashes(contents)) == []
    manager.flush()
    with host.match_sequence_hashes_blocking(hashes(contents)) as found, manager.onboard(found) as back:
        assert [str(each.tokens).encode() for each in contents] == payloads(back)
        assert (device.counts.active, host.counts.active) == (2, 2)
        assert hashes(contents) == [block.sequence_hash for block in back]
    assert hashes(contents) == device.registered_hashes() == host.registered_hashes()


@pytest.mark.parametrize(
    ("priorities", "copied"),
    [([0, 0, 0], [0, 1]), ([0, 1, 2], [2, 1]), ([5, 0, 5], [0, 2]), ([0, 9, 0], [1, 0])],
)
def test_offload_copies_the_highest_priority_first_and_drops_copies_without_room(priorities, copied):
    manager = make_manager(host=2)
    with registered(manager.device(), ROOTS[:3]) as held:
        for block, priority in zip(held, priorities, strict=True):
            manager.offload(block, priority)
        assert Flushed(0, 2, 0, 0, 1) == manager.flush()
        assert hashes([ROOTS[number] for number in copied]) == manager.host().registered_hashes()
        # The request without room is not retried.
        assert Flushed(0, 0, 0, 0, 0) == manager.flush()


def test_blocks_already_on_the_host_or_evicted_from_the_device_are_not_copied():
    manager = make_manager(device=2)
    cache(manager.host(), ROOTS[:1])
    with registered(manager.device(), ROOTS[:2]) as held:
        for block in held:
            manager.offload(block)
    manager.device().flush()
    with manager.device().allocate_blocks_blocking(1):  # evicts the first block
        assert Flushed(0, 1, 1, 0, 0) == manager.flush()
    with manager.device().match_sequence_hashes_blocking(hashes(ROOTS[1:2])) as (again,):
        manager.offload(again)
        manager.offload(again)
        assert Flushed(1, 0, 0, 2, 0) == manager.flush()
    assert {*hashes(ROOTS[:2])} == {*manager.host().registered_hashes()}


def test_a_queued_offload_does_not_hold_its_block():
    manager = make_manager(device=1)
    (block,) = registered(manager.device(), ROOTS[:1])
    manager.offload(block)
    block.close()
    manager.device().flush()
    assert len(manager.device().allocate_blocks_blocking(1)) == 1


def test_a_full_host_evicts_older_copies_but_not_those_of_the_same_flush():
    manager = make_manager(host=2)
    for contents in (ROOTS[:2], ROOTS[2:5]):
        with registered(manager.device(), contents) as held:
            for block in held:
                manager.offload(block)
            manager.flush()
    assert hashes(ROOTS[2:4]) == manager.host().registered_hashes()


@pytest.mark.parametrize(
    ("on_host", "queued", "flushed"),
    [
        ([], [0, 1, 1, 2], Flushed(0, 2, 0, 1, 1)),
        ([0, 1, 2], [0, 1, 2, 1, 3], Flushed(0, 0, 0, 4, 1)),
    ],
    ids=["copied", "present"],
)
def test_a_block_queued_twice_does_not_evict_copies_of_the_same_flush(on_host, queued, flushed):
    manager = make_manager(host=len(on_host) or 2)
    cache(manager.host(), [ROOTS[number] for number in on_host])
    held = registered(manager.device(), ROOTS[: max(queued) + 1])
    for number in queued:
        manager.offload(held[number])
    assert flushed == manager.flush()
    assert hashes(ROOTS[: manager.host().total_blocks]) == manager.host().registered_hashes()


def test_onboarding_is_all_or_nothing():
    manager = make_manager(device=2)
    held = registered(manager.host(), ROOTS[:3])
    with pytest.raises(NotEnoughBlocksAvailable, match="requested: 3, available: 2"):
        manager.onboard(held)
    assert (manager.device().counts.active, manager.host().counts.active) == (0, 3)
    assert manager.onboard([]) == []


def test_onboard_accepts_any_iterable_of_blocks():
    manager = make_manager()
    held = registered(manager.host(), ROOTS[:3])
    assert hashes(ROOTS[:3]) == [block.sequence_hash for block in manager.onboard(iter(held))]


def test_blocks_on_the_device_are_returned_unchanged():
    manager = make_manager()
    there = registered(manager.device(), ROOTS[:1])
    with registered(manager.host(), ROOTS[:1]) as held, manager.onboard(held) as back:
        assert there[0].block_idx == back[0].block_idx
    assert manager.device().counts.active == 1


def test_copies_are_published_separately_for_each_tier():
    sink = CapturingSink()
    manager = make_manager(device=2, host=1, sink=sink)
    for content in ROOTS[:2]:
        with registered(manager.device(), [content]) as (block,):
            manager.offload(block)
            manager.flush()
    tiers = [(type(event.event.data).__name__, event.storage_tier) for event in sink.router_events]
    device, host = StorageTier.DEVICE, StorageTier.HOST_PINNED
    assert [("Stored", device), ("Stored", host), ("Stored", device), ("Removed", host), ("Stored", host)] == tiers
    assert Removed((ROOTS[0].sequence_hash,)) == sink.events[3].data
    assert [event.event_id for event in sink.events] == [0, 1, 2, 3, 4]
    assert sink.router_events[1].token_ids is None  # a registered block keeps no tokens
    assert [(content.block_hash,) for content in (ROOTS[0], ROOTS[0], ROOTS[1])] == [
        sink.events[place].data.tokens_hashes for place in (0, 1, 2)
    ]


def test_the_event_stream_of_both_tiers_has_no_problem():
    with RouterHarness(EngineProfile(block_size=4), backend=None) as kv:
        sink = kv.make_sink(chained=True, prefix_closed=False, num_blocks=3, tier_blocks={"host": 4})
        manager = make_manager(device=3, host=4, sink=sink)
        for start in range(0, 500, 100):
            with registered(manager.device(), chain(3, start)) as held:
                for block in held:
                    manager.offload(block)
            manager.flush()
        assert len(sink.events) > 15
        sink.compare(manager.device().registered_hashes)
        sink.compare(manager.host().registered_hashes, storage_tier=StorageTier.HOST_PINNED)
        kv.assert_in_sync()


@pytest.mark.parametrize(("device", "host"), [(8, None), (None, 16)])
def test_offload_needs_both_pools(device, host):
    manager = make_manager(device=device, host=host)
    (held,) = register(manager.pools[0], ROOTS[:1])
    missing = "host" if device else "device"
    for step in (lambda: manager.offload(held), lambda: manager.onboard([held])):
        with pytest.raises(BlockPoolError, match=f"needs a device and a host pool; this manager has no {missing} pool"):
            step()
    assert Flushed(0, 0, 0, 0, 0) == manager.flush()


def test_offload_of_an_invalid_block_is_refused():
    manager = make_manager()
    (on_device,), (on_host,) = register(manager.device(), ROOTS[:1]), register(manager.host(), ROOTS[:1])
    other = register(make_manager(7).device(), ROOTS[:1])
    with pytest.raises(
        BlockPoolError, match=r"^offload takes blocks of the device pool of worker 1337, got block 0 of the host"
    ):
        manager.offload(on_host)
    with pytest.raises(BlockPoolError, match=r"got block 0 of the device pool of worker 7$"):
        manager.offload(other[0])
    with pytest.raises(
        BlockPoolError, match=r"^onboard takes blocks of the host pool of worker 1337, got block 0 of the device"
    ):
        manager.onboard([on_host, on_device])
    with pytest.raises(TypeError, match=r"^offload takes immutable blocks of the device pool, got <MutableBlock: "):
        manager.offload(manager.device().allocate_blocks_blocking(1)[0])
    with pytest.raises(ValueError, match=r"^offload: priority must be an integer of at least 0, got -1$"):
        manager.offload(on_device, -1)
    on_device.close()
    with pytest.raises(BlockClosed):
        manager.offload(on_device)
    assert Flushed(2, 0, 0, 0, 0) == manager.flush()


def test_a_closed_manager_copies_nothing():
    manager = make_manager()
    (held,) = register(manager.device(), ROOTS[:1])
    manager.close()
    steps = {"offload": lambda: manager.offload(held), "onboard": lambda: manager.onboard([]), "flush": manager.flush}
    for name, step in steps.items():
        with pytest.raises(ProgressEngineShutdown, match=f"^Progress engine shutdown: {name} on the "):
            step()
