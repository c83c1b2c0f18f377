"""Workers of SGLang: when they match, make room, publish and free."""

from dataclasses import replace
from random import Random

import pytest

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    Cleared,
    EngineProfile,
    OutOfBlocks,
    Prompt,
    Removed,
    RouterHarness,
    Stored,
    create_manager,
)
from pytest_kvmock.engines import KvWorker, SglangSpeculative
from pytest_kvmock.engines.base.hashed import HashChain
from pytest_kvmock.engines.sglang.hashes import SglangHasher
from pytest_kvmock.engines.sglang.radix_cache import RadixCacheManager
from pytest_kvmock.engines.sglang.radix_driver import RadixDriver

SIZE = 4


def new_worker(num_blocks=8, *, block_size=SIZE, policy="lru", **options):
    captured = CapturingSink()
    spec = BACKENDS["sglang"]

    def make(sink):
        return create_manager(spec, num_blocks=num_blocks, block_size=block_size, sink=sink, policy=policy)

    worker = KvWorker(make, sink=captured, rng=Random(0), driver=spec.driver, **options)
    worker.captured = captured
    return worker


def prompt(*numbers, tail=0):
    return [*(number for number in numbers for _ in range(SIZE)), *[0] * tail]


def message(worker):
    """Return the kind and the number of blocks of each event since the last call."""
    return [(type(e.data), len(getattr(e.data, "block_hashes", ()))) for e in worker.captured.take()]


def test_a_prompt_is_published_when_it_is_prefilled_and_output_when_the_request_finishes():
    worker = new_worker()
    request = worker.prefill(prompt(1, 2, tail=1))
    assert [(Cleared, 0), (Stored, 2)] == message(worker)
    request.decode(SIZE)
    assert message(worker) == []
    request.finish()
    assert [(Stored, 1)] == message(worker)


def test_a_prefill_publishes_its_evictions_before_its_stored():
    worker = new_worker(num_blocks=3)
    worker.serve(prompt(1, 2))
    message(worker)
    worker.serve(prompt(3, 4))
    assert [(Removed, 2), (Stored, 2)] == message(worker)


def test_a_prefill_evicts_for_one_page_more_than_it_allocates():
    worker = new_worker(num_blocks=4)
    worker.serve(prompt(1))
    worker.serve(prompt(2))
    worker.serve(prompt(3, 4))  # the last two pages would be free: it asks for three
    assert len(worker.manager.resident()) == 3
    assert worker.cached_tokens(prompt(1, tail=1)) == 0


def test_with_one_token_pages_a_prefill_evicts_only_for_the_pages_that_it_allocates():
    worker = new_worker(num_blocks=4, block_size=1)
    for tokens in ([1], [2], [3, 4]):
        worker.serve(tokens)
    assert len(worker.manager.resident()) == 4


def test_a_decode_step_evicts_a_page_even_if_it_needs_none():
    worker = new_worker(num_blocks=3)
    worker.serve(prompt(1))
    request = worker.prefill(prompt(2))
    message(worker)
    request.decode(1)  # it allocates the last free page
    assert message(worker) == []
    request.decode(1)
    assert [(Removed, 1)] == message(worker)
    request.decode(1)  # a page is free now
    assert message(worker) == []


def test_a_decode_step_succeeds_if_it_needs_no_page_and_none_is_evictable():
    worker = new_worker(num_blocks=2)
    requests = [worker.prefill([number]) for number in (1, 2)]
    message(worker)
    for request in requests:
        request.decode(SIZE - 1)
    assert message(worker) == []


def test_a_request_adds_one_hit_to_the_pages_that_it_inserts():
    worker = new_worker(policy="slru")
    for times in (1, 2):
        with worker.prefill(prompt(1, tail=1)) as request:
            request.decode(2 * SIZE)
        assert times == next(worker.manager._tree.nodes()).hit_count


def test_the_last_token_of_a_cached_prompt_is_recomputed_without_a_second_copy():
    worker = new_worker()
    worker.serve(prompt(1, 2))
    message(worker)
    request = worker.prefill(prompt(1, 2))
    assert (request.cached_tokens, message(worker)) == (SIZE, [])
    assert worker.manager.num_active_blocks == 2
    request.finish()
    assert (worker.manager.num_active_blocks, worker.manager.num_inactive_blocks) == (0, 2)


def test_equal_output_of_two_requests_is_cached_once():
    worker = new_worker()
    first, second = (worker.prefill(prompt(1, tail=1)) for _ in range(2))
    for request in (first, second):
        request.decode(prompt(0)[1:])
    message(worker)
    first.finish()
    second.finish()
    assert [(Stored, 1)] == message(worker)
    assert worker.manager.num_inactive_blocks == 2


def test_a_preempted_request_leaves_checkpointed_pages_cached_and_frees_the_rest_without_events():
    worker = new_worker()
    request = worker.prefill(prompt(1, 2, tail=1))
    request.decode(SIZE)
    message(worker)
    request.preempt()
    assert (message(worker), worker.manager.num_active_blocks, worker.manager.num_inactive_blocks) == ([], 0, 2)
    request.resume()
    assert ([(Stored, 1)], 2 * SIZE) == (message(worker), request.cached_tokens)  # now its output is prefilled
    assert dict.fromkeys(request.blocks, 1) == worker.manager.active_blocks


def test_a_request_can_finish_while_it_is_preempted():
    worker = new_worker()
    request = worker.prefill(prompt(1))
    request.preempt()
    message(worker)
    request.finish()
    assert (message(worker), worker.manager.num_inactive_blocks) == ([], 1)


def test_the_lookup_of_a_refused_request_still_splits_and_touches_nodes():
    worker = new_worker(num_blocks=4)
    worker.serve(prompt(1, 2))
    worker.serve(prompt(3))
    one, two, three = worker.manager.inactive_blocks()
    before = worker.captured.take()
    with pytest.raises(OutOfBlocks) as raised:
        worker.prefill(prompt(1, 5, 6, 7, 8))
    assert (raised.value.requested, raised.value.available) == (5, 4)
    assert before
    assert message(worker) == []
    assert [three, two, one] == worker.manager.inactive_blocks()  # the node of two pages was split, and is newer
    assert worker.manager.num_active_blocks == 0


def test_cached_tokens_does_not_touch_or_split_nodes():
    worker = new_worker(num_blocks=4)
    worker.serve(prompt(1, 2))
    worker.serve(prompt(3))
    before = worker.manager.inactive_blocks()
    assert worker.cached_tokens(prompt(1, 9)) == SIZE
    assert before == worker.manager.inactive_blocks()


def test_each_chunk_is_checkpointed_and_has_its_own_node():
    worker = new_worker(chunk=2 * SIZE)
    worker.serve(prompt(1, 2, 3, tail=1))
    assert [(Cleared, 0), (Stored, 2), (Stored, 1)] == message(worker)
    assert worker.manager.evict(1) == [SIZE]
    assert worker.manager.evict(1) == [2 * SIZE]


def test_a_chunk_that_ends_within_a_page_publishes_its_whole_pages():
    worker = new_worker(chunk=SIZE + 1)
    worker.prefill(prompt(1, 2))
    assert [(Cleared, 0), (Stored, 1), (Stored, 1)] == message(worker)


def test_the_priority_policy_evicts_output_before_the_prompt():
    worker = new_worker(policy="priority")
    with worker.prefill(prompt(1)) as request:
        request.decode(prompt(2))
    assert worker.manager.evict(2 * SIZE) == [SIZE, SIZE]  # split where the prompt ends


def test_the_first_event_of_a_restarted_worker_is_a_cleared():
    worker = new_worker()
    worker.serve(prompt(1))
    worker.captured.take()
    worker.restart()
    assert [(0, Cleared())] == [(event.event_id, event.data) for event in worker.captured.events]


def test_without_prefix_caching_requests_share_no_pages_and_publish_no_event():
    worker = new_worker(prefix_caching=False)
    first, second = (worker.prefill(prompt(1, 2, tail=1)) for _ in range(2))
    first.decode(SIZE)
    assert (worker.manager.num_active_blocks, first.cached_tokens, second.cached_tokens) == (7, 0, 0)
    with pytest.raises(OutOfBlocks, match="2 blocks are needed and 1 are available"):
        worker.prefill(prompt(1, 2))
    for request in (first, second):
        request.finish()
    assert (message(worker), worker.manager.num_active_blocks, worker.manager.resident()) == ([], 0, [])


def test_output_hashes_after_a_prompt_of_hashes_are_drawn_from_the_seed():
    streams = []
    for _ in range(2):
        worker = new_worker()
        worker.serve(Prompt(hashes=[5], num_tokens=SIZE + 1), SIZE)
        streams.append(worker.captured.router_events)
    assert [Cleared, Stored, Stored] == [type(event.event.data) for event in streams[0]]
    assert streams[0] == streams[1]


def test_a_radix_driver_refuses_other_managers_and_speculative_caches():
    with pytest.raises(ValueError, match=r"^a RadixDriver drives a RadixCacheManager, got <LogicalManager lru: "):
        RadixDriver(create_manager("lru", num_blocks=1), True, Random(0))
    with pytest.raises(
        ValueError,
        match=r"^a RadixDriver does not drive a RadixCacheManager with speculative, which is for calls by hand$",
    ):
        RadixDriver(RadixCacheManager(num_blocks=1, speculative=SglangSpeculative()), True, Random(0))


def test_a_variant_with_another_policy_evicts_by_that_policy():
    lfu = BACKENDS["sglang"].variant("sglang_lfu", policy="lfu")
    with RouterHarness(EngineProfile(block_size=SIZE, num_blocks=4), lfu) as kv:
        worker = kv.worker(0)
        for tokens in (prompt(1), prompt(1), prompt(2), prompt(3, 4)):
            worker.serve(tokens)
        assert (
            worker.backend,
            worker.cached_tokens(prompt(2, tail=1)),
            worker.cached_tokens(prompt(1, tail=1)),
        ) == ("sglang_lfu", 0, SIZE)


@pytest.mark.parametrize("hasher", [SglangHasher(cache_salt="x"), SglangHasher()])
def test_a_block_name_that_sglang_would_not_give_is_a_wrong_hash(hasher):
    def make(**sizes):
        manager = BACKENDS["sglang"].make(**sizes)
        manager.hasher = hasher
        return manager

    spec = replace(BACKENDS["sglang"], make=make, chain=lambda manager: HashChain(SglangHasher()))
    kv = RouterHarness(EngineProfile(block_size=SIZE, num_blocks=8), spec)
    kv.worker(0).serve(prompt(1, 2, tail=1), SIZE)
    assert ["wrong_hash"] * bool(hasher.cache_salt) == [problem.rule for problem in kv.judge().errors]
