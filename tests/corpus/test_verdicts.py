"""The verdicts on all known bugs agree with the table; see `verdicts.py`."""

from difflib import unified_diff
from itertools import islice

import pytest
import verdicts
from depth import DEEP

MOST_LINES = 40
MOST_SEEDS = verdicts.SEEDS if DEEP else 1
SHARE = 1 if DEEP else 4
"""One in this many cases is tried over each backend; the next backend tries the next cases."""
FOUND_NOWHERE = ["index/grows_with_events", "index/queue_overflows", "index/removed_worker_back_by_queue"]
"""Listed bugs that this traffic does not show over any backend. A change that finds one removes it from this list."""


@pytest.fixture(scope="module")
def committed():
    """Return the lines of the table without its head."""
    return verdicts.TABLE.read_text(encoding="utf-8").splitlines()[1:]


def is_tried(line, backend, names):
    name, over, seed = line.split("\t")[:3]
    return name in names and over == backend and int(seed) < MOST_SEEDS


@pytest.mark.parametrize("backend", verdicts.backends_of_all())
def test_verdicts_agree_with_the_table(backend, committed):
    names = [case.name for case in verdicts.cases() if backend in case.backends()]
    tried = set(names[verdicts.backends_of_all().index(backend) % SHARE % len(names) :: SHARE])
    expected = [line for line in committed if is_tried(line, backend, tried)]
    got = verdicts.lines(backend=backend, most_seeds=MOST_SEEDS, only=tried)
    if expected != got:
        changes = islice(unified_diff(expected, got, "verdicts.tsv", "now", n=0, lineterm=""), MOST_LINES)
        pytest.fail(
            "\n".join(
                [
                    f"verdicts over {backend} changed; the first {MOST_LINES} lines of the difference:",
                    *changes,
                    "If that is meant: python tests/corpus/verdicts.py --write, and say why of each row.",
                ]
            ),
            pytrace=False,
        )


def test_the_table_has_no_rows_of_other_backends(committed):
    assert set(verdicts.backends_of_all()) == {line.split("\t")[1] for line in committed}


def test_correct_streams_have_no_errors(committed):
    right = [line.split("\t") for line in committed if line.startswith("right/")]
    assert {row[0] for row in right} == {"right/no_index", "right/tree", "right/chains"}
    assert [row for row in right if row[3] != "none" and row[4] != "warning"] == []


def test_bugs_that_the_traffic_does_not_find_are_listed(committed):
    rows = [line.split("\t") for line in committed if line.startswith(("index/", "engine/"))]
    found = {row[0] for row in rows if row[3] != "none" and row[3:5] != ["wrong_hash", "warning"]}
    assert sorted({row[0] for row in rows} - found) == FOUND_NOWHERE
