"""A trace through two workers with a host each, and the use of the host.

`pytest examples/tiered_router` takes a synthetic trace. For a real one, in the Mooncake format:

    pytest examples/tiered_router --kv-trace mooncake_conversation_trace.jsonl

Requests overlap, and last as long as their output takes. The times of the trace are the only clock.

`multi_lru` links some blocks wrongly and publishes some as removed while it holds them, like the real one. These are
warnings: a router must tolerate them.
"""

from collections import Counter
from heapq import heappop, heappush

import pytest
from tiered_router import TieredIndex, TieredRouter

from pytest_kvmock import EngineProfile, OutOfBlocks, StorageTier
from pytest_kvmock.fleets import MOONCAKE_BLOCK_SIZE

MS_PER_TOKEN = 20


@pytest.fixture
def kv_base_profile(pytestconfig):
    """Size the workers: small for the short prompts of the synthetic trace, so that they evict, or larger for a real
    one.
    """
    device, host = (64, 512) if pytestconfig.getoption("kv_trace") is None else (1_000, 4_000)
    return EngineProfile(workers=2, block_size=MOONCAKE_BLOCK_SIZE, num_blocks=device, tiers={"host": host})


@pytest.fixture
def kv_index():
    return TieredIndex()


@pytest.fixture
def router(kv_index, kv_harness):
    return TieredRouter(kv_index, kv_harness.workers)


class Fleet:
    """Serves a trace on the workers of a harness."""

    def __init__(self, router, kv_harness):
        self.router = router
        self.workers = kv_harness.workers
        self.asked = Counter()
        self.cached = Counter()
        self.onboarded = Counter()
        self._running = []  # heap of (end, number, worker, request)

    def serve(self, number, row):
        """Finish the requests that have ended by now, then route and prefill one request of the trace."""
        prompt, now = row.prompt(), row.timestamp or 0.0
        while self._running and self._running[0][0] <= now:
            self._finish_next()
        query = prompt.block_hashes(MOONCAKE_BLOCK_SIZE)
        chosen = self.router.route(query)
        request = self._prefill(self.workers[chosen], prompt, now)
        heappush(self._running, (now + row.output_length * MS_PER_TOKEN, number, chosen, request))
        self.asked[chosen] += len(query)
        self.cached[chosen] += request.cached_tokens // MOONCAKE_BLOCK_SIZE
        self.onboarded[chosen] += request.onboarded_tokens // MOONCAKE_BLOCK_SIZE

    def finish(self):
        """Let the last requests end."""
        while self._running:
            self._finish_next()

    def _prefill(self, worker, prompt, now):
        worker.tick(max(worker.now, now))  # a prefill that waited for blocks has advanced it
        while True:
            try:
                return worker.prefill(prompt)
            except OutOfBlocks:
                if not worker.requests:
                    raise  # the prompt is larger than the worker
                self._finish_next()

    def _finish_next(self):
        _, _, worker, request = heappop(self._running)
        request.finish()
        self.router.finish(worker, request.prompt.block_hashes(MOONCAKE_BLOCK_SIZE))

    def table(self, title):
        """Return a table with one line per worker."""
        lines = [title, "worker  blocks asked  cached  hit rate  from the host"]
        for name, workers in (*((str(w), [w]) for w in self.workers), ("all", list(self.workers))):
            asked, cached, onboarded = (
                sum(counts[w] for w in workers) for counts in (self.asked, self.cached, self.onboarded)
            )
            rate = cached / asked if asked else 0.0
            lines.append(f"{name:>6}  {asked:>12}  {cached:>6}  {rate:>8.1%}  {onboarded:>13}")
        return "\n".join(lines)


def test_a_trace_is_served_by_two_workers_with_a_host(router, kv_harness, kv_trace, kv_backend, capsys):
    fleet = Fleet(router, kv_harness)

    for number, row in enumerate(kv_trace):
        fleet.serve(number, row)
    fleet.finish()

    kv_harness.assert_no_event_errors()
    with capsys.disabled():
        print("\n" + fleet.table(f"{len(kv_trace)} requests over 2 workers, {kv_backend}"))
    assert 0 < fleet.onboarded.total() <= fleet.cached.total() <= fleet.asked.total()
    if "evicted_and_restored" not in kv_harness.events.counts.warnings:  # else engines hold more than they published
        kv_harness.assert_in_sync()
        for number, worker in kv_harness.workers.items():
            for tier in (StorageTier.DEVICE, StorageTier.HOST_PINNED):
                assert len(worker.manager.resident(tier)) == router.index.size(number, tier)
