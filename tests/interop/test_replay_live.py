"""Replays against Dynamo's own, on random cases: statistics and times of requests, and cases in which the original
loops for ever.

Run as a program, it is the long differential: `python tests/interop/test_replay_live.py RUNS [FIRST_SEED [KIND]]`.
"""

import sys
from collections import Counter
from importlib import metadata

import pytest
from peer import dynamo_core, play_in_wheel
from replay_cases import random_cases

from pytest_kvmock import MockEngine, OutOfBlocks, replay
from pytest_kvmock.engines import MockEngineArgs
from pytest_kvmock.fleets import EngineStalled, TraceRequest

dynamo_core("1.2")
VERSION = metadata.version("ai-dynamo-runtime")
SEMANTICS = "1.2.1"

RUNS = {"vllm": 100, "disaggregated": 80, "sessions": 60}
"""Cases of each kind in a run of the suite; some seconds of it are loops of the original that must be ended."""

OF_THE_HOST = {"processed_tokens_per_s", "processed_output_tokens_per_s", "wall_time_ms"}
OF_THE_FLEET = {
    "prefill_worker_seconds",
    "decode_worker_seconds",
    "prefill_gpus_per_worker",
    "decode_gpus_per_worker",
    "gpu_hours",
}


def play(case):
    """Return our report of a case; None if an engine can never make progress."""
    settings = case["replay"]

    def engines(fields, number):
        args = MockEngineArgs(**fields, semantics=SEMANTICS)
        return [MockEngine(args, seed=seed) for seed in range(settings.get(number, 1))]

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
    decode = engines(case["engine"], "num_workers") if "engine" in case else []
    prefill = []
    if "prefill_engine" in case:
        prefill = engines(case["prefill_engine"], "num_prefill_workers")
        decode = engines(case["decode_engine"], "num_decode_workers")
    try:
        return replay(
            rows,
            decode,
            prefill,
            settings.get("replay_concurrency"),
            settings.get("arrival_speedup_ratio", 1.0),
            trace_block_size=settings["trace_block_size"],
        )
    except (EngineStalled, OutOfBlocks):
        return None


def differences(case, theirs):
    """Return the differences between our replay of a case and the release's: names with its value and ours."""
    ours = play(case)
    if ours is None or "error" in theirs:
        end = theirs.get("error", "ended")
        is_same = ours is None and end == "timeout"
        return {} if is_same else {"end": (end, "stalled" if ours is None else "ended")}
    figures = ours.to_json()
    return {
        name: (value, figures.get(name))
        for name, value in theirs["summary"].items()
        if name not in OF_THE_HOST | OF_THE_FLEET and not is_equal(name, value, figures.get(name), theirs["summary"])
    }


def is_equal(name, theirs, ours, summary):
    """Return whether a statistic is the same: to the bit, or nearly if the original sums in another order."""
    kind, _, rest = name.partition("_")
    if ours is None or kind not in ("mean", "std"):
        return ours == theirs
    # The deviation of equal values is only rounding error.
    return ours == pytest.approx(theirs, rel=1e-9, abs=1e-9 * summary[f"mean_{rest}"])


def cases_of(kind, runs, first=0):
    """Return cases of a kind, without those of SGLang, as the mock does not follow this release for SGLang."""
    return [case for case in random_cases(kind, runs, first) if case["scheduler"] == "vllm"]


@pytest.mark.parametrize("kind", RUNS)
def test_random_replays_have_the_same_statistics_times_and_ends(kind):
    cases = cases_of(kind, RUNS[kind])
    answers = play_in_wheel(cases)
    different = {case["seed"]: differences(case, theirs) for case, theirs in zip(cases, answers, strict=True)}
    assert {seed: found for seed, found in different.items() if found} == {}


def main():
    """Play RUNS cases of each kind (or of KIND), and print the ones that differ."""
    runs, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for kind in sys.argv[3:] or RUNS:
        counts = Counter()
        cases = cases_of(kind, runs, first)
        for case, theirs in zip(cases, play_in_wheel(cases), strict=True):
            found = differences(case, theirs)
            counts["looped" if "error" in theirs else "ended"] += 1
            counts["different"] += bool(found)
            if found:
                print(kind, case["seed"], len(case["requests"]), next(iter(found.items())))  # noqa: T201 - it is a program
        print(VERSION, kind, dict(counts))  # noqa: T201 - as above


if __name__ == "__main__":
    main()
