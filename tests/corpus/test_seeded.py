"""A seed makes what it made before; see `seeded.py`.

Python draws another hash seed for each process, so that rows which depend on the order of a set change from run to run.
"""

from itertools import groupby

import pytest
import seeded
from depth import DEEP

SHARE = 15  # of the rows of a group, one in so many in a quick run
GROUPS = {
    name: list(rows)[:: 1 if DEEP else SHARE]
    for name, rows in groupby(seeded.rows(), key=lambda row: seeded.group_of(row[0]))
}


@pytest.fixture(scope="module")
def committed():
    """The digest of each row."""
    return dict(row.split("\t") for row in seeded.TABLE.read_text(encoding="utf-8").splitlines()[1:])


@pytest.mark.parametrize("group", GROUPS)
def test_a_seed_makes_what_it_made_before(group, committed):
    changed = [name for name, make in GROUPS[group] if committed[name] != seeded.digest(make())]
    if changed:
        command = f"python tests/corpus/seeded.py --text {changed[0]}"
        pytest.fail(
            f"{len(changed)} of {len(GROUPS[group])} rows changed: {', '.join(changed)}\n"
            f"Compare: {command}; before the change: PYTHONPATH=CHECKOUT {command}\n"
            "If that is meant: python tests/corpus/seeded.py --write, and say why.",
            pytrace=False,
        )


def test_there_is_a_digest_for_each_row(committed):
    assert [name for name, _ in seeded.rows()] == list(committed)
