"""Pools: allocation, eviction, registration, matching, return."""

import asyncio
import sys

import pytest
from block_helpers import cache, chain, fill, hashes, make_manager, make_pool, register

from pytest_kvmock.contrib.block_manager import (
    BlockClosed,
    BlockNotComplete,
    CancellationToken,
    Fabric,
    InvalidMutableBlock,
    KvBlockManager,
    NotEnoughBlocksAvailable,
    PoolCounts,
    ProgressEngineShutdown,
    TierPool,
    TokenBlock,
)


def indices(handles):
    return [handle.block_idx for handle in handles]


# -------------------------------------------------------------------------------------------------- allocation


def test_allocation_is_all_or_nothing():
    pool = make_pool(4)
    held = pool.allocate_blocks_blocking(3)
    with pytest.raises(NotEnoughBlocksAvailable) as error:
        pool.allocate_blocks_blocking(2)
    assert (error.value.requested, error.value.available) == (2, 1)
    assert str(error.value) == "Not enough blocks available, requested: 2, available: 1"
    assert PoolCounts(total=4, free=1, inactive=0, active=3, returning=0) == pool.counts
    assert indices(pool.allocate_blocks_blocking(1)) == [3]
    assert indices(held) == [0, 1, 2]


def test_returned_blocks_become_available_at_flush():
    pool = make_pool(2)
    pool.allocate_blocks_blocking(2).close()
    with pytest.raises(NotEnoughBlocksAvailable) as error:
        pool.allocate_blocks_blocking(1)
    assert (
        str(error.value)
        == "Not enough blocks available, requested: 1, available: 0 (2 more were returned and wait for flush())"
    )  # fmt: skip
    assert (pool.available_blocks, pool.flush()) == (0, 2)
    assert (pool.available_blocks, pool.flush()) == (2, 0)


@pytest.mark.parametrize("count", [-1, 1.0, "1", None, True])
def test_an_allocation_count_must_be_a_non_negative_integer(count):
    pool = make_pool(2)
    with pytest.raises(ValueError) as error:
        pool.allocate_blocks_blocking(count)
    assert str(error.value) == f"allocate_blocks: count must be an integer of at least 0, got {count!r}"
    assert pool.available_blocks == 2


def test_zero_blocks_can_be_allocated():
    assert make_pool(1).allocate_blocks_blocking(0) == []


def test_reset_blocks_are_allocated_first_in_first_out():
    pool = make_pool(3)
    one, two, three = pool.allocate_blocks_blocking(3)
    for block in (two, three, one):
        block.close()
    pool.flush()
    assert indices(pool.allocate_blocks_blocking(3)) == [1, 2, 0]


def test_free_blocks_are_allocated_before_any_block_is_evicted():
    pool = make_pool(3)
    (content,) = chain(1)
    cache(pool, [content])  # block 0
    with pool.allocate_blocks_blocking(2) as blocks:
        assert indices(blocks) == [1, 2]
    pool.flush()
    assert indices(pool.allocate_blocks_blocking(3)) == [1, 2, 0]
    assert pool.registered_hashes() == []


# ---------------------------------------------------------------------------------------------------- eviction


def evicted_in_order(pool, contents):
    """Allocate block by block, and return the contents that are no longer matched, in order."""
    left, order, held = {content.sequence_hash: number for number, content in enumerate(contents)}, [], []
    while pool.available_blocks:
        held += pool.allocate_blocks_blocking(1)
        for gone in left.keys() - set(pool.registered_hashes()):
            order.append(left[gone])
            del left[gone]
    return order


@pytest.mark.parametrize(
    ("priorities", "returned", "order"),
    [
        ([0, 0, 0, 0], [0, 1, 2, 3], [0, 1, 2, 3]),  # parents first: no block is kept for its children
        ([0, 0, 0, 0], [3, 2, 1, 0], [3, 2, 1, 0]),
        ([0, 0, 0, 0], [2, 0, 3, 1], [2, 0, 3, 1]),
        ([1, 0, 1, 0], [0, 1, 2, 3], [1, 3, 0, 2]),
        ([9, 5, 5, 7], [2, 0, 1, 3], [2, 1, 3, 0]),
        ([2**32 - 1, 0, 0, 0], [0, 3, 2, 1], [3, 2, 1, 0]),
    ],
)
def test_eviction_takes_the_lowest_priority_first_then_the_earliest_returned(priorities, returned, order):
    pool = make_pool(4)
    contents = chain(4)
    blocks = fill(pool, contents)
    for block, priority in zip(blocks, priorities, strict=True):
        block.metadata.priority = priority
    held = pool.register_blocks_blocking(blocks)
    for number in returned:
        held[number].close()
    pool.flush()
    assert order == evicted_in_order(pool, contents)


def test_a_matched_block_moves_to_the_end_of_the_eviction_order_on_return():
    pool = make_pool(3)
    contents = [TokenBlock([number] * 4) for number in range(3)]
    cache(pool, contents)
    pool.match_sequence_hashes_blocking([contents[0].sequence_hash]).close()
    pool.flush()
    assert evicted_in_order(pool, contents) == [1, 2, 0]


def test_a_priority_can_change_while_the_block_is_owned():
    pool = make_pool(3)
    contents = [TokenBlock([number] * 4) for number in range(3)]
    cache(pool, contents)
    with pool.match_sequence_hashes_blocking([contents[0].sequence_hash]) as (block,):
        block.metadata.priority = 1
    pool.flush()
    cache(pool, [])
    with pool.match_sequence_hashes_blocking([contents[1].sequence_hash]) as (block,):
        block.metadata.priority = 2
    with pool.match_sequence_hashes_blocking([contents[0].sequence_hash]) as (block,):
        assert block.metadata.priority == 1
        block.metadata.priority = 3
    pool.flush()
    assert evicted_in_order(pool, contents) == [2, 1, 0]


def test_an_evicted_block_is_reset():
    pool = make_pool(1)
    blocks = fill(pool, chain(1))
    blocks[0].metadata.priority = 7
    blocks[0].payload = b"old"
    pool.register_blocks_blocking(blocks).close()
    pool.flush()
    (block,) = pool.allocate_blocks_blocking(1)
    assert (block.state, block.metadata.priority, block.payload, block.tokens) == ("Reset", 0, b"", None)


@pytest.mark.parametrize(
    "fill_it",
    [lambda block: None, lambda block: block.initialize_sequence(), lambda block: block.apply_token_block(*chain(1))],
    ids=["Reset", "Partial", "Complete"],
)
def test_an_unregistered_block_loses_its_content_when_it_is_returned(fill_it):
    pool = make_pool(1)
    (block,) = pool.allocate_blocks_blocking(1)
    fill_it(block)
    block.payload = b"lost"
    block.close()
    pool.flush()
    assert PoolCounts(1, 1, 0, 0, 0) == pool.counts
    (block,) = pool.allocate_blocks_blocking(1)
    assert (block.state, block.payload) == ("Reset", b"")


def test_an_unregistered_block_loses_its_priority_when_it_is_returned():
    pool = make_pool(1)
    with fill(pool, chain(1)) as (block,):
        block.metadata.priority = 7
    pool.flush()
    (block,) = pool.allocate_blocks_blocking(1)
    assert block.metadata.priority == 0


def test_a_reset_block_keeps_its_priority_in_the_pool():
    # Dynamo resets a block with contents on its return; a Reset block has none.
    pool = make_pool(1)
    with pool.allocate_blocks_blocking(1) as (block,):
        block.metadata.priority = 7
    pool.flush()
    (block,) = pool.allocate_blocks_blocking(1)
    assert block.metadata.priority == 7


# ------------------------------------------------------------------------------------------------ registration


def test_registered_blocks_are_matched():
    pool = make_pool(4)
    contents = chain(3)
    held = register(pool, contents)
    assert (hashes(contents), hashes(contents)) == ([each.sequence_hash for each in held], pool.registered_hashes())
    matched = pool.match_sequence_hashes_blocking(hashes(contents))
    assert [0, 1, 2] == indices(matched) == indices(held)
    assert PoolCounts(4, 1, 0, 3, 0) == pool.counts
    held.close()
    assert (pool.flush(), pool.counts.active) == (0, 3)
    matched.close()
    assert (pool.flush(), pool.counts.inactive) == (3, 3)


def test_a_second_copy_of_an_active_block_is_returned_to_the_pool():
    pool = make_pool(4)
    (content,) = chain(1)
    held = register(pool, [content])
    (again,) = register(pool, [content])
    assert (0, PoolCounts(4, 2, 0, 1, 1)) == (again.block_idx, pool.counts)
    pool.flush()
    held.close()
    assert (0, PoolCounts(4, 3, 0, 1, 0)) == (pool.flush(), pool.counts)
    assert again.payload == b""
    assert indices(pool.allocate_blocks_blocking(3)) == [2, 3, 1]


def test_a_second_copy_of_an_inactive_block_is_returned_to_the_pool():
    pool = make_pool(2)
    (content,) = chain(1)
    cache(pool, [content])
    (again,) = register(pool, [content])
    assert (0, PoolCounts(2, 0, 0, 1, 1)) == (again.block_idx, pool.counts)
    assert again.metadata.acquired_tick - 1 == 0  # it was not allocated again


def test_two_copies_registered_in_one_call_become_one_block():
    pool = make_pool(2)
    (content,) = chain(1)
    held = register(pool, [content, content])
    assert ([0, 0], PoolCounts(2, 0, 0, 1, 1)) == (indices(held), pool.counts)
    held[0].close()
    pool.flush()
    assert pool.counts.active == 1


def test_a_match_waits_for_a_block_that_is_being_returned():
    pool = make_pool(3)
    contents = [TokenBlock([number] * 4) for number in range(3)]
    register(pool, contents).close()
    (found,) = pool.match_sequence_hashes_blocking([contents[1].sequence_hash])
    # Blocks returned before it are in the pool; blocks returned after it are not yet.
    assert (1, PoolCounts(3, 0, 1, 1, 1)) == (found.block_idx, pool.counts)
    assert found.metadata.returned_tick == 0
    (again,) = pool.match_sequence_hashes_blocking([contents[2].sequence_hash])
    assert (2, PoolCounts(3, 0, 1, 2, 0)) == (again.block_idx, pool.counts)


def test_registering_a_block_that_is_being_returned_reuses_it():
    pool = make_pool(2)
    (content,) = chain(1)
    register(pool, [content]).close()
    (again,) = register(pool, [content])
    assert (0, PoolCounts(2, 0, 0, 1, 1)) == (again.block_idx, pool.counts)


@pytest.mark.parametrize(
    "step", [lambda block: None, lambda block: block.initialize_sequence()], ids=["Reset", "Partial"]
)
def test_an_incomplete_block_cannot_be_registered(step):
    pool = make_pool(2)
    blocks = fill(pool, chain(1)) + pool.allocate_blocks_blocking(1)
    step(blocks[1])
    with pytest.raises(BlockNotComplete) as error:
        pool.register_blocks_blocking(blocks)
    assert (
        str(error.value)
        == "Block is not complete: register_blocks on block 1 of the device pool of worker 1337, which is "
        f"{blocks[1].state}"
    )  # fmt: skip
    assert (pool.registered_hashes(), blocks[0].state, blocks[1].is_open) == ([], "Complete", True)


def test_a_failed_registration_changes_nothing():
    manager = make_manager(device=2, host=2)
    device, host = manager.device(), manager.host()
    (one, two), (other,) = fill(device, chain(2)), fill(host, chain(1, 100))
    with pytest.raises(InvalidMutableBlock, match=r"^Invalid MutableBlock: block 0 of the host pool of worker 1337 is "
    r"not of the device pool"):  # fmt: skip
        device.register_blocks_blocking([one, other])
    with pytest.raises(InvalidMutableBlock, match=r"^Invalid MutableBlock: register_blocks was given a block twice$"):
        device.register_blocks_blocking([one, two, one])
    held = device.register_blocks_blocking([two])
    with pytest.raises(BlockClosed, match=r"^this MutableBlock holds no block any more"):
        device.register_blocks_blocking([one, two])
    with pytest.raises(TypeError, match=r"^register_blocks takes mutable blocks, got <ImmutableBlock: "):
        device.register_blocks_blocking([one, *held])
    assert (one.state, other.state, len(device.registered_hashes())) == ("Complete", "Complete", 1)


# ---------------------------------------------------------------------------------------------------- matching


@pytest.mark.parametrize(
    ("asked", "found"),
    [([0, 1, 2], 3), ([0, 1, 2, 3], 3), ([0, 3, 1], 1), ([3, 0], 0), ([], 0), ([2, 1], 2)],
)
def test_a_match_returns_the_longest_leading_run(asked, found):
    pool = make_pool(4)
    contents = chain(4)
    cache(pool, contents[:3])
    matched = pool.match_sequence_hashes_blocking([contents[number].sequence_hash for number in asked])
    assert asked[:found] == indices(matched)
    assert found == pool.counts.active


def test_a_hash_that_is_requested_twice_is_matched_twice():
    pool = make_pool(1)
    (content,) = chain(1)
    cache(pool, [content])
    one, two = pool.match_sequence_hashes_blocking([content.sequence_hash] * 2)
    one.close()
    assert (0, content.sequence_hash) == (pool.flush(), two.sequence_hash)


def test_touched_inactive_blocks_move_to_the_end_of_the_eviction_order():
    pool = make_pool(4)
    contents = [TokenBlock([number] * 4) for number in range(4)]
    cache(pool, contents)
    held = pool.match_sequence_hashes_blocking([contents[1].sequence_hash])
    pool.touch_blocks_blocking([*hashes(contents[:2]), 5, contents[2].sequence_hash])
    assert PoolCounts(4, 0, 3, 1, 0) == pool.counts
    held.close()
    pool.flush()
    assert evicted_in_order(pool, contents) == [2, 3, 0, 1]


# ----------------------------------------------------------------------------------------------- awaited, closed


def test_awaited_and_blocking_requests_give_the_same_result():
    async def cycle(pool, contents):
        blocks = await pool.allocate_blocks(len(contents))
        for block, content in zip(blocks, contents, strict=True):
            block.apply_token_block(content)
        held = await pool.register_blocks(blocks)
        matched = await pool.match_sequence_hashes(hashes(contents))
        held.close()
        matched.close()
        pool.flush()
        await pool.touch_blocks(hashes(contents))

    awaited, blocking = make_pool(4), make_pool(4)
    asyncio.run(cycle(awaited, chain(3)))
    cache(blocking, chain(3))
    assert blocking.counts == awaited.counts
    assert blocking.registered_hashes() == awaited.registered_hashes()


REQUESTS = {
    "allocate_blocks": lambda pool: pool.allocate_blocks_blocking(1),
    "register_blocks": lambda pool: pool.register_blocks_blocking([]),
    "match_sequence_hashes": lambda pool: pool.match_sequence_hashes_blocking([]),
    "touch_blocks": lambda pool: pool.touch_blocks_blocking([]),
    "flush": lambda pool: pool.flush(),
}


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("stop", ["close", "with", "token"])
def test_a_closed_manager_refuses_every_request(stop, request_name):
    manager = make_manager()
    pool = manager.device()
    held = register(pool, chain(1))
    if stop == "close":
        manager.close()
    elif stop == "with":
        with manager:
            pass
    else:
        manager.config.runtime.cancellation_token.cancel()
    assert manager.is_closed
    with pytest.raises(ProgressEngineShutdown) as error:
        REQUESTS[request_name](pool)
    assert str(error.value) == (
        f"Progress engine shutdown: {request_name} on the device pool of worker 1337, whose manager was closed or its "
        "cancellation token cancelled"
    )
    held.close()  # without effect
    manager.close()  # also without effect


@pytest.mark.parametrize("is_child", [False, True])
def test_a_manager_cannot_be_created_with_a_cancelled_token(is_child):
    token = CancellationToken()
    config = make_manager(cancellation_token=token.child_token() if is_child else token).config
    token.cancel()
    fabric = Fabric()
    with pytest.raises(ValueError) as error:
        KvBlockManager(config, fabric=fabric)
    assert str(error.value) == (
        "KvBlockManager: the cancellation token of the configuration of worker 1337 is cancelled already, so the "
        "manager would be closed; take a configuration with a new CancellationToken()"
    )
    assert fabric.workers == []


def test_managers_that_share_a_token_are_closed_together():
    # As in 0.2.1, whose manager owns the token of its configuration, and cancels it when it is dropped.
    first = make_manager(1)
    token = first.config.runtime.cancellation_token
    second, third = make_manager(2, cancellation_token=token), make_manager(3)
    first.close()
    assert (second.is_closed, third.is_closed) == (True, False)
    assert third.device().allocate_blocks_blocking(1)


def test_a_block_index_out_of_range_is_refused():
    pool = make_pool(2)
    with pytest.raises(IndexError) as error:
        pool.block(2)
    assert str(error.value) == "block index out of bounds: 2; the device pool of worker 1337 has blocks 0 to 1"
    assert pool.block(1).index == 1


def test_the_reprs_of_a_manager_and_its_pools_show_their_sizes():
    manager = make_manager()
    assert repr(manager) == "<KvBlockManager of worker 1337: host 16 blocks, device 8 blocks>"
    assert repr(manager.host()).startswith("<TierPool host of worker 1337: PoolCounts(total=16, free=16, ")
    manager.close()
    assert repr(manager) == "<KvBlockManager of worker 1337: host 16 blocks, device 8 blocks, closed>"
    assert repr(make_manager(1, device=None, host=None)) == "<KvBlockManager of worker 1: no pools>"


@pytest.mark.parametrize(
    ("device", "host", "sets"),
    [(8, 16, [("host", 1), ("device", 2)]), (8, None, [("device", 1)]), (None, 16, [("host", 1)]), (None, None, [])],
)
def test_a_manager_has_a_pool_for_each_layout(device, host, sets):
    manager = make_manager(device=device, host=host)
    assert sets == [(pool.block_set.name, pool.block_set.block_set_idx) for pool in manager.pools]
    assert device == (manager.device() and manager.device().total_blocks)
    assert host == (manager.host() and manager.host().total_blocks)
    assert isinstance(manager, KvBlockManager)


def test_touching_waits_for_a_block_that_is_being_returned():
    pool = make_pool(3)
    contents = [TokenBlock([number] * 4) for number in range(3)]
    register(pool, contents).close()
    pool.touch_blocks_blocking([contents[1].sequence_hash])
    assert PoolCounts(3, 0, 2, 0, 1) == pool.counts
    pool.flush()
    assert evicted_in_order(pool, contents) == [0, 1, 2]


@pytest.mark.parametrize("request_name", ["match_sequence_hashes", "touch_blocks"])
@pytest.mark.parametrize("wrong", [chain(1)[0], "5", 5.5, True, -1, 2**64, [5], None], ids=repr)
def test_an_invalid_sequence_hash_is_refused_and_not_treated_as_a_miss(request_name, wrong):
    pool = make_pool(4)
    contents = chain(3)
    cache(pool, contents)
    pool.match_sequence_hashes_blocking(hashes(contents[:1])).close()  # it is returning, and must stay so
    before = pool.counts, [pool.block(index).returned_tick for index in range(4)]
    with pytest.raises(ValueError) as error:
        getattr(pool, f"{request_name}_blocking")([*hashes(contents[:2]), wrong])
    message = f"{request_name}: sequence_hashes[2] must be an integer from 0 to 18446744073709551615 (u64), got "
    assert message + repr(wrong)[:80] == str(error.value)
    assert before == (pool.counts, [pool.block(index).returned_tick for index in range(4)])


def test_hashes_behind_the_matched_run_are_not_checked():
    pool = make_pool(4)
    cache(pool, chain(1))
    assert indices(pool.match_sequence_hashes_blocking([*hashes(chain(1)), 5, "x"])) == [0]


@pytest.mark.parametrize("moment", range(8))
def test_a_handle_collected_during_a_flush_does_not_lose_its_block(moment):
    """The garbage collector drops handles of reference cycles at any moment, also within `flush()`."""
    pool = make_pool(4)
    dropped = [pool.allocate_blocks_blocking(2)]
    pool.allocate_blocks_blocking(2).close()
    lines = 0

    def trace(frame, kind, _):
        nonlocal lines
        if frame.f_code is not TierPool.flush.__code__:
            return None
        if kind == "line":
            if lines == moment:
                dropped.clear()
            lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        pool.flush()
    finally:
        sys.settrace(before)
    dropped.clear()
    pool.flush()
    assert PoolCounts(total=4, free=4, inactive=0, active=0, returning=0) == pool.counts
