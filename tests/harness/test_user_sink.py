"""Sinks to which a user's own block manager publishes."""

import random
import re
from contextlib import suppress

import pytest
from hybrid_sizes import EACH, sized

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    Cleared,
    EngineProfile,
    EventRulesBroken,
    KvCacheEvent,
    OutOfBlocks,
    Prompt,
    RadixIndex,
    Removed,
    RouterEvent,
    RouterHarness,
    StorageTier,
    Stored,
    create_manager,
    sequence_hashes,
)
from pytest_kvmock.harness.reduce import reproduce

FIRST = 2**16


def one_block(number):
    return Stored(None, (number,), (number,))


@pytest.fixture
def kv(make_kv):
    return make_kv(None)


@pytest.fixture
def sink(kv):
    return kv.make_sink()


def test_each_sink_is_its_own_worker(kv):
    sinks = [kv.make_sink() for _ in range(3)]
    assert [sink.worker_id for sink in sinks] == [FIRST, FIRST + 1, FIRST + 2]
    for count, sink in enumerate(sinks, 1):
        sink(Stored(None, tuple(range(1, count + 1)), tuple(range(1, count + 1))))
    assert kv.overlap(Prompt(hashes=[1, 2, 3])) == {FIRST: 1, FIRST + 1: 2, FIRST + 2: 3}
    kv.assert_no_event_errors()


def test_a_sink_with_several_ranks_takes_only_one_worker_id(kv):
    first = kv.make_sink()
    for rank in (0, 1, 2):
        first(KvCacheEvent(0, one_block(1), rank))
    assert kv.make_sink().worker_id == FIRST + 1


def test_a_sink_can_be_called_or_published_to_and_captures_its_events(kv, sink):
    sink(one_block(1))
    sink.publish(Stored(1, (2,), (2,)))
    sink(Removed((2,)))
    sink(Cleared())
    assert [event.event_id for event in sink.events] == [0, 1, 2, 3]
    assert [entry.event.event for entry in kv.events] == sink.events
    assert repr(sink) == f"<KvSink worker {FIRST}, 4 events>"
    kv.assert_no_event_errors()


def test_events_keep_their_ids_which_may_begin_with_any_number(kv, sink):
    sink(KvCacheEvent(41, one_block(1)))
    sink(one_block(2))
    assert [event.event_id for event in sink.events] == [41, 42]
    kv.assert_no_event_errors()
    sink(KvCacheEvent(44, one_block(3)))
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.event_id) == ("event_id_gap", 44)


def test_a_router_event_gets_the_sinks_worker_id_and_keeps_the_rest(kv, sink):
    sink(RouterEvent(3, KvCacheEvent(7, one_block(1), 2), StorageTier.HOST_PINNED, [(1, 2, 3, 4)]))
    (entry,) = kv.events
    assert (entry.event.worker_id, entry.event.event.dp_rank, entry.event.event.event_id) == (FIRST, 2, 7)
    assert (entry.storage_tier, entry.token_ids) == (StorageTier.HOST_PINNED, [(1, 2, 3, 4)])


def test_an_event_may_be_published_with_a_tier_and_token_ids(kv, sink):
    sink(one_block(1), StorageTier.DISK, [(1, 2, 3, 4)])
    sink.publish(one_block(1), token_ids=[(5, 6, 7, 8)])
    assert [entry.storage_tier for entry in kv.events] == [StorageTier.DISK, StorageTier.DEVICE]
    assert [entry.token_ids for entry in kv.events] == [[(1, 2, 3, 4)], [(5, 6, 7, 8)]]
    assert kv.events.counts.warnings == {}  # another tier, so no duplicate


def test_a_manager_can_publish_to_a_sink(kv, sink):
    manager = create_manager("lru", num_blocks=2, block_size=4, sink=sink)
    sink.compare(manager.resident)
    for number in range(5):
        manager.use([number])
        manager.deref(number)
    kv.assert_in_sync()
    assert len(sink.events) == 8  # five stored, three removed


@pytest.mark.parametrize("wrong", [None, 1, "stored", [one_block(1)], KvCacheEvent(0, 7), RouterEvent(0, None)])
def test_an_object_that_is_no_event_is_refused_and_not_captured(kv, sink, wrong):
    with pytest.raises(
        TypeError,
        match=r"a kv_sink takes Stored, Removed, Located, Updated, Cleared, KvCacheEvent or RouterEvent, with tuples "
        r"of .*, got",
    ):
        sink(wrong)
    assert (sink.events, kv.events.total) == ([], 0)
    sink(one_block(1))
    assert [event.event_id for event in sink.events] == [0]


def test_hashes_are_checked_only_with_a_chain(kv):
    free, chained = kv.make_sink(), kv.make_sink(chained=True)
    for sink in (free, chained):
        sink(Stored(None, (1, 2), (1, 2)))
    (problem,) = kv.judge().errors
    assert ("wrong_hash", chained.worker_id) == (problem.rule, problem.worker_id)
    chained(Stored(None, tuple(sequence_hashes([5, 6])), (5, 6)))
    assert kv.judge().errors == []


# ------------------------------------------------------------------------------------------------------- compare


def test_without_compare_resident_blocks_are_not_checked(kv, sink):
    sink(one_block(1))
    kv.assert_in_sync()


def test_a_missing_removed_is_drift(kv, sink):
    resident = {1, 2}
    sink.compare(lambda: resident)
    sink(one_block(1))
    sink(one_block(2))
    kv.assert_in_sync()
    resident.discard(1)
    with pytest.raises(EventRulesBroken, match="engine_drift"):
        kv.assert_in_sync()
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.worker_id, problem.blocks) == ("engine_drift", FIRST, (1,))
    assert problem.observed == "the engine does not hold block 1; block 1 was stored by event 0 and never removed"
    assert problem.expected == "what the engine drops is published as Removed"


def test_a_block_that_drifted_is_reported_again_after_it_was_stored_again(kv, sink):
    resident = {1}
    sink.compare(lambda: resident)
    kv.flush()
    sink(one_block(1))
    resident.clear()
    kv.flush()
    assert rules(kv) == [("engine_drift", -1, (1,)), ("engine_drift", 0, (1,))]


def test_a_missing_stored_is_drift(kv, sink):
    sink.compare(lambda: [1])
    (problem,) = kv.judge().errors
    assert problem.observed == "the engine holds block 1; block 1 was never stored"


@pytest.mark.parametrize("resident", [list, set, tuple, iter, dict.fromkeys])
def test_compare_accepts_any_iterable_of_hashes(kv, sink, resident):
    sink.compare(lambda: resident([1]))
    sink(one_block(1))
    kv.assert_in_sync()


def test_ranks_and_tiers_are_compared_separately(kv, sink):
    sink.compare(lambda: [1])
    sink.compare(lambda: [2], dp_rank=1)
    sink.compare(lambda: [3], storage_tier=StorageTier.DISK)
    sink(one_block(1))
    sink(KvCacheEvent(0, one_block(2), 1))
    assert [problem.blocks for problem in kv.judge().errors] == [(3,)]
    sink(one_block(3), StorageTier.DISK)
    kv.assert_in_sync()


def test_a_sink_counts_as_compared_when_each_published_rank_and_tier_is(kv, sink):
    sink(one_block(1))
    assert kv.publisher.num_uncompared_sinks == 1
    sink.compare(lambda: [1])
    assert kv.publisher.num_uncompared_sinks == 0
    sink(KvCacheEvent(0, one_block(2), 1))
    assert kv.publisher.num_uncompared_sinks == 1
    sink.compare(lambda: [2], dp_rank=1)
    sink(one_block(3), StorageTier.DISK)
    assert kv.publisher.num_uncompared_sinks == 1
    sink.compare(lambda: [3], storage_tier="g3")
    assert kv.publisher.num_uncompared_sinks == 0


def test_a_cleared_requires_no_comparison_of_a_tier_if_another_is_compared(kv, sink):
    sink(Cleared())
    assert kv.publisher.num_uncompared_sinks == 1
    sink.compare(lambda: [3], storage_tier=StorageTier.DISK)
    assert kv.publisher.num_uncompared_sinks == 0


def test_compare_refuses_an_object_that_is_not_callable(sink):
    with pytest.raises(TypeError, match=r"compare takes a callable that returns the resident block hashes, got \[1\]"):
        sink.compare([1])


def test_a_removed_sink_is_not_compared(kv, sink):
    sink.compare(lambda: [1])
    sink(one_block(1))
    kv.remove_worker(sink.worker_id)
    kv.assert_in_sync()
    assert kv.overlap(Prompt(hashes=[1])) == {}


@pytest.mark.parametrize(
    "data",
    [
        Removed(("a",)),
        Removed((2**64,)),
        Removed((-(2**63) - 1,)),
        Stored("x", (1,), (1,)),
        Stored(None, (1.5,), (1,)),
        Stored(None, (1,), (-1,)),
    ],
)
def test_an_invalid_hash_is_refused_before_it_is_logged(data):
    kv = RouterHarness(backend=None)
    sink = kv.make_sink()
    with pytest.raises(
        TypeError,
        match=r"with tuples of hashes, of blocks from -2\*\*63 to 2\*\*64 - 1 and local ones from 0, and a mapping as extra, got",  # noqa: E501
    ):
        sink(data)
    with pytest.raises(
        TypeError,
        match=r"with tuples of hashes, of blocks from -2\*\*63 to 2\*\*64 - 1 and local ones from 0, and a mapping as extra, got",  # noqa: E501
    ):
        kv.apply(data)
    assert (kv.events.total, sink.events) == (0, [])


@pytest.mark.parametrize(
    "resident", [lambda: 1 / 0, lambda: 3, lambda: ["a"]], ids=["it raises", "no iterable", "no hash"]
)
def test_a_resident_callable_that_fails_is_a_problem_and_hides_no_other(resident):
    kv = RouterHarness(backend=None)
    sink = kv.make_sink()
    sink.compare(resident)
    sink(Removed((9,)))
    assert [p.rule for p in kv.judge().errors] == ["block_not_found", "engine_drift"]
    assert "the resident blocks could not be read: " in kv.events.errors[1].observed
    assert kv.judge().errors == []


# ----------------------------------------------------------------------------------------------- what a manager is


def test_capacity_is_checked_only_with_num_blocks(kv):
    for num_blocks in (2, None):
        sink = kv.make_sink(num_blocks=num_blocks)
        for number in range(3):
            sink(one_block(number))
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.worker_id) == ("over_capacity", FIRST)


def test_copies_are_counted_with_counted_residency(kv):
    resident = [1, 1]
    sink = kv.make_sink(residency="counted", num_blocks=2)
    sink.compare(lambda: resident)
    sink(one_block(1))
    sink(one_block(1))
    sink(KvCacheEvent(0, one_block(1), 3))
    sink(KvCacheEvent(1, one_block(1), 3))  # another rank is like the first
    kv.assert_in_sync()
    assert kv.events.counts.warnings == {}
    resident.pop()
    with pytest.raises(
        EventRulesBroken,
        match="the engine holds fewer copies of block 1; block 1 was stored by event 1 and never removed; 2 copies "
        "are held",
    ):
        kv.assert_in_sync()
    sink(Removed((1,)))
    kv.assert_in_sync()


def test_an_orphan_is_a_warning_only_for_a_prefix_closed_sink(kv):
    for closed in (True, False):
        sink = kv.make_sink(prefix_closed=closed)
        sink(Stored(None, (1, 2), (1, 2)))
        sink(Removed((1,)))
    (warning,) = kv.judge().warnings
    assert (warning.rule, warning.worker_id) == ("orphaned_child", FIRST)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "make_kv_sink: num_blocks must be an integer of at least 1, or None, got 0"),
        ({"num_blocks": True}, "got True"),
        ({"num_blocks": 2.0}, "got 2.0"),
        ({"residency": "multi"}, "make_kv_sink: unknown residency 'multi'; known: unique, counted"),
    ],
    ids=["zero", "a bool", "a float", "a word"],
)
def test_impossible_options_of_a_sink_are_refused(kv, options, message):
    with pytest.raises(ValueError, match=message):
        kv.make_sink(**options)
    assert kv.make_sink().worker_id == FIRST  # no id is used up


def test_an_index_of_tokens_is_not_blamed_for_missing_tokens(make_kv):
    class ByTokens:
        def __init__(self):
            self.held = {}

        def apply(self, event):
            for block, tokens in zip(event.event.data.block_hashes, event.token_ids, strict=True):
                self.held[block] = tuple(tokens)

        def match_tokens(self, tokens):
            return {FIRST: len(tokens) // 4} if tuple(tokens[:4]) in self.held.values() else {}

    kv = make_kv(None, ByTokens())
    sink = kv.make_sink()
    sink(one_block(1), token_ids=[(1, 2, 3, 4)])
    sink(Stored(1, (2, 3), (2, 3)), token_ids=[(5, 6, 7, 8)])
    sink(Stored(3, (4,), (4,)), token_ids=[(5, 6, 7, 8)])
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.blocks) == ("sparse_tokens", (3,))


def test_signed_block_hashes_are_accepted_as_they_are():
    """SGLang's block hashes are signed; local hashes never are."""
    with RouterHarness(backend=None) as kv:
        sink = kv.make_sink(num_blocks=4)
        sink.compare(lambda: [-5, -(2**63)])
        sink(Stored(None, (-1, -2), (11, 12)))
        sink(Stored(-2, (-(2**63), -5), (13, 14)))
        assert {sink.worker_id: 4} == kv.overlap(Prompt(hashes=[11, 12, 13, 14]))
        sink(Removed((-2,)))
        sink(Removed((-1,)))
        assert [problem.rule for problem in kv.events.warnings] == ["orphaned_child"]
        assert kv.overlap(Prompt(hashes=[11])) == {}
        with kv.events.expect_error("block_not_found"):
            sink(Removed((-1,)))
        with kv.events.expect_error("parent_block_not_found"):
            sink(Stored(-2, (-7,), (15,)))
            sink(Removed((-7,)))


@pytest.mark.parametrize("child", [-1, -2, 7])
def test_an_orphan_with_any_hash_is_found(child):
    kv = RouterHarness(backend=None)
    sink = kv.make_sink()
    for data in (Stored(None, (5, child), (5, 6)), Removed((5,))):
        sink(data)
    assert [problem.rule for problem in kv.judge().warnings] == ["orphaned_child"]


def test_signed_block_hashes_are_unsigned_in_dynamos_json():
    event = KvCacheEvent(0, Stored(-2, (-1,), (11,)))
    assert Stored(2**64 - 2, (2**64 - 1,), (11,)) == KvCacheEvent.from_json(event.to_json()).data
    assert Removed((2**63,)) == KvCacheEvent.from_json(KvCacheEvent(0, Removed((-(2**63),))).to_json()).data


# ---------------------------------------------------------------------------------------------------- whose id


def test_a_sink_takes_the_first_free_id(make_kv):
    kv = make_kv("lru")
    kv.worker(FIRST)
    kv.worker(FIRST + 1, dp_rank=1)
    kv.apply(one_block(1), worker_id=FIRST + 3)

    assert [kv.make_sink().worker_id for _ in range(3)] == [FIRST + 2, FIRST + 4, FIRST + 5]
    kv.make_sink()(one_block(1))
    kv.assert_no_event_errors()


def test_the_id_of_a_removed_sink_is_not_free(kv, sink):
    sink(one_block(1))
    kv.remove_worker(FIRST)
    assert kv.make_sink().worker_id == FIRST + 1


def test_a_sink_may_have_a_given_worker_id(kv):
    sink = kv.make_sink(worker_id=7)
    sink(one_block(1))
    assert (sink.worker_id, kv.overlap(Prompt(hashes=[1]))) == (7, {7: 1})
    assert [kv.make_sink(worker_id=given).worker_id for given in (None, 2**64 - 1)] == [FIRST, 2**64 - 1]
    kv.assert_no_event_errors()


@pytest.mark.parametrize(
    ("worker_id", "message"),
    [
        (0, "worker 0 is an engine of this test; take another worker_id"),
        (3, "worker 3 is known by events that were published before; take another worker_id"),
        (7, "worker 7 is a sink of this test already; take another worker_id"),
        (FIRST, f"worker {FIRST} is a sink of this test already; take another worker_id"),
        (-1, "make_kv_sink: worker_id must be an integer from 0 to 18446744073709551615 (u64), got -1"),
        (2**64, "make_kv_sink: worker_id must be an integer from 0 to"),
        (True, "got True"),
        ("7", "got '7'"),
    ],
)
def test_a_sink_cannot_have_the_id_of_another_worker(make_kv, worker_id, message):
    kv = make_kv("lru")
    kv.apply(one_block(1), worker_id=3)
    kv.make_sink(worker_id=7), kv.make_sink()
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        kv.make_sink(worker_id=worker_id)
    assert "\n" not in str(raised.value)
    assert kv.recording.sinks == {7, FIRST}


def test_a_removed_worker_may_return_as_another_sink(kv):
    former = kv.make_sink(worker_id=7, num_blocks=1)
    former(one_block(1))
    kv.remove_worker(7)
    sink = kv.make_sink(worker_id=7, num_blocks=2)
    sink(Stored(None, (1, 2), (1, 2)))
    assert kv.overlap(Prompt(hashes=[1, 2])) == {7: 2}
    with pytest.raises(ValueError, match="worker 7 is a sink of this test already"):
        kv.make_sink(worker_id=7)
    kv.assert_no_event_errors()
    assert kv.events.counts.warnings == {}


def test_a_sink_that_continues_after_its_removal_keeps_its_id(kv, sink):
    kv.remove_worker(FIRST)
    sink(one_block(1))
    with pytest.raises(ValueError, match=f"worker {FIRST} is a sink of this test already"):
        kv.make_sink(worker_id=FIRST)


def test_a_failure_of_a_sink_with_a_low_id_is_cut(make_kv):
    kv = make_kv("lru")
    kv.worker(0).serve(kv.prompt())
    sink = kv.make_sink(worker_id=7, num_blocks=2)
    for number in range(1, 6):
        sink(one_block(number))
    kv.flush()
    found = reproduce(kv)
    assert "sink = kv.make_sink(num_blocks=2)" in found.as_test()
    assert (found.breach.rule, len(found.steps)) == ("over_capacity", 1)


@pytest.mark.parametrize("worker_id", [2**16, 2**53 + 1, 2**63, 2**64 - 1])
def test_a_worker_may_have_any_id_of_64_bits(make_kv, worker_id):
    kv = make_kv("lru", RadixIndex(), dp_size=2)
    prompt = kv.prompt(3)
    kv.worker(worker_id).serve(prompt)
    kv.worker(worker_id, dp_rank=1).serve(prompt)
    assert {(worker_id, 0): 3, (worker_id, 1): 3} == kv.overlap(prompt)
    kv.worker(worker_id).restart(announced=True)
    assert {(worker_id, 1): 3} == kv.overlap(prompt)
    kv.remove_worker(worker_id)
    assert kv.overlap(prompt) == {}
    assert kv.judge()[:2] == ([], [])


CLASHES = {
    "a worker": (lambda kv: kv.worker(FIRST), f"worker {FIRST} is a sink of this test; take another id for an engine"),
    "a rank": (
        lambda kv: kv.worker(FIRST, dp_rank=1),
        f"worker {FIRST} is a sink of this test; take another id for an engine",
    ),
    "a misfit": (
        lambda kv: kv.faults.block_size(2, worker=FIRST),
        f"kv_harness.faults.block_size: worker {FIRST} is a sink of this test; take another id for an engine",
    ),
    "an event by hand": (
        lambda kv: kv.apply(one_block(1), worker_id=FIRST),
        f"worker {FIRST} is a sink of this test; publish its events through the sink",
    ),
    "an event with its worker": (
        lambda kv: kv.apply(RouterEvent(FIRST, KvCacheEvent(0, one_block(1), 2))),
        f"worker {FIRST} is a sink of this test; publish its events through the sink",
    ),
}


@pytest.mark.parametrize(("act", "message"), [pytest.param(*case, id=name) for name, case in CLASHES.items()])
def test_no_other_call_can_take_the_id_of_a_sink(make_kv, act, message):
    kv = make_kv("lru")
    sink = kv.make_sink()
    with pytest.raises(ValueError, match=rf"^{message}$"):
        act(kv)
    sink(one_block(1))
    assert kv.events.total == 1
    kv.assert_no_event_errors()


def test_the_next_worker_skips_only_ids_that_are_taken(make_kv):
    kv = make_kv("lru", workers=2)
    kv.make_sink()
    kv.worker(2**64 - 1)
    assert kv.worker(None).worker_id == 2


def test_a_failure_is_reproduced_for_a_worker_with_a_sinks_id_next_to_a_sink(make_kv):
    kv = make_kv("lru")
    sink = kv.make_sink()
    engine = kv.worker(FIRST + 1)
    for number in range(30):
        sink(one_block(number))
        engine.serve(kv.prompt(2))
    kv.make_sink()(Removed((7,)))

    found = reproduce(kv)

    assert (found.size, found.rule) == (1, "block_not_found")
    namespace = {}
    exec(found.as_test(), namespace)
    with pytest.raises(EventRulesBroken, match=r"^1 KV event error: block_not_found"):
        namespace["test_reproduction"]()
    assert not kv.workers.keys() & {sink.worker_id}


@pytest.mark.parametrize("worker_id", [FIRST, 2**40])
def test_a_failure_is_reproduced_for_a_worker_with_a_sinks_id(make_kv, worker_id):
    kv = make_kv("lru", num_blocks=64)
    kv.worker(worker_id).serve(kv.prompt(2))
    for number in range(30):
        kv.apply(one_block(number), worker_id=worker_id)
    kv.apply(Removed((77,)), worker_id=worker_id)

    found = reproduce(kv)

    namespace = {}
    exec(found.as_test(), namespace)
    with pytest.raises(EventRulesBroken, match=r"^1 KV event error: block_not_found"):
        namespace["test_reproduction"]()


# ------------------------------------------------------------------------------------ whether hashes are a chain

LOCALS = (0xA000_0000_0000_0001, 0xA000_0000_0000_0002, 0xA000_0000_0000_0003, 0xA000_0000_0000_0004)
CHAIN = tuple(sequence_hashes(LOCALS))
OTHER = 0xB000_0000_0000_0001


def text(block):
    return f"0x{block:016x}"


def rules(kv):
    return [(p.rule, p.position, p.blocks) for p in kv.events.problems if p.cause is None]


def test_a_chain_is_detected_and_checked_from_then_on(kv, sink):
    sink(Stored(None, CHAIN[:2], LOCALS[:2]))
    sink(Stored(CHAIN[1], (OTHER,), LOCALS[2:3]))
    assert rules(kv) == [("wrong_hash", 1, (OTHER,))]
    (problem,) = kv.judge().errors
    assert (
        problem.observed
        == f"block {text(OTHER)} is stored with local hash {text(LOCALS[2])}; the event has parent {text(CHAIN[1])}"
    )
    assert problem.expected == f"the chain of parent and local hash is {text(CHAIN[2])}"


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([Stored(None, (CHAIN[0], OTHER), LOCALS[:2])], id="two free hashes"),
        pytest.param([Stored(None, LOCALS, LOCALS), Removed(LOCALS[::-1])], id="local hashes as names"),
        pytest.param([Stored(None, (1, 2), (11, 12)), Stored(2, (3,), (13,))], id="by hand"),
        pytest.param([Stored(None, CHAIN, LOCALS), Stored(None, (1, 2), (11, 12))], id="by hand beside a chain"),
        pytest.param([Stored(None, CHAIN, LOCALS), Stored(None, (OTHER,), (OTHER - 1,))], id="free beside a chain"),
        pytest.param([Stored(None, (-5, -6), LOCALS[:2]), Stored(-6, (-7,), LOCALS[2:3])], id="signed"),
    ],
)
def test_hashes_without_a_chain_are_free(kv, sink, events):
    for event in events:
        sink(event)
    assert rules(kv) == []


def test_events_before_the_chain_was_detected_are_checked_afterwards(kv, sink):
    sink(Stored(None, (CHAIN[0], OTHER), LOCALS[:2]))
    assert rules(kv) == []
    sink(Stored(CHAIN[1], CHAIN[2:3], LOCALS[2:3]))
    assert [("wrong_hash", 0, (OTHER,)), ("parent_block_not_found", 1, (CHAIN[1],))] == rules(kv)
    assert [problem.rule for problem in kv.events[0].problems] == ["wrong_hash"]


def test_the_engines_resident_blocks_can_show_that_a_published_hash_breaks_the_chain(kv, sink):
    sink.compare(lambda: CHAIN[:1])
    sink(Stored(None, (OTHER,), LOCALS[:1]))
    assert rules(kv) == []
    kv.flush()
    assert [("wrong_hash", 0, (OTHER,)), ("engine_drift", 0, (OTHER,)), ("engine_drift", 0, CHAIN[:1])] == rules(kv)


def test_one_of_several_resident_blocks_is_enough_to_show_a_chain(kv, sink):
    sink.compare(lambda: CHAIN[:2])
    sink(Stored(None, (CHAIN[0], OTHER), LOCALS[:2]))
    assert rules(kv) == []
    kv.flush()
    assert [("wrong_hash", 0, (OTHER,)), ("engine_drift", 0, (OTHER,)), ("engine_drift", 0, CHAIN[1:2])] == rules(kv)


def test_one_event_may_show_the_chain_and_break_it(kv, sink):
    sink(Stored(None, (*CHAIN[:2], OTHER), LOCALS[:3]))
    assert rules(kv) == [("wrong_hash", 0, (OTHER,))]


def test_a_block_with_hash_0_can_be_part_of_a_chain(kv, sink):
    for parent, local in ((0, LOCALS[0]), (None, LOCALS[1])):
        sink(Stored(parent, tuple(sequence_hashes([local], parent=0)), (local,)))
    assert [
        ("parent_block_not_found", 0, (0,)),
        ("wrong_hash", 1, tuple(sequence_hashes(LOCALS[1:2], parent=0))),
    ] == rules(kv)


def test_a_wrong_parent_of_a_block_that_was_stored_before_is_named(kv):
    sink = kv.make_sink(chained=True)
    sink(Stored(CHAIN[0], CHAIN[1:2], LOCALS[1:2]))
    sink(Removed(CHAIN[1:2]))
    sink(Stored(None, CHAIN[1:2], LOCALS[1:2]))
    (wrong,) = (problem for problem in kv.events.problems if problem.rule == "wrong_hash")
    known = f"block {text(CHAIN[1])} is stored with local hash {text(LOCALS[1])}; the event has no parent"
    assert wrong.observed == f"{known}; the hash fits parent {text(CHAIN[0])}"
    assert wrong.expected == f"the parent is block {text(CHAIN[0])}"


def test_a_chain_detected_late_is_declared_in_the_reproduction_and_not_for_other_sinks(kv, sink):
    free = kv.make_sink(chained=False)
    free(Removed((7,)))
    sink(Stored(None, (CHAIN[0], OTHER), LOCALS[:2]))
    sink(Stored(CHAIN[0], CHAIN[1:2], LOCALS[1:2]))
    of_free, late = kv.judge().errors
    assert tuple((problem.rule, "chained=True" in reproduce(kv, problem).as_test()) for problem in (of_free, late)) == (
        ("block_not_found", False),
        ("wrong_hash", True),
    )


def test_a_chain_that_only_the_engine_shows_is_declared_in_the_reproduction(kv, sink):
    sink.compare(lambda: CHAIN[:1])
    sink(Stored(None, (OTHER,), LOCALS[:1]))
    problem = kv.judge().errors[0]
    assert problem.rule == "wrong_hash"
    assert "chained=True" in reproduce(kv, problem).as_test()


def test_resident_blocks_that_were_never_published_show_no_chain(kv, sink):
    sink.compare(lambda: [OTHER, *CHAIN])
    sink(Stored(None, (OTHER,), LOCALS[:1]))
    kv.flush()
    assert [(rule, at, tuple(sorted(blocks, key=CHAIN.index))) for rule, at, blocks in rules(kv)] == [
        ("engine_drift", 0, CHAIN)
    ]


def test_chained_false_disables_the_detection_of_a_chain(kv):
    sink = kv.make_sink(chained=False)
    sink(Stored(None, CHAIN[:2], LOCALS[:2]))
    sink(Stored(CHAIN[1], (OTHER,), LOCALS[2:3]))
    assert rules(kv) == []


def test_each_sink_detects_its_own_chain(kv):
    first, second = kv.make_sink(), kv.make_sink()
    first(Stored(None, CHAIN, LOCALS))
    second(Stored(None, (CHAIN[0], OTHER), LOCALS[:2]))
    assert rules(kv) == []


@pytest.mark.parametrize("chained", [None, True], ids=["found out", "given"])
@pytest.mark.parametrize(
    ("wrong", "known", "right"),
    [
        pytest.param(
            Stored(CHAIN[0], CHAIN[2:3], LOCALS[2:3]),
            f"the event has parent {text(CHAIN[0])}; the hash fits parent {text(CHAIN[1])}",
            f"the parent is block {text(CHAIN[1])}",
            id="another block",
        ),
        pytest.param(
            Stored(None, CHAIN[2:3], LOCALS[2:3]),
            f"the event has no parent; the hash fits parent {text(CHAIN[1])}",
            f"the parent is block {text(CHAIN[1])}",
            id="none",
        ),
        pytest.param(
            Stored(CHAIN[1], (OTHER,), (OTHER,)),
            f"the event has parent {text(CHAIN[1])}; the hash fits no parent",
            "the block is a root",
            id="one, of a root",
        ),
        pytest.param(
            Stored(CHAIN[1], CHAIN[3:], LOCALS[3:]),
            f"the event has parent {text(CHAIN[1])}; the hash fits parent {text(CHAIN[2])}",
            f"the parent is block {text(CHAIN[2])}",
            id="a block that was removed",
        ),
    ],
)
def test_a_wrong_parent_is_named_with_the_parent_that_fits_the_hash(kv, chained, wrong, known, right):
    sink = kv.make_sink(chained=chained)
    sink(Stored(None, CHAIN[:3], LOCALS[:3]))
    sink(Removed(CHAIN[2:3]))
    sink(wrong)
    (problem,) = kv.judge().errors
    block = f"block {text(wrong.block_hashes[0])} is stored with local hash {text(wrong.tokens_hashes[0])}"
    assert ("wrong_hash", f"{block}; {known}", right) == (problem.rule, problem.observed, problem.expected)


def test_a_signed_parent_does_not_disable_the_check_of_a_chained_sink(kv):
    sink = kv.make_sink(chained=True)
    sink(Stored(None, (-1,), (1,)))
    sink(Stored(-1, (2,), (2,)))
    assert [problem.rule for problem in kv.judge().errors] == ["wrong_hash", "wrong_hash"]


# --------------------------------------------------------------------------------- ids that a worker leaves out


def gaps(kv):
    return [(p.observed, p.expected) for p in kv.events.problems if p.rule == "event_id_gap"]


def test_an_id_that_the_worker_skipped_is_reported_as_never_published(kv, sink):
    for event_id in (5, 7, 8, 11):
        sink(KvCacheEvent(event_id, one_block(event_id)))
    assert gaps(kv) == [
        ("event ids go on from 5 to 7; the worker never published event 6", "event 6"),
        ("event ids go on from 8 to 11; the worker never published events 9 to 10", "event 9"),
    ]


def test_the_first_id_of_a_mock_worker_is_0(make_kv):
    kv = make_kv("lru")
    kv.apply(KvCacheEvent(2, one_block(1)))
    assert [known for known, _ in gaps(kv)] == ["event ids begin with 2; the worker never published events 0 to 1"]


def test_lost_ids_and_skipped_ids_are_distinguished(kv, sink):
    sink(KvCacheEvent(5, one_block(5)))
    kv.drop_next()
    sink(KvCacheEvent(7, one_block(7)))
    sink(KvCacheEvent(9, one_block(9)))
    assert gaps(kv) == [
        ("event 7 did not arrive after event 5; the worker never published event 6, event 8", "event 6")
    ]


def test_a_lost_last_id_and_a_skipped_id_are_distinguished(kv, sink):
    sink(KvCacheEvent(5, one_block(5)))
    kv.drop_next()
    sink(KvCacheEvent(7, one_block(7)))
    kv.flush()
    assert gaps(kv) == [
        (
            "the worker published ids up to 7; event 7 did not arrive; it never published event 6",
            "what is published arrives",
        )
    ]


def test_a_lost_last_event_is_reported_at_the_flush(kv, sink):
    sink(KvCacheEvent(5, one_block(5)))
    kv.drop_next()
    sink(KvCacheEvent(6, one_block(6)))
    kv.flush()
    assert rules(kv) == [("event_id_gap", 0, ())]


def test_an_event_that_a_sink_kept_back_makes_no_gap_for_the_next(kv):
    class Refuses:
        def publish(self, event, *beside):
            if event.event_id == 1:
                raise RuntimeError("full")

    kv.add_sink(Refuses(), before=True)
    sink = kv.make_sink()
    for event_id in (0, 1):
        sink(KvCacheEvent(event_id, one_block(event_id)))
    kv.faults.double()
    sink(KvCacheEvent(2, one_block(2)))
    assert gaps(kv) == [("event 2 had arrived already", "event 3")]


def test_an_event_that_a_sink_kept_back_counts_as_published(kv):
    class Refuses:
        def publish(self, event, *beside):
            if event.event_id == 1:
                raise RuntimeError("full")

    kv.add_sink(Refuses(), before=True)
    sink = kv.make_sink()
    for event_id in (0, 1, 3):
        sink(KvCacheEvent(event_id, one_block(event_id)))
    assert [problem.rule for problem in kv.events.problems] == ["sink_failure", "event_id_gap"]
    assert [known for known, _ in gaps(kv)] == ["event ids go on from 1 to 3; the worker never published event 2"]


def test_a_skipped_id_is_known_when_an_earlier_event_arrives_late(kv, sink):
    sink(KvCacheEvent(0, one_block(1)))
    kv.faults.reorder()
    sink(KvCacheEvent(2, one_block(2)))
    kv.faults.delay(by=3)
    for event_id in (4, 5, 6, 7):
        sink(KvCacheEvent(event_id, one_block(event_id)))
    assert [entry.event.event.event_id for entry in kv.events] == [0, 2, 5, 6, 7, 4]
    assert gaps(kv) == [
        ("event ids go on from 0 to 2; the worker never published event 1", "event 1"),
        ("event 4 did not arrive after event 2; the worker never published event 3", "event 3"),
    ]


def test_ids_skipped_before_a_restart_do_not_count_for_new_ids(make_kv):
    kv = make_kv("lru")
    kv.apply(KvCacheEvent(0, one_block(1)))
    kv.drop_next()
    kv.apply(KvCacheEvent(4, one_block(2)))
    kv.worker(0).restart(announced=True)
    kv.apply(KvCacheEvent(0, one_block(1)))
    for event_id in (1, 2, 3):
        kv.drop_next()
        kv.apply(KvCacheEvent(event_id, one_block(event_id)))
    kv.apply(KvCacheEvent(4, one_block(4)))
    assert gaps(kv) == [("events 1 to 3 did not arrive after event 0", "event 1")]


# -------------------------------------------------------------------------------------------- which is the cause


def test_an_orphan_that_the_engine_dropped_follows_from_a_missing_removed(kv, sink):
    resident = {1, 2}
    sink.compare(lambda: resident)
    sink(Stored(None, (1, 2), (1, 2)))
    resident.clear()
    sink(Removed((1,)))
    kv.flush()
    (problem,) = kv.events.errors
    assert (
        problem.rule,
        problem.blocks,
        [consequence.rule for consequence in problem.folded],
    ) == ("engine_drift", (2,), ["orphaned_child"])
    assert kv.events.warnings == []


def test_an_orphan_that_the_engine_holds_follows_from_nothing(kv, sink):
    resident = {1, 2}
    sink.compare(lambda: resident)
    sink(Stored(None, (1, 2), (1, 2)))
    resident.discard(1)
    sink(Removed((1,)))
    kv.flush()
    resident.clear()
    kv.flush()
    assert rules(kv) == [("orphaned_child", 1, (2,)), ("engine_drift", 1, (2,))]


def test_an_orphan_does_not_follow_from_drift_after_a_cleared(kv, sink):
    resident = set()
    sink.compare(lambda: resident)
    sink(Stored(None, (1, 2), (1, 2)))
    sink(Removed((1,)))
    sink(Cleared())
    sink(one_block(2))
    kv.flush()
    assert rules(kv) == [("orphaned_child", 1, (2,)), ("engine_drift", 3, (2,))]


def test_over_capacity_follows_from_a_missing_removed(kv):
    resident = {1, 2}
    sink = kv.make_sink(num_blocks=2)
    sink.compare(lambda: resident)
    sink(Stored(None, (1, 2), (1, 2)))
    resident.symmetric_difference_update({1, 3})
    sink(one_block(3))
    kv.flush()
    assert rules(kv) == [("engine_drift", 1, (1,))]


def test_over_capacity_of_blocks_that_the_engine_holds_follows_from_nothing(kv):
    resident = {1, 2, 3, 4}
    sink = kv.make_sink(num_blocks=2)
    sink.compare(lambda: resident)
    sink(Stored(None, (1, 2, 3, 4), (1, 2, 3, 4)))
    resident.discard(1)
    kv.flush()
    assert rules(kv) == [("over_capacity", 0, ()), ("engine_drift", 0, (1,))]


# ------------------------------------------------------------------------------------------- workers, likewise


@pytest.mark.parametrize("backend", ["lineage", "hash_cache", "vllm", "sglang"])
def test_a_wrong_parent_is_named_in_the_hash_chain_of_every_engine(make_kv, backend):
    kv = make_kv(backend)
    prompt = kv.prompt(3)
    kv.worker(0).serve(prompt)
    first, _, last = kv.events.stored_blocks
    kv.faults.wrong_parent(parent=first)
    kv.worker(0).serve(kv.prompt(2, after=prompt))
    problem = next(problem for problem in kv.judge() and kv.events.problems if problem.rule == "wrong_hash")
    name = f"{'-' * (last < 0)}0x{abs(last):016x}"
    assert problem.observed.endswith(f"; the hash fits parent {name}")
    assert problem.expected == f"the parent is block {name}"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("backend", EACH)
def test_a_sink_that_receives_a_workers_events_gets_the_same_verdict_as_the_worker(backend, seed):
    """A worker's hashes are known to be a chain; those of a sink are detected as one."""
    spec, profile = BACKENDS[backend], sized(EngineProfile(block_size=4, num_blocks=16, seed=seed), backend)
    rng, theirs, own = random.Random(seed), RouterHarness(profile, backend), RouterHarness(profile, None)
    sink = own.make_sink(num_blocks=profile.num_blocks, residency=spec.residency, prefix_closed=spec.prefix_closed)
    sink.compare(theirs.worker(0).manager.resident)
    shared = [theirs.prompt(rng.randint(1, 3)) for _ in range(4)]
    running = []
    for _ in range(200):
        with suppress(OutOfBlocks):
            prompt = theirs.prompt(rng.randint(0, 3), after=rng.choice(shared), tail=rng.randint(1, 3))
            running.append(theirs.worker(0).prefill(prompt))
        if running and rng.random() < 0.7:
            running.pop(rng.randrange(len(running))).finish()
        for event in theirs.events.take():
            sink(event)
        own.flush()
    theirs.flush()

    assert own.events.total > 100
    assert [(p.rule, p.position, p.observed) for p in theirs.events.problems] == [
        (p.rule, p.position, p.observed) for p in own.events.problems
    ]


def test_a_wrong_hash_follows_from_a_wrong_parent_and_not_from_an_unknown_one(make_kv):
    standing = []
    for event_id in (1, 5):  # with 5 it is unknown whether the parent was stored
        kv = make_kv()
        sink = kv.make_sink(chained=True)
        (right,) = sequence_hashes((4,))
        sink(KvCacheEvent(0, Stored(None, (right,), (4,))))
        sink(KvCacheEvent(event_id, Stored(77, (2,), (2,))))
        standing.append([(p.rule, [each.rule for each in p.folded]) for p in kv.events.errors])
    wrong_parent, unknown_parent = standing
    assert wrong_parent == [("parent_block_not_found", ["wrong_hash"])]
    assert unknown_parent == [("event_id_gap", ["parent_block_not_found"]), ("wrong_hash", [])]


def test_add_sink_can_be_limited_to_the_events_of_one_worker():
    with RouterHarness(backend="lru") as harness:
        one, all_of_them = CapturingSink(), CapturingSink()
        harness.add_sink(one, worker_id=1)
        harness.add_sink(all_of_them)
        for worker in (0, 1, 2):
            harness.worker(worker).serve(harness.prompt(blocks=1))
        assert (len(one.events), len(all_of_them.events)) == (1, 3)
