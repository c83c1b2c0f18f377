"""Engines over `sglang` with a host: when events leave, what a report says of device, host and storage; fleets."""

import pytest

from pytest_kvmock import EngineProfile, MockEngineArgs, RouterHarness, Stored

SIZE = 4


def harness(num_blocks=64, workers=1, engine=None, **tiers):
    tiers = {"host": 128, "gbps": 1.0, "bytes_per_token": 250_000, **tiers}  # a block takes a millisecond
    profile = EngineProfile(block_size=SIZE, num_blocks=num_blocks, workers=workers, tiers=tiers)
    return RouterHarness(profile, "sglang", engine=engine)


def published(kv):
    return [
        (entry.event.storage_tier.value, len(entry.event.event.data.block_hashes))
        for entry in kv.events
        if isinstance(entry.event.event.data, Stored)
    ]


@pytest.mark.parametrize(("every", "copied_at"), [(None, 7), (1, 7), (3, 9), (40, 12)])
def test_events_wait_for_a_prefill_a_number_of_decode_steps_or_an_idle_engine(every, copied_at):
    kv = harness(engine={"performance_model": (1, 1), "publish_every": every})
    engine = kv.engine(0)
    engine.submit(range(29), 12)
    engine.step()
    assert [("device", 7)] == published(kv)  # behind a prefill
    while ("host_pinned", 7) not in published(kv):
        engine.step()
        kv.assert_in_sync()
    assert copied_at == engine.passes  # the last one of 12 leaves it idle
    engine.run()
    assert [("device", 7), ("host_pinned", 7), ("device", 3)] == published(kv)


def test_what_waits_is_in_sync_with_what_was_published():
    kv = harness(num_blocks=16, host=20, engine={"performance_model": (1, 1), "publish_every": 7})
    engine = kv.engine(0)
    for user in range(8):
        engine.submit([user % 3] * 20 + [user] * 9, 9, arrival_ms=user * 11.0)
    waited = 0
    while not engine.is_idle:
        engine.step()
        waited += bool(len(engine.worker.manager._queue))
        kv.assert_in_sync()
    assert waited
    engine.run(until_ms=engine.now_ms + 1000)
    kv.assert_in_sync()
    assert not engine.worker.manager._queue


def test_events_wait_for_sglangs_host_alone():
    message = r"^publish_every=40 is for engines over sglang with tiers, .* got <RadixCacheManager sglang"
    with pytest.raises(ValueError, match=message):
        RouterHarness(EngineProfile(), "sglang", engine={"publish_every": 40}).engine(0)
    with pytest.raises(ValueError, match=r"^publish_every must be an integer of at least 1"):
        MockEngineArgs(publish_every=0)
