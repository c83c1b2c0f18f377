"""Sinks that receive tokens: names that contradict the tokens are a warning, or an error with a declared chain."""

import pytest
from depth import each_parameter

from pytest_kvmock import EngineProfile, RouterHarness, Stored, block_hashes, sequence_hashes
from pytest_kvmock.engines.vllm.hashes import VllmHasher

TOKENS = list(range(100, 112))
SPLIT = [TOKENS[at : at + 4] for at in range(0, 12, 4)]
BASE, ADAPTER = block_hashes(TOKENS, 4), block_hashes(TOKENS, 4, lora_name="tuned")
SALTED = block_hashes(TOKENS, 4, cache_namespace="tenant")
LORA = {"lora_name": "tuned"}


def chain(local):
    return tuple(sequence_hashes(local))


def vllm_names(seed="0"):
    hasher = VllmHasher("0.33.0", "sha256_cbor", seed)
    return tuple(map(hasher.name, hasher.digests(TOKENS, 4, 0, None)))


def published(*steps, **declared):
    """Publish the steps to a sink; return of each problem its rule, whether it is an error, and what was observed."""
    kv = RouterHarness(EngineProfile(block_size=4), backend=None)
    sink = kv.make_sink(**declared)
    for names, local, extra in steps:
        sink.publish(Stored(None, tuple(names), tuple(local)), token_ids=SPLIT[: len(names)], extra=extra)
    return [(problem.rule, problem.is_error, problem.observed) for problem in kv.events.problems]


WRONG = {
    "hashes of the base model": [(chain(BASE), BASE, LORA)],
    "names of the base model": [(chain(BASE), ADAPTER, LORA)],
    "names of an engine, hashes of the base model": [(range(2**20, 2**20 + 3), BASE, LORA)],
    "a salt's pages under plain names": [(chain(BASE), SALTED, {"cache_salt": "tenant"})],
    "an image's pages under plain names": [(chain(BASE), BASE, {"extra_keys": [[("red", 0)], None, None]})],
}
RIGHT = {
    "an adapter's names": [(chain(ADAPTER), ADAPTER, LORA)],
    "a salt's names": [(chain(SALTED), SALTED, {"cache_salt": "tenant"})],
    "a salt that events do not carry": [(chain(SALTED), SALTED, None)],
    "names of a random seed": [(vllm_names("17"), BASE, None), (vllm_names("18"), ADAPTER, LORA)],
    "numbers by hand": [((1, 2, 3), (11, 12, 13), LORA), ((1, 2, 3), (21, 22, 23), None)],
    "names that look ahead": [((2**20,), (2**30,), {"lookahead_token_ids": [[1]], **LORA})],
}


@pytest.mark.parametrize("steps", WRONG.values(), ids=WRONG)
@each_parameter
def test_names_that_contradict_the_tokens_of_an_event_are_a_warning(steps):
    assert ("wrong_hash", False) in [found[:2] for found in published(*steps)]


@pytest.mark.parametrize("steps", RIGHT.values(), ids=RIGHT)
@each_parameter
def test_names_that_follow_from_the_tokens_or_cannot_be_computed_are_right(steps):
    assert [found for found in published(*steps) if found[0] == "wrong_hash"] == []


@pytest.mark.parametrize("name", ["hashes of the base model", "names of the base model"])
@each_parameter
def test_with_a_declared_chain_contradicting_names_are_an_error(name):
    assert ("wrong_hash", True) in [found[:2] for found in published(*WRONG[name], chained=True)]


def test_with_chained_false_names_are_not_checked():
    assert published(*WRONG["hashes of the base model"], chained=False) == []


def test_with_a_declared_hash_adapter_blocks_must_not_have_the_names_of_the_base_model():
    """The adapter's path is hashed and is in no event, so the right name is unknown."""
    steps = [(vllm_names(), ADAPTER, LORA)]
    (problem,) = published(*steps, hash="sha256_cbor", seed="0")
    assert problem[:2] == ("wrong_hash", True)
    assert problem[2].endswith(" has the name of its tokens alone")
    assert published((vllm_names("17"), ADAPTER, LORA), hash="sha256_cbor", seed="0") == []
