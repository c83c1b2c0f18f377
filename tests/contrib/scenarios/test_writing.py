"""A reproduction in a scenario file violates the same rule when it is played."""

from __future__ import annotations

import re

import pytest

from pytest_kvmock import (
    BackendSpec,
    Cleared,
    EngineProfile,
    EventRulesBroken,
    KvCacheEvent,
    Prompt,
    RadixIndex,
    Removed,
    RouterEvent,
    RouterHarness,
    StorageTier,
    Stored,
)
from pytest_kvmock.contrib.scenarios import load_scenarios, play
from pytest_kvmock.contrib.scenarios.writing import scenario_text
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy
from pytest_kvmock.engines.dynamo.logical import LogicalManager
from pytest_kvmock.harness.reduce import Breach, reproduce
from pytest_kvmock.harness.reduce.program import Reproduction, SinkKind
from pytest_kvmock.oracle.hygiene.entries import BatchesLost, WorkerRemoved
from pytest_kvmock.values.programs.interpreter import Interpreter
from pytest_kvmock.values.programs.operations import (
    Burst,
    Clear,
    Decode,
    DropNext,
    Finish,
    Preempt,
    Prefill,
    RemoveWorker,
    Restart,
    Resume,
    Serve,
)
from pytest_kvmock.values.strict_yaml import YamlError


class Forgets:
    """An index that forgets every Removed."""

    def __init__(self):
        self.tree = RadixIndex()

    def apply(self, event):
        if not isinstance(event.event.data, Removed):
            self.tree.apply(event)

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes).scores


class NamesOneTwice:
    """A filter between manager and sink: of two blocks evicted at once, it removes the first twice."""

    def __init__(self, sink):
        self.sink = sink

    def publish(self, event, storage_tier, token_ids):
        data = event.data
        if isinstance(data, Removed) and len(data.block_hashes) > 1:
            data = Removed((*data.block_hashes, data.block_hashes[0]))
        self.sink.publish(KvCacheEvent(event.event_id, data, event.dp_rank), storage_tier, token_ids)


def names_one_twice(*, sink, **sizes):
    return LogicalManager(backend="names-one-twice", eviction=LruPolicy(), sink=sink and NamesOneTwice(sink), **sizes)


def unknown_parent(kv):
    for block in range(1, 20):
        kv.apply(Stored(None, (block,), (block + 100,)))
    kv.apply(Stored(77, (50, 51), (52, 53)))


def a_gap_of_ids(kv):
    for event_id in (0, 1, 2, 5, 6):
        kv.apply(KvCacheEvent(event_id, Stored(None, (event_id + 1,), (1,))), worker_id=1)


def a_sink_that_hashes_wrongly(kv):
    sink = kv.make_sink(chained=True)
    kv.make_sink()(Stored(None, (1, 2), (1, 2)))
    sink(Stored(None, (5,), (6,)))


def a_sink_that_holds_too_much(kv):
    kv.make_sink()(Stored(None, (1, 2), (1, 2)))
    sink = kv.make_sink(num_blocks=3, residency="counted")
    for _ in range(2):
        sink(Stored(None, (5, 6), (5, 6)))


def a_sink_whose_host_holds_too_much(kv):
    kv.make_sink(tier_blocks={"host": 2}).publish(Stored(9, (1, 2, 3), (1, 2, 3)), StorageTier.HOST_PINNED)


def a_removed_of_another_tier(kv):
    kv.apply(Stored(None, (1, 2, 3), (1, 2, 3)))
    kv.apply(RouterEvent(0, KvCacheEvent(1, Removed((3,))), StorageTier.HOST_PINNED))


def a_worker_that_is_forgotten(kv):
    kv.worker(0).serve(range(64), 9)
    kv.remove_worker(0)
    kv.apply(Removed((5,)))


def tokens_that_are_too_few(kv):
    kv.apply(RouterEvent(0, KvCacheEvent(0, Stored(None, (1, 2), (3, 4))), token_ids=[[0, 1, 2, 3], [4]]))


def a_signed_name_of_a_parent_that_is_not_there(kv):
    kv.make_sink()(Stored(-7, (-(2**63),), (8,)))


@pytest.mark.parametrize(
    "traffic",
    [
        unknown_parent,
        a_signed_name_of_a_parent_that_is_not_there,
        a_gap_of_ids,
        a_sink_that_hashes_wrongly,
        a_sink_that_holds_too_much,
        a_sink_whose_host_holds_too_much,
        a_removed_of_another_tier,
        a_worker_that_is_forgotten,
        tokens_that_are_too_few,
    ],
)
def test_a_written_scenario_of_events_breaks_the_same_rule(traffic, tmp_path):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=64, workers=2), "lru")
    traffic(kv)
    kv.flush()
    found = reproduce(kv, level="events")
    assert_breaks_the_same(found, tmp_path)


def overlapping_requests(kv):
    held = [kv.worker(0).prefill([*range(n, n + 8)]) for n in (0, 100)]
    held[0].decode([7, 8, 9])
    held[0].preempt()
    held[0].resume()
    for request in held:
        request.finish()
    kv.worker(1).serve(Prompt(hashes=[1, 2], num_tokens=10), 2)
    kv.worker(0).clear()
    for n in range(20):
        kv.worker(0).serve([*range(1000 * n, 1000 * n + 12)])


def test_a_written_scenario_of_requests_breaks_the_same_rule(tmp_path):
    spec = BackendSpec("names-one-twice", "nobody", names_one_twice)
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=8, workers=2), spec)
    overlapping_requests(kv)
    kv.flush()
    found = reproduce(kv, level="requests")
    assert_breaks_the_same(found, tmp_path, backend=spec)


def test_a_written_reproduction_of_an_index_problem_needs_an_index(tmp_path):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=4), "lru", Forgets())
    for n in range(20):
        kv.worker(0).serve([*range(100 * n, 100 * n + 8)])
    found = reproduce(kv)
    text = assert_breaks_the_same(found, tmp_path, index=Forgets())
    assert "\nneeds_index: true\n" in text


def test_a_written_scenario_keeps_the_counted_residency_of_a_sink(tmp_path):
    kv = RouterHarness(backend="lineage", index=RadixIndex())
    kv.make_sink()(Stored(None, (1,), (1,)))
    sink = kv.make_sink(residency="counted")
    for start in range(10, 100, 10):
        for _ in range(2):
            sink(Stored(None, (start,), (start,)))
    sink(Removed((50,)))
    found = reproduce(kv)
    assert_breaks_the_same(found, tmp_path, index=RadixIndex())


def test_a_written_scenario_creates_a_sink_with_the_same_options(tmp_path):
    kv = RouterHarness(backend="lineage")
    sink = kv.make_sink(chained=True, num_blocks=7, residency="counted", prefix_closed=False)
    sink(Stored(None, (5,), (6,)))
    sink(Stored(None, (7,), (7,)))
    kv.flush()
    (problem,) = kv.events.warnings
    found = reproduce(kv, problem)
    path = tmp_path / "saved.kv.yaml"
    path.write_text(scenario_text(found, "reproduction"))
    (scenario,) = load_scenarios(path)

    (step,) = scenario.steps
    expected = {"chained": True, "residency": "counted", "prefix_closed": False}
    assert {key: step.given[key] for key in ("chained", "residency", "prefix_closed")} == expected
    assert "num_blocks" not in step.given
    harness = RouterHarness(backend="lineage")
    with pytest.raises(AssertionError, match=r"expect problems \[\]: got \['wrong_hash'\]"):
        play(harness, scenario)
    assert [problem.is_error for problem in harness.events.problems] == [False]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("num_blocks: 0", "1:58: num_blocks: got 0; allowed: an integer of at least 1"),
        ("num_blocks: x", "1:58: num_blocks: got 'x'; allowed: an integer"),
        ("prefix_closed: 1", "1:61: prefix_closed: got 1; allowed: true or false"),
    ],
)
def test_invalid_sink_options_are_refused(tmp_path, said, why):
    path = tmp_path / "wrong.kv.yaml"
    path.write_text("steps: [{event: {stored: [1], worker: 65536, " + said + "}}]")
    with pytest.raises(YamlError) as raised:
        load_scenarios(path, "wrong.kv.yaml")
    assert str(raised.value) == f"wrong.kv.yaml:{why}"


def assert_breaks_the_same(found, tmp_path, backend=None, index=None):
    path = tmp_path / "saved.kv.yaml"
    text = scenario_text(found, "reproduction")
    path.write_text(text)
    (scenario,) = load_scenarios(path)
    assert scenario.name == "reproduction"
    profile = EngineProfile().replace(**scenario.profile)
    harness = RouterHarness(profile, backend or scenario.backends[0], index, allow=scenario.allow)
    with pytest.raises((AssertionError, EventRulesBroken)), harness:
        play(harness, scenario)
    assert found.rule in [problem.rule for problem in harness.events.problems]
    return text


def test_runs_of_numbers_are_written_as_ranges(tmp_path):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=8), "lru", Forgets())
    for n in range(20):
        kv.worker(0).serve([*range(100 * n, 100 * n + 16), 3])
    text = scenario_text(reproduce(kv, level="requests"), "long")
    assert ".." in text
    assert text.isascii()


def test_each_operation_is_written_as_an_equivalent_step(tmp_path):
    steps = (
        Serve((1, 2), output_tokens=3, worker=1),
        Prefill("a", (1, (5, 6, 7, 8)), 1),
        Decode("a", 2, of=None),
        Decode("a", 3, of=4),
        Preempt("a"),
        Resume("a"),
        Finish("a"),
        Prefill(7, (11, 12), 2, hashed=True),
        Finish(7),
        Serve((11,), None, hashed=True),
        Clear(),
        Restart(1, announced=True),
        DropNext(1, of="removed"),
        DropNext(),
        RemoveWorker(1),
        RemoveWorker(0, rank=0),
    )
    profile = EngineProfile(block_size=4, num_blocks=8)
    breach = Breach("event_id_gap", is_error=True, worker=(0, 0), block=None, story="")
    path = tmp_path / "saved.kv.yaml"
    path.write_text(scenario_text(Reproduction(breach, "requests", "lru", profile, steps), "all"))
    (scenario,) = load_scenarios(path)
    played, done = RouterHarness(profile, "lru"), RouterHarness(profile, "lru")
    play(played, scenario)
    interpreter = Interpreter(done)
    for step in steps:
        interpreter.do(step)
    assert [entry.event for entry in done.events] == [entry.event for entry in played.events]


def test_each_event_is_written_as_a_step_that_publishes_it(tmp_path):
    at_sink = RouterEvent(65536, KvCacheEvent(7, Stored(None, (-5, 6), (5, 6))))
    steps = (
        RouterEvent(0, KvCacheEvent(3, Stored(None, (1, 2), (11, 12))), extra={"cache_level": 2, "pair": (1, 2)}),
        RouterEvent(0, KvCacheEvent(4, Stored(2, (3,), (3,))), StorageTier.HOST_PINNED),
        RouterEvent(1, KvCacheEvent(0, Stored(None, (9,), (9,)), 1), token_ids=[[1, 2, 3, 4]]),
        RouterEvent(0, KvCacheEvent(5, Removed((2, 1)))),
        at_sink,
        BatchesLost(65536, 0, range(4, 6), "batches 4 to 5 did not arrive"),
        BatchesLost(1, 1, range(2, 3), ""),
        WorkerRemoved(1, None, 0),
        RouterEvent(1, KvCacheEvent(0, Cleared())),
        WorkerRemoved(0, None, None),
    )
    profile = EngineProfile(block_size=4, num_blocks=8, workers=2, dp_size=2)
    breach = Breach("event_id_gap", is_error=True, worker=(0, 0), block=None, story="")
    sink = SinkKind(num_blocks=7, tier_blocks={"host_pinned": 3}, residency="counted", prefix_closed=False)
    allow = ("block_not_found", "event_id_gap", "parent_block_not_found", "over_capacity", "wrong_hash")
    path = tmp_path / "saved.kv.yaml"
    program = Reproduction(breach, "events", "lru", profile, steps, sinks=(sink,), with_ids=True, allow=allow)
    path.write_text(scenario_text(program, "all"))
    (scenario,) = load_scenarios(path)
    assert ("all", ("lru",), allow) == (scenario.name, scenario.backends, scenario.allow)
    assert scenario.profile == {"block_size": 4, "num_blocks": 8, "workers": 2, "dp_size": 2}
    events = [step for step in steps if isinstance(step, RouterEvent)]
    kv = RouterHarness(profile, "lru")
    play(kv, scenario, errors_fail=False)
    assert [(each.worker_id, each.event, each.storage_tier) for each in events] == [
        (each.worker_id, each.event, each.storage_tier) for each in (entry.event for entry in kv.events)
    ]
    assert kv.events[0].event.extra == {"cache_level": 2, "pair": [1, 2]}
    assert [*map(tuple, kv.events[2].event.token_ids)] == [(1, 2, 3, 4)]
    lost = [problem.observed for problem in kv.events.problems if problem.rule == "event_id_gap"]
    assert "batches 4 to 5 did not arrive" in lost


def test_a_written_reproduction_names_its_rule_and_original_size():
    breach = Breach("event_id_gap", is_error=True, worker=(0, 0), block=None, story="")
    steps = (RouterEvent(0, KvCacheEvent(0, Removed((1,)))),)
    program = Reproduction(breach, "events", "lru", EngineProfile(), steps, cut_from=12)
    text = scenario_text(program, "one")
    assert text.startswith("description: event_id_gap, cut from 12 events\nbackends: [lru]\nscenarios:\n")


def test_two_consecutive_numbers_are_written_singly_and_three_as_a_range():
    breach = Breach("event_id_gap", is_error=True, worker=(0, 0), block=None, story="")
    tokens = (Serve((), (1, 2, 7, 8, 9, 20)), Serve((), (4, 5, 6)), Serve((), (4, 5)))
    text = scenario_text(Reproduction(breach, "requests", "lru", EngineProfile(), tokens), "numbers")
    assert re.findall(r"tokens: (\[.*?\]|[^}]*)", text) == ["[1, 2, 7..9, 20]", "4..6", "[4, 5]"]


def test_workers_of_other_backends_are_written():
    breach = Breach("event_id_gap", is_error=True, worker=(0, 0), block=None, story="")
    workers = (((5, 0), "lineage"), ((6, 1), None))
    text = scenario_text(Reproduction(breach, "requests", "lru", EngineProfile(), (Serve((1,)),), workers), "w")
    assert "- worker: {id: 5, backend: lineage}\n" in text
    assert "- worker:\n" in text or "- worker: {id: [6, 1]}\n" in text
    assert text.count("backend: ") == 1


def test_a_warning_is_written_as_an_expectation_of_no_problems(tmp_path):
    breach = Breach("leaked_requests", is_error=False, worker=(0, 0), block=None, story="")
    path = tmp_path / "saved.kv.yaml"
    path.write_text(scenario_text(Reproduction(breach, "requests", "lru", EngineProfile(), (Serve((1,)),)), "one"))
    (scenario,) = load_scenarios(path)
    assert [[*step.expected] for step in scenario.steps] == [["problems"]]


def test_a_burst_cannot_be_written_as_a_step():
    breach = Breach("index_drift", is_error=True, worker=(0, 0), block=None, story="")
    burst = Reproduction(breach, "requests", "lru", EngineProfile(), (Burst(3),))
    with pytest.raises(ValueError, match=r"^a scenario file has no step for Burst\(count=3\)$"):
        scenario_text(burst, "burst")
