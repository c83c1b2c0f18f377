"""Routers over stores shared by workers: wrong ones fail by name, and right ones pass."""

import pytest
from contract_runs import failure_of
from depth import each_parameter, few
from store_routers import (
    ALL,
    CHUNKS,
    FAR,
    LOWERED,
    OUTLIVES,
    OWN,
    RIGHT,
    STORES,
    WRONG,
    Counting,
    CountsFarAsTheDevice,
    CreditsAPartOfAChunk,
    LeavesStoresOut,
    LowersAfterAMiss,
    OfChunks,
    OfFar,
    contract,
)

from pytest_kvmock.fleets import RoundRobin
from pytest_kvmock.testing import RouterContract


def skip_of(subject, name=OWN):
    with pytest.raises(pytest.skip.Exception) as skipped:
        getattr(subject(), name)()
    return str(skipped.value)


@pytest.mark.parametrize("seed", few(range(5)))
@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ALL)
@each_parameter
def test_a_right_router_over_stores_passes(name, kind, seed):
    if name != OWN and not hasattr(kind, "overlap_by_owner"):
        assert "what it promises of a store was not checked" in skip_of(contract(kind, seed), name)
    else:
        assert failure_of(contract(kind, seed), name) is None


@pytest.mark.parametrize("seed", few(range(5)))
@pytest.mark.parametrize("name", [OWN, OUTLIVES])
@pytest.mark.parametrize(("kind", "stores"), [(OfFar, FAR), (OfChunks, CHUNKS), (LeavesStoresOut, FAR)])
@each_parameter
def test_a_right_router_passes_over_other_kinds_of_stores(kind, stores, name, seed):
    if name == OWN or kind is not LeavesStoresOut:
        assert failure_of(contract(kind, seed, stores=stores), name) is None


@pytest.mark.parametrize(
    ("kind", "stores", "text"),
    [
        (CountsFarAsTheDevice, FAR, "CountsFarAsTheDevice.overlap() says 8 of 8 blocks on worker 0"),
        (CreditsAPartOfAChunk, CHUNKS, "promises worker 0 7 of 7 blocks from the store 'chunks'"),
    ],
)
@each_parameter
def test_a_wrong_router_is_found_over_other_kinds_of_stores(kind, stores, text):
    assert text in (failure_of(contract(kind, stores=stores), OWN) or "")


@pytest.mark.parametrize("seed", few(range(5)))
@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
@each_parameter
def test_a_wrong_router_over_stores_is_found(kind, seed):
    name, text = WRONG[kind]
    found = failure_of(contract(kind, seed), name) or ""
    assert [part for part in text.split("...") if part.strip() not in found] == [], found


def test_unjudged_properties_of_stores_are_reported():
    class OfTurns(RouterContract):
        def make_router(self):
            return RoundRobin()

    assert skip_of(OfTurns) == "OfTurns.stores is None: stores that workers share were not checked"
    for stores in ({"far": {"kind": "objects", "workers": [0, 1]}}, {"disk": {"kind": "files", "workers": [0]}}):
        OfTurns.stores = stores
        text = (
            "OfTurns: stores has none of files, mooncake, lmcache with two workers: stores that workers share were not "
        )
        text += "checked"
        assert skip_of(OfTurns) == text
    OfTurns.stores = STORES
    assert failure_of(OfTurns, OWN) is None
    asked = "RoundRobin has no overlap_by_owner(request): what it promises of a store was not checked"
    assert skip_of(OfTurns, LOWERED) == asked


@pytest.mark.parametrize(
    ("stores", "message"),
    [
        ({"disk": {"kind": "file", "workers": [0]}}, "stores['disk']: unknown kind 'file'; did you mean 'files'"),
        ({"disk": {"kind": "files", "workers": [0, 7]}}, "stores: worker ids must be below 7, got 7"),
        (
            {"a": {"kind": "lmcache", "workers": [0, 1], "chunk": 40}},
            "chunk must be a multiple of block_size, 16 tokens",
        ),
    ],
)
@each_parameter
def test_a_wrong_declaration_of_stores_is_refused(stores, message):
    assert message in failure_of(contract(Counting, stores=stores), OWN)


def notes_of(kind):
    """Return the notes that a contract adds to the summary of a run."""
    subject = contract(kind)()
    subject._properties, subject._class_id = [], "test_x.py::TestX"
    getattr(subject, LOWERED)()
    return [text for _, text in subject._properties]


def test_a_broken_promise_paid_twice_is_noted_and_is_no_failure():
    shows = "(request.reused_tokens in finished(request) shows a miss)"
    told = f"4 of 4 promises of deleted blocks were paid for twice {shows}"
    assert notes_of(Counting) == [f"test_x.py::TestX, the store 'disk': {told}"]
    assert notes_of(LowersAfterAMiss) == []
