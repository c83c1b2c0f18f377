"""What every eviction policy, manager and worker promises: contracts whose tests are inherited."""

from custom_backend.s3fifo import S3FifoPolicy

from pytest_kvmock.testing import EvictionContract, ManagerContract, WorkerContract


class TestPolicy(EvictionContract):
    def make_policy(self, capacity):
        return S3FifoPolicy(capacity)


class TestManager(ManagerContract):
    backend = "s3fifo"


class TestWorker(WorkerContract):
    backend = "s3fifo"
