"""Disconnecting clients in the contract of routers: right routers pass, and one that keeps counting them fails."""

import re

import pytest
from contract_runs import failure_of, names_of_tests

from pytest_kvmock.fleets import DynamoRouter, LeastLoaded, RoundRobin
from pytest_kvmock.testing import RightRouter, RouterContract
from pytest_kvmock.testing.router.router_aborts import RouterAborts

TESTS = names_of_tests(RouterAborts)
USED_AGAIN = "test_a_worker_whose_clients_left_is_used_again"


def contract_of(make, **traits):
    def make_router(self, workers):
        return make(workers)

    return type("OfOne", (RouterContract,), {"make_router": make_router, **traits})


class Fewest:
    """Counts requests itself without reporting it; picks the worker with the fewest, and waits if all have too
    many.
    """

    most = None

    def __init__(self, workers):
        self.open = dict.fromkeys(workers, 0)
        self.of = {}

    def pick(self, request, candidates):
        least = min(self.open.values())
        if self.most is not None and least >= self.most:
            return None
        return next(worker for worker, count in self.open.items() if count == least)

    def dispatched(self, request, worker):
        self.open[worker] += 1
        self.of[request] = worker

    def finished(self, request):
        self.free(self.of.pop(request))

    def free(self, worker):
        if worker in self.open:
            self.open[worker] -= 1

    def worker_added(self, worker):
        self.open[worker] = 0

    def worker_removed(self, worker):
        del self.open[worker]


class Capped(Fewest):
    most = 3


class Leaks(Fewest):
    """Frees only completed requests."""

    def finished(self, request):
        if request.status != "aborted":
            super().finished(request)


class LeaksCapped(Leaks, Capped):
    """The same, and lets requests wait."""


class FreesTwice(Fewest):
    """Frees an aborted request twice."""

    def finished(self, request):
        worker = self.of[request]
        super().finished(request)
        if request.status == "aborted":
            self.free(worker)


class LeaksAndSays(RightRouter):
    def finished(self, request):
        if request.status != "aborted":
            super().finished(request)


class FreesTwiceAndSays(RightRouter):
    def finished(self, request):
        load, _ = self.book._open[request, request.phase]
        super().finished(request)
        load.requests -= request.status == "aborted"


class CountsWaiting(RightRouter):
    """Reserves a place for a waiting request until its dispatch, and never checks the reservation again."""

    def __init__(self, workers):
        super().__init__(workers)
        self.kept = {}

    def pick(self, request, candidates):
        self.drop(request)
        worker = super().pick(request, candidates)
        if self.book.loads[worker].requests - len([each for each in self.kept.values() if each == worker]) >= 2:
            self.kept[request] = worker
            return None
        return worker

    def loads(self):
        found = super().loads()
        stale = [worker for request, worker in self.kept.items() if request.status == "aborted"]
        return {
            worker: (prefill, blocks, count + stale.count(worker)) for worker, (prefill, blocks, count) in found.items()
        }

    def drop(self, request):
        self.kept.pop(request, None)


class WaitsForOne(Capped):
    """Serves waiting requests in order, and waits for one that was aborted."""

    def __init__(self, workers):
        super().__init__(workers)
        self.first = None

    def pick(self, request, candidates):
        if self.first not in (None, request):
            return None
        worker = super().pick(request, candidates)
        self.first = request if worker is None else None
        return worker


class Avoids(Fewest):
    """Sends nothing to a worker for five seconds after a client of it left."""

    def __init__(self, workers):
        super().__init__(workers)
        self.until = dict.fromkeys(workers, 0.0)

    def pick(self, request, candidates):
        rested = [each.worker for each in candidates if self.until[each.worker] <= request.now_ms]
        return min(rested or self.open, key=self.open.__getitem__)

    def finished(self, request):
        if request.status == "aborted":
            self.until[self.of[request]] = request.now_ms + 5000.0
        super().finished(request)


@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize(
    ("make", "traits"),
    [
        (RightRouter, {}),
        (Fewest, {}),
        (Capped, {}),
        (lambda _: DynamoRouter("1.6.1", router_queue_threshold=0.001), {}),
        (lambda _: RoundRobin(), {}),
        (lambda _: LeastLoaded(), {"first_of_equals": True}),
    ],
    ids=["right", "fewest", "capped", "dynamo", "turns", "least"],
)
def test_a_right_router_passes_the_tests_of_aborts(make, traits, name):
    assert None is failure_of(contract_of(make, **traits), name)


@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize("backend", ["vllm", "sglang", "mocker_sglang_1_6", "vllm_gpt_oss"])
def test_a_right_router_passes_the_tests_of_aborts_over_any_engine(backend, name):
    def make(workers):
        return RightRouter(workers, copies=backend.startswith("vllm"))

    assert None is failure_of(contract_of(make, backend=backend), name)


@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize("make", [LeaksAndSays, FreesTwiceAndSays])
def test_a_router_that_leaks_or_frees_twice_is_found_at_the_first_wrong_request(make, name):
    text = failure_of(contract_of(make), name)
    wanted = (
        rf"^Failed: OfOne: .*: load_drift: {make.__name__}.loads\(\) says .* requests? of worker . before the pick for "
    )
    assert re.search(wanted, text, re.DOTALL)
    assert re.search(r"they differ since finished\(request \d+\)", text)


def test_a_router_that_keeps_counting_a_withdrawn_request_is_found():
    text = failure_of(contract_of(CountsWaiting), "test_it_forgets_who_leaves_while_it_waits")
    assert re.search(
        r"load_drift: CountsWaiting.loads\(\) says .* they differ since withdrawn\(request \d+\)", text, re.DOTALL
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            Leaks,
            r"worker 0 got none of 90 requests.*; expected some: .* called off .*counts them as open, or avoids .*\. f",
        ),
        (FreesTwice, r"worker . got none of 90 requests"),
        (LeaksCapped, r"worker 0 got none of 90 requests|pick\(\) returned None and nothing runs"),
    ],
)
def test_a_router_without_loads_is_judged_by_its_picks(make, text):
    assert re.search(text, failure_of(contract_of(make), USED_AGAIN))


def test_a_policy_that_avoids_a_worker_whose_clients_left_declares_how_long():
    text = "got none of 90 requests"
    assert text in failure_of(contract_of(Avoids), USED_AGAIN)
    assert failure_of(contract_of(Avoids, cools_down_s=5.0), USED_AGAIN) is None
    assert text in failure_of(contract_of(Leaks, cools_down_s=5.0), USED_AGAIN)


def test_a_router_that_waits_for_an_aborted_request_is_found():
    found = [failure_of(contract_of(WaitsForOne), name) for name in TESTS]
    assert any("pick() returned None and nothing runs" in (text or "") for text in found)
