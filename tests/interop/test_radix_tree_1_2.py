"""RadixIndex against the real RadixTree of ai-dynamo-runtime 1.2: any stream, errors and matches after each event.

The index answers by exact intersection; the real tree's shortcut is the only accepted difference, and the tests
compute the answer that it must then give.
"""

from collections import Counter

import pytest
from peer import dynamo_core
from streams import AnyStream, run_1_2_1

core = dynamo_core("1.2")


@pytest.mark.parametrize("block", range(10))
def test_any_stream_gives_the_same_errors_and_matches_as_the_real_tree(block):
    counts = Counter()
    for seed in range(20 * block, 20 * block + 20):
        run_1_2_1(core, seed, counts)
    assert counts["runs"] == 20


def test_the_streams_reach_every_error_and_the_shortcut():
    counts = Counter()
    for seed in range(40):
        run_1_2_1(core, seed, counts)
    reached = [
        "accepted",
        "Failed to find parent block",
        "Failed to find block",
        "Invalid block sequence",
        "RadixTree request was cancelled",
        "answers that the shortcut changes",
    ]
    assert [name for name in reached if not counts[name]] == []


def test_one_seed_always_gives_the_same_stream():
    one, two = AnyStream(5), AnyStream(5)
    assert [one.step() for _ in range(50)] == [two.step() for _ in range(50)]
