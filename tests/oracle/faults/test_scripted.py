"""Faults by hand: what each does to the stream, which events it changes, and what is refused."""

from contextlib import suppress

import pytest
from fault_worlds import PROFILE

from pytest_kvmock import (
    Cleared,
    EngineProfile,
    EventRulesBroken,
    KvCacheEvent,
    Prompt,
    RadixIndex,
    RadixIndexError,
    Removed,
    RouterEvent,
    RouterHarness,
    Stored,
    block_hashes,
    sequence_hashes,
)
from pytest_kvmock.oracle.faults.changes import salted
from pytest_kvmock.oracle.faults.kinds import FAULTS


@pytest.fixture
def kv():
    return RouterHarness(PROFILE)


def one_block(number):
    return Stored(None, (number,), (number,))


def arrived(kv, worker_id=0):
    """Return the events of a worker as they arrived: id and data."""
    return [(e.event.event.event_id, e.event.event.data) for e in kv.events if e.event.worker_id == worker_id]


def ids(kv, worker_id=0):
    return [event_id for event_id, _ in arrived(kv, worker_id)]


def errors(kv):
    return [(p.rule, p.fault and p.fault.kind) for p in kv.judge().errors]


# ------------------------------------------------------------------------------------------------ what each does


def test_every_fault_is_a_method_of_its_name(kv):
    assert [name for name in FAULTS if not callable(getattr(kv.faults, name, None))] == []


@pytest.mark.parametrize("name", [kind.name for kind in FAULTS.values() if kind.has_rate] + ["missing_first"])
def test_a_fault_is_injected_into_one_event_by_default(kv, name):
    assert getattr(kv.faults, name)().left == 1


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("restart", lambda faults: faults.restart()),
        ("clear", lambda faults: faults.clear()),
        ("survive", lambda faults: faults.survive("lose")),
        ("at_random", lambda faults: faults.at_random({"lose": 0.5})),
    ],
)
def test_an_immediate_fault_is_not_a_context_manager_and_names_those_that_are(kv, name, call):
    kv.worker(0)
    with pytest.raises(TypeError) as raised, call(kv.faults):
        pytest.fail("the block ran")
    assert str(raised.value).startswith(f"kv_harness.faults.{name}() is not a context manager: call it without `with`")
    calls, blocks = str(raised.value).partition(" Calls: ")[2].split("; blocks, for `with`: ")
    of_stores = {"evict", "restart_store", "trim_log"}
    assert {*calls.split(", ")} == {"restart", "clear", "block_size", "survive", "at_random", *of_stores}
    assert {*FAULTS} - {*calls.split(", ")} == {*blocks.split(", ")}


@pytest.mark.parametrize("name", [kind.name for kind in FAULTS.values() if kind.is_block])
def test_a_fault_that_lasts_can_be_used_in_a_with_block(name):
    kv = RouterHarness(PROFILE, index=RadixIndex())
    kv.worker(0), kv.worker(1)
    arguments = {"lora_name": "l"} if name == "salt" else {}
    with pytest.raises(EventRulesBroken, match="unused"), getattr(kv.faults, name)(**arguments):
        pass


def test_late_join_salt_and_signed_last_until_they_are_stopped():
    faults = RouterHarness(PROFILE, index=RadixIndex()).faults
    assert [fault.left for fault in (faults.late_join(), faults.salt(lora_name="l"), faults.signed())] == [
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(("name", "late_by"), [("reorder", 1), ("delay", 2)])
def test_random_faults_delay_events_as_much_as_scripted_ones(name, late_by):
    kv = RouterHarness(PROFILE, faults={name: 1.0})
    kv.apply([one_block(n) for n in range(6)])
    assert list(range(6 - late_by)) == ids(kv)


def test_blocks_that_were_never_stored_may_be_any_u64(kv):
    kv.faults.wrong_parent(20)
    kv.faults.unknown_removed(20)
    kv.apply([event for n in range(20) for event in (one_block(n), Removed((n,)))])
    for number, made in (
        (20, [event.data.parent_hash for event in kv.events.stored]),
        (40, [block for event in kv.events.removed for block in event.data.block_hashes[::2]]),  # first and last
    ):
        assert number == len(set(made))
        assert 2**63 <= max(made) < 2**64


def test_lost_events_do_not_arrive(kv):
    kv.faults.lose(2)
    kv.apply([one_block(n) for n in range(4)])
    assert ids(kv) == [2, 3]
    assert errors(kv) == [("event_id_gap", "lose")]


def test_a_doubled_event_arrives_twice(kv):
    kv.faults.double()
    kv.apply([one_block(1), one_block(2)])
    assert ids(kv) == [0, 0, 1]
    assert errors(kv) == [("event_id_gap", "double")]


def test_a_reordered_event_arrives_after_the_next_of_its_worker(kv):
    kv.faults.reorder()
    kv.apply(one_block(1))
    kv.apply(one_block(7), worker_id=1)
    assert ids(kv) == []
    kv.apply([one_block(2), one_block(3)])
    assert ids(kv) == [1, 0, 2]
    assert errors(kv) == [("event_id_gap", "reorder")]


def test_a_delayed_event_arrives_after_n_more(kv):
    kv.faults.delay(by=3)
    kv.apply([one_block(n) for n in range(6)])
    assert ids(kv) == [1, 2, 3, 0, 4, 5]


def test_a_delayed_event_is_late_by_two(kv):
    kv.faults.delay()
    kv.apply([one_block(n) for n in range(4)])
    assert ids(kv) == [1, 2, 0, 3]


def test_an_event_that_is_held_back_at_the_end_is_missing(kv):
    kv.faults.delay()
    kv.apply([one_block(1)])
    assert errors(kv) == [("event_id_gap", "delay")]


def test_events_held_back_arrive_in_the_order_in_which_they_are_due(kv):
    kv.faults.delay(1, by=3)
    kv.faults.delay(1, by=1)
    kv.apply([one_block(n) for n in range(5)])
    assert ids(kv) == [2, 1, 3, 0, 4]


def test_a_wrong_parent_was_never_stored_or_is_the_named_one(kv):
    kv.faults.wrong_parent()
    kv.apply(one_block(1))
    kv.faults.wrong_parent(parent=1)
    kv.apply([Removed((1,)), one_block(2)])
    (_, first), _, (_, second) = arrived(kv)
    assert first.parent_hash not in (None, 1)
    assert second.parent_hash == 1
    assert errors(kv) == [("parent_block_not_found", "wrong_parent")] * 2


def test_a_foreign_event_arrives_as_an_event_of_the_next_worker(kv):
    kv.faults.foreign(worker=1)
    kv.apply(one_block(1), worker_id=1)
    assert ([(0, one_block(1))], []) == (arrived(kv, 0), arrived(kv, 1))
    assert errors(kv) == [("event_id_gap", "foreign")]
    assert kv.events.problems[0].fault.keys == {(0, 0), (1, 0)}


def test_a_foreign_event_may_arrive_at_another_rank():
    kv = RouterHarness(PROFILE.replace(workers=1, dp_size=2))
    kv.worker(0, dp_rank=0).serve(range(4))
    kv.worker(0, dp_rank=1).serve(range(4))
    kv.faults.foreign(kind="cleared", worker=(0, 0), to=(0, 1))
    kv.worker(0, dp_rank=0).clear()
    assert kv.overlap(range(4)) == {(0, 0): 1}
    assert {fault for _, fault in errors(kv)} == {"foreign"}


def test_a_removed_names_a_block_that_was_never_stored(kv):
    kv.faults.unknown_removed()
    kv.apply([one_block(1), Removed((1,))])
    (removed,) = kv.events.removed
    first, own, last = removed.data.block_hashes
    assert len({first, own, last}) == 3
    assert own == 1
    assert errors(kv) == [("block_not_found", "unknown_removed")]


def test_an_index_that_stops_at_an_unknown_block_does_not_survive_one():
    class StopsAtTheFirst(RadixIndex):
        def apply(self, event):
            data = event.event.data
            with suppress(RadixIndexError):
                for block in data.block_hashes if isinstance(data, Removed) else ():
                    super().apply(RouterEvent(event.worker_id, KvCacheEvent(event.event.event_id, Removed((block,)))))
            if not isinstance(data, Removed):
                super().apply(event)

    kv = RouterHarness(PROFILE, index=StopsAtTheFirst())
    kv.faults.survive("unknown_removed")
    kv.faults.unknown_removed()
    kv.apply([one_block(1), Removed((1,))])
    assert ("index_drift", "unknown_removed") in errors(kv)


def test_a_stored_becomes_its_own_parent(kv):
    kv.faults.self_parent()
    kv.apply([one_block(1)])
    assert [Stored(1, (1,), (1,))] == [event.data for event in kv.events.stored]
    assert errors(kv) == [("invalid_block", "self_parent")]


def test_a_sink_raises_before_the_router(kv):
    before, after = [], []
    for published, first in ((before, True), (after, False)):
        sink = type(
            "Sink", (), {"publish": lambda self, event, *_, published=published: published.append(event.event_id)}
        )()
        kv.add_sink(sink, before=first)
    kv.faults.sink_failure()
    kv.apply([one_block(1), one_block(2)])
    assert (ids(kv), before, after) == ([1], [0, 1], [1])
    assert errors(kv) == [("sink_failure", "sink_failure")]


def test_a_lost_event_is_lost_only_to_the_router(kv):
    published = []
    kv.add_sink(type("Sink", (), {"publish": lambda self, event, *_: published.append(event.event_id)})())
    kv.faults.lose()
    kv.apply([one_block(1), one_block(2)])
    assert (ids(kv), published) == ([1], [0, 1])


def test_the_first_event_of_a_new_worker_is_lost(kv):
    kv.apply(one_block(1))
    kv.faults.missing_first()
    kv.apply(one_block(2))
    kv.apply([one_block(1), one_block(2)], worker_id=1)
    assert (ids(kv, 0), ids(kv, 1)) == ([0, 1], [1])
    assert errors(kv) == [("event_id_gap", "missing_first")]


def test_a_router_that_joins_late_receives_only_later_events(kv):
    with kv.faults.late_join():
        kv.apply([one_block(1), one_block(2)])
    kv.apply(one_block(3))
    assert ids(kv) == [2]
    assert errors(kv) == [("event_id_gap", "late_join")]


def test_a_late_join_can_be_limited_to_one_worker(kv):
    joining = kv.faults.late_join(worker=1)
    kv.apply(one_block(1))
    kv.apply(one_block(1), worker_id=1)
    joining.stop()
    assert (ids(kv, 0), ids(kv, 1)) == ([0], [])


def test_a_worker_restarts_unannounced(kv):
    kv.worker(0).serve(kv.prompt(2))
    kv.worker(0).serve(kv.prompt(2))
    kv.faults.restart()
    assert kv.worker(0).manager.num_inactive_blocks == 0
    kv.worker(0).serve(kv.prompt(2))
    assert ids(kv) == [0, 1, 0]
    assert errors(kv) == [("event_id_gap", "restart")]
    assert str(kv.events.problems[0].fault) == "restart of worker 0"


def test_a_restart_that_only_shows_as_drift_is_attributed_to_the_injection(kv):
    kv.worker(0).serve(kv.prompt(2))
    kv.faults.restart()
    assert errors(kv) == [("engine_drift", "restart")]


def test_a_restart_by_the_test_is_not_attributed_to_a_fault(kv):
    kv.faults.lose(worker=1)
    kv.worker(1).serve(kv.prompt(1))
    kv.worker(0).serve(kv.prompt(2))
    kv.worker(0).restart()
    kv.worker(0).serve(kv.prompt(2))
    assert errors(kv) == [("event_id_gap", None), ("event_id_gap", "lose")]


def test_a_cleared_that_was_never_published_arrives(kv):
    asked = kv.prompt(2)
    kv.worker(0).serve(asked)
    kv.worker(1).serve(asked)
    kv.faults.clear(1)
    assert kv.overlap(asked) == {0: 2}
    assert [(0, one_block(1)), (1, Cleared())][1] == arrived(kv, 1)[1]
    assert set(errors(kv)) == {("engine_drift", "clear")}


def test_a_salted_worker_matches_no_prompt(kv):
    asked = kv.prompt(3)
    with kv.faults.salt(lora_name="adapter", worker=0) as salt:
        kv.worker(0).serve(asked)
        kv.worker(1).serve(asked)
    assert salt.injected == 1
    assert kv.overlap(asked) == {1: 3}
    assert kv.overlap(Prompt(hashes=block_hashes(asked.tokens, 4, lora_name="adapter"))) == {0: 3}
    assert errors(kv) == [("wrong_hash", "salt"), ("engine_drift", "salt"), ("engine_drift", "salt")]


def test_salted_blocks_are_removed_under_their_salted_names():
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=4))
    kv.faults.salt(cache_namespace="tenant")
    for _ in range(3):
        kv.worker(0).serve(kv.prompt(3))
    assert set(kv.events.removed_blocks) <= set(kv.events.stored_blocks)
    assert "block_not_found" not in {p.rule for p in kv.events.problems}


def test_signed_hashes_are_salted_too_and_stay_signed():
    change = salted(2, "adapter", None)
    tokens = [(1, 2), (3, 4)]
    first, second = (
        RouterEvent(0, KvCacheEvent(number, Stored(parent, (name,), (7,))), token_ids=[ids])
        for number, (parent, name, ids) in enumerate([(None, -5, tokens[0]), (-5, -6, tokens[1])])
    )
    ((one,), (two,)) = (change(event) for event in (first, second))
    local = block_hashes([1, 2, 3, 4], 2, lora_name="adapter")
    names = [name - 2**64 if name >= 2**63 else name for name in sequence_hashes(local)]
    assert min(names) < 0
    assert [Stored(None, (names[0],), (local[0],)), Stored(names[0], (names[1],), (local[1],))] == [
        one.event.data,
        two.event.data,
    ]


def test_blocks_without_tokens_cannot_be_salted(kv):
    kv.faults.salt(lora_name="adapter")
    kv.apply(one_block(1))
    assert kv.judge().unmet == ["kv_harness.faults.salt(lora_name='adapter'): unused, no event matched"]


@pytest.mark.parametrize("token_ids", [((-1, 0, 0, 0),), (("a", "b", "c", "d"),), ((1, 2, 3, 4), (5, 6, 7, 8))])
def test_blocks_with_foreign_tokens_are_not_salted(token_ids):
    change = salted(4, "adapter", None)
    assert change(RouterEvent(0, KvCacheEvent(0, one_block(1)), token_ids=token_ids)) is None


@pytest.mark.parametrize("token_ids", [((1, 2, 3, 4), (5, 6)), ((5, 6), (1, 2, 3, 4)), ((5, 6), (7, 8))])
def test_blocks_are_not_salted_if_some_lack_tokens(token_ids):
    change = salted(4, "adapter", None)
    event = KvCacheEvent(0, Stored(None, (1, 2), (1, 2)))
    assert change(RouterEvent(0, event, token_ids=token_ids)) is None


def test_a_worker_has_blocks_of_another_size(kv):
    worker = kv.faults.block_size(8)
    asked = kv.prompt(4)
    worker.serve(asked)
    assert (worker.worker_id, worker.dp_rank, worker.manager.block_size) == (2, 0, 8)
    assert len(kv.events.stored_blocks) == 2
    assert kv.overlap(asked) == {}
    assert {"block_size"} >= {fault for _, fault in errors(kv)}


class Seen(RadixIndex):
    def __init__(self):
        super().__init__()
        self.events = []

    def apply(self, event):
        self.events.append(event.event.data)
        super().apply(event)


def test_only_the_index_under_test_receives_signed_hashes():
    index, block = Seen(), 2**64 - 5
    kv = RouterHarness(PROFILE, index=index)
    with kv.faults.signed(1):
        kv.apply(Stored(None, (block,), (7,)))
    kv.apply(Removed((block,)))
    assert [Stored(None, (-5,), (7,)), Removed((block,))] == index.events
    assert [Stored(None, (block,), (7,))] == [event.data for event in kv.events.stored]
    assert errors(kv) == [("index_failure", "signed")]


@pytest.mark.parametrize("worker", [None, 1, (1, 0)])
def test_signed_is_refused_if_all_hashes_are_already_signed(worker):
    """The fault could never be injected, and a test would see that only at its end, without the reason."""
    kv = RouterHarness(PROFILE, backend="sglang", index=Seen())
    text = r"^kv_harness\.faults\.signed: backend 'sglang' publishes signed hashes already, so that the fault would change nothing$"  # noqa: E501
    with pytest.raises(ValueError, match=text):
        kv.faults.signed(worker=worker)
    assert kv.faults.unmet() == []
    assert tuple(kv.judge()) == ([], [], [])


def test_a_sink_may_have_unsigned_hashes_next_to_signed_engines():
    index, block = Seen(), 2**64 - 5
    kv = RouterHarness(PROFILE, backend="sglang", index=index)
    sink = kv.make_sink()
    with kv.faults.signed(1):
        sink(Stored(None, (block,), (7,)))
    assert Stored(None, (-5,), (7,)) == index.events[-1]
    with kv.faults.signed(worker=sink.worker_id):
        sink(Removed((block,)))
    assert Removed((-5,)) == index.events[-1]


def test_an_index_that_treats_hashes_as_opaque_is_right_with_signed_hashes():
    kv = RouterHarness(PROFILE, index=Seen())
    with kv.faults.signed() as fault:
        for _ in range(10):
            kv.worker(0).serve(kv.prompt(4))
    assert fault.injected
    assert tuple(kv.judge()) == ([], [], [])


# ------------------------------------------------------------------------------------------- which events it wants


def test_a_fault_can_be_limited_to_a_kind_and_a_worker(kv):
    kv.faults.lose(2, kind="removed", worker=1)
    for worker_id in (0, 1):
        kv.apply([one_block(1), Removed((1,)), one_block(2), Removed((2,)), Cleared()], worker_id=worker_id)
    assert (ids(kv, 0), ids(kv, 1)) == ([0, 1, 2, 3, 4], [0, 2, 4])


def test_a_fault_can_be_limited_to_a_rank():
    kv = RouterHarness(PROFILE.replace(dp_size=2))
    kv.faults.lose(None, worker=(0, 1))
    kv.apply(one_block(1))
    kv.apply(one_block(1), dp_rank=1)
    assert [e.event.event.dp_rank for e in kv.events] == [0]


def test_a_sink_of_the_test_can_have_faults(kv):
    sink = kv.make_sink()
    kv.faults.lose(worker=sink.worker_id)
    sink(one_block(1))
    assert len(kv.events) == 0


def test_the_fault_requested_first_is_injected_first(kv):
    kv.faults.lose()
    kv.faults.double()
    kv.apply([one_block(1), one_block(2)])
    assert ids(kv) == [1, 1]


def test_a_fault_without_a_limit_applies_until_it_is_stopped(kv):
    losing = kv.faults.lose(None)
    kv.apply([one_block(1), one_block(2)])
    losing.stop()
    kv.apply(one_block(3))
    assert (ids(kv), losing.injected, losing.left) == ([2], 2, None)


def test_a_fault_that_does_not_apply_to_an_event_waits_for_the_next(kv):
    kv.faults.self_parent()
    kv.apply([Removed((1,)), one_block(2)])
    assert kv.events.stored[0].data.parent_hash == 2


def test_a_transport_is_applied_after_faults(kv):
    kv.publisher.transport = lambda event: [event, event]
    kv.faults.lose()
    kv.apply([one_block(1), one_block(2)])
    assert ids(kv) == [1, 1]


# --------------------------------------------------------------------------------------------------- unused faults


def test_an_unused_fault_is_reported_once(kv):
    kv.faults.lose(3)
    kv.apply([one_block(1), one_block(2)])
    assert kv.judge().unmet == ["kv_harness.faults.lose(3): 2 of 3 injected"]
    assert kv.judge().unmet == []
    kv.apply(one_block(3))
    assert ids(kv) == [2]


def test_a_with_block_reports_an_unused_fault_on_exit(kv):
    with (
        pytest.raises(
            EventRulesBroken, match=r"^kv_harness\.faults\.lose\(2, kind='stored', worker=0\): unused, no event "
        ),
        kv.faults.lose(2, kind="stored", worker=0),
    ):
        pass
    assert kv.judge().unmet == []


def test_a_with_block_that_raises_keeps_its_own_failure(kv):
    with pytest.raises(ZeroDivisionError), kv.faults.lose():
        raise ZeroDivisionError


def test_a_fault_without_a_count_must_be_injected_at_least_once(kv):
    kv.faults.late_join()
    assert kv.judge().unmet == ["kv_harness.faults.late_join(): unused, no event matched"]


def test_a_fault_that_is_stopped_need_not_be_used(kv):
    kv.faults.lose(3).stop()
    assert kv.judge().unmet == []


def test_a_harness_as_a_context_manager_fails_for_an_unused_fault():
    with pytest.raises(EventRulesBroken, match="unused, no event matched"), RouterHarness(PROFILE) as kv:
        kv.faults.double()


# ---------------------------------------------------------------------------------------------------- the records


def test_injections_are_recorded():
    kv = RouterHarness(PROFILE)
    kv.apply(one_block(5), worker_id=1)
    kv.faults.lose()
    kv.apply(one_block(1), worker_id=1)
    kv.apply([one_block(2), Removed((1,))], worker_id=1)
    gap, unknown = kv.events.problems
    assert (
        gap.fault.kind,
        gap.fault.worker_id,
        gap.fault.dp_rank,
        gap.fault.event_id,
        gap.fault.blocks,
        gap.fault.survived,
    ) == ("lose", 1, 0, 1, {1}, False)
    assert ("block_not_found", gap.fault) == (unknown.rule, unknown.fault)
    assert repr(gap.fault) == "<injected: lose, event 1 of worker 1>"


def test_a_gap_is_attributed_to_the_missing_event(kv):
    kv.faults.sink_failure()
    kv.faults.lose()
    kv.apply([one_block(n) for n in range(3)])
    assert [(p.rule, p.fault.kind) for p in kv.events.problems] == [
        ("sink_failure", "sink_failure"),
        ("event_id_gap", "lose"),
    ]


def test_events_missing_before_a_restart_do_not_count(kv):
    worker = kv.worker(0)
    worker.serve(kv.prompt(1))
    kv.faults.lose(worker=0)
    worker.serve(kv.prompt(1))
    kv.faults.restart(0)
    worker.serve(kv.prompt(1))
    worker.serve(kv.prompt(1))
    kv.faults.foreign(worker=0)
    worker.serve(kv.prompt(1))
    worker.serve(kv.prompt(1))
    gaps = [p for p in kv.events.problems if (p.rule, p.worker_id) == ("event_id_gap", 0)]
    assert [gap.fault.kind for gap in gaps] == ["restart", "foreign"]


def test_a_problem_that_a_flush_finds_without_the_fault_too_is_real(kv):
    sink = kv.make_sink(num_blocks=1)
    sink.compare(lambda: [1, 3])
    sink(one_block(1))
    kv.faults.lose(worker=sink.worker_id)
    sink(one_block(2))
    sink(one_block(3))
    kv.judge()
    assert [(p.rule, p.fault and p.fault.kind) for p in kv.events.errors] == [
        ("event_id_gap", "lose"),
        ("over_capacity", None),
    ]


def test_a_problem_that_both_books_find_only_at_the_flush_is_real(kv):
    sink = kv.make_sink(num_blocks=1)
    kv.faults.double(worker=sink.worker_id)
    sink(one_block(1))
    sink(one_block(2))
    assert errors(kv) == [("event_id_gap", "double"), ("over_capacity", None)]


def test_problems_before_the_first_fault_stay_real(kv):
    kv.apply([one_block(1), Stored(9, (2,), (2,))])
    kv.faults.lose()
    kv.apply([one_block(3), one_block(4)])
    assert errors(kv) == [("parent_block_not_found", None), ("event_id_gap", "lose")]


def test_an_uninjected_sink_error_is_real_after_an_injected_fault():
    kv = RouterHarness(PROFILE, survive=["lose"])

    class Raising:
        def publish(self, event, *_):
            if event.event_id == 2:
                raise OSError("disk full")

    kv.add_sink(Raising(), before=True)
    kv.faults.lose()
    kv.apply([one_block(n) for n in range(4)])
    kv.apply([Removed((2,)), Removed((0,))])
    (error,) = kv.judge().errors
    assert (error.rule, error.fault) == ("sink_failure", None)
    assert [(p.rule, p.blocks, p.fault) for p in error.folded] == [("block_not_found", (2,), None)]


def test_a_consequence_of_a_real_error_stays_listed_under_it(kv):
    kv.apply(KvCacheEvent(3, one_block(1)))  # a real gap
    kv.faults.lose(worker=1)
    kv.apply(one_block(1), worker_id=1)
    kv.apply(RouterEvent(0, KvCacheEvent(4, Removed((9,)))))
    gap = kv.events.errors[0]
    assert [(p.rule, p.fault) for p in gap.folded] == [("block_not_found", None)]


# ------------------------------------------------------------------------------------------------------- refused

COUNT = "n must be an integer of at least 1, got"
NOBODY = r"worker: there is no worker 7; there are: 0, 1$"

REFUSED = {
    "n is 0": (lambda faults: faults.lose(0), rf"lose: {COUNT} 0"),
    "n is below 0": (lambda faults: faults.double(-1), rf"double: {COUNT} -1"),
    "n is True": (lambda faults: faults.reorder(True), rf"reorder: {COUNT} True"),
    "n is a text": (lambda faults: faults.self_parent("1"), rf"self_parent: {COUNT} '1'"),
    "by is 0": (lambda faults: faults.delay(by=0), r"delay: by must be an integer of at least 1, got 0"),
    "kind": (
        lambda faults: faults.lose(kind="store"),
        r"lose: unknown kind 'store'; did you mean 'stored'\? known: stored, removed, cleared",
    ),
    "no such worker": (lambda faults: faults.lose(worker=7), rf"lose: {NOBODY}"),
    "no such rank": (
        lambda faults: faults.late_join(worker=(0, 1)),
        r"late_join: worker: there is no worker \(0, 1\); there are: \(0, 0\), \(1, 0\)$",
    ),
    "restart of nobody": (lambda faults: faults.restart(7), rf"restart: {NOBODY}"),
    "clear of nobody": (lambda faults: faults.clear(7), rf"clear: {NOBODY}"),
    "to nobody": (lambda faults: faults.foreign(to=7), r"foreign: to: there is no worker 7; there are: 0, 1$"),
    "parent": (
        lambda faults: faults.wrong_parent(parent=-1),
        r"wrong_parent: parent must be a hash from 0 to 2\*\*64 - 1, got -1",
    ),
    "parent is True": (
        lambda faults: faults.wrong_parent(parent=True),
        r"wrong_parent: parent must be a hash from 0 to 2\*\*64 - 1, got True",
    ),
    "worker is a float": (lambda faults: faults.lose(worker=0.0), r"lose: worker: there is no worker 0\.0; "),
    "worker of True": (
        lambda faults: faults.lose(worker=(True, 0)),
        r"lose: worker: there is no worker \(True, 0\); there are: \(0, 0\), \(1, 0\)$",
    ),
    "salt is a number": (
        lambda faults: faults.salt(lora_name=3),
        r"salt: lora_name must be a text in UTF-8, or None, got 3$",
    ),
    "salt is bytes": (
        lambda faults: faults.salt(cache_namespace=b"x"),
        r"salt: cache_namespace must be a text in UTF-8, or None, got b'x'$",
    ),
    "salt has no bytes": (
        lambda faults: faults.salt(lora_name="\ud800"),
        r"salt: lora_name must be a text in UTF-8, or None, got '\\ud800'$",
    ),
    "salt": (lambda faults: faults.salt(lora_name=""), r"salt: give a lora_name or a cache_namespace"),
    "signed": (lambda faults: faults.signed(), r"signed: there is no index under test"),
    "no size": (
        lambda faults: faults.block_size(0),
        r"block_size: block_size must be an integer of at least 1, got 0$",
    ),
    "size that the backend refuses": (
        lambda faults: faults.block_size(3),
        r"block_size: block_size must be a power of",
    ),
    "size": (lambda faults: faults.block_size(4), r"block_size: 4 must differ from the block size of the router"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_faults_are_refused_with_the_valid_ones(kv, name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^kv_harness\.faults\.{message}"):
        call(kv.faults)
    kv.apply(one_block(1))
    assert (ids(kv), tuple(kv.judge())) == ([0], ([], [], []))


def test_a_worker_that_exists_keeps_its_block_size(kv):
    with pytest.raises(ValueError, match="worker 1 exists already; its profile is the router's"):
        kv.faults.block_size(8, worker=1)
    with pytest.raises(ValueError, match="block_size"):
        kv.faults.block_size(3)
    assert list(kv.workers) == [0, 1]


def test_a_foreign_event_needs_another_worker():
    kv = RouterHarness(PROFILE.replace(workers=1))
    with pytest.raises(ValueError, match=r"^kv_harness\.faults\.foreign: there is no other worker"):
        kv.faults.foreign()


def test_a_sink_has_no_engine_to_restart(kv):
    sink = kv.make_sink()
    with pytest.raises(ValueError, match=r"worker 65536 is a sink of the test's own; it has no engine"):
        kv.faults.restart(sink.worker_id)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"loose": 0.1}, r"unknown fault 'loose'; did you mean 'lose'\? known: lose, "),
        (
            {"late_join": 0.1},
            r"`late_join` cannot strike at random; call `faults\.late_join\(\)`; allowed at random: lose, ",
        ),
        ({"lose": 2}, "lose: got 2; allowed: a rate from 0 to 1"),
        ({"lose": float("nan")}, "lose: got nan; allowed: a rate from 0 to 1"),
        (["lose"], "got \\['lose'\\]; allowed: a mapping of faults to rates"),
    ],
)
def test_invalid_rates_are_refused(rates, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        RouterHarness(PROFILE, faults=rates)
