"""The router in traffic: a whole trace through four workers, and the order in which they free their blocks.

`pytest examples` takes a synthetic trace. For a real one, in the Mooncake format:

    pytest examples --kv-trace mooncake_conversation_trace.jsonl

A trace has one hash for each 512 tokens and no tokens, so the router's index is keyed by local hashes here.

Under such traffic the backends `lineage` and `lru` publish the same events: requests free their blocks tail first.
`multi_lru` keeps blocks that were seen often. `test_free_order.py` shows where the first two differ.

`multi_lru` links some blocks wrongly (`wrong_hash`) and publishes some as removed while it holds them
(`evicted_and_restored`), like the real one. These are warnings: a router must tolerate them. The table counts them.
"""

from collections import Counter
from heapq import heappop, heappush

import pytest
from prefix_router import HashIndex, PrefixRouter

from pytest_kvmock import EngineProfile, OutOfBlocks
from pytest_kvmock.fleets import MOONCAKE_BLOCK_SIZE

MS_PER_TOKEN = 20


@pytest.fixture
def kv_base_profile(pytestconfig):
    """Size the workers: small for the short prompts of the synthetic trace, so that they evict, or as large as real
    ones.
    """
    num_blocks = 128 if pytestconfig.getoption("kv_trace") is None else 4096
    return EngineProfile(workers=4, block_size=MOONCAKE_BLOCK_SIZE, num_blocks=num_blocks)


@pytest.fixture
def kv_index():
    return HashIndex()


@pytest.fixture
def router(kv_index, kv_harness):
    return PrefixRouter(kv_index, len(kv_harness.workers))


class Fleet:
    """Serves a trace: requests overlap, and last as long as their output takes. The trace's clock is the only one."""

    def __init__(self, router, kv_harness):
        self.router = router
        self.workers = kv_harness.workers
        self.requests = Counter()
        self.asked = Counter()
        self.cached = Counter()
        self._running = []  # heap of (end, number, worker, request)

    def serve(self, number, request):
        """Finish the requests that have ended by now, then route and prefill one request of the trace."""
        prompt = request.prompt()
        now = request.timestamp or 0.0
        while self._running and self._running[0][0] <= now:
            self._finish_next()
        worker = self.router.route(prompt.block_hashes(MOONCAKE_BLOCK_SIZE))
        running = self._prefill(worker, prompt)
        heappush(self._running, (now + request.output_length * MS_PER_TOKEN, number, worker, running))
        self.requests[worker] += 1
        self.asked[worker] += len(prompt.block_hashes(MOONCAKE_BLOCK_SIZE))
        self.cached[worker] += running.cached_tokens // MOONCAKE_BLOCK_SIZE

    def finish(self):
        """Let the last requests end."""
        while self._running:
            self._finish_next()

    def _prefill(self, worker, prompt):
        while True:
            try:
                return self.workers[worker].prefill(prompt)
            except OutOfBlocks:
                if not self.workers[worker].requests:
                    raise  # the prompt is larger than the worker
                self._finish_next()

    def _finish_next(self):
        _, _, worker, request = heappop(self._running)
        request.finish()
        self.router.finish(worker, request.prompt.block_hashes(MOONCAKE_BLOCK_SIZE))

    def table(self, title, evicted, warnings):
        """Return a table with one line per worker."""
        lines = [title, "worker  requests  blocks asked  cached  hit rate  evicted  warnings"]
        for name, workers in (*((str(w), [w]) for w in self.workers), ("all", list(self.workers))):
            requests, asked, cached, gone, odd = (
                sum(counts[w] for w in workers)
                for counts in (self.requests, self.asked, self.cached, evicted, warnings)
            )
            rate = cached / asked if asked else 0.0
            lines.append(f"{name:>6}  {requests:>8}  {asked:>12}  {cached:>6}  {rate:>8.1%}  {gone:>7}  {odd:>8}")
        return "\n".join(lines)


def test_a_trace_is_served_by_four_workers(router, kv_harness, kv_events, kv_trace, kv_backend, capsys):
    fleet = Fleet(router, kv_harness)

    for number, request in enumerate(kv_trace):
        fleet.serve(number, request)
    fleet.finish()

    kv_harness.assert_no_event_errors()
    logs = {worker: kv_events.for_worker(worker) for worker in kv_harness.workers}
    evicted = {worker: len(log.removed_blocks) for worker, log in logs.items()}
    warnings = {worker: len(log.warnings) for worker, log in logs.items()}
    with capsys.disabled():
        print("\n" + fleet.table(f"{len(kv_trace)} requests over 4 workers, {kv_backend}", evicted, warnings))
        for rule, count in kv_harness.events.counts.warnings.items():
            print(f"{rule}: {count}")
    assert len(kv_trace) == sum(fleet.requests.values())
    if "evicted_and_restored" not in kv_harness.events.counts.warnings:  # else engines hold more than they published
        kv_harness.assert_in_sync()
        for worker, engine in kv_harness.workers.items():
            assert len(engine.manager.resident()) == router.index.size(worker)
