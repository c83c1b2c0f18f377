"""A router that uses tiers: it prefers the device to the host, and the host to recomputing a prefix.

Each worker has a device and a host. Blocks that the device evicts go to the host, and come back when they are needed.
Both moves take time, in ms that the test advances (`worker.tick`); there is no clock. `test_tiered_trace.py` serves a
whole trace.
"""

import pytest
from tiered_router import CREDIT, TieredIndex, TieredRouter

from pytest_kvmock import StorageTier

HOST = StorageTier.HOST_PINNED

pytestmark = pytest.mark.kvmock(workers=3, num_blocks=4, tiers={"host": 64, "gbps": 14.0, "bytes_per_token": 160_000})


@pytest.fixture
def kv_index():
    return TieredIndex()


@pytest.fixture
def router(kv_index, kv_harness):
    return TieredRouter(kv_index, kv_harness.workers)


def push_to_host(worker, prompt, other):
    """Serve a prompt, then another that needs the whole device, so that the first is only on the host."""
    worker.serve(prompt)
    worker.serve(other)
    worker.tick(worker.now + 1000.0)


def test_the_device_is_preferred_to_the_host_and_the_host_to_nothing(router, kv_harness, kv_profile, kv_prompt):
    prompt = kv_prompt(blocks=4)
    device, host, nothing = (kv_harness.worker(worker) for worker in range(3))
    device.serve(prompt)
    push_to_host(host, prompt, other=kv_prompt(blocks=4))
    asked = prompt.block_hashes(kv_profile.block_size)

    assert kv_harness.overlap(prompt, tier=None) == {"device": {0: 4}, "host_pinned": {1: 4}}
    assert {device.worker_id: 0.0, host.worker_id: 1.0, nothing.worker_id: 4.0} == router.cost(asked)
    assert device.worker_id == router.route(asked)
    assert host.worker_id == router.route(asked)  # the first is busy with 4 blocks
    kv_harness.remove_worker(1)
    router.finish(0, asked)
    assert {worker: cost for worker, cost in router.cost(asked).items() if worker != 1} == {0: 0.0, 2: 4.0}


def test_a_prefix_in_two_tiers_is_credited_in_both(router, kv_harness, kv_worker, kv_profile, kv_prompt):
    start = kv_prompt(blocks=2)
    whole = kv_prompt(blocks=2, after=start)
    push_to_host(kv_worker, whole, other=kv_prompt(blocks=4))
    with kv_worker.prefill(start) as request:  # brings the first half back
        assert 2 * kv_profile.block_size == request.onboarded_tokens == request.cached_tokens

    assert kv_harness.overlap(whole, tier=None) == {"device": {0: 2}, "host_pinned": {0: 2}}
    expected = 4 - 2 * CREDIT[StorageTier.DEVICE] - 2 * CREDIT[HOST]
    assert router.cost(whole.block_hashes(kv_profile.block_size))[0] == expected


def test_what_is_on_its_way_to_the_host_is_in_no_tier_yet(kv_harness, kv_worker, kv_prompt):
    """The device publishes the removal of a block at once; the host publishes the block when the transfer is done."""
    prompt = kv_prompt(blocks=4)
    kv_worker.serve(prompt)
    with pytest.raises(Exception, match="on their way to the host"):
        kv_worker.prefill(kv_prompt(blocks=4), wait=False)

    assert kv_harness.overlap(prompt, tier=None) == {}
    kv_worker.tick(1000.0)
    assert kv_harness.overlap(prompt, tier=None) == {"host_pinned": {0: 4}}
