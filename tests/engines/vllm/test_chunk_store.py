"""The chunks of vLLM's host tier: their order of eviction."""

import pytest

from pytest_kvmock.engines.vllm.host.chunk_eviction import EVICTION_ORDERS, ChunkUser
from pytest_kvmock.engines.vllm.host.chunk_store import ChunkStore

OF_TWO_GROUPS = {(1, 0): 16, (2, 0): 32, (1, 1): 16, (2, 1): 32}
"""Two chunks in each of two groups, with their ends."""


def evicted_for_others(store):
    """Return the evicted chunks, in order, when another request fills the whole tier."""
    return store.offer(ChunkUser(), [((100 + number, 0), 16) for number in range(store.capacity)]).evicted


@pytest.mark.parametrize("policy", EVICTION_ORDERS)
def test_of_chunks_with_the_same_end_that_of_the_later_group_is_evicted_first(policy):
    store, user = ChunkStore(4, policy), ChunkUser()
    assert store.offer(user, list(OF_TWO_GROUPS.items())).new == list(OF_TWO_GROUPS)
    store.written(OF_TWO_GROUPS)
    store.end(user)
    # vLLM: order_request_keys sorts by the end, then by group, and the policies walk the order backwards
    assert evicted_for_others(store) == [(2, 1), (2, 0), (1, 1), (1, 0)]


@pytest.mark.parametrize("policy", EVICTION_ORDERS)
def test_chunks_that_were_read_are_evicted_in_the_same_order_whatever_the_order_of_reads(policy):
    store, writer, reader = ChunkStore(4, policy), ChunkUser(), ChunkUser()
    store.offer(writer, list(OF_TWO_GROUPS.items()))
    store.written(OF_TWO_GROUPS)
    store.end(writer)
    store.read(reader, [(key, OF_TWO_GROUPS[key]) for key in [(2, 1), (1, 1), (1, 0), (2, 0)]], waits=True)
    store.was_read(OF_TWO_GROUPS, waited=True)
    store.end(reader)
    assert evicted_for_others(store) == [(2, 1), (2, 0), (1, 1), (1, 0)]
