"""A user's index in a harness: each kind of index, and each way to be wrong."""

import asyncio

import pytest
from faulty_indexes import (
    Answers,
    Async,
    AsyncManageable,
    ByTokens,
    ByWorker,
    ForgetsOneRemoved,
    IgnoresCleared,
    Manageable,
    MatchesByContentAlone,
    Queued,
    RaisesOnce,
    RaisesWhenAsked,
    RemovesFromTheWrongWorker,
    ScoresObject,
    Sound,
    WithZeros,
)

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
    Stored,
    replay,
)
from pytest_kvmock.fleets import TraceRequest
from pytest_kvmock.oracle import OverlapScores

BY_RANK = (Sound, ScoresObject, WithZeros, ByTokens, Manageable, Queued)


def busy(kv, rounds=12, workers=(0, 1)):
    """Serve prompts that fill the workers and make them evict."""
    for _ in range(rounds):
        for worker in workers:
            kv.worker(worker).serve(kv.prompt(3, tail=1), output_tokens=5)


def chain(kv, *numbers, worker=0):
    """Store a chain of blocks by hand."""
    kv.apply(Stored(None, numbers, numbers), worker_id=worker)


def shown(kv):
    return {rule for problem in kv.events.problems for rule in [problem.rule]}


# -------------------------------------------------------------------------------------------------- sound ones


@pytest.mark.parametrize("kind", [*BY_RANK, ByWorker])
@pytest.mark.parametrize("sync", ["every", "auto", "burst", "end"])
def test_a_right_index_of_each_kind_passes(make_kv, kind, sync):
    with make_kv(index=kind(), sync=sync, workers=2) as kv:
        busy(kv)
        kv.worker(0).clear()
        kv.worker(0).serve(kv.prompt(2))
        kv.assert_in_sync()
    assert kv.events.problems == []


@pytest.mark.parametrize("kind", [*BY_RANK, ByWorker])
def test_the_index_under_test_answers_overlaps(make_kv, kind):
    index = kind()
    kv = make_kv(index=index, workers=2)
    asked = kv.prompt(3)
    kv.worker(1).serve(asked)
    assert kv.overlap(asked) == {1: 3}
    assert kv.overlap(kv.prompt(1)) == {}
    assert index is kv.index
    assert kv.inside.reference is not index


def test_without_an_index_under_test_the_reference_answers(make_kv):
    kv = make_kv()
    assert kv.index is kv.inside.reference


@pytest.mark.parametrize("kind", [Sound, ByTokens])
def test_an_index_by_rank_distinguishes_ranks(make_kv, kind):
    with make_kv(index=kind(), dp_size=2) as kv:
        asked = kv.prompt(3)
        kv.worker(0, dp_rank=0).serve(asked.tokens[:4])
        kv.worker(0, dp_rank=1).serve(asked)
        assert kv.overlap(asked) == {(0, 0): 1, (0, 1): 3}


def test_an_answer_by_worker_is_the_maximum_over_its_ranks(make_kv):
    with make_kv(index=ByWorker(), dp_size=2) as kv:
        asked = kv.prompt(3)
        kv.worker(0, dp_rank=0).serve(asked.tokens[:4])
        kv.worker(0, dp_rank=1).serve(asked)
        assert kv.overlap(asked) == {0: 3}


def test_overlap_of_hashes_queries_the_index_too(make_kv):
    kv = make_kv(index=Sound())
    chain(kv, 1, 2)
    assert kv.overlap(Prompt(hashes=[1, 2, 3])) == {0: 2}


def test_an_index_of_tokens_cannot_be_queried_with_hashes(make_kv):
    kv = make_kv(index=ByTokens())
    with pytest.raises(ValueError, match=r"takes tokens \(match_tokens\), and this prompt has only hashes"):
        kv.overlap(Prompt(hashes=[1]))


def test_an_index_of_tokens_cannot_be_compared_on_events_without_tokens(make_kv):
    kv = make_kv(index=ByTokens())
    chain(kv, 1, 2)
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.observed) == ("index_failure", f"match_tokens raised ValueError: {WITHOUT_TOKENS}")


WITHOUT_TOKENS = (
    "the index under test takes tokens (match_tokens), and a Stored of these blocks had no token_ids for each: give "
    "them with the event, sink.publish(event, token_ids=[...]), a list of tokens a block, or give the index a "
    "find_matches(local_hashes)"
)


class ReadsTokens(ByTokens):
    def apply(self, event):
        if isinstance(event.event.data, Stored):
            for _, tokens in zip(event.event.data.block_hashes, event.token_ids, strict=True):
                assert len(tokens) == 4
        super().apply(event)


@pytest.mark.parametrize(
    ("token_ids", "raised"),
    [
        (None, "TypeError: 'NoneType' object is not iterable"),
        ([[1, 2, 3, 4]], "ValueError: zip() argument 2 is shorter than argument 1"),
    ],
    ids=["none", "too few"],
)
def test_an_index_of_tokens_that_raises_without_them_gets_advice_on_token_ids(make_kv, token_ids, raised):
    kv = make_kv(None, index=ReadsTokens())
    sink = kv.make_sink()
    sink.publish(Stored(None, (1, 2), (1, 2)), token_ids=token_ids)
    (error,) = kv.judge().errors
    problem = next(each for each in (error, *error.consequences()) if each.rule == "index_failure")
    assert problem.observed.startswith(f"apply raised {raised}")
    assert problem.observed.endswith(
        "; the event had no token_ids for each block: sink.publish(event, token_ids=[...]), a list of tokens a block"
    )


@pytest.mark.parametrize("index", [Sound, ByTokens], ids=["by hashes", "by tokens"])
def test_an_index_that_raises_for_another_reason_gets_no_advice_on_tokens(make_kv, index):
    class Raises(index):
        def apply(self, event):
            raise OSError("none")

    kv = make_kv(None, index=Raises())
    tokens = None if index is Sound else [[1, 2, 3, 4]]
    kv.make_sink().publish(Stored(None, (1,), (1,)), token_ids=tokens)
    (problem,) = kv.judge().errors
    assert problem.rule == "index_failure"
    assert "token_ids" not in problem.observed


ONLY_HASHES = (
    "the index under test takes tokens (match_tokens), and this prompt has only hashes; give a prompt of tokens "
    "(of a trace: request.prompt(tokens=True), @pytest.mark.kvmock(trace_tokens=True) or --kv-trace-tokens), or "
    "give the index a find_matches(local_hashes)"
)


@pytest.mark.parametrize("backend", ["lineage", "hash_cache", "vllm", "sglang"])
def test_a_prompt_without_tokens_is_refused_for_an_index_of_tokens_before_any_event(make_kv, backend):
    kv = make_kv(backend, index=ByTokens())
    prompt = TraceRequest(0.0, 10, 1, (7, 8, 9)).prompt(4)
    engine, worker = kv.engine(0), kv.worker(None)
    begun = kv.events.total  # sglang publishes a Cleared at its start
    for serve in (worker.serve, worker.prefill, lambda prompt: engine.submit(prompt, 1)):
        with pytest.raises(ValueError) as refused:
            serve(prompt)
        assert str(refused.value) == ONLY_HASHES
    with pytest.raises(ValueError) as refused:
        replay([TraceRequest(0.0, 10, 1, (7, 8, 9))], [engine])
    assert str(refused.value) == ONLY_HASHES
    assert ([], begun) == (worker.requests, kv.events.total)
    assert kv.judge().errors == []


@pytest.mark.parametrize("backend", ["lineage", "vllm", "sglang"])
def test_an_index_of_tokens_follows_a_trace_with_tokens(make_kv, backend):
    kv = make_kv(backend, index=ByTokens())
    for ids in ((7, 8, 9), (7, 8, 10)):
        prompt = TraceRequest(0.0, 12, 1, ids).prompt(4, tokens=True)
        kv.worker(0).serve(prompt)
        assert kv.overlap(prompt) == {0: 3}
    assert kv.events.total
    assert kv.judge().errors == []


def test_a_worker_that_publishes_nothing_may_serve_hashes_over_an_index_of_tokens(make_kv):
    kv = make_kv(index=ByTokens(), prefix_caching=False)
    assert kv.worker(0).serve(Prompt(hashes=[1, 2])).cached_tokens == 0
    assert kv.judge().errors == []


# -------------------------------------------------------------------------------------- flush, dump_events, remove


def test_flush_is_called_before_an_index_is_queried(make_kv):
    index = Queued()
    kv = make_kv(index=index, sync="end")
    chain(kv, 1, 2)
    assert len(index.queue) == 1
    assert kv.overlap(Prompt(hashes=[1, 2])) == {0: 2}
    assert index.queue == []


def test_an_index_that_never_applies_its_queue_drifts(make_kv, rules_of):
    class Lazy(Queued):
        def flush(self):
            pass

    kv = make_kv(index=Lazy())
    chain(kv, 1)
    assert rules_of(kv.judge().errors) == ["index_drift"]


@pytest.mark.parametrize("as_generator", [False, True])
def test_an_index_that_is_not_empty_is_refused(make_kv, as_generator):
    class Used(Manageable):
        def dump_events(self):
            events = super().dump_events()
            return (event for event in events) if as_generator else events

    index = Used()
    make_kv(index=index)
    index.apply(RouterEvent(0, KvCacheEvent(0, Stored(None, (1,), (1,)))))
    with pytest.raises(ValueError, match=r"\(Used\) is not empty at the start: dump_events\(\) has 1 event; each"):
        make_kv(index=index)


def test_an_index_that_is_not_empty_and_cannot_be_dumped_is_found_at_the_first_drift(make_kv):
    index = Sound()
    for worker in (0, 1):
        index.apply(RouterEvent(worker, KvCacheEvent(0, Stored(None, (1, 2), (1, 2)))))
    kv = make_kv(index=index)
    chain(kv, 1)
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.worker_id, problem.blocks, problem.event_id) == ("index_drift", 1, (1,), 0)
    assert "it never stored it, worker 0 did; was the index empty at the start?" in problem.observed


def test_a_removed_worker_is_removed_from_the_index(make_kv):
    index = Manageable()
    with make_kv(index=index, workers=2) as kv:
        asked = kv.prompt(2)
        for worker in (0, 1):
            kv.worker(worker).serve(asked)
        kv.remove_worker(0)
        assert index.removals == [0]
        assert kv.overlap(asked) == {1: 2}


def test_an_announced_restart_removes_the_worker_from_the_index(make_kv):
    index = Manageable()
    with make_kv(index=index, dp_size=2) as kv:
        asked = kv.prompt(2)
        for worker in kv.workers.values():
            worker.serve(asked)
        kv.worker(0, dp_rank=1).restart(announced=True)
        assert index.removals == [(0, 1)]
        assert kv.overlap(asked) == {(0, 0): 2}
        kv.worker(0, dp_rank=1).serve(asked)


def test_removing_a_worker_from_an_index_without_remove_worker_is_refused(make_kv):
    kv = make_kv(index=Sound(), workers=2)
    asked = kv.prompt(2)
    kv.worker(0).serve(asked)
    request = kv.worker(0).prefill(asked)
    with pytest.raises(ValueError, match=r"\(Sound\) cannot remove worker 0: it has no remove_worker"):
        kv.remove_worker(0)
    with pytest.raises(ValueError, match="cannot remove worker 0"):
        kv.worker(0).restart(announced=True)
    assert request.status == "running"
    assert kv.overlap(asked) == {0: 2}
    assert list(kv.workers) == [0, 1]
    kv.assert_in_sync()


def test_an_index_that_raises_at_a_removal_leaves_everything_unchanged(make_kv):
    class Stubborn(Manageable):
        def remove_worker(self, worker_id):
            raise OSError("no")

    kv = make_kv(index=Stubborn())
    asked = kv.prompt(2)
    kv.worker(0).serve(asked)
    manager = kv.worker(0).manager
    for call in (lambda: kv.remove_worker(0), lambda: kv.worker(0).restart(announced=True)):
        with pytest.raises(OSError, match="no"):
            call()
    assert manager is kv.worker(0).manager
    assert kv.overlap(asked) == {0: 2}
    kv.assert_in_sync()


# --------------------------------------------------------------------------------------------------- bad indexes


class NoApply:
    def find_matches(self, hashes):
        return {}


class NoQuestion:
    def apply(self, event):
        pass


class NotCallable(Sound):
    apply = 7


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (NoApply(), r"\(NoApply\) has no apply\(event\), which takes a RouterEvent"),
        (NotCallable(), r"\(NotCallable\) has no apply\(event\)"),
        (
            NoQuestion(),
            r"\(NoQuestion\) has none of find_matches\(local_hashes\), match_tokens\(tokens\), find_tiered",
        ),
        (Sound, "is a class, Sound; it must be an object, Sound"),
        (object(), r"\(object\) has no apply"),
    ],
    ids=range(5),
)
def test_an_index_that_lacks_a_method_is_refused(make_kv, index, message):
    with pytest.raises(TypeError, match=message):
        make_kv(index=index)


@pytest.mark.parametrize(
    "answer", [None, 3, [0, 1], "no", {"0": 1}, {0: "1"}, {0: 1.0}, {0: 1, (1, 0): 1}, {(0,): 1}, OverlapScores(None)]
)
def test_an_unreadable_answer_is_one_problem_that_quotes_it(make_kv, answer):
    kv = make_kv(index=Answers(answer))
    chain(kv, 1, 2)
    with pytest.raises(ValueError, match=r"Answers returned .*; expected .*worker_id or"):
        kv.overlap(Prompt(hashes=[1]))
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.worker_id, problem.event_id) == ("index_failure", 0, 0)
    assert "Answers returned" in problem.observed


def test_an_index_that_always_raises_at_lookups_is_one_problem_per_worker(make_kv, rules_of):
    kv = make_kv(index=RaisesWhenAsked(), workers=2)
    busy(kv)
    errors = kv.judge().errors
    assert rules_of(errors) == ["index_failure", "index_failure"]
    assert [problem.worker_id for problem in errors] == [0, 1]
    assert errors[0].observed.startswith("find_matches raised ZeroDivisionError: no (faulty_indexes.py:")


def test_an_index_that_raises_at_the_lookups_at_the_end_is_one_problem_per_worker(make_kv, rules_of):
    kv = make_kv(index=RaisesWhenAsked(), workers=2, sync="end")
    busy(kv)
    assert rules_of(kv.judge().errors) == ["index_failure", "index_failure"]


def test_a_flush_that_raises_is_one_problem_without_a_worker(make_kv):
    class Broken(Manageable):
        def flush(self):
            raise OSError("gone")

    kv = make_kv(index=Broken(), sync="end")
    chain(kv, 1)
    kv.flush()
    (problem,) = kv.judge().errors
    assert problem.rule == "index_failure"
    assert problem.observed.startswith("flush raised OSError: gone (test_index_under_test.py:")
    assert repr(problem).startswith("<index_failure: no worker: ")
    assert (problem.worker_id, problem.dp_rank) == (-1, 0)


def test_an_exception_of_the_index_does_not_reach_the_code_under_test(make_kv):
    kv = make_kv(index=RaisesOnce())
    assert len(kv.worker(0).serve(kv.prompt(2)).stored_blocks) == 2


# ------------------------------------------------------------------------------------- wrong ones, and at which event


def test_a_skipped_removed_is_found_at_its_event(make_kv):
    kv = make_kv(index=ForgetsOneRemoved())
    chain(kv, 1, 2, 3)
    kv.apply([Removed((3,)), Stored(2, (4,), (4,))])
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.event_id, problem.blocks) == ("index_drift", 1, (3,))
    assert problem.observed == (
        "find_matches() of your index (ForgetsOneRemoved) returned 3 for worker 0 on a 3-block prefix (ends in 3); "
        "block 3 was removed by event 1"
    )
    assert problem.expected == "2 blocks, as the reference index returned"


def test_a_cleared_that_empties_another_rank_is_found_at_its_event(make_kv):
    class ClearsAllRanks(Sound):
        def apply(self, event):
            super().apply(event)
            if isinstance(event.event.data, Cleared):
                self.tree.remove_worker(event.worker_id)

    kv = make_kv(index=ClearsAllRanks(), dp_size=2)
    kv.apply([Stored(None, (1, 2), (1, 2))], dp_rank=0)
    kv.apply([Stored(None, (7, 8), (7, 8))], dp_rank=1)
    kv.apply([Cleared()], dp_rank=0)
    (problem,) = kv.judge().errors
    assert (problem.rule, (problem.worker_id, problem.dp_rank), problem.position) == ("index_drift", (0, 1), 2)
    assert problem.observed == (
        "find_matches() of your index (ClearsAllRanks) returned 0 for worker 0 rank 1 on a 1-block prefix (ends in 7); "
        "block 7 was stored by event 0 and never removed"
    )


def test_a_missing_first_block_is_named_by_the_workers_hash(make_kv):
    class ForgetsWorkerOne(Sound):
        def find_matches(self, local_hashes):
            return {key: blocks for key, blocks in super().find_matches(local_hashes).items() if key[0] != 1}

    kv = make_kv(index=ForgetsWorkerOne(), sync="end", workers=2)
    kv.apply([Stored(None, (5,), (12,))], worker_id=1)
    with kv.burst():
        kv.apply([Stored(None, (1, 2), (11, 12))])
    (problem,) = kv.judge().errors
    assert (problem.worker_id, problem.blocks) == (1, (5,))
    assert problem.observed.endswith("on a 1-block prefix (ends in 5); block 5 was stored by event 0 and never removed")


def test_an_ignored_cleared_is_found_at_its_event(make_kv, rules_of):
    kv = make_kv(index=IgnoresCleared())
    chain(kv, 1, 2)
    chain(kv, 5)
    kv.apply([Cleared(), Stored(None, (9,), (9,))])
    errors = kv.judge().errors
    assert {(problem.rule, problem.event_id) for problem in errors} == {("index_drift", 2)}
    assert 1 <= len(errors) <= 3


def test_a_removal_from_the_wrong_worker_is_found_at_its_event(make_kv):
    kv = make_kv(index=RemovesFromTheWrongWorker(), workers=2)
    chain(kv, 1, 2)
    chain(kv, 1, 2, worker=1)
    kv.apply(Removed((2,)))
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.worker_id, problem.event_id) == ("index_drift", 0, 1)


def test_an_index_that_matches_by_content_alone_drifts_at_the_first_chain(make_kv):
    kv = make_kv(index=MatchesByContentAlone())
    chain(kv, 1)
    assert shown(kv) == set()
    chain(kv, 2, 3)
    assert shown(kv) == {"index_drift"}
    assert kv.events.errors[0].event_id == 1


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_index_that_raises_once_fails_at_that_event_and_its_drift_follows_from_it(make_kv, at, rules_of):
    kv = make_kv(index=RaisesOnce(at))
    chain(kv, 1)
    kv.apply([Stored(1, (2,), (2,)), Stored(2, (3,), (3,)), Stored(3, (4,), (4,))])
    (problem,) = kv.judge().errors
    assert ("index_failure", at) == (problem.rule, problem.event_id)
    assert problem.observed.startswith("apply raised OSError: disk full (faulty_indexes.py:")
    assert {"index_failure", "index_drift"} >= set(rules_of(problem.consequences())) > set()


def test_an_index_that_refuses_a_wrong_event_is_listed_under_the_error_of_the_event(make_kv, rules_of):
    class Strict(Sound):
        def apply(self, event):
            if isinstance(event.event.data, Stored) and event.event.data.parent_hash == 9:
                raise LookupError(9)
            super().apply(event)

    kv = make_kv(index=Strict())
    kv.apply(Stored(9, (1,), (1,)))
    (problem,) = kv.judge().errors
    assert problem.rule == "parent_block_not_found"
    assert "index_failure" in rules_of(problem.consequences())


FAULTY = (ForgetsOneRemoved, IgnoresCleared, RemovesFromTheWrongWorker, MatchesByContentAlone, RaisesOnce)


@pytest.mark.parametrize("kind", FAULTY)
@pytest.mark.parametrize("sync", ["every", "auto", "end"])
def test_each_wrong_index_is_found_by_traffic(make_kv, kind, sync):
    index = kind()
    if sync == "end" and kind is ForgetsOneRemoved:
        index.skips = 1000  # a single one is hidden by a later Removed of its parent
    kv = make_kv(index=index, sync=sync, workers=2)
    busy(kv)
    if kind is IgnoresCleared:
        kv.worker(0).clear()
    before_the_end = shown(kv)
    errors = kv.judge().errors
    assert errors
    assert {"index_drift", "index_failure"} >= {problem.rule for problem in errors}
    if sync == "end" and kind is not RaisesOnce:  # an exception is reported at once
        assert before_the_end == set()
    else:
        assert set() < before_the_end


def test_a_drift_is_reported_once_per_block(make_kv):
    kv = make_kv(index=ForgetsOneRemoved())
    chain(kv, 1, 2)
    kv.apply([Removed((2,)), Removed((1,)), Stored(None, (1,), (1,))])
    for _ in range(3):
        kv.flush()
    assert len(kv.judge().errors) == 1
    assert kv.judge().errors == []


def test_assert_in_sync_raises_each_time_while_the_index_differs(make_kv):
    kv = make_kv(index=ForgetsOneRemoved())
    chain(kv, 1, 2)
    kv.assert_in_sync()
    kv.apply(Removed((2,)))
    for _ in range(2):
        with pytest.raises(EventRulesBroken, match="index_drift"):
            kv.assert_in_sync()
    assert len(kv.events.errors) == 1
    kv.apply(Stored(1, (2,), (2,)))
    kv.assert_in_sync()


def test_a_new_drift_is_reported_next_to_an_earlier_one(make_kv):
    index = ForgetsOneRemoved()
    kv = make_kv(index=index)
    chain(kv, 1, 2)
    kv.apply(Removed((2,)))
    chain(kv, 5)
    index.tree.apply(RouterEvent(0, KvCacheEvent(9, Removed((5,)))))
    assert [problem.blocks for problem in kv.judge().errors] == [(2,), (5,)]


def test_blocks_that_are_each_others_parents_are_still_looked_up(make_kv):
    kv = make_kv(index=RadixIndex())
    chain(kv, 1)
    kv.apply([Stored(1, (2,), (2,)), Stored(2, (1,), (1,))])
    assert kv.inside.streams[0, 0].chain(1) == [2, 1]
    assert [problem for problem in kv.judge().errors if problem.rule == "index_failure"] == []


def test_a_drift_found_at_the_end_is_placed_after_the_last_event(make_kv):
    kv = make_kv(index=ForgetsOneRemoved(), sync="end")
    chain(kv, 1, 2)
    kv.apply(Removed((2,)))
    with pytest.raises(EventRulesBroken, match="worker 0, compared after entry 1 of the log"):
        kv.assert_in_sync()
    (problem,) = kv.judge().errors
    assert (problem.event, problem.position) == (None, 1)


def test_a_drift_found_at_an_async_flush_is_placed_after_the_last_event(make_kv):
    async def body():
        chain(kv, 1, 2)
        kv.apply(Removed((2,)))
        await kv.aflush()

    class Forgets(Async):
        async def apply(self, event):
            if not isinstance(event.event.data, Removed):
                await super().apply(event)

    kv = make_kv(index=Forgets(), sync="end")
    asyncio.run(body())
    (problem,) = kv.judge().errors
    assert (problem.event, problem.position) == (None, 1)


def test_sync_determines_how_often_an_index_is_looked_up(make_kv, monkeypatch):
    from pytest_kvmock.harness import index_comparison as comparison

    monkeypatch.setattr(comparison, "ALWAYS_UPTO", 10)
    asked = {}
    for sync in ("every", "auto", "end"):
        index = Sound()
        kv = make_kv(index=index, sync=sync)
        for number in range(200):
            chain(kv, number)
            if number == 9:
                asked[sync, 10] = index.asked
        asked[sync] = index.asked
    assert (asked["every", 10], asked["auto", 10], asked["end", 10]) == (10, 10, 0)
    assert (asked["every"], asked["end"]) == (200, 0)
    assert 10 < asked["auto"] < 60


def test_with_sync_auto_each_of_the_first_2000_events_is_followed_by_a_lookup(make_kv):
    index = Sound()
    kv = make_kv(index=index)
    for number in range(2000):
        chain(kv, number)
    assert index.asked == 2000
    chain(kv, 2000)
    assert index.asked == 2000  # with this name and seed, later events are chosen
    for number in range(2001, 2321):
        chain(kv, number)
    assert 5 <= index.asked - 2000 <= 40  # one in 16


# -------------------------------------------------------------------------------------------------- async indexes


def test_events_wait_for_an_async_index_until_a_flush(make_kv):
    async def body(kv):
        asked = kv.prompt(2)
        kv.worker(0).serve(asked)
        assert await kv.aoverlap(asked) == {}
        await kv.aflush()
        assert await kv.aoverlap(asked) == {0: 2}
        await kv.aassert_in_sync()

    kv = make_kv(index=Async())
    asyncio.run(body(kv))
    assert tuple(kv.judge()) == ([], [], [])


def test_a_lookup_of_an_async_index_does_not_flush_it(make_kv):
    class Queues(Async):
        flushes = 0

        async def flush(self):
            self.flushes += 1

    async def body(kv):
        asked = kv.prompt(2)
        kv.worker(0).serve(asked)
        await kv.aflush()
        flushes = index.flushes
        assert await kv.aoverlap(asked) == {0: 2}
        assert flushes == index.flushes

    index = Queues()
    asyncio.run(body(make_kv(index=index)))


def test_an_async_index_is_not_queried_without_await(make_kv):
    kv = make_kv(index=Async())
    with pytest.raises(TypeError, match=r"overlap cannot query an async index \(Async\): use `await kv_harness.a"):
        kv.overlap([1, 2, 3, 4])
    with pytest.raises(TypeError, match="aassert_in_sync"):
        kv.assert_in_sync()


def test_a_sync_index_cannot_be_awaited(make_kv):
    async def body(kv):
        for call in (kv.aflush, kv.aassert_in_sync, lambda: kv.aoverlap([1])):
            with pytest.raises(TypeError, match="is for an async index under test; this one is not async"):
                await call()

    asyncio.run(body(make_kv(index=Sound())))
    asyncio.run(body(make_kv()))


def test_events_that_wait_at_the_end_are_reported_as_not_flushed(make_kv):
    kv = make_kv(index=Async())
    kv.worker(0).serve(kv.prompt(1))
    kv.worker(0).serve(kv.prompt(1))
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.event_id) == ("not_flushed", 0)
    assert problem.observed == "2 events waited for the async index when the test body ended, this one first"


def test_a_wrong_async_index_is_found_at_the_flush(make_kv):
    class Forgetful(Async):
        async def apply(self, event):
            if not isinstance(event.event.data, Removed):
                await super().apply(event)

    async def body(kv):
        chain(kv, 1, 2, 3)
        kv.apply(Removed((3,)))
        assert kv.events.problems == []
        await kv.aflush()

    kv = make_kv(index=Forgetful())
    asyncio.run(body(kv))
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.blocks) == ("index_drift", (3,))


def test_aassert_in_sync_raises_each_time_while_the_index_differs(make_kv):
    class Forgetful(Async):
        async def apply(self, event):
            if not isinstance(event.event.data, Removed):
                await super().apply(event)

    async def body():
        chain(kv, 1, 2)
        await kv.aassert_in_sync()
        kv.apply(Removed((2,)))
        for _ in range(2):
            with pytest.raises(EventRulesBroken, match="index_drift"):
                await kv.aassert_in_sync()

    kv = make_kv(index=Forgetful())
    asyncio.run(body())
    assert len(kv.events.errors) == 1


def test_an_async_index_that_raises_is_found_at_the_flush(make_kv):
    class Raising(Async):
        async def apply(self, event):
            if event.event.event_id == 1:
                raise OSError("gone")
            await super().apply(event)

    async def body(kv):
        chain(kv, 1)
        chain(kv, 2)
        await kv.aflush()

    kv = make_kv(index=Raising())
    asyncio.run(body(kv))
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.event_id) == ("index_failure", 1)


@pytest.mark.parametrize("what", ["remove", "restart"])
@pytest.mark.parametrize("kind", [Async, AsyncManageable])
def test_an_async_index_removes_a_worker_after_the_events_before_it(make_kv, kind, what):
    class Index(kind):
        if kind is Async:

            def remove_worker(self, worker_id):
                self.tree.remove_worker(worker_id)

    async def body(kv):
        asked, worker = kv.prompt(2), kv.worker(0)
        worker.serve(asked)
        kv.worker(1).serve(asked)
        if what == "remove":
            kv.remove_worker(0)
        else:
            worker.restart(announced=True)
        kv.worker(0).serve(asked.tokens[:4])
        await kv.aflush()
        assert await kv.aoverlap(asked) == {0: 1, 1: 2}
        await kv.aassert_in_sync()

    kv = make_kv(index=Index(), workers=2)
    asyncio.run(body(kv))
    assert tuple(kv.judge()) == ([], [], [])


def test_a_removal_from_an_async_index_waits_for_a_flush(make_kv, rules_of):
    kv = make_kv(index=AsyncManageable())
    kv.worker(0).serve(kv.prompt(1))
    kv.remove_worker(0)
    assert rules_of(kv.judge().errors) == ["not_flushed"]


def test_an_index_that_raises_at_a_cleared_fails_once():
    class RaisesAtCleared(RadixIndex):
        def apply(self, event):
            if isinstance(event.event.data, Cleared):
                raise RuntimeError("no")  # noqa: TRY004 - any error
            super().apply(event)

    kv = RouterHarness(backend=None, index=RaisesAtCleared())
    kv.apply([Stored(None, (1, 2), (1, 2)), Cleared()])
    (error,) = kv.events.errors
    assert (error.rule, {p.rule for p in error.folded}) == ("index_failure", {"index_drift"})


def test_a_dump_that_raises_at_the_start_is_refused():
    class Broken(RadixIndex):
        def dump_events(self):
            raise RuntimeError("broken")

    with pytest.raises(ValueError, match=r"dump_events\(\) of the index under test \(Broken\) raised RuntimeError"):
        RouterHarness(backend=None, index=Broken())


def test_two_concurrent_flushes_are_refused_and_no_event_is_lost():
    class Slow:
        def __init__(self):
            self.inner = RadixIndex()
            self.turn = asyncio.Event()

        async def apply(self, event):
            await self.turn.wait()  # another task may run here
            self.inner.apply(event)

        def find_matches(self, hashes):
            return self.inner.find_matches(hashes)

    async def main():
        kv = RouterHarness(backend=None, index=Slow())
        kv.apply([Stored(None, (1,), (1,)), Stored(1, (2,), (2,))])
        first = asyncio.ensure_future(kv.aflush())
        with pytest.raises(RuntimeError, match="aflush\\(\\) is under way already"):
            await asyncio.gather(first, kv.aflush())
        kv.index.turn.set()
        await first
        await kv.aassert_in_sync()
        assert kv.judge().errors == []

    asyncio.run(main())


@pytest.mark.parametrize("answer", [{0: -1}, {(0, 0): -2}])
def test_a_negative_answer_is_an_index_failure(answer):
    class Negative(RadixIndex):
        def find_matches(self, hashes, *rest):
            return answer

    kv = RouterHarness(backend=None, index=Negative())
    kv.apply(Stored(None, (1,), (1,)))
    assert [p.rule for p in kv.events.errors] == ["index_failure"]


class LooksOverHoles:
    """Finds a prompt as far as the deepest block that is held."""

    def __init__(self):
        self.chains = {}

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Removed):
            for block in data.block_hashes:
                del self.chains[block]
            return
        chain = self.chains.get(data.parent_hash, ())
        for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            self.chains[block] = chain = (*chain, local)

    def find_matches(self, local_hashes):
        held = [chain for chain in self.chains.values() if chain == tuple(local_hashes[: len(chain)])]
        return {(2**16, 0): max(map(len, held), default=0)}


def test_a_drift_behind_a_removed_block_names_that_block():
    kv = RouterHarness(EngineProfile(block_size=4), backend=None, index=LooksOverHoles())
    sink = kv.make_sink()
    sink(Stored(None, (1, 2, 3), (11, 12, 13)))
    sink(Removed((2,)))
    kv.judge()
    (drift,) = [each for each in kv.events.problems if each.rule == "index_drift"]
    assert drift.observed.endswith(
        "block 3 was stored by event 0 and never removed, but what stands before it is gone: block 2 was removed by "
        "event 1"
    )
