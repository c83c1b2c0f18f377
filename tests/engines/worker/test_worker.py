"""A worker turns requests into the events of a real engine."""

from random import Random

import pytest

from pytest_kvmock import (
    BACKENDS,
    Cleared,
    OutOfBlocks,
    Prompt,
    Removed,
    StorageTier,
    Stored,
    block_hashes,
    create_manager,
    sequence_hashes,
)
from pytest_kvmock.engines import KvWorker, RequestError
from pytest_kvmock.engines.vllm.block_pool_driver import BlockPoolDriver
from pytest_kvmock.engines.worker import Served


def prompt(*numbers):
    """Return a prompt of one block of four equal tokens for each number."""
    return Prompt([number for number in numbers for _ in range(4)])


def chain(tokens, block_size=4):
    """Return the sequence hashes of the whole blocks of these tokens."""
    return sequence_hashes(block_hashes(list(tokens), block_size))


# ------------------------------------------------------------------------------------------------------- prefill


def test_a_prefill_stores_the_whole_blocks_of_the_prompt_in_one_event(worker):
    asked = Prompt(range(10))
    request = worker.prefill(asked)
    first, second = chain(range(8))
    (event,) = worker.captured.events
    assert (event.event_id, event.dp_rank) == (0, 0)
    assert Stored(None, (first, second), tuple(block_hashes(range(8), 4))) == event.data
    assert request.cached_tokens == 0
    assert asked is request.prompt
    assert len(request) == 10
    assert [first, second] == request.blocks[:2]
    assert {first: 1, second: 1, request.blocks[2]: 1} == worker.manager.active_blocks


def test_token_ids_are_published_with_the_event(worker):
    worker.serve(range(10))
    (event,) = worker.captured.router_events
    assert [tuple(ids) for ids in event.token_ids] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_every_call_that_takes_a_prompt_accepts_tokens(worker):
    worker.serve([7] * 8)
    assert (
        worker.cached_tokens([7] * 8),
        worker.cached_tokens(Prompt([7] * 8)),
        worker.cached_tokens((7,) * 9),
    ) == (8, 8, 8)


def test_a_second_prefill_reuses_cached_blocks_and_stores_the_rest_after_them(worker, stored_of):
    worker.serve(prompt(1, 2))
    served = worker.serve(prompt(1, 2, 3))
    a, b, c = chain(prompt(1, 2, 3).tokens)
    assert Served(8, (c,)) == served
    assert [(None, [a, b]), (b, [c])] == stored_of(worker.captured.events)


def test_a_fully_cached_prompt_of_whole_blocks_stores_and_publishes_nothing(worker):
    worker.serve(prompt(1, 2))
    served = worker.serve(prompt(1, 2))
    assert Served(8, ()) == served
    assert len(worker.captured.events) == 1


def test_requests_that_overlap_share_blocks(worker):
    first, second = worker.prefill(prompt(1, 2)), worker.prefill(prompt(1, 3))
    shared, own = chain(prompt(1, 2).tokens)
    assert (first.cached_tokens, second.cached_tokens) == (0, 4)
    assert (worker.manager.num_active_blocks, worker.manager.num_active_block_refs) == (3, 4)
    assert [first, second] == worker.requests
    first.finish()
    assert [second] == worker.requests
    assert [own] == worker.manager.inactive_blocks()
    assert worker.manager.active_blocks[shared] == 1
    second.finish()
    assert (worker.manager.num_active_blocks, worker.manager.num_inactive_blocks) == (0, 3)


def test_a_full_worker_publishes_evictions_before_or_after_its_stores(make_worker):
    worker = make_worker(num_blocks=3)
    worker.serve(prompt(1, 2))
    served = worker.serve(prompt(3, 4))
    a, b = chain(prompt(1, 2).tokens)
    last_two = [Removed, Stored] if worker.traits.removed_first else [Stored, Removed]
    assert [Stored, *last_two] == [type(event.data) for event in worker.captured.events]
    assert [Removed((b,))] == [
        e.data for e in worker.captured.events if isinstance(e.data, Removed)
    ]  # b before its parent
    assert [event.event_id for event in worker.captured.events] == [0, 1, 2]
    assert sorted([a, *served.stored_blocks]) == sorted(worker.manager.resident())


def test_an_empty_prompt_is_refused(worker, state_of):
    before = state_of(worker)
    with pytest.raises(ValueError, match="the prompt is empty"):
        worker.prefill([])
    assert before == state_of(worker)


def test_a_prompt_of_hashes_is_served_without_token_ids(worker, stored_of):
    local = [11, 12]
    served = worker.serve(Prompt(hashes=local, num_tokens=10))
    assert Served(0, tuple(sequence_hashes(local))) == served
    (event,) = worker.captured.router_events
    assert event.event.data.tokens_hashes == (11, 12)
    assert event.token_ids is None
    assert worker.cached_tokens(Prompt(hashes=[11, 12, 13])) == 8


def test_a_prompt_of_hashes_that_does_not_match_the_block_size_is_refused(worker, state_of):
    before = state_of(worker)
    with pytest.raises(ValueError, match="does not fit block_size=4"):
        worker.prefill(Prompt(hashes=[1, 2], num_tokens=1024))
    assert before == state_of(worker)


# ------------------------------------------------------------------------------------------------------- chunks


def in_chunks(worker, *stored):
    """Return the Stored events of a chunked prefill; it is a single one if the engine takes no chunks."""
    if worker.traits.chunks:
        return list(stored)
    return [(stored[0][0], [block for _, blocks in stored for block in blocks])]


def test_a_chunked_prefill_stores_each_chunk_after_the_previous_one(make_worker, stored_of):
    worker = make_worker(num_blocks=8, block_size=64, chunk=256)
    tokens = list(range(512))
    request = worker.prefill(tokens)
    blocks = chain(tokens, 64)
    assert in_chunks(worker, (None, blocks[:4]), (blocks[3], blocks[4:])) == stored_of(worker.captured.events)
    assert blocks == request.blocks


def test_a_chunk_that_ends_inside_a_block_takes_the_whole_block(make_worker, stored_of):
    worker = make_worker(chunk=6)
    worker.serve(range(11))
    first, second = chain(range(8))
    assert [(None, [first, second])] == stored_of(worker.captured.events)


def test_chunks_smaller_than_a_block_store_each_block_once(make_worker, stored_of):
    worker = make_worker(chunk=1)
    request = worker.prefill(range(9))
    first, second = chain(range(8))
    assert in_chunks(worker, (None, [first]), (first, [second])) == stored_of(worker.captured.events)
    assert dict.fromkeys(request.blocks, 1) == worker.manager.active_blocks


# ------------------------------------------------------------------------------------------------------- decode


def test_a_block_is_stored_on_the_first_token_of_the_next_one(worker, stored_of):
    with worker.prefill(range(3)) as request:
        partial = request.blocks[0]
        request.decode([3])
        assert [partial] == request.blocks
        assert worker.captured.events == []
        request.decode([4])
        (full,) = chain(range(4))
        assert [(None, [full])] == stored_of(worker.captured.events)
        assert full == request.blocks[0]
        assert len(request.blocks) == 2
        assert [tuple(range(4))] == [tuple(ids) for ids in worker.captured.router_events[0].token_ids]


def test_a_block_that_the_last_token_fills_is_never_stored(worker):
    worker.serve(range(3), output_tokens=1)
    assert worker.captured.events == []
    assert (worker.manager.num_active_blocks, worker.manager.num_inactive_blocks) == (0, 0)


def test_a_prompt_of_whole_blocks_opens_a_block_with_its_first_token_and_stores_nothing(worker):
    with worker.prefill(prompt(1)) as request:
        request.decode()
        assert len(request.blocks) == 2
    assert len(worker.captured.events) == 1


def test_decoding_across_two_block_boundaries_stores_two_chained_blocks(worker, stored_of):
    with worker.prefill(range(3)) as request:
        request.decode(range(3, 9))
    first, second = chain(range(8))
    assert [(None, [first]), (first, [second])] == stored_of(worker.captured.events)
    assert worker.cached_tokens(range(9)) == 8


def test_decoded_tokens_are_a_prefix_for_the_next_turn(worker):
    with worker.prefill(range(6)) as request:
        request.decode(range(6, 13))
    assert worker.cached_tokens(range(20)) == 12


def test_decode_takes_a_count_of_tokens_or_the_tokens_themselves(worker):
    with worker.prefill(range(3)) as request:
        request.decode(5)
        request.decode([1, 2])
        request.decode(0)
        request.decode([])
        request.decode()
        assert len(request) == 11


def test_a_prompt_of_hashes_decodes_blocks_that_no_request_can_share(make_worker):
    one, other = make_worker(seed=1), make_worker(seed=2)
    asked = Prompt(hashes=[5], num_tokens=6)
    stored = [w.serve(asked, output_tokens=3).stored_blocks for w in (one, other)]
    assert [len(blocks) for blocks in stored] == [2, 2]
    assert stored[0][0] == stored[1][0]
    assert stored[0][1] != stored[1][1]


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (-1, ValueError, "decode: a count of tokens is an integer of at least 0, got -1"),
        (True, ValueError, "got True"),
        ([1, -1], ValueError, "token 1 is -1"),
        ([2**32], ValueError, "token 0 is 4294967296"),
        (["a"], TypeError, "token 0 is 'a'"),
        (Prompt(hashes=[1]), ValueError, "decode takes tokens"),
    ],
)
def test_invalid_tokens_are_refused_and_no_token_is_decoded(worker, state_of, tokens, error, message):
    request = worker.prefill(range(3))
    before = state_of(worker)
    with pytest.raises(error, match=message):
        request.decode(tokens)
    assert before == state_of(worker)
    assert len(request) == 3


# ---------------------------------------------------------------------------------------------------- no room


def test_a_prefill_that_does_not_fit_changes_nothing(worker, state_of):
    worker.serve(prompt(9))
    worker.prefill(prompt(1, 2, 3, 4, 5))
    before = state_of(worker)
    with pytest.raises(OutOfBlocks) as raised:
        worker.prefill(prompt(1, 2, 6, 7, 8, 10))
    assert before == state_of(worker)
    assert (raised.value.requested, raised.value.available) == (4, 3)
    assert str(raised.value) == (
        "4 blocks are needed and 3 are available "
        "(capacity: @pytest.mark.kvmock(num_blocks=...), or EngineProfile(num_blocks=...))"
    )


def test_a_prefill_that_exactly_fits_is_admitted(worker):
    worker.serve(prompt(9))
    worker.prefill(prompt(1, 2, 3, 4, 5))
    worker.prefill(prompt(1, 2, 6, 7, 8))
    assert (worker.manager.num_active_blocks, worker.manager.num_inactive_blocks) == (8, 0)


def test_a_chunked_prefill_that_does_not_fit_changes_nothing(make_worker, state_of):
    worker = make_worker(num_blocks=4, chunk=4)
    before = state_of(worker)
    with pytest.raises(OutOfBlocks) as raised:
        worker.prefill(range(17))
    assert before == state_of(worker)
    assert (raised.value.requested, raised.value.available) == (5, 4)


def test_hits_on_inactive_blocks_count_as_needed_blocks(make_worker, state_of):
    worker = make_worker(num_blocks=3)
    worker.serve(prompt(1, 2))
    worker.prefill(prompt(3))
    before = state_of(worker)
    with pytest.raises(OutOfBlocks) as raised:
        worker.prefill(prompt(1, 2, 4))
    assert (raised.value.requested, raised.value.available) == (3, 2)
    assert before == state_of(worker)


def test_a_decode_that_does_not_fit_generates_no_token(make_worker, state_of):
    worker = make_worker(num_blocks=3)
    request = worker.prefill(range(6))
    before = state_of(worker)
    with pytest.raises(OutOfBlocks) as raised:
        request.decode(11)  # its block has room for two; then three more blocks are allocated
    assert before == state_of(worker)
    assert len(request) == 6
    assert (raised.value.requested, raised.value.available) == (3, 1)
    request.decode(6)
    assert len(request) == 12
    with pytest.raises(OutOfBlocks):
        request.decode()


def test_a_failed_decode_reports_the_blocks_needed_for_all_its_tokens(make_worker):
    worker = make_worker(num_blocks=2)
    request = worker.prefill(range(4))
    with pytest.raises(OutOfBlocks) as raised:
        request.decode(40)
    assert (raised.value.requested, raised.value.available) == (10, 1)


def test_a_request_whose_resume_does_not_fit_stays_preempted(make_worker, state_of):
    worker = make_worker(num_blocks=4)
    request = worker.prefill(range(10))
    request.preempt()
    other = worker.prefill(prompt(7, 8))
    before = state_of(worker)
    with pytest.raises(OutOfBlocks) as raised:
        request.resume()
    assert before == state_of(worker)
    assert request.status == "preempted"
    assert (raised.value.requested, raised.value.available) == (3, 2)
    other.finish()
    request.resume()
    assert request.status == "running"


def test_serve_frees_the_prompt_when_its_output_does_not_fit(make_worker):
    worker = make_worker(num_blocks=2)
    with pytest.raises(OutOfBlocks):
        worker.serve(range(8), output_tokens=1)
    assert worker.requests == []
    assert (worker.manager.num_active_blocks, worker.manager.num_inactive_blocks) == (0, 2)
    assert Served(4, ()) == worker.serve(range(4))


def test_a_full_block_equal_to_one_in_use_frees_its_slot(make_worker):
    worker = make_worker(num_blocks=3)
    worker.prefill(range(4))
    second = worker.prefill(range(3))
    second.decode([3, 9, 9, 9, 9])  # its first block becomes the held one: one slot is freed, and the next takes one
    assert worker.manager.active_blocks[chain(range(4))[0]] == 2
    assert worker.manager.num_active_blocks == 2
    with pytest.raises(OutOfBlocks) as raised:
        second.decode(5)
    assert (raised.value.requested, raised.value.available) == (2, 1)


def test_a_full_worker_can_decode_into_a_block_that_another_request_holds(make_worker):
    worker = make_worker(num_blocks=2)
    worker.prefill(range(4))
    second = worker.prefill(range(3))
    second.decode([3, 9])
    assert [chain(range(4))[0]] == second.blocks[:1]
    assert worker.manager.num_active_blocks == 2
    assert len(worker.captured.events) == 1


def test_a_slot_is_not_counted_as_free_before_its_block_equals_another(make_worker, state_of):
    worker = make_worker(num_blocks=2)
    worker.prefill(range(4))
    second = worker.prefill(range(3))
    before = state_of(worker)
    with pytest.raises(OutOfBlocks) as raised:
        second.decode([4, 9])  # another block: no slot is freed
    assert (raised.value.requested, raised.value.available) == (1, 0)
    assert before == state_of(worker)


def test_a_full_block_equal_to_a_cached_one_frees_its_slot_and_activates_that_block(make_worker):
    worker = make_worker(num_blocks=2)
    worker.serve(range(4))
    request = worker.prefill(range(3))
    request.decode([3, 9])
    assert worker.manager.num_active_blocks == 2
    assert worker.manager.num_inactive_blocks == 0
    assert len(worker.captured.events) == 1  # cached already: no second Stored, nothing removed


# --------------------------------------------------------------------------------------------------- one request


def test_a_request_finishes_when_its_with_block_ends(worker):
    with worker.prefill(range(6)) as request:
        assert request.status == "running"
        assert [request] == worker.requests
    assert request.status == "finished"
    assert worker.requests == []
    assert (worker.manager.num_active_blocks, worker.manager.num_inactive_blocks) == (0, 1)


def test_a_request_finishes_when_its_with_block_raises(worker):
    with pytest.raises(KeyError), worker.prefill(range(6)):
        raise KeyError
    assert worker.requests == []
    assert worker.manager.num_active_blocks == 0


def test_a_request_can_be_finished_inside_its_with_block(worker):
    with worker.prefill(range(6)) as request:
        request.finish()
    assert request.status == "finished"


def test_a_preempted_request_finishes_when_its_with_block_ends(worker):
    with worker.prefill(range(6)) as request:
        request.preempt()
    assert request.status == "finished"
    assert worker.requests == []


def test_a_with_block_exits_without_error_after_a_restart_of_its_worker(worker):
    with worker.prefill(range(6)) as request:
        worker.restart()
    assert request.status == "lost"


@pytest.mark.parametrize(
    ("before", "call", "message"),
    [
        ("finish", "finish", "finish on a request that is finished; it must be running or preempted"),
        ("finish", "decode", "decode on a request that is finished; it must be running"),
        ("finish", "preempt", "preempt on a request that is finished; it must be running"),
        ("finish", "resume", "resume on a request that is finished; it must be preempted"),
        ("preempt", "decode", "decode on a request that is preempted; it must be running"),
        ("preempt", "preempt", "preempt on a request that is preempted; it must be running"),
        (None, "resume", "resume on a request that is running; it must be preempted"),
        ("restart", "finish", "finish on a request that is lost"),
        ("restart", "decode", "decode on a request that is lost"),
        ("restart", "resume", "resume on a request that is lost"),
    ],
)
def test_calls_that_the_state_of_a_request_does_not_allow_are_refused(worker, state_of, before, call, message):
    request = worker.prefill(range(6))
    if before == "restart":
        worker.restart()
    elif before is not None:
        getattr(request, before)()
    then = state_of(worker)
    with pytest.raises(RequestError, match=message):
        getattr(request, call)()
    assert then == state_of(worker)


def test_the_blocks_of_a_request_are_returned_as_a_copy(worker):
    request = worker.prefill(range(6))
    request.blocks.clear()
    assert len(request.blocks) == 2


# -------------------------------------------------------------------------------------------- preempt and resume


def test_a_preempted_request_frees_its_blocks_tail_first_and_publishes_nothing(worker):
    request = worker.prefill(range(9))
    first, second = chain(range(8))
    request.preempt()
    assert [second, first] == worker.manager.inactive_blocks()
    assert worker.manager.num_active_blocks == 0
    assert [request] == worker.requests
    assert len(worker.captured.events) == 1


def test_a_resumed_request_keeps_its_output_and_reuses_cached_blocks(worker, stored_of):
    request = worker.prefill(range(6))
    request.decode([6, 7, 8])
    blocks = request.blocks
    request.preempt()
    assert (9, blocks) == (len(request), request.blocks)
    request.resume()
    assert (9, blocks, "running") == (len(request), request.blocks, request.status)
    assert request.cached_tokens == 6  # all tokens of the prompt
    assert len(worker.captured.events) == 2
    request.decode([9, 10, 11, 12])
    assert chain(range(12)) == request.blocks[:3]


def test_a_resumed_request_stores_evicted_blocks_again(make_worker, stored_of):
    worker = make_worker(num_blocks=3)
    request = worker.prefill(range(6))
    request.decode([6, 7, 8])
    request.preempt()
    worker.serve(prompt(7, 8))
    request.resume()
    first, second = chain(range(8))
    assert request.cached_tokens == 4
    assert (first, [second]) == stored_of(worker.captured.events)[-1]


def test_a_resumed_prefill_is_chunked_again(make_worker, stored_of):
    worker = make_worker(chunk=4)
    request = worker.prefill(range(8))
    request.preempt()
    assert worker.manager.clear()
    request.resume()
    first, second = chain(range(8))
    assert in_chunks(worker, (None, [first]), (first, [second])) * 2 == stored_of(worker.captured.events)


def test_a_request_can_finish_while_it_is_preempted(worker):
    request = worker.prefill(range(6))
    request.preempt()
    request.finish()
    assert worker.requests == []
    assert (worker.manager.num_active_blocks, worker.manager.num_inactive_blocks) == (0, 1)


# --------------------------------------------------------------------------------------------------------- serve


def test_serve_returns_the_cached_tokens_and_the_stored_blocks(worker):
    assert Served(0, tuple(chain(range(4)))) == worker.serve(range(6), output_tokens=2)
    served = worker.serve(range(6), output_tokens=3)
    assert served.cached_tokens == 4
    assert len(served.stored_blocks) == 1
    assert worker.requests == []


def test_serve_does_not_count_blocks_stored_by_other_requests(worker):
    worker.serve(range(4))
    assert worker.serve(range(4)).stored_blocks == ()
    worker.prefill(prompt(3))
    assert len(worker.captured.events) == 2


# -------------------------------------------------------------------------------------------------- cached_tokens


def test_a_lookup_does_not_find_the_partial_block_of_a_request(make_worker):
    worker = make_worker(seed=0)
    worker.prefill(range(3))
    assert worker.cached_tokens([9] * 3) == 0


def test_cached_tokens_does_not_change_the_cache(worker, state_of):
    for number in range(6):
        worker.serve(prompt(number))
    oldest = prompt(0)
    before = state_of(worker)
    assert worker.cached_tokens(oldest) == 4
    assert worker.cached_tokens(prompt(77)) == 0
    assert before == state_of(worker)


def test_a_lookup_does_not_change_later_operations(make_worker):
    def traffic(look):
        worker = make_worker(seed=3)
        worker.serve(range(6), output_tokens=7)
        if look:
            worker.cached_tokens(range(7))
        worker.serve(range(20, 26), output_tokens=7)
        return worker.captured.events

    assert traffic(look=False) == traffic(look=True)


def test_a_lookup_finds_blocks_in_use(worker):
    with worker.prefill(range(8)):
        assert worker.cached_tokens(range(9)) == 8


# ------------------------------------------------------------------------------------------------ clear, restart


def test_clear_drops_all_blocks_and_publishes_a_cleared(worker):
    worker.serve(range(8))
    assert worker.clear()
    assert Cleared() == worker.captured.events[-1].data
    assert worker.cached_tokens(range(8)) == 0
    assert list(worker.manager.resident()) == []


def test_clear_does_nothing_while_a_request_is_open(worker, state_of):
    with worker.prefill(range(8)) as request:
        before = state_of(worker)
        assert not worker.clear()
        assert before == state_of(worker)
        request.preempt()
        assert not worker.clear()
    assert worker.clear()


def test_clear_does_nothing_while_the_manager_holds_a_block(worker):
    worker.manager.use([1])
    assert not worker.clear()
    assert len(worker.captured.events) == 1


def test_a_restarted_worker_is_empty_and_its_event_ids_start_at_0(worker):
    worker.serve(range(8))
    request, before = worker.prefill(range(4)), worker.manager
    worker.restart()
    assert worker.manager is not before
    assert (worker.requests, request.status) == ([], "lost")
    assert worker.cached_tokens(range(8)) == 0
    assert len(worker.captured.events) == 1  # a crash publishes no event
    worker.serve(range(4))
    assert worker.captured.events[-1].event_id == 0


# --------------------------------------------------------------------------------------------- no prefix caching


def test_without_prefix_caching_no_block_is_published_or_hit(make_worker):
    worker = make_worker(prefix_caching=False)
    for _ in range(3):
        assert Served(0, ()) == worker.serve(range(10), output_tokens=9)
    assert worker.clear()
    assert worker.captured.events == []
    assert not worker.has_published


def test_without_prefix_caching_two_requests_share_no_block(make_worker):
    worker = make_worker(num_blocks=3, prefix_caching=False)
    one = worker.prefill(range(4))
    two = worker.prefill(range(4))
    assert worker.manager.num_active_blocks == 2
    assert set(one.blocks).isdisjoint(two.blocks)
    with pytest.raises(OutOfBlocks) as raised:
        worker.prefill(range(8))
    assert (raised.value.requested, raised.value.available) == (2, 1)


def test_without_prefix_caching_a_resumed_request_finds_its_own_blocks(make_worker, backend):
    worker = make_worker(prefix_caching=False)
    request = worker.prefill(range(8))
    blocks = request.blocks
    request.preempt()
    request.resume()
    assert blocks == request.blocks
    assert (worker.manager.num_active_blocks, worker.manager.num_inactive_blocks) == (2, 0)
    assert (8 if backend == "hash_cache" else 0) == request.cached_tokens  # 1.0.2 counts them, 1.2.1 does not


# ------------------------------------------------------------------------------------------------------- the rest


def test_the_repr_of_a_worker_shows_its_id_and_backend(make_worker, backend):
    worker = make_worker(worker_id=3, dp_rank=1)
    assert repr(worker) == f"<KvWorker 3 rank 1 {backend}>"
    assert backend == worker.backend
    assert repr(worker.prefill(range(6))) == "<Request of 6 tokens, running>"


def test_the_same_seed_gives_the_same_events_and_blocks(make_worker):
    def traffic(seed):
        worker = make_worker(seed=seed)
        with worker.prefill(range(6)) as request:
            request.decode(12)
            return request.blocks, list(worker.captured.events)

    assert traffic(1) == traffic(1)
    assert traffic(1) != traffic(2)


def test_a_worker_without_a_listener_publishes_no_event(backend):
    made = []

    def make_manager(sink):
        from pytest_kvmock import create_manager

        made.append(create_manager(backend, num_blocks=4, block_size=4, sink=sink))
        return made[-1]

    worker = KvWorker(make_manager, rng=Random(0))
    assert Served(0, tuple(chain(range(4)))) == worker.serve(range(4))


def test_worker_events_have_the_device_tier(worker):
    worker.serve(range(4))
    assert [event.storage_tier for event in worker.captured.router_events] == [StorageTier.DEVICE]


def test_only_events_published_for_a_request_are_marked_as_chained(backend):
    from pytest_kvmock import create_manager

    marks = []

    class Listener:
        def publish(self, event):
            marks.append(event.chained)

    worker = KvWorker(
        lambda sink: create_manager(backend, num_blocks=4, block_size=4, sink=sink), sink=Listener(), rng=Random(0)
    )
    worker.serve(range(4))
    worker.manager.use([1])
    worker.manager.deref(1)
    worker.clear()
    assert marks == [True, False, False]


@pytest.mark.parametrize("name", ["vllm", "vllm_0_19", "sglang", "mocker_sglang_1_6"])
def test_a_manager_that_takes_requests_marks_every_stored_as_chained(name):
    spec, taken = BACKENDS[name], []
    worker = KvWorker(
        lambda sink: spec.make(num_blocks=4, block_size=4, dp_rank=0, sink=sink),
        sink=taken.append,
        rng=Random(0),
        driver=spec.driver,
    )
    driver = spec.driver(worker.manager, True, Random(0))
    request = driver.open(Prompt(range(8)))
    driver.admit(request, 8)
    driver.free(request, done=True)
    worker.clear()
    assert {(Stored, True), (Cleared, False)} == {(type(event.data), event.chained) for event in taken}


def test_a_listener_that_raises_does_not_stop_the_worker(backend, caplog):
    from pytest_kvmock import create_manager

    class Broken:
        def publish(self, event, storage_tier=None, token_ids=None):
            raise OSError("gone")

    worker = KvWorker(
        lambda sink: create_manager(backend, num_blocks=4, block_size=4, sink=sink), sink=Broken(), rng=Random(0)
    )
    served = worker.serve(range(4))
    assert tuple(chain(range(4))) == served.stored_blocks
    assert "KV event 0 was not taken by its sink" in caplog.text


@pytest.mark.parametrize(
    ("backend", "driver", "message"),
    [
        ("vllm", None, r"^a 'vllm' manager takes no moves; a worker of it needs the driver of its backend: KvWorker"),
        (
            "sglang",
            None,
            r"^a 'sglang' manager takes no moves; a worker of it needs the driver of its backend: KvWorker",
        ),
        ("lineage", "vllm", r"^a BlockPoolDriver drives a BlockPoolManager, got <LogicalManager lineage: "),
        ("vllm", "sglang", r"^a RadixDriver drives a RadixCacheManager, got <BlockPoolManager vllm: "),
    ],
)
def test_a_worker_with_the_driver_of_another_engine_is_refused_at_creation(backend, driver, message):
    with pytest.raises(ValueError, match=message):
        KvWorker(
            lambda sink: create_manager(backend, num_blocks=4, sink=sink),
            driver=None if driver is None else BACKENDS[driver].driver,
        )


def test_a_driver_without_steps_is_refused_over_a_manager_with_tiers():
    def make(sink):
        return create_manager("vllm", num_blocks=4, sink=sink, tiers={"host": 8})

    with pytest.raises(ValueError, match=r"^a TierHostTime drives a LogicalManager, got <BlockPoolManager vllm: "):
        KvWorker(make, driver=BlockPoolDriver)
