"""A check of a capture finds the same problems as the test that was captured."""

import json

import pytest
from captured import NOT_OF_THE_STREAM, PROFILE, Captured, shown
from depth import few
from hybrid_sizes import sized
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import (
    BACKENDS,
    Cleared,
    EngineProfile,
    KvCacheEvent,
    RadixIndex,
    Removed,
    RouterEvent,
    RouterHarness,
    StorageTier,
    Stored,
)
from pytest_kvmock.harness import Recovery
from pytest_kvmock.oracle import WorkerQuery
from pytest_kvmock.oracle.faults.kinds import FAULTS
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.servers import CaptureFile, CapturingJournal, check_file
from pytest_kvmock.wire import find_dialect
from pytest_kvmock.wire.sockets.wire_faults import Numbered, WireFaults, WireInjection

RANDOM = [name for name, kind in FAULTS.items() if kind.has_rate]
OWN_WARNINGS = {
    "multi_lru": {"wrong_hash", "evicted_and_restored", "duplicate_store"},
    "hash_cache": {"wrong_hash", "evicted_and_restored", "duplicate_store"},
    "lru": {"evicted_and_restored", "duplicate_store"},
    "lineage": {"evicted_and_restored", "duplicate_store"},
}


@pytest.fixture
def captured(tmp_path):
    return lambda *args, **given: Captured(tmp_path / "capture.jsonl", *args, **given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_capture_of_each_backend_has_no_error(captured, backend):
    world = captured(backend, sized(PROFILE, backend))
    world.serve(60)

    found = world.found()
    checked = check_file(world.path)

    assert found == world.again()
    assert checked.errors == []
    assert {problem.rule for problem in checked.warnings} <= OWN_WARNINGS.get(backend, set())
    assert checked.is_clean


@pytest.mark.parametrize("backend", few(["lineage", "multi_lru", "vllm", "sglang"], 2))
@pytest.mark.parametrize("fault", RANDOM)
def test_injected_faults_are_found_again_in_a_capture(captured, backend, fault):
    world = captured(backend, faults={fault: 0.1})
    world.serve(40, seed=3)

    found = world.found()

    assert found
    assert found == world.again()
    checked = check_file(world.path)
    assert checked.errors == []
    assert checked.is_clean
    assert checked.injected != []
    assert {fault} == {injection.kind for injection in checked.faults}


@given(
    seed=st.integers(0, 2**32),
    backend=st.sampled_from(["lineage", "hash_cache", "vllm_0_19", "sglang", "mocker_sglang_1_6"]),
    rates=st.dictionaries(st.sampled_from(RANDOM), st.sampled_from([0.02, 0.1, 0.3]), max_size=3),
)
def test_any_random_faults_are_found_again_in_a_capture(tmp_path_factory, seed, backend, rates):
    world = Captured(
        tmp_path_factory.mktemp("capture") / "a.jsonl", backend, EngineProfile(4, 16, workers=2), faults=rates
    )
    world.serve(25, seed=seed)

    assert world.found() == world.again()
    assert check_file(world.path).errors == []


# ---------------------------------------------------------------------------------------------------- by hand

ROOT = Stored(None, (1, 2), (11, 12))


def hand_made(world):
    kv = world.kv
    kv.apply([ROOT, Stored(9, (3,), (13,)), Removed((7, 1)), Stored(2, (2,), (12,))])


def wrong_tokens(world):
    sink = world.kv.make_sink(num_blocks=1)
    sink.publish(ROOT, token_ids=[[1, 2, 3, 4], [5]])
    sink.publish(Stored(2, (3,), (13,)))  # over its capacity


def chain_found_late(world):
    sink, kv = world.kv.make_sink(), world.kv
    for seed in (1, 2):
        hashes = kv.prompt(3).sequence_hashes(4)
        locals_ = kv.prompt(3).block_hashes(4)
        sink.publish(Stored(None, tuple(hashes), tuple(locals_)))
        prompt = kv.prompt(3)
        sink.publish(Stored(None, tuple(prompt.sequence_hashes(4)), tuple(prompt.block_hashes(4))))
        sink.publish(Stored(seed, tuple(prompt.sequence_hashes(4)[1:]), tuple(prompt.block_hashes(4)[1:])))


def restarts(world):
    kv = world.kv
    kv.inside.use_backend("vllm")
    world.serve(5)
    kv.worker(0).restart(announced=True)
    world.serve(5, seed=1)
    kv.worker(1).restart()
    world.serve(5, seed=2)
    kv.remove_worker(0)
    kv.apply([Removed((5,)), Stored(None, (6,), (16,))])
    kv.remove_worker((0, 0))
    kv.apply(Stored(None, (7,), (17,)))


def batches_lost(world):
    sink = world.kv.make_sink()
    sink(ROOT)
    sink.lost_batches(sink.worker_id, 0, range(4, 7))
    sink(Removed((8,)))
    sink.lost_batches(sink.worker_id, 0, range(9, 9), "numbers went backwards")


class Raises:
    def __init__(self, *at):
        self.at, self.count = at, 0

    def publish(self, event, tier, tokens):
        self.count += 1
        if self.count in self.at:
            raise OSError("the disk is full")


def sink_raises(world):
    world.kv.inside.use_backend("lineage")
    world.kv.add_sink(Raises(3, 4), before=True)
    world.serve(12)


def lost_at_the_end(world):
    world.kv.inside.use_backend("lineage")
    world.serve(3)
    world.kv.faults.lose(1)
    world.kv.worker(0).serve(world.kv.prompt(2))


def ids_left_out(world):
    sink = world.kv.make_sink()
    for event_id in (3, 4, 9, 9, 2):
        sink(KvCacheEvent(event_id, Stored(None, (event_id,), (11,))))


def tiers_and_groups(world):
    sink = world.kv.make_sink(residency="counted", tier_blocks={"host_pinned": 1})
    sink.publish(ROOT, extra={"group_idx": 1, "lora_name": "sql"})
    sink.publish(ROOT, StorageTier.HOST_PINNED)
    sink.publish(Stored(2, (3,), (13,)), StorageTier.HOST_PINNED)
    sink.publish(Removed((2, 2)), extra={"group_idx": 1})
    sink.publish(Cleared())


BY_HAND = [
    hand_made,
    wrong_tokens,
    chain_found_late,
    restarts,
    batches_lost,
    sink_raises,
    lost_at_the_end,
    ids_left_out,
    tiers_and_groups,
]


@pytest.mark.parametrize("what", BY_HAND, ids=lambda what: what.__name__)
def test_problems_of_hand_made_streams_are_found_again_in_a_capture(captured, what):
    world = captured()
    what(world)

    found = world.found()

    assert found
    assert found == world.again()


LOSES_ONE = "event_id_gap"


def loses_one_beside_a_real_problem(kv):
    kv.faults.lose(1)
    kv.worker(0).serve(kv.prompt(2))
    kv.worker(0).serve(kv.prompt(2))  # reveals the gap
    kv.apply(Removed((7,)), worker_id=1)


def a_real_problem_of_the_same_stream(kv):
    loses_one_beside_a_real_problem(kv)
    kv.apply(Stored(99, (5,), (15,)))  # also wrong in the published stream, although the stream is out of sync


def a_restart_and_another_block_size(kv):
    kv.worker(0).serve(kv.prompt(2))
    kv.faults.restart(0)
    kv.worker(0).serve(kv.prompt(2))
    kv.faults.block_size(8).serve(kv.prompt(4))


@pytest.mark.parametrize(
    ("what", "real", "injected"),
    [
        (loses_one_beside_a_real_problem, ["block_not_found"], {LOSES_ONE}),
        (a_real_problem_of_the_same_stream, ["block_not_found", "parent_block_not_found"], {LOSES_ONE}),
        (a_restart_and_another_block_size, [], {LOSES_ONE, "sparse_tokens"}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_real_problems_and_injected_ones_are_distinguished_in_a_capture(captured, what, real, injected):
    world = captured("lineage")
    what(world.kv)
    found = world.found()

    checked = check_file(world.path)

    assert found == world.again()
    assert real == [problem.rule for problem in checked.errors]
    assert injected == {problem.rule for problem in checked.injected}
    assert (real == []) is checked.is_clean
    counted = check_file(world.path, counts_injected=True)
    assert sorted([*real, *injected]) == sorted({problem.rule for problem in counted.errors})


def test_a_capture_without_recorded_faults_is_readable(captured):
    world = captured("lineage")
    loses_one_beside_a_real_problem(world.kv)
    world.found()
    lines = [
        line
        for line in world.path.read_text().splitlines(keepends=True)
        if '"injected"' not in line[:12] and '"result"' not in line[:12]
    ]
    world.path.write_text("".join(lines))

    assert [problem.rule for problem in check_file(world.path).errors] == [LOSES_ONE, "block_not_found"]


@pytest.mark.parametrize(
    ("lost", "injections", "real"),
    [
        (range(4, 6), [("lose", 4), ("corrupt", 5)], 0),
        (range(4, 7), [("lose", 4), ("corrupt", 5)], 1),
        (range(4, 5), [("double", 4)], 1),
        (range(4, 9), [("lose", 4), ("truncate_replay", 5)], 0),
        (range(4, 9), [("truncate_replay", 5)], 1),
        (range(9, 9), [("restart", 0)], 0),
        (range(9, 9), [("lose", 9)], 1),
    ],
    ids=str,
)
def test_batches_lost_by_an_injected_wire_fault_are_not_reported(captured, lost, injections, real):
    world = captured()
    sink = world.kv.make_sink()
    publisher = WireStandIn(ranks=2)
    world.journal.publishes(0, publisher)
    sink(ROOT)
    if ("restart", 0) in injections:
        publisher.faults.begun_anew(0)
    sink.lost_batches(sink.worker_id, 0, lost)
    sink(Removed((8,)))  # a consequence of the loss
    restarts = publisher.faults.restarts(0)
    publisher.faults.injected += [WireInjection(fault, 1, batch) for fault, batch in injections if fault != "restart"]
    publisher.faults.injected += [WireInjection(fault, 0, batch, restarts) for fault, batch in injections]
    world.journal.injected_on_wire()
    world.found()

    checked = check_file(world.path)

    assert [LOSES_ONE] * real == [problem.rule for problem in checked.errors]
    assert [LOSES_ONE] * (1 - real) == [problem.rule for problem in checked.injected]


class WireStandIn:
    """A publisher as a capture sees it, without sockets: each of its ranks has published."""

    def __init__(self, *endpoints, ranks=1):
        self.ranks = ranks
        self.endpoints = endpoints or tuple(f"inproc://{id(self)}_{rank}" for rank in range(ranks))
        self.faults = WireFaults(find_dialect("vllm-0.33"), self.begin_anew, int)

    def begin_anew(self, dp_rank=None):
        for rank in range(self.ranks) if dp_rank is None else [dp_rank]:
            self.faults.begun_anew(rank)

    def batches(self, dp_rank=0):
        return 9

    def lose(self, batch, dp_rank=0):
        self.faults.lose(dp_rank=dp_rank)
        self.faults.strike(dp_rank, Numbered(batch, b""))


FIRST, SECOND, RESTART = range(1, 2), range(2, 3), range(3, 3)


def again_after_a_restart(kv, a, b):
    a.lose(1)
    kv.inside.lost_batches(77, 0, FIRST)
    a.faults.restart()
    kv.inside.lost_batches(77, 0, RESTART)
    kv.inside.lost_batches(77, 0, FIRST)


def on_purpose_before_and_after(kv, a, b):
    again_after_a_restart(kv, a, b)
    a.lose(1)


def after_a_restart_of_the_worker(kv, a, b):
    a.lose(1)
    a.begin_anew()  # not a fault
    kv.inside.lost_batches(77, 0, FIRST)
    kv.inside.lost_batches(77, 0, RESTART)
    kv.inside.lost_batches(77, 0, FIRST)


def after_a_restart_that_was_noticed_late(kv, a, b):
    a.lose(1)
    a.begin_anew()
    a.begin_anew()
    kv.inside.lost_batches(77, 0, FIRST)
    kv.inside.lost_batches(77, 0, RESTART)
    kv.inside.lost_batches(77, 0, RESTART)


def after_a_restart_that_was_not_noticed(kv, a, b):
    a.lose(1)
    a.begin_anew()
    kv.inside.lost_batches(77, 0, FIRST)


def twice(kv, a, b):
    a.lose(1)
    kv.inside.lost_batches(77, 0, FIRST)
    kv.inside.lost_batches(77, 0, FIRST)


def of_two_consumers(kv, a, b):
    a.lose(1)
    kv.inside.lost_batches(77, 0, FIRST)
    kv.inside.lost_batches(78, 0, FIRST)


def of_a_later_publisher(kv, a, b):
    a.lose(1)
    kv._judge.ledger.journal.publishes(1, b)
    kv.inside.losses_at(b.endpoints)(77, 0, FIRST, "")
    kv.inside.losses_at(a.endpoints)(77, 0, FIRST, "")


def of_a_publisher_that_is_not_known(kv, a, b):
    a.lose(1)
    kv.inside.losses_at(b.endpoints)(77, 0, FIRST, "")


def of_either_of_two(kv, a, b):
    a.lose(1)
    kv._judge.ledger.journal.publishes(1, b)
    kv.inside.lost_batches(77, 0, FIRST)
    kv.inside.lost_batches(0, 0, FIRST)  # the first publisher publishes for it
    kv.inside.lost_batches(1, 0, FIRST)


def of_another_rank(kv, a, b):
    a.lose(1)
    kv._judge.ledger.journal.publishes(1, b)
    b.lose(2, dp_rank=1)
    kv.inside.losses_at(b.endpoints[1:])(77, 0, SECOND, "")
    kv.inside.losses_at(b.endpoints[:1])(78, 0, SECOND, "")


def of_one_that_subscribed_after_a_restart(kv, a, b):
    a.lose(1)
    a.begin_anew()
    a.lose(2)
    lose = kv.inside.losses_at(a.endpoints)
    lose(77, 0, FIRST, "")
    lose(77, 0, SECOND, "")


def of_one_that_had_a_restart_nobody_else_had(kv, a, b):
    a.lose(1)
    kv.inside.lost_batches(77, 0, RESTART)
    kv.inside.lost_batches(77, 0, FIRST)


def of_each_rank_that_restarts(kv, a, b):
    kv._judge.ledger.journal.publishes(1, b)
    b.faults.restart()
    for rank in (0, 1):
        kv.inside.lost_batches(1, rank, RESTART)
        kv.inside.lost_batches(2 + rank, rank, FIRST)


def of_more_restarts_than_there_were(kv, a, b):
    a.faults.restart()
    kv.inside.lost_batches(77, 0, RESTART)
    kv.inside.lost_batches(77, 0, RESTART)


@pytest.mark.parametrize(
    ("what", "excused"),
    [
        (again_after_a_restart, [True, True, False]),
        (on_purpose_before_and_after, [True, True, True]),
        (after_a_restart_of_the_worker, [True, False, False]),
        (after_a_restart_that_was_noticed_late, [True, False, False]),
        (after_a_restart_that_was_not_noticed, [False]),
        (twice, [True, False]),
        (of_two_consumers, [True, True]),
        (of_a_later_publisher, [False, True]),
        (of_a_publisher_that_is_not_known, [False]),
        (of_either_of_two, [False, True, False]),
        (of_another_rank, [True, False]),
        (of_one_that_subscribed_after_a_restart, [False, True]),
        (of_one_that_had_a_restart_nobody_else_had, [False, False]),
        (of_each_rank_that_restarts, [True, False, True, False]),
        (of_more_restarts_than_there_were, [False, False]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_wire_fault_excuses_only_the_batch_that_it_lost(captured, what, excused):
    world = captured()
    publisher = WireStandIn()
    world.journal.publishes(0, publisher)
    what(world.kv, publisher, WireStandIn(ranks=2))
    world.journal.injected_on_wire()
    world.found()

    checked = check_file(world.path)

    assert excused == [problem.fault is not None for problem in checked.log.problems if problem.rule == LOSES_ONE]
    assert all(excused) is checked.is_clean


def test_a_lost_batch_without_a_sender_in_the_capture_is_real(captured):
    world = captured()
    publisher = WireStandIn()
    world.journal.publishes(0, publisher)
    twice(world.kv, publisher, None)
    world.journal.injected_on_wire()
    world.found()
    lines = [json.loads(line) for line in world.path.read_text().splitlines()]
    for line in lines:
        line.get("lost", {}).pop("sent_by", None)
    world.path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert not check_file(world.path).is_clean


def test_a_signed_hash_stays_signed_in_a_capture(captured):
    world = captured("sglang")
    world.serve(20)
    world.found()

    events = [entry.event for entry in check_file(world.path).log]

    assert any(block < 0 for event in events for block in getattr(event.event.data, "block_hashes", ()))
    assert [entry.event for entry in world.kv.events] == events


def test_extra_data_of_an_event_survives_a_capture(captured):
    world = captured("vllm")
    kv = world.kv
    keys = {"lora_name": "sql", "cache_salt": "s", "session_id": "x", "multimodal": [("image", 1, 6)]}
    kv.worker(0).serve(kv.prompt(3, **keys))
    world.found()

    (entry,) = check_file(world.path).log
    (before,) = kv.events

    assert before.extra == entry.extra
    assert [list(tokens) for tokens in before.token_ids] == entry.token_ids
    assert entry.problems == ()


def test_digests_survive_a_capture(tmp_path):
    event = RouterEvent(0, KvCacheEvent(0, ROOT), extra={"digests": (None, (b"\1" * 32, b"\2" * 32))})
    with CaptureFile(tmp_path / "a.jsonl", {}) as file:
        Ledger(CapturingJournal(file)).take(event)

    (entry,) = check_file(tmp_path / "a.jsonl").log

    assert event.extra == entry.extra


def test_problems_around_a_recovery_are_found_again_in_a_capture(tmp_path):
    file = CaptureFile(tmp_path / "a.jsonl", {})
    journal = CapturingJournal(file)
    recovery = Recovery()
    kv = RouterHarness(EngineProfile(4, 24), "lineage", RadixIndex(), recovery=recovery, journal=journal)
    for step in range(8):
        if step in (2, 5):
            kv.faults.lose(1)
        kv.worker(0).serve(kv.prompt(3))
        if step == 6:
            recovery(*WorkerQuery(0, 0))
    kv.apply(Removed((5,)))
    kv.flush()
    file.close()

    stream = [shown(problem) for problem in kv.events.problems if problem.rule not in NOT_OF_THE_STREAM]
    assert "recovered" in (tmp_path / "a.jsonl").read_text()
    assert stream == [shown(problem) for problem in check_file(tmp_path / "a.jsonl").log.problems]


def test_a_recovery_after_ids_went_backwards_is_found_again_in_a_capture(tmp_path):
    recovery = Recovery()
    with CaptureFile(tmp_path / "a.jsonl", {}) as file:
        kv = RouterHarness(EngineProfile(4, 24), "lineage", recovery=recovery, journal=CapturingJournal(file))
        steps = (0, Stored(None, (1, 2), (11, 12))), (1, Removed((2,))), (0, Stored(1, (3,), (13,)))
        kv.apply([RouterEvent(7, KvCacheEvent(*step)) for step in steps])
        recovery(7, 0)
        kv.apply(RouterEvent(7, KvCacheEvent(1, Removed((2,)))))
        kv.flush()

    problems = kv.events.problems
    assert problems[-1].observed == "block 2 was removed by event 1 (before ids went backwards)"
    assert list(map(shown, problems)) == [shown(problem) for problem in check_file(tmp_path / "a.jsonl").log.problems]


def test_a_recovery_of_cache_groups_after_ids_went_backwards_is_found_again_in_a_capture(tmp_path):
    def event(event_id, data, group):
        return RouterEvent(7, KvCacheEvent(event_id, data), extra={"group_idx": group} if group else None)

    recovery = Recovery()
    with CaptureFile(tmp_path / "a.jsonl", {}) as file:
        kv = RouterHarness(EngineProfile(4, 24), "lineage", recovery=recovery, journal=CapturingJournal(file))
        kv.apply(event(0, Stored(None, (1, 2), (11, 12)), 0))
        kv.apply(event(1, Stored(None, (1, 2), (11, 12)), 1))
        kv.apply(event(2, Removed((2,)), 1))
        kv.apply(event(0, Stored(1, (3,), (13,)), 0))
        kv.apply(event(1, Stored(1, (3,), (13,)), 2))
        recovery(7, 0)
        kv.apply(event(2, Removed((2,)), 1))
        kv.flush()

    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    (answer,) = (line["recovered"]["events"] for line in lines if "recovered" in line)
    assert [each["event"]["event"]["event_id"] for each in answer] == [0, 1, 2, 0, 1]
    problems = list(map(shown, kv.events.problems))
    assert problems == [shown(problem) for problem in check_file(tmp_path / "a.jsonl").log.problems]


def test_a_check_does_not_know_a_backend_that_a_test_defined(captured):
    from pytest_kvmock import BACKENDS as BUILT_IN

    world = captured(BUILT_IN["vllm"].variant("mine", hash_seed="7"))
    world.serve(10)
    world.found()

    checked = check_file(world.path)

    assert checked.notes == ["backend 'mine' is not known here, so its hashes are not judged"]
    assert checked.is_clean


def test_the_book_of_a_fault_writes_nothing_into_a_capture(captured):
    world = captured("lineage")
    world.serve(5)
    before = world.file.events
    world.kv.faults.at_random({"lose": 0})
    world.kv._judge.book.ledger.take(RouterEvent(0, KvCacheEvent(0, ROOT)))

    assert before == world.file.events
    world.file.close()
