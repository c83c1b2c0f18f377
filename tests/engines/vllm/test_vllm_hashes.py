"""Block hashes of vLLM: those of its own functions, and refused inputs."""

import pickle
from copy import deepcopy
from random import Random

import pytest
from depth import seeds

from pytest_kvmock import Prompt, Stored
from pytest_kvmock.engines import VllmHasher
from pytest_kvmock.engines.base.hashed import HashChain, HashedTokens
from pytest_kvmock.engines.sglang.hashes import SglangHasher
from pytest_kvmock.engines.vllm import hashes
from pytest_kvmock.engines.vllm.hashes import ALGORITHMS, VERSIONS, ExtraKeys
from pytest_kvmock.values.hashed_blocks import own_blocks
from pytest_kvmock.values.prompt_keys import MultimodalItem
from pytest_kvmock.values.tokens import TokenRuns

ONE = (MultimodalItem("img-1", 2, 4),)
KEYS = {
    "plain": None,
    "salt": ExtraKeys(cache_salt="salt1"),
    "lora": ExtraKeys("adapter-a", "/adapters/a"),
    "mm in block 0, over block 1": ExtraKeys(multimodal=ONE),
    "two mm": ExtraKeys(multimodal=(MultimodalItem("img-1", 1, 2), MultimodalItem("img-2", 5, 3))),
    "all": ExtraKeys("adapter-a", "/adapters/a", ONE, "salt1"),
}


def tuples(value):
    """Return tuples, which are hashed; JSON has lists."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def test_block_hashes_equal_those_of_vllm_for_every_algorithm_seed_and_key(recording):
    checked = 0
    for run in recording("vllm_block_hashes_extra.json.gz"):
        for case in run["cases"]:
            where = (run["vllm"], run["seed"], case["algorithm"], case["case"])
            keys = KEYS[case["case"]]
            hasher = VllmHasher(run["vllm"], case["algorithm"], run["seed"], keys)
            digests = hasher.digests(run["tokens"], run["block_size"], 0, None)
            assert case["none_hash"] == hasher.none_hash.hex(), where
            assert case["hashes"] == [digest.hex() for digest in digests], where
            tagged = VERSIONS[run["vllm"]].tagged_keys
            found = [keys and keys.of_block(i, run["block_size"], tagged=tagged) for i in range(3)]
            assert [tuples(key) for key in case["extra_keys"]] == found, where
            checked += 1
    assert checked == 60


@pytest.mark.parametrize("seed", ["0", "42"])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_the_published_name_is_the_last_64_bits_of_the_digest(recording, algorithm, seed):
    known = recording("vllm_block_hashes.json")[f"{algorithm}|seed={seed}"]
    hasher = VllmHasher("0.33.0", algorithm, seed)
    first, second = hasher.digests(range(1, 9), 4, 0, None)
    assert (known["none"], known["h0"], known["h1"]) == (hasher.none_hash.hex(), first.hex(), second.hex())
    assert (known["h0_u64"], known["h1_u64"]) == (hasher.name(first), hasher.name(second))
    for version, name in (("0.33.0", "h0_salt_tagged_0_33"), ("0.19.1", "h0_salt_untagged_old")):
        salted = VllmHasher(version, algorithm, seed, KEYS["salt"])
        assert known[name] == salted.digests(range(1, 5), 4, 0, None)[0].hex()


TOKENS = (0, 23, 24, 255, 256, 65535, 65536, 2**18, 2**32 - 1)


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash_cbor"])
@pytest.mark.parametrize("block_size", [1, 3, 9, 23, 24, 256])
def test_plain_blocks_are_encoded_as_by_cbor2(algorithm, block_size):
    cbor2 = pytest.importorskip("cbor2")
    hasher = VllmHasher(algorithm=algorithm)
    tokens = (TOKENS * 30)[:block_size]
    parent = hasher.none_hash
    for digest in hasher.digests(tokens * 2, block_size, 0, None):
        parent = hasher._hashed(cbor2.dumps((parent, tokens, None), canonical=True)).digest()
        assert parent == digest
    assert hasher.none_hash == hasher._hashed(cbor2.dumps("0", canonical=True)).digest()


@pytest.mark.parametrize("seed", seeds(200))
def test_tokens_of_any_size_are_encoded_as_canonical_cbor(seed):
    """Repeated ids, ids above any vocabulary and mixtures of both are written at once; with keys, one by one."""
    rng = Random(seed)
    tokens = []
    for _ in range(40):
        count, most = rng.randint(1, 40), rng.choice([23, 24, 255, 256, 2**16 - 1, 2**16, 2**18, 2**32 - 1])
        tokens += rng.choice([[rng.randint(0, most)] * count, [rng.randint(0, most) for _ in range(count)]])
    hasher, parent = VllmHasher(), None
    for digest in hasher.digests(tokens, 16, 0, None):
        block, tokens = tuple(tokens[:16]), tokens[16:]
        parent = hasher._hashed(hashes._cbor((parent or hasher.none_hash, block, None))).digest()
        assert parent == digest


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("keys", [None, KEYS["lora"]], ids=["plain", "lora"])
def test_a_continued_hash_chain_equals_one_computed_at_once(algorithm, keys):
    hasher = VllmHasher(algorithm=algorithm, keys=keys)
    whole = hasher.digests(range(16), 4, 0, None)
    assert whole[2:] == hasher.digests(range(8, 17), 4, 2, whole[1])


@pytest.mark.parametrize("seed", [None, "7"])
def test_a_growing_request_has_the_names_of_all_its_tokens(seed):
    hasher = VllmHasher(seed=seed)
    grown = HashedTokens(Prompt(range(3)), 4, hasher, None)
    prompt = Prompt(range(5))
    also = HashedTokens(prompt, 4, hasher, None)
    for token in range(3, 21):
        grown.append(token)
    also.extend(range(5, 21))
    whole = HashedTokens(Prompt(range(21)), 4, hasher, None)
    assert whole.names == grown.names == also.names
    assert whole.local_hashes == grown.local_hashes == also.local_hashes
    assert len(HashedTokens(prompt, 4, hasher, None).names) == 1  # the prompt's own names have not grown


@pytest.mark.parametrize(
    "hasher", [VllmHasher(), VllmHasher("0.9.2"), SglangHasher()], ids=["vllm", "signed", "sglang"]
)
@pytest.mark.parametrize("output", [0, 2, 9])
def test_a_released_request_keeps_its_names_tokens_and_hashes(hasher, output):
    def facts(tokens):
        data, rows = tokens.stored(1, 3)
        return list(tokens.names), tokens.local_hashes, tokens.tokens, data, rows, rows.digests, rows.names

    prompts = Prompt(TokenRuns((7, 2**32 + 8, 9), 5, 14)), Prompt([*(7,) * 5, *(8,) * 5, *(9,) * 4])
    over, still = (HashedTokens(prompt, 4, hasher, None) for prompt in prompts)
    for each in (over, still):
        each.extend(range(output))
    before = facts(over)
    for _ in range(2):
        over.release()
        prompts[0].release()
        assert before == facts(over) == facts(still)


@pytest.mark.parametrize("seed", seeds(100))
@pytest.mark.parametrize("made_by", [*ALGORITHMS, "signed", "sglang"])
def test_a_prompt_of_trace_ids_has_the_names_of_its_tokens(made_by, seed):
    """Also if blocks do not end with the ids of the trace, and for ids of all CBOR forms."""
    others = {"signed": VllmHasher("0.9.2"), "sglang": SglangHasher()}
    hasher = others.get(made_by) or VllmHasher("0.33.0", made_by)
    draw = Random(seed)
    ids = [draw.choice([7, 200, 2**15, 2**18 + 1, 2**31, 2**32 + 7]) for _ in range(draw.randint(1, 5))]
    times = draw.randint(1, 12)
    length = draw.randint(1, times * len(ids))
    runs = TokenRuns(ids, times, length)
    for size in range(1, 7):
        made, plain = (HashedTokens(prompt, size, hasher, None) for prompt in (Prompt(runs), Prompt(runs.tokens())))
        for each in (made, plain):
            each.extend(range(2 * size))
        assert plain.names == made.names
        assert plain.stored(0, len(plain.names)) == made.stored(0, len(made.names))
        assert plain.rows(0, 1, size) == made.rows(0, 1, size)


def test_a_released_request_of_hashes_keeps_its_drawn_names():
    tokens = HashedTokens(Prompt(hashes=[1, 2]), 4, VllmHasher(), Random(1))
    tokens.extend(range(8))
    before = list(tokens.names), list(tokens.local_hashes)
    tokens.release()
    assert before == (list(tokens.names), list(tokens.local_hashes))


def test_hashers_that_give_the_same_names_are_equal():
    assert VllmHasher() == VllmHasher("0.19.1")  # plain blocks have the same names in all releases
    assert hash(VllmHasher()) == hash(VllmHasher("0.19.1"))
    different = [
        VllmHasher(),
        VllmHasher(algorithm="sha256"),
        VllmHasher(algorithm="xxhash"),
        VllmHasher(seed="1"),
        VllmHasher(seed=None),
        VllmHasher(keys=KEYS["salt"]),
        VllmHasher("0.19.1", keys=KEYS["salt"]),
        VllmHasher(keys=ExtraKeys(cache_salt="salt2")),
    ]
    assert len(different) == len(set(different))
    assert VllmHasher() != "sha256_cbor"


def test_the_hash_chain_of_a_stream_detects_a_name_that_does_not_match_its_tokens():
    hasher = VllmHasher()
    tokens = HashedTokens(Prompt(range(12)), 4, hasher, None)
    chain = HashChain(hasher)
    first = Stored(None, tokens.names[:1], tokens.local_hashes[:1])
    rest = Stored(tokens.names[0], tokens.names[1:], tokens.local_hashes[1:])
    assert tokens.names[:1] == chain.expected(first, list(tokens.block_tokens(0, 1)), 4)
    assert tokens.names[1:] == chain.expected(rest, list(tokens.block_tokens(1, 3)), 4)
    assert tokens.names[:1] != chain.expected(first, [(0, 1, 2, 4)], 4)
    assert None is HashChain(hasher).expected(rest, list(tokens.block_tokens(1, 3)), 4)  # its parent is unknown
    assert None is chain.expected(rest, (), 4)


def test_freshly_hashed_blocks_are_not_hashed_again_unless_they_were_changed():
    hasher = VllmHasher()
    data, tokens = HashedTokens(Prompt(range(12)), 4, hasher, None).stored(0, 3)
    assert own_blocks(data, tokens, 4, None) is tokens == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert data.block_hashes is HashChain(hasher).expected(data, tokens, 4)
    assert data.block_hashes != HashChain(VllmHasher(seed="1")).expected(data, tokens, 4)
    names, local_hashes = data.block_hashes, data.tokens_hashes
    wrong = [(None, (7, *names[1:]), local_hashes), (None, names, (7, *local_hashes[1:])), (7, names, local_hashes)]
    for changed in wrong:
        assert None is own_blocks(Stored(*changed), tokens, 4, None)
    assert None is own_blocks(data, list(tokens), 4, None)
    assert None is own_blocks(data, tokens, 2, None)
    assert None is own_blocks(data, tokens, 4, {"lora_name": "a"})
    assert list is type(deepcopy(tokens)) is type(pickle.loads(pickle.dumps(tokens)))
    rest = tokens.part(1, 3)
    assert (
        own_blocks(Stored(names[0], names[1:], local_hashes[1:]), rest, 4, None)
        is rest
        == [(4, 5, 6, 7), (8, 9, 10, 11)]
    )
    assert None is own_blocks(Stored(None, names[1:], local_hashes[1:]), rest, 4, None)
    with pytest.raises(TypeError):  # the names that were made from them remain valid
        tokens[1] = (4, 5, 6, 8)
    changed = [tokens[0], (4, 5, 6, 8), *tokens[2:]]
    assert None is own_blocks(data, changed, 4, None)
    assert data.block_hashes != HashChain(hasher).expected(data, changed, 4)


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"version": "0.12"}, "unknown vLLM version '0.12'; known: 0.33.0, 0.28.0, 0.24.0, 0.23.0, 0.19.1"),
        ({"version": 33}, "unknown vLLM version 33; known: "),
        (
            {"algorithm": "md5"},
            "hash_algorithm must be one of sha256, sha256_cbor, xxhash, xxhash_cbor, got 'md5'",
        ),
        ({"algorithm": None}, "hash_algorithm must be one of .*, got None"),
        ({"seed": 0}, "hash_seed must be a string, as PYTHONHASHSEED is, or None; got 0"),
        ({"seed": ""}, "hash_seed must be a string, as PYTHONHASHSEED is, or None; got ''"),
        (
            {"seed": None, "algorithm": "xxhash"},
            "hash_seed is missing: without one, vLLM 0.33.0 has other xxhash hashes",
        ),
        ({"seed": None, "version": "0.28.0"}, "hash_seed is missing: .* in each process; give a string"),
        ({"seed": None, "version": "0.19.1", "algorithm": "xxhash_cbor"}, "hash_seed is missing: .* other xxhash_cbor"),
    ],
)
def test_invalid_options_of_a_hasher_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        VllmHasher(**arguments)


def test_a_multimodal_item_is_hashed_only_in_the_blocks_that_it_covers():
    keys = ExtraKeys(multimodal=(MultimodalItem("img", 4, 4),))
    assert [keys.of_block(place, 4, tagged=False) for place in range(3)] == [None, (("img", 0),), None]
