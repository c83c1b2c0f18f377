"""Workers for tests outside a harness."""

from random import Random

import pytest

from pytest_kvmock import BACKENDS, CapturingSink, Stored, create_manager
from pytest_kvmock.engines import KvWorker

MOVED = sorted([*(name for name, spec in BACKENDS.items() if spec.in_matrix), "hash_cache"])
"""The backends that accept moves."""


@pytest.fixture(params=MOVED)
def backend(request):
    return request.param


@pytest.fixture
def make_worker(backend):
    """Make a worker, by default of 8 blocks of 4 tokens; its events are in `worker.captured`."""

    def make(num_blocks=8, block_size=4, *, seed=0, **options):
        captured = CapturingSink()

        def make_manager(sink):
            return create_manager(backend, num_blocks=num_blocks, block_size=block_size, sink=sink)

        driver = BACKENDS[backend].driver
        worker = KvWorker(make_manager, sink=captured, rng=Random(seed), driver=driver, **options)
        worker.captured = captured
        return worker

    return make


@pytest.fixture
def worker(make_worker):
    return make_worker()


@pytest.fixture
def state_of():
    """Return all visible state of a worker, its manager and its listener."""

    def state(worker):
        manager = worker.manager
        return (
            list(worker.requests),
            [request.blocks for request in worker.requests],
            manager.active_blocks,
            manager.num_active_block_refs,
            manager.inactive_blocks(),
            sorted(manager.resident()),
            list(worker.captured.events),
        )

    return state


@pytest.fixture
def stored_of():
    """Return (parent, blocks) of each Stored."""

    def stored(events):
        return [(e.data.parent_hash, list(e.data.block_hashes)) for e in events if isinstance(e.data, Stored)]

    return stored
