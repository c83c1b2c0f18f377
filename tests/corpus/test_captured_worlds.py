"""A check of the capture of a random world finds the same problems as the world did."""

import logging

import pytest
from captured_worlds import captured_world
from depth import few

IN_ONE_TEST = 8


@pytest.fixture(autouse=True)
def _no_log():
    """Disable the log: messages about guesses of a recovery would hide the seeds that differ."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", few(range(0, 48, IN_ONE_TEST)))
def test_a_check_of_a_capture_finds_the_problems_of_its_world(first, tmp_path):
    differing = []
    for seed in range(first, first + IN_ONE_TEST):
        found, again = captured_world(seed, tmp_path / f"{seed}.jsonl")
        if found != again:
            differing.append(seed)

    assert differing == []
