"""RadixIndex against independent models, over random streams."""

import contextlib
import copy
import random

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from index_steps import chain, event
from plain_tree import PlainTree

from pytest_kvmock import Cleared, Removed, Stored, sequence_hashes
from pytest_kvmock.oracle import RadixIndex, RadixIndexError

WORKERS, RANKS = 2, 2
KEYS = [(w, r) for w in range(WORKERS + 1) for r in range(RANKS)]

small = st.integers(1, 3)
hashes = st.integers(1, 5)
queries = st.lists(small, max_size=7)


@st.composite
def any_event(draw):
    """Events that need not make sense: few hashes, so that they collide, are their own parents and make cycles."""
    kind = draw(st.sampled_from("SSSSRRC"))
    if kind == "S":
        blocks = draw(st.lists(st.tuples(hashes, small), max_size=4))
        parent = draw(st.none() | hashes)
        data = Stored(parent, tuple(h for h, _ in blocks), tuple(local for _, local in blocks))
    elif kind == "R":
        data = Removed(tuple(draw(st.lists(hashes, max_size=3))))
    else:
        data = Cleared()
    return event(draw(st.integers(0, WORKERS - 1)), data, draw(st.integers(0, RANKS - 1)))


calls = st.tuples(st.sampled_from(["remove_worker", "clear_all_blocks"]), st.integers(0, WORKERS))


def rule_of(index, reported):
    try:
        index.apply(reported)
    except RadixIndexError as error:
        return error.rule
    return None


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(any_event() | any_event() | any_event() | calls, max_size=25), st.lists(queries, min_size=3), st.booleans()
)
def test_any_stream_gives_the_same_errors_and_matches_as_the_plain_tree(steps, asked, e1):
    index, model = RadixIndex(clears="worker" if e1 else "rank"), PlainTree(e1=e1)
    for step in steps:
        if isinstance(step, tuple):
            name, worker = step
            getattr(index, name)(worker)
            getattr(model, name)(worker)
        else:
            assert model.apply(step) == rule_of(index, step)
        for query in asked:
            assert model.find(query, KEYS) == index.find_matches(query).scores
            assert model.find_early(query, KEYS) == index.find_matches(query, early_exit=True).scores
    assert {key: len(blocks) for key, blocks in model.known.items()} == {k: index.num_blocks(*k) for k in index.workers}


def random_step(rnd):
    """Return a step like `any_event` and `calls`, without Hypothesis: longer streams in less time, no shrinking."""
    worker, rank, kind = rnd.randrange(WORKERS), rnd.randrange(RANKS), rnd.random()
    if kind < 0.04:
        return rnd.choice(["remove_worker", "clear_all_blocks"]), worker
    if kind < 0.06:
        data = Cleared()
    elif kind < 0.35:
        data = Removed(tuple(rnd.randint(1, 6) for _ in range(rnd.choice([1, 1, 2, 3]))))
    else:
        count = rnd.randint(0, 4)
        block_hashes = tuple(rnd.randint(1, 6) for _ in range(count))
        parent = rnd.choice([None, None, *range(1, 7)])
        data = Stored(parent, block_hashes, tuple(rnd.randint(1, 3) for _ in range(count)))
    return event(worker, data, rank)


@pytest.mark.parametrize("seed", range(100))
def test_long_streams_give_the_same_errors_and_matches_as_the_plain_tree(seed):
    rnd = random.Random(seed)
    e1 = rnd.random() < 0.5
    index, model = RadixIndex(clears="worker" if e1 else "rank"), PlainTree(e1=e1)
    for _ in range(80):
        step = random_step(rnd)
        if isinstance(step, tuple):
            name, worker = step
            getattr(index, name)(worker)
            getattr(model, name)(worker)
        else:
            assert model.apply(step) == rule_of(index, step)
        query = [rnd.randint(1, 3) for _ in range(rnd.randint(0, 8))]
        assert model.find(query, KEYS) == index.find_matches(query).scores
        assert model.find_early(query, KEYS) == index.find_matches(query, early_exit=True).scores


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(any_event(), max_size=20))
def test_a_dump_of_any_stream_ends_and_replays_without_an_error(steps):
    index = RadixIndex()
    for step in steps:
        rule_of(index, step)
    copy = RadixIndex()
    dumped = index.dump_events()
    assert list(range(len(dumped))) == [e.event.event_id for e in dumped]
    assert [None] * len(dumped) == [rule_of(copy, e) for e in dumped]


@st.composite
def sane_stream(draw, *, leaves_first):
    """Events of a right engine: hashes are chains, parents are held, removed blocks are held."""
    held = {}
    events = []
    for _ in range(draw(st.integers(0, 20))):
        key = (draw(st.integers(0, WORKERS - 1)), draw(st.integers(0, RANKS - 1)))
        paths = held.setdefault(key, set())
        kind = draw(st.sampled_from("SSSRRC")) if paths else "S"
        if kind == "S":
            before = draw(st.sampled_from([(), *sorted(paths)]))
            local = draw(st.lists(small, min_size=1, max_size=4))
            events.append(chain(key[0], local, before, rank=key[1]))
            paths.update((*before, *local[: i + 1]) for i in range(len(local)))
        elif kind == "R":
            gone = draw(st.lists(st.sampled_from(sorted(paths)), min_size=1, max_size=3, unique=True))
            if leaves_first:
                gone = {path for path in paths if any(path[: len(g)] == g for g in gone)}
            ordered = sorted(gone, key=lambda path: (-len(path), path))
            events.append(event(key[0], Removed(tuple(sequence_hashes(path)[-1] for path in ordered)), key[1]))
            paths.difference_update(gone)
        else:
            events.append(event(key[0], Cleared(), key[1]))
            paths.clear()
    return events, held


@settings(max_examples=examples(150), deadline=None)
@given(sane_stream(leaves_first=True), st.lists(queries, min_size=3))
def test_a_right_stream_gives_a_set_of_prefixes_per_worker(stream, asked):
    events, held = stream
    index = RadixIndex()
    for reported in events:
        index.apply(reported)
    for query in [*asked, *(list(path) for paths in held.values() for path in paths)]:
        expected = {}
        for key, paths in held.items():
            depth = next((i for i in range(len(query)) if tuple(query[: i + 1]) not in paths), len(query))
            if depth:
                expected[key] = depth
        assert index.find_matches(query).scores == expected
    assert {key: len(paths) for key, paths in held.items()} == {key: index.num_blocks(*key) for key in held}


def rows(index):
    return {(e.worker_id, e.event.dp_rank, repr(e.event.data)) for e in index.dump_events()}


@settings(max_examples=examples(150), deadline=None)
@given(sane_stream(leaves_first=False), st.lists(queries, min_size=3))
def test_replaying_a_dump_gives_the_same_index(stream, asked):
    index, copy = RadixIndex(), RadixIndex()
    for reported in stream[0]:
        index.apply(reported)
    for reported in index.dump_events():
        copy.apply(reported)
    assert rows(index) == rows(copy)
    for query in asked:
        assert index.find_matches(query) == copy.find_matches(query)


@given(st.lists(any_event(), max_size=20), st.lists(any_event(), max_size=10), st.lists(queries, min_size=3))
def test_a_copy_of_an_index_is_equal_and_independent(before, after, asked):
    index, expected = RadixIndex(), RadixIndex()
    for reported in before:
        rule_of(index, reported)
        rule_of(expected, reported)
    twin = copy.deepcopy(index)
    assert [rule_of(twin, reported) for reported in after] == [rule_of(expected, reported) for reported in after]
    for query in asked:
        assert twin.find_matches(query) == expected.find_matches(query)
    again = RadixIndex()
    for reported in before:
        rule_of(again, reported)
    for query in asked:
        assert again.find_matches(query) == index.find_matches(query)


def test_a_long_chain_can_be_deep_copied():
    index = RadixIndex(count_copies=True)
    index.apply(chain(0, range(5_000)))
    assert copy.deepcopy(index).find_matches(range(5_000)).scores == {(0, 0): 5_000}


@settings(max_examples=examples(500))
@given(st.lists(any_event(), max_size=25), st.lists(queries, min_size=1, max_size=4), st.booleans())
def test_removing_blocks_at_once_equals_removing_them_one_by_one(events, asked, count_copies):
    one_by_one, at_once = RadixIndex(count_copies=count_copies), RadixIndex(count_copies=count_copies)
    for each in events:
        if isinstance(each.data, Removed):
            at_once.remove(*each.key, each.data.block_hashes)
            singles = [event(each.worker_id, Removed((block,)), each.dp_rank) for block in each.data.block_hashes]
        else:
            singles = [each]
            with contextlib.suppress(RadixIndexError):
                at_once.apply(each)
        for single in singles:
            with contextlib.suppress(RadixIndexError):
                one_by_one.apply(single)
    for query in asked:
        assert one_by_one.find_matches(query) == at_once.find_matches(query)
    assert one_by_one.dump_events() == at_once.dump_events()
    assert [one_by_one.num_blocks(*key) for key in KEYS] == [at_once.num_blocks(*key) for key in KEYS]
