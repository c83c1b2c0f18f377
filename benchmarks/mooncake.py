"""Both complete published request traces through a worker with full verdict: reuse, compared with recordings of Dynamo
and vLLM (`tests/data`).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from benchmarks.measure import Figure, NotHere
from benchmarks.verdict import traces
from pytest_kvmock import EngineProfile, Prompt, RouterHarness
from pytest_kvmock.fleets import MOONCAKE_BLOCK_SIZE, read_mooncake

DATA = Path(__file__).parents[1] / "tests" / "data"
NAMES = ("conversation", "synthetic")
TRACE = "mooncake_{}_trace.jsonl"
VLLM = {"vllm": "0.33.0", "vllm_0_19": "0.19.1"}
BUDGET = 8_192  # tokens that Dynamo's mock scheduler prefills in one pass


def reused(requests, backend, num_blocks, *, whole):
    """Return the cached share of all requested tokens or blocks, one request at a time, through a worker of a
    harness.
    """
    profile = EngineProfile(block_size=MOONCAKE_BLOCK_SIZE, num_blocks=num_blocks, chunk=None if whole else BUDGET)
    with RouterHarness(profile, backend) as kv:
        worker = kv.worker(0)
        cached = asked = 0
        # As in vLLM's recording: one token after the whole blocks, which is always computed.
        tail = worker.traits.recomputes_last_token
        for request in requests:
            prompt = request.prompt(whole_blocks=whole)
            if whole and tail:
                prompt = Prompt(hashes=request.hash_ids, num_tokens=len(request.hash_ids) * MOONCAKE_BLOCK_SIZE + 1)
            served = worker.serve(prompt, 0 if whole else request.output_length)
            if whole:
                asked += len(request.hash_ids)
                cached += len(request.hash_ids) - len(served.stored_blocks)
            else:
                asked += request.input_length
                cached += served.cached_tokens
        kv.judge()
    assert not kv.events.errors
    return cached / asked


def whole_blocks():
    """Compare with the recordings of the real managers: hits are blocks that a request did not store."""
    runs = json.loads((DATA / "logical_mooncake.json").read_text())["runs"]
    recorded = {}
    for run in runs:
        if run["open"] == 1:
            row = recorded.setdefault((run["backend"], "dynamo-mocker 1.2.1"), {})
            row[run["trace"], run["capacity"]] = run["hits"] / run["blocks"]
    for backend, version in VLLM.items():
        recorded[backend, f"vLLM {version}"] = {
            (TRACE.format(run["trace"]), run["usable_blocks"]): run["hit_blocks"] / run["ref_blocks"]
            for run in json.loads((DATA / f"vllm_{version}_mooncake.json").read_text())
        }
    return _figures("every hash id a whole block", recorded, whole=True)


def as_long_as_they_were():
    """Compare with a scheduler's recordings: chunks, a partial tail, decoded blocks; hits are tokens of cached leading
    blocks.
    """
    runs = json.loads(gzip.decompress((DATA / "dynamo_reused_blocks.json.gz").read_bytes()))["runs"]
    recorded = {(run["trace"], run["num_blocks"]): run["ratio_of_1.2.1"] for run in runs}
    title = "prompts and outputs as long as they were"
    return _figures(title, {("lineage", "run_mocker_trace_replay, 1.2.1"): recorded}, whole=False)


def _figures(title, recorded, *, whole):
    """Yield a figure for each backend, from the run that deviates most from the recording."""
    folder = traces().parent
    for name in NAMES:
        if not (folder / TRACE.format(name)).is_file():
            raise NotHere(f"{TRACE.format(name)} is not beside the other trace")
    requests = {TRACE.format(name): list(read_mooncake(folder / TRACE.format(name))) for name in NAMES}
    for (backend, program), runs in recorded.items():
        ratios = [
            reused(requests[file], backend, num_blocks, whole=whole) / share
            for (file, num_blocks), share in runs.items()
        ]
        name = f"share of the Mooncake traces that is reused, {title}"
        yield Figure(name, max(ratios, key=lambda ratio: abs(ratio - 1)), None, f"recorded of {program}", backend)
