"""Fleets whose workers share a folder, and a router with an index of block owners."""

from pytest_kvmock import RadixIndex, StorageTier
from pytest_kvmock.engines import MockEngineArgs, Tiers
from pytest_kvmock.engines.backends import backend_spec
from pytest_kvmock.engines.worker import KvWorker
from pytest_kvmock.fleets import Fleet, FleetRequest, MockEngine
from pytest_kvmock.testing import RightRouter

STORES = {"disk": {"kind": "files", "workers": [0, 1]}}
SIZE = 16
PROMPTS = [range(1000 * at, 1000 * at + 8 * SIZE) for at in range(4)]


def engine(num_blocks=10, host=16, **tiers):
    """Return a vLLM engine whose device holds one prompt and its host two; its folder holds all prompts."""
    spec = backend_spec("vllm")
    below = Tiers.of({"host": host, **({"files": True} | tiers)})

    def make(sink):
        return spec.make(num_blocks=num_blocks, block_size=SIZE, dp_rank=0, sink=sink, tiers=below)

    args = MockEngineArgs(num_gpu_blocks=num_blocks, block_size=SIZE, engine_type="vllm")
    return MockEngine(args, backend=spec, worker=KvWorker(make, driver=spec.driver))


def serve(fleet, worker, prompts=PROMPTS, fillers=3):
    """Let an engine serve prompts, and then others until its device and host hold none of the first ones."""
    others = [range(10**6 + 1000 * at, 10**6 + 1000 * at + 8 * SIZE) for at in range(fillers)]
    for prompt in (*prompts, *others):
        fleet.engines[worker].submit([*prompt, 7], 1)
        fleet.engines[worker].run()


def asked(prompts=PROMPTS, apart_ms=2000.0, first=0):
    """Return requests of the same prompts, each with one more token."""
    return [FleetRequest([*each, 99 + first + at], 1, apart_ms * at) for at, each in enumerate(prompts)]


class OfOwners(RightRouter):
    """A correct router with an index of owners; it records the tokens that engines reused."""

    worker = None  # the worker that it always picks

    def __init__(self, workers=range(3), stores=STORES):
        super().__init__(workers, copies=True)
        self.index = RadixIndex(count_copies=True, chunk=1, clears_below=False, stores=stores)
        self.reused = []

    def overlap_by_owner(self, request):
        found = self.index.find_tiered(request.local_hashes)
        return {
            name: {key[0]: blocks for key, blocks in found.get(spec.tier, {}).items() if key[0] in spec.workers}
            for name, spec in self.index.stores.items()
        }

    def pick(self, request, candidates):
        return super().pick(request, candidates) if self.worker is None else self.worker

    def finished(self, request):
        super().finished(request)
        self.reused.append(request.reused_tokens)


def fleet_of(router=None, engines=3, stores=STORES, **options):
    made = [engine() for _ in range(engines)] if isinstance(engines, int) else engines
    return Fleet(made, router or OfOwners(), stores=stores, **options)


DISK = StorageTier.DISK
