"""Routers that detect an unannounced restart by event ids that start again, and routers that do not: both are right."""

from random import Random

import pytest
from contract_runs import failure_of
from depth import few, seeds

from pytest_kvmock import (
    BACKENDS,
    EngineProfile,
    Fleet,
    KvCacheEvent,
    MockEngine,
    MockEngineArgs,
    RadixIndex,
    RouterEvent,
    RouterHarness,
    Stored,
)
from pytest_kvmock.fleets import RoundRobin, synthetic_trace
from pytest_kvmock.fleets.noticed_restarts import NoticedRestarts
from pytest_kvmock.testing import RightRouter, RouterContract

SCENE = "test_it_lives_through_a_silent_restart"
BACKENDS_ = ["lineage", "vllm", "sglang", "mocker_sglang_1_6", "hash_cache"]


class Capped(RightRouter):
    """Sends at most `cap` requests to a worker at once."""

    cap = 1000

    def choices(self, candidates):
        return [each for each in super().choices(candidates) if self.book.loads[each].requests < self.cap]

    def pick(self, request, candidates):
        return super().pick(request, candidates) if self.choices(candidates) else None


class Noticing(Capped):
    """Drops the blocks of a rank when its event ids start again."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.last = {}

    def apply(self, event):
        key = event.worker_id, event.event.dp_rank
        if event.event.event_id <= self.last.get(key, -1):
            self.began_anew(key)
        self.last[key] = event.event.event_id
        super().apply(event)

    def began_anew(self, key):
        self.index.remove_worker_dp_rank(*key)

    def worker_removed(self, worker):
        super().worker_removed(worker)
        self.last = {key: last for key, last in self.last.items() if worker not in (key, key[0])}


class DropsTooMuch(Noticing):
    """Drops the blocks of all workers."""

    def began_anew(self, key):
        for worker in self.workers():
            self.index.remove_worker(worker)


class DropsLater(Noticing):
    """Drops later blocks too: ten events late."""

    count = 0

    def began_anew(self, key):
        self.count = 10

    def apply(self, event):
        super().apply(event)
        if self.count and event.worker_id == 1:
            self.count -= 1
            if not self.count:
                self.index.remove_worker(1)


class Declared(Noticing):
    survives = ("restart",)


class OnlyDeclared(RightRouter):
    survives = ("restart",)


def contract(kind, backend=None, cap=1000, **traits):
    copies = backend is not None and BACKENDS[backend].residency == "counted"

    def make_router(self, workers):
        router = kind(workers, copies=copies)
        router.cap = cap
        return router

    return type("OfRouter", (RouterContract,), {"backend": backend, "make_router": make_router, **traits})


@pytest.mark.parametrize("cap", [1000, 4, 3, 2])
@pytest.mark.parametrize("backend", BACKENDS_)
@pytest.mark.parametrize("kind", [Capped, Noticing, Declared])
def test_a_router_that_detects_a_silent_restart_and_one_that_does_not_are_both_right(kind, backend, cap):
    assert failure_of(contract(kind, backend, cap), SCENE) is None


@pytest.mark.parametrize("kind", [DropsTooMuch, DropsLater])
def test_a_router_that_drops_too_many_blocks_is_wrong(kind):
    failure = failure_of(contract(kind), SCENE)
    assert "overlap_drift" in failure
    assert "by the reference index of the same events" in failure


def test_a_router_that_declares_to_detect_restarts_must_do_so():
    text = "as it dropped what it held before event 0 at "
    assert failure_of(contract(Declared), SCENE) is None
    assert failure_of(contract(Noticing, survives=("restart",)), SCENE) is None
    for failing in (contract(OnlyDeclared), contract(RightRouter, survives=("restart",))):
        failure = failure_of(failing, SCENE)
        assert "unannounced restarts of worker 1 at 150 and 1500 ms: overlap_drift" in failure
        assert text in failure
        assert ", which began its ids again" in failure


@pytest.mark.parametrize("survives", ["restart", ("double",), 3])
def test_survives_must_be_a_restart(survives):
    text = f"survives must be ('restart',) or (), got {survives!r}"
    assert text in failure_of(contract(RightRouter, survives=survives), SCENE)
    router = type("Router", (RoundRobin,), {"survives": survives})()
    with pytest.raises(TypeError, match="Router: survives must be"):
        Fleet([MockEngine(MockEngineArgs())], router)


# ------------------------------------------------------------------------------------------------- any fleet


def trace(seed):
    return list(
        synthetic_trace(
            60, seed=seed, block_size=4, groups=4, prefix_blocks=(2, 6), input_tokens=(1, 30), output_tokens=(1, 12),
            interval_ms=8, turns=(1, 3), delay_ms=(5, 60),
        )
    )  # fmt: skip


KINDS = [Capped, Noticing, Declared]


def happen(fleet, rng, workers):
    """Request announced and unannounced restarts of random workers, and one crash."""
    for _ in range(rng.randint(1, 4)):
        fleet.at(rng.uniform(1, 400)).restart(rng.randrange(workers), announced=rng.random() < 0.2)
    if rng.random() < 0.3:
        fleet.at(410).crash(rng.randrange(workers), notice_ms=20)


@pytest.mark.parametrize("seed", seeds(60))
@pytest.mark.parametrize("kind", KINDS)
def test_over_bare_engines_each_of_these_routers_is_right_in_every_run(kind, seed):
    rng = Random(seed)
    backend, ranks = rng.choice(BACKENDS_), rng.choice([1, 1, 2])
    engine_type = BACKENDS[backend].scheduler
    args = MockEngineArgs(engine_type=engine_type, num_gpu_blocks=rng.choice([64, 200]), block_size=4, dp_size=ranks)
    names = [(worker, rank) for worker in range(3) for rank in range(ranks)] if ranks > 1 else list(range(3))
    router = kind(names, copies=BACKENDS[backend].residency == "counted")
    router.cap = rng.choice([1000, 3])
    delay = rng.choice([0, 0, 15])
    fleet = Fleet([MockEngine(args, backend=backend) for _ in names], router, event_delay_ms=delay)
    for run in range(2):
        if len(fleet.engines) == 3 * ranks:
            happen(fleet, rng, 3)
        report = fleet.run(trace(seed + run))
        assert report.beliefs == ()
        assert len(report.completed) == report.arrived


@pytest.mark.parametrize("backend", few(BACKENDS_, 3))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(6))
def test_over_a_harness_each_of_these_routers_is_right_too(kind, backend, seed):
    harness = RouterHarness(EngineProfile(block_size=4, num_blocks=200, workers=3), backend)
    fleet = harness.fleet(kind(range(3), copies=BACKENDS[backend].residency == "counted"))
    fleet.at(Random(seed).uniform(50, 200)).restart(1, announced=False)
    assert fleet.run(trace(seed)).beliefs == ()
    assert all(problem.fault is not None for problem in harness.judge().errors)


# ------------------------------------------------------------------------------------------------- what is noticed


def stored(number, block):
    return RouterEvent(1, KvCacheEvent(number, Stored(None, (block,), (block,))))


def test_a_repeated_id_counts_as_a_restart():
    restarts = NoticedRestarts()
    restarts.applied(stored(0, 5), 1, RadixIndex, 1.0)
    restarts.restarted([1])
    restarts.applied(stored(0, 6), 1, RadixIndex, 2.0)
    assert restarts.noticed == {1: "event 0 at 2 ms"}


def test_an_announced_restart_ends_the_watch():
    restarts = NoticedRestarts()
    restarts.restarted([1])
    assert restarts.prefill_tokens(1) == 0
    restarts.forget(1)
    assert restarts.prefill_tokens(1) is None
    for number in (0, 0):  # like in any stream after an announced restart
        restarts.applied(stored(number, 5), 1, RadixIndex, 1.0)
    assert restarts.noticed == {}
