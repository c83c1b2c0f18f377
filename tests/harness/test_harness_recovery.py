"""A router queries workers for events that it missed: the answers, and how the harness judges them."""

import asyncio
import threading
from contextlib import suppress

import pytest
from faulty_indexes import Sound
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import (
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
from pytest_kvmock.harness import Recovery
from pytest_kvmock.oracle import Events, RadixIndexError, RouterCursor, TooNew, TreeDump, WorkerQuery


class Recovering:
    """A router index that recovers."""

    def __init__(self, ask):
        self.ask, self.tree, self.cursor = ask, RadixIndex(), RouterCursor()

    def apply(self, event):
        step = self.cursor.observe(event)
        self.take(event, step)
        while step.ask is not None:
            step = self.cursor.answered(step.ask, self.ask(*step.ask))
            self.take(event, step)

    def take(self, event, step):
        if step.replace:
            self.tree.remove_worker_dp_rank(event.worker_id, event.event.dp_rank)
        for each in step.apply:
            with suppress(RadixIndexError):
                self.tree.apply(each)

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)

    def remove_worker(self, worker_id):
        self.tree.remove_worker(worker_id)
        self.cursor.forget(worker_id)

    def remove_worker_dp_rank(self, worker_id, dp_rank):
        self.tree.remove_worker_dp_rank(worker_id, dp_rank)
        self.cursor.forget(worker_id, dp_rank)


class Plain(Sound):
    """Applies each event that it receives and never queries a worker."""

    def apply(self, event):
        with suppress(RadixIndexError):
            super().apply(event)


@pytest.fixture
def recovering(make_kv):
    """Make a harness with a recovery: `recovering(index=Recovering, ring=4096, **fields)`."""

    def make(index=Recovering, ring=4096, backend="lineage", **fields):
        recovery = Recovery(ring)
        sync = fields.pop("sync", "auto")
        profile = EngineProfile(**{"block_size": 4, "num_blocks": 8, **fields})
        kv = RouterHarness(profile, backend, index and index(recovery), recovery=recovery, sync=sync)
        kv.ask = recovery
        return kv

    return make


def plain(_):
    return Plain()


def store(kv, *blocks, parent=None, worker=0, rank=0):
    kv.apply(Stored(parent, blocks, blocks), worker_id=worker, dp_rank=rank)


def rules(kv):
    """Return the rules of errors that do not follow from another."""
    return [problem.rule for problem in kv.events.errors]


# ------------------------------------------------------------------------------------------------ what is answered


def test_a_worker_answers_with_published_events_that_were_lost(recovering):
    kv = recovering(index=None)
    store(kv, 1)
    kv.drop_next()
    store(kv, 2)
    answer = kv.ask(0, 1)
    assert Events((RouterEvent(0, KvCacheEvent(1, Stored(None, (2,), (2,)))),), 1) == answer
    assert TooNew(2, 1, 1) == kv.ask(0, 2)


def test_an_event_that_a_sink_keeps_from_the_router_is_still_in_the_ring(recovering):
    class Full:
        def publish(self, *_):
            raise OSError("full")

    kv = recovering(index=None)
    kv.add_sink(Full(), before=True)
    store(kv, 1)
    assert len(kv.ask(0, 0).events) == 1


def test_each_rank_has_its_own_ring(recovering):
    kv = recovering(index=None, dp_size=2)
    store(kv, 1, rank=0)
    store(kv, 2, rank=1)
    store(kv, 3, worker=1)
    answers = [kv.ask(0), kv.ask(0, dp_rank=1), kv.ask(1)]
    assert [[e.event.data.block_hashes for e in answer.events] for answer in answers] == [[(1,)], [(2,)], [(3,)]]


def test_a_users_own_sink_can_be_queried(recovering):
    kv = recovering(index=None)
    sink = kv.make_sink()
    sink(KvCacheEvent(7, Stored(None, (1,), (1,))))
    with kv.drop_next():
        sink(Stored(None, (2,), (2,)))
    assert len(kv.ask(sink.worker_id).events) == 2
    assert kv.ask(sink.worker_id).last_event_id == 8
    sink(Stored(None, (3,), (3,)))
    assert kv.judge().errors == []


def test_a_sink_queried_before_its_first_event_may_begin_with_any_id(recovering):
    kv = recovering(index=None)
    sink = kv.make_sink()
    assert TreeDump((), 0) == kv.ask(sink.worker_id)
    sink(KvCacheEvent(7, Stored(None, (1,), (1,))))
    assert kv.judge().errors == []


@pytest.mark.parametrize("ask", [(3,), (0, None, None, 1), ("0",), (0.0,), (False,), ([],), (0, 0, 0, [])])
def test_an_unknown_worker_cannot_be_queried(recovering, ask):
    kv = recovering(index=None)
    kv.worker(0).serve(kv.prompt(1))
    with pytest.raises(ValueError, match=r"^there is no worker .* rank .* to ask; known: worker 0 rank 0$"):
        kv.ask(*ask)
    assert kv.ask.queries == []


def test_an_invalid_query_is_refused_and_not_counted(recovering):
    kv = recovering(index=None)
    with pytest.raises(ValueError, match=r"^start is an event id, "):
        kv.ask(0, -1)
    assert (kv.ask.queries, kv.ask.answers) == ([], [])


def test_queries_and_answers_are_recorded(recovering):
    kv = recovering(index=None, ring=2)
    store(kv, 1)
    answers = [kv.ask(0), kv.ask(0, 0, 5), kv.ask(0, 5, dp_rank=0)]
    assert [WorkerQuery(0), WorkerQuery(0, 0, 5), WorkerQuery(0, 5)] == kv.ask.queries
    assert answers == kv.ask.answers
    assert repr(kv.ask) == "<Recovery with rings of 2 events, asked 3 times>"


def test_a_ring_can_be_made_smaller_at_any_time(recovering):
    kv = recovering(index=None)
    for block in range(1, 6):
        store(kv, block)
    assert isinstance(kv.ask(0, 1), Events)
    kv.ask.ring = 2
    assert isinstance(kv.ask(0, 2), TreeDump)
    assert isinstance(kv.ask(0, 3), Events)
    store(kv, 1, worker=1)
    store(kv, 2, worker=1)
    store(kv, 3, worker=1)
    assert isinstance(kv.ask(1, 0), TreeDump)
    with pytest.raises(ValueError, match=r"^ring is a number of events"):
        kv.ask.ring = 0
    assert kv.ask.ring == 2


# --------------------------------------------------------------------------------------------- how it is set up


def test_use_recovery_is_refused_after_the_first_event(make_kv):
    kv = make_kv()
    with kv.drop_next():
        store(kv, 1)
    with pytest.raises(ValueError, match=r"^use_recovery\(\) must be called before any event is published; earlier"):
        kv.inside.use_recovery(Recovery())


def test_an_engine_that_starts_with_a_cleared_can_be_queried():
    kv, recovery = RouterHarness(EngineProfile(workers=2), "sglang"), Recovery()
    assert kv.events.total == 2
    kv.inside.use_recovery(recovery)
    kv.worker(1).serve(range(32))
    assert [event.event.event_id for event in recovery(1, 0).events] == [0, 1]
    assert [event.event.event_id for event in recovery(0, 0).events] == [0]


def test_a_harness_has_one_recovery_and_a_recovery_has_one_harness(make_kv):
    kv, other = make_kv(), make_kv()
    recovery = Recovery()
    kv.inside.use_recovery(recovery)
    with pytest.raises(ValueError, match=r"^the harness has a recovery already$"):
        kv.inside.use_recovery(Recovery())
    with pytest.raises(ValueError, match=r"^this recovery belongs to another RouterHarness; make one for each$"):
        other.inside.use_recovery(recovery)
    other.inside.use_recovery(Recovery())


@pytest.mark.parametrize("wrong", [4096, "x", Recovery])
def test_an_object_that_is_no_recovery_is_refused(wrong):
    with pytest.raises(TypeError, match=r"^recovery must be a Recovery, got "):
        RouterHarness(recovery=wrong)


def test_a_recovery_without_a_harness_cannot_be_queried():
    with pytest.raises(RuntimeError, match=r"belongs to no RouterHarness$"):
        Recovery()(0)


def test_a_harness_without_a_recovery_keeps_no_events(make_kv):
    assert make_kv().publisher.recovery is None


# -------------------------------------------------------------------------------------------- what is made of it


@pytest.mark.parametrize("ring", [1, 2, 4096])
@pytest.mark.parametrize("backend", ["lineage", "lru", "multi_lru"])
@pytest.mark.parametrize("lost", [1, 3])
def test_a_router_that_recovers_ends_in_sync(recovering, backend, ring, lost):
    kv = recovering(backend=backend, ring=ring)
    prompts = [kv.prompt(3) for _ in range(6)]
    kv.worker(0).serve(prompts[0])
    kv.events.expect_error("event_id_gap")
    kv.drop_next(lost)
    for prompt in prompts[1:]:
        kv.worker(0).serve(prompt)
    kv.assert_in_sync()
    assert kv.overlap(prompts[-1]) == {0: 3}
    assert len(kv.ask.queries) == 2
    verdict = kv.judge()
    assert (verdict.errors, verdict.unmet) == ([], [])


def test_a_router_that_joins_late_receives_a_dump(recovering):
    kv = recovering()
    kv.events.expect_error("event_id_gap")
    kv.drop_next(3)
    for block in range(1, 5):
        store(kv, block)
    assert kv.overlap(Prompt(hashes=[1])) == {0: 1}
    assert kv.judge().errors == []


def test_a_lost_last_event_that_was_recovered_is_no_gap(recovering):
    kv = recovering(index=None)
    store(kv, 1)
    kv.drop_next()
    store(kv, 2)
    kv.ask(0, 1)
    assert kv.overlap(Prompt(hashes=[2])) == {0: 1}
    assert kv.judge().errors == []


def test_an_answer_without_events_changes_no_verdict(recovering):
    kv = recovering(index=None)
    store(kv, 1)
    kv.drop_next()
    store(kv, 2)
    kv.ask(0, 2)
    kv.ask(0, 1, 0)
    assert [problem.rule for problem in kv.judge().errors] == ["event_id_gap"]


@pytest.mark.parametrize("ring", [1, 4096])
def test_an_error_after_a_recovery_stands_by_itself(recovering, ring):
    kv = recovering(ring=ring, index=None)
    store(kv, 1)
    kv.drop_next()
    store(kv, 2)
    store(kv, 3)
    kv.apply(Removed((2,)))
    assert rules(kv) == ["event_id_gap"]  # the error follows from the gap
    kv.ask(0, 1)
    kv.apply(Removed((8,)))
    kv.apply(Stored(7, (6,), (6,)))
    assert rules(kv) == ["event_id_gap", "block_not_found", "parent_block_not_found"]


@pytest.mark.parametrize("ring", [1, 4096])
def test_the_stream_after_a_recovery_is_judged_by_all_published_events(recovering, ring):
    kv = recovering(ring=ring, index=None)
    store(kv, 1)
    kv.drop_next(2)
    store(kv, 2, 3)
    kv.apply(Removed((1,)))
    store(kv, 4)
    kv.ask(0, 1)
    store(kv, 5, parent=3)
    kv.apply(Removed((5, 3, 2)))
    kv.apply(Removed((4,)))
    assert rules(kv) == ["event_id_gap"]
    assert kv.events.warnings == []
    kv.apply(Removed((1,)))
    (_, problem) = kv.events.errors
    assert problem.observed == "block 1 was removed by event 2"


def test_recovered_events_from_after_a_gap_do_not_fill_the_gap(recovering):
    kv = recovering(index=None)
    store(kv, 1)
    kv.publisher.transport = lambda _: ()  # the event is lost without a trace
    store(kv, 2)
    kv.publisher.transport = None
    store(kv, 3)
    kv.ask(0, 2)
    kv.apply(Removed((9,)))
    assert rules(kv) == ["event_id_gap"]


def test_an_index_that_does_not_apply_the_answer_drifts(recovering):
    kv = recovering(index=plain)
    store(kv, 1)
    kv.events.expect_error("event_id_gap")
    kv.drop_next()
    store(kv, 2)
    store(kv, 3)
    assert kv.judge().errors == []
    kv.ask(0, 1)
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.blocks) == ("index_drift", (2,))


def test_a_drift_that_the_gap_explained_is_reported_after_the_recovery(recovering):
    class Stops(Plain):
        def apply(self, event):
            if event.event.event_id < 2:
                super().apply(event)

    kv = recovering(index=lambda _: Stops())
    store(kv, 1)
    kv.events.expect_error("event_id_gap")
    kv.drop_next()
    store(kv, 2)
    store(kv, 3)
    assert [(p.rule, p.blocks) for p in kv.events.errors[0].folded] == [("index_drift", (3,))]
    kv.ask(0, 1)
    assert [(p.rule, p.blocks) for p in kv.judge().errors] == [("index_drift", (2,)), ("index_drift", (3,))]


def test_an_index_that_applies_half_of_the_answer_drifts(recovering):
    class Half(Recovering):
        def take(self, event, step):
            super().take(event, step._replace(apply=step.apply[:1]))

    kv = recovering(index=Half)
    store(kv, 1)
    kv.events.expect_error("event_id_gap")
    kv.drop_next()
    store(kv, 2)
    store(kv, 3)
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.event_id, problem.blocks) == ("index_drift", 2, (3,))


def test_an_index_that_does_not_replace_its_blocks_by_a_dump_drifts(recovering):
    class Adds(Recovering):
        def take(self, event, step):
            super().take(event, step._replace(replace=False))

    kv = recovering(index=Adds, ring=1)
    store(kv, 1)
    kv.events.expect_error("event_id_gap")
    kv.drop_next()
    kv.apply(Removed((1,)))
    store(kv, 3)
    assert [problem.rule for problem in kv.judge().errors] == ["index_drift"]


def test_an_index_that_counts_replayed_events_twice_drifts(recovering):
    # bug catalogue (7): the overlap of a replay inflates counts
    class Counts:
        def __init__(self, ask):
            self.ask, self.last, self.copies = ask, -1, {}

        def apply(self, event):
            events = (event,)
            if event.event.event_id > self.last + 1:
                events = self.ask(0, self.last).events  # one too many
            for each in events:
                data = each.event.data
                for block in data.block_hashes:
                    self.copies[block] = self.copies.get(block, 0) + (1 if isinstance(data, Stored) else -1)
            self.last = event.event.event_id

        def find_matches(self, local_hashes):
            return {0: sum(self.copies.get(block, 0) > 0 for block in local_hashes[:1])}

    kv = recovering(index=Counts)
    store(kv, 1)
    kv.events.expect_error("event_id_gap")
    kv.drop_next()
    store(kv, 2)
    store(kv, 3)
    kv.apply(Removed((1,)))
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.blocks) == ("index_drift", (1,))


# ------------------------------------------------------------------------------------------------- late arrivals


class Delay:
    """Holds events back until they are released."""

    def __init__(self, kv, *ids):
        self.kv, self.ids, self.held = kv, ids, []
        kv.publisher.transport = self

    def __call__(self, event):
        if event.event.event_id in self.ids:
            self.held.append(event)
            return ()
        return (event,)

    def let_go(self, *more):
        self.kv.publisher.transport = lambda event: [*self.held, *more, event]


@pytest.mark.parametrize("ring", [1, 4096])
def test_an_event_that_was_recovered_may_arrive_late(recovering, ring):
    kv = recovering(ring=ring)
    delay = Delay(kv, 1)
    store(kv, 1)
    kv.events.expect_error("event_id_gap")
    store(kv, 2)
    kv.apply(Removed((1,)))
    kv.apply(Removed((2,)))
    delay.let_go()
    store(kv, 3)
    kv.assert_in_sync()
    assert kv.overlap(Prompt(hashes=[2])) == {}
    assert kv.judge().errors == []


def test_an_event_that_was_recovered_may_arrive_late_only_once(recovering):
    kv = recovering(index=None)
    delay = Delay(kv, 1)
    store(kv, 1)
    store(kv, 2)
    store(kv, 3)
    kv.ask(0, 1)
    delay.let_go(*delay.held)
    store(kv, 4)
    known = [problem.observed for problem in kv.events.problems if problem.rule == "event_id_gap"]
    assert known[1] == "event 2 had arrived: ids went backwards, as after an unannounced restart"


def test_an_index_that_applies_a_recovered_event_again_drifts(recovering):
    class Forgetful(Recovering):
        def apply(self, event):
            if self.cursor.last(0) is not None and event.event.event_id < self.cursor.last(0):
                self.tree.apply(event)
            super().apply(event)

    kv = recovering(index=Forgetful)
    delay = Delay(kv, 1)
    store(kv, 1)
    kv.events.expect_error("event_id_gap")
    store(kv, 2)
    kv.apply(Removed((2,)))
    delay.let_go()
    store(kv, 3)
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.blocks) == ("index_drift", (2,))


# ----------------------------------------------------------------------------------------- restarts and removals


@pytest.mark.parametrize("ring", [1, 4096])
def test_after_an_announced_restart_a_worker_answers_with_an_empty_dump(recovering, ring):
    kv = recovering(ring=ring)
    kv.worker(0).serve(kv.prompt(3))
    kv.worker(0).restart(announced=True)
    assert TreeDump((), 0) == kv.ask(0)
    new = kv.prompt(2)
    kv.worker(0).serve(new)
    assert kv.overlap(new) == {0: 2}
    assert kv.judge().errors == []


def test_a_router_that_queries_all_after_an_unannounced_restart_is_in_sync(recovering):
    kv = recovering()
    old, new = kv.prompt(3), kv.prompt(2)
    kv.worker(0).serve(old)
    kv.worker(0).restart()
    kv.index.remove_worker(0)  # the router detected the restart by other means
    assert TreeDump((), 0) == kv.ask(0)
    kv.worker(0).serve(new)
    assert (kv.overlap(old), kv.overlap(new)) == ({}, {0: 2})
    assert kv.judge().errors == []


def test_ids_recovered_before_a_restart_do_not_count_after_it(recovering):
    kv = recovering(index=None)
    store(kv, 1)
    kv.drop_next()
    store(kv, 2)
    kv.ask(0, 1)
    kv.worker(0).restart()
    kv.drop_next()
    store(kv, 3)
    store(kv, 4)  # event 1 again, other than the recovered one
    assert "event_id_gap" in rules(kv)


def test_recovered_ids_do_not_count_after_a_restart_of_hand_made_events(recovering):
    kv = recovering(index=None)
    store(kv, 1)
    kv.drop_next()
    store(kv, 2)
    store(kv, 3)
    kv.ask(0, 1)
    kv.apply(KvCacheEvent(0, Stored(None, (4,), (4,))))
    kv.apply(KvCacheEvent(1, Stored(None, (5,), (5,))))
    assert kv.overlap(Prompt(hashes=[5])) == {0: 1}


def test_a_worker_that_is_removed_and_made_again_has_an_empty_ring(recovering):
    kv = recovering()
    kv.worker(0).serve(kv.prompt(3))
    kv.remove_worker(0)
    new = kv.prompt(2)
    kv.worker(0).serve(new)
    assert kv.overlap(new) == {0: 2}
    assert [answer.last_event_id for answer in kv.ask.answers] == [0, 0]
    assert kv.judge().errors == []


def test_a_cleared_in_the_gap_drops_the_earlier_blocks(recovering):
    kv = recovering()
    old, new = kv.prompt(2), kv.prompt(2)
    kv.worker(0).serve(old)
    kv.events.expect_error("event_id_gap")
    kv.drop_next(2)
    kv.worker(0).serve(kv.prompt(1))
    kv.worker(0).clear()
    kv.worker(0).serve(new)
    assert (kv.overlap(old), kv.overlap(new)) == ({}, {0: 2})
    assert [Cleared, Stored] == [type(event.event.data) for event in kv.ask.answers[-1].events]
    assert kv.judge().errors == []


# ------------------------------------------------------------------------------------------------- odd streams


def test_blocks_of_lower_tiers_are_recovered_too(recovering):
    kv = recovering(ring=1)
    store(kv, 1)
    kv.events.expect_error("event_id_gap")
    kv.drop_next()
    kv.apply(RouterEvent(0, KvCacheEvent(1, Stored(None, (5,), (5,))), StorageTier.HOST_PINNED))
    store(kv, 2)
    assert kv.index.tree.find_tiered([5])[StorageTier.HOST_PINNED] == {(0, 0): 1}
    kv.apply(RouterEvent(0, KvCacheEvent(3, Removed((5,))), StorageTier.HOST_PINNED))
    assert kv.judge().errors == []


@pytest.mark.parametrize("ring", [1, 2, 4096])
def test_a_block_stored_again_under_its_own_child_is_recovered_as_from_events_in_order(recovering, ring):
    kv = recovering(ring=ring)  # multi_lru publishes such a stream
    sink = kv.make_sink(prefix_closed=False)
    sink(Stored(None, (1, 2), (1, 2)))
    kv.events.expect_error("event_id_gap")
    kv.drop_next()
    sink(Removed((1,)))
    sink(Stored(2, (1,), (1,)))
    assert kv.overlap(Prompt(hashes=[1])) == {}
    assert kv.judge().errors == []


@pytest.mark.parametrize("ring", [1, 4096])
def test_recovered_copies_are_counted_as_they_were_published(recovering, ring):
    kv = recovering(index=None, ring=ring)
    sink = kv.make_sink(residency="counted")
    sink(Stored(None, (1,), (1,)))
    kv.events.expect_error("event_id_gap")
    kv.drop_next()
    sink(Stored(None, (1,), (1,)))
    sink(Stored(None, (2,), (2,)))
    kv.ask(sink.worker_id, 1)
    sink(Removed((1,)))
    sink(Removed((1,)))
    assert kv.judge().errors == []
    sink(Removed((1,)))
    assert [problem.rule for problem in kv.judge().errors] == ["block_not_found"]


def test_a_block_that_no_dump_can_contain_is_no_error_of_the_index(recovering):
    class Strict(Recovering):
        def take(self, event, step):
            if step.replace:
                self.tree.remove_worker_dp_rank(event.worker_id, event.event.dp_rank)
            for each in step.apply:
                self.tree.apply(each)

    kv = recovering(index=Strict, ring=1)
    store(kv, 1, 2)
    kv.apply(Removed((1,)))  # 2 is an orphan
    kv.events.expect_error("event_id_gap")
    kv.drop_next()
    store(kv, 3)
    store(kv, 4)
    kv.apply(Removed((2,)))  # the reference index raises on it as well
    assert kv.judge().errors == []


@given(st.data())
def test_whatever_is_lost_a_recovering_router_ends_with_gaps_as_its_only_errors(data):
    recovery = Recovery(data.draw(st.sampled_from([1, 3, 4096])))
    backend = data.draw(st.sampled_from(["lineage", "lru", "multi_lru"]))
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=8), backend, Recovering(recovery), recovery=recovery)
    kv.publisher.transport = lambda event: data.draw(st.sampled_from([(event,), (), (event, event)]))
    prompts = [kv.prompt(2) for _ in range(3)]
    for number in data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=12)):
        kv.worker(0).serve(kv.prompt(2, after=prompts[number]), output_tokens=3)
    kv.publisher.transport = None
    last = kv.prompt(2)
    kv.worker(0).serve(last)

    kv.events.clear()
    kv.judge()
    kv.assert_in_sync()
    assert {"event_id_gap"} >= {problem.rule for problem in kv.events.errors}
    assert kv.overlap(last) == {0: 2}


# --------------------------------------------------------------------------------------------- async and threads


class AsyncRecovering(Recovering):
    async def answer(self, *query):
        return self.ask(*query)

    async def apply(self, event):
        step = self.cursor.observe(event)
        self.take(event, step)
        while step.ask is not None:
            step = self.cursor.answered(step.ask, await asyncio.create_task(self.answer(*step.ask)))
            self.take(event, step)


def test_an_async_index_recovers_when_it_is_flushed(recovering):
    async def test():
        kv = recovering(index=AsyncRecovering)
        kv.events.expect_error("event_id_gap")
        prompts = [kv.prompt(2) for _ in range(4)]
        kv.worker(0).serve(prompts[0])
        kv.drop_next()
        for prompt in prompts[1:]:
            kv.worker(0).serve(prompt)
        await kv.aflush()
        await kv.aassert_in_sync()
        assert await kv.aoverlap(prompts[1]) == {0: 2}
        return kv.judge()

    assert asyncio.run(test()).errors == []


class Threaded(Recovering):
    """Applies its queue in a thread of its own; `flush` waits for the thread."""

    def __init__(self, ask):
        super().__init__(ask)
        self.waiting = []

    def apply(self, event):
        self.waiting.append(event)

    def work(self):
        while self.waiting:
            super().apply(self.waiting.pop(0))

    def flush(self):
        thread = threading.Thread(target=self.work, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("sync", ["every", "end"])
def test_an_index_may_query_in_a_thread_while_the_harness_waits_for_it(recovering, sync):
    kv = recovering(index=Threaded, sync=sync)
    kv.events.expect_error("event_id_gap")
    store(kv, 1, 2)
    kv.drop_next()
    kv.apply(Removed((2,)))
    store(kv, 3)
    kv.assert_in_sync()
    assert kv.overlap(Prompt(hashes=[1, 2])) == {0: 1}
    assert kv.judge().errors == []


def test_a_harness_reports_at_its_end_what_an_index_did_wrong_with_an_answer():
    recovery = Recovery()

    def run():
        with RouterHarness(index=Plain(), recovery=recovery) as kv:
            store(kv, 1)
            kv.events.expect_error("event_id_gap")
            kv.drop_next()
            store(kv, 2)
            store(kv, 3)
            recovery(0, 1)

    with pytest.raises(EventRulesBroken, match="1 KV event error: index_drift"):
        run()
