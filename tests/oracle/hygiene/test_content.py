"""Rules that one Stored can break by itself: each block needs a sequence of tokens of its size, or none has one."""

import pytest

from pytest_kvmock import KvCacheEvent, Removed, RouterEvent, Stored, block_hashes, sequence_hashes
from pytest_kvmock.oracle.hygiene.ledger import Ledger

FOUR = (1, 2, 3, 4)
LOCALS = tuple(block_hashes((*FOUR, *FOUR), 4))
BLOCKS = tuple(sequence_hashes(LOCALS))


def observe(tokens, blocks=(5, 6), *, chained=False, event_id=0, **options):
    ledger = Ledger()
    ledger.open((0, 0), first_id=0, **{"block_size": 4, **options})
    event = KvCacheEvent(event_id, Stored(None, blocks, LOCALS[: len(blocks)]))
    return ledger.take(RouterEvent(0, event, token_ids=tokens, chained=chained)), ledger


@pytest.mark.parametrize(
    ("tokens", "known"),
    [
        pytest.param(None, None, id="none"),
        pytest.param([FOUR, FOUR], None, id="each block"),
        pytest.param([list(FOUR), range(4)], None, id="any sequence"),
        pytest.param([FOUR], "token ids came for 1 of 2 blocks", id="one missing"),
        pytest.param([], "token ids came for 0 of 2 blocks", id="an empty list"),
        pytest.param([FOUR] * 3, "token ids came for 3 of 2 blocks", id="one too many"),
        pytest.param([FOUR, FOUR[:3]], "block 6 came with 3 token ids", id="one too short"),
        pytest.param([(), FOUR], "block 5 came with 0 token ids", id="one empty"),
        pytest.param([FOUR, (*FOUR, 5)], "block 6 came with 5 token ids", id="one too long"),
        pytest.param([(1,), FOUR], "block 5 came with 1 token id", id="one token"),
        pytest.param(
            [*FOUR, *FOUR], "token ids came, and not as one sequence for each block", id="flat, as vLLM has it"
        ),
    ],
)
def test_token_ids_must_come_with_every_block_or_none(tokens, known):
    problems, _ = observe(tokens)
    assert [("sparse_tokens", True, known)] * bool(known) == [(p.rule, p.is_error, p.observed) for p in problems]


def test_the_first_block_without_tokens_is_named():
    assert [observe(tokens)[0][0].blocks for tokens in ([FOUR], [], [FOUR] * 3)] == [(6,), (5,), (6,)]


def test_without_a_block_size_each_block_needs_at_least_one_token():
    assert observe([FOUR, (1,)], block_size=None)[0] == []
    (problem,) = observe([FOUR], block_size=None)[0]
    assert (problem.rule, problem.expected) == ("sparse_tokens", "one sequence of token ids a block")


def test_an_empty_stored_and_a_removed_need_no_tokens():
    assert observe([], blocks=())[0] == []
    assert observe([()], blocks=())[0] == []
    _, ledger = observe(None)
    assert ledger.take(RouterEvent(0, KvCacheEvent(1, Removed((6,))), token_ids=[()])) == []


def test_a_chain_is_checked_without_tokens_and_local_hashes_only_with_them():
    assert [p.rule for p in observe([FOUR[:3], FOUR], BLOCKS, chained=True)[0]] == ["sparse_tokens"]
    assert [p.rule for p in observe([FOUR], (BLOCKS[0], 7), chained=True)[0]] == ["sparse_tokens", "wrong_hash"]
    assert [p.rule for p in observe([FOUR, (9, 9, 9, 9)], BLOCKS, chained=True)[0]] == ["wrong_hash"]


def test_sparse_tokens_is_a_separate_problem_even_in_a_gap():
    problems, _ = observe([FOUR], event_id=3)
    assert [(p.rule, p.cause) for p in problems] == [("event_id_gap", None), ("sparse_tokens", None)]


def test_token_ids_that_do_not_cover_every_block_are_not_kept():
    _, ledger = observe([FOUR])
    assert None is ledger.streams[0, 0].tokens(5)
    _, ledger = observe([FOUR, FOUR])
    assert ledger.streams[0, 0].tokens(6) == FOUR
