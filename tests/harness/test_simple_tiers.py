"""Workers with vLLM's `SimpleCPUOffloadConnector`: a pool of blocks below the device."""

from random import Random

import offload_traffic
import pytest
from depth import each_parameter, seeds
from offload_traffic import HOST, overlaps, traffic

from pytest_kvmock import BACKENDS, StorageTier, Stored
from pytest_kvmock.engines import CacheGroup, EndlessOffloadError
from pytest_kvmock.values import Located

FORMS = [{}, {"lazy": True, "host": 40}, {"disk": True}, {"async_scheduling": True}]


def harness(tiers, **more):
    return offload_traffic.harness({"connector": "simple", **tiers}, **more)


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("tiers", FORMS, ids=str)
@each_parameter
def test_events_describe_exactly_what_device_and_pool_hold(tiers, seed):
    kv = harness(tiers)
    worker = kv.worker(0)
    traffic(worker, seed)
    worker.tick(worker.now + 100)
    kv.assert_in_sync()
    assert list(kv.events.errors) == []
    below = StorageTier.DISK if tiers.get("disk") else HOST
    kinds = {type(each.event.data) for each in kv.events if each.storage_tier is below}
    assert (Located if tiers.get("lazy") else Stored) in kinds
    assert worker.manager.resident(below)


@pytest.mark.parametrize("tiers", [{}, {"lazy": True, "host": 40}], ids=str)
@each_parameter
def test_the_reference_returns_what_the_engine_would_reuse(tiers):
    kv = harness(tiers)
    worker = kv.worker(0)
    for seed in range(3):
        traffic(worker, seed)
        worker.tick(worker.now + 100)
        for found, expected in overlaps(kv, worker):
            assert found == expected


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("lazy", [False, True])
@each_parameter
def test_an_engine_in_virtual_time_completes_all_requests_and_every_event_is_right(lazy, seed):
    rng, kv = Random(seed), harness({"host": 64, "lazy": lazy}, num_blocks=24)
    engine = kv.engine(0)
    for _ in range(40):
        base = rng.randrange(4) * 100
        engine.submit(range(base, base + rng.randint(3, 40)), rng.randint(1, 20))
        if rng.random() < 0.3:
            engine.run(engine.now_ms + rng.randrange(50))
    report = engine.run()
    engine.run(engine.now_ms + 500)
    kv.assert_in_sync()
    assert len(report.completed) == 40
    assert list(kv.events.errors) == []


def test_blocks_evicted_from_the_device_are_loaded_from_the_pool():
    worker = harness({"host": 40}).worker(0)
    worker.serve([*range(32)], 1)
    worker.tick(worker.now + 100)
    worker.serve([*range(100, 148)])
    worker.tick(worker.now + 100)
    device = worker.cached_tokens([*range(33)])
    with worker.prefill([*range(33)]) as request:
        assert device < 32
        assert (request.cached_tokens, request.onboarded_tokens) == (32, 32 - device)


def test_the_device_evicts_heads_before_tails_and_breaks_no_rule():
    """Copied blocks become free one by one, from the head on."""
    kv = harness({"host": 40})
    worker = kv.worker(0)
    with worker.prefill([*range(24)]):
        worker.tick(worker.now + 100)
    worker.tick(worker.now + 100)
    worker.serve([*range(100, 136)])
    chain = [each for each in kv.events if each.storage_tier is StorageTier.DEVICE]
    first = next(each.event.data for each in chain if type(each.event.data) is Stored)
    removed = [block for each in chain if each.event.data.kind == "removed" for block in each.event.data.block_hashes]
    assert removed[0] in first.block_hashes
    assert list(kv.events.errors) == []


def test_a_lazy_pool_smaller_than_the_device_never_stops_copying():
    groups = [CacheGroup("full_attention", 4)]
    backend = BACKENDS["vllm"].variant("vllm_small_steps", groups=groups, max_num_batched_tokens=4)
    worker = harness({"lazy": True, "host": 3}, backend=backend).worker(0)
    worker.serve([*range(40)])
    with pytest.raises(EndlessOffloadError, match="its lazy pool of 3 blocks is smaller than what the device caches"):
        worker.tick(worker.now + 10_000)


@pytest.mark.parametrize(
    ("tiers", "text"),
    [
        ({"chunk": 2}, "'chunk' is not for this backend; vLLM's SimpleCPUOffloadConnector has host, gbps"),
        ({"connector": "mine"}, "tiers: connector: unknown 'mine'|unknown tiers: connector 'mine'"),
        ({"lazy": 1}, "tiers: lazy must be True or False, got 1"),
        ({"connector": "native", "lazy": True}, "'lazy' is not for this backend; vLLM's native offload has host"),
        ({"connector": "native", "disk": True}, "tiers: 'disk' is not a key: 'files': True puts a folder below"),
    ],
)
@each_parameter
def test_options_that_the_simple_connector_lacks_are_refused(tiers, text):
    with pytest.raises(ValueError, match=text):
        harness(tiers)
