"""Failures over tiers: the reproduction has the tiers and ticks that it needs, and fails too."""

from contextlib import suppress
from dataclasses import replace

import pytest
from scenario_files import load_scenarios, play, scenario_text

from pytest_kvmock import (
    BACKENDS,
    EngineProfile,
    EventRulesBroken,
    RadixIndex,
    Removed,
    RouterHarness,
    StorageTier,
    Stored,
)
from pytest_kvmock.engines import Tiers, WouldWait, backends
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.values.programs.operations import Finish, Prefill, Tick

HOST = StorageTier.HOST_PINNED
TIERS = {"host": 9, "gbps": 1.0, "bytes_per_token": 250_000}


class ForgetsNothingOnTheHost(RadixIndex):
    """Ignores each Removed of the host."""

    def new(self):
        return type(self)()

    def apply(self, event):
        if event.storage_tier is not HOST or not isinstance(event.event.data, Removed):
            super().apply(event)


def _removes_in_silence(**options):
    """Make a manager whose host evicts without an event; the ids have no gap."""
    manager = BACKENDS["lineage"].make(**options)
    if manager.offload is not None:
        result = manager.offload._result

        def quiet(slots):
            done = result(slots)
            return done._replace(events=[event for event in done.events if not isinstance(event.data, Removed)])

        manager.offload._result = quiet
    return manager


def _late_in_silence(**options):
    """Make a manager that publishes nothing about transfers that ended before its clock was moved."""
    manager = BACKENDS["lineage"].make(**options)
    if manager.offload is not None:
        tick = manager.offload.tick

        def quiet(now):
            deadline = manager.offload.deadline()
            done = tick(now)
            return done if deadline is None or now <= deadline else done._replace(events=[])

        manager.offload.tick = quiet
    return manager


def _in_place_of_lineage(monkeypatch, make):
    spec = replace(BACKENDS["lineage"], make=make)
    monkeypatch.setattr(backends, "BACKENDS", {**BACKENDS, "lineage": spec})


@pytest.fixture
def faulty(monkeypatch):
    """Register an engine whose host evicts without an event, in place of `lineage`."""
    _in_place_of_lineage(monkeypatch, _removes_in_silence)


@pytest.fixture
def late(monkeypatch):
    """Register an engine that forgets transfers that ended before a tick, in place of `lineage`."""
    _in_place_of_lineage(monkeypatch, _late_in_silence)


def busy(index=None, *, wait=True, requests=40):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=24, workers=2, tiers=TIERS), "lineage", index)
    now = 0
    for number in range(requests):
        worker = kv.worker(number % 2)
        with suppress(WouldWait):
            worker.prefill(kv.prompt(5), wait=wait).finish()
        if number % 3 == 0:
            now = max(now + 7, worker.now, kv.worker(1 - number % 2).now)
            kv.worker(0).tick(now)
            kv.worker(1).tick(now)
    kv.judge()
    return kv


@pytest.mark.parametrize("wait", [True, False])
def test_an_engine_fault_on_the_host_is_cut_to_a_few_requests(faulty, failure_of, wait):
    kv = busy(wait=wait)
    assert {"engine_drift"} <= {problem.rule for problem in kv.events.errors}

    found = reproduce(kv, next(problem for problem in kv.events.errors if problem.rule == "engine_drift"))

    assert found.complete
    assert found.size <= 4
    assert (found.profile.tiers.host, found.level) == (1, "requests")
    assert "engine_drift" in failure_of(found)
    assert 'tiers={"host": 1' in found.as_test()


def test_a_reproduction_keeps_only_the_ticks_that_it_needs(late, failure_of, tmp_path):
    kv = busy(wait=False)

    found = reproduce(kv, next(problem for problem in kv.events.errors if problem.rule == "engine_drift"))

    assert [Prefill, Prefill, Tick] == [type(step) for step in found.operations if not isinstance(step, Finish)]
    text = found.as_test()
    assert "from contextlib import suppress\n\nfrom pytest_kvmock import" in text
    assert "        with suppress(WouldWait):\n            kv.worker(0).prefill(" in text
    assert "wait=False)\n        kv.worker(0).tick(" in text
    assert "engine_drift" in failure_of(found)
    written = scenario_text(found, "x")
    assert "wait: false" in written
    assert "- tick: {now_ms: " in written
    plays_again(found, tmp_path)


def test_an_index_fault_below_the_device_is_cut_by_events_and_by_requests(failure_of):
    kv = busy(ForgetsNothingOnTheHost())
    for level in ("events", "requests"):
        found = reproduce(kv, level=level)
        assert level == found.level
        assert found.size <= 4
        assert "index_drift" in failure_of(found, ForgetsNothingOnTheHost())
        if level == "events":
            assert all(event.token_ids is None for event in found.events)  # it does not ask for tokens


class DropsWithoutAParent(RadixIndex):
    """Ignores blocks that are stored on the host before their parent."""

    def new(self):
        return type(self)()

    def apply(self, event):
        data = event.event.data
        if event.storage_tier is HOST and isinstance(data, Stored) and data.parent_hash is not None:
            held = {block for each in self.dump_events() for block in each.event.data.block_hashes}
            if data.parent_hash not in held:
                return
        super().apply(event)


@pytest.mark.parametrize("sync", ["every", "auto"])
def test_a_block_stored_before_its_parent_stays_before_it(failure_of, sync):
    """Below the device, a Stored before its parent is not moved to another parent when the others are left out."""
    kv = RouterHarness(backend=None, index=DropsWithoutAParent(), sync=sync)
    sink = kv.make_sink()
    for number in range(100, 120):
        sink(Stored(None, (number,), (number,)))
    sink(Stored(None, (1, 2, 3), (11, 12, 13)))
    sink(Stored(5, (6,), (16,)), HOST)
    sink(Stored(4, (5,), (15,)), HOST)
    sink(Stored(3, (4,), (14,)), HOST)
    found = reproduce(kv)
    child, parent = found.steps
    assert [child.storage_tier, parent.storage_tier] == [HOST, HOST]
    assert parent.event.data.block_hashes == (child.event.data.parent_hash,)
    assert "index_drift" in failure_of(found, DropsWithoutAParent())


@pytest.mark.parametrize("wait", [True, False])
def test_a_reproduction_written_as_a_scenario_fails_in_the_same_way(faulty, tmp_path, wait):
    kv = busy(wait=wait)
    found = reproduce(kv, next(problem for problem in kv.events.errors if problem.rule == "engine_drift"))
    plays_again(found, tmp_path)


def plays_again(found, tmp_path):
    path = tmp_path / "x.kv.yaml"
    path.write_text(scenario_text(found, "x"))
    (scenario,) = load_scenarios(path)
    assert found.profile.tiers == scenario.profile["tiers"]
    failure = pytest.raises((EventRulesBroken, AssertionError), match="engine_drift")
    with failure, RouterHarness(found.profile, found.backend) as harness:
        play(harness, scenario)


def test_tier_operations_of_a_worker_are_recorded():
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=8, tiers=Tiers(64, 1.0, 250_000)))
    worker = kv.worker(0)
    worker.tick(5)
    worker.serve([1] * 24)
    with pytest.raises(WouldWait):
        worker.prefill([2] * 24, wait=False)
    steps = [recorded.operation for recorded in kv.recording.recorded()]
    assert [Tick(5), Prefill(1, (), (1,) * 24), Prefill(2, (), (2,) * 24, wait=False)] == [
        step for step in steps if isinstance(step, Tick | Prefill)
    ]
