"""vLLM's manager of several cache groups: refused inputs, worked examples, and the equality of one group."""

from random import Random

import pytest
from depth import seeds

from pytest_kvmock import CapturingSink, Prompt, Removed, Stored, create_manager
from pytest_kvmock.engines import CacheGroup
from pytest_kvmock.engines.makers import hash_chain
from pytest_kvmock.engines.vllm.block_pool import BlockPoolManager
from pytest_kvmock.engines.vllm.groups import GroupGeometry
from pytest_kvmock.engines.vllm.host.offload_steps import OffloadStopError
from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager
from pytest_kvmock.values import SparseStored
from pytest_kvmock.values.prompt_keys import group_of

FULL = CacheGroup("full_attention", block_size=4)
WINDOW = CacheGroup("sliding_window", block_size=4, window=6)
STATE = CacheGroup("mamba", block_size=8)
GPT_OSS = (WINDOW, FULL)
QWEN = (STATE, CacheGroup("full_attention", block_size=8))


def made(groups=GPT_OSS, **options):
    return create_manager("vllm", num_blocks=options.pop("num_blocks", 64), groups=groups, **options)


def run(manager, prompt, *, free=True):
    """Prefill a prompt as the scheduler does; returns the number of reused tokens and the request."""
    request = manager.new_request(prompt)
    hits = manager.get_computed_blocks(request)
    left = len(request) - hits.num_tokens
    while left:
        manager.new_step_starts()
        tokens = manager.chunk_tokens(request, left, hits)
        assert manager.allocate_slots(request, tokens, hits) is not None
        manager.end_step()
        hits, left = None, len(request) - request.num_computed_tokens
    if free:
        manager.free(request)
    return request


def published(sink):
    """Return for each Stored: group, tokens before it, tokens after each of its hashes, span."""
    return [
        (group_of(extra), event.data, len(token_ids) * len(token_ids[0]))
        for event, _, token_ids, extra in sink
        if isinstance(event.data, Stored)
    ]


class Recorder(list):
    """A sink."""

    def publish(self, event, storage_tier, token_ids=None, extra=None):
        self.append((event, storage_tier, token_ids, extra))


def test_gpt_oss_stores_only_the_window_blocks_from_which_a_prompt_can_resume():
    sink = Recorder()
    manager = made(sink=sink)
    tokens = range(22)
    request = run(manager, tokens)
    key = request.key
    (window, sparse, span), (full, dense, whole) = published(sink)
    assert (window, span, full, whole) == (0, 20, 1, 20)
    assert type(sparse) is SparseStored
    assert (sparse.parent_hash, sparse.block_hashes) == (None, (key(16), key(20)))
    assert dense.block_hashes == tuple(map(key, range(4, 21, 4)))
    assert sink[0][3] == {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 6}
    assert sink[1][3] == {"group_idx": 1}


def test_the_second_sibling_reuses_nothing_and_the_third_hits_the_junction():
    manager = made()
    run(manager, [*range(14), *range(100, 108)])
    second = manager.new_request([*range(14), *range(200, 208)])
    assert manager.get_computed_blocks(second)[::2] == (0, 12)
    run(manager, [*range(14), *range(200, 208)])
    third = manager.new_request([*range(14), *range(300, 308)])
    assert manager.get_computed_blocks(third)[::2] == (12, 0)


def test_chunks_of_an_engine_with_states_end_where_states_are_cached():
    manager = made(QWEN)
    request = manager.new_request(range(22))
    assert manager.chunk_tokens(request, 22) == 16
    run(manager, range(22))
    sibling = manager.new_request([*range(14), *range(50, 58)])
    hits = manager.get_computed_blocks(sibling)
    assert hits[::2] == (0, 8)
    assert manager.chunk_tokens(sibling, 22, hits) == 8


def test_a_request_waits_one_step_for_a_state_that_its_sibling_computes():
    manager = made(QWEN)
    manager.new_step_starts()
    first = manager.new_request(range(22))
    assert manager.allocate_slots(first, 16) is not None
    second = manager.new_request(range(22))
    hits = manager.get_computed_blocks(second)
    assert hits.num_tokens == 16
    assert manager.allocate_slots(second, 6, hits) is None
    manager.new_step_starts()
    assert manager.allocate_slots(second, 6, hits) is not None


def test_a_prompt_tail_is_published_by_its_hash_unit_and_removed_before_its_block_is_full():
    sink = Recorder()
    manager = made(QWEN, match_unit=2, sink=sink)
    request = run(manager, range(22), free=False)
    tails = [data for _, data, span in published(sink) if span == 2]
    assert [data.block_hashes for data in tails] == [(request.key(20),)] * 2
    assert {data.parent_hash for data in tails} == {request.key(18)}
    sink.clear()
    for token in (50, 51):
        request.tokens.append(token)
        manager.new_step_starts()
        manager.allocate_slots(request, 1)
        manager.end_step()
    kinds = [type(event.data) for event, *_ in sink if group_of(_[2]) == 1]
    assert kinds == [Removed, Stored, Stored]
    assert manager.get_computed_blocks(manager.new_request(range(22))).num_tokens == 20


def test_a_single_full_attention_group_uses_the_block_pool_manager():
    manager = made((FULL,), retention=0)
    assert type(manager) is BlockPoolManager
    assert manager.block_size == 4
    assert type(made((CacheGroup("mla_attention", block_size=4),))) is VllmHybridManager


def random_prompts(rng, count):
    """Prompts of a few blocks of 4 tokens, some of which share a prefix with, or equal, an earlier one."""
    prompts = []
    for _ in range(count):
        before = rng.choice(prompts) if prompts and rng.random() < 0.7 else []
        fresh = [rng.randrange(1000) for _ in range(rng.randint(1, 16))]
        prompts.append([*before[: rng.randint(0, len(before))], *fresh][:29])
    return prompts


@pytest.mark.parametrize("seed", seeds(200))
def test_a_hybrid_manager_with_one_full_group_equals_the_block_pool(seed):
    prompts = random_prompts(Random(seed), 40)
    streams = []
    for make in (BlockPoolManager, VllmHybridManager):
        sink, rng, open_requests, answers = CapturingSink(), Random(seed), [], []
        sizes = {"block_size": 4} if make is BlockPoolManager else {"groups": (FULL,)}
        manager = make(num_blocks=12, sink=sink, **sizes)
        for prompt in prompts:
            request = manager.new_request(prompt)
            hits = manager.get_computed_blocks(request)
            count = hits.num_tokens if make is VllmHybridManager else 4 * len(hits)
            fits = manager.allocate_slots(request, len(request) - count, hits) is not None
            answers.append((count, fits))
            if fits:
                open_requests.append(request)
            while open_requests and (not fits or rng.random() < 0.6):
                manager.free(open_requests.pop(rng.randrange(len(open_requests))))
                fits = True
        streams.append((answers, sink.events, manager.free_queue))
    assert streams[0] == streams[1]


BY_SIXTEEN = (CacheGroup("full_attention", block_size=16), CacheGroup("sliding_window", block_size=16, window=64))


@pytest.mark.parametrize(
    ("local", "external", "new", "tables"),
    [
        (0, 32, 16, [[1, 2, 5], [3, 4, 6]]),
        (0, 48, 0, [[1, 2, 3], [4, 5, 6]]),
        (0, 0, 48, [[1, 2, 3], [4, 5, 6]]),
        (16, 16, 32, [[1, 4, 5, 6], [3, 2, 7, 8]]),  # in the cached prompt, blocks 2 and 4 had no name
        (0, 96, 32, [[1, 2, 3, 4, 5, 6, 11, 12], [0, 0, 7, 8, 9, 10, 13, 14]]),
    ],
)
def test_external_tokens_get_blocks_in_all_groups_before_new_tokens(local, external, new, tables):
    manager = made(BY_SIXTEEN, retention=None)
    tokens = range(local + external + new + 1)
    if local:
        run(manager, tokens[: local + 1])
    request = manager.new_request(tokens)
    hits = manager.get_computed_blocks(request)
    assert local == hits.num_tokens
    manager.allocate_slots(request, new, hits, num_external_tokens=external)
    assert tables == [table.blocks for table in request.tables]
    assert local + external + new == request.num_computed_tokens


def test_an_external_state_takes_one_block_behind_null_blocks():
    manager = made(QWEN)
    request = manager.new_request(range(48))
    manager.allocate_slots(request, 0, num_external_tokens=32, delay_cache_blocks=True)
    assert [table.blocks for table in request.tables] == [[0, 0, 0, 1], [2, 3, 4, 5]]
    manager.cache_blocks(request, 32)
    assert manager.allocate_slots(request, 8) is not None
    assert [table.blocks for table in request.tables] == [[0, 0, 0, 1, 6], [2, 3, 4, 5, 7]]


def test_a_load_within_a_step_that_needs_an_uncounted_state_block_crashes_the_engine():
    manager = made(QWEN, num_blocks=6)
    request = manager.new_request(range(40))
    with pytest.raises(OffloadStopError, match=r"states need a block more than was counted.*get_new_blocks"):
        manager.allocate_slots(request, 8, num_external_tokens=32)


def test_a_rehearsal_does_not_change_the_manager():
    sink = Recorder()
    manager = made(sink=sink, num_blocks=12)
    request = run(manager, range(22), free=False)
    before = manager.free_queue, manager.active_blocks, len(sink), manager.take_event_id()
    copy, copied = manager.rehearsal(request, 40)
    copied.tokens.extend(range(50, 90))
    assert copy.allocate_slots(copied, 40) is not None
    assert (manager.free_queue, manager.active_blocks, len(sink), manager.take_event_id() - 1) == before
    assert len(request) == 22


def test_references_are_counted_by_name_and_blocks_by_number():
    manager = made()
    request = run(manager, range(22), free=False)
    assert manager.num_active_blocks == manager.num_active_block_refs == 12
    assert manager.num_free_blocks == 52
    assert manager.references(request.key(4)) == 1  # in the full group; the window kept none
    assert manager.references(request.key(16)) == 2
    assert sum(manager.active_blocks.values()) == 12
    assert sorted(manager.resident_names()) == sorted(
        [(0, request.key(16)), (0, request.key(20)), *((1, request.key(end)) for end in range(4, 21, 4))]
    )
    manager.free(request)
    assert manager.inactive_blocks() == [request.key(end) for end in range(20, 3, -4)]
    assert sorted(manager.resident()) == sorted(manager.inactive_blocks())
    assert manager.clear()
    assert manager.resident() == []


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ((), {}, "groups must have at least one that is not a ring, got 0 groups"),
        ((WINDOW,), {}, "groups must have one of kind 'full_attention' or 'mla_attention', got sliding_window"),
        (FULL, {}, "groups must be a list of CacheGroup, got CacheGroup"),
        ((FULL, "full"), {}, "groups must be a list of CacheGroup, got 'full' in it"),
        (GPT_OSS, {"match_unit": 3}, "match_unit 3 does not divide block_size 4 of sliding_window"),
        (
            GPT_OSS,
            {"retention": 6},
            "retention must be a multiple of 4, the least common multiple of the groups' block sizes; got 6",
        ),
        (GPT_OSS, {"retention": -4}, "retention must be an integer of at least 0 tokens, or None, got -4"),
        (GPT_OSS, {"block_size": 16}, "block_size must be that of the attention group, 4 tokens, or not given; got 16"),
        (
            GPT_OSS,
            {"version": "0.19.1"},
            "cache groups are those of vLLM 0.33.0; version 0.19.1 is not mocked with them",
        ),
        (GPT_OSS, {"max_model_len": 0}, "max_model_len must be an integer of at least 1 tokens, or None, got 0"),
        (None, {"retention": 0}, "retention is for engines with cache groups; give groups, too"),
    ],
)
def test_invalid_lists_of_groups_are_refused_in_one_line(groups, options, message):
    with pytest.raises(ValueError) as caught:
        made(groups, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "sliding_windov", "block_size": 4}, "unknown kind of a cache group 'sliding_windov'; did you mean"),
        ({"kind": "sliding_window", "block_size": 4}, "cache group 'sliding_window': window must be an integer"),
        (
            {"kind": "full_attention", "block_size": 4, "window": 4},
            "cache group 'full_attention': it has no window, got 4",
        ),
        ({"kind": "mamba", "block_size": 0}, "cache group 'mamba': block_size must be an integer of at least 1, got 0"),
        (
            {"kind": "ring", "block_size": 4, "checkpoint": 4},
            "cache group 'ring': checkpoint, speculative_blocks and mode",
        ),
    ],
)
def test_an_invalid_group_is_refused(fields, message):
    with pytest.raises(ValueError) as caught:
        CacheGroup(**fields)
    assert str(caught.value).startswith(message)


def test_a_prompt_of_hashes_needs_blocks_of_one_size():
    with pytest.raises(ValueError, match="a prompt of hashes has no tokens"):
        made(QWEN, match_unit=2).new_request(Prompt(hashes=[1, 2, 3]))
    manager = made()
    request = run(manager, Prompt(hashes=[1, 2, 3]))
    assert len(request) == 12


def test_block_sizes_and_admission_caps_follow_from_the_groups():
    geometry = GroupGeometry.of((WINDOW, CacheGroup("full_attention", block_size=12), CacheGroup("ring", block_size=8)))
    assert (geometry.scheduler_block_size, geometry.hash_unit, geometry.alignment) == (24, 4, 24)
    assert geometry.admission_cap(0, 24, None) == 9
    assert geometry.admission_cap(0, 24, 20) == 6
    assert geometry.admission_cap(1, 24, None) is None


@pytest.mark.parametrize("unit", [None, 2])
def test_names_of_blocks_of_several_units_are_checked_by_unit(unit):
    sink = Recorder()
    groups = (CacheGroup("sliding_window", block_size=4, window=6), CacheGroup("full_attention", block_size=8))
    manager = made(groups, sink=sink) if unit is None else made(QWEN, sink=sink, match_unit=unit)
    request = run(manager, range(30), free=False)
    request.tokens.extend(range(60, 70))
    manager.allocate_slots(request, 10)
    chain, judged = hash_chain(manager), 0
    for event, _, token_ids, extra in sink:
        data = event.data
        is_block = len(token_ids[0]) == manager.block_size if token_ids else False  # and no tail
        if type(data) is Stored and is_block and group_of(extra) == len(manager.geometry.groups) - 1:
            expected = chain.expected(data, token_ids, len(token_ids[0]), extra)
            assert data.block_hashes == tuple(expected)
            other = [(999, *tokens[1:]) for tokens in token_ids]
            assert set(chain.expected(data, other, len(token_ids[0]), extra)).isdisjoint(expected)
            chain.expected(data, token_ids, len(token_ids[0]), extra)
            judged += 1
    assert judged >= 2


def test_names_of_salted_blocks_of_several_units_are_not_checked():
    groups = (CacheGroup("sliding_window", block_size=4, window=6), CacheGroup("full_attention", block_size=8))
    sink = Recorder()
    manager = made(groups, sink=sink)
    run(manager, Prompt(range(30), cache_salt="tenant"))
    event, _, token_ids, extra = next(each for each in sink if type(each[0].data) is Stored)
    assert extra["extra_keys"] == [("tenant",), None, None]
    assert hash_chain(manager).expected(event.data, token_ids, 8, extra) is None
    sparse = next(each for each in sink if type(each[0].data) is SparseStored)
    assert "extra_keys" not in sparse[3] or len(sparse[3]["extra_keys"]) == len(sparse[0].data.block_hashes)


WINDOW_AND_FULL = (CacheGroup("sliding_window", 4, window=8), CacheGroup("full_attention", 4))


def test_a_window_needs_blocks_only_for_external_tokens_that_are_still_attended_to():
    """40 tokens come, and 4 are computed: 11 blocks of full attention and 3 of the window."""

    def allocated(num_blocks):
        manager = VllmHybridManager(groups=WINDOW_AND_FULL, num_blocks=num_blocks)
        request = manager.new_request(range(44))
        return manager.allocate_slots(request, 4, num_external_tokens=40, delay_cache_blocks=True), manager

    assert (allocated(13)[0], allocated(13)[1].num_free_blocks) == (None, 13)
    (window, full), manager = allocated(14)
    assert (
        window[:8],
        len([each for each in window if each]),
        len(full),
        manager.num_free_blocks,
    ) == (8 * [0], 3, 11, 0)


def test_a_step_that_frees_a_block_behind_the_window_is_not_quiet():
    manager = VllmHybridManager(groups=WINDOW_AND_FULL, num_blocks=40)
    request = manager.new_request(range(21))
    manager.allocate_slots(request, 21)
    assert manager.quiet_tokens(request) == 0
    request.tokens.append(1)
    manager.allocate_slots(request, 1)
    assert manager.quiet_tokens(request) == 1
