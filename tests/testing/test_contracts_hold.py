"""The contracts hold for what we ship: backends, eviction policies and the reference index."""

from pytest_kvmock import BACKENDS, RadixIndex, create_manager
from pytest_kvmock.backends import backend_spec
from pytest_kvmock.cache.eviction.lineage import LineagePolicy
from pytest_kvmock.cache.eviction.lru import LruPolicy
from pytest_kvmock.cache.eviction.multi_lru import MultiLruPolicy
from pytest_kvmock.testing import EvictionContract, IndexContract, ManagerContract, WorkerContract


class TestLineagePolicy(EvictionContract):
    prefix_closed = True

    def make_policy(self):
        return LineagePolicy()


class TestLruPolicy(EvictionContract):
    prefix_closed = True

    def make_policy(self):
        return LruPolicy()


class TestMultiLruPolicy(EvictionContract):
    def make_policy(self, capacity):
        return MultiLruPolicy(capacity)


class TestLineageManager(ManagerContract):
    backend = "lineage"


class TestLruManager(ManagerContract):
    backend = "lru"


class TestMultiLruManager(ManagerContract):
    backend = "multi_lru"


class TestAManagerOfOnesOwn(ManagerContract):
    def make_manager(self, num_blocks, block_size, sink):
        return create_manager("lru", num_blocks=num_blocks, block_size=block_size, sink=sink)


class TestLineageWorker(WorkerContract):
    backend = "lineage"


class TestLruWorker(WorkerContract):
    backend = "lru"


class TestMultiLruWorker(WorkerContract):
    backend = backend_spec("multi_lru")


class TestSglangWorker(WorkerContract):
    backend = "sglang"


class TestSglangWorkerOfSmallPages(WorkerContract):
    backend = backend_spec("sglang").but("sglang_slru", policy="slru")
    block_size = 2


class TestLargeBlocks(WorkerContract):
    backend = "lru"
    block_size = 16


class TestRadixIndex(IndexContract):
    def make_index(self):
        return RadixIndex()


def under(contract):
    here = [case for case in globals().values() if isinstance(case, type) and issubclass(case, contract)]
    return {backend_spec(case.backend).name for case in here if case.backend is not None}


def test_no_backend_is_left_out():
    assert {name for name, spec in BACKENDS.items() if spec.driver is None} == under(ManagerContract)
    assert set(BACKENDS) <= under(WorkerContract)
