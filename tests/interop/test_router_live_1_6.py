"""Dynamo's router of 1.6.1 over our engines against the original: random replays, the chosen worker and its cost at
each pick.

The original chooses among equal costs at random. It logs its choice, but not the costs of the others; ours follows it.

Run as a program, it is the long differential: `python tests/interop/test_router_live_1_6.py RUNS [FIRST_SEED]`.
"""

import math
import sys
from collections import Counter
from random import Random

from peer import dynamo_core, play_chosen
from replay_cases_1_6 import random_case
from test_replay_live_1_6 import BACKENDS, OF_THE_HOST, is_equal

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs, OutOfBlocks
from pytest_kvmock.fleets import DynamoRouter, EngineStalled, TraceRequest

dynamo_core("1.6")
RUNS = 300
ROUTES = {"routing_history", "admission_history", "decode_worker_idx"}


class Chosen(DynamoRouter):
    """Picks as logged, and compares overlap and cost of the picked worker, a cheapest one at temperature 0."""

    def __init__(self, chosen, **options):
        super().__init__("1.6.1", **options)
        self.left = list(chosen)

    def _choose(self, request, candidates, costs):
        worker, overlap, cost = self.left.pop(0)
        at = [each.worker for each in candidates].index(worker)
        found = self.known_overlap(request, candidates[at]), costs[at]
        assert math.isclose(overlap, found[0], abs_tol=1e-9), (request, overlap, found, candidates)
        assert math.isclose(cost, found[1], rel_tol=1e-12, abs_tol=1e-12), (request, cost, found, candidates)
        if not self._temperature:
            assert min(costs) == costs[at], (request, worker, costs)
        return worker


def routed_case(seed):
    """Return the case of a seed: several workers behind the router, whose events may be late."""
    rng = Random(f"routed 1.6 {seed}")
    case = random_case(rng.choice(("vllm", "vllm", "sglang")), seed)
    case["engine"].pop("timing_model", None)  # an arrival during an instant pass may come before or after it
    replay = case["replay"]
    for name in ("max_sim_time_ms", "sla_ttft_ms", "sla_itl_ms", "sla_e2e_ms"):
        replay.pop(name, None)
    replay["num_workers"] = rng.choice((2, 2, 3, 4))
    if "replay_concurrency" in replay:
        replay["replay_concurrency"] = rng.choice((1, 2, 3, 6, 12))
    if rng.random() < 0.2:
        replay["kv_event_lag_ms"] = rng.choice((1.0, 20.0, 100.0))
    options = {
        "overlap_score_credit": (0.0, 0.3, 0.5, 1.0),
        "overlap_score_credit_decay": (0.5, 2.0),
        "prefill_load_scale": (0.0, 0.5, 1.7, 2.0),
        "decode_active_request_weight": (0.5, 3.0),
        "router_queue_threshold": (0.0, 0.0005, 0.002, 0.25, 1.0),
        "router_queue_policy": ("fcfs", "lcfs", "wspt"),
        "router_temperature": (0.2, 1.0),
        "router_track_active_blocks": (False,),
        "router_track_prefill_tokens": (False,),
        "router_assume_kv_reuse": (False,),
    }
    often = ("router_queue_threshold", "router_queue_policy")
    case["router"] = {
        name: rng.choice(values) for name, values in options.items() if rng.random() < (0.4 if name in often else 0.15)
    }
    return case


def play(case, chosen):
    """Return our report of a case, and the picks that our replay did not reach; the report is None if an engine can
    never make progress.
    """
    how = case["replay"]
    args = MockEngineArgs.from_json({"engine": case["engine"]})
    router = Chosen(chosen, **case["router"])
    fleet = Fleet(
        [MockEngine(args, backend=BACKENDS[args.engine_type]) for _ in range(how["num_workers"])],
        router,
        concurrency=how.get("replay_concurrency"),
        arrival_speedup=how.get("arrival_speedup_ratio", 1.0),
        trace_block_size=how["trace_block_size"],
        event_delay_ms=how.get("kv_event_lag_ms", 0.0),
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


def differences(case, theirs, chosen):
    """Return the differences between our replay of a case and the release's."""
    try:
        ours, left = play(case, chosen)
    except RuntimeError as error:
        return {"pick": str(error)}
    if ours is None or "error" in theirs:
        same = ours is None and "error" in theirs
        return {} if same else {"end": (theirs.get("error", "ended"), "stalled" if ours is None else "ended")}
    figures = ours.to_json()
    found = {
        name: (value, figures.get(name))
        for name, value in theirs["summary"].items()
        if name not in OF_THE_HOST and not is_equal(name, value, figures.get(name))
    }
    if left:
        found["picks"] = left
    columns = theirs["per_request"][0].keys() - ROUTES if theirs["per_request"] else ()
    pair = [
        sorted(repr(sorted((name, row.get(name)) for name in columns)) for row in rows)
        for rows in (theirs["per_request"], ours.per_request())
    ]
    if pair[0] != pair[1]:
        found["per_request"] = pair
    return found


def test_random_replays_make_the_same_picks_at_the_same_costs():
    cases = [routed_case(seed) for seed in range(RUNS)]
    played = play_chosen(cases)
    different = {case["seed"]: differences(case, *each) for case, each in zip(cases, played, strict=True)}
    assert {seed: found for seed, found in different.items() if found} == {}
    assert sum(len(chosen) for _, chosen in played) > 3 * RUNS


def main():
    """Play RUNS cases, and print the ones that differ."""
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    cases = [routed_case(seed) for seed in range(first, first + int(sys.argv[1]))]
    counts = Counter()
    for case, (theirs, chosen) in zip(cases, play_chosen(cases), strict=True):
        found = differences(case, theirs, chosen)
        counts["no end" if "error" in theirs else "ended"] += 1
        counts["picks"] += len(chosen)
        counts["different"] += bool(found)
        if found:
            print(case["kind"], case["seed"], str(next(iter(found.items())))[:500])  # noqa: T201 - it is a program
    print(dict(counts))  # noqa: T201 - as above


if __name__ == "__main__":
    main()
