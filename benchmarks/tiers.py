"""The conversation trace with a host below the device, through a worker and through an engine, compared with no
host.
"""

from __future__ import annotations

from itertools import product

from benchmarks.measure import Figure
from benchmarks.verdict import traces
from pytest_kvmock import KvWorker, MockEngine, MockEngineArgs, create_manager, replay
from pytest_kvmock.engines import Tiers
from pytest_kvmock.fleets import MOONCAKE_BLOCK_SIZE, read_mooncake

DEVICE, HOST = 1_000, 4_000  # blocks
GBPS, BYTES_PER_TOKEN = 14.0, 160_000
PARTS = ((None, "lineage"), (3_000, "lineage"), (3_000, "lru"), (3_000, "multi_lru"))
TITLE = f"the conversation trace, {DEVICE:,} blocks on the device, a host of {HOST:,} at {GBPS:g} GB/s"


class Run:
    """One part of the trace, one request at a time.

    Attributes:
        reused: tokens that the first admission of each request found on the device, onboarded ones included.
    """

    def __init__(self, requests, backend, host, by):
        self.requests, self.backend, self.host = requests, backend, host
        self.reused = 0
        if by == "worker":
            self.through_worker()
        else:
            self.through_engine()

    def through_worker(self):
        tiers = {"tiers": Tiers(HOST, GBPS, BYTES_PER_TOKEN)} if self.host else {}

        def make(sink):
            sizes = {"num_blocks": DEVICE, "block_size": MOONCAKE_BLOCK_SIZE}
            return create_manager(self.backend, sink=sink, **sizes, **tiers)

        worker = KvWorker(make)
        for each in self.requests:
            with worker.prefill(each.prompt()) as request:
                self.reused += request.cached_tokens
                request.decode(each.output_length)

    def through_engine(self):
        tiers = {"num_g2_blocks": HOST, "kv_bytes_per_token": BYTES_PER_TOKEN} if self.host else {}
        args = MockEngineArgs(block_size=MOONCAKE_BLOCK_SIZE, num_gpu_blocks=DEVICE, **tiers)
        engine = MockEngine(args, backend=self.backend)
        report = replay(self.requests, [engine], concurrency=1)
        self.reused = sum(request.first_reused_tokens for request in report.requests)


def host():
    """Measure the cached prompt tokens at the first admission of each request, with and without a host."""
    trace = list(read_mooncake(traces()))
    for (part, backend), by in product(PARTS, ("worker", "replay")):
        requests = trace[:part]
        without, having = (Run(requests, backend, host, by) for host in (False, True))
        yield Figure(
            f"{TITLE}: device hits, through a {by}",
            having.reused / without.reused,
            None,
            "the same without a host",
            backend if part is None else f"{backend}, the first {part:,} requests",
        )
