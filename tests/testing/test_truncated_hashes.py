"""An index that keeps 32, 53 or 63 bits of a hash is found by the contract and by `traffic`."""

import pytest
from contract_runs import failure_of, names_of_tests
from depth import examples, few, takes_long
from hybrid_sizes import HYBRID, block_size_of, sized
from hypothesis import Phase, given, seed, settings
from truncating_indexes import KEPT, HashIndex, TokenIndex

from pytest_kvmock import BACKENDS, EngineProfile, EventRulesBroken, RouterHarness, block_hashes
from pytest_kvmock.engines import backend_spec
from pytest_kvmock.testing import IndexContract, Program, ServeNear, play, traffic
from pytest_kvmock.values.programs.near_hashes import TRUNCATIONS, hash_pair, token_pair, truncated

KINDS = [HashIndex, TokenIndex]
SIZES = EngineProfile(block_size=4, num_blocks=8, workers=2)

each_truncation = pytest.mark.parametrize("kept", KEPT)
each_kind = pytest.mark.parametrize("kind", KINDS)
of_which = pytest.mark.parametrize("of", ["block", "local"])

OF_BLOCKS = [name for name, spec in BACKENDS.items() if spec.group != "speculative"]
"""Backends whose names are of single blocks, like the hashes of these tests."""


def contract_of(make, **body):
    # These indexes look up each prefix in full, which is found beyond this size.
    return type("TestMine", (IndexContract,), {"make_index": lambda self: make(), "size_blocks": 2_000, **body})


# -------------------------------------------------------------------------------------------------- the pairs


@each_truncation
def test_two_hashes_of_a_pair_differ_and_agree_in_the_kept_part(kept):
    first, second = hash_pair(kept)
    assert first != second
    assert truncated(first, kept) == truncated(second, kept)


@each_truncation
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64])
def test_the_hashes_of_two_token_blocks_differ_and_agree_in_the_kept_part(block_size, kept):
    first, second = token_pair(block_size, kept)
    assert (block_size, block_size) == (len(first), len(second))
    (one,), (other,) = block_hashes(first, block_size), block_hashes(second, block_size)
    assert one != other
    assert truncated(one, kept) == truncated(other, kept)


@each_truncation
@pytest.mark.parametrize("block_size", [1, 2, 12])
def test_for_other_block_sizes_a_pair_that_agrees_in_32_bits_is_found(block_size, kept):
    first, second = token_pair(block_size, kept)
    (one,), (other,) = block_hashes(first, block_size), block_hashes(second, block_size)
    bits = TRUNCATIONS[kept].otherwise
    assert one != other
    assert truncated(one, bits) == truncated(other, bits)


def test_a_signed_hash_is_truncated_like_the_unsigned_one():
    assert [truncated(2**64 - 5, kept) for kept in KEPT] == [truncated(-5, kept) for kept in KEPT]


# ------------------------------------------------------------------------------------------------ the contract

ABOUT = {"local": "test_local_hashes_are_compared_whole", "block": "test_block_hashes_are_compared_whole"}


@each_truncation
@of_which
@each_kind
def test_the_contract_finds_an_index_that_keeps_part_of_a_hash(kind, of, kept):
    failure = failure_of(contract_of(lambda: kind(kept, of)), ABOUT[of], KeyError)
    assert f"p and q are blocks whose {of} hashes agree {TRUNCATIONS[kept].words}\n" in str(failure)


@takes_long
@pytest.mark.parametrize("kind", few(KINDS))
def test_no_other_test_of_the_contract_finds_a_truncated_hash(kind):
    contract = contract_of(lambda: kind("low63", "local"))
    others = [
        name for name in names_of_tests(contract) if name not in ABOUT.values() and not _is_skipped(contract, name)
    ]
    assert [name for name in others if failure_of(contract, name) is not None] == []


def _is_skipped(contract, name):
    try:
        getattr(contract(), name)()
    except pytest.skip.Exception:
        return True
    return False


@pytest.mark.parametrize("block_size", [4, 16, 2])
@each_kind
def test_an_index_that_keeps_whole_hashes_passes(kind, block_size):
    sizes = {"size": block_size} if kind is TokenIndex else {}
    contract = contract_of(lambda: kind(**sizes), block_size=block_size)
    assert [failure_of(contract, name) for name in ABOUT.values()] == [None, None]


# ------------------------------------------------------------------------------------------------- the traffic


def is_found(make, seed_of_hypothesis, backend="lineage", most=100):
    @seed(seed_of_hypothesis)
    @settings(max_examples=most, database=None, phases=(Phase.generate,))
    @given(traffic(workers=2))
    def run(program):
        with RouterHarness(sized(SIZES, backend), backend, make()) as kv:
            play(kv, program)

    try:
        run()
    except (EventRulesBroken, KeyError):
        return True
    return False


@pytest.mark.parametrize("kept", few(KEPT, 2))
@of_which
@each_kind
def test_traffic_finds_an_index_that_keeps_part_of_a_hash(kind, of, kept):
    assert is_found(lambda: kind(kept, of), 1)


@pytest.mark.parametrize("backend", few(OF_BLOCKS, 3))
@each_kind
def test_an_index_that_keeps_whole_hashes_passes_traffic_over_every_backend(kind, backend):
    counts, size = backend_spec(backend).traits.copies, block_size_of(backend, 4)
    most = 5 if backend in HYBRID else 20  # the models of an engine differ in sizes and share its manager
    assert not is_found(lambda: kind(counts=counts, size=size), 1, backend, most)


@each_truncation
@of_which
@each_kind
@pytest.mark.parametrize("backend", few(OF_BLOCKS, 3))
def test_one_step_finds_a_truncated_hash_over_every_backend(backend, kind, of, kept):
    sizes = sized(SIZES.replace(workers=1), backend)
    index = kind(kept, of, size=sizes.block_size)
    with pytest.raises(EventRulesBroken), RouterHarness(sizes, backend, index) as kv:
        play(kv, Program(ServeNear(kept)))


def test_traffic_can_leave_out_prompts_with_near_hashes():
    @settings(max_examples=examples(100), database=None)
    @given(traffic(near_hashes=False))
    def run(program):
        assert not any(isinstance(step, ServeNear) for step in program)

    run()
