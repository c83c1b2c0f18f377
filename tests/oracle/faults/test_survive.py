"""Faults that a router must survive: the stream is excused, and the index must be right in spite of them."""

import asyncio
import re
from contextlib import suppress

import pytest
from depth import few
from fault_worlds import PROFILE, Traffic
from hybrid_sizes import caches
from hypothesis import given
from hypothesis import strategies as st
from surviving_indexes import (
    AsksByCursor,
    AsksTheWorker,
    AsyncAsksTheWorker,
    ByWorker,
    TakesWhatComes,
    WaitsForLateEvents,
)

from pytest_kvmock import BACKENDS, EventRulesBroken, KvCacheEvent, RadixIndex, Removed, RouterHarness, Stored
from pytest_kvmock.harness import Recovery
from pytest_kvmock.oracle import RadixIndexError

SURVIVABLE = ("lose", "double", "reorder", "delay", "wrong_parent", "unknown_removed", "self_parent", "sink_failure")


def rules(problems):
    return [problem.rule for problem in problems]


def traffic_with(index, seed=0, **given):
    traffic = Traffic("lineage", seed, index, **given)
    for worker in traffic.kv.workers.values():
        index.listen(worker)
    return traffic


# ------------------------------------------------------------------------------------------------- it is excused


def test_a_survived_fault_is_no_failure_without_an_index_under_test():
    kv = RouterHarness(PROFILE, survive=["lose"])
    kv.faults.lose()
    kv.worker(0).serve(kv.prompt(2))
    kv.worker(0).serve(kv.prompt(2))
    assert tuple(kv.judge()) == ([], [], [])
    (problem,) = [p for p in kv.events.problems if p.cause is None]
    assert (problem.rule, problem.excused) == ("event_id_gap", True)


class RaisesWithoutParent(RadixIndex):
    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored) and data.parent_hash not in (None, *getattr(self, "seen", ())):
            raise KeyError(data.parent_hash)
        self.seen = (*getattr(self, "seen", ()), *data.block_hashes)
        super().apply(event)


@pytest.mark.parametrize("survive", [["lose"], []], ids=["survived", "not survived"])
def test_a_failure_after_a_survived_fault_does_not_call_the_event_valid(survive):
    kv = RouterHarness(PROFILE, index=RaisesWithoutParent(), survive=survive)
    prompt = kv.prompt(1)
    kv.faults.lose()
    kv.worker(0).serve(prompt)
    kv.worker(0).serve(kv.prompt(1, after=prompt))
    problem = next(problem for problem in kv.events.problems if problem.rule == "index_failure")
    assert (
        (
            "your index raised, or returned what cannot be read, after a fault that it must survive",
            "an index that must survive lose does not raise, and answers every query",
        )
        if survive
        else (
            "your index raised on a valid event, or returned what cannot be read",
            "an index applies every valid event, and answers every query",
        )
    ) == (problem.broken_when, problem.expected)


def test_a_fault_that_need_not_be_survived_fails_next_to_one_that_must():
    kv = RouterHarness(PROFILE, survive=["lose"])
    kv.faults.lose()
    kv.faults.double()
    for _ in range(4):
        kv.worker(0).serve(kv.prompt(1))
    (error,) = kv.judge().errors
    assert error.fault.kind == "double"


def test_a_survived_fault_can_be_expected_too():
    kv = RouterHarness(PROFILE, survive="lose")
    with kv.events.expect_error("event_id_gap"):
        kv.faults.lose()
        kv.worker(0).serve(kv.prompt(2))
    assert tuple(kv.judge()) == ([], [], [])


def test_a_restart_that_must_be_survived_is_excused():
    kv = RouterHarness(PROFILE, survive=["restart"])
    kv.worker(0).serve(kv.prompt(2))
    kv.faults.restart()
    kv.worker(0).serve(kv.prompt(2))
    assert tuple(kv.judge()) == ([], [], [])


# --------------------------------------------------------------------------------------------- the index is right


@given(
    seed=st.integers(0, 2**32),
    rates=st.dictionaries(st.sampled_from(SURVIVABLE), st.sampled_from([0.05, 0.3]), min_size=1),
    kind=st.sampled_from([AsksTheWorker, ByWorker]),
    flushed=st.booleans(),
)
def test_an_index_that_recovers_passes(seed, rates, kind, flushed):
    traffic = traffic_with(kind(), seed, faults=rates, survive=list(rates))
    for _ in range(25):
        traffic.step()
        if flushed and not traffic.rng.randrange(6):
            traffic.kv.flush()
    assert tuple(traffic.kv.judge()) == ([], [], [])


@given(seed=st.integers(0, 2**32), flushed=st.booleans())
def test_an_index_that_waits_for_late_events_passes(seed, flushed):
    late = {"reorder": 0.1, "delay": 0.1, "double": 0.1}
    traffic = Traffic("lineage", seed, WaitsForLateEvents(), faults=late, survive=list(late))
    for _ in range(25):
        traffic.step()
        if flushed and not traffic.rng.randrange(6):
            traffic.kv.flush()
    assert tuple(traffic.kv.judge()) == ([], [], [])


BY_CURSOR = ("lose", "double", "reorder", "delay", "sink_failure")


@given(
    seed=st.integers(0, 2**32),
    ring=st.sampled_from([1, 3, 4096]),
    rates=st.dictionaries(st.sampled_from(BY_CURSOR), st.sampled_from([0.05, 0.3]), min_size=1),
    survived=st.sets(st.sampled_from(BY_CURSOR), min_size=1),
    flushed=st.booleans(),
)
def test_an_index_with_a_recovery_fails_only_for_faults_that_it_need_not_survive(seed, ring, rates, survived, flushed):
    recovery = Recovery(ring)
    traffic = Traffic("lineage", seed, AsksByCursor(recovery), recovery=recovery, faults=rates, survive=survived)
    for _ in range(25):
        traffic.step()
        if flushed and not traffic.rng.randrange(6):
            traffic.kv.flush()
    errors, warnings, unmet = traffic.kv.judge()
    assert unmet == []
    assert {problem.fault.kind for problem in errors + warnings} <= rates.keys() - survived
    assert {"index_drift", "index_failure"}.isdisjoint(rules(errors))


def test_an_index_that_has_recovered_is_compared_after_each_event_again():
    index = AsksTheWorker()
    kv = traffic_with(index, survive=["lose"]).kv
    kv.faults.lose(worker=0)
    for _ in range(3):
        kv.worker(0).serve(kv.prompt(1))
    assert index.recoveries == 1
    index.tree.apply = lambda event: None  # ignores all events from here on
    kv.worker(0).serve(kv.prompt(1))
    assert [(p.rule, p.position) for p in kv.events.errors if not p.excused] == [("index_drift", 2)]


@pytest.mark.parametrize("kind", ["lose", "delay", "wrong_parent"])
def test_an_index_that_does_not_recover_fails_and_names_the_fault(kind):
    errors = []
    for seed in range(6):
        traffic = Traffic("lineage", seed, TakesWhatComes(), faults={kind: 0.3}, survive=[kind])
        errors += traffic.run(25).judge().errors
    assert set(rules(errors)) == {"index_drift"}
    assert all(kind == error.fault.kind for error in errors)
    assert all(error.expected.endswith("as was published") for error in errors)


class AsksInVain(AsksByCursor):
    """Queries the worker and does not apply the answer."""

    def apply(self, event):
        with suppress(RadixIndexError):
            self.tree.apply(event)
        step = self.cursor.observe(event)
        while step.ask is not None:
            step = self.cursor.answered(step.ask, self.ask(*step.ask))


@pytest.mark.parametrize("kind", ["lose", "delay"])
def test_after_querying_a_recovery_an_index_must_hold_the_lost_and_delayed_events(kind):
    for index, expected in ((AsksByCursor, []), (AsksInVain, [("index_drift", 1)])):
        recovery = Recovery()
        kv = RouterHarness(PROFILE, index=index(recovery), recovery=recovery, survive=[kind])
        kv.apply(Stored(None, (1,), (1,)))
        if kind == "delay":
            kv.faults.delay(by=9)
        else:
            kv.faults.lose()
        kv.apply(Stored(None, (2,), (2,)))
        kv.apply(Stored(None, (3,), (3,)))
        errors, warnings, unmet = kv.judge()
        assert [(problem.rule, len(problem.blocks)) for problem in errors] == expected
        assert (warnings, unmet) == ([], [])


@pytest.mark.parametrize(("applies", "expected"), [(True, set()), (False, {("index_drift", (2,))})])
def test_an_index_that_queries_at_a_flush_must_have_the_event_that_was_lost_last(applies, expected):
    class AsksAtFlush(TakesWhatComes):
        def flush(self):
            for event in recovery(0, 0).events:
                if applies:
                    self.apply(event)

    recovery = Recovery()
    kv = RouterHarness(PROFILE, index=AsksAtFlush(), recovery=recovery, survive=["lose"])
    kv.apply(Stored(None, (1,), (1,)))
    kv.faults.lose()
    kv.apply(Stored(None, (2,), (2,)))
    assert {(problem.rule, problem.blocks) for problem in kv.judge().errors} == expected


def test_an_index_that_has_not_queried_may_lack_events_that_are_still_held_back():
    for index in (TakesWhatComes(), WaitsForLateEvents()):
        kv = RouterHarness(PROFILE, index=index, survive=["delay"])
        kv.apply(Stored(None, (1,), (1,)))
        kv.faults.delay(by=9)
        kv.apply([Stored(None, (block,), (block,)) for block in (2, 3)])
        assert tuple(kv.judge()) == ([], [], [])


def test_an_index_that_raises_after_a_survived_fault_fails():
    kv = RouterHarness(PROFILE, index=RadixIndex(), survive=["lose"])
    prompt = kv.prompt(1)
    kv.faults.lose()
    kv.worker(0).serve(prompt)
    kv.worker(0).serve(kv.prompt(1, after=prompt))
    (error,) = kv.judge().errors
    assert (error.rule, error.fault.kind) == ("index_failure", "lose")
    assert rules(error.folded) == ["index_drift"]


def test_an_index_recovers_after_a_late_join_and_after_a_restart():
    index = AsksTheWorker()
    traffic = traffic_with(index, survive=["late_join", "restart"])
    with traffic.kv.faults.late_join():
        traffic.run(8)
    traffic.run(4)
    traffic.kv.faults.restart(0)
    traffic.run(6)
    assert tuple(traffic.kv.judge()) == ([], [], [])
    assert index.recoveries


def test_an_event_that_was_lost_last_is_optional_for_an_index():
    for index in (TakesWhatComes(), AsksTheWorker()):
        kv = RouterHarness(PROFILE, index=index, survive=["lose"])
        if isinstance(index, AsksTheWorker):
            index.listen(kv.worker(0))
        kv.worker(0).serve(kv.prompt(1))
        kv.faults.lose(None, worker=0)
        kv.worker(0).serve(kv.prompt(2))
        kv.flush()
        if isinstance(index, AsksTheWorker):
            index.recover((0, 0), index.journal[0, 0])
        assert tuple(kv.judge()) == ([], [], [])


def test_a_lost_event_is_expected_once_a_later_one_shows_the_loss():
    kv = RouterHarness(PROFILE, index=TakesWhatComes(), survive=["lose"])
    kv.faults.lose()
    kv.worker(0).serve(kv.prompt(2))
    kv.flush()
    assert kv.events.errors[1:] == []  # without the gap, which is excused
    kv.worker(0).serve(kv.prompt(2))
    kv.flush()
    assert rules(kv.events.errors) == ["event_id_gap", "index_drift"]


def test_a_stale_block_is_found_as_well_as_a_missing_one():
    kv = RouterHarness(PROFILE, index=TakesWhatComes(), survive=["lose"])
    worker = kv.worker(0)
    prompt = kv.prompt(6)
    worker.serve(prompt)
    kv.faults.lose(kind="cleared")
    worker.clear()
    worker.serve(kv.prompt(1))
    (error,) = kv.judge().errors
    assert error.rule == "index_drift"
    assert error.expected == "0 blocks, as was published"


def test_other_workers_are_compared_while_one_is_out_of_sync():
    index = TakesWhatComes()
    kv = RouterHarness(PROFILE, index=index, survive=["lose"])
    prompt = kv.prompt(2)
    kv.faults.lose(worker=0)
    for worker in (0, 0, 1):
        kv.worker(worker).serve(prompt)
    kv.worker(0).serve(kv.prompt(1))
    kv.worker(1).serve(kv.prompt(1))
    assert [p for p in kv.events.errors if p.rule == "index_drift"] == []
    index.tree.remove_worker(1)
    kv.worker(1).serve(kv.prompt(1, after=prompt))
    assert (1, 0) in {(p.worker_id, p.dp_rank) for p in kv.events.errors if p.rule == "index_drift"}


def test_any_answer_is_right_for_a_stream_that_another_fault_has_changed():
    index = TakesWhatComes()
    kv = RouterHarness(PROFILE, index=index, survive=["lose"])
    kv.events.expect_error("event_id_gap")
    kv.faults.double(worker=0)
    kv.worker(0).serve(kv.prompt(2))
    kv.worker(0).serve(kv.prompt(2))
    kv.worker(1).serve(kv.prompt(2))
    index.tree.remove_worker(0)
    kv.worker(0).serve(kv.prompt(2))
    assert tuple(kv.judge()) == ([], [], [])


def test_assert_in_sync_requires_that_the_index_has_recovered():
    index = AsksTheWorker()
    traffic = traffic_with(index, survive=["lose"])
    kv = traffic.kv
    kv.faults.lose()
    kv.worker(0).serve(kv.prompt(1))
    kv.worker(0).serve(kv.prompt(1))
    kv.assert_in_sync()
    index.tree.remove_worker(0)
    with pytest.raises(EventRulesBroken, match="index_drift"):
        kv.assert_in_sync()


def test_an_async_index_can_survive_faults():
    index = AsyncAsksTheWorker()
    traffic = traffic_with(index, faults={"lose": 0.2, "double": 0.2}, survive=["lose", "double"])

    async def body():
        for _ in range(20):
            traffic.step()
            if not traffic.rng.randrange(3):
                await traffic.kv.aflush()
        await traffic.kv.aflush()

    asyncio.run(body())
    assert tuple(traffic.kv.judge()) == ([], [], [])
    assert index.recoveries


def test_an_announced_restart_ends_the_effects_of_faults():
    class Told(TakesWhatComes):
        def remove_worker(self, worker_id):
            self.tree.remove_worker(worker_id)

    kv = RouterHarness(PROFILE, index=Told(), survive=["lose"])
    kv.faults.lose()
    kv.worker(0).serve(kv.prompt(1))
    kv.worker(0).restart(announced=True)
    kv.worker(0).serve(kv.prompt(1))
    assert tuple(kv.judge()) == ([], [], [])


# --------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["loose"], r"unknown fault 'loose'; did you mean 'lose'\? known: lose, double, reorder, "),
        ([7], r"unknown fault 7; known: lose"),
        (["block_size"], r"no router can survive `block_size`"),
    ],
)
def test_unknown_faults_are_refused_by_survive(names, message):
    with pytest.raises(ValueError, match=rf"^survive: {message}"):
        RouterHarness(PROFILE, survive=names)
    with pytest.raises(ValueError, match=rf"^kv_harness\.faults\.survive: {message}"):
        RouterHarness(PROFILE).faults.survive(*names)


# ------------------------------------------------------------------------------------------- after some events


def counts(backend, index):
    """Let an index count copies if the engine publishes them."""
    index.tree = RadixIndex(count_copies=BACKENDS[backend].residency == "counted")
    return index


def own_warnings(backend):
    """Return the rules that an engine breaks by itself if it is not prefix-closed."""
    return set() if BACKENDS[backend].prefix_closed else {"wrong_hash", "evicted_and_restored", "engine_drift"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [0, 12])
def test_survive_may_be_called_after_events_without_a_fault(backend, steps):
    traffic = Traffic(backend, 1, counts(backend, WaitsForLateEvents()))
    kv = traffic.run(steps)
    kv.faults.survive("double", "delay")
    with kv.faults.double(3), kv.faults.delay(3):
        traffic.run(20)
    traffic.run(10)
    errors, _, unmet = kv.judge()
    assert (errors, unmet) == ([], [])
    assert {p.fault.kind for p in kv.events.problems if p.fault is not None} == {"double", "delay"}
    real = {p.rule for p in kv.events.problems if p.fault is None}
    assert real <= own_warnings(backend)


@pytest.mark.parametrize("backend", few(BACKENDS, 2))
def test_an_index_that_does_not_survive_is_found_after_a_late_call(backend):
    found = []
    lost = caches(backend)  # an index of the attention group misses nothing of a window
    for seed in range(4):
        traffic = Traffic(backend, seed, counts(backend, TakesWhatComes()))
        kv = traffic.run(8)
        kv.faults.survive("lose")
        for _ in range(4):
            kv.faults.lose(lost, kind="removed")
            kv.faults.lose(lost, kind="stored")
        for _ in range(25):
            traffic.step()
            kv.flush()
        found += rules(kv.judge().errors)
    assert set(found) == {"index_drift"}


@pytest.mark.parametrize("backend", ["vllm", "vllm_0_19", "sglang"])
def test_hashes_are_checked_in_arrived_events_and_not_in_published_ones(backend):
    """Only the published event has a digest of the block under itself: no receiver can compute its hash."""
    kv = RouterHarness(PROFILE, backend, TakesWhatComes(), allow=["index_drift"])
    kv.worker(0).serve(kv.prompt(2))
    kv.faults.survive("self_parent")
    kv.faults.self_parent()
    kv.worker(0).serve(kv.prompt(2))
    assert "invalid_block" in rules(kv.events.problems)
    assert "wrong_hash" not in rules(kv.events.problems)


def test_an_index_must_know_events_from_before_the_call_of_survive():
    kv = RouterHarness(PROFILE, index=TakesWhatComes())
    worker, prompt = kv.worker(0), kv.prompt(3)
    worker.serve(prompt)
    kv.faults.survive("lose")
    kv.faults.lose(kind="cleared")
    worker.clear()
    worker.serve(kv.prompt(1))
    (error,) = kv.judge().errors
    assert (error.rule, error.expected) == ("index_drift", "0 blocks, as was published")
    assert str(error.fault) == "lose, event 1 of worker 0"


def test_an_event_lost_last_is_not_expected_after_a_late_call():
    kv = RouterHarness(PROFILE, index=TakesWhatComes())
    prompt = kv.prompt(2)
    kv.worker(0).serve(prompt)
    kv.faults.survive("lose")
    kv.faults.lose()
    kv.worker(0).serve(kv.prompt(1, after=prompt))
    kv.flush()
    assert kv.overlap(prompt) == {0: 2}
    assert tuple(kv.judge()) == ([], [], [])


def test_a_fault_that_was_not_injected_yet_does_not_prevent_a_late_call():
    kv = RouterHarness(PROFILE, index=TakesWhatComes())
    kv.faults.lose(kind="removed")
    kv.apply([Stored(None, (1,), (1,))])
    kv.faults.survive("lose")
    kv.faults.survive("double")
    kv.apply([Removed((1,)), Stored(None, (2,), (2,))])
    assert rules(kv.judge().errors) == ["index_drift"]


def test_events_that_wait_for_an_async_index_are_applied_after_a_late_call():
    index = AsyncAsksTheWorker()
    traffic = Traffic("lineage", 0, index)
    for worker in traffic.kv.workers.values():
        index.listen(worker)
    kv = traffic.run(5)
    kv.faults.survive("lose")
    kv.faults.lose(2)
    traffic.run(5)
    asyncio.run(kv.aflush())
    assert tuple(kv.judge()) == ([], [], [])
    assert index.recoveries


def test_an_error_expected_before_a_late_call_stays_expected():
    kv = RouterHarness(PROFILE, index=TakesWhatComes())
    with kv.events.expect_error("event_id_gap"):
        kv.apply([Stored(None, (1,), (1,)), KvCacheEvent(3, Stored(None, (2,), (2,)))])
    kv.faults.survive("double")
    kv.faults.double()
    kv.apply([Stored(None, (3,), (3,))])
    assert tuple(kv.judge()) == ([], [], [])


AFTER_A_FAULT = "kv_harness.faults.survive: call it before the first fault; injected already: "


@pytest.mark.parametrize(
    ("inject", "message"),
    [
        pytest.param(
            lambda kv: kv.faults.lose() and kv.worker(0).serve(kv.prompt(1)),
            AFTER_A_FAULT + "lose, event 0 of worker 0",
            id="lose",
        ),
        pytest.param(lambda kv: kv.faults.restart(), AFTER_A_FAULT + "restart of worker 0", id="restart"),
        pytest.param(lambda kv: kv.faults.clear(), AFTER_A_FAULT + "clear, event 0 of worker 0", id="clear"),
        pytest.param(
            lambda kv: kv.faults.signed() and kv.apply([Stored(None, (2**63,), (1,))]),
            AFTER_A_FAULT + "signed, event 0 of worker 0",
            id="signed",
        ),
        pytest.param(
            lambda kv: kv.add_sink(Raising(), before=True) or kv.worker(1).serve(kv.prompt(1)),
            "kv_harness.faults.survive: call it before an event is lost; a sink has kept event 0 of worker 1 from the "
            "router",
            id="a sink that raises",
        ),
    ],
)
def test_survive_is_refused_after_an_event_did_not_arrive_as_published(inject, message):
    kv = RouterHarness(PROFILE, index=TakesWhatComes(), allow=["index_drift"])
    inject(kv)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        kv.faults.survive("lose")


class Raising:
    def publish(self, event, *_):
        raise OSError("disk full")
