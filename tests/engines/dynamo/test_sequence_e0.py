"""ActiveSequence with the moves of 1.0.2 (reference: the tests of that version's `sequence.rs`)."""

import random
from uuid import UUID

import pytest

from pytest_kvmock import Prompt, block_hashes, sequence_hashes
from pytest_kvmock.engines.dynamo.sequence import ActiveSequence
from pytest_kvmock.values import Deref, Destroy, Promote, Use


def new(tokens, max_output=100, block_size=4, **fields):
    return ActiveSequence(tokens, max_output, block_size, moves="whole", **fields)


def filled(tokens=range(6), **fields):
    """Return a sequence of 6 + 2 tokens whose last block is full but not promoted."""
    sequence = new(tokens, **fields)
    sequence.take_creation_signal()
    assert [sequence.push(6), sequence.push(7)] == [[], []]
    return sequence


def test_the_creation_signal_is_one_use_of_all_blocks_and_local_hashes():
    sequence, use = ActiveSequence.new_with_signal(range(10), 5, 4, moves="whole")
    assert Use(sequence.unique_blocks, block_hashes(range(8), 4)) == use
    assert (len(use.blocks), sequence.num_allocated_tokens) == (3, 10)
    assert isinstance(use.blocks[2], UUID)
    assert sequence.take_creation_signal() is None


def test_a_prompt_shorter_than_a_block_is_one_partial_block():
    _, use = ActiveSequence.new_with_signal(range(15), 100, 16, moves="whole")
    assert (use.local_hashes, len(use.blocks), isinstance(use.blocks[0], UUID)) == ([], 1, True)


def test_a_use_is_unchanged_when_its_sequence_grows():
    sequence = new(range(4))
    use = sequence.take_creation_signal()
    sequence.push(1)
    assert 1 == len(use.blocks) == len(use.local_hashes)


def test_a_block_is_promoted_by_the_first_token_of_the_next():
    sequence = filled()
    first, partial = sequence.unique_blocks
    promote, use = sequence.push(8)
    second = sequence_hashes(block_hashes(range(8), 4))[1]
    assert (partial, second, first) == (promote.partial, promote.block, promote.parent)
    assert block_hashes(range(8), 4)[1] == promote.local_hash
    assert [first, second, use.blocks[0]] == sequence.unique_blocks


def test_a_free_signal_frees_all_blocks_tail_first_and_destroys_a_partial_one():
    sequence = filled()
    first, partial = sequence.unique_blocks
    assert [Destroy([partial]), Deref([first])] == sequence.free_signal()
    assert [first, partial] == sequence.allocated_blocks
    assert [Deref([block]) for block in new(range(8)).unique_blocks[::-1]] == new(range(8)).free_signal()


def test_a_reset_frees_all_blocks_and_prepares_the_next_creation_signal():
    sequence = filled()
    sequence.push(8)
    blocks = sequence.unique_blocks.copy()
    assert [Destroy(blocks[2:]), Deref(blocks[1:2]), Deref(blocks[:1])] == sequence.reset_with_signal()
    assert (
        sequence.num_allocated_tokens,
        sequence.allocated_blocks,
        sequence.generated_tokens,
        len(sequence),
    ) == (0, [], 3, 9)
    assert Use(blocks, block_hashes(range(8), 4)) == sequence.take_creation_signal()
    assert sequence.take_creation_signal() is None


def test_after_a_reset_a_full_unpromoted_last_block_adds_an_extra_local_hash():
    sequence = filled(emit_token_ids=True)
    sequence.reset_with_signal()
    use = sequence.take_creation_signal()
    assert (len(use.blocks), isinstance(use.blocks[1], UUID)) == (2, True)
    assert block_hashes(range(8), 4) == use.local_hashes
    assert use.token_ids == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert len(sequence.block_hashes) == 1
    promote, _ = sequence.push(8)
    assert use.local_hashes[1] == promote.local_hash


def test_after_a_reset_unknown_tokens_add_an_extra_random_local_hash():
    sequence = filled(Prompt(hashes=[11], num_tokens=6), rng=random.Random(1))
    sequence.reset_with_signal()
    use = sequence.take_creation_signal()
    assert (len(use.local_hashes), use.local_hashes[0], use.token_ids) == (2, 11, None)


def test_after_a_reset_a_promoted_block_adds_no_extra_local_hash():
    sequence = filled()
    sequence.push(8)
    sequence.pop()
    sequence.reset_with_signal()
    use = sequence.take_creation_signal()
    assert sequence_hashes(block_hashes(range(8), 4)) == use.blocks
    assert len(use.local_hashes) == 2


def test_the_last_generated_token_frees_all_blocks():
    sequence, _ = ActiveSequence.new_with_signal(range(14), 5, 16, moves="whole")
    assert [sequence.generate(), sequence.generate()] == [[], []]
    assert [Promote, Use] == [type(move) for move in sequence.generate()]
    assert sequence.generate() == []
    full, partial = sequence.unique_blocks
    assert [Destroy([partial]), Deref([full])] == sequence.generate()


def test_without_prefix_caching_block_names_are_random_and_stable():
    sequence = new(range(8), enable_prefix_caching=False)
    use = sequence.take_creation_signal()
    sequence.reset_with_signal()
    assert use == sequence.take_creation_signal()
    assert not set(use.blocks) & set(sequence_hashes(block_hashes(range(8), 4)))


@pytest.mark.parametrize("call", ["prepare_allocation", "allocate_blocks_for_chunk"])
def test_chunked_allocation_is_refused_with_moves_whole(call):
    sequence = new(range(8))
    with pytest.raises(ValueError, match='moves="whole" has no chunks'):
        getattr(sequence, call)(4)
    assert len(sequence.take_creation_signal().blocks) == 2


def test_an_unknown_kind_of_moves_is_refused():
    with pytest.raises(ValueError, match="unknown moves 'e0'; known: chunks, whole"):
        ActiveSequence([1], 5, 4, moves="e0")
