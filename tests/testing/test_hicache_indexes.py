"""Indexes as routers have them over SGLang's HiCache: a right one passes the traffic of the contract, and each wrong one is found."""

import pytest
from contract_runs import failure_of
from tiered_indexes import DEVICE, HostIndex, SubtreeRemoved, contract_of

from pytest_kvmock.events import StorageTier

HOST = StorageTier.HOST_PINNED
TRAFFIC = "test_it_follows_traffic_over_a_host"

HOSTS = [
    {"host": blocks, "write_policy": policy}
    for blocks in (6, 16)
    for policy in ("write_through", "write_through_selective", "write_back")
]


class MediumIgnored(HostIndex):
    """One set: whatever stores or removes a block, it is the device's."""

    def store(self, key, tier, data):
        super().store(key, DEVICE, data)

    def remove(self, key, tier, data):
        super().remove(key, DEVICE, data)


class DeviceOnly(HostIndex):
    """Events of the host are passed over."""

    def store(self, key, tier, data):
        if tier is DEVICE:
            super().store(key, tier, data)

    def remove(self, key, tier, data):
        if tier is DEVICE:
            super().remove(key, tier, data)


class LastMediumWins(HostIndex):
    """A block is where it was stored last: a copy is taken for a move."""

    def store(self, key, tier, data):
        super().store(key, tier, data)
        for block in data.block_hashes:
            self.held[key][HOST if tier is DEVICE else DEVICE].pop(block, None)


class Demoting(HostIndex):
    """What the device removes is on the host from then on."""

    def store(self, key, tier, data):
        if tier is DEVICE:
            super().store(key, tier, data)

    def remove(self, key, tier, data):
        super().remove(key, tier, data)
        if tier is DEVICE:
            self.add(key, HOST, data.block_hashes)


class StickyHost(HostIndex):
    """What the host removes stays there: the storage has it."""

    def remove(self, key, tier, data):
        if tier is DEVICE:
            super().remove(key, tier, data)


class CountingAcrossMedia(HostIndex):
    """One counter a block over both media, and no tiers."""

    def apply(self, event):
        self.counts = True
        super().apply(event)

    def store(self, key, tier, data):
        super().store(key, DEVICE, data)

    def remove(self, key, tier, data):
        super().remove(key, DEVICE, data)


FOUND_BY = {
    MediumIgnored: TRAFFIC,
    DeviceOnly: TRAFFIC,
    LastMediumWins: TRAFFIC,
    Demoting: TRAFFIC,
    SubtreeRemoved: "test_a_host_keeps_what_stands_below_a_copy_that_it_gives_up",
    StickyHost: TRAFFIC,
    CountingAcrossMedia: TRAFFIC,
}


def over_sglang(index, hosts=None):
    contract = contract_of(index)
    contract.backends, contract.tiers = ("sglang",), hosts
    return contract


@pytest.mark.parametrize("host", HOSTS, ids=str)
def test_a_set_a_medium_is_right(host):
    assert failure_of(over_sglang(HostIndex, (host,)), TRAFFIC) is None


@pytest.mark.parametrize("index", FOUND_BY, ids=lambda index: index.__name__)
def test_a_wrong_index_is_found(index):
    assert failure_of(over_sglang(index), FOUND_BY[index]) is not None
