"""Answers of a worker to a router that missed events, and what the router does with them."""

import asyncio
import logging
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.oracle import (
    Events,
    InvalidRange,
    RadixIndex,
    RadixIndexError,
    RecoveryStep,
    RouterCursor,
    TooNew,
    TreeDump,
    WorkerQuery,
)
from pytest_kvmock.oracle.index.recovery import LocalIndex


def message(event_id, data=None, worker=0, rank=0):
    """Return an event with this id; by default it stores a block of its own."""
    if data is None:
        data = Stored(None, (event_id * 100,), (event_id * 200,))
    return RouterEvent(worker, KvCacheEvent(event_id, data, rank))


def ids(events):
    return [event.event.event_id for event in events]


def local(*events, ring=4096, to_newest=True):
    index = LocalIndex(ring, to_newest=to_newest)
    for event in events:
        index.apply(event)
    return index


def shown(answer):
    """Return a short form of an answer."""
    if isinstance(answer, Events):
        return ids(answer.events), answer.last_event_id
    if isinstance(answer, TreeDump):
        return f"dump of {len(answer.events)}", answer.last_event_id
    return answer


# ---------------------------------------------------------------------------------------------------- LocalIndex

TEN = [message(event_id) for event_id in range(5, 15)]  # a ring of 5 keeps 10 to 14


@pytest.mark.parametrize(
    ("start", "end", "newer", "older"),
    [
        (11, None, ([11, 12, 13, 14], 14), ([11, 12, 13, 14], 14)),
        (10, 14, ([10, 11, 12, 13, 14], 14), ([10, 11, 12, 13, 14], 14)),
        (11, 12, ([11, 12, 13, 14], 14), ([11, 12], 12)),
        (11, 20, ([11, 12, 13, 14], 14), ([11, 12, 13, 14], 14)),
        (12, 12, ([12, 13, 14], 14), ([12], 12)),
        (14, None, ([14], 14), ([14], 14)),
        (None, None, ("dump of 10", 14), ("dump of 10", 14)),
        (None, 12, ("dump of 10", 14), ("dump of 10", 14)),
        (7, None, ("dump of 10", 14), ("dump of 10", 14)),
        (9, 9, ("dump of 10", 14), ("dump of 10", 14)),
        (15, 10, InvalidRange(15, 10), InvalidRange(15, 10)),
        (7, 6, InvalidRange(7, 6), InvalidRange(7, 6)),
        (100, 200, TooNew(100, 200, 14), TooNew(100, 200, 14)),
        (15, None, TooNew(15, 14, 14), TooNew(15, 14, 14)),
    ],
)
def test_each_range_of_ids_has_its_answer(start, end, newer, older):
    assert newer == shown(local(*TEN, ring=5).get_events_in_id_range(start, end))
    assert older == shown(local(*TEN, ring=5, to_newest=False).get_events_in_id_range(start, end))


@pytest.mark.parametrize(("start", "end"), [(None, None), (0, None), (7, 9), (None, 3)])
def test_a_worker_without_events_answers_with_an_empty_dump(start, end):
    assert TreeDump((), 0) == LocalIndex().get_events_in_id_range(start, end)


def test_an_invalid_range_is_refused_even_without_events():
    assert InvalidRange(3, 2) == LocalIndex().get_events_in_id_range(3, 2)


CLEARS = [message(10), message(11, Cleared()), message(12), message(13), message(14, Cleared()), message(15)]


@pytest.mark.parametrize(
    ("start", "newer", "older"),
    [
        (10, [14, 15], [10, 11, 12, 13, 14, 15]),
        (12, [14, 15], [12, 13, 14, 15]),
        (14, [14, 15], [14, 15]),
        (15, [15], [15]),
    ],
)
def test_the_newer_answer_starts_at_the_last_cleared(start, newer, older):
    assert (newer, 15) == shown(local(*CLEARS).get_events_in_id_range(start))
    assert (older, 15) == shown(local(*CLEARS, to_newest=False).get_events_in_id_range(start))


def test_the_ids_of_a_dump_start_at_0():
    dump = local(*TEN, ring=5).get_events_in_id_range()
    assert list(range(10)) == ids(dump.events)


def test_a_dump_builds_an_index_with_the_same_answers():
    index = local(
        message(3, Stored(None, (1, 2, 3), (11, 12, 13))), message(4, Stored(2, (4,), (14,))), message(5, Removed((3,)))
    )
    built = RadixIndex()
    for event in index.get_events_in_id_range().events:
        built.apply(event)
    assert built.find_matches([11, 12, 14]).scores == {(0, 0): 3}
    assert built.find_matches([11, 12, 13]).scores == {(0, 0): 2}


def test_a_dump_has_the_token_ids_of_the_events():
    first = RouterEvent(0, KvCacheEvent(0, Stored(None, (1, 2), (11, 12))), token_ids=((5, 6), (7, 8)))
    dump = local(first, message(1)).get_events_in_id_range()
    tokens = {event.event.data.block_hashes: event.token_ids for event in dump.events}
    assert tokens == {(1,): ((5, 6),), (2,): ((7, 8),), (100,): None}


def test_a_dump_has_the_tier_of_each_block():
    host = RouterEvent(0, KvCacheEvent(1, Stored(None, (5,), (5,))), StorageTier.HOST_PINNED, ((9,),))
    dump = local(message(0), host).get_events_in_id_range()
    assert [(event.storage_tier, event.token_ids) for event in dump.events] == [
        (StorageTier.DEVICE, None),
        (StorageTier.HOST_PINNED, ((9,),)),
    ]


def test_tokens_of_removed_blocks_are_forgotten():
    index = LocalIndex()
    for n, last in enumerate((Removed((1,)), Cleared())):
        index.apply(RouterEvent(0, KvCacheEvent(2 * n, Stored(None, (1,), (1,))), token_ids=((5,),)))
        index.apply(message(2 * n + 1, last))
    index.apply(message(4, Stored(None, (1,), (1,))))
    assert [event.token_ids for event in index.get_events_in_id_range().events] == [None]


def test_an_id_that_is_not_the_next_is_logged_and_kept(caplog):
    index = local(message(3), message(4))
    assert caplog.records == []
    index.apply(message(9))
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.ERROR, "worker 0: event 9 was kept after 4")
    ]
    assert shown(index.get_events_in_id_range(5)) == ([9], 9)


def test_an_event_that_the_tree_refuses_is_kept_in_the_ring():
    index = local(message(0, Removed((1,))), message(1, Stored(77, (2,), (2,))))
    assert shown(index.get_events_in_id_range(0)) == ([0, 1], 1)
    assert shown(index.get_events_in_id_range()) == ("dump of 0", 1)


def test_a_value_that_is_not_an_event_is_refused_and_not_kept():
    index = local(message(0))
    with pytest.raises(TypeError, match="takes a RouterEvent, got 'x'"):
        index.apply("x")
    assert index.newest == 0


def test_a_ring_made_smaller_forgets_the_oldest():
    index = local(*TEN)
    assert (index.oldest, index.newest, index.ring) == (5, 14, 4096)
    index.ring = 2
    assert (index.oldest, index.newest, index.ring) == (13, 14, 2)
    index.apply(message(15))
    assert repr(index) == "<LocalIndex with events 14 to 15>"
    assert repr(LocalIndex()) == "<LocalIndex with no event>"


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None, "4"])
def test_an_invalid_ring_size_is_refused(size):
    index = LocalIndex(3)
    for call in (lambda: LocalIndex(size), lambda: setattr(index, "ring", size)):
        with pytest.raises(ValueError, match=rf"^ring is a number of events, an integer of at least 1, got {size!r}$"):
            call()
    assert index.ring == 3


def test_a_ring_can_be_at_most_as_long_as_a_deque():
    index = LocalIndex(sys.maxsize)
    for call in (lambda: LocalIndex(2**100), lambda: setattr(index, "ring", sys.maxsize + 1)):
        with pytest.raises(ValueError, match=rf"^ring is a number of events, at most {sys.maxsize}, got \d+$"):
            call()
    assert sys.maxsize == index.ring


@pytest.mark.parametrize(("name", "start", "end"), [("start", -1, None), ("end", 3, "9"), ("start", True, None)])
def test_an_invalid_event_id_is_refused(name, start, end):
    with pytest.raises(ValueError, match=rf"^{name} is an event id, an integer of at least 0, or None, got "):
        LocalIndex().get_events_in_id_range(start, end)


# -------------------------------------------------------------------------------------------------- RouterCursor

ALL = WorkerQuery(0)


def at(last, worker=0, rank=0):
    """Return a cursor that is at an id."""
    cursor = RouterCursor()
    query = cursor.observe(message(last, worker=worker, rank=rank)).ask
    cursor.answered(query, TreeDump((message(0),), last))
    assert last == cursor.last(worker, rank)
    return cursor


def test_the_first_event_is_applied_and_all_events_are_queried():
    cursor = RouterCursor()
    assert cursor.last(0) is None
    assert RecoveryStep(apply=(message(7),), ask=ALL) == cursor.observe(message(7))
    assert cursor.last(0) == 7


@pytest.mark.parametrize("got", [0, 9, 10])
def test_an_id_up_to_the_last_is_dropped(got):
    cursor = at(10)
    assert RecoveryStep() == cursor.observe(message(got))
    assert cursor.last(0) == 10


def test_the_next_id_is_applied():
    cursor = at(10)
    assert RecoveryStep(apply=(message(11),)) == cursor.observe(message(11))
    assert cursor.last(0) == 11


def test_after_a_gap_the_worker_is_queried_for_the_missing_events():
    cursor = at(10)
    assert RecoveryStep(ask=WorkerQuery(0, 11)) == cursor.observe(message(15))
    assert cursor.last(0) == 10


@pytest.mark.parametrize(
    ("events", "last", "applied", "stands_at"),
    [
        ([11, 12, 13, 14, 15], 15, [11, 12, 13, 14, 15], 15),
        ([11, 12, 13, 14, 15, 16, 17], 17, [11, 12, 13, 14, 15, 16, 17], 17),  # the worker is ahead
        ([14, 15], 15, [14, 15], 15),  # a Cleared made the rest void
        ([9, 10, 11, 12, 13, 14, 15], 15, [11, 12, 13, 14, 15], 15),  # more than was queried
        ([11, 12, 13, 14], 14, [11, 12, 13, 14, 15], 15),  # the event that caused the query comes after the answer
        ([], 9, [15], 15),  # the worker is behind: it has no more events
    ],
)
def test_after_events_the_cursor_is_at_the_later_of_the_last_and_the_current_id(events, last, applied, stands_at):
    cursor = at(10)
    query = cursor.observe(message(15)).ask
    step = cursor.answered(query, Events(tuple(map(message, events)), last))
    assert (False, applied, None) == (step.replace, ids(step.apply), step.ask)
    assert stands_at == cursor.last(0)


def test_after_a_dump_the_cursor_is_at_its_last_event_id():
    # dynamo #7072: at an id of the dump's own events it would query again at each event
    cursor = at(10)
    query = cursor.observe(message(15)).ask
    dump = TreeDump(tuple(map(message, range(3))), 17)
    assert RecoveryStep(replace=True, apply=dump.events) == cursor.answered(query, dump)
    assert cursor.last(0) == 17
    assert RecoveryStep() == cursor.observe(message(17))
    assert RecoveryStep(apply=(message(18),)) == cursor.observe(message(18))


def test_an_empty_dump_does_not_drop_the_event_that_caused_the_query():
    cursor = RouterCursor()
    query = cursor.observe(message(0)).ask
    assert RecoveryStep(replace=True, apply=(message(0),)) == cursor.answered(query, TreeDump((), 0))
    assert cursor.last(0) == 0


def test_events_wait_while_a_query_is_open():
    cursor = at(10)
    query = cursor.observe(message(12)).ask
    for later in (14, 13, 13, 10):
        assert RecoveryStep() == cursor.observe(message(later))
    assert RecoveryStep(apply=(message(11), message(12), message(13), message(14))) == cursor.answered(
        query, Events((message(11), message(12)), 12)
    )
    assert cursor.last(0) == 14


def test_events_missing_among_the_waiting_ones_are_queried_at_once():
    cursor = at(10)
    query = cursor.observe(message(12)).ask
    cursor.observe(message(14))
    cursor.observe(message(16))
    step = cursor.answered(query, Events((message(11), message(12)), 12))
    assert RecoveryStep(apply=(message(11), message(12)), ask=WorkerQuery(0, 13)) == step
    step = cursor.answered(step.ask, Events((message(13), message(14), message(15)), 15))
    assert RecoveryStep(apply=(message(13), message(14), message(15), message(16))) == step


def test_a_worker_that_returns_nothing_is_not_queried_again_at_once():
    cursor = at(10)
    query = cursor.observe(message(12)).ask
    cursor.observe(message(15))
    assert RecoveryStep(apply=(message(12), message(15))) == cursor.answered(query, Events((), 10))


@pytest.mark.parametrize("answer", [None, TooNew(11, 10, 10), InvalidRange(11, 10)])
def test_without_an_answer_the_next_event_causes_a_query_again(answer):
    cursor = at(10)
    query = cursor.observe(message(12)).ask
    assert RecoveryStep() == cursor.answered(query, answer)
    assert cursor.last(0) == 10
    assert RecoveryStep(ask=WorkerQuery(0, 11)) == cursor.observe(message(13))


def test_without_an_answer_to_the_first_query_the_next_event_queries_all_again():
    cursor = RouterCursor()
    assert RecoveryStep() == cursor.answered(cursor.observe(message(5)).ask, None)
    assert RecoveryStep(apply=(message(6),), ask=ALL) == cursor.observe(message(6))


def test_a_cleared_after_a_gap_causes_a_query_like_other_events():
    cursor = at(10)
    query = cursor.observe(message(15, Cleared())).ask
    assert WorkerQuery(0, 11) == query
    cleared = Events((message(15, Cleared()),), 15)
    assert RecoveryStep(apply=cleared.events) == cursor.answered(query, cleared)
    assert RecoveryStep() == cursor.observe(message(14))


def test_a_late_cleared_is_dropped():
    assert RecoveryStep() == at(10).observe(message(10, Cleared()))


def test_each_rank_of_each_worker_has_its_own_cursor():
    cursor = at(10, worker=1, rank=1)
    for worker, rank in ((1, 0), (0, 1)):
        query = WorkerQuery(worker, dp_rank=rank)
        assert query == cursor.observe(message(3, worker=worker, rank=rank)).ask
    assert WorkerQuery(1, 11, dp_rank=1) == cursor.observe(message(12, worker=1, rank=1)).ask
    assert [cursor.last(*key) for key in ((1, 1), (1, 0), (0, 1), (0, 0))] == [10, 3, 3, None]


def test_after_a_worker_is_forgotten_its_next_event_is_the_first():
    cursor = RouterCursor()
    for rank in (0, 1):
        cursor.observe(message(9, rank=rank))
    cursor.forget(0, 1)
    assert [cursor.last(0, rank) for rank in (0, 1)] == [9, None]
    cursor.forget(0)
    assert cursor.observe(message(0)).ask == ALL


def test_an_answer_from_before_a_worker_was_forgotten_is_ignored():
    cursor = at(10)
    query = cursor.observe(message(12)).ask
    cursor.forget(0)
    answer = Events((message(11), message(12)), 12)
    assert RecoveryStep() == cursor.answered(query, answer)
    cursor.observe(message(0))
    assert RecoveryStep() == cursor.answered(query, answer)
    assert cursor.last(0) == 0


def test_an_unannounced_restart_looks_like_duplicates():
    cursor = at(10)
    assert [RecoveryStep()] * 3 == [cursor.observe(message(event_id)) for event_id in range(3)]


@pytest.mark.parametrize("wrong", ["x", 3, [message(1)]])
def test_values_that_are_neither_events_nor_answers_are_refused(wrong):
    cursor = at(10)
    with pytest.raises(TypeError, match=r"^RouterCursor\.observe takes a RouterEvent, got "):
        cursor.observe(wrong)
    query = cursor.observe(message(12)).ask
    with pytest.raises(TypeError, match=r"^an answer is Events, TreeDump, TooNew, InvalidRange or None, got "):
        cursor.answered(query, wrong)
    with pytest.raises(TypeError, match=r"^RouterCursor\.answered takes the WorkerQuery that was asked, got "):
        cursor.answered(wrong, None)
    assert RecoveryStep(apply=(message(11), message(12))) == cursor.answered(
        query, Events((message(11), message(12)), 12)
    )


# --------------------------------------------------------------------------------------------------- both together


class Router:
    """A router that recovers, as the documentation shows it."""

    def __init__(self, ask):
        self.tree, self.cursor, self.ask = RadixIndex(), RouterCursor(), ask
        self.applied = []

    def take(self, worker, rank, step):
        if step.replace:
            self.tree.remove_worker_dp_rank(worker, rank)
        for event in step.apply:
            self.applied.append(event)
            with suppress(RadixIndexError):
                self.tree.apply(event)

    def apply(self, event):
        step = self.cursor.observe(event)
        self.take(event.worker_id, event.event.dp_rank, step)
        while step.ask is not None:
            query = step.ask
            step = self.cursor.answered(query, self.ask(*query))
            self.take(query.worker_id, query.dp_rank, step)


@st.composite
def honest_streams(draw, length=30):
    """Events of a right engine: children are removed before their parents, and no block is stored twice."""
    held, data = {}, []  # block: parent
    fresh = iter(range(1, 10**6))
    for _ in range(draw(st.integers(1, length))):
        leaves = [block for block in held if block not in held.values()]
        kind = draw(st.sampled_from("SSSSRRC"))
        if kind == "R" and leaves:
            gone = draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=2, unique=True))
            for block in gone:
                del held[block]
            data.append(Removed(tuple(gone)))
        elif kind == "C":
            held.clear()
            data.append(Cleared())
        else:
            parent = draw(st.none() | st.sampled_from(sorted(held))) if held else None
            blocks = [next(fresh) for _ in range(draw(st.integers(1, 3)))]
            data.append(Stored(parent, tuple(blocks), tuple(blocks)))
            for block in blocks:
                held[block], parent = parent, block
    return [message(event_id, each) for event_id, each in enumerate(data)]


def blocks_of(tree):
    return {event.event.data for event in tree.dump_events()}


@given(honest_streams(), st.integers(1, 40), st.data())
def test_a_router_that_queries_ends_in_sync_whatever_is_lost_doubled_or_late(stream, ring, data):
    worker, truth = LocalIndex(ring), RadixIndex()
    asked = []

    def ask(*query):
        asked.append(query)
        return worker.get_events_in_id_range(query[1], query[2])

    router = Router(ask)
    late, arrived = [], 0
    for position, event in enumerate(stream):
        worker.apply(event)
        truth.apply(event)
        last = position == len(stream) - 1
        fate = "arrives" if last else data.draw(st.sampled_from(["arrives", "arrives", "lost", "twice", "late"]))
        coming = {"arrives": [event], "lost": [], "twice": [event, event], "late": []}[fate]
        if fate == "late":
            late.append(event)
        elif late and data.draw(st.booleans()):
            coming = [*coming, late.pop()]
        for each in coming:
            arrived += 1
            router.apply(each)
    for each in late:
        arrived += 1
        router.apply(each)

    assert blocks_of(truth) == blocks_of(router.tree)
    assert stream[-1].event.event_id == router.cursor.last(0)
    assert arrived >= len(asked)


@given(honest_streams(), st.integers(1, 40), st.data())
def test_a_router_ends_in_sync_if_answers_come_late_with_events_in_between(stream, ring, data):
    worker, truth, router = LocalIndex(ring), RadixIndex(), Router(None)
    waiting, questions, arrived = [], 0, 0  # at most one open query with its answer

    def take(step):
        nonlocal questions
        router.take(0, 0, step)
        if step.ask is not None:
            questions += 1
            assert waiting == []
            waiting.append((step.ask, worker.get_events_in_id_range(step.ask.start, step.ask.end)))

    for position, event in enumerate(stream):
        worker.apply(event)
        truth.apply(event)
        if position == len(stream) - 1 or data.draw(st.booleans()):
            arrived += 1
            take(router.cursor.observe(event))
        if waiting and data.draw(st.booleans()):
            take(router.cursor.answered(*waiting.pop()))
    while waiting:
        take(router.cursor.answered(*waiting.pop()))

    assert blocks_of(truth) == blocks_of(router.tree)
    assert arrived >= questions


@given(honest_streams(), st.sets(st.integers(0, 29)))
def test_with_a_long_ring_every_event_is_applied_once_and_in_order(stream, lost):
    worker = LocalIndex()
    router = Router(lambda *query: worker.get_events_in_id_range(query[1]))
    router.apply(message(0, Cleared()))
    router.applied.clear()
    for event in stream:
        shifted = message(event.event.event_id + 1, event.event.data)
        worker.apply(shifted)
        if event.event.event_id not in lost:
            router.apply(shifted)

    applied = ids(router.applied)
    assert sorted(set(applied)) == applied


def test_a_cursor_works_with_awaited_queries():
    worker = local(*map(message, range(6)))
    tree, cursor = RadixIndex(), RouterCursor()

    async def ask(worker_id, start, end, dp_rank):
        return worker.get_events_in_id_range(start, end)

    async def apply(event):
        step = cursor.observe(event)
        while True:
            if step.replace:
                tree.remove_worker_dp_rank(event.worker_id, event.event.dp_rank)
            for each in step.apply:
                tree.apply(each)
            if step.ask is None:
                return
            step = cursor.answered(step.ask, await asyncio.create_task(ask(*step.ask)))

    async def both():
        await asyncio.gather(apply(message(3)), apply(message(5)))

    asyncio.run(both())
    assert tree.num_blocks(0) == 6
    assert cursor.last(0) == 5
