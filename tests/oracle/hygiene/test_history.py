"""Lookups in the events of one worker and rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import Cleared, EventLog, KvCacheEvent, Removed, RouterEvent, Stored
from pytest_kvmock.oracle.hygiene.history import History


def event(data, event_id=0, tokens=None):
    return RouterEvent(0, KvCacheEvent(event_id, data), token_ids=tokens)


def history_of(*events, block_size=2):
    history = History(block_size)
    history.events += events
    return history


def test_a_chain_is_read_with_its_local_hashes_and_tokens():
    history = history_of(
        event(Stored(None, (1, 2), (10, 20)), tokens=((0, 1), (2, 3))), event(Stored(2, (3,), (30,)), tokens=((4, 5),))
    )
    assert history.read_chain(3, with_tokens=True) == ((1, 2, 3), (10, 20, 30), (0, 1, 2, 3, 4, 5))
    assert history.read_chain(2) == ((1, 2), (10, 20), None)


def test_a_chain_uses_the_latest_stored_of_each_block():
    history = history_of(
        event(Stored(None, (1, 2), (10, 20)), tokens=((0, 1), (2, 3))),
        event(Stored(None, (1,), (11,)), tokens=((8, 9),)),
    )
    assert history.read_chain(2, with_tokens=True) == ((1, 2), (11, 20), (8, 9, 2, 3))


@pytest.mark.parametrize("tokens", [None, ((0, 1),), ((0, 1), (2,))], ids=["none", "too few", "not a whole block"])
def test_a_chain_has_no_tokens_if_a_block_lacks_them(tokens):
    history = history_of(event(Stored(None, (1, 2), (10, 20)), tokens=tokens))
    assert history.read_chain(2, with_tokens=True) == ((1, 2), (10, 20), None)


class Row(tuple):
    """Token ids of a block that compare, and convert to bool, as arrays do."""

    __slots__ = ()

    def __bool__(self):
        raise ValueError("the truth of an array is ambiguous")

    def __eq__(self, other):
        raise ValueError("arrays compare element by element")

    __hash__ = None


def test_token_ids_may_be_arrays():
    stored = Stored(None, (1, 2), (10, 20))
    history = history_of(event(stored, tokens=Row((Row((0, 1)), Row((2, 3))))))
    assert history.read_chain(2, with_tokens=True).tokens == (0, 1, 2, 3)


def test_an_added_chain_is_found_at_the_next_lookup():
    history = history_of(event(Stored(None, (1,), (1,))))
    assert (history.stored_at[1], history.was_stored(2)) == (0, False)
    history.events += [event(Removed((1,))), event(Cleared()), event(Stored(None, (1, 2), (1, 2)))]
    assert (history.stored_at, history.removed_at, history.cleared_at) == ({1: 3, 2: 3}, {1: 1}, [2])
    assert history.leaves() == [2]


blocks = st.integers(1, 6)
stored = st.builds(
    lambda parent, names: Stored(parent, tuple(names), tuple(name * 10 for name in names)),
    st.none() | blocks,
    st.lists(blocks, min_size=1, max_size=4),
)


@given(st.lists(stored, min_size=1, max_size=8), st.data())
def test_reading_a_chain_at_once_equals_reading_it_block_by_block(events, data):
    history = history_of(*(event(each, event_id) for event_id, each in enumerate(events)))
    block = data.draw(st.sampled_from(sorted(history.stored_at)))
    chain = history.chain(block)
    assert (tuple(chain), tuple(map(history.local_hash, chain)), None) == history.read_chain(block, with_tokens=True)


def test_a_log_finds_events_by_identity():
    log = EventLog()
    first, same_id = event(Stored(None, (1,), (1,)), 5), event(Stored(None, (1,), (1,)), 5)
    for each in (first, same_id, first):
        log.append(each)
    assert [entry.position for entry in log.find([first])] == [0, 2]
    assert log.positions([same_id, first, event(Cleared(), 5)]) == [1, 2, -1]
