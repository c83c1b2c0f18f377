"""Engines over `sglang` with a host: event times, report figures of device, host and storage, and fleets."""

import pytest

from pytest_kvmock import EngineProfile, MockEngineArgs, RouterHarness, Stored
from pytest_kvmock.fleets import synthetic_trace

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
def test_events_wait_for_a_prefill_publish_every_decode_steps_or_an_idle_engine(every, copied_at):
    kv = harness(engine={"performance_model": (1, 1), "publish_every": every})
    engine = kv.engine(0)
    engine.submit(range(29), 12)
    engine.step()
    assert published(kv) == [("device", 7)]  # after a prefill
    while ("host_pinned", 7) not in published(kv):
        engine.step()
        kv.assert_in_sync()
    assert copied_at == engine.passes  # the last of 12 passes leaves the engine idle
    engine.run()
    assert published(kv) == [("device", 7), ("host_pinned", 7), ("device", 3)]


def test_an_engine_with_waiting_events_is_in_sync():
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


def test_publish_every_is_refused_without_an_sglang_host():
    message = r"^publish_every=40 is for engines over sglang with tiers, .* got <RadixCacheManager sglang"
    with pytest.raises(ValueError, match=message):
        RouterHarness(EngineProfile(), "sglang", engine={"publish_every": 40}).engine(0)
    with pytest.raises(ValueError, match=r"^publish_every must be an integer of at least 1"):
        MockEngineArgs(publish_every=0)


def test_a_request_that_waits_for_a_prefetch_does_not_block_others():
    kv = harness(engine={"performance_model": (1, 1)}, storage=True, prefetch_threshold=16)
    engine, prompt = kv.engine(0), [1] * 41
    engine.worker.storage.fill(prompt)
    waits = engine.submit(prompt, 2)
    passes_by = engine.submit([2] * 9, 2)
    engine.step()
    assert (waits.status, passes_by.status) == ("waiting", "running")
    engine.run()
    assert 10.0 <= waits.admitted_ms < 13.0
    assert (waits.device_tokens, waits.host_tokens, waits.fetched_tokens) == (0, 0, 40)
    engine.run(until_ms=1000)
    kv.assert_in_sync()


def test_a_request_aborted_during_its_prefetch_holds_no_page():
    kv = harness(engine={"performance_model": (1, 1)}, storage=True, prefetch_threshold=16)
    engine, prompt = kv.engine(0), [1] * 41
    engine.worker.storage.fill(prompt)
    request = engine.submit(prompt, 2)
    engine.step()
    request.abort()
    engine.run(until_ms=1000)
    assert not engine.worker.manager.is_busy
    assert engine.worker.manager.host_free == 128 * SIZE
    kv.assert_in_sync()


def test_a_report_counts_the_tokens_from_device_host_and_storage():
    kv = harness(num_blocks=16, storage=True, prefetch_threshold=16)
    engine, prompts = kv.engine(0), [[user] * 41 for user in range(3)]
    engine.worker.storage.fill(prompts[2])
    for user, at in ((0, 0), (0, 100), (1, 200), (0, 300), (2, 400)):  # computed; device; computed; host; storage
        engine.submit(prompts[user], 1, arrival_ms=at)
    report = engine.run()
    assert tuple(report.figure(f"{tier}_tokens") for tier in ("device", "host", "storage")) == (40, 40, 40)
    assert report.figure("device_tokens") + report.figure("onboarded_input_tokens") == sum(
        r.first_reused_tokens for r in report.requests
    )
    kv.assert_in_sync()


def test_without_a_host_a_report_has_no_tiers():
    engine = RouterHarness(EngineProfile(block_size=4, num_blocks=16), "sglang").engine(0)
    engine.submit(range(9), 1)
    assert engine.run().figure("device_tokens") is None


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_fleet_runs_over_engines_with_an_sglang_host(policy, tmp_path):
    kv = harness(40, 3, write_policy=policy, storage=True, prefetch_threshold=16, engine={"publish_every": 5})
    trace = synthetic_trace(
        40,
        block_size=SIZE,
        interval_ms=30,
        seed=1,
        input_tokens=(20, 60),
        output_tokens=(2, 12),
        groups=5,
        prefix_blocks=(4, 8),
    )
    report = kv.fleet().run(trace)
    assert len(report.completed) == 40
    tiers = [report.figure(f"{tier}_tokens") for tier in ("device", "host", "storage")]
    assert all(tiers)
    assert tiers[1] == sum(report.figure("host_tokens", worker) for worker in report.workers)
    assert " device " in str(report)
    report.to_html(tmp_path / "fleet.html")
    assert "storage_tokens" in (tmp_path / "fleet.html").read_text()
    kv.assert_in_sync()
