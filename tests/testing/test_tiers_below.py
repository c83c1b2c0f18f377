"""The tests of an index contract about tiers below the device: a right index passes, and each wrong one is found."""

import re
from contextlib import nullcontext

import pytest
from contract_runs import failure_of
from depth import each_parameter, few, takes_long, worth_its_time
from tiered_indexes import FOUND_BY, BlocksForChunks, HashesTokens, HostIndex, NoticesRepeats, contract_of

from pytest_kvmock import EventRulesBroken, RadixIndex, StorageTier
from pytest_kvmock.engines import Tiers, backend_spec
from pytest_kvmock.testing import IndexContract


@worth_its_time
class TestARightIndex(contract_of(HostIndex)):
    pass


class TestARightIndexOfTokens(contract_of(HashesTokens)):
    pass


class TestARightIndexThatNoticesRepeats(contract_of(NoticesRepeats)):
    pass


@pytest.mark.parametrize("subject", FOUND_BY, ids=lambda subject: subject.__name__)
def test_a_wrong_index_of_tiers_is_found(subject):
    contract = contract_of(subject)
    assert [name for name in FOUND_BY[subject] if failure_of(contract, name) is None] == []


@pytest.mark.parametrize(
    ("backends", "tiers", "message"),
    [
        (("vllm",), 64, r"tiers must be a tuple or list of hosts such as {'host': 64}, or None, got 64"),
        (("vllm",), ({"host": 65, "chunk": 2},), r"tiers has .*: tiers: host must be whole chunks of 2 blocks, got 65"),
        (("lru",), ({"host": 64, "chunk": 2},), r"tiers has .*: tiers: 'chunk' is not for this backend; a host that"),
        (("hash_cache",), ({"host": 64},), r"tiers has .*: none of backends takes tiers"),
    ],
)
def test_hosts_that_no_engine_supports_are_refused(backends, tiers, message):
    contract = contract_of(HostIndex)
    contract.backends, contract.tiers = backends, tiers
    with pytest.raises(pytest.fail.Exception, match=message):
        contract().test_a_tier_goes_on_where_the_faster_ones_end()


def test_a_contract_may_name_its_hosts():
    contract = contract_of(HostIndex)
    contract.backends, contract.tiers = ("vllm",), ({"host": 64},)
    contract().test_what_the_device_lets_go_of_is_where_it_was_located()
    with pytest.raises(pytest.skip.Exception, match="backends and tiers name no vLLM with chunks of 2 on its host"):
        contract().test_part_of_a_chunk_is_worth_nothing()
    contract.tiers = ()
    with pytest.raises(pytest.skip.Exception, match="backends and tiers name no vLLM with chunks of 1"):
        contract().test_a_cleared_leaves_a_host_that_is_a_copy()
    with pytest.raises(pytest.skip.Exception, match="tiers names no host: tiers below the device were not checked"):
        contract().test_a_tier_goes_on_where_the_faster_ones_end()


class Radix:
    """The reference index as a contract makes it."""

    def __init__(self, traits):
        self.index = RadixIndex(count_copies=traits.copies, chunk=traits.chunk, clears_below=traits.clears_below)
        self.find_matches, self.find_tiered = self.index.find_matches, self.index.find_tiered
        self.remove_worker = self.index.remove_worker

    def apply(self, event):
        self.index.apply(event)


class IgnoresTheHost(Radix):
    """Reads only events of the device."""

    def apply(self, event):
        if event.storage_tier is not StorageTier.HOST_PINNED:
            super().apply(event)


def over_a_hybrid(index, backend):
    contract = contract_of(index)
    contract.backends, contract.tiers = (backend,), ({"host": 640},)
    return contract


MODELS = ["vllm_gpt_oss", "vllm_qwen3_next", "vllm_mtp", "sglang_gpt_oss", "sglang_qwen3_next", "sglang_eagle"]


@each_parameter
@pytest.mark.parametrize("backend", few(MODELS, 2))
def test_a_right_index_follows_hybrid_models_and_draft_models_over_a_host(backend):
    assert failure_of(over_a_hybrid(Radix, backend), "test_it_follows_traffic_over_a_host") is None


@takes_long
@pytest.mark.parametrize("backend", ["vllm_qwen3_next", "sglang_gpt_oss"])
def test_an_index_that_ignores_the_host_is_found_over_hybrid_models(backend):
    assert failure_of(over_a_hybrid(IgnoresTheHost, backend), "test_it_follows_traffic_over_a_host") is not None


@pytest.mark.parametrize(("backends", "tiers"), [(("hash_cache",), None), (("vllm",), ())])
def test_without_a_host_the_test_of_traffic_over_one_is_skipped(backends, tiers):
    contract = contract_of(HostIndex)
    contract.backends, contract.tiers = backends, tiers
    with pytest.raises(
        pytest.skip.Exception, match="backends and tiers name no engine with a host: traffic over one was"
    ):
        contract().test_it_follows_traffic_over_a_host()


def test_without_find_tiered_the_test_of_traffic_over_a_host_is_skipped():
    class Device(IndexContract):
        backends = ("vllm",)

        def make_index(self):
            index = HostIndex(self.traits)
            index.find_tiered = None
            return index

    with pytest.raises(
        pytest.skip.Exception, match=r"has neither find_tiered\(local_hashes\) nor match_tiered\(tokens, extra\)"
    ):
        Device().test_it_follows_traffic_over_a_host()


def test_a_failure_over_a_host_has_a_reproduction_that_a_right_index_passes():
    """The reproduction has requests: events do not show the chunk size, so events that show the fault would fail a
    right index too.
    """
    contract = contract_of(BlocksForChunks)
    with pytest.raises(EventRulesBroken) as error:
        contract().test_it_follows_traffic_over_a_host()
    text = error.value.__notes__[0].partition(":\n")[2]
    assert re.search(r"^@pytest.mark.kvmock\(tiers={.*'chunk': 2.*}\)$".replace("'", '"'), text, re.MULTILINE)
    traits = backend_spec("vllm").traits_at(tiers=Tiers(8, chunk=2))
    for subject, fails in ((BlocksForChunks, True), (HostIndex, False)):
        found = {"BlocksForChunks": contract_of(subject)}
        exec(text, found)
        with pytest.raises(EventRulesBroken) if fails else nullcontext():
            found["test_reproduction"]("vllm", traits)
