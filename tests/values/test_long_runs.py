"""Long runs make the garbage collector run less often, never disable it, and restore its settings at the end."""

import asyncio
import gc
import weakref

import pytest

from pytest_kvmock import EngineProfile, Fleet, MockEngine, MockEngineArgs, Removed, RouterHarness, Stored, replay
from pytest_kvmock.fleets import RoundRobin, RouterError, synthetic_trace
from pytest_kvmock.fleets.report.page_data import fleet_data
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.harness.reduce.states import states
from pytest_kvmock.oracle import RadixIndex
from pytest_kvmock.servers import CaptureFile, CapturingJournal, KvServer, check_file
from pytest_kvmock.servers.capture import check
from pytest_kvmock.values.long_runs import RAISED, long_run

AT_START = (700, 10, 10)
IN_A_RUN = (RAISED, 10, 10)
ARGS = MockEngineArgs(num_gpu_blocks=96, block_size=4, max_num_batched_tokens=32)
TRACE = [*synthetic_trace(12, seed=3, block_size=4, input_tokens=(4, 24), output_tokens=(1, 4), interval_ms=10)]


@pytest.fixture(autouse=True)
def _collector_of_a_new_interpreter():
    found = gc.get_threshold()
    gc.set_threshold(*AT_START)
    yield
    gc.enable()
    gc.set_threshold(*found)


class Hooked(RoundRobin):
    """A router that calls a hook before each pick."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def pick(self, request, candidates):
        self.hook()
        return super().pick(request, candidates)

    def cost(self, request, candidate):  # of a selector
        self.hook()
        return float(candidate.worker)


class Cycle:
    def __init__(self):
        self.itself = self


def fleet(hook, **options):
    return Fleet([MockEngine(ARGS), MockEngine(ARGS)], Hooked(hook), **options)


def thresholds_in_a_fleet(prepare=lambda: None):
    seen = set()

    def look():
        prepare()
        seen.add(gc.get_threshold())

    fleet(look).run(TRACE)
    return seen


# ------------------------------------------------------------------------------------------------ what is a long run


def a_fleet(look, _):
    fleet(look).run(TRACE)


def an_async_fleet(look, _):
    asyncio.run(fleet(look).arun(TRACE))


def a_replay(look, _):
    replay((request for request in TRACE if look() is None), [MockEngine(ARGS)])


def a_page(look, _):
    fleet_data(fleet(lambda: None, record=True).run(TRACE), selector=Hooked(look))


def of_a_wrong_event():
    kv = RouterHarness(backend="lru", index=RadixIndex())
    for block in range(1, 90):
        kv.apply([Stored(None, (block,), (block,))], 0)
    kv.apply([Removed((99,))], 0)
    return kv


def a_reduction(look, _):
    assert reproduce(of_a_wrong_event(), expired=lambda: look() is not None).events


def states_of_books(look, _):
    assert states(of_a_wrong_event(), 60, 0, expired=lambda: look() is not None)["steps"]


def a_check(look, home):
    with CaptureFile(home / "capture.jsonl", {"engine": None, "seed": 0}) as file:
        journal = CapturingJournal(file, lambda _: "lru")
        kv = RouterHarness(EngineProfile(block_size=4, num_blocks=64), "lru", journal=journal)
        kv.worker(0).serve(range(40))
    assert check_file(home / "capture.jsonl", progress=lambda *_: look()).log.total


@pytest.mark.parametrize("run", [a_fleet, an_async_fleet, a_replay, a_page, a_reduction, states_of_books, a_check])
def test_the_garbage_collector_runs_less_often_during_a_long_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "_EVERY", 1)
    seen = set()
    run(lambda: seen.add((gc.isenabled(), gc.get_threshold())), tmp_path)
    assert seen == {(True, IN_A_RUN)}
    assert (gc.isenabled(), gc.get_threshold()) == (True, AT_START)


# ------------------------------------------------------------------------------------------ what is garbage is
# collected


def test_a_reference_cycle_made_by_a_router_hook_is_collected_after_the_run():
    made = []
    fleet(lambda: made.append(weakref.ref(Cycle()))).run(TRACE)
    assert len(TRACE) == len(made)
    kept = []
    while any(ref() is not None for ref in made) and len(kept) < 10_000:  # no gc.collect(): new allocations are enough
        kept.append([])
    assert [None] * len(TRACE) == [ref() for ref in made]


def test_many_reference_cycles_made_by_hooks_are_collected_during_the_run():
    made = []

    def many():
        made.append(weakref.ref(Cycle()))
        for _ in range(RAISED // 4):
            Cycle()

    fleet(many).run(TRACE)
    assert made[0]() is None


# ---------------------------------------------------------------------------------------------- left as it was found


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_an_exception_restores_the_collector_thresholds(raised):
    def hook():
        assert gc.get_threshold() == IN_A_RUN
        raise raised

    with pytest.raises((RouterError, KeyboardInterrupt)):
        fleet(hook).run(TRACE)
    assert gc.get_threshold() == AT_START


@pytest.mark.parametrize("own", [(699, 10, 10), (1, 1, 1), (100_000, 50, 1_000), (0, 10, 10), (700, 11, 10)])
def test_custom_collector_thresholds_are_not_changed(own):
    gc.set_threshold(*own)
    assert {own} == thresholds_in_a_fleet()
    assert own == gc.get_threshold()


@pytest.mark.parametrize("own", [(2_000, 10, 10), (2_000, 10, 0)])
def test_the_default_thresholds_of_later_python_versions_are_raised(own):
    gc.set_threshold(*own)
    assert {(RAISED, *own[1:])} == thresholds_in_a_fleet()
    assert own == gc.get_threshold()


def test_a_disabled_collector_stays_disabled():
    gc.disable()
    assert thresholds_in_a_fleet() == {AT_START}
    assert not gc.isenabled()
    assert gc.get_threshold() == AT_START


def test_thresholds_set_by_a_hook_are_kept():
    assert thresholds_in_a_fleet(lambda: gc.set_threshold(5, 5, 5)) == {(5, 5, 5)}
    assert gc.get_threshold() == (5, 5, 5)


def test_a_nested_run_does_not_restore_the_thresholds_of_the_outer_run():
    with long_run():
        fleet(lambda: None).run(TRACE)
        assert gc.get_threshold() == IN_A_RUN
    assert gc.get_threshold() == AT_START


# ---------------------------------------------------------------------------------------- while engines are served


def test_thresholds_are_not_raised_while_a_server_runs():
    with RouterHarness(EngineProfile(block_size=16, num_blocks=64, workers=1)) as kv:
        with KvServer(kv):
            assert thresholds_in_a_fleet() == {AT_START}
        assert thresholds_in_a_fleet() == {IN_A_RUN}


def test_a_server_started_within_a_run_restores_the_thresholds():
    with RouterHarness(EngineProfile(block_size=16, num_blocks=64, workers=1)) as kv, long_run(), KvServer(kv):
        assert gc.get_threshold() == AT_START
        with long_run():
            assert gc.get_threshold() == AT_START
    assert gc.get_threshold() == AT_START
