"""Transcripts of the real tree, ai-dynamo-runtime 1.1.1 and 1.2.1: its answers, step by step.

Blocks written 1 to 9 have the local hashes 1 to 9 and the sequence hashes 101 to 109. 1.2.1 takes two sets of workers
of equal size for the same set; rows where this shows say so, and expect the value of an exact intersection.
"""

import pytest
from index_steps import PARENT, UNKNOWN, clear_all_blocks, cleared, dump, find, remove, remove_worker, store

from pytest_kvmock.oracle import RadixIndex

OK = None

TRANSCRIPTS = {
    "basic": [
        (OK, store(0, [1, 2, 3])),
        ({(0, 0): 3}, find(1, 2, 3, 4, 5)),
        ({(0, 0): 2}, find(1, 2, 9)),
        ({}, find(2, 3)),
        ({}, find()),
        (OK, store(0, [1, 2, 3])),
        ({(0, 0): 3}, find(1, 2, 3, 4, 5)),
        (OK, store(0, [4], 103)),
        ({(0, 0): 4}, find(1, 2, 3, 4, 5)),
        (PARENT, store(0, [9], 555)),
        ([(0, 0, None, (101,)), (0, 0, 101, (102,)), (0, 0, 102, (103,)), (0, 0, 103, (104,))], dump),
    ],
    "two workers": [
        (OK, store(0, [1, 2, 3, 4, 5])),
        (OK, store(1, [1, 2, 3])),
        ({(0, 0): 5, (1, 0): 3}, find(1, 2, 3, 4, 5)),
        ({(0, 0): 4, (1, 0): 3}, find(1, 2, 3, 4, 5, early_exit=True)),
        (PARENT, store(1, [5], 104)),
        (OK, remove(1, [103])),
        ({(0, 0): 5, (1, 0): 2}, find(1, 2, 3, 4, 5)),
        (UNKNOWN, remove(1, [103])),
        (UNKNOWN, remove(1, [101, 777, 102])),
        ({(0, 0): 5}, find(1, 2, 3, 4, 5)),
        (
            [(0, 0, None, (101,)), (0, 0, 101, (102,)), (0, 0, 102, (103,)), (0, 0, 103, (104,)), (0, 0, 104, (105,))],
            dump,
        ),
    ],
    "a hole in the chain": [
        (OK, store(0, [1, 2, 3, 4, 5])),
        (OK, remove(0, [103])),
        ({(0, 0): 2}, find(1, 2, 3, 4, 5)),
        (OK, store(0, [6], 105)),
        ({(0, 0): 2}, find(1, 2, 3, 4, 5, 6)),
        (OK, store(0, [3], 102)),
        ({(0, 0): 3}, find(1, 2, 3, 4, 5, 6)),
        (OK, store(0, [4, 5], 103)),
        ({(0, 0): 6}, find(1, 2, 3, 4, 5, 6)),
    ],
    "ranks": [
        (OK, store(0, [1, 2, 3], rank=0)),
        (OK, store(0, [1, 2], rank=1)),
        (OK, store(0, [3], 102, rank=1)),
        ({(0, 0): 3, (0, 1): 3}, find(1, 2, 3, 4, 5)),
        (OK, remove(0, [103], rank=1)),
        ({(0, 0): 3, (0, 1): 2}, find(1, 2, 3, 4, 5)),
        (OK, cleared(0, rank=1)),
        ({}, find(1, 2, 3, 4, 5)),
    ],
    "remove_worker": [
        (OK, store(0, [1, 2])),
        (OK, store(1, [1, 2])),
        (OK, remove_worker(0)),
        ({(1, 0): 2}, find(1, 2, 3, 4, 5)),
        (OK, remove_worker(99)),
        (UNKNOWN, remove(0, [101])),
        (OK, clear_all_blocks(1)),
        ({}, find(1, 2, 3, 4, 5)),
        (OK, store(1, [1, 2])),
        ({(1, 0): 2}, find(1, 2, 3, 4, 5)),
    ],
    "one local hash, two sequence hashes": [
        (OK, store(0, [1, 2])),
        (OK, store(1, [1, 2], base=200)),
        ({(0, 0): 2, (1, 0): 2}, find(1, 2, 3, 4, 5)),
        (OK, store(1, [3], 202, base=200)),
        ({(0, 0): 2, (1, 0): 3}, find(1, 2, 3, 4, 5)),
        (OK, remove(1, [202])),
        ({(0, 0): 2, (1, 0): 1}, find(1, 2, 3, 4, 5)),  # 1.2.1: worker 0 has 3, which it never stored
    ],
    "leaves first": [
        (OK, store(0, [1, 2, 3, 4, 5])),
        (OK, remove(0, [105, 104, 103])),
        ({(0, 0): 2}, find(1, 2, 3, 4, 5)),
        (OK, remove(0, [101, 102])),
        ({}, find(1, 2, 3, 4, 5)),
        ([], dump),
    ],
    "empty events": [
        (OK, store(0, [])),
        (OK, remove(0, [])),
        (UNKNOWN, remove(0, [1])),
        (OK, cleared(0)),
        ({}, find(1, 2, 3, 4, 5)),
    ],
    "branches": [
        (OK, store(0, [1, 2, 3])),
        (OK, store(0, [7, 8], 102)),
        ({(0, 0): 4}, find(1, 2, 7, 8)),
        ({(0, 0): 3}, find(1, 2, 3)),
        (OK, remove(0, [102])),
        ({(0, 0): 1}, find(1, 2, 7, 8)),
        ({(0, 0): 1}, find(1, 2, 3)),
    ],
    "a hole in a chain that another worker shares": [
        (OK, store(0, [1, 2, 3, 4, 5])),
        (OK, store(1, [1, 2, 3, 4, 5])),
        (OK, remove(0, [103])),
        ({(0, 0): 2, (1, 0): 5}, find(1, 2, 3, 4, 5)),
        (OK, store(0, [6], 105)),
        ({(0, 0): 2, (1, 0): 5}, find(1, 2, 3, 4, 5, 6)),  # 1.2.1: worker 1 has 6
        (OK, store(0, [3], 102)),
        ({(0, 0): 6, (1, 0): 5}, find(1, 2, 3, 4, 5, 6)),
    ],
    "a hole in a chain that another worker shares in part": [
        (OK, store(0, [1, 2, 3, 4, 5])),
        (OK, store(1, [1, 2, 3])),
        (OK, remove(0, [103])),
        ({(0, 0): 2, (1, 0): 3}, find(1, 2, 3, 4, 5)),  # 1.2.1: worker 1 has 5
        (OK, store(0, [3], 102)),
        ({(0, 0): 5, (1, 0): 3}, find(1, 2, 3, 4, 5)),
    ],
    "the root first": [
        (OK, store(0, [1, 2, 3])),
        (OK, remove(0, [101])),
        ({}, find(1, 2, 3, 4, 5)),
        (OK, store(0, [1])),
        ({(0, 0): 1}, find(1, 2, 3, 4, 5)),
        (OK, remove(0, [102, 103])),
        ({(0, 0): 1}, find(1, 2, 3, 4, 5)),
    ],
    "head first in one event": [
        (OK, store(0, [1, 2, 3, 4, 5])),
        (OK, remove(0, [103, 104, 105])),
        ({(0, 0): 2}, find(1, 2, 3, 4, 5)),
        (OK, store(0, [3, 4, 5], 102)),
        ({(0, 0): 5}, find(1, 2, 3, 4, 5)),
    ],
    "one sequence hash under two parents": [
        (OK, store(0, [1, 2])),
        (OK, store(0, [(201, 9)])),
        (OK, store(0, [(102, 2)], 201)),
        ({(0, 0): 2}, find(1, 2)),
        ({(0, 0): 2}, find(9, 2)),
        (OK, remove(0, [102])),
        ({(0, 0): 1}, find(1, 2)),
        ({(0, 0): 1}, find(9, 2)),
    ],
    "cleared, then a continuation": [
        (OK, store(0, [1, 2, 3])),
        (OK, cleared(0)),
        (PARENT, store(0, [4], 103)),
        (OK, store(0, [1, 2])),
        ({(0, 0): 2}, find(1, 2, 3, 4, 5)),
    ],
}


@pytest.mark.parametrize("transcript", TRANSCRIPTS.values(), ids=TRANSCRIPTS)
def test_the_index_gives_the_answers_of_the_recorded_tree(transcript):
    index = RadixIndex(clears="worker")
    for number, (expected, step) in enumerate(transcript):
        assert step(index) == expected, f"step {number}"


def test_by_default_a_cleared_empties_only_the_rank_that_published_it():
    index = RadixIndex()
    for _, step in TRANSCRIPTS["ranks"]:
        answer = step(index)
    assert answer == {(0, 0): 3}
