"""Eviction order of LruEvictor (reference: the test of dynamo-mocker 1.0.2's `evictor.rs`)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock.engines.dynamo.hash_cache import LruEvictor

TABLE = [
    ("", ""),
    ("4 3 2 1 5", "4 3 2 1 5"),
    ("4 3 2 1 5 1 4 2", "3 5 1 4 2"),
    ("4 3 2 1 5 1 4 2 <4", "4 3 5 1 2"),
    ("1 2 <3 <4", "4 3 1 2"),
    ("1 2 <3 <4 3", "4 1 2 3"),
    ("<1 <2 <1", "1 2"),
    ("1 2 3 -2 2", "1 3 2"),
    ("1 2 -1 -2 -9", ""),
    ("<1 2 -1 1", "2 1"),
]
"""Steps (n: insert, <n: push to the front, -n: remove) and the resulting eviction order."""


@pytest.mark.parametrize(("steps", "gone"), TABLE)
def test_the_slot_with_the_lowest_key_is_evicted_first(steps, gone):
    evictor = LruEvictor()
    for step in steps.split():
        do = {"<": evictor.push_front, "-": evictor.remove}.get(step[0], evictor.insert)
        do(int(step.lstrip("<-")))
    expected = [int(item) for item in gone.split()]
    assert (len(evictor), list(evictor)) == (len(expected), expected)
    assert [evictor.evict() for _ in range(len(expected) + 1)] == [*expected, None]
    assert len(evictor) == 0


def test_an_evictor_reports_membership_and_whether_a_slot_was_removed():
    evictor = LruEvictor()
    evictor.insert("a")
    assert ("a" in evictor, "b" in evictor) == (True, False)
    assert (evictor.remove("a"), evictor.remove("a"), evictor.remove("b")) == (True, False, False)
    assert "a" not in evictor


def test_a_cleared_evictor_is_empty():
    evictor = LruEvictor()
    evictor.insert(1)
    evictor.push_front(2)
    evictor.clear()
    assert (len(evictor), evictor.evict()) == (0, None)


steps = st.lists(st.tuples(st.sampled_from(["insert", "push_front", "remove", "evict"]), st.integers(0, 5)))


@given(steps=steps)
def test_an_evictor_evicts_in_the_order_of_the_signed_counter_of_the_original(steps):
    """Compare with the rule of the original, written out."""
    evictor, numbers, up, down = LruEvictor(), {}, 0, 0
    for kind, item in steps:
        if kind == "insert":
            up += 1
            numbers[item] = up
            evictor.insert(item)
        elif kind == "push_front":
            down -= 1
            numbers[item] = down
            evictor.push_front(item)
        elif kind == "remove":
            assert (numbers.pop(item, None) is not None) == evictor.remove(item)
        else:
            first = min(numbers, key=numbers.get, default=None)
            numbers.pop(first, None)
            assert first == evictor.evict()
        assert sorted(numbers, key=numbers.get) == list(evictor)
