"""Two workers that exchange prefixes: transferred blocks are not computed, and blocks that cannot be transferred are.

The mock moves the payloads, so a test can check that the right ones arrived. `kv_fabric` cuts links and records
transfers. As the tests use `kv_events`, the managers publish, and their events are checked as a router would see them.
"""

import pytest
from prefix_exchange import Served, Worker, compute

from pytest_kvmock import RadixIndex, block_hashes

PAGE = 4
SYSTEM_PROMPT = list(range(3 * PAGE))
FIRST = [*SYSTEM_PROMPT, *range(100, 100 + PAGE)]
SECOND = [*SYSTEM_PROMPT, *range(200, 200 + 2 * PAGE)]

pytestmark = pytest.mark.kvmock(block_size=PAGE, num_blocks=8)


@pytest.fixture
def kv_index():
    return RadixIndex()


@pytest.fixture
def workers(make_kv_block_manager, kv_fabric, kv_events):
    one, other = Worker(make_kv_block_manager()), Worker(make_kv_block_manager())
    kv_fabric.exchange_blocksets()
    one.peer, other.peer = other, one
    return one, other


def payloads(worker, tokens):
    with worker.pool.match_sequence_hashes_blocking([each.sequence_hash for each in worker.chain(tokens)]) as blocks:
        return [block.payload for block in blocks]


def test_a_prefix_that_the_peer_has_is_not_computed_again(workers, kv_fabric):
    one, other = workers
    assert Served(cached=0, received=0, computed=4) == one.serve(FIRST)
    assert Served(cached=0, received=3, computed=2) == other.serve(SECOND)
    assert Served(cached=5, received=0, computed=0) == other.serve(SECOND)
    assert [compute(content) for content in other.chain(SECOND)] == payloads(other, SECOND)
    (transfer,) = kv_fabric.transfers
    assert ("get", other.manager.worker_id(), one.manager.worker_id(), 3) == transfer[:4]


def test_prefixes_go_both_ways(workers):
    one, other = workers
    one.serve(FIRST)
    other.serve(SECOND)
    assert Served(cached=3, received=2, computed=0) == one.serve(SECOND)
    assert Served(cached=3, received=1, computed=0) == other.serve(FIRST)
    assert payloads(one, FIRST) == payloads(other, FIRST)


def test_a_router_sees_both_workers(workers, kv_index, kv_events):
    one, other = workers
    one.serve(FIRST)
    other.serve(SECOND)
    kv_events.assert_no_event_errors(at_least=2)  # each worker's events agree with its blocks
    held = {worker.manager.worker_id(): blocks for worker, blocks in ((one, 3), (other, 5))}
    assert held == {
        worker: blocks for (worker, _), blocks in kv_index.find_matches(block_hashes(SECOND, PAGE)).scores.items()
    }


def test_behind_a_cut_link_blocks_are_computed(workers, kv_fabric):
    one, other = workers
    one.serve(FIRST)
    with kv_fabric.cut_link(one.manager.worker_id(), other.manager.worker_id()):
        assert Served(cached=0, received=0, computed=5) == other.serve(SECOND)
    assert kv_fabric.transfers == []
    assert Served(cached=3, received=1, computed=0) == other.serve(FIRST)


def test_a_peer_that_was_closed_is_done_without(workers):
    one, other = workers
    one.serve(FIRST)
    one.on_lend = one.manager.close
    one.take_back = lambda: None  # a closed manager answers no messages
    assert Served(cached=0, received=0, computed=5) == other.serve(SECOND)
    assert [compute(content) for content in other.chain(SECOND)] == payloads(other, SECOND)


def test_a_peer_that_does_not_hold_what_it_lends_is_found_out(workers):
    one, other = workers
    one.serve(FIRST)

    def evict():  # the bug: blocks are released before they were fetched, and others take their place
        one.take_back()
        with one.pool.allocate_blocks_blocking(one.pool.available_blocks) as blocks:
            for block in blocks:
                block.payload = b"of another request"
        one.manager.flush()

    one.on_lend = evict
    assert Served(cached=0, received=0, computed=5) == other.serve(SECOND)
    assert [compute(content) for content in other.chain(SECOND)] == payloads(other, SECOND)


def test_a_prefill_worker_puts_blocks_into_those_of_a_worker_that_decodes(workers, kv_fabric):
    prefill, decode = workers
    prefill.push(FIRST, to=decode)
    assert [compute(content) for content in decode.chain(FIRST)] == payloads(decode, FIRST)
    decode.peer = None
    assert Served(cached=4, received=0, computed=0) == decode.serve(FIRST)
    assert [transfer.kind for transfer in kv_fabric.transfers] == ["put"]


def test_no_block_is_held_when_all_is_served(workers):
    for number in range(20):
        for worker in workers:
            worker.serve([*SYSTEM_PROMPT, *range(300 + number, 300 + number + 2 * PAGE)])
            assert (worker.pool.counts.active, worker.pool.counts.returning) == (0, 0)
