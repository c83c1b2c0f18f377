"""Workers driven by engines in virtual time have restarts, clears, removals, leaks, faults and recovery too."""

import pytest

from pytest_kvmock import EngineProfile, OutOfBlocks, RadixIndex, Removed, RouterHarness, Stored
from pytest_kvmock.engines import RequestError
from pytest_kvmock.harness import Recovery
from pytest_kvmock.oracle import RouterCursor

ENGINES = ["lineage", "hash_cache", "vllm", "sglang"]


@pytest.fixture
def driven(make_kv):
    """Make a harness and the engine of its worker 0 with two requests: one is running, the other waits."""

    def make(backend="lineage", index=None, **options):
        profile = EngineProfile(block_size=4, num_blocks=12, workers=2)
        kv = RouterHarness(profile, backend, index, engine={"max_num_seqs": 1}, **options)
        engine = kv.engine(0)
        running, waiting = engine.submit(range(8), 9), engine.submit(range(100, 108), 3)
        engine.step()
        return kv, engine, running, waiting

    return make


# ---------------------------------------------------------------------------------------------------- restart and clear


@pytest.mark.parametrize("backend", ENGINES)
def test_after_a_restart_the_engine_is_empty_and_serves_again(driven, backend):
    kv, engine, running, waiting = driven(backend)
    if backend != "sglang":  # its scheduler has no limit of requests in this form
        assert [running.status, waiting.status] == ["running", "waiting"]
    arriving = engine.submit(range(8), 1, 5_000.0)
    before = engine.now_ms

    kv.worker(0).restart(announced=True)

    assert [request.status for request in (running, waiting, arriving)] == ["lost"] * 3
    assert (
        engine.metrics.running,
        engine.metrics.waiting,
        engine.metrics.arriving,
        engine.metrics.active_blocks,
    ) == (0, 0, 0, 0)
    assert before == engine.now_ms
    assert kv.worker(0).requests == []
    fresh = engine.submit(range(8), 3)
    engine.run()
    assert (fresh.status, fresh.cached_tokens) == ("finished", 0)
    assert kv.overlap(range(8)) == {0: 2}
    assert kv.judge()[:2] == ([], [])


def test_a_lost_request_cannot_be_aborted(driven):
    kv, _, running, _ = driven()
    kv.worker(0).restart(announced=True)
    with pytest.raises(
        RequestError, match=r"^abort on a request that is lost; it must be waiting, running or preempted$"
    ):
        running.abort()


def test_an_unannounced_restart_is_noticed(driven, rules_of):
    kv, engine, _, _ = driven()
    kv.worker(0).restart()
    assert rules_of(kv.judge().errors) == ["engine_drift"]
    engine.submit(range(8), 1)
    engine.run()
    assert rules_of(kv.judge().errors) == ["event_id_gap"]


def test_a_worker_is_not_cleared_while_requests_of_its_engine_are_open(driven):
    kv, engine, running, waiting = driven()
    worker = kv.worker(0)
    assert not worker.clear()
    running.abort()
    assert (waiting.status, worker.clear()) == ("waiting", False)
    waiting.abort()
    arriving = engine.submit(range(4), 1, 1_000.0)
    assert not worker.clear()
    assert kv.events.counts.ok("cleared") == 0
    engine.run()
    assert arriving.status == "finished"
    assert worker.clear()
    assert kv.overlap(range(8)) == {}
    again = engine.submit(range(8), 1)
    engine.run()
    assert again.cached_tokens == 0
    assert kv.judge()[:2] == ([], [])


def test_held_events_of_a_restarted_worker_are_lost_with_it():
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=12), "lineage", engine={"events_visible": "pass_end"})
    engine = kv.engine(0)
    engine.submit(range(8), 3)
    engine.inside.start_pass(0.0)
    kv.worker(0).restart(announced=True)
    kv.flush()
    assert kv.events.total == 0
    engine.submit(range(8), 3)
    engine.run()
    assert [entry.event.event.event_id for entry in kv.events][:1] == [0]
    assert kv.judge()[:2] == ([], [])


def test_held_events_are_published_before_the_harness_compares():
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=12), "lineage", engine={"events_visible": "pass_end"})
    engine = kv.engine(0)
    engine.submit(range(8), 3)
    engine.inside.start_pass(0.0)
    assert kv.events.total == 0
    kv.assert_in_sync()
    assert kv.events.total == 1
    engine.inside.finish_pass()
    engine.run()
    assert kv.overlap(range(8)) == {0: 2}


# --------------------------------------------------------------------------------------------------- removal and leaks


def test_a_removed_worker_returns_with_a_new_engine(driven):
    kv, engine, running, _ = driven()
    kv.remove_worker(0)
    assert kv.overlap(range(8)) == {}
    again = kv.engine(0)
    assert again is not engine
    assert again.requests == []
    again.submit(range(8), 1)
    again.run()
    assert kv.overlap(range(8)) == {0: 2}
    assert running.status == "running"  # the old engine continues, and its state is not read
    assert kv.judge().errors == []


def test_open_requests_of_an_engine_are_leaked(driven):
    kv, engine, running, _ = driven()
    engine.submit(range(4), 1, 1_000.0)
    (leaked,) = kv.judge().warnings
    assert (
        leaked.rule,
        leaked.worker_id,
        leaked.observed,
    ) == ("leaked_requests", 0, "3 requests are open, with 3, 0, 0 blocks")
    running.abort()
    engine.run()
    assert kv.judge().warnings == []


def test_requests_of_a_worker_and_of_its_engine_share_the_cache():
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=6), "lineage")
    own = kv.worker(0).prefill(range(8))
    theirs = kv.engine(0).submit(range(12), 2)
    kv.engine(0).run()
    assert theirs.cached_tokens == 8
    with pytest.raises(OutOfBlocks):
        kv.engine(0).submit(range(100, 124), 1)
    own.finish()
    assert kv.judge()[:2] == ([], [])


def test_a_request_that_replay_dispatches_can_be_aborted_and_is_not_recorded(driven):
    """A dispatch by `replay` is no operation of the test, and its request can be aborted."""
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=12), "lineage")
    engine = kv.engine(0)
    engine.inside.dispatch(kv.prompt(2), 9, 0.0).abort()
    assert [*kv.recording.recorded()] == []
    assert kv.judge()[:2] == ([], [])


# ------------------------------------------------------------------------------------------------ faults and recovery


def test_a_lost_event_of_an_engine_is_detected(rules_of):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=12), "lineage")
    kv.drop_next()
    engine = kv.engine(0)
    for start in (0, 100, 200):
        engine.submit(range(start, start + 8), 6)
    engine.run()
    assert "event_id_gap" in rules_of(kv.judge().errors)


@pytest.mark.parametrize("visible", ["pass_start", "pass_end"])
def test_a_fault_is_injected_into_the_events_of_an_engine(visible):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=12), "lineage", engine={"events_visible": visible})
    fault = kv.faults.double()
    engine = kv.engine(0)
    engine.submit(range(8), 1)
    engine.run()
    assert fault.injected == 1
    assert [entry.event.event.event_id for entry in kv.events] == [0, 0]
    assert [problem.rule for problem in kv.judge().errors] == ["event_id_gap"]


class Recovering(RadixIndex):
    """Queries the worker for missed events."""

    def __init__(self, ask):
        super().__init__()
        self.ask = ask
        self.cursor = RouterCursor()

    def apply(self, event):
        step = self.cursor.observe(event)
        while True:
            for each in step.apply:
                super().apply(each)
            if step.ask is None:
                return
            step = self.cursor.answered(step.ask, self.ask(*step.ask))


def test_a_router_recovers_events_of_an_engine_that_it_missed():
    recovery = Recovery()
    index = Recovering(recovery)
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=12), "lineage", index, recovery=recovery)
    kv.engine(0).submit(range(8), 1)
    kv.engine(0).run()
    kv.drop_next(2)
    for start in (100, 200, 300):
        kv.engine(0).submit(range(start, start + 8), 6)
    kv.engine(0).run()
    kv.assert_in_sync()
    assert kv.overlap(range(100, 108)) == {0: 2}
    assert [problem.rule for problem in kv.judge().errors] == ["event_id_gap"]  # and no index_drift


def test_events_of_several_engines_are_kept_apart():
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=8, workers=2), "lineage", RadixIndex())
    for worker in (0, 1):
        for start in (0, 100 * (worker + 1), 200):
            kv.engine(worker).submit(range(start, start + 8), 6)
    while not (kv.engine(0).is_idle and kv.engine(1).is_idle):
        for worker in (0, 1):
            kv.engine(worker).step()
    assert {entry.event.worker_id for entry in kv.events} == {0, 1}
    assert {Stored, Removed} == {type(entry.event.event.data) for entry in kv.events}
    assert kv.judge()[:2] == ([], [])


@pytest.mark.parametrize("backend", ["lineage", "hash_cache", "vllm", "sglang", "mocker_sglang_1_6"])
def test_a_decode_engine_publishes_nothing_and_is_not_compared(backend):
    with RouterHarness(backend=backend, engine={"worker_type": "decode"}) as kv:
        kv.engine().submit(kv.prompt(3), 20)
        kv.engine().run()
        assert kv.events.stored == []


def test_a_worker_that_becomes_a_decode_engine_is_no_longer_compared():
    with RouterHarness() as kv:
        kv.worker(0).serve(kv.prompt(2))
        engine = kv.engine(0, worker_type="decode")
        engine.submit(kv.prompt(3), 4)
        engine.run()


def test_making_an_engine_keeps_the_manager_of_its_worker():
    with RouterHarness(engine={"enable_prefix_caching": False}, judge_unpublished=True) as kv:
        manager = kv.worker(0).manager
        engine = kv.engine()
        assert manager is engine.worker.manager


def test_a_refused_run_is_not_recorded():
    with RouterHarness() as kv:
        engine = kv.engine()
        engine.submit(kv.prompt(2), 2)
        engine.run()
        before = len(kv.recording.operations)
        with pytest.raises(ValueError, match="until_ms must be"):
            engine.run(-1.0)
        assert before == len(kv.recording.operations)
