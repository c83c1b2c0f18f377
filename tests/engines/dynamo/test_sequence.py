"""ActiveSequence: the moves of one request (reference: the tests of Dynamo's `sequence.rs`)."""

import random
from random import Random
from uuid import UUID

import pytest

from pytest_kvmock import Prompt, block_hashes, sequence_hashes
from pytest_kvmock.engines.dynamo.sequence import ActiveSequence
from pytest_kvmock.values import Deref, Promote, Use, lineage_hash, lineage_hashes
from pytest_kvmock.values.tokens import TokenRuns


def is_partial_use(move):
    return isinstance(move, Use) and len(move.blocks) == 1 and isinstance(move.blocks[0], UUID)


def kinds(moves):
    return [type(move) for move in moves]


def test_a_prompt_shorter_than_a_block_is_one_partial_block():
    sequence, use = ActiveSequence.new_with_signal(range(15), 100, 16)
    assert (sequence.num_input_tokens, len(sequence), sequence.num_allocated_tokens) == (15, 15, 15)
    assert is_partial_use(use)
    assert (list(use.local_hashes), list(use.plhs), use.token_ids, use.parent) == ([], [], None, None)


def test_a_prompt_of_whole_blocks_has_no_partial_block():
    sequence = ActiveSequence(range(32), 100, 16)
    assert sequence_hashes(block_hashes(range(32), 16)) == sequence.unique_blocks


def test_a_block_is_promoted_by_the_first_token_of_the_next():
    sequence, use = ActiveSequence.new_with_signal(range(15), 100, 16)
    assert sequence.push(15) == []
    promote, new = sequence.push(16)
    local = block_hashes(range(16), 16)[0]
    assert Promote(use.blocks[0], local, None, local, lineage_hash(local, None, 0)) == promote
    assert is_partial_use(new)
    assert [local, new.blocks[0]] == sequence.unique_blocks


def test_after_whole_blocks_the_first_token_only_opens_a_new_one():
    sequence = ActiveSequence(range(16), 100, 16)
    (use,) = sequence.push(16)
    assert is_partial_use(use)
    assert use.blocks[0] == sequence.unique_blocks[1]


def test_sequences_with_the_same_tokens_share_full_blocks_but_not_partial_ones():
    one = ActiveSequence(range(15), 100, 16)
    one.push(15)
    one.push(16)
    two = ActiveSequence(range(16), 100, 16)
    two.push(16)
    two.pop()
    two.push(16)
    assert one.unique_blocks[0] == two.unique_blocks[0]
    assert one.unique_blocks[1] != two.unique_blocks[1]


def test_a_promotion_names_the_full_block_before_it():
    sequence = ActiveSequence(range(15), 100, 16)
    for token in (15, 16, 17):
        sequence.push(token)
    sequence.pop()
    sequence.pop()
    sequence.push(16)
    for token in range(17, 32):
        assert sequence.push(token) == []
    promote, _ = sequence.push(32)
    local = block_hashes(range(32), 16)
    names = sequence_hashes(local)
    plhs = lineage_hashes(names)
    assert sequence.unique_blocks[0] == promote.parent
    assert (names[1], local[1], plhs[1]) == (promote.block, promote.local_hash, promote.plh)
    assert (plhs, local) == (sequence.positional_lineage_hashes, sequence.block_hashes)


def test_a_reset_frees_the_blocks_and_keeps_the_tokens():
    sequence, _ = ActiveSequence.new_with_signal(range(15), 100, 16)
    sequence.push(15)
    sequence.push(16)
    sequence.commit_allocation(len(sequence))
    full, partial = sequence.unique_blocks
    assert [Deref([partial]), Deref([full])] == sequence.reset_with_signal()
    assert (sequence.num_allocated_tokens, sequence.generated_tokens, len(sequence)) == (0, 2, 17)
    assert sequence.free_signal() == []


def test_the_last_generated_token_frees_all_blocks():
    sequence, _ = ActiveSequence.new_with_signal(range(14), 5, 16)
    assert [sequence.generate(), sequence.generate()] == [[], []]
    assert [Promote, Use] == kinds(sequence.generate())
    assert sequence.generate() == []
    full, partial = sequence.unique_blocks
    assert [Deref([partial]), Deref([full])] == sequence.generate()
    with pytest.raises(ValueError, match="all 5 output tokens were generated"):
        sequence.generate()


def test_the_frees_come_after_the_moves_of_the_last_token():
    sequence = ActiveSequence(range(15), 2, 16)
    sequence.generate()
    assert [Promote, Use, Deref, Deref] == kinds(sequence.generate())


def test_a_block_that_the_last_token_fills_is_freed_as_partial():
    sequence = ActiveSequence(range(15), 1, 16)
    (free,) = sequence.generate()
    assert isinstance(free.blocks[0], UUID)


def test_prepare_slices_full_and_partial_blocks():
    sequence = ActiveSequence(range(10), 4, 4)
    blocks, hashes, plhs = sequence.unique_blocks, sequence.block_hashes, sequence.positional_lineage_hashes
    assert Use(blocks[:1], hashes[:1], plhs[:1]) == sequence.prepare_allocation(4)
    assert Use(blocks[:2], hashes[:2], plhs[:2]) == sequence.prepare_allocation(8)
    assert Use(blocks[:3], hashes[:2], plhs[:2]) == sequence.prepare_allocation(10)


def test_prepare_is_stable_until_the_commit():
    sequence = ActiveSequence(range(10), 4, 4)
    assert sequence.prepare_allocation(4) == sequence.prepare_allocation(4)
    sequence.commit_allocation(4)
    use = sequence.prepare_allocation(10)
    assert sequence.unique_blocks[1:] == use.blocks
    assert (sequence.block_hashes[1:], sequence.unique_blocks[0]) == (use.local_hashes, use.parent)


def test_prepare_returns_none_if_all_blocks_are_allocated():
    sequence = ActiveSequence(range(10), 4, 4)
    assert sequence.prepare_allocation(0) is None
    assert len(sequence.take_creation_signal().blocks) == 3
    assert sequence.num_allocated_tokens == 10
    assert sequence.take_creation_signal() is None
    assert sequence.prepare_allocation(100) is None


def test_frees_cover_exactly_the_allocated_blocks():
    sequence = ActiveSequence(range(10), 4, 4)
    sequence.allocate_blocks_for_chunk(5)
    assert [Deref([block]) for block in sequence.unique_blocks[1::-1]] == sequence.free_signal()


def test_pop_undoes_the_new_partial_block_but_not_the_promotion():
    sequence = ActiveSequence(range(15), 100, 16)
    sequence.push(15)
    sequence.push(16)
    sequence.pop()
    assert (len(sequence), sequence.generated_tokens) == (16, 1)
    assert sequence_hashes(block_hashes(range(16), 16)) == sequence.unique_blocks
    assert 1 == len(sequence.block_hashes) == len(sequence.positional_lineage_hashes)
    assert is_partial_use(sequence.push(99)[0])


def test_pop_undoes_only_the_last_push():
    sequence = ActiveSequence(range(15), 100, 16)
    with pytest.raises(ValueError, match="there is none"):
        sequence.pop()
    sequence.push(15)
    sequence.push(16)
    sequence.pop()
    with pytest.raises(ValueError, match="promoted"):
        sequence.pop()


def test_without_prefix_caching_block_names_are_random_and_stable():
    one, two = (ActiveSequence(range(32), 9, 16, enable_prefix_caching=False) for _ in range(2))
    assert not set(one.unique_blocks) & set(two.unique_blocks)
    assert block_hashes(range(32), 16) == one.block_hashes
    first = one.take_creation_signal()
    one.reset_with_signal()
    assert first == one.take_creation_signal()


def test_without_prefix_caching_a_promoted_block_has_a_random_name_below_no_parent():
    sequence = ActiveSequence(range(31), 9, 16, enable_prefix_caching=False)
    sequence.push(31)
    promote, _ = sequence.push(32)
    assert sequence.unique_blocks[:2] == [promote.parent, promote.block]
    assert block_hashes(range(32), 16)[1] == promote.local_hash
    assert sequence_hashes(block_hashes(range(32), 16))[1] != promote.block
    assert (promote.plh >> 118, promote.plh >> 59 & (2**59 - 1)) == (1, 0)  # position 1, no parent fragment


def test_moves_carry_the_token_ids_of_full_blocks_on_request():
    sequence = ActiveSequence(range(10), 9, 4, emit_token_ids=True)
    assert sequence.take_creation_signal().token_ids == [(0, 1, 2, 3), (4, 5, 6, 7)]
    sequence.push(10)
    sequence.push(11)
    promote, use = sequence.push(12)
    assert promote.token_ids == (8, 9, 10, 11)
    assert use.token_ids is None
    assert ActiveSequence(range(3), 9, 4, emit_token_ids=True).take_creation_signal().token_ids is None
    unshared = ActiveSequence(range(10), 9, 4, enable_prefix_caching=False, emit_token_ids=True)
    assert unshared.take_creation_signal().token_ids is None


def test_a_prompt_object_makes_the_same_moves_as_its_tokens():
    prompt = Prompt(range(40))
    assert ActiveSequence(range(40), 9, 8).take_creation_signal() == ActiveSequence(prompt, 9, 8).take_creation_signal()
    sequence = ActiveSequence(prompt, 9, 8)
    for token in range(9):
        sequence.push(token)
    assert len(sequence.block_hashes) == 6
    assert tuple(
        len(hashes) for hashes in (prompt.block_hashes(8), prompt.sequence_hashes(8), prompt.lineage_hashes(8))
    ) == (5, 5, 5)


def test_a_prompt_of_hashes_makes_moves_without_tokens():
    sequence = ActiveSequence(Prompt(hashes=[7, 8], num_tokens=35), 40, 16, emit_token_ids=True)
    use = sequence.take_creation_signal()
    assert ([7, 8], sequence_hashes([7, 8]), None) == (use.local_hashes, use.blocks[:2], use.token_ids)
    assert isinstance(use.blocks[2], UUID)
    assert sequence.tokens is None
    moves = [move for _ in range(14) for move in sequence.push(0)]
    assert [Promote, Use] == kinds(moves)
    assert sequence.unique_blocks[1] == moves[0].parent
    assert sequence.block_hashes[2] == moves[0].local_hash
    assert sequence_hashes(sequence.block_hashes) == sequence.unique_blocks[:3]


def test_a_seeded_generator_gives_a_reproducible_history():
    def history(seed):
        sequence = ActiveSequence(range(14), 20, 4, rng=random.Random(seed))
        return [sequence.take_creation_signal(), *(sequence.generate() for _ in range(20))]

    assert history(5) == history(5)
    assert history(5) != history(6)


def test_names_of_partial_blocks_are_version_4_and_differ_by_default():
    one, two = (ActiveSequence([1], 9, 4).unique_blocks[0] for _ in range(2))
    assert (one.version, two.version) == (4, 4)
    assert one != two


def test_a_sequence_reports_its_length_and_block_counts():
    sequence = ActiveSequence(range(10), 7, 4)
    assert (sequence.to_completion_blocks, sequence.extra_tokens, sequence.is_empty) == (5, 2, False)
    sequence.push(3)
    assert ((*range(10), 3), 11, 3) == (sequence.tokens, len(sequence), sequence.extra_tokens)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], 5, 16), "the prompt is empty"),
        ((Prompt(hashes=[]), 5, 16), "the prompt is empty"),
        (([1], 5, 1), "block_size must be an integer of at least 2"),
        (([1], 5, True), "block_size must be an integer of at least 2"),
        (([1], 5, 2.0), "block_size must be an integer of at least 2"),
        (([1], -1, 16), "max_output_tokens must be an integer of at least 0"),
        (([-1], 5, 16), "token 0 is -1"),
        ((Prompt(hashes=[1], num_tokens=40), 5, 16), "expected 16 to 31 tokens"),
    ],
)
def test_invalid_arguments_of_a_sequence_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        ActiveSequence(*arguments)


@pytest.mark.parametrize(("token", "error"), [(-1, ValueError), (2**32, ValueError), (1.5, TypeError)])
def test_a_value_that_is_not_a_token_is_not_pushed(token, error):
    sequence = ActiveSequence([1], 5, 4)
    with pytest.raises(error, match="a token id is an integer from 0 to 4294967295"):
        sequence.push(token)
    assert (len(sequence), sequence.generated_tokens) == (1, 0)


@pytest.mark.parametrize("caching", [True, False])
def test_a_finished_sequence_still_answers_queries(caching):
    def facts():
        return (
            list(sequence.unique_blocks),
            list(sequence.block_hashes),
            sequence.tokens,
            list(sequence.positional_lineage_hashes),
            repr(sequence),
        )

    prompt = Prompt(TokenRuns((3, 4), 6, 11))
    sequence = ActiveSequence(prompt, 8, 4, caching, rng=Random(0))
    for token in range(8):
        sequence.push(token)
    before = facts()
    sequence.release()
    prompt.release()
    assert before == facts()
    assert sequence.tokens == (3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 0, 1, 2, 3, 4, 5, 6, 7)
