"""The conversation trace with a host below the device, through a worker and through an engine, beside no host."""

from __future__ import annotations

from itertools import product

from benchmarks.measure import TableRow, cpu_seconds
from benchmarks.verdict import traces
from pytest_kvmock import KvWorker, MockEngine, MockEngineArgs, create_manager, replay
from pytest_kvmock.tiers import Tiers
from pytest_kvmock.traces import MOONCAKE_BLOCK_SIZE, read_mooncake

DEVICE, HOST = 1_000, 4_000  # blocks
GBPS, BYTES_PER_TOKEN = 14.0, 160_000
PARTS = ((None, "lineage"), (3_000, "lineage"), (3_000, "lru"), (3_000, "multi_lru"))
TITLE = f"Mooncake conversation trace, {DEVICE:,} blocks on the device, a host of {HOST:,} blocks at {GBPS:g} GB/s"


class Run:
    """One part of the trace, one request at a time.

    Attributes:
        reused: tokens that the first admission of each request found on the device, onboarded ones included.
        onboarded: tokens that came back from the host.
        lost: blocks that were lost on their way to the host.
        seconds: CPU time.
    """

    def __init__(self, requests, backend, host, by):
        self.requests, self.backend, self.host = requests, backend, host
        self.reused = self.onboarded = 0
        self.manager = None
        self.seconds = cpu_seconds(self.through_worker if by == "worker" else self.through_engine)
        self.lost = self.manager.offload.lost_blocks if host else 0

    def through_worker(self):
        tiers = {"tiers": Tiers(HOST, GBPS, BYTES_PER_TOKEN)} if self.host else {}

        def make(sink):
            sizes = {"num_blocks": DEVICE, "block_size": MOONCAKE_BLOCK_SIZE}
            return create_manager(self.backend, sink=sink, **sizes, **tiers)

        worker = KvWorker(make)
        for each in self.requests:
            with worker.prefill(each.prompt()) as request:
                self.reused += request.cached_tokens
                self.onboarded += request.onboarded_tokens
                request.decode(each.output_length)
        self.manager = worker.manager

    def through_engine(self):
        tiers = {"num_g2_blocks": HOST, "kv_bytes_per_token": BYTES_PER_TOKEN} if self.host else {}
        args = MockEngineArgs(block_size=MOONCAKE_BLOCK_SIZE, num_gpu_blocks=DEVICE, **tiers)
        engine = MockEngine(args, backend=self.backend)
        report = replay(self.requests, [engine], concurrency=1)
        self.reused = sum(request.first_reused_tokens for request in report.requests)
        self.onboarded = report.onboarded_tokens
        self.manager = engine.worker.manager


def host():
    """Device hits over blocks asked for: whole blocks of prompts, cached when a request is first admitted."""
    trace = list(read_mooncake(traces()))
    for (part, backend), by in product(PARTS, ("worker", "replay")):
        requests = trace[:part]
        asked = sum(request.input_length // MOONCAKE_BLOCK_SIZE for request in requests)
        without, having = (Run(requests, backend, host, by) for host in (False, True))
        yield TableRow(
            f"{TITLE}: {len(requests)}, {by}, {backend}",
            TITLE,
            {
                "requests": f"{len(requests):,}",
                "through": by,
                "backend": backend,
                "hits without a host": _share(without.reused, asked),
                "hits with it": _share(having.reused, asked),
                "of them onboarded": _share(having.onboarded, asked),
                "blocks lost": f"{having.lost:,}",
                "CPU seconds": f"{without.seconds:.1f}, with {having.seconds:.1f}",
            },
        )


def _share(tokens, blocks):
    return f"{tokens / MOONCAKE_BLOCK_SIZE / blocks:.4f}"
