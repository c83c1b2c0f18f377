"""SGLang's event queue: which events are merged with the previous event."""

import pytest

from pytest_kvmock import Cleared, Removed, Stored
from pytest_kvmock.engines.sglang.event_queue import EventQueue

FIRST = (None, (1, 2), (11, 12), [(5,), (6,)], "s")

NEXT = {
    "goes on": ((2, (3,), (13,), [(7,)], "s"), [((1, 2, 3), (11, 12, 13), [(5,), (6,), (7,)])]),
    "of another parent": ((1, (3,), (13,), [(7,)], "s"), None),
    "a root": ((None, (3,), (13,), [(7,)], "s"), None),
    "of another salt": ((2, (3,), (13,), [(7,)], None), None),
    "without tokens": ((2, (3,), (13,), None, "s"), None),
}


@pytest.mark.parametrize("case", NEXT)
def test_two_consecutive_stored_are_merged_only_if_the_second_continues_the_first(case):
    then, expected = NEXT[case]
    queue = EventQueue()
    for stored in (FIRST, then):
        queue.stored(*stored)
    taken = [(event.data.block_hashes, event.data.tokens_hashes, event.token_ids) for event in queue.take()]
    assert taken == (expected or [FIRST[1:4], then[1:4]])


def test_events_of_one_kind_are_not_merged_across_an_event_of_another_kind():
    queue = EventQueue()
    queue.stored(*FIRST)
    queue.removed([2])
    queue.removed((1,))
    queue.stored(None, (1,), (11,), None)
    queue.cleared()
    queue.removed([9])
    assert len(queue) == 5
    assert [
        Stored(None, (1, 2), (11, 12)),
        Removed((2, 1)),
        Stored(None, (1,), (11,)),
        Cleared(),
        Removed((9,)),
    ] == [event.data for event in queue.take()]
    assert queue.take() == []
