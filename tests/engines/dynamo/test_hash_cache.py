"""The manager of dynamo-mocker 1.0.2: its own tests, its faults and the rules that report them, and `strict`."""

import logging
from uuid import UUID

import pytest
from cache_helpers import event_rows
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import BACKENDS, CapturingSink, EngineProfile, RouterHarness, StorageTier, create_manager
from pytest_kvmock.engines.dynamo.hash_cache import HashCacheManager
from pytest_kvmock.engines.dynamo.sequence import ActiveSequence
from pytest_kvmock.values import Deref, Destroy, MoveError, Promote, Use

P, Q = UUID(int=1, version=4), UUID(int=2, version=4)
STRICT = BACKENDS["hash_cache"].variant("hash_cache_strict", prefix_closed=True, strict=True)
BOTH = pytest.mark.parametrize("strict", [False, True], ids=["faithful", "strict"])


def new_manager(num_blocks=10, block_size=16, *, strict=False, **options):
    return create_manager(
        "hash_cache", num_blocks=num_blocks, block_size=block_size, sink=CapturingSink(), strict=strict, **options
    )


def said(manager):
    """Return the events since the last call, without their ids."""
    return [[row[0], *row[2:]] for row in event_rows(manager.sink.take())]


def stored(parent, *blocks):
    """Return a Stored in the form of `said`; the local hash of block n is 1000 + n."""
    return ["S", parent, [[block, 1000 + block] for block in blocks]]


def use(manager, *blocks, **fields):
    full = [1000 + block for block in blocks if not isinstance(block, UUID)]
    return manager.process(Use(list(blocks), full, **fields))


def shown(manager):
    return manager.active_blocks, manager.inactive_blocks(), sorted(manager.resident()), list(manager.sink.events)


# ------------------------------------------------------------------------------- the original's own tests


@BOTH
def test_a_use_beyond_the_capacity_allocates_no_block(strict):
    manager = new_manager(10, strict=strict)
    assert use(manager, *range(10)) == 10
    assert manager.current_capacity == 10
    assert use(manager, 10) == 0


@BOTH
def test_blocks_move_from_active_to_inactive_and_back_until_they_are_evicted(strict):
    manager = new_manager(10, strict=strict)
    use(manager, 0, 1, 2, 3, 4)
    use(manager, 0, 1, 5, 6)
    assert manager.active_blocks == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1}

    manager.destroy(4)
    manager.deref(0, 1, 2, 3)
    assert (manager.num_inactive_blocks, manager.inactive_blocks()) == (2, [2, 3])
    assert manager.active_blocks == {0: 1, 1: 1, 5: 1, 6: 1}

    manager.destroy(6)
    manager.deref(0, 1, 5)
    assert (manager.num_inactive_blocks, manager.inactive_blocks()) == (5, [2, 3, 0, 1, 5])
    assert manager.active_blocks == {}

    use(manager, 0, 1, 2, 7, 8, 9)
    assert (manager.num_inactive_blocks, manager.inactive_blocks()) == (2, [3, 5])
    assert dict.fromkeys([0, 1, 2, 7, 8, 9], 1) == manager.active_blocks
    assert manager.probe_new_blocks([0, 1, 2, 3, 4]) == 1

    use(manager, 10, 11, 12)
    assert manager.inactive_blocks() == [5]
    use(manager, 13)
    assert manager.inactive_blocks() == []


# ------------------------------------------------------------------------------------------------- queries


def test_capacity_counts_active_and_inactive_blocks_including_partial_ones():
    manager = new_manager(8)
    use(manager, 1, 2, P)
    use(manager, 1, Q)
    manager.deref(2, Q)

    assert (manager.num_active_blocks, manager.num_active_block_refs, manager.num_inactive_blocks) == (2, 3, 2)
    assert (manager.current_capacity, manager.current_capacity_perc, manager.active_perc) == (4, 0.5, 0.25)
    assert manager.active_blocks == {1: 2, P: 1}
    assert manager.inactive_blocks() == [2, Q]
    assert (sorted(manager.resident()), list(manager.resident(StorageTier.HOST_PINNED))) == ([1, 2], [])
    assert (manager.references(1), manager.references(P), manager.references(2)) == (2, 1, 0)
    assert repr(manager) == "<HashCacheManager hash_cache: 2 active, 2 inactive of 8>"


def test_probe_new_blocks_counts_repeated_blocks_each_time():
    manager = new_manager()
    use(manager, 0, 3, P)
    manager.deref(3)

    assert manager.probe_new_blocks([0, 1, 1, 2, 3, P, Q]) == 4
    assert manager.probe_new_blocks([]) == 0


COSTS = [
    ((), (3, 10, 0)),
    ((0,), (2, 6, 4)),
    ((0, 1), (1, 2, 8)),
    ((0, 1, 2), (0, 0, 10)),
    ((1, 2), (3, 10, 0)),
]
"""Which of three blocks are cached (the last is partial with two tokens): new blocks, new tokens, cached tokens."""


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("freed", [False, True])
@pytest.mark.parametrize(("there", "cost"), COSTS)
def test_cached_leading_blocks_do_not_count_for_the_prefill_cost(there, cost, freed, caching):
    manager = new_manager(block_size=4)
    sequence = ActiveSequence(range(10), 5, 4, caching, moves="whole")
    for block in (sequence.unique_blocks[i] for i in there):
        manager.process(Use([block], [0]))
        if freed:
            manager.deref(block)
    before = shown(manager)

    assert cost == manager.prefill_cost(sequence)
    assert before == shown(manager)


def test_the_prefill_cost_counts_only_prompt_tokens():
    manager = new_manager(block_size=4)
    sequence = ActiveSequence(range(4), 5, 4, moves="whole")
    manager.process(sequence.take_creation_signal())
    for move in sequence.push(1):
        manager.process(move)

    assert manager.prefill_cost(sequence) == (0, 0, 4)


# --------------------------------------------------------------------------------------------------- moves


def test_evictions_are_published_at_once_and_stores_at_the_end():
    manager = new_manager(3)
    use(manager, 1, 2, 3)
    manager.deref(3, 2, 1)
    said(manager)

    assert use(manager, 4, 5) == 2
    assert [["R", [3]], ["R", [2]], stored(None, 4, 5)] == said(manager)


def test_a_block_that_a_use_evicts_and_needs_is_stored_again():
    manager = new_manager(3)
    use(manager, 1, 2, 3)
    manager.deref(2, 1)

    assert use(manager, 4, 2) == 2
    assert [stored(None, 1, 2, 3), ["R", [2]], ["R", [1]], stored(None, 4, 2)] == said(manager)
    assert manager.active_blocks == {2: 1, 3: 1, 4: 1}


def test_a_use_does_not_evict_the_blocks_that_it_reactivated():
    manager = new_manager(3)
    use(manager, 1, 2, 3)
    manager.deref(1, 2, 3)

    assert use(manager, 1, 4, 5) == 3
    assert [stored(None, 1, 2, 3), ["R", [2]], ["R", [3]], stored(1, 4, 5)] == said(manager)


def test_a_destroy_publishes_one_removed_of_its_full_blocks():
    manager = new_manager()
    use(manager, 1, 2, 3, P)
    said(manager)
    manager.process(Destroy([P]))
    assert said(manager) == []
    manager.use([Q])
    manager.destroy([3, Q], 1)
    assert said(manager) == [["R", [3, 1]]]
    assert manager.active_blocks == {2: 1}
    assert manager.inactive_blocks() == []


def test_promotion_to_a_cached_block_publishes_no_stored():
    manager = new_manager()
    use(manager, 1, P)
    said(manager)
    manager.process(Promote(P, 2, 1, 1002, token_ids=[7] * 16))
    assert manager.sink.router_events[0].token_ids == [[7] * 16]
    assert [stored(1, 2)] == said(manager)

    for freed in (False, True):
        if freed:
            manager.deref(2, 2)
        use(manager, Q)
        manager.process(Promote(Q, 2, 1, 1002))
        assert (1 if freed else 2) == manager.references(2)
    assert said(manager) == []
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (2, 0)


def test_clear_drops_all_blocks_and_is_refused_while_a_block_is_in_use():
    manager = new_manager()
    use(manager, 1, 2, P)
    manager.deref(2, 1)
    before = shown(manager)
    assert manager.clear() is False
    assert before == shown(manager)

    manager.deref(P)
    said(manager)
    assert manager.clear() is True
    assert (manager.current_capacity, said(manager)) == (0, [["C"]])


def test_short_forms_fill_in_parent_and_local_hashes():
    manager = new_manager()
    assert manager.use([1, 2, P]) == 3
    manager.promote(P, 3, parent=2)
    assert manager.use([4], parent=2) == 1
    manager.deref([4, 3], 2)

    assert said(manager) == [["S", None, [[1, 1], [2, 2]]], ["S", 2, [[3, 3]]], ["S", 2, [[4, 4]]]]
    assert manager.inactive_blocks() == [4, 3, 2]
    with pytest.raises(MoveError, match=r"^Use: parent 9 is not cached"):
        manager.use([5], parent=9)
    with pytest.raises(MoveError, match=r"^Promote: parent 9 is not cached"):
        manager.promote(Q, 5, parent=9)


@BOTH
def test_an_empty_use_allocates_and_publishes_nothing(strict):
    manager = new_manager(strict=strict)
    assert manager.process(Use([])) == 0
    assert (manager.current_capacity, said(manager)) == (0, [])


def test_allocation_and_eviction_are_logged(caplog):
    caplog.set_level(logging.DEBUG, "pytest_kvmock.engines")
    manager = new_manager(3)
    use(manager, 1, 2, P)
    manager.deref(2, 1)
    use(manager, 3)
    manager.process(Promote(P, 4, 1, 1004))
    manager.destroy(4)

    assert [(r.event, r.block_ids, r.active_blocks, r.inactive_blocks) for r in caplog.records] == [
        ("allocation", [1, 2], 3, 0),
        ("eviction", [2], 1, 1),  # 3 is not allocated yet
        ("allocation", [3], 2, 1),
        ("allocation", [4], 2, 1),
        ("eviction", [4], 1, 1),
    ]


# --------------------------------------------------------------------------- the faults, and what mends them


def story(*moves):
    """Return a faithful and a strict manager after moves that both accept."""
    managers = new_manager(4), new_manager(4, strict=True)
    for manager in managers:
        for move in moves:
            manager.process(move)
    return managers


def test_local_hashes_are_taken_from_the_end_of_the_list_unless_strict():
    faithful, strict = story(Use([2], [1002]), Use([1, 2], [1001, 1002]))
    assert [stored(None, 2), ["S", 2, [[1, 1002]]]] == said(faithful)
    assert [stored(None, 2), stored(None, 1)] == said(strict)

    faithful, strict = story(Use([1, P], [1001, 1009]))  # the move of 1.0.2's sequence when P has all its tokens
    assert said(faithful) == [["S", None, [[1, 1009]]]]
    assert [stored(None, 1)] == said(strict)


def test_the_parent_is_the_last_hit_of_the_use_unless_strict():
    faithful, strict = story(Use([2], [1002]), Use([1, 2, 3], [1001, 1002, 1003]))
    assert [stored(None, 2), ["S", 2, [[1, 1002], [3, 1003]]]] == said(faithful)
    assert [stored(None, 2), stored(None, 1), stored(2, 3)] == said(strict)

    faithful, strict = story(Use([1, 1], [1001, 1001]))
    assert [stored(1, 1)] == said(faithful)
    assert [stored(None, 1)] == said(strict)
    assert {1: 2} == faithful.active_blocks == strict.active_blocks


def test_a_failed_use_returns_0_and_keeps_its_blocks_unless_strict():
    faithful, strict = story(Use([1, 2, 3], [1001, 1002, 1003]), Deref([3]))
    for manager in (faithful, strict):
        said(manager)
        assert use(manager, 1, 4, 5, 6) == 0
    assert (faithful.active_blocks, said(faithful)) == ({1: 2, 2: 1, 4: 1, 5: 1}, [["R", [3]]])
    assert (strict.active_blocks, strict.inactive_blocks(), said(strict)) == ({1: 1, 2: 1}, [3], [])


def test_a_deref_of_an_inactive_block_is_ignored_unless_strict():
    faithful, strict = story(Use([1, 2], [1001, 1002]))
    faithful.process(Deref([1, 9, 1, Q]))
    assert (faithful.active_blocks, faithful.inactive_blocks()) == ({2: 1}, [1])

    for blocks, why in (
        ([9], "block 9: it is not active"),
        ([Q], f"partial block {Q}: it is not active"),
        ([1, 1], r"block 1: it has 1 reference\(s\), and the move drops 2"),
    ):
        before = shown(strict)
        with pytest.raises(MoveError, match=f"^Deref of {why}$"):
            strict.process(Deref(blocks))
        assert before == shown(strict)


def test_a_freed_partial_block_stays_until_it_is_evicted_unless_strict():
    faithful, strict = story(Use([P], []), Deref([P]))
    assert (faithful.inactive_blocks(), strict.inactive_blocks()) == ([P], [])

    use(faithful, 1, 2, 3, 4)
    assert ([], [stored(None, 1, 2, 3, 4)]) == (faithful.inactive_blocks(), said(faithful))


def test_a_destroy_removes_a_block_with_other_references_unless_strict():
    faithful, strict = story(Use([1], [1001]), Use([1], [1001]))
    faithful.destroy(1)
    assert ({}, [stored(None, 1), ["R", [1]]]) == (faithful.active_blocks, said(faithful))

    before = shown(strict)
    with pytest.raises(MoveError, match=r"^Destroy of block 1: it has 2 references, and others use it"):
        strict.destroy(1)
    assert before == shown(strict)


def test_token_ids_are_indexed_by_the_place_among_all_blocks_unless_strict():
    tokens = [[1] * 16, [2] * 16]
    faithful, strict = story(Use([1], [1001], token_ids=[[0] * 16]))
    for manager in (faithful, strict):
        manager.sink.take()
        use(manager, 1, P, token_ids=tokens[:1])
        assert len(manager.sink.events) == 0
    use(faithful, Q, 2, token_ids=tokens)
    use(strict, Q, 2, token_ids=tokens[1:])
    assert [tokens[1:]] == [event.token_ids for event in faithful.sink.router_events]
    assert [tokens[1:]] == [event.token_ids for event in strict.sink.router_events]
    for capacity in (2, 1):  # it fits, or fails after the block without tokens
        short = Use([2, P, 3] if capacity == 1 else [P, 3], [1002, 1003], token_ids=[])
        assert "0 token_ids for" in refused(new_manager(capacity), short)


def test_a_partial_block_cannot_be_the_last_hit():
    faithful, strict = story(Use([P], []))
    assert f"Use of block {P}: partial block {P} is the last that is cached" in refused(faithful, Use([P, 1], [1001]))
    assert use(strict, P, 1) == 2
    assert ({P: 2, 1: 1}, [stored(None, 1)]) == (strict.active_blocks, said(strict))


def refused(manager, move):
    """Return the error of a refused move, after checking that the manager is unchanged."""
    before = shown(manager)
    with pytest.raises(MoveError) as error:
        manager.process(move)
    assert before == shown(manager)
    return str(error.value)


# --------------------------------------------------------------------------------- each under its name


def world(spec, num_blocks=4):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=num_blocks), spec)
    return kv, kv.worker(0)


def judged(kv):
    verdict = kv.judge()
    return [problem.rule for problem in (*verdict.errors, *kv.events.warnings)]


FAULTS = {
    "a failed use": (["engine_drift"], lambda manager: [manager.use([9]), manager.use([1, 2, 3, 4])]),
    "a parent that is a later hit": (["invalid_block"], lambda manager: manager.use([1, 1])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_harness_reports_each_fault_of_hash_cache_and_none_of_strict(fault):
    rules, do = FAULTS[fault]
    for spec, expected in ((BACKENDS["hash_cache"], rules), (STRICT, [])):
        kv, worker = world(spec)
        do(worker.manager)
        assert judged(kv) == expected


def test_blocks_that_a_failed_use_kept_are_reported_as_drift():
    kv, worker = world(BACKENDS["hash_cache"])
    worker.manager.use([1, 2])
    worker.manager.use([1, 3, 4, 5])
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.blocks) == ("engine_drift", (3, 4))
    assert "block 3 was never stored" in problem.observed


def a_request_preempted_when_its_last_block_is_full(kv, worker):
    """Return a resumed request: its blocks were evicted, and its creation signal has one local hash too many."""
    prompt, output = kv.prompt(1, tail=3), [5]
    request = worker.prefill(prompt)
    request.decode(output)
    request.preempt()
    worker.serve(kv.prompt(4))
    request.resume()
    kv.flush()
    return request


def test_shifted_local_hashes_are_reported_as_wrong_hash():
    kv, worker = world(BACKENDS["hash_cache"])
    request = a_request_preempted_when_its_last_block_is_full(kv, worker)
    (problem,) = kv.events.warnings
    assert ("wrong_hash", (request.blocks[0],)) == (problem.rule, problem.blocks)
    assert "its 4 tokens have local hash" in problem.expected
    assert kv.events.counts.warnings == {"wrong_hash": 1}
    request.finish()
    assert kv.judge().errors == []
    assert kv.overlap(request.prompt) == {}  # the router received the tokens of another block

    kv, worker = world(STRICT)
    request = a_request_preempted_when_its_last_block_is_full(kv, worker)
    request.finish()
    assert judged(kv) == []
    assert kv.overlap(request.prompt) == {0: 1}


def test_a_wrong_hash_is_found_by_the_chain_when_events_have_no_tokens():
    kv, worker = world(BACKENDS["hash_cache"])
    a, b = kv.prompt(1), kv.prompt(1)
    with worker.prefill(a):
        blocks = [b.sequence_hashes(4)[0], a.sequence_hashes(4)[0]]
        worker._driver.process(Use(blocks, [b.block_hashes(4)[0], a.block_hashes(4)[0]]))
    assert judged(kv) == ["wrong_hash"]


# --------------------------------------------------------------------------------------------- bad input

NO_LISTS = [
    (Use(7), "Use: a list is expected"),
    (Use([1], 7), "Use: a list is expected"),
    (Use(["a"], [1]), "Use of block 'a': a block is a sequence hash"),
    (Use([-1], [1]), "Use of block -1"),
    (Use([True], [1.5]), "Use of block True: local hash 1.5"),
    (Use([9], [2**64]), "Use of block 9: local hash 18446744073709551616"),
    (Use([9], [1], parent=P), f"Use of block 9: its parent {P} is partial"),
    (Use([9], [1], parent="x"), "Use of block 9: parent 'x'"),
    (Deref(7), "Deref: a list is expected"),
    (Deref(["a"]), "Deref of block 'a': expected a sequence hash"),
    (Destroy(7), "Destroy: a list is expected"),
    (Destroy([2**64]), "Destroy of block 18446744073709551616: expected a sequence hash"),
    (Destroy([9]), "Destroy of block 9: it is not active"),
    (Destroy([2]), "Destroy of block 2: it is not active"),
    (Destroy([Q]), f"Destroy of partial block {Q}: it is not active"),
    (Destroy([1, 1]), "Destroy of block 1: the move names it 2 times"),
    (Promote(Q, 9), f"Promote of partial block {Q}: it is not active"),
    (Promote(1, 9), "Promote of partial block 1: it is not active"),
    (Promote(P, P), f"Promote of partial block {P} to block {P!r}: expected a sequence hash"),
    (Promote(P, 9, Q), f"Promote of partial block {P} to block 9: its parent {Q} is partial"),
    (Promote(P, 9, 1, -1), f"Promote of partial block {P} to block 9: local hash -1"),
    ("a move", "expected a Use, Deref, Destroy or Promote, got 'a move'"),
    (None, "expected a Use, Deref, Destroy or Promote, got None"),
]


@BOTH
@pytest.mark.parametrize(("move", "words"), NO_LISTS)
def test_an_invalid_move_is_refused_and_changes_nothing(move, words, strict):
    manager = new_manager(strict=strict)
    use(manager, 1, 2, P)
    manager.deref(2)
    assert refused(manager, move).startswith(words)


def test_fewer_local_hashes_than_stored_blocks_are_refused():
    manager = new_manager()
    use(manager, 1)
    assert "Use of block 1: 1 local hashes for 2 blocks that are not cached" in refused(manager, Use([1, 2, 3], [1003]))
    assert manager.process(Use([1, 2], [1002])) == 2
    assert manager.active_blocks == {1: 2, 2: 1}


def test_a_partial_block_with_two_references_is_not_promoted():
    manager = new_manager()
    use(manager, 1, P)
    use(manager, P, 1)
    assert "it has 2 references, expected one" in refused(manager, Promote(P, 2, 1, 1002))


LENGTHS = [
    (Use([9], [9, 10]), "Use of block 9: 2 local_hashes for 1 full blocks; expected none, or one"),
    (Use([8, 9], [9]), "Use of block 8: 1 local_hashes for 2 full blocks; expected none, or one"),
    (Use([9, Q], [9, 10, 11]), "Use of block 9: 3 local_hashes for 1 full blocks"),
    (Use([Q, 9], [9, 10]), f"Use of block {Q}: 2 local_hashes for 1 full blocks"),
    (Use([9], [9], [9, 10]), "Use of block 9: 2 plhs for 1 full blocks; expected none, or one"),
    (Use([9], [9], token_ids=[]), "Use of block 9: 0 token_ids for 1 full blocks; expected None, or one"),
]


@pytest.mark.parametrize(("move", "words"), LENGTHS)
def test_strict_refuses_lists_of_different_lengths(move, words):
    assert refused(new_manager(strict=True), move).startswith(words)


def test_strict_accepts_a_use_without_local_hashes():
    manager = new_manager(strict=True)
    manager.process(Use([1, 2]))
    assert said(manager) == [["S", None, [[1, 0], [2, 0]]]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 1}, "block_size must be an integer of at least 2"),
        ({"block_size": "16"}, "block_size must be an integer of at least 2"),
        ({"num_blocks": 0}, "num_blocks must be an integer of at least 1, got 0"),
        ({"dp_rank": -1}, "dp_rank must be"),
        ({"strict": "yes"}, "strict must be True or False, got 'yes'"),
        ({"stric": True}, "backend 'hash_cache' has no option 'stric'; did you mean 'strict'[?] it has strict"),
    ],
)
def test_invalid_arguments_of_a_manager_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        create_manager("hash_cache", **{"num_blocks": 4, **options})


def test_any_block_size_of_at_least_two_is_accepted():
    assert [new_manager(block_size=size).block_size for size in (2, 3, 48)] == [2, 3, 48]


@pytest.mark.parametrize("backend", ["lineage", "lru", "multi_lru"])
def test_managers_without_a_destroy_move_refuse_it(backend):
    manager = create_manager(backend, num_blocks=4, sink=CapturingSink())
    manager.use([1])
    before = shown(manager)
    with pytest.raises(MoveError, match=f"^Destroy: {backend} has no such move; it belongs to hash_cache"):
        manager.process(Destroy([1]))
    assert before == shown(manager)


# ----------------------------------------------------------------------------------------------- properties

blocks = st.lists(st.one_of(st.integers(0, 6), st.sampled_from([P, Q])), max_size=5)
moves = st.lists(
    st.one_of(
        st.builds(lambda names, extra: Use(names, [1000 + n for n in names if isinstance(n, int)] + extra), blocks,
                  st.lists(st.just(7), max_size=1)),
        st.builds(Deref, blocks),
        st.builds(Destroy, blocks),
        st.builds(Promote, st.sampled_from([P, Q]), st.integers(0, 6), st.none(), st.just(5)),
    ),
    max_size=30,
)  # fmt: skip


@BOTH
@given(moves=moves, capacity=st.integers(1, 6))
def test_any_moves_conserve_blocks_and_a_refused_move_changes_nothing(moves, capacity, strict):
    manager = new_manager(capacity, strict=strict)
    held, kept = set(), set()  # stored blocks according to the events; blocks that a failed Use allocated
    for move in moves:
        before = shown(manager)
        known = set(manager.resident())
        try:
            answer = manager.process(move)
        except MoveError:
            assert before == shown(manager)
            continue
        told = said(manager)
        for row in told:
            if row[0] == "S":
                held.update(block for block, _ in row[2])
            else:
                held.difference_update(row[1])
        failed = isinstance(move, Use) and not answer and move.blocks
        if failed:
            assert manager.num_active_blocks <= capacity < len({*before[0], *move.blocks})
            if strict:
                assert (*before[:3], []) == (*shown(manager)[:3], told)
            kept |= set(manager.resident()) - known
        elif isinstance(move, Use):
            assert all(manager.references(block) for block in move.blocks)
            assert sum(manager.active_blocks.values()) == sum(before[0].values()) + len(move.blocks)
        active, inactive = manager.active_blocks, manager.inactive_blocks()
        assert not {*active} & {*inactive}
        assert len(inactive) == len(set(inactive)) == manager.num_inactive_blocks
        assert manager.current_capacity == len(active) + len(inactive) <= capacity
        assert min(active.values(), default=1) >= 1
        assert sorted(manager.resident()) == sorted(b for b in (*active, *inactive) if isinstance(b, int))
        kept &= set(manager.resident())
        kept -= held
        assert held | kept == set(manager.resident())
        if strict:
            assert not kept
            assert all(isinstance(block, int) for block in inactive)


@given(moves=moves, capacity=st.integers(1, 6))
def test_both_managers_publish_the_same_events_without_faults(moves, capacity):
    """Both managers agree as long as strict accepts the moves and each Use begins with its hits."""
    faithful, strict = new_manager(capacity), new_manager(capacity, strict=True)
    for move in moves:
        try:
            answer = strict.process(move)
        except MoveError:
            return
        if isinstance(move, Use):
            full = [block for block in move.blocks if isinstance(block, int)]
            hits = [faithful.references(b) > 0 or b in faithful.inactive_blocks() for b in move.blocks]
            tidy = sorted(hits, reverse=True) == hits and len(set(move.blocks)) == len(move.blocks)
            if not answer or not tidy or len(full) < len(move.local_hashes):
                return
        if isinstance(move, Deref) and any(isinstance(block, UUID) for block in move.blocks):
            return
        try:
            assert answer == faithful.process(move)
        except MoveError:  # a partial block is a hit
            return
        assert shown(faithful) == shown(strict)


def test_two_managers_do_not_share_state():
    one, other = new_manager(), new_manager()
    use(one, 1)
    assert (one.current_capacity, other.current_capacity) == (1, 0)


def test_create_manager_returns_a_hash_cache_manager():
    manager = new_manager(dp_rank=3)
    assert isinstance(manager, HashCacheManager)
    assert (manager.backend, manager.dp_rank, manager.strict) == ("hash_cache", 3, False)
    use(manager, 1)
    assert [event.dp_rank for event in manager.sink.events] == [3]
    assert create_manager(STRICT, num_blocks=1).backend == "hash_cache_strict"
    assert create_manager(STRICT, num_blocks=1).strict
