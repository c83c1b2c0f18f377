"""Replays equal recordings of Dynamo's mocker 1.1.1 and 1.2.1 bit for bit."""

from itertools import groupby, islice
from operator import itemgetter

import pytest
from depth import few, whole_trace
from recorded_replays import check_run, check_summary, recorded, runs_of

from pytest_kvmock import MockEngine, replay
from pytest_kvmock.engines import MockEngineArgs
from pytest_kvmock.fleets import read_mooncake

VERSION = "1.2.1"
SMALL = runs_of("replay_small.json.gz", VERSION)
RANDOM = runs_of("replay_random_vllm.json.gz", VERSION)
SESSIONS = runs_of("replay_sessions.json.gz", VERSION)
OLDEST = runs_of("replay_small.json.gz", "1.1.1") + runs_of("replay_random_1.1.1.json.gz", "1.1.1")


@pytest.mark.parametrize("watched", [False, True], ids=["in-one-go", "each-pass"])
@pytest.mark.parametrize(("case", "version"), few(SMALL, 24) + few(RANDOM, 24) + few(SESSIONS, 8))
def test_a_replay_equals_the_recorded_one(case, version, watched):
    check_run(case, version, watched=watched)


@pytest.mark.parametrize("backend", ["lru", "multi_lru"])
@pytest.mark.parametrize(("case", "version"), SMALL)
def test_with_enough_blocks_every_eviction_policy_gives_the_recorded_replay(case, version, backend):
    if case["id"] != "evict_small_pool":
        check_run(case, version, backend)


@pytest.mark.parametrize(("case", "version"), OLDEST)
def test_hash_cache_equals_the_recorded_mocker_of_its_release(case, version):
    check_run(case, version, "hash_cache", semantics="1.2.1")


MOONCAKE = recorded("replay_mooncake.json.gz")
# What 1.2.1 does not report, of 1.3.1: what each request reused is a matter of the manager, and the same.
WITH_REUSED_BLOCKS = [run for run in MOONCAKE if "reused_blocks" in run]
WORLD = itemgetter("trace", "num_gpu_blocks", "replay_concurrency")
REPLAYS = [[*runs] for _, runs in groupby(sorted(MOONCAKE, key=WORLD), key=WORLD)]
"""The runs of each configuration; one replay compares them all."""
HEAD = 1_000  # requests; the smaller caches are full after a hundred


def replay_mooncake(run, traces_dir, most=None):
    engine = MockEngine(MockEngineArgs(block_size=512, num_gpu_blocks=run["num_gpu_blocks"], semantics=VERSION))
    trace = islice(read_mooncake(traces_dir / run["trace"]), most)
    return replay(trace, [engine], concurrency=run["replay_concurrency"])


def reused_blocks(report):
    return [request.reused_tokens // 512 for request in report.requests]


# Requests are served in the order of the trace, so reuse depends only on earlier requests.
@pytest.mark.parametrize("run", few(WITH_REUSED_BLOCKS, 2), ids=lambda run: run["id"])
def test_the_head_of_a_mooncake_trace_reuses_the_recorded_blocks(run, traces_dir):
    assert run["reused_blocks"][:HEAD] == reused_blocks(replay_mooncake(run, traces_dir, HEAD))


@whole_trace
@pytest.mark.parametrize("runs", REPLAYS, ids=lambda runs: " ".join(run["id"] for run in runs))
def test_a_mooncake_trace_equals_the_recorded_replays(runs, traces_dir):
    report = replay_mooncake(runs[0], traces_dir)
    for run in runs:
        if "summary" in run:
            check_summary(run["summary"], report)
        if "reused_blocks" in run:
            assert run["reused_blocks"] == reused_blocks(report)
