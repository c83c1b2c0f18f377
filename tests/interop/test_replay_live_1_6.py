"""Replays against those of 1.6.1, on random cases: figures, rows, and cases in which the original is stuck.

Run as a program, it is the long differential: `python tests/interop/test_replay_live_1_6.py RUNS [FIRST_SEED [KIND]]`.
"""

import sys
from collections import Counter
from itertools import takewhile

import pytest
from peer import dynamo_core, play_in_wheel
from replay_cases_1_6 import KINDS, random_case, random_cases

from pytest_kvmock import MockEngine, MockEngineArgs, OutOfBlocks, Stored, replay
from pytest_kvmock.fleets import EngineStalled, Objectives, TraceRequest

dynamo_core("1.6")

RUNS = 300
"""Cases of each kind in a run of the suite."""

OF_DRAFTS = 200
"""Cases with drafts: ten of 2,000 differ when blocks run short; the first of them is number 203."""

OPTIONS = {"max_sim_time_ms": "stop_ms"}
LIMITS = {"sla_ttft_ms": "ttft_ms", "sla_itl_ms": "itl_ms", "sla_e2e_ms": "e2e_ms"}
OF_THE_HOST = {"processed_tokens_per_s", "processed_output_tokens_per_s", "wall_time_ms"}
BACKENDS = {"vllm": "vllm", "sglang": "mocker_sglang_1_6", "trtllm": "vllm"}


def play(case, make=MockEngine):
    """Return our report of a case; None if an engine can never make progress or refuses its arguments or a request.

    `make` makes each engine.

    Raises:
        OutOfBlocks: the clock stops early, so the original may never reach the request that cannot fit.
    """
    settings, ranks = case["replay"], case.get("dp_size", 1)

    def engines(name, number):
        args = MockEngineArgs.from_json({"engine": case[name], "dp_size": ranks})
        return [make(args, backend=BACKENDS[args.engine_type]) for _ in range(settings.get(number, 1) * ranks)]

    rows = [
        TraceRequest(
            row.get("timestamp"),
            row["input_length"],
            row["output_length"],
            tuple(row["hash_ids"]),
            row.get("session_id"),
            row.get("delay"),
        )
        for row in case["requests"]
    ]
    try:
        prefill = [] if "engine" in case else engines("prefill_engine", "num_prefill_workers")
        decode = engines(*(("decode_engine", "num_decode_workers") if prefill else ("engine", "num_workers")))
        return replay(
            rows,
            decode,
            prefill,
            settings.get("replay_concurrency"),
            settings.get("arrival_speedup_ratio", 1.0),
            trace_block_size=settings["trace_block_size"],
            **{ours: settings[theirs] for theirs, ours in OPTIONS.items() if theirs in settings},
            slo=Objectives(**{ours: settings[theirs] for theirs, ours in LIMITS.items() if theirs in settings}),
        )
    except EngineStalled:
        return None
    except OutOfBlocks:
        if "max_sim_time_ms" in settings:
            raise
        return None
    except ValueError as error:
        if "must be at least dp_size" in str(error):
            return None
        raise


def differences(case, theirs):
    """Return the differences between our replay of a case and the release's: names with its value and ours."""
    try:
        ours = play(case)
    except OutOfBlocks:
        return {}
    if ours is None or "error" in theirs:
        same = ours is None and "error" in theirs
        return {} if same else {"end": (theirs.get("error", "ended"), "stalled" if ours is None else "ended")}
    figures = ours.to_json()
    found = {
        name: (value, figures.get(name))
        for name, value in theirs["summary"].items()
        if name not in OF_THE_HOST and not is_equal(name, value, figures.get(name))
    }
    columns = theirs["per_request"][0].keys() if theirs["per_request"] else ()
    rows = [{name: row[name] for name in columns} for row in ours.per_request()]
    pair = [sorted(map(repr, map(sorted, map(dict.items, each)))) for each in (theirs["per_request"], rows)]
    if pair[0] != pair[1]:
        found["per_request"] = pair
    return found


def is_equal(name, theirs, ours):
    """Return whether a figure is the same: to the bit, or nearly if the original sums in another order."""
    summed = name.startswith(("mean_", "std_")) or name.endswith(("_seconds", "_hours"))
    return ours == (pytest.approx(theirs, rel=1e-9, abs=1e-9) if summed else theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_random_replays_have_the_same_figures_rows_and_ends(kind):
    cases = random_cases(kind, OF_DRAFTS if kind == "drafts" else RUNS)
    answers = play_in_wheel(cases)
    different = {case["seed"]: differences(case, theirs) for case, theirs in zip(cases, answers, strict=True)}
    assert {seed: found for seed, found in different.items() if found} == {}


def behind_a_router(seed):
    """Return a case of one worker behind the release's KV router; its rows show what the router knows of a prompt."""
    case = random_case("sglang", seed)
    case["engine"].pop("timing_model", None)  # an arrival during an instant pass may come before or after it
    for name in ("num_workers", "max_sim_time_ms"):
        case["replay"].pop(name, None)
    case["replay"]["router_mode"] = "kv_router"
    return case


def cached_tokens(case):
    """Return arrival, end and length of each request, and how much of it is cached by the events of our earlier
    passes.
    """
    new, events = [], []

    def pass_ended(done):
        events.extend((done.end_ms, event.data) for event in new)
        new.clear()

    def make(args, backend):
        engine = MockEngine(args, backend=backend, sink=new.append)
        engine.on_pass(pass_ended)
        return engine

    report, size, found = play(case, make), case["engine"]["block_size"], []
    for request in report.requests if report else ():
        held = set()
        for end_ms, data in events:
            if end_ms > request.arrival_ms:
                break
            change = held.update if isinstance(data, Stored) else held.difference_update
            change(data.block_hashes)
        known = list(takewhile(held.__contains__, request.prompt.sequence_hashes(size)))
        found.append((request.arrival_ms, request.ended_ms, request.prompt_tokens, len(known) * size))
    return sorted(found)


def test_sglang_events_show_a_router_the_same_cached_tokens_as_the_releases_events():
    cases = [behind_a_router(seed) for seed in range(RUNS)]
    for case, theirs in zip(cases, play_in_wheel(cases), strict=True):
        told = [
            (
                row["arrival_time_ms"],
                row["terminal_time_ms"],
                row["input_length"],
                row["routing_history"][0]["reported_overlap_tokens"],
            )
            for row in theirs.get("per_request", ())
        ]
        assert sorted(told) == cached_tokens(case), case["seed"]


def main():
    """Play RUNS cases of each kind (or of KIND), and print the ones that differ."""
    runs, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for kind in sys.argv[3:] or KINDS:
        counts = Counter()
        cases = random_cases(kind, runs, first)
        for case, theirs in zip(cases, play_in_wheel(cases), strict=True):
            found = differences(case, theirs)
            counts["no end" if "error" in theirs else "ended"] += 1
            counts["different"] += bool(found)
            if found:
                print(kind, case["seed"], str(next(iter(found.items())))[:400])  # noqa: T201 - it is a program
        print(kind, dict(counts))  # noqa: T201 - as above


if __name__ == "__main__":
    main()
