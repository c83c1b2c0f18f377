"""SGLang's names of pages, computed by hand; test_radix_recordings.py compares more of them."""

import struct
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import Prompt, Stored, block_hashes
from pytest_kvmock.engines.base.hashed import HashChain, HashedTokens
from pytest_kvmock.engines.sglang.hashes import SglangHasher


def signed(digest):
    return int.from_bytes(digest[:8], "big", signed=True)


def names(tokens, size=4, **options):
    hasher = SglangHasher(**options)
    return list(map(hasher.name, hasher.digests(tokens, size, 0, None)))


def test_pages_have_the_recorded_names():
    assert names(range(8)) == [-4977211910723114241, 90435953025800507]
    assert names(range(8), cache_salt="s1") == [-8021339544225929516, -2546974396340174739]


def test_an_incomplete_page_has_no_name():
    assert names([1, 2, 3]) == []
    assert names([1, 2, 3, 4]) == names([1, 2, 3, 4, 5, 6, 7])


def test_a_page_is_hashed_with_the_full_digest_of_the_previous_page():
    first = sha256(struct.pack("<4I", 1, 2, 3, 4)).digest()
    second = sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()
    assert [first, second] == SglangHasher().digests([1, 2, 3, 4, 5, 6, 7, 8], 4, 0, None)
    assert [second] == SglangHasher().digests([5, 6, 7, 8], 4, 1, first)
    assert [second] == SglangHasher(cache_salt="s").digests([5, 6, 7, 8], 4, 1, first)  # a salt starts a chain


def test_a_page_with_a_token_beyond_32_bits_is_hashed_in_64_bit_words_after_a_marker():
    wide = sha256(b"\xff" + struct.pack("<2Q", 2**32, 7)).digest()
    plain = sha256(wide + struct.pack("<2I", 2**32 - 1, 8)).digest()
    assert [signed(wide), signed(plain)] == names([2**32, 7, 2**32 - 1, 8, 2**63 - 1], 2)


def test_the_pairs_of_an_eagle_page_overlap():
    page = sha256(struct.pack("<6I", 1, 2, 2, 3, 3, 4)).digest()
    assert [signed(page)] == names([1, 2, 3, 4], 3, is_eagle=True)
    assert names([1, 2, 3], 3, is_eagle=True) == []


def test_the_namespace_changes_names_only_in_dynamo_event_format():
    plain = names(range(4))
    assert plain == names(range(4), extra_key="k") == names(range(4), dynamo_kv_event_format=True)
    seed = sha256(b"sglang-kv-event-namespace-v1" + b"\1" + struct.pack("<Q", 1) + b"k" + b"\0").digest()
    expected = signed(sha256(seed + struct.pack(">q", plain[0])).digest())
    assert names(range(4), extra_key="k", dynamo_kv_event_format=True) == [expected]


def test_in_dynamo_event_format_the_salt_is_part_of_the_namespace():
    salted = names(range(4), cache_salt="é")
    part = b"\1" + struct.pack("<Q", 2) + "é".encode()
    seed = sha256(b"sglang-kv-event-namespace-v1" + b"\0" + part).digest()
    expected = signed(sha256(seed + struct.pack(">q", salted[0])).digest())
    assert names(range(4), cache_salt="é", dynamo_kv_event_format=True) == [expected]


WRONG = [
    ([1, -1], ValueError, "token -1: a token id is an integer from 0 to 2**63 - 1"),
    ([2**63, 1], ValueError, "token 9223372036854775808: a token id is an integer from 0 to 2**63 - 1"),
    ([2**32, -5], ValueError, "token -5: a token id is an integer from 0 to 2**63 - 1"),
    ([1, 2, -3], ValueError, "token -3: a token id is an integer from 0 to 2**63 - 1"),
    ([1, 2.5], TypeError, "token 2.5 (float): a token id is an integer from 0 to 2**63 - 1"),
    (["a", 1], TypeError, "token 'a' (str): a token id is an integer from 0 to 2**63 - 1"),
]


@pytest.mark.parametrize(("tokens", "error", "message"), WRONG)
def test_a_value_that_is_not_a_token_is_refused(tokens, error, message):
    with pytest.raises(error) as raised:
        names(tokens, 2)
    assert str(raised.value) == message


def test_bytes_and_tuples_hash_like_lists_of_tokens():
    assert names([1, 2, 3, 4]) == names(b"\1\2\3\4") == names((1, 2, 3, 4))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 29))
def test_a_growing_request_has_the_names_of_all_its_tokens(tokens, start):
    start = min(start + 1, len(tokens))
    request = HashedTokens(Prompt(tokens[:start]), 4, SglangHasher(), None)
    for token in tokens[start:]:
        request.append(token)
    assert names(tokens) == request.names


def test_the_hash_chain_gives_the_expected_names_of_a_stream():
    chain = HashChain(SglangHasher())
    tokens = [(1, 2), (3, 4), (5, 6)]
    one, two, three = names([1, 2, 3, 4, 5, 6], 2)
    local = tuple(block_hashes([1, 2, 3, 4, 5, 6], 2))
    assert [one, two] == chain.expected(Stored(None, (one, two), local[:2]), tokens[:2], 2)
    assert [three] == chain.expected(Stored(two, (three + 1,), local[2:]), tokens[2:], 2)
    assert chain.expected(Stored(99, (three,), local[2:]), tokens[2:], 2) is None
