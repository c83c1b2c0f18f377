"""Dynamo's router over our engines against the original: random replays, every candidate's cost at every pick.

The original chooses among equal costs at random and logs its choice; ours follows that log.

Run as a program, it is the long differential: `python tests/interop/test_router_live.py RUNS [FIRST_SEED]`.
"""

import sys
from collections import Counter
from importlib import metadata

from follower import Follower
from peer import dynamo_core, play_routed
from replay_cases import routed_case
from test_replay_live import OF_THE_FLEET, OF_THE_HOST, SEMANTICS, is_equal

from pytest_kvmock import Fleet, MockEngine, OutOfBlocks
from pytest_kvmock.engines import MockEngineArgs
from pytest_kvmock.fleets import EngineStalled, TraceRequest

dynamo_core("1.2")
RUNS = 300


def play(case, picks):
    """Return our report of a case, and the picks that our replay did not reach; the report is None if an engine can
    never make progress.
    """
    how = case["replay"]
    args = MockEngineArgs(**case["engine"], semantics=SEMANTICS)
    router = Follower(picks, SEMANTICS, **case["router"])
    fleet = Fleet(
        [MockEngine(args, backend="lineage", seed=seed) for seed in range(how["num_workers"])],
        router,
        concurrency=how.get("replay_concurrency"),
        arrival_speedup=how.get("arrival_speedup_ratio", 1.0),
        trace_block_size=how["trace_block_size"],
    )
    names = ("timestamp", "input_length", "output_length", "hash_ids", "session_id", "delay")
    rows = [
        TraceRequest(*(tuple(row[name]) if name == "hash_ids" else row.get(name) for name in names))
        for row in case["requests"]
    ]
    try:
        return fleet.run(rows), router.left
    except (EngineStalled, OutOfBlocks):
        return None, router.left


def differences(case, theirs, picks):
    """Return the differences between our replay of a case and the release's."""
    try:
        ours, left = play(case, picks)
    except RuntimeError as error:
        return {"pick": str(error)}
    if ours is None or "error" in theirs:
        end = theirs.get("error", "ended")
        is_same = ours is None and end == "timeout"
        return {} if is_same else {"end": (end, "stalled" if ours is None else "ended")}
    figures = ours.to_json()
    found = {
        name: (value, figures.get(name))
        for name, value in theirs["summary"].items()
        if name not in OF_THE_HOST | OF_THE_FLEET and not is_equal(name, value, figures.get(name), theirs["summary"])
    }
    if left:
        found["picks"] = left
    return found


def cases_from(first, runs):
    return [routed_case(seed) for seed in range(first, first + runs)]


def test_random_replays_make_the_same_picks_at_the_same_costs():
    cases = cases_from(0, RUNS)
    played = play_routed(cases)
    different = {case["seed"]: differences(case, *each) for case, each in zip(cases, played, strict=True)}
    assert {seed: found for seed, found in different.items() if found} == {}
    assert sum(len(picks) for _, picks in played) > 10 * RUNS


def main():
    """Play RUNS cases, and print the ones that differ."""
    cases = cases_from(int(sys.argv[2]) if len(sys.argv) > 2 else 0, int(sys.argv[1]))
    counts = Counter()
    for case, (theirs, picks) in zip(cases, play_routed(cases), strict=True):
        found = differences(case, theirs, picks)
        counts["looped" if "error" in theirs else "ended"] += 1
        counts["picks"] += len(picks)
        counts["different"] += bool(found)
        if found:
            print(case["seed"], len(case["requests"]), next(iter(found.items())))  # noqa: T201 - it is a program
    print(metadata.version("ai-dynamo-runtime"), dict(counts))  # noqa: T201 - as above


if __name__ == "__main__":
    main()
