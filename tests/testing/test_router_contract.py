"""Right routers hold the contract of routers; planted bugs fail it, each in a text that says what is wrong."""

import asyncio
import re

import pytest
from contract_runs import failure_of, names_of_tests
from depth import DEEP

from pytest_kvmock.router import DynamoRouter, LeastLoaded, RoundRobin
from pytest_kvmock.testing import ROUTER_BUGS, RightRouter, RouterContract

TESTS = names_of_tests(RouterContract)


class OfDynamo(RouterContract):
    selector = DynamoRouter("1.2.1")

    def make_router(self):
        return DynamoRouter("1.2.1")


class OfRight(RouterContract):
    selector = DynamoRouter("1.2.1")

    def make_router(self, workers):
        return RightRouter(workers)


class OfTurns(RouterContract):
    def make_router(self):
        return RoundRobin()


class OfLeast(RouterContract):
    def make_router(self):
        return LeastLoaded()


def of_bug(name):
    class OfBug(OfRight):
        def make_router(self, workers):
            return ROUTER_BUGS[name].make(workers)

    return OfBug


@pytest.mark.parametrize("contract", [OfDynamo, OfRight, OfTurns, OfLeast])
@pytest.mark.parametrize("name", TESTS)
def test_a_right_router_holds_it(contract, name):
    try:
        getattr(contract(), name)()
    except pytest.skip.Exception as skipped:
        assert "not checked" in str(skipped)
        assert name.endswith(("_are_right", "_cheapest"))
        assert contract is not OfRight


def test_what_a_router_does_not_have_is_a_skip_that_says_so():
    for name, text in (
        ("test_its_loads_are_right", "RoundRobin has no loads(): what it counts of its open requests was not checked"),
        ("test_its_overlaps_are_right", "RoundRobin has no overlap(request): what it takes each worker to hold was not"),
        ("test_its_workers_are_right", "RoundRobin has no workers(): whom it takes to be there was not checked"),
        ("test_its_picks_are_among_the_cheapest", "OfTurns.selector is None: whether a cheaper worker was there was not"),
    ):
        with pytest.raises(pytest.skip.Exception, match=re.escape(text)):
            getattr(OfTurns(), name)()
