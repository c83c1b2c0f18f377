"""Hashes compared with recordings of Dynamo, growing sequences compared with hashing again, and refused input."""

import json
from array import array
from copy import deepcopy
from pathlib import Path

import pytest
from depth import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from pytest_kvmock import Prompt, block_hashes, sequence_hashes
from pytest_kvmock.values import lineage_hash, lineage_hashes
from pytest_kvmock.values.plh import (
    MAX_POSITION,
    LineageHashes,
    are_lineage,
    lineage_fragment,
    lineage_parent_fragment,
    lineage_position,
)
from pytest_kvmock.values.tokens import GrowingTokens, TokenRuns, chained_hash, hash_seed

U64 = 2**64 - 1
RECORDED = json.loads((Path(__file__).parents[1] / "data" / "dynamo_block_hashes.json").read_text())

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, U64)
tokens_and_size = st.tuples(st.lists(u32, max_size=40), st.integers(1, 9))


def options(case):
    infos = case["mm_infos"]
    return {
        "lora_name": case["lora_name"],
        "cache_namespace": case["cache_namespace"],
        "mm_hashes": infos and [info and [o["mm_hash"] for o in info["mm_objects"]] for info in infos],
        "eagle": bool(case["is_eagle"]),
    }


# ------------------------------------------------------------------------------------- local and sequence hashes


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["name"])
def test_block_hashes_equal_the_recorded_ones(case):
    local = block_hashes(case["tokens"], case["block_size"], **options(case))
    assert case["local_hashes"] == local
    assert case["seq_hashes"] == sequence_hashes(local)


@pytest.mark.parametrize(
    ("expected", "given_"),
    [
        ([14643705804678351452, 16777012769546811212, 483935686894639516], {}),
        ([15633847640104431966, 728185010911637095, 3844993433954264052], {"lora_name": "my-adapter"}),
        ([1914873892905420881, 1929047464662796003, 8175084615354468756], {"eagle": True}),
        ([15207512089340001072, 16777012769546811212, 483935686894639516], {"mm_hashes": [[0xDEADBEEF]]}),
    ],
    ids=["plain", "lora", "eagle", "multimodal"],
)
def test_block_hashes_with_lora_and_other_options_have_known_values(expected, given_):
    assert block_hashes(range(1, 14), 4, **given_) == expected


def test_hashes_equal_those_of_a_logged_pair_of_blocks():
    local = block_hashes([11, 22, 33, 44, 55, 66, 77, 88], 4)
    assert local == [4117275816416024698, 6081346995852963768]
    assert sequence_hashes(local) == [4117275816416024698, 5947898228081096063]


@given(tokens_and_size)
def test_each_block_is_hashed_independently_and_a_partial_block_is_not_hashed(case):
    tokens, size = case
    blocks = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
    expected = [xxh3_64_intdigest(b"".join(t.to_bytes(4, "little") for t in block), 1337) for block in blocks]
    assert block_hashes(tokens, size) == expected


@given(tokens_and_size)
def test_eagle_hashes_cover_windows_one_token_longer_than_a_block(case):
    tokens, size = case
    windows = [tokens[i : i + size + 1] for i in range(0, len(tokens) - size, size)]
    expected = [xxh3_64_intdigest(b"".join(t.to_bytes(4, "little") for t in w), 1337) for w in windows]
    assert block_hashes(tokens, size, eagle=True) == expected


@given(st.lists(u64, max_size=12), st.integers(0, 12))
def test_a_chain_continues_from_any_of_its_blocks(local, cut):
    chain = sequence_hashes(local)
    head = chain[:cut]
    assert chain == head + sequence_hashes(local[cut:], parent=head[-1] if head else None)
    for i, own in enumerate(chain):
        assert own == chained_hash(chain[i - 1] if i else None, local[i])
    assert local[:1] == chain[:1]


@pytest.mark.parametrize("tokens", [(1, 2), range(1, 3), b"\x01\x02", bytearray((1, 2)), array("Q", (1, 2))], ids=repr)
def test_all_sequence_types_of_token_ids_give_the_same_hashes(tokens):
    assert block_hashes([1, 2], 2) == block_hashes(tokens, 2)


def test_the_order_of_multimodal_objects_does_not_change_hashes_and_empty_ones_are_ignored():
    plain = block_hashes(range(8), 4)
    assert plain == block_hashes(range(8), 4, mm_hashes=[None, []])
    assert plain == block_hashes(range(8), 4, mm_hashes=[])
    assert block_hashes(range(8), 4, mm_hashes=[[1, 2]]) == block_hashes(
        range(8), 4, mm_hashes=[[2, 1], None, [7], [8]]
    )
    assert plain[1:] == block_hashes(range(8), 4, mm_hashes=[[1]])[1:]


def test_lora_name_and_namespace_add_to_the_hash_seed_unless_empty():
    assert hash_seed() == 1337
    assert hash_seed("", "") == 1337
    lora, namespace = xxh3_64_intdigest(b"a", 0), xxh3_64_intdigest(b"a", 1)
    assert (1337 + lora) & U64 == hash_seed("a")
    assert (1337 + namespace) & U64 == hash_seed(None, "a")
    assert (1337 + lora + namespace) & U64 == hash_seed("a", "a")


# --------------------------------------------------------------------------------------------------- lineage


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        (1, (1, None, 0)),
        (0x3F8000000000000007FFFFFFFFFFFFFF, (U64, None, 254)),
        (0x3FC0000000000000007FFFFFFFFFFFFF, (U64, None, 255)),
        (0x40403FFFFFFFFFFFFFFFFFFFFFFFFFFF, (U64, U64, 256)),
    ],
)
def test_lineage_hashes_equal_the_recorded_ones(expected, arguments):
    assert lineage_hash(*arguments) == expected


def test_lineage_hashes_of_a_sequence_equal_the_recorded_ones():
    local = block_hashes(range(12), 4)
    assert local == [9143094415614847814, 12124091508212882195, 1088361764653601668]
    chain = sequence_hashes(local)
    assert chain == [9143094415614847814, 9510318385840434533, 16998148715716822651]
    expected = [0x6E2CBEDC694AB46, 0x77165F6E34A55A33FB702F20E2AD65, 0x9FDB817907156B2BE58E326790467B]
    assert lineage_hashes(chain) == expected


def bits_at(position):
    return 59 if position < 2**8 else 55 if position < 2**16 else 51


BORDERS = [0, 1, 254, 255, 256, 257, 65_534, 65_535, 65_536, 65_537, MAX_POSITION - 1, MAX_POSITION]


@pytest.mark.parametrize("position", BORDERS)
@given(current=u64, parent=u64)
def test_a_lineage_hash_encodes_position_and_fragments_at_every_mode_boundary(position, current, parent):
    plh = lineage_hash(current, parent, position)
    assert 0 <= plh < 2**128
    assert position == lineage_position(plh)
    assert current % 2 ** bits_at(position + 1) == lineage_fragment(plh)
    assert parent % 2 ** bits_at(position) == lineage_parent_fragment(plh)


@pytest.mark.parametrize("position", BORDERS[:-1])
@given(own=u64, child=u64)
def test_the_parent_fragment_of_a_child_equals_the_fragment_of_its_parent(position, own, child):
    parent = lineage_hash(own, None, position)
    assert lineage_fragment(parent) == lineage_parent_fragment(lineage_hash(child, own, position + 1))


def test_a_root_has_no_parent_fragment():
    assert lineage_parent_fragment(lineage_hash(U64, None, 0)) == 0


@given(st.lists(u64, min_size=1, max_size=5), st.sampled_from([0, 253, 65_533]), st.none() | u64)
@example(chain=[U64, U64 - 1, 5, U64], start=254, parent=U64)
@example(chain=[U64, U64 - 1, 5, U64], start=65534, parent=U64)
def test_lineage_hashes_of_a_chain_equal_the_hashes_of_each_block(chain, start, parent):
    parents = [parent, *chain]
    expected = [lineage_hash(own, parents[i], start + i) for i, own in enumerate(chain)]
    assert lineage_hashes(chain, parent=parent, start=start) == expected


def test_lazy_lineage_hashes_equal_eager_ones():
    names = sequence_hashes([10, 20, 30, 40])
    late, made = LineageHashes(names), lineage_hashes(names)
    assert [made[0], made[3], made[-1]] == [late[0], late[3], late[-1]]
    assert late == made == [*late] == late[:] == LineageHashes(names)
    assert repr(made) == repr(late)
    assert late != made[:3]
    assert len(late.part(1, 3)) == 2
    assert made[1:3] == late.part(1, 3)
    assert are_lineage(late.part(1, 3), names[1:3], parent=names[0], start=1)
    assert are_lineage(made[1:3], names[1:3], parent=names[0], start=1)
    assert not are_lineage(late.part(1, 3), names[1:3], parent=names[0], start=2)
    with pytest.raises(IndexError):
        late[4]


@pytest.mark.parametrize("position", [-1, MAX_POSITION + 1])
def test_a_position_out_of_range_is_refused(position):
    with pytest.raises(ValueError, match=f"position must be from 0 to 16777215, got {position}"):
        lineage_hash(1, None, position)


# -------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_has_the_hashes_of_its_tokens():
    prompt = Prompt(range(13))
    assert (tuple(range(13)), 13, 13) == (prompt.tokens, prompt.num_tokens, prompt.length(4))
    local = block_hashes(range(13), 4)
    assert local == prompt.block_hashes(4)
    assert sequence_hashes(local) == prompt.sequence_hashes(4)
    assert lineage_hashes(sequence_hashes(local)) == prompt.lineage_hashes(4)
    assert block_hashes(range(13), 5) == prompt.block_hashes(5)


def test_a_prompt_computes_its_hashes_once():
    prompt = Prompt(range(8))
    assert prompt.block_hashes(4) is prompt.block_hashes(4)


def test_prompt_of_returns_a_given_prompt_unchanged():
    prompt = Prompt([1, 2])
    assert prompt is Prompt.of(prompt)
    assert Prompt.of([1, 2]).tokens == (1, 2)


def test_a_prompt_of_hashes_has_no_tokens_and_consists_of_whole_blocks_by_default():
    prompt = Prompt(hashes=[7, 8])
    assert (prompt.tokens, prompt.num_tokens) == (None, None)
    assert (prompt.block_hashes(4), prompt.length(4), prompt.length(16)) == ([7, 8], 8, 32)
    assert sequence_hashes([7, 8]) == prompt.sequence_hashes(4)


@pytest.mark.parametrize("num_tokens", [8, 9, 11])
def test_a_prompt_of_hashes_can_end_with_a_partial_block(num_tokens):
    assert num_tokens == Prompt(hashes=[7, 8], num_tokens=num_tokens).length(4)


@pytest.mark.parametrize("num_tokens", [7, 12])
def test_a_tail_that_does_not_fit_the_block_size_is_refused(num_tokens):
    with pytest.raises(
        ValueError, match=rf"num_tokens={num_tokens} does not fit block_size=4: expected 8 to 11 tokens"
    ):
        Prompt(hashes=[7, 8], num_tokens=num_tokens).length(4)


def test_the_repr_of_a_prompt_describes_it():
    assert [
        repr(Prompt([1, 2, 3])),
        repr(Prompt(hashes=[1, 2])),
    ] == ["<Prompt of 3 tokens>", "<Prompt of 2 block hashes>"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "either tokens or hashes="),
        ({"tokens": [1], "hashes": [1]}, TypeError, "either tokens or hashes="),
        ({"tokens": [1], "num_tokens": 1}, TypeError, "num_tokens goes with hashes="),
        ({"hashes": [1, 2], "num_tokens": 1}, ValueError, "num_tokens=1 is less than the 2 blocks"),
        ({"hashes": [1, 2**64]}, ValueError, r"hash 1 is 18446744073709551616: .* 0 to 2\*\*64 - 1"),
        ({"hashes": [-1]}, ValueError, "hash 0 is -1"),
        ({"hashes": [1.5]}, ValueError, r"hash 0 is 1\.5"),
        ({"tokens": [1, -2]}, ValueError, "token 1 is -2"),
        ({"tokens": "text"}, TypeError, "token ids, not text"),
    ],
)
def test_the_error_for_an_invalid_prompt_names_the_problem(arguments, error, message):
    with pytest.raises(error, match=message):
        Prompt(**arguments)


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("tokens", "block_size", "error", "message"),
    [
        ([1], 0, ValueError, r"block_size must be an integer of at least 1 \(tokens a block\), got 0"),
        ([1], -4, ValueError, "block_size must be an integer of at least 1 .* got -4"),
        ([1], 4.0, TypeError, r"block_size must be an integer .* got 4\.0"),
        ([1], True, TypeError, "block_size must be an integer .* got True"),
        ([1], "4", TypeError, "block_size must be an integer .* got '4'"),
        ([1], None, TypeError, "block_size must be an integer .* got None"),
        ([1, 2, -3], 1, ValueError, "token 2 is -3: a token id is an integer from 0 to 4294967295"),
        ([2**32], 1, ValueError, "token 0 is 4294967296: a token id"),
        ([2**64], 1, ValueError, "token 0 is 18446744073709551616: a token id"),
        ([1, 1.5], 1, TypeError, r"token 1 is 1\.5 \(float\): a token id"),
        ([None], 1, TypeError, r"token 0 is None \(NoneType\)"),
        (["7"], 1, TypeError, r"token 0 is '7' \(str\)"),
        ("hello", 1, TypeError, "not text: a token id .* got the string 'hello'"),
        (7, 1, TypeError, "must be a sequence of token ids.* got 7"),
        ([1, 2, 3, -1], 2, ValueError, "token 3 is -1"),
        ([1, 2, -1], 2, ValueError, "token 2 is -1"),
    ],
    ids=repr,
)
def test_invalid_tokens_and_block_sizes_are_named_in_the_error(tokens, block_size, error, message):
    with pytest.raises(error, match=message):
        block_hashes(tokens, block_size)


def test_an_iterator_is_read_once_and_an_invalid_token_is_named_by_position():
    assert Prompt(iter([1, 2, 3])).tokens == (1, 2, 3)
    assert block_hashes([1, 2], 2) == block_hashes(iter([1, 2]), 2)
    with pytest.raises(ValueError, match="token 2 is -1"):
        block_hashes(iter([5, 6, -1]), 1)
    with pytest.raises(ValueError, match="token 2 is -1"):
        Prompt(iter([5, 6, -1]))


@pytest.mark.parametrize(
    ("local", "parent", "message"),
    [
        ([1, 2**64], None, "hash 1 is 18446744073709551616: a hash is an integer from 0 to 2"),
        ([1, 2, -1], None, "hash 2 is -1"),
        ([1, 1.5], None, r"hash 1 is 1\.5"),
        ([-3, 1], None, "hash 0 is -3"),
        ([1], -5, "the parent is -5"),
    ],
)
def test_an_invalid_hash_in_a_chain_is_refused_with_its_position(local, parent, message):
    with pytest.raises(ValueError, match=message):
        sequence_hashes(local, parent=parent)


@pytest.mark.parametrize("wrong", [-1, 2**64, 1.5, "x"])
def test_a_multimodal_hash_that_is_not_a_u64_is_refused(wrong):
    with pytest.raises(ValueError, match=r"mm_hashes are integers from 0 to 2\*\*64 - 1, got \[3, "):
        block_hashes([1, 2], 2, mm_hashes=[[3, wrong]])


# ------------------------------------------------------------------------------------------- tokens made again

RUNS = st.builds(
    lambda ids, times, short: (ids, times, len(ids) * times - min(short, times - 1)),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6),
    st.integers(1, 24),
    st.integers(0, 23),
)


@settings(max_examples=examples(200))
@given(RUNS, st.integers(1, 16))
def test_a_prompt_of_token_runs_equals_a_prompt_of_its_tokens(runs, block_size):
    ids, times, length = runs
    tokens = tuple(each % 2**32 for each in ids for _ in range(times))[:length]
    plain, made = Prompt(tokens), Prompt(TokenRuns(ids, times, length))
    for _ in range(2):  # before and after release()
        assert plain.block_hashes(block_size) == made.block_hashes(block_size)
        assert plain.last_hash(block_size) == made.last_hash(block_size)  # also after release()
        assert plain.sequence_hashes(block_size) == made.sequence_hashes(block_size)
        assert next(reversed(plain.sequence_hashes(block_size)), None) == made.last_hash(block_size)
        assert plain.last_hash(3) == made.last_hash(3)
        assert (tokens, length) == (made.tokens, made.num_tokens)
        made.release()


def test_a_released_prompt_keeps_its_given_tokens():
    prompt = Prompt([1, 2, 3, 4])
    hashes = prompt.block_hashes(2)
    prompt.release()
    assert prompt.tokens == (1, 2, 3, 4)
    assert hashes is prompt.block_hashes(2)


@settings(max_examples=examples(200))
@given(RUNS, st.integers(1, 5), st.lists(u32, max_size=12), st.data())
def test_rows_equal_the_blocks_of_prompt_and_output(runs, size, output, data):
    ids, times, length = runs
    growing = GrowingTokens(Prompt(TokenRuns(ids, times, length)))
    growing.output.extend(output)
    whole = growing.whole
    start = data.draw(st.integers(0, len(whole) // size))
    end = data.draw(st.integers(start, len(whole) // size))
    rows, expected = (
        growing.rows(start, end, size),
        [whole[at : at + size] for at in range(start * size, end * size, size)],
    )
    assert expected == list(rows) == rows == deepcopy(rows)
    assert (len(rows), repr(rows)) == (len(expected), repr(expected))
    first, last = sorted(data.draw(st.tuples(st.integers(0, len(rows)), st.integers(0, len(rows)))))
    assert expected[first:last] == rows[first:last] == rows.part(first, last)
    assert [rows[at] for at in range(len(rows))] == expected
    with pytest.raises(IndexError):
        rows[len(rows)]
