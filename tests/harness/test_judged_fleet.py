"""A fleet over the workers of a harness: verdict, faults, late events, incidents, and replay of the recording."""

from collections import Counter

import pytest
from depth import seeds

from pytest_kvmock import EngineProfile, MockEngine, Removed, RouterHarness
from pytest_kvmock.fleets import LeastLoaded, RoundRobin, RouterError, synthetic_trace
from pytest_kvmock.fleets.routing.routing import stream_of
from pytest_kvmock.oracle import RadixIndex
from pytest_kvmock.oracle.hygiene.entries import Injected
from pytest_kvmock.values.programs.interpreter import Interpreter

BACKENDS = ["lineage", "multi_lru", "hash_cache", "vllm", "mocker_sglang_1_6", "sglang"]


def trace(count=40, seed=0, **options):
    options = {"groups": 3, "prefix_blocks": (3, 3), "turns": (1, 2), "interval_ms": 10, "delay_ms": (5, 50), **options}
    return list(synthetic_trace(count, seed=seed, block_size=4, input_tokens=(4, 24), output_tokens=(1, 12), **options))


def harness(backend="lineage", **options):
    return RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=3), backend, **options)


class Blind(RadixIndex):
    """An index that ignores every third Removed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def apply(self, event):
        if isinstance(event.event.data, Removed):
            self.count += 1
            if self.count % 3 == 0:
                return
        super().apply(event)


class Numbering(RoundRobin):
    """Records gaps in the event ids of each stream since the last notice that its worker starts."""

    def __init__(self):
        super().__init__()
        self.last, self.gaps = {}, []

    def apply(self, event):
        expected = self.last.get(event.key, event.event.event_id - 1) + 1  # the stream may have begun before the run
        if event.event.event_id != expected:
            self.gaps.append((event.key, expected, event.event.event_id))
        self.last[event.key] = event.event.event_id

    def worker_added(self, worker):
        self.last[stream_of(worker)] = -1


@pytest.mark.parametrize("delay", [0, 35, lambda event: 10 * event.worker_id], ids=["at-once", "late", "by-worker"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_right_router_has_no_problem(backend, delay):
    with harness(backend) as world:
        report = world.fleet(event_delay_ms=delay).run(trace())
        assert len(report.completed) == 40
        assert world.events.total > 40


@pytest.mark.parametrize(
    "happen",
    [
        lambda at: at.crash(1),
        lambda at: at.crash(1, notice_ms=50),
        lambda at: at.crash(1, notice_ms=10_000),
        lambda at: at.restart(1),
        lambda at: at.leave(1),
        lambda at: at.join(),
    ],
    ids=["crash", "noticed-later", "noticed-never", "restart", "leave", "join"],
)
@pytest.mark.parametrize("delay", [0, 30])
@pytest.mark.parametrize("index", [None, RadixIndex], ids=["reference", "own-index"])
def test_incidents_cause_no_problem_by_themselves(happen, delay, index):
    with harness(index=None if index is None else index()) as world:
        fleet = world.fleet(event_delay_ms=delay)
        happen(fleet.at(100))
        assert len(fleet.run(trace()).completed) == 40


@pytest.mark.parametrize("delay", [0, 30])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_announced_restart_starts_all_streams_of_the_worker_again(backend, ranks, delay):
    router = Numbering()
    with RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=3, dp_size=ranks), backend) as world:
        fleet = world.fleet(router, event_delay_ms=delay)
        fleet.at(100).restart(1)
        assert len(fleet.run(trace()).completed) == 40
    assert router.gaps == []


@pytest.mark.parametrize("delay", [0, 30])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("notice_ms", [0, 60, 10_000], ids=["at-once", "noticed-later", "noticed-never"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_crashed_worker_publishes_nothing(backend, notice_ms, ranks, delay):
    published, by_its_end = Counter(), []

    class Router(Numbering):
        def finished(self, request):
            if request.status == "lost" and not by_its_end:
                by_its_end.append(published[1])

    router = Router()
    world = RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=3, dp_size=ranks), backend)
    world.add_sink(lambda event: published.update([event.worker_id]))
    fleet = world.fleet(router, event_delay_ms=delay)
    fleet.at(100).crash(1, notice_ms=notice_ms)
    assert len(fleet.run(trace()).completed) == 40
    assert by_its_end == [published[1]]
    assert router.gaps == []
    assert world.judge().errors == []
    injected = [entry.injection for entry in world.recording.journal if isinstance(entry, Injected)]
    assert ["crash"] * ranks == [each.kind for each in injected]


def test_a_silent_restart_is_an_injected_fault():
    world = harness()
    fleet = world.fleet()
    fleet.at(100).restart(1, announced=False)
    fleet.run(trace())
    problems = world.judge().errors
    assert problems
    assert all(problem.fault is not None for problem in problems)


def test_an_index_under_test_answers_overlaps_and_is_judged():
    world = harness(index=Blind())
    world.fleet().run(trace(120))
    assert {problem.rule for problem in world.judge().errors} == {"index_drift"}


def test_faults_are_injected_into_the_events_of_a_fleet():
    world = harness()
    world.faults.lose(1, kind="stored")
    world.fleet(RoundRobin()).run(trace())
    assert "event_id_gap" in {problem.rule for problem in world.judge().errors}


def test_delayed_events_reach_the_router_and_the_log_together():
    heard = []

    class Router(RoundRobin):
        def apply(self, event):
            heard.append(event)

    with harness() as world:
        world.fleet(Router(), event_delay_ms=20).run(trace())
        assert [entry.event for entry in world.events] == heard


def streams(world):
    """Return the events by worker: only their order within a worker is fixed."""
    found = {}
    for entry in world.events:
        found.setdefault(entry.event.key, []).append(entry.event)
    return found


def shapes(world):
    """Return event kinds and block counts only: names of generated blocks are drawn, also in a pass that is lost."""
    return {
        key: [(type(event.data).__name__, len(event.data.block_hashes)) for event in events]
        for key, events in streams(world).items()
    }


@pytest.mark.parametrize("happens", [None, "restart", "crash"])
@pytest.mark.parametrize("seed", seeds(10))
@pytest.mark.parametrize("backend", ["lineage", "vllm", "mocker_sglang_1_6"])
def test_replaying_the_recording_makes_the_same_events(backend, seed, happens):
    world = harness(backend, name=str(seed))
    fleet = world.fleet(LeastLoaded() if seed % 2 else None, concurrency=seed % 4 or None)
    if happens is not None:
        getattr(fleet.at(150), happens)(seed % 3)
    fleet.run(trace(seed=seed))
    again = harness(backend, name=str(seed))
    for key in world.workers:
        again.engine(key)
    interpreter = Interpreter(again)
    for step in world.recording.recorded():
        interpreter.do(step.operation)
    look = shapes if happens is not None and backend != "lineage" else streams
    assert look(world) == look(again)


def test_workers_of_a_fleet_may_differ_in_backend():
    with harness() as world:
        fleet = world.fleet(workers=4, backends=["lineage", "lru"])
        assert list(fleet.engines) == [3, 4, 5, 6]
        assert [engine.worker.backend for engine in fleet.engines.values()] == ["lineage", "lru"] * 2
        assert len(fleet.run(trace()).completed) == 40


def test_ranks_are_workers_named_by_pairs():
    world = RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=2, dp_size=2), "lineage")
    report = world.fleet().run(trace())
    assert {(0, 0), (0, 1), (1, 0), (1, 1)} >= {pick.worker for pick in report.picks}
    assert world.judge().errors == []


@pytest.mark.parametrize("happen", ["crash", "restart", "leave", "join"])
def test_incidents_of_workers_with_ranks_cause_no_problem(happen):
    with RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=2, dp_size=2), "lineage") as world:
        fleet = world.fleet()
        getattr(fleet.at(100), happen)(*([] if happen == "join" else [1]))
        assert len(fleet.run(trace()).completed) == 40


def test_workers_with_ranks_may_differ_in_backend():
    with RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=1, dp_size=2), "lineage") as world:
        fleet = world.fleet(workers=2, backends=["lineage", "lru"])
        assert list(fleet.engines) == [(1, 0), (1, 1), (2, 0), (2, 1)]
        assert len(fleet.run(trace()).completed) == 40


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"backends": ["lru"]}, ValueError, "backends need workers="),
        ({"workers": 0}, ValueError, "workers"),
        ({"workers": 2, "backends": "lru"}, TypeError, "backends must be names"),
        ({"event_delay_ms": -1}, ValueError, "event_delay_ms"),
        ({"router": LeastLoaded}, TypeError, "router is the class LeastLoaded"),
    ],
    ids=["backends", "workers", "name", "delay", "class"],
)
def test_a_fleet_refuses_bad_options(options, error, text):
    with pytest.raises(error, match=text):
        harness().fleet(**options)


def test_a_run_that_fails_releases_the_harness():
    class Broken(RoundRobin):
        def finished(self, request):
            raise ZeroDivisionError

    world = harness()
    with pytest.raises(RouterError, match=r"Broken\.finished\(\) raised"):
        world.fleet(Broken()).run(trace())
    assert world.publisher.gate is None
    assert world.judge().errors == []


def test_a_fleet_of_a_harness_makes_the_engine_of_a_joining_worker():
    world = harness()
    with pytest.raises(TypeError, match="makes the engine itself; leave engine out"):
        world.fleet().at(5).join(engine=MockEngine())
