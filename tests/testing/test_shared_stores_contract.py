"""`IndexContract.stores`: right indexes pass, and each wrong one is found by name."""

import pytest
from contract_runs import failure_of
from depth import each_parameter, takes_long
from sharing_indexes import SHARED, STORES, sharing

from pytest_kvmock import RadixIndex, StorageTier
from pytest_kvmock.testing import IndexContract
from pytest_kvmock.testing.index import store_owners
from pytest_kvmock.testing.index.store_owners import SharedStores

TESTS = [name for name in vars(SharedStores) if name.startswith("test_")]


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
