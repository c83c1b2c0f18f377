"""A failing stream is cut to the fewest events or requests that break the same rule, and printed as a test."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from depth import DEEP, examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import (
    Cleared,
    EngineProfile,
    EventRulesBroken,
    KvCacheEvent,
    OutOfBlocks,
    Problem,
    Removed,
    RouterEvent,
    RouterHarness,
    StorageTier,
    Stored,
    sequence_hashes,
)
from pytest_kvmock.harness.recording import MOST, RecordedOperation
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.harness.reduce.breach import Breach, story_of
from pytest_kvmock.harness.reduce.program import NotReduced
from pytest_kvmock.harness.reduce.replay import Replayer
from pytest_kvmock.harness.reduce.search import Budget
from pytest_kvmock.values.programs.operations import Clear, Decode, DropNext, Finish, Preempt, Prefill, Resume
from pytest_kvmock.values.tokens import chained_hash

# ------------------------------------------------------------------------------------------------ events by rule


def noise(sink, start=1000, count=30):
    """Publish chains of three blocks that no later event names."""
    for root in range(start, start + 10 * count, 10):
        sink(Stored(None, (root, root + 1), (root, root + 1)))
        sink(Stored(root + 1, (root + 2,), (root + 2,)))


def a_parent_that_is_gone(sink):
    sink(Stored(None, (1, 2, 3), (11, 12, 13)))
    noise(sink)
    sink(Removed((3, 2)))
    noise(sink, 5000)
    sink(Stored(2, (7, 8), (17, 18)))


def a_parent_that_was_never_there(sink):
    noise(sink)
    sink(Stored(999, (1,), (1,)))


def a_block_removed_twice(sink):
    sink(Stored(None, (1, 2, 3), (1, 2, 3)))
    sink(Stored(3, (4,), (4,)))
    noise(sink)
    sink(Removed((4, 3)))
    noise(sink, 5000)
    sink(Removed((3, 2)))


def a_block_removed_after_a_cleared(sink):
    noise(sink)
    sink(Stored(None, (1,), (1,)))
    sink(Cleared())
    noise(sink, 5000)
    sink(Removed((1,)))


def a_block_removed_in_another_tier(sink):
    noise(sink)
    sink(Stored(None, (1,), (1,)), StorageTier.HOST_PINNED)
    sink(Removed((1,)))


def its_own_parent(sink):
    noise(sink)
    sink(Stored(None, (1, 2), (1, 2)))
    sink(Stored(2, (3, 3), (3, 3)))


def a_second_local_hash(sink):
    noise(sink)
    sink(Stored(None, (1, 2), (11, 12)))
    noise(sink, 5000)
    sink(Stored(1, (2,), (13,)))


def a_skipped_id(sink):
    noise(sink)
    sink(KvCacheEvent(100, Stored(None, (1,), (1,))))


def an_id_that_comes_again(sink):
    noise(sink, count=2)
    sink(KvCacheEvent(3, Removed((1012,))))


DATA = {
    a_parent_that_is_gone: [Stored(None, (1,), (1,)), Removed((1,)), Stored(1, (2,), (2,))],
    a_parent_that_was_never_there: [Stored(1, (2,), (1,))],
    a_block_removed_twice: [Stored(None, (1,), (1,)), Removed((1,)), Removed((1,))],
    a_block_removed_after_a_cleared: [Stored(None, (1,), (1,)), Cleared(), Removed((1,))],
    its_own_parent: [Stored(1, (1,), (1,))],
    a_second_local_hash: [Stored(None, (1,), (1,)), Stored(None, (1,), (2,))],
    a_skipped_id: [Stored(None, (1,), (1,)), Stored(None, (2,), (2,))],
    an_id_that_comes_again: [Stored(None, (1,), (1,)), Removed((1,))],
}


def sunk(say, **options):
    kv = RouterHarness(EngineProfile(num_blocks=100, workers=3))
    sink = kv.make_sink(**options)
    say(sink)
    kv.judge()
    return kv


@pytest.mark.parametrize("say", DATA, ids=lambda say: say.__name__)
def test_hand_made_events_are_cut_to_the_fewest_that_break_the_rule(say, failure_of):
    kv = sunk(say)
    found = reproduce(kv)

    assert DATA[say] == [event.event.data for event in found.events]
    assert found.complete
    assert (kv.events.total, len(DATA[say])) == (found.cut_from, found.size)
    assert failure_of(found).startswith(f"1 KV event error: {kv.events.errors[0].rule} (worker 65536, event ")


def test_a_reproduction_keeps_the_storage_tier_if_it_matters(failure_of):
    found = reproduce(sunk(a_block_removed_in_another_tier))

    assert [event.storage_tier for event in found.events] == [StorageTier.HOST_PINNED, StorageTier.DEVICE]
    assert "sink(Stored(None, (1,), (1,)), StorageTier.HOST_PINNED)" in found.as_test()
    assert failure_of(found).startswith("1 KV event error: block_not_found")


def too_many_on_the_host(sink):
    noise(sink)
    sink(Stored(None, (1, 2, 3), (1, 2, 3)), StorageTier.HOST_PINNED)
    noise(sink, 5000)
    sink(Removed((2,)), StorageTier.HOST_PINNED)
    sink(Stored(7, (8,), (8,)), StorageTier.HOST_PINNED)


def test_too_many_blocks_in_a_tier_are_cut_to_one_stored_in_that_tier(failure_of):
    found = reproduce(sunk(too_many_on_the_host, tier_blocks={"host": 2}))

    assert [event.storage_tier for event in found.events] == [StorageTier.HOST_PINNED]
    assert 'kv.make_sink(tier_blocks={"host_pinned": 2})' in found.as_test()
    assert failure_of(found).startswith("1 KV event error: over_capacity (worker 65536")


@pytest.mark.parametrize(("say", "ids"), [(a_skipped_id, [0, 41]), (an_id_that_comes_again, [0, 0])])
def test_event_ids_keep_their_jumps_if_these_matter(say, ids):
    assert ids == [event.event.event_id for event in reproduce(sunk(say)).events]


def test_events_that_are_left_out_make_no_gap_in_the_ids():
    found = reproduce(sunk(a_parent_that_is_gone))

    assert [event.event.event_id for event in found.events] == [0, 1, 2]
    assert not found.with_ids


def test_a_reproduction_of_a_wrong_hash_keeps_the_hashes(failure_of):
    """The verdict depends on the hashes. The parent becomes a root, for which its own local hash is right."""

    def say(sink):
        chain = [5]
        for local in (6, 7, 8):
            chain.append(chained_hash(chain[-1], local))
        sink(Stored(None, tuple(chain), (5, 6, 7, 8)))
        sink(Stored(chain[-1], (99, chained_hash(99, 10)), (9, 10)))

    kv = sunk(say, chained=True)
    found = reproduce(kv)

    parent = kv.events[0].event.event.data.block_hashes[-1]
    assert [Stored(None, (parent,), (parent,)), Stored(parent, (99,), (9,))] == [e.event.data for e in found.events]
    assert failure_of(found).startswith("1 KV event error: wrong_hash")


LOCALS = tuple(range(2**40, 2**40 + 40))
CHAIN = tuple(sequence_hashes(LOCALS))


@pytest.mark.parametrize("options", [{}, {"chained": True}], ids=["found out", "said"])
def test_a_reproduction_of_a_wrong_parent_keeps_the_right_parent_too(failure_of, options):
    def say(sink):
        sink(Stored(None, CHAIN[:30], LOCALS[:30]))
        sink(Stored(CHAIN[4], CHAIN[30:], LOCALS[30:]))

    kv = sunk(say, **options)
    found = reproduce(kv)
    message = failure_of(found)

    assert f"the hash fits parent 0x{CHAIN[29]:016x}" in message
    assert message.startswith("1 KV event error: wrong_hash (worker 65536, event ")
    assert "kv.make_sink(chained=True)" in found.as_test()


def test_a_wrong_hash_among_hand_made_events_is_cut(failure_of):
    def say(sink):
        sink(Stored(None, (2**50,), (2**51,)))  # by hand, and no chain
        sink(Stored(None, CHAIN, LOCALS))
        noise(sink)
        sink(Stored(CHAIN[9], (2**52,), (2**53,)))

    found = reproduce(sunk(say))

    assert found.size == 2
    assert failure_of(found).startswith("1 KV event error: wrong_hash (worker 65536, event ")


def test_the_hashes_of_a_reproduction_are_not_taken_for_a_chain(failure_of):
    found = reproduce(sunk(a_parent_that_is_gone))
    assert "kv.make_sink()" in found.as_test()

    steps = [
        RouterEvent(2**16, KvCacheEvent(i, data))
        for i, data in enumerate([Stored(None, CHAIN[:2], LOCALS[:2]), Stored(CHAIN[0], CHAIN[3:4], LOCALS[3:4])])
    ]
    gone = RouterEvent(2**16, KvCacheEvent(2, Removed((7,))))
    text = found.replace(steps=(*steps, gone)).as_test()
    assert "kv.make_sink(chained=False)" in text
    module = {}
    exec(text, module)
    with pytest.raises(EventRulesBroken, match=r"^1 KV event error: block_not_found "):
        module["test_reproduction"]()


def test_a_lost_event_is_replayed_as_an_event_id_that_was_never_published(failure_of):
    kv = RouterHarness(backend=None)
    sink = kv.make_sink()
    noise(sink)
    kv.drop_next()
    noise(sink, 5000)
    kv.judge()
    found = reproduce(kv)

    assert [event.event.event_id for event in found.events] == [0, 2]
    assert kv.events.errors[0].observed == "event 60 did not arrive after event 59"
    assert "event ids go on from 0 to 2; the worker never published event 1" in failure_of(found)


def test_a_warning_is_cut_too_and_its_test_asserts_that_there_are_no_warnings():
    def say(sink):
        noise(sink)
        sink(Stored(1001, (1002,), (1002,)))

    kv = sunk(say)
    found = reproduce(kv, kv.events.warnings[0])

    assert [Stored(None, (1,), (1,))] * 2 == [event.event.data for event in found.events]
    module = {}
    exec(found.as_test(), module)
    with pytest.raises(AssertionError):
        module["test_reproduction"]()


def test_an_allowed_error_that_the_problem_does_not_need_is_left_out():
    kv = RouterHarness(allow=["block_not_found"])
    noise(kv.apply)
    kv.apply([Removed((77,)), Stored(None, (1,), (1,)), Stored(None, (1,), (2,))])
    kv.judge()
    problem = kv.events.errors[-1]
    found = reproduce(kv, problem, allow=["block_not_found"])

    assert (found.rule, found.size, found.allow) == ("invalid_block", 2, ())


@pytest.mark.parametrize(
    ("forget", "text", "what"),
    [
        (lambda kv: kv.worker(1).restart(announced=True), "kv.worker(1).restart(announced=True)", "restarted"),
        (lambda kv: kv.remove_worker(1), "kv.remove_worker(1)", "was removed"),
        (lambda kv: kv.remove_worker((1, 0)), "kv.remove_worker((1, 0))", "was removed"),
    ],
    ids=["restart", "remove", "remove a rank"],
)
def test_a_reproduction_drops_the_blocks_of_a_worker_as_the_test_did(failure_of, forget, text, what):
    kv = RouterHarness(EngineProfile(workers=2))
    noise(kv.apply)
    kv.apply(Stored(None, (1, 2), (1, 2)), worker_id=1)
    forget(kv)
    kv.apply(Removed((2,)), worker_id=1)
    kv.judge()
    found = reproduce(kv)

    assert (found.rule, found.size) == ("block_not_found", 2)
    assert text in found.as_test()
    assert f" was stored by event 0 and dropped when worker 1 {what}\n" in failure_of(found)


def test_a_restart_that_the_failure_does_not_need_is_left_out():
    kv = RouterHarness()
    kv.apply([Stored(None, (1,), (1,)), Removed((1,))])
    kv.worker(0).restart(announced=True)
    kv.apply(Removed((1,)))
    (problem,) = kv.judge().errors
    found = reproduce(kv)

    assert problem.observed == "block 1 was removed by event 1 (before the restart)"
    assert found.size == 3
    assert "restart" not in found.as_test()


def test_a_reproduction_keeps_ranks_and_workers_apart(failure_of):
    kv = RouterHarness(EngineProfile(workers=2, dp_size=2))
    for rank in (0, 1):
        for worker in (0, 1):
            kv.apply([Stored(None, (1, 2), (1, 2)), Removed((2,))], worker, rank)
    kv.apply(Stored(2, (3,), (3,)), 1, 1)
    kv.judge()
    found = reproduce(kv)

    assert {(event.worker_id, event.event.dp_rank) for event in found.events} == {(1, 1)}
    assert "], worker_id=1, dp_rank=1)" in found.as_test()
    assert "rank 1" in failure_of(found)


# -------------------------------------------------------------------------------------------------------- sinks


def more_than_there_is_room_for(sink):
    """Hold forty blocks, ten of them in two copies."""
    sink(Stored(None, (1, 2), (11, 12)))
    sink(Removed((2, 1)))
    noise(sink, count=20)
    for root in range(1000, 1200, 20):
        sink(Stored(None, (root,), (root,)))
        sink(Removed((root + 2,)))


def test_over_capacity_of_a_sink_is_cut_to_one_stored(failure_of):
    kv = sunk(more_than_there_is_room_for, num_blocks=41)
    found = reproduce(kv)

    assert (found.cut_from, found.size, found.complete) == (62, 1, True)
    assert found.as_test() == (
        "from pytest_kvmock import RouterHarness, Stored\n\n\ndef test_reproduction():\n    with RouterHarness() as "
        "kv:\n        sink = kv.make_sink(num_blocks=41)\n        sink(Stored(None, (*range(1, 43),), (*range(1, "
        "43),)))\n"
    )
    assert failure_of(found).startswith("1 KV event error: over_capacity (worker 65536)")


def test_over_capacity_by_copies_is_cut_to_one_stored_per_copy(failure_of):
    def say(sink):
        for _ in range(3):
            sink(Stored(None, (1, 2), (11, 12)))
        sink(Removed((2,)))
        sink(Stored(None, (3,), (13,)), StorageTier.HOST_PINNED)
        sink(Removed((3,)), StorageTier.HOST_PINNED)

    kv = sunk(say, num_blocks=4, residency="counted")
    found = reproduce(kv)

    assert [Stored(None, (1, 2), (1, 2)), Stored(None, (1, 2), (1, 2)), Stored(None, (1,), (1,))] == [
        event.event.data for event in found.events
    ]
    assert 'sink = kv.make_sink(num_blocks=4, residency="counted")' in found.as_test()
    assert failure_of(found).startswith("1 KV event error: over_capacity (worker 65536)")


def test_cleared_and_removed_blocks_do_not_count_as_held_in_a_reproduction():
    kv = RouterHarness(EngineProfile(num_blocks=3))
    kv.apply([Stored(None, (1, 2), (1, 2)), Cleared(), Stored(None, (3,), (3,))])
    kv.remove_worker(0)
    kv.worker(0)
    kv.apply(Stored(None, (4,), (4,)), worker_id=1)
    kv.apply(Stored(None, (5, 6, 7, 8), (5, 6, 7, 8)))
    kv.judge()
    found = reproduce(kv)

    assert [Stored(None, (1, 2, 3, 4), (1, 2, 3, 4))] == [event.event.data for event in found.events]
    assert "EngineProfile(num_blocks=3)" in found.as_test()


def test_the_capacity_of_a_sink_is_left_out_if_it_does_not_matter():
    assert "sink = kv.make_sink()\n" in reproduce(sunk(a_parent_that_is_gone, num_blocks=1000)).as_test()


def test_a_reproduction_keeps_the_rules_that_a_sink_was_made_with():
    """Its wrong hash is a warning, also where it is no longer the first sink."""
    kv = RouterHarness(backend=None)
    kv.make_sink()(Stored(None, (1,), (1,)))
    sink = kv.make_sink(chained=True, prefix_closed=False)
    for block in range(10, 40):
        sink(Stored(None, (block,), (block,)))
    sink(Stored(None, (5,), (6,)))
    kv.judge()
    found = reproduce(kv, kv.events.warnings[0])

    assert [Stored(None, (5,), (6,))] == [event.event.data for event in found.events]
    assert "sink = kv.make_sink(chained=True, prefix_closed=False)\n" in found.as_test()


# ----------------------------------------------------------------------------------------------- property: events


@given(st.integers(0, 10_000))
@settings(max_examples=examples(40))
def test_random_streams_are_cut_to_the_fewest_events_that_break_the_same_rule(seed):
    kv = broken_stream(seed)
    if not kv.events.errors:
        return
    problem = kv.events.errors[0]
    found = reproduce(kv)

    assert found.complete
    shown = judged(found.events)
    assert (problem.rule, story_of(problem)) == (shown[0].rule, story_of(shown[0]))
    for i in range(len(found.events)):
        fewer = [event for j, event in enumerate(found.events) if j != i]
        if not found.with_ids:
            fewer = [RouterEvent(e.worker_id, KvCacheEvent(n, e.event.data)) for n, e in enumerate(fewer)]
        again = judged(fewer)
        block = None if found.breach.block is None else found.breach.block
        assert not again or (problem.rule, story_of(problem), block) != (
            again[0].rule,
            story_of(again[0]),
            again[0].block,
        )


def broken_stream(seed):
    """Publish a hundred events, one in thirty with wrong blocks."""
    rng = random.Random(seed)
    kv = RouterHarness()
    held = []
    for number in range(100):
        wrong = rng.random() < 0.03
        if held and rng.random() < 0.4:
            block = rng.randrange(500) if wrong else held.pop()
            kv.apply(Removed((block,)))
        else:
            parent = rng.randrange(500, 600) if wrong else (rng.choice([None, held[-1]]) if held else None)
            kv.apply(Stored(parent, (1000 + number,), (rng.randrange(50),)))
            held.append(1000 + number)
    kv.judge()
    return kv


def judged(events):
    kv = RouterHarness()
    for event in events:
        kv.publisher.publish(event)
    return kv.judge().errors


# ------------------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("backend", "rule", "requests"),
    [
        ("forgets_a_removed", "engine_drift", ["prefill", "finish"] * 2),
        ("names_one_twice", "block_not_found", ["prefill", "finish"] * 2),
        ("hashes_one_wrongly", "wrong_hash", ["prefill", "finish"]),
    ],
)
@pytest.mark.usefixtures("faulty_backends")
def test_an_engine_fault_is_cut_to_few_requests(busy, failure_of, backend, rule, requests):
    found = reproduce(busy(backend))

    assert (rule, "requests", backend) == (found.rule, found.level, found.backend)
    assert requests == [step.kind for step in found.operations]
    assert (150, len(requests) // 2, True) == (found.cut_from, found.size, found.complete)
    assert rule in failure_of(found).splitlines()[0]


@pytest.mark.usefixtures("faulty_backends")
def test_a_block_that_an_engine_holds_without_an_event_is_cut_to_one_request(failure_of):
    kv = RouterHarness(EngineProfile(block_size=4), "keeps_one_secret")
    for blocks in (2, 5, 3, 6, 1, 5):
        kv.worker(0).serve(kv.prompt(blocks))
    kv.judge()
    found = reproduce(kv)

    assert (found.rule, found.cut_from, found.size) == ("engine_drift", 6, 1)
    assert "        kv.worker(0).serve([*range(16)])\n" in found.as_test()
    assert failure_of(found).startswith("1 KV event error: engine_drift (worker 0)")


def test_requests_of_a_reproduction_are_written_with_small_tokens(faulty_backends, busy):
    kv = busy("names_one_twice")

    assert reproduce(kv).as_test() == (
        "from pytest_kvmock import EngineProfile, RouterHarness\n"
        "\n"
        "\n"
        "def test_reproduction():\n"
        '    with RouterHarness(EngineProfile(block_size=4, num_blocks=4), "names_one_twice") as kv:\n'
        f"        kv.worker({kv.events.errors[0].worker_id}).serve([*range(16)])\n"
        f"        kv.worker({kv.events.errors[0].worker_id}).serve([*range(16, 32)])\n"
    )


def test_no_request_and_no_block_can_be_left_out_of_a_reproduction(faulty_backends, busy):
    found = reproduce(busy("names_one_twice"))
    steps = found.operations
    requests = [step for step in steps if step.kind == "prefill"]

    def breaks(steps):
        return Replayer(None, (), Budget(1000)).breaks(found.replace(steps=tuple(steps)))

    assert breaks(steps)
    for gone in requests:
        assert not breaks([step for step in steps if step.name != gone.name])
        tokens = gone.prompt(4).tokens
        for start in range(0, len(tokens), 4):
            shorter = replace(gone, blocks=(), tail=tokens[:start] + tokens[start + 4 :])
            assert not breaks([shorter if step is gone else step for step in steps])


@pytest.mark.parametrize(
    ("amid", "rule", "expected"),
    [
        (lambda kv: kv.drop_next(), "event_id_gap", "kv.drop_next()"),
        (lambda kv: kv.worker(0).restart(), "event_id_gap", "kv.worker(0).restart()"),
    ],
    ids=["lost", "restarted"],
)
def test_a_reproduction_replays_what_the_test_did_to_the_stream(busy, failure_of, amid, rule, expected):
    found = reproduce(busy(amid=amid), level="requests")

    assert rule == found.rule
    assert expected in found.as_test()
    assert found.size <= 3
    assert rule in failure_of(found).splitlines()[0]


def test_a_lost_event_is_cut_to_two_events(busy):
    found = reproduce(busy(amid=lambda kv: kv.drop_next()))

    assert (found.level, found.size, [event.event.event_id for event in found.events]) == ("events", 2, [0, 2])


def test_overlapping_requests_are_replayed_as_they_were_recorded(faulty_backends, failure_of):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=8), "forgets_a_removed")
    worker = kv.worker(0)
    for _ in range(10):
        worker.serve(kv.prompt(3))
    held = worker.prefill(kv.prompt(4))
    held.decode(3)
    held.preempt()
    worker.serve(kv.prompt(8))
    held.resume()
    held.finish()
    kv.judge()
    found = reproduce(kv)

    assert (found.rule, found.complete) == ("engine_drift", True)
    assert "engine_drift" in failure_of(found)


@pytest.mark.usefixtures("faulty_backends")
def test_requests_that_need_not_overlap_are_written_one_after_the_other():
    """Of the first two requests, three blocks must be evicted at once for the third."""
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=6), "forgets_a_removed")
    worker = kv.worker(0)
    first = worker.prefill(kv.prompt(2, tail=2))
    second = worker.prefill(kv.prompt(2, tail=1))
    first.finish()
    second.finish()
    worker.serve(kv.prompt(5))
    kv.judge()
    lines = reproduce(kv).as_test().splitlines()

    assert lines[-3:-1] == [
        "        kv.worker(0).serve([*range(8)])",
        "        kv.worker(0).serve([*range(8, 16)])",
    ]
    assert lines[-1].startswith("        kv.worker(0).serve([*range(16, ")


@pytest.mark.usefixtures("faulty_backends")
def test_a_request_of_a_reproduction_decodes_no_more_tokens_than_needed():
    kv = RouterHarness(EngineProfile(block_size=4), "hashes_decoded_blocks_wrongly")
    for _ in range(5):
        kv.worker(0).serve(kv.prompt(1), 40)
    kv.judge()
    text = reproduce(kv).as_test()

    assert "kv.worker(0).serve([0, 1, 2, 3], 5)\n" in text


@pytest.mark.usefixtures("faulty_backends")
def test_an_allowed_error_that_comes_with_the_failure_is_allowed_in_the_test_too(busy, failure_of):
    kv = busy("does_both")
    problem = next(p for p in kv.events.errors if p.rule == "engine_drift")
    found = reproduce(kv, problem, allow=["block_not_found"])

    assert (found.rule, found.allow) == ("engine_drift", ("block_not_found",))
    assert ', allow=["block_not_found"]) as kv:' in found.as_test()
    assert failure_of(found).startswith("1 KV event error: engine_drift")


@pytest.mark.usefixtures("faulty_backends")
def test_the_written_test_fails_for_the_rule_wherever_the_search_ends(failure_of):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=4), "forgets_a_removed")
    for n in range(20):
        with suppress(OutOfBlocks):
            kv.worker(0).serve(kv.prompt(3 + n % 2 * 2))  # every other one does not fit
    kv.judge()
    complete = []
    for work in range(20, 1500, 20 if DEEP else 200):
        with suppress(NotReduced):
            found = reproduce(kv, work=work)
            complete.append(found.complete)
            assert "over_capacity" in failure_of(found)

    assert set(complete) == {False, True}


@pytest.mark.parametrize(
    "other",
    [
        Problem("block_not_found", 0, 0, "block 5 was removed by event 7", "", blocks=(4,)),
        Problem("block_not_found", 0, 0, "block 5 was never stored", "", blocks=(5,)),
        Problem("block_not_found", 1, 0, "block 5 was removed by event 7", "", blocks=(5,)),
        Problem("parent_block_not_found", 0, 0, "block 5 was removed by event 7", "", blocks=(5,)),
    ],
    ids=["block", "story", "worker", "rule"],
)
def test_a_breach_does_not_show_in_another_problem(other):
    breach = Breach.of(Problem("block_not_found", 0, 0, "block 5 was removed by event 6", "", blocks=(5, 6)))

    assert breach.shows_in(Problem("block_not_found", 0, 0, "block 5 was removed by event 8", "", blocks=(5,)))
    assert not breach.shows_in(other)


def test_two_wrong_hashes_with_different_expected_hashes_are_different_breaches():
    first, second = (
        Problem("wrong_hash", 0, 0, "block 5 is wrong", right, blocks=(5,)) for right in ("it is 6", "it is 7")
    )

    assert Breach.of(first).shows_in(first)
    assert not Breach.of(first).shows_in(second)


def test_requests_that_raised_are_left_out(faulty_backends):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=4), "forgets_a_removed")
    for tokens in (range(12), range(100, 200), range(20, 36), range(200, 300)):
        try:
            kv.worker(0).serve(list(tokens))
        except RuntimeError:
            continue
    kv.judge()

    assert [step.kind for step in reproduce(kv).operations] == ["prefill", "finish"] * 2


# -------------------------------------------------------------------------------------------------- limits, words


def test_reproduce_leaves_the_harness_unchanged(busy):
    kv = busy(amid=lambda kv: kv.drop_next())
    before = (kv.events.total, len(kv.events.problems), kv.recording.requests)
    reproduce(kv)
    reproduce(kv, level="requests")

    assert before == (kv.events.total, len(kv.events.problems), kv.recording.requests)


def test_the_same_failure_always_gives_the_same_reproduction(busy):
    texts = {reproduce(busy(amid=lambda kv: kv.drop_next()), level="requests").as_test() for _ in range(3)}

    assert len(texts) == 1


def test_reproduce_raises_when_there_is_no_problem(busy):
    with pytest.raises(NotReduced, match=r"^there is no problem to reproduce$"):
        reproduce(busy())


def test_an_expected_error_is_not_reproduced():
    kv = RouterHarness()
    with kv.events.expect_error("block_not_found"):
        kv.apply(Removed((1,)))
    with pytest.raises(NotReduced, match="no problem"):
        reproduce(kv)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("sink_failure", "sink_failure is not about the events of a stream"),
        ("not_flushed", "not_flushed is not about the events of a stream"),
    ],
)
def test_rules_that_concern_no_stream_cannot_be_reproduced(rule, why):
    with pytest.raises(NotReduced, match=f"^{why}$"):
        reproduce(RouterHarness(), Problem(rule, 0, 0, "", ""))


def test_drift_of_a_users_own_manager_cannot_be_replayed():
    kv = RouterHarness()
    sink = kv.make_sink()
    sink.compare(lambda: {7})
    sink(Stored(None, (1,), (1,)))
    kv.judge()

    with pytest.raises(NotReduced, match=r"^what an engine holds cannot be replayed from its events$"):
        reproduce(kv)


def test_moves_on_a_bare_manager_cannot_be_replayed(faulty_backends):
    kv = RouterHarness(EngineProfile(num_blocks=4), "forgets_a_removed")
    manager = kv.worker(0).manager
    manager.use([1, 2, 3])
    manager.deref(3, 2, 1)
    manager.use([4, 5, 6, 7])
    kv.judge()

    with pytest.raises(NotReduced, match="moves on a bare manager cannot be replayed"):
        reproduce(kv, level="requests")


def test_a_search_that_runs_out_of_budget_reports_the_limit():
    with pytest.raises(NotReduced, match=r"^no part of the events broke the rule again before the limit was reached$"):
        reproduce(sunk(a_parent_that_is_gone), work=1)


def test_a_search_that_ends_early_is_not_complete():
    found = [reproduce(sunk(a_parent_that_is_gone), work=work).complete for work in (60, 10_000)]

    assert found == [False, True]


def test_reproduce_refuses_an_unknown_level_and_an_unknown_rule():
    kv = RouterHarness()
    with pytest.raises(ValueError, match="unknown level 'blocks'; known: events, requests"):
        reproduce(kv, level="blocks")
    with pytest.raises(ValueError, match="unknown rule 'no_rule'; known: "):
        reproduce(kv, allow=["no_rule"])


def test_recording_stops_at_its_limit(monkeypatch):
    monkeypatch.setattr("pytest_kvmock.harness.recording.MOST", 3)
    kv = RouterHarness()
    kv.apply([Stored(None, (n,), (n,)) for n in range(1, 6)])
    for _ in range(5):
        kv.worker(0).clear()

    assert (len(kv.recording.arrivals), len(kv.recording.operations)) == (3, 3)
    assert MOST > 100_000


def test_operations_are_recorded_as_the_test_called_them():
    kv = RouterHarness(EngineProfile(block_size=4))
    with kv.worker(0).prefill([1, 2, 3, 4, 5]) as request:
        request.decode(2)
        request.preempt()
        request.resume()
    kv.worker(0).clear()
    kv.drop_next(2, kind="removed")

    assert [
        RecordedOperation(Prefill(1, tail=(1, 2, 3, 4, 5)), 0),
        RecordedOperation(Decode(1, 2, of=None), 1),
        RecordedOperation(Preempt(1), 1),
        RecordedOperation(Resume(1), 1),
        RecordedOperation(Finish(1), 1),
        RecordedOperation(Clear(), 1),
        RecordedOperation(DropNext(2, of="removed"), 2),
    ] == [*kv.recording.recorded()]


def test_reproduce_raises_when_no_event_arrived():
    kv = RouterHarness(EngineProfile(), "lineage")
    kv.faults.late_join()
    kv.worker(0).serve(range(64))
    kv.judge()
    with pytest.raises(NotReduced, match=r"^no event arrived; "):
        reproduce(kv)


# ------------------------------------------------------------------------------------- engines with the ids of sinks


def test_an_engine_with_the_id_of_a_sink_stays_an_engine_when_a_gap_is_replayed(failure_of):
    kv = RouterHarness()
    kv.worker(70_000)
    kv.apply(KvCacheEvent(3, Stored(None, (1,), (1,))), worker_id=70_000)
    kv.judge()
    found = reproduce(kv)

    assert found.rule == "event_id_gap"
    assert found.sinks == ()
    assert "event_id_gap" in failure_of(found).splitlines()[0]


def test_an_engine_with_the_id_of_a_sink_stays_an_engine_when_over_capacity_is_replayed(failure_of):
    kv = RouterHarness(EngineProfile(num_blocks=2))
    kv.worker(70_000)
    kv.apply([Stored(None, (block,), (block,)) for block in range(1, 5)], worker_id=70_000)
    kv.judge()
    found = reproduce(kv)

    assert found.rule == "over_capacity"
    assert found.sinks == ()
    assert "over_capacity" in failure_of(found).splitlines()[0]
