"""Fleets of P/D pairs for tests: engines of both roles, traffic, and a router that records its calls."""

from pytest_kvmock.engines import MockEngineArgs
from pytest_kvmock.fleets import Fleet, MockEngine, synthetic_trace
from pytest_kvmock.testing import RightRouter

WAYS = ("vllm", "vllm-mooncake", "sglang")
ORDERS = ("prefill_first", "decode_first")
SIZE = 16


def engine_of(kind, way="vllm", *, pair=None, size=SIZE, blocks=512, **fields):
    """Return an engine of a role; SGLang's decode engines get a radix cache, so they publish events."""
    given = {"block_size": size, "num_gpu_blocks": blocks, "worker_type": kind, "hand_over": way, **fields}
    if way == "sglang":
        cached = {"disaggregation_decode_enable_radix_cache": True, "num_reserved_decode_tokens": 32}
        pair = {**(cached if kind == "decode" else {}), **(pair or {})}
        return MockEngine(MockEngineArgs(engine_type="sglang", pair=pair, **given), backend="sglang")
    args = MockEngineArgs(engine_type="vllm", semantics="1.6.1", pair=pair, **given)
    return MockEngine(args, backend="vllm")


def engines(way="vllm", prefill=2, decode=2, *, p=None, d=None, **fields):
    """Return prefill engines, then decode engines: workers 0, 1, 2, 3."""
    return [
        *(engine_of("prefill", way, **fields, **(p or {})) for _ in range(prefill)),
        *(engine_of("decode", way, **fields, **(d or {})) for _ in range(decode)),
    ]


def trace(count=40, seed=1, **options):
    options = {
        "groups": 5,
        "prefix_blocks": (2, 8),
        "turns": (1, 3),
        "input_tokens": (SIZE, 8 * SIZE),
        "output_tokens": (2, 24),
        "interval_ms": 8,
        "delay_ms": (5, 50),
        **options,
    }
    return list(synthetic_trace(count, seed=seed, block_size=SIZE, **options))


class Noting(RightRouter):
    """A correct router of both roles that records its calls by request."""

    def __init__(self, workers=range(4), way="vllm", **options):
        super().__init__(workers, copies=way != "sglang", **options)
        self.told = []

    def of(self, number):
        """Return the calls for a request: the method, the leg, and the worker or the request's status."""
        return [(what, *rest) for at, what, *rest in self.told if at == number]

    def pick(self, request, candidates):
        answer = self.answer(request, candidates)
        self.told.append((request.number, "pick", request.phase, request.picked, answer))
        return answer

    def answer(self, request, candidates):
        return super().pick(request, candidates)

    def dispatched(self, request, worker):
        self.told.append((request.number, "dispatched", request.phase, request.picked, worker))
        super().dispatched(request, worker)

    def first_token(self, request):
        self.told.append((request.number, "first_token", request.phase))
        super().first_token(request)

    def finished(self, request):
        self.told.append((request.number, "finished", request.phase, request.status))
        super().finished(request)

    def withdrawn(self, request):
        self.told.append((request.number, "withdrawn", request.phase))

    @property
    def open(self):
        """The open entries of its load book."""
        return [(worker, load.requests, load.blocks) for worker, load in self.book.loads.items() if load.requests]


def fleet(router=None, way="vllm", *, order="prefill_first", link=None, made=None, **options):
    return Fleet(engines(way) if made is None else made, router, order=order, link=link, **options)


def held(fleet):
    """Return the workers that hold blocks or leases for a request, or freed blocks while they were written."""
    found = {worker: each.worker for worker, each in fleet.engines.items()}
    return [at for at, each in found.items() if each.leased or each.manager.num_active_blocks or each.overwritten]
