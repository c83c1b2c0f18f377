"""The search alone: its result fails, and nothing more can be left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock.harness.reduce.search import Budget, Spent, minimal


@given(st.sets(st.integers(0, 199), max_size=8), st.integers(0, 200))
def test_the_search_finds_exactly_the_items_that_are_needed(needed, count):
    needed = {n for n in needed if n < count}

    assert sorted(needed) == [*minimal(range(count), needed.issubset)]


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 30))
def test_no_single_item_can_be_left_out_of_the_result_of_the_search(items, total):
    def fails(part):
        return sum(part) >= total

    if not fails(items):
        return
    found = [*minimal(items, fails)]
    assert fails(found)
    assert not any(fails(found[:i] + found[i + 1 :]) for i in range(len(found)))


def test_an_item_that_can_go_only_after_another_one_goes_too():
    """2 is needed as long as 1, which stands before it, is there."""
    assert [*minimal([0, 2, 1], lambda part: 0 in part and (1 not in part or 2 in part))] == [0]
    assert [*minimal([0, 1, 2], lambda part: 0 in part and (1 not in part or 2 in part))] == [0]


def test_few_needed_items_among_many_take_few_attempts():
    attempts = 0

    def fails(part):
        nonlocal attempts
        attempts += 1
        return {17, 4_711, 9_998}.issubset(part)

    assert [*minimal(range(10_000), fails)] == [17, 4_711, 9_998]
    assert attempts < 100


def test_a_budget_of_two_allows_two_steps():
    budget = Budget(2)
    budget.spend()
    budget.spend()
    with pytest.raises(Spent):
        budget.spend()


def test_a_callers_clock_ends_a_budget():
    answers = iter([False, True])
    budget = Budget(10, lambda: next(answers))
    budget.spend()
    with pytest.raises(Spent):
        budget.spend()
