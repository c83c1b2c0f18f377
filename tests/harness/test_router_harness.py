"""The harness as a library: its workers, events in, overlaps out, and losses in between."""

import sys
import threading
from dataclasses import replace

import pytest
from faulty_indexes import Manageable, Sound

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    Cleared,
    EngineProfile,
    EventRulesBroken,
    KvCacheEvent,
    Prompt,
    Removed,
    RouterEvent,
    RouterHarness,
    StorageTier,
    Stored,
    block_hashes,
    sequence_hashes,
)


class Raising:
    """A sink that raises on the events with these ids."""

    def __init__(self, *ids):
        self.ids = ids
        self.received = []

    def publish(self, event, storage_tier=None, token_ids=None):
        self.received.append(event.event_id)
        if event.event_id in self.ids:
            raise OSError("disk full")


def one_block(number):
    return Stored(None, (number,), (number,))


def ids(log):
    return [entry.event.event.event_id for entry in log]


# ------------------------------------------------------------------------------------------------------ workers


def test_workers_of_the_profile_exist_from_the_start(make_kv):
    kv = make_kv(workers=3)
    assert list(kv.workers) == [0, 1, 2]
    assert [worker.worker_id for worker in kv.workers.values()] == [0, 1, 2]
    assert kv.worker(1) is kv.workers[1]
    with pytest.raises(TypeError):
        kv.workers[9] = None


def test_ranks_of_the_profile_exist_from_the_start_and_have_names(make_kv):
    kv = make_kv(workers=2, dp_size=2)
    assert list(kv.workers) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (kv.worker(1, dp_rank=1).worker_id, kv.worker(1, dp_rank=1).dp_rank) == (1, 1)
    kv.worker(1, dp_rank=1).serve(range(4))
    (entry,) = kv.events
    assert (entry.event.worker_id, entry.event.event.dp_rank) == (1, 1)


def test_a_worker_is_made_at_its_first_use(make_kv, kv):
    assert kv.worker(7) is kv.worker(7)
    assert list(kv.workers) == [0, 7]
    assert kv.worker(7, dp_rank=2) is kv.workers[7, 2]
    assert kv.worker(None).worker_id == 1
    assert list(make_kv(workers=0).workers) == []


def test_workers_have_the_sizes_of_the_profile_and_their_backend(make_kv):
    kv = make_kv("lru", num_blocks=5, block_size=8)
    manager = kv.worker(0).manager
    assert (manager.backend, manager.num_blocks, manager.block_size) == ("lru", 5, 8)
    assert kv.worker(1, backend="lineage").backend == "lineage"
    assert kv.backend == "lru"


def test_a_harness_without_a_backend_has_no_workers_until_use_backend(make_kv):
    kv = make_kv(None, workers=2)
    assert (kv.backend, dict(kv.workers)) == (None, {})
    with pytest.raises(ValueError, match="no backend yet"):
        kv.worker(0)
    kv.inside.use_backend("lru")
    kv.inside.use_backend("lru")
    assert [worker.backend for worker in kv.workers.values()] == ["lru", "lru"]
    with pytest.raises(ValueError, match="'lru' already; it cannot become 'lineage'"):
        kv.inside.use_backend("lineage")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda kv: kv.worker(-1), "a worker id is an integer from 0 to 18446744073709551615, got -1"),
        (lambda kv: kv.worker(2**64), "got 18446744073709551616"),
        (lambda kv: kv.worker("0"), "got '0'"),
        (lambda kv: kv.worker(0, dp_rank=-1), "a dp_rank is an integer of at least 0, got -1"),
        (lambda kv: kv.worker(1, backend="nope"), f"unknown backend 'nope'; known: {', '.join(BACKENDS)}"),
        (lambda kv: kv.worker(0, backend="lru"), "worker 0 has backend 'lineage', not 'lru'"),
        (lambda kv: kv.drop_next(0), "n must be an integer of at least 1, got 0"),
        (lambda kv: kv.drop_next(True), "got True"),
        (
            lambda kv: kv.drop_next(kind="store"),
            r"unknown kind 'store'; did you mean 'stored'\? known: stored, removed, cleared",
        ),
        (
            lambda kv: kv.events.counts.ok("store"),
            r"unknown kind 'store'; did you mean 'stored'\? known: stored, removed, cleared",
        ),
        (
            lambda kv: kv.events.counts.status("stored", "bad"),
            "unknown status 'bad'; known: ok, parent_block_not_found",
        ),
        (lambda kv: RouterHarness(backend="nope"), "unknown backend 'nope'"),
        (
            lambda kv: RouterHarness(sync="never"),
            r"unknown sync 'never'; did you mean 'every'\? known: every, auto, burst, end",
        ),
        (lambda kv: RouterHarness(clears="e2"), "unknown clears 'e2'; known: rank, worker"),
        (lambda kv: RouterHarness(allow=["nope"]), "unknown rule 'nope'; known: parent_block_not_found"),
    ],
    ids=range(15),
)
def test_unknown_arguments_are_refused_with_the_known_ones(kv, call, message):
    before = list(kv.workers)
    with pytest.raises(ValueError, match=message):
        call(kv)
    assert before == list(kv.workers)


@pytest.mark.parametrize(
    ("field", "error", "message"),
    [
        ({"allow": None}, TypeError, "allow takes a list or tuple of rules, got None"),
        ({"allow": 3}, TypeError, "allow takes a list or tuple of rules, got 3"),
        ({"allow": {"event_id_gap": 1}}, TypeError, "allow takes a list or tuple of rules, got {'event_id_gap': 1}"),
        ({"survive": None}, ValueError, "survive: got None; allowed: a fault, or a list of faults"),
        ({"survive": 3}, ValueError, "survive: got 3; allowed: a fault, or a list of faults"),
        ({"survive": {"lose": 1}}, ValueError, "survive: got {'lose': 1}; allowed: a fault, or a list of faults"),
        (
            {"survive": ["lost"]},
            ValueError,
            r"survive: unknown fault 'lost'; did you mean 'lose'\? known: lose, double",
        ),
    ],
    ids=str,
)
def test_invalid_lists_of_rules_or_faults_are_refused(field, error, message):
    with pytest.raises(error, match=f"^{message}"):
        RouterHarness(**field)


def test_a_backend_that_makes_no_manager_is_refused_by_name():
    from pytest_kvmock import BackendSpec

    with pytest.raises(ValueError, match=r"^backend 'mine' made the class object; it must be an object"):
        RouterHarness(backend=BackendSpec("mine", "nobody", lambda **_: object))
    with pytest.raises(ValueError, match=r"^backend 'mine': make raised ZeroDivisionError: division by zero"):
        RouterHarness(backend=BackendSpec("mine", "nobody", lambda **_: 1 / 0))


def test_a_backend_whose_manager_has_another_name_is_refused(monkeypatch, make_kv):
    from pytest_kvmock.engines import backends

    liar = backends.BackendSpec("lineage", "nobody", backends.BACKENDS["lru"].make)
    monkeypatch.setattr(backends, "BACKENDS", {"lineage": liar})
    with pytest.raises(ValueError, match="backend 'lineage' made a manager that calls itself 'lru'"):
        make_kv("lineage")


# ------------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_is_new_or_begins_with_a_given_one(kv):
    first = kv.prompt(blocks=2)
    second = kv.prompt(blocks=3, after=first, tail=1)
    assert (first.num_tokens, second.num_tokens) == (8, 21)
    assert first.tokens == second.tokens[:8]
    assert set(block_hashes(first.tokens, 4)).isdisjoint(block_hashes(kv.prompt(2).tokens, 4))
    assert kv.prompt(1, after=[1, 2, 3]).tokens[:3] == (1, 2, 3)
    assert kv.prompt().num_tokens == 16


def test_a_prompt_after_hashes_is_refused(kv):
    with pytest.raises(ValueError, match="needs a prompt of tokens"):
        kv.prompt(after=Prompt(hashes=[1]))


@pytest.mark.parametrize(
    ("sizes", "message"), [({"blocks": -1}, "blocks"), ({"tail": -1}, "tail"), ({"tail": 4}, "tail")]
)
def test_a_prompt_of_an_impossible_size_is_refused(kv, sizes, message):
    with pytest.raises(ValueError, match=message):
        kv.prompt(**sizes)


def test_prompts_and_events_are_the_same_for_the_same_seed_and_name(make_kv):
    def traffic(**given):
        kv = make_kv(**given)
        kv.worker(0).serve(kv.prompt(2, tail=1), output_tokens=5)
        return [entry.event for entry in kv.events]

    assert traffic() == traffic()
    assert traffic() != traffic(seed=1)
    assert traffic() != traffic(name="other")


# -------------------------------------------------------------------------------------------------------- apply


def test_data_without_an_id_gets_the_next_id_of_its_worker(kv):
    kv.apply([one_block(1), one_block(2)])
    kv.worker(0).manager.use([7])
    kv.apply(Removed((1,)))
    kv.apply(one_block(1), worker_id=4)
    assert ids(kv.events) == [0, 1, 2, 3, 0]
    assert [entry.event.worker_id for entry in kv.events] == [0, 0, 0, 0, 4]
    assert kv.events.problems == []


def test_each_rank_has_its_own_ids(make_kv):
    kv = make_kv(dp_size=2)
    kv.apply([one_block(1), one_block(2)], dp_rank=1)
    kv.apply(one_block(3))
    assert [(e.event.event.event_id, e.event.event.dp_rank) for e in kv.events] == [(0, 1), (1, 1), (0, 0)]
    assert kv.overlap(Prompt(hashes=[2])) == {(0, 1): 1}


def test_apply_takes_each_form_of_event_one_or_many(kv):
    kv.apply(KvCacheEvent(0, one_block(1)))
    kv.apply(RouterEvent(3, KvCacheEvent(5, one_block(1)), StorageTier.DISK, [(1, 2, 3, 4)]))
    kv.apply(event for event in (KvCacheEvent(1, Cleared()), one_block(2)))
    assert ids(kv.events) == [0, 5, 1, 2]
    assert kv.events[1].storage_tier == StorageTier.DISK
    assert list(kv.events[1].token_ids) == [(1, 2, 3, 4)]
    kv.assert_no_event_errors()


@pytest.mark.parametrize(
    "wrong", [None, 7, "stored", {"stored": 1}, b"", KvCacheEvent(0, "stored"), RouterEvent(0, KvCacheEvent(0, None))]
)
def test_an_object_that_is_no_event_is_refused_and_not_received(kv, wrong):
    with pytest.raises(
        TypeError, match="apply takes Stored, Removed, Located, Updated, Cleared, KvCacheEvent or RouterEvent"
    ):
        kv.apply(wrong)
    assert 0 == len(kv.events) == kv.events.total
    kv.apply(one_block(1))
    assert ids(kv.events) == [0]


def test_events_before_an_invalid_one_are_received(kv):
    with pytest.raises(TypeError, match=r"got None \(NoneType\)"):
        kv.apply([one_block(1), None, one_block(2)])
    assert kv.events.stored_blocks == [1]


# ------------------------------------------------------------------------------------------------------ overlap


def test_overlap_counts_leading_blocks_of_each_worker_that_has_any(make_kv):
    kv = make_kv(workers=3)
    long = kv.prompt(3)
    kv.worker(0).serve(long)
    kv.worker(1).serve(long.tokens[:4])
    assert kv.overlap(long) == {0: 3, 1: 1}
    assert kv.overlap(list(long.tokens)) == {0: 3, 1: 1}
    assert kv.overlap(kv.prompt(2, after=long)) == {0: 3, 1: 1}
    assert kv.overlap(kv.prompt(1)) == {}
    assert kv.overlap([]) == {}
    assert kv.overlap(Prompt(hashes=block_hashes(long.tokens[:8], 4))) == {0: 2, 1: 1}


def test_overlap_names_ranks_if_a_worker_has_several(make_kv):
    kv = make_kv(workers=2, dp_size=2)
    asked = kv.prompt(2)
    kv.worker(1, dp_rank=1).serve(asked)
    assert kv.overlap(asked) == {(1, 1): 2}


def test_overlap_names_a_rank_other_than_the_first(kv):
    kv.apply(one_block(1), worker_id=2)
    kv.apply(one_block(1), worker_id=2, dp_rank=3)
    assert kv.overlap(Prompt(hashes=[1])) == {2: 1, (2, 3): 1}


# --------------------------------------------------------------------------------------------------------- drops


def test_a_dropped_event_is_neither_received_nor_logged(kv, rules_of):
    kv.drop_next()
    kv.apply(one_block(1))
    assert (len(kv.events), kv.overlap(Prompt(hashes=[1]))) == (0, {})
    kv.apply(one_block(2))
    assert rules_of(kv.judge().errors) == ["event_id_gap"]


def test_a_drop_by_kind_passes_events_of_other_kinds(kv):
    kv.drop_next(2, kind="removed")
    kv.apply([one_block(1), Removed((1,)), one_block(2), Removed((2,)), Removed((3,)), Cleared()])
    assert ids(kv.events) == [0, 2, 4, 5]


def test_two_drops_count_independently(kv):
    kv.drop_next(kind="cleared")
    kv.drop_next(kind="stored")
    kv.apply([one_block(1), Cleared(), one_block(2), Cleared()])
    assert ids(kv.events) == [2, 3]


def test_no_event_is_dropped_after_the_with_block(kv):
    with kv.faults.lose(None) as drop:
        kv.apply([one_block(1), one_block(2)])
    assert drop.injected == 2
    kv.apply(one_block(3))
    assert ids(kv.events) == [2]
    with kv.drop_next() as drop:
        kv.apply(one_block(4))
    assert (drop.left, drop.injected) == (0, 1)


def test_a_transport_may_lose_repeat_and_delay_events(kv):
    late = []

    def transport(event):
        if event.event.event_id == 0:
            late.append(event)
            return []
        return [event, *late]

    kv.publisher.transport = transport
    kv.apply([one_block(1), one_block(2)])
    assert ids(kv.events) == [1, 0]


# ------------------------------------------------------------------------------------------ remove_worker, restart


def test_removing_a_worker_removes_all_its_ranks(make_kv):
    kv = make_kv(workers=2, dp_size=2)
    asked = kv.prompt(2)
    for worker in kv.workers.values():
        worker.serve(asked)
    kv.remove_worker(0)
    assert kv.overlap(asked) == {(1, 0): 2, (1, 1): 2}
    assert list(kv.workers) == [(1, 0), (1, 1)]
    kv.assert_in_sync()


def test_a_removed_worker_may_return_with_any_id(kv):
    asked = kv.prompt(2)
    worker = kv.worker(0)
    worker.serve(asked)
    kv.remove_worker(0)
    worker.clear()
    worker.serve(asked)
    assert kv.overlap(asked) == {0: 2}
    assert ids(kv.events) == [0, 1, 2]
    kv.assert_no_event_errors()


def test_a_new_worker_may_have_the_id_of_a_removed_one(kv):
    before = kv.worker(0)
    before.serve(kv.prompt(1))
    kv.remove_worker(0)
    assert kv.worker(0) is not before
    kv.worker(0).serve(kv.prompt(2))
    assert ids(kv.events) == [0, 0]
    kv.assert_no_event_errors()


def test_a_removed_worker_that_continues_is_unknown_to_the_router(kv, rules_of):
    asked, worker = kv.prompt(1), kv.worker(0)
    worker.serve(asked)
    kv.remove_worker(0)
    worker.serve(kv.prompt(1, after=asked))
    assert rules_of(kv.judge().errors) == ["parent_block_not_found"]


def test_a_lost_event_after_the_return_of_a_worker_names_no_earlier_event(kv):
    worker = kv.worker(0)
    worker.serve(kv.prompt(1))
    kv.remove_worker(0)
    kv.drop_next()
    worker.serve(kv.prompt(1))
    (problem,) = kv.judge().errors
    assert problem.observed == "the worker published ids up to 1; event 1 did not arrive"


def test_removing_an_unknown_worker_is_no_error(kv):
    kv.remove_worker(9)
    assert list(kv.workers) == [0]


def test_removing_a_rank_keeps_the_other_ranks_of_its_worker(make_kv):
    kv = make_kv(workers=2, dp_size=2)
    asked = kv.prompt(2)
    for worker in kv.workers.values():
        worker.serve(asked)
    kv.remove_worker((1, 1))
    assert kv.overlap(asked) == {(0, 0): 2, (0, 1): 2, (1, 0): 2}
    assert list(kv.workers) == [(0, 0), (0, 1), (1, 0)]
    assert [note.text for note in kv.events.notes] == ["worker 1 rank 1 removed: your router drops its blocks"]
    kv.worker(1, dp_rank=1).serve(kv.prompt(1))  # a new worker
    assert ids(kv.events)[-1] == 0
    kv.assert_in_sync()
    kv.assert_no_event_errors()


def test_removed_workers_and_ranks_are_removed_from_the_index_under_test(make_kv):
    index = Manageable()
    kv = make_kv(index=index, workers=2, dp_size=2)
    kv.remove_worker((1, 1))
    kv.remove_worker(1)
    kv.remove_worker((0, 0))
    assert index.removals == [(1, 1), 1, (0, 0)]


def test_removing_a_rank_from_an_index_without_remove_worker_dp_rank_is_refused(make_kv):
    kv = make_kv(index=Sound(), dp_size=2)
    asked = kv.prompt(2)
    for worker in kv.workers.values():
        worker.serve(asked)
    with pytest.raises(
        ValueError, match=r"cannot remove worker 0: it has no remove_worker_dp_rank\(worker_id, dp_rank\)$"
    ):
        kv.remove_worker((0, 1))
    assert kv.overlap(asked) == {(0, 0): 2, (0, 1): 2}
    kv.assert_in_sync()


@pytest.mark.parametrize("given", ["1", -1, True, (1,), (1, -1), ("1", 0), (1, 2, 3), [1, 1], 2**64])
def test_an_argument_that_names_no_worker_or_rank_is_refused(kv, given):
    with pytest.raises(
        ValueError, match=r"^remove_worker takes a worker id \(.*\), or \(worker id, dp_rank\) for one rank, "
    ) as error:
        kv.remove_worker(given)
    assert str(error.value).endswith(f", got {given!r}")
    assert list(kv.workers) == [0]


def test_a_sink_stays_usable_when_its_rank_is_removed(kv):
    sink = kv.make_sink(worker_id=7)
    sink.publish(Stored(None, (1,), (11,)))
    kv.remove_worker((7, 0))
    assert kv.overlap(Prompt(hashes=[11])) == {}
    with pytest.raises(ValueError, match="is a sink of this test already"):
        kv.make_sink(worker_id=7)


def test_an_announced_restart_reaches_the_router(kv):
    asked, worker = kv.prompt(2), kv.worker(0)
    worker.serve(asked)
    worker.restart(announced=True)
    assert kv.overlap(asked) == {}
    kv.assert_in_sync()
    worker.serve(asked)
    assert ids(kv.events) == [0, 0]
    assert kv.overlap(asked) == {0: 2}
    assert worker is kv.worker(0)
    kv.assert_no_event_errors()


def test_an_announced_restart_of_one_rank_keeps_the_others(make_kv):
    kv = make_kv(dp_size=2)
    asked = kv.prompt(2)
    for worker in kv.workers.values():
        worker.serve(asked)
    kv.worker(0, dp_rank=1).restart(announced=True)
    assert kv.overlap(asked) == {(0, 0): 2}
    kv.assert_in_sync()


def test_a_silent_restart_is_detected_at_the_next_event(kv, rules_of):
    worker = kv.worker(0)
    worker.serve(kv.prompt(2))
    worker.restart()
    worker.serve(kv.prompt(1))
    assert rules_of(kv.events.errors) == ["event_id_gap"]


def test_a_silent_restart_without_later_events_is_detected_at_the_flush(kv, rules_of):
    worker = kv.worker(0)
    worker.serve(kv.prompt(2))
    worker.restart()
    kv.flush()
    assert rules_of(kv.events.errors) == ["engine_drift"]


# --------------------------------------------------------------------------------------------------------- sinks


def test_sinks_before_and_after_the_router_receive_every_event(kv):
    before, after = CapturingSink(), CapturingSink()
    kv.add_sink(before, before=True)
    kv.add_sink(after)
    kv.worker(0).serve(range(4))
    kv.apply(Removed((7,)))
    assert [e.event.event for e in kv.events] == before.events == after.events
    assert [tuple(ids) for ids in before.router_events[0].token_ids] == [(0, 1, 2, 3)]


def test_a_sink_before_the_router_that_raises_keeps_the_event_from_all_after_it(kv, rules_of):
    raising, second, after = Raising(1), CapturingSink(), CapturingSink()
    for sink, before in ((raising, True), (second, True), (after, False)):
        kv.add_sink(sink, before=before)
    kv.apply([one_block(1), one_block(2), one_block(3)])
    assert raising.received == [0, 1, 2]
    assert [0, 2] == ids(kv.events) == [e.event_id for e in second.events] == [e.event_id for e in after.events]
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.event_id) == ("sink_failure", 1)
    assert problem.observed == "Raising.publish raised OSError: disk full; the router never got the event"


def test_a_sink_after_the_router_that_raises_keeps_no_event_from_it(kv, rules_of):
    second = CapturingSink()
    kv.add_sink(Raising(1))
    kv.add_sink(second)
    kv.apply([one_block(1), one_block(2), Stored(2, (3,), (3,))])
    assert ids(kv.events) == [0, 1, 2]
    assert [event.event_id for event in second.events] == [0, 2]
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.event_id) == ("sink_failure", 1)
    assert problem.observed == "Raising.publish raised OSError: disk full"


def test_errors_from_an_event_that_a_sink_kept_back_follow_from_the_sink_failure(kv, rules_of):
    kv.add_sink(Raising(0), before=True)
    worker = kv.worker(0)
    asked = kv.prompt(1)
    worker.serve(asked)
    worker.serve(kv.prompt(1, after=asked))
    (problem,) = kv.judge().errors
    assert rules_of(problem.consequences()) == ["parent_block_not_found"]


def test_a_worker_continues_when_a_sink_raises(kv):
    kv.add_sink(Raising(0), before=True)
    assert len(kv.worker(0).serve(kv.prompt(2)).stored_blocks) == 2
    assert len(kv.worker(0).manager.resident()) == 2


def test_an_exception_of_the_harness_itself_fails_the_test(kv):
    """The worker continues, as with any sink, and an event that could not be judged must not pass."""

    def transport(event):
        raise KeyError("no route")

    kv.worker(0).serve(kv.prompt(1))
    kv.publisher.transport = transport
    kv.worker(0).serve(kv.prompt(1))
    (problem,) = (e for e in kv.judge().errors if e.rule == "sink_failure")
    assert (problem.rule, problem.event_id) == ("sink_failure", 1)
    assert problem.observed == "it could not be judged: KeyError: 'no route'"


# ------------------------------------------------------------------------------------------------------- counters


def test_counters_count_a_hand_made_stream(make_kv):
    kv = make_kv(None)
    kv.apply(
        [
            Stored(None, (1, 2), (1, 2)),  # ok
            Stored(2, (3,), (3,)),  # ok
            Stored(2, (3,), (3,)),  # ok, and a duplicate
            Stored(99, (4,), (4,)),  # parent_block_not_found
            Stored(5, (5,), (5,)),  # invalid_block
            Removed((3,)),  # ok
            Removed((3,)),  # block_not_found
            Removed((1, 77, 78)),  # block_not_found, once
            Cleared(),  # ok
        ],
        worker_id=1,
    )
    assert tuple(map(kv.events.counts.ok, ("stored", "removed", "cleared"))) == (3, 1, 1)
    expected = {
        ("stored", "parent_block_not_found"): 1,
        ("stored", "block_not_found"): 0,
        ("stored", "invalid_block"): 1,
        ("removed", "parent_block_not_found"): 0,
        ("removed", "block_not_found"): 2,
        ("removed", "invalid_block"): 0,
    }
    assert kv.events.counts.invalid == expected
    assert {pair: kv.events.counts.status(*pair) for pair in expected} == expected
    assert kv.events.counts.warnings == {"duplicate_store": 1, "orphaned_child": 1}  # block 2 loses its parent
    assert repr(kv.events.counts) == "<EventCounts ok: 3 stored, 1 removed, 1 cleared; invalid: 4; warnings: 2>"


def test_counters_include_errors_that_follow_from_another_fault(kv):
    kv.drop_next()
    kv.apply([one_block(1), Stored(1, (2,), (2,)), Removed((1,))])
    assert len(kv.judge().errors) == 1
    assert (
        kv.events.counts.status("stored", "parent_block_not_found"),
        kv.events.counts.status("removed", "block_not_found"),
    ) == (1, 0)


def test_counters_are_kept_when_the_log_is_cleared(kv):
    kv.apply([one_block(1), Removed((9,))])
    kv.events.clear()
    assert (
        kv.events.counts.ok("stored"),
        kv.events.counts.ok("removed"),
        kv.events.counts.status("removed", "block_not_found"),
    ) == (1, 0, 1)
    part = kv.events.for_worker(0)
    assert (part.counts.status("stored", "ok"), part.counts.status("removed", "ok")) == (1, 0)


# --------------------------------------------------------------------------------------------------------- threads


def test_two_publishing_threads_take_turns(make_kv):
    kv = make_kv(None)
    sink = kv.make_sink()
    inside, most = 0, 0

    def transport(event):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        inside -= 1
        return [event]

    kv.publisher.transport = transport
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    start = threading.Barrier(4)

    def publish(thread):
        start.wait()
        for number in range(300):
            if thread < 2:
                sink(one_block(1000 * thread + number))
            else:
                kv.apply(one_block(1000 * thread + number), worker_id=1)

    threads = [threading.Thread(target=publish, args=(thread,)) for thread in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert most == 1
    assert list(range(600)) == ids(kv.events.for_worker(1))
    assert list(range(600)) == ids(kv.events.for_worker(sink.worker_id))
    assert [*range(600)] == [event.event_id for event in sink.events]
    kv.assert_no_event_errors()


# --------------------------------------------------------------------------------------------------------- judging


def test_clean_traffic_passes_every_assertion(kv):
    worker = kv.worker(0)
    for _ in range(5):
        worker.serve(kv.prompt(3, tail=2), output_tokens=6)
    worker.clear()
    kv.assert_no_event_errors()
    kv.events.assert_no_event_warnings()
    kv.assert_in_sync()
    assert tuple(kv.judge()) == ([], [], [])


def test_expected_errors_do_not_fail_assert_no_event_errors(kv):
    with kv.events.expect_error("block_not_found"):
        kv.apply(Removed((7,)))
    kv.assert_no_event_errors()
    kv.apply(Removed((8,)))
    with pytest.raises(EventRulesBroken, match=r"1 KV event error: block_not_found \(worker 0, event 1\)"):
        kv.assert_no_event_errors()


def test_an_error_expected_for_the_whole_test_fails_no_assertion_before_its_end(kv):
    kv.events.expect_error("block_not_found")
    kv.apply(Removed((7,)))
    kv.assert_no_event_errors()
    kv.apply(Removed((8,)))
    with pytest.raises(EventRulesBroken, match=r"1 KV event error: block_not_found \(worker 0, event 1\)"):
        kv.assert_no_event_errors()
    assert kv.judge().unmet == ["expected 1 block_not_found, saw 2 in 2 KV events"]


def test_an_allowed_error_fails_no_assertion_before_the_end(make_kv):
    kv = make_kv(allow=["block_not_found"])
    kv.apply(Removed((7,)))
    kv.assert_no_event_errors()
    kv.apply(Stored(3, (4,), (4,)))
    with pytest.raises(EventRulesBroken, match="1 KV event error: parent_block_not_found"):
        kv.assert_no_event_errors()


def test_assert_no_event_errors_flushes_first(kv):
    kv.drop_next()
    kv.worker(0).serve(range(4))
    with pytest.raises(EventRulesBroken, match="event_id_gap"):
        kv.assert_no_event_errors()


def test_warnings_have_their_own_assertion(kv):
    kv.apply([one_block(1), one_block(1)])
    kv.assert_no_event_errors()
    with pytest.raises(EventRulesBroken, match=r"1 KV event warning: duplicate_store \(worker 0, event 1\)"):
        kv.events.assert_no_event_warnings()


def test_assert_in_sync_raises_each_time_while_stream_and_engine_differ(kv):
    asked = kv.prompt(2)
    kv.drop_next()
    kv.worker(0).serve(asked)
    for _ in range(2):
        with pytest.raises(EventRulesBroken, match="engine_drift"):
            kv.assert_in_sync()
    kv.worker(0).clear()
    kv.assert_in_sync()


def test_each_problem_is_returned_once_by_judge(kv, rules_of):
    kv.apply(Removed((7,)))
    assert rules_of(kv.judge().errors) == ["block_not_found"]
    assert tuple(kv.judge()) == ([], [], [])
    kv.apply([Stored(9, (1,), (1,)), one_block(1)])
    late = kv.judge()
    assert (rules_of(late.errors), rules_of(late.warnings)) == (["parent_block_not_found"], ["duplicate_store"])
    assert tuple(kv.judge()) == ([], [], [])


def test_an_unmet_expectation_is_reported_once(kv):
    kv.events.expect_error("event_id_gap", times=2)
    assert kv.judge().unmet == ["expected 2 event_id_gap, saw none in 0 KV events"]
    assert kv.judge().unmet == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_that_publishes_nothing_is_found(backend):
    def make(*, sink, **sizes):
        return BACKENDS[backend].make(sink=None, **sizes)

    kv = RouterHarness(EngineProfile(num_blocks=512), replace(BACKENDS[backend], make=make))
    kv.flush()
    assert kv.events.errors == []
    kv.worker(0).serve(kv.prompt(3, tail=kv.worker(0).traits.looks_ahead))
    (problem,) = kv.judge().errors
    held = kv.worker(0).manager.resident()
    has_tail = backend in (
        "vllm_gemma4",
        "vllm_deepseek_v4",
    )  # with hash units that are parts of a block, the tail of a prompt has a name
    assert len(held) == 3 + has_tail
    assert ("engine_drift", {*held}) == (problem.rule, {*problem.blocks})


def test_a_use_that_fails_before_any_event_is_found():
    kv = RouterHarness(EngineProfile(num_blocks=4), "hash_cache")
    assert kv.worker(0).manager.use([1, 2, 3, 4, 5]) == 0
    (problem,) = kv.judge().errors
    assert (problem.rule, set(problem.blocks)) == ("engine_drift", {1, 2, 3, 4})


def test_a_worker_with_only_hand_made_events_is_not_compared_at_a_flush(kv):
    kv.apply(Stored(None, (1,), (1,)))
    kv.flush()
    assert kv.events.errors == []


def test_drift_is_reported_once_per_block(kv, rules_of):
    worker = kv.worker(0)
    worker.serve(kv.prompt(1))
    kv.apply(one_block(5))
    assert rules_of(kv.judge().errors) == ["engine_drift"]
    kv.apply(one_block(6))
    (problem,) = kv.judge().errors
    assert problem.blocks == (6,)


def test_a_worker_with_only_hand_made_events_is_in_sync(kv):
    kv.apply(one_block(5))
    kv.assert_in_sync()


def test_without_prefix_caching_nothing_is_published_or_compared(make_kv):
    kv = make_kv(prefix_caching=False)
    kv.worker(0).serve(kv.prompt(3))
    assert len(kv.events) == 0
    kv.assert_in_sync()


# --------------------------------------------------------------------------------------------------- with harness


def test_leaving_a_harness_raises_its_errors(make_kv):
    with pytest.raises(EventRulesBroken, match="1 KV event error: block_not_found"), make_kv() as kv:
        kv.apply(Removed((7,)))


def test_leaving_a_harness_without_errors_raises_nothing(make_kv):
    with make_kv() as kv:
        kv.worker(0).serve(kv.prompt(3))


def test_an_exception_of_the_with_block_is_kept(make_kv):
    def body():
        with make_kv() as kv:
            kv.apply(Removed((7,)))
            raise KeyError

    with pytest.raises(KeyError):
        body()


def test_allowed_rules_and_errors_that_follow_from_them_do_not_fail(make_kv):
    with make_kv(allow=["event_id_gap"]) as kv:
        kv.drop_next()
        asked = kv.prompt(1)
        kv.worker(0).serve(asked)
        kv.worker(0).serve(kv.prompt(1, after=asked))
    assert len(kv.events.errors) == 1


def test_an_unmet_expectation_fails_the_harness(make_kv):
    with pytest.raises(EventRulesBroken, match="expected 1 engine_drift, saw none"), make_kv() as kv:
        kv.events.expect_error("engine_drift")


def test_warnings_do_not_fail_the_harness(make_kv):
    with make_kv() as kv:
        kv.apply([one_block(1), one_block(1)])
    assert kv.events.counts.warnings == {"duplicate_store": 1}


def test_block_hashes_are_checked_only_in_events_of_requests(kv, rules_of):
    wrong = sequence_hashes([1, 2])
    kv.apply(Stored(None, (wrong[0], 77), (1, 2)))  # by hand: any hashes are allowed
    assert kv.judge().errors == []

    def transport(event):
        data = event.event.data
        return [
            RouterEvent(event.worker_id, KvCacheEvent(event.event.event_id, Stored(None, (5,), data.tokens_hashes)))
        ]

    kv.publisher.transport = transport
    kv.worker(0).serve(range(4))
    assert rules_of(kv.judge().errors)[:2] == ["wrong_hash", "engine_drift"]


def test_a_harness_shows_its_profile():
    profile = EngineProfile(block_size=8)
    assert profile is RouterHarness(profile).profile
    assert EngineProfile() == RouterHarness().profile


# ---------------------------------------------------------------------------------------------- capacity, open requests


def test_a_worker_that_holds_more_blocks_than_its_profile_allows_is_over_capacity(make_kv, rules_of):
    kv = make_kv(num_blocks=3)
    kv.drop_next(1, kind="removed")
    worker = kv.worker(0)
    for _ in range(2):
        worker.serve(kv.prompt(2))
    (gap,) = kv.judge().errors
    assert "over_capacity" in rules_of(gap.folded)  # explained by the lost Removed
    kv = make_kv(num_blocks=3)
    kv.apply([one_block(number) for number in range(4)])
    kv.events.assert_no_event_warnings()
    (problem,) = kv.judge().errors
    assert (
        problem.rule,
        problem.observed,
    ) == ("over_capacity", "according to the events, 4 blocks are held after event 3")


def test_a_stored_before_its_removed_is_not_over_capacity(make_kv):
    for backend in ("lineage", "lru", "multi_lru"):
        kv = make_kv(backend, num_blocks=3)
        for _ in range(20):
            kv.worker(0).serve(kv.prompt(3))
        assert len(kv.events.removed_blocks) == 57
        assert tuple(kv.judge()) == ([], [], [])


def test_requests_open_at_the_end_are_one_warning_per_worker(make_kv):
    kv = make_kv(workers=3, num_blocks=64)
    kv.worker(1).prefill(kv.prompt(2, tail=1))
    kv.worker(1).prefill(kv.prompt(3)).preempt()
    with kv.worker(0).prefill(kv.prompt(1)):
        pass
    kv.worker(2).prefill(kv.prompt(1))
    first, second = kv.judge().warnings
    assert (
        first.rule,
        first.worker_id,
        first.observed,
    ) == ("leaked_requests", 1, "2 requests are open, with 3, 0 blocks")
    assert (
        second.rule,
        second.worker_id,
        second.observed,
    ) == ("leaked_requests", 2, "1 request is open, with 1 blocks")
    assert kv.judge().warnings == []  # reported once
    kv.worker(2).prefill(kv.prompt(1))
    assert [problem.observed for problem in kv.judge().warnings] == ["1 request is open, with 1 blocks"]


def test_many_open_requests_are_summed_up_in_one_line(make_kv):
    kv = make_kv(num_blocks=64)
    for _ in range(12):
        kv.worker(0).prefill(kv.prompt(1))
    (problem,) = kv.judge().warnings
    assert problem.observed == "12 requests are open, with 1, 1, 1, 1, 1, 1, 1, 1 and 4 more blocks"


def test_a_request_lost_with_its_worker_is_not_open(kv):
    kv.worker(0).prefill(kv.prompt(1))
    kv.worker(0).restart(announced=True)
    kv.worker(0).prefill(kv.prompt(1))
    kv.remove_worker(0)
    assert kv.judge().warnings == []


def test_open_requests_may_be_expected_or_made_by_fixtures(kv):
    kv.events.expect_error("leaked_requests")
    kv.worker(0).prefill(kv.prompt(1))
    kv.inside.body_begins()
    kv.worker(0).prefill(kv.prompt(1))
    assert tuple(kv.judge()) == ([], [], [])
    assert [problem.rule for problem in kv.judge().warnings] == ["leaked_requests"]  # the request is still open
