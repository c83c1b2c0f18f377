"""Whole request traces through a worker, compared with recordings of Dynamo with the same traces."""

import gzip
import json
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from depth import whole_trace

from pytest_kvmock import BACKENDS, Prompt, Removed, Stored, create_manager, sequence_hashes
from pytest_kvmock.engines import KvWorker
from pytest_kvmock.fleets import MOONCAKE_BLOCK_SIZE, read_mooncake

BUDGET = 8192  # tokens that Dynamo's mock scheduler prefills in one pass

# run_mocker_trace_replay of ai-dynamo-runtime 1.3.1 with MockEngineArgs(block_size=512, num_gpu_blocks=...),
# trace_block_size=512 and replay_concurrency=1: reused_input_tokens of each request, in blocks. 1.2.1 reports only
# the share of the whole trace.
RECORDED = Path(__file__).parents[2] / "data" / "dynamo_reused_blocks.json.gz"
HEAD = 1_000  # requests
RUNS = (("conversation", 2_000), ("conversation", 32_000), ("synthetic", 32_000))


def new_worker(backend, num_blocks, *, chunk=None, sink=None):
    def make_manager(outlet):
        return create_manager(backend, num_blocks=num_blocks, block_size=MOONCAKE_BLOCK_SIZE, sink=outlet)

    return KvWorker(make_manager, chunk=chunk, sink=sink, rng=Random(0), driver=BACKENDS[backend].driver)


@pytest.fixture(scope="module")
def read_trace(traces_dir):
    """Return a function that reads all or the first requests of a trace once for all runs."""
    return cache(lambda name, most=None: list(islice(read_mooncake(traces_dir / f"mooncake_{name}_trace.jsonl"), most)))


@pytest.fixture(scope="module")
def recorded():
    runs = json.loads(gzip.decompress(RECORDED.read_bytes()))["runs"]
    return {(run["trace"], run["num_blocks"]): run for run in runs}


def reused_blocks(requests, num_blocks):
    """Return the reused blocks of each request.

    Prompts of num_tokens, in chunks of the budget, with a partial block at the end that the output
    fills: it is published and cached like the blocks of a real engine.
    """
    worker = new_worker("lineage", num_blocks, chunk=BUDGET)
    served = (worker.serve(request.prompt(), request.output_length) for request in requests)
    return [each.cached_tokens / MOONCAKE_BLOCK_SIZE for each in served]


@pytest.mark.parametrize(("trace", "num_blocks"), RUNS)
def test_lineage_reuses_the_blocks_that_dynamo_reuses_at_the_head_of_a_trace(read_trace, recorded, trace, num_blocks):
    run = recorded[f"mooncake_{trace}_trace.jsonl", num_blocks]
    assert run["reused_blocks"][:HEAD] == reused_blocks(read_trace(trace, HEAD), num_blocks)


@whole_trace
@pytest.mark.parametrize(("trace", "num_blocks"), RUNS)
def test_lineage_reuses_the_blocks_that_dynamo_reuses_request_by_request(read_trace, recorded, trace, num_blocks):
    run = recorded[f"mooncake_{trace}_trace.jsonl", num_blocks]
    requests = read_trace(trace)
    reused = reused_blocks(requests, num_blocks)
    assert run["reused_blocks"] == reused
    asked = sum(request.input_length for request in requests)
    assert run["ratio_of_1.2.1"] == sum(reused) * MOONCAKE_BLOCK_SIZE / asked


def test_every_recorded_run_is_played(recorded):
    assert {(f"mooncake_{trace}_trace.jsonl", num_blocks) for trace, num_blocks in RUNS} == set(recorded)


class StoredAndRemoved:
    """Record each Stored immediately followed by a Removed of some of its blocks: one Use evicted and stored
    them.
    """

    def __init__(self):
        self.before = None
        self.pairs = []

    def publish(self, event, storage_tier, token_ids):
        stored, self.before = self.before, event.data
        if isinstance(stored, Stored) and isinstance(event.data, Removed):
            again = set(stored.block_hashes) & set(event.data.block_hashes)
            if again:
                self.pairs.append((stored, event.data, again))


# As the real manager was recorded (tests/engines/dynamo/test_recordings.py has the digest of its whole stream): every
# id of the trace is a whole block, one request at a time. docs/fidelity.md, "Holes under multi_lru", explains
# the reason.
@pytest.mark.parametrize("most", [2_500, pytest.param(None, marks=whole_trace)])
def test_multi_lru_evicts_descendants_of_a_block_and_stores_them_again(read_trace, most):
    captured = StoredAndRemoved()
    worker = new_worker("multi_lru", 32_000, sink=captured)
    cases = []
    for number, request in enumerate(read_trace("conversation", most)):
        worker.serve(request.prompt(whole_blocks=True))
        cases += [(number, sequence_hashes(request.hash_ids), *pair) for pair in captured.pairs]
        captured.pairs.clear()
    ((number, chain, stored, removed, again),) = cases
    assert (number, len(chain)) == (2408, 131)
    assert (len(stored.block_hashes), len(removed.block_hashes), len(again)) == (99, 99, 24)
    assert {57, 58, 63, 64, 95} < {chain.index(block) for block in again}
    # And it stores the blocks with a later block of their own chain as parent: the last that was still cached.
    assert (chain.index(stored.block_hashes[0]), chain.index(stored.parent_hash)) == (1, 54)


@pytest.fixture(scope="module")
def prompts(read_trace):
    """Return a prompt for each request of a trace, hashed once for all runs: whole blocks, then one token."""

    def read(name):
        each = (request.hash_ids for request in read_trace(name))
        return [Prompt(hashes=ids, num_tokens=len(ids) * MOONCAKE_BLOCK_SIZE + 1) for ids in each]

    return cache(read)


# One request at a time.
@whole_trace
@pytest.mark.parametrize("run", range(4))
@pytest.mark.parametrize(("backend", "version"), [("vllm", "0.33.0"), ("vllm_0_19", "0.19.1")])
def test_vllm_hits_stores_and_removes_as_many_blocks_as_the_recorded_engine(prompts, recording, backend, version, run):
    recorded = recording(f"vllm_{version}_mooncake.json")[run]
    captured = Totals()
    worker = new_worker(backend, recorded["usable_blocks"], sink=captured)
    requests = hits = asked = skipped = 0
    for prompt in prompts(recorded["trace"]):
        requests += 1
        blocks = prompt.num_tokens // MOONCAKE_BLOCK_SIZE
        if blocks >= recorded["usable_blocks"]:
            skipped += 1
            continue
        hits += worker.serve(prompt).cached_tokens // MOONCAKE_BLOCK_SIZE
        asked += blocks
    found = {
        "vllm": version,
        "trace": recorded["trace"],
        "usable_blocks": recorded["usable_blocks"],
        "requests": requests,
        "skipped": skipped,
        "hit_blocks": hits,
        "ref_blocks": asked,
        "hit_rate": round(hits / asked, 4),
        "stored": captured.stored,
        "removed": captured.removed,
        "resident": len(worker.manager.resident()),
    }
    assert recorded == found
    assert worker.manager.num_active_block_refs == 0


class Totals:
    """Count blocks; vLLM removes each with its own event."""

    def __init__(self):
        self.stored = self.removed = 0

    def publish(self, event, storage_tier, token_ids):
        if isinstance(event.data, Stored):
            self.stored += len(event.data.block_hashes)
        else:
            (_,) = event.data.block_hashes
            self.removed += 1
