"""`IndexContract.stores`: right indexes pass, and each wrong one is found by name."""

from contextlib import suppress

import pytest
from contract_runs import failure_of, names_of_tests
from depth import each_parameter, takes_long
from sharing_indexes import SHARED, STORES, naming, sharing

from pytest_kvmock import RadixIndex, StorageTier
from pytest_kvmock.engines import VllmHasher
from pytest_kvmock.testing import IndexContract
from pytest_kvmock.testing.index import store_owners
from pytest_kvmock.testing.index.store_owners import SharedStores

NAMES = "test_names_that_it_computes_are_in_the_stream_of_a_store"
TESTS = [name for name in vars(SharedStores) if name.startswith("test_") and name != NAMES]


class LeavesStoresOut(RadixIndex):
    """An index of workers only."""

    def __init__(self, *, stores, **traits):
        super().__init__(**traits)
        self.tiers = {"disk": StorageTier.DISK, "mooncake": StorageTier.EXTERNAL}

    def apply(self, event):
        if event.storage_tier not in self.tiers.values():
            super().apply(event)


class PromisesTheFirst(RadixIndex):
    """Promises the first block of a store to all workers alike."""

    def find_tiered(self, local_hashes, **more):
        found = super().find_tiered(local_hashes, **more)
        for spec in self.stores.values():
            own = [scores for tier, scores in found.items() if tier is not spec.tier]
            for key, blocks in [*found.get(spec.tier, {}).items()]:
                found[spec.tier][key] = max(min(blocks, 1 - sum(scores.get(key, 0) for scores in own)), 0)
        return found


@pytest.mark.parametrize("make", [RadixIndex, LeavesStoresOut, PromisesTheFirst])
@each_parameter
def test_a_right_index_of_stores_passes(make):
    contract = sharing(make)
    assert {name: failure for name in TESTS if (failure := failure_of(contract, name)) is not None} == {}


@takes_long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [RadixIndex, LeavesStoresOut, PromisesTheFirst])
def test_a_right_index_of_stores_follows_any_traffic(make, seed, monkeypatch):
    monkeypatch.setattr(store_owners, "_TRAFFIC", [(10 + seed, chunk) for chunk in (1, 2, 4)])
    assert failure_of(sharing(make), "test_it_follows_workers_that_share_a_folder") is None


@pytest.mark.parametrize("make", [RadixIndex, LeavesStoresOut, PromisesTheFirst])
@each_parameter
def test_a_right_index_of_two_folders_passes(make):
    stores = {"a": {"kind": "files", "workers": [0, 1]}, "b": {"kind": "files", "workers": [2, 3]}}
    assert failure_of(sharing(make, stores), "test_it_follows_workers_that_share_a_folder") is None


@takes_long
def test_an_index_of_stores_passes_the_tests_of_lower_tiers_of_workers():
    contract, failures = sharing(RadixIndex), {}
    for name in names_of_tests(contract):
        with suppress(pytest.skip.Exception):
            failures[name] = failure_of(contract, name)
    assert len(failures) > 80
    assert {name: failure for name, failure in failures.items() if failure is not None} == {}


def test_tests_that_are_not_about_stores_use_workers_of_no_store():
    contract = sharing(RadixIndex)
    assert failure_of(contract, "test_a_tier_goes_on_where_the_faster_ones_end") is None


@pytest.mark.parametrize(
    ("stores", "reason"),
    [
        ({}, "stores is empty: streams of workers"),
        ({"chunks": {"kind": "lmcache", "workers": [0, 1]}}, "stores has only stores of kind 'lmcache'"),
    ],
)
def test_stores_without_announced_blocks_are_not_judged(stores, reason):
    with pytest.raises(pytest.skip.Exception, match=reason):
        failure_of(sharing(RadixIndex, stores), "test_a_hole_ends_what_a_store_promises")


def test_a_right_index_passes_over_engines_that_clear_lower_tiers():
    contract = sharing(RadixIndex, backends=("lineage",))
    assert {name: failure for name in TESTS[:-1] if (failure := failure_of(contract, name)) is not None} == {}


@pytest.mark.parametrize(("mutant", "names", "ends_in"), SHARED.each())
@each_parameter
def test_a_wrong_index_of_stores_is_found(mutant, names, ends_in):
    assert [name for name in names if failure_of(mutant, name, *ends_in) is None] == []


def test_stores_are_not_judged_unless_they_are_declared():
    class TestIt(IndexContract):
        def make_index(self):
            return RadixIndex()

    with pytest.raises(pytest.skip.Exception, match="stores is None: streams of workers that share a store were"):
        TestIt().test_a_hole_ends_what_a_store_promises()


def test_a_wrong_declaration_of_stores_is_refused():
    contract = sharing(RadixIndex, stores={"disk": {"kind": "file", "workers": [0]}})
    with pytest.raises(pytest.fail.Exception, match=r"stores\['disk'\]: unknown kind 'file'; did you mean 'files'"):
        contract().test_a_hole_ends_what_a_store_promises()


def test_a_wrong_index_fails_with_the_declared_store_in_its_message():
    class CreditsThePublisher(RadixIndex):
        def __init__(self, *, stores, **traits):
            super().__init__(**traits)

    with pytest.raises(AssertionError) as error:
        sharing(CreditsThePublisher)().test_a_store_is_credited_alike_to_its_workers_and_to_no_other()
    assert "expected {0: 4, 1: 4} in disk, the index answered {(0, 0): 4}" in str(error.value)
    assert error.value.__notes__ == ["'disk' is shared by workers 0, 1: each alike, or less"]
    assert STORES["disk"]["workers"] == [0, 1]


def names_of_vllm(tokens, size=4):
    hasher = VllmHasher()
    return [hasher.name(digest) for digest in hasher.digests(tokens, size, 0, None)]


def names_of_lmcache(tokens, size=256, is_chained=True):
    """As LMCache's server names chunks; without a chain, each as if it were the first."""
    blake3 = pytest.importorskip("blake3").blake3
    first = before = blake3(bytes(12)).digest()
    names = []
    for end in range(size, len(tokens) + 1, size):
        words = b"".join(token.to_bytes(4, "big") for token in tokens[end - size : end])
        before = blake3((before if is_chained else first) + words).digest()
        names.append(int.from_bytes(before[-8:], "big"))
    return names


@pytest.mark.parametrize(
    ("names", "kind"), [(names_of_vllm, "files"), (names_of_vllm, "mooncake"), (names_of_lmcache, "lmcache")]
)
@each_parameter
def test_an_index_that_computes_the_names_of_a_store_passes(names, kind):
    assert failure_of(naming(names, kind), NAMES) is None
    assert failure_of(naming(lambda tokens: names(tokens)[:1], kind), NAMES) is None  # it may promise less


@pytest.mark.parametrize(
    ("names", "kind", "text"),
    [
        (lambda tokens: names_of_vllm(tokens, 8), "files", "no computed name is in the stream"),
        (lambda tokens: names_of_vllm(tokens, 8), "mooncake", "no computed name is in the stream"),
        (lambda tokens: names_of_lmcache(tokens, 4), "lmcache", "no computed name is in the stream"),
        (names_of_vllm, "lmcache", "no computed name is in the stream"),
        (lambda tokens: [], "mooncake", "no computed name is in the stream; computed []"),
        (
            lambda tokens: names_of_lmcache(tokens, is_chained=False),
            "lmcache",
            "only 1 of 3 computed names are in the stream",
        ),
    ],
)
@each_parameter
def test_an_index_that_computes_other_names_than_the_store_has_is_found(names, kind, text):
    found = failure_of(naming(names, kind), NAMES)
    assert text in found
    assert "for chunks of 256 tokens" in found or "for blocks of 4 tokens" in found


@pytest.mark.parametrize("kind", ["objects", "hicache"])
def test_names_of_a_store_that_no_engine_announces_are_not_judged(kind):
    with pytest.raises(pytest.skip.Exception, match="names of a store were not checked"):
        failure_of(naming(names_of_vllm, kind), NAMES)


def test_an_index_that_computes_no_names_is_not_judged_by_them():
    with pytest.raises(pytest.skip.Exception, match="store_names answers None"):
        failure_of(sharing(RadixIndex), NAMES)
