"""Captures of random worlds: a check finds what the world has found."""

import logging

import pytest
from captured_worlds import captured_world
from depth import few

IN_ONE_TEST = 8


@pytest.fixture(autouse=True)
def _no_log():
    """What a recovery had to guess is logged; it would bury the seeds that differ."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", few(range(0, 48, IN_ONE_TEST)))
def test_a_capture_of_any_world_is_judged_as_the_world_was(first, tmp_path):
    differing = []
    for seed in range(first, first + IN_ONE_TEST):
        found, again = captured_world(seed, tmp_path / f"{seed}.jsonl")
        if found != again:
            differing.append(seed)

    assert differing == []
