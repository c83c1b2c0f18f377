"""The problems of random worlds have the recorded digests; see `worlds.py`."""

import logging
import os
import subprocess
import sys

import pytest
import worlds
from depth import DEEP

IN_ONE_TEST = 20


@pytest.fixture(autouse=True)
def _no_log():
    """Disable the log: messages about guesses of a recovery would hide the seeds that changed."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def committed():
    """Return the row of each seed."""
    rows = worlds.DIGESTS.read_text(encoding="utf-8").splitlines()[1:]
    return {int(row.partition("\t")[0]): row for row in rows}


@pytest.mark.parametrize("first", (worlds.SEEDS if DEEP else worlds.SEEDS[:40])[::IN_ONE_TEST])
def test_worlds_have_the_recorded_digests(first, committed):
    changed = []
    for seed in worlds.SEEDS[first : first + IN_ONE_TEST]:
        expected, got = committed[seed], worlds.row_of(seed)
        if expected != got:
            only = "texts only" if expected.split("\t")[:-1] == got.split("\t")[:-1] else "facts"
            changed.append(f"seed {seed}, {only}:\n  - {expected}\n  + {got}\n  {whole_text_of(seed)}")
    if changed:
        pytest.fail("\n".join([f"{len(changed)} worlds changed:", *changed, worlds.IF_MEANT]), pytrace=False)


def whole_text_of(seed):
    command = f"python tests/corpus/worlds.py {seed} {seed + 1}"
    return f"its whole text: {command}; before the change: PYTHONPATH=CHECKOUT {command}"


def test_each_seed_has_a_digest(committed):
    assert list(worlds.SEEDS) == list(committed)


def test_the_text_of_a_world_is_the_same_under_any_hash_seed():
    texts = {text_under(hash_seed) for hash_seed in ("0", "1")}
    assert len(texts) == 1
    assert len({line.partition(" fact ")[0] for line in texts.pop().splitlines() if " fact world " in line}) == 7


def text_under(hash_seed):
    return subprocess.run(
        [sys.executable, worlds.__file__, "20", "27"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
