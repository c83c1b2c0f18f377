"""The texts of validation errors."""

from __future__ import annotations

import math

import pytest

from pytest_kvmock.values.checks import check_integer, check_number, did_you_mean, not_allowed_text, unknown_text

RULES = ["parent_block_not_found", "block_not_found", "event_id_gap", "wrong_hash"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong_hsah", f"unknown rule 'wrong_hsah'; did you mean 'wrong_hash'? known: {', '.join(RULES)}"),
        (
            "parent_not_found",
            f"unknown rule 'parent_not_found'; did you mean 'parent_block_not_found'? known: {', '.join(RULES)}",
        ),
        ("nonsense", f"unknown rule 'nonsense'; known: {', '.join(RULES)}"),
        (7, f"unknown rule 7; known: {', '.join(RULES)}"),
    ],
)
def test_the_error_for_an_unknown_name_suggests_the_nearest_and_lists_all_known_names(name, message):
    assert unknown_text("rule", name, RULES) == message


def test_the_error_for_a_disallowed_value_suggests_the_nearest_and_lists_the_allowed_ones():
    assert not_allowed_text("fial", ("fail", "warn")) == "got 'fial'; did you mean 'fail'? allowed: fail, warn"
    assert not_allowed_text(None, ("fail", "warn")) == "got None; allowed: fail, warn"


def test_did_you_mean_suggests_the_nearest_names():
    assert did_you_mean("lruu", ["lru", "lineage"]) == "; did you mean 'lru'?"
    assert did_you_mean("nam", ["names", "name", "rank"]) == "; did you mean 'name' or 'names'?"
    assert did_you_mean("nonsense", ["lru", "lineage"]) == ""


def test_a_common_prefix_does_not_make_a_name_similar():
    known = ["kvmock_backends", "kvmock_show_log", "kvmock_seed"]
    assert did_you_mean("kvmock_bakends", known) == "; did you mean 'kvmock_backends'?"
    assert did_you_mean("kvmock_zzzz", known) == ""


@pytest.mark.parametrize("value", [1, 7, 2**64])
def test_an_integer_of_at_least_n_is_returned(value):
    assert value == check_integer("size", value, 1)


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("1", TypeError), (1.0, TypeError)]
)
def test_integers_below_n_and_other_types_are_refused(value, error):
    with pytest.raises(ValueError, match=rf"^size must be an integer of at least 1 \(blocks\), got {value!r}$"):
        check_integer("size", value, 1, " (blocks)")
    with pytest.raises(error, match=rf"^size must be an integer of at least 1, got {value!r}$"):
        check_integer("size", value, 1, wrong_type=TypeError)


@pytest.mark.parametrize("value", [0, 0.5, 10, 1e308])
def test_a_finite_number_is_returned_as_a_float(value):
    assert (value, float) == (check_number("ratio", value), type(check_number("ratio", value)))


@pytest.mark.parametrize(
    "value", [-1, -0.5, math.nan, math.inf, 10**400, True, "1", None], ids=lambda value: f"{value}"[:9]
)
def test_a_value_that_is_not_a_finite_number_in_range_is_refused(value):
    given = f"{value!r:.80}"
    for limits, allowed in (
        ({}, "a finite number of at least 0"),
        ({"unit": " seconds"}, "a finite number of at least 0 seconds"),
        ({"most": 1}, "a finite number from 0 to 1"),
    ):
        with pytest.raises(ValueError) as caught:
            check_number("ratio", value, **limits)
        assert str(caught.value) == f"ratio must be {allowed}, got {given}"


def test_a_number_above_the_maximum_is_refused():
    assert check_number("ratio", 1, 0, 1) == 1.0
    with pytest.raises(ValueError, match=r"^ratio must be a finite number from 0.5 to 1, got 1.5$"):
        check_number("ratio", 1.5, 0.5, 1)
