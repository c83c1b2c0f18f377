"""inference_lab's KVCacheManager: the tests of the original, its arithmetic, and refused input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import Prompt
from pytest_kvmock.engines import PagedCacheManager, PagedRequest


def request_of(num_prompt_tokens, request_id="req-1"):
    return PagedRequest(request_id, 0, 0.0, num_prompt_tokens, 50)


def state_of(manager):
    return (
        [manager.references(block) for block in range(manager.total_blocks)],
        manager.num_free_blocks,
        manager.num_prefix_cache_hits,
        manager.num_prefix_cache_misses,
    )


# ---------------------------------------------------------------------------- the tests of the original, in its order


def test_a_manager_has_as_many_blocks_as_fit_into_its_capacity():
    manager = PagedCacheManager(16000, 16, 100, False)
    assert manager.block_size == 16
    assert manager.total_blocks == 10
    assert manager.num_free_blocks == 10
    assert manager.utilization == 0.0


def test_only_the_blocks_that_a_request_still_needs_are_allocated():
    manager = PagedCacheManager(16000, 16, 100, False)
    request = request_of(32)
    blocks = manager.allocate_blocks(request, 32)
    assert len(blocks) == 2
    assert manager.num_free_blocks == 8

    request.kv_blocks.extend(blocks)
    request.num_computed_tokens = 32
    assert len(manager.allocate_blocks(request, 16)) == 1
    assert manager.num_free_blocks == 7


def test_an_allocation_larger_than_the_capacity_returns_none():
    manager = PagedCacheManager(1600, 16, 100, False)
    assert manager.total_blocks == 1
    assert manager.allocate_blocks(request_of(32), 32) is None


def test_freed_blocks_count_as_free_again():
    manager = PagedCacheManager(16000, 16, 100, False)
    blocks = manager.allocate_blocks(request_of(32), 32)
    assert manager.num_free_blocks == 8
    manager.free_blocks(blocks)
    assert manager.num_free_blocks == 10
    assert manager.utilization == 0.0


def test_utilization_is_the_share_of_blocks_in_use():
    manager = PagedCacheManager(16000, 16, 100, False)
    assert manager.utilization == 0.0
    blocks = manager.allocate_blocks(request_of(32), 32)
    assert abs(0.2 - manager.utilization) < 1e-10
    manager.free_blocks(blocks)
    assert manager.utilization == 0.0


def test_a_prompt_is_a_prefix_cache_hit_after_its_first_miss():
    manager = PagedCacheManager(16000, 16, 100, True)
    first = request_of(16)
    first.kv_blocks.extend(manager.allocate_blocks(first, 16))
    assert manager.check_prefix_cache(first) == 0
    assert manager.num_prefix_cache_misses == 1
    assert manager.check_prefix_cache(request_of(16)) == 16
    assert manager.num_prefix_cache_hits == 1


# ------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("capacity", "block_size", "bytes_per_token", "total"),
    [
        (1600, 16, 100, 1),
        (3199, 16, 100, 1),
        (3200, 16, 100, 2),
        (7, 1, 1, 7),
        (7, 2, 3, 1),
        (40 * 2**30, 16, 131072, 20480),  # 40 GiB, for a model of 128 KiB per token
        (2**64, 1, 1, 2**64),  # unused blocks take no memory
    ],
)
def test_the_capacity_in_bytes_is_rounded_down_to_whole_blocks(capacity, block_size, bytes_per_token, total):
    manager = PagedCacheManager(capacity, block_size, bytes_per_token)
    assert total == manager.total_blocks == manager.num_free_blocks
    assert [total - 1] == manager.allocate_blocks(request_of(1), 1)


@pytest.mark.parametrize(
    ("computed", "has", "tokens", "needed"),
    [
        (0, 0, 0, 0),
        (0, 0, 1, 1),
        (0, 0, 16, 1),
        (0, 0, 17, 2),
        (16, 1, 1, 1),
        (17, 2, 15, 0),
        (17, 2, 16, 1),
        (0, 3, 16, 0),  # it has more blocks than it needs
        (100, 0, 1, 7),  # its own token counts decide, not its blocks
        (0, 0, 160, 10),
        (0, 0, 161, None),
        (160, 10, 1, None),
    ],
)
def test_blocks_needed_cover_all_tokens_of_a_request_minus_the_blocks_that_it_has(computed, has, tokens, needed):
    manager = PagedCacheManager(160, 16, 1)
    request = PagedRequest("r", 0, 0.0, 32, 50, computed, manager.allocate_blocks(request_of(1), 16 * has))
    free = manager.num_free_blocks
    blocks = manager.allocate_blocks(request, tokens)
    assert needed == (None if blocks is None else len(blocks))
    assert free - (needed or 0) == manager.num_free_blocks
    assert has == len(request.kv_blocks)  # the scheduler adds them


def test_allocation_takes_the_last_freed_block_first_and_highest_ids_before_lower_ones():
    manager = PagedCacheManager(5, 1, 1)
    request = request_of(1)
    assert manager.allocate_blocks(request, 3) == [4, 3, 2]
    manager.free_blocks([4, 2])
    assert manager.allocate_blocks(request, 3) == [2, 4, 1]
    assert manager.allocate_blocks(request, 1) == [0]
    assert manager.allocate_blocks(request, 1) is None
    assert manager.utilization == 1.0


def test_a_shared_block_becomes_free_with_its_last_reference():
    manager = PagedCacheManager(4, 1, 1)
    blocks = manager.allocate_blocks(request_of(2), 2)
    manager.reference_blocks([3, 3])
    manager.free_blocks(blocks)
    assert (manager.num_free_blocks, manager.references(3)) == (3, 2)
    manager.free_blocks([3, 3])
    assert (manager.num_free_blocks, manager.references(3)) == (4, 0)
    assert manager.allocate_blocks(request_of(2), 2) == [3, 2]


# ----------------------------------------------------------------------------------------------------- prefix cache


def cached(request_id, num_prompt_tokens, *kv_blocks):
    return PagedRequest(request_id, 0, 0.0, num_prompt_tokens, 50, 0, list(kv_blocks))


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (cached("a", 40), 16),
        (cached("a", 41), 0),
        (cached("b", 40), 0),
        (cached("short", 5), 5),
        (cached("no blocks", 40), 0),
    ],
)
def test_the_prefix_cache_matches_prompts_by_id_and_length(asked, found):
    manager = PagedCacheManager(1600, 16, 1, True)
    for request in (cached("a", 40, 9), cached("short", 5, 8), cached("no blocks", 40)):
        assert manager.check_prefix_cache(request) == 0
    assert found == manager.check_prefix_cache(asked)
    assert (bool(found), 4 - bool(found)) == (manager.num_prefix_cache_hits, manager.num_prefix_cache_misses)


def test_a_cached_prompt_is_still_hit_after_its_blocks_are_freed():
    manager = PagedCacheManager(1600, 16, 1, True)
    request = request_of(16)
    request.kv_blocks.extend(manager.allocate_blocks(request, 16))
    manager.check_prefix_cache(request)
    manager.free_blocks(request.kv_blocks)
    assert manager.check_prefix_cache(request_of(16)) == 16


def test_without_prefix_caching_no_lookup_hits_or_is_counted():
    manager = PagedCacheManager(1600, 16, 1)
    request = cached("a", 40, 9)
    assert [manager.check_prefix_cache(request) for _ in range(2)] == [0, 0]
    assert (manager.num_prefix_cache_hits, manager.num_prefix_cache_misses) == (0, 0)


# --------------------------------------------------------------------------------------------------------- any order


class Schedule:
    """Requests over a manager, compared with a plain list as the stack of free blocks."""

    def __init__(self, total_blocks, block_size):
        self.manager = PagedCacheManager(total_blocks * block_size, block_size, 1)
        self.stack = list(range(total_blocks))
        self.requests = {}

    def grow(self, name, tokens):
        request = self.requests.setdefault(name, request_of(1, name))
        size = self.manager.block_size
        needed = max(0, -(-(request.num_computed_tokens + tokens) // size) - len(request.kv_blocks))
        before = state_of(self.manager)
        blocks = self.manager.allocate_blocks(request, tokens)
        if needed > len(self.stack):
            assert blocks is None
            assert before == state_of(self.manager)
            return
        assert [self.stack.pop() for _ in range(needed)] == blocks
        request.kv_blocks.extend(blocks)
        request.num_computed_tokens += tokens

    def end(self, name, tail_first):
        request = self.requests.pop(name, None)
        if request is not None:
            blocks = request.kv_blocks[::-1] if tail_first else request.kv_blocks
            self.manager.free_blocks(blocks)
            self.stack += blocks

    def check(self):
        held = [block for request in self.requests.values() for block in request.kv_blocks]
        assert len(held) == len(set(held))
        assert self.manager.total_blocks == self.manager.num_free_blocks + len(held)
        assert set(held) == {b for b in range(self.manager.total_blocks) if self.manager.references(b) == 1}
        assert abs(len(held) / self.manager.total_blocks - self.manager.utilization) < 1e-10


NAMES = st.sampled_from("abcd")
STEPS = st.lists(st.one_of(st.tuples(NAMES, st.integers(0, 12)), st.tuples(NAMES, st.booleans())), max_size=40)


@given(st.integers(1, 12), st.integers(1, 5), STEPS)
def test_any_schedule_conserves_blocks_and_allocates_from_the_top_of_the_stack(total_blocks, block_size, steps):
    schedule = Schedule(total_blocks, block_size)
    for name, step in steps:
        if isinstance(step, bool):
            schedule.end(name, step)
        else:
            schedule.grow(name, step)
        schedule.check()
    for name in list(schedule.requests):
        schedule.end(name, tail_first=True)
    assert total_blocks == schedule.manager.num_free_blocks
    assert schedule.manager.utilization == 0.0


@given(st.lists(st.integers(0, 5), max_size=8), st.lists(st.integers(0, 5), max_size=4))
def test_freeing_a_list_of_blocks_is_all_or_nothing(freed, shared):
    manager = PagedCacheManager(6, 1, 1)
    in_use = manager.allocate_blocks(request_of(1), 4)
    shared = [block for block in shared if block in in_use]
    manager.reference_blocks(shared)
    has = [(block in in_use) + shared.count(block) for block in range(6)]
    left = [count - freed.count(block) for block, count in enumerate(has)]
    if min(left) < 0:
        before = state_of(manager)
        with pytest.raises(ValueError, match="free_blocks of block"):
            manager.free_blocks(freed)
        assert before == state_of(manager)
    else:
        manager.free_blocks(freed)
        assert left == [manager.references(block) for block in range(6)]
        assert left.count(0) == manager.num_free_blocks


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 16, 100), "kv_cache_capacity must be an integer of at least 1 (bytes), got 0"),
        ((1.6e4, 16, 100), "kv_cache_capacity must be an integer of at least 1 (bytes), got 16000.0"),
        ((16000, 0, 100), "block_size must be an integer of at least 1 (tokens a block), got 0"),
        ((16000, True, 100), "block_size must be an integer of at least 1 (tokens a block), got True"),
        ((16000, 16, 0), "kv_cache_bytes_per_token must be an integer of at least 1, got 0"),
        ((16000, 16, "100"), "kv_cache_bytes_per_token must be an integer of at least 1, got '100'"),
        ((16000, 16, 100, 1), "enable_prefix_caching must be True or False, got 1"),
        (
            (1599, 16, 100),
            "kv_cache_capacity must be at least one block, 1600 bytes (16 tokens of 100 bytes), got 1599",
        ),
    ],
)
def test_an_invalid_manager_is_refused(arguments, said):
    with pytest.raises(ValueError) as error:
        PagedCacheManager(*arguments)
    assert said == str(error.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"request_id": 7}, "request_id must be a string, got 7"),
        ({"num_prompt_tokens": -1}, "num_prompt_tokens must be an integer of at least 0, got -1"),
        ({"max_output_tokens": 0.5}, "max_output_tokens must be an integer of at least 0, got 0.5"),
        ({"num_computed_tokens": None}, "num_computed_tokens must be an integer of at least 0, got None"),
    ],
)
def test_an_invalid_request_is_refused(fields, said):
    good = {
        "request_id": "r",
        "priority": 0,
        "arrival_time": 0.0,
        "num_prompt_tokens": 16,
        "max_output_tokens": 50,
    }
    with pytest.raises(ValueError) as error:
        PagedRequest(**{**good, **fields})
    assert said == str(error.value)


def spoilt(**fields):
    request = request_of(16)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: m.free_blocks([9, 0]), "free_blocks of block 0: it is free already"),
        (lambda m: m.free_blocks([9, 8, 9]), "free_blocks of block 9: it has 1 reference(s), and 2 would be released"),
        (lambda m: m.free_blocks([9, 10]), "free_blocks of block 10: there is none; ids are 0 to 9"),
        (lambda m: m.free_blocks([-1]), "free_blocks of block -1: there is none; ids are 0 to 9"),
        (lambda m: m.free_blocks(["9"]), "free_blocks of block '9': there is none; ids are 0 to 9"),
        (lambda m: m.free_blocks([True]), "free_blocks of block True: there is none; ids are 0 to 9"),
        (lambda m: m.free_blocks(9), "free_blocks: a list of block ids is expected, got 9"),
        (lambda m: m.free_blocks(None), "free_blocks: a list of block ids is expected, got None"),
        (
            lambda m: m.reference_blocks([9, 0]),
            "reference_blocks of block 0: it is free; allocate_blocks gives free blocks",
        ),
        (lambda m: m.reference_blocks([9, 10]), "reference_blocks of block 10: there is none; ids are 0 to 9"),
        (lambda m: m.reference_blocks("9"), "reference_blocks: a list of block ids is expected, got '9'"),
        (lambda m: m.references(10), "references of block 10: there is none; ids are 0 to 9"),
        (
            lambda m: m.allocate_blocks(request_of(16), -1),
            "allocate_blocks: num_tokens must be an integer of at least 0, got -1",
        ),
        (
            lambda m: m.allocate_blocks(request_of(16), 1.0),
            "allocate_blocks: num_tokens must be an integer of at least 0, got 1.0",
        ),
        (
            lambda m: m.allocate_blocks(Prompt([1, 2]), 2),
            "allocate_blocks: the request must be like a PagedRequest, got <Prompt of 2 tokens>",
        ),
        (
            lambda m: m.allocate_blocks(spoilt(num_computed_tokens=-1), 2),
            "allocate_blocks of request 'req-1': num_computed_tokens must be an integer of at least 0, got -1",
        ),
        (
            lambda m: m.allocate_blocks(spoilt(kv_blocks=None), 2),
            "allocate_blocks of request 'req-1': kv_blocks must be a list of block ids, got None",
        ),
        (
            lambda m: m.check_prefix_cache("req-1"),
            "check_prefix_cache: the request must be like a PagedRequest, got 'req-1'",
        ),
        (
            lambda m: m.check_prefix_cache(spoilt(num_prompt_tokens="16")),
            "check_prefix_cache of request 'req-1': num_prompt_tokens must be an integer of at least 0, got '16'",
        ),
    ],
)
def test_calls_that_would_corrupt_the_manager_are_refused_and_change_nothing(call, said):
    manager = PagedCacheManager(160, 16, 1, True)
    manager.allocate_blocks(request_of(32), 32)
    before = state_of(manager)
    with pytest.raises(ValueError) as error:
        call(manager)
    assert said == str(error.value)
    assert before == state_of(manager)
    assert manager.allocate_blocks(request_of(16), 16) == [7]  # the top of the stack is unchanged


def test_the_repr_of_a_pool_shows_its_use():
    manager = PagedCacheManager(160, 16, 1)
    manager.allocate_blocks(request_of(1), 17)
    assert repr(manager) == "<PagedCacheManager: 8 of 10 blocks free>"
