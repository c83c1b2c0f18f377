"""RadixIndex against the real RadixTree of ai-dynamo-runtime 1.6: leaf-first streams, no difference at all.

Its tree of compressed edges forgets the rest of an edge when a block in the middle is removed, and never stores one
place under two sequence hashes. If neither happens, as in a scheduler's traffic, the two must agree in everything.
"""

from collections import Counter

import pytest
from peer import dynamo_core
from streams import run_leaf_first

core = dynamo_core("1.6")


@pytest.mark.parametrize("block", range(10))
def test_leaf_first_streams_give_the_same_errors_matches_and_dump(block):
    counts = Counter()
    for seed in range(20 * block, 20 * block + 20):
        run_leaf_first(core, seed, counts)
    assert counts["runs"] == 20
    assert [
        name for name in ("accepted", "Failed to find parent block", "Failed to find block") if not counts[name]
    ] == []
    assert counts["queries with a match"] > counts["queries"] / 4
