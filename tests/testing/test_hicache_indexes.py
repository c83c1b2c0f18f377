"""Indexes of routers over SGLang's HiCache: a right one passes the contract's traffic, and each wrong one is found."""

import contextlib

import pytest
from contract_runs import failure_of, names_of_tests
from depth import takes_long, worth_its_time
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tiered_indexes import DEVICE, HostIndex, SubtreeRemoved, contract_of

from pytest_kvmock import BACKENDS, EngineProfile, RouterHarness, StorageTier
from pytest_kvmock.engines import Tiers
from pytest_kvmock.testing import play, traffic

HOST = StorageTier.HOST_PINNED
TRAFFIC = "test_it_follows_traffic_over_a_host"

HOSTS = [
    {"host": blocks, "write_policy": policy}
    for blocks in (6, 16)
    for policy in ("write_through", "write_through_selective", "write_back")
]


class MediumIgnored(HostIndex):
    """Ignores the medium: each event counts for the device."""

    def store(self, key, tier, data):
        super().store(key, DEVICE, data)

    def remove(self, key, tier, data):
        super().remove(key, DEVICE, data)


class DeviceOnly(HostIndex):
    """Ignores events of the host."""

    def store(self, key, tier, data):
        if tier is DEVICE:
            super().store(key, tier, data)

    def remove(self, key, tier, data):
        if tier is DEVICE:
            super().remove(key, tier, data)


class LastMediumWins(HostIndex):
    """Takes a copy for a move: a block is only where it was stored last."""

    def store(self, key, tier, data):
        super().store(key, tier, data)
        for block in data.block_hashes:
            self.held[key][HOST if tier is DEVICE else DEVICE].pop(block, None)


class Demoting(HostIndex):
    """Takes a block that the device removes as being on the host, until 1,000 others follow."""

    def store(self, key, tier, data):
        if tier is DEVICE:
            super().store(key, tier, data)

    def remove(self, key, tier, data):
        super().remove(key, tier, data)
        if tier is DEVICE:
            self.add(key, HOST, data.block_hashes)
        host = self.held[key][HOST]
        for block in [*host][:-1000]:
            del host[block]


class StickyHost(HostIndex):
    """Keeps blocks that the host removes, as if the storage had them."""

    def remove(self, key, tier, data):
        if tier is DEVICE:
            super().remove(key, tier, data)


class CountingAcrossMedia(HostIndex):
    """Counts a block over both media together, without tiers."""

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


OF_THE_DEVICE = ("test_what_another_tier_alone_has_is_not_found", "test_what_another_tier_removes_stays_on_the_device")
TRAITS = BACKENDS["sglang"].traits_at(4, Tiers.of({"host": 6}))


def over_sglang(index, hosts=None):
    contract = contract_of(index)
    contract.backends, contract.tiers = ("sglang",), hosts
    return contract


@pytest.mark.parametrize("host", HOSTS, ids=str)
def test_an_index_with_one_set_per_medium_is_right(host):
    assert failure_of(over_sglang(HostIndex, (host,)), TRAFFIC) is None


@pytest.mark.parametrize("index", FOUND_BY, ids=lambda index: index.__name__)
def test_a_wrong_index_of_hicache_is_found(index):
    assert failure_of(over_sglang(index), FOUND_BY[index]) is not None


def without_tiers(index):
    """Return the index without `find_tiered`: it is queried for the device only."""

    class WithoutTiers:
        def __init__(self, traits):
            tiered = index(traits)
            self.apply, self.find_matches, self.remove_worker = tiered.apply, tiered.find_matches, tiered.remove_worker

    return WithoutTiers


@worth_its_time
@pytest.mark.parametrize("index", [HostIndex, DeviceOnly, Demoting, SubtreeRemoved, StickyHost])
def test_without_find_tiered_four_wrong_indexes_are_not_judged(index):
    contract = over_sglang(without_tiers(index))
    for name in names_of_tests(contract):
        with contextlib.suppress(pytest.skip.Exception):
            assert failure_of(contract, name) is None
    with pytest.raises(pytest.skip.Exception) as reason:
        failure_of(contract, TRAFFIC)
    assert str(reason.value).endswith(
        "tiers below the device were not checked; unjudged: whether it overlooks the host, has there "
        "what the device removes, keeps what the host removes, or drops what stands below a removed block"
    )


@pytest.mark.parametrize("index", [MediumIgnored, LastMediumWins, CountingAcrossMedia])
def test_without_find_tiered_the_others_are_found_by_their_answers_for_the_device(index):
    contract = over_sglang(without_tiers(index))
    assert [name for name in OF_THE_DEVICE if failure_of(contract, name) is not None]


def is_found_by_traffic(index):
    """Return whether 200 examples of traffic find an index wrong, over hosts with each of the three policies."""
    found = []

    @settings(max_examples=200, database=None, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(traffic(workers=2, most_in_a_burst=5, tiers=True), st.sampled_from(HOSTS))
    def follow(program, host):
        tiers = {"gbps": 1.0, "bytes_per_token": 250_000, **host}  # a block takes a millisecond
        profile = EngineProfile(block_size=4, num_blocks=8, workers=2, tiers=tiers)
        kv = RouterHarness(profile, "sglang", index=index(TRAITS))
        try:
            play(kv, program)
            kv.assert_no_event_errors()
        except AssertionError:
            found.append(program)
            raise

    with contextlib.suppress(AssertionError):
        follow()
    return bool(found)


@pytest.mark.parametrize("index", [each for each in FOUND_BY if each is not SubtreeRemoved])
def test_traffic_finds_six_of_the_seven_wrong_indexes_within_200_examples(index):
    assert is_found_by_traffic(index)


@takes_long
@pytest.mark.parametrize("index", [HostIndex, SubtreeRemoved])
def test_traffic_accepts_right_indexes_and_misses_what_only_the_contract_finds(index):
    """Traffic seldom evicts a host block above others and looks below it in time."""
    assert not is_found_by_traffic(index)
