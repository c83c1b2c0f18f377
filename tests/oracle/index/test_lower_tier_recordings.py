"""Tiers below the device against recordings of Dynamo's own (kv-router 1.2.1): random programs, query by query.

They omit streams that 1.2.1 answers wrongly by accident: all workers name a block alike, and an unknown block is the
last of its Removed (see `lower_tier.py`).
"""

import gzip
import json
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_kvmock import RouterEvent
from pytest_kvmock.oracle import RadixIndex, RadixIndexError

DATA = Path(__file__).parents[2] / "data" / "lower_tiers_1.2.1.json.gz"
PROGRAMS = json.loads(gzip.decompress(DATA.read_bytes()))["programs"]


def recorded(answer):
    """Return the blocks by tier, as `find_tiered` has them: Dynamo's answer also names empty tiers."""
    return {
        tier: {(worker, rank): blocks for worker, rank, blocks in scores} for tier, scores in answer.items() if scores
    }


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program["seed"])
def test_a_query_continues_through_the_tiers_like_dynamos(program):
    index = RadixIndex(clears="worker")
    for kind, argument, answer in program["steps"]:
        if kind == "event":
            with suppress(RadixIndexError):
                index.apply(RouterEvent.from_dict(argument))
        elif kind == "remove_worker":
            index.remove_worker(argument)
        else:
            assert recorded(answer) == index.find_tiered(argument)


def test_the_recording_extends_matches_in_every_tier_many_times():
    queries = [recorded(answer) for program in PROGRAMS for kind, _, answer in program["steps"] if kind == "query"]
    assert all(
        sum(tier in answer for answer in queries) > 200 for tier in ("device", "host_pinned", "disk", "external")
    )
    assert sum(len(answer) > 2 for answer in queries) > 100
