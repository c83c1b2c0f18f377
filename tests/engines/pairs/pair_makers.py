"""Workers and engines of P/D pairs, for tests."""

from pytest_kvmock import CapturingSink
from pytest_kvmock.engines import KvWorker, MockEngineArgs, backend_spec
from pytest_kvmock.engines.base.pair_options import PairOptions, PairRole
from pytest_kvmock.fleets import MockEngine

WAYS = ("vllm", "vllm-mooncake")


def worker_of(role, number, *, way="vllm", backend="vllm", num_blocks=16, block_size=4, **options):
    """Return a worker of a role and the list of its events."""
    spec, sink = backend_spec(backend), CapturingSink()
    worker = KvWorker(
        lambda own: spec.make(num_blocks=num_blocks, block_size=block_size, dp_rank=0, sink=own),
        number,
        sink=sink,
        driver=spec.driver,
        pair=PairRole(role, way, PairOptions(**options)),
    )
    return worker, sink


def pair_of(way="vllm", *, p=None, d=None, **options):
    """Return a prefill and a decode worker, and the events of both."""
    prefill, of_p = worker_of("prefill", 0, way=way, **(p or {}), **options)
    decode, of_d = worker_of("decode", 1, way=way, **(d or {}), **options)
    return prefill, decode, of_p, of_d


def stored(sink):
    """Return the stored hashes, one list per event."""
    return [list(each.data.block_hashes) for each in sink.events if hasattr(each.data, "tokens_hashes")]


def engines_of(kind, count, *, way="vllm", seed=0, **fields):
    """Return engines of a role in virtual time, and the events of each."""
    sinks = [CapturingSink() for _ in range(count)]
    options = {"engine_type": "vllm", "semantics": "1.6.1", "block_size": 16, "num_gpu_blocks": 512, **fields}
    args = MockEngineArgs(worker_type=kind, hand_over=way, **options)
    return [MockEngine(args, backend="vllm", sink=sink, seed=seed) for sink in sinks], sinks
