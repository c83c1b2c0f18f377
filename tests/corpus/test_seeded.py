"""A seed gives the same results as before; see `seeded.py`.

Each Python process has a different hash seed, so rows that depend on the order of a set change from run to run.
"""

from itertools import groupby

import pytest
import seeded
from depth import DEEP

SHARE = 15  # a quick run compares one in this many rows of a group
GROUPS = {
    name: list(rows)[:: 1 if DEEP else SHARE]
    for name, rows in groupby(seeded.rows(), key=lambda row: seeded.group_of(row[0]))
}


@pytest.fixture(scope="module")
def committed():
    """Return the digest of each row."""
    return dict(row.split("\t") for row in seeded.TABLE.read_text(encoding="utf-8").splitlines()[1:])


@pytest.mark.parametrize("group", GROUPS)
def test_a_seed_gives_the_same_results_as_before(group, committed):
    changed = [name for name, make in GROUPS[group] if committed[name] != seeded.digest(make())]
    if changed:
        command = f"python tests/corpus/seeded.py --text {changed[0]}"
        pytest.fail(
            f"{len(changed)} of {len(GROUPS[group])} rows changed: {', '.join(changed)}\n"
            f"Compare: {command}; before the change: PYTHONPATH=CHECKOUT {command}\n"
            "If that is meant: python tests/corpus/seeded.py --write, and say why.",
            pytrace=False,
        )


def test_each_row_has_a_digest(committed):
    assert [name for name, _ in seeded.rows()] == list(committed)
