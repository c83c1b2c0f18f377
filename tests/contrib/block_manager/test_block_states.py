"""The four states of a block, their transitions, and the contents of a block in each."""

import copy
import gc
import pickle
import struct

import pytest
from block_helpers import BLOCK_BYTES, chain, fill, make_manager, make_pool, register
from xxhash import xxh3_64_intdigest

from pytest_kvmock import block_hashes, sequence_hashes
from pytest_kvmock.contrib.block_manager import (
    BlockClosed,
    BlockDescriptorList,
    BlockState,
    BlockStateInvalid,
    PayloadTooLarge,
    TokenBlock,
    TokenBlockError,
    TransferRequestGet,
    TransferRequestPut,
    as_block_descriptor_set,
    token_blocks,
)

CONTENT = TokenBlock([1, 2, 3, 4])
STEPS = {
    "initialize_sequence": lambda block: block.initialize_sequence(),
    "apply_token_block": lambda block: block.apply_token_block(CONTENT),
    "add_token": lambda block: block.add_token(1),
    "add_tokens": lambda block: block.add_tokens([1, 2]),
    "pop_token": lambda block: block.pop_token(),
    "pop_tokens": lambda block: block.pop_tokens(1),
    "commit": lambda block: block.commit(),
    "reset": lambda block: block.reset(),
    "sequence_hash": lambda block: block.sequence_hash,
}
PARTIAL_STEPS = {"add_token", "add_tokens", "pop_token", "pop_tokens", "commit"}
ALLOWED = {
    BlockState.RESET: {"initialize_sequence", "apply_token_block", "reset"},
    BlockState.PARTIAL: PARTIAL_STEPS | {"reset"},
    BlockState.COMPLETE: {"reset", "sequence_hash"},
}


def block_in(state):
    (block,) = make_pool(1).allocate_blocks_blocking(1)
    if state is BlockState.PARTIAL:
        block.initialize_sequence()
        block.add_tokens([1, 2, 3])
    elif state is BlockState.COMPLETE:
        block.apply_token_block(CONTENT)
    return block


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("state", ALLOWED)
def test_each_step_is_allowed_only_in_its_block_states(state, step):
    block = block_in(state)
    tokens = block.tokens
    if step == "commit" and state is BlockState.PARTIAL:
        block.add_token(4)
    if step in ALLOWED[state]:
        STEPS[step](block)
        return
    with pytest.raises(BlockStateInvalid) as error:
        STEPS[step](block)
    why = {
        "initialize_sequence": "Block state is invalid: Block is not reset",
        "apply_token_block": "Block state is invalid: Block is not reset",
        "sequence_hash": "Invalid state: Block is not complete",
    }
    message = why.get(step, "Block state is invalid: Block is not partial")
    assert str(error.value) == f"{message}: {step} on block 0 of the device pool of worker 1337, which is {state}"
    assert (state, tokens) == (block.state, block.tokens)


def test_a_root_block_is_filled_token_by_token():
    (block,) = make_pool(1).allocate_blocks_blocking(1)
    seen = [(block.state, len(block), block.remaining, block.is_empty, block.is_full, block.tokens)]
    block.initialize_sequence(1337)
    seen.append((block.state, len(block), block.remaining, block.is_empty, block.is_full, block.tokens))
    block.add_token(1)
    assert block.add_tokens([2, 3]) == []
    seen.append((block.state, len(block), block.remaining, block.is_empty, block.is_full, block.tokens))
    block.add_token(4)
    block.commit()
    seen.append((block.state, len(block), block.remaining, block.is_empty, block.is_full, block.tokens))
    assert seen == [
        ("Reset", 0, 0, True, False, None),
        ("Partial", 0, 4, True, False, ()),
        ("Partial", 3, 1, False, False, (1, 2, 3)),
        ("Complete", 4, 0, False, True, (1, 2, 3, 4)),
    ]
    # The value in the tests of dynamo-llm 0.2.1.
    assert block.sequence_hash == 14643705804678351452


def test_a_registered_block_keeps_its_hash_but_not_its_tokens():
    pool = make_pool(1)
    (block,) = register(pool, [CONTENT])
    assert (block.state, block.sequence_hash) == ("Registered", 14643705804678351452)
    assert (len(block), block.remaining, block.tokens, block.is_empty, block.is_full) == (4, 0, None, False, True)


def test_tokens_beyond_a_full_block_are_returned():
    (block,) = make_pool(1).allocate_blocks_blocking(1)
    block.initialize_sequence()
    assert block.add_tokens([1, 2, 3, 4, 5, 6]) == [5, 6]
    assert block.add_tokens([7]) == [7]
    with pytest.raises(TokenBlockError, match=r"^TokenBlock is full: block 0 of the device pool of worker 1337 has 4 "):
        block.add_token(5)
    assert block.tokens == (1, 2, 3, 4)


def test_popping_removes_the_last_tokens():
    block = block_in(BlockState.PARTIAL)
    block.pop_token()
    assert block.tokens == (1, 2)
    with pytest.raises(TokenBlockError, match=r"^TokenBlock has insufficient tokens: 3 are to be popped, .* has 2$"):
        block.pop_tokens(3)
    block.pop_tokens(0)
    assert block.tokens == (1, 2)
    block.pop_tokens(2)
    with pytest.raises(TokenBlockError, match=r"^TokenBlock is empty: "):
        block.pop_token()
    assert block.tokens == ()


def test_an_incomplete_block_cannot_be_committed():
    block = block_in(BlockState.PARTIAL)
    with pytest.raises(
        TokenBlockError,
        match=r"^TokenBlock is incomplete: block 0 of the device pool of worker 1337 has 3 of 4 tokens$",
    ):
        block.commit()
    assert (block.state, block.tokens) == ("Partial", (1, 2, 3))


@pytest.mark.parametrize("state", ALLOWED)
def test_reset_clears_the_content_of_a_block_and_keeps_its_handle_open(state):
    block = block_in(state)
    block.payload = b"x"
    block.metadata.priority = 3
    block.reset()
    assert (block.state, block.tokens, block.payload, block.metadata.priority) == ("Reset", None, b"", 0)
    assert block.is_open


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 2, 3, 4, 5]])
def test_a_token_block_of_another_size_is_refused(tokens):
    block = block_in(BlockState.RESET)
    with pytest.raises(
        BlockStateInvalid, match=rf"TokenBlock size \({len(tokens)}\) does not match Block page size \(4\)"
    ):
        block.apply_token_block(TokenBlock(tokens))
    assert block.state == "Reset"


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (lambda block: block.add_token(-1), ValueError, "token 0 is -1: a token id is an integer from 0 to 4294967295"),
        (lambda block: block.add_tokens([1, 2**32]), ValueError, "token 1 is 4294967296: "),
        (lambda block: block.add_tokens([1, "2"]), TypeError, "token 1 is '2' (str): "),
        (lambda block: block.pop_tokens(-1), ValueError, "pop_tokens: count must be an integer of at least 0, got -1"),
    ],
)
def test_an_invalid_token_is_refused_and_changes_nothing(step, error, message):
    block = block_in(BlockState.PARTIAL)
    with pytest.raises(error) as caught:
        step(block)
    assert str(caught.value).startswith(message)
    assert block.tokens == (1, 2, 3)


@pytest.mark.parametrize("salt", [-1, 2**64, None, "salt"])
def test_a_salt_must_be_a_u64(salt):
    block = block_in(BlockState.RESET)
    with pytest.raises(ValueError, match=r"^salt_hash must be an integer from 0 to 18446744073709551615 \(u64\), got "):
        block.initialize_sequence(salt)
    assert block.state == "Reset"


def test_apply_token_block_accepts_only_a_token_block():
    block = block_in(BlockState.RESET)
    with pytest.raises(TypeError, match=r"^apply_token_block takes a TokenBlock, got \[1, 2, 3, 4\]$"):
        block.apply_token_block([1, 2, 3, 4])


# ------------------------------------------------------------------------------------------------- token blocks


def test_token_blocks_have_the_block_and_sequence_hashes_of_routers():
    tokens = list(range(1, 19))
    blocks = token_blocks(tokens, 4)
    local = block_hashes(tokens, 4)
    assert [local, sequence_hashes(local)] == [
        [block.block_hash for block in blocks],
        [block.sequence_hash for block in blocks],
    ]
    assert [None, *(block.sequence_hash for block in blocks[:-1])] == [block.parent_sequence_hash for block in blocks]
    # The values in the tests of dynamo-llm 0.2.1.
    assert [block.sequence_hash for block in blocks[:2]] == [14643705804678351452, 4945711292740353085]


def test_a_different_salt_changes_every_hash_of_the_chain():
    one, other = token_blocks(range(8), 4), token_blocks(range(8), 4, salt_hash=0)
    assert {block.sequence_hash for block in one}.isdisjoint(block.sequence_hash for block in other)
    assert {block.block_hash for block in one}.isdisjoint(block.block_hash for block in other)


def test_the_salt_seeds_both_block_and_sequence_hashes():
    first, second = token_blocks(range(8), 4, salt_hash=5)
    assert first.sequence_hash == first.block_hash == xxh3_64_intdigest(struct.pack("<4I", 0, 1, 2, 3), 5)
    assert second.block_hash == xxh3_64_intdigest(struct.pack("<4I", 4, 5, 6, 7), 5)
    assert second.sequence_hash == xxh3_64_intdigest(struct.pack("<2Q", first.sequence_hash, second.block_hash), 5)


@pytest.mark.parametrize("parent", [-1, 2**64, "parent"])
def test_a_parent_must_be_a_u64(parent):
    with pytest.raises(ValueError, match=r"^parent_sequence_hash must be an integer from 0 to 18446744073709551615 "):
        TokenBlock([1, 2, 3, 4], parent_sequence_hash=parent)


@pytest.mark.parametrize("tokens", [(), (1, 2, 3), (1, 2, 3, 4)])
@pytest.mark.parametrize("argument", ["salt_hash", "parent_sequence_hash"])
def test_salt_and_parent_must_be_u64_for_prompts_of_any_length(tokens, argument):
    for wrong in (-1, 2**64, "5", True):
        with pytest.raises(ValueError, match=f"^{argument} must be an integer from 0 to 18446744073709551615 "):
            token_blocks(tokens, 4, **{argument: wrong})


def test_next_block_equals_the_next_block_of_a_sequence():
    first, second = token_blocks(range(8), 4, salt_hash=5)
    assert second == first.next_block(range(4, 8)) != TokenBlock(range(4, 8), 5)
    assert hash(second) == hash(first.next_block(range(4, 8)))
    assert [second] == token_blocks(range(4, 8), 4, 5, first.sequence_hash)


def test_a_token_block_needs_at_least_one_token():
    with pytest.raises(ValueError, match=r"^a TokenBlock has at least 1 token, got none$"):
        TokenBlock([])
    assert token_blocks([], 4) == []


# ------------------------------------------------------------------------------------------ payload and metadata


def test_a_payload_stays_with_its_block_until_the_pool_resets_it():
    pool = make_pool(1)
    (block,) = fill(pool, [CONTENT])
    assert block.payload == b""
    block.payload = bytearray(b"keys and values")
    (shared,) = pool.register_blocks_blocking([block])
    shared.close()
    pool.flush()
    (shared,) = pool.match_sequence_hashes_blocking([CONTENT.sequence_hash])
    assert shared.payload == b"keys and values"
    with pytest.raises(AttributeError):
        shared.payload = b"other"
    shared.close()
    pool.flush()
    (block,) = pool.allocate_blocks_blocking(1)
    assert block.payload == b""


def test_a_payload_larger_than_its_block_is_refused():
    block = block_in(BlockState.RESET)
    assert block.block_bytes == BLOCK_BYTES
    block.payload = bytes(BLOCK_BYTES)
    with pytest.raises(PayloadTooLarge) as error:
        block.payload = bytes(BLOCK_BYTES + 1)
    assert (error.value.size, error.value.block_bytes) == (385, 384)
    assert (
        str(error.value)
        == "a payload of 385 bytes is larger than block 0 of the device pool of worker 1337, which has room for 384 "
        "bytes"
    )
    assert bytes(BLOCK_BYTES) == block.payload


@pytest.mark.parametrize("payload", ["text", 5, None, [1]])
def test_a_payload_must_be_bytes(payload):
    block = block_in(BlockState.RESET)
    with pytest.raises(TypeError, match=r"^a payload is bytes, got "):
        block.payload = payload
    assert block.payload == b""


@pytest.mark.parametrize("priority", [-1, 2**32, 1.5, None])
def test_a_priority_must_be_a_u32(priority):
    block = block_in(BlockState.RESET)
    with pytest.raises(ValueError, match=r"^priority must be an integer from 0 to 4294967295 \(u32\), got "):
        block.metadata.priority = priority
    assert block.metadata.priority == 0


def test_ticks_count_the_allocations_and_returns_of_a_pool():
    pool = make_pool(2)
    one, two = pool.allocate_blocks_blocking(2)
    assert [(each.metadata.acquired_tick, each.metadata.returned_tick) for each in (one, two)] == [(1, 0), (2, 0)]
    two.close()
    pool.flush()
    (two,) = pool.allocate_blocks_blocking(1)
    assert repr(two.metadata) == "BasicMetadata(priority=0, returned_tick=3, acquired_tick=4)"


# ----------------------------------------------------------------------------------------------------- handles


def test_a_handle_describes_its_block():
    _, block = make_pool(2).allocate_blocks_blocking(2)
    assert (
        block.worker_id,
        block.block_set_idx,
        block.block_idx,
        block.num_layers,
        block.page_size,
        block.inner_dim,
    ) == (1337, 1, 1, 3, 4, 16)
    assert repr(block) == "<MutableBlock: block 1 of the device pool of worker 1337, Reset>"
    assert block
    assert len(block) == 0
    block.close()
    assert repr(block) == "<MutableBlock: closed>"


USES = {
    **STEPS,
    **{
        name: lambda block, name=name: getattr(block, name)
        for name in ("state", "tokens", "payload", "remaining", "block_idx", "page_size", "is_full", "worker_id")
    },
    "priority": lambda block: block.metadata.priority,
    "len": len,
    "close": lambda block: block.close(),
    "with": lambda block: block.__enter__(),
}


@pytest.mark.parametrize("use", USES)
def test_a_closed_handle_refuses_every_use(use):
    pool = make_pool(1)
    (block,) = pool.allocate_blocks_blocking(1)
    block.close()
    with pytest.raises(BlockClosed, match=r"^this MutableBlock holds no block any more: it was closed, or given to"):
        USES[use](block)
    assert (block.is_open, pool.flush()) == (False, 1)


def test_a_handle_of_a_registered_block_refuses_every_use():
    pool = make_pool(1)
    (block,) = fill(pool, [CONTENT])
    held = pool.register_blocks_blocking([block])
    with pytest.raises(BlockClosed):
        block.close()
    held.close()
    with pytest.raises(BlockClosed, match=r"^this ImmutableBlock holds no block any more"):
        held[0].sequence_hash  # noqa: B018 - it raises
    with pytest.raises(BlockClosed):
        held.close()
    with pytest.raises(BlockClosed):
        held[0].close()
    with pytest.raises(BlockClosed):
        held[0].clone()
    assert pool.flush() == 1


def test_a_with_block_returns_its_block_once():
    pool = make_pool(2)
    with pool.allocate_blocks_blocking(1)[0] as block:
        assert pool.counts.active == 1
    assert not block.is_open
    with pool.allocate_blocks_blocking(1)[0] as block:
        block.close()
    assert (pool.flush(), pool.available_blocks) == (2, 2)


def test_a_with_block_over_a_list_returns_its_open_blocks_in_order():
    pool = make_pool(3)
    with pool.allocate_blocks_blocking(3) as blocks:
        blocks[1].close()
    pool.flush()
    assert [block.block_idx for block in pool.allocate_blocks_blocking(3)] == [1, 0, 2]


def test_split_off_splits_a_list_of_blocks():
    pool = make_pool(3)
    blocks = pool.allocate_blocks_blocking(3)
    rest = blocks.split_off(1)
    assert ([block.block_idx for block in blocks], [block.block_idx for block in rest]) == ([0], [1, 2])
    assert type(blocks) is type(rest)
    for at in (-1, 2):
        with pytest.raises(IndexError, match=f"^split_off at {at} of a list of 1 blocks; 0 to 1 is allowed$"):
            blocks.split_off(at)


@pytest.mark.parametrize("kind", ["mutable", "immutable"])
def test_a_slice_of_a_block_list_is_a_plain_list_of_the_same_handles(kind):
    pool = make_pool(3)
    blocks = pool.allocate_blocks_blocking(3) if kind == "mutable" else register(pool, chain(3))
    part = blocks[:2]
    assert (list, True) == (type(part), part[0] is blocks[0])
    for plain in (blocks + part, blocks * 2, blocks.copy()):
        assert list is type(plain)
    with pytest.raises(TypeError), part:  # it owns no blocks, so it cannot be closed at the end
        pass
    del part, plain
    assert (pool.flush(), pool.counts.active) == (0, 3)
    blocks.split_off(2).close()
    assert (pool.flush(), pool.counts.active) == (1, 2)
    blocks.close()
    assert pool.flush() == 2


def test_closing_a_list_closes_all_handles_or_none():
    pool = make_pool(2)
    blocks = pool.allocate_blocks_blocking(2)
    blocks.append(blocks[0])
    with pytest.raises(BlockClosed, match=r"^a handle is in the list twice; none was closed$"):
        blocks.close()
    assert (pool.counts.active, pool.flush()) == (2, 0)
    blocks.pop().close()
    with pytest.raises(BlockClosed):
        blocks.close()
    assert pool.counts.active == 1


def test_a_garbage_collected_handle_returns_its_block():
    pool = make_pool(2)
    blocks = pool.allocate_blocks_blocking(2)
    shared = pool.register_blocks_blocking([*fill_one(blocks.pop())])
    del blocks, shared
    gc.collect()
    assert pool.flush() == 2
    assert (pool.counts.free, pool.counts.inactive) == (1, 1)


def fill_one(block):
    block.apply_token_block(CONTENT)
    yield block


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_handle_cannot_be_copied(duplicate):
    pool = make_pool(2)
    (block,), (shared,) = pool.allocate_blocks_blocking(1), register(pool, [CONTENT])
    for handle in (block, shared):
        with pytest.raises(TypeError, match=r"owns its block and cannot be copied or pickled"):
            duplicate(handle)
    assert pool.counts.active == 2


def test_a_clone_is_an_additional_owner_of_the_block():
    pool = make_pool(1)
    (first,) = register(pool, chain(1))
    second = first.clone()
    first.close()
    assert (pool.flush(), pool.counts.active) == (0, 1)
    second.close()
    assert (pool.flush(), pool.counts.active) == (1, 0)


def test_the_generation_of_a_block_increases_when_it_loses_its_content():
    pool = make_pool(1)
    block = pool.block(0)
    generations = []

    def note():
        generations.append(block.generation)

    with pool.allocate_blocks_blocking(1) as (handle,):
        handle.apply_token_block(CONTENT)
        handle.reset()  # the owner may reset it
        note()
    note()  # returned unregistered
    pool.flush()
    register(pool, [CONTENT]).close()
    pool.flush()
    pool.match_sequence_hashes_blocking([CONTENT.sequence_hash]).close()
    pool.flush()
    note()  # still the registered contents
    with pool.allocate_blocks_blocking(1):
        note()  # evicted
    pool.flush()
    pair = make_pool(2)
    held = register(pair, [CONTENT, CONTENT])  # the second copy is returned
    generations += [pair.block(0).generation, pair.block(1).generation]
    held.close()
    assert generations == [0, 1, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("use", "takes"),
    [
        (
            lambda pool, block: pool.register_blocks_blocking(block),
            "register_blocks takes an iterable of mutable blocks",
        ),
        (
            lambda pool, _: pool.match_sequence_hashes_blocking(5),
            "match_sequence_hashes takes an iterable of sequence hashes",
        ),
        (lambda pool, _: pool.touch_blocks_blocking(5), "touch_blocks takes an iterable of sequence hashes"),
        (lambda pool, block: block.add_tokens(5), "add_tokens takes an iterable of token ids"),
        (lambda pool, block: TokenBlock(5), "TokenBlock takes an iterable of token ids"),
        (lambda pool, block: TransferRequestPut(block, [block]), "TransferRequestPut takes an iterable of sources"),
        (
            lambda pool, block: TransferRequestPut([block], block),
            "TransferRequestPut takes an iterable of destinations",
        ),
        (lambda pool, block: TransferRequestGet(block, [block]), "TransferRequestGet takes an iterable of sources"),
        (lambda pool, block: TransferRequestGet([], block), "TransferRequestGet takes an iterable of destinations"),
        (lambda pool, block: as_block_descriptor_set(block), "as_block_descriptor_set takes an iterable of blocks"),
        (
            lambda pool, block: BlockDescriptorList.from_mutable_blocks(block),
            "from_mutable_blocks takes an iterable of mutable blocks",
        ),
        (
            lambda pool, block: BlockDescriptorList.from_immutable_blocks(block),
            "from_immutable_blocks takes an iterable of immutable blocks",
        ),
    ],
)
def test_a_single_block_in_place_of_a_list_is_refused(use, takes):
    pool = make_pool(1)
    (block,) = pool.allocate_blocks_blocking(1)
    block.initialize_sequence()
    with pytest.raises(TypeError) as error:
        use(pool, block)
    assert str(error.value) in (f"{takes}, got {block!r:.80}", f"{takes}, got 5")
    assert (block.state, len(block), pool.counts.active) == (BlockState.PARTIAL, 0, 1)


def test_onboard_refuses_a_single_block_instead_of_an_iterable():
    manager = make_manager()
    (block,) = register(manager.host(), [CONTENT])
    with pytest.raises(TypeError, match=r"^onboard takes an iterable of immutable blocks of the host pool, got <Immu"):
        manager.onboard(block)
