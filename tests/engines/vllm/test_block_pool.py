"""vLLM's block pool: behaviour that its recordings do not show, and refused inputs."""

from collections import Counter
from itertools import pairwise
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    Cleared,
    Prompt,
    Removed,
    StorageTier,
    Stored,
    block_hashes,
    create_manager,
    sequence_hashes,
)
from pytest_kvmock.engines.vllm.hashes import VERSIONS, ExtraKeys
from pytest_kvmock.values import Deref, MoveError, Promote, Use

OURS = ("vllm", "vllm_0_19")


@pytest.fixture(params=OURS)
def backend(request):
    return request.param


@pytest.fixture
def make_pool(backend):
    """Return a pool, by default of 8 blocks of 4 tokens; its events are in `manager.sink.events`."""

    def make(num_blocks=8, block_size=4, **options):
        return create_manager(backend, num_blocks=num_blocks, block_size=block_size, sink=CapturingSink(), **options)

    return make


@pytest.fixture
def pool(make_pool):
    return make_pool()


def admit(pool, prompt, **options):
    """Look up and allocate; returns the request, its hits and its new blocks."""
    request = pool.new_request(prompt if isinstance(prompt, Prompt) else Prompt(prompt), **options)
    hits = pool.get_computed_blocks(request)
    return request, hits, pool.allocate_slots(request, len(request) - len(hits) * pool.block_size, hits)


def expected_message(pool):
    """Return ("S", parent, blocks), ("R", block) or "C" for each event since the last call."""
    out = []
    for event in pool.sink.take():
        data = event.data
        if isinstance(data, Stored):
            out.append(("S", data.parent_hash, *data.block_hashes))
        else:
            out.append(("R", *data.block_hashes) if isinstance(data, Removed) else "C")
    return out


def shown(pool):
    return (
        pool.free_queue,
        pool.resident(),
        pool.inactive_blocks(),
        pool.active_blocks,
        pool.num_active_block_refs,
        len(pool.sink.events),
    )


# ------------------------------------------------------------------------------------------ rows without recording


def test_blocks_that_two_requests_compute_at_once_are_stored_and_removed_twice(pool):
    first, second = pool.new_request(Prompt(range(4))), pool.new_request(Prompt(range(4)))
    for request in (first, second):
        assert pool.get_computed_blocks(request) == []
        pool.allocate_slots(request, 4)
    (name,) = first.tokens.names
    assert [("S", None, name)] * 2 == expected_message(pool)
    assert [name, name] == pool.resident()
    assert {name: 2} == pool.active_blocks
    assert (pool.num_active_blocks, pool.num_active_block_refs, pool.references(name)) == (2, 2, 2)
    pool.free(first)
    pool.free(second)
    assert [name, name] == pool.inactive_blocks()
    admit(pool, range(100, 132))
    assert [("R", name)] * 2 == expected_message(pool)[:2]
    assert [n for n in pool.resident() if n == name] == []


def test_a_lookup_hits_the_remaining_copy_that_was_cached_first(pool):
    requests = [pool.new_request(Prompt(range(4))) for _ in range(3)]
    for request in requests:
        pool.allocate_slots(request, 4)
    for request in requests[::-1]:  # freed in reverse order, so that the first is evicted last
        pool.free(request)
    look = pool.new_request(Prompt(range(5)))
    assert pool.get_computed_blocks(look) == [1]
    taken, *_ = admit(pool, range(100, 124))  # 5 blocks were never used; copy 3 is next
    assert 3 in taken.block_ids
    assert pool.get_computed_blocks(look) == [1]
    other, *_ = admit(pool, range(200, 204))
    assert other.block_ids == [2]
    assert pool.get_computed_blocks(look) == [1]
    admit(pool, range(300, 304))
    assert pool.get_computed_blocks(look) == []


def test_after_the_first_copy_is_evicted_the_next_one_is_hit(pool):
    requests = [pool.new_request(Prompt(range(4))) for _ in range(3)]
    for request in requests:
        pool.allocate_slots(request, 4)
    pool.free(requests[0])
    taken, *_ = admit(pool, range(100, 124))
    assert 1 in taken.block_ids
    assert pool.get_computed_blocks(pool.new_request(Prompt(range(5)))) == [2]
    assert pool.references(requests[1].tokens.names[0]) == 2


def test_a_lookup_of_a_grown_request_includes_its_new_tokens(pool):
    pool.free(admit(pool, range(8))[0])
    request = pool.new_request(Prompt(range(8)))
    assert pool.get_computed_blocks(request) == [1]
    request.tokens.append(8)
    assert pool.get_computed_blocks(request) == [1, 2]
    pool.get_computed_blocks(request).clear()
    assert pool.get_computed_blocks(request) == [1, 2]


def test_a_waiting_request_does_not_hit_blocks_that_were_evicted_meanwhile(make_pool):
    pool = make_pool(num_blocks=2)
    pool.free(admit(pool, range(4))[0])
    waiting = pool.new_request(Prompt(range(6)))
    assert pool.get_computed_blocks(waiting) == [1]
    admit(pool, range(100, 102))
    admit(pool, range(200, 202))  # takes the cached one, and caches none
    assert pool.get_computed_blocks(waiting) == []


def test_a_reset_drops_all_copies(make_pool):
    pool = make_pool(num_blocks=2)
    for request in [admit(pool, range(4))[0] for _ in range(2)]:
        pool.free(request)
    assert pool.reset_prefix_cache()
    pool.free(admit(pool, range(4))[0])
    admit(pool, range(100, 108))
    assert pool.get_computed_blocks(pool.new_request(Prompt(range(5)))) == []


def test_a_repeated_prompt_of_whole_blocks_stores_a_second_copy_of_its_last_block(pool):
    first, *_ = admit(pool, range(8))
    pool.free(first)
    expected_message(pool)
    second, hits, new = admit(pool, range(8))
    h0, h1 = second.tokens.names
    assert (len(hits), len(new)) == (1, 1)
    assert [("S", h0, h1)] == expected_message(pool)
    assert Counter({h0: 1, h1: 2}) == Counter(pool.resident())


@pytest.mark.parametrize("usable", [2, 3, 10])
def test_a_repeated_prompt_that_fills_the_pool_removes_and_restores_its_last_block(make_pool, usable):
    pool = make_pool(usable)
    first, *_ = admit(pool, range(usable * 4))
    pool.free(first)
    expected_message(pool)
    admit(pool, range(usable * 4))
    names = first.tokens.names
    assert [("R", names[-1]), ("S", names[-2], names[-1])] == expected_message(pool)


def test_without_a_lookup_all_blocks_are_removed_one_by_one_and_stored_in_one_event(make_pool):
    pool = make_pool(3)
    first, *_ = admit(pool, range(12))
    pool.free(first)
    expected_message(pool)
    pool.allocate_slots(pool.new_request(Prompt(range(12))), 12)
    names = first.tokens.names
    assert [*(("R", name) for name in reversed(names)), ("S", None, *names)] == expected_message(pool)


def test_a_request_that_skips_the_prefix_cache_computes_all_blocks_as_copies(pool):
    first, *_ = admit(pool, range(9))
    second, hits, _ = admit(pool, range(9), skip_reading_prefix_cache=True)
    assert hits == []
    assert [("S", None, *first.tokens.names)] * 2 == expected_message(pool)
    assert first.tokens.names * 2 == pool.resident()
    assert second.blocks[:2] == first.tokens.names


def test_the_parent_of_a_stored_is_a_name_whichever_copy_the_request_holds(pool):
    copies = [pool.new_request(Prompt(range(4))) for _ in range(2)]
    for request in copies:
        pool.allocate_slots(request, 4)
    expected_message(pool)
    copies[1].tokens.extend(range(4, 8))
    pool.allocate_slots(copies[1], 4)
    h0, h1 = copies[1].tokens.names
    assert [("S", h0, h1)] == expected_message(pool)
    assert pool.get_computed_blocks(pool.new_request(Prompt(range(9)))) == [1, 3]


@pytest.mark.parametrize(
    "keys",
    [ExtraKeys(cache_salt="a"), ExtraKeys("adapter", "/a"), ExtraKeys(multimodal=(("image", 0, 1),))],
    ids=["salt", "lora", "multimodal"],
)
@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash"])
def test_requests_with_different_extra_keys_share_no_blocks(make_pool, keys, algorithm):
    pool = make_pool(hash_algorithm=algorithm)
    plain, *_ = admit(pool, range(8))
    other, hits, _ = admit(pool, range(8), keys=keys)
    assert hits == []
    assert set(plain.tokens.names).isdisjoint(other.tokens.names)
    assert plain.tokens.local_hashes[0] != other.tokens.local_hashes[0]
    assert [other.block_ids[0]] == admit(pool, range(8), keys=keys)[1]
    assert pool.get_computed_blocks(pool.new_request(Prompt(range(8)), keys=ExtraKeys(cache_salt="b"))) == []


def test_a_freed_block_without_a_hash_is_reused_first_since_0_24():
    queues = {}
    for version in VERSIONS:
        pool = create_manager("vllm", num_blocks=6, block_size=4, version=version)
        other, *_ = admit(pool, range(50, 54))
        request, *_ = admit(pool, range(9))
        pool.free(other)
        pool.free(request)
        queues[version] = pool.free_queue
    newer, older = [4, 5, 6, 1, 3, 2], [5, 6, 1, 4, 3, 2]
    since = {"0.33.0": newer, "0.28.0": newer, "0.24.0": newer, "0.23.0": older, "0.19.1": older}
    assert {**since, "0.14.1": older, "0.10.2": older, "0.9.2": older} == queues


def test_without_prefix_caching_no_block_is_hashed_hit_or_published(make_pool):
    pool = make_pool(enable_caching=False)
    first, *_ = admit(pool, range(9))
    second, hits, _ = admit(pool, range(9))
    assert [] == hits == pool.resident() == pool.inactive_blocks() == expected_message(pool)
    assert (pool.num_active_blocks, pool.num_inactive_blocks) == (6, 0)
    assert [UUID(int=i) for i in (4, 5, 6)] == second.blocks
    pool.free(first)
    pool.free(second)
    assert sorted(pool.free_queue) == list(range(1, 9))


def test_a_prompt_of_hashes_is_stored_under_dynamo_hashes(pool):
    request, *_ = admit(pool, Prompt(hashes=[11, 12], num_tokens=9))
    (event,) = pool.sink.router_events
    assert Stored(None, tuple(sequence_hashes([11, 12])), (11, 12)) == event.event.data
    assert event.token_ids is None
    request.tokens.extend([0, 0, 0])
    pool.allocate_slots(request, 3)
    assert 3 == len(request.tokens.names) == len(pool.resident())


def test_a_stored_has_router_hashes_and_carries_token_ids(pool):
    admit(pool, range(9))
    (event,) = pool.sink.router_events
    assert tuple(block_hashes(range(8), 4)) == event.event.data.tokens_hashes
    assert event.token_ids == [(0, 1, 2, 3), (4, 5, 6, 7)]


# --------------------------------------------------------------------------------------------------- what it shows


def test_a_block_without_a_name_is_shown_by_its_number(pool):
    request, *_ = admit(pool, range(6))
    (name,) = request.tokens.names
    assert [name, UUID(int=2)] == request.blocks
    assert {name: 1, UUID(int=2): 1} == pool.active_blocks
    assert [pool.references(b) for b in (name, UUID(int=2), UUID(int=1), UUID(int=3), 77)] == [1, 1, 0, 0, 0]
    pool.free(request)
    assert [name, UUID(int=0)] == request.blocks  # vLLM's null block is not in use
    assert pool.active_blocks == {}
    assert 0 == pool.references(UUID(int=2)) == pool.references(UUID(int=9))
    assert [name] == pool.resident() == pool.resident(StorageTier.DEVICE)
    assert pool.resident(StorageTier.HOST_PINNED) == []
    assert pool.active_perc == 0.0


def test_a_request_can_be_freed_twice_and_started_again(pool):
    request, *_ = admit(pool, range(9))
    for _ in range(2):
        pool.free(request)
    assert sorted(pool.free_queue) == list(range(1, 9))
    assert (request.num_computed_tokens, request.num_cached_blocks) == (0, 0)
    assert pool.get_computed_blocks(request) == [1, 2]


def test_a_block_pool_logs_its_actions(pool, caplog):
    caplog.set_level("DEBUG", "pytest_kvmock.engines")
    for prompt in (range(32), range(50, 58)):
        pool.free(admit(pool, prompt)[0])
    assert [record.event for record in caplog.records] == ["allocation", "eviction", "allocation"]  # as its events
    assert [len(record.block_ids) for record in caplog.records[1:]] == [2, 2]


def test_each_vllm_backend_models_its_own_release():
    assert [BACKENDS[name].models for name in OURS] == ["vLLM 0.33.0", "vLLM 0.19.1"]
    variant = BACKENDS["vllm"].variant("mine", hash_algorithm="xxhash", hash_seed="42")
    manager = create_manager(variant, num_blocks=1)
    assert (variant.name, manager.backend) == ("mine", "mine")
    assert create_manager("vllm", num_blocks=1, hash_algorithm="xxhash", hash_seed="42").hasher == manager.hasher


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": "0.12.0"}, "unknown vLLM version '0.12.0'; known: 0.33.0, 0.28.0, 0.24.0, 0.23.0, 0.19.1"),
        (
            {"hash_algorithm": "md5"},
            "hash_algorithm must be one of sha256, sha256_cbor, xxhash, xxhash_cbor, got 'md5'",
        ),
        (
            {"hash_algorithm": "xxhash", "hash_seed": None},
            "hash_seed is missing: .* vLLM 0.33.0 .* each process; give a",
        ),
        ({"hash_seed": 42}, "hash_seed must be a string, as PYTHONHASHSEED is, or None; got 42"),
        ({"enable_caching": 1}, "enable_caching must be True or False, got 1"),
        ({"num_blocks": 0}, "num_blocks must be an integer of at least 1, got 0"),
        ({"block_size": 0}, "block_size must be an integer of at least 1 .*, got 0"),
        (
            {"policy": "lru"},
            "backend 'vllm' has no option 'policy'; it has version, hash_algorithm, hash_seed, enable_",
        ),
    ],
)
def test_an_invalid_manager_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        create_manager("vllm", **{"num_blocks": 4, **options})


def test_a_missing_hash_seed_is_refused_by_releases_without_a_default():
    assert create_manager("vllm", num_blocks=1, hash_seed=None)
    with pytest.raises(ValueError, match=r"^hash_seed is missing: without one, vLLM 0\.19\.1 has other sha256_cbor"):
        create_manager("vllm_0_19", num_blocks=1, hash_seed=None)
    with pytest.raises(ValueError, match=r"^backend 'vllm_0_19' has no option 'version'"):
        create_manager("vllm_0_19", num_blocks=1, version="0.33.0")


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.process(Use([1], [1], [1])),
        lambda pool: pool.process(Deref([1])),
        lambda pool: pool.process(Promote(UUID(int=1), 1)),
        lambda pool: pool.use([1, 2], parent=3),
        lambda pool: pool.deref(1),
        lambda pool: pool.promote(UUID(int=1), 1),
    ],
    ids=["Use", "Deref", "Promote", "use", "deref", "promote"],
)
def test_a_move_is_refused(pool, call):
    with pytest.raises(MoveError, match=r"takes requests, not moves \(new_request, get_computed_blocks, allocate"):
        call(pool)
    assert pool.sink.events == []


def test_an_invalid_allocation_is_refused_and_changes_nothing(pool):
    request, *_ = admit(pool, range(6))
    pool.free(request)
    request, hits, _ = admit(pool, range(6))
    before = shown(pool)
    for tokens in (0, -1, 1):
        with pytest.raises(
            ValueError, match=rf"^num_new_tokens must be at least 1, and at most the 0 .*; got {tokens}"
        ):
            pool.allocate_slots(request, tokens)
    with pytest.raises(ValueError, match=r"^new_computed_blocks are for a request without blocks; this one has 2"):
        pool.allocate_slots(request, 1, hits)
    with pytest.raises(ValueError, match=r"^the prompt is empty"):
        pool.new_request(Prompt([]))
    with pytest.raises(ValueError, match=r"^a prompt of hashes has no tokens to hash extra keys"):
        pool.new_request(Prompt(hashes=[1]), keys=ExtraKeys(cache_salt="a"))
    assert before == shown(pool)


def test_a_request_larger_than_the_pool_is_not_allocated(pool):
    admit(pool, range(8))
    before = shown(pool)
    request, hits, new = admit(pool, range(33))
    assert (len(hits), new, request.block_ids) == (2, None, [])
    assert before == shown(pool)


# ------------------------------------------------------------------------------------------------------ properties

tokens = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=9)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), tokens),
        st.tuples(st.just("decode"), st.integers(0, 9), tokens),
        st.tuples(st.just("free"), st.integers(0, 9)),
        st.tuples(st.just("reset")),
    ),
    max_size=40,
)


@given(steps=steps, backend=st.sampled_from(OURS), num_blocks=st.integers(1, 8), size=st.integers(1, 3))
def test_any_requests_conserve_blocks_and_events_equal_the_resident_blocks(steps, backend, num_blocks, size):
    pool = create_manager(backend, num_blocks=num_blocks, block_size=size, sink=CapturingSink())
    live, held = [], Counter()
    for kind, *rest in steps:
        before = shown(pool)
        if kind == "add":
            request, hits, new = admit(pool, rest[0])
            need = -(-len(request) // size) - len(hits) + sum(block_id in before[0] for block_id in hits)
            assert (new is None) == (need > len(before[0]))
            if new is None:
                assert before == shown(pool)
            else:
                live.append(request)
        elif kind == "reset":
            assert pool.reset_prefix_cache() == (not live)
        elif live:
            request = live[rest[0] % len(live)]
            if kind == "free":
                live.remove(request)
                pool.free(request)
            elif pool.missing_blocks(request, len(request) + len(rest[1])) <= pool.num_free_blocks:
                request.tokens.extend(rest[1])
                assert pool.allocate_slots(request, len(rest[1])) is not None
        apply_events(pool, held)
        check(pool, live, held, num_blocks)
    for request in live:
        pool.free(request)
    assert (pool.num_active_blocks, pool.num_active_block_refs) == (0, 0)
    assert len(pool.resident()) == pool.num_inactive_blocks


def apply_events(pool, held):
    """Apply events as a router that counts copies."""
    for event in pool.sink.take():
        data = event.data
        if isinstance(data, Stored):
            assert data.parent_hash is None or held[data.parent_hash]
            held.update(data.block_hashes)
        elif isinstance(data, Removed):
            assert len(data.block_hashes) == 1
            held.subtract(data.block_hashes)
            assert held[data.block_hashes[0]] >= 0
        else:
            assert isinstance(data, Cleared)
            held.clear()


def check(pool, live, held, num_blocks):
    queue, in_use = pool.free_queue, Counter(i for request in live for i in request.block_ids)
    assert sorted([*queue, *in_use]) == list(range(1, num_blocks + 1))
    assert (len(in_use), in_use.total()) == (pool.num_active_blocks, pool.num_active_block_refs)
    assert in_use.total() == sum(pool.active_blocks.values())
    assert +held == Counter(pool.resident())
    for request in live:
        names = request.tokens.names
        # A lookup finds the whole resident prefix of names, and no block is resident without its parent.
        look = pool.new_request(Prompt([*request.tokens.tokens, 0]))
        assert len(names) == len(pool.get_computed_blocks(look))
        for parent, child in pairwise(names):
            assert held[parent] or not held[child]
