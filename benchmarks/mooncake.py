"""Both published request traces, whole, through a worker with full verdict: what each backend keeps, and what is said.

Beside them stands what was recorded of Dynamo and vLLM, from `tests/data`.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import product
from pathlib import Path

from benchmarks.measure import NotHere, TableRow, cpu_seconds
from benchmarks.verdict import traces
from pytest_kvmock import EngineProfile, Prompt, RouterHarness
from pytest_kvmock.backends import BACKENDS
from pytest_kvmock.traces import MOONCAKE_BLOCK_SIZE, read_mooncake

DATA = Path(__file__).parents[1] / "tests" / "data"
CAPACITIES = (2_000, 8_000, 32_000)
NAMES = ("conversation", "synthetic")
VLLM = {"vllm": "0.33.0", "vllm_0_19": "0.19.1"}
BUDGET = 8_192  # tokens that Dynamo's mock scheduler prefills in one pass

WHOLE = "Mooncake traces, every hash id a whole block"
REAL = "Mooncake traces, prompts and outputs as long as they were"


class Run:
    """One trace through one worker of a harness, one request at a time.

    Attributes:
        reused: share of what was asked for that was cached.
        stored: blocks that events stored.
        removed: blocks that events removed.
        problems: how many there were of each rule, errors and warnings apart.
        seconds: CPU time, verdict included.
    """

    def __init__(self, requests, backend, num_blocks, whole):
        self.requests, self.whole = requests, whole
        profile = EngineProfile(block_size=MOONCAKE_BLOCK_SIZE, num_blocks=num_blocks, chunk=None if whole else BUDGET)
        self.kv = RouterHarness(profile, backend)
        self.seconds = cpu_seconds(self.serve)
        log = self.kv.events
        self.stored, self.removed = len(log.stored_blocks), len(log.removed_blocks)
        self.problems = [
            Counter(problem.rule for problem in log.problems if problem.is_error == errors) for errors in (True, False)
        ]

    def serve(self):
        worker = self.kv.worker(0)
        cached = asked = 0
        # As vLLM was recorded: one token after the whole blocks, which is computed in any case.
        tail = worker.traits.recomputes_last_token
        for request in self.requests:
            prompt = request.prompt(whole_blocks=self.whole)
            if self.whole and tail:
                prompt = Prompt(hashes=request.hash_ids, num_tokens=len(request.hash_ids) * MOONCAKE_BLOCK_SIZE + 1)
            served = worker.serve(prompt, 0 if self.whole else request.output_length)
            if self.whole:
                asked += len(request.hash_ids)
                cached += len(request.hash_ids) - len(served.stored_blocks)
            else:
                asked += request.input_length
                cached += served.cached_tokens
        self.kv.judge()
        self.reused = cached / asked


def whole_blocks():
    """As the real managers were recorded: hits are blocks that a request did not store."""
    runs = json.loads((DATA / "logical_mooncake.json").read_text())["runs"]
    recorded = {
        (run["trace"], run["capacity"], run["backend"]): f"{run['hits'] / run['blocks']:.4%} (dynamo-mocker 1.2.1)"
        for run in runs
        if run["open"] == 1
    }
    for backend, version in VLLM.items():
        for run in json.loads((DATA / f"vllm_{version}_mooncake.json").read_text()):
            key = f"mooncake_{run['trace']}_trace.jsonl", run["usable_blocks"], backend
            recorded[key] = f"{run['hit_blocks'] / run['ref_blocks']:.4%} (vLLM {version})"
    return _table(WHOLE, recorded)


def as_long_as_they_were():
    """As a scheduler sees them: chunks, a partial tail, decoded blocks; hits are tokens of cached leading blocks."""
    runs = json.loads(gzip.decompress((DATA / "dynamo_reused_blocks.json.gz").read_bytes()))["runs"]
    recorded = {
        (run["trace"], run["num_blocks"], "lineage"): f"{run['ratio_of_1.2.1']:.4%} (run_mocker_trace_replay, 1.2.1)"
        for run in runs
    }
    return _table(REAL, recorded)


def _table(title, recorded):
    folder = traces().parent
    for name in NAMES:
        file = f"mooncake_{name}_trace.jsonl"
        if not (folder / file).is_file():
            raise NotHere(f"{file} is not beside the other trace")
        requests = list(read_mooncake(folder / file))
        for num_blocks, backend in product(CAPACITIES, BACKENDS):
            run = Run(requests, backend, num_blocks, title == WHOLE)
            errors, warnings = map(_counted, run.problems)
            yield TableRow(
                f"{title}: {name}, {num_blocks}, {backend}",
                title,
                {
                    "trace": name,
                    "blocks": f"{num_blocks:,}",
                    "backend": backend,
                    "reused": f"{run.reused:.4%}",
                    "recorded": recorded.get((file, num_blocks, backend), ""),
                    "stored": f"{run.stored:,}",
                    "removed": f"{run.removed:,}",
                    "errors": errors,
                    "warnings": warnings,
                    "CPU seconds": f"{run.seconds:.1f}",
                },
            )


def _counted(problems):
    return ", ".join(f"{rule} {count:,}" for rule, count in sorted(problems.items())) or "none"
